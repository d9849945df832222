//! One request as a state machine without system calls. [`Operation::begin`] starts a request,
//! [`Operation::next`] returns the next command, and [`Operation::complete`] processes its
//! completion. A request needs several consecutive commands when it exceeds a limit, when zeroes
//! must be written as data, or when a zone report is long.

use super::facts::{MAX_IOVECS, NamespaceFacts};
use crate::direct::{Zone, ZoneAction, ZoneRequest};
use crate::zeroes::zero_segments;
use block::{Data, Flags, IoError, IoResult, Op, Request, Segment};
use nvme::command::{Command, ZoneSendAction, deallocate_range};
use nvme::zns::{DESCRIPTOR_BYTES, REPORT_HEADER_BYTES, report_count, report_zone};
use nvme::{MAX_BLOCKS, Status};

/// Maximum temporary refusals of one command by the kernel.
const MAX_RETRIES: u8 = 64;
/// Maximum `EFAULT` results of one command.
const MAX_FAULTS: u8 = 8;
/// Bytes of a zone report per command: about a thousand zones.
const REPORT_STEP: usize = 64 << 10;

/// The kind of work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    Read,
    Write,
    WriteZeroes,
    /// Zeroes sent as data.
    WriteBuffers,
    Discard,
    Flush,
    Manage(ZoneAction),
    ManageAll(ZoneAction),
    Report(Report),
}

/// A zone report in progress.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Report {
    zones: *mut Zone,
    max: u32,
    reported: *mut u32,
    done: u32,
}

/// The memory of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Memory {
    /// One segment; empty when its length is 0.
    Single(Segment),
    /// [`Operation::iovecs`].
    List,
}

const NO_MEMORY: Memory = Memory::Single(Segment { base: std::ptr::null_mut(), len: 0 });

/// The next action after a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// [`Operation::next`] has another command.
    Issue,
    /// Issue the same command again once fewer are in flight.
    IssueLater,
    /// The request has ended.
    Finished(IoResult),
}

/// One slot of a queue.
pub(super) struct Operation {
    work: Work,
    flags: Flags,
    /// First block.
    lba: u64,
    /// Number of blocks of the request.
    blocks: u64,
    /// Blocks that have been completed.
    done: u64,
    /// Blocks of the command in flight.
    in_command: u64,
    /// The caller's memory. Its lifetime is the contract of `Queue::push`, not a borrow.
    data: Data<'static>,
    /// The list that a vectored command points at. Reused to avoid allocations.
    pub iovecs: Vec<Segment>,
    /// Memory of our own: ranges to deallocate, or a zone report.
    own: Vec<u8>,
    retries: u8,
}

impl Operation {
    pub fn idle() -> Operation {
        Operation {
            work: Work::Flush,
            flags: Flags::NONE,
            lba: 0,
            blocks: 0,
            done: 0,
            in_command: 0,
            data: Data::none(),
            iovecs: Vec::new(),
            own: Vec::new(),
            retries: 0,
        }
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
        facts: &NamespaceFacts,
    ) -> Result<bool, IoError> {
        self.work = match req.op {
            Op::Read => Work::Read,
            Op::Write => Work::Write,
            Op::WriteZeroes if facts.zero_blocks.is_some() => Work::WriteZeroes,
            Op::WriteZeroes if req.flags.contains(Flags::NO_FALLBACK) => return Err(IoError::Unsupported),
            Op::WriteZeroes => Work::WriteBuffers,
            Op::Discard if facts.deallocation.is_some() => Work::Discard,
            Op::Discard => return Err(IoError::Unsupported),
            Op::Flush => Work::Flush,
        };
        self.retries = 0;
        self.done = 0;
        self.flags = req.flags;
        if self.work == Work::Flush {
            self.blocks = 0;
            // Without a cache there is nothing to flush, even if the feature changes later.
            return Ok(facts.has_write_cache);
        }
        // The namespace may have grown since it was opened: the controller checks the range.
        if offset.checked_add(req.len).is_none() {
            return Err(IoError::OutOfRange);
        }
        if (offset | req.len) & (u64::from(facts.block_size()) - 1) != 0 {
            return Err(IoError::Misaligned);
        }
        if req.op.has_data() && req.data.len() as u64 != req.len {
            return Err(IoError::Invalid);
        }
        self.lba = offset >> facts.block_shift;
        self.blocks = req.len >> facts.block_shift;
        // SAFETY: only the lifetime changes; the caller promises that the memory outlives the operation.
        self.data = unsafe { std::mem::transmute::<Data<'_>, Data<'static>>(req.data) };
        Ok(self.blocks > 0)
    }

    /// As [`Operation::begin`], for requests that only zoned namespaces support.
    ///
    /// # Errors
    /// When the namespace has no zones, or no zone at this offset.
    ///
    /// # Safety
    /// As [`crate::direct::DirectQueue::push_zone`].
    pub unsafe fn begin_zone(&mut self, req: ZoneRequest, facts: &NamespaceFacts) -> Result<bool, IoError> {
        let zones = facts.zones.ok_or(IoError::Unsupported)?;
        self.retries = 0;
        self.done = 0;
        self.blocks = 0;
        self.flags = Flags::NONE;
        let zone_start = |offset: u64| {
            let zone = offset / zones.zone_size;
            (zone < zones.zones).then_some((zone * zones.zone_size) >> facts.block_shift)
        };
        match req {
            ZoneRequest::Report { offset, zones, max, reported } => {
                self.lba = zone_start(offset).ok_or(IoError::OutOfRange)?;
                self.work = Work::Report(Report { zones, max, reported, done: 0 });
                // SAFETY: the caller's memory.
                unsafe { reported.write(0) };
                return Ok(max > 0);
            }
            ZoneRequest::Manage(action, offset) => {
                self.lba = zone_start(offset).ok_or(IoError::OutOfRange)?;
                self.work = Work::Manage(action);
            }
            ZoneRequest::ManageAll(action) => self.work = Work::ManageAll(action),
        }
        Ok(true)
    }

    /// The next command and its memory, which stays in place until the completion.
    ///
    /// # Errors
    /// When a block is spread over more memory segments than the kernel supports.
    #[inline]
    pub fn next(&mut self, facts: &NamespaceFacts, page: usize) -> Result<(Command, Memory), IoError> {
        let nsid = facts.nsid;
        let (lba, left) = (self.lba + self.done, self.blocks - self.done);
        let fua = self.flags.contains(Flags::FUA);
        Ok(match self.work {
            Work::Read | Work::Write | Work::WriteBuffers => {
                let (blocks, memory) = self.cut(facts, page)?;
                self.in_command = u64::from(blocks);
                let command = match self.work {
                    Work::Read => Command::read(nsid, lba, blocks),
                    _ => Command::write(nsid, lba, blocks, fua),
                };
                (command, memory)
            }
            Work::WriteZeroes => {
                let most = facts.zero_blocks.unwrap_or(MAX_BLOCKS).clamp(1, MAX_BLOCKS);
                let blocks = left.min(most.into());
                self.in_command = blocks;
                let deallocate = facts.zeroes_by_deallocating && !self.flags.contains(Flags::NO_UNMAP);
                (Command::write_zeroes(nsid, lba, blocks as u32, fua, deallocate), NO_MEMORY)
            }
            Work::Discard => self.deallocate(facts)?,
            Work::Flush => (Command::flush(nsid), NO_MEMORY),
            Work::Manage(action) => (Command::manage_zone(nsid, self.lba, wire(action)), NO_MEMORY),
            Work::ManageAll(action) => (Command::manage_all_zones(nsid, wire(action)), NO_MEMORY),
            Work::Report(report) => self.ask_for_report(&report, facts, page),
        })
    }

    /// Processes the completion of the command: 0, a positive NVMe status, or a negative errno.
    #[inline]
    pub fn complete(&mut self, answer: i32, facts: &NamespaceFacts) -> Next {
        if answer != 0 {
            return self.refused(answer);
        }
        self.retries = 0;
        if let Work::Report(report) = self.work {
            return self.take_report(report, facts);
        }
        self.done += self.in_command;
        if self.done < self.blocks { Next::Issue } else { Next::Finished(Ok(())) }
    }

    #[cold]
    fn refused(&mut self, answer: i32) -> Next {
        let error = match answer {
            ..0 if self.may_retry(-answer) => {
                self.retries += 1;
                return Next::IssueLater;
            }
            // The kernel aborts commands that time out: it resets the controller.
            ..0 if -answer == libc::EINTR => IoError::TimedOut,
            ..0 => IoError::from_errno(-answer),
            status => match Status::new(status as u16).result() {
                Err(error) => error,
                Ok(()) => IoError::Medium, // bits that no status has
            },
        };
        let may_write = !self.flags.contains(Flags::NO_FALLBACK);
        if self.work == Work::WriteZeroes && error == IoError::Unsupported && may_write {
            self.work = Work::WriteBuffers;
            return Next::Issue;
        }
        Next::Finished(Err(error))
    }

    /// Whether the kernel's refusal may be temporary. A command that finds the controller's queue
    /// full is passed to one of io_uring's worker threads. Kernels with the x32 ABI (Debian's 6.12)
    /// mistake some of these threads for 32-bit programs, and truncate the pointers of pass-through
    /// commands: `EFAULT` unless memory is below 4 GiB. The submitter executes the same command
    /// once the queue has room for it.
    fn may_retry(&self, errno: i32) -> bool {
        match errno {
            libc::EAGAIN => self.retries < MAX_RETRIES,
            libc::EFAULT => self.retries < MAX_FAULTS,
            _ => false,
        }
    }

    /// The memory of the next transfer, and its number of blocks.
    #[inline]
    fn cut(&mut self, facts: &NamespaceFacts, page: usize) -> Result<(u32, Memory), IoError> {
        let rest = self.rest(facts);
        let most = facts.max_transfer as usize;
        if let Some(segment) = rest.as_single() {
            let skip = segment.base.addr() % page;
            let in_pages = facts.max_pages as usize * page - skip;
            let len = segment.len.min(most).min(in_pages) >> facts.block_shift << facts.block_shift;
            // A page may be smaller than a block; the kernel refuses transfers that it cannot send.
            let len = len.max(facts.block_size() as usize);
            return Ok(((len >> facts.block_shift) as u32, Memory::Single(Segment { len, ..segment })));
        }
        let len = self.gather(rest, facts, page)?;
        let memory = match self.iovecs.as_slice() {
            [single] => Memory::Single(*single),
            _ => Memory::List,
        };
        Ok(((len >> facts.block_shift) as u32, memory))
    }

    /// The remaining data.
    #[inline]
    fn rest(&self, facts: &NamespaceFacts) -> Data<'static> {
        let done = (self.done << facts.block_shift) as usize;
        if self.work == Work::WriteBuffers {
            let left = ((self.blocks - self.done) << facts.block_shift).min(usize::MAX as u64) as usize;
            // SAFETY: list and zeroes are static, and only read.
            let zeroes = unsafe { Data::new(zero_segments()) };
            return zeroes.part(0, left.min(zeroes.len()));
        }
        if done == 0 { self.data } else { self.data.part(done, self.data.len() - done) }
    }

    /// Fills `iovecs` with the first whole blocks of `rest`, as many as one command takes. Returns
    /// their bytes. The first block is always taken, in any number of pages: the kernel then copies
    /// or refuses it.
    fn gather(&mut self, rest: Data<'_>, facts: &NamespaceFacts, page: usize) -> Result<usize, IoError> {
        let (most, block) = (facts.max_transfer as usize, facts.block_size() as usize);
        let (mut total, mut pages) = (0, 0);
        self.iovecs.clear();
        for segment in rest.iter() {
            if self.iovecs.len() == MAX_IOVECS || total == most {
                break;
            }
            let skip = segment.base.addr() % page;
            let room = (facts.max_pages as usize).saturating_sub(pages) * page;
            let budget = room.saturating_sub(skip).max(block.saturating_sub(total));
            let len = segment.len.min(most - total).min(budget);
            if len == 0 {
                break;
            }
            self.iovecs.push(Segment { len, ..segment });
            total += len;
            pages += (skip + len).div_ceil(page);
            if len < segment.len {
                break;
            }
        }
        let mut excess = total % block;
        total -= excess;
        while let Some(last) = self.iovecs.last_mut().filter(|_| excess > 0) {
            let cut = excess.min(last.len);
            last.len -= cut;
            excess -= cut;
            if last.len == 0 {
                self.iovecs.pop();
            }
        }
        if total == 0 { Err(IoError::Invalid) } else { Ok(total) }
    }

    fn deallocate(&mut self, facts: &NamespaceFacts) -> Result<(Command, Memory), IoError> {
        let limits = facts.deallocation.ok_or(IoError::Unsupported)?;
        let most = (self.blocks - self.done).min(limits.total_blocks);
        self.own.clear();
        let (mut taken, mut ranges) = (0, 0);
        while taken < most && ranges < limits.ranges {
            let blocks = (most - taken).min(limits.range_blocks.into());
            let lba = self.lba + self.done + taken;
            self.own.extend_from_slice(&deallocate_range(lba, blocks as u32));
            taken += blocks;
            ranges += 1;
        }
        self.in_command = taken;
        Ok((Command::deallocate(facts.nsid, ranges), self.own_memory()))
    }

    fn ask_for_report(&mut self, report: &Report, facts: &NamespaceFacts, page: usize) -> (Command, Memory) {
        let in_pages = page * (facts.max_pages as usize - 1).max(1);
        let room = REPORT_STEP.min(facts.max_transfer as usize).min(in_pages) - REPORT_HEADER_BYTES;
        let zones = ((report.max - report.done) as usize).min(room / DESCRIPTOR_BYTES);
        self.own.clear();
        self.own.resize(REPORT_HEADER_BYTES + zones * DESCRIPTOR_BYTES, 0);
        let len = self.own.len() as u32;
        (Command::report_zones(facts.nsid, self.lba, len), self.own_memory())
    }

    fn own_memory(&mut self) -> Memory {
        Memory::Single(Segment { base: self.own.as_mut_ptr(), len: self.own.len() })
    }

    /// Passes the zones of a received report to the caller, and continues after the last one.
    fn take_report(&mut self, mut report: Report, facts: &NamespaceFacts) -> Next {
        match self.copy_report(&mut report, facts) {
            Ok(true) => {
                self.work = Work::Report(report);
                Next::Issue
            }
            Ok(false) => {
                // SAFETY: the caller's memory.
                unsafe { report.reported.write(report.done) };
                Next::Finished(Ok(()))
            }
            Err(error) => {
                tracing::error!(%error, nsid = facts.nsid, "the controller sent an invalid zone report");
                Next::Finished(Err(IoError::Medium))
            }
        }
    }

    /// Returns `true` if another report command is needed.
    fn copy_report(&mut self, report: &mut Report, facts: &NamespaceFacts) -> Result<bool, nvme::Malformed> {
        let Some(zones) = facts.zones else { return Ok(false) };
        let count = report_count(&self.own)?;
        let zone_blocks = zones.zone_size >> facts.block_shift;
        for index in 0..count {
            let found = report_zone(&self.own, index, self.lba, zone_blocks)?;
            let bytes = |blocks: u64| blocks << facts.block_shift;
            let zone = Zone {
                start: bytes(found.start),
                len: zones.zone_size,
                capacity: bytes(found.capacity),
                write_pointer: bytes(found.write_pointer),
                zone_type: 2,
                zone_state: found.state as u8,
                reset: found.is_reset_recommended.into(),
                reserved: [0; 29],
            };
            // SAFETY: `count` is at most the requested number, which is at most the free part of
            // the caller's buffer.
            unsafe { report.zones.add(report.done as usize).write(zone) };
            report.done += 1;
            self.lba += zone_blocks;
        }
        let end = (zones.zones * zones.zone_size) >> facts.block_shift;
        Ok(count > 0 && report.done < report.max && self.lba < end)
    }
}

fn wire(action: ZoneAction) -> ZoneSendAction {
    match action {
        ZoneAction::Close => ZoneSendAction::Close,
        ZoneAction::Finish => ZoneSendAction::Finish,
        ZoneAction::Open => ZoneSendAction::Open,
        ZoneAction::Reset => ZoneSendAction::Reset,
    }
}

#[cfg(test)]
mod tests;
