//! The side of virtqueues that issues requests.
//!
//! ```text
//!   BlkQueue   virtio-blk requests: header, data, status, one cache line a slot
//!      │ add_indirect / add_chain                    ▲ poll
//!      ▼ publish: visible, and is a kick needed?     │
//!   Ring       split or packed; tokens in, tokens out
//! ```
//!
//! The device is not trusted: a used entry that names nothing in flight breaks the ring ([`RingBroken`]), and
//! every call after that says so again. Nothing it writes is used as an address or an index unchecked.
//!
//! Source: Virtual I/O Device (VIRTIO) 1.2, sections 2.7 (split), 2.8 (packed), 5.2 (block).

mod blk;
mod packed;
mod ring;
mod split;
#[cfg(test)]
mod tests;

pub use blk::{BlkQueue, BlkQueueConfig, PushError};
pub use ring::{Buffer, Ring, RingBroken, RingConfig, RingLayout, Used};

/// Memory that driver and device share: where it is here, and how the device calls it.
#[derive(Clone, Copy, Debug)]
pub struct SharedArea {
    /// First byte in this process.
    pub base: *mut u8,
    /// The same byte as descriptors name it (a guest physical address).
    pub guest_addr: u64,
    /// Length in bytes.
    pub len: usize,
}

impl SharedArea {
    /// The part that starts `offset` bytes in and is `len` bytes long.
    ///
    /// # Panics
    /// When the part does not lie inside.
    pub fn part(&self, offset: usize, len: usize) -> SharedArea {
        assert!(
            offset.checked_add(len).is_some_and(|end| end <= self.len),
            "part {offset}+{len} of {}",
            self.len
        );
        SharedArea { base: self.base.wrapping_add(offset), guest_addr: self.guest_addr + offset as u64, len }
    }
}
