//! Arrays and their members.

use super::answer::{Failure, Tagged};
use super::request::{Body, IfMatch, Path, Query};
use super::roles::Caller;
use super::{Context, run};
use api::{Array, ArrayAction, Done, Member, NewArray, Problem};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use serde::Deserialize;
use utoipa::IntoParams;

/// List the arrays.
#[utoipa::path(get, path = "/v1/arrays", tag = "arrays", responses((status = 200, body = Vec<Array>)))]
pub async fn list(State(context): State<Context>) -> Result<Json<Vec<Array>>, Failure> {
    run(context, |engine| Ok(engine.arrays())).await.map(Json)
}

/// Create an array. The content of its devices is lost.
#[utoipa::path(
    post, path = "/v1/arrays", tag = "arrays", request_body = NewArray,
    responses((status = 201, body = Array), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn create(
    State(context): State<Context>,
    Body(new): Body<NewArray>,
) -> Result<Tagged<Array>, Failure> {
    let array = run(context, move |engine| engine.create_array(&new)).await?;
    Ok(Tagged(StatusCode::CREATED, array))
}

/// Show an array.
#[utoipa::path(
    get, path = "/v1/arrays/{name}", tag = "arrays", params(("name" = String, Path, description = "Name or UUID")),
    responses((status = 200, body = Array), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn show(
    State(context): State<Context>,
    Path(name): Path<String>,
) -> Result<Tagged<Array>, Failure> {
    Ok(Tagged(StatusCode::OK, run(context, move |engine| engine.array(&name)).await?))
}

/// List the members of an array.
#[utoipa::path(
    get, path = "/v1/arrays/{name}/members", tag = "arrays",
    params(("name" = String, Path, description = "Name or UUID")),
    responses(
        (status = 200, body = Vec<Member>),
        (status = "default", body = Problem, content_type = "application/problem+json")
    )
)]
pub async fn members(
    State(context): State<Context>,
    Path(name): Path<String>,
) -> Result<Json<Vec<Member>>, Failure> {
    run(context, move |engine| engine.members(&name)).await.map(Json)
}

/// Perform an action on a running array.
#[utoipa::path(
    post, path = "/v1/arrays/{name}/actions", tag = "arrays", request_body = ArrayAction,
    params(("name" = String, Path, description = "Name or UUID")),
    responses((status = 200, body = Done), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn act(
    State(context): State<Context>,
    Path(name): Path<String>,
    caller: Caller,
    Body(action): Body<ArrayAction>,
) -> Result<Json<Done>, Failure> {
    let authority = caller.authority();
    run(context, move |engine| engine.act_on_array(&name, &action, &authority)).await.map(Json)
}

/// Options of a deletion.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct Deletion {
    /// Keep the superblocks of the members, so that the array can start again.
    #[serde(default)]
    keep: bool,
}

/// Delete an array without volumes and exports. The daemon erases the superblocks of the members
/// unless the request keeps them.
#[utoipa::path(
    delete, path = "/v1/arrays/{name}", tag = "arrays",
    params(("name" = String, Path, description = "Name or UUID"), Deletion),
    responses((status = 204), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn delete(
    State(context): State<Context>,
    Path(name): Path<String>,
    Query(how): Query<Deletion>,
    tag: IfMatch,
) -> Result<StatusCode, Failure> {
    run(context, move |engine| engine.delete_array(&name, how.keep, |array| tag.check(array))).await?;
    Ok(StatusCode::NO_CONTENT)
}
