//! Requests that are carried out once, however often they come: a POST with an `Idempotency-Key` gets the answer of the
//! first that had the key.
//!
//! Keys are remembered as long as the daemon runs, the last thousand of them. After a restart a repeated creation finds
//! what it has created, and is told so.

use super::answer::Failure;
use super::bounds::MAX_BODY;
use super::request::malformed;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::header::CONTENT_LENGTH;
use axum::http::{HeaderMap, Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::collections::{HashMap, VecDeque};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Keys that are remembered.
const REMEMBERED: usize = 1000;
/// The longest key.
const MAX_KEY: usize = 255;
/// The longest answer that is remembered.
const MAX_ANSWER: usize = 1 << 20;

/// Keys, and what was answered.
#[derive(Clone, Default)]
pub struct Keys(Arc<Mutex<Book>>);

#[derive(Default)]
struct Book {
    entries: HashMap<String, Entry>,
    order: VecDeque<String>,
}

struct Entry {
    /// Method, path and body of the first request.
    fingerprint: u64,
    /// Nothing while it is being carried out.
    answer: Option<(StatusCode, HeaderMap, Bytes)>,
}

impl Keys {
    fn lock(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was answered to the key; nothing if this is the first request that has it, which is noted.
    fn begin(&self, key: &str, fingerprint: u64) -> Result<Option<Response>, Failure> {
        let mut book = self.lock();
        let refuse = |kind: &str, detail: &str| {
            let detail = format!("Idempotency-Key {key}: {detail}");
            Failure::new(StatusCode::CONFLICT, kind, "This key is taken", detail)
        };
        match book.entries.get(key) {
            Some(entry) if entry.fingerprint != fingerprint => {
                Err(refuse("key-reused", "another request has it"))
            }
            Some(Entry { answer: None, .. }) => Err(refuse("in-progress", "it is being carried out")),
            Some(Entry { answer: Some((status, headers, body)), .. }) => {
                Ok(Some((*status, headers.clone(), body.clone()).into_response()))
            }
            None => {
                if book.order.len() == REMEMBERED
                    && let Some(oldest) = book.order.pop_front()
                {
                    book.entries.remove(&oldest);
                }
                book.order.push_back(key.into());
                book.entries.insert(key.into(), Entry { fingerprint, answer: None });
                Ok(None)
            }
        }
    }

    fn end(&self, key: &str, answer: Option<(StatusCode, HeaderMap, Bytes)>) {
        let mut book = self.lock();
        match (answer, book.entries.get_mut(key)) {
            (Some(answer), Some(entry)) => entry.answer = Some(answer),
            _ => {
                // Nothing was done: the next may try.
                book.entries.remove(key);
                book.order.retain(|known| known != key);
            }
        }
    }
}

/// Forgets a key whose request was given up half way.
struct Pending<'a> {
    keys: &'a Keys,
    key: &'a str,
    answer: Option<(StatusCode, HeaderMap, Bytes)>,
}

impl Drop for Pending<'_> {
    fn drop(&mut self) {
        self.keys.end(self.key, self.answer.take());
    }
}

/// Carries a request out unless its key was seen before.
pub async fn once(State(keys): State<Keys>, request: Request, next: Next) -> Response {
    let key = request.headers().get("idempotency-key").map(|key| key.to_str().unwrap_or_default().to_owned());
    let Some(key) = key.filter(|_| request.method() == Method::POST) else { return next.run(request).await };
    if key.is_empty() || key.len() > MAX_KEY {
        let detail = format!("Idempotency-Key: want 1 to {MAX_KEY} visible characters");
        return malformed(StatusCode::BAD_REQUEST, detail).into_response();
    }
    let (parts, body) = request.into_parts();
    let Ok(body) = to_bytes(body, MAX_BODY).await else {
        let detail = format!("the body has more than {MAX_BODY} bytes");
        return malformed(StatusCode::PAYLOAD_TOO_LARGE, detail).into_response();
    };
    let mut hasher = DefaultHasher::new();
    (parts.method.as_str(), parts.uri.path(), &body).hash(&mut hasher);
    match keys.begin(&key, hasher.finish()) {
        Ok(None) => {}
        Ok(Some(answer)) => return answer,
        Err(failure) => return failure.into_response(),
    }
    let mut pending = Pending { keys: &keys, key: &key, answer: None };
    let (mut parts, body) = next.run(Request::from_parts(parts, Body::from(body))).await.into_parts();
    let body = to_bytes(body, MAX_ANSWER).await.unwrap_or_default();
    parts.headers.remove(CONTENT_LENGTH); // made anew
    if parts.status.is_success() {
        pending.answer = Some((parts.status, parts.headers.clone(), body.clone()));
    }
    Response::from_parts(parts, Body::from(body))
}
