//! The kind `nvme_uring` of devices.

use super::{NvmeDevice, Options};
use crate::kind::DeviceConfig;
use block::{Device, DeviceError};
#[cfg(feature = "sandbox")]
use sandbox::{Access, Capability, Profile};
use spec::{ID, Kind, READ_ONLY, Spec, SpecError, key};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The kind.
pub static KIND: Kind = Kind {
    name: "nvme_uring",
    about: "an NVMe namespace without the kernel's block layer; needs CAP_SYS_ADMIN",
    keys: &[
        key("path", "PATH", "its character device, such as /dev/ng0n1"),
        READ_ONLY,
        key("queue-depth", "N", "requests in flight on each core [128]"),
        key("poll", "on|off", "poll the controller for completions, if it can [off]"),
        ID,
    ],
};

/// The device of a specification.
///
/// # Errors
/// When a value is invalid.
pub fn parse(spec: &Spec) -> Result<Box<dyn DeviceConfig>, SpecError> {
    let defaults = Options::new(spec.require::<PathBuf>("path")?);
    Ok(Box::new(Options {
        read_only: spec.is_on("readonly")?,
        queue_depth: spec.get_or("queue-depth", defaults.queue_depth)?,
        iopoll: spec.is_on("poll")?,
        ..defaults
    }))
}

impl DeviceConfig for Options {
    fn open(&self) -> Result<Arc<dyn Device>, DeviceError> {
        Ok(Arc::new(NvmeDevice::open(self)?))
    }

    #[cfg(feature = "sandbox")]
    fn keep(&self, profile: &mut Profile) {
        profile.allow(&self.path, Access::ReadWrite);
        // The kernel asks for it with each command, but for those that it knows to be harmless.
        profile.keep(Capability::CAP_SYS_ADMIN);
    }

    fn make_read_only(&mut self) {
        self.read_only = true;
    }

    fn path(&self) -> Option<&Path> {
        Some(&self.path)
    }
}
