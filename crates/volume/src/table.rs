//! The table of a pool: which volumes there are and where they lie. Bytes and rules, without I/O.
//!
//! All numbers are little-endian. `docs/on-disk-formats.md` describes every byte.

use crate::extents::{Extent, holes};
use crate::name::{MAX_NAME, Name, Uuid};
use crate::store::RESERVED;
use std::collections::HashSet;

/// What a table begins with.
pub const MAGIC: [u8; 8] = *b"FsPool\0\0";
/// The version of the format.
pub const VERSION: u16 = 1;
/// Bytes of the header.
pub const HEADER_BYTES: usize = 192;
/// Most volumes of a pool.
pub const MAX_VOLUMES: usize = 4096;
/// Most extents of all volumes together.
pub const MAX_EXTENTS: usize = 24 << 10;
/// Most bytes of a table.
pub const MAX_BYTES: usize = HEADER_BYTES + MAX_VOLUMES * VOLUME_BYTES + MAX_EXTENTS * EXTENT_BYTES;

/// Highest sequence number. No pool reaches it, and changes beyond it are still numbers.
const MAX_SEQUENCE: u64 = u64::MAX / 2;

const VOLUME_BYTES: usize = 104;
const EXTENT_BYTES: usize = 16;
/// Bytes of a name's field: zeroes behind the name.
const NAME_BYTES: usize = MAX_NAME + 1;
/// Where the length of the table and its checksum stand in the header.
const LENGTH_AT: usize = 128;
const CHECKSUM_AT: usize = 132;
/// Where the number of copies stands.
const COPIES_AT: usize = 136;
/// Copies of the table that a pool has.
pub const COPIES: u32 = 4;
/// Units and their place are multiples of it, so that no device has larger blocks.
pub const ALIGNMENT: u64 = 4096;

/// One volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its identity.
    pub uuid: Uuid,
    /// Its name.
    pub name: Name,
    /// Bytes that its users see: what the last unit has beyond is not theirs.
    pub size: u64,
    /// Where it lies, in units, in the order of its bytes.
    pub extents: Vec<Extent>,
}

/// A pool's table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// The pool's identity.
    pub pool: Uuid,
    /// The pool's name.
    pub name: Name,
    /// Counts the changes: of two tables the one with the higher number is valid.
    pub sequence: u64,
    /// Copies that the pool keeps: [`COPIES`], or 0 in a table of the former format, which has two.
    pub copies: u32,
    /// Bytes of a unit.
    pub unit: u64,
    /// Where the first unit begins.
    pub data_offset: u64,
    /// Units there are.
    pub units: u64,
    /// The volumes, in the order in which they were made.
    pub volumes: Vec<Record>,
}

/// Why bytes are no table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// There is none.
    #[error("no pool is there")]
    None,
    /// A later version has written it.
    #[error("the pool has format {0}, and only {VERSION} is known here")]
    Version(u16),
    /// It was not written whole, or was damaged.
    #[error("the pool's table is damaged")]
    Checksum,
    /// It contradicts itself.
    #[error("the pool's table is invalid: {0}")]
    Nonsense(String),
}

impl Table {
    /// The place of the volume with this name or UUID.
    pub fn position(&self, key: &str) -> Option<usize> {
        let uuid = Uuid::parse(key);
        self.volumes.iter().position(|volume| Some(volume.uuid) == uuid || volume.name.as_str() == key)
    }

    /// What is free, in units.
    pub fn holes(&self) -> Vec<Extent> {
        holes(self.units, self.volumes.iter().flat_map(|volume| volume.extents.iter().copied()))
    }

    /// Units that a volume of `size` bytes takes.
    pub fn units_of(&self, size: u64) -> u64 {
        size.div_ceil(self.unit)
    }

    /// The bytes, as many as there are; [`MAX_BYTES`] at most.
    ///
    /// # Errors
    /// When there is more than a table takes, in words.
    pub fn encode(&self) -> Result<Vec<u8>, String> {
        let extents: usize = self.volumes.iter().map(|volume| volume.extents.len()).sum();
        if self.volumes.len() > MAX_VOLUMES {
            return Err(format!("{} volumes: a pool has at most {MAX_VOLUMES}", self.volumes.len()));
        }
        if extents > MAX_EXTENTS {
            return Err(format!("volumes in {extents} pieces: a pool has at most {MAX_EXTENTS}"));
        }
        let mut bytes = vec![0; HEADER_BYTES];
        put(&mut bytes, 0, &MAGIC);
        put(&mut bytes, 8, &VERSION.to_le_bytes());
        put(&mut bytes, 12, &(self.volumes.len() as u32).to_le_bytes());
        put(&mut bytes, 16, &self.pool.0);
        put(&mut bytes, 32, &self.sequence.to_le_bytes());
        put(&mut bytes, 40, &self.unit.to_le_bytes());
        put(&mut bytes, 48, &self.data_offset.to_le_bytes());
        put(&mut bytes, 56, &self.units.to_le_bytes());
        put(&mut bytes, 64, self.name.as_str().as_bytes());
        put(&mut bytes, COPIES_AT, &self.copies.to_le_bytes());
        for volume in &self.volumes {
            let at = bytes.len();
            bytes.resize(at + VOLUME_BYTES, 0);
            put(&mut bytes, at, &volume.uuid.0);
            put(&mut bytes, at + 16, &volume.size.to_le_bytes());
            put(&mut bytes, at + 24, &(volume.extents.len() as u32).to_le_bytes());
            put(&mut bytes, at + 40, volume.name.as_str().as_bytes());
            for extent in &volume.extents {
                bytes.extend(extent.start.to_le_bytes());
                bytes.extend(extent.len.to_le_bytes());
            }
        }
        let len = bytes.len() as u32;
        put(&mut bytes, LENGTH_AT, &len.to_le_bytes());
        let sum = checksum(&bytes);
        put(&mut bytes, CHECKSUM_AT, &sum.to_le_bytes());
        Ok(bytes)
    }

    /// How many bytes the table has whose header begins `bytes`.
    ///
    /// # Errors
    /// When there is no table, or none that can be read here.
    pub fn length(bytes: &[u8]) -> Result<usize, DecodeError> {
        let header = bytes.get(..HEADER_BYTES).filter(|header| header.starts_with(&MAGIC));
        let header = header.ok_or(DecodeError::None)?;
        let version = u16::from_le_bytes([header[8], header[9]]);
        if version != VERSION {
            return Err(DecodeError::Version(version));
        }
        let len = u32_at(header, LENGTH_AT) as usize;
        if (HEADER_BYTES..=MAX_BYTES).contains(&len) { Ok(len) } else { Err(DecodeError::Checksum) }
    }

    /// Reads a table; what stands behind it does not matter.
    ///
    /// # Errors
    /// When there is none, or it contradicts itself.
    pub fn decode(bytes: &[u8]) -> Result<Table, DecodeError> {
        let len = Table::length(bytes)?;
        let bytes = bytes.get(..len).filter(|bytes| u32_at(bytes, CHECKSUM_AT) == checksum(bytes));
        let bytes = bytes.ok_or(DecodeError::Checksum)?;
        let mut table = Table {
            pool: uuid_at(bytes, 16),
            name: name_at(bytes, 64)?,
            sequence: u64_at(bytes, 32),
            copies: u32_at(bytes, COPIES_AT),
            unit: u64_at(bytes, 40),
            data_offset: u64_at(bytes, 48),
            units: u64_at(bytes, 56),
            volumes: Vec::new(),
        };
        let mut at = HEADER_BYTES;
        for _ in 0..u32_at(bytes, 12) {
            let cut = || DecodeError::Nonsense("a volume is cut off".into());
            let record = bytes.get(at..at + VOLUME_BYTES).ok_or_else(cut)?;
            let count = u32_at(record, 24) as usize;
            at += VOLUME_BYTES;
            let end = count.checked_mul(EXTENT_BYTES).and_then(|len| len.checked_add(at)).ok_or_else(cut)?;
            let extents = bytes.get(at..end).ok_or_else(cut)?;
            at = end;
            let extent = |bytes: &[u8]| Extent { start: u64_at(bytes, 0), len: u64_at(bytes, 8) };
            table.volumes.push(Record {
                uuid: uuid_at(record, 0),
                name: name_at(record, 40)?,
                size: u64_at(record, 16),
                extents: extents.chunks_exact(EXTENT_BYTES).map(extent).collect(),
            });
        }
        table.check().map_err(DecodeError::Nonsense)?;
        if at == len { Ok(table) } else { Err(DecodeError::Nonsense(format!("{} bytes too many", len - at))) }
    }

    /// Whether it contradicts itself, in words.
    ///
    /// # Errors
    /// If it does.
    pub fn check(&self) -> Result<(), String> {
        let Table { unit, data_offset, units, .. } = *self;
        if unit == 0 || !unit.is_multiple_of(ALIGNMENT) || !data_offset.is_multiple_of(ALIGNMENT) {
            return Err(format!("units of {unit} bytes from {data_offset} on"));
        }
        if data_offset < RESERVED {
            return Err(format!(
                "units begin at byte {data_offset}, and the first {RESERVED} bytes hold the table"
            ));
        }
        if self.sequence > MAX_SEQUENCE {
            return Err(format!("sequence number {}: the highest is {MAX_SEQUENCE}", self.sequence));
        }
        if unit.checked_mul(units).and_then(|len| len.checked_add(data_offset)).is_none() {
            return Err(format!("{units} units of {unit} bytes"));
        }
        let (mut names, mut uuids) = (HashSet::new(), HashSet::new());
        let mut all = Vec::new();
        for Record { uuid, name, size, extents } in &self.volumes {
            if !names.insert(name) || !uuids.insert(uuid) {
                return Err(format!("two volumes {name} or {uuid}"));
            }
            let taken = extents.iter().try_fold(0u64, |sum, extent| sum.checked_add(extent.len));
            if *size == 0 || !size.is_multiple_of(512) || taken != Some(self.units_of(*size)) {
                return Err(format!("volume {name} of {size} bytes in {taken:?} units"));
            }
            all.extend(extents.iter().map(|extent| (*extent, name)));
        }
        all.sort_unstable_by_key(|(extent, _)| extent.start);
        let mut end = 0;
        for (extent, name) in all {
            let its_end = extent.start.checked_add(extent.len).filter(|end| *end <= units);
            match its_end {
                Some(its_end) if extent.start >= end && extent.len > 0 => end = its_end,
                _ => return Err(format!("volume {name} has {} units from {} on", extent.len, extent.start)),
            }
        }
        Ok(())
    }
}

fn put(bytes: &mut [u8], at: usize, field: &[u8]) {
    bytes[at..at + field.len()].copy_from_slice(field);
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(*bytes[at..].first_chunk().expect("within a structure"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(*bytes[at..].first_chunk().expect("within a structure"))
}

fn uuid_at(bytes: &[u8], at: usize) -> Uuid {
    Uuid(*bytes[at..].first_chunk().expect("within a structure"))
}

fn name_at(bytes: &[u8], at: usize) -> Result<Name, DecodeError> {
    let field = &bytes[at..at + NAME_BYTES];
    let len = field.iter().position(|byte| *byte == 0).unwrap_or(NAME_BYTES);
    let text = String::from_utf8_lossy(&field[..len]);
    Name::new(&text).map_err(|error| DecodeError::Nonsense(error.to_string()))
}

/// CRC-32C of a table, its own field taken as zero.
fn checksum(bytes: &[u8]) -> u32 {
    let (before, after) = bytes.split_at(CHECKSUM_AT);
    crc32c::crc32c_append(crc32c::crc32c_append(crc32c::crc32c(before), &[0; 4]), &after[4..])
}

#[cfg(test)]
mod tests;
