//! Failed logins over TCP: each is a line of the audit log, at a bounded rate, and is answered
//! late.
//!
//! A wrong token is answered after a delay that doubles with each failure of the same client, from
//! [`FIRST_DELAY`] to [`LONGEST_DELAY`]. From the failure with the number [`GUARDED_FROM`] on,
//! every login of the client is checked after [`GUARD`]: an attacker that does not wait for the
//! answer gains nothing. This is also the longest delay of a valid token. A client without failures
//! for [`MEMORY`] starts again.
//!
//! A delayed answer is a timer, and a connection has one request at a time. So the limits of
//! connections bound the answers that wait.

use super::connections::{Connection, Peer};
use api::Problem;
use axum::Extension;
use axum::body::{Body, to_bytes};
use axum::extract::{Request, State};
use axum::http::StatusCode;
use axum::http::header::AUTHORIZATION;
use axum::middleware::Next;
use axum::response::Response;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Delay of a client's first failure.
const FIRST_DELAY: Duration = Duration::from_millis(100);
/// Delay of its later failures, at most.
const LONGEST_DELAY: Duration = Duration::from_secs(5);
/// Failures after which all logins of a client are delayed.
const GUARDED_FROM: u32 = 10;
/// The delay before the check then.
const GUARD: Duration = Duration::from_millis(250);
/// Time after which the failures of a client are forgotten.
const MEMORY: Duration = Duration::from_secs(600);
/// Clients with failures; the one with the oldest failure is forgotten first.
const MAX_CLIENTS: usize = 1024;
/// Time for which lines are counted.
const WINDOW: Duration = Duration::from_secs(60);
/// Lines in this time, for each client and for all.
const LINES_PER_CLIENT: u32 = 5;
const LINES: u32 = 60;

/// The failures of all clients. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Logins(Arc<Mutex<Book>>);

#[derive(Default)]
struct Book {
    clients: HashMap<Peer, Client>,
    window: Option<Instant>,
    lines: u32,
    suppressed: u64,
}

#[derive(Clone, Copy)]
struct Client {
    failures: u32,
    last: Instant,
    lines: u32,
}

/// The consequences of a failure.
#[derive(Debug, PartialEq, Eq)]
struct Verdict {
    delay: Duration,
    failures: u32,
    /// Lines that were suppressed before this one. None: this line is suppressed, too.
    suppressed_before: Option<u64>,
}

impl Book {
    /// The delay before a login of this client is checked.
    fn guard(&self, client: Peer, now: Instant) -> Duration {
        let is_guarded = self
            .clients
            .get(&client)
            .is_some_and(|known| known.failures >= GUARDED_FROM && now.duration_since(known.last) < MEMORY);
        if is_guarded { GUARD } else { Duration::ZERO }
    }

    /// Notes a failure. Only a wrong token counts as one and is delayed.
    fn fail(&mut self, client: Peer, has_token: bool, now: Instant) -> Verdict {
        self.begin_window(now);
        if self.clients.get(&client).is_some_and(|known| now.duration_since(known.last) >= MEMORY) {
            self.clients.remove(&client);
        }
        if !self.clients.contains_key(&client) && self.clients.len() >= MAX_CLIENTS {
            let oldest = self.clients.iter().min_by_key(|(_, known)| known.last).map(|(peer, _)| *peer);
            oldest.map(|oldest| self.clients.remove(&oldest));
        }
        let known = self.clients.entry(client).or_insert(Client { failures: 0, last: now, lines: 0 });
        known.failures = known.failures.saturating_add(u32::from(has_token));
        known.last = now;
        let is_shown = known.lines < LINES_PER_CLIENT && self.lines < LINES;
        known.lines += u32::from(is_shown);
        self.lines += u32::from(is_shown);
        let (failures, delay) = (known.failures, delay(known.failures, has_token));
        let suppressed_before = is_shown.then(|| std::mem::take(&mut self.suppressed));
        self.suppressed += u64::from(!is_shown);
        Verdict { delay, failures, suppressed_before }
    }

    fn begin_window(&mut self, now: Instant) {
        if self.window.is_none_or(|began| now.duration_since(began) >= WINDOW) {
            self.window = Some(now);
            self.lines = 0;
            self.clients.values_mut().for_each(|client| client.lines = 0);
        }
    }
}

fn delay(failures: u32, has_token: bool) -> Duration {
    match has_token {
        false => Duration::ZERO,
        true => FIRST_DELAY
            .saturating_mul(1_u32.checked_shl(failures.saturating_sub(1)).unwrap_or(u32::MAX))
            .min(LONGEST_DELAY),
    }
}

impl Logins {
    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Logs and delays the answers to requests without a valid token.
pub(super) async fn watch(
    State(logins): State<Logins>,
    Extension(connection): Extension<Arc<Connection>>,
    request: Request,
    next: Next,
) -> Response {
    let client = connection.peer.client();
    let has_token = request.headers().contains_key(AUTHORIZATION);
    let guard = if has_token { logins.book().guard(client, Instant::now()) } else { Duration::ZERO };
    if !guard.is_zero() {
        sleep(guard).await;
    }
    let response = next.run(request).await;
    if response.status() != StatusCode::UNAUTHORIZED {
        return response;
    }
    let (parts, body) = response.into_parts();
    let body = to_bytes(body, usize::MAX).await.unwrap_or_default();
    let verdict = logins.book().fail(client, has_token, Instant::now());
    if let Some(suppressed) = verdict.suppressed_before {
        // The text is the daemon's own and quotes nothing.
        let reason =
            serde_json::from_slice(&body).map_or_else(|_| String::new(), |Problem { detail, .. }| detail);
        let (peer, failures, delay_ms) =
            (connection.peer, verdict.failures, verdict.delay.as_millis() as u64);
        tracing::warn!(target: "audit", %peer, reason, failures, delay_ms, suppressed, "login failed");
    }
    if !verdict.delay.is_zero() {
        sleep(verdict.delay).await;
    }
    Response::from_parts(parts, Body::from(body))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{IpAddr, Ipv4Addr};

    fn client(number: u32) -> Peer {
        Peer::Address(IpAddr::V4(Ipv4Addr::from_bits(number)))
    }

    #[test]
    fn the_delay_of_a_wrong_token_doubles_up_to_a_limit_for_its_client_alone() {
        let (mut book, now) = (Book::default(), Instant::now());
        let delays: Vec<u128> = (0..8).map(|_| book.fail(client(1), true, now).delay.as_millis()).collect();
        assert_eq!(delays, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        assert_eq!(book.fail(client(2), true, now).delay, FIRST_DELAY);
        assert_eq!(book.fail(client(1), false, now).delay, Duration::ZERO);
        // Neither a client without failures nor one with few waits before its token is checked.
        assert_eq!((book.guard(client(1), now), book.guard(client(3), now)), Default::default());
        for _ in 0..100 {
            assert_eq!(book.fail(client(1), true, now).delay, LONGEST_DELAY);
        }
        assert_eq!((book.guard(client(1), now), book.guard(client(2), now)), (GUARD, Duration::ZERO));
        let later = now + MEMORY;
        assert_eq!(book.guard(client(1), later), Duration::ZERO);
        assert_eq!(book.fail(client(1), true, later).delay, FIRST_DELAY);
    }

    #[test]
    fn a_flood_of_failed_logins_leaves_few_lines_and_is_counted() {
        let (mut book, now) = (Book::default(), Instant::now());
        let is_shown = |verdict: &Verdict| verdict.suppressed_before.is_some();
        let of_one = (0..1000).filter(|_| is_shown(&book.fail(client(1), true, now))).count();
        assert_eq!(of_one, LINES_PER_CLIENT as usize);
        assert_eq!(book.fail(client(2), true, now).suppressed_before, Some(995), "others are shown");
        let of_many = (10..9000).filter(|number| is_shown(&book.fail(client(*number), false, now))).count();
        assert_eq!(of_many, (LINES - LINES_PER_CLIENT - 1) as usize);
        assert_eq!(book.clients.len(), MAX_CLIENTS);
        let next = book.fail(client(1), true, now + WINDOW);
        assert_eq!(next.suppressed_before, Some(8990 - of_many as u64));
    }
}
