//! Exports to virtual machines, whose rings are virtqueues: vhost-user-blk, and VDUSE for the
//! machine's own kernel.

pub mod vduse;
pub mod vhost_user_blk;
mod virtio_blk;

pub use virtio::contain_truncation;
