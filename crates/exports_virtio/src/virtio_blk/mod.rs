//! A virtio-blk disk behind any transport: its features ([`config`]), its virtqueues on the cores
//! ([`queue`]), requests ([`request`]), guest memory ([`memory`]) and interrupts ([`signal`]).
//!
//! Source of truth: virtio 1.3, 2.7, 2.8 and 5.2.

pub(crate) mod config;
pub(crate) mod memory;
pub(crate) mod queue;
pub(crate) mod request;
pub(crate) mod signal;

use virtio::blk::ID_BYTES;

/// A serial number in the format of GET_ID: truncated or padded with zeroes.
pub(crate) fn virtio_id(serial: &str) -> [u8; ID_BYTES] {
    let mut id = [0; ID_BYTES];
    let len = serial.len().min(ID_BYTES);
    id[..len].copy_from_slice(&serial.as_bytes()[..len]);
    id
}
