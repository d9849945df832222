//! The device of an export, on one of the cores that serve it.

use crate::Error;
use block::{Channel, Data, Device, Flags, IoError, IoFuture, IoResult, Limits, Op, Request, StatusReport};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;

thread_local! {
    /// Open channels of this core, by device. Queues of one device on one core share a channel, so
    /// that their requests are submitted in one batch.
    static CHANNELS: RefCell<HashMap<usize, Weak<dyn Channel>>> = RefCell::default();
}

/// A device opened on the calling core.
pub struct Target {
    channel: Rc<dyn Channel>,
    /// Keeps the device alive as long as the channel.
    _device: Arc<dyn Device>,
    is_read_only: bool,
    /// The limits when it was opened; the capacity may have changed since.
    limits: Limits,
}

impl Target {
    /// Opens the device on the calling core, or shares an open channel. Refuses writes if the
    /// device or `is_read_only` says so.
    pub fn open(device: Arc<dyn Device>, is_read_only: bool) -> Result<Target, Error> {
        let key = Arc::as_ptr(&device).addr();
        // A channel found here is in use by a target, which keeps its device: no other device has
        // the same address.
        let open = CHANNELS.with_borrow(|channels| channels.get(&key).and_then(Weak::upgrade));
        let channel = match open {
            Some(channel) => channel,
            None => device.open_channel()?,
        };
        CHANNELS.with_borrow_mut(|channels| {
            channels.retain(|_, channel| channel.strong_count() > 0);
            channels.insert(key, Rc::downgrade(&channel));
        });
        let limits = device.limits();
        Ok(Target { channel, _device: device, is_read_only: is_read_only || limits.read_only, limits })
    }

    /// Submits a request that modifies nothing.
    #[inline]
    pub fn submit<'a>(&'a self, request: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        self.channel.submit(request, offset)
    }

    /// Submits a request that modifies data, unless the target is read-only.
    #[inline]
    pub fn modify<'a>(&'a self, request: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        if self.is_read_only {
            return IoFuture::ready(Err(IoError::ReadOnly));
        }
        self.channel.submit(request, offset)
    }

    /// Appends the status of the range's first bytes to `report` ([`Channel::block_status`]), which
    /// has room for an extent. Returns the number of these bytes.
    ///
    /// # Errors
    /// Those of the device, and a medium error if it answers for nothing.
    pub async fn block_status(&self, report: &StatusReport, offset: u64, len: u64) -> Result<u64, IoError> {
        let before = report.covered();
        self.channel.block_status(report, offset, len).await?;
        match report.covered() - before {
            0 => Err(IoError::Medium),
            covered => Ok(covered),
        }
    }

    /// Block size in bytes.
    #[inline]
    pub fn block_size(&self) -> u32 {
        self.limits.block_size
    }

    /// Makes completed writes durable; returns at once if the device has no volatile cache.
    pub async fn flush(&self) -> IoResult {
        if !self.limits.volatile_cache {
            return Ok(());
        }
        self.channel.submit(&Request::flush(), 0).await
    }

    /// The flags of a write that must be durable when it completes.
    #[inline]
    pub fn durable(&self) -> Flags {
        if self.limits.volatile_cache { Flags::FUA } else { Flags::NONE }
    }

    /// Reads or writes all of `data`, in parts that the device accepts.
    #[inline]
    pub async fn transfer(&self, op: Op, flags: Flags, offset: u64, data: Data<'_>) -> IoResult {
        let longest = (self.limits.max_transfer & !(self.limits.block_size - 1)) as usize;
        let mut done = 0;
        loop {
            let len = (data.len() - done).min(longest);
            let part = if len == data.len() { data } else { data.part(done, len) };
            let request = Request { op, flags, len: len as u64, data: part };
            let offset = offset + done as u64;
            match op {
                Op::Write => self.modify(&request, offset).await?,
                _ => self.submit(&request, offset).await?,
            }
            done += len;
            if done == data.len() {
                return Ok(());
            }
        }
    }

    /// Discards a range of any length.
    pub async fn discard(&self, offset: u64, len: u64) -> IoResult {
        let Limits { max_discard, discard_alignment, block_size, .. } = self.limits;
        let longest = longest_of(max_discard, discard_alignment.max(block_size).into(), block_size);
        self.in_parts(offset, len, longest, Request::discard).await
    }

    /// Writes zeroes over a range of any length.
    pub async fn write_zeroes(&self, offset: u64, len: u64, flags: Flags) -> IoResult {
        let Limits { max_write_zeroes, block_size, .. } = self.limits;
        let longest = longest_of(max_write_zeroes, block_size.into(), block_size);
        self.in_parts(offset, len, longest, |len| Request::write_zeroes(len, flags)).await
    }

    /// Executes a request without data over the whole range, at most `longest` bytes at a time.
    async fn in_parts(
        &self,
        offset: u64,
        len: u64,
        longest: u64,
        request: impl Fn(u64) -> Request<'static>,
    ) -> IoResult {
        let mut done = 0;
        while done < len {
            let part = (len - done).min(longest);
            self.modify(&request(part), offset + done).await?;
            done += part;
        }
        Ok(())
    }
}

/// The longest part: a multiple of `unit` if that fits, else of the block.
fn longest_of(max: u64, unit: u64, block: u32) -> u64 {
    let whole = max - max % unit.max(1);
    if whole > 0 { whole } else { (max & !u64::from(block - 1)).max(block.into()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_as_long_as_the_device_takes_and_whole_units_where_they_fit() {
        assert_eq!(longest_of(1 << 40, 4096, 512), 1 << 40);
        assert_eq!(longest_of(10_000, 4096, 512), 8192);
        assert_eq!(longest_of(3000, 4096, 512), 2560);
        assert_eq!(longest_of(1, 512, 512), 512);
    }
}
