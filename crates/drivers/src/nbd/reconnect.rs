//! A new connection for a queue that has lost its own.
//!
//! ```text
//!   connected ── lost ──► attempts ── connected again ──► connected
//!                            ├─ reconnect delay ──► requests fail, attempts continue
//!                            └─ the export changed ──► every request fails
//! ```
//!
//! A thread connects, so that no core waits for the server. It ends with a connection, or with the
//! queue.

use super::error::OpenError;
use super::session::{Connection, Session};
use crate::stream::connect::Deadline;
use crate::stream::mailbox::Mailbox;
use crate::stream::{Cancel, StreamError};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vmm_sys_util::eventfd::EventFd;

/// First pause before an attempt; doubles with each attempt.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
/// Longest pause between two attempts.
const LONGEST_PAUSE: Duration = Duration::from_secs(5);

/// Pending events of a queue.
#[derive(Default)]
pub(super) struct Events {
    /// A new connection.
    pub(super) connection: Option<Connection>,
    /// The reconnect delay has passed.
    pub(super) is_late: bool,
    /// There will be no connection any more, with the reason.
    pub(super) dead: Option<String>,
}

/// Attempts to reconnect. Dropping it ends them.
pub(super) struct Attempts {
    mailbox: Arc<Mailbox<Events>>,
    stop: Cancel,
}

impl Attempts {
    /// Begins attempts for an outage that began at `since`. `event` is raised with each event.
    ///
    /// # Errors
    /// When the system refuses a thread or a descriptor.
    pub(super) fn start(session: &Arc<Session>, event: EventFd, since: Instant) -> io::Result<Attempts> {
        let mailbox = Arc::new(Mailbox::new(event));
        let stop = Cancel::new()?;
        let thread = Thread { session: session.clone(), mailbox: mailbox.clone(), stop: stop.clone(), since };
        reactor::spawn_thread("nbd", move || thread.run())?;
        Ok(Attempts { mailbox, stop })
    }

    /// Whether there are events for the queue.
    pub(super) fn has_events(&self) -> bool {
        self.mailbox.has_events()
    }

    /// Takes all events.
    pub(super) fn take_events(&self) -> Events {
        self.mailbox.take()
    }
}

impl Drop for Attempts {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

struct Thread {
    session: Arc<Session>,
    mailbox: Arc<Mailbox<Events>>,
    stop: Cancel,
    since: Instant,
}

impl Thread {
    fn run(self) {
        let (delay, mut pause, mut is_late) = (self.session.reconnect_delay(), FIRST_PAUSE, false);
        loop {
            let left = delay.saturating_sub(self.since.elapsed());
            if left.is_zero() && !is_late {
                is_late = true;
                self.mailbox.tell(|events| events.is_late = true);
            }
            let pause_now = if is_late { pause } else { pause.min(left) };
            if Deadline::new(u64::MAX, &self.stop).pause(pause_now).is_err() {
                return;
            }
            pause = (pause * 2).min(LONGEST_PAUSE);
            // Requests do not wait longer because an attempt takes long.
            let left = delay.saturating_sub(self.since.elapsed());
            if left.is_zero() && !is_late {
                continue;
            }
            let most_ms = if is_late { u64::MAX } else { left.as_millis() as u64 + 1 };
            let device = self.session.name();
            match self.session.connect_again(most_ms, &self.stop) {
                Ok(connection) => {
                    let after_ms = self.since.elapsed().as_millis() as u64;
                    tracing::info!(device, after_ms, "reconnected");
                    return self.mailbox.tell(|events| events.connection = Some(connection));
                }
                Err(OpenError::Stream(StreamError::Cancelled)) => return,
                Err(error @ OpenError::Changed(_)) => {
                    return self.mailbox.tell(|events| events.dead = Some(error.to_string()));
                }
                Err(error) => tracing::debug!(device, %error, "reconnect attempt failed"),
            }
        }
    }
}
