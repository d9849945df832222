//! The daemon itself: what it is, what has happened, what was counted.

use super::answer::Failure;
use super::request::Query;
use super::roles::Caller;
use super::{Context, run};
use api::{Event, HealthProblem, History, Problem, Samples, System};
use axum::Json;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::header::CONTENT_TYPE;
use axum::response::IntoResponse;
use axum::response::sse::{self, KeepAlive, Sse};
use serde::Deserialize;
use std::convert::Infallible;
use tokio_stream::wrappers::BroadcastStream;
use tokio_stream::{Stream, StreamExt};
use utoipa::IntoParams;

/// Show the daemon.
#[utoipa::path(get, path = "/v1/system", tag = "system", responses((status = 200, body = System)))]
pub async fn show(State(context): State<Context>, caller: Caller) -> Result<Json<System>, Failure> {
    let system = run(context, |engine| Ok(engine.system())).await?;
    Ok(Json(System { role: Some(caller.role), ..system }))
}

/// List the problems of all objects, critical ones first.
#[utoipa::path(get, path = "/v1/health", tag = "system", responses((status = 200, body = Vec<HealthProblem>)))]
pub async fn health(State(context): State<Context>) -> Result<Json<Vec<HealthProblem>>, Failure> {
    run(context, |engine| Ok(engine.health())).await.map(Json)
}

/// Selection of events.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct After {
    /// Only events after the one with this id.
    #[serde(default)]
    after: u64,
}

/// List past events.
#[utoipa::path(
    get, path = "/v1/events", tag = "system", params(After),
    responses((status = 200, body = Vec<Event>), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn events(
    State(context): State<Context>,
    Query(After { after }): Query<After>,
) -> Json<Vec<Event>> {
    Json(context.engine.events().listen(after).0)
}

/// Stream events as server-sent events with the id and the JSON of the event. `Last-Event-ID`
/// resumes after that event.
#[utoipa::path(
    get, path = "/v1/events/stream", tag = "system", params(After),
    responses((status = 200, body = String, content_type = "text/event-stream"))
)]
pub async fn stream(
    State(context): State<Context>,
    Query(After { after }): Query<After>,
    headers: HeaderMap,
) -> Sse<impl Stream<Item = Result<sse::Event, Infallible>>> {
    let last = headers.get("last-event-id").and_then(|id| id.to_str().ok()?.parse().ok());
    let (missed, next) = context.engine.events().listen(last.unwrap_or(after));
    // A client that is too slow misses events; the ids show that.
    let next = BroadcastStream::new(next).filter_map(Result::ok);
    let all = tokio_stream::iter(missed).chain(next);
    let message = |event: Event| {
        let data = serde_json::to_string(&event).expect("plain data");
        Ok(sse::Event::default().id(event.id.to_string()).data(data))
    };
    Sse::new(all.map(message)).keep_alive(KeepAlive::default())
}

/// Show the counters of volumes and members.
#[utoipa::path(get, path = "/v1/samples", tag = "system", responses((status = 200, body = Samples)))]
pub async fn samples(State(context): State<Context>) -> Result<Json<Samples>, Failure> {
    run(context, |engine| Ok(engine.samples())).await.map(Json)
}

/// An object and a time.
#[derive(Debug, Deserialize, IntoParams)]
#[into_params(parameter_in = Query)]
#[serde(deny_unknown_fields)]
pub struct Span {
    /// `arrays/NAME`, `devices/NAME`, `volumes/NAME`, `exports/NAME` or `members/ARRAY/SLOT`.
    object: String,
    /// The last seconds. Default: 3600.
    #[param(minimum = 10, maximum = 86400, multiple_of = 10)]
    seconds: Option<u32>,
    /// Seconds of an interval. Default: as many as make 360 points at most.
    #[param(minimum = 10, maximum = 86400, multiple_of = 10)]
    resolution_s: Option<u32>,
}

/// Show the load of an object over the last day, and what happened meanwhile. The history begins
/// with the daemon.
#[utoipa::path(
    get, path = "/v1/history", tag = "system", params(Span),
    responses((status = 200, body = History), (status = "default", body = Problem, content_type = "application/problem+json"))
)]
pub async fn history(
    State(context): State<Context>,
    Query(Span { object, seconds, resolution_s }): Query<Span>,
) -> Result<Json<History>, Failure> {
    run(context, move |engine| engine.history(&object, seconds, resolution_s)).await.map(Json)
}

/// The OpenAPI document.
pub async fn document(State(context): State<Context>) -> impl IntoResponse {
    ([(CONTENT_TYPE, "application/json")], context.document.to_string())
}

/// Metrics in the format of Prometheus.
pub async fn metrics(State(context): State<Context>) -> Result<impl IntoResponse, Failure> {
    let text = run(context, |engine| Ok(crate::metrics::text(engine))).await?;
    Ok(([(CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text))
}
