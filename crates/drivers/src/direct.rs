//! A leaf's queue for a program without a reactor: what the C API needs of it beyond [`Queue`].
//!
//! The caller owns slots and waiting line, may hand the queue from one thread to another between calls, and
//! may sleep in it.

use block::{IoResult, Queue};
use std::io;
use std::os::fd::RawFd;
use std::time::{Duration, Instant};

/// A queue that its caller may block on, from whatever thread has it at the moment.
pub trait DirectQueue: Queue + Send {
    /// Kicks, then waits until [`Queue::reap`] is worth a call: about `at_least` operations have ended. It may
    /// return early and for nothing; the caller reaps, and calls again for what is still missing.
    ///
    /// An event queue sleeps. A poll queue spins, in the kernel where the kernel can poll the drive.
    ///
    /// `signal_mask`, if any, is the thread's signal mask while it sleeps, as in `ppoll(2)`.
    ///
    /// # Errors
    /// `ETIME` when `timeout` has passed, `EINTR` when a signal was handled.
    fn wait(
        &mut self,
        at_least: u32,
        timeout: Option<Duration>,
        signal_mask: Option<&libc::sigset_t>,
    ) -> io::Result<()>;

    /// As [`Queue::push`], for what only zoned devices have.
    ///
    /// An `Err` ends the operation at once: its slot is free again and no completion follows. A device without
    /// zones answers [`block::IoError::Unsupported`].
    ///
    /// # Safety
    /// What a [`ZoneRequest::Report`] points at stays valid until the completion has been reaped.
    unsafe fn push_zone(&mut self, slot: u32, req: ZoneRequest) -> IoResult;
}

/// What is asked of a zoned device. Offsets are bytes and name the zone that they lie in.
#[derive(Clone, Copy, Debug)]
pub enum ZoneRequest {
    /// Describes up to `max` zones, from the one at `offset` on.
    Report {
        /// A byte of the first zone.
        offset: u64,
        /// Where `max` descriptions have room.
        zones: *mut Zone,
        /// Most zones to describe.
        max: u32,
        /// Where the number of zones that were described goes before the operation completes.
        reported: *mut u32,
    },
    /// Changes the state of the zone at `offset`.
    Manage(ZoneAction, u64),
    /// Changes the state of all zones for which that makes sense.
    ManageAll(ZoneAction),
}

// SAFETY: the pointers belong to whoever owns the request, on whatever thread that is.
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
    /// From this zone to the next.
    pub len: u64,
    /// How much of `len` holds data.
    pub capacity: u64,
    /// Where the next write goes, from the start of the device.
    pub write_pointer: u64,
    /// 1 conventional, 2 sequential writes required, 3 sequential writes preferred.
    pub zone_type: u8,
    /// 1 empty, 2 implicitly open, 3 explicitly open, 4 closed, 13 read-only, 14 full, 15 offline.
    pub zone_state: u8,
    /// 1 when the device asks for a reset of the zone.
    pub reset: u8,
    /// For later.
    pub reserved: [u8; 29],
}

/// A short look before a sleep, for a peer that answers faster than a thread falls asleep and wakes up again. It
/// grows while it finds something and goes away while it does not, as where the peer needs this very processor.
#[derive(Debug)]
pub struct Spin {
    window_ns: u64,
    /// Waits without a look since the last one.
    skipped: u32,
    /// So many waits go without a look before it is tried again.
    retry_after: u32,
}

impl Spin {
    /// Longest look, and the first: long enough for a peer that has to be woken, as it may stay awake from then on.
    const MOST_NS: u64 = 50_000;
    /// Shortest look.
    const LEAST_NS: u64 = 2_000;
    /// Where looks have gone away, one wait in this many tries again; twice as many after each try in vain.
    const RETRY: u32 = 64;
    const MOST_RETRY: u32 = 4096;

    /// Looks at first.
    pub const fn new() -> Spin {
        Spin { window_ns: Self::MOST_NS, skipped: 0, retry_after: Self::RETRY }
    }

    /// Looks until `has_ended`; `false` when it is time to sleep.
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
                // A quarter: what did not come in the whole window is not worth much more of it.
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

/// [`DirectQueue::wait`] for a queue whose completions raise its event: kick, arm, sleep on the event, disarm.
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

/// Waits until the eventfd `fd` has been raised, and lowers it.
///
/// # Errors
/// As [`DirectQueue::wait`].
pub fn poll_readable(
    fd: RawFd,
    timeout: Option<Duration>,
    signal_mask: Option<&libc::sigset_t>,
) -> io::Result<()> {
    poll_events(fd, libc::POLLIN, timeout, signal_mask)?;
    let mut counter = 0u64;
    let bytes = libc::iovec { iov_base: (&raw mut counter).cast(), iov_len: size_of::<u64>() };
    // A server that has the event, too, may have lowered it already and made it block.
    // SAFETY: eight bytes of our own.
    unsafe { libc::preadv2(fd, &raw const bytes, 1, -1, libc::RWF_NOWAIT) };
    Ok(())
}

/// Waits until any of `events` (as in `poll(2)`) holds of `fd`, or its other end is gone.
///
/// # Errors
/// As [`DirectQueue::wait`].
pub fn poll_events(
    fd: RawFd,
    events: libc::c_short,
    timeout: Option<Duration>,
    signal_mask: Option<&libc::sigset_t>,
) -> io::Result<()> {
    poll_any(&mut [libc::pollfd { fd, events, revents: 0 }], timeout, signal_mask)
}

/// As [`poll_events`], until it is so for any of `wanted`; negative descriptors are left out.
///
/// # Errors
/// As [`DirectQueue::wait`].
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
