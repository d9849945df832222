//! The kind `virtio-blk-uring` of devices.

use super::{Options, VirtioBlkUring};
use crate::kind::{DeviceConfig, RegionUse};
use block::{Device, DeviceError};
#[cfg(feature = "sandbox")]
use sandbox::Profile;
use spec::{ID, Kind, READ_ONLY, Spec, SpecError, key};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The kind.
pub static KIND: Kind = Kind {
    name: "virtio-blk-uring",
    about: "a virtio disk of this machine without the kernel's block layer; needs the module virtio_blk_uring",
    keys: &[
        key("path", "PATH", "its character device, such as /dev/vdac0"),
        READ_ONLY,
        key("queue-depth", "N", "requests in flight on each core [128]"),
        key("poll", "on|off", "poll the disk for completions, if it can [off]"),
        key("fixed-buffers", "on|off", "register memory with the kernel; pins guest memory [off]"),
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
        fixed_buffers: spec.is_on("fixed-buffers")?,
        ..defaults
    }))
}

impl DeviceConfig for Options {
    fn open(&self) -> Result<Arc<dyn Device>, DeviceError> {
        Ok(Arc::new(VirtioBlkUring::open(self)?))
    }

    #[cfg(feature = "sandbox")]
    fn keep(&self, profile: &mut Profile) {
        crate::kind::keep_file(profile, &self.path, self.read_only, self.fixed_buffers);
    }

    fn make_read_only(&mut self) {
        self.read_only = true;
    }

    fn regions(&self) -> RegionUse {
        RegionUse { are_pinned: self.fixed_buffers, ..RegionUse::default() }
    }

    fn path(&self) -> Option<&Path> {
        Some(&self.path)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use spec::Role;

    #[test]
    fn a_specification_has_all_options() {
        let parse = |text| parse(&Spec::parse(Role::Device, &[&KIND], text)?);
        let plain = Options::new("/dev/vdac0");
        let found = parse("virtio-blk-uring:path=/dev/vdac0").unwrap();
        assert_eq!(found.options(), Some(&plain));
        let text = "virtio-blk-uring:path=/dev/vdac0,readonly,queue-depth=8,poll=on,fixed-buffers=on,id=d";
        let expected =
            Options { read_only: true, queue_depth: 8, iopoll: true, fixed_buffers: true, ..plain };
        assert_eq!(parse(text).unwrap().options(), Some(&expected));
        assert!(parse("virtio-blk-uring:").unwrap_err().to_string().contains("path=PATH is missing"));
        let mut config = parse("virtio-blk-uring:path=a,fixed-buffers=on").unwrap();
        assert!(config.pins_regions() && !config.needs_regions());
        config.make_read_only();
        assert!(config.options::<Options>().unwrap().read_only);
    }
}
