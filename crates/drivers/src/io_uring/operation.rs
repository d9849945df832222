//! One request as a state machine without system calls. [`Operation::begin`] chooses the first
//! step, and [`Operation::complete`] processes the kernel's result and returns the next. A request
//! needs several steps after a short transfer, when the file does not support a way of zeroing, or
//! when zeroes must be durable.

use block::{Data, Flags, IoError, IoResult, Op, Request, Segment};
use std::os::fd::RawFd;

/// Maximum consecutive "again" results of one step.
const MAX_RETRIES: u8 = 64;
/// Maximum segments of one system call (`UIO_MAXIOV`).
pub(super) const MAX_IOVECS: usize = 1024;

/// The constant properties of a queue's file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Backing {
    pub is_block_device: bool,
    pub is_direct: bool,
    pub block_size: u32,
    /// Whether a block device can write zeroes without receiving them.
    pub zeroes_itself: bool,
    /// Whether the file is on tmpfs or ramfs: short transfers need no ring.
    pub is_in_memory: bool,
}

/// Ways of zeroing and discarding that the kernel has not refused yet.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ways {
    pub punch_hole: bool,
    pub zero_range: bool,
    /// `BLOCK_URING_CMD_DISCARD`, Linux 6.12.
    pub discard_command: bool,
}

impl Ways {
    pub fn all() -> Ways {
        Ways { punch_hole: true, zero_range: true, discard_command: true }
    }
}

/// The system call of the current step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// Move `data` from or to the file.
    Transfer,
    /// `fallocate(PUNCH_HOLE)`: zeroes the range and releases its space.
    PunchHole,
    /// `fallocate(ZERO_RANGE)`: zeroes the range and keeps its space.
    ZeroRange,
    /// Write buffers of zeroes.
    WriteZeroes,
    /// A block device's discard.
    DiscardCommand,
    /// `fdatasync`.
    Sync,
}

/// The next action after the kernel's result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// Issue the current `step` at `done`.
    Issue,
    /// The request has ended.
    Finished(IoResult),
}

/// One slot of a queue.
pub(super) struct Operation {
    pub op: Op,
    pub flags: Flags,
    pub offset: u64,
    pub len: u64,
    /// Bytes of `len` that have been moved.
    pub done: u64,
    pub step: Step,
    /// The caller's memory. Its lifetime is the contract of `Queue::push`, not a borrow.
    pub data: Data<'static>,
    /// Segments in use by the kernel that are not the caller's own list. Reused to avoid
    /// allocations.
    pub iovecs: Vec<Segment>,
    /// Another descriptor of the file, for a request that direct I/O cannot execute.
    pub other_fd: Option<RawFd>,
    /// The result that completes the request without further checks; -1 when there is none.
    pub plain_answer: i32,
    retries: u8,
}

impl Operation {
    pub fn idle() -> Operation {
        Operation {
            op: Op::Flush,
            flags: Flags::NONE,
            offset: 0,
            len: 0,
            done: 0,
            step: Step::Sync,
            data: Data::none(),
            iovecs: Vec::new(),
            other_fd: None,
            plain_answer: -1,
            retries: 0,
        }
    }

    /// Starts a request; its first step is in `step`.
    ///
    /// # Safety
    /// As [`block::Queue::push`]: the request's memory stays valid until the operation has
    /// finished.
    #[inline(always)]
    pub unsafe fn begin(&mut self, req: &Request<'_>, offset: u64, ways: &Ways, file: &Backing) -> IoResult {
        self.op = req.op;
        self.flags = req.flags;
        self.offset = offset;
        self.len = req.len;
        self.done = 0;
        self.other_fd = None;
        self.retries = 0;
        // SAFETY: only the lifetime changes; the caller promises that the memory outlives the
        // operation.
        self.data = unsafe { std::mem::transmute::<Data<'_>, Data<'static>>(req.data) };
        let is_plain = req.op.has_data() && !req.flags.contains(Flags::FUA) && req.len <= i32::MAX as u64;
        self.plain_answer = if is_plain { req.len as i32 } else { -1 };
        self.step = match req.op {
            Op::Read | Op::Write => Step::Transfer,
            Op::WriteZeroes => self.zero_step(ways, file).ok_or(IoError::Unsupported)?,
            Op::Discard => discard_step(ways, file).ok_or(IoError::Unsupported)?,
            Op::Flush => Step::Sync,
        };
        Ok(())
    }

    /// The memory of a plain transfer before its first step: one segment, not durable.
    #[inline]
    pub fn plain(&self) -> Option<Segment> {
        if self.plain_answer > 0 { self.data.as_single() } else { None }
    }

    /// Processes the kernel's result of the current step: bytes moved, 0, or a negative errno.
    pub fn complete(&mut self, result: i32, ways: &mut Ways, file: &Backing) -> Next {
        if result < 0 {
            return self.refused(-result, ways, file);
        }
        self.retries = 0;
        match self.step {
            Step::Transfer | Step::WriteZeroes => self.moved(result as u64, file),
            Step::PunchHole | Step::ZeroRange
                if self.flags.contains(Flags::FUA) && self.op == Op::WriteZeroes =>
            {
                self.step = Step::Sync;
                Next::Issue
            }
            Step::PunchHole | Step::ZeroRange | Step::DiscardCommand | Step::Sync => Next::Finished(Ok(())),
        }
    }

    /// The remaining data, and its offset on the device.
    pub fn rest(&self) -> (Data<'static>, u64) {
        let done = self.done as usize;
        let rest = if done == 0 { self.data } else { self.data.part(done, self.data.len() - done) };
        (rest, self.offset + self.done)
    }

    /// Fills `iovecs` with as much of `rest` as one system call accepts.
    pub fn gather(&mut self, rest: Data<'static>, file: &Backing) {
        self.iovecs.clear();
        self.iovecs.extend(rest.iter().take(MAX_IOVECS));
        if self.iovecs.len() < MAX_IOVECS || !file.is_direct {
            return;
        }
        // Direct I/O moves whole blocks: all calls but the last must end on a block boundary.
        let len: usize = self.iovecs.iter().map(|s| s.len).sum();
        let mut excess = len % file.block_size as usize;
        while let Some(last) = self.iovecs.last_mut().filter(|_| excess > 0) {
            let cut = excess.min(last.len);
            last.len -= cut;
            excess -= cut;
            if last.len == 0 {
                self.iovecs.pop();
            }
        }
    }

    /// Handles a transfer of `count` bytes, which may be short.
    fn moved(&mut self, count: u64, file: &Backing) -> Next {
        let is_read = self.op == Op::Read;
        if count == 0 && !is_read {
            return Next::Finished(Err(IoError::NoSpace));
        }
        self.plain_answer = -1;
        self.done += count;
        if self.done >= self.len {
            return Next::Finished(Ok(()));
        }
        // A read stops at the end of the file; a direct read stops inside a block only there.
        // Device bytes beyond it (the file shrank, or ends inside its last block) read as zeroes.
        let is_end = count == 0 || (file.is_direct && !count.is_multiple_of(u64::from(file.block_size)));
        if is_read && is_end {
            if self.data.is_registered() {
                // Only a repetition with memory can fill the rest with zeroes.
                return Next::Finished(Err(IoError::Unsupported));
            }
            self.rest().0.fill(0);
            return Next::Finished(Ok(()));
        }
        if !is_read && file.is_direct {
            self.done -= self.done % u64::from(file.block_size);
        }
        Next::Issue
    }

    fn refused(&mut self, errno: i32, ways: &mut Ways, file: &Backing) -> Next {
        let is_missing = match self.step {
            // A kernel without the command returns one of these, depending on its version.
            Step::DiscardCommand => matches!(errno, libc::EOPNOTSUPP | libc::EINVAL | libc::ENOTTY),
            Step::PunchHole | Step::ZeroRange => matches!(errno, libc::EOPNOTSUPP | libc::ENOSYS),
            Step::Transfer | Step::WriteZeroes | Step::Sync => false,
        };
        if is_missing {
            match self.step {
                Step::DiscardCommand => ways.discard_command = false,
                Step::PunchHole => ways.punch_hole = false,
                _ => ways.zero_range = false,
            }
            let other = match self.op {
                Op::Discard => discard_step(ways, file),
                _ => self.zero_step(ways, file),
            };
            let Some(other) = other else { return Next::Finished(Err(IoError::Unsupported)) };
            self.step = other;
            return Next::Issue;
        }
        if matches!(errno, libc::EAGAIN | libc::EINTR) && self.retries < MAX_RETRIES {
            self.retries += 1;
            return Next::Issue;
        }
        Next::Finished(Err(IoError::from_errno(errno)))
    }

    /// The best remaining way to write zeroes.
    fn zero_step(&self, ways: &Ways, file: &Backing) -> Option<Step> {
        let may_be_slow = !self.flags.contains(Flags::NO_FALLBACK);
        if ways.punch_hole && !self.flags.contains(Flags::NO_UNMAP) {
            Some(Step::PunchHole)
        } else if ways.zero_range && (may_be_slow || !file.is_block_device || file.zeroes_itself) {
            // The kernel writes the zeroes if the block device cannot.
            Some(Step::ZeroRange)
        } else if may_be_slow {
            Some(Step::WriteZeroes)
        } else {
            None
        }
    }
}

fn discard_step(ways: &Ways, file: &Backing) -> Option<Step> {
    if file.is_block_device && ways.discard_command {
        Some(Step::DiscardCommand)
    } else if ways.punch_hole {
        Some(Step::PunchHole)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: Backing = Backing {
        is_block_device: false,
        is_direct: false,
        block_size: 512,
        zeroes_itself: false,
        is_in_memory: false,
    };
    const DIRECT: Backing = Backing { is_direct: true, ..FILE };
    const BLOCK_DEVICE: Backing = Backing { is_block_device: true, ..DIRECT };

    fn begin(req: &Request<'_>, ways: &Ways, file: &Backing) -> Result<Operation, IoError> {
        let mut operation = Operation::idle();
        // SAFETY: the tests keep their buffers until the end.
        unsafe { operation.begin(req, 0, ways, file) }.map(|()| operation)
    }

    fn segment(buffer: &mut [u8]) -> [Segment; 1] {
        [Segment { base: buffer.as_mut_ptr(), len: buffer.len() }]
    }

    #[test]
    fn a_short_transfer_goes_on_where_it_stopped() {
        let mut buffer = vec![1; 4096];
        let list = segment(&mut buffer);
        // SAFETY: the buffer outlives the operation.
        let req = Request::read(unsafe { Data::new(&list) });
        let mut ways = Ways::all();
        let mut operation = begin(&req, &ways, &FILE).unwrap();
        assert_eq!(operation.complete(1000, &mut ways, &FILE), Next::Issue);
        let (rest, offset) = operation.rest();
        assert_eq!((rest.len(), offset), (3096, 1000));
        assert_eq!(operation.complete(3096, &mut ways, &FILE), Next::Finished(Ok(())));
    }

    #[test]
    fn a_read_past_the_end_of_the_file_reads_zeroes() {
        for (file, answers) in [(&FILE, &[700, 0][..]), (&DIRECT, &[700])] {
            let mut buffer = vec![1; 1024];
            let list = segment(&mut buffer);
            // SAFETY: the buffer outlives the operation.
            let req = Request::read(unsafe { Data::new(&list) });
            let mut ways = Ways::all();
            let mut operation = begin(&req, &ways, file).unwrap();
            let last = answers.iter().map(|n| operation.complete(*n, &mut ways, file)).last();
            assert_eq!(last, Some(Next::Finished(Ok(()))));
            assert_eq!(buffer, [vec![1; 700], vec![0; 324]].concat());
        }
    }

    #[test]
    fn the_kernel_may_say_again_only_so_often() {
        let mut ways = Ways::all();
        let mut operation = begin(&Request::flush(), &ways, &FILE).unwrap();
        for _ in 0..MAX_RETRIES {
            assert_eq!(operation.complete(-libc::EINTR, &mut ways, &FILE), Next::Issue);
        }
        assert_eq!(
            operation.complete(-libc::EAGAIN, &mut ways, &FILE),
            Next::Finished(Err(IoError::from_errno(libc::EAGAIN)))
        );
    }

    #[test]
    fn zeroing_falls_back_step_by_step_and_remembers_it() {
        let mut ways = Ways::all();
        let mut operation = begin(&Request::write_zeroes(4096, Flags::NONE), &ways, &FILE).unwrap();
        assert_eq!(operation.step, Step::PunchHole);
        assert_eq!(operation.complete(-libc::EOPNOTSUPP, &mut ways, &FILE), Next::Issue);
        assert_eq!(operation.step, Step::ZeroRange);
        assert_eq!(operation.complete(-libc::EOPNOTSUPP, &mut ways, &FILE), Next::Issue);
        assert_eq!(operation.step, Step::WriteZeroes);
        assert_eq!(operation.complete(4096, &mut ways, &FILE), Next::Finished(Ok(())));
        assert_eq!(
            begin(&Request::write_zeroes(4096, Flags::NONE), &ways, &FILE).unwrap().step,
            Step::WriteZeroes
        );
        let refused = begin(&Request::write_zeroes(4096, Flags::NO_FALLBACK), &ways, &FILE);
        assert_eq!(refused.err(), Some(IoError::Unsupported));
        assert_eq!(begin(&Request::discard(4096), &ways, &FILE).err(), Some(IoError::Unsupported));
    }

    #[test]
    fn zeroes_that_must_stay_allocated_punch_no_hole() {
        let ways = Ways::all();
        let keep = Request::write_zeroes(4096, Flags::NO_UNMAP);
        assert_eq!(begin(&keep, &ways, &FILE).unwrap().step, Step::ZeroRange);
        let fast = keep.with_flags(Flags::NO_UNMAP.with(Flags::NO_FALLBACK));
        assert_eq!(begin(&fast, &ways, &BLOCK_DEVICE).err(), Some(IoError::Unsupported));
        let able = Backing { zeroes_itself: true, ..BLOCK_DEVICE };
        assert_eq!(begin(&fast, &ways, &able).unwrap().step, Step::ZeroRange);
    }

    #[test]
    fn durable_zeroes_are_synced_before_they_complete() {
        let mut ways = Ways::all();
        let mut operation = begin(&Request::write_zeroes(4096, Flags::FUA), &ways, &FILE).unwrap();
        assert_eq!(operation.complete(0, &mut ways, &FILE), Next::Issue);
        assert_eq!(operation.step, Step::Sync);
        assert_eq!(
            operation.complete(-libc::EIO, &mut ways, &FILE),
            Next::Finished(Err(IoError::Medium)),
            "a sync that fails fails the request"
        );
    }

    #[test]
    fn a_discard_without_the_command_punches_a_hole() {
        let mut ways = Ways::all();
        let mut operation = begin(&Request::discard(4096), &ways, &BLOCK_DEVICE).unwrap();
        assert_eq!(operation.step, Step::DiscardCommand);
        assert_eq!(operation.complete(-libc::EINVAL, &mut ways, &BLOCK_DEVICE), Next::Issue);
        assert_eq!(operation.step, Step::PunchHole);
        assert!(!ways.discard_command);
    }

    #[test]
    fn a_long_segment_list_is_cut_at_a_block_border_for_direct_files() {
        let mut buffer = vec![0u8; (MAX_IOVECS + 500) * 12];
        let list: Vec<Segment> =
            buffer.chunks_mut(12).map(|c| Segment { base: c.as_mut_ptr(), len: c.len() }).collect();
        // SAFETY: the buffer outlives the operation.
        let req = Request::read(unsafe { Data::new(&list) });
        let mut operation = begin(&req, &Ways::all(), &DIRECT).unwrap();
        operation.gather(operation.rest().0, &DIRECT);
        let len: usize = operation.iovecs.iter().map(|s| s.len).sum();
        assert_eq!(len, MAX_IOVECS * 12 / 512 * 512);
        operation.gather(operation.rest().0, &FILE);
        assert_eq!(operation.iovecs.len(), MAX_IOVECS);
    }

    #[test]
    fn a_registered_buffer_that_a_read_does_not_fill_is_read_again_with_memory() {
        let req = Request::read(Data::registered(0, 3, 4096));
        for (file, answers) in [(&FILE, &[700, 0][..]), (&DIRECT, &[700]), (&DIRECT, &[0])] {
            let mut ways = Ways::all();
            let mut operation = begin(&req, &ways, file).unwrap();
            let last = answers.iter().map(|n| operation.complete(*n, &mut ways, file)).last();
            assert_eq!(last, Some(Next::Finished(Err(IoError::Unsupported))));
        }
        let mut operation = begin(&req, &Ways::all(), &DIRECT).unwrap();
        assert_eq!(operation.complete(512, &mut Ways::all(), &DIRECT), Next::Issue);
        assert_eq!(
            operation.rest().0.as_registered().map(|b| (b.index, b.offset, b.len)),
            Some((3, 512, 3584))
        );
        assert_eq!(operation.complete(3584, &mut Ways::all(), &DIRECT), Next::Finished(Ok(())));
    }
}
