//! Bad blocks: ranges of the array whose data is lost until they are written again.
//!
//! The list is the same on all members, two copies each. It is short. A range enters it when more
//! strips of a row are unreadable than parity can reconstruct, or when a crash left a row that the
//! log cannot complete.

use super::io::{self, MemberFailures, Target, Targets};
use super::layout::{Layout, PAGE_BYTES};
use super::replicated::{Format, Replicated};
use crate::Uuid;
use block::IoError;
use std::sync::atomic::{AtomicUsize, Ordering};

const MAGIC: [u8; 8] = *b"FrstRbad";
const HEAD_BYTES: usize = 64;
const RANGE_BYTES: usize = 24;

/// A range of strips that cannot be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, serde::Serialize)]
pub struct BadRange {
    /// The stripe.
    pub stripe: u64,
    /// Its strips, bit `s` for strip `s`.
    pub strips: u64,
    /// Bytes into each strip.
    pub offset: u32,
    /// Bytes.
    pub len: u32,
}

impl BadRange {
    /// Whether two ranges share a byte.
    pub fn overlaps(&self, other: &BadRange) -> bool {
        self.stripe == other.stripe
            && self.strips & other.strips != 0
            && u64::from(self.offset) < other.end()
            && u64::from(other.offset) < self.end()
    }

    fn end(&self) -> u64 {
        u64::from(self.offset) + u64::from(self.len)
    }
}

/// Why a range could not be added or removed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadBlocksError {
    /// The list has no room for another range: the range cannot be recorded, and the caller must
    /// freeze the affected part of the array.
    #[error("bad-block list: full at {0} ranges")]
    Full(usize),
    /// Members that could not be written: the caller marks them failed, durably, and calls again.
    #[error(transparent)]
    Members(#[from] MemberFailures),
}

/// Why the list cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoadError {
    /// Members that could not be read or written: the caller marks them failed, durably, and calls
    /// again.
    #[error(transparent)]
    Members(#[from] MemberFailures),
    /// Every copy is damaged, on these slots. The former ranges are unknown and would read as
    /// zeroes.
    #[error("no copy of the bad block list on members {0:?} is valid")]
    Lost(Vec<usize>),
}

/// The bad blocks of a running array, shared by all cores.
pub struct BadBlocks {
    array: Uuid,
    capacity: usize,
    count: AtomicUsize,
    list: Replicated<Vec<BadRange>>,
}

impl BadBlocks {
    /// The empty list of a new array, with at most `capacity` ranges.
    pub fn new(array: Uuid, capacity: usize) -> BadBlocks {
        BadBlocks::with(array, capacity, Replicated::new(Vec::new(), 0, 1))
    }

    fn with(array: Uuid, capacity: usize, list: Replicated<Vec<BadRange>>) -> BadBlocks {
        let count = AtomicUsize::new(list.lock().wanted.len());
        BadBlocks { array, capacity, count, list }
    }

    /// Ranges that fit in the area of a member.
    pub fn capacity_of(layout: &Layout) -> usize {
        (layout.bad_bytes as usize - HEAD_BYTES) / RANGE_BYTES
    }

    /// Reads the list from the live members: the newest valid copy. Before it returns, it updates
    /// members with an older or damaged copy. With `is_forced` a list without a valid copy counts
    /// as empty.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub async fn load(array: Uuid, live: &[Target], is_forced: bool) -> Result<BadBlocks, LoadError> {
        let (list, copies) = BadBlocks::read(array, live, is_forced).await?;
        let generation = list.list.lock().generation;
        for (target, copies) in live.iter().zip(&copies) {
            let has_it = copies.iter().filter_map(|copy| copy.decoded(array)).any(|(g, _)| g == generation);
            let is_damaged = copies.iter().any(|copy| copy.is_damaged(array));
            if is_damaged || generation > 0 && !has_it {
                // The whole copy: any block of it may be unreadable.
                let format = ListFormat { array, least_bytes: target.layout.bad_bytes as usize };
                let written = list.list.write_to(&format, target).await;
                written.map_err(|e| MemberFailures(vec![(target.slot, e)]))?;
            }
        }
        Ok(list)
    }

    /// Reads the list as [`BadBlocks::load`] does, but writes nothing: older copies remain.
    ///
    /// # Errors
    /// See [`LoadError`].
    pub async fn look(array: Uuid, live: &[Target], is_forced: bool) -> Result<BadBlocks, LoadError> {
        BadBlocks::read(array, live, is_forced).await.map(|(list, _)| list)
    }

    /// The list, and the copies of each member.
    async fn read(
        array: Uuid,
        live: &[Target],
        is_forced: bool,
    ) -> Result<(BadBlocks, Vec<[Copy; 2]>), LoadError> {
        let capacity = live.iter().map(|t| BadBlocks::capacity_of(&t.layout)).min().unwrap_or(0);
        let copies = io::all(live.iter().map(read_copies)).await;
        let failed = |(target, copies): (&Target, &Result<[Copy; 2], IoError>)| {
            Some((target.slot, *copies.as_ref().err()?))
        };
        let failures: Vec<_> = live.iter().zip(&copies).filter_map(failed).collect();
        if !failures.is_empty() || live.is_empty() {
            return Err(MemberFailures(failures).into());
        }
        let copies: Vec<[Copy; 2]> = copies.into_iter().flatten().collect();
        let decoded = |c: &[Copy; 2]| [0, 1].map(|copy| Some((copy, c[copy].decoded(array)?)));
        let newest = copies.iter().flat_map(decoded).flatten().max_by_key(|(_, (generation, _))| *generation);
        // If a first write was torn everywhere, the other copy is untouched; the write was never
        // acknowledged.
        let was_durable = || !copies.iter().flatten().any(Copy::is_untouched);
        if newest.is_none() && was_durable() {
            let slots: Vec<usize> = live.iter().map(|target| target.slot).collect();
            if !is_forced {
                return Err(LoadError::Lost(slots));
            }
            tracing::error!(
                "no copy of the bad block list on members {slots:?} is valid: a forced start treats it as empty"
            );
        }
        let (copy, (generation, ranges)) = newest.unwrap_or((1, (0, Vec::new())));
        let list = BadBlocks::with(array, capacity, Replicated::new(ranges, generation, copy));
        Ok((list, copies))
    }

    /// Whether the list is empty; costs one load.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.count.load(Ordering::Acquire) == 0
    }

    /// All ranges.
    pub fn ranges(&self) -> Vec<BadRange> {
        self.list.lock().wanted.clone()
    }

    /// The strips of `range` with a bad byte in the range, as a mask.
    pub fn strips_in(&self, range: &BadRange) -> u64 {
        if self.is_empty() {
            return 0;
        }
        let list = self.list.lock();
        list.wanted.iter().filter(|bad| bad.overlaps(range)).fold(0, |strips, bad| strips | bad.strips)
            & range.strips
    }

    /// Adds a range and returns when that is durable on all `members`. If the list is full, ranges
    /// of one stripe are merged into a range that covers them.
    ///
    /// # Errors
    /// See [`BadBlocksError`].
    pub async fn add(
        &self,
        range: BadRange,
        members: &(impl Targets + ?Sized),
    ) -> Result<(), BadBlocksError> {
        self.edit(members, |list| insert(list, range, self.capacity), |list| is_covered(list, &range)).await
    }

    /// Removes a range that has been written, and returns when that is durable on all `members`.
    /// The caller acknowledges the write afterwards.
    ///
    /// # Errors
    /// See [`BadBlocksError`]; a full list may have no room to split a range.
    pub async fn remove(
        &self,
        range: BadRange,
        members: &(impl Targets + ?Sized),
    ) -> Result<(), BadBlocksError> {
        let is_gone = |list: &[BadRange]| !list.iter().any(|bad| bad.overlaps(&range));
        if self.is_empty() && is_gone(&self.list.lock().durable) {
            return Ok(());
        }
        self.edit(members, |list| cut(list, &range, self.capacity), is_gone).await
    }

    async fn edit(
        &self,
        members: &(impl Targets + ?Sized),
        edit: impl Fn(&[BadRange]) -> Option<Vec<BadRange>>,
        is_done: impl Fn(&[BadRange]) -> bool,
    ) -> Result<(), BadBlocksError> {
        let is_full = std::cell::Cell::new(false);
        let change = |wanted: &mut Vec<BadRange>| {
            match edit(wanted) {
                Some(edited) => *wanted = edited,
                None => is_full.set(true),
            }
            self.count.store(wanted.len(), Ordering::Release);
        };
        let format = ListFormat { array: self.array, least_bytes: 0 };
        self.list.change(&format, members, change, |durable| is_full.get() || is_done(durable)).await?;
        if is_full.get() { Err(BadBlocksError::Full(self.capacity)) } else { Ok(()) }
    }

    /// Writes the list to a member that is about to take writes. No other task may change the list
    /// meanwhile.
    ///
    /// # Errors
    /// If the member cannot be written or has no room.
    pub async fn write_to(&self, target: &Target) -> block::IoResult {
        if self.list.lock().durable.len() > BadBlocks::capacity_of(&target.layout) {
            return Err(IoError::NoSpace);
        }
        self.list.write_to(&ListFormat { array: self.array, least_bytes: 0 }, target).await
    }
}

/// The list with another range; `None` if it is full.
fn insert(list: &[BadRange], range: BadRange, capacity: usize) -> Option<Vec<BadRange>> {
    let mut list = list.to_vec();
    if is_covered(&list, &range) {
        return Some(list);
    }
    let touches = |bad: &BadRange| {
        bad.stripe == range.stripe
            && bad.strips == range.strips
            && u64::from(bad.offset) <= range.end()
            && u64::from(range.offset) <= bad.end()
    };
    let is_twin =
        |bad: &BadRange| (bad.stripe, bad.offset, bad.len) == (range.stripe, range.offset, range.len);
    let is_full = list.len() >= capacity;
    let place = list
        .iter()
        .position(|bad| touches(bad) || is_twin(bad))
        .or_else(|| list.iter().position(|bad| is_full && bad.stripe == range.stripe));
    match place {
        Some(place) => list[place] = union(&list[place], &range),
        None if is_full => return None,
        None => list.push(range),
    }
    Some(list)
}

fn union(a: &BadRange, b: &BadRange) -> BadRange {
    let offset = a.offset.min(b.offset);
    let len = (a.end().max(b.end()) - u64::from(offset)) as u32;
    BadRange { stripe: a.stripe, strips: a.strips | b.strips, offset, len }
}

/// The list without the bytes of a range; `None` if the rest does not fit.
fn cut(list: &[BadRange], range: &BadRange, capacity: usize) -> Option<Vec<BadRange>> {
    let mut left = Vec::with_capacity(list.len());
    for bad in list {
        if !bad.overlaps(range) {
            left.push(*bad);
            continue;
        }
        let (from, to) = (range.offset.max(bad.offset), range.end().min(bad.end()) as u32);
        let inner = bad.strips & range.strips;
        let pieces = [
            BadRange { strips: bad.strips & !range.strips, ..*bad },
            BadRange { strips: inner, len: from - bad.offset, ..*bad },
            BadRange { strips: inner, offset: to, len: (bad.end() - u64::from(to)) as u32, ..*bad },
        ];
        left.extend(pieces.into_iter().filter(|piece| piece.strips != 0 && piece.len != 0));
    }
    (left.len() <= capacity).then_some(left)
}

/// Whether every byte of a range is in the list.
fn is_covered(list: &[BadRange], range: &BadRange) -> bool {
    let mut rest = vec![*range];
    for bad in list {
        rest = cut(&rest, bad, usize::MAX).unwrap_or_default();
    }
    rest.is_empty()
}

/// A member's copy of the list: `None` if it is unreadable.
struct Copy(Option<Vec<u8>>);

impl Copy {
    fn decoded(&self, array: Uuid) -> Option<(u64, Vec<BadRange>)> {
        decode(array, self.0.as_deref()?)
    }

    /// Whether the copy is unreadable, or has content that is no list.
    fn is_damaged(&self, array: Uuid) -> bool {
        !self.is_untouched() && self.decoded(array).is_none()
    }

    /// Whether the copy was never written: the page of its head is zeroes.
    fn is_untouched(&self) -> bool {
        let is_zero = |bytes: &Vec<u8>| bytes[..PAGE_BYTES as usize].iter().all(|byte| *byte == 0);
        self.0.as_ref().is_some_and(is_zero)
    }
}

/// Reads both copies. An unreadable block makes its copy `None`; any other error is an error of the
/// member.
async fn read_copies(target: &Target) -> Result<[Copy; 2], IoError> {
    let mut copies = [const { Copy(None) }; 2];
    for (i, copy) in copies.iter_mut().enumerate() {
        let place = target.layout.bad_copy(i);
        match io::read_long(&*target.channel, place, target.layout.bad_bytes as usize).await {
            Ok(bytes) => *copy = Copy(Some(bytes)),
            Err(IoError::Medium | IoError::Corrupt) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(copies)
}

/// The on-disk format of the list.
struct ListFormat {
    array: Uuid,
    /// Shorter lists are padded with zeroes.
    least_bytes: usize,
}

impl Format<Vec<BadRange>> for ListFormat {
    fn encode(&self, ranges: &Vec<BadRange>, generation: u64) -> Vec<u8> {
        let len = HEAD_BYTES + ranges.len() * RANGE_BYTES;
        let mut bytes = vec![0; len.next_multiple_of(PAGE_BYTES as usize).max(self.least_bytes)];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[12..16].copy_from_slice(&(ranges.len() as u32).to_le_bytes());
        bytes[16..32].copy_from_slice(&self.array.0);
        bytes[32..40].copy_from_slice(&generation.to_le_bytes());
        for (range, bytes) in ranges.iter().zip(bytes[HEAD_BYTES..].chunks_exact_mut(RANGE_BYTES)) {
            bytes[..8].copy_from_slice(&range.stripe.to_le_bytes());
            bytes[8..16].copy_from_slice(&range.strips.to_le_bytes());
            bytes[16..20].copy_from_slice(&range.offset.to_le_bytes());
            bytes[20..].copy_from_slice(&range.len.to_le_bytes());
        }
        let crc = crc32c::crc32c(&bytes[..len]);
        bytes[8..12].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    fn place(&self, layout: &Layout, copy: usize) -> u64 {
        layout.bad_copy(copy)
    }
}

/// The generation and the ranges of a copy if it is valid and belongs to this array.
fn decode(array: Uuid, bytes: &[u8]) -> Option<(u64, Vec<BadRange>)> {
    let u32_at = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let u64_at = |at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let count = u32_at(12)? as usize;
    let used = bytes.get(..HEAD_BYTES.checked_add(count.checked_mul(RANGE_BYTES)?)?)?;
    let crc = crc32c::crc32c_append(crc32c::crc32c_append(crc32c::crc32c(&used[..8]), &[0; 4]), &used[12..]);
    if used[..8] != MAGIC || used[16..32] != array.0 || u32_at(8)? != crc {
        return None;
    }
    let range = |at: usize| {
        Some(BadRange {
            stripe: u64_at(at)?,
            strips: u64_at(at + 8)?,
            offset: u32_at(at + 16)?,
            len: u32_at(at + 20)?,
        })
    };
    let ranges: Option<Vec<_>> = (0..count).map(|i| range(HEAD_BYTES + i * RANGE_BYTES)).collect();
    // Lengths are bounded so that ends of ranges fit in 32 bits.
    let ranges = ranges?;
    let is_sound = ranges.iter().all(|range| range.end() <= u64::from(u32::MAX) && range.len > 0);
    let generation = u64_at(32)?;
    (is_sound && generation > 0 && generation >> 63 == 0).then_some((generation, ranges))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::testing::{config, disks, targets};
    use proptest::prelude::*;
    use reactor::run_simulated;
    use std::collections::HashSet;

    fn bad(stripe: u64, strips: u64, offset: u32, len: u32) -> BadRange {
        BadRange { stripe, strips, offset, len }
    }

    #[test]
    fn a_bad_block_is_known_after_a_restart_until_it_is_written() {
        run_simulated(1, |_| async {
            let (config, (disks, _)) = (config(2, 1), disks(3));
            let targets = targets(&config, &disks);
            let list = BadBlocks::load(config.uuid, &targets, false).await.unwrap();
            assert!(list.is_empty());
            list.add(bad(9, 0b101, 512, 1024), &targets).await.unwrap();
            let list = BadBlocks::load(config.uuid, &targets, false).await.unwrap();
            assert_eq!(list.strips_in(&bad(9, 0b111, 1024, 4096)), 0b101);
            assert_eq!(list.strips_in(&bad(9, 0b111, 1536, 4096)), 0);
            list.remove(bad(9, 1, 0, 1024), &targets).await.unwrap();
            let list = BadBlocks::load(config.uuid, &targets[1..], false).await.unwrap();
            assert_eq!(list.ranges(), [bad(9, 4, 512, 1024), bad(9, 1, 1024, 512)]);
            list.remove(bad(9, 5, 0, 4096), &targets).await.unwrap();
            assert!(
                list.is_empty() && BadBlocks::load(config.uuid, &targets, false).await.unwrap().is_empty()
            );
        });
    }

    #[test]
    fn a_list_of_which_every_copy_is_damaged_is_refused_and_taken_for_empty_only_by_force() {
        run_simulated(3, |_| async {
            let (config, (disks, _)) = (config(2, 1), disks(3));
            let targets = targets(&config, &disks);
            let list = BadBlocks::load(config.uuid, &targets, false).await.unwrap();
            list.add(bad(9, 1, 0, 512), &targets).await.unwrap();
            list.add(bad(10, 1, 0, 512), &targets).await.unwrap();
            let damage = async |target: &Target, copy: usize| {
                let place = target.layout.bad_copy(copy);
                io::write(&*target.channel, place, &[0xa5; PAGE_BYTES as usize]).await.unwrap();
            };
            for target in &targets[..2] {
                damage(target, 0).await;
                damage(target, 1).await;
            }
            // One member still has the list; the others get it only when writes are allowed.
            assert_eq!(BadBlocks::look(config.uuid, &targets, false).await.unwrap().ranges().len(), 2);
            assert_eq!(
                BadBlocks::look(config.uuid, &targets[..2], false).await.err(),
                Some(LoadError::Lost(vec![0, 1]))
            );
            BadBlocks::load(config.uuid, &targets, false).await.unwrap();
            assert_eq!(BadBlocks::look(config.uuid, &targets[..2], false).await.unwrap().ranges().len(), 2);
            for target in &targets {
                damage(target, 0).await;
                damage(target, 1).await;
            }
            let lost = Some(LoadError::Lost(vec![0, 1, 2]));
            assert_eq!(BadBlocks::load(config.uuid, &targets, false).await.err(), lost);
            assert!(BadBlocks::load(config.uuid, &targets, true).await.unwrap().is_empty());
            // Force is needed once.
            assert!(BadBlocks::load(config.uuid, &targets, false).await.unwrap().is_empty());
        });
    }

    #[test]
    fn a_damaged_copy_is_written_anew_before_the_other_one_is_damaged_too() {
        for count in 0..3 {
            run_simulated(4, move |_| async move {
                let (config, (disks, _)) = (config(2, 1), disks(3));
                let targets = targets(&config, &disks);
                let list = BadBlocks::load(config.uuid, &targets, false).await.unwrap();
                for stripe in 0..count {
                    list.add(bad(stripe, 1, 0, 512), &targets).await.unwrap();
                }
                for copy in [0, 1, 0] {
                    let layout = targets[1].layout;
                    let end = layout.bad_copy(copy) + u64::from(layout.bad_bytes);
                    for at in [layout.bad_copy(copy), end - PAGE_BYTES] {
                        io::write(&*targets[1].channel, at, &[0xa5; PAGE_BYTES as usize]).await.unwrap();
                    }
                    BadBlocks::load(config.uuid, &targets, false).await.unwrap();
                    let alone = BadBlocks::load(config.uuid, &targets[1..2], false).await.unwrap();
                    assert_eq!(alone.ranges(), list.ranges(), "{count} ranges, copy {copy}");
                    assert!(
                        !read_copies(&targets[1])
                            .await
                            .unwrap()
                            .iter()
                            .any(|copy| copy.is_damaged(config.uuid))
                    );
                }
            });
        }
    }

    #[test]
    fn a_full_list_covers_a_stripe_with_one_range_and_refuses_another_stripe() {
        run_simulated(2, |_| async {
            let (config, (disks, _)) = (config(2, 1), disks(3));
            let targets = targets(&config, &disks);
            let list = BadBlocks::load(config.uuid, &targets, false).await.unwrap();
            let capacity = BadBlocks::capacity_of(&targets[0].layout) as u64;
            for stripe in 0..capacity {
                list.add(bad(stripe, 1, 0, 512), &targets).await.unwrap();
            }
            list.add(bad(3, 2, 2048, 512), &targets).await.unwrap();
            assert_eq!(list.strips_in(&bad(3, 2, 2048, 512)), 2);
            let refused = list.add(bad(capacity, 1, 0, 512), &targets).await;
            assert_eq!(refused, Err(BadBlocksError::Full(capacity as usize)));
            assert_eq!(BadBlocks::load(config.uuid, &targets, false).await.unwrap().ranges(), list.ranges());
        });
    }

    type Cells = HashSet<(u64, u32, u32)>;

    fn cells(list: &[BadRange]) -> Cells {
        let blocks = |bad: &BadRange| {
            let bad = *bad;
            (0..64).filter(move |s| bad.strips >> s & 1 != 0).flat_map(move |s| {
                (bad.offset..bad.offset + bad.len).map(move |block| (bad.stripe, s, block))
            })
        };
        list.iter().flat_map(blocks).collect()
    }

    proptest! {
        #[test]
        fn ranges_hold_exactly_the_blocks_that_were_added_and_not_removed(
            edits in proptest::collection::vec((any::<bool>(), 0..2u64, 1..8u64, 0..12u32, 1..6u32), 1..40),
        ) {
            let (mut list, mut model) = (Vec::new(), Cells::new());
            for (adds, stripe, strips, offset, len) in edits {
                let range = bad(stripe, strips, offset, len);
                if adds {
                    list = insert(&list, range, usize::MAX).unwrap();
                    model.extend(cells(&[range]));
                    prop_assert!(is_covered(&list, &range));
                } else {
                    list = cut(&list, &range, usize::MAX).unwrap();
                    cells(&[range]).iter().for_each(|cell| { model.remove(cell); });
                }
                prop_assert_eq!(cells(&list), model.clone());
                let bytes = ListFormat { array: Uuid([1; 16]), least_bytes: 0 }.encode(&list, 3);
                prop_assert_eq!(decode(Uuid([1; 16]), &bytes), Some((3, list.clone())));
            }
        }

        #[test]
        fn any_bytes_are_a_list_or_not(mut bytes in proptest::collection::vec(any::<u8>(), 0..300), count in any::<u32>()) {
            let _ = decode(Uuid([1; 16]), &bytes);
            if bytes.len() > 40 {
                bytes[..8].copy_from_slice(&MAGIC);
                bytes[12..16].copy_from_slice(&count.to_le_bytes());
                bytes[16..32].fill(1);
                let _ = decode(Uuid([1; 16]), &bytes);
            }
        }
    }
}
