//! Transfers that need no ring: files in memory.
//!
//! tmpfs and ramfs cannot report in advance whether a transfer would block. So io_uring passes each
//! one to a worker thread: two context switches for a copy of a few kilobytes. The driver does such
//! a copy at once instead, with `preadv2(2)` and `pwritev2(2)`. It blocks only for memory that was
//! swapped out.

use super::operation::{MAX_IOVECS, Operation, Step};
use block::{Data, Flags, Op, Request, Segment};
use std::fs::File;
use std::os::fd::{AsRawFd, RawFd};

/// Longest transfer that is done at once, in bytes: about 10 µs of copying. Worker threads copy
/// longer ones in parallel.
const LONGEST: u64 = 128 << 10;
/// Maximum segments that fit on the stack; a transfer with more uses the ring.
const MOST_SEGMENTS: usize = 16;

/// Whether a regular file's file system is in memory. The nodes of block devices lie in a tmpfs,
/// their data does not.
pub(super) fn is_in_memory(file: &File) -> bool {
    const RAMFS_MAGIC: i64 = 0x8584_58f6;
    if !file.metadata().is_ok_and(|metadata| metadata.is_file()) {
        return false;
    }
    // SAFETY: a plain structure of numbers, valid when zeroed.
    let mut found: libc::statfs = unsafe { std::mem::zeroed() };
    // SAFETY: the structure lives through the call.
    let result = unsafe { libc::fstatfs(file.as_raw_fd(), &raw mut found) };
    result == 0 && matches!(found.f_type, libc::TMPFS_MAGIC | RAMFS_MAGIC)
}

/// Does the operation's transfer now and returns the result as a ring would. Returns `None` if the
/// step is not a transfer or is too long.
#[inline]
pub(super) fn transfer(fd: RawFd, operation: &Operation, flags: i32) -> Option<i32> {
    if operation.step != Step::Transfer || operation.len > LONGEST {
        return None;
    }
    let (rest, offset) = operation.rest();
    let moved = transfer_list(fd, operation.op, rest, offset, flags)?;
    Some(answer(moved))
}

/// Does a whole request at once, if it is a short transfer of one segment without flags. Returns
/// `false` for any other request or after an interruption.
///
/// # Safety
/// The request's memory is valid.
/// The request's memory is valid.
#[inline(always)]
pub(super) unsafe fn transfer_one(fd: RawFd, req: &Request<'_>, offset: u64) -> bool {
    if req.len > LONGEST || req.len == 0 || !req.op.has_data() || req.flags != Flags::NONE {
        return false;
    }
    let Some(segment) = req.data.as_single() else { return false };
    // SAFETY: by contract.
    let moved = unsafe {
        match req.op {
            Op::Read => libc::pread(fd, segment.base.cast(), segment.len, offset as i64),
            _ => libc::pwrite(fd, segment.base.cast(), segment.len, offset as i64),
        }
    };
    moved == segment.len as isize
}

fn answer(moved: isize) -> i32 {
    if moved >= 0 {
        return moved as i32; // at most LONGEST
    }
    -std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO)
}

fn transfer_list(fd: RawFd, op: Op, rest: Data<'_>, offset: u64, flags: i32) -> Option<isize> {
    let mut few = [Segment { base: std::ptr::null_mut(), len: 0 }; MOST_SEGMENTS];
    let list = match rest.as_whole_list() {
        Some(list) if list.len() <= MAX_IOVECS => list,
        _ => copy_list(rest.iter(), &mut few)?,
    };
    let (iovecs, count, offset) = (list.as_ptr().cast::<libc::iovec>(), list.len() as i32, offset as i64);
    // SAFETY: `Segment` is laid out as `iovec`; the caller's memory is valid by the contract of
    // `Queue::push`.
    Some(unsafe {
        match op {
            Op::Read => libc::preadv2(fd, iovecs, count, offset, flags),
            _ => libc::pwritev2(fd, iovecs, count, offset, flags),
        }
    })
}

fn copy_list(segments: impl Iterator<Item = Segment>, few: &mut [Segment]) -> Option<&[Segment]> {
    let mut count = 0;
    for segment in segments {
        *few.get_mut(count)? = segment;
        count += 1;
    }
    Some(&few[..count])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::FromRawFd;

    #[test]
    fn nodes_of_devices_are_not_files_in_memory() {
        // SAFETY: a C string, and the descriptor is new.
        let file = unsafe { File::from_raw_fd(libc::memfd_create(c"memory".as_ptr(), libc::MFD_CLOEXEC)) };
        assert!(is_in_memory(&file));
        // /dev is a tmpfs, or a devtmpfs with the same magic number.
        assert!(!is_in_memory(&File::open("/dev/null").unwrap()));
    }
}
