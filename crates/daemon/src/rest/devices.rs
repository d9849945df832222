//! Devices.

use super::answer::{Failure, Tagged};
use super::request::{Body, IfMatch, Path};
use super::{Context, run};
use crate::engine::Engine;
use api::{Device, DeviceChange, NewDevice, Problem};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

/// List the devices.
#[utoipa::path(get, path = "/v1/devices", tag = "devices", responses((status = 200, body = Vec<Device>)))]
pub async fn list(State(context): State<Context>) -> Result<Json<Vec<Device>>, Failure> {
    run(context, |engine| Ok(engine.devices())).await.map(Json)
}

/// Open a device now and at each start of the daemon. With `size_bytes`, create its RBD image
/// first.
#[utoipa::path(
    post, path = "/v1/devices", tag = "devices", request_body = NewDevice,
    responses((status = 201, body = Device), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn create(
    State(context): State<Context>,
    Body(new): Body<NewDevice>,
) -> Result<Tagged<Device>, Failure> {
    let device = run(context, move |engine| engine.create_device(&new)).await?;
    Ok(Tagged(StatusCode::CREATED, device))
}

/// Show a device.
#[utoipa::path(
    get, path = "/v1/devices/{name}", tag = "devices", params(("name" = String, Path, description = "Name")),
    responses((status = 200, body = Device), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn show(
    State(context): State<Context>,
    Path(name): Path<String>,
) -> Result<Tagged<Device>, Failure> {
    Ok(Tagged(StatusCode::OK, run(context, move |engine| engine.device(&name)).await?))
}

/// Grow the RBD image of a device, while it is in use.
#[utoipa::path(
    patch, path = "/v1/devices/{name}", tag = "devices", request_body = DeviceChange,
    params(("name" = String, Path, description = "Name")),
    responses((status = 200, body = Device), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn change(
    State(context): State<Context>,
    Path(name): Path<String>,
    tag: IfMatch,
    Body(change): Body<DeviceChange>,
) -> Result<Tagged<Device>, Failure> {
    let change = move |engine: &Engine| engine.change_device(&name, &change, |device| tag.check(device));
    Ok(Tagged(StatusCode::OK, run(context, change).await?))
}

/// Close an unused device and remove it. Its content does not change.
#[utoipa::path(
    delete, path = "/v1/devices/{name}", tag = "devices", params(("name" = String, Path, description = "Name")),
    responses((status = 204), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn delete(
    State(context): State<Context>,
    Path(name): Path<String>,
    tag: IfMatch,
) -> Result<StatusCode, Failure> {
    run(context, move |engine| engine.delete_device(&name, |device| tag.check(device))).await?;
    Ok(StatusCode::NO_CONTENT)
}
