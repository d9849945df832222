//! The bits of a dirty bitmap in memory, which all cores set.
//!
//! ```text
//!   table:  entry 0   entry 1    entry 2 …          one for each cluster of bits in the file
//!   parts:  words     none: 0    words              in memory when a bit of it is set
//! ```

use crate::bitmap::{self, Bitmap, MAX_BYTES, Part};
use crate::error::{Problem, invalid};
use crate::header::Header;
use crate::reader::Reader;
use block::DirtyBitmap;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Bits of a word.
const WORD_BITS: u64 = 64;
/// Words that one answer about a run looks at, so that the core serves others.
const MOST_WORDS: u64 = 16 << 10;

/// See the module.
pub(crate) struct Bits {
    /// Bytes of the disk for each bit, as a power of two.
    shift: u32,
    /// Words of a part.
    part_words: u64,
    parts: Box<[OnceLock<Words>]>,
}

/// The bits of a part.
struct Words {
    /// `None`: all bits are set, and stay so.
    words: Option<Box<[AtomicU64]>>,
    /// Whether a bit was set since the part was loaded.
    is_changed: AtomicBool,
}

impl Words {
    fn new(words: impl Iterator<Item = u64>) -> Words {
        Words { words: Some(words.map(AtomicU64::new).collect()), is_changed: AtomicBool::new(false) }
    }

    fn ones() -> Words {
        Words { words: None, is_changed: AtomicBool::new(false) }
    }

    fn get(&self, word: u64) -> u64 {
        self.words.as_ref().map_or(u64::MAX, |words| words[word as usize].load(Ordering::Relaxed))
    }

    /// The bits of so many words in the order of the file.
    fn bytes(&self, words: u64) -> Vec<u8> {
        (0..words).flat_map(|word| self.get(word).to_le_bytes()).collect()
    }

    fn set(&self, word: u64, mask: u64) {
        let Some(words) = &self.words else { return };
        let word = &words[word as usize];
        // A core that only reads leaves the cache line with the others.
        if word.load(Ordering::Relaxed) & mask != mask {
            word.fetch_or(mask, Ordering::Relaxed);
            self.is_changed.store(true, Ordering::Relaxed);
        }
    }
}

impl Bits {
    /// The bits of a disk of `size` bytes, of which none is set. A cluster has `cluster_size`
    /// bytes.
    pub(crate) fn new(granularity: u64, size: u64, cluster_size: u64) -> Bits {
        let clusters = bitmap::clusters(size, granularity, cluster_size);
        Bits {
            shift: granularity.trailing_zeros(),
            part_words: cluster_size * 8 / WORD_BITS,
            parts: (0..clusters).map(|_| OnceLock::new()).collect(),
        }
    }

    /// Sets the bits of some bytes of the disk.
    pub(crate) fn mark(&self, offset: u64, len: u64) {
        let (mut at, end) = (offset >> self.shift, ((offset + len - 1) >> self.shift) + 1);
        while at < end {
            let word = at / WORD_BITS;
            let stop = ((word + 1) * WORD_BITS).min(end);
            let mask = u64::MAX >> (WORD_BITS - (stop - at)) << (at % WORD_BITS);
            self.part(word).set(word % self.part_words, mask);
            at = stop;
        }
    }

    /// Whether the bit of the byte at `offset` is set, and for how many bytes from there, at most
    /// `len`, that is so, as far as the next words say.
    pub(crate) fn run(&self, offset: u64, len: u64) -> (bool, u64) {
        let (first, last) = (offset >> self.shift, (offset + len - 1) >> self.shift);
        let is_set = self.word(first / WORD_BITS) >> (first % WORD_BITS) & 1 == 1;
        let mut at = first;
        let stop = (last + 1).min((first / WORD_BITS + MOST_WORDS) * WORD_BITS);
        while at < stop {
            let word = self.word(at / WORD_BITS);
            let others = if is_set { !word } else { word } >> (at % WORD_BITS);
            if others != 0 {
                at += u64::from(others.trailing_zeros());
                break;
            }
            at = (at / WORD_BITS + 1) * WORD_BITS;
        }
        // Granules behind the last one are no part of the disk.
        let end = if at > last { offset + len } else { (at << self.shift).min(offset + len) };
        (is_set, end - offset)
    }

    /// A word of the bitmap.
    fn word(&self, word: u64) -> u64 {
        let part = self.parts.get((word / self.part_words) as usize).and_then(OnceLock::get);
        part.map_or(0, |part| part.get(word % self.part_words))
    }

    /// The part with this word of the bitmap.
    fn part(&self, word: u64) -> &Words {
        let part = &self.parts[(word / self.part_words) as usize];
        part.get_or_init(|| Words::new((0..self.part_words).map(|_| 0)))
    }

    /// The numbers of the parts in which a bit was set since they were loaded, with their bytes in
    /// the file.
    pub(crate) fn changed(&self) -> impl Iterator<Item = (usize, Vec<u8>)> {
        self.parts.iter().enumerate().filter_map(|(number, part)| {
            let part = part.get().filter(|part| part.is_changed.load(Ordering::Relaxed))?;
            Some((number, part.bytes(self.part_words)))
        })
    }

    /// The bytes of each part in the file; `None` if no bit is set.
    pub(crate) fn parts(&self) -> impl Iterator<Item = Option<Vec<u8>>> {
        let bytes = |part: &OnceLock<Words>| part.get().map(|part| part.bytes(self.part_words));
        self.parts.iter().map(move |part| bytes(part).filter(|bytes| bytes.iter().any(|byte| *byte != 0)))
    }
}

/// A bitmap whose bits are in memory.
pub(crate) struct Loaded {
    pub bitmap: Bitmap,
    /// Its table.
    pub parts: Vec<Part>,
    pub bits: Bits,
}

impl DirtyBitmap for Loaded {
    fn name(&self) -> &str {
        &self.bitmap.name
    }

    fn granularity(&self) -> u64 {
        self.bitmap.granularity
    }

    fn run(&self, offset: u64, len: u64) -> (bool, u64) {
        self.bits.run(offset, len)
    }
}

/// The bitmaps of an image.
#[derive(Default)]
pub(crate) struct Bitmaps {
    /// Those that are not in use.
    pub loaded: Vec<Arc<Loaded>>,
    /// The directory, the tables and the clusters of all bitmaps: first byte and length.
    pub places: Vec<(u64, u64)>,
}

/// Reads the bitmaps of the image with this header.
///
/// # Errors
/// When a bitmap is invalid, a cluster has several uses, or bitmaps that are not in use are larger
/// than [`MAX_BYTES`] together; the device's.
pub(crate) async fn load(reader: &Reader, header: &Header) -> Result<Bitmaps, Problem> {
    let Some(directory) = header.bitmaps else { return Ok(Bitmaps::default()) };
    let cluster_size = header.cluster_size();
    let (mut room, mut bytes) = (reader.capacity(), 0);
    let mut places = Places { list: Vec::new(), used: HashSet::new(), cluster_size };
    let refcount_bytes = u64::from(header.refcount_table_clusters) * cluster_size;
    places.claim(0, cluster_size)?;
    places.claim(header.l1_offset, u64::from(header.l1_entries) * 8)?;
    places.claim(header.refcount_table_offset, refcount_bytes)?;
    places.add(directory.directory_offset, directory.directory_bytes)?;
    let mut found = Vec::new();
    for bitmap in bitmap::read(reader, header, directory).await? {
        places.add(bitmap.table_offset, bitmap.table_bytes())?;
        let parts = bitmap::read_parts(reader, header, &bitmap, &mut room).await?;
        for part in &parts {
            if let Part::Stored(offset) = part {
                places.add(*offset, cluster_size)?;
            }
        }
        if bitmap.is_in_use {
            continue;
        }
        bytes += bitmap.clusters(header.size, cluster_size) * cluster_size;
        if bytes > MAX_BYTES {
            let text = format!("bitmap {:?}: with those before it more than {MAX_BYTES} bytes", bitmap.name);
            return Err(Problem::Refused(text));
        }
        found.push((bitmap, parts));
    }
    let mut loaded = Vec::new();
    for (bitmap, parts) in found {
        loaded.push(load_bits(reader, header, bitmap, parts).await?.into());
    }
    Ok(Bitmaps { loaded, places: places.list })
}

/// Clusters that have a use.
struct Places {
    /// Those of bitmaps: first byte and length.
    list: Vec<(u64, u64)>,
    used: HashSet<u64>,
    cluster_size: u64,
}

impl Places {
    /// Refuses clusters that have a use already: a write to one part would change another.
    fn claim(&mut self, offset: u64, bytes: u64) -> Result<(), Problem> {
        for cluster in offset / self.cluster_size..(offset + bytes).div_ceil(self.cluster_size) {
            if !self.used.insert(cluster) {
                return Err(invalid(format!("bitmaps: cluster {cluster} has several uses")));
            }
        }
        Ok(())
    }

    /// Claims clusters of a bitmap.
    fn add(&mut self, offset: u64, bytes: u64) -> Result<(), Problem> {
        self.list.push((offset, bytes));
        self.claim(offset, bytes)
    }
}

/// Reads the bits of a bitmap of these parts.
///
/// # Errors
/// When there are too few; the device's.
pub(crate) async fn load_bits(
    reader: &Reader,
    header: &Header,
    bitmap: Bitmap,
    parts: Vec<Part>,
) -> Result<Loaded, Problem> {
    let cluster_size = header.cluster_size();
    let clusters = bitmap.clusters(header.size, cluster_size);
    if clusters > parts.len() as u64 {
        let (name, has) = (&bitmap.name, parts.len());
        return Err(invalid(format!("bitmap {name:?}: table of {has} entries: want {clusters}")));
    }
    let bits = Bits::new(bitmap.granularity, header.size, cluster_size);
    for (place, part) in bits.parts.iter().zip(&parts) {
        let words = match *part {
            Part::Zeroes => continue,
            Part::Ones => Words::ones(),
            Part::Stored(offset) => {
                let bytes = reader.read_padded(offset, cluster_size).await;
                let part = "a cluster of a bitmap";
                let bytes = bytes.map_err(|error| Problem::Io { part, offset, error })?;
                let word = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
                Words::new(bytes.chunks_exact(8).map(word))
            }
        };
        let _ = place.set(words);
    }
    Ok(Loaded { bits, parts, bitmap })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_granules_of_a_range_are_marked_and_no_others() {
        // 4096 bits in each part of 512 bytes.
        for (offset, len, granules) in [
            (0, 1, 0..1),
            (65_535, 2, 0..2),
            (63 << 16, 2 << 16, 63..65),
            (4095 << 16, (2 << 16) + 1, 4095..4098),
            (0, 9000 << 16, 0..9000),
        ] {
            let bits = Bits::new(1 << 16, (3 * 4096) << 16, 512);
            bits.mark(offset, len);
            let mut found = vec![0; 3 * 512];
            for (part, bytes) in bits.changed() {
                found[part * 512..][..512].copy_from_slice(&bytes);
            }
            let is_set = |granule: &u64| found[*granule as usize / 8] >> (granule % 8) & 1 == 1;
            let marked: Vec<u64> = (0..3 * 4096).filter(is_set).collect();
            assert_eq!(marked, granules.collect::<Vec<_>>(), "{offset}+{len}");
        }
    }

    #[test]
    fn runs_end_where_the_bits_change() {
        let disk = 300 * 4096 * 512 - 100;
        let bits = Bits::new(512, disk, 512);
        bits.mark(100 * 512, 512);
        bits.mark(63 * 512, 2 * 512);
        bits.mark(5000 * 512, 100_000 * 512);
        let (mut at, mut found) = (7, Vec::new());
        while at < disk {
            let (is_set, len) = bits.run(at, disk - at);
            found.push((at, is_set, len));
            at += len;
        }
        let part = 512 * WORD_BITS * MOST_WORDS;
        let expected = [
            (7, false, 63 * 512 - 7),
            (63 * 512, true, 2 * 512),
            (65 * 512, false, 35 * 512),
            (100 * 512, true, 512),
            (101 * 512, false, 4899 * 512),
            (5000 * 512, true, 100_000 * 512),
            (105_000 * 512, false, part - 105_000 % WORD_BITS * 512),
        ];
        assert_eq!(found[..expected.len()], expected);
        assert_eq!(found.iter().map(|(_, _, len)| len).sum::<u64>(), disk - 7);
        assert_eq!(bits.run(63 * 512 + 1, 100), (true, 100));
    }

    #[test]
    fn a_part_without_new_bits_has_not_changed() {
        let bits = Bits::new(512, 2 * 4096 * 512, 512);
        let _ = bits.parts[0].set(Words::ones());
        bits.mark(0, 4096 * 512);
        assert_eq!(bits.changed().count(), 0);
        assert_eq!(bits.run(0, 8192 * 512), (true, 4096 * 512));
        let parts: Vec<_> = bits.parts().collect();
        assert_eq!(parts, [Some(vec![0xff; 512]), None]);
        bits.mark(4095 * 512, 1024);
        assert_eq!(bits.changed().map(|(part, _)| part).collect::<Vec<_>>(), [1]);
    }
}
