//! Exports.

use super::answer::{Failure, Tagged};
use super::request::{Body, IfMatch, Path};
use super::{Context, run};
use api::{Attach, Export, ExportChange, NewExport, Problem};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

/// Every export.
#[utoipa::path(get, path = "/v1/exports", tag = "exports", responses((status = 200, body = Vec<Export>)))]
pub async fn list(State(context): State<Context>) -> Result<Json<Vec<Export>>, Failure> {
    run(context, |engine| Ok(engine.exports())).await.map(Json)
}

/// Start an export, now and at every start of the daemon.
#[utoipa::path(
    post, path = "/v1/exports", tag = "exports", request_body = NewExport,
    responses((status = 201, body = Export), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn create(
    State(context): State<Context>,
    Body(new): Body<NewExport>,
) -> Result<Tagged<Export>, Failure> {
    let export = run(context, move |engine| engine.create_export(&new)).await?;
    Ok(Tagged(StatusCode::CREATED, export))
}

/// An export.
#[utoipa::path(
    get, path = "/v1/exports/{name}", tag = "exports", params(("name" = String, Path, description = "Its name")),
    responses((status = 200, body = Export), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn show(
    State(context): State<Context>,
    Path(name): Path<String>,
) -> Result<Tagged<Export>, Failure> {
    Ok(Tagged(StatusCode::OK, run(context, move |engine| engine.export(&name)).await?))
}

/// Change an export while it is served.
#[utoipa::path(
    patch, path = "/v1/exports/{name}", tag = "exports", request_body = ExportChange,
    params(("name" = String, Path, description = "Its name")),
    responses((status = 200, body = Export), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn change(
    State(context): State<Context>,
    Path(name): Path<String>,
    tag: IfMatch,
    Body(change): Body<ExportChange>,
) -> Result<Tagged<Export>, Failure> {
    let change = move |engine: &crate::engine::Engine| {
        engine.change_export(&name, &change, |export| tag.check(export))
    };
    Ok(Tagged(StatusCode::OK, run(context, change).await?))
}

/// Lines to attach an export with.
#[utoipa::path(
    get, path = "/v1/exports/{name}/attach", tag = "exports", params(("name" = String, Path, description = "Its name")),
    responses((status = 200, body = Attach), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn attach(
    State(context): State<Context>,
    Path(name): Path<String>,
) -> Result<Json<Attach>, Failure> {
    run(context, move |engine| engine.attach(&name)).await.map(Json)
}

/// End an export, and forget it. Its clients lose it.
#[utoipa::path(
    delete, path = "/v1/exports/{name}", tag = "exports", params(("name" = String, Path, description = "Its name")),
    responses((status = 204), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn delete(
    State(context): State<Context>,
    Path(name): Path<String>,
    tag: IfMatch,
) -> Result<StatusCode, Failure> {
    run(context, move |engine| engine.delete_export(&name, |export| tag.check(export))).await?;
    Ok(StatusCode::NO_CONTENT)
}
