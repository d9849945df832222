//! The mailbox between the connection thread, which makes connections, and a queue, which uses one.

use super::facts::Facts;
use super::link::Terms;
use ::stream::{Wire, abort};
use drivers::stream::Mailbox;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vmm_sys_util::eventfd::EventFd;

/// A connection that a queue can use.
pub(super) struct Connection {
    pub(super) wire: Wire,
    pub(super) terms: Terms,
    pub(super) facts: Facts,
}

/// Pending events of a queue. Several may be pending at once; the loss of a connection is older
/// than a new one.
#[derive(Default)]
pub(super) struct QueueEvents {
    /// The connection was lost; requests wait for another.
    pub(super) is_lost: bool,
    /// A new connection.
    pub(super) connection: Option<Connection>,
    /// There will be no connection any more, with the reason.
    pub(super) dead: Option<Arc<str>>,
    /// A second has passed.
    pub(super) is_tick: bool,
}

/// The mailbox of one queue.
pub(super) struct QueueMailbox {
    pub(super) queue_id: u16,
    /// Maximum requests in flight.
    pub(super) depth: u32,
    /// Requests in flight.
    pub(super) in_flight: AtomicU32,
    mailbox: Mailbox<QueueEvents>,
    /// The socket in use, so that the thread can shut it down.
    socket: Mutex<Option<Arc<OwnedFd>>>,
}

impl QueueMailbox {
    pub(super) fn new(queue_id: u16, depth: u32, event: EventFd) -> QueueMailbox {
        QueueMailbox {
            queue_id,
            depth,
            in_flight: AtomicU32::new(0),
            mailbox: Mailbox::new(event),
            socket: Mutex::new(None),
        }
    }

    /// Whether there are events for the queue.
    #[inline]
    pub(super) fn has_events(&self) -> bool {
        self.mailbox.has_events()
    }

    /// Whether the loss of the connection is among the events.
    pub(super) fn is_lost(&self) -> bool {
        self.mailbox.events().is_lost
    }

    /// Takes all events.
    pub(super) fn take_events(&self) -> QueueEvents {
        self.mailbox.take()
    }

    /// Hands over a connection.
    pub(super) fn connected(&self, connection: Connection) {
        *lock(&self.socket) = Some(connection.wire.socket().clone());
        self.mailbox.tell(|events| events.connection = Some(connection));
    }

    /// Ends the connection, even one that the queue has not seen yet. The loss is stored first, so
    /// the queue knows it when the socket ends.
    pub(super) fn disconnect(&self) {
        self.mailbox.tell(|events| {
            events.connection = None;
            events.is_lost = true;
        });
        if let Some(socket) = lock(&self.socket).take() {
            abort(&socket);
        }
    }

    /// Reports that there will be no connection any more.
    pub(super) fn give_up(&self, why: &Arc<str>) {
        self.mailbox.tell(|events| events.dead = Some(why.clone()));
    }

    /// Sends the timeout tick if requests are in flight.
    pub(super) fn tick(&self) {
        if self.in_flight.load(Ordering::Relaxed) > 0 {
            self.mailbox.tell(|events| events.is_tick = true);
        }
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
