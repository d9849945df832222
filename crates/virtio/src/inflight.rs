//! Shared memory that tracks which requests a device has popped and not completed. After a crash
//! its successor resubmits them: no request is lost or completed twice.
//!
//! ```text
//!   region = queue 0 │ queue 1 │ …      each starts on a multiple of 64 bytes
//!   queue  = header (16 B split, 32 B packed) │ one entry for each descriptor (16 B split, 32 B packed)
//! ```
//!
//! Source of truth: vhost-user specification, "Inflight I/O tracking". The device creates the
//! region, and the front-end keeps it while the device is dead. A process can be killed between any
//! two stores, so each step has one decisive store:
//!
//! | step | decided by |  before it, the successor finds | after it |
//! |---|---|---|---|
//! | pop, split | `inflight = 1` | an available chain | a chain to resubmit |
//! | pop, packed | `old_free_head` | an available chain | a chain to resubmit |
//! | publish, split | the ring's `used.idx` | chains to resubmit | used chains; it clears their marks |
//! | publish, packed | the flags of the batch's first slot | chains to resubmit | used chains; it commits the new heads |
//!
//! The successor's position in the ring follows: used plus in-flight chains have been popped. Every
//! store here is a release store, which keeps the compiler from reordering them. The processor's
//! stores are in program order when the process dies.
//!
//! The front-end can write the region too. A value read from it is a checked index, a descriptor
//! that is walked like any other, or a number that only orders requests.

use crate::device::RingError;
use crate::mapping::{Mapping, sealed_file};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

mod packed;
mod split;

pub(crate) use packed::{PackedTracker, RecoveredChain, RecoveredPacked};
pub(crate) use split::SplitTracker;

/// The version of the layout; 0 marks an unused region.
const VERSION: u16 = 1;
/// Alignment of a queue's region, as in other back-ends.
const QUEUE_ALIGNMENT: u64 = 64;
/// Largest number of queues in one region, which vhost-user can address.
const MAX_QUEUES: u16 = 256;

/// The region of all queues of a device.
#[derive(Debug)]
pub struct InflightRegion {
    mapping: Arc<Mapping>,
    fd: OwnedFd,
    num_queues: u16,
    queue_size: u16,
    is_packed: bool,
}

impl InflightRegion {
    /// Bytes for `num_queues` queues with `queue_size` descriptors each.
    pub fn size(num_queues: u16, queue_size: u16, is_packed: bool) -> u64 {
        u64::from(num_queues) * queue_bytes(queue_size, is_packed)
    }

    /// Creates an empty region (GET_INFLIGHT_FD) in a file that cannot be truncated.
    ///
    /// # Errors
    /// `InvalidInput` for zero or too many queues or descriptors; else the system's error.
    pub fn create(num_queues: u16, queue_size: u16, is_packed: bool) -> io::Result<InflightRegion> {
        check_counts(num_queues, queue_size)?;
        let len = Self::size(num_queues, queue_size, is_packed);
        Self::map(sealed_file(c"inflight", len)?, 0, len, num_queues, queue_size, is_packed)
    }

    /// Maps a region that an earlier device created (SET_INFLIGHT_FD).
    ///
    /// # Errors
    /// As [`InflightRegion::create`], and when `len` is too small or exceeds the file.
    pub fn map(
        fd: OwnedFd,
        offset: u64,
        len: u64,
        num_queues: u16,
        queue_size: u16,
        is_packed: bool,
    ) -> io::Result<InflightRegion> {
        check_counts(num_queues, queue_size)?;
        let needed = Self::size(num_queues, queue_size, is_packed);
        if len < needed || !offset.is_multiple_of(QUEUE_ALIGNMENT) {
            let text = format!("an in-flight region of {len} bytes at {offset}, {needed} are needed");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, text));
        }
        let mapping = Arc::new(Mapping::new(fd.as_fd(), offset, needed)?);
        Ok(InflightRegion { mapping, fd, num_queues, queue_size, is_packed })
    }

    /// The file of the region, which is sent to the front-end. The region starts at offset 0 if
    /// [`InflightRegion::create`] made it.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The part of one queue; `None` beyond the last queue. Only one [`crate::device::VirtQueue`]
    /// may use it at a time.
    pub fn queue(&self, index: u16) -> Option<InflightQueue> {
        (index < self.num_queues).then(|| InflightQueue {
            part: Part {
                base: self
                    .mapping
                    .addr()
                    .wrapping_add(usize::from(index) * queue_bytes(self.queue_size, self.is_packed) as usize),
                desc_num: self.queue_size,
                _mapping: self.mapping.clone(),
            },
            is_packed: self.is_packed,
        })
    }
}

/// The in-flight memory of one queue.
#[derive(Debug)]
pub struct InflightQueue {
    part: Part,
    is_packed: bool,
}

impl InflightQueue {
    /// Marks the part as unused. For a ring that was stopped with nothing in flight: the front-end
    /// chooses its next start, not the stored state.
    pub fn reset(&mut self) {
        // Both layouts have the version at the same offset. The first use rewrites the rest.
        self.part.set_header::<16, 8, u16>(0);
    }

    /// Returns the part if it matches a ring of this kind and size.
    fn for_ring(self, size: u16, is_packed: bool) -> Result<Part, RingError> {
        let tracked = self.part.desc_num;
        if self.is_packed != is_packed || tracked < size {
            let layout = if self.is_packed { "packed" } else { "split" };
            return Err(RingError::InflightLayout { layout, tracked, size });
        }
        Ok(self.part)
    }
}

fn check_counts(num_queues: u16, queue_size: u16) -> io::Result<()> {
    if (1..=MAX_QUEUES).contains(&num_queues) && (1..=crate::ring::MAX_QUEUE_SIZE).contains(&queue_size) {
        return Ok(());
    }
    let text = format!("an in-flight region for {num_queues} queues of {queue_size} descriptors");
    Err(io::Error::new(io::ErrorKind::InvalidInput, text))
}

fn queue_bytes(queue_size: u16, is_packed: bool) -> u64 {
    let (header, entry) = if is_packed { (32, 32) } else { (16, 16) };
    (header + entry * u64::from(queue_size)).next_multiple_of(QUEUE_ALIGNMENT)
}

/// The bytes of one queue. Bounds are checked here; the caller chooses the offsets.
#[derive(Debug)]
struct Part {
    base: *mut u8,
    desc_num: u16,
    _mapping: Arc<Mapping>,
}

// SAFETY: `base` points into the mapping that comes with it; all access is atomic.
unsafe impl Send for Part {}

/// A number in the region: one atomic load, and one atomic store that is also a crash point.
trait Field: Copy {
    /// # Safety
    /// `at` is mapped and aligned for the type.
    unsafe fn load(at: *mut u8) -> Self;
    /// # Safety
    /// As `load`.
    unsafe fn store(at: *mut u8, value: Self);
}

macro_rules! fields {
    ($($number:ty => $atomic:ident),*) => {$(
        impl Field for $number {
            #[inline]
            unsafe fn load(at: *mut u8) -> Self {
                // SAFETY: by contract.
                unsafe { std::sync::atomic::$atomic::from_ptr(at.cast()) }.load(std::sync::atomic::Ordering::Relaxed)
            }
            #[inline]
            unsafe fn store(at: *mut u8, value: Self) {
                // SAFETY: by contract.
                let atomic = unsafe { std::sync::atomic::$atomic::from_ptr(at.cast()) };
                crate::crash_point::crash_point();
                atomic.store(value, std::sync::atomic::Ordering::Release);
            }
        }
    )*};
}
fields!(u8 => AtomicU8, u16 => AtomicU16, u32 => AtomicU32, u64 => AtomicU64);

impl Part {
    /// A field of the header, which has `HEADER` bytes.
    #[inline]
    fn header<const HEADER: usize, const OFFSET: usize, T: Field>(&self) -> T {
        const { assert!(OFFSET + size_of::<T>() <= HEADER && OFFSET.is_multiple_of(size_of::<T>())) };
        // SAFETY: inside the header; the part is aligned to 64 bytes.
        unsafe { T::load(self.base.add(OFFSET)) }
    }

    /// Stores a field of the header.
    #[inline]
    fn set_header<const HEADER: usize, const OFFSET: usize, T: Field>(&self, value: T) {
        const { assert!(OFFSET + size_of::<T>() <= HEADER && OFFSET.is_multiple_of(size_of::<T>())) };
        // SAFETY: as in `header`.
        unsafe { T::store(self.base.add(OFFSET), value) }
    }

    /// Address of an entry; header and entries have `BYTES` bytes each.
    ///
    /// # Panics
    /// When no such entry exists.
    #[inline]
    fn entry<const BYTES: usize>(&self, index: u16) -> *mut u8 {
        assert!(index < self.desc_num);
        self.base.wrapping_add(BYTES + BYTES * usize::from(index))
    }

    /// Loads a field of an entry. Panics as `entry`.
    #[inline]
    fn get<const BYTES: usize, const OFFSET: usize, T: Field>(&self, index: u16) -> T {
        const { assert!(OFFSET + size_of::<T>() <= BYTES && OFFSET.is_multiple_of(size_of::<T>())) };
        // SAFETY: inside the entry, which `entry` checked.
        unsafe { T::load(self.entry::<BYTES>(index).add(OFFSET)) }
    }

    /// Stores a field of an entry. Panics as `entry`.
    #[inline]
    fn set<const BYTES: usize, const OFFSET: usize, T: Field>(&self, index: u16, value: T) {
        const { assert!(OFFSET + size_of::<T>() <= BYTES && OFFSET.is_multiple_of(size_of::<T>())) };
        // SAFETY: as in `get`.
        unsafe { T::store(self.entry::<BYTES>(index).add(OFFSET), value) }
    }

    fn checked(&self, index: u16, what: &'static str) -> Result<u16, RingError> {
        if index < self.desc_num { Ok(index) } else { Err(RingError::InflightCorrupt { what }) }
    }

    /// Whether a device has used the region before.
    fn is_initialised<const HEADER: usize>(&self) -> Result<bool, RingError> {
        match self.header::<HEADER, 8, u16>() {
            0 => Ok(false),
            VERSION => match self.header::<HEADER, 10, u16>() == self.desc_num {
                true => Ok(true),
                false => Err(RingError::InflightCorrupt { what: "desc_num is not the queue size" }),
            },
            version => Err(RingError::InflightVersion { version }),
        }
    }

    /// Last step of the first use.
    fn set_initialised<const HEADER: usize>(&self) {
        self.set_header::<HEADER, 0, u64>(0);
        self.set_header::<HEADER, 10, u16>(self.desc_num);
        self.set_header::<HEADER, 8, u16>(VERSION);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_region_is_as_large_as_other_back_ends_make_it() {
        assert_eq!(InflightRegion::size(1, 128, false), 2112); // 16 + 16 × 128, rounded up to 64
        assert_eq!(InflightRegion::size(4, 128, true), 4 * 4160);
        assert_eq!(InflightRegion::size(2, 1, false), 128);
    }

    #[test]
    fn a_region_that_does_not_fit_is_refused() {
        assert!(InflightRegion::create(0, 128, false).is_err());
        assert!(InflightRegion::create(1, 0, false).is_err());
        assert!(InflightRegion::create(257, 8, false).is_err());
        let region = InflightRegion::create(2, 8, false).unwrap();
        assert!(region.queue(1).is_some() && region.queue(2).is_none());
        let again = |offset, len, queues| {
            let fd = region.fd().try_clone_to_owned().unwrap();
            InflightRegion::map(fd, offset, len, queues, 8, false)
        };
        assert!(again(0, 384, 2).is_ok());
        assert!(again(0, 383, 2).is_err());
        assert!(again(0, 576, 3).is_err(), "the file is too short");
        assert!(again(8, 384, 2).is_err());
    }

    #[test]
    fn a_queue_takes_only_its_own_kind_of_ring() {
        let region = InflightRegion::create(1, 8, false).unwrap();
        assert!(region.queue(0).unwrap().for_ring(8, false).is_ok());
        assert!(region.queue(0).unwrap().for_ring(4, false).is_ok());
        assert!(region.queue(0).unwrap().for_ring(16, false).is_err());
        assert!(region.queue(0).unwrap().for_ring(8, true).is_err());
    }
    #[test]
    fn a_region_of_a_later_version_is_refused() {
        let queue = |region: &InflightRegion| region.queue(0).unwrap();
        let region = InflightRegion::create(1, 8, false).unwrap();
        SplitTracker::attach(queue(&region), 8, 0).unwrap();
        queue(&region).part.set_header::<16, 8, u16>(VERSION + 1);
        let refused = SplitTracker::attach(queue(&region), 8, 0).map(drop).unwrap_err().to_string();
        assert_eq!(refused, "the in-flight region is of version 2, this is version 1");
        assert_eq!(queue(&region).part.header::<16, 8, u16>(), VERSION + 1);
    }
}
