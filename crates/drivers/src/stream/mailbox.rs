//! Events from a thread that connects to a queue that uses connections.
//!
//! Neither waits for the other: the thread stores events and raises the queue's eventfd, and the
//! queue checks one flag.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use vmm_sys_util::eventfd::EventFd;

/// Pending events; several may be pending at once.
pub struct Mailbox<E> {
    has_events: AtomicBool,
    events: Mutex<E>,
    /// Raises the queue's eventfd. Never blocks.
    raise: Box<dyn Fn() + Send + Sync>,
}

impl<E: Default> Mailbox<E> {
    /// A mailbox without events. `event` is raised with each one.
    pub fn new(event: EventFd) -> Mailbox<E> {
        // Fails only when the counter is full; then the event is raised already.
        Mailbox::raising(move || drop(event.write(1)))
    }

    /// A mailbox without events, which calls `raise` with each one.
    pub fn raising(raise: impl Fn() + Send + Sync + 'static) -> Mailbox<E> {
        Mailbox { has_events: AtomicBool::new(false), events: Mutex::default(), raise: Box::new(raise) }
    }

    /// Whether there are events for the queue.
    #[inline]
    pub fn has_events(&self) -> bool {
        self.has_events.load(Ordering::Acquire)
    }

    /// The pending events.
    pub fn events(&self) -> MutexGuard<'_, E> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes all events.
    pub fn take(&self) -> E {
        let mut events = self.events();
        self.has_events.store(false, Ordering::Release);
        std::mem::take(&mut *events)
    }

    /// Adds an event.
    pub fn tell(&self, change: impl FnOnce(&mut E)) {
        let mut events = self.events();
        change(&mut events);
        self.has_events.store(true, Ordering::Release);
        drop(events);
        (self.raise)();
    }
}
