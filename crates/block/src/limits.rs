//! The limits of a device: capacity, block sizes, alignment, largest requests, and its properties.

use crate::{Flags, IoError, IoFuture, IoResult, Op, Request, StatusReport};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The limits and properties of a device. Exports report them to their clients.
///
/// Sizes are bytes. After a change at run time (a device that grew), [`crate::Device::limits`]
/// returns the new ones.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Size of the device; a multiple of `block_size`.
    pub capacity: u64,
    /// Logical block size: every offset and length is a multiple of it. A power of two, at least
    /// 512.
    pub block_size: u32,
    /// Physical block size: writes below it cost a read-modify-write inside the device.
    pub physical_block_size: u32,
    /// The fastest I/O size (a RAID stripe); 0 if unknown.
    pub optimal_io_size: u32,
    /// Alignment of every memory segment's address and length. A power of two; 1 if the device
    /// takes any.
    pub memory_alignment: u32,
    /// Longest read or write.
    pub max_transfer: u32,
    /// Largest number of memory segments in one request.
    pub max_segments: u16,
    /// Longest discard; 0 if the device does not support discard.
    pub max_discard: u64,
    /// Alignment that makes a discard effective.
    pub discard_alignment: u32,
    /// Longest write-zeroes; 0 if the device does not support it.
    pub max_write_zeroes: u64,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Whether completed writes may sit in a volatile cache until a flush.
    pub volatile_cache: bool,
    /// Whether a write with [`Flags::FUA`] costs less than a write and a flush.
    pub native_fua: bool,
    /// Whether the medium rotates.
    pub rotational: bool,
}

impl Limits {
    /// Limits of a plain device of `capacity` bytes: 512-byte blocks, no volatile cache.
    pub fn new(capacity: u64) -> Limits {
        Limits {
            capacity,
            block_size: 512,
            physical_block_size: 4096,
            optimal_io_size: 0,
            memory_alignment: 1,
            max_transfer: 1 << 30,
            max_segments: 1024,
            max_discard: 1 << 40,
            discard_alignment: 4096,
            max_write_zeroes: 1 << 40,
            read_only: false,
            volatile_cache: false,
            native_fua: true,
            rotational: false,
        }
    }

    /// Checks a request's range, alignment, permission and size. Every leaf calls it before it
    /// starts a request. Accepts any offset and length without overflow.
    #[inline]
    pub fn check(&self, req: &Request<'_>, offset: u64) -> IoResult {
        self.check_within(self.capacity, req, offset)
    }

    /// Checks that a range is inside the device, and a multiple of its block size. Accepts any
    /// offset and length without overflow.
    #[inline]
    pub fn check_range(&self, offset: u64, len: u64) -> IoResult {
        self.check_range_within(self.capacity, offset, len)
    }

    #[inline]
    fn check_range_within(&self, capacity: u64, offset: u64, len: u64) -> IoResult {
        match offset.checked_add(len) {
            Some(end) if end <= capacity => {}
            _ => return Err(IoError::OutOfRange),
        }
        if (offset | len) & (u64::from(self.block_size) - 1) != 0 {
            return Err(IoError::Misaligned);
        }
        Ok(())
    }

    #[inline]
    fn check_within(&self, capacity: u64, req: &Request<'_>, offset: u64) -> IoResult {
        if req.op == Op::Flush {
            return Ok(());
        }
        self.check_range_within(capacity, offset, req.len)?;
        if req.op.is_modifying() && self.read_only {
            return Err(IoError::ReadOnly);
        }
        match req.op {
            Op::Read | Op::Write if req.data.len() as u64 != req.len => Err(IoError::Invalid),
            Op::Read | Op::Write if req.len > u64::from(self.max_transfer) => Err(IoError::Invalid),
            Op::Discard if req.len > self.max_discard => Err(IoError::Unsupported),
            Op::WriteZeroes if req.len > self.max_write_zeroes => Err(IoError::Unsupported),
            _ => Ok(()),
        }
    }

    /// Flags that apply to `op`; devices ignore others.
    pub fn flags_of(op: Op) -> Flags {
        match op {
            Op::Write => Flags::FUA,
            Op::WriteZeroes => Flags::FUA.with(Flags::NO_UNMAP).with(Flags::NO_FALLBACK),
            Op::Read | Op::Discard | Op::Flush => Flags::NONE,
        }
    }
}

/// The limits of an open device, shared by its channels. All are fixed except the capacity, which a
/// control thread may change while requests run.
#[derive(Debug)]
pub struct SharedLimits {
    fixed: Limits,
    capacity: AtomicU64,
}

impl SharedLimits {
    /// Shares `limits`, whose capacity is the first one.
    pub fn new(limits: Limits) -> Arc<SharedLimits> {
        let capacity = AtomicU64::new(limits.capacity);
        Arc::new(SharedLimits { fixed: limits, capacity })
    }

    /// A copy of the limits with the present capacity.
    pub fn get(&self) -> Limits {
        Limits { capacity: self.capacity(), ..self.fixed.clone() }
    }

    /// The fixed limits; their capacity may be stale.
    #[inline]
    pub fn fixed(&self) -> &Limits {
        &self.fixed
    }

    /// The present capacity in bytes.
    #[inline]
    pub fn capacity(&self) -> u64 {
        // A request that races with a resize may be checked against either size.
        self.capacity.load(Ordering::Relaxed)
    }

    /// Sets the capacity, rounded down to a whole block, for requests submitted from now on.
    pub fn set_capacity(&self, capacity: u64) {
        self.capacity.store(capacity & !(u64::from(self.fixed.block_size) - 1), Ordering::Relaxed);
    }

    /// [`Limits::check`] with the present capacity.
    #[inline]
    pub fn check(&self, req: &Request<'_>, offset: u64) -> IoResult {
        self.fixed.check_within(self.capacity(), req, offset)
    }

    /// [`Limits::check_range`] with the present capacity.
    #[inline]
    pub fn check_range(&self, offset: u64, len: u64) -> IoResult {
        self.fixed.check_range_within(self.capacity(), offset, len)
    }

    /// The answer to [`crate::Channel::block_status`] of a device that does not know where it has
    /// data: the whole range is data.
    pub fn answer_data<'a>(&self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        match self.check_range(offset, len) {
            Ok(()) => report.answer_data(len),
            Err(error) => IoFuture::ready(Err(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_range_check_does_not_overflow() {
        let limits = Limits::new(1 << 20);
        let zeroes = |len| Request::write_zeroes(len, Flags::NONE);
        assert_eq!(limits.check(&zeroes(512), 1 << 20), Err(IoError::OutOfRange));
        assert_eq!(limits.check(&zeroes(!511), 512), Err(IoError::OutOfRange));
        assert_eq!(limits.check(&zeroes(512), !511), Err(IoError::OutOfRange));
        assert_eq!(limits.check(&zeroes(512), (1 << 20) - 512), Ok(()));
        assert_eq!(limits.check(&zeroes(512), 1), Err(IoError::Misaligned));
        assert_eq!(limits.check(&zeroes(1), 0), Err(IoError::Misaligned));
    }

    #[test]
    fn a_read_only_device_takes_reads_and_flushes() {
        let limits = Limits { read_only: true, ..Limits::new(4096) };
        assert_eq!(limits.check(&Request::discard(512), 0), Err(IoError::ReadOnly));
        assert_eq!(limits.check(&Request::flush(), 0), Ok(()));
        assert_eq!(limits.check(&Request::read(crate::Data::none()), 0), Ok(()));
    }
}
