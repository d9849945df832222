//! Pools of volumes.

use super::answer::Failure;
use super::request::{Body, Path};
use super::{Context, run};
use api::{Pool, PoolAction, PoolCapacity, Problem, Repaired};
use axum::Json;
use axum::extract::State;

/// Check the pool of an array or device: read each copy of its table and compare it with the table
/// in use.
#[utoipa::path(
    get, path = "/v1/pools/{backing}", tag = "volumes",
    params(("backing" = String, Path, description = "The name of the device, or the name or UUID of the array")),
    responses((status = 200, body = Pool), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn show(State(context): State<Context>, Path(on): Path<String>) -> Result<Json<Pool>, Failure> {
    run(context, move |engine| engine.pool(&on)).await.map(Json)
}

/// Show the room of the pool of an array or device, without reading its table.
#[utoipa::path(
    get, path = "/v1/pools/{backing}/capacity", tag = "volumes",
    params(("backing" = String, Path, description = "The name of the device, or the name or UUID of the array")),
    responses((status = 200, body = PoolCapacity), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn capacity(
    State(context): State<Context>,
    Path(on): Path<String>,
) -> Result<Json<PoolCapacity>, Failure> {
    run(context, move |engine| engine.pool_capacity(&on)).await.map(Json)
}

/// Perform an action on the pool of an array or device. Its volumes may be in use.
#[utoipa::path(
    post, path = "/v1/pools/{backing}/actions", tag = "volumes", request_body = PoolAction,
    params(("backing" = String, Path, description = "The name of the device, or the name or UUID of the array")),
    responses((status = 200, body = Repaired), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn act(
    State(context): State<Context>,
    Path(on): Path<String>,
    Body(action): Body<PoolAction>,
) -> Result<Json<Repaired>, Failure> {
    run(context, move |engine| engine.act_on_pool(&on, &action)).await.map(Json)
}
