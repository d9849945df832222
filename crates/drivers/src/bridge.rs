//! The queue of a device stack as a [`DirectQueue`]: lets the C API use devices that run on cores.

use crate::direct::{DirectQueue, ZoneRequest, poll_readable};
use block::{IoError, IoResult, Queue};
use reactor::bridge::BridgeQueue;
use std::io;
use std::time::{Duration, Instant};

/// Time that a poll queue spins before it delivers signals and checks its timeout.
const SPIN: Duration = Duration::from_micros(100);

impl DirectQueue for BridgeQueue {
    fn wait(
        &mut self,
        at_least: u32,
        timeout: Option<Duration>,
        signal_mask: Option<&libc::sigset_t>,
    ) -> io::Result<()> {
        self.kick();
        if self.is_polled() {
            return spin(self, at_least, timeout, signal_mask);
        }
        if self.spin_for(at_least, timeout) {
            return Ok(());
        }
        let start = Instant::now();
        let result = if self.arm_for(at_least) {
            let fd = self.event_fd().expect("an event queue has an event");
            poll_readable(fd, timeout, signal_mask)
        } else {
            Ok(())
        };
        self.disarm();
        self.note_slept(start.elapsed());
        result
    }

    unsafe fn push_zone(&mut self, _: u32, _: ZoneRequest) -> IoResult {
        Err(IoError::Unsupported)
    }
}

/// Waits without sleeping.
fn spin(
    queue: &mut BridgeQueue,
    at_least: u32,
    timeout: Option<Duration>,
    signal_mask: Option<&libc::sigset_t>,
) -> io::Result<()> {
    let start = Instant::now();
    loop {
        let left = timeout.map(|timeout| timeout.saturating_sub(start.elapsed()));
        let limit = SPIN.min(left.unwrap_or(SPIN));
        if queue.look_for(at_least, limit) {
            return Ok(());
        }
        if left.is_some_and(|left| left.is_zero()) {
            return Err(io::Error::from_raw_os_error(libc::ETIME));
        }
        if let Some(mask) = signal_mask {
            let_signals_through(mask)?;
        }
    }
}

/// Handles pending signals that `mask` does not block.
///
/// # Errors
/// `EINTR` when a signal was handled.
fn let_signals_through(mask: &libc::sigset_t) -> io::Result<()> {
    let now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: no descriptors are passed; the structures live through the call.
    match unsafe { libc::ppoll(std::ptr::null_mut(), 0, &raw const now, &raw const *mask) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}
