//! Jobs.

use super::answer::{Failure, Tagged};
use super::request::{Body, Path};
use super::{Context, run};
use api::{Job, JobChange, Problem};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

/// Every job that runs, or stands still.
#[utoipa::path(get, path = "/v1/jobs", tag = "jobs", responses((status = 200, body = Vec<Job>)))]
pub async fn list(State(context): State<Context>) -> Result<Json<Vec<Job>>, Failure> {
    run(context, |engine| Ok(engine.jobs())).await.map(Json)
}

/// A job.
#[utoipa::path(
    get, path = "/v1/jobs/{id}", tag = "jobs", params(("id" = String, Path, description = "What it is called")),
    responses((status = 200, body = Job), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn show(State(context): State<Context>, Path(id): Path<String>) -> Result<Tagged<Job>, Failure> {
    Ok(Tagged(StatusCode::OK, run(context, move |engine| engine.job(&id)).await?))
}

/// Let a job stand still, or go on, or at another pace.
#[utoipa::path(
    patch, path = "/v1/jobs/{id}", tag = "jobs", request_body = JobChange,
    params(("id" = String, Path, description = "What it is called")),
    responses((status = 200, body = Job), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn change(
    State(context): State<Context>,
    Path(id): Path<String>,
    Body(change): Body<JobChange>,
) -> Result<Tagged<Job>, Failure> {
    Ok(Tagged(StatusCode::OK, run(context, move |engine| engine.change_job(&id, &change)).await?))
}

/// Give a job up: a move, whose volume stays where it is; a scrub; a replacement.
#[utoipa::path(
    delete, path = "/v1/jobs/{id}", tag = "jobs", params(("id" = String, Path, description = "What it is called")),
    responses((status = 204), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn cancel(State(context): State<Context>, Path(id): Path<String>) -> Result<StatusCode, Failure> {
    run(context, move |engine| engine.cancel_job(&id)).await?;
    Ok(StatusCode::NO_CONTENT)
}
