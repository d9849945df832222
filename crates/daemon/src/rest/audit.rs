//! The audit log: lines with the target `audit` for every request that is to change something.
//!
//! ```text
//!   judged ─► body read ─► "change requested" ─► a task of its own ─► "change answered"
//!      └► "change refused"                             └► "change interrupted"
//! ```
//!
//! The first line is written before the change begins. It has the caller and the body, without
//! secrets ([`super::masking`]). The task ends the change and writes its outcome with the same id,
//! whether or not the client still waits. It counts as a change in flight until then, so that a
//! daemon that stops waits for it. A request that is refused before it begins has one line.

use super::answer::{Failure, malformed};
use super::bounds::MAX_BODY;
use super::idempotency::Replayed;
use super::judged::Judged;
use super::masking::{Asked, Masking, shorten};
use super::roles::Caller;
use crate::engine::{Engine, InFlight};
use api::Problem;
use axum::body::{Body, Bytes, to_bytes};
use axum::extract::{Request, State};
use axum::http::{Method, StatusCode};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_stream::StreamExt;

/// Changes of one caller that are carried out at the same time. A client that disconnects leaves
/// its change running, so connections alone do not bound them. It is more than the connections of
/// one client: clients that wait for their answers do not wait for a slot.
const CHANGES_PER_CALLER: usize = 256;
/// Longest error in the log, in bytes.
const MAX_ERROR: usize = 512;

/// Writes the lines of a listener.
#[derive(Clone)]
pub(super) struct Audit {
    engine: Arc<Engine>,
    masking: Masking,
    slots: Slots,
}

impl Audit {
    pub(super) fn new(engine: Arc<Engine>, masking: Masking) -> Audit {
        Audit { engine, masking, slots: Slots::default() }
    }
}

/// The changes in flight, by the caller's identity. Tokens and users of the Unix socket are few.
#[derive(Clone, Default)]
struct Slots(Arc<Mutex<HashMap<Arc<str>, Arc<Semaphore>>>>);

impl Slots {
    /// Waits until the caller may begin another change.
    async fn take(&self, caller: &Caller) -> OwnedSemaphorePermit {
        let semaphore = {
            let mut callers = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let new = || Arc::new(Semaphore::new(CHANGES_PER_CALLER));
            callers.entry(caller.identity.clone()).or_insert_with(new).clone()
        };
        semaphore.acquire_owned().await.expect("it is never closed")
    }
}

/// Marks the response of a request whose outcome is in the log.
#[derive(Clone)]
struct Recorded;

/// Records a request that is to change something, and carries it out even if its client hangs up.
pub(super) async fn record(State(audit): State<Audit>, request: Request, next: Next) -> Response {
    // The router refuses the others: there is no such operation.
    let is_operation = request.extensions().get::<Judged>().is_some();
    if !is_change(request.method()) || !is_operation {
        return next.run(request).await;
    }
    let caller = Caller::of(&request);
    let (mut parts, body) = request.into_parts();
    let body = match read(body).await {
        Ok(body) => body,
        Err(failure) => return failure.into_response(),
    };
    let slot = audit.slots.take(&caller).await;
    let Some(in_flight) = audit.engine.begin_change() else { return stopping().into_response() };
    let asked = audit.masking.mask(&body);
    let path = parts.uri.path().to_owned();
    let change = Change::begin(caller, parts.method.clone(), path, asked.clone(), (in_flight, slot));
    parts.extensions.insert(asked);
    let request = Request::from_parts(parts, Body::from(body));
    // Dropping the handle does not end the task.
    match tokio::spawn(carry_out(change, request, next)).await {
        Ok(response) => response,
        Err(error) => {
            tracing::error!(%error, "a request was not carried out");
            let detail = "a defect of the daemon; its log says more";
            let status = StatusCode::INTERNAL_SERVER_ERROR;
            let mut response = Failure::new(status, "failed", "Something failed", detail).into_response();
            response.extensions_mut().insert(Recorded);
            response
        }
    }
}

async fn carry_out(change: Change, request: Request, next: Next) -> Response {
    let (mut parts, body) = next.run(request).await.into_parts();
    // Answers to changes are in memory already.
    let body = to_bytes(body, usize::MAX).await.unwrap_or_default();
    change.end(parts.status, parts.extensions.get::<Replayed>().is_some(), &body);
    parts.extensions.insert(Recorded);
    Response::from_parts(parts, Body::from(body))
}

/// The answer to a change that comes while the daemon stops.
fn stopping() -> Failure {
    let detail = "the daemon stops and makes no changes; ask its successor";
    Failure::new(StatusCode::SERVICE_UNAVAILABLE, "stopping", "The daemon stops", detail)
}

/// The whole body of a request.
async fn read(body: Body) -> Result<Bytes, Failure> {
    let mut parts = body.into_data_stream();
    let mut whole = Vec::new();
    while let Some(part) = parts.next().await {
        let part = part.map_err(|error| {
            malformed(StatusCode::BAD_REQUEST, format!("the body of the request is incomplete: {error}"))
        })?;
        if whole.len() + part.len() > MAX_BODY {
            let detail = format!("the body has more than {MAX_BODY} bytes");
            return Err(malformed(StatusCode::PAYLOAD_TOO_LARGE, detail));
        }
        whole.extend_from_slice(&part);
    }
    Ok(whole.into())
}

/// A change that is being carried out. It is in flight as long as this lives.
struct Change {
    id: String,
    caller: Caller,
    method: Method,
    path: String,
    asked: Asked,
    began: Instant,
    has_ended: bool,
    /// Dropped behind the last line.
    _held: (InFlight, OwnedSemaphorePermit),
}

impl Change {
    /// Writes the first line.
    fn begin(
        caller: Caller,
        method: Method,
        path: String,
        asked: Asked,
        held: (InFlight, OwnedSemaphorePermit),
    ) -> Change {
        let (id, who, role) = (next_id(), &caller.who, caller.role.name());
        let asked_text = Some(&asked.text).filter(|text| !text.is_empty());
        tracing::info!(target: "audit", id, %who, role, %method, path, asked = asked_text, "change requested");
        Change { id, caller, method, path, asked, began: Instant::now(), has_ended: false, _held: held }
    }

    /// Writes the last line.
    fn end(mut self, status: StatusCode, is_replayed: bool, body: &[u8]) {
        self.has_ended = true;
        let Change { id, caller, method, path, .. } = &self;
        let (who, role, status) = (&caller.who, caller.role.name(), status.as_u16());
        let (duration_ms, error) = (self.began.elapsed().as_millis() as u64, self.error(body));
        let replayed = is_replayed.then_some(true);
        tracing::info!(
            target: "audit", id, %who, role, %method, path, status, duration_ms, error, replayed, "change answered"
        );
    }

    /// The error that a body says.
    fn error(&self, body: &[u8]) -> Option<String> {
        error_of(body, |detail| self.asked.hide(detail))
    }
}

impl Drop for Change {
    fn drop(&mut self) {
        if self.has_ended {
            return;
        }
        let Change { id, caller, method, path, .. } = self;
        let (who, role, duration_ms) =
            (&caller.who, caller.role.name(), self.began.elapsed().as_millis() as u64);
        let error = "the daemon ended or failed while it carried the change out: its outcome is unknown";
        tracing::warn!(
            target: "audit", id, %who, role, %method, path, duration_ms, error, "change interrupted"
        );
    }
}

/// Writes the line of a change that was refused before it began, if the response is to one.
pub(super) fn note_refusal(caller: &Caller, method: &Method, path: &str, response: &Response) {
    if !is_change(method) || response.extensions().get::<Recorded>().is_some() {
        return;
    }
    let (id, who, role, status) = (next_id(), &caller.who, caller.role.name(), response.status().as_u16());
    tracing::info!(target: "audit", id, %who, role, %method, path, status, "change refused");
}

/// Type and detail of a problem, in one line without control characters.
fn error_of(body: &[u8], hide: impl Fn(&str) -> Option<String>) -> Option<String> {
    let Problem { kind, detail, .. } = serde_json::from_slice(body).ok()?;
    let detail = hide(&detail).map(|detail| format!(": {}", detail.escape_debug())).unwrap_or_default();
    Some(shorten(format!("{kind}{detail}"), MAX_ERROR))
}

/// Whether a request of this method is to change something.
fn is_change(method: &Method) -> bool {
    !matches!(*method, Method::GET | Method::HEAD | Method::OPTIONS)
}

/// An identity for a request that no other has, in this daemon or those before it.
fn next_id() -> String {
    static START: OnceLock<u64> = OnceLock::new();
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let now = || SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_millis() as u64);
    format!("{:x}-{}", START.get_or_init(now), NEXT.fetch_add(1, Ordering::Relaxed))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rest::Role;
    use std::pin::{Pin, pin};
    use std::task::{Context, Poll, Waker};

    fn caller(identity: &str) -> Caller {
        Caller { who: "".into(), identity: identity.into(), role: Role::Admin, label: "".into() }
    }

    fn poll<T>(future: Pin<&mut impl Future<Output = T>>) -> Option<T> {
        match future.poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(value) => Some(value),
            Poll::Pending => None,
        }
    }

    #[test]
    fn a_caller_with_many_changes_in_flight_waits_and_others_do_not() {
        let (slots, one, other) = (Slots::default(), caller("user 1"), caller("user 2"));
        let mut taken: Vec<_> =
            (0..CHANGES_PER_CALLER).map(|_| poll(pin!(slots.take(&one))).unwrap()).collect();
        let mut next = pin!(slots.take(&one));
        assert!(poll(next.as_mut()).is_none());
        assert!(poll(pin!(slots.take(&other))).is_some());
        taken.pop();
        assert!(poll(next.as_mut()).is_some());
    }

    #[test]
    fn an_error_is_one_line_and_bounded() {
        let body = |detail: &str| {
            let problem = serde_json::json!({ "type": "t", "title": "", "status": 409, "detail": detail });
            problem.to_string().into_bytes()
        };
        let shown = |detail: &str| error_of(&body(detail), |detail| Some(detail.to_owned())).unwrap();
        assert_eq!(shown("a\nb\u{1b}[2J"), "t: a\\nb\\u{1b}[2J");
        assert!(shown(&"x".repeat(10_000)).len() < MAX_ERROR + 30);
        assert_eq!(error_of(&body("secret"), |_| None).as_deref(), Some("t"));
        assert_eq!(error_of(b"{\"name\":\"v1\"}", |_| None), None);
    }
}
