//! An io_uring in the best mode of the running kernel, with entries of normal size or the large
//! ones of pass-through commands.

use io_uring::{IoUring, cqueue, squeue, types};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

/// `IOSQE_FIXED_FILE`: the descriptor is an index into the ring's registered files.
pub(crate) const FIXED_FILE: squeue::Flags = squeue::Flags::from_bits_retain(1);

/// `IORING_ENTER_GETEVENTS`.
const ENTER_GETEVENTS: u32 = 1;

/// The setup flags to request. An older kernel returns `EINVAL` for unknown ones.
#[derive(Clone, Copy)]
enum Mode {
    /// 6.1: completions run on the core that owns the ring, only on request.
    OneThread,
    /// 5.19: no inter-processor interrupt per completion.
    Cooperative,
    /// 5.18: a refused entry does not block later ones.
    SubmitAll,
    Plain,
}

/// `IORING_ENTER_EXT_ARG`.
const ENTER_EXT_ARG: u32 = 8;

/// The kernel's size of a `sigset_t`: one bit for each of its 64 signals. The C library's type is
/// longer, and the kernel refuses its length. So `SubmitArgs` of the io-uring crate cannot carry a
/// mask.
const KERNEL_SIGSET_BYTES: u32 = 8;

/// `struct io_uring_getevents_arg` of `linux/io_uring.h`.
#[repr(C)]
struct WaitArgs {
    signal_mask: *const libc::sigset_t,
    signal_mask_bytes: u32,
    min_wait_us: u32,
    time: *const types::Timespec,
}

/// An entry of a completion ring, of any size.
pub trait Answer: cqueue::EntryMarker {
    /// The number that the submission carried.
    fn user_data(&self) -> u64;
    /// The result, or a negative error number.
    fn result(&self) -> i32;
}

impl Answer for cqueue::Entry {
    #[inline]
    fn user_data(&self) -> u64 {
        self.user_data()
    }

    #[inline]
    fn result(&self) -> i32 {
        self.result()
    }
}

impl Answer for cqueue::Entry32 {
    #[inline]
    fn user_data(&self) -> u64 {
        self.user_data()
    }

    #[inline]
    fn result(&self) -> i32 {
        self.result()
    }
}

/// A ring and the event of its completions.
pub(crate) struct Ring<S = squeue::Entry, C = cqueue::Entry>
where
    S: squeue::EntryMarker,
    C: cqueue::EntryMarker,
{
    pub uring: IoUring<S, C>,
    /// Whether the drive is polled for completions.
    pub is_polled: bool,
    /// Submitted entries without a completion.
    pub in_flight: u32,
    /// Queued entries for [`Ring::submit`].
    unsubmitted: u32,
    /// Whether completions may wait for the ring's owner to enter the kernel.
    is_deferred: bool,
    /// Signalled by completions. A ring with deferred completions (the best mode) never wakes a
    /// poll of its own descriptor, but does signal an eventfd.
    event: Option<OwnedFd>,
}

impl<S: squeue::EntryMarker, C: cqueue::EntryMarker> Ring<S, C> {
    /// Creates a ring for `entries` requests, used by the calling thread alone.
    ///
    /// # Errors
    /// The error of `io_uring_setup(2)` in the simplest mode: `EPERM` where io_uring is forbidden
    /// (`kernel.io_uring_disabled`, a seccomp filter), `ENOMEM` where `RLIMIT_MEMLOCK` is too
    /// small.
    pub fn new(entries: u32, is_polled: bool) -> io::Result<Self> {
        let mut refused = match build(entries, is_polled, Mode::OneThread) {
            Ok(uring) => return Ring::with_event(uring, is_polled, true),
            Err(error) => error,
        };
        for mode in [Mode::Cooperative, Mode::SubmitAll, Mode::Plain] {
            if refused.raw_os_error() != Some(libc::EINVAL) {
                break;
            }
            match build(entries, is_polled, mode) {
                Ok(uring) => {
                    let (in_flight, unsubmitted, is_deferred) = (0, 0, true);
                    return Ok(Ring { uring, is_polled, in_flight, unsubmitted, is_deferred, event: None });
                }
                Err(error) => refused = error,
            }
        }
        Err(refused)
    }

    /// Creates a ring for `entries` requests that may move between threads. It always has an event.
    pub fn for_any_thread(entries: u32, is_polled: bool) -> io::Result<Self> {
        // Work deferred to the submitting thread waits until that thread enters the kernel, which
        // it need not do after it has passed the ring on.
        let uring = match build(entries, is_polled, Mode::SubmitAll) {
            Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {
                build(entries, is_polled, Mode::Plain)?
            }
            result => result?,
        };
        Ring::with_event(uring, is_polled, false)
    }

    fn with_event(uring: IoUring<S, C>, is_polled: bool, is_deferred: bool) -> io::Result<Self> {
        let event = eventfd()?;
        uring.submitter().register_eventfd(event.as_raw_fd())?;
        let mut ring =
            Ring { uring, is_polled, in_flight: 0, unsubmitted: 0, is_deferred, event: Some(event) };
        ring.disarm();
        Ok(ring)
    }

    /// The descriptor that becomes readable at a completion while the ring is armed.
    pub fn event_fd(&self) -> RawFd {
        self.event.as_ref().map_or_else(|| self.uring.as_raw_fd(), AsRawFd::as_raw_fd)
    }

    /// Queues an entry for the next [`Ring::submit`].
    ///
    /// # Safety
    /// All memory that the entry points at stays valid until its completion.
    #[inline]
    pub unsafe fn push(&mut self, entry: &S) {
        // SAFETY: by contract.
        let result = unsafe { self.uring.submission().push(entry) };
        result.expect("the ring has room for every slot");
        self.in_flight += 1;
        self.unsubmitted += 1;
    }

    /// Submits queued entries and lets the kernel post deferred completions. Entries that cannot be
    /// submitted now stay for the next call.
    #[inline]
    pub fn submit(&mut self) {
        let get_events = self.is_polled || self.is_deferred;
        if let Err(error) = self.enter(0, get_events) {
            check(&error);
        }
    }

    #[inline]
    fn enter(&mut self, at_least: u32, get_events: bool) -> io::Result<()> {
        let flags = if get_events { ENTER_GETEVENTS } else { 0 };
        // SAFETY: without a mask no pointer is passed; what the entries point at is valid by the
        // contract of `push`.
        let submitted = unsafe {
            self.uring.submitter().enter::<libc::sigset_t>(self.unsubmitted, at_least, flags, None)
        }?;
        self.unsubmitted -= submitted as u32;
        Ok(())
    }

    /// Whether an entry waits for [`Ring::submit`].
    #[inline]
    pub fn has_unsubmitted(&self) -> bool {
        self.unsubmitted > 0
    }

    /// Enters the kernel if completions need that: a polled drive, deferred work, or entries that
    /// an earlier call did not submit.
    #[inline]
    pub fn look(&mut self) {
        if self.in_flight > 0 && (self.is_polled || self.is_held_back()) {
            self.submit();
        }
    }

    /// Reaps completions. A result shorter than `room` means that no more are waiting.
    #[inline]
    pub fn take<'a>(&mut self, room: &'a mut [MaybeUninit<C>]) -> &'a [C] {
        if self.in_flight == 0 {
            return &[];
        }
        let taken = self.uring.completion().fill(room);
        self.in_flight -= taken.len() as u32;
        taken
    }

    /// Enables the event. Returns `false` when a completion may be waiting already, or would raise
    /// no event.
    pub fn arm(&mut self) -> bool {
        if self.is_polled && self.in_flight > 0 {
            return false;
        }
        if self.event.is_some() {
            self.uring.completion().enable_eventfd();
            // The kernel adds work and then reads the flag; this side sets the flag and then looks
            // for work.
            fence(Ordering::SeqCst);
        }
        !self.is_held_back() && self.uring.completion().is_empty()
    }

    /// Disables the event: the ring is polled.
    pub fn disarm(&mut self) {
        if self.event.is_some() {
            self.uring.completion().disable_eventfd();
        }
    }

    /// Submits, and waits until `at_least` completions are in the ring, the timeout expires or a
    /// signal arrives.
    pub fn wait_for(
        &mut self,
        at_least: u32,
        timeout: Option<Duration>,
        signal_mask: Option<&libc::sigset_t>,
    ) -> io::Result<()> {
        if self.is_polled {
            return self.poll_for(timeout, signal_mask);
        }
        if signal_mask.is_some() && self.has_unsubmitted() {
            // A call that submits returns the number of submitted entries, and hides that a signal
            // ended its wait.
            self.submit();
        }
        let result = if timeout.is_none() && signal_mask.is_none() {
            self.enter(at_least, true)
        } else {
            self.enter_with(at_least, timeout, signal_mask)
        };
        match result {
            Err(error) if !matches!(error.raw_os_error(), Some(libc::ETIME | libc::EINTR)) => {
                check(&error);
                Ok(())
            }
            result => result,
        }
    }

    fn enter_with(
        &mut self,
        at_least: u32,
        timeout: Option<Duration>,
        signal_mask: Option<&libc::sigset_t>,
    ) -> io::Result<()> {
        let start = Instant::now();
        let time = timeout.map(types::Timespec::from);
        let args = WaitArgs {
            signal_mask: signal_mask.map_or(ptr::null(), ptr::from_ref),
            signal_mask_bytes: if signal_mask.is_some() { KERNEL_SIGSET_BYTES } else { 0 },
            min_wait_us: 0,
            time: time.as_ref().map_or(ptr::null(), ptr::from_ref),
        };
        let flags = ENTER_GETEVENTS | ENTER_EXT_ARG;
        // SAFETY: the entries were pushed under their own contract; mask and time outlive the call.
        let submitted =
            unsafe { self.uring.submitter().enter(self.unsubmitted, at_least, flags, Some(&args))? };
        self.unsubmitted -= submitted as u32;
        if signal_mask.is_some() && self.uring.completion().len() < at_least as usize {
            // The kernel does not report a signal when some completions are waiting.
            let is_over = timeout.is_some_and(|timeout| start.elapsed() >= timeout);
            return Err(io::Error::from_raw_os_error(if is_over { libc::ETIME } else { libc::EINTR }));
        }
        Ok(())
    }

    /// [`Ring::wait_for`] one completion of a polled drive. The kernel's own wait supports neither
    /// timeout nor signal mask then, and ends early when another thread needs the processor.
    fn poll_for(&mut self, timeout: Option<Duration>, mask: Option<&libc::sigset_t>) -> io::Result<()> {
        let start = Instant::now();
        let want = u32::from(timeout.is_none() && mask.is_none());
        loop {
            match self.enter(want, true) {
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => return Err(error),
                Err(error) => check(&error),
                Ok(()) => {}
            }
            if want > 0 || !self.uring.completion().is_empty() {
                return Ok(());
            }
            if let Some(mask) = mask {
                let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
                // SAFETY: no descriptors; time and mask live through the call.
                let result = unsafe { libc::ppoll(std::ptr::null_mut(), 0, &raw const now, mask) };
                if result < 0 {
                    return Err(io::Error::last_os_error());
                }
            }
            if timeout.is_some_and(|limit| start.elapsed() >= limit) {
                return Err(io::Error::from_raw_os_error(libc::ETIME));
            }
        }
    }

    /// Waits until a completion is waiting.
    pub fn wait(&mut self) {
        if let Err(error) = self.enter(1, true) {
            check(&error);
        }
    }

    #[inline]
    fn is_held_back(&mut self) -> bool {
        self.unsubmitted > 0 || (self.is_deferred && self.uring.submission().taskrun())
    }
}

fn build<S: squeue::EntryMarker, C: cqueue::EntryMarker>(
    entries: u32,
    is_polled: bool,
    mode: Mode,
) -> io::Result<IoUring<S, C>> {
    let mut builder = IoUring::<S, C>::builder();
    match mode {
        Mode::OneThread => {
            builder.setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag().setup_submit_all();
        }
        Mode::Cooperative => {
            builder.setup_coop_taskrun().setup_taskrun_flag().setup_submit_all();
        }
        Mode::SubmitAll => {
            builder.setup_submit_all();
        }
        Mode::Plain => {}
    }
    if is_polled {
        builder.setup_iopoll();
    }
    builder.dontfork().build(entries)
}

fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: no pointer is passed.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: a fresh descriptor with no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Interrupted, or a temporary lack of resources: the next call tries again.
#[cold]
fn check(error: &io::Error) {
    let is_passing =
        matches!(error.raw_os_error(), Some(libc::EINTR | libc::EAGAIN | libc::EBUSY | libc::ENOMEM));
    // The ring is ours and every entry well-formed, so no request can cause any other error.
    assert!(is_passing, "io_uring_enter: {error}");
}
