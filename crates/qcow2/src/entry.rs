//! Entries of L1 and L2 tables: bits and rules, without I/O.
//!
//! Source: QEMU `docs/interop/qcow2.rst`, sections *Cluster mapping* and *Extended L2 Entries*.

use crate::header::Header;
use crate::mutant::{self, Mutant};
use std::ops::Range;

/// Bits 9 to 55 of an entry: an offset in the file.
pub const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Bit 63: the refcount is exactly 1. Only active tables keep it up to date.
pub const COPIED: u64 = 1 << 63;
/// Bit 62 of an L2 entry: the cluster is compressed.
pub const COMPRESSED: u64 = 1 << 62;
/// Bit 0 of a standard L2 entry: the cluster reads as zeroes.
pub const ZERO: u64 = 1;
/// Reserved bits of an L1 entry.
pub const L1_RESERVED: u64 = 0x7f00_0000_0000_01ff;
/// Reserved bits of a standard L2 entry.
pub const L2_RESERVED: u64 = 0x3f00_0000_0000_01fe;
/// Subclusters of a cluster with an extended L2 entry.
pub const SUBCLUSTERS: u64 = 32;

/// Properties of an image that decide what its entries mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The cluster size as a power of two.
    pub cluster_bits: u32,
    /// Whether L2 entries have a bitmap of subclusters.
    pub has_extended_l2: bool,
    /// Whether guest data is in another file.
    pub has_data_file: bool,
    /// Whether the version is 2, which has no zero clusters.
    pub is_v2: bool,
}

/// An L2 entry and its bitmap of subclusters, which is 0 without extended entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The standard entry.
    pub word: u64,
    /// Low half: allocated; high half: reads as zeroes.
    pub bitmap: u64,
}

impl Entry {
    /// No place, and not cleared.
    pub const NONE: Entry = Entry { word: 0, bitmap: 0 };
    /// The bits of a bitmap that subclusters have when they read as zeroes.
    const ZEROES: u32 = 32;

    /// Whether the subclusters of `mask` have neither data nor zeroes.
    pub(crate) fn has_neither(self, mask: u32) -> bool {
        let mask = u64::from(mask);
        self.bitmap & (mask | mask << Entry::ZEROES) == 0
    }

    /// The same entry with the subclusters of `mask` allocated.
    #[must_use]
    fn with_allocated(self, mask: u32) -> Entry {
        let mask = u64::from(mask);
        Entry { bitmap: (self.bitmap | mask) & !(mask << Entry::ZEROES), ..self }
    }

    /// The same entry with the subclusters of `mask` as zeroes.
    #[must_use]
    fn with_zeroes(self, mask: u32) -> Entry {
        let mask = u64::from(mask);
        Entry { bitmap: self.bitmap & !mask | mask << Entry::ZEROES, ..self }
    }
}

/// The type of a cluster. The offsets are as they stand in the entry: not checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cluster {
    /// No place in this image.
    Unallocated,
    /// Reads as zeroes, without a place.
    Zero,
    /// Reads as zeroes; its place is kept.
    ZeroAllocated(u64),
    /// Data at this byte.
    Data(u64),
    /// Compressed data.
    Compressed(Compressed),
}

/// The place of compressed data.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Compressed {
    /// First byte in the file; any alignment.
    pub offset: u64,
    /// Most bytes that the data has: up to the end of its last 512-byte sector.
    pub len: u64,
}

/// Where a part of the disk is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// In the backing device; zeroes without one.
    Unallocated,
    /// Zeroes. The image may keep a place for them at this byte of the data file.
    Zero(Option<u64>),
    /// At this byte of the data file.
    Data(u64),
    /// In compressed data, which stands for a whole cluster.
    Compressed(Compressed),
}

impl Place {
    /// Whether `next` continues this place, `len` bytes behind its first byte, without a gap.
    pub fn continues(self, len: u64, next: Place) -> bool {
        match (self, next) {
            (Place::Data(first), Place::Data(second))
            | (Place::Zero(Some(first)), Place::Zero(Some(second))) => first + len == second,
            (Place::Compressed(_), _) => false,
            _ => self == next,
        }
    }
}

/// An entry that contradicts the format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadEntry;

impl Geometry {
    /// The geometry of an image with this header.
    pub fn of(header: &Header) -> Geometry {
        Geometry {
            cluster_bits: header.cluster_bits,
            has_extended_l2: header.has_extended_l2(),
            has_data_file: header.has_data_file(),
            is_v2: header.version == 2,
        }
    }

    /// Bytes of a cluster.
    pub fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes of an L2 entry.
    pub fn entry_bytes(&self) -> usize {
        if self.has_extended_l2 { 16 } else { 8 }
    }

    /// Words of eight bytes in an L2 entry.
    #[inline]
    pub fn entry_words(&self) -> u64 {
        if self.has_extended_l2 { 2 } else { 1 }
    }

    /// Bytes of the smallest part of a cluster that an entry tells from others: a subcluster, or
    /// the cluster.
    pub fn unit(&self) -> u64 {
        if self.has_extended_l2 { self.cluster_size() / SUBCLUSTERS } else { self.cluster_size() }
    }

    /// The subclusters of the cluster `number` that have a byte in `range`, which counts from the
    /// first byte of cluster 0.
    pub fn subclusters_in(&self, number: u64, range: &Range<u64>) -> u32 {
        let first = number * self.cluster_size();
        let [start, end] = [range.start, range.end].map(|at| at.saturating_sub(first));
        let (start, end) = (start / self.unit(), end.div_ceil(self.unit()));
        let below = |bit: u64| (1u64 << bit) - 1;
        (below(end.min(SUBCLUSTERS)) & !below(start.min(SUBCLUSTERS))) as u32
    }

    /// Whether the cluster has data in a place that no snapshot shares.
    #[inline]
    pub fn is_own(&self, entry: Entry) -> bool {
        let is_alone = entry.word & COPIED != 0 || mutant::is(Mutant::SharedClusterInPlace);
        is_alone && matches!(self.cluster(entry), Cluster::Data(_))
    }

    /// The place of a cluster in the data file, which it may keep for zeroes.
    pub fn data_place(&self, entry: Entry) -> Option<u64> {
        match self.cluster(entry) {
            Cluster::Data(offset) | Cluster::ZeroAllocated(offset) => Some(offset),
            Cluster::Unallocated | Cluster::Zero | Cluster::Compressed(_) => None,
        }
    }

    /// The same entry with zeroes in the subclusters of `mask`; in all of it if it has none.
    #[must_use]
    pub fn zeroed(&self, entry: Entry, mask: u32) -> Entry {
        match self.has_extended_l2 {
            true => entry.with_zeroes(mask),
            false => Entry { word: entry.word | ZERO, ..entry },
        }
    }

    /// The entry of a cluster after its subclusters of `mask` were written at byte `offset` of the
    /// data file, and those that had data were copied there.
    pub fn written(&self, old: Entry, offset: u64, mask: u32) -> Entry {
        let word = offset | COPIED;
        match self.cluster(old) {
            _ if !self.has_extended_l2 => Entry { word, bitmap: 0 },
            Cluster::Compressed(_) => Entry { word, bitmap: u64::from(u32::MAX) },
            _ if mutant::is(Mutant::WholeClusterAllocated) => Entry { word, bitmap: u64::from(u32::MAX) },
            _ => Entry { word, ..old }.with_allocated(mask),
        }
    }

    /// Entries of an L2 table.
    pub fn l2_entries(&self) -> u64 {
        self.cluster_size() / self.entry_bytes() as u64
    }

    /// The first byte of the L2 table that an L1 entry names; `None` if it names none.
    ///
    /// # Errors
    /// When the entry contradicts the format.
    pub fn l2_table(&self, l1_entry: u64) -> Result<Option<u64>, BadEntry> {
        let table = l1_entry & OFFSET;
        match table {
            0 => Ok(None),
            _ if l1_entry & L1_RESERVED != 0 || !table.is_multiple_of(self.cluster_size()) => Err(BadEntry),
            _ => Ok(Some(table)),
        }
    }

    /// The clusters of the file that an entry refers to.
    pub fn host_clusters(&self, entry: Entry) -> Range<u64> {
        let size = self.cluster_size();
        match self.cluster(entry) {
            Cluster::Data(offset) | Cluster::ZeroAllocated(offset) => offset / size..offset / size + 1,
            Cluster::Compressed(data) => data.offset / size..(data.offset + data.len).div_ceil(size),
            Cluster::Unallocated | Cluster::Zero => 0..0,
        }
    }

    /// The entry that starts at byte `at` of a table.
    pub fn entry(&self, table: &[u8], at: usize) -> Entry {
        let word = crate::header::be64(table, at);
        let bitmap = if self.has_extended_l2 { crate::header::be64(table, at + 8) } else { 0 };
        Entry { word, bitmap }
    }

    /// The type of the cluster of an entry.
    pub fn cluster(&self, entry: Entry) -> Cluster {
        let offset = entry.word & OFFSET;
        if entry.word & COMPRESSED != 0 {
            return Cluster::Compressed(self.compressed(entry.word));
        }
        if entry.word & ZERO != 0 && !self.has_extended_l2 {
            return if offset == 0 { Cluster::Zero } else { Cluster::ZeroAllocated(offset) };
        }
        // With a data file, byte 0 is a place like any other, which COPIED tells from no place.
        let has_place = offset != 0 || self.has_data_file && entry.word & COPIED != 0;
        if has_place { Cluster::Data(offset) } else { Cluster::Unallocated }
    }

    fn compressed(&self, word: u64) -> Compressed {
        let offset_bits = 62 - (self.cluster_bits - 8);
        let offset = word & ((1 << offset_bits) - 1);
        let sectors = (word & (COMPRESSED - 1)) >> offset_bits;
        Compressed { offset, len: (sectors + 1) * 512 - (offset & 511) }
    }

    /// The place of the byte `within` of the cluster at byte `guest` of the disk. Also returns how
    /// many bytes from there on have the same kind of place, without a gap.
    ///
    /// # Errors
    /// When the entry contradicts the format.
    pub fn place(&self, entry: Entry, guest: u64, within: u64) -> Result<(Place, u64), BadEntry> {
        let rest = self.cluster_size() - within;
        match self.cluster(entry) {
            // Its subclusters have no meaning, and a check reports them.
            Cluster::Compressed(_) if self.has_data_file => Err(BadEntry),
            Cluster::Compressed(data) => Ok((Place::Compressed(data), rest)),
            Cluster::Zero | Cluster::ZeroAllocated(_) if self.is_v2 => Err(BadEntry),
            Cluster::Zero => Ok((Place::Zero(None), rest)),
            Cluster::ZeroAllocated(offset) => {
                self.check_data(offset, guest)?;
                Ok((Place::Zero(Some(offset + within)), rest))
            }
            Cluster::Data(offset) => {
                self.check_data(offset, guest)?;
                if self.has_extended_l2 {
                    return self.subclusters(entry.bitmap, Some(offset), within);
                }
                Ok((Place::Data(offset + within), rest))
            }
            Cluster::Unallocated if self.has_extended_l2 => self.subclusters(entry.bitmap, None, within),
            Cluster::Unallocated => Ok((Place::Unallocated, rest)),
        }
    }

    /// Checks the place of a cluster of data.
    fn check_data(&self, offset: u64, guest: u64) -> Result<(), BadEntry> {
        let is_aligned = offset.is_multiple_of(self.cluster_size());
        // A place in another file is the same as on the disk.
        if !is_aligned || self.has_data_file && offset != guest { Err(BadEntry) } else { Ok(()) }
    }

    fn subclusters(&self, bitmap: u64, offset: Option<u64>, within: u64) -> Result<(Place, u64), BadEntry> {
        let (allocated, zero) = (bitmap as u32, (bitmap >> 32) as u32);
        if allocated & zero != 0 || offset.is_none() && allocated != 0 {
            return Err(BadEntry);
        }
        let bits = self.cluster_bits - SUBCLUSTERS.trailing_zeros();
        let first = (within >> bits) as u32;
        let (map, place) = match (allocated >> first & 1, zero >> first & 1) {
            (1, _) => (allocated, Place::Data(offset.ok_or(BadEntry)? + within)),
            (_, 1) => (zero, Place::Zero(offset.map(|offset| offset + within))),
            _ => (!(allocated | zero), Place::Unallocated),
        };
        let count = (map >> first).trailing_ones().min(SUBCLUSTERS as u32 - first);
        let end = u64::from(first + count) << bits;
        Ok((place, end - within))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry(cluster_bits: u32) -> Geometry {
        Geometry { cluster_bits, has_extended_l2: false, has_data_file: false, is_v2: false }
    }

    fn standard(word: u64) -> Entry {
        Entry { word, bitmap: 0 }
    }

    #[test]
    fn the_fields_of_compressed_entries_depend_on_the_cluster_size() {
        // With clusters of 64 KiB, 54 bits of offset and 8 of sectors.
        let entry = standard(COMPRESSED | 5 << 54 | 0x1_2345);
        let data = Compressed { offset: 0x1_2345, len: 6 * 512 - 0x145 };
        assert_eq!(geometry(16).cluster(entry), Cluster::Compressed(data));
        // With 512 bytes, 61 bits of offset and one of sectors; with 2 MiB, 49 and 13.
        let entry = standard(COMPRESSED | 1 << 61 | 0x600);
        assert_eq!(geometry(9).cluster(entry), Cluster::Compressed(Compressed { offset: 0x600, len: 1024 }));
        let entry = standard(COMPRESSED | 0x1fff << 49 | 512);
        let data = Compressed { offset: 512, len: 0x2000 * 512 };
        assert_eq!(geometry(21).cluster(entry), Cluster::Compressed(data));
    }

    #[test]
    fn standard_entries_are_data_zeroes_or_unallocated() {
        let place = |geometry: Geometry, word| geometry.place(standard(word), 0x2_0000, 0x200);
        let (plain, rest) = (geometry(16), 0xfe00);
        assert_eq!(place(plain, COPIED | 0x5_0000), Ok((Place::Data(0x5_0200), rest)));
        assert_eq!(place(plain, 0), Ok((Place::Unallocated, rest)));
        assert_eq!(place(plain, ZERO), Ok((Place::Zero(None), rest)));
        assert_eq!(place(plain, 0x5_0000 | ZERO), Ok((Place::Zero(Some(0x5_0200)), rest)));
        assert_eq!(place(plain, 0x5_0200), Err(BadEntry), "not aligned");
        let v2 = Geometry { is_v2: true, ..plain };
        assert_eq!(place(v2, ZERO), Err(BadEntry), "version 2 has no zero clusters");
        // Offset 0 is a place of a data file only, and there the place is that of the disk.
        let external = Geometry { has_data_file: true, ..plain };
        assert_eq!(place(external, COPIED | 0x2_0000), Ok((Place::Data(0x2_0200), rest)));
        assert_eq!(place(external, COPIED | 0x3_0000), Err(BadEntry));
        assert_eq!(external.place(standard(COPIED), 0, 0), Ok((Place::Data(0), 0x1_0000)));
        assert_eq!(place(plain, COPIED), Ok((Place::Unallocated, rest)));
        assert_eq!(place(external, COMPRESSED), Err(BadEntry));
    }

    #[test]
    fn a_write_allocates_subclusters_and_keeps_the_others() {
        let extended = Geometry { has_extended_l2: true, ..geometry(16) };
        assert_eq!(extended.subclusters_in(0, &(2048..2049)), 0b10);
        assert_eq!(extended.subclusters_in(0, &(2047..4097)), 0b111);
        assert_eq!(extended.subclusters_in(1, &(0xffff..0x3_0000)), u32::MAX);
        let old = Entry { word: 0, bitmap: 0b110 << 32 };
        let new = Entry { word: 0x5_0000 | COPIED, bitmap: 0b10 | 0b100 << 32 };
        assert_eq!(extended.written(old, 0x5_0000, 0b10), new);
        assert_eq!(extended.zeroed(new, 0b11), Entry { bitmap: 0b111 << 32, ..new });
        assert_eq!(geometry(16).zeroed(Entry::NONE, u32::MAX), standard(ZERO));
        let all = Entry { bitmap: u64::from(u32::MAX), ..new };
        assert_eq!(extended.written(standard(COMPRESSED | 0x600), 0x5_0000, 1), all);
        assert_eq!(geometry(16).written(Entry::NONE, 0x5_0000, 1), standard(0x5_0000 | COPIED));
        assert!(extended.is_own(new) && !extended.is_own(standard(COPIED)));
        let external = Geometry { has_data_file: true, ..geometry(16) };
        assert!(external.is_own(standard(COPIED)) && !external.is_own(Entry::NONE));
    }

    #[test]
    fn subclusters_are_data_zeroes_or_unallocated() {
        let extended = Geometry { has_extended_l2: true, ..geometry(16) };
        let place = |word, bitmap, within| extended.place(Entry { word, bitmap }, 0, within);
        // Subclusters of 2 KiB: 0 and 1 are data, 2 is zero, the others are unallocated.
        let bitmap = 0b011 | 0b100 << 32;
        assert_eq!(place(0x5_0000, bitmap, 512), Ok((Place::Data(0x5_0200), 4096 - 512)));
        assert_eq!(place(0x5_0000, bitmap, 4096), Ok((Place::Zero(Some(0x5_1000)), 2048)));
        assert_eq!(place(0x5_0000, bitmap, 6144), Ok((Place::Unallocated, 29 * 2048)));
        assert_eq!(place(0, 1 << 63, 31 * 2048), Ok((Place::Zero(None), 2048)));
        assert_eq!(place(0x5_0000, u64::from(u32::MAX), 0), Ok((Place::Data(0x5_0000), 0x1_0000)));
        let compressed = Compressed { offset: 0x600, len: 512 };
        assert_eq!(place(COMPRESSED | 0x600, 1, 0), Ok((Place::Compressed(compressed), 0x1_0000)));
        for (word, bitmap) in [(0x5_0000, 1 | 1 << 32), (0, 1)] {
            assert_eq!(place(word, bitmap, 0), Err(BadEntry), "{word:#x} {bitmap:#x}");
        }
    }
}
