//! One request as a state machine without system calls. [`Operation::begin`] starts a request,
//! [`Operation::next`] returns the next command, and [`Operation::complete`] processes its
//! completion. A request needs several consecutive commands when it exceeds a limit, when zeroes
//! must be written as data, or when a zone report is long.

use super::facts::NamespaceFacts;
use crate::direct::{Zone, ZoneAction, ZoneRequest};
use crate::passthrough::Next;
use crate::passthrough::transfer::{Memory, NO_MEMORY, Source, Transfer};
use crate::work::Work;
use block::{Flags, IoError, Request, Segment};
use nvme::command::{Command, ZoneSendAction, deallocate_range};
use nvme::zns::{DESCRIPTOR_BYTES, REPORT_HEADER_BYTES, report_count, report_zone};
use nvme::{MAX_BLOCKS, Status};

/// Bytes of a zone report per command: about a thousand zones.
const REPORT_STEP: usize = 64 << 10;

/// The task of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Task {
    Request(Work),
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

/// One slot of a queue.
pub struct Operation {
    task: Task,
    flags: Flags,
    /// Range and memory.
    pub(super) transfer: Transfer,
    /// Memory of our own: ranges to deallocate, or a zone report.
    own: Vec<u8>,
}

impl Operation {
    pub fn idle() -> Operation {
        Operation {
            task: Task::Request(Work::Flush),
            flags: Flags::NONE,
            transfer: Transfer::idle(),
            own: Vec::new(),
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
        let work = Work::of(req, facts.zero_blocks.is_some(), facts.deallocation.is_some())?;
        self.task = Task::Request(work);
        self.flags = req.flags;
        if work == Work::Flush {
            self.transfer.begin_without_range();
            // Without a cache there is nothing to flush, even if the feature changes later.
            return Ok(facts.has_write_cache);
        }
        // The namespace may have grown since it was opened: the controller checks the range.
        // SAFETY: by the contract of this function.
        unsafe { self.transfer.begin(req, offset, facts.block_shift) }?;
        Ok(self.transfer.blocks > 0)
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
        self.transfer.begin_without_range();
        self.flags = Flags::NONE;
        let zone_start = |offset: u64| {
            let zone = offset / zones.zone_size;
            (zone < zones.zones).then_some((zone * zones.zone_size) >> facts.block_shift)
        };
        match req {
            ZoneRequest::Report { offset, zones, max, reported } => {
                self.transfer.lba = zone_start(offset).ok_or(IoError::OutOfRange)?;
                self.task = Task::Report(Report { zones, max, reported, done: 0 });
                // SAFETY: the caller's memory.
                unsafe { reported.write(0) };
                return Ok(max > 0);
            }
            ZoneRequest::Manage(action, offset) => {
                self.transfer.lba = zone_start(offset).ok_or(IoError::OutOfRange)?;
                self.task = Task::Manage(action);
            }
            ZoneRequest::ManageAll(action) => self.task = Task::ManageAll(action),
        }
        Ok(true)
    }

    /// The next command and its memory, which stays in place until the completion.
    ///
    /// # Errors
    /// When a block is spread over more memory segments than the kernel supports.
    #[inline]
    pub(super) fn next(&mut self, facts: &NamespaceFacts, page: usize) -> Result<(Command, Memory), IoError> {
        let nsid = facts.nsid;
        let (lba, left) = (self.transfer.next_lba(), self.transfer.left());
        let fua = self.flags.contains(Flags::FUA);
        Ok(match self.task {
            Task::Request(work @ (Work::Read | Work::Write | Work::WriteBuffers)) => {
                let source = if work == Work::WriteBuffers { Source::Zeroes } else { Source::Caller };
                let (blocks, memory) = self.transfer.cut(source, &facts.transfer_limits(page))?;
                let command = match work {
                    Work::Read => Command::read(nsid, lba, blocks),
                    _ => Command::write(nsid, lba, blocks, fua),
                };
                (command, memory)
            }
            Task::Request(Work::WriteZeroes) => {
                let most = facts.zero_blocks.unwrap_or(MAX_BLOCKS).clamp(1, MAX_BLOCKS);
                let blocks = left.min(most.into());
                self.transfer.in_command = blocks;
                let deallocate = facts.zeroes_by_deallocating && !self.flags.contains(Flags::NO_UNMAP);
                (Command::write_zeroes(nsid, lba, blocks as u32, fua, deallocate), NO_MEMORY)
            }
            Task::Request(Work::Discard) => self.deallocate(facts)?,
            Task::Request(Work::Flush) => (Command::flush(nsid), NO_MEMORY),
            Task::Manage(action) => (Command::manage_zone(nsid, self.transfer.lba, wire(action)), NO_MEMORY),
            Task::ManageAll(action) => (Command::manage_all_zones(nsid, wire(action)), NO_MEMORY),
            Task::Report(report) => self.ask_for_report(&report, facts, page),
        })
    }

    /// Processes the completion of the command: 0, a positive NVMe status, or a negative errno.
    #[inline]
    pub fn complete(&mut self, answer: i32, facts: &NamespaceFacts) -> Next {
        if answer != 0 {
            return self.refused(answer);
        }
        let has_more = self.transfer.advance();
        if let Task::Report(report) = self.task {
            return self.take_report(report, facts);
        }
        if has_more { Next::Issue } else { Next::Finished(Ok(())) }
    }

    #[cold]
    fn refused(&mut self, answer: i32) -> Next {
        let error = match answer {
            ..0 if self.transfer.may_retry(-answer) => return Next::IssueLater,
            // The kernel aborts commands that time out: it resets the controller.
            ..0 if -answer == libc::EINTR => IoError::TimedOut,
            ..0 => IoError::from_errno(-answer),
            status => match Status::new(status as u16).result() {
                Err(error) => error,
                Ok(()) => IoError::Medium, // bits that no status has
            },
        };
        if let Task::Request(work) = self.task
            && let Some(other) = work.fallback(error, self.flags)
        {
            self.task = Task::Request(other);
            return Next::Issue;
        }
        Next::Finished(Err(error))
    }

    fn deallocate(&mut self, facts: &NamespaceFacts) -> Result<(Command, Memory), IoError> {
        let limits = facts.deallocation.ok_or(IoError::Unsupported)?;
        let most = self.transfer.left().min(limits.total_blocks);
        self.own.clear();
        let (mut taken, mut ranges) = (0, 0);
        while taken < most && ranges < limits.ranges {
            let blocks = (most - taken).min(limits.range_blocks.into());
            let lba = self.transfer.next_lba() + taken;
            self.own.extend_from_slice(&deallocate_range(lba, blocks as u32));
            taken += blocks;
            ranges += 1;
        }
        self.transfer.in_command = taken;
        Ok((Command::deallocate(facts.nsid, ranges), self.own_memory()))
    }

    fn ask_for_report(&mut self, report: &Report, facts: &NamespaceFacts, page: usize) -> (Command, Memory) {
        let in_pages = page * (facts.max_pages as usize - 1).max(1);
        let room = REPORT_STEP.min(facts.max_transfer as usize).min(in_pages) - REPORT_HEADER_BYTES;
        let zones = ((report.max - report.done) as usize).min(room / DESCRIPTOR_BYTES);
        self.own.clear();
        self.own.resize(REPORT_HEADER_BYTES + zones * DESCRIPTOR_BYTES, 0);
        let len = self.own.len() as u32;
        (Command::report_zones(facts.nsid, self.transfer.lba, len), self.own_memory())
    }

    fn own_memory(&mut self) -> Memory {
        Memory::Single(Segment { base: self.own.as_mut_ptr(), len: self.own.len() })
    }

    /// Passes the zones of a received report to the caller, and continues after the last one.
    fn take_report(&mut self, mut report: Report, facts: &NamespaceFacts) -> Next {
        match self.copy_report(&mut report, facts) {
            Ok(true) => {
                self.task = Task::Report(report);
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
            let found = report_zone(&self.own, index, self.transfer.lba, zone_blocks)?;
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
            self.transfer.lba += zone_blocks;
        }
        let end = (zones.zones * zones.zone_size) >> facts.block_shift;
        Ok(count > 0 && report.done < report.max && self.transfer.lba < end)
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
