//! Shared memory divided into buffers that requests own while they use them, for programs without
//! `unsafe`.

use crate::shared_memory::SharedMemory;
use block::{Channel, Data, Flags, IoResult, Op, Request, Segment};
use std::sync::Arc;

/// One piece of a [`SharedMemory`]; no other buffer of this process has the same bytes.
#[derive(Debug)]
pub struct SharedBuffer {
    memory: Arc<SharedMemory>,
    offset: usize,
    len: usize,
}

impl SharedBuffer {
    /// Allocates `count` buffers of `len` bytes, each on its own page. Also returns their memory,
    /// which must be registered with devices ([`block::Device::map_region`]) before its first use.
    ///
    /// # Errors
    /// An error of the operating system.
    pub fn allocate(count: usize, len: usize) -> std::io::Result<(Arc<SharedMemory>, Vec<SharedBuffer>)> {
        const PAGE: usize = 4096;
        let stride = len.next_multiple_of(PAGE);
        let bytes = stride.checked_mul(count).ok_or(std::io::ErrorKind::OutOfMemory)?;
        let memory = Arc::new(SharedMemory::of_huge_pages(bytes)?);
        let buffer = |i| SharedBuffer { memory: memory.clone(), offset: i * stride, len };
        let buffers = (0..count).map(buffer).collect();
        Ok((memory, buffers))
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the buffer has no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The buffer as one segment.
    pub fn segment(&self) -> Segment {
        self.memory.segment(self.offset, self.len)
    }

    /// Copies the first bytes out.
    ///
    /// # Panics
    /// When `target` is longer than the buffer.
    pub fn read(&self, target: &mut [u8]) {
        assert!(target.len() <= self.len, "{} of {}", target.len(), self.len);
        self.memory.read(self.offset, target);
    }

    /// Copies `source` to the buffer's start.
    ///
    /// # Panics
    /// When it is longer than the buffer.
    pub fn write(&mut self, source: &[u8]) {
        assert!(source.len() <= self.len, "{} of {}", source.len(), self.len);
        self.memory.write(self.offset, source);
    }

    /// Executes a request on `channel` with this buffer as its memory. The buffer is returned with
    /// the result, so that it cannot be accessed meanwhile.
    pub async fn transfer(
        self,
        channel: &dyn Channel,
        op: Op,
        flags: Flags,
        offset: u64,
    ) -> (SharedBuffer, IoResult) {
        let segments = [self.segment()];
        // SAFETY: this future owns the buffer, and with it the memory, until the request has
        // completed.
        let data = unsafe { Data::new(&segments) };
        let req = Request { op, flags, len: self.len as u64, data };
        let result = channel.submit(&req, offset).await;
        (self, result)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shared_memory::HUGE_PAGE;

    #[test]
    fn buffers_do_not_share_bytes() {
        let (memory, mut buffers) = SharedBuffer::allocate(3, 5000).unwrap();
        assert_eq!(memory.len(), HUGE_PAGE, "three buffers of two pages each");
        for (i, buffer) in buffers.iter_mut().enumerate() {
            buffer.write(&[i as u8 + 1; 5000]);
        }
        for (i, buffer) in buffers.iter().enumerate() {
            let mut bytes = [0; 5000];
            buffer.read(&mut bytes);
            assert_eq!(bytes, [i as u8 + 1; 5000]);
        }
    }
}
