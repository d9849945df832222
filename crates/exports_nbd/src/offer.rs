//! Export information for clients: size, transmission flags, block sizes.

use block::{DirtyBitmap, Limits};
use nbd::Replies;
use nbd::handshake::{
    BASE_ALLOCATION, FLAG_CAN_MULTI_CONN, FLAG_HAS_FLAGS, FLAG_READ_ONLY, FLAG_ROTATIONAL, FLAG_SEND_CACHE,
    FLAG_SEND_DF, FLAG_SEND_FAST_ZERO, FLAG_SEND_FLUSH, FLAG_SEND_FUA, FLAG_SEND_TRIM,
    FLAG_SEND_WRITE_ZEROES, MAX_PAYLOAD,
};
use std::sync::Arc;

/// Largest minimum block size that the protocol can express.
pub(crate) const MAX_BLOCK: u32 = 64 << 10;

/// Most metadata contexts of an export: further bitmaps are not offered.
const MAX_CONTEXTS: usize = 64;
/// Most metadata contexts that a client may select. Their extents fit the least memory of a
/// connection.
pub(crate) const MAX_SELECTED: u32 = 16;

/// The metadata contexts that a client has selected, by their place in [`Offer::contexts`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Selected(u64);

impl Selected {
    /// Selects another context.
    pub(crate) fn add(&mut self, place: usize) {
        self.0 |= 1 << place;
    }

    /// The number of contexts.
    pub(crate) fn len(self) -> u32 {
        self.0.count_ones()
    }

    /// Their places.
    pub(crate) fn places(self) -> impl Iterator<Item = usize> {
        (0..MAX_CONTEXTS).filter(move |place| self.0 >> place & 1 == 1)
    }
}

/// The identifier of the metadata context at a place of the export's list.
pub(crate) fn context_id(place: usize) -> u32 {
    place as u32 + 1
}

/// The metadata contexts of an export with these bitmaps.
pub(crate) fn contexts(bitmaps: &[Arc<dyn DirtyBitmap>]) -> Arc<[String]> {
    let bitmaps = bitmaps.iter().map(|bitmap| format!("qemu:dirty-bitmap:{}", bitmap.name()));
    [BASE_ALLOCATION.to_owned()].into_iter().chain(bitmaps).take(MAX_CONTEXTS).collect()
}

/// The export information that a handshake sends.
#[derive(Clone, Debug)]
pub(crate) struct Offer {
    pub(crate) name: String,
    pub(crate) description: String,
    pub(crate) limits: Limits,
    /// Whether device or export refuse writes.
    pub(crate) is_read_only: bool,
    /// The metadata contexts: `base:allocation`, and then one for each bitmap.
    pub(crate) contexts: Arc<[String]>,
}

impl Offer {
    /// Transmission flags for a client that negotiated `form`.
    pub(crate) fn flags(&self, form: Replies) -> u16 {
        let Limits { max_discard, max_write_zeroes, rotational, .. } = self.limits;
        // An export is one device on all cores: a flush covers requests that completed on any
        // connection. Flush and FUA are always supported; without a volatile cache they cost
        // nothing.
        let mut flags =
            FLAG_HAS_FLAGS | FLAG_SEND_FLUSH | FLAG_SEND_FUA | FLAG_CAN_MULTI_CONN | FLAG_SEND_CACHE;
        let mut add = |flag, is_set| flags |= if is_set { flag } else { 0 };
        let can_write = !self.is_read_only;
        add(FLAG_READ_ONLY, !can_write);
        add(FLAG_ROTATIONAL, rotational);
        add(FLAG_SEND_TRIM, can_write && max_discard > 0);
        add(FLAG_SEND_WRITE_ZEROES | FLAG_SEND_FAST_ZERO, can_write && max_write_zeroes > 0);
        add(FLAG_SEND_DF, form != Replies::Simple);
        flags
    }

    /// Minimum block, preferred block, longest read or write, in bytes.
    pub(crate) fn block_sizes(&self) -> [u32; 3] {
        let least = self.limits.block_size;
        // The protocol requires a power of two.
        let preferred = self.limits.physical_block_size.clamp(least, MAX_PAYLOAD).next_power_of_two();
        [least, preferred, MAX_PAYLOAD]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offer(limits: Limits) -> Offer {
        let is_read_only = limits.read_only;
        let contexts = contexts(&[]);
        Offer { name: "disk".into(), description: String::new(), limits, is_read_only, contexts }
    }

    #[test]
    fn flags_say_what_the_device_can() {
        let common = 0x1 | 0x4 | 0x8 | 0x100 | 0x400;
        let writable = 0x20 | 0x40 | 0x800;
        let plain = Limits::new(1 << 20);
        assert_eq!(offer(plain.clone()).flags(Replies::Simple), common | writable);
        assert_eq!(offer(plain.clone()).flags(Replies::Extended), common | writable | 0x80);
        let read_only = Limits { read_only: true, rotational: true, ..plain.clone() };
        assert_eq!(offer(read_only).flags(Replies::Simple), common | 0x2 | 0x10);
        let bare = Limits { max_discard: 0, max_write_zeroes: 0, ..plain };
        assert_eq!(offer(bare).flags(Replies::Structured), common | 0x80);
    }

    #[test]
    fn block_sizes_are_powers_of_two_in_order() {
        let sizes = |block_size, physical_block_size| {
            offer(Limits { block_size, physical_block_size, ..Limits::new(1 << 20) }).block_sizes()
        };
        assert_eq!(sizes(512, 4096), [512, 4096, MAX_PAYLOAD]);
        assert_eq!(sizes(4096, 512), [4096, 4096, MAX_PAYLOAD]);
        assert_eq!(sizes(512, 5000), [512, 8192, MAX_PAYLOAD]);
        assert_eq!(sizes(512, u32::MAX), [512, MAX_PAYLOAD, MAX_PAYLOAD]);
    }
}
