//! Silent damage: a member's strip does not hold what was written, and the disk says nothing. A scrub must find it, name
//! the member where two parities or more tell which it is, and bring back exactly what was there.
//!
//! Without checksums nothing but a scrub finds it, and a write of the stripe would hide it in parity; so it happens to a
//! whole array that is quiet, one member at a time.

use crate::oracle::SECTOR;
use crate::subject::{Running, Scrubbed};
use crate::world::World;
use block::Device;
use std::collections::BTreeSet;
use std::ops::Range;

/// Most sectors that are damaged.
const MOST_SECTORS: u64 = 8;

/// Damages a strip and judges what scrubs make of it. No member is lost, parity is right, nobody writes.
pub async fn inflict(world: &World, running: &dyn Running) {
    let is_unsound = |disk: &crate::SimDisk| disk.has_medium_errors() || disk.is_failing();
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

async fn expect(world: &World, running: &dyn Running, is_repairing: bool, expected: &Scrubbed, what: &str) {
    match running.scrub(is_repairing).await {
        Ok(found) if found == *expected => {}
        Ok(found) => world.fail(format!("a scrub {what} found {found:?}, and not {expected:?}")),
        Err(error) => world.fail(format!("a scrub {what}: {error}")),
    }
}

fn below(world: &World, bound: u64) -> u64 {
    world.draw() % bound
}

/// Some sectors of one strip.
fn draw_place(world: &World, strips: &Range<u64>) -> Range<u64> {
    let sector = SECTOR as u64;
    let first = strips.start + below(world, (strips.end - strips.start) / sector) * sector;
    let strip = u64::from(world.shape.geometry.strip_bytes);
    let strip_end = strips.start + (first - strips.start) / strip * strip + strip;
    first..strip_end.min(first + (1 + below(world, MOST_SECTORS)) * sector)
}

/// A bit that has rotted, garbage, or what a write that was lost or went astray leaves: zeroes, another sector's data.
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
