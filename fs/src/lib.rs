//! `freestone-fs`: the virtio-fs server that `freestone fs serve --queues N` runs.
//!
//! ```text
//!   guest ─ hiprio queue ──► thread ─┐
//!         ─ request queue 1 ► thread ─┼─► Requests: FUSE_INIT first ─► virtiofsd's library ─► directory
//!         ─ request queue N ► thread ─┘
//! ```
//!
//! The library of virtiofsd speaks FUSE and confines the process; its own server has one request
//! queue. This program has one thread for each virtqueue. Source of truth: virtio 1.2 section 5.11,
//! and the vhost-user protocol.

#![forbid(unsafe_code)]

pub mod args;
mod capabilities;
mod confine;
pub mod device;
mod requests;
pub mod serve;
