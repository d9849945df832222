//! Virtqueues and virtio-blk: the shared layouts, and both the driver and the device side.
//!
//! ```text
//!   driver::  (issues requests: our initiator)            device::  (serves requests: our exports)
//!        add ──► kick ──► poll                                 pop ──► push_used ──► publish
//!              \                                               /
//!               ring:: the layout of split and packed rings in guest memory (memory::)
//!               blk::  the content of virtio-blk buffers
//! ```
//!
//! Source of truth: virtio 1.3, sections 2.7 (split virtqueues), 2.8 (packed virtqueues) and 5.2
//! (block device); for [`inflight`] and [`dirty_log`] the vhost-user specification of QEMU.
//!
//! Guest memory is volatile and hostile: a field is read once, the copy is validated, and only the
//! copy is used. Nothing that a guest writes makes this crate panic or touch memory outside that
//! guest's.
//!
//! The owner of a file used as guest memory can truncate it later, and the next access then raises
//! SIGBUS. A program that serves clients contains that with [`contain_truncation`].

#[cfg(not(all(target_endian = "little", target_pointer_width = "64")))]
compile_error!("rings are little-endian and addresses are 64 bits wide; other hosts would need conversions");

pub mod blk;
mod crash_point;
pub mod device;
pub mod dirty_log;
pub mod driver;
pub mod inflight;
mod mapping;
pub mod memory;
pub mod ring;
pub mod status;
mod truncation;

pub use truncation::{contain_truncation, losses as memory_losses};

/// The driver may use [`ring::DESC_F_INDIRECT`] descriptors.
pub const VIRTIO_F_INDIRECT_DESC: u64 = 1 << 28;
/// `used_event`/`avail_event` (split) or descriptor events (packed) say when to notify.
pub const VIRTIO_F_EVENT_IDX: u64 = 1 << 29;
/// The device follows virtio 1.0 or later; always needed here.
pub const VIRTIO_F_VERSION_1: u64 = 1 << 32;
/// Addresses in the rings are translated by an IOMMU or otherwise limited.
pub const VIRTIO_F_ACCESS_PLATFORM: u64 = 1 << 33;
/// The rings are packed.
pub const VIRTIO_F_RING_PACKED: u64 = 1 << 34;
/// The device uses buffers in the order in which they were made available.
pub const VIRTIO_F_IN_ORDER: u64 = 1 << 35;
/// Memory is ordered by the platform's rules for devices rather than those of the CPUs.
pub const VIRTIO_F_ORDER_PLATFORM: u64 = 1 << 36;
/// A single queue can be reset.
pub const VIRTIO_F_RING_RESET: u64 = 1 << 40;
/// vhost: log every write to guest memory ([`dirty_log`]).
pub const VHOST_F_LOG_ALL: u64 = 1 << 26;
/// vhost-user: protocol features can be negotiated.
pub const VHOST_USER_F_PROTOCOL_FEATURES: u64 = 1 << 30;
