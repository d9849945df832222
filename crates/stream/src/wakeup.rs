//! An eventfd that is raised when the socket of a queue is ready.
//!
//! A sleeping caller of a queue reads an eventfd, but events occur on a socket. A small io_uring
//! connects both. While the queue is armed it polls the socket, and a completion raises the
//! eventfd. A poll request stays until it fires, so arming repeatedly costs one request per event,
//! not one per arming. No data goes through the ring, so it cannot access a caller's memory.

use io_uring::{IoUring, opcode::PollAdd, types::Fd};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{Ordering, fence};
use vmm_sys_util::eventfd::EventFd;

/// The polled events, which identify the completions.
const WAYS: [libc::c_short; 2] = [libc::POLLIN, libc::POLLOUT];

/// The eventfd and its ring.
pub struct Wakeup {
    ring: IoUring,
    event: EventFd,
    /// The [`WAYS`] that the kernel watches now.
    is_watched: [bool; WAYS.len()],
}

impl Wakeup {
    /// Creates a wakeup without a socket.
    ///
    /// # Errors
    /// When io_uring or a descriptor is not available.
    pub fn new() -> io::Result<Wakeup> {
        let event = EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)?;
        let mut wakeup = Wakeup { ring: ring(&event)?, event, is_watched: [false; WAYS.len()] };
        wakeup.disarm();
        Ok(wakeup)
    }

    /// Forgets the socket: the next one uses the same eventfd.
    pub fn renew(&mut self) -> io::Result<()> {
        self.ring = ring(&self.event)?;
        self.is_watched = [false; WAYS.len()];
        self.disarm();
        Ok(())
    }

    /// Resets the eventfd.
    pub fn lower(&self) {
        // Fails only when it is not raised.
        let _ = self.event.read();
    }

    /// Another handle of the eventfd, for other events.
    pub fn share_event(&self) -> io::Result<EventFd> {
        self.event.try_clone()
    }

    /// The non-blocking eventfd.
    pub fn event_fd(&self) -> RawFd {
        self.event.as_raw_fd()
    }

    /// Enables the event for bytes to read from `socket`, or for room to write if `wants_room`.
    /// Returns `false` when it may be ready already.
    pub fn arm(&mut self, socket: RawFd, wants_room: bool) -> bool {
        for fired in self.ring.completion() {
            if let Some(is_watched) = self.is_watched.get_mut(fired.user_data() as usize) {
                *is_watched = false;
            }
        }
        self.ring.completion().enable_eventfd();
        // The kernel adds a completion and then reads the flag; this side sets the flag and then
        // looks for completions.
        fence(Ordering::SeqCst);
        for (way, is_wanted) in [true, wants_room].into_iter().enumerate() {
            if is_wanted && !self.is_watched[way] {
                let poll = PollAdd::new(Fd(socket), WAYS[way] as u32).build().user_data(way as u64);
                // SAFETY: a poll points at nothing.
                let pushed = unsafe { self.ring.submission().push(&poll) };
                pushed.expect("the ring has room for every way");
                self.is_watched[way] = true;
            }
        }
        // Entries that the kernel does not accept now stay in the ring for the next time.
        let is_taken = self.ring.submission().is_empty() || self.ring.submit().is_ok();
        is_taken && self.ring.submission().is_empty() && self.ring.completion().is_empty()
    }

    /// Disables the event.
    pub fn disarm(&mut self) {
        self.ring.completion().disable_eventfd();
    }
}

fn ring(event: &EventFd) -> io::Result<IoUring> {
    // Any thread may use the queue next, so the ring uses neither a single issuer nor deferred
    // work.
    let ring = IoUring::builder().dontfork().build(4)?;
    ring.submitter().register_eventfd(event.as_raw_fd())?;
    Ok(ring)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;

    /// Waits for the event, and resets it.
    fn is_raised(wakeup: &Wakeup, timeout_ms: i32) -> bool {
        let mut entry = libc::pollfd { fd: wakeup.event_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: the entry outlives the call.
        let is_raised = unsafe { libc::poll(&raw mut entry, 1, timeout_ms) } == 1;
        wakeup.lower();
        is_raised
    }

    #[test]
    fn an_armed_wakeup_rises_with_each_event_and_a_disarmed_one_does_not() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let mut wakeup = Wakeup::new().unwrap();
        let mut byte = [0];
        for _ in 0..3 {
            assert!(wakeup.arm(ours.as_raw_fd(), false));
            assert!(!is_raised(&wakeup, 10));
            theirs.write_all(&[1]).unwrap();
            assert!(is_raised(&wakeup, 10_000));
            wakeup.disarm();
            (&ours).read_exact(&mut byte).unwrap();
        }
        assert!(wakeup.arm(ours.as_raw_fd(), false));
        wakeup.disarm();
        theirs.write_all(&[1]).unwrap();
        assert!(!is_raised(&wakeup, 50));
        assert!(!wakeup.arm(ours.as_raw_fd(), false), "there is something to read");
        (&ours).read_exact(&mut byte).unwrap();
        wakeup.arm(ours.as_raw_fd(), false);
        drop(theirs);
        assert!(is_raised(&wakeup, 10_000), "the end of the connection is an event");
    }

    #[test]
    fn it_rises_for_room_in_the_socket_and_on_another_thread() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        ours.set_nonblocking(true).unwrap();
        let mut filled = 0;
        while let Ok(sent) = (&ours).write(&[0; 65536]) {
            filled += sent;
        }
        let mut wakeup = Wakeup::new().unwrap();
        // The thread that armed it has ended before the event.
        let wakeup = std::thread::spawn(move || {
            let mut armed = wakeup.arm(ours.as_raw_fd(), true);
            while !armed {
                armed = wakeup.arm(ours.as_raw_fd(), true);
            }
            (wakeup, ours)
        });
        let (mut wakeup, ours) = wakeup.join().unwrap();
        let reader = std::thread::spawn(move || theirs.read_exact(&mut vec![0; filled]).map(|()| theirs));
        assert!(is_raised(&wakeup, 10_000));
        let _theirs = reader.join().unwrap().unwrap();
        while wakeup.arm(ours.as_raw_fd(), true) {
            assert!(is_raised(&wakeup, 10_000), "there is room");
        }
    }
}
