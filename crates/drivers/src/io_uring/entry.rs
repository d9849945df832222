//! Converts the step of an [`Operation`] into a submission entry.

use super::operation::{Backing, MAX_IOVECS, Operation, Step};
use crate::fixed::FixedBuffers;
use crate::ring::FIXED_FILE;
use crate::zeroes::{ZERO_PAGE_LEN, ZERO_STEP};
use block::{Flags, Op, Segment};
use io_uring::opcode::{Fallocate, Fsync, Read, ReadFixed, Readv, UringCmd16, Write, WriteFixed, Writev};
use io_uring::types::{Fd, FsyncFlags};
use io_uring::{squeue, types};
use std::os::fd::RawFd;

/// `BLOCK_URING_CMD_DISCARD` of `linux/blkdev.h`: `_IO(0x12, 0)`.
const DISCARD_COMMAND: u32 = 0x1200;

/// The fields that all entries of a queue share.
pub(super) struct Target {
    pub backing: Backing,
    pub fd: RawFd,
    /// Whether `fd` is registered as file 0 of the rings.
    pub is_registered: bool,
    pub zeroes: &'static [Segment],
}

impl Target {
    /// The entry for the operation's current step.
    #[inline]
    pub fn entry(&self, operation: &mut Operation, buffers: Option<&FixedBuffers>) -> squeue::Entry {
        let is_registered = self.is_registered && operation.other_fd.is_none();
        let fd = if is_registered { Fd(0) } else { Fd(operation.other_fd.unwrap_or(self.fd)) };
        let entry = match operation.step {
            Step::Transfer => self.transfer(fd, operation, buffers),
            Step::WriteZeroes => {
                let left = (operation.len - operation.done) as usize;
                // Whole pages except in the last call, whose list is built in the operation's own.
                if left >= ZERO_STEP {
                    writev(fd, self.zeroes, operation.offset + operation.done, rw_flags(operation))
                } else {
                    self.last_zeroes(fd, operation, left)
                }
            }
            Step::PunchHole => {
                allocate(fd, operation, libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE)
            }
            Step::ZeroRange => {
                allocate(fd, operation, libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE)
            }
            Step::DiscardCommand => {
                let mut command = [0; 16];
                command[..8].copy_from_slice(&operation.len.to_ne_bytes());
                UringCmd16::new(fd, DISCARD_COMMAND).cmd(command).addr(Some(operation.offset)).build()
            }
            Step::Sync => Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
        };
        if is_registered { entry.flags(FIXED_FILE) } else { entry }
    }

    /// The entry of a plain transfer, with one segment and no flags.
    #[inline(always)]
    pub fn plain_entry(&self, operation: &Operation, segment: Segment) -> squeue::Entry {
        let fd = if self.is_registered { Fd(0) } else { Fd(self.fd) };
        let (base, len) = (segment.base, segment.len as u32); // a plain transfer is below 2 GiB
        let entry = match operation.op {
            Op::Read => Read::new(fd, base, len).offset(operation.offset).build(),
            _ => Write::new(fd, base, len).offset(operation.offset).build(),
        };
        if self.is_registered { entry.flags(FIXED_FILE) } else { entry }
    }

    #[inline]
    fn transfer(
        &self,
        fd: types::Fd,
        operation: &mut Operation,
        buffers: Option<&FixedBuffers>,
    ) -> squeue::Entry {
        let (rest, offset) = operation.rest();
        let rw_flags = rw_flags(operation);
        let is_read = operation.op == Op::Read;
        if let Some(segment) = rest.as_single() {
            let (base, len) = (segment.base, segment.len as u32); // max_transfer is below 4 GiB
            let index = buffers.and_then(|b| b.index_of(&segment));
            return match (is_read, index) {
                (true, None) => Read::new(fd, base, len).offset(offset).build(),
                (true, Some(i)) => ReadFixed::new(fd, base, len, i).offset(offset).build(),
                (false, None) => Write::new(fd, base, len).offset(offset).rw_flags(rw_flags).build(),
                (false, Some(i)) => {
                    WriteFixed::new(fd, base, len, i).offset(offset).rw_flags(rw_flags).build()
                }
            };
        }
        let list = match rest.as_whole_list() {
            Some(list) if list.len() <= MAX_IOVECS => list,
            _ => {
                operation.gather(rest, &self.backing);
                &operation.iovecs
            }
        };
        if is_read {
            Readv::new(fd, list.as_ptr().cast(), list.len() as u32).offset(offset).build()
        } else {
            writev(fd, list, offset, rw_flags)
        }
    }

    fn last_zeroes(&self, fd: types::Fd, operation: &mut Operation, left: usize) -> squeue::Entry {
        operation.iovecs.clear();
        let whole = left / ZERO_PAGE_LEN;
        operation.iovecs.extend_from_slice(&self.zeroes[..whole]);
        if !left.is_multiple_of(ZERO_PAGE_LEN) {
            operation.iovecs.push(Segment { len: left % ZERO_PAGE_LEN, ..self.zeroes[0] });
        }
        writev(fd, &operation.iovecs, operation.offset + operation.done, rw_flags(operation))
    }
}

/// The entry for the rest of a transfer from or to a registered buffer, and the number of the
/// buffer's ring. The kernel counts the bytes of such a buffer from address 0.
pub(super) fn registered_entry(operation: &Operation, fd: RawFd) -> Option<(u32, squeue::Entry)> {
    let (rest, offset) = operation.rest();
    let buffer = rest.as_registered()?;
    let (start, len) = (std::ptr::without_provenance_mut(buffer.offset), buffer.len as u32);
    let entry = match operation.op {
        Op::Read => ReadFixed::new(Fd(fd), start, len, buffer.index).offset(offset).build(),
        _ => {
            let rw_flags = rw_flags(operation);
            WriteFixed::new(Fd(fd), start, len, buffer.index).offset(offset).rw_flags(rw_flags).build()
        }
    };
    Some((buffer.ring, entry))
}

fn writev(fd: types::Fd, list: &[Segment], offset: u64, rw_flags: i32) -> squeue::Entry {
    Writev::new(fd, list.as_ptr().cast(), list.len() as u32).offset(offset).rw_flags(rw_flags).build()
}

fn allocate(fd: types::Fd, operation: &Operation, mode: i32) -> squeue::Entry {
    Fallocate::new(fd, operation.len).offset(operation.offset).mode(mode).build()
}

#[inline]
pub(super) fn rw_flags(operation: &Operation) -> i32 {
    if operation.flags.contains(Flags::FUA) && operation.op != Op::Read { libc::RWF_DSYNC } else { 0 }
}
