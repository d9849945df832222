//! What a kind of device is to the library.

use crate::property::{Properties, Spec};
use crate::rules::Codes;
use crate::{Region, Result, Value};
use drivers::direct::DirectQueue;
use std::sync::Arc;

/// How to learn the capacity in bytes, from any thread, while the device is connected.
pub(crate) type Capacity = Arc<dyn Fn() -> Result<u64> + Send + Sync>;

/// A kind of device. The instance calls it in the order of its states: settings, `connect`, tuning, `start`,
/// then queues and regions.
pub(crate) trait Driver: Send {
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

    /// Opens the device that the settings name and states its facts. After an error the driver is as before.
    ///
    /// # Errors
    /// What is wrong with the settings or the device.
    fn connect(&mut self, properties: &mut Properties) -> Result<()>;

    /// Prepares for `num-queues` and `num-poll-queues` queues. After an error it may be called again.
    ///
    /// # Errors
    /// What the device does not have.
    fn start(&mut self, properties: &Properties) -> Result<()>;

    /// Opens a queue, between `start` and the end.
    ///
    /// # Errors
    /// What is wrong with the tuning, or what the device refuses.
    fn open_queue(&mut self, properties: &Properties, is_poll: bool) -> Result<Box<dyn DirectQueue>>;

    /// How to learn the capacity of the connected device.
    fn capacity(&self) -> Capacity;

    /// Tells the started device about memory.
    ///
    /// # Errors
    /// What the device cannot take.
    fn map_region(&mut self, region: &Region) -> Result<()>;

    /// Takes a region back.
    fn unmap_region(&mut self, region: &Region);

    /// Makes a `connect` that runs on another thread fail soon; `None` where it cannot take long.
    fn canceller(&self) -> Option<Arc<dyn Fn() + Send + Sync>>;
}
