//! The interface between the library and a kind of device.

use super::{Properties, Region, Result, Spec, Value};
use crate::direct::DirectQueue;
use std::sync::Arc;

/// How to learn the capacity in bytes, from any thread, while the device is connected.
pub type Capacity = Arc<dyn Fn() -> Result<u64> + Send + Sync>;

/// The error codes of libblkio 1.5 where its drivers differ: it leaves these checks to the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Codes {
    /// Those of the kernel's file operations: a null buffer is `EFAULT`. Write zeroes and discard
    /// of no bytes or beyond `i64::MAX` are `EINVAL` even on a read-only device.
    Kernel,
    /// Those of a virtio-blk device: a request beyond its end is `EIO`, a start that is not aligned
    /// is `EINVAL` even on a read-only device.
    Virtio,
    /// Neither: `EINVAL` for all but a read-only device.
    Library,
}

/// A kind of device. The instance calls it in the order of its states: settings, `connect`, tuning,
/// `start`, then queues and regions.
pub trait Driver: Send {
    /// The properties that only this kind has.
    fn specs(&self) -> Vec<Spec>;

    /// Whether queues can be added after the start.
    fn can_add_queues(&self) -> bool;

    /// The error codes of refused requests.
    fn codes(&self) -> Codes {
        Codes::Library
    }

    /// Refuses a value that no device takes, of a property of any kind. The type is right already.
    ///
    /// # Errors
    /// `EINVAL` with the name and the value.
    fn check(&self, name: &str, value: &Value) -> Result<()>;

    /// Opens the device that the settings name and states its facts. After an error the driver is
    /// as before.
    ///
    /// # Errors
    /// Names the setting that is wrong, or the device's error.
    fn connect(&mut self, properties: &mut Properties) -> Result<()>;

    /// Prepares for `num-queues` and `num-poll-queues` queues. After an error it may be called
    /// again.
    ///
    /// # Errors
    /// Names the property that the device cannot satisfy.
    fn start(&mut self, properties: &Properties) -> Result<()>;

    /// Opens a queue, between `start` and the end.
    ///
    /// # Errors
    /// Names the tuning that is wrong, or the device's error.
    fn open_queue(&mut self, properties: &Properties, is_poll: bool) -> Result<Box<dyn DirectQueue>>;

    /// How to learn the capacity of the connected device.
    fn capacity(&self) -> Capacity;

    /// Alignment of address and length of memory that the library allocates for the device, in
    /// bytes: a power of two. The device then gets all of that memory with each region in it.
    fn own_alignment(&self) -> usize {
        1
    }

    /// Tells the started device about memory.
    ///
    /// # Errors
    /// Names the region's property that the device cannot accept.
    fn map_region(&mut self, region: &Region) -> Result<()>;

    /// Takes a region back.
    fn unmap_region(&mut self, region: &Region);

    /// Makes a `connect` that runs on another thread fail soon; `None` where it cannot take long.
    fn canceller(&self) -> Option<Arc<dyn Fn() + Send + Sync>>;
}

/// A kind of device as a driver of the library.
pub struct DriverKind {
    /// The name that programs create an instance with.
    pub name: &'static str,
    /// Creates the driver of an instance. It fails with `ENOSYS` when this system lacks a need.
    pub create: fn() -> Result<Box<dyn Driver>>,
}
