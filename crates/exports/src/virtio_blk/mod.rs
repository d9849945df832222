//! A virtio-blk disk, whoever brings its virtqueues: what it offers ([`config`]), its virtqueues on the cores that serve
//! them ([`queue`]), and the requests in them ([`request`]).
//!
//! Source of truth: virtio 1.3, 2.7, 2.8 and 5.2.

pub(crate) mod config;
pub(crate) mod queue;
pub(crate) mod request;
