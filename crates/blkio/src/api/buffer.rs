//! Memory that the device knows, cut from mapped memory regions.

use super::device::Shared;
use crate::{Error, Result};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::{Arc, MutexGuard, PoisonError};

/// Devices may bound the number of regions, so each is at least so long, and longer than the one before.
const SMALLEST_REGION: usize = 2 << 20;

/// Regions stop growing here. Pages that nobody touches cost nothing.
const LARGEST_REGION: usize = 256 << 20;

/// Longest buffer: no device takes more in one request.
const LONGEST: usize = 1 << 32;

/// Memory for one request at a time. A request takes it and gives it back when it has ended.
///
/// Where the device is another process (`virtio-blk-vhost-user`), the memory is shared with it: a `Buffer` is as safe
/// as that process is honest, like memory that a device reaches by DMA.
pub struct Buffer {
    start: NonNull<u8>,
    len: usize,
    /// What was cut for it: a power of two times the pool's alignment.
    capacity: usize,
    device: Arc<Shared>,
}

// SAFETY: it owns its memory, which is bound to no thread.
unsafe impl Send for Buffer {}
// SAFETY: a shared reference only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub(super) fn new(device: &Arc<Shared>, len: usize) -> Result<Buffer> {
        if len > LONGEST {
            return Err(Error::new(
                libc::EINVAL,
                format!("a buffer of {len} bytes is longer than {LONGEST}"),
            ));
        }
        let (start, capacity) = pool(device).take(device, len)?;
        Ok(Buffer { start, len, capacity, device: device.clone() })
    }

    /// Most bytes that it can be [resized](Buffer::resize) to.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Changes the length. Bytes beyond the old end are what they were before in that memory.
    ///
    /// # Panics
    /// When `len` is more than [`Buffer::capacity`].
    pub fn resize(&mut self, len: usize) {
        assert!(len <= self.capacity, "a length of {len} in a buffer of {} bytes", self.capacity);
        self.len = len;
    }

    pub(super) fn segment(&self) -> block::Segment {
        block::Segment { base: self.start.as_ptr(), len: self.len }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: the memory is mapped, initialized and this buffer's alone; a request in flight owns its buffer,
        // so that nobody holds a reference to it.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        pool(&self.device).give_back(self.start, self.capacity);
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("start", &self.start).field("len", &self.len).finish_non_exhaustive()
    }
}

fn pool(device: &Shared) -> MutexGuard<'_, Pool> {
    device.pool.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Free pieces of mapped regions, by size. Regions stay mapped until the device is closed.
pub(super) struct Pool {
    alignment: usize,
    region_alignment: usize,
    /// Free pieces of `alignment << index` bytes.
    free: Vec<Vec<NonNull<u8>>>,
    /// What is left of the newest region.
    rest: Option<(NonNull<u8>, usize)>,
    next_region: usize,
    regions: Vec<(usize, usize)>,
}

// SAFETY: the pieces are nobody's, on any thread.
unsafe impl Send for Pool {}

impl Pool {
    pub fn new(alignment: usize, region_alignment: usize) -> Pool {
        Pool {
            alignment: alignment.next_power_of_two(),
            region_alignment,
            free: Vec::new(),
            rest: None,
            next_region: SMALLEST_REGION,
            regions: Vec::new(),
        }
    }

    /// Whether all of that memory lies in one mapped region.
    pub fn holds(&self, start: usize, len: usize) -> bool {
        self.regions
            .iter()
            .any(|(from, all)| start >= *from && start - from <= *all && len <= all - (start - from))
    }

    fn take(&mut self, device: &Shared, len: usize) -> Result<(NonNull<u8>, usize)> {
        let capacity = len.next_power_of_two().max(self.alignment);
        let class = (capacity / self.alignment).trailing_zeros() as usize;
        if let Some(piece) = self.free.get_mut(class).and_then(Vec::pop) {
            return Ok((piece, capacity));
        }
        let (start, left) = match self.rest {
            Some((start, left)) if left >= capacity => (start, left),
            _ => self.map_region(device, capacity)?,
        };
        // SAFETY: `capacity` bytes are left of the region.
        self.rest = Some((unsafe { start.add(capacity) }, left - capacity));
        Ok((start, capacity))
    }

    fn map_region(&mut self, device: &Shared, at_least: usize) -> Result<(NonNull<u8>, usize)> {
        let len = self.next_region.max(at_least).next_multiple_of(self.region_alignment);
        let mut instance = device.instance();
        let region = instance.alloc_region(len)?;
        if let Err(error) = instance.map_region(&region) {
            instance.free_region(&region)?;
            return Err(error);
        }
        drop(instance);
        self.keep_rest();
        self.regions.push((region.addr, len));
        self.next_region = (self.next_region * 2).min(LARGEST_REGION);
        let start = NonNull::new(std::ptr::with_exposed_provenance_mut(region.addr));
        Ok((start.expect("memory was allocated"), len))
    }

    /// Cuts what is left of a region into free pieces, the longest first, so that none is lost.
    fn keep_rest(&mut self) {
        let Some((mut start, mut left)) = self.rest.take() else { return };
        while left >= self.alignment {
            let piece = self.alignment << (left / self.alignment).ilog2();
            self.give_back(start, piece);
            // SAFETY: `left` bytes are there.
            start = unsafe { start.add(piece) };
            left -= piece;
        }
    }

    fn give_back(&mut self, start: NonNull<u8>, capacity: usize) {
        let class = (capacity / self.alignment).trailing_zeros() as usize;
        if self.free.len() <= class {
            self.free.resize_with(class + 1, Vec::new);
        }
        self.free[class].push(start);
    }
}
