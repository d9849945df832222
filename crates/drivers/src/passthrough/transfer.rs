//! The range of a request and its memory, cut into commands that the device accepts.

use crate::zeroes::zero_segments;
use block::{Data, IoError, Request, Segment};

/// Maximum segments of one system call (`UIO_MAXIOV`).
pub(crate) const MAX_IOVECS: usize = 1024;
/// Maximum temporary refusals of one command by the kernel.
pub(crate) const MAX_RETRIES: u8 = 64;
/// Maximum `EFAULT` results of one command.
pub(crate) const MAX_FAULTS: u8 = 8;

/// The limits of one command.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TransferLimits {
    /// Size of a logical block, as a power of two.
    pub block_shift: u32,
    /// Longest transfer in bytes, a multiple of the block.
    pub max_transfer: u32,
    /// Maximum memory pages.
    pub max_pages: u32,
    /// The kernel's page size in bytes.
    pub page: usize,
}

impl TransferLimits {
    fn block(&self) -> usize {
        1 << self.block_shift
    }
}

/// The memory of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Memory {
    /// One segment; empty when its length is 0.
    Single(Segment),
    /// [`Transfer::iovecs`].
    List,
}

pub(crate) const NO_MEMORY: Memory = Memory::Single(Segment { base: std::ptr::null_mut(), len: 0 });

/// The origin of the data of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Source {
    /// The caller's memory.
    Caller,
    /// Zeroes.
    Zeroes,
}

/// The progress of one request in logical blocks.
pub(crate) struct Transfer {
    /// First block.
    pub lba: u64,
    /// Number of blocks of the request.
    pub blocks: u64,
    /// Blocks that have been completed.
    pub done: u64,
    /// Blocks of the command in flight.
    pub in_command: u64,
    /// The caller's memory. Its lifetime is the contract of `Queue::push`, not a borrow.
    data: Data<'static>,
    /// The list that a vectored command points at. Reused to avoid allocations.
    pub iovecs: Vec<Segment>,
    retries: u8,
}

impl Transfer {
    pub fn idle() -> Transfer {
        Transfer {
            lba: 0,
            blocks: 0,
            done: 0,
            in_command: 0,
            data: Data::none(),
            iovecs: Vec::new(),
            retries: 0,
        }
    }

    /// Starts a request without a range.
    #[inline]
    pub fn begin_without_range(&mut self) {
        (self.lba, self.blocks, self.done, self.in_command, self.retries) = (0, 0, 0, 0, 0);
    }

    /// Starts a request with a range, which may be empty.
    ///
    /// # Errors
    /// When the range or the memory is malformed. The end of the device is not checked: it may
    /// have grown.
    ///
    /// # Safety
    /// As [`block::Queue::push`]: the request's memory stays valid until the operation has
    /// finished.
    #[inline]
    pub unsafe fn begin(&mut self, req: &Request<'_>, offset: u64, block_shift: u32) -> Result<(), IoError> {
        self.begin_without_range();
        if offset.checked_add(req.len).is_none() {
            return Err(IoError::OutOfRange);
        }
        if (offset | req.len) & ((1 << block_shift) - 1) != 0 {
            return Err(IoError::Misaligned);
        }
        if req.op.has_data() && req.data.len() as u64 != req.len {
            return Err(IoError::Invalid);
        }
        self.lba = offset >> block_shift;
        self.blocks = req.len >> block_shift;
        // SAFETY: only the lifetime changes; the caller promises that the memory outlives the
        // operation.
        self.data = unsafe { std::mem::transmute::<Data<'_>, Data<'static>>(req.data) };
        Ok(())
    }

    /// First block of the next command.
    #[inline]
    pub fn next_lba(&self) -> u64 {
        self.lba + self.done
    }

    /// Blocks that have not been completed.
    #[inline]
    pub fn left(&self) -> u64 {
        self.blocks - self.done
    }

    /// Counts the command in flight as completed. Returns whether blocks are left.
    #[inline]
    pub fn advance(&mut self) -> bool {
        self.retries = 0;
        self.done += self.in_command;
        self.done < self.blocks
    }

    /// Whether the kernel's refusal may be temporary: the command is then to be issued once more.
    /// A command that finds the device's queue full is passed to one of io_uring's worker threads.
    /// Kernels with the x32 ABI (Debian's 6.12) mistake some of these threads for 32-bit programs,
    /// and truncate the pointers of pass-through commands: `EFAULT` unless memory is below 4 GiB.
    /// The submitter executes the same command once the queue has room for it.
    pub fn may_retry(&mut self, errno: i32) -> bool {
        let most = match errno {
            libc::EAGAIN => MAX_RETRIES,
            libc::EFAULT => MAX_FAULTS,
            _ => return false,
        };
        let may_retry = self.retries < most;
        self.retries += u8::from(may_retry);
        may_retry
    }

    /// The next command's blocks, of which there is at least one, and their memory.
    ///
    /// # Errors
    /// When a block is spread over more memory segments than the kernel supports.
    #[inline]
    pub fn cut(&mut self, source: Source, limits: &TransferLimits) -> Result<(u32, Memory), IoError> {
        let rest = self.rest(source, limits);
        let (len, memory) = match rest.as_single() {
            Some(segment) => single(segment, limits),
            None => {
                let len = self.gather(rest, limits)?;
                match self.iovecs.as_slice() {
                    [segment] => (len, Memory::Single(*segment)),
                    _ => (len, Memory::List),
                }
            }
        };
        let blocks = (len >> limits.block_shift) as u32;
        self.in_command = blocks.into();
        Ok((blocks, memory))
    }

    /// As [`Transfer::cut`], of the first of several segments of the caller's memory alone. `None`
    /// when it is the only one, shorter than a block, or `is_suitable` refuses it.
    #[inline]
    pub fn cut_first(
        &mut self,
        limits: &TransferLimits,
        is_suitable: impl FnOnce(&Segment) -> bool,
    ) -> Option<(u32, Memory)> {
        let rest = self.rest(Source::Caller, limits);
        if rest.as_single().is_some() {
            return None;
        }
        let first = rest.iter().next().filter(|first| first.len >= limits.block())?;
        let (len, memory) = single(first, limits);
        if !is_suitable(&Segment { len, ..first }) {
            return None;
        }
        let blocks = (len >> limits.block_shift) as u32;
        self.in_command = blocks.into();
        Some((blocks, memory))
    }

    /// The remaining data.
    #[inline]
    fn rest(&self, source: Source, limits: &TransferLimits) -> Data<'static> {
        if source == Source::Zeroes {
            let left = (self.left() << limits.block_shift).min(usize::MAX as u64) as usize;
            // SAFETY: list and zeroes are static, and only read.
            let zeroes = unsafe { Data::new(zero_segments()) };
            return zeroes.part(0, left.min(zeroes.len()));
        }
        let done = (self.done << limits.block_shift) as usize;
        if done == 0 { self.data } else { self.data.part(done, self.data.len() - done) }
    }

    /// Fills `iovecs` with the first whole blocks of `rest`, as many as one command takes. Returns
    /// their bytes. The first block is always taken, in any number of pages: the kernel then copies
    /// or refuses it.
    fn gather(&mut self, rest: Data<'_>, limits: &TransferLimits) -> Result<usize, IoError> {
        let TransferLimits { max_transfer, max_pages, page, .. } = *limits;
        let (most, block) = (max_transfer as usize, limits.block());
        let (mut total, mut pages) = (0, 0);
        self.iovecs.clear();
        for segment in rest.iter() {
            if self.iovecs.len() == MAX_IOVECS || total == most {
                break;
            }
            let skip = segment.base.addr() % page;
            let room = (max_pages as usize).saturating_sub(pages) * page;
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
}

/// The first whole blocks of `segment`, as many as one command takes.
#[inline]
fn single(segment: Segment, limits: &TransferLimits) -> (usize, Memory) {
    let skip = segment.base.addr() % limits.page;
    let in_pages = limits.max_pages as usize * limits.page - skip;
    let len = segment.len.min(limits.max_transfer as usize).min(in_pages);
    // A page may be smaller than a block; the kernel refuses transfers that it cannot send.
    let len = (len >> limits.block_shift << limits.block_shift).max(limits.block());
    (len, Memory::Single(Segment { len, ..segment }))
}
