//! The stop signal of a control thread, and waiting with it.

use crate::eventfd::eventfd;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::time::Duration;

/// Raised to end a control thread, or to give it orders.
pub struct StopSignal {
    event: OwnedFd,
}

impl StopSignal {
    /// A signal that is not raised.
    ///
    /// # Errors
    /// When the system has no descriptor left.
    pub fn new() -> io::Result<StopSignal> {
        Ok(StopSignal { event: eventfd()? })
    }

    /// Raises the signal, for every thread that waits for it.
    pub fn raise(&self) {
        let one = 1u64;
        // SAFETY: writes 8 bytes from a live variable; the counter is far from full.
        unsafe { libc::write(self.event.as_raw_fd(), (&raw const one).cast(), 8) };
    }

    /// Takes the signal back, for a thread that has seen its orders.
    pub fn lower(&self) {
        let mut count = 0u64;
        // SAFETY: reads 8 bytes into a live variable; the descriptor is non-blocking.
        unsafe { libc::read(self.event.as_raw_fd(), (&raw mut count).cast(), 8) };
    }

    /// Waits for the signal, at most `timeout`. Returns whether it is raised.
    pub fn wait(&self, timeout: Duration) -> bool {
        let mut fds = [readable(self.event.as_raw_fd())];
        poll(&mut fds, timeout.as_millis() as libc::c_int);
        fds[0].revents != 0
    }

    /// Waits until `fd` is readable (or has failed). Returns `false` once the signal is raised.
    pub fn wait_readable(&self, fd: RawFd) -> bool {
        self.wait_any([fd]).is_some()
    }

    /// As [`StopSignal::wait_readable`], at most `timeout` if there is one.
    pub fn wait_readable_for(&self, fd: RawFd, timeout: Option<Duration>) -> Wait {
        let Some(timeout) = timeout else {
            return if self.wait_readable(fd) { Wait::Readable } else { Wait::Stopped };
        };
        let mut fds = [readable(self.event.as_raw_fd()), readable(fd)];
        poll(&mut fds, timeout.as_millis() as libc::c_int);
        match fds.map(|fd| fd.revents != 0) {
            [true, _] => Wait::Stopped,
            [false, true] => Wait::Readable,
            [false, false] => Wait::TimedOut,
        }
    }

    /// Waits until one of `fds` is readable (or has failed). Returns its index, or `None` once the
    /// signal is raised.
    pub fn wait_any<const N: usize>(&self, fds: [RawFd; N]) -> Option<usize> {
        let mut all: Vec<libc::pollfd> = Vec::with_capacity(N + 1);
        all.push(readable(self.event.as_raw_fd()));
        all.extend(fds.map(readable));
        loop {
            poll(&mut all, -1);
            if let Some(place) = all.iter().position(|fd| fd.revents != 0) {
                return place.checked_sub(1);
            }
        }
    }
}

/// The reason why a wait ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// The descriptor is readable.
    Readable,
    /// The time is over.
    TimedOut,
    /// The signal is raised.
    Stopped,
}

impl AsRawFd for StopSignal {
    /// Readable once the signal is raised.
    fn as_raw_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }
}

fn readable(fd: RawFd) -> libc::pollfd {
    libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
}

/// Waits until one of `fds` has a requested event, or for `timeout_ms` (-1: no timeout).
pub fn poll(fds: &mut [libc::pollfd], timeout_ms: libc::c_int) {
    // SAFETY: `fds` is a live list of the length that is given. A signal ends the wait early, as a
    // timeout.
    if unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout_ms) } < 0 {
        fds.iter_mut().for_each(|fd| fd.revents = 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixStream;

    #[test]
    fn the_stop_signal_ends_every_wait() {
        let stop = StopSignal::new().unwrap();
        let (ours, _theirs) = UnixStream::pair().unwrap();
        assert!(!stop.wait(Duration::ZERO));
        assert_eq!(stop.wait_readable_for(ours.as_raw_fd(), Some(Duration::ZERO)), Wait::TimedOut);
        stop.raise();
        assert_eq!(stop.wait_readable_for(ours.as_raw_fd(), None), Wait::Stopped);
        assert!(stop.wait(Duration::from_secs(9)) && !stop.wait_readable(ours.as_raw_fd()));
    }
}
