//! One slot: a request and its execution by the controller, command by command.
//!
//! A request needs several consecutive commands when it exceeds the controller's limits, or when
//! zeroes must be sent. Commands that were in flight when the connection was lost are sent again
//! over the next one.

use super::error::Violation;
use super::facts::Facts;
use block::{Data, Flags, IoError, IoResult, Op, Request, Segment};
use drivers::work::Work;
use drivers::zeroes::zero_segments;
use nvme::command::{Command, deallocate_range};
use nvme::tcp::{C2hData, DataDigest, R2t};
use nvme::{MAX_BLOCKS, Sgl, Status};

/// Maximum failed attempts of one command: over connections that were lost, or refused as
/// retryable.
const MAX_ATTEMPTS: u8 = 5;
/// Bytes of a deallocation range.
const RANGE_BYTES: u64 = 16;
/// Bytes of the caller's memory that are copied at once to compute a digest: no reference to that
/// memory may exist.
const DIGEST_STEP: usize = 4096;

/// Data that a slot has to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Pending {
    Nothing,
    Command,
    /// Data that an R2T requested.
    Data {
        tag: u16,
        offset: u32,
        left: u32,
    },
}

/// The next action after a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Send the next command to the controller.
    Issue,
    /// Send the same command again after the next tick.
    IssueLater,
    /// The request is complete.
    End(IoResult),
}

/// A request, or an idle slot.
pub(super) struct Operation {
    pub(super) is_busy: bool,
    pub(super) pending: Pending,
    /// Whether the command was sent and not answered.
    pub(super) is_out: bool,
    /// Its age in ticks.
    pub(super) age: u32,
    /// Whether the command is to be sent again at the next tick.
    pub(super) is_later: bool,
    /// The outbox position at which the command has been sent so far.
    pub(super) sent_at: u64,
    work: Work,
    flags: Flags,
    /// Offset and length of the command in flight on the namespace, in bytes.
    offset: u64,
    part: u64,
    /// Bytes after that.
    rest: u64,
    /// The caller's memory from the command in flight on.
    data: Data<'static>,
    /// The data of a deallocation command.
    range: [u8; RANGE_BYTES as usize],
    /// Data bytes of the command, and how many of them were moved or requested.
    data_len: u32,
    moved: u32,
    status: Status,
    may_retry: bool,
    is_corrupt: bool,
    attempts: u8,
    generation: u16,
}

// SAFETY: the window's pointers belong to the owner of the request, on any thread.
unsafe impl Send for Operation {}

impl Operation {
    /// A free slot.
    pub(super) fn idle() -> Operation {
        Operation {
            is_busy: false,
            pending: Pending::Nothing,
            is_out: false,
            age: 0,
            is_later: false,
            sent_at: 0,
            work: Work::Flush,
            flags: Flags::NONE,
            offset: 0,
            part: 0,
            rest: 0,
            data: Data::none(),
            range: [0; RANGE_BYTES as usize],
            data_len: 0,
            moved: 0,
            status: Status::SUCCESS,
            may_retry: false,
            is_corrupt: false,
            attempts: 0,
            generation: 0,
        }
    }

    /// Starts a request, whose first command is then pending. `Ok(false)`: there is nothing to do.
    ///
    /// # Errors
    /// When the controller does not support it.
    ///
    /// # Safety
    /// The request's memory obeys the contract of [`Data::new`] until the request has ended.
    #[inline]
    pub(super) unsafe fn begin(
        &mut self,
        req: &Request<'_>,
        offset: u64,
        facts: &Facts,
    ) -> Result<bool, IoError> {
        self.work = Work::of(req, facts.zero_blocks.is_some(), facts.deallocation.is_some())?;
        if self.work == Work::Flush && !facts.has_cache {
            return Ok(false);
        }
        let len = if req.op == Op::Flush { 0 } else { req.len };
        if len == 0 && req.op != Op::Flush {
            return Ok(false);
        }
        // The namespace may have another size by now: the controller checks the range.
        offset.checked_add(len).ok_or(IoError::OutOfRange)?;
        if req.op != Op::Flush && (offset | len) & (u64::from(facts.block_size()) - 1) != 0 {
            return Err(IoError::Misaligned);
        }
        if req.op.has_data() && req.data.len() as u64 != len {
            return Err(IoError::Invalid);
        }
        self.flags = req.flags;
        self.offset = offset;
        (self.part, self.rest) = (0, len);
        // SAFETY: by contract the list and the memory live until the request has ended, and the
        // slot forgets them then.
        self.data = unsafe { std::mem::transmute::<Data<'_>, Data<'static>>(req.data) };
        (self.is_busy, self.attempts) = (true, 0);
        (self.is_out, self.is_later) = (false, false);
        self.pending = Pending::Command;
        Ok(true)
    }

    /// Builds the pending command, which has `generation` in its identifier.
    #[inline]
    pub(super) fn issue(&mut self, facts: &Facts) -> (Command, Sgl) {
        // A command that is sent again may be split differently now.
        self.rest += self.part;
        let (len, blocks) = self.cut(facts);
        self.part = len;
        self.rest -= len;
        (self.moved, self.age) = (0, 0);
        (self.is_out, self.is_later, self.is_corrupt) = (true, false, false);
        self.pending = Pending::Nothing;
        self.generation = self.generation.wrapping_add(1);
        let (nsid, lba) = (facts.nsid, self.offset >> facts.block_shift);
        let fua = self.flags.contains(Flags::FUA);
        let command = match self.work {
            Work::Read => Command::read(nsid, lba, blocks),
            Work::Write | Work::WriteBuffers => Command::write(nsid, lba, blocks, fua),
            Work::WriteZeroes => {
                let deallocate = facts.zeroes_by_deallocating && !self.flags.contains(Flags::NO_UNMAP);
                Command::write_zeroes(nsid, lba, blocks, fua, deallocate)
            }
            Work::Discard => {
                self.range = deallocate_range(lba, blocks);
                Command::deallocate(nsid, 1)
            }
            Work::Flush => Command::flush(nsid),
        };
        self.data_len = match self.work {
            Work::Read | Work::Write | Work::WriteBuffers => len as u32,
            Work::Discard => RANGE_BYTES as u32,
            Work::WriteZeroes | Work::Flush => 0,
        };
        if self.sends() && self.data_len <= facts.in_capsule {
            self.moved = self.data_len;
            return (command, Sgl::InCapsule { offset: 0, len: self.data_len });
        }
        (command, Sgl::Transport { len: self.data_len })
    }

    /// The part of the remaining request that one command takes: bytes and blocks.
    #[inline]
    fn cut(&self, facts: &Facts) -> (u64, u32) {
        let most = match self.work {
            Work::Read | Work::Write | Work::WriteBuffers => u64::from(facts.max_transfer),
            Work::WriteZeroes => {
                let blocks = facts.zero_blocks.unwrap_or(MAX_BLOCKS).clamp(1, MAX_BLOCKS);
                u64::from(blocks) << facts.block_shift
            }
            Work::Discard => {
                let limits = facts.deallocation;
                let blocks = limits.map_or(1, |l| l.total_blocks.min(l.range_blocks.into()).max(1));
                blocks << facts.block_shift
            }
            Work::Flush => 0,
        };
        let len = self.rest.min(most);
        (len, (len >> facts.block_shift) as u32)
    }

    /// Whether the command sends data to the controller.
    #[inline]
    pub(super) fn sends(&self) -> bool {
        matches!(self.work, Work::Write | Work::WriteBuffers | Work::Discard)
    }

    /// Passes the segments of the command's data from `offset` on to `push`, for reading only.
    #[inline]
    pub(super) fn pieces(&mut self, offset: u32, len: u32, push: impl FnMut(Segment)) {
        let (offset, len) = (offset as usize, len as usize);
        match self.work {
            Work::Discard => {
                let base = self.range[offset..offset + len].as_mut_ptr();
                std::iter::once(Segment { base, len }).for_each(push);
            }
            Work::WriteBuffers => {
                // SAFETY: list and zeroes are static, and only read.
                let zeroes = unsafe { Data::new(zero_segments()) };
                zeroes.part(0, len).iter().for_each(push);
            }
            _ => self.data.part(offset, len).iter().for_each(push),
        }
    }

    /// The digest of these data.
    pub(super) fn digest(&mut self, offset: u32, len: u32) -> [u8; 4] {
        let mut digest = DataDigest::new();
        let mut copy = [0; DIGEST_STEP];
        self.pieces(offset, len, |piece| {
            let mut at = 0;
            while at < piece.len {
                let part =
                    Segment { base: piece.base.wrapping_add(at), len: DIGEST_STEP.min(piece.len - at) };
                // SAFETY: the caller's memory, by the contract of `begin`; or our own.
                unsafe { Data::one(&part) }.copy_to(&mut copy);
                digest.update(&copy[..part.len]);
                at += part.len;
            }
        });
        digest.to_bytes()
    }

    /// The part of the identifier that distinguishes this command from earlier ones of the slot.
    #[inline]
    pub(super) fn generation(&self) -> u16 {
        self.generation
    }

    /// Accepts data of the command. Returns its offset in [`Operation::target`].
    #[inline]
    pub(super) fn expect(&mut self, data: &C2hData) -> Result<usize, Violation> {
        let C2hData { offset, len, .. } = *data;
        if self.work != Work::Read || offset != self.moved || len > self.data_len - self.moved {
            return Err(Violation::Outside { offset, len });
        }
        self.moved += len;
        Ok(offset as usize)
    }

    /// The caller's memory for received data.
    #[inline]
    pub(super) fn target(&self, at: usize, len: usize) -> Data<'static> {
        self.data.part(at, len)
    }

    /// The controller requests data.
    #[inline]
    pub(super) fn want(&mut self, r2t: &R2t) -> Result<(), Violation> {
        let R2t { tag, offset, len, .. } = *r2t;
        if !self.sends() || offset != self.moved || len > self.data_len - self.moved {
            return Err(Violation::Outside { offset, len });
        }
        if self.pending != Pending::Nothing {
            return Err(Violation::Limit);
        }
        self.moved += len;
        self.pending = Pending::Data { tag, offset, left: len };
        Ok(())
    }

    /// Records a wrong digest of received data.
    #[cold]
    pub(super) fn corrupt(&mut self) {
        self.is_corrupt = true;
    }

    /// Records the completion of the command.
    #[inline]
    pub(super) fn answer(&mut self, status: Status, do_not_retry: bool) -> Result<(), Violation> {
        let is_whole = self.moved == self.data_len && self.pending == Pending::Nothing;
        if status == Status::SUCCESS && !is_whole {
            return Err(Violation::Incomplete);
        }
        self.status = status;
        self.may_retry = !do_not_retry && status.is_worth_retrying();
        self.pending = Pending::Nothing;
        self.is_out = false;
        Ok(())
    }

    /// Determines the next action after a completion.
    #[inline]
    pub(super) fn conclude(&mut self) -> Next {
        if self.status != Status::SUCCESS || self.is_corrupt {
            return self.conclude_error();
        }
        self.attempts = 0;
        self.offset += self.part;
        if self.rest == 0 {
            return Next::End(Ok(()));
        }
        if !self.data.is_empty() {
            self.data = self.data.part(self.part as usize, self.rest as usize);
        }
        self.part = 0;
        self.pending = Pending::Command;
        Next::Issue
    }

    #[cold]
    fn conclude_error(&mut self) -> Next {
        let error = self.status.result().err().unwrap_or(IoError::Corrupt);
        if let Some(other) = self.work.fallback(error, self.flags) {
            self.work = other;
            self.pending = Pending::Command;
            return Next::Issue;
        }
        let may_retry = self.may_retry || self.status == Status::SUCCESS;
        if may_retry && self.attempts < MAX_ATTEMPTS {
            self.attempts += 1;
            (self.is_later, self.is_corrupt) = (true, false);
            return Next::IssueLater;
        }
        Next::End(Err(error))
    }

    /// The connection is lost: the command must be sent over the next one. Returns `false` after
    /// too many attempts.
    #[cold]
    pub(super) fn start_over(&mut self) -> bool {
        if self.is_out {
            self.attempts += 1;
        }
        (self.is_out, self.is_later, self.is_corrupt) = (false, false, false);
        self.pending = Pending::Command;
        self.attempts <= MAX_ATTEMPTS
    }
}
