//! A new image, written from its first to its last byte: for creation and conversion.
//!
//! ```text
//!   header (last) │ data, compressed data and L2 tables, as they come │ L1 table │ refcount table │ refcount blocks
//! ```
//!
//! The header is written last, so that a file whose writing was interrupted is no image.
//!
//! Source: QEMU `docs/interop/qcow2.rst`.

use crate::compress::compress;
use crate::entry::{COMPRESSED, COPIED, ZERO};
use crate::error::{Problem, invalid};
use crate::header::{
    BACKING_FORMAT, Compression, LAZY_REFCOUNTS, MAGIC, MAX_L1_BYTES, MAX_NAME, MAX_REFCOUNT_TABLE_BYTES,
    RawExtension, V2_LENGTH, be_bytes, incompatible,
};
use crate::refcount::{self, Width};
use std::io;

/// Length of the header of version 3 that is written: with the compression type, and padding.
const V3_HEADER: usize = 112;
/// Bits of an extended L2 entry for 32 subclusters.
const ALL_SUBCLUSTERS: u64 = 0xffff_ffff;

/// Properties of a new image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Size of the disk in bytes; a multiple of 512.
    pub size: u64,
    /// 2 or 3.
    pub version: u32,
    /// The cluster size as a power of two, 9 to 21.
    pub cluster_bits: u32,
    /// How compressed clusters are compressed.
    pub compression: Compression,
    /// A refcount has `1 << refcount_order` bits.
    pub refcount_order: u32,
    /// Whether clusters have subclusters.
    pub has_extended_l2: bool,
    /// Whether later writers may leave refcounts behind.
    pub has_lazy_refcounts: bool,
    /// Name and format of the backing file.
    pub backing: Option<(String, String)>,
}

impl Options {
    /// The properties that `qemu-img create` chooses for a disk of `size` bytes.
    pub fn new(size: u64) -> Options {
        Options {
            size,
            version: 3,
            cluster_bits: 16,
            compression: Compression::Zlib,
            refcount_order: 4,
            has_extended_l2: false,
            has_lazy_refcounts: false,
            backing: None,
        }
    }

    /// Bytes of a cluster.
    pub fn cluster_size(&self) -> u64 {
        1 << self.cluster_bits
    }

    fn entry_bytes(&self) -> u64 {
        if self.has_extended_l2 { 16 } else { 8 }
    }

    /// Bytes of the disk that one L2 table maps.
    fn l2_span(&self) -> u64 {
        self.cluster_size() / self.entry_bytes() * self.cluster_size()
    }

    /// Checks that the properties fit each other and the format.
    ///
    /// # Errors
    /// When they do not; the message names the value.
    pub fn check(&self) -> Result<(), Problem> {
        let size = self.size;
        if size == 0 || !size.is_multiple_of(512) {
            return Err(invalid(format!("size {size}: want a multiple of 512 bytes")));
        }
        let least = if self.has_extended_l2 { 14 } else { 9 };
        if !(least..=21).contains(&self.cluster_bits) {
            let cluster = 1u64.checked_shl(self.cluster_bits).unwrap_or(0);
            return Err(invalid(format!("cluster size {cluster}: want {} to 2097152 bytes", 1 << least)));
        }
        if self.refcount_order > 6 {
            return Err(invalid(format!("refcount order {}: at most 6", self.refcount_order)));
        }
        let newer = [
            (self.has_extended_l2, "extended L2 entries"),
            (self.has_lazy_refcounts, "lazy refcounts"),
            (self.refcount_order != 4, "refcounts of other than 16 bits"),
            (self.compression != Compression::Zlib, "compression with zstd"),
        ];
        if let Some((_, what)) = newer.iter().find(|(is_wanted, _)| *is_wanted && self.version < 3) {
            return Err(invalid(format!("{what}: need version 3 (compat=1.1)")));
        }
        let l1_bytes = size.div_ceil(self.l2_span()) * 8;
        if l1_bytes > MAX_L1_BYTES {
            let cluster = self.cluster_size();
            return Err(invalid(format!("size {size}: too large for clusters of {cluster} bytes")));
        }
        if let Some((name, format)) = &self.backing {
            let room = self.cluster_size() as usize - V3_HEADER - 8 - format.len().next_multiple_of(8) - 8;
            if name.is_empty() || name.len() > MAX_NAME.min(room) {
                let (len, most) = (name.len(), MAX_NAME.min(room));
                return Err(invalid(format!("backing file name of {len} bytes: want 1 to {most}")));
            }
        }
        Ok(())
    }
}

/// The file of a new image.
pub trait Output {
    /// Writes `bytes` at byte `offset`. Other bytes of the file read as zeroes.
    ///
    /// # Errors
    /// The error of the file.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;
}

/// An image that is being written. Clusters come in the order of the disk.
pub struct Writer<O> {
    options: Options,
    output: O,
    /// Clusters that are in use, each with its refcount.
    refcounts: Vec<u32>,
    /// First free byte behind the compressed data that was written last, in its cluster.
    packed_end: u64,
    l1: Vec<u64>,
    /// The L2 table of the last cluster, with its number.
    l2: Option<(u64, Vec<u8>)>,
    /// Least byte of the disk that the next cluster may have.
    next: u64,
}

impl<O: Output> Writer<O> {
    /// Begins an image in the empty file `output`.
    ///
    /// # Errors
    /// As [`Options::check`].
    pub fn new(options: Options, output: O) -> Result<Writer<O>, Problem> {
        options.check()?;
        let l1 = vec![0; options.size.div_ceil(options.l2_span()) as usize];
        // The first cluster is the header's.
        Ok(Writer { options, output, refcounts: vec![1], packed_end: 0, l1, l2: None, next: 0 })
    }

    /// Bytes of a cluster.
    pub fn cluster_size(&self) -> u64 {
        self.options.cluster_size()
    }

    /// Writes a cluster with its data. The last one may be shorter.
    ///
    /// # Errors
    /// The error of the file.
    ///
    /// # Panics
    /// If `offset` is not a cluster's, or before an earlier one.
    pub fn write(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let at = self.take(1);
        self.output.write_at(at, data)?;
        self.set_entry(offset, at | COPIED, ALL_SUBCLUSTERS)
    }

    /// Writes a cluster compressed, or with its data if that is not larger.
    ///
    /// # Errors
    /// The error of the file.
    ///
    /// # Panics
    /// As [`Writer::write`]; if `data` is not a whole cluster.
    pub fn write_compressed(&mut self, offset: u64, data: &[u8]) -> io::Result<()> {
        let size = self.options.cluster_size();
        assert_eq!(data.len() as u64, size, "a cluster");
        let packed = compress(self.options.compression, data)?;
        let len = packed.len() as u64;
        if len >= size {
            return self.write(offset, data);
        }
        let at = self.place_packed(len);
        self.output.write_at(at, &packed)?;
        let sectors = (at + len - 1) / 512 - at / 512;
        let shift = 62 - (self.options.cluster_bits - 8);
        self.set_entry(offset, COMPRESSED | sectors << shift | at, 0)
    }

    /// Hides a range of the backing file with zeroes.
    ///
    /// # Errors
    /// The error of the file.
    ///
    /// # Panics
    /// As [`Writer::write`].
    pub fn write_zeroes(&mut self, offset: u64) -> io::Result<()> {
        if self.options.version < 3 {
            let zeroes = vec![0; self.options.cluster_size() as usize];
            return self.write(offset, &zeroes);
        }
        match self.options.has_extended_l2 {
            true => self.set_entry(offset, 0, ALL_SUBCLUSTERS << 32),
            false => self.set_entry(offset, ZERO, 0),
        }
    }

    /// Gives a cluster a place without writing it: it reads as zeroes.
    ///
    /// # Errors
    /// The error of the file.
    ///
    /// # Panics
    /// As [`Writer::write`].
    pub fn reserve(&mut self, offset: u64) -> io::Result<()> {
        let at = self.take(1);
        self.set_entry(offset, at | COPIED, ALL_SUBCLUSTERS)
    }

    /// Writes the tables and the header. Returns the file, and its length in bytes.
    ///
    /// # Errors
    /// The error of the file; `FileTooLarge` when there are more clusters than refcounts.
    pub fn finish(mut self) -> io::Result<(O, u64)> {
        self.end_l2()?;
        let size = self.options.cluster_size();
        let l1 = be_bytes(self.l1.iter().copied());
        let l1_at = self.take((l1.len() as u64).div_ceil(size));
        self.output.write_at(l1_at, &l1)?;
        // Refcounts count the clusters of refcounts, too.
        let per_block = (size * 8) >> self.options.refcount_order;
        let used = self.refcounts.len() as u64;
        let (mut blocks, mut table) = (0, 0);
        loop {
            let needed = (used + blocks + table).div_ceil(per_block);
            let room = (needed * 8).div_ceil(size);
            if (needed, room) == (blocks, table) {
                break;
            }
            (blocks, table) = (needed, room);
        }
        if table * size > MAX_REFCOUNT_TABLE_BYTES {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let table_at = self.take(table);
        let blocks_at = self.take(blocks);
        let entries = be_bytes((0..blocks).map(|block| blocks_at + block * size));
        self.output.write_at(table_at, &entries)?;
        for (block, counts) in (0u64..).zip(self.refcounts.chunks(per_block as usize)) {
            let width = Width { order: self.options.refcount_order };
            let bytes = refcount::block_of(counts, width, size as usize);
            self.output.write_at(blocks_at + block * size, &bytes)?;
        }
        let header = self.header(l1_at, table_at, table as u32);
        self.output.write_at(0, &header)?;
        Ok((self.output, self.refcounts.len() as u64 * size))
    }

    /// Takes the next free clusters. Returns their first byte.
    fn take(&mut self, count: u64) -> u64 {
        let at = self.refcounts.len() as u64 * self.options.cluster_size();
        self.refcounts.extend(std::iter::repeat_n(1, count as usize));
        at
    }

    /// Finds room for `len` bytes of compressed data, behind the last ones if there is room.
    fn place_packed(&mut self, len: u64) -> u64 {
        let size = self.options.cluster_size();
        let most = u32::MAX >> (32 - (1u32 << self.options.refcount_order.min(5)));
        let cluster = (self.packed_end / size) as usize;
        let is_open = !self.packed_end.is_multiple_of(size) && self.refcounts[cluster] < most;
        let room = size - self.packed_end % size;
        // Data may reach into the next cluster if that is the next free one.
        let is_last = cluster + 1 == self.refcounts.len();
        let at = match is_open && (len <= room || is_last) {
            true => {
                self.refcounts[cluster] += 1;
                if len > room {
                    self.take(1);
                }
                self.packed_end
            }
            false => self.take(1),
        };
        self.packed_end = at + len;
        at
    }

    /// Sets the L2 entry of the cluster at `offset`.
    fn set_entry(&mut self, offset: u64, word: u64, bitmap: u64) -> io::Result<()> {
        let (size, span) = (self.options.cluster_size(), self.options.l2_span());
        assert!(offset.is_multiple_of(size) && offset >= self.next && offset < self.options.size, "{offset}");
        self.next = offset + size;
        let number = offset / span;
        if self.l2.as_ref().is_some_and(|(other, _)| *other != number) {
            self.end_l2()?;
        }
        let (_, table) = self.l2.get_or_insert_with(|| (number, vec![0; size as usize]));
        let at = (offset % span / size * self.options.entry_bytes()) as usize;
        table[at..at + 8].copy_from_slice(&word.to_be_bytes());
        if self.options.has_extended_l2 {
            table[at + 8..at + 16].copy_from_slice(&bitmap.to_be_bytes());
        }
        Ok(())
    }

    /// Writes the L2 table of the last cluster.
    fn end_l2(&mut self) -> io::Result<()> {
        let Some((number, table)) = self.l2.take() else { return Ok(()) };
        let at = self.take(1);
        self.l1[number as usize] = at | COPIED;
        self.output.write_at(at, &table)
    }

    /// The first cluster.
    fn header(&self, l1_at: u64, table_at: u64, table_clusters: u32) -> Vec<u8> {
        let options = &self.options;
        let is_v3 = options.version >= 3;
        let mut extensions = Vec::new();
        if let Some((_, format)) = &options.backing {
            let bytes = format.as_bytes().to_vec();
            RawExtension { kind: BACKING_FORMAT, bytes }.append_to(&mut extensions);
        }
        extensions.extend([0; 8]);
        let length = if is_v3 { V3_HEADER } else { V2_LENGTH };
        let name = options.backing.as_ref().map_or("", |(name, _)| name);
        let name_at = if name.is_empty() { 0 } else { length + extensions.len() };
        let is_zstd = options.compression == Compression::Zstd;
        let features =
            [(is_zstd, incompatible::COMPRESSION), (options.has_extended_l2, incompatible::EXTENDED_L2)];
        let incompatible = features.iter().filter(|(is_set, _)| *is_set).map(|(_, bit)| bit).sum::<u64>();
        let mut bytes = MAGIC.to_vec();
        bytes.extend(options.version.to_be_bytes());
        bytes.extend((name_at as u64).to_be_bytes());
        bytes.extend((name.len() as u32).to_be_bytes());
        bytes.extend(options.cluster_bits.to_be_bytes());
        bytes.extend(options.size.to_be_bytes());
        bytes.extend(0u32.to_be_bytes()); // no encryption
        bytes.extend((self.l1.len() as u32).to_be_bytes());
        bytes.extend(l1_at.to_be_bytes());
        bytes.extend(table_at.to_be_bytes());
        bytes.extend(table_clusters.to_be_bytes());
        bytes.extend([0; 12]); // no snapshots
        if is_v3 {
            bytes.extend(incompatible.to_be_bytes());
            bytes.extend((if options.has_lazy_refcounts { LAZY_REFCOUNTS } else { 0 }).to_be_bytes());
            bytes.extend(0u64.to_be_bytes()); // no autoclear features
            bytes.extend(options.refcount_order.to_be_bytes());
            bytes.extend((V3_HEADER as u32).to_be_bytes());
            bytes.extend([u8::from(is_zstd), 0, 0, 0, 0, 0, 0, 0]);
        }
        bytes.extend(extensions);
        bytes.extend(name.as_bytes());
        bytes.resize(options.cluster_size() as usize, 0);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn properties_that_contradict_each_other_are_refused() {
        let good = Options::new(1 << 30);
        assert_eq!(good.check(), Ok(()));
        let name = |len: usize| Some(("x".repeat(len), "raw".into()));
        for (bad, what) in [
            (Options { size: 100, ..good.clone() }, "size 100"),
            (Options { size: u64::MAX - 511, ..good.clone() }, "too large"),
            (Options { cluster_bits: 8, ..good.clone() }, "cluster size 256"),
            (Options { cluster_bits: 13, has_extended_l2: true, ..good.clone() }, "cluster size 8192"),
            (Options { refcount_order: 7, ..good.clone() }, "refcount order 7"),
            (Options { version: 2, refcount_order: 3, ..good.clone() }, "need version 3"),
            (Options { version: 2, compression: Compression::Zstd, ..good.clone() }, "zstd"),
            (Options { backing: name(1024), ..good.clone() }, "1024 bytes"),
            (Options { backing: name(400), cluster_bits: 9, ..good.clone() }, "400 bytes"),
            (Options { backing: name(0), ..good }, "0 bytes"),
        ] {
            let problem = bad.check().unwrap_err().to_string();
            assert!(problem.contains(what), "{what}: {problem}");
        }
    }
}
