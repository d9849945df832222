//! One request and its execution on the device.

use crate::blocks::Writes;
use crate::long_write::LongWrite;
use crate::request::Blocks;
use block::{Data, Flags, IoError, IoResult, Op};
use exports::stream::{Link, Memory, copy};
use exports::{DataMemory, Target};
use nbd::request::{CMD_FLAG_FAST_ZERO, CMD_FLAG_FUA, CMD_FLAG_NO_HOLE, Command, Header};
use std::ops::Range;

/// A validated request, with its memory.
pub(crate) struct Job {
    pub(crate) header: Header,
    /// The buffer of a read or write.
    pub(crate) memory: Option<Memory>,
    pub(crate) part: Part,
}

/// The part of a request that a job covers.
pub(crate) enum Part {
    /// The whole request.
    Whole,
    /// A long read, which allocates memory fragment by fragment.
    LongRead,
    /// A fragment of a long write.
    OfWrite(LongWrite),
}

impl Job {
    /// Executes the request.
    #[inline]
    pub(crate) async fn execute(&self, target: &Target, writes: &Writes, link: &Link) -> IoResult {
        let Header { command, flags, len, .. } = self.header;
        let is_durable = flags & CMD_FLAG_FUA != 0;
        let durable = if is_durable { target.durable() } else { Flags::NONE };
        let (op, result) = match command {
            Command::Read => (Op::Read, self.read(target).await),
            Command::Write => (Op::Write, self.write(durable, target, writes, link).await),
            Command::Flush => (Op::Flush, target.flush().await),
            Command::Trim => {
                let mut result = self.trim(target, writes).await;
                // The protocol allows FUA on every command that modifies data.
                if result.is_ok() && is_durable {
                    result = target.flush().await;
                }
                (Op::Discard, result)
            }
            Command::WriteZeroes => (Op::WriteZeroes, self.write_zeroes(durable, target, writes, link).await),
            Command::Disconnect | Command::Cache | Command::BlockStatus | Command::Unknown(_) => {
                return Err(IoError::Invalid); // answered elsewhere
            }
        };
        let stats = link.stats();
        stats.count_request(op, len);
        if result.is_err() {
            stats.count_failure();
        }
        result
    }

    #[inline]
    fn blocks(&self, target: &Target) -> Blocks {
        Blocks::of(&self.header, target.block_size())
    }

    #[inline]
    async fn read(&self, target: &Target) -> IoResult {
        let Some(memory) = &self.memory else { return Err(IoError::Invalid) };
        // SAFETY: the memory is the job's, which this future borrows; what is awaited below ends
        // before it does.
        let data = unsafe { memory.data() };
        target.transfer(Op::Read, Flags::NONE, self.blocks(target).offset, data).await
    }

    #[inline]
    async fn write(&self, durable: Flags, target: &Target, writes: &Writes, link: &Link) -> IoResult {
        let Some(memory) = &self.memory else { return Err(IoError::Invalid) };
        // SAFETY: as in `read`.
        let data = unsafe { memory.data() };
        let blocks = self.blocks(target);
        if blocks.are_meant(&self.header) {
            let _turn = writes.enter(blocks.offset, self.header.len).await;
            return target.transfer(Op::Write, durable, blocks.offset, data).await;
        }
        let _turn = writes.enter_alone(blocks.offset, blocks.len as u64, link).await;
        complete(target, blocks, self.header.len as usize, data, link).await?;
        target.transfer(Op::Write, durable, blocks.offset, data).await
    }

    /// Discards the whole blocks of the range. The protocol lets a server ignore the rest of a
    /// trim.
    async fn trim(&self, target: &Target, writes: &Writes) -> IoResult {
        let Header { offset, len, .. } = self.header;
        let inner = inner_blocks(offset, len, target.block_size());
        if inner.is_empty() {
            return Ok(());
        }
        let len = inner.end - inner.start;
        let _turn = writes.enter(inner.start, len).await;
        target.discard(inner.start, len).await
    }

    async fn write_zeroes(&self, durable: Flags, target: &Target, writes: &Writes, link: &Link) -> IoResult {
        let Header { offset, len, flags, .. } = self.header;
        let flags = durable.with(zeroing(flags));
        let block_size = target.block_size();
        let inner = inner_blocks(offset, len, block_size);
        if inner == (offset..offset + len) {
            let _turn = writes.enter(offset, len).await;
            return target.write_zeroes(offset, len, flags).await;
        }
        let blocks = self.blocks(target);
        let _turn = writes.enter_alone(blocks.offset, blocks.len as u64, link).await;
        // Executed first, since the device may refuse it: then nothing has changed.
        if !inner.is_empty() {
            target.write_zeroes(inner.start, inner.end - inner.start, flags).await?;
        }
        let range = offset..offset + len;
        let last = blocks.offset + blocks.len as u64 - u64::from(block_size);
        let edges = [blocks.offset, last];
        for edge in edges.iter().take(if blocks.offset == last { 1 } else { 2 }) {
            if !inner.contains(edge) {
                zero_part(target, *edge, &range, durable, link).await?;
            }
        }
        Ok(())
    }
}

/// The whole blocks in a range of bytes; may be empty.
fn inner_blocks(offset: u64, len: u64, block_size: u32) -> Range<u64> {
    let mask = u64::from(block_size) - 1;
    let start = (offset + mask) & !mask;
    start..((offset + len) & !mask).max(start)
}

/// Reads the data around a `len`-byte write into the first and the last block of `data`.
async fn complete(target: &Target, blocks: Blocks, len: usize, data: Data<'_>, link: &Link) -> IoResult {
    let block_size = target.block_size() as usize;
    let (head, end) = (blocks.head, blocks.head + len);
    let last = blocks.len - block_size;
    let _turn = link.scratch().await;
    let old = link.uncounted(block_size);
    // SAFETY: the memory outlives the transfers, which are awaited here.
    let block = unsafe { old.data() };
    if head > 0 {
        target.transfer(Op::Read, Flags::NONE, blocks.offset, block).await?;
        copy(block, 0, data, 0, head);
    }
    if end < blocks.len {
        if head == 0 || last > 0 {
            target.transfer(Op::Read, Flags::NONE, blocks.offset + last as u64, block).await?;
        }
        copy(block, end - last, data, end, blocks.len - end);
    }
    Ok(())
}

/// Writes zeroes to the part of the block at `at` that lies in `range`.
async fn zero_part(target: &Target, at: u64, range: &Range<u64>, durable: Flags, link: &Link) -> IoResult {
    let block_size = target.block_size();
    let _turn = link.scratch().await;
    let memory = link.uncounted(block_size as usize);
    // SAFETY: the memory outlives the transfers, which are awaited here.
    let block = unsafe { memory.data() };
    target.transfer(Op::Read, Flags::NONE, at, block).await?;
    let start = range.start.max(at) - at;
    let end = range.end.min(at + u64::from(block_size)) - at;
    block.part(start as usize, (end - start) as usize).fill(0);
    target.transfer(Op::Write, durable, at, block).await
}

/// The device flags of a command that writes zeroes.
fn zeroing(flags: u16) -> Flags {
    [(CMD_FLAG_NO_HOLE, Flags::NO_UNMAP), (CMD_FLAG_FAST_ZERO, Flags::NO_FALLBACK)]
        .into_iter()
        .filter(|(flag, _)| flags & flag != 0)
        .fold(Flags::NONE, |all, (_, meaning)| all.with(meaning))
}
