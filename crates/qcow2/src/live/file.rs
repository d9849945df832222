//! The file of an image as its metadata is read and written, on the image's home core.

use crate::reader::Reader;
use block::{Channel, Device, DeviceError, Flags, IoError, IoResult, Op, Request};
use reactor::{BufferPool, MAX_BUFFER};
use std::cell::RefCell;
use std::collections::HashSet;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Longest transfer, which every device accepts.
const PART: usize = 128 << 10;
/// Steps by which a file grows ahead of its need: a quarter of its size, between these.
const LEAST_STEP: u64 = 1 << 20;
const MOST_STEP: u64 = 1 << 30;

/// See the module.
pub(crate) struct File {
    device: Arc<dyn Device>,
    channel: Rc<dyn Channel>,
    pub(crate) reader: Reader,
    buffers: BufferPool,
    cluster_size: u64,
    /// Bytes of the file, which all cores know.
    capacity: Arc<AtomicU64>,
    /// Clusters with metadata, which no data may overwrite.
    known: RefCell<HashSet<u64>>,
}

impl File {
    /// Opens the file on the calling core.
    ///
    /// # Errors
    /// When the channel cannot be opened.
    pub(crate) fn open(
        device: &Arc<dyn Device>,
        cluster_size: u64,
        capacity: &Arc<AtomicU64>,
    ) -> Result<File, DeviceError> {
        let channel = device.open_channel()?;
        Ok(File {
            reader: Reader::new(&**device, channel.clone()),
            device: device.clone(),
            channel,
            buffers: BufferPool::new(MAX_BUFFER),
            cluster_size,
            capacity: capacity.clone(),
            known: RefCell::default(),
        })
    }

    /// Bytes of a cluster.
    pub(crate) fn cluster_size(&self) -> u64 {
        self.cluster_size
    }

    /// Bytes of the file.
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Relaxed)
    }

    /// Notes clusters with metadata.
    pub(crate) fn note_metadata(&self, offset: u64, bytes: u64) {
        let clusters = offset / self.cluster_size..(offset + bytes).div_ceil(self.cluster_size);
        self.known.borrow_mut().extend(clusters);
    }

    /// Forgets clusters that had metadata.
    pub(crate) fn forget_metadata(&self, offset: u64, bytes: u64) {
        let clusters = offset / self.cluster_size..(offset + bytes).div_ceil(self.cluster_size);
        let mut known = self.known.borrow_mut();
        for cluster in clusters {
            known.remove(&cluster);
        }
    }

    /// Whether a cluster has metadata.
    pub(crate) fn is_metadata(&self, cluster: u64) -> bool {
        self.known.borrow().contains(&cluster)
    }

    /// Lets the file have at least `end` bytes.
    ///
    /// # Errors
    /// [`IoError::NoSpace`] when it cannot grow.
    pub(crate) fn make_room(&self, end: u64) -> IoResult {
        let capacity = self.capacity();
        if end <= capacity {
            return Ok(());
        }
        let step = (capacity / 4).clamp(LEAST_STEP, MOST_STEP);
        let ahead = end.max(capacity.saturating_add(step)).next_multiple_of(self.cluster_size);
        // A file system that has no room for a step may have room for what is needed.
        self.resize(ahead).or_else(|_| self.resize(end)).map_err(|error| {
            tracing::warn!(%error, "an image cannot grow");
            IoError::NoSpace
        })
    }

    /// Lets a file that ends inside its last cluster have all of it, if it can grow.
    pub(crate) fn complete_last_cluster(&self) {
        let end = self.capacity().next_multiple_of(self.cluster_size);
        if end > self.capacity()
            && let Err(error) = self.resize(end)
        {
            tracing::debug!(%error, "an image has a fixed size");
        }
    }

    /// Sets the length of the file.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn resize(&self, bytes: u64) -> Result<(), DeviceError> {
        let capacity = self.device.resize(bytes)?.capacity;
        self.capacity.store(capacity, Ordering::Relaxed);
        self.reader.set_capacity(capacity);
        Ok(())
    }

    /// Writes whole blocks.
    ///
    /// # Errors
    /// The device's.
    pub(crate) async fn write(&self, offset: u64, bytes: &[u8], flags: Flags) -> IoResult {
        for (number, part) in (0u64..).zip(bytes.chunks(PART)) {
            let mut buffer = self.buffers.take(part.len()).await;
            buffer.as_mut_slice().copy_from_slice(part);
            let at = offset + number * PART as u64;
            buffer.transfer(&*self.channel, Op::Write, flags, at).await.1?;
        }
        Ok(())
    }

    /// Replaces bytes of the file, which may share blocks with others.
    ///
    /// # Errors
    /// The device's.
    pub(crate) async fn patch(&self, offset: u64, bytes: &[u8], flags: Flags) -> IoResult {
        let unit = u64::from(self.device.limits().block_size);
        let start = offset / unit * unit;
        let end = (offset + bytes.len() as u64).next_multiple_of(unit);
        let mut blocks = self.reader.read_padded(start, end - start).await?;
        blocks[(offset - start) as usize..][..bytes.len()].copy_from_slice(bytes);
        self.write(start, &blocks, flags).await
    }

    /// Makes completed writes durable.
    ///
    /// # Errors
    /// The device's.
    pub(crate) async fn flush(&self) -> IoResult {
        self.channel.submit(&Request::flush(), 0).await
    }

    /// Tells the device that clusters, one behind the other, are not used, if it can take that.
    pub(crate) async fn discard(&self, first: u64, count: u64) {
        let most = self.device.limits().max_discard / self.cluster_size;
        let inside = (self.capacity() / self.cluster_size).saturating_sub(first).min(count);
        let mut done = 0;
        while most > 0 && done < inside {
            let part = most.min(inside - done);
            let request = Request::discard(part * self.cluster_size);
            // Only a loss of room.
            let _ = self.channel.submit(&request, (first + done) * self.cluster_size).await;
            done += part;
        }
    }
}
