//! The driver side of virtqueues, which issues requests.
//!
//! ```text
//!   BlkQueue   virtio-blk requests: header, data, status, one cache line a slot
//!      │ add_indirect / add_chain                    ▲ poll
//!      ▼ publish: visible, and is a kick needed?     │
//!   Ring       split or packed; tokens in, tokens out
//! ```
//!
//! The device is not trusted. A used entry that names nothing in flight breaks the ring
//! ([`RingBroken`]), and every later call returns the same error. No value that the device writes
//! is used as an address or an index unchecked.
//!
//! Source: Virtual I/O Device (VIRTIO) 1.2, sections 2.7 (split), 2.8 (packed), 5.2 (block).

mod blk;
mod chain;
mod packed;
mod ring;
mod split;
#[cfg(test)]
mod tests;

pub use blk::{BlkQueue, BlkQueueConfig, PushError};
pub use chain::{Buffer, RingBroken, Used};
pub use ring::{Ring, RingConfig, RingLayout};

/// Memory that driver and device share, with its addresses for both.
#[derive(Clone, Copy, Debug)]
pub struct SharedArea {
    /// First byte in this process.
    pub base: *mut u8,
    /// The device's address of the same byte (a guest physical address).
    pub guest_addr: u64,
    /// Length in bytes.
    pub len: usize,
}

impl SharedArea {
    /// The part of `len` bytes at `offset`.
    ///
    /// # Panics
    /// When the part exceeds the area.
    pub fn part(&self, offset: usize, len: usize) -> SharedArea {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "part {offset}+{len} of {}",
            self.len
        );
        SharedArea { base: self.base.wrapping_add(offset), guest_addr: self.guest_addr + offset as u64, len }
    }
}
