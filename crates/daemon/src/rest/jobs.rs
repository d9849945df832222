//! Jobs.

use super::answer::{Failure, Tagged};
use super::request::{Body, Path};
use super::{Context, run};
use api::{Job, JobChange, Problem};
use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;

/// List running and paused jobs.
#[utoipa::path(get, path = "/v1/jobs", tag = "jobs", responses((status = 200, body = Vec<Job>)))]
pub async fn list(State(context): State<Context>) -> Result<Json<Vec<Job>>, Failure> {
    run(context, |engine| Ok(engine.jobs())).await.map(Json)
}

/// Show a job.
#[utoipa::path(
    get, path = "/v1/jobs/{id}", tag = "jobs", params(("id" = String, Path, description = "Identifier")),
    responses((status = 200, body = Job), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn show(State(context): State<Context>, Path(id): Path<String>) -> Result<Tagged<Job>, Failure> {
    Ok(Tagged(StatusCode::OK, run(context, move |engine| engine.job(&id)).await?))
}

/// Pause or resume a job, or change its rate.
#[utoipa::path(
    patch, path = "/v1/jobs/{id}", tag = "jobs", request_body = JobChange,
    params(("id" = String, Path, description = "Identifier")),
    responses((status = 200, body = Job), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn change(
    State(context): State<Context>,
    Path(id): Path<String>,
    Body(change): Body<JobChange>,
) -> Result<Tagged<Job>, Failure> {
    Ok(Tagged(StatusCode::OK, run(context, move |engine| engine.change_job(&id, &change)).await?))
}

/// Cancel a move, a scrub or a replacement. The volume of a move stays on its present device.
#[utoipa::path(
    delete, path = "/v1/jobs/{id}", tag = "jobs", params(("id" = String, Path, description = "Identifier")),
    responses((status = 204), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn cancel(State(context): State<Context>, Path(id): Path<String>) -> Result<StatusCode, Failure> {
    run(context, move |engine| engine.cancel_job(&id)).await?;
    Ok(StatusCode::NO_CONTENT)
}
