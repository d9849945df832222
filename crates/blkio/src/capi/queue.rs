//! Queues: `struct blkioq *`. Requests enter here; a null queue is ignored.

use super::report;
use crate::raw::{Completion, IoQueue, Memory, ReqFlags};
use crate::{Error, Result};
use block::{Op, Segment};
use drivers::direct::{Zone, ZoneAction};
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::time::Duration;

/// `void blkioq_read(struct blkioq *q, uint64_t start, void *buf, size_t len, void *user_data,
/// uint32_t flags)`
///
/// # Safety
/// `q` came from `blkio_get_queue()`; the buffer is the library's until the completion was
/// returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkioq_read(
    q: *mut IoQueue,
    start: u64,
    buf: *mut c_void,
    len: usize,
    user_data: *mut c_void,
    flags: u32,
) {
    // SAFETY: by contract.
    unsafe { transfer(q, Op::Read, start, one(buf, len), user_data, flags) }
}

/// `void blkioq_write(struct blkioq *q, uint64_t start, const void *buf, size_t len,
/// void *user_data, uint32_t flags)`
///
/// # Safety
/// As [`blkioq_read`]; the buffer is only read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkioq_write(
    q: *mut IoQueue,
    start: u64,
    buf: *const c_void,
    len: usize,
    user_data: *mut c_void,
    flags: u32,
) {
    // SAFETY: by contract.
    unsafe { transfer(q, Op::Write, start, one(buf.cast_mut(), len), user_data, flags) }
}

/// `void blkioq_readv(struct blkioq *q, uint64_t start, const struct iovec *iovec, int iovcnt,
/// void *user_data, uint32_t flags)`
///
/// # Safety
/// As [`blkioq_read`], for the list and everything in it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkioq_readv(
    q: *mut IoQueue,
    start: u64,
    iovec: *const libc::iovec,
    iovcnt: c_int,
    user_data: *mut c_void,
    flags: u32,
) {
    // SAFETY: by contract.
    unsafe { transfer(q, Op::Read, start, many(iovec, iovcnt), user_data, flags) }
}

/// `void blkioq_writev(struct blkioq *q, uint64_t start, struct iovec *iovec, int iovcnt,
/// void *user_data, uint32_t flags)`
///
/// # Safety
/// As [`blkioq_readv`]; the buffers are only read.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkioq_writev(
    q: *mut IoQueue,
    start: u64,
    iovec: *const libc::iovec,
    iovcnt: c_int,
    user_data: *mut c_void,
    flags: u32,
) {
    // SAFETY: by contract.
    unsafe { transfer(q, Op::Write, start, many(iovec, iovcnt), user_data, flags) }
}

fn one(base: *mut c_void, len: usize) -> Memory {
    Memory::One(Segment { base: base.cast(), len })
}

fn many(iovec: *const libc::iovec, iovcnt: c_int) -> Memory {
    // `Segment` is laid out as `struct iovec`; a negative number becomes one that no device takes.
    Memory::List(iovec.cast(), usize::try_from(iovcnt).unwrap_or(usize::MAX))
}

/// # Safety
/// As [`blkioq_readv`].
#[inline(always)]
unsafe fn transfer(q: *mut IoQueue, op: Op, start: u64, memory: Memory, user_data: *mut c_void, flags: u32) {
    // SAFETY: by contract.
    if let Some(queue) = unsafe { q.as_mut() } {
        // SAFETY: by contract.
        unsafe { queue.transfer(op, start, memory, user_data.addr(), ReqFlags(flags)) }
    }
}

/// # Safety
/// `q` came from `blkio_get_queue()`.
unsafe fn operate(q: *mut IoQueue, op: Op, start: u64, len: u64, user_data: *mut c_void, flags: u32) {
    // SAFETY: by contract.
    if let Some(queue) = unsafe { q.as_mut() } {
        queue.operate(op, start, len, user_data.addr(), ReqFlags(flags));
    }
}

/// `void blkioq_write_zeroes(struct blkioq *q, uint64_t start, uint64_t len, void *user_data,
/// uint32_t flags)`
///
/// # Safety
/// `q` came from `blkio_get_queue()`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkioq_write_zeroes(
    q: *mut IoQueue,
    start: u64,
    len: u64,
    user_data: *mut c_void,
    flags: u32,
) {
    // SAFETY: by contract.
    unsafe { operate(q, Op::WriteZeroes, start, len, user_data, flags) }
}

/// `void blkioq_discard(struct blkioq *q, uint64_t start, uint64_t len, void *user_data,
/// uint32_t flags)`
///
/// # Safety
/// `q` came from `blkio_get_queue()`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkioq_discard(
    q: *mut IoQueue,
    start: u64,
    len: u64,
    user_data: *mut c_void,
    flags: u32,
) {
    // SAFETY: by contract.
    unsafe { operate(q, Op::Discard, start, len, user_data, flags) }
}

/// `void blkioq_flush(struct blkioq *q, void *user_data, uint32_t flags)`
///
/// # Safety
/// `q` came from `blkio_get_queue()`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkioq_flush(q: *mut IoQueue, user_data: *mut c_void, flags: u32) {
    // SAFETY: by contract.
    unsafe { operate(q, Op::Flush, 0, 0, user_data, flags) }
}

/// `void blkioq_report_zones(struct blkioq *q, uint64_t offset, struct blkio_zone *zones,
/// uint32_t nr_zones, void *user_data, uint32_t flags)`
///
/// # Safety
/// `q` came from `blkio_get_queue()`; `zones` has room for `nr_zones` zones and is the library's
/// until the completion was returned.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkioq_report_zones(
    q: *mut IoQueue,
    offset: u64,
    zones: *mut Zone,
    nr_zones: u32,
    user_data: *mut c_void,
    flags: u32,
) {
    // SAFETY: by contract.
    if let Some(queue) = unsafe { q.as_mut() } {
        // SAFETY: by contract.
        unsafe { queue.report_zones(offset, zones, nr_zones, user_data.addr(), ReqFlags(flags)) }
    }
}

/// # Safety
/// `q` came from `blkio_get_queue()`.
unsafe fn manage(
    q: *mut IoQueue,
    action: ZoneAction,
    offset: Option<u64>,
    user_data: *mut c_void,
    flags: u32,
) {
    // SAFETY: by contract.
    if let Some(queue) = unsafe { q.as_mut() } {
        queue.manage_zones(action, offset, user_data.addr(), ReqFlags(flags));
    }
}

macro_rules! zone_functions {
    ($($one:ident $all:ident $action:ident;)*) => { $(
        #[doc = concat!("`void ", stringify!($one), "(struct blkioq *q, uint64_t offset, void *user_data, uint32_t flags)`")]
        ///
        /// # Safety
        /// `q` came from `blkio_get_queue()`.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $one(q: *mut IoQueue, offset: u64, user_data: *mut c_void, flags: u32) {
            // SAFETY: by contract.
            unsafe { manage(q, ZoneAction::$action, Some(offset), user_data, flags) }
        }

        #[doc = concat!("`void ", stringify!($all), "(struct blkioq *q, void *user_data, uint32_t flags)`")]
        ///
        /// # Safety
        /// `q` came from `blkio_get_queue()`.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $all(q: *mut IoQueue, user_data: *mut c_void, flags: u32) {
            // SAFETY: by contract.
            unsafe { manage(q, ZoneAction::$action, None, user_data, flags) }
        }
    )* };
}

zone_functions! {
    blkioq_close_zone blkioq_close_all_zones Close;
    blkioq_finish_zone blkioq_finish_all_zones Finish;
    blkioq_open_zone blkioq_open_all_zones Open;
    blkioq_reset_zone blkioq_reset_all_zones Reset;
}

/// `int blkioq_do_io(struct blkioq *q, struct blkio_completion *completions, int min_completions,
/// int max_completions, struct timespec *timeout)`
///
/// # Safety
/// `q` came from `blkio_get_queue()`, `completions` has room for `max_completions`, `timeout` is
/// null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkioq_do_io(
    q: *mut IoQueue,
    completions: *mut Completion,
    min_completions: c_int,
    max_completions: c_int,
    timeout: *mut libc::timespec,
) -> c_int {
    // SAFETY: by contract.
    unsafe { do_io(q, completions, min_completions, max_completions, timeout, std::ptr::null()) }
}

/// `int blkioq_do_io_interruptible(struct blkioq *q, struct blkio_completion *completions,
/// int min_completions, int max_completions, struct timespec *timeout, const sigset_t *sig)`
///
/// # Safety
/// As [`blkioq_do_io`]; `sig` is null or valid.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkioq_do_io_interruptible(
    q: *mut IoQueue,
    completions: *mut Completion,
    min_completions: c_int,
    max_completions: c_int,
    timeout: *mut libc::timespec,
    sig: *const libc::sigset_t,
) -> c_int {
    // SAFETY: by contract.
    unsafe { do_io(q, completions, min_completions, max_completions, timeout, sig) }
}

/// # Safety
/// As [`blkioq_do_io_interruptible`].
#[inline]
unsafe fn do_io(
    q: *mut IoQueue,
    completions: *mut Completion,
    min: c_int,
    max: c_int,
    timeout: *mut libc::timespec,
    sig: *const libc::sigset_t,
) -> c_int {
    // SAFETY: by contract.
    let Some(queue) = (unsafe { q.as_mut() }) else {
        return report(Error::new(libc::EINVAL, "the blkioq pointer is null"));
    };
    if min < 0 || max < 0 || (completions.is_null() && max > 0) {
        let message = format!("{min} to {max} completions at {completions:p}");
        return report(Error::new(libc::EINVAL, message));
    }
    let out: &mut [MaybeUninit<Completion>] = match max {
        0 => &mut [],
        // SAFETY: by contract.
        _ => unsafe { std::slice::from_raw_parts_mut(completions.cast(), max as usize) },
    };
    // SAFETY: by contract.
    let (timeout, mask) = unsafe { (timeout.as_mut(), sig.as_ref()) };
    let result = match timeout {
        None => queue.do_io(out, min as usize, None, mask),
        Some(time) => duration(time).and_then(|mut left| {
            let result = queue.do_io(out, min as usize, Some(&mut left), mask);
            time.tv_sec = left.as_secs() as libc::time_t;
            time.tv_nsec = left.subsec_nanos().into();
            result
        }),
    };
    match result {
        Ok(count) => count as c_int,
        Err(error) => report(error),
    }
}

fn duration(time: &libc::timespec) -> Result<Duration> {
    match (u64::try_from(time.tv_sec), u32::try_from(time.tv_nsec)) {
        (Ok(secs), Ok(nanos)) if nanos < 1_000_000_000 => Ok(Duration::new(secs, nanos)),
        _ => {
            let message = format!("timeout of {} s and {} ns", time.tv_sec, time.tv_nsec);
            Err(Error::new(libc::EINVAL, message))
        }
    }
}

/// `int blkioq_get_completion_fd(struct blkioq *q)`: -1 for a poll queue.
///
/// # Safety
/// `q` came from `blkio_get_queue()`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkioq_get_completion_fd(q: *mut IoQueue) -> c_int {
    // SAFETY: by contract.
    unsafe { q.as_ref() }.and_then(IoQueue::completion_fd).unwrap_or(-1)
}

/// `void blkioq_set_completion_fd_enabled(struct blkioq *q, bool enable)`
///
/// # Safety
/// `q` came from `blkio_get_queue()`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkioq_set_completion_fd_enabled(q: *mut IoQueue, enable: bool) {
    // SAFETY: by contract.
    if let Some(queue) = unsafe { q.as_mut() } {
        queue.set_completion_fd_enabled(enable);
    }
}
