//! The table of a pool: its volumes and their extents. Bytes and rules, without I/O.
//!
//! All numbers are little-endian. `docs/on-disk-formats.md` describes every byte.

use crate::extents::{Extent, holes};
use crate::name::{MAX_NAME, Name};
use base::Uuid;
use std::collections::HashSet;

/// First bytes of a table.
pub const MAGIC: [u8; 8] = *b"FsPool\0\0";
/// The version of the format.
pub const VERSION: u16 = 1;
/// Bytes of the header.
pub const HEADER_BYTES: usize = 192;
/// Largest number of volumes in a pool.
pub const MAX_VOLUMES: usize = 4096;
/// Largest number of extents of all volumes together.
pub const MAX_EXTENTS: usize = 24 << 10;
/// Largest size of a table in bytes.
pub const MAX_BYTES: usize = HEADER_BYTES + MAX_VOLUMES * VOLUME_BYTES + MAX_EXTENTS * EXTENT_BYTES;

/// Highest sequence number. No pool reaches it, and changes beyond it are still numbers.
const MAX_SEQUENCE: u64 = u64::MAX / 2;

const VOLUME_BYTES: usize = 104;
const EXTENT_BYTES: usize = 16;
/// Bytes of the name field, padded with zeroes.
const NAME_BYTES: usize = MAX_NAME + 1;
/// Offsets of the table's length and checksum in the header.
const LENGTH_AT: usize = 128;
const CHECKSUM_AT: usize = 132;
/// Offset of the number of copies in the header.
const COPIES_AT: usize = 136;
/// Copies of the table that a pool has.
pub const COPIES: u32 = 4;
/// Smallest number of bytes before the first unit.
pub const RESERVED: u64 = 4 << 20;
/// Units and their offsets are multiples of this, which is the largest block size.
pub const ALIGNMENT: u64 = 4096;

/// One volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// UUID of the volume.
    pub uuid: Uuid,
    /// Name of the volume.
    pub name: Name,
    /// Bytes that users see; they never see the rest of the last unit.
    pub size: u64,
    /// Extents in units, in the order of the volume's bytes.
    pub extents: Vec<Extent>,
}

/// A pool's table.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Table {
    /// UUID of the pool.
    pub pool: Uuid,
    /// Name of the pool.
    pub name: Name,
    /// Number of the change: of two tables the one with the higher number is newer.
    pub sequence: u64,
    /// Number of copies: [`COPIES`], or 0 in a table of the former format, which has two.
    pub copies: u32,
    /// Bytes of a unit.
    pub unit: u64,
    /// Offset of the first unit in bytes.
    pub data_offset: u64,
    /// Number of units.
    pub units: u64,
    /// The volumes in the order of their creation.
    pub volumes: Vec<Record>,
}

/// Why bytes are not a usable table.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    /// The bytes do not begin with a table.
    #[error("no pool found")]
    None,
    /// A later version wrote the table.
    #[error("the pool has format {0}, and this version supports only {VERSION}")]
    Version(u16),
    /// The table was not written completely, or was damaged.
    #[error("the pool's table is damaged")]
    Checksum,
    /// The table contradicts itself, with the reason.
    #[error("the pool's table is invalid: {0}")]
    Invalid(String),
}

impl Table {
    /// Index of the volume with this name or UUID.
    pub fn position(&self, key: &str) -> Option<usize> {
        let uuid = Uuid::parse_hyphenated(key);
        self.volumes.iter().position(|volume| Some(volume.uuid) == uuid || volume.name.as_str() == key)
    }

    /// Free extents, in units.
    pub fn holes(&self) -> Vec<Extent> {
        holes(self.units, self.volumes.iter().flat_map(|volume| volume.extents.iter().copied()))
    }

    /// Number of units for `size` bytes.
    pub fn units_of(&self, size: u64) -> u64 {
        size.div_ceil(self.unit)
    }

    /// Encodes the table in at most [`MAX_BYTES`] bytes.
    ///
    /// # Errors
    /// When the table has too many volumes or extents, in words.
    pub fn encode(&self) -> Result<Vec<u8>, String> {
        let extents: usize = self.volumes.iter().map(|volume| volume.extents.len()).sum();
        if self.volumes.len() > MAX_VOLUMES {
            return Err(format!("{} volumes: a pool has at most {MAX_VOLUMES}", self.volumes.len()));
        }
        if extents > MAX_EXTENTS {
            return Err(format!("volumes in {extents} extents: a pool has at most {MAX_EXTENTS}"));
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

    /// Length in bytes of the table whose header begins `bytes`.
    ///
    /// # Errors
    /// When the bytes are no table, or none of this version.
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

    /// Decodes a table and ignores the bytes behind it.
    ///
    /// # Errors
    /// When the bytes are no table, or the table contradicts itself.
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
            let cut = || DecodeError::Invalid("a volume is cut off".into());
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
        table.check().map_err(DecodeError::Invalid)?;
        if at == len { Ok(table) } else { Err(DecodeError::Invalid(format!("{} bytes too many", len - at))) }
    }

    /// Checks that the table does not contradict itself.
    ///
    /// # Errors
    /// With the contradiction in words.
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
    Name::new(&text).map_err(|error| DecodeError::Invalid(error.to_string()))
}

/// CRC-32C of a table with its checksum field taken as zero.
fn checksum(bytes: &[u8]) -> u32 {
    let (before, after) = bytes.split_at(CHECKSUM_AT);
    crc32c::crc32c_append(crc32c::crc32c_append(crc32c::crc32c(before), &[0; 4]), &after[4..])
}

#[cfg(test)]
mod tests;
