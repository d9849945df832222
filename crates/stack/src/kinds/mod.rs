//! The kinds of devices and layers: their tables, and those that are made of other devices.

#[cfg(feature = "sandbox")]
pub mod confinement;
pub mod device;
pub mod discovery;
pub mod layer;
pub mod member;
pub mod qcow2;
pub mod raid;
pub mod restart_log;
