//! Exports.

use super::answer::{Failure, Tagged};
use super::listing::{ListQuery, Listing, Page};
use super::request::{Body, IfMatch, Path};
use super::roles::Caller;
use super::{Context, run};
use crate::api_error::ApiError;
use crate::engine::{Authority, Engine};
use api::{Attach, Client, Export, ExportChange, NewExport, Problem};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

/// Returns the export `name` if the caller may see it.
fn find(engine: &Engine, name: &str, authority: &Authority) -> Result<Export, ApiError> {
    let export = engine.export(name)?;
    check(&export, name, authority)?;
    Ok(export)
}

fn check(export: &Export, name: &str, authority: &Authority) -> Result<(), ApiError> {
    authority.check_owns(export.label.as_deref(), || ApiError::not_found("export", name))
}

/// List the exports. With `limit` or `after` they are in the order of their names.
#[utoipa::path(
    get, path = "/v1/exports", tag = "exports", params(ListQuery),
    responses((status = 200, body = Vec<Export>), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn list(
    State(context): State<Context>,
    caller: Caller,
    listing: Listing,
) -> Result<Page<Export>, Failure> {
    let authority = caller.authority();
    let is_seen = move |export: &Export| check(export, "", &authority).is_ok();
    let page =
        move |engine: &Engine| Ok(listing.page(engine.exports().into_iter().filter(is_seen).collect()));
    run(context, page).await
}

/// Start an export now and at each start of the daemon.
#[utoipa::path(
    post, path = "/v1/exports", tag = "exports", request_body = NewExport,
    responses((status = 201, body = Export), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn create(
    State(context): State<Context>,
    caller: Caller,
    Body(new): Body<NewExport>,
) -> Result<Tagged<Export>, Failure> {
    let authority = caller.authority();
    let export = run(context, move |engine| engine.create_export(&new, &authority)).await?;
    Ok(Tagged(StatusCode::CREATED, export))
}

/// Show an export.
#[utoipa::path(
    get, path = "/v1/exports/{name}", tag = "exports", params(("name" = String, Path, description = "Name")),
    responses((status = 200, body = Export), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn show(
    State(context): State<Context>,
    Path(name): Path<String>,
    caller: Caller,
) -> Result<Tagged<Export>, Failure> {
    let authority = caller.authority();
    Ok(Tagged(StatusCode::OK, run(context, move |engine| find(engine, &name, &authority)).await?))
}

/// Change an export while it is in use.
#[utoipa::path(
    patch, path = "/v1/exports/{name}", tag = "exports", request_body = ExportChange,
    params(("name" = String, Path, description = "Name")),
    responses((status = 200, body = Export), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn change(
    State(context): State<Context>,
    Path(name): Path<String>,
    caller: Caller,
    tag: IfMatch,
    Body(change): Body<ExportChange>,
) -> Result<Tagged<Export>, Failure> {
    let authority = caller.authority();
    let change = move |engine: &Engine| {
        let may_change = |export: &Export| check(export, &name, &authority).and_then(|()| tag.check(export));
        engine.change_export(&name, &change, may_change)
    };
    Ok(Tagged(StatusCode::OK, run(context, change).await?))
}

/// Show the command lines that attach clients to an export.
#[utoipa::path(
    get, path = "/v1/exports/{name}/attach", tag = "exports", params(("name" = String, Path, description = "Name")),
    responses((status = 200, body = Attach), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn attach(
    State(context): State<Context>,
    Path(name): Path<String>,
    caller: Caller,
) -> Result<Json<Attach>, Failure> {
    let authority = caller.authority();
    let attach = move |engine: &Engine| {
        find(engine, &name, &authority)?;
        engine.attach(&name)
    };
    run(context, attach).await.map(Json)
}

/// List the clients that are connected to an export.
#[utoipa::path(
    get, path = "/v1/exports/{name}/clients", tag = "exports", params(("name" = String, Path, description = "Name")),
    responses((status = 200, body = Vec<Client>), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn clients(
    State(context): State<Context>,
    Path(name): Path<String>,
    caller: Caller,
) -> Result<Json<Vec<Client>>, Failure> {
    let authority = caller.authority();
    let clients = move |engine: &Engine| {
        find(engine, &name, &authority)?;
        engine.clients(&name)
    };
    run(context, clients).await.map(Json)
}

/// Delete an export. The daemon disconnects its clients.
#[utoipa::path(
    delete, path = "/v1/exports/{name}", tag = "exports", params(("name" = String, Path, description = "Name")),
    responses((status = 204), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn delete(
    State(context): State<Context>,
    Path(name): Path<String>,
    caller: Caller,
    tag: IfMatch,
) -> Result<StatusCode, Failure> {
    let authority = caller.authority();
    let delete = move |engine: &Engine| {
        let may_go = |export: &Export| check(export, &name, &authority).and_then(|()| tag.check(export));
        engine.delete_export(&name, may_go)
    };
    run(context, delete).await?;
    Ok(StatusCode::NO_CONTENT)
}
