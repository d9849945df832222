//! Reads of metadata: any offset and length, within the device.

use block::{Channel, Device, DeviceError, Flags, IoError, Op};
use reactor::{BufferPool, MAX_BUFFER};
use std::cell::Cell;
use std::rc::Rc;

/// Longest transfer, which every device accepts.
const PART: u64 = 128 << 10;

/// One device as the metadata of an image is read from it, on one core.
#[derive(Clone)]
pub(crate) struct Reader {
    channel: Rc<dyn Channel>,
    buffers: BufferPool,
    block_size: u64,
    /// Bytes of the device.
    capacity: Rc<Cell<u64>>,
}

impl Reader {
    /// A reader over a channel of its own.
    ///
    /// # Errors
    /// When the channel cannot be opened.
    pub(crate) fn open(device: &dyn Device) -> Result<Reader, DeviceError> {
        Ok(Reader::new(device, device.open_channel()?))
    }

    /// A reader over this channel of `device`.
    pub(crate) fn new(device: &dyn Device, channel: Rc<dyn Channel>) -> Reader {
        let limits = device.limits();
        let buffers = BufferPool::new(MAX_BUFFER);
        let capacity = Rc::new(Cell::new(limits.capacity));
        Reader { channel, buffers, block_size: u64::from(limits.block_size), capacity }
    }

    /// Bytes of the device.
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity.get()
    }

    /// Sets the bytes of the device, of all clones.
    pub(crate) fn set_capacity(&self, capacity: u64) {
        self.capacity.set(capacity);
    }

    /// The bytes at `offset`.
    ///
    /// # Errors
    /// [`IoError::OutOfRange`] when they are not inside the device, or the device's error. Nothing
    /// is allocated for bytes outside the device.
    pub(crate) async fn read(&self, offset: u64, len: u64) -> Result<Vec<u8>, IoError> {
        let end = offset.checked_add(len).filter(|end| *end <= self.capacity()).ok_or(IoError::OutOfRange)?;
        let mut bytes = Vec::with_capacity(len as usize);
        let mut at = offset;
        while at < end {
            let start = at & !(self.block_size - 1);
            let stop = (start + PART.max(self.block_size)).min(end.next_multiple_of(self.block_size));
            let buffer = self.buffers.take((stop - start) as usize).await;
            let (buffer, result) = buffer.transfer(&*self.channel, Op::Read, Flags::NONE, start).await;
            result?;
            let wanted = (at - start) as usize..(stop.min(end) - start) as usize;
            bytes.extend_from_slice(&buffer.as_slice()[wanted]);
            at = stop.min(end);
        }
        Ok(bytes)
    }

    /// The bytes at `offset`, which a table names.
    ///
    /// # Errors
    /// [`IoError::Corrupt`] when they are not inside the device, or the device's error.
    pub(crate) async fn read_named(&self, offset: u64, len: u64) -> Result<Vec<u8>, IoError> {
        self.read(offset, len).await.map_err(|error| match error {
            IoError::OutOfRange => IoError::Corrupt,
            other => other,
        })
    }

    /// The bytes at `offset` up to the end of the device, and zeroes behind it. The caller has
    /// bounded `len`.
    ///
    /// # Errors
    /// The device's error.
    pub(crate) async fn read_padded(&self, offset: u64, len: u64) -> Result<Vec<u8>, IoError> {
        let inside = self.capacity().saturating_sub(offset).min(len);
        let mut bytes = self.read(offset.min(self.capacity()), inside).await?;
        bytes.resize(len as usize, 0);
        Ok(bytes)
    }
}
