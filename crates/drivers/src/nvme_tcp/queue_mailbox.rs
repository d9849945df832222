//! Where the keeper, which makes connections, and a queue, which uses one, meet. Neither waits for the other: the
//! keeper leaves events and raises the queue's event, and the queue looks at one flag.

use super::error::OpenError;
use super::facts::Facts;
use super::link::{Terms, abort};
use socket2::Socket;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use vmm_sys_util::eventfd::EventFd;

/// A connection that a queue can use.
pub(super) struct Connection {
    pub(super) socket: Socket,
    pub(super) terms: Terms,
    pub(super) facts: Facts,
}

/// What a queue has to know. Several things may be new at once; the loss of a connection is older than a new one.
#[derive(Default)]
pub(super) struct QueueEvents {
    /// The connection is gone; requests wait for another.
    pub(super) is_lost: bool,
    /// Here is another.
    pub(super) connection: Option<Connection>,
    /// There will be none any more, and why.
    pub(super) dead: Option<Arc<str>>,
    /// A second has passed.
    pub(super) is_tick: bool,
}

/// One queue's place at the controller.
pub(super) struct QueueMailbox {
    pub(super) queue_id: u16,
    /// Requests in flight at most.
    pub(super) depth: u32,
    /// Requests in flight.
    pub(super) in_flight: AtomicU32,
    has_events: AtomicBool,
    events: Mutex<QueueEvents>,
    event: EventFd,
    /// The socket in use, to be shut down from here.
    socket: Mutex<Option<Socket>>,
}

impl QueueMailbox {
    pub(super) fn new(queue_id: u16, depth: u32, event: EventFd) -> QueueMailbox {
        QueueMailbox {
            queue_id,
            depth,
            in_flight: AtomicU32::new(0),
            has_events: AtomicBool::new(false),
            events: Mutex::default(),
            event,
            socket: Mutex::new(None),
        }
    }

    /// Whether there are events for the queue.
    #[inline]
    pub(super) fn has_events(&self) -> bool {
        self.has_events.load(Ordering::Acquire)
    }

    /// Whether it is among the events that the connection is gone.
    pub(super) fn is_lost(&self) -> bool {
        lock(&self.events).is_lost
    }

    /// Takes the events.
    pub(super) fn take_events(&self) -> QueueEvents {
        let mut events = lock(&self.events);
        self.has_events.store(false, Ordering::Release);
        std::mem::take(&mut *events)
    }

    /// Hands a connection over.
    pub(super) fn connected(&self, connection: Connection) -> Result<(), OpenError> {
        let socket = connection.socket.try_clone().map_err(OpenError::System)?;
        *lock(&self.socket) = Some(socket);
        self.tell(|events| events.connection = Some(connection));
        Ok(())
    }

    /// Ends the connection, also one that the queue has not seen yet. Whoever sees it end can know why.
    pub(super) fn disconnect(&self) {
        self.tell(|events| {
            events.connection = None;
            events.is_lost = true;
        });
        if let Some(socket) = lock(&self.socket).take() {
            abort(&socket);
        }
    }

    /// Says that there will be no connection any more.
    pub(super) fn give_up(&self, why: &Arc<str>) {
        self.tell(|events| events.dead = Some(why.clone()));
    }

    /// Lets the queue look at its clock, if it has something in flight.
    pub(super) fn tick(&self) {
        if self.in_flight.load(Ordering::Relaxed) > 0 {
            self.tell(|events| events.is_tick = true);
        }
    }

    fn tell(&self, change: impl FnOnce(&mut QueueEvents)) {
        let mut events = lock(&self.events);
        change(&mut events);
        self.has_events.store(true, Ordering::Release);
        drop(events);
        // Fails only when the counter is full, and then it has been raised.
        let _ = self.event.write(1);
    }
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
