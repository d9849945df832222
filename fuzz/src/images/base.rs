//! Small valid images: clusters of data, zeroes and compressed data, and an internal snapshot.

use crate::input::Input;
use std::collections::BTreeMap;

/// Bytes of each disk in clusters.
const CLUSTERS: u64 = 24;
/// Clusters of metadata: header, refcount table and block, two L1 tables, L2 table, snapshots.
const METADATA: u64 = 7;
/// First cluster of data in the file.
const DATA: u64 = METADATA;
const COPIED: u64 = 1 << 63;

/// An image, and what its disk has.
#[derive(Clone)]
pub struct Base {
    /// The file.
    pub bytes: Vec<u8>,
    pub cluster_bits: u32,
    has_snapshot: bool,
    /// First bytes of the parts that are edited.
    pub parts: Vec<usize>,
}

/// The content of a cluster of the disk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Data,
    Compressed,
    Zero,
    Unallocated,
}

fn kind(cluster: u64) -> Kind {
    match cluster % 6 {
        0 | 1 => Kind::Data,
        2 => Kind::Compressed,
        3 => Kind::Zero,
        _ => Kind::Unallocated,
    }
}

impl Base {
    /// An image with the options that two bytes choose.
    pub fn chosen(input: &mut Input<'_>) -> Base {
        let (cluster_bits, flags) = (input.one_of(&[9, 12, 14, 16]), input.u8());
        let is_extended = flags & 1 != 0 && cluster_bits >= 14;
        let order = if flags & 2 != 0 { 6 } else { 4 };
        build(cluster_bits, is_extended, order, flags & 4 != 0)
    }

    /// The byte at `offset` of the disk.
    pub fn byte(&self, offset: u64) -> u8 {
        let cluster = offset >> self.cluster_bits;
        match kind(cluster) {
            Kind::Data | Kind::Compressed => cluster as u8 + 1,
            Kind::Zero | Kind::Unallocated => 0,
        }
    }

    /// Every byte of the disk.
    pub fn disk(&self) -> Vec<u8> {
        (0..CLUSTERS << self.cluster_bits).map(|at| self.byte(at)).collect()
    }

    /// The disks of the internal snapshots, by their identifiers.
    pub fn snapshots(&self) -> BTreeMap<String, Vec<u8>> {
        self.has_snapshot.then(|| ("1".into(), self.disk())).into_iter().collect()
    }
}

fn build(cluster_bits: u32, is_extended: bool, order: u32, has_snapshot: bool) -> Base {
    let size = 1_u64 << cluster_bits;
    let at = |cluster: u64| (cluster << cluster_bits) as usize;
    let mut bytes = vec![0; at(DATA)];
    let mut counts = vec![1_u64; METADATA as usize];
    let mut l2 = Vec::new();
    let uses = 1 + u64::from(has_snapshot);
    let copied = if has_snapshot { 0 } else { COPIED };
    for cluster in 0..CLUSTERS {
        let place = bytes.len() as u64;
        let (word, bitmap) = match kind(cluster) {
            Kind::Data => {
                bytes.extend(std::iter::repeat_n(cluster as u8 + 1, size as usize));
                (place | copied, 0xffff_ffff)
            }
            Kind::Compressed => {
                let len = compress(&mut bytes, cluster as u8 + 1, size);
                let sectors = (len - 1) / 512;
                (1 << 62 | sectors << (62 - (cluster_bits - 8)) | place, 0)
            }
            Kind::Zero if is_extended => (0, 0xffff_ffff << 32),
            Kind::Zero => (1, 0),
            Kind::Unallocated => (0, 0),
        };
        bytes.resize(bytes.len().next_multiple_of(size as usize), 0);
        counts.resize(bytes.len() >> cluster_bits, uses);
        l2.push(word);
        l2.extend(is_extended.then_some(bitmap));
    }
    // The order of METADATA. Both L1 tables have the one L2 table.
    counts[4] = u64::from(has_snapshot);
    counts[5] = uses;
    counts[6] = u64::from(has_snapshot);
    let mut put = |at: usize, number: u64, width: usize| {
        bytes[at..at + width].copy_from_slice(&number.to_be_bytes()[8 - width..]);
    };
    l2.iter().enumerate().for_each(|(i, word)| put(at(5) + 8 * i, *word, 8));
    put(at(3), at(5) as u64 | copied, 8);
    put(at(1), at(2) as u64, 8);
    let width = 1 << (order - 3);
    counts.iter().enumerate().for_each(|(i, count)| put(at(2) + width * i, *count, width));
    let incompatible = if is_extended { 1 << 4 } else { 0 };
    let (snapshots, table) = if has_snapshot { (1, at(6) as u64) } else { (0, 0) };
    for (offset, number, width) in [
        (0, 0x5146_49fb, 4),
        (4, 3, 4),
        (20, u64::from(cluster_bits), 4),
        (24, CLUSTERS << cluster_bits, 8),
        (36, 1, 4),
        (40, at(3) as u64, 8),
        (48, at(1) as u64, 8),
        (56, 1, 4),
        (60, snapshots, 4),
        (64, table, 8),
        (72, incompatible, 8),
        (96, u64::from(order), 4),
        (100, 104, 4),
    ] {
        put(offset, number, width);
    }
    if has_snapshot {
        put(at(4), at(5) as u64, 8);
        put(at(6), at(4) as u64, 8);
        put(at(6) + 8, 1, 4);
        put(at(6) + 12, 1, 2); // length of the identifier
        put(at(6) + 14, 1, 2); // length of the name
        put(at(6) + 36, 16, 4); // extra data
        put(at(6) + 48, CLUSTERS << cluster_bits, 8);
        put(at(6) + 56, u64::from(b'1'), 1);
        put(at(6) + 57, u64::from(b's'), 1);
    }
    let parts = [0, 64, 104, at(1), at(2), at(3), at(4), at(5), at(6), at(DATA + 2)].to_vec();
    Base { bytes, cluster_bits, has_snapshot, parts }
}

/// Appends a cluster of `byte` as a stream of deflate; returns its length. A run of one byte fits
/// into a block with fixed codes: the byte, and copies of the one before.
fn compress(bytes: &mut Vec<u8>, byte: u8, size: u64) -> u64 {
    let mut bits = Bits { bytes, word: 0, count: 0 };
    bits.put(1, 1); // the last block
    bits.put(1, 2); // fixed codes
    bits.put_code(0x30 + u32::from(byte), 8); // a literal below 144
    let mut left = size - 1;
    while left >= 258 {
        bits.put_code(0xc5, 8); // length 258: symbol 285
        bits.put_code(0, 5); // distance 1
        left -= 258;
    }
    for _ in 0..left {
        bits.put_code(0x30 + u32::from(byte), 8);
    }
    bits.put_code(0, 7); // the end
    let Bits { bytes, word, count } = bits;
    if count > 0 {
        bytes.push(word as u8);
    }
    let start = bytes.len() as u64 / size * size;
    bytes.len() as u64 - start
}

/// Bits of a stream of deflate (RFC 1951, 3.1.1).
struct Bits<'a> {
    bytes: &'a mut Vec<u8>,
    word: u32,
    count: u32,
}

impl Bits<'_> {
    /// Appends a number, its least significant bit first.
    fn put(&mut self, value: u32, width: u32) {
        self.word |= value << self.count;
        self.count += width;
        while self.count >= 8 {
            self.bytes.push(self.word as u8);
            self.word >>= 8;
            self.count -= 8;
        }
    }

    /// Appends a code, its most significant bit first.
    fn put_code(&mut self, code: u32, width: u32) {
        self.put(code.reverse_bits() >> (32 - width), width);
    }
}
