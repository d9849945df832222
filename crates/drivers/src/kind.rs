//! The facts that each kind of device states about itself: [`DeviceConfig`].
//!
//! A driver's folder has a file `kind.rs` with the names and keys of its kinds, the function that
//! reads a specification, and this trait for its options. The table of all kinds, which also has
//! the devices that are made of others, is `stack::kinds::device::TABLE`.

use base::Size;
use block::{Device, DeviceError, SharedRole};
#[cfg(feature = "sandbox")]
use sandbox::Profile;
use spec::{Key, Spec, SpecError, key};
use std::any::Any;
use std::fmt::Debug;
use std::path::Path;
use std::sync::Arc;

/// An open device, and the role of this host for it.
pub type WithRole = (Arc<dyn Device>, Option<Arc<SharedRole>>);

/// A device to be opened: everything that can be checked without opening it has been.
pub trait DeviceConfig: Any + Debug + Send + Sync {
    /// Opens the device.
    ///
    /// # Errors
    /// Errors of the driver.
    fn open(&self) -> Result<Arc<dyn Device>, DeviceError>;

    /// Opens the device, and returns the role of this host for it if other hosts serve it too.
    ///
    /// # Errors
    /// Errors of the driver.
    fn open_with_role(&self) -> Result<WithRole, DeviceError> {
        Ok((self.open()?, None))
    }

    /// Adds the needs of the device in a sandbox: paths, ports, capabilities, locked memory, from
    /// when it is opened until it is closed.
    #[cfg(feature = "sandbox")]
    fn keep(&self, profile: &mut Profile);

    /// Adds the needs of further devices in the same directory.
    #[cfg(feature = "sandbox")]
    fn keep_beside(&self, _profile: &mut Profile) {}

    /// Has the device opened for reading only, as far as its kind can.
    fn make_read_only(&mut self);

    /// The use of memory regions.
    fn regions(&self) -> RegionUse {
        RegionUse::default()
    }

    /// Whether the device waits while another host uses it.
    fn is_standby(&self) -> bool {
        false
    }

    /// The file or device node that it opens, if it is one of this host.
    fn path(&self) -> Option<&Path> {
        None
    }

    /// The image that the device opens, if Freestone can create and grow it.
    fn image(&self) -> Option<&dyn RemoteImage> {
        None
    }

    /// Has an image keep no restart log, unless one is asked for.
    fn drop_restart_log(&mut self) {}
}

impl dyn DeviceConfig {
    /// The options of the kind that has options of type `T`; `None` for other kinds.
    pub fn options<T: Any>(&self) -> Option<&T> {
        (self as &dyn Any).downcast_ref()
    }

    /// Whether requests may only use memory that is registered with the device and lies in a file.
    pub fn needs_regions(&self) -> bool {
        self.regions().are_needed
    }

    /// Whether registered memory is pinned until it is unregistered.
    pub fn pins_regions(&self) -> bool {
        self.regions().are_pinned
    }

    /// Whether requests may only use memory that another process maps, and that nothing pins.
    pub fn maps_memory(&self) -> bool {
        self.needs_regions() && !self.pins_regions()
    }

    /// Whether requests may only use memory that is pinned.
    pub fn pins_all_memory(&self) -> bool {
        self.needs_regions() && self.pins_regions()
    }
}

/// The use that a device makes of memory regions. By default it needs none, and pins none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RegionUse {
    /// Requests may only use memory that is registered with the device and lies in a file.
    pub are_needed: bool,
    /// Registered memory is pinned until it is unregistered.
    pub are_pinned: bool,
}

/// An image of a service that Freestone can create and grow.
pub trait RemoteImage {
    /// Creates the image with `size` bytes.
    ///
    /// # Errors
    /// When it exists, or the service refuses it.
    fn create(&self, size: u64) -> Result<(), DeviceError>;

    /// Makes the image larger, also while it is open.
    ///
    /// # Errors
    /// When it is larger than `size`, or the service refuses it.
    fn grow(&self, size: u64) -> Result<(), DeviceError>;
}

/// The key of devices that wait for a server.
pub const RECONNECT_DELAY: Key =
    key("reconnect-delay", "S", "time that requests wait for a lost server, in seconds; 0: none [0]");

/// The value of `block-size=`, if it was given.
pub(crate) fn block_size(spec: &Spec) -> Result<Option<u32>, SpecError> {
    let Some(Size(size)) = spec.get("block-size")? else { return Ok(None) };
    // Drivers know which powers of two they take; here it only has to fit.
    match u32::try_from(size) {
        Ok(size) => Ok(Some(size)),
        Err(_) => Err(spec.refuse(format!("block-size={size}: at most 64K"))),
    }
}

/// Keeps a file or device node, and locked memory for regions that are registered with the kernel.
#[cfg(feature = "sandbox")]
pub(crate) fn keep_file(profile: &mut Profile, path: &Path, is_read_only: bool, locks_memory: bool) {
    profile.allow(path, if is_read_only { sandbox::Access::Read } else { sandbox::Access::ReadWrite });
    if locks_memory {
        profile.lock_memory();
    }
}

/// Keeps a directory that a host need not have. A need of a missing one could not be satisfied.
#[cfg(feature = "sandbox")]
pub fn keep_settings(profile: &mut Profile, directory: &str) {
    if Path::new(directory).exists() {
        profile.allow(directory, sandbox::Access::Read);
    }
}
