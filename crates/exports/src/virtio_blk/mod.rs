//! A virtio-blk disk, whoever brings its virtqueues: what it offers ([`config`]), its virtqueues on the cores that serve
//! them ([`queue`]), the requests in them ([`request`]), the memory that those point into ([`memory`]), and how the driver
//! is interrupted ([`signal`]).
//!
//! Source of truth: virtio 1.3, 2.7, 2.8 and 5.2.

pub(crate) mod config;
pub(crate) mod memory;
pub(crate) mod queue;
pub(crate) mod request;
pub(crate) mod signal;

use virtio::blk::ID_BYTES;

/// A serial number as GET_ID answers it: padded with zeroes, cut where it is too long.
pub(crate) fn virtio_id(serial: &str) -> [u8; ID_BYTES] {
    let mut id = [0; ID_BYTES];
    let len = serial.len().min(ID_BYTES);
    id[..len].copy_from_slice(&serial.as_bytes()[..len]);
    id
}
