//! Edits of the copies of a pool's table, and matching checksums.
//!
//! `docs/on-disk-formats.md` documents the offsets.

use super::disk::{Image, PAGE};
use super::story::{Base, name};
use crate::input::Input;
use volume::Uuid;
use volume::extents::Extent;
use volume::store::SETS;
use volume::table::{HEADER_BYTES, Table};

/// Bytes of a copy that edits may change.
const REACH: usize = 8192;
/// Offsets of the table's length and the checksum in the header.
const LENGTH_AT: usize = 128;
const CHECKSUM_AT: usize = 132;

/// Offsets of the four copies in bytes.
pub fn places() -> [u64; 4] {
    let [[a, b], [c, d]] = SETS;
    [a, b, c, d]
}

/// The copies that a byte of the input selects; all if it selects none.
fn chosen(mask: u8) -> impl Iterator<Item = u64> {
    let is_in = move |i: &usize| mask & 15 == 0 || mask >> i & 1 == 1;
    (0..4).filter(is_in).map(|i| places()[i])
}

/// Applies the next edit.
pub fn edit(image: &mut Image, bases: &[Base], input: &mut Input<'_>) {
    let (action, mask) = (input.u8(), input.u8());
    match action {
        0..=63 => put(image, mask, usize::from(input.u8()) % HEADER_BYTES, number(input)),
        64..=103 => {
            let at = HEADER_BYTES + usize::from(input.u8()) * 4 + usize::from(action % 4);
            put(image, mask, at, number(input));
        }
        104..=111 => put(image, mask, usize::from(input.u16()) % REACH, number(input)),
        112..=191 => {
            // Every selected copy becomes the changed table of one of them.
            let from = places()[input.below(4)];
            let Ok(mut table) = Table::decode(&image.bytes(from, REACH)) else { return };
            change(&mut table, input);
            let Ok(bytes) = table.encode() else { return };
            chosen(mask).for_each(|at| image.put(at, &bytes));
        }
        192..=215 => {
            let (base, from) = (input.below(bases.len()), places()[input.below(4)]);
            let bytes = bases[base].image.bytes(from, REACH);
            chosen(mask).for_each(|at| image.put(at, &bytes));
        }
        216..=231 => {
            let (page, len) = (input.u8() % 2, usize::from(input.u8()) * 16);
            chosen(mask).for_each(|at| image.put(at + u64::from(page) * PAGE, &vec![0; len]));
        }
        232..=255 => {
            let page = u64::from(input.u8() % 2);
            chosen(mask).for_each(|at| image.damage(at / PAGE + page));
        }
    }
}

/// Changes one field of a table.
fn change(table: &mut Table, input: &mut Input<'_>) {
    let (what, which) = (input.u8() % 16, usize::from(input.u8()));
    let value = value(input);
    let count = table.volumes.len().max(1);
    let volume = table.volumes.get_mut(which % count);
    match (what, volume) {
        (0, _) => table.sequence = value,
        (1, _) => table.sequence = table.sequence.wrapping_add(value),
        (2, _) => table.copies = value as u32,
        (3, _) => table.unit = value,
        (4, _) => table.data_offset = value,
        (5, _) => table.units = value,
        (6, _) => table.pool = Uuid([value as u8; 16]),
        (7, _) => table.name = name(value as u8),
        (8, Some(volume)) => volume.size = value,
        (9, Some(volume)) => volume.name = name(value as u8),
        (10, Some(volume)) => volume.uuid = Uuid([value as u8; 16]),
        (11, Some(volume)) => drop(volume.extents.pop()),
        (12, Some(volume)) => {
            if let Some(extent) = volume.extents.first_mut() {
                extent.start = value;
            }
        }
        (13, Some(volume)) => {
            let len = u64::from(input.u8());
            volume.extents.push(Extent { start: value, len });
            volume.size = volume.size.saturating_add(table.unit.saturating_mul(len));
        }
        (14, Some(_)) => drop(table.volumes.remove(which % count)),
        (15, Some(volume)) => {
            let twin = volume.clone();
            table.volumes.push(twin);
        }
        _ => {}
    }
}

fn value(input: &mut Input<'_>) -> u64 {
    match input.u8() {
        0 => u64::MAX,
        1 => u64::MAX - u64::from(input.u8()),
        2 => 1 << (input.u8() % 64),
        3 => u64::from(input.u8()) * PAGE,
        4 => u64::from(input.u8()) << 20,
        5 => input.u64(),
        6 => u64::from(input.u8()) * 512,
        other => u64::from(other) - 7,
    }
}

/// A value and its number of bytes.
fn number(input: &mut Input<'_>) -> (u64, usize) {
    let width = [1, 2, 4, 8][input.below(4)];
    (value(input), width)
}

fn put(image: &mut Image, mask: u8, at: usize, (value, width): (u64, usize)) {
    chosen(mask).for_each(|place| image.put(place + at as u64, &value.to_le_bytes()[..width]));
}

/// Recomputes the checksum of every copy.
pub fn seal(image: &mut Image) {
    for at in places() {
        let header = image.bytes(at, HEADER_BYTES);
        let len = u32::from_le_bytes(std::array::from_fn(|i| header[LENGTH_AT + i])) as usize;
        if (HEADER_BYTES..=1 << 20).contains(&len) {
            let mut bytes = image.bytes(at, len);
            bytes[CHECKSUM_AT..CHECKSUM_AT + 4].fill(0);
            image.put(at + CHECKSUM_AT as u64, &crc32c::crc32c(&bytes).to_le_bytes());
        }
    }
}
