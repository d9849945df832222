//! Requests that are carried out once, however often they come: a POST with an `Idempotency-Key`
//! gets the answer of the first that had the key.
//!
//! Keys belong to their caller and outlive the daemon ([`super::keys`]). A request that failed has
//! changed nothing, so its key is forgotten and the next request with it is carried out.

use super::answer::{Failure, malformed};
use super::keys::{Begun, Keys, Name, Refusal, Saved};
use super::masking::Asked;
use super::roles::Caller;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::header::CONTENT_LENGTH;
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};

/// The longest key, in bytes.
const MAX_KEY: usize = 255;

/// Marks a response that an earlier request with the same key has made.
#[derive(Clone)]
pub(super) struct Replayed;

/// Carries a request out unless its key was seen before.
pub(super) async fn once(State(keys): State<Keys>, request: Request, next: Next) -> Response {
    let key = request.headers().get("idempotency-key").map(|key| key.to_str().unwrap_or_default().to_owned());
    let Some(key) = key.filter(|_| request.method() == Method::POST) else { return next.run(request).await };
    if key.is_empty() || key.len() > MAX_KEY {
        let detail = format!("Idempotency-Key: want 1 to {MAX_KEY} visible characters");
        return malformed(StatusCode::BAD_REQUEST, detail).into_response();
    }
    let caller = Caller::of(&request);
    let (parts, body) = request.into_parts();
    // The body is in memory: the audit log has read it.
    let body = to_bytes(body, usize::MAX).await.unwrap_or_default();
    let asked = parts.extensions.get::<Asked>().cloned();
    let (name, fingerprint) = (Name::new(&caller.identity, &key), fingerprint(&parts, &body));
    let claim = match wait(move || keys.begin(name, fingerprint)).await {
        Some(Ok(Begun::New(claim))) => claim,
        Some(Ok(Begun::Answered(saved))) => return replay(saved),
        Some(Err(refusal)) => return refuse(&key, &refusal).into_response(),
        None => return refuse(&key, &Refusal::Failed("the daemon stops".into())).into_response(),
    };
    let (mut parts, body) = next.run(Request::from_parts(parts, Body::from(body))).await.into_parts();
    let body = to_bytes(body, usize::MAX).await.unwrap_or_default();
    parts.headers.remove(CONTENT_LENGTH); // computed again
    let saved = parts.status.is_success().then(|| saved(parts.status, &parts.headers, &body, asked.as_ref()));
    wait(move || match saved {
        Some(saved) => claim.complete(saved),
        // Nothing was done: the next may try.
        None => claim.forget(),
    })
    .await;
    Response::from_parts(parts, Body::from(body))
}

/// Runs what waits for the disk. None when the daemon ends before.
async fn wait<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    tokio::task::spawn_blocking(work).await.ok()
}

/// Method, path and body of a request, as a hash.
fn fingerprint(parts: &Parts, body: &[u8]) -> String {
    let mut hash = Sha256::new();
    for part in [parts.method.as_str().as_bytes(), parts.uri.path().as_bytes(), body] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part);
    }
    super::keys::hex(&hash.finalize())
}

/// The answer, without what the audit log does not show of the request.
fn saved(status: StatusCode, headers: &HeaderMap, body: &Bytes, asked: Option<&Asked>) -> Saved {
    let text = |value: &HeaderValue| value.to_str().ok().map(str::to_owned);
    let headers = headers.iter().filter_map(|(name, value)| Some((name.to_string(), text(value)?))).collect();
    let body = String::from_utf8_lossy(body);
    let body = asked.and_then(|asked| asked.hide(&body)).unwrap_or_else(|| body.into_owned());
    Saved { status: status.as_u16(), headers, body }
}

fn replay(saved: Saved) -> Response {
    let mut response = Response::new(Body::from(saved.body));
    *response.status_mut() = StatusCode::from_u16(saved.status).unwrap_or(StatusCode::OK);
    for (name, value) in saved.headers {
        if let (Ok(name), Ok(value)) = (name.parse::<HeaderName>(), value.parse::<HeaderValue>()) {
            response.headers_mut().append(name, value);
        }
    }
    response.extensions_mut().insert(Replayed);
    response
}

fn refuse(key: &str, refusal: &Refusal) -> Failure {
    let (status, kind, title) = match refusal {
        Refusal::OtherRequest => (StatusCode::CONFLICT, "key-reused", "This key is taken"),
        Refusal::InProgress => (StatusCode::CONFLICT, "in-progress", "This key is taken"),
        Refusal::Interrupted(_) => (StatusCode::CONFLICT, "interrupted", "The outcome is unknown"),
        Refusal::Failed(_) => (StatusCode::INTERNAL_SERVER_ERROR, "failed", "Something failed"),
    };
    Failure::new(status, kind, title, format!("Idempotency-Key {key}: {refusal}"))
}
