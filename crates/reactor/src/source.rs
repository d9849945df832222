//! Sources, which bring work to a core.

use crate::core::Core;
use std::cell::Cell;
use std::os::fd::RawFd;
use std::rc::{Rc, Weak};

/// A leaf's queue or an export's virtqueue. The core polls it while it is busy and watches its
/// event fd while it is idle. Only the core's thread calls it, never from inside another call to
/// it.
pub trait Source {
    /// Publishes all operations pushed since the last call and rings the doorbell once.
    fn flush(&self);
    /// Looks for completions or new work and wakes the tasks concerned; returns the number found.
    fn poll(&self) -> usize;
    /// File descriptor that becomes readable when work arrives after [`Source::arm`]; `None` for a
    /// source that can only be polled. The core never reads from it: it watches for edges (a
    /// multishot poll). Must not change while the source is registered.
    fn event_fd(&self) -> Option<RawFd>;
    /// Requests an event at the next work. `false` means that some may be ready now: the core polls
    /// again first.
    fn arm(&self) -> bool;
    /// Cancels [`Source::arm`]: the core polls again.
    fn disarm(&self);
}

/// How long a core polls a source without work before it arms it.
///
/// The window doubles after a sleep of up to `max_ns`, and halves after a longer one. The rule is
/// that of the kernel's haltpoll governor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PollWindow {
    /// Longest window. 0: never poll; `u64::MAX`: always poll, never sleep.
    pub max_ns: u64,
    /// First window of a source, and the smallest above 0.
    pub start_ns: u64,
}

impl PollWindow {
    /// A window of up to `max_ns`.
    pub fn up_to(max_ns: u64) -> PollWindow {
        PollWindow { max_ns, start_ns: if max_ns == u64::MAX { max_ns } else { max_ns / 8 } }
    }

    pub(crate) fn after_sleep(&self, window_ns: u64, slept_ns: u64) -> u64 {
        if slept_ns <= self.max_ns {
            return window_ns.saturating_mul(2).clamp(self.start_ns, self.max_ns);
        }
        let half = window_ns / 2;
        if half < self.start_ns { 0 } else { half }
    }
}

impl Default for PollWindow {
    /// Up to 50 µs: a fast drive's latency, and a fortieth of a scheduler tick.
    fn default() -> Self {
        PollWindow::up_to(50_000)
    }
}

/// A registered source, shared by core and handle.
pub(crate) struct Registered {
    pub(crate) source: Weak<dyn Source>,
    pub(crate) is_active: Cell<bool>,
    /// The handle was dropped; the core removes the source in its next turn.
    pub(crate) is_gone: Cell<bool>,
    /// The park's token: the source's place in the core's table, and a generation.
    pub(crate) token: Cell<u64>,
    pub(crate) event_fd: Option<RawFd>,
    /// The park watches the event fd.
    pub(crate) is_watched: Cell<bool>,
    window_ns: Cell<u64>,
    idle_since_ns: Cell<u64>,
    armed_at_ns: Cell<u64>,
}

impl Registered {
    pub(crate) fn new(source: &Rc<dyn Source>, window: PollWindow) -> Rc<Registered> {
        Rc::new(Registered {
            source: Rc::downgrade(source),
            is_active: Cell::new(false),
            is_gone: Cell::new(false),
            token: Cell::new(u64::MAX),
            event_fd: source.event_fd(),
            is_watched: Cell::new(false),
            window_ns: Cell::new(window.start_ns),
            idle_since_ns: Cell::new(0),
            armed_at_ns: Cell::new(0),
        })
    }

    #[inline]
    pub(crate) fn note_work(&self) {
        self.idle_since_ns.set(0);
    }

    /// Whether the source has been without work for its whole window.
    pub(crate) fn is_window_over(&self, now_ns: u64) -> bool {
        let since = self.idle_since_ns.get();
        if since == 0 {
            self.idle_since_ns.set(now_ns.max(1));
            return self.window_ns.get() == 0;
        }
        now_ns - since >= self.window_ns.get()
    }

    pub(crate) fn note_armed(&self, now_ns: u64) {
        self.armed_at_ns.set(now_ns);
        self.is_active.set(false);
    }

    /// Adapts the window after an event has ended the sleep.
    pub(crate) fn note_event(&self, window: PollWindow, now_ns: u64) {
        let slept = now_ns.saturating_sub(self.armed_at_ns.get());
        self.window_ns.set(window.after_sleep(self.window_ns.get(), slept));
    }
}

/// Keeps a source registered with its core until dropped. Usually a field of the source itself.
pub struct SourceHandle {
    core: Core,
    registered: Rc<Registered>,
}

impl SourceHandle {
    pub(crate) fn new(core: Core, registered: Rc<Registered>) -> SourceHandle {
        SourceHandle { core, registered }
    }

    /// Makes the core flush and poll the source in this turn; called after a push. Cheap while the
    /// source is active.
    #[inline]
    pub fn activate(&self) {
        if !self.registered.is_active.get() {
            self.core.activate(&self.registered);
        }
    }
}

impl Drop for SourceHandle {
    fn drop(&mut self) {
        self.core.forget_source(&self.registered);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_window_grows_while_work_comes_soon_and_shrinks_to_nothing_while_it_does_not() {
        let window = PollWindow::up_to(80);
        let mut ns = window.start_ns;
        for expected in [20, 40, 80, 80] {
            ns = window.after_sleep(ns, 80);
            assert_eq!(ns, expected);
        }
        for expected in [40, 20, 10, 0, 0] {
            ns = window.after_sleep(ns, 81);
            assert_eq!(ns, expected);
        }
        assert_eq!(window.after_sleep(0, 1), 10);
        assert_eq!(PollWindow::up_to(0).after_sleep(0, 0), 0);
    }
}
