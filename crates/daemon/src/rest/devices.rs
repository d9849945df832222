//! Devices.

use super::answer::{Failure, Tagged};
use super::request::{Body, IfMatch, Path};
use super::{Context, run};
use crate::engine::Engine;
use api::{Device, DeviceChange, Disk, ImageSnapshot, Job, JobChange, NewDevice, NewImageSnapshot, Problem};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

/// List the devices.
#[utoipa::path(get, path = "/v1/devices", tag = "devices", responses((status = 200, body = Vec<Device>)))]
pub async fn list(State(context): State<Context>) -> Result<Json<Vec<Device>>, Failure> {
    run(context, |engine| Ok(engine.devices())).await.map(Json)
}

/// List the block devices of the host, from which devices and arrays are made. The daemon reads the
/// content of those that have no use, and waits up to 3 s for it.
#[utoipa::path(
    get, path = "/v1/disks", tag = "devices",
    responses((status = 200, body = Vec<Disk>), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn disks(State(context): State<Context>) -> Result<Json<Vec<Disk>>, Failure> {
    run(context, |engine| engine.disks()).await.map(Json)
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

/// List the internal snapshots of a device that is a qcow2 image.
#[utoipa::path(
    get, path = "/v1/devices/{name}/snapshots", tag = "devices", params(("name" = String, Path, description = "Name")),
    responses((status = 200, body = Vec<ImageSnapshot>), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn snapshots(
    State(context): State<Context>,
    Path(name): Path<String>,
) -> Result<Json<Vec<ImageSnapshot>>, Failure> {
    run(context, move |engine| engine.image_snapshots(&name)).await.map(Json)
}

/// Make an internal snapshot of a device that is a qcow2 image, also while exports serve it. Writes
/// wait until it is durable; reads do not wait.
#[utoipa::path(
    post, path = "/v1/devices/{name}/snapshots", tag = "devices", request_body = NewImageSnapshot,
    params(("name" = String, Path, description = "Name")),
    responses((status = 201, body = ImageSnapshot), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn create_snapshot(
    State(context): State<Context>,
    Path(name): Path<String>,
    Body(new): Body<NewImageSnapshot>,
) -> Result<(StatusCode, Json<ImageSnapshot>), Failure> {
    let create = move |engine: &Engine| engine.create_image_snapshot(&name, &new.name);
    Ok((StatusCode::CREATED, Json(run(context, create).await?)))
}

/// Delete an internal snapshot of a device that is a qcow2 image, also while exports serve it.
#[utoipa::path(
    delete, path = "/v1/devices/{name}/snapshots/{snapshot}", tag = "devices",
    params(
        ("name" = String, Path, description = "Name"),
        ("snapshot" = String, Path, description = "Identifier or name of the snapshot")
    ),
    responses((status = 204), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn delete_snapshot(
    State(context): State<Context>,
    Path((name, snapshot)): Path<(String, String)>,
) -> Result<StatusCode, Failure> {
    run(context, move |engine| engine.delete_image_snapshot(&name, &snapshot)).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Copy the data of the backing file into a device that is a qcow2 image, also while exports serve
/// it. The image has no backing file when the job ends. The body sets the rate of the job.
#[utoipa::path(
    post, path = "/v1/devices/{name}/stream", tag = "devices", request_body = JobChange,
    params(("name" = String, Path, description = "Name")),
    responses((status = 202, body = Job), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn stream(
    State(context): State<Context>,
    Path(name): Path<String>,
    Body(pace): Body<JobChange>,
) -> Result<(StatusCode, Json<Job>), Failure> {
    let stream = move |engine: &Engine| engine.stream_device(&name, &pace);
    Ok((StatusCode::ACCEPTED, Json(run(context, stream).await?)))
}

/// Copy the data of a device that is a qcow2 image to its backing file, also while exports serve
/// it. When the job ends, the device is the backing file, and the image is not used any more. The
/// body sets the rate of the job.
#[utoipa::path(
    post, path = "/v1/devices/{name}/commit", tag = "devices", request_body = JobChange,
    params(("name" = String, Path, description = "Name")),
    responses((status = 202, body = Job), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn commit(
    State(context): State<Context>,
    Path(name): Path<String>,
    Body(pace): Body<JobChange>,
) -> Result<(StatusCode, Json<Job>), Failure> {
    let commit = move |engine: &Engine| engine.commit_device(&name, &pace);
    Ok((StatusCode::ACCEPTED, Json(run(context, commit).await?)))
}
