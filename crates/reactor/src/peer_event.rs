//! Signals an eventfd that another process holds too, without ever waiting for that process.
//!
//! An eventfd that was received from a peer, or sent to one, shares its counter and its flags with
//! the peer. The peer can fill the counter and clear `O_NONBLOCK` at any moment; then `write(2)`
//! blocks. The other ways to write do not help:
//!
//! * `poll(2)` before the write leaves a window.
//! * `pwritev2(2)` has no `RWF_NOWAIT` for eventfds.
//! * io_uring reads `O_NONBLOCK` before it calls the eventfd's `write`, which reads the flag again.
//!
//! The kernel itself signals eventfds with `eventfd_signal`, which never waits: a full counter
//! stays full, and watchers are woken. An io_uring calls it for its registered eventfd whenever it
//! posts a completion. So each [`PeerEvent`] has a ring of one entry and submits only no-ops: one
//! system call a signal, as for a write. See `io_uring_register_eventfd(3)`.

use io_uring::{IoUring, opcode};
use std::cell::RefCell;
use std::io;
use std::mem::ManuallyDrop;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Limit of rings that a thread keeps for future events. Making one takes the kernel as long as
/// hundreds of signals.
const MAX_SPARE: usize = 16;
/// Attempts for one signal. The kernel refuses a no-op only while it lacks memory.
const MAX_ATTEMPTS: usize = 16;

thread_local! {
    static SPARE: RefCell<Vec<IoUring>> = const { RefCell::new(Vec::new()) };
}

/// An eventfd shared with a peer, for signals only.
///
/// Keeps the event alive, not the descriptor that it was made from.
pub struct PeerEvent {
    /// Taken only by `drop`.
    ring: ManuallyDrop<IoUring>,
}

impl PeerEvent {
    /// Prepares to signal `event`.
    ///
    /// # Errors
    /// `InvalidInput` if `event` is not an eventfd; other kinds if the kernel refuses an io_uring.
    pub fn new(event: BorrowedFd<'_>) -> io::Result<PeerEvent> {
        let spare = SPARE.with_borrow_mut(Vec::pop);
        let ring = match spare {
            Some(ring) => ring,
            None => IoUring::new(1)?,
        };
        ring.submitter().register_eventfd(event.as_raw_fd())?;
        Ok(PeerEvent { ring: ManuallyDrop::new(ring) })
    }

    /// Adds 1 to the event's counter, unless it is full, and wakes its watchers. Never blocks.
    #[inline]
    pub fn signal(&mut self) {
        let nop = opcode::Nop::new().build();
        // A full submission queue still holds an earlier no-op, which signals too.
        // SAFETY: a no-op points to no memory.
        let _ = unsafe { self.ring.submission().push(&nop) };
        for _ in 0..MAX_ATTEMPTS {
            if self.ring.submit().is_ok() {
                break;
            }
        }
        self.ring.completion().for_each(drop);
    }
}

impl Drop for PeerEvent {
    fn drop(&mut self) {
        // SAFETY: nothing uses the ring after this.
        let mut ring = unsafe { ManuallyDrop::take(&mut self.ring) };
        let is_idle = ring.submission().is_empty() && ring.submitter().unregister_eventfd().is_ok();
        // A thread that ends has dropped its spare rings.
        let _ = SPARE.try_with(|spare| {
            let mut spare = spare.borrow_mut();
            if is_idle && spare.len() < MAX_SPARE {
                spare.push(ring);
            }
        });
    }
}

impl std::fmt::Debug for PeerEvent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PeerEvent").finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::{AsFd, FromRawFd};
    use std::sync::mpsc;
    use std::time::Duration;

    fn blocking_eventfd() -> File {
        // SAFETY: a fresh descriptor.
        unsafe { File::from_raw_fd(libc::eventfd(0, libc::EFD_CLOEXEC)) }
    }

    fn counter(mut event: &File) -> u64 {
        let mut bytes = [0; 8];
        event.read_exact(&mut bytes).unwrap();
        u64::from_ne_bytes(bytes)
    }

    #[test]
    fn a_full_counter_of_a_blocking_eventfd_blocks_no_signal() {
        let event = blocking_eventfd();
        let full = u64::MAX - 1;
        (&event).write_all(&full.to_ne_bytes()).unwrap();
        let (done, ended) = mpsc::channel();
        let peer = event.try_clone().unwrap();
        // A thread of its own: a signal that blocks fails the test instead of hanging it.
        std::thread::spawn(move || {
            let mut signal = PeerEvent::new(peer.as_fd()).unwrap();
            for _ in 0..1000 {
                signal.signal();
            }
            done.send(()).unwrap();
        });
        ended.recv_timeout(Duration::from_secs(20)).expect("the signal blocks");
        // The kernel's own signals may take the counter to the very end.
        assert!(counter(&event) >= full);
    }

    #[test]
    fn every_signal_counts_and_wakes_a_reader() {
        let event = blocking_eventfd();
        let mut signal = PeerEvent::new(event.as_fd()).unwrap();
        for _ in 0..5 {
            signal.signal();
        }
        assert_eq!(counter(&event), 5);
        let reader = event.try_clone().unwrap();
        let waits = std::thread::spawn(move || counter(&reader));
        signal.signal();
        assert_eq!(waits.join().unwrap(), 1);
    }

    #[test]
    fn a_ring_that_is_used_again_signals_the_new_event_only() {
        let (first, second) = (blocking_eventfd(), blocking_eventfd());
        PeerEvent::new(first.as_fd()).unwrap().signal();
        let mut signal = PeerEvent::new(second.as_fd()).unwrap();
        signal.signal();
        assert_eq!((counter(&first), counter(&second)), (1, 1));
        drop(second);
        // The event lives on without its descriptor.
        signal.signal();
        let mut poll = libc::pollfd { fd: first.as_raw_fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: one live entry.
        assert_eq!(unsafe { libc::poll(&raw mut poll, 1, 0) }, 0, "the first event was signalled again");
    }

    #[test]
    fn anything_but_an_eventfd_is_refused() {
        let (reader, _writer) = std::os::unix::net::UnixStream::pair().unwrap();
        for fd in [reader.as_fd(), File::open("/dev/null").unwrap().as_fd()] {
            let error = PeerEvent::new(fd).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
        }
    }

    #[test]
    #[ignore = "a measurement: prints how long a signal takes"]
    fn speed() {
        let event = blocking_eventfd();
        let mut signal = PeerEvent::new(event.as_fd()).unwrap();
        let one = 1u64;
        const N: u32 = 1_000_000;
        for _ in 0..2 {
            let start = std::time::Instant::now();
            (0..N).for_each(|_| signal.signal());
            let by_signal = start.elapsed() / N;
            let start = std::time::Instant::now();
            for _ in 0..N {
                let mut fd = libc::pollfd { fd: event.as_raw_fd(), events: libc::POLLOUT, revents: 0 };
                // SAFETY: both work on live local variables.
                unsafe {
                    libc::poll(&raw mut fd, 1, 0);
                    libc::write(fd.fd, (&raw const one).cast(), 8);
                }
            }
            println!("signal {by_signal:?}, poll and write {:?}", start.elapsed() / N);
        }
    }
}
