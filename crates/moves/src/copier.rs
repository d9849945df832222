//! Copies what is dirty of a volume to its new place, or of a device to a new volume.

use block::{
    Channel, Device, DeviceError, Flags, IoError, IoFuture, IoResult, Op, Request, Status, StatusReport,
    join_all,
};
use layers::migrate::Dirty;
use reactor::{Buffer, BufferPool};
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// Chunks that are copied at the same time.
const DEPTH: usize = 4;
/// Maximum bytes of one copy request.
const PART: u64 = 1 << 20;
/// Maximum bytes to copy while the users of the volume wait. The limit doubles after each
/// [`PATIENCE`] passes, so that a move ends even if users write as fast as it copies.
const LAST: u64 = 8 * PART;
const PATIENCE: u32 = 8;

/// The parts of a device that are copied.
pub trait Parts {
    /// The first part of `range` that is copied; empty, at the end of the range, if there is none.
    ///
    /// # Errors
    /// The device's.
    fn next(&self, range: Range<u64>) -> impl Future<Output = Result<Range<u64>, IoError>>;
}

/// All of a device.
pub struct Whole;

impl Parts for Whole {
    async fn next(&self, range: Range<u64>) -> Result<Range<u64>, IoError> {
        Ok(range)
    }
}

/// A copier on one core.
pub struct Copier<P = Whole> {
    parts: P,
    pool: BufferPool,
    old: Rc<dyn Channel>,
    new: Rc<dyn Channel>,
    /// Bytes of the old place. The new one has zeroes behind them.
    old_size: u64,
    /// Bytes of a block of the new place.
    block: u64,
    part: u64,
    zeroes: bool,
}

impl Copier {
    /// A copier on the current core. A new place that is larger has zeroes in the rest.
    ///
    /// # Errors
    /// When a place cannot be opened there.
    pub fn new(old: &Arc<dyn Device>, new: &Arc<dyn Device>) -> Result<Copier, DeviceError> {
        let limits = [old.limits(), new.limits()];
        let part = limits.iter().map(|limits| u64::from(limits.max_transfer)).fold(PART, u64::min);
        let blocks = limits.each_ref().map(|limits| u64::from(limits.block_size));
        Ok(Copier {
            parts: Whole,
            pool: BufferPool::new(DEPTH * PART as usize),
            old: old.open_channel()?,
            new: new.open_channel()?,
            old_size: limits[0].capacity,
            block: blocks[1],
            part: part - part % blocks[0].max(blocks[1]),
            zeroes: limits[1].max_write_zeroes >= PART,
        })
    }

    /// The same for these parts only.
    #[must_use]
    pub fn only<P>(self, parts: P) -> Copier<P> {
        let Copier { parts: Whole, pool, old, new, old_size, block, part, zeroes } = self;
        Copier { parts, pool, old, new, old_size, block, part, zeroes }
    }
}

impl<P: Parts> Copier<P> {
    /// Copies all that is dirty, if it `is_last`; else until so little is left that users can wait
    /// for it. `begin` is asked before each few chunks, with their bytes, and `left` gets how many
    /// are left after them.
    ///
    /// # Errors
    /// The error of `begin`, or what `failed` makes of a place's.
    pub async fn copy<E>(
        &self,
        dirty: &Dirty,
        is_last: bool,
        mut begin: impl AsyncFnMut(u64) -> Result<(), E>,
        left: impl Fn(u64),
        failed: impl Fn(IoError) -> E,
    ) -> Result<(), E> {
        let (mut at, mut pass) = (0, 0u32);
        loop {
            let mut chunks: [Option<Range<u64>>; DEPTH] = Default::default();
            for chunk in &mut chunks {
                *chunk = dirty.take(at);
                at = chunk.as_ref().map_or(at, |chunk| chunk.end);
            }
            if chunks[0].is_none() {
                let last = LAST << (pass / PATIENCE).min(32);
                if dirty.bytes() <= if is_last { 0 } else { last } {
                    return Ok(());
                }
                (at, pass) = (0, pass + 1);
                continue;
            }
            let chunks = chunks.iter().flatten();
            begin(chunks.clone().map(|chunk| chunk.end - chunk.start).sum()).await?;
            join_all(chunks.map(|chunk| IoFuture::new(self.copy_chunk(chunk.clone()))))
                .await
                .map_err(&failed)?;
            left(dirty.bytes());
        }
    }

    /// Copies what is to be copied of a dirty range.
    async fn copy_chunk(&self, chunk: Range<u64>) -> IoResult {
        let mut at = chunk.start;
        while at < chunk.end {
            let part = self.parts.next(at..chunk.end).await?;
            at = part.end;
            self.copy_part(part).await?;
        }
        Ok(())
    }

    /// Copies a range. Parts of which the old place knows that they are zeroes are not read.
    async fn copy_part(&self, chunk: Range<u64>) -> IoResult {
        if !self.zeroes {
            return self.copy_data(chunk).await;
        }
        let data_end = chunk.end.min(self.old_size);
        let mut at = chunk.start;
        while at < data_end {
            let report = StatusReport::new();
            if self.old.block_status(&report, at, data_end - at).await.is_err() {
                return self.copy_data(at..chunk.end).await;
            }
            let (start, mut end) = (at, at);
            for extent in report.extents() {
                end += extent.len;
                let is_zero = extent.status.contains(Status::ZERO);
                // A block of the new place that is zeroes in part is data.
                let until = match is_zero {
                    true => end - end % self.block,
                    false => end.next_multiple_of(self.block).min(chunk.end),
                };
                if until > at {
                    match is_zero {
                        true => self.write_zeroes(at..until).await?,
                        false => self.copy_data(at..until).await?,
                    }
                    at = until;
                }
            }
            if at == start {
                at = (start + self.block).min(chunk.end);
                self.copy_data(start..at).await?;
            }
        }
        match at < chunk.end {
            true => self.write_zeroes(at..chunk.end).await,
            false => Ok(()),
        }
    }

    async fn write_zeroes(&self, range: Range<u64>) -> IoResult {
        let zeroes = Request::write_zeroes(range.end - range.start, Flags::NONE);
        self.new.submit(&zeroes, range.start).await
    }

    async fn copy_data(&self, range: Range<u64>) -> IoResult {
        let mut at = range.start;
        while at < range.end {
            let len = self.part.min(range.end - at);
            let buffer = self.read(at, len).await?;
            // A sum that can be computed many bytes at a time.
            let is_zero = buffer.as_slice().iter().fold(0, |any, byte| any | byte) == 0;
            match is_zero && self.zeroes {
                true => self.write_zeroes(at..at + len).await?,
                false => buffer.transfer(&*self.new, Op::Write, Flags::NONE, at).await.1?,
            }
            at += len;
        }
        Ok(())
    }

    /// Reads from the old place; behind its end are zeroes.
    async fn read(&self, at: u64, len: u64) -> Result<Buffer, IoError> {
        let has = len.min(self.old_size.saturating_sub(at));
        let mut buffer = self.pool.take(len as usize).await;
        if has == len {
            let (buffer, read) = buffer.transfer(&*self.old, Op::Read, Flags::NONE, at).await;
            return read.map(|()| buffer);
        }
        buffer.as_mut_slice().fill(0);
        if has > 0 {
            let part = self.pool.take(has as usize).await;
            let (part, read) = part.transfer(&*self.old, Op::Read, Flags::NONE, at).await;
            read?;
            buffer.as_mut_slice()[..has as usize].copy_from_slice(part.as_slice());
        }
        Ok(buffer)
    }
}
