//! Silent damage: a member's strip differs from the written data, and the disk reports no error. A
//! scrub must detect it, name the member if two or more parities identify it, and restore the exact
//! data.
//!
//! Without checksums only a scrub detects the damage, and a write of the stripe would hide it in
//! parity. So it happens to one member at a time of a complete array without other requests.

use crate::client::Client;
use crate::disk::{SimDisk, Strayed};
use crate::oracle::SECTOR;
use crate::subject::{Running, Scrubbed};
use crate::world::World;
use block::Device;
use raid::array::Soft;
use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;

/// Largest number of damaged sectors.
const MOST_SECTORS: u64 = 8;

/// Damages a strip and judges the results of scrubs. All members are live, parity is right, and no
/// writes run.
pub async fn inflict(world: &World, running: &dyn Running) {
    let is_unsound = |disk: &SimDisk| disk.has_medium_errors() || disk.is_failing();
    if world.has_failed() || !world.is_whole() || world.disks().iter().any(is_unsound) {
        return;
    }
    let slot = below(world, world.members() as u64) as usize;
    let Some(strips) = running.strips_at(slot) else { return };
    let place = draw_place(world, &strips);
    let disk = world.disk(slot);
    let before = peek(world, slot, &place);
    let after = draw_content(world, slot, &strips, &before);
    if after == before {
        return;
    }
    disk.poke(place.start, &after);
    let parity = world.geometry().parity;
    let named = if parity > 1 { BTreeSet::from([slot]) } else { BTreeSet::new() };
    let expected = Scrubbed { stripes: 1, named };
    expect(world, running, false, &expected, "of damage in one strip").await;
    if parity > 1 {
        expect(world, running, true, &expected, "that mends").await;
        if peek(world, slot, &place) != before {
            world.fail(format!("a scrub did not bring back what was damaged in slot {slot}"));
        }
    } else {
        disk.poke(place.start, &before);
    }
    expect(world, running, false, &Scrubbed::default(), "of what was mended").await;
    world.count(|stats| stats.damages += 1);
}

/// The next write to one member is lost or misdirected among its strips, and the disk reports no
/// error. Data outside of it must be right, and scrubs must detect it. All members are live, parity
/// is right, and no other writes run.
pub async fn stray(world: &World, running: &dyn Running, client: &Client) {
    let is_unsound = |disk: &SimDisk| disk.has_medium_errors() || disk.is_failing();
    if world.disks().iter().any(is_unsound) || running.is_reshaping() {
        return;
    }
    let slot = below(world, world.members() as u64) as usize;
    let Some(strips) = running.strips_at(slot) else { return };
    let disk = world.disk(slot);
    let is_misdirected = world.draw().is_multiple_of(2);
    disk.let_write_stray(strips.clone(), is_misdirected);
    let unit = u64::from(world.shape.block_size) / SECTOR as u64;
    let lba = below(world, world.sectors() / unit) * unit;
    let count = (1 + below(world, MOST_SECTORS)).next_multiple_of(unit).min(world.sectors() - lba);
    // An array may write several blocks one after the other, and a read-modify-write of a block
    // that a misdirected write has hit computes parity from it. One block is one write.
    let count = if is_misdirected { unit } else { count };
    client.write(lba, count, true, 0).await;
    let Some(strayed) = disk.take_strayed() else { return };
    let right = Right::of(strayed);
    let wrong = right.wrong(&disk);
    let sectors = wrong.iter().flat_map(|at| sectors_at(world, slot, at - strips.start));
    let blocks: BTreeSet<u64> = sectors.map(|sector| sector / unit).collect();
    let sectors: BTreeSet<u64> = blocks.iter().flat_map(|block| block * unit..(block + 1) * unit).collect();
    client.verify_without(&sectors).await;
    let strip = u64::from(world.shape.geometry.strip_bytes);
    let numbers: BTreeSet<u64> = wrong.iter().map(|at| (at - strips.start) / strip).collect();
    let is_named = world.geometry().parity > 1 && !numbers.is_empty();
    let named = if is_named { BTreeSet::from([slot]) } else { BTreeSet::new() };
    let expected = Scrubbed { stripes: numbers.len() as u64, named };
    expect(world, running, false, &expected, "of a write that strayed").await;
    if is_named {
        expect(world, running, true, &expected, "that mends").await;
        if world.machine.is_on() && !right.wrong(&disk).is_empty() {
            world.fail(format!("a scrub did not bring back what strayed from slot {slot}"));
        }
    }
    right.restore(&disk);
    expect(world, running, false, &Scrubbed::default(), "of what was mended").await;
    world.count(|stats| stats.strays += u64::from(!numbers.is_empty()));
}

/// The expected data of places of a disk where a write has strayed, by offset in bytes.
struct Right(Vec<(u64, Vec<u8>)>);

impl Right {
    /// Entries in the order of their restoration.
    fn of(strayed: Strayed) -> Right {
        let Strayed { offset, bytes, overwritten } = strayed;
        Right(overwritten.into_iter().chain([(offset, bytes)]).collect())
    }

    fn restore(&self, disk: &SimDisk) {
        self.0.iter().for_each(|(offset, bytes)| disk.poke(*offset, bytes));
    }

    /// Sectors of the disk without their expected data, as offsets in bytes.
    fn wrong(&self, disk: &SimDisk) -> BTreeSet<u64> {
        let mut right: BTreeMap<u64, &[u8]> = BTreeMap::new();
        for (offset, bytes) in &self.0 {
            let places = (*offset..).step_by(SECTOR);
            right.extend(places.zip(bytes.chunks(SECTOR)));
        }
        let is_wrong = |(at, bytes): &(u64, &[u8])| {
            let mut found = vec![0; SECTOR];
            disk.peek(*at, &mut found);
            found != *bytes
        };
        right.into_iter().filter(is_wrong).map(|(at, _)| at).collect()
    }
}

/// The sectors of the array whose reads may depend on an offset in a slot's strips: the sector
/// there, if it is not parity. Any copy of a mirror may be read. A read that is raced at a soft
/// deadline computes its sector from others of the row, and compares nothing.
fn sectors_at(world: &World, slot: usize, at: u64) -> Vec<u64> {
    let geometry = world.geometry();
    let strip_bytes = u64::from(geometry.strip_bytes);
    let group = world.shape.group_of(slot);
    let is_there = |stripe: &u64| {
        geometry.group(*stripe) == group && geometry.member_offset(*stripe) == at / strip_bytes * strip_bytes
    };
    let Some(stripe) = (0..geometry.stripes()).find(is_there) else { return Vec::new() };
    let is_raced = world.shape.operations.is_some_and(|operations| operations.deadlines.soft != Soft::Never);
    let may_be_read =
        |strip: &usize| geometry.member(stripe, *strip) == slot || geometry.data == 1 || is_raced;
    let offset =
        |strip: usize| stripe * geometry.stripe_bytes() + strip as u64 * strip_bytes + at % strip_bytes;
    (0..geometry.data).filter(may_be_read).map(|strip| offset(strip) / SECTOR as u64).collect()
}

async fn expect(world: &World, running: &dyn Running, is_repairing: bool, expected: &Scrubbed, what: &str) {
    let result = running.scrub(is_repairing).await;
    if !world.machine.is_on() {
        return;
    }
    match result {
        Ok(found) if found == *expected => {}
        Ok(found) => world.fail(format!("a scrub {what} found {found:?}, and not {expected:?}")),
        Err(error) => world.fail(format!("a scrub {what}: {error}")),
    }
}

fn below(world: &World, bound: u64) -> u64 {
    world.draw() % bound
}

/// Random sectors of one strip.
fn draw_place(world: &World, strips: &Range<u64>) -> Range<u64> {
    let sector = SECTOR as u64;
    let first = strips.start + below(world, (strips.end - strips.start) / sector) * sector;
    let strip = u64::from(world.shape.geometry.strip_bytes);
    let strip_end = strips.start + (first - strips.start) / strip * strip + strip;
    first..strip_end.min(first + (1 + below(world, MOST_SECTORS)) * sector)
}

/// A flipped bit, random bytes, or the effect of a lost or misdirected write: zeroes, another
/// sector's data.
fn draw_content(world: &World, slot: usize, strips: &Range<u64>, before: &[u8]) -> Vec<u8> {
    let len = before.len() as u64;
    match below(world, 4) {
        0 => {
            let mut bytes = before.to_vec();
            bytes[below(world, len) as usize] ^= 1 << below(world, 8);
            bytes
        }
        1 => (0..len).map(|_| world.draw() as u8).collect(),
        2 => vec![0; before.len()],
        _ => {
            let first = strips.start + below(world, (strips.end - strips.start - len) / 512 + 1) * 512;
            peek(world, slot, &(first..first + len))
        }
    }
}

fn peek(world: &World, slot: usize, range: &Range<u64>) -> Vec<u8> {
    let mut bytes = vec![0; (range.end - range.start) as usize];
    debug_assert!(range.end <= world.disk(slot).limits().capacity);
    world.disk(slot).peek(range.start, &mut bytes);
    bytes
}
