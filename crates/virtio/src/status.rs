//! The bits of a device's status: virtio 1.3, section 2.1.

/// The driver has noticed the device.
pub const ACKNOWLEDGE: u8 = 1;
/// The driver supports the device.
pub const DRIVER: u8 = 2;
/// The driver is ready: the device runs.
pub const DRIVER_OK: u8 = 4;
/// Both sides have agreed on the features.
pub const FEATURES_OK: u8 = 8;
/// The device needs a reset to continue.
pub const NEEDS_RESET: u8 = 64;
/// The driver has given up on the device.
pub const FAILED: u8 = 128;
