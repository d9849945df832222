//! A started device: where queues and buffers come from.

use super::pool::Pool;
use super::shared::Shared;
use super::{Buffer, Property, Queue};
use crate::{Error, Instance, Result, Value};
use std::sync::Arc;

/// A started device. Clones name the same device; it is closed when the last clone, queue and
/// buffer is gone.
///
/// ```
/// # fn main() -> blkio::Result<()> {
/// # let file = tempfile::NamedTempFile::new().unwrap();
/// # file.as_file().set_len(1 << 20).unwrap();
/// # let path = file.path().to_str().unwrap();
/// let device = blkio::Builder::new("io_uring")?.set("path", path)?.set("num-queues", 2)?.start()?;
/// assert_eq!(device.capacity()?, 1 << 20);
/// assert_eq!(device.get::<bool>("can-grow")?, true);
/// let queues = [device.queue(0)?, device.queue(1)?];
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct Device {
    shared: Arc<Shared>,
}

impl Device {
    pub(super) fn new(instance: Instance) -> Result<Device> {
        let number = |name: &str| i32::from_value(name, instance.get(name)?).map(|n| n.max(1) as usize);
        let buf_alignment = number("buf-alignment")?;
        let region_alignment = u64::from_value("", instance.get("mem-region-alignment")?)?.max(1) as usize;
        let pool = Pool::new(buf_alignment.max(number("optimal-buf-alignment")?), region_alignment);
        let needs_regions = bool::from_value("", instance.get("needs-mem-regions")?)?;
        Ok(Device { shared: Arc::new(Shared::new(instance, pool, needs_regions, buf_alignment)) })
    }

    /// Bytes on the device now.
    ///
    /// # Errors
    /// When the device cannot be asked.
    pub fn capacity(&self) -> Result<u64> {
        self.get("capacity")
    }

    /// A property's value.
    ///
    /// # Errors
    /// `ENOENT` unknown, `ENOTTY` of another type.
    pub fn get<T: Property>(&self, name: &str) -> Result<T> {
        T::from_value(name, self.value(name)?)
    }

    /// A property's value, of whatever type it is.
    ///
    /// # Errors
    /// `ENOENT` unknown.
    pub fn value(&self, name: &str) -> Result<Value> {
        self.shared.instance().get(name)
    }

    /// The names of the device's properties.
    pub fn property_names(&self) -> Vec<&'static str> {
        self.shared.instance().property_names().collect()
    }

    /// Lends the queue at `index`, one of `num-queues`. It can be lent again once it was dropped.
    ///
    /// # Errors
    /// `ENOENT` when there is none, `EBUSY` while it is lent.
    pub fn queue(&self, index: usize) -> Result<Queue> {
        self.lend(index, false)
    }

    /// Lends the poll queue at `index`, one of `num-poll-queues`.
    ///
    /// # Errors
    /// `ENOENT` when there is none, `EBUSY` while it is lent.
    pub fn poll_queue(&self, index: usize) -> Result<Queue> {
        self.lend(index, true)
    }

    fn lend(&self, index: usize, is_poll: bool) -> Result<Queue> {
        let no_queue = || Error::new(libc::ENOENT, format!("queue {index} does not exist"));
        let index = i32::try_from(index).map_err(|_| no_queue())?;
        let raw = self.shared.instance().lend_queue(index, is_poll)?;
        Ok(Queue::new(self.shared.clone(), raw, index, is_poll, false))
    }

    /// Opens one more queue, which is removed when it is dropped.
    ///
    /// # Errors
    /// `ENOTSUP` where queues cannot be added (`can-add-queues`), `EINVAL` where there are
    /// `max-queues` already; what the device refuses.
    pub fn add_queue(&self) -> Result<Queue> {
        self.add(false)
    }

    /// Opens one more poll queue, which is removed when it is dropped.
    ///
    /// # Errors
    /// As [`Device::add_queue`], and `EINVAL` where there are no poll queues
    /// (`supports-poll-queues`).
    pub fn add_poll_queue(&self) -> Result<Queue> {
        self.add(true)
    }

    fn add(&self, is_poll: bool) -> Result<Queue> {
        let mut instance = self.shared.instance();
        let index = instance.add_queue(is_poll)?;
        let raw = instance.lend_queue(index, is_poll)?;
        drop(instance);
        Ok(Queue::new(self.shared.clone(), raw, index, is_poll, true))
    }

    /// Memory for `len` bytes that the device knows, aligned as it likes it. The bytes are zero, or
    /// those of a buffer that was dropped.
    ///
    /// # Errors
    /// `ENOSPC` and the like when the device takes no more memory regions; `ENOMEM`.
    pub fn buffer(&self, len: usize) -> Result<Buffer> {
        Buffer::new(&self.shared, len)
    }
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let driver = self.get::<String>("driver").unwrap_or_default();
        f.debug_struct("Device").field("driver", &driver).finish_non_exhaustive()
    }
}
