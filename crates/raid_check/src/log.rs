//! Chapter "The log" of the format document.

use crate::device::{Source, u16_at, u32_at, u64_at};
use crate::math::crc32c;
use crate::{Findings, Member};
use std::collections::BTreeMap;

const UNIT: usize = 4096;

/// The keyed checksum of contents.
struct Key(Vec<u64>);

impl Key {
    fn new(nonce: &[u8]) -> Key {
        fn mix(mut z: u64) -> u64 {
            z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
            z ^ z >> 31
        }
        let (a, b) = (u64_at(nonce, 0), u64_at(nonce, 8));
        let word = |i: u64| {
            let step = (i + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
            mix(a.wrapping_add(step)) ^ mix(b.wrapping_add(step).rotate_left(32))
        };
        Key((0..512).map(word).collect())
    }

    fn sums(&self, content: &[u8]) -> Vec<u8> {
        let mut sums = Vec::new();
        for row in content.chunks(4096) {
            let mut columns = [0u64; 8];
            for (i, word) in row.chunks_exact(8).enumerate() {
                let (w, k) = (u64_at(word, 0), self.0[i]);
                let low = (w as u32).wrapping_add(k as u32);
                let high = ((w >> 32) as u32).wrapping_add((k >> 32) as u32);
                columns[i % 8] = columns[i % 8].wrapping_add(u64::from(low).wrapping_mul(high.into()));
            }
            sums.extend(columns.iter().flat_map(|sum| sum.to_le_bytes()));
        }
        sums
    }
}

/// An entry with a right header.
struct Entry {
    position: usize,
    sequence: u64,
    tail: u64,
    units: usize,
}

/// Checks every entry under the nonce of the superblock, on every member.
pub fn check(members: &[&Member], findings: &mut Findings) {
    let table = &members[0].block;
    let key = Key::new(table.nonce());
    for lane in 0..table.lanes() {
        // The common fields of the copies of one entry, and the location of the first copy.
        let mut seen: BTreeMap<u64, (Vec<u8>, String)> = BTreeMap::new();
        for member in members {
            let offset = u64_at(&member.block.0, 248) + lane as u64 * u64::from(table.lane_bytes());
            let what = format!("log lane {lane}");
            let image = match member.device.read(offset, table.lane_bytes() as usize) {
                Ok(image) => image,
                Err(error) => {
                    findings.add(&member.name, &what, offset, error.to_string());
                    continue;
                }
            };
            let mut entries = Vec::new();
            for position in (0..image.len()).step_by(UNIT) {
                let header = &image[position..position + 512];
                let is_ours = header[16..32] == *table.nonce() && header[32..48] == *table.array();
                if &header[..8] != b"FsRdLog\0" || !is_ours {
                    continue;
                }
                match entry(member, lane, position, &image, &key) {
                    Err(why) => findings.add(&member.name, &what, offset + position as u64, why),
                    Ok(entry) => {
                        let common = [&header[10..12], &header[80..106], &header[116..508]].concat();
                        let first =
                            seen.entry(entry.sequence).or_insert((common.clone(), member.name.clone()));
                        if first.0 != common {
                            let why =
                                format!("entry {} differs from its copy on {}", entry.sequence, first.1);
                            findings.add(&member.name, &what, offset + position as u64, why);
                        }
                        entries.push(entry);
                    }
                }
            }
            ring(member, &what, offset, image.len(), entries, findings);
        }
    }
}

fn entry(member: &Member, lane: usize, at: usize, image: &[u8], key: &Key) -> Result<Entry, String> {
    let (table, header) = (&member.block, &image[at..at + 512]);
    let sequence = u64_at(header, 56);
    let fail = |text: String| Err(format!("entry {sequence}: {text}"));
    let (stored, computed) = (u32_at(header, 508), crc32c(&[&header[..508]]));
    if stored != computed {
        return fail(format!("header checksum {stored:#010x}, computed {computed:#010x}"));
    }
    let place = (u16_at(header, 48), u16_at(header, 50), u32_at(header, 52) as usize);
    if place != (lane, table.slot(), at) {
        return fail(format!("the header names lane {}, slot {}, place {}", place.0, place.1, place.2));
    }
    let (kind, tail) = (header[10], u64_at(header, 64));
    if u16_at(header, 8) != 1 || kind > 1 || header[11] > 1 {
        return fail(format!("version {}, kind {kind}, flags {}", u16_at(header, 8), header[11]));
    }
    if tail > sequence {
        return fail(format!("tail {tail}"));
    }
    if kind == 1 {
        return Ok(Entry { position: at, sequence, tail, units: 1 });
    }
    let (stripe, offset, len) =
        (u64_at(header, 80), u64::from(u32_at(header, 88)), u32_at(header, 92) as usize);
    let modified = u64_at(header, 96);
    let is_full = modified.count_ones() as usize == table.k();
    let redo = if header[11] & 1 != 0 { modified.count_ones() as usize } else { 0 };
    let payload = (redo + usize::from(!is_full)) * len;
    let lane_of =
        (((stripe.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32) * table.lanes() as u64) >> 32) as usize;
    if lane_of != lane || len == 0 || len % 512 != 0 || offset + len as u64 > table.strip() || modified == 0 {
        return fail(format!("stripe {stripe}, offset {offset}, {len} bytes, strips {modified:#x}"));
    }
    if payload != u32_at(header, 108) as usize || 512 + payload > image.len() / 2 {
        return fail(format!("payload of {} bytes, {payload} by its strips", u32_at(header, 108)));
    }
    let begin = at + 512;
    let bytes: Vec<u8> = (begin..begin + payload).map(|i| image[i % image.len()]).collect();
    let partial = if is_full { 0 } else { len };
    let mut contents: Vec<&[u8]> = bytes[partial..].chunks(len).collect();
    if partial > 0 {
        contents.push(&bytes[..partial]);
    }
    let sums: Vec<u8> = contents.iter().flat_map(|content| key.sums(content)).collect();
    let (stored, computed) = (u32_at(header, 112), crc32c(&[&sums]));
    if stored != computed {
        return fail(format!("payload checksum {stored:#010x}, computed {computed:#010x}"));
    }
    Ok(Entry { position: at, sequence, tail, units: (512 + payload).div_ceil(UNIT) })
}

/// Entries of a ring follow each other without gaps and overlaps, and tails never fall.
fn ring(
    member: &Member,
    what: &str,
    offset: u64,
    bytes: usize,
    mut entries: Vec<Entry>,
    findings: &mut Findings,
) {
    entries.sort_by_key(|entry| entry.sequence);
    for pair in entries.windows(2) {
        let (before, entry) = (&pair[0], &pair[1]);
        let expected = (before.position + before.units * UNIT) % bytes;
        let why = if entry.sequence == before.sequence {
            "stands twice".into()
        } else if entry.position != expected {
            format!("is not at {expected} of the lane, behind entry {}", before.sequence)
        } else if entry.tail < before.tail {
            format!("tail {} falls from {} in entry {}", entry.tail, before.tail, before.sequence)
        } else {
            continue;
        };
        let why = format!("entry {}: {why}", entry.sequence);
        findings.add(&member.name, what, offset + entry.position as u64, why);
    }
}
