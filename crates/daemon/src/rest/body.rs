//! Bodies of requests: the time that they may take, and reading the rest of a refused one.

use super::answer::Failure;
use super::connections::{Connection, Limits};
use axum::body::{Body, BodyDataStream, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::http::header::{CONNECTION, EXPECT};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Sleep, sleep, timeout};
use tokio_stream::{Stream, StreamExt};

/// Longest part of a refused body that is read and thrown away, in bytes.
const MAX_UNHEARD: usize = 16 << 20;

/// Time for reading it.
const UNHEARD_TIMEOUT: Duration = Duration::from_secs(2);

/// The body of a request, for its handler and for [`hear_out`] after that. It fails at its
/// deadline.
#[derive(Clone)]
struct SharedBody(Arc<Mutex<Source>>);

struct Source {
    body: BodyDataStream,
    deadline: Pin<Box<Sleep>>,
    is_late: bool,
}

impl SharedBody {
    fn new(body: Body, limit: Duration) -> SharedBody {
        let (body, deadline) = (body.into_data_stream(), Box::pin(sleep(limit)));
        SharedBody(Arc::new(Mutex::new(Source { body, deadline, is_late: false })))
    }

    /// Whether a reader has met the deadline.
    fn is_late(&self) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).is_late
    }

    /// Reads what the handler left.
    async fn drain(mut self) {
        let mut bytes = 0;
        while let Some(Ok(part)) = self.next().await
            && bytes < MAX_UNHEARD
        {
            bytes += part.len();
        }
    }
}

impl Stream for SharedBody {
    type Item = Result<Bytes, axum::Error>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut source = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let next = Pin::new(&mut source.body).poll_next(context);
        if next.is_pending() && source.deadline.as_mut().poll(context).is_ready() {
            source.is_late = true;
            return Poll::Ready(Some(Err(axum::Error::new(io::Error::from(io::ErrorKind::TimedOut)))));
        }
        next
    }
}

/// Bounds the time that a body takes, and reads what a handler left of it before its answer is
/// sent.
///
/// Many clients write all they have before they read: on a connection that closes meanwhile they
/// would see a broken pipe, not why they were refused. A client that waits to be asked
/// (`Expect: 100-continue`) is not.
pub async fn hear_out(request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    if body.is_end_stream() {
        return next.run(Request::from_parts(parts, body)).await;
    }
    let limits =
        parts.extensions.get::<Arc<Connection>>().map_or(Limits::TCP, |connection| connection.limits);
    let waits = parts.headers.contains_key(EXPECT);
    let rest = SharedBody::new(body, limits.body);
    let answer = next.run(Request::from_parts(parts, Body::from_stream(rest.clone()))).await;
    if rest.is_late() {
        let detail = format!("the body was not complete within {} s", limits.body.as_secs());
        let failure = Failure::new(StatusCode::REQUEST_TIMEOUT, "late", "The request is incomplete", detail);
        return ([(CONNECTION, "close")], failure).into_response();
    }
    if !waits {
        let _ = timeout(UNHEARD_TIMEOUT, rest.drain()).await;
    }
    answer
}
