//! Volumes and groups.

use super::answer::{Answer, Failure, Tagged};
use super::listing::{ListQuery, Listing, Page};
use super::request::{Body, IfMatch, Path, Prefer};
use super::roles::{Caller, Role};
use super::{Context, run, run_long};
use crate::api_error::ApiError;
use crate::engine::{Authority, Engine};
use api::{Group, Job, NewVolume, Problem, Qos, Volume, VolumeChange, VolumeMove};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

fn check(volume: &Volume, name: &str, authority: &Authority) -> Result<(), ApiError> {
    authority.check_owns(volume.label.as_deref(), || ApiError::not_found("volume", name))
}

/// The preference of a caller that sees jobs; the others wait.
fn seen(prefer: Prefer, caller: &Caller) -> Prefer {
    Prefer { is_async: prefer.is_async && caller.role != Role::Provisioner }
}

/// List the volumes. With `limit` or `after` they are in the order of their UUIDs.
#[utoipa::path(
    get, path = "/v1/volumes", tag = "volumes", params(ListQuery),
    responses((status = 200, body = Vec<Volume>), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn list(
    State(context): State<Context>,
    caller: Caller,
    listing: Listing,
) -> Result<Page<Volume>, Failure> {
    let authority = caller.authority();
    let is_seen = move |volume: &Volume| check(volume, "", &authority).is_ok();
    let page =
        move |engine: &Engine| Ok(listing.page(engine.volumes().into_iter().filter(is_seen).collect()));
    run(context, page).await
}

/// Create a volume, which reads as zeroes. If the answer is a job, the volume exists when the job
/// ends. With `from` the answer is a volume with `copying_from`, and the job `NAME.copy` completes
/// it. With `pivot` the volume then replaces its source in all exports.
#[utoipa::path(
    post, path = "/v1/volumes", tag = "volumes", request_body = NewVolume,
    params(("Prefer" = Option<String>, Header, description = "`respond-async`: what takes long is answered with its job")),
    responses(
        (status = 201, body = Volume), (status = 202, body = Job),
        (status = "default", body = Problem, content_type = "application/problem+json")
    )
)]
pub async fn create(
    State(context): State<Context>,
    prefer: Prefer,
    caller: Caller,
    Body(new): Body<NewVolume>,
) -> Result<Answer<Volume>, Failure> {
    let (authority, prefer) = (caller.authority(), seen(prefer, &caller));
    let id = format!("{}.create", new.name);
    let job = move |engine: &Engine| engine.job(&id);
    let create = move |engine: &Engine| engine.create_volume(&new, &authority);
    run_long(context, prefer, StatusCode::CREATED, create, job).await
}

/// Show a volume.
#[utoipa::path(
    get, path = "/v1/volumes/{name}", tag = "volumes", params(("name" = String, Path, description = "Name or UUID")),
    responses((status = 200, body = Volume), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn show(
    State(context): State<Context>,
    Path(name): Path<String>,
    caller: Caller,
) -> Result<Tagged<Volume>, Failure> {
    let authority = caller.authority();
    let find = move |engine: &Engine| {
        let volume = engine.volume(&name)?;
        check(&volume, &name, &authority)?;
        Ok(volume)
    };
    Ok(Tagged(StatusCode::OK, run(context, find).await?))
}

/// Rename a volume, grow it, or change its limits, while it is in use. If the answer is a job, the
/// volume has its new size when the job ends.
#[utoipa::path(
    patch, path = "/v1/volumes/{name}", tag = "volumes", request_body = VolumeChange,
    params(
        ("name" = String, Path, description = "Name or UUID"),
        ("Prefer" = Option<String>, Header, description = "`respond-async`: what takes long is answered with its job")
    ),
    responses(
        (status = 200, body = Volume), (status = 202, body = Job),
        (status = "default", body = Problem, content_type = "application/problem+json")
    )
)]
pub async fn change(
    State(context): State<Context>,
    Path(name): Path<String>,
    tag: IfMatch,
    prefer: Prefer,
    caller: Caller,
    Body(change): Body<VolumeChange>,
) -> Result<Answer<Volume>, Failure> {
    let (authority, prefer) = (caller.authority(), seen(prefer, &caller));
    let (now, grows) = (change.name.clone().unwrap_or_else(|| name.clone()), change.size_bytes.is_some());
    let change = move |engine: &Engine| {
        let may_change = |volume: &Volume| check(volume, &name, &authority).and_then(|()| tag.check(volume));
        engine.change_volume(&name, &change, may_change)
    };
    let prefer = Prefer { is_async: prefer.is_async && grows };
    let job = move |engine: &Engine| engine.job(&format!("{}.grow", engine.volume(&now)?.name));
    run_long(context, prefer, StatusCode::OK, change, job).await
}

/// Delete a volume without exports. Its content is lost.
#[utoipa::path(
    delete, path = "/v1/volumes/{name}", tag = "volumes",
    params(("name" = String, Path, description = "Name or UUID")),
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
        let may_go = |volume: &Volume| check(volume, &name, &authority).and_then(|()| tag.check(volume));
        engine.delete_volume(&name, may_go)
    };
    run(context, delete).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Move a volume to another array or device, while it is in use.
#[utoipa::path(
    post, path = "/v1/volumes/{name}/move", tag = "volumes", request_body = VolumeMove,
    params(("name" = String, Path, description = "Name or UUID")),
    responses((status = 202, body = Job), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn relocate(
    State(context): State<Context>,
    Path(name): Path<String>,
    Body(place): Body<VolumeMove>,
) -> Result<Tagged<Job>, Failure> {
    let job = run(context, move |engine| engine.move_volume(&name, &place)).await?;
    Ok(Tagged(StatusCode::ACCEPTED, job))
}

/// List the groups.
#[utoipa::path(get, path = "/v1/groups", tag = "volumes", responses((status = 200, body = Vec<Group>)))]
pub async fn list_groups(State(context): State<Context>) -> Result<Json<Vec<Group>>, Failure> {
    run(context, |engine| Ok(engine.groups())).await.map(Json)
}

/// Set the limits that the volumes of a group share. Creates the group if needed.
#[utoipa::path(
    put, path = "/v1/groups/{name}", tag = "volumes", request_body = Qos,
    params(("name" = String, Path, description = "Name")),
    responses((status = 200, body = Group), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn set_group(
    State(context): State<Context>,
    Path(name): Path<String>,
    Body(qos): Body<Qos>,
) -> Result<Json<Group>, Failure> {
    run(context, move |engine| engine.set_group(&name, &qos)).await.map(Json)
}

/// Delete a group without volumes.
#[utoipa::path(
    delete, path = "/v1/groups/{name}", tag = "volumes", params(("name" = String, Path, description = "Name")),
    responses((status = 204), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn delete_group(
    State(context): State<Context>,
    Path(name): Path<String>,
) -> Result<StatusCode, Failure> {
    run(context, move |engine| engine.delete_group(&name)).await?;
    Ok(StatusCode::NO_CONTENT)
}
