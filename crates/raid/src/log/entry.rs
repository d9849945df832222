//! The format of a log entry on a member.
//!
//! ```text
//!   ┌ header   ┬ partial parity ┬ new data of each modified strip ┬ zeroes ┐
//!   │ 512      │ len            │ len each, only with REDO        │ to 4096│
//!   └ at a multiple of 4096 bytes in the lane                              ┘
//! ```
//!
//! All numbers are little-endian. An entry takes a multiple of 4096 bytes. It may wrap at the end
//! of its lane and continue at the lane's first byte. The header fits in one 512-byte sector, so
//! that it is written as a whole or not at all. Its CRC and the checksum of the payload distinguish
//! a complete entry from a torn one. A marker has no payload. An entry that modifies all data
//! strips has no partial parity.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic `FsRdLog` and a zero byte |
//! | 8 | 2 | version: 1 |
//! | 10 | 1 | kind: 0 write, 1 marker (carries a tail only) |
//! | 11 | 1 | flags: 1 REDO; others must be zero |
//! | 12 | 4 | zero |
//! | 16 | 16 | nonce of the assembly, from the superblock |
//! | 32 | 16 | UUID of the array |
//! | 48 | 2 | lane |
//! | 50 | 2 | slot of the member that this copy was written to |
//! | 52 | 4 | position of the header in the lane, in bytes |
//! | 56 | 8 | sequence: one count for a lane over all members |
//! | 64 | 8 | tail: every entry of the lane with a lower sequence was retired when this one was made |
//! | 72 | 8 | epoch of the array |
//! | 80 | 8 | stripe |
//! | 88 | 4 | first byte of the write in each strip |
//! | 92 | 4 | bytes of the write in each strip |
//! | 96 | 8 | modified data strips, bit i for strip i |
//! | 104 | 2 | parities that get a copy, bit j for parity j |
//! | 106 | 2 | the parity whose partial this copy holds |
//! | 108 | 4 | bytes of payload |
//! | 112 | 4 | checksum of the payload: new data, strip by strip, then the partial parity |
//! | 116 | 4 | checksums that follow: 0, or one for each modified strip |
//! | 120 | 256 | checksum of the new data of each modified strip, ascending; unused ones are zero |
//! | 376 | 132 | zero |
//! | 508 | 4 | CRC32C of bytes 0 to 508 |
//!
//! A marker has zeroes from 80 on, up to the CRC.

use crate::config::{MAX_GROUP_MEMBERS, MAX_PARITY, ROW_BYTES};
use crate::log::size;
pub use crate::log::size::{HEADER_BYTES, UNIT, entry_bytes};
use crate::{ArrayConfig, Uuid};
use arrayvec::ArrayVec;

const _: () = assert!(UNIT == ROW_BYTES);

const MAGIC: [u8; 8] = *b"FsRdLog\0";
/// The version of entries that are written and read.
pub(super) const VERSION: u16 = 1;
const WRITE: u8 = 0;
const MARKER: u8 = 1;
const REDO: u8 = 1;
const CHECKSUMS_AT: usize = 120;
const CRC_AT: usize = HEADER_BYTES - 4;

/// 128 random bits that are new at every assembly. They invalidate entries of earlier assemblies,
/// and guest data that looks like an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub struct Nonce(pub [u8; 16]);

/// The header of an entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Nonce of the assembly.
    pub nonce: Nonce,
    /// UUID of the array.
    pub array: Uuid,
    /// The lane.
    pub lane: u16,
    /// The member that this copy was written to.
    pub slot: u16,
    /// Position of the header in the lane, in bytes.
    pub position: u32,
    /// The entry's number in the lane.
    pub sequence: u64,
    /// The tail: every entry of the lane with a lower sequence was retired.
    pub tail: u64,
    /// Epoch of the array.
    pub epoch: u64,
    /// The write; `None` for a marker, which carries only the tail.
    pub write: Option<Write>,
    /// [`Checksum`](super::checksum::Checksum) of the payload: the parts of
    /// [`Write::payload_parts`].
    pub payload_checksum: u32,
}

/// The write that an entry stands for: a byte range of some data strips of one stripe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Write {
    /// The stripe.
    pub stripe: u64,
    /// First byte in each strip.
    pub offset: u32,
    /// Bytes of each strip.
    pub len: u32,
    /// Modified data strips, bit `i` for strip `i`.
    pub modified: u64,
    /// Parities that get a copy, bit `j` for parity `j`.
    pub targets: u16,
    /// The parity whose partial this copy holds.
    pub parity: u16,
    /// Whether the new data is in the payload.
    pub has_redo: bool,
    /// [`Checksum`](super::checksum::Checksum) of each modified strip's new data, ascending, or
    /// empty.
    pub checksums: ArrayVec<u32, MAX_GROUP_MEMBERS>,
}

impl Write {
    /// Whether every one of `data` data strips is modified, and there is no partial parity.
    pub fn is_full(&self, data: usize) -> bool {
        self.modified.count_ones() as usize == data
    }

    /// Bytes of the payload in units of `len`.
    fn payload_strips(&self, data: usize) -> u64 {
        let redo = if self.has_redo { u64::from(self.modified.count_ones()) } else { 0 };
        u64::from(!self.is_full(data)) + redo
    }

    /// Bytes of the payload.
    pub fn payload_bytes(&self, data: usize) -> u64 {
        self.payload_strips(data) * u64::from(self.len)
    }

    /// Offset and length of each content of the payload, in the order of their checksum: first new
    /// data, strip by strip, then the partial parity, which differs between copies.
    pub fn payload_parts(&self, data: usize) -> impl Iterator<Item = (usize, usize)> + use<> {
        let len = self.len as usize;
        let partial = if self.is_full(data) { 0 } else { len };
        let redo = if self.has_redo { self.modified.count_ones() as usize } else { 0 };
        (0..redo).map(move |i| (partial + i * len, len)).chain((partial > 0).then_some((0, partial)))
    }

    /// Offset of the new data of modified strip `strip` in the payload. Only with redo.
    pub fn redo_at(&self, data: usize, strip: usize) -> u64 {
        let before = u64::from((self.modified & ((1 << strip) - 1)).count_ones());
        (u64::from(!self.is_full(data)) + before) * u64::from(self.len)
    }

    /// Whether both may change the same bytes of parity.
    pub fn overlaps(&self, other: &Write) -> bool {
        let end = |write: &Write| u64::from(write.offset) + u64::from(write.len);
        self.stripe == other.stripe
            && u64::from(self.offset) < end(other)
            && u64::from(other.offset) < end(self)
    }

    /// Whether the other is another copy of the same entry.
    pub fn is_copy_of(&self, other: &Write) -> bool {
        Write { parity: other.parity, ..self.clone() } == *other
    }

    /// Whether the write is valid in an array, so that arithmetic with it cannot overflow.
    fn fits(&self, config: &ArrayConfig, lane: u16, slot: u16) -> bool {
        let geometry = &config.geometry;
        let (data, parities) = (geometry.data, geometry.parity);
        let blocks = |bytes: u32| bytes.is_multiple_of(config.block_size);
        self.stripe < geometry.stripes()
            && config.lane_of(self.stripe) == lane
            && self.len > 0
            && self.offset.checked_add(self.len).is_some_and(|end| end <= geometry.strip_bytes)
            && (blocks(self.offset) && blocks(self.len))
            && self.modified != 0
            && (data == 64 || self.modified >> data == 0)
            && (parities <= MAX_PARITY && u32::from(self.targets) >> parities == 0)
            && self.parity < 16
            && self.targets >> self.parity & 1 == 1
            && geometry.member(self.stripe, data + usize::from(self.parity)) == usize::from(slot)
            && (self.checksums.is_empty() || self.checksums.len() == self.modified.count_ones() as usize)
    }
}

impl Header {
    /// Bytes of payload.
    pub fn payload_bytes(&self, data: usize) -> u64 {
        self.write.as_ref().map_or(0, |write| write.payload_bytes(data))
    }

    /// Bytes that the entry takes in the lane.
    pub fn entry_bytes(&self, data: usize) -> u64 {
        entry_bytes(self.payload_bytes(data))
    }

    /// The header in its on-disk format.
    pub fn encode(&self, data: usize) -> [u8; HEADER_BYTES] {
        let mut bytes = [0; HEADER_BYTES];
        put(&mut bytes, 0, MAGIC);
        put(&mut bytes, 8, VERSION.to_le_bytes());
        bytes[10] = if self.write.is_some() { WRITE } else { MARKER };
        put(&mut bytes, 16, self.nonce.0);
        put(&mut bytes, 32, self.array.0);
        put(&mut bytes, 48, self.lane.to_le_bytes());
        put(&mut bytes, 50, self.slot.to_le_bytes());
        put(&mut bytes, 52, self.position.to_le_bytes());
        put(&mut bytes, 56, self.sequence.to_le_bytes());
        put(&mut bytes, 64, self.tail.to_le_bytes());
        put(&mut bytes, 72, self.epoch.to_le_bytes());
        if let Some(write) = &self.write {
            bytes[11] = if write.has_redo { REDO } else { 0 };
            put(&mut bytes, 80, write.stripe.to_le_bytes());
            put(&mut bytes, 88, write.offset.to_le_bytes());
            put(&mut bytes, 92, write.len.to_le_bytes());
            put(&mut bytes, 96, write.modified.to_le_bytes());
            put(&mut bytes, 104, write.targets.to_le_bytes());
            put(&mut bytes, 106, write.parity.to_le_bytes());
            put(&mut bytes, 108, (write.payload_bytes(data) as u32).to_le_bytes());
            put(&mut bytes, 112, self.payload_checksum.to_le_bytes());
            put(&mut bytes, 116, (write.checksums.len() as u32).to_le_bytes());
            for (i, crc) in write.checksums.iter().enumerate() {
                put(&mut bytes, CHECKSUMS_AT + 4 * i, crc.to_le_bytes());
            }
        }
        let crc = crc32c::crc32c(&bytes[..CRC_AT]);
        put(&mut bytes, CRC_AT, crc.to_le_bytes());
        bytes
    }

    /// The version of the entry in `bytes`, if a later version of Freestone wrote it to this log.
    /// Every version has magic, version, nonce, UUID of the array and checksum at the same offsets.
    pub fn later_version(bytes: &[u8], nonce: Nonce, array: Uuid) -> Option<u16> {
        let bytes: &[u8; HEADER_BYTES] = bytes.get(..HEADER_BYTES)?.try_into().ok()?;
        let version = u16::from_le_bytes(get(bytes, 8));
        let is_of_log = get(bytes, 0) == MAGIC && get(bytes, 16) == nonce.0 && get(bytes, 32) == array.0;
        (is_of_log && version > VERSION && is_whole(bytes)).then_some(version)
    }

    /// The header in `bytes`, if it is one that this array may have written: every field is in
    /// range. The caller compares its position with the place where it was read.
    pub fn decode(bytes: &[u8], config: &ArrayConfig) -> Option<Header> {
        let bytes: &[u8; HEADER_BYTES] = bytes.get(..HEADER_BYTES)?.try_into().ok()?;
        let version = u16::from_le_bytes(get(bytes, 8));
        if get(bytes, 0) != MAGIC || version != VERSION || !is_whole(bytes) {
            return None;
        }
        let (lane, slot) = (u16::from_le_bytes(get(bytes, 48)), u16::from_le_bytes(get(bytes, 50)));
        let write = match (bytes[10], bytes[11]) {
            (MARKER, 0) => None,
            (WRITE, flags @ (0 | REDO)) => Some(decode_write(bytes, flags == REDO)?),
            _ => return None,
        };
        let data = config.geometry.data;
        if let Some(write) = &write
            && (!write.fits(config, lane, slot)
                || u64::from(u32::from_le_bytes(get(bytes, 108))) != write.payload_bytes(data))
        {
            return None;
        }
        let header = Header {
            nonce: Nonce(get(bytes, 16)),
            array: Uuid(get(bytes, 32)),
            lane,
            slot,
            position: u32::from_le_bytes(get(bytes, 52)),
            sequence: u64::from_le_bytes(get(bytes, 56)),
            tail: u64::from_le_bytes(get(bytes, 64)),
            epoch: u64::from_le_bytes(get(bytes, 72)),
            write,
            payload_checksum: u32::from_le_bytes(get(bytes, 112)),
        };
        let is_placed = header.position.is_multiple_of(UNIT) && header.position < config.lane_bytes;
        let is_whole = header.entry_bytes(data) <= max_entry_bytes(config);
        (is_placed && is_whole && header.tail <= header.sequence && header.lane < config.lanes)
            .then_some(header)
    }
}

/// The longest entry.
pub fn max_entry_bytes(config: &ArrayConfig) -> u64 {
    size::max_entry_bytes(config.lane_bytes)
}

/// Whether the header has the checksum of its bytes.
fn is_whole(bytes: &[u8; HEADER_BYTES]) -> bool {
    u32::from_le_bytes(get(bytes, CRC_AT)) == crc32c::crc32c(&bytes[..CRC_AT])
}

fn decode_write(bytes: &[u8; HEADER_BYTES], has_redo: bool) -> Option<Write> {
    let count = u32::from_le_bytes(get(bytes, 116)) as usize;
    if count > MAX_GROUP_MEMBERS {
        return None;
    }
    Some(Write {
        stripe: u64::from_le_bytes(get(bytes, 80)),
        offset: u32::from_le_bytes(get(bytes, 88)),
        len: u32::from_le_bytes(get(bytes, 92)),
        modified: u64::from_le_bytes(get(bytes, 96)),
        targets: u16::from_le_bytes(get(bytes, 104)),
        parity: u16::from_le_bytes(get(bytes, 106)),
        has_redo,
        checksums: (0..count).map(|i| u32::from_le_bytes(get(bytes, CHECKSUMS_AT + 4 * i))).collect(),
    })
}

fn put<const N: usize>(bytes: &mut [u8; HEADER_BYTES], at: usize, value: [u8; N]) {
    bytes[at..at + N].copy_from_slice(&value);
}

/// `N` bytes at `at`; every caller passes a constant inside the header.
fn get<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    std::array::from_fn(|i| bytes[at + i])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::log::test_array;
    use proptest::prelude::*;

    fn sample(config: &ArrayConfig, stripe: u64, parity: u16, has_redo: bool, checksums: usize) -> Header {
        let write = Write {
            stripe,
            offset: 512,
            len: 1024,
            modified: 0b101,
            targets: 0b11,
            parity,
            has_redo,
            checksums: (0..checksums as u32).collect(),
        };
        Header {
            nonce: Nonce([7; 16]),
            array: config.uuid,
            lane: config.lane_of(stripe),
            slot: config.geometry.member(stripe, config.geometry.data + usize::from(parity)) as u16,
            position: 8192,
            sequence: u64::MAX,
            tail: u64::MAX - 3,
            epoch: 9,
            write: Some(write),
            payload_checksum: 0x1234_5678,
        }
    }

    #[test]
    fn a_header_survives_the_member() {
        let config = test_array(4, 2, 4096, 2);
        for stripe in 0..20 {
            for (parity, has_redo, checksums) in [(0, false, 0), (1, true, 2), (0, true, 0), (1, false, 2)] {
                let header = sample(&config, stripe, parity, has_redo, checksums);
                assert_eq!(Header::decode(&header.encode(4), &config), Some(header));
            }
        }
        let marker = Header { write: None, payload_checksum: 0, ..sample(&config, 0, 0, false, 0) };
        assert_eq!(Header::decode(&marker.encode(4), &config), Some(marker));
    }

    #[test]
    fn payload_lies_one_strip_after_the_other() {
        let config = test_array(4, 2, 4096, 2);
        let header = sample(&config, 0, 0, true, 2);
        let write = header.write.as_ref().unwrap();
        assert_eq!((write.payload_bytes(4), header.entry_bytes(4)), (3072, 4096));
        assert_eq!((write.redo_at(4, 0), write.redo_at(4, 2)), (1024, 2048));
        let full = Write { modified: 0b1111, ..write.clone() };
        assert_eq!((full.payload_bytes(4), full.redo_at(4, 3)), (4096, 3072));
        let header_only = Write { has_redo: false, ..full };
        assert_eq!(header_only.payload_bytes(4), 0);
    }

    #[test]
    fn an_entry_that_no_array_of_this_geometry_writes_is_refused() {
        let config = test_array(4, 2, 4096, 2);
        let refused = |change: &dyn Fn(&mut Header)| {
            let mut header = sample(&config, 3, 1, false, 0);
            change(&mut header);
            assert_eq!(Header::decode(&header.encode(4), &config), None, "{header:?}");
        };
        fn write(header: &mut Header) -> &mut Write {
            header.write.as_mut().unwrap()
        }
        refused(&|h| h.position = 512);
        refused(&|h| h.position = 1 << 31);
        refused(&|h| h.sequence = 0);
        refused(&|h| h.lane ^= 1);
        refused(&|h| h.slot ^= 1);
        refused(&|h| write(h).stripe = u64::MAX);
        refused(&|h| write(h).len = 0);
        refused(&|h| write(h).len = u32::MAX - 511);
        refused(&|h| write(h).offset = 100);
        refused(&|h| write(h).offset = 4096);
        refused(&|h| write(h).modified = 0);
        refused(&|h| write(h).modified = 1 << 4);
        refused(&|h| write(h).targets = 0b111);
        refused(&|h| write(h).targets = 0b01);
        refused(&|h| write(h).parity = 16);
        refused(&|h| write(h).parity = 0);
        refused(&|h| write(h).checksums.push(1));
    }

    proptest! {
        #[test]
        fn a_flipped_bit_is_noticed(stripe in 0u64..20, bit in 0..HEADER_BYTES * 8) {
            let config = test_array(4, 2, 4096, 2);
            let mut bytes = sample(&config, stripe, 1, true, 2).encode(4);
            bytes[bit / 8] ^= 1 << (bit % 8);
            prop_assert_eq!(Header::decode(&bytes, &config), None);
        }

        #[test]
        fn any_bytes_give_a_header_that_is_in_range_or_none(
            noise in prop::collection::vec(any::<u8>(), 0..600),
            from in 0usize..HEADER_BYTES,
            data in 1usize..=60,
        ) {
            // Magic, version and CRC are valid, so that the other checks see the noise.
            let config = test_array(data, 2, 4096, 3);
            let mut bytes = sample(&test_array(4, 2, 4096, 2), 1, 1, true, 2).encode(4);
            for (byte, noise) in bytes[from.max(11)..].iter_mut().zip(&noise) {
                *byte = *noise;
            }
            let crc = crc32c::crc32c(&bytes[..CRC_AT]);
            put(&mut bytes, CRC_AT, crc.to_le_bytes());
            if let Some(header) = Header::decode(&bytes, &config) {
                prop_assert!(header.entry_bytes(data) <= max_entry_bytes(&config));
                if let Some(write) = &header.write {
                    prop_assert!(write.stripe < config.geometry.stripes());
                    prop_assert!(u64::from(write.offset) + u64::from(write.len) <= 4096);
                }
            }
            let _ = Header::decode(&noise, &config);
        }
    }
}
