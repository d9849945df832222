//! A device queue for a program without a reactor: the operations that the C API needs beyond
//! [`Queue`].
//!
//! The caller owns the slots and the list of waiting requests. It may move the queue between
//! threads between calls, and may block in it.

use block::{IoResult, Queue};
use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// A queue on which its caller may block, from any thread.
pub trait DirectQueue: Queue + Send {
    /// Kicks, then waits until about `at_least` operations have completed, so that [`Queue::reap`]
    /// is worth a call. It may return early without a completion. The caller reaps, and calls again
    /// for the rest.
    ///
    /// An event queue sleeps. A poll queue spins, in the kernel if the kernel can poll the drive.
    ///
    /// `signal_mask` is the thread's signal mask while it sleeps, as in `ppoll(2)`.
    ///
    /// # Errors
    /// `ETIME` when `timeout` has passed, `EINTR` when a signal was handled.
    fn wait(
        &mut self,
        at_least: u32,
        timeout: Option<Duration>,
        signal_mask: Option<&libc::sigset_t>,
    ) -> io::Result<()>;

    /// As [`Queue::push`], for requests that only zoned devices support.
    ///
    /// An `Err` ends the operation at once: its slot is free again and no completion follows. A
    /// device without zones returns [`block::IoError::Unsupported`].
    ///
    /// # Safety
    /// All memory that a [`ZoneRequest::Report`] points at stays valid until the completion has
    /// been reaped.
    unsafe fn push_zone(&mut self, slot: u32, req: ZoneRequest) -> IoResult;
}

/// A request to a zoned device. An offset in bytes names the zone that contains it.
#[derive(Clone, Copy, Debug)]
pub enum ZoneRequest {
    /// Describes up to `max` zones, from the one at `offset` on.
    Report {
        /// A byte of the first zone.
        offset: u64,
        /// Memory for `max` descriptions.
        zones: *mut Zone,
        /// Maximum number of zones to describe.
        max: u32,
        /// Receives the number of described zones before the operation completes.
        reported: *mut u32,
    },
    /// Changes the state of the zone at `offset`.
    Manage(ZoneAction, u64),
    /// Changes the state of all zones that permit it.
    ManageAll(ZoneAction),
}

// SAFETY: the pointers belong to the owner of the request, on any thread.
unsafe impl Send for ZoneRequest {}

/// A change of a zone's state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ZoneAction {
    /// To closed.
    Close,
    /// To full.
    Finish,
    /// To explicitly open.
    Open,
    /// To empty: the data is lost.
    Reset,
}

/// A zone, laid out as `struct blkio_zone` of `blkio.h`. All sizes are bytes.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Zone {
    /// First byte.
    pub start: u64,
    /// Length up to the next zone.
    pub len: u64,
    /// The part of `len` that can hold data.
    pub capacity: u64,
    /// Position of the next write, from the start of the device.
    pub write_pointer: u64,
    /// 1 conventional, 2 sequential writes required, 3 sequential writes preferred.
    pub zone_type: u8,
    /// 1 empty, 2 implicitly open, 3 explicitly open, 4 closed, 13 read-only, 14 full, 15 offline.
    pub zone_state: u8,
    /// 1 when the device requests a reset of the zone.
    pub reset: u8,
    /// Reserved.
    pub reserved: [u8; 29],
}

/// Spins briefly before a sleep, for a peer that answers faster than a thread falls asleep and
/// wakes up. The window grows while spinning finds completions, and shrinks to nothing while it
/// does not, for example when the peer needs this very processor.
#[derive(Debug)]
pub struct Spin {
    window_ns: u64,
    /// Waits without spinning since the last try.
    skipped: u32,
    /// Number of waits without spinning before the next try.
    retry_after: u32,
}

impl Spin {
    /// Longest window, and the first: long enough for a peer that has to be woken, as it may stay
    /// awake from then on.
    const MOST_NS: u64 = 50_000;
    /// Shortest window.
    const LEAST_NS: u64 = 2_000;
    /// After spinning has stopped, one wait in this many tries again; the number doubles after each
    /// failed try.
    const RETRY: u32 = 64;
    const MOST_RETRY: u32 = 4096;

    /// Starts with spinning enabled.
    pub const fn new() -> Spin {
        Spin { window_ns: Self::MOST_NS, skipped: 0, retry_after: Self::RETRY }
    }

    /// Spins until `has_ended`. Returns `false` when it is time to sleep.
    pub fn until(&mut self, timeout: Option<Duration>, mut has_ended: impl FnMut() -> bool) -> bool {
        if self.window_ns == 0 {
            self.skipped += 1;
            if self.skipped < self.retry_after {
                return has_ended();
            }
            (self.window_ns, self.skipped) = (Self::MOST_NS, 0);
            self.retry_after = (self.retry_after * 2).min(Self::MOST_RETRY);
        }
        let window = Duration::from_nanos(self.window_ns).min(timeout.unwrap_or(Duration::MAX));
        let start = Instant::now();
        while !has_ended() {
            if start.elapsed() >= window {
                // A quarter: after a whole window without a completion, more spinning is unlikely
                // to help.
                self.window_ns = if self.window_ns > Self::LEAST_NS { self.window_ns / 4 } else { 0 };
                return false;
            }
            std::hint::spin_loop();
        }
        self.window_ns = (self.window_ns * 2).min(Self::MOST_NS);
        self.retry_after = Self::RETRY;
        true
    }
}

impl Default for Spin {
    fn default() -> Spin {
        Spin::new()
    }
}

/// [`DirectQueue::wait`] for a queue whose completions raise its event: kick, arm, sleep on the
/// event, disarm.
///
/// # Errors
/// As [`DirectQueue::wait`].
pub fn sleep_on_event(
    queue: &mut (impl Queue + ?Sized),
    timeout: Option<Duration>,
    signal_mask: Option<&libc::sigset_t>,
) -> io::Result<()> {
    queue.kick();
    let result = if queue.arm() {
        let fd = queue.event_fd().expect("a queue that can be armed has an event");
        poll_readable(fd, timeout, signal_mask)
    } else {
        Ok(())
    };
    queue.disarm();
    result
}

/// Waits until the eventfd `fd` is signalled, and resets it.
pub fn poll_readable(
    fd: RawFd,
    timeout: Option<Duration>,
    signal_mask: Option<&libc::sigset_t>,
) -> io::Result<()> {
    poll_events(fd, libc::POLLIN, timeout, signal_mask)?;
    let mut counter = 0u64;
    let bytes = libc::iovec { iov_base: (&raw mut counter).cast(), iov_len: size_of::<u64>() };
    // A server that shares the event may have reset it already and set it to blocking mode.
    // SAFETY: eight bytes of our own.
    unsafe { libc::preadv2(fd, &raw const bytes, 1, -1, libc::RWF_NOWAIT) };
    Ok(())
}

/// Waits until `fd` has any of `events` (as in `poll(2)`) or its other end is closed.
pub fn poll_events(
    fd: RawFd,
    events: libc::c_short,
    timeout: Option<Duration>,
    signal_mask: Option<&libc::sigset_t>,
) -> io::Result<()> {
    poll_any(&mut [libc::pollfd { fd, events, revents: 0 }], timeout, signal_mask)
}

/// As [`poll_events`], for any of `wanted`; negative descriptors are ignored.
pub fn poll_any(
    wanted: &mut [libc::pollfd],
    timeout: Option<Duration>,
    signal_mask: Option<&libc::sigset_t>,
) -> io::Result<()> {
    let timeout = timeout.map(|t| libc::timespec {
        tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: t.subsec_nanos().into(),
    });
    let timeout = timeout.as_ref().map_or(std::ptr::null(), |t| &raw const *t);
    let mask = signal_mask.map_or(std::ptr::null(), |m| &raw const *m);
    // SAFETY: the structures live through the call.
    match unsafe { libc::ppoll(wanted.as_mut_ptr(), wanted.len() as libc::nfds_t, timeout, mask) } {
        0 => Err(io::Error::from_raw_os_error(libc::ETIME)),
        count if count < 0 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn looks_go_away_while_they_find_nothing_and_come_back_when_one_does() {
        let mut spin = Spin::new();
        for expected in [12_500, 3_125, 781, 0] {
            assert!(!spin.until(None, || false));
            assert_eq!(spin.window_ns, expected);
        }
        let mut looks = 0;
        while spin.window_ns == 0 {
            let mut asked = 0;
            spin.until(None, || {
                asked += 1;
                asked > 1
            });
            looks += 1;
        }
        assert_eq!((looks, spin.window_ns), (Spin::RETRY, Spin::MOST_NS));
    }

    #[test]
    fn a_look_is_no_longer_than_the_timeout() {
        let mut spin = Spin { window_ns: u64::MAX, ..Spin::new() };
        assert!(!spin.until(Some(Duration::ZERO), || false));
    }
}
