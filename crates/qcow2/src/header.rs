//! The header and its extensions: bytes and rules, without I/O.
//!
//! Source: QEMU `docs/interop/qcow2.rst`, sections *Header*, *Header extensions* and *Feature name
//! table*. The limits of sizes are QEMU's (`block/qcow2.h`).

use crate::error::{Problem, invalid, unsupported};

/// The first four bytes of every version.
pub const MAGIC: [u8; 4] = *b"QFI\xfb";
/// Length of a header of version 2, and the least that can be parsed.
pub const V2_LENGTH: usize = 72;
/// Least length of a header of version 3.
const V3_LENGTH: u32 = 104;
/// Supported cluster sizes, as powers of two.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;
/// Least cluster size with extended L2 entries, as a power of two.
const EXTENDED_L2_CLUSTER_BITS: u32 = 14;
/// Largest L1 table in bytes.
pub const MAX_L1_BYTES: u64 = 32 << 20;
/// Largest refcount table in bytes.
pub(crate) const MAX_REFCOUNT_TABLE_BYTES: u64 = 8 << 20;
/// Longest name of a backing file or data file in bytes.
pub(crate) const MAX_NAME: usize = 1023;
/// Longest name of a format in bytes.
pub(crate) const MAX_FORMAT_NAME: usize = 15;
/// Most internal snapshots.
pub const MAX_SNAPSHOTS: u32 = 65536;
/// Least length of an entry of the snapshot table.
const SNAPSHOT_ENTRY: u64 = 40;
/// Most bitmaps.
pub(crate) const MAX_BITMAPS: u32 = 65535;
/// Largest directory of bitmaps in bytes.
pub(crate) const MAX_BITMAP_DIRECTORY: u64 = MAX_BITMAPS as u64 * 1024;
/// The refcount order of version 2: 16 bits.
const V2_REFCOUNT_ORDER: u32 = 4;
/// Largest refcount order: 64 bits.
const MAX_REFCOUNT_ORDER: u32 = 6;
/// Type of the header extension with the format of the backing file.
pub(crate) const BACKING_FORMAT: u32 = 0xe279_2aca;
/// Type of the header extension with names of features.
pub(crate) const FEATURE_NAMES: u32 = 0x6803_f857;
/// Type of the header extension with the place of the bitmap directory.
pub(crate) const BITMAPS: u32 = 0x2385_2875;
/// Length of an entry of the feature name table.
const FEATURE_ENTRY: usize = 48;

/// Places of fields that commands and writers replace.
pub(crate) mod at {
    /// The backing file name's offset, and its length.
    pub const BACKING: usize = 8;
    pub const SIZE: usize = 24;
    /// The refcount table's offset, and its length in clusters.
    pub const REFCOUNT_TABLE: usize = 48;
    /// The number of snapshots, and the offset of their table.
    pub const SNAPSHOTS: usize = 60;
    pub const INCOMPATIBLE: usize = 72;
    pub const AUTOCLEAR: usize = 88;
}

/// Incompatible feature bits: a reader that does not know one of them cannot read the image.
pub mod incompatible {
    /// Refcounts may be too low or too high.
    pub const DIRTY: u64 = 1;
    /// A structure is damaged: the image must not be written.
    pub const CORRUPT: u64 = 1 << 1;
    /// Guest data is in another file.
    pub const DATA_FILE: u64 = 1 << 2;
    /// The header has a compression type other than deflate.
    pub const COMPRESSION: u64 = 1 << 3;
    /// L2 entries have 16 bytes and a bitmap of subclusters.
    pub const EXTENDED_L2: u64 = 1 << 4;
    /// All bits that this crate reads.
    pub const KNOWN: u64 = DIRTY | CORRUPT | DATA_FILE | COMPRESSION | EXTENDED_L2;
}

/// Compatible feature bit: refcounts are written lazily.
pub const LAZY_REFCOUNTS: u64 = 1;
/// Number of the first of the reserved feature bits, compatible or autoclear, that have the session
/// of a restart log.
const SESSION: u32 = 32;

/// Autoclear feature bits: a writer that does not know one of them clears it.
pub mod autoclear {
    /// The bitmaps extension is consistent with the image.
    pub const BITMAPS: u64 = 1;
    /// The external data file is also a complete raw image.
    pub const RAW_DATA: u64 = 1 << 1;
}

/// How compressed clusters are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Deflate without the header of zlib.
    Zlib,
    /// Zstandard.
    Zstd,
}

impl Compression {
    /// The name as `qemu-img info` prints it.
    pub fn name(self) -> &'static str {
        match self {
            Compression::Zlib => "zlib",
            Compression::Zstd => "zstd",
        }
    }
}

/// The bitmaps extension.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bitmaps {
    /// Number of bitmaps.
    pub count: u32,
    /// Length of the directory in bytes.
    pub directory_bytes: u64,
    /// First byte of the directory.
    pub directory_offset: u64,
}

impl Bitmaps {
    /// The extension without type and length.
    pub(crate) fn bytes(self) -> Vec<u8> {
        let mut bytes = self.count.to_be_bytes().to_vec();
        bytes.extend([0; 4]); // reserved
        bytes.extend(self.directory_bytes.to_be_bytes());
        bytes.extend(self.directory_offset.to_be_bytes());
        bytes
    }
}

/// A header extension that this crate does not interpret, as it stands in the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RawExtension {
    /// The type of the extension.
    pub kind: u32,
    /// Its bytes without padding.
    pub bytes: Vec<u8>,
}

impl RawExtension {
    /// Appends the extension as it stands in a file.
    pub(crate) fn append_to(&self, area: &mut Vec<u8>) {
        area.extend(self.kind.to_be_bytes());
        area.extend((self.bytes.len() as u32).to_be_bytes());
        area.extend(&self.bytes);
        area.resize(area.len() + self.bytes.len().next_multiple_of(8) - self.bytes.len(), 0);
    }
}

/// A checked header with its extensions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// The cluster size as a power of two.
    pub cluster_bits: u32,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Entries of the active L1 table.
    pub l1_entries: u32,
    /// First byte of the active L1 table.
    pub l1_offset: u64,
    /// First byte of the refcount table.
    pub refcount_table_offset: u64,
    /// Length of the refcount table in clusters.
    pub refcount_table_clusters: u32,
    /// A refcount has `1 << refcount_order` bits.
    pub refcount_order: u32,
    /// Number of internal snapshots.
    pub snapshot_count: u32,
    /// First byte of the snapshot table.
    pub snapshots_offset: u64,
    /// Incompatible features, see [`incompatible`].
    pub incompatible: u64,
    /// Compatible features.
    pub compatible: u64,
    /// Autoclear features, see [`autoclear`].
    pub autoclear: u64,
    /// How clusters are compressed.
    pub compression: Compression,
    /// Length of the header in bytes.
    pub header_length: u32,
    /// Name of the backing file as the image has it.
    pub backing_file: Option<String>,
    /// Format of the backing file.
    pub backing_format: Option<String>,
    /// Name of the external data file as the image has it.
    pub data_file: Option<String>,
    /// The bitmaps, if they are consistent with the image.
    pub bitmaps: Option<Bitmaps>,
    /// Extensions that are kept without interpretation.
    pub unknown: Vec<RawExtension>,
}

impl Header {
    /// Bytes of a cluster.
    pub fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes of the first cluster that hold the header: parse needs that many, or the whole file.
    ///
    /// # Errors
    /// When the bytes are no header of a supported version, or the cluster size is invalid.
    pub fn first_cluster_len(start: &[u8]) -> Result<usize, Problem> {
        if start.len() < V2_LENGTH {
            return Err(Problem::NotQcow2(format!("{} bytes: want at least {V2_LENGTH}", start.len())));
        }
        if start[..4] != MAGIC {
            return Err(Problem::NotQcow2(format!("the first bytes are {:02x?}", &start[..4])));
        }
        match be32(start, 4) {
            2 | 3 => {}
            1 => return Err(unsupported("version 1 (the format qcow)")),
            other => return Err(unsupported(format!("version {other}: 2 and 3 are supported"))),
        }
        let bits = be32(start, 20);
        if !CLUSTER_BITS.contains(&bits) {
            let (least, most) = CLUSTER_BITS.into_inner();
            return Err(invalid(format!("cluster size 2^{bits}: want 2^{least} to 2^{most} bytes")));
        }
        Ok(1 << bits)
    }

    /// Parses the first cluster of an image, which may be shorter if the file is.
    ///
    /// # Errors
    /// When a field is invalid, exceeds its limit, or stands for an unsupported feature.
    pub fn parse(cluster: &[u8]) -> Result<Header, Problem> {
        let cluster_size = Header::first_cluster_len(cluster)? as u64;
        let is_v3 = be32(cluster, 4) == 3;
        let header_length = if is_v3 { be32_or_0(cluster, 100) } else { V2_LENGTH as u32 };
        check_header_length(is_v3, header_length, cluster_size, cluster.len())?;
        let field = |at| if is_v3 { be64(cluster, at) } else { 0 };
        let name_at = be64(cluster, 8);
        if name_at > cluster_size {
            return Err(invalid(format!("backing file name at byte {name_at}: behind the first cluster")));
        }
        let end = if name_at == 0 { cluster_size } else { name_at };
        let area = cluster.get(header_length as usize..(end as usize).min(cluster.len())).unwrap_or(&[]);
        let incompatible = field(72);
        check_incompatible(incompatible, area)?;
        let mut header = Header {
            version: be32(cluster, 4),
            cluster_bits: be32(cluster, 20),
            size: be64(cluster, 24),
            l1_entries: be32(cluster, 36),
            l1_offset: be64(cluster, 40),
            refcount_table_offset: be64(cluster, 48),
            refcount_table_clusters: be32(cluster, 56),
            refcount_order: if is_v3 { be32(cluster, 96) } else { V2_REFCOUNT_ORDER },
            snapshot_count: be32(cluster, 60),
            snapshots_offset: be64(cluster, 64),
            incompatible,
            compatible: field(80),
            autoclear: field(88),
            compression: compression(header_length, incompatible, cluster)?,
            header_length,
            backing_file: None,
            backing_format: None,
            data_file: None,
            bitmaps: None,
            unknown: Vec::new(),
        };
        header.check_numbers()?;
        check_encryption(be32(cluster, 32))?;
        if header.autoclear & autoclear::RAW_DATA != 0 && !header.has_data_file() {
            return Err(invalid("raw external data without an external data file"));
        }
        for RawExtension { kind, bytes } in extensions(area, end - u64::from(header_length).min(end))?.0 {
            header.read_extension(kind, bytes)?;
        }
        if header.data_file.is_some() && !header.has_data_file() {
            header.data_file = None;
        }
        header.backing_file = backing_name(cluster, name_at, be32(cluster, 16), cluster_size)?;
        Ok(header)
    }

    /// Whether guest data is in another file.
    pub fn has_data_file(&self) -> bool {
        self.incompatible & incompatible::DATA_FILE != 0
    }

    /// Whether L2 entries have a bitmap of subclusters.
    pub fn has_extended_l2(&self) -> bool {
        self.incompatible & incompatible::EXTENDED_L2 != 0
    }

    /// Whether the image says that it is damaged.
    pub fn is_corrupt(&self) -> bool {
        self.incompatible & incompatible::CORRUPT != 0
    }

    /// Whether the image was not closed, and its refcounts and COPIED bits may be wrong.
    pub fn is_dirty(&self) -> bool {
        self.incompatible & incompatible::DIRTY != 0
    }

    /// The autoclear features without those that a writer must clear, because it does not know
    /// them.
    pub(crate) fn known_autoclear(&self) -> u64 {
        self.autoclear & (autoclear::BITMAPS | autoclear::RAW_DATA)
    }

    /// The session of a restart log that may belong to the image; 0 for none. Every other writer
    /// has ended it: it clears the autoclear bits that have it, or the bit for a dirty image.
    pub fn session(&self) -> u32 {
        match self.is_dirty() {
            true if self.may_be_marked_dirty() => (self.compatible >> SESSION) as u32,
            true => 0,
            false => (self.autoclear >> SESSION) as u32,
        }
    }

    /// Whether a dirty image with a session can only be one that this crate has left. Programs that
    /// write refcounts lazily set the bit, too.
    pub(crate) fn may_be_marked_dirty(&self) -> bool {
        self.version >= 3 && self.compatible & LAZY_REFCOUNTS == 0
    }

    /// The feature bits of an image that is written with the restart log of `session`, or without
    /// one if that is 0: incompatible, compatible and autoclear. With `is_dirty` other programs
    /// repair the image before they write to it.
    pub(crate) fn features_with(&self, session: u32, is_dirty: bool) -> [u64; 3] {
        let (session, low) = (u64::from(session) << SESSION, (1 << SESSION) - 1);
        let (incompatible, compatible) = (self.incompatible & !incompatible::DIRTY, self.compatible & low);
        match is_dirty {
            true => [incompatible | incompatible::DIRTY, compatible | session, self.known_autoclear()],
            false => [incompatible, compatible, self.known_autoclear() | session],
        }
    }

    /// Bytes of an L2 entry.
    pub fn l2_entry_bytes(&self) -> u64 {
        if self.has_extended_l2() { 16 } else { 8 }
    }

    /// Bytes of the disk that one L2 table maps.
    pub fn l2_table_span(&self) -> u64 {
        self.cluster_size() / self.l2_entry_bytes() * self.cluster_size()
    }

    /// Checks all numbers that need no other structure.
    fn check_numbers(&self) -> Result<(), Problem> {
        if self.has_extended_l2() && self.cluster_bits < EXTENDED_L2_CLUSTER_BITS {
            let size = self.cluster_size();
            let least = 1 << EXTENDED_L2_CLUSTER_BITS;
            return Err(invalid(format!(
                "cluster size {size} with extended L2 entries: want at least {least} bytes"
            )));
        }
        if self.refcount_order > MAX_REFCOUNT_ORDER {
            let order = self.refcount_order;
            return Err(invalid(format!("refcount order {order}: at most {MAX_REFCOUNT_ORDER}")));
        }
        let table = u64::from(self.refcount_table_clusters) << self.cluster_bits;
        self.check_table("refcount table", self.refcount_table_offset, table, MAX_REFCOUNT_TABLE_BYTES)?;
        let l1_bytes = u64::from(self.l1_entries) * 8;
        self.check_table("L1 table", self.l1_offset, l1_bytes, MAX_L1_BYTES)?;
        let needed = self.size.div_ceil(self.l2_table_span());
        if needed > u64::from(self.l1_entries) {
            let (size, has) = (self.size, self.l1_entries);
            return Err(invalid(format!("L1 table of {has} entries: a disk of {size} bytes needs {needed}")));
        }
        Ok(())
    }

    /// Checks place and length of a table; every table starts on a cluster.
    pub(crate) fn check_table(&self, what: &str, offset: u64, bytes: u64, most: u64) -> Result<(), Problem> {
        if bytes > most {
            return Err(invalid(format!("{what} at byte {offset} has {bytes} bytes: at most {most}")));
        }
        if offset.checked_add(bytes).is_none_or(|end| end > i64::MAX as u64) {
            return Err(invalid(format!("{what} at byte {offset}: beyond the largest file")));
        }
        if !offset.is_multiple_of(self.cluster_size()) {
            return Err(invalid(format!("{what} at byte {offset}: not at the start of a cluster")));
        }
        Ok(())
    }

    /// Checks place and length of the snapshot table.
    pub(crate) fn check_snapshot_table(&self) -> Result<(), Problem> {
        let most = u64::from(MAX_SNAPSHOTS) * SNAPSHOT_ENTRY;
        let bytes = u64::from(self.snapshot_count) * SNAPSHOT_ENTRY;
        self.check_table("snapshot table", self.snapshots_offset, bytes, most)
    }

    fn read_extension(&mut self, kind: u32, bytes: Vec<u8>) -> Result<(), Problem> {
        match kind {
            BACKING_FORMAT => {
                if bytes.len() > MAX_FORMAT_NAME {
                    let len = bytes.len();
                    return Err(invalid(format!("backing format of {len} bytes: at most {MAX_FORMAT_NAME}")));
                }
                self.backing_format = Some(text(&bytes));
            }
            0x4441_5441 => {
                if bytes.len() > MAX_NAME {
                    let len = bytes.len();
                    return Err(invalid(format!("data file name of {len} bytes: at most {MAX_NAME}")));
                }
                self.data_file = Some(text(&bytes));
            }
            0x0537_be77 => return Err(invalid("full disk encryption header of an image without encryption")),
            BITMAPS => self.bitmaps = self.read_bitmaps(&bytes)?,
            _ => self.unknown.push(RawExtension { kind, bytes }),
        }
        Ok(())
    }

    fn read_bitmaps(&self, bytes: &[u8]) -> Result<Option<Bitmaps>, Problem> {
        if bytes.len() != 24 {
            return Err(invalid(format!("bitmaps extension of {} bytes: want 24", bytes.len())));
        }
        if self.autoclear & autoclear::BITMAPS == 0 {
            return Ok(None);
        }
        let bitmaps = Bitmaps {
            count: be32(bytes, 0),
            directory_bytes: be64(bytes, 8),
            directory_offset: be64(bytes, 16),
        };
        if be32(bytes, 4) != 0 {
            return Err(invalid("bitmaps extension: reserved bytes are not zero"));
        }
        if !(1..=MAX_BITMAPS).contains(&bitmaps.count) {
            return Err(invalid(format!("{} bitmaps: want 1 to {MAX_BITMAPS}", bitmaps.count)));
        }
        let (offset, len) = (bitmaps.directory_offset, bitmaps.directory_bytes);
        self.check_table("bitmap directory", offset, len, MAX_BITMAP_DIRECTORY)?;
        Ok(Some(bitmaps))
    }
}

/// The extensions in an area of `room` bytes, of which a short file may have less. Also returns how
/// many bytes they take, the end mark included.
pub(crate) fn extensions(area: &[u8], mut room: u64) -> Result<(Vec<RawExtension>, usize), Problem> {
    let (mut list, mut at) = (Vec::new(), 0);
    while room > 0 && area.len() - at >= 8 {
        let (kind, len) = (be32(area, at), be32(area, at + 4) as usize);
        room = room.saturating_sub(8);
        at += 8;
        if len as u64 > room || len > area.len() - at {
            return Err(invalid(format!("header extension {kind:#010x}: {len} bytes of {room}")));
        }
        if kind == 0 {
            return Ok((list, at));
        }
        list.push(RawExtension { kind, bytes: area[at..at + len].to_vec() });
        let padded = len.next_multiple_of(8);
        room = room.saturating_sub(padded as u64);
        at = (at + padded).min(area.len());
    }
    match area[at..].iter().any(|byte| *byte != 0) && room < 8 {
        true => Err(invalid(format!("header extension of {room} bytes: want at least 8"))),
        false => Ok((list, at)),
    }
}

fn check_header_length(is_v3: bool, length: u32, cluster_size: u64, len: usize) -> Result<(), Problem> {
    if is_v3 && length < V3_LENGTH {
        return Err(invalid(format!("header of {length} bytes: version 3 has at least {V3_LENGTH}")));
    }
    if u64::from(length) > cluster_size {
        return Err(invalid(format!("header of {length} bytes: longer than a cluster of {cluster_size}")));
    }
    if length as usize > len {
        return Err(invalid(format!("header of {length} bytes: the file ends at byte {len}")));
    }
    Ok(())
}

/// Refuses unknown features by the names that the image has for them.
fn check_incompatible(bits: u64, area: &[u8]) -> Result<(), Problem> {
    let unknown = bits & !incompatible::KNOWN;
    if unknown == 0 {
        return Ok(());
    }
    let name = |bit: u32| feature_name(area, bit as u8).unwrap_or_else(|| format!("bit {bit}"));
    let names: Vec<String> = (0..64).filter(|bit| unknown >> bit & 1 == 1).map(name).collect();
    Err(unsupported(format!("incompatible features: {}", names.join(", "))))
}

/// The name of an incompatible feature in the feature name table.
fn feature_name(mut area: &[u8], bit: u8) -> Option<String> {
    while area.len() >= 8 {
        let (kind, len) = (be32(area, 0), be32(area, 4) as usize);
        let bytes = area.get(8..)?.get(..len)?;
        if kind == 0 {
            return None;
        }
        if kind == FEATURE_NAMES {
            let entry = bytes.chunks_exact(FEATURE_ENTRY).find(|entry| entry[0] == 0 && entry[1] == bit)?;
            let end = entry[2..].iter().position(|byte| *byte == 0).unwrap_or(FEATURE_ENTRY - 2);
            return Some(text(&entry[2..2 + end])).filter(|name| !name.is_empty());
        }
        area = area.get(8 + len.next_multiple_of(8)..)?;
    }
    None
}

fn compression(header_length: u32, incompatible: u64, cluster: &[u8]) -> Result<Compression, Problem> {
    let kind = if header_length > V3_LENGTH { cluster[V3_LENGTH as usize] } else { 0 };
    match (kind, incompatible & incompatible::COMPRESSION != 0) {
        (0, false) => Ok(Compression::Zlib),
        (1, true) => Ok(Compression::Zstd),
        (0 | 1, _) => Err(invalid(format!("compression type {kind} contradicts its feature bit"))),
        _ => Err(unsupported(format!("compression type {kind}"))),
    }
}

fn check_encryption(method: u32) -> Result<(), Problem> {
    match method {
        0 => Ok(()),
        1 => Err(unsupported("encryption with AES-CBC")),
        2 => Err(unsupported("encryption with LUKS")),
        other => Err(invalid(format!("encryption method {other}: unknown"))),
    }
}

fn backing_name(cluster: &[u8], at: u64, len: u32, cluster_size: u64) -> Result<Option<String>, Problem> {
    if at == 0 {
        return Ok(None);
    }
    let most = (MAX_NAME as u64).min(cluster_size - at);
    if u64::from(len) > most {
        return Err(invalid(format!("backing file name of {len} bytes at byte {at}: at most {most}")));
    }
    let bytes = cluster.get(at as usize..(at + u64::from(len)) as usize);
    let bytes = bytes.ok_or_else(|| invalid(format!("backing file name at byte {at}: behind the file")))?;
    Ok(Some(text(bytes)).filter(|name| !name.is_empty()))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// The big-endian number at byte `at`, which the caller has checked.
pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes[at..at + 4].try_into().expect("four bytes"))
}

/// The big-endian number at byte `at`, which the caller has checked.
pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

/// The words of a table as they stand in a file.
pub(crate) fn be_bytes(words: impl IntoIterator<Item = u64>) -> Vec<u8> {
    words.into_iter().flat_map(u64::to_be_bytes).collect()
}

fn be32_or_0(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..at + 4).map_or(0, |bytes| be32(bytes, 0))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first cluster of an image of 1 MiB with these numbers at these bytes.
    fn header(changes: &[(usize, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0; 4096];
        let numbers: [(usize, &[u8]); 10] = [
            (0, &MAGIC),
            (4, &3_u32.to_be_bytes()),
            (20, &12_u32.to_be_bytes()),
            (24, &(1_u64 << 20).to_be_bytes()),
            (36, &1_u32.to_be_bytes()),
            (40, &0x3000_u64.to_be_bytes()),
            (48, &0x1000_u64.to_be_bytes()),
            (56, &1_u32.to_be_bytes()),
            (96, &4_u32.to_be_bytes()),
            (100, &112_u32.to_be_bytes()),
        ];
        for (at, number) in numbers.iter().chain(changes) {
            bytes[*at..*at + number.len()].copy_from_slice(number);
        }
        bytes
    }

    fn refusal(changes: &[(usize, &[u8])]) -> String {
        Header::parse(&header(changes)).unwrap_err().to_string()
    }

    /// A header extension.
    fn extension(kind: u32, bytes: &[u8]) -> Vec<u8> {
        let mut all = [&kind.to_be_bytes()[..], &(bytes.len() as u32).to_be_bytes(), bytes].concat();
        all.resize(all.len().next_multiple_of(8), 0);
        all
    }

    #[test]
    fn every_field_has_its_limit() {
        assert!(Header::parse(&header(&[])).is_ok());
        for (at, number, reason) in [
            (0, 0_u32, "no qcow2 image"),
            (4, 1, "unsupported: version 1 (the format qcow)"),
            (4, 4, "unsupported: version 4"),
            (20, 8, "cluster size 2^8: want 2^9 to 2^21 bytes"),
            (20, 22, "cluster size 2^22"),
            (32, 1, "unsupported: encryption with AES-CBC"),
            (32, 2, "unsupported: encryption with LUKS"),
            (32, 3, "encryption method 3: unknown"),
            (36, 0, "L1 table of 0 entries: a disk of 1048576 bytes needs 1"),
            (36, 4_194_305, "L1 table at byte 12288 has 33554440 bytes: at most 33554432"),
            (44, 0x3200, "L1 table at byte 12800: not at the start of a cluster"),
            (40, 0xffff_0000, "L1 table at byte 18446462598732853248: beyond the largest file"),
            (56, 2049, "refcount table at byte 4096 has 8392704 bytes: at most 8388608"),
            (96, 7, "refcount order 7: at most 6"),
            (100, 103, "header of 103 bytes: version 3 has at least 104"),
            (100, 4097, "header of 4097 bytes: longer than a cluster of 4096"),
        ] {
            let number = number.to_be_bytes();
            let text = refusal(&[(at, &number)]);
            assert!(text.contains(reason), "{at}: {text}");
        }
        for len in [0, 4, 71, 72, 100, 111] {
            assert!(Header::parse(&header(&[])[..len]).is_err(), "{len} bytes");
        }
    }

    #[test]
    fn unknown_incompatible_features_are_refused_by_the_names_that_the_image_has() {
        let mut names = vec![0; 96];
        names[1] = 5;
        names[2..9].copy_from_slice(b"journal");
        names[48] = 1;
        names[49] = 6;
        names[50..55].copy_from_slice(b"other");
        let table = extension(0x6803_f857, &names);
        let bits = (0b110_0001_u64).to_be_bytes();
        let text = refusal(&[(72, &bits), (112, &table)]);
        assert_eq!(text, "unsupported: incompatible features: journal, bit 6");
        assert_eq!(refusal(&[(72, &bits)]), "unsupported: incompatible features: bit 5, bit 6");
    }

    #[test]
    fn extensions_and_the_backing_file_are_read() {
        let all = [
            extension(0xe279_2aca, b"raw"),
            extension(0x1234_5678, &[1, 2, 3]),
            extension(0x4441_5441, b"data"),
            extension(0, b""),
        ]
        .concat();
        let end = 112 + all.len();
        let offset = (end as u64).to_be_bytes();
        let bits = incompatible::DATA_FILE.to_be_bytes();
        let name = [(8, &offset[..]), (16, &4_u32.to_be_bytes()), (end, b"base"), (112, &all), (72, &bits)];
        let parsed = Header::parse(&header(&name)).unwrap();
        assert_eq!(parsed.backing_file.as_deref(), Some("base"));
        assert_eq!(parsed.backing_format.as_deref(), Some("raw"));
        assert_eq!(parsed.data_file.as_deref(), Some("data"));
        assert_eq!(parsed.unknown, [RawExtension { kind: 0x1234_5678, bytes: vec![1, 2, 3] }]);
        let long = 1024_u32.to_be_bytes();
        assert!(refusal(&[(8, &offset), (16, &long)]).contains("of 1024 bytes at byte"), "a long name");
        let cut = [&0x1234_5678_u32.to_be_bytes()[..], &u32::MAX.to_be_bytes()].concat();
        assert!(refusal(&[(112, &cut)]).contains("header extension 0x12345678: 4294967295 bytes"));
        let disk_key = extension(0x0537_be77, &[0; 16]);
        assert!(refusal(&[(112, &disk_key)]).contains("without encryption"));
    }

    #[test]
    fn the_compression_type_needs_its_feature_bit() {
        let bit = incompatible::COMPRESSION.to_be_bytes();
        let zstd = Header::parse(&header(&[(72, &bit), (104, &[1])])).unwrap();
        assert_eq!((zstd.compression, zstd.compression.name()), (Compression::Zstd, "zstd"));
        assert!(refusal(&[(104, &[1])]).contains("compression type 1 contradicts its feature bit"));
        assert!(refusal(&[(72, &bit)]).contains("compression type 0 contradicts its feature bit"));
        assert!(refusal(&[(72, &bit), (104, &[2])]).contains("unsupported: compression type 2"));
    }
}
