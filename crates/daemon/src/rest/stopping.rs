//! Changes while the daemon stops: those in flight are answered, new ones are refused.

use super::answer::Failure;
use super::request::is_change;
use crate::engine::Engine;
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::sync::Arc;

/// Lets requests that read pass, and changes unless the daemon stops.
pub async fn refuse_changes(State(engine): State<Arc<Engine>>, request: Request, next: Next) -> Response {
    if !is_change(request.method()) {
        return next.run(request).await;
    }
    match engine.begin_change() {
        Some(_in_flight) => next.run(request).await,
        None => {
            let detail = "the daemon stops and makes no changes; ask its successor";
            Failure::new(StatusCode::SERVICE_UNAVAILABLE, "stopping", "The daemon stops", detail)
                .into_response()
        }
    }
}
