//! One slot: a request and its execution by the server, part by part.

use super::coverage::Coverage;
use block::{Data, Flags, IoError, IoResult, Op, Request, Status, StatusReport};
use nbd::Replies;
use nbd::client::Facts;
use nbd::error::{EOVERFLOW, ESHUTDOWN, error_of};
use nbd::reply::Violation;
use nbd::request::{CMD_FLAG_FAST_ZERO, CMD_FLAG_FUA, CMD_FLAG_NO_HOLE, Command};
use std::ptr::NonNull;

/// Longest range of a request with a 32-bit length: servers differ in their handling of the largest
/// values.
const MAX_COMPACT_RANGE: u64 = 1 << 30;

/// The properties of the export that a slot needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct Traits {
    pub(super) has_flush: bool,
    has_trim: bool,
    has_fua: bool,
    has_write_zeroes: bool,
    has_fast_zero: bool,
    /// Block size of the device in bytes.
    pub(super) block: u64,
    max_payload: u64,
    /// Longest range of a request without data; shrinks when the server refuses one as too long.
    max_range: u64,
}

impl Traits {
    pub(super) fn new(facts: &Facts) -> Traits {
        let is_extended = facts.replies == Replies::Extended;
        Traits {
            has_flush: facts.has_flush(),
            has_trim: facts.has_trim(),
            has_fua: facts.has_fua(),
            has_write_zeroes: facts.has_write_zeroes(),
            has_fast_zero: facts.has_fast_zero(),
            block: facts.min_block.into(),
            max_payload: facts.max_payload.into(),
            max_range: if is_extended { u64::MAX } else { MAX_COMPACT_RANGE },
        }
    }
}

/// A request from its beginning.
#[derive(Clone, Copy)]
struct Whole {
    command: Command,
    flags: u16,
    offset: u64,
    len: u64,
    data: Data<'static>,
    then_flush: bool,
}

/// The next action of a slot when a part has ended.
pub(super) enum Next {
    /// Send the next part to the server.
    Issue,
    /// The request is complete.
    End(IoResult),
}

/// A request, or an idle slot.
pub(super) struct Operation {
    pub(super) is_busy: bool,
    pub(super) command: Command,
    pub(super) flags: u16,
    /// Offset and length of the part in flight.
    pub(super) offset: u64,
    pub(super) part: u64,
    /// Bytes after that part; before the first part: all.
    rest: u64,
    /// The request as it began, for another connection.
    whole: Whole,
    /// The caller's memory from the part in flight on.
    pub(super) data: Data<'static>,
    /// Whether the data of a write is all zeroes.
    pub(super) writes_zeroes: bool,
    /// Whether a flush follows the last part.
    then_flush: bool,
    /// The outbox position at which the part in flight has been sent completely.
    pub(super) sent_at: u64,
    /// The first error of the part in flight, as the protocol's number; 0: none.
    pub(super) error: u32,
    covered: Coverage,
    /// The report of a query of block status, until it has ended.
    report: Option<NonNull<StatusReport>>,
    /// Bytes of the part in flight that the server has described.
    described: u64,
    /// Bytes of the part in flight that are in the report.
    reported: u64,
    generation: u32,
    is_answered: bool,
}

// SAFETY: the pointers of window and report belong to the owner of the request, on any thread.
unsafe impl Send for Operation {}

impl Operation {
    /// A free slot.
    pub(super) fn idle() -> Operation {
        let whole = Whole {
            command: Command::Flush,
            flags: 0,
            offset: 0,
            len: 0,
            data: Data::none(),
            then_flush: false,
        };
        Operation {
            whole,
            is_busy: false,
            command: Command::Flush,
            flags: 0,
            offset: 0,
            part: 0,
            rest: 0,
            data: Data::none(),
            writes_zeroes: false,
            then_flush: false,
            sent_at: 0,
            error: 0,
            covered: Coverage::default(),
            report: None,
            described: 0,
            reported: 0,
            generation: 0,
            is_answered: false,
        }
    }

    /// Starts a request; its first part can be begun.
    ///
    /// # Errors
    /// When the server does not support it.
    ///
    /// # Safety
    /// The request's memory obeys the contract of [`Data::new`] until the request has ended.
    #[inline]
    pub(super) unsafe fn begin(&mut self, req: &Request<'_>, offset: u64, traits: &Traits) -> IoResult {
        let mut flags = 0;
        self.writes_zeroes = false;
        self.command = match req.op {
            Op::Read => Command::Read,
            Op::Write => Command::Write,
            Op::Flush => Command::Flush,
            Op::Discard if !traits.has_trim => return Err(IoError::Unsupported),
            Op::Discard => Command::Trim,
            Op::WriteZeroes => {
                let must_be_fast = req.flags.contains(Flags::NO_FALLBACK);
                if must_be_fast && !traits.has_fast_zero {
                    return Err(IoError::Unsupported);
                }
                flags |= if must_be_fast { CMD_FLAG_FAST_ZERO } else { 0 };
                self.writes_zeroes = !traits.has_write_zeroes;
                if req.flags.contains(Flags::NO_UNMAP) && !self.writes_zeroes {
                    flags |= CMD_FLAG_NO_HOLE;
                }
                if self.writes_zeroes { Command::Write } else { Command::WriteZeroes }
            }
        };
        let is_fua = req.is_fua() && matches!(req.op, Op::Write | Op::WriteZeroes);
        if is_fua && traits.has_fua {
            flags |= CMD_FLAG_FUA;
        }
        self.then_flush = is_fua && !traits.has_fua && traits.has_flush;
        self.flags = flags;
        self.offset = if req.op == Op::Flush { 0 } else { offset };
        self.rest = req.len;
        // SAFETY: by contract the list and the memory live until the request has ended, and the
        // slot forgets them then.
        self.data = unsafe { std::mem::transmute::<Data<'_>, Data<'static>>(req.data) };
        self.is_busy = true;
        self.whole = Whole {
            command: self.command,
            flags,
            offset: self.offset,
            len: req.len,
            data: self.data,
            then_flush: self.then_flush,
        };
        Ok(())
    }

    /// Starts the request again, over another connection: a completed part may be lost with a
    /// server that had not flushed it. Returns whether that is possible: a query ends instead, and
    /// the bytes that are not in its report yet are data.
    pub(super) fn start_over(&mut self) -> bool {
        if self.command == Command::BlockStatus {
            self.report_data(self.part);
            self.report = None;
            return false;
        }
        let Whole { command, flags, offset, len, data, then_flush } = self.whole;
        (self.command, self.flags, self.offset, self.rest) = (command, flags, offset, len);
        (self.data, self.then_flush) = (data, then_flush);
        true
    }

    /// Whether the server has answered that it shuts down.
    pub(super) fn met_shutdown(&self) -> bool {
        self.error == ESHUTDOWN
    }

    /// Starts a query of block status, which has one part.
    ///
    /// # Safety
    /// The report stays valid until the query has ended.
    pub(super) unsafe fn begin_status(
        &mut self,
        report: &StatusReport,
        offset: u64,
        len: u64,
        traits: &Traits,
    ) {
        (self.command, self.flags, self.offset) = (Command::BlockStatus, 0, offset);
        (self.writes_zeroes, self.then_flush, self.data) = (false, false, Data::none());
        self.rest = len.min(traits.max_range);
        self.report = Some(NonNull::from(report));
        (self.described, self.reported) = (0, 0);
        self.is_busy = true;
    }

    /// Accepts the next extent of a query, and appends what is not data to its report: whole blocks
    /// of `block` bytes in the part in flight.
    ///
    /// # Errors
    /// If the extent is empty.
    pub(super) fn describe(&mut self, len: u64, status: Status, block: u64) -> Result<(), Violation> {
        if len == 0 {
            return Err(Violation::EmptyExtent);
        }
        let from = self.described;
        self.described += len.min(self.part - from);
        let (start, end) = (from.next_multiple_of(block), self.described & !(block - 1));
        if status != Status::DATA && start < end {
            self.report_data(start);
            self.report_extent(end, status);
        }
        Ok(())
    }

    /// Appends data up to byte `end` of the part in flight to the report.
    fn report_data(&mut self, end: u64) {
        self.report_extent(end, Status::DATA);
    }

    /// Appends an extent up to byte `end` of the part in flight, if the report has room.
    fn report_extent(&mut self, end: u64, status: Status) {
        let Some(report) = self.report else { return };
        // SAFETY: the caller keeps the report until the query has ended, which forgets it.
        let report = unsafe { report.as_ref() };
        if report.push(end - self.reported, status) {
            self.reported = end;
        } else {
            self.report = None;
        }
    }

    /// Ends a query: the bytes that are not in the report yet are data. A server that reports an
    /// error or no extent does not know, so that the whole part is data.
    fn conclude_status(&mut self, block: u64) -> Next {
        let end = if self.error != 0 || self.described == 0 { self.part } else { self.described };
        self.report_data(end.next_multiple_of(block).min(self.part));
        self.report = None;
        Next::End(Ok(()))
    }

    /// Starts the next part. Returns the generation that its replies must carry.
    #[inline]
    pub(super) fn begin_part(&mut self, traits: &Traits) -> u32 {
        let most = match self.command {
            Command::Read | Command::Write => traits.max_payload,
            Command::Trim | Command::WriteZeroes => traits.max_range,
            Command::BlockStatus => self.rest,
            Command::Flush | Command::Disconnect | Command::Cache | Command::Unknown(_) => 0,
        };
        self.part = self.rest.min(most);
        self.rest -= self.part;
        self.error = 0;
        self.is_answered = false;
        self.covered.clear();
        self.generation = self.generation.wrapping_add(1);
        self.generation
    }

    /// Whether a reply to the request of `generation` in this slot is still pending.
    #[inline]
    pub(super) fn awaits(&self, generation: u32) -> bool {
        self.is_busy && !self.is_answered && self.generation == generation
    }

    /// Expects all data of the part in flight in one piece. Returns its length.
    #[inline]
    pub(super) fn expect_all(&mut self) -> Result<usize, Violation> {
        self.covered.add(0, self.part)?;
        Ok(self.part as usize)
    }

    /// Accepts `len` bytes of data at `offset` of the export. Returns their position in the part in
    /// flight.
    #[inline]
    pub(super) fn cover(&mut self, offset: u64, len: u32) -> Result<usize, Violation> {
        let len = u64::from(len);
        let outside = Violation::Outside { offset, len };
        let at = offset.checked_sub(self.offset).ok_or(outside)?;
        if at >= self.part || len > self.part - at {
            return Err(outside);
        }
        match self.covered.add(at, at + len) {
            Err(Violation::Overlap { .. }) => Err(Violation::Overlap { offset, len }),
            added => added.map(|()| at as usize),
        }
    }

    /// Records the last reply to the part in flight.
    #[inline]
    pub(super) fn answer(&mut self) -> Result<(), Violation> {
        if self.command == Command::Read && self.error == 0 && !self.covered.is_whole(self.part) {
            return Err(Violation::Incomplete);
        }
        self.is_answered = true;
        Ok(())
    }

    /// Determines the next action after the part in flight.
    #[inline]
    pub(super) fn conclude(&mut self, traits: &mut Traits) -> Next {
        if self.command == Command::BlockStatus {
            return self.conclude_status(traits.block);
        }
        if self.error != 0 {
            return self.conclude_error(traits);
        }
        if self.rest > 0 {
            self.offset += self.part;
            if !self.data.is_empty() {
                self.data = self.data.part(self.part as usize, self.rest as usize);
            }
            return Next::Issue;
        }
        if self.then_flush {
            (self.command, self.flags, self.offset, self.then_flush) = (Command::Flush, 0, 0, false);
            return Next::Issue;
        }
        Next::End(Ok(()))
    }

    #[cold]
    fn conclude_error(&mut self, traits: &mut Traits) -> Next {
        let is_range = matches!(self.command, Command::Trim | Command::WriteZeroes);
        if self.error == EOVERFLOW && is_range && self.part > traits.max_payload {
            traits.max_range = traits.max_payload;
            self.rest += self.part;
            return Next::Issue;
        }
        Next::End(Err(error_of(self.error)))
    }
}
