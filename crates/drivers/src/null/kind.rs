//! The kind `null` of devices.

use super::{NullDevice, Options};
use crate::kind::{DeviceConfig, block_size};
use base::Size;
use block::{Device, DeviceError};
#[cfg(feature = "sandbox")]
use sandbox::Profile;
use spec::{ID, Kind, READ_ONLY, Spec, SpecError, key};
use std::sync::Arc;

/// The kind.
pub static KIND: Kind = Kind {
    name: "null",
    about: "discards writes; reads leave memory unchanged: to measure layers and exports, or to model a drive",
    keys: &[
        key("size", "SIZE", "bytes [1T]"),
        key("block-size", "SIZE", "logical block size [512]"),
        key("latency-us", "N", "duration of each request in microseconds [0]"),
        key("iops", "N", "most requests a second, all cores together; 0: no limit [0]"),
        key("bandwidth", "SIZE", "most bytes a second, all cores together; 0: no limit [0]"),
        key("zero", "on|off", "reads return zeroes [off]"),
        READ_ONLY,
        ID,
    ],
};

/// Size without `size=`.
const DEFAULT_SIZE: u64 = 1 << 40;

/// The device of a specification.
///
/// # Errors
/// When a value is invalid.
pub fn parse(spec: &Spec) -> Result<Box<dyn DeviceConfig>, SpecError> {
    let Size(size) = spec.get_or("size", Size(DEFAULT_SIZE))?;
    Ok(Box::new(Options {
        block_size: block_size(spec)?.unwrap_or(512),
        read_only: spec.is_on("readonly")?,
        zero: spec.is_on("zero")?,
        latency_ns: u64::from(spec.get_or::<u32>("latency-us", 0)?) * 1000,
        iops: spec.get_or("iops", 0)?,
        bandwidth: spec.get_or("bandwidth", Size(0))?.0,
        ..Options::new(size)
    }))
}

impl DeviceConfig for Options {
    fn open(&self) -> Result<Arc<dyn Device>, DeviceError> {
        Ok(Arc::new(NullDevice::new(self)?))
    }

    #[cfg(feature = "sandbox")]
    fn keep(&self, _profile: &mut Profile) {}

    fn make_read_only(&mut self) {
        self.read_only = true;
    }
}
