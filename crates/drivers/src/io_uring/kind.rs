//! The kind `io_uring` of devices.

use super::{Options, UringDevice};
use crate::kind::{DeviceConfig, RegionUse, block_size};
use block::{Device, DeviceError};
#[cfg(feature = "sandbox")]
use sandbox::{Access, Profile};
use spec::{ID, Kind, READ_ONLY, Spec, SpecError, key};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The kind.
pub static KIND: Kind = Kind {
    name: "io_uring",
    about: "a regular file or block device of this host",
    keys: &[
        key("path", "PATH", "the file or block device"),
        key("direct", "on|off", "bypass the page cache [off]"),
        READ_ONLY,
        key("share", "on|off", "open for writing even if another process has it open for writing [off]"),
        key("queue-depth", "N", "requests in flight on each core [128]"),
        key("poll", "on|off", "poll the drive for completions, if it can [off]"),
        key("fixed-buffers", "on|off", "register memory with the kernel; pins guest memory [off]"),
        key("block-size", "SIZE", "logical block size [the smallest that works]"),
        ID,
    ],
};

/// The device of a specification.
///
/// # Errors
/// When a value is invalid.
pub fn parse(spec: &Spec) -> Result<Box<dyn DeviceConfig>, SpecError> {
    let mut options = Options::new(spec.require::<PathBuf>("path")?);
    options.direct = spec.is_on("direct")?;
    options.read_only = spec.is_on("readonly")?;
    options.share = spec.is_on("share")?;
    options.queue_depth = spec.get_or("queue-depth", options.queue_depth)?;
    options.iopoll = spec.is_on("poll")?;
    options.fixed_buffers = spec.is_on("fixed-buffers")?;
    options.block_size = block_size(spec)?;
    Ok(Box::new(options))
}

impl DeviceConfig for Options {
    fn open(&self) -> Result<Arc<dyn Device>, DeviceError> {
        Ok(Arc::new(UringDevice::open(self)?))
    }

    #[cfg(feature = "sandbox")]
    fn keep(&self, profile: &mut Profile) {
        crate::kind::keep_file(profile, &self.path, self.read_only, self.fixed_buffers);
    }

    #[cfg(feature = "sandbox")]
    fn keep_beside(&self, profile: &mut Profile) {
        if let Some(directory) = directory_of(&self.path) {
            profile.allow(directory, Access::ReadWrite);
        }
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

/// The directory of a file, which need not exist. `None` for the root directory, which contains
/// every path.
#[cfg(feature = "sandbox")]
fn directory_of(file: &Path) -> Option<PathBuf> {
    let parent = |path: &Path| path.parent().map(Path::to_owned);
    let directory = match file.canonicalize() {
        Ok(path) => parent(&path),
        Err(_) => std::path::absolute(file).ok().as_deref().and_then(parent),
    };
    directory.filter(|directory| directory.parent().is_some())
}

#[cfg(all(test, feature = "sandbox"))]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_missing_may_come_back() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().canonicalize().unwrap();
        assert_eq!(directory_of(&folder.join("missing")), Some(folder.clone()));
        std::os::unix::fs::symlink("/dev/null", folder.join("link")).unwrap();
        assert_eq!(directory_of(&folder.join("link")), Some("/dev".into()));
        assert_eq!(directory_of(Path::new("/missing")), None);
    }
}
