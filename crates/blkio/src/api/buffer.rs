//! A buffer: memory that the device knows, from the device's pool.

use super::shared::Shared;
use crate::{Error, Result};
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

/// Longest buffer: no device takes more in one request.
const LONGEST: usize = 1 << 32;

/// Memory for one request at a time. A request takes it and gives it back when it has ended.
///
/// If the device is another process (`virtio-blk-vhost-user`), it shares the memory. A `Buffer` is
/// then as safe as that process is honest, like memory that a device reaches by DMA.
pub struct Buffer {
    start: NonNull<u8>,
    len: usize,
    /// Bytes that the pool allocated for it: a power of two times the pool's alignment.
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
        let (start, capacity) = device.pool().take(len, |len| device.map_region(len))?;
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
        // SAFETY: the memory is mapped, initialized and this buffer's alone; a request in flight
        // owns its buffer, so that no other reference to it exists.
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
        self.device.pool().give_back(self.start, self.capacity);
    }
}

impl std::fmt::Debug for Buffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Buffer").field("start", &self.start).field("len", &self.len).finish_non_exhaustive()
    }
}
