//! A disk whose bytes a command reads and writes: that of an image, or of its backing file.

use crate::error::Problem;
use crate::image::open_reader;
use crate::reader::Reader;
use block::{Channel, Device, Flags, IoError, IoResult, Limits, Op, Request, Status, StatusReport};
use reactor::MAX_BUFFER;
use std::ops::Range;
use std::rc::Rc;

/// See the module.
pub(super) struct Disk {
    channel: Rc<dyn Channel>,
    reader: Reader,
    limits: Limits,
}

impl Disk {
    /// The disk on `device`, on the calling core.
    ///
    /// # Errors
    /// When the channel cannot be opened.
    pub(super) fn open(device: &dyn Device) -> Result<Disk, Problem> {
        let channel = device.open_channel().map_err(|error| Problem::Refused(error.to_string()))?;
        Ok(Disk { channel, reader: open_reader(device)?, limits: device.limits() })
    }

    /// The bytes at `offset`, and zeroes behind the end of the disk.
    ///
    /// # Errors
    /// The device's.
    pub(super) async fn read(&self, offset: u64, len: u64) -> Result<Vec<u8>, IoError> {
        self.reader.read_padded(offset, len).await
    }

    /// How many of `len` bytes at `offset` are zeroes, as far as the device knows without reading
    /// them. All bytes behind the end of the disk are.
    pub(super) async fn zeroes(&self, offset: u64, len: u64) -> u64 {
        let inside = self.limits.capacity.saturating_sub(offset).min(len);
        let report = StatusReport::new();
        // A device that cannot answer is read.
        if inside > 0 && self.channel.block_status(&report, offset, inside).await.is_err() {
            return 0;
        }
        let known = report.extents().take_while(|extent| extent.status.contains(Status::ZERO));
        match known.map(|extent| extent.len).sum::<u64>() {
            zeroes if zeroes >= inside => len,
            zeroes => zeroes,
        }
    }

    /// Writes bytes, which may share blocks with others.
    ///
    /// # Errors
    /// The device's.
    pub(super) async fn write(&self, offset: u64, bytes: &[u8]) -> IoResult {
        let unit = u64::from(self.limits.block_size);
        let (start, end) = (offset / unit * unit, (offset + bytes.len() as u64).next_multiple_of(unit));
        if (start, end) != (offset, offset + bytes.len() as u64) {
            let mut blocks = self.read(start, end - start).await?;
            blocks[(offset - start) as usize..][..bytes.len()].copy_from_slice(bytes);
            return self.write_blocks(start, &blocks).await;
        }
        self.write_blocks(offset, bytes).await
    }

    async fn write_blocks(&self, offset: u64, bytes: &[u8]) -> IoResult {
        let longest = self.longest();
        for (part, at) in bytes.chunks(longest).zip((offset..).step_by(longest)) {
            let mut buffer = reactor::current().buffers().take(part.len()).await;
            buffer.as_mut_slice().copy_from_slice(part);
            buffer.transfer(&*self.channel, Op::Write, Flags::NONE, at).await.1?;
        }
        Ok(())
    }

    /// Longest write of bytes.
    fn longest(&self) -> usize {
        MAX_BUFFER.min(self.limits.max_transfer as usize)
    }

    /// Writes zeroes, as data if the device cannot do more.
    ///
    /// # Errors
    /// The device's.
    pub(super) async fn write_zeroes(&self, range: Range<u64>) -> IoResult {
        let unit = u64::from(self.limits.block_size);
        let is_whole = range.start.is_multiple_of(unit) && range.end.is_multiple_of(unit);
        let most = if is_whole { self.limits.max_write_zeroes } else { 0 };
        let mut at = range.start;
        while at < range.end {
            let len = (range.end - at).min(if most == 0 { self.longest() as u64 } else { most });
            match most {
                0 => self.write(at, &vec![0; len as usize]).await?,
                _ => self.channel.submit(&Request::write_zeroes(len, Flags::NONE), at).await?,
            }
            at += len;
        }
        Ok(())
    }

    /// Discards, if the device can.
    ///
    /// # Errors
    /// The device's.
    pub(super) async fn discard(&self, range: Range<u64>) -> IoResult {
        let mut at = range.start;
        while at < range.end && self.limits.max_discard > 0 {
            let len = (range.end - at).min(self.limits.max_discard);
            self.channel.submit(&Request::discard(len), at).await?;
            at += len;
        }
        Ok(())
    }

    /// Makes completed writes durable.
    ///
    /// # Errors
    /// The device's.
    pub(super) async fn flush(&self) -> IoResult {
        self.channel.submit(&Request::flush(), 0).await
    }
}
