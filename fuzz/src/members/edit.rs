//! Edits of members' metadata, and matching checksums.
//!
//! `docs/on-disk-formats.md` documents the offsets.

use crate::input::Input;

const PAGE: usize = 4096;
const SUPERBLOCK: usize = 12 << 10;
/// Length of the longest member that an edit may make.
const MAX_MEMBER: usize = 1 << 20;

/// Offsets of the copies of a member's superblock.
fn superblocks(member: &[u8]) -> [usize; 4] {
    let end = member.len() / PAGE * PAGE;
    [PAGE, PAGE + SUPERBLOCK, end.saturating_sub(2 * SUPERBLOCK), end.saturating_sub(SUPERBLOCK)]
}

/// Offsets of the pages that begin with a magic.
fn places(member: &[u8], magic: &[u8; 8]) -> Vec<usize> {
    (0..member.len() / PAGE).map(|page| page * PAGE).filter(|at| member[*at..].starts_with(magic)).collect()
}

/// Applies the next edit.
pub fn edit(members: &mut Vec<Vec<u8>>, others: &[Vec<Vec<u8>>], input: &mut Input<'_>) {
    if members.is_empty() {
        input.u8();
        return;
    }
    let (action, which) = (input.u8(), input.below(members.len()));
    let member = &mut members[which];
    match action {
        0..=95 => {
            let (copies, at, value) = (input.u8(), usize::from(input.u16()) % SUPERBLOCK, number(input));
            let at = if action < 64 { at % 1200 } else { at };
            for (i, copy) in superblocks(member).into_iter().enumerate() {
                if copies == 0 || copies >> i & 1 == 1 {
                    put(member, copy + at, value);
                }
            }
        }
        96..=119 => put_in(member, b"FrstRmap", input),
        120..=143 => put_in(member, b"FrstRbad", input),
        144..=199 => put_in(member, b"FsRdLog\0", input),
        200..=209 => {
            let at = input.u32() as usize % (member.len() + 1);
            put(member, at, number(input));
        }
        // Copies a page from another time, member or array.
        210..=229 => {
            let (base, other, page) = (input.below(others.len()), input.u8(), input.u8());
            let Some(other) = others[base].get(usize::from(other) % others[base].len()) else { return };
            let at = usize::from(page) * PAGE;
            if let (Some(to), Some(from)) = (member.get_mut(at..at + PAGE), other.get(at..at + PAGE)) {
                to.copy_from_slice(from);
            }
        }
        230..=237 => {
            let (base, other) = (input.below(others.len()), input.u8());
            let other = others[base][usize::from(other) % others[base].len()].clone();
            match action % 2 {
                0 => *member = other,
                _ if members.len() < 8 => members.push(other),
                _ => {}
            }
        }
        238..=243 => drop(members.remove(which)),
        244..=249 => {
            let len = usize::from(input.u16()) * 512;
            member.resize(len.min(MAX_MEMBER), 0);
        }
        250..=255 => {
            let (at, len) = (usize::from(input.u8()) * PAGE, input.u8());
            let end = (at + usize::from(len) * PAGE).min(member.len());
            if let Some(bytes) = member.get_mut(at..end) {
                bytes.fill(0);
            }
        }
    }
}

/// A value and its number of bytes.
fn number(input: &mut Input<'_>) -> (u64, usize) {
    let width = [1, 2, 4, 8][input.below(4)];
    let value = match input.u8() {
        0 => 0,
        1 => u64::MAX,
        2 => 1 << (width * 8 - 1),
        3 => u64::from(input.u8()) * PAGE as u64,
        4 => input.u64(),
        other => u64::from(other) - 5,
    };
    (value, width)
}

fn put(member: &mut [u8], at: usize, (value, width): (u64, usize)) {
    if let Some(bytes) = member.get_mut(at..at + width) {
        bytes.copy_from_slice(&value.to_le_bytes()[..width]);
    }
}

/// Changes one of the pages with a magic.
fn put_in(member: &mut [u8], magic: &[u8; 8], input: &mut Input<'_>) {
    let (which, at) = (usize::from(input.u8()), usize::from(input.u16()) % PAGE);
    let (value, places) = (number(input), places(member, magic));
    if !places.is_empty() {
        put(member, places[which % places.len()] + at, value);
    }
}

/// Recomputes every checksum in a page with a header.
pub fn seal(member: &mut [u8]) {
    for at in superblocks(member) {
        if member.get(at..).is_some_and(|bytes| bytes.starts_with(b"FrstRaid")) {
            let len = field(member, at + 12).clamp(1024, SUPERBLOCK);
            seal_one(member, at, len, at + 16);
        }
    }
    for at in places(member, b"FrstRmap") {
        seal_one(member, at, PAGE, at + 8);
    }
    for at in places(member, b"FrstRbad") {
        let ranges = field(member, at + 12).min(PAGE);
        seal_one(member, at, 64 + 24 * ranges, at + 8);
    }
    for at in places(member, b"FsRdLog\0") {
        seal_one(member, at, 508, at + 508);
    }
}

fn field(member: &[u8], at: usize) -> usize {
    member
        .get(at..at + 4)
        .map_or(0, |bytes| u32::from_le_bytes(bytes.try_into().expect("four bytes")) as usize)
}

/// Writes the checksum of `len` bytes at `at` to `place`, which counts as zero.
fn seal_one(member: &mut [u8], at: usize, len: usize, place: usize) {
    if at + len > member.len() || place + 4 > member.len() {
        return;
    }
    member[place..place + 4].fill(0);
    let sum = crc32c::crc32c(&member[at..at + len]);
    member[place..place + 4].copy_from_slice(&sum.to_le_bytes());
}
