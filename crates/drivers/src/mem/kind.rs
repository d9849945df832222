//! The kind `mem` of devices.

use super::{MemDevice, Options};
use crate::kind::{DeviceConfig, block_size};
use base::Size;
use block::{Device, DeviceError};
#[cfg(feature = "sandbox")]
use sandbox::Profile;
use spec::{ID, Kind, READ_ONLY, Spec, SpecError, key};
use std::sync::Arc;

/// The kind.
pub static KIND: Kind = Kind {
    name: "mem",
    about: "a sparse RAM disk, lost when the program ends",
    keys: &[
        key("size", "SIZE", "bytes"),
        key("block-size", "SIZE", "logical block size [512]"),
        key("huge-pages", "on|off", "allocate 2 MiB at a time: large requests are faster [off]"),
        READ_ONLY,
        ID,
    ],
};

/// The device of a specification.
///
/// # Errors
/// When a value is invalid.
pub fn parse(spec: &Spec) -> Result<Box<dyn DeviceConfig>, SpecError> {
    let Size(size) = spec.require("size")?;
    Ok(Box::new(Options {
        block_size: block_size(spec)?.unwrap_or(512),
        read_only: spec.is_on("readonly")?,
        huge_pages: spec.is_on("huge-pages")?,
        ..Options::new(size)
    }))
}

impl DeviceConfig for Options {
    fn open(&self) -> Result<Arc<dyn Device>, DeviceError> {
        Ok(Arc::new(MemDevice::new(self)?))
    }

    #[cfg(feature = "sandbox")]
    fn keep(&self, _profile: &mut Profile) {}

    fn make_read_only(&mut self) {
        self.read_only = true;
    }
}
