//! One request as a state machine without system calls. [`Operation::begin`] starts a request,
//! [`Operation::next`] returns the next command, and [`Operation::complete`] processes its
//! completion. A request needs several consecutive commands when it exceeds a limit, when zeroes
//! must be written as data, or when it must be durable.

use super::facts::{DiskFacts, RangeLimits};
use crate::passthrough::Next;
use crate::passthrough::transfer::{Memory, NO_MEMORY, Source, Transfer};
use crate::work::Work;
use block::{Flags, IoError, Request, Segment};
use virtio::blk::{
    RANGE_BYTES, RANGE_F_UNMAP, Range, SECTOR_BYTES, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_FLUSH,
    VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, VIRTIO_BLK_T_WRITE_ZEROES,
};

/// Shortest segment of a list that becomes a command of its own because its memory is registered:
/// pinning fewer pages costs less than one more command.
const LEAST_ALONE: usize = 64 << 10;

/// A command for the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Command {
    /// `VIRTIO_BLK_T_*`.
    pub kind: u32,
    /// First sector of a read or write.
    pub sector: u64,
    pub memory: Memory,
}

/// One slot of a queue.
pub struct Operation {
    work: Work,
    flags: Flags,
    /// Range and memory.
    pub(super) transfer: Transfer,
    /// Memory of our own: the ranges of a discard or write zeroes.
    own: Vec<u8>,
}

impl Operation {
    pub fn idle() -> Operation {
        Operation { work: Work::Flush, flags: Flags::NONE, transfer: Transfer::idle(), own: Vec::new() }
    }

    /// Starts a request. `Ok(false)`: there is nothing to do, and the request has succeeded.
    ///
    /// # Errors
    /// When the request is malformed or not supported.
    ///
    /// # Safety
    /// As [`block::Queue::push`]: the request's memory stays valid until the operation has
    /// finished.
    #[inline]
    pub unsafe fn begin(
        &mut self,
        req: &Request<'_>,
        offset: u64,
        facts: &DiskFacts,
    ) -> Result<bool, IoError> {
        self.work = Work::of(req, facts.write_zeroes.is_some(), facts.discard.is_some())?;
        self.flags = req.flags;
        if self.work == Work::Flush {
            self.transfer.begin_without_range();
            return Ok(facts.has_flush);
        }
        // The disk may have grown since it was opened: the kernel checks the range.
        // SAFETY: by the contract of this function.
        unsafe { self.transfer.begin(req, offset, facts.block_shift) }?;
        Ok(self.transfer.blocks > 0)
    }

    /// The next command, whose memory stays in place until the completion. `is_registered` says
    /// whether memory is registered with the ring.
    ///
    /// # Errors
    /// When a block is spread over more memory segments than the kernel supports.
    #[inline]
    pub(super) fn next(
        &mut self,
        facts: &DiskFacts,
        page: usize,
        is_registered: impl Fn(&Segment) -> bool,
    ) -> Result<Command, IoError> {
        let sector = self.transfer.next_lba() << facts.block_shift >> SECTOR_BYTES.ilog2();
        let limits = facts.transfer_limits(page);
        Ok(match self.work {
            Work::Read | Work::Write => {
                let is_alone = |segment: &Segment| segment.len >= LEAST_ALONE && is_registered(segment);
                let (_, memory) = match self.transfer.cut_first(&limits, is_alone) {
                    Some(first) => first,
                    None => self.transfer.cut(Source::Caller, &limits)?,
                };
                let kind = if self.work == Work::Read { VIRTIO_BLK_T_IN } else { VIRTIO_BLK_T_OUT };
                Command { kind, sector, memory }
            }
            Work::WriteBuffers => {
                let (_, memory) = self.transfer.cut(Source::Zeroes, &limits)?;
                Command { kind: VIRTIO_BLK_T_OUT, sector, memory }
            }
            Work::WriteZeroes => {
                let unmap = if self.flags.contains(Flags::NO_UNMAP) { 0 } else { RANGE_F_UNMAP };
                let memory = self.ranges(facts.write_zeroes, unmap, facts)?;
                Command { kind: VIRTIO_BLK_T_WRITE_ZEROES, sector: 0, memory }
            }
            Work::Discard => {
                let memory = self.ranges(facts.discard, 0, facts)?;
                Command { kind: VIRTIO_BLK_T_DISCARD, sector: 0, memory }
            }
            Work::Flush => Command { kind: VIRTIO_BLK_T_FLUSH, sector: 0, memory: NO_MEMORY },
        })
    }

    /// Processes the completion of the command: 0 or a negative errno.
    #[inline]
    pub fn complete(&mut self, answer: i32, facts: &DiskFacts) -> Next {
        if answer != 0 {
            return self.refused(answer);
        }
        if self.transfer.advance() {
            return Next::Issue;
        }
        let is_write = !matches!(self.work, Work::Read | Work::Flush);
        if is_write && self.flags.contains(Flags::FUA) && facts.has_flush {
            // No virtio disk has durable writes.
            self.work = Work::Flush;
            self.transfer.begin_without_range();
            return Next::Issue;
        }
        Next::Finished(Ok(()))
    }

    #[cold]
    fn refused(&mut self, answer: i32) -> Next {
        let error = match answer.saturating_neg() {
            errno if self.transfer.may_retry(errno) => return Next::IssueLater,
            libc::ENOSPC => IoError::OutOfRange,
            libc::EBADF => IoError::ReadOnly,
            libc::E2BIG => IoError::Invalid,
            errno => IoError::from_errno(errno),
        };
        if let Some(other) = self.work.fallback(error, self.flags) {
            self.work = other;
            return Next::Issue;
        }
        Next::Finished(Err(error))
    }

    /// Fills memory of our own with the next ranges of a discard or write zeroes.
    fn ranges(
        &mut self,
        limits: Option<RangeLimits>,
        flags: u32,
        facts: &DiskFacts,
    ) -> Result<Memory, IoError> {
        let RangeLimits { blocks, ranges } = limits.ok_or(IoError::Unsupported)?;
        let sectors_of_block = facts.block_shift - SECTOR_BYTES.ilog2();
        let (next, left) = (self.transfer.next_lba(), self.transfer.left());
        let mut taken = 0;
        self.own.clear();
        while taken < left && self.own.len() < ranges as usize * RANGE_BYTES {
            let len = (left - taken).min(blocks.into());
            let range = Range {
                sector: (next + taken) << sectors_of_block,
                num_sectors: (len << sectors_of_block) as u32,
                flags,
            };
            self.own.extend_from_slice(&range.to_bytes());
            taken += len;
        }
        self.transfer.in_command = taken;
        Ok(Memory::Single(Segment { base: self.own.as_mut_ptr(), len: self.own.len() }))
    }
}

#[cfg(test)]
mod tests;
