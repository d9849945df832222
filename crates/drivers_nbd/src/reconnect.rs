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
use drivers::stream::reconnect::{End, Failed, Outage};
use drivers::stream::{Cancel, Mailbox, StreamError};
use std::io;
use std::sync::Arc;
use std::time::Instant;
use vmm_sys_util::eventfd::EventFd;

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
        let Thread { session, mailbox, stop, since } = self;
        let outage = Outage { device: session.name(), since, delay: session.reconnect_delay(), stop: &stop };
        let connected = outage.reconnect(
            || mailbox.tell(|events| events.is_late = true),
            |most_ms| session.connect_again(most_ms, &stop).map_err(Failed::from),
        );
        match connected {
            Ok(connection) => mailbox.tell(|events| events.connection = Some(connection)),
            Err(End::Dead(why)) => mailbox.tell(|events| events.dead = Some(why)),
            Err(End::Cancelled) => {}
        }
    }
}

impl From<OpenError> for Failed {
    fn from(error: OpenError) -> Failed {
        match error {
            OpenError::Stream(StreamError::Cancelled) => Failed::Cancelled,
            OpenError::Changed(_) => Failed::Final(error.to_string()),
            other => Failed::Passing(other.to_string()),
        }
    }
}
