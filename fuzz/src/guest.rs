//! The guest's memory: one file, shown to the device in several layouts.
//!
//! ```text
//!   guest address 0        0x1000       0x2000           0x6000              0x7000
//!                 descriptors, driver   device   tables, 256 B each   frames, 64 B each   data …
//! ```
//!
//! Every layout has the ring in its first region; other regions differ. Addresses are relative to
//! the guest's base except in descriptors, so that one client can use several guests.

use crate::memfd::Memfd;
use std::sync::Arc;
use virtio::device::RingAreas;
use virtio::memory::{GuestMemory, RegionSpec};

/// Largest number of entries of a ring.
pub const MAX_SIZE: u16 = 64;
/// Descriptor area of the ring.
pub const DESC: u64 = 0;
/// Driver area of the ring.
pub const DRIVER: u64 = 0x800;
/// Device area of the ring.
pub const DEVICE: u64 = 0x1000;
/// Indirect tables, one for each chain.
pub const TABLES: u64 = 0x2000;
/// Bytes of a table.
pub const TABLE_BYTES: u64 = 0x100;
/// Headers and status bytes, one frame for each chain.
pub const FRAMES: u64 = 0x6000;
/// Bytes of a frame.
pub const FRAME_BYTES: u64 = 64;
/// Start of the data.
pub const DATA: u64 = 0x7000;
/// Difference of user addresses and guest addresses in the first region.
pub const USER: u64 = 0x7000_0000_0000;

/// Bytes of the first region in every layout.
pub const FIRST_BYTES: u64 = 0x8000;

const FILE_BYTES: usize = 0x2_0000;
/// Content of memory outside all layouts.
const UNTOUCHED: u8 = 0xa5;
static ALL_UNTOUCHED: [u8; FILE_BYTES] = [UNTOUCHED; FILE_BYTES];

/// A region of a layout.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// First guest address.
    pub guest: u64,
    /// Length in bytes.
    pub len: u64,
    file: u64,
}

const fn part(guest: u64, len: u64, file: u64) -> Part {
    Part { guest, len, file }
}

/// The layouts: one region; adjacent ones that are not adjacent in the file; gaps; borders inside a
/// page; the end of the address space; many small regions.
const LAYOUTS: [&[Part]; 6] = [
    &[part(0, 0x1_0000, 0)],
    &[part(0, 0x8000, 0), part(0x8000, 0x8000, 0x1_0000), part(0x1_0000, 0x8000, 0x8000)],
    &[part(0, 0x8000, 0), part(0x1_0000_0000, 0x4000, 0x8000), part(0x1_0001_0000, 0x1000, 0xe000)],
    &[part(0, 0x8123, 0), part(0x9000, 0xfff, 0x9800), part(0x9fff, 0x801, 0x1_0001)],
    &[part(0, 0x8000, 0), part(0xffff_ffff_ffff_bfff, 0x4000, 0xc000)],
    &[part(0, 0x8000, 0), part(0x8000, 1, 0x9000), part(0x8001, 2, 0x9010), part(0x8003, 0x100, 0xa000)],
];

/// The guest's view of its memory.
#[derive(Debug)]
pub struct Guest {
    base: u64,
    file: Memfd,
    parts: &'static [Part],
    /// Layouts that the device has seen, as a bit mask.
    seen: u32,
}

impl Guest {
    /// Memory at guest address `base` that no device has seen.
    pub fn new(base: u64) -> Guest {
        Guest { base, file: Memfd::new(FILE_BYTES), parts: LAYOUTS[0], seen: 0 }
    }

    /// Offset that turns a relative address into a guest address.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// The file with the memory.
    pub fn file(&self) -> &Memfd {
        &self.file
    }

    /// Resets the memory for the next input.
    pub fn reset(&mut self) {
        self.file.fill(UNTOUCHED);
        self.file.write(0, &[0; FIRST_BYTES as usize]);
        self.seen = 0;
    }

    /// Switches to layout number `layout`, modulo the number of layouts. Returns guest address,
    /// length, user address and offset in the file of each region.
    pub fn choose(&mut self, layout: u8) -> impl Iterator<Item = [u64; 4]> {
        let index = usize::from(layout) % LAYOUTS.len();
        self.parts = LAYOUTS[index];
        self.seen |= 1 << index;
        let base = self.base;
        let region = move |(i, part): (usize, &Part)| {
            [base.wrapping_add(part.guest), part.len, base + USER + ((i as u64) << 32), part.file]
        };
        self.parts.iter().enumerate().map(region)
    }

    /// As [`Guest::choose`], for a device in this process.
    pub fn map(&mut self, layout: u8) -> Arc<GuestMemory> {
        let regions: Vec<_> = self.choose(layout).collect();
        let spec = |[guest_addr, len, user_addr, fd_offset]: [u64; 4]| {
            let fd = self.file.fd().try_clone_to_owned().expect("descriptors are left");
            RegionSpec { guest_addr, len, user_addr, fd, fd_offset }
        };
        Arc::new(GuestMemory::map(regions.into_iter().map(spec).collect()).expect("the layouts are sound"))
    }

    /// The present regions.
    pub fn parts(&self) -> &'static [Part] {
        self.parts
    }

    /// Addresses of the ring.
    pub fn areas(&self) -> RingAreas {
        let user = USER + self.base;
        RingAreas { descriptors: user + DESC, driver: user + DRIVER, device: user + DEVICE }
    }

    fn offset(&self, addr: u64, len: usize) -> Option<usize> {
        let len = len as u64;
        let part = self.parts.iter().find(|part| {
            addr.checked_sub(part.guest).is_some_and(|from| from < part.len && len <= part.len - from)
        })?;
        Some((addr - part.guest + part.file) as usize)
    }

    /// Writes at a guest address. Does nothing outside memory.
    pub fn write(&self, addr: u64, bytes: &[u8]) {
        if let Some(offset) = self.offset(addr, bytes.len()) {
            self.file.write(offset, bytes);
        }
    }

    /// Writes a 16-bit number.
    pub fn write_u16(&self, addr: u64, value: u16) {
        self.write(addr, &value.to_le_bytes());
    }

    /// The bytes at a guest address in the first region.
    ///
    /// # Panics
    /// When the bytes are outside memory.
    pub fn read<const N: usize>(&self, addr: u64) -> [u8; N] {
        self.file.read(self.offset(addr, N).expect("the ring is in memory"))
    }

    /// Reads a 16-bit number.
    pub fn read_u16(&self, addr: u64) -> u16 {
        u16::from_le_bytes(self.read(addr))
    }

    /// Writes a descriptor; `a` and `b` are flags and next (split), id and flags (packed).
    pub fn write_desc(&self, at: u64, addr: u64, len: u32, a: u16, b: u16) {
        let words = [addr, u64::from(len) | u64::from(a) << 32 | u64::from(b) << 48];
        self.write(at, &words[0].to_le_bytes());
        self.write(at + 8, &words[1].to_le_bytes());
    }

    /// Asserts that the device has written only to memory of layouts that it has seen.
    pub fn check_untouched(&self) {
        let shown = || (0..LAYOUTS.len()).filter(|i| self.seen & 1 << i != 0).flat_map(|i| LAYOUTS[i]);
        let mut from = FIRST_BYTES as usize;
        while from < FILE_BYTES {
            let is_in = |part: &&Part| (part.file..part.file + part.len).contains(&(from as u64));
            if let Some(part) = shown().find(is_in) {
                from = (part.file + part.len) as usize;
                continue;
            }
            let next = shown().map(|part| part.file as usize).filter(|&file| file > from).min();
            let end = next.unwrap_or(FILE_BYTES);
            let is_untouched = self.file.holds(from, &ALL_UNTOUCHED[..end - from]);
            assert!(
                is_untouched,
                "the device wrote to bytes {from:#x}..{end:#x} of the file, which no region has"
            );
            from = end;
        }
    }
}
