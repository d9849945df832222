//! A descriptor that becomes readable when a socket has an event for its core.
//!
//! A core watches an armed source for edges with a persistent poll, and reads the socket of an
//! active one without notification. If it watched the socket itself, each message to a busy
//! connection would cost a redundant completion. So an epoll instance stands in between. It watches
//! the socket only while the source is armed: for bytes to read, for room to write, or for both.
//! The core can watch the epoll instance all the time.
//!
//! (A condition that already holds when its event is enabled counts as an edge: the kernel checks
//! on each change.)

use std::cell::Cell;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};

/// Watches one socket on behalf of one source.
pub struct Readiness {
    epoll: OwnedFd,
    socket: RawFd,
    /// The events watched for now.
    events: Cell<u32>,
}

impl Readiness {
    /// Creates an instance without events. `socket` must outlive it.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    pub fn new(socket: RawFd) -> io::Result<Readiness> {
        // SAFETY: the new descriptor is ours alone.
        let epoll = unsafe {
            let fd = libc::epoll_create1(libc::EPOLL_CLOEXEC);
            if fd < 0 {
                return Err(io::Error::last_os_error());
            }
            OwnedFd::from_raw_fd(fd)
        };
        let readiness = Readiness { epoll, socket, events: Cell::new(0) };
        readiness.control(libc::EPOLL_CTL_ADD, libc::EPOLLET as u32)?;
        Ok(readiness)
    }

    /// The descriptor to be watched.
    pub fn event_fd(&self) -> RawFd {
        self.epoll.as_raw_fd()
    }

    /// Enables events for bytes to read or room to write, even if the condition holds already.
    /// Returns `false` when the system refuses: the source must keep polling.
    #[inline]
    pub fn watch(&self, for_bytes: bool, for_room: bool) -> bool {
        let bytes = if for_bytes { libc::EPOLLIN } else { 0 } as u32;
        let room = if for_room { libc::EPOLLOUT } else { 0 } as u32;
        // An event stays on the instance's ready list until it is collected, and an entry already
        // there raises no new edge.
        let mut event = libc::epoll_event { events: 0, u64: 0 };
        // SAFETY: `event` is alive and there is room for one.
        unsafe { libc::epoll_wait(self.epoll.as_raw_fd(), &raw mut event, 1, 0) };
        self.set(bytes | room)
    }

    /// Disables all events but the end of the connection.
    #[inline]
    pub fn ignore(&self) {
        // If the system refuses, a few unneeded events follow.
        let _ = self.set(0);
    }

    fn set(&self, events: u32) -> bool {
        if events == self.events.get() {
            return true;
        }
        // Edge-triggered: the end of the connection is always reported, and must not stay on the
        // list.
        let is_done = self.control(libc::EPOLL_CTL_MOD, events | libc::EPOLLET as u32).is_ok();
        if is_done {
            self.events.set(events);
        }
        is_done
    }

    fn control(&self, operation: libc::c_int, events: u32) -> io::Result<()> {
        let mut event = libc::epoll_event { events, u64: 0 };
        // SAFETY: `event` is alive; both descriptors are open.
        let result =
            unsafe { libc::epoll_ctl(self.epoll.as_raw_fd(), operation, self.socket, &raw mut event) };
        if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    /// Reports whether there was an edge since the last call, as a core sees it.
    struct Edges(io_uring::IoUring);

    impl Edges {
        fn of(readiness: &Readiness) -> Edges {
            let mut ring = io_uring::IoUring::new(4).unwrap();
            let fd = io_uring::types::Fd(readiness.event_fd());
            let poll = io_uring::opcode::PollAdd::new(fd, libc::POLLIN as u32).multi(true).build();
            // SAFETY: a poll points at nothing.
            unsafe { ring.submission().push(&poll) }.unwrap();
            ring.submit().unwrap();
            Edges(ring)
        }

        fn take(&mut self) -> bool {
            self.0.submit().unwrap();
            self.0.completion().count() > 0
        }
    }

    #[test]
    fn bytes_and_room_are_events_only_while_they_are_asked_for() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let readiness = Readiness::new(ours.as_raw_fd()).unwrap();
        let mut edges = Edges::of(&readiness);
        theirs.write_all(b"x").unwrap();
        assert!(!edges.take());
        assert!(readiness.watch(true, false) && edges.take());
        readiness.ignore();
        theirs.write_all(b"x").unwrap();
        assert!(!edges.take());
        ours.read_exact(&mut [0; 2]).unwrap();
        assert!(readiness.watch(true, false) && !edges.take());
        theirs.write_all(b"x").unwrap();
        assert!(edges.take());
        readiness.ignore();
        assert!(readiness.watch(false, true) && edges.take(), "there is room");
        readiness.ignore();
        while ours.write(&[0; 4096]).is_ok() {}
        assert!(readiness.watch(false, true) && !edges.take());
        while !edges.take() {
            theirs.read_exact(&mut [0; 4096]).unwrap();
        }
    }

    #[test]
    fn a_condition_that_already_holds_is_an_event_each_time_it_is_enabled() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let readiness = Readiness::new(ours.as_raw_fd()).unwrap();
        let mut edges = Edges::of(&readiness);
        theirs.write_all(b"x").unwrap();
        for round in 0..5 {
            assert!(readiness.watch(true, false) && edges.take(), "round {round}");
            readiness.ignore();
            assert!(!edges.take(), "round {round}");
        }
        drop(theirs);
        assert!(edges.take(), "the end of the connection is an event, asked for or not");
        readiness.ignore();
        assert!(readiness.watch(true, false) && edges.take());
    }
}
