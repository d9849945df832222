//! Chapter "A pool of volumes" of the format document.

use crate::Findings;
use crate::device::{Source, is_zero, u16_at, u32_at, u64_at};
use crate::math::crc32c_without;
use std::collections::BTreeSet;

const MAGIC: &[u8] = b"FsPool\0\0";
/// Where copies stand: offset, set. The first two are all that the former format has.
const PLACES: [(u64, u64); 4] = [(64 << 10, 0), (2 << 20, 1), (3 << 20, 0), (1 << 20, 1)];
/// The longest table: 4096 volumes and 24576 extents.
const MOST_BYTES: usize = 192 + 4096 * 104 + 24576 * 16;

/// Checks the pool on a device. `false` when there is none.
pub fn check(name: &str, device: &dyn Source, findings: &mut Findings) -> bool {
    let copies = PLACES.map(|(offset, set)| (offset, set, read(device, offset, set)));
    if device.bytes() < 4 << 20
        || !copies.iter().any(|(.., copy)| matches!(copy, Copy::Valid(_) | Copy::Bad(_)))
    {
        return false;
    }
    let valid = || {
        copies.iter().filter_map(|(_, set, copy)| match copy {
            Copy::Valid(bytes) => Some((*set, bytes)),
            _ => None,
        })
    };
    let newest = valid().max_by_key(|(_, bytes)| sequence(bytes));
    let is_former = newest.is_some_and(|(_, bytes)| u32_at(bytes, 136) == 0);
    for (i, (offset, set, copy)) in copies.iter().enumerate() {
        let what = format!("pool table, set {set}");
        match copy {
            _ if is_former && i > 1 => {}
            Copy::Bad(why) | Copy::Other(why) => findings.add(name, &what, *offset, why.clone()),
            Copy::None => findings.add(name, &what, *offset, "no table".into()),
            Copy::Valid(bytes) => {
                let twin = valid().find(|(other, twin)| other == set && twin != &bytes);
                if let Some((_, twin)) = twin {
                    let why =
                        format!("sequence {} in one set with sequence {}", sequence(bytes), sequence(twin));
                    findings.add(name, &what, *offset, why);
                }
                table(name, *offset, bytes, device.bytes(), findings);
            }
        }
    }
    true
}

enum Copy {
    /// Nothing was ever written.
    None,
    /// Something else stands there.
    Other(String),
    Bad(String),
    Valid(Vec<u8>),
}

fn sequence(bytes: &[u8]) -> u64 {
    u64_at(bytes, 32)
}

fn read(device: &dyn Source, offset: u64, set: u64) -> Copy {
    let bytes = match device.read(offset, MOST_BYTES) {
        Ok(bytes) => bytes,
        Err(error) => return Copy::Other(error.to_string()),
    };
    if &bytes[..8] != MAGIC {
        return if is_zero(&bytes[..4096]) {
            Copy::None
        } else {
            Copy::Other(format!("magic {:02x?}", &bytes[..8]))
        };
    }
    let len = u32_at(&bytes, 128) as usize;
    if !(192..=MOST_BYTES).contains(&len) {
        return Copy::Bad(format!("{len} bytes of the table"));
    }
    let (stored, computed) = (u32_at(&bytes, 132), crc32c_without(&bytes[..len], 132));
    if stored != computed {
        return Copy::Bad(format!("checksum {stored:#010x}, computed {computed:#010x}"));
    }
    if u16_at(&bytes, 8) != 1 {
        return Copy::Bad(format!("version {}", u16_at(&bytes, 8)));
    }
    if sequence(&bytes) % 2 != set {
        return Copy::Bad(format!("sequence {} of the other set", sequence(&bytes)));
    }
    Copy::Valid(bytes[..len].to_vec())
}

/// Volumes overlap nowhere, end with the units, and have what their sizes need.
fn table(name: &str, offset: u64, bytes: &[u8], device_bytes: u64, findings: &mut Findings) {
    let (unit, data, units) = (u64_at(bytes, 40), u64_at(bytes, 48), u64_at(bytes, 56));
    let end = units.checked_mul(unit).and_then(|len| len.checked_add(data));
    let mut add = |why: String| findings.add(name, "pool table", offset, why);
    if unit == 0
        || unit % 4096 != 0
        || data % 4096 != 0
        || data < 4 << 20
        || end.is_none_or(|end| end > device_bytes)
    {
        return add(format!("{units} units of {unit} bytes from {data} on, in {device_bytes} bytes"));
    }
    let (mut at, mut taken) = (192, Vec::new());
    let (mut names, mut uuids) = (BTreeSet::new(), BTreeSet::new());
    for volume in 0..u32_at(bytes, 12) {
        let entry = bytes.get(at..at + 104);
        let extents = entry.map_or(0, |entry| u32_at(entry, 24) as usize);
        let list = bytes.get(at + 104..at + 104 + 16 * extents);
        let (Some(entry), Some(list)) = (entry, list) else {
            return add(format!("volume {volume} is cut off"));
        };
        at += 104 + 16 * extents;
        let label = String::from_utf8_lossy(&entry[40..104]).trim_end_matches('\0').to_owned();
        let extents: Vec<(u64, u64)> = list.chunks(16).map(|e| (u64_at(e, 0), u64_at(e, 8))).collect();
        let own = extents.iter().fold(0u64, |sum, (_, units)| sum.saturating_add(*units));
        let size = u64_at(entry, 16);
        if size == 0 || !size.is_multiple_of(512) || own != size.div_ceil(unit) {
            add(format!("volume {label}: {size} bytes in {own} units of {unit} bytes"));
        }
        if !uuids.insert(&entry[..16]) || !names.insert(label.clone()) {
            add(format!("volume {label}: name or UUID stands twice"));
        }
        taken.extend(extents.into_iter().map(|(first, units)| (first, units, label.clone())));
    }
    if at != bytes.len() {
        add(format!("{} bytes of the table, {at} by its volumes", bytes.len()));
    }
    taken.sort();
    let mut free = 0;
    for (first, count, label) in taken {
        let end = first.checked_add(count).filter(|end| first >= free && count > 0 && *end <= units);
        match end {
            Some(end) => free = end,
            None => add(format!(
                "volume {label}: {count} units from {first} on overlap others or end beyond {units}"
            )),
        }
    }
}
