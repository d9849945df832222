//! Portals.

use super::answer::{Failure, Tagged};
use super::request::{Body, IfMatch, Path};
use super::{Context, run};
use crate::engine::Engine;
use api::{NewPortal, Portal, Problem};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

/// List the portals.
#[utoipa::path(get, path = "/v1/portals", tag = "exports", responses((status = 200, body = Vec<Portal>)))]
pub async fn list(State(context): State<Context>) -> Result<Json<Vec<Portal>>, Failure> {
    run(context, |engine| Ok(engine.portals())).await.map(Json)
}

/// Open a portal now and at each start of the daemon. Exports use it with the option `portal`.
#[utoipa::path(
    post, path = "/v1/portals", tag = "exports", request_body = NewPortal,
    responses((status = 201, body = Portal), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn create(
    State(context): State<Context>,
    Body(new): Body<NewPortal>,
) -> Result<Tagged<Portal>, Failure> {
    Ok(Tagged(StatusCode::CREATED, run(context, move |engine| engine.create_portal(&new)).await?))
}

/// Show a portal.
#[utoipa::path(
    get, path = "/v1/portals/{name}", tag = "exports", params(("name" = String, Path, description = "Name")),
    responses((status = 200, body = Portal), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn show(
    State(context): State<Context>,
    Path(name): Path<String>,
) -> Result<Tagged<Portal>, Failure> {
    Ok(Tagged(StatusCode::OK, run(context, move |engine| engine.portal(&name)).await?))
}

/// Delete a portal that no export uses.
#[utoipa::path(
    delete, path = "/v1/portals/{name}", tag = "exports", params(("name" = String, Path, description = "Name")),
    responses((status = 204), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn delete(
    State(context): State<Context>,
    Path(name): Path<String>,
    tag: IfMatch,
) -> Result<StatusCode, Failure> {
    run(context, move |engine: &Engine| engine.delete_portal(&name, |portal| tag.check(portal))).await?;
    Ok(StatusCode::NO_CONTENT)
}
