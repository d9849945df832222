//! Superblocks on members: finding the newest copy, and committing a new table.
//!
//! The four copies of a member are two sets: copies 0 and 2, copies 1 and 3. A commit overwrites
//! the set that does not hold the newest copy, so a crash in the middle leaves the other one.

use super::io::{self, Target};
use super::layout::{COPIES, COPY_BYTES, Layout};
use super::superblock::{DecodeError, Label, Superblock, Table};
use crate::mutant::{self, Mutant};
use block::{Channel, IoError, IoResult};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};

/// The superblock that was found on a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// The device's name.
    pub name: String,
    /// Its size in bytes.
    pub capacity: u64,
    /// The newest valid superblock.
    pub label: Label,
    /// Which copy that was.
    pub newest: usize,
    /// All copies.
    pub copies: [Copy; COPIES],
}

/// One copy of a superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Copy {
    /// It is valid and of this generation (0 for a spare).
    Valid(u64),
    /// It is not.
    Bad(DecodeError),
    /// It cannot be read.
    Unreadable(IoError),
}

/// Why a device has no superblock that can be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReadError {
    /// The device is too small to be a member.
    #[error("{name}: {capacity} bytes are too few for a member")]
    TooSmall {
        /// The device.
        name: String,
        /// Its size.
        capacity: u64,
    },
    /// Nothing there looks like a superblock.
    #[error("{name}: no superblock")]
    None {
        /// The device.
        name: String,
    },
    /// The device has a superblock, but no copy is valid, or one is from a newer program.
    #[error("{name}: {error}")]
    Bad {
        /// The device.
        name: String,
        /// The error of the copy that says most.
        error: DecodeError,
    },
    /// No copy can be read.
    #[error("{name}: superblock: {error}")]
    Io {
        /// The device.
        name: String,
        /// The error of the first copy.
        error: IoError,
    },
}

/// Reads all copies of a device's superblock. `name` is the device's, for messages.
///
/// # Errors
/// When no copy is valid, or one needs a newer program.
pub async fn read_superblock(name: &str, channel: &dyn Channel, capacity: u64) -> Result<Found, ReadError> {
    let Some(places) = Layout::superblocks_at(capacity) else {
        return Err(ReadError::TooSmall { name: name.to_owned(), capacity });
    };
    let mut copies: [Result<Label, Copy>; COPIES] =
        std::array::from_fn(|_| Err(Copy::Bad(DecodeError::NoMagic)));
    for (copy, place) in copies.iter_mut().zip(places) {
        *copy = read_copy(channel, place).await;
    }
    // A device that has grown has its last copies where it ended before. An older copy may be from
    // before the array grew, so the newest one says first where that was.
    let mut found: Vec<&Label> = copies.iter().flatten().collect();
    found.sort_by_key(|label| std::cmp::Reverse(generation(label)));
    let ends: Vec<u64> =
        found.into_iter().filter_map(member_bytes).filter(|end| *end < capacity & !4095).collect();
    for places in ends.into_iter().filter_map(Layout::superblocks_at) {
        for i in COPIES / 2..COPIES {
            if copies[i].is_err() {
                copies[i] = read_copy(channel, places[i]).await;
            }
        }
    }
    choose(name, capacity, copies)
}

fn member_bytes(label: &Label) -> Option<u64> {
    match label {
        Label::Member(superblock) => Some(superblock.layout.member_bytes),
        Label::Spare(spare) => Some(spare.member_bytes),
    }
}

async fn read_copy(channel: &dyn Channel, place: u64) -> Result<Label, Copy> {
    let buffer = io::read(channel, place, COPY_BYTES as usize).await.map_err(Copy::Unreadable)?;
    Label::decode(buffer.as_slice()).map_err(Copy::Bad)
}

fn generation(label: &Label) -> u64 {
    match label {
        Label::Member(superblock) => superblock.table.generation,
        Label::Spare(_) => 0,
    }
}

fn choose(name: &str, capacity: u64, copies: [Result<Label, Copy>; COPIES]) -> Result<Found, ReadError> {
    let name = name.to_owned();
    let states = copies.each_ref().map(|copy| match copy {
        Ok(label) => Copy::Valid(generation(label)),
        Err(state) => state.clone(),
    });
    let errors = || {
        states.iter().filter_map(|copy| if let Copy::Bad(error) = copy { Some(error.clone()) } else { None })
    };
    // A newer program has written here: older copies are stale.
    if let Some(error) = errors().find(DecodeError::is_of_later_version) {
        return Err(ReadError::Bad { name, error });
    }
    let newest = copies.iter().enumerate().filter_map(|(i, copy)| Some((i, copy.as_ref().ok()?)));
    let Some((newest, label)) = newest.max_by_key(|(i, label)| (generation(label), COPIES - i)) else {
        if let Some(error) = errors().find(|error| *error != DecodeError::NoMagic) {
            return Err(ReadError::Bad { name, error });
        }
        return Err(
            match states.iter().find_map(|c| if let Copy::Unreadable(e) = c { Some(*e) } else { None }) {
                Some(error) => ReadError::Io { name, error },
                None => ReadError::None { name },
            },
        );
    };
    Ok(Found { name, capacity, label: label.clone(), newest, copies: states })
}

/// Which set of copies each member is to be written to next. One for each array; every commit goes
/// through it, one at a time.
#[derive(Debug)]
pub struct Store {
    next: Vec<AtomicU8>,
    /// Whether the newest table stands at the member's end only, or may. On a device larger than
    /// the member, the front copies say where the others are: one must be whole at each moment.
    lacks_front: Vec<AtomicBool>,
    /// A copy that holds the member's newest table, where another lacks it.
    newest: Vec<AtomicU8>,
    /// The copies, as bits, that get the newest table before the next commit: the twin of the only
    /// one that holds it, and those that are broken. Power has cut a commit off, a block is bad, or
    /// its write has failed.
    lacking: Vec<AtomicU8>,
    /// Bytes of the member's device, as far as known.
    capacity: Vec<AtomicU64>,
}

impl Store {
    /// For an array of so many slots, none of which has a superblock that matters yet.
    pub fn new(slots: usize) -> Store {
        Store {
            next: (0..slots).map(|_| AtomicU8::new(0)).collect(),
            lacks_front: (0..slots).map(|_| AtomicBool::new(false)).collect(),
            newest: (0..slots).map(|_| AtomicU8::new(0)).collect(),
            lacking: (0..slots).map(|_| AtomicU8::new(0)).collect(),
            capacity: (0..slots).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    /// Remembers which copy of a member is the newest: to be called for every member that is taken
    /// into the array.
    pub fn note(&self, slot: usize, found: &Found) {
        self.next[slot].store(1 - (found.newest % 2) as u8, Ordering::Relaxed);
        let has_twin = found.copies[twin(found.newest)] == found.copies[found.newest];
        self.note_lone_copy(slot, (!has_twin).then_some(found.newest));
        let broken = (0..COPIES).filter(|copy| is_broken(&found.copies[*copy]));
        self.newest[slot].store(found.newest as u8, Ordering::Relaxed);
        self.lacking[slot].fetch_or(broken.fold(0, |bits, copy| bits | 1 << copy), Ordering::Relaxed);
        self.note_capacity(slot, found.capacity);
    }

    fn note_lone_copy(&self, slot: usize, copy: Option<usize>) {
        let is_at_end = copy.is_some_and(|copy| copy >= COPIES / 2);
        self.lacks_front[slot].store(is_at_end, Ordering::Relaxed);
        if let Some(copy) = copy {
            self.newest[slot].store(copy as u8, Ordering::Relaxed);
        }
        self.lacking[slot].store(copy.map_or(0, |copy| 1 << twin(copy)), Ordering::Relaxed);
    }

    /// Remembers how large a member's device is. Where it is larger than the member, only the front
    /// copies say where the others are.
    pub fn note_capacity(&self, slot: usize, capacity: u64) {
        self.capacity[slot].store(capacity, Ordering::Relaxed);
    }

    /// Writes `table` to the given members, to all at once, and says how each of them ended, in the
    /// same order.
    ///
    /// The table is committed when it is durable on every member that it calls live or rebuilding.
    /// When one fails, the caller takes it out ([`Table::take_out`], [`Table::begin_epoch`]) and
    /// commits the table after this one.
    ///
    /// A table that a member holds in one copy only is written to the copy's twin first. With the
    /// next table on another member, the loss of that one copy would make the member look as if it
    /// had missed a commit. Broken copies get it, too: a commit that power cut off may have torn
    /// them, and a tear of this one could complete that table. On a device that is larger than its
    /// member, a broken front copy is written before the other one.
    pub async fn commit(&self, targets: &[Target], table: &Table) -> Vec<(usize, IoResult)> {
        io::all(targets.iter().map(|target| self.complete(target))).await;
        io::all(targets.iter().map(|target| self.check_front(target))).await;
        io::all(targets.iter().map(|target| self.write(target, table))).await
    }

    /// Writes `table`, which is being created, to a device that no superblock names yet: to copies
    /// 0 and 2. [`Store::exchange`] makes the device the slot's member. Before that, commits go to
    /// the member that it replaces.
    ///
    /// # Errors
    /// When one of the two copies cannot be written.
    pub async fn introduce(&self, target: &Target, table: &Table) -> IoResult {
        let (bytes, places) = (encode(target, table), target.layout.superblocks());
        let copies = [0, COPIES / 2].map(|copy| io::write(&*target.channel, places[copy], &bytes));
        io::all(copies).await.into_iter().collect()
    }

    /// The next commit goes to the device that [`Store::introduce`] wrote for the slot: to copies 1
    /// and 3.
    pub fn exchange(&self, slot: usize) {
        self.next[slot].store(1, Ordering::Relaxed);
        self.lacks_front[slot].store(false, Ordering::Relaxed);
        self.lacking[slot].store(0, Ordering::Relaxed);
        self.note_capacity(slot, 0); // as large as the member
    }

    /// Reads the front copy that the next commit leaves in place, if the device is larger than its
    /// member: it may have been damaged since the start.
    async fn check_front(&self, Target { slot, channel, layout }: &Target) {
        let is_larger = self.capacity[*slot].load(Ordering::Relaxed) & !4095 > layout.member_bytes;
        let set = usize::from(self.next[*slot].load(Ordering::Relaxed));
        if is_larger && read_copy(&**channel, layout.superblocks()[1 - set]).await.is_err() {
            self.lacks_front[*slot].store(true, Ordering::Relaxed);
        }
    }

    /// Writes a member's newest table to the copies that lack it. A failure is for the commit to
    /// meet.
    async fn complete(&self, Target { slot, channel, layout }: &Target) {
        if mutant::is(Mutant::SuperblocksAllAtOnce) {
            return; // such a commit keeps no copy in place
        }
        let lacking = self.lacking[*slot].swap(0, Ordering::Relaxed);
        if lacking == 0 {
            return;
        }
        let newest = usize::from(self.newest[*slot].load(Ordering::Relaxed));
        let places = layout.superblocks();
        let Ok(label @ Label::Member(_)) = read_copy(&**channel, places[newest]).await else { return };
        let bytes = label.encode();
        let copies = (0..COPIES).filter(|copy| lacking >> copy & 1 == 1);
        let write = async |copy: usize| io::write(&**channel, places[copy], &bytes).await.map(|()| copy);
        if io::all(copies.map(write)).await.contains(&Ok(twin(newest))) {
            // The commit must not overwrite the twin: the copy itself may become unreadable.
            self.lacks_front[*slot].store(false, Ordering::Relaxed);
        }
    }

    async fn write(&self, target: &Target, table: &Table) -> (usize, IoResult) {
        let Target { slot, channel, layout } = target;
        let set = usize::from(self.next[*slot].load(Ordering::Relaxed));
        let bytes = encode(target, table);
        if mutant::is(Mutant::SuperblocksAllAtOnce) {
            let both = [set, 1 - set].map(|set| write_set(&**channel, layout, set, &bytes));
            let results = io::all(both).await;
            return (*slot, results[0].and(results[1]).map(drop));
        }
        if self.lacks_front[*slot].swap(false, Ordering::Relaxed) {
            // Over a copy that is broken or out of date; a bad block there is for the other set to
            // make up for.
            let _ = io::write(&**channel, layout.superblocks()[1 - set], &bytes).await;
        }
        let result = write_set(&**channel, layout, set, &bytes).await;
        if let Ok(lone_copy) = result {
            self.next[*slot].store(1 - set as u8, Ordering::Relaxed);
            self.note_lone_copy(*slot, lone_copy);
        }
        (*slot, result.map(drop))
    }
}

/// The superblock of the member that a target is, as bytes.
fn encode(target: &Target, table: &Table) -> Vec<u8> {
    let superblock = Superblock {
        member: table.members[target.slot].uuid,
        slot: target.slot as u16,
        layout: target.layout,
        unknown_ro_compat: 0,
        table: table.clone(),
    };
    superblock.encode()
}

/// The other copy of a copy's set.
fn twin(copy: usize) -> usize {
    (copy + COPIES / 2) % COPIES
}

/// Whether a copy was written and is not whole. One without magic was never written: a torn write
/// may have left parts of a table there, but not the head that vouches for them.
fn is_broken(copy: &Copy) -> bool {
    !matches!(copy, Copy::Valid(_) | Copy::Bad(DecodeError::NoMagic))
}

/// Writes both copies of a set. One that is durable is enough: a bad block under the other costs no
/// member. Returns the durable copy if its twin is not.
async fn write_set(
    channel: &dyn Channel,
    layout: &Layout,
    set: usize,
    bytes: &[u8],
) -> Result<Option<usize>, IoError> {
    let places = layout.superblocks();
    let write = async |copy: usize| io::write(channel, places[copy], bytes).await.map(|()| copy);
    let results = io::all([set, twin(set)].map(write)).await;
    match (results[0], results[1]) {
        (Ok(_), Ok(_)) => Ok(None),
        (Ok(copy), Err(error)) | (Err(error), Ok(copy)) => {
            tracing::warn!(%error, "one copy of a superblock cannot be written");
            Ok(Some(copy))
        }
        (Err(error), Err(_)) => Err(error),
    }
}

/// Writes an array's table over one that was never committed, on a device that keeps its place as a
/// member out of use: to all copies, the older ones first.
///
/// # Errors
/// When no copy of a set can be written.
pub async fn supersede(channel: &dyn Channel, found: &Found, table: &Table) -> IoResult {
    let Label::Member(superblock) = &found.label else { return Err(IoError::Invalid) };
    let layout = superblock.layout;
    let label = Label::Member(Box::new(Superblock { table: table.clone(), ..(**superblock).clone() }));
    let bytes = label.encode();
    for set in [1 - found.newest % 2, found.newest % 2] {
        write_set(channel, &layout, set, &bytes).await?;
    }
    Ok(())
}

/// Makes a device a spare, or what [`Label`] says: writes all four copies, set by set.
///
/// # Errors
/// When a set cannot be written.
pub async fn write_label(channel: &dyn Channel, capacity: u64, label: &Label) -> IoResult {
    let places = Layout::superblocks_at(capacity).ok_or(IoError::OutOfRange)?;
    let bytes = label.encode();
    for set in 0..2 {
        for result in io::all([set, set + 2].map(|copy| io::write(channel, places[copy], &bytes))).await {
            result?;
        }
    }
    Ok(())
}

/// Wipes every copy of a superblock, so that the device is no longer a member. A copy that never
/// was one is left as it is.
///
/// # Errors
/// When a copy cannot be read or written; others may be gone by then.
pub async fn zero_superblock(channel: &dyn Channel, capacity: u64) -> Result<usize, IoError> {
    let Some(mut places) = Layout::superblocks_at(capacity).map(Vec::from) else { return Ok(0) };
    if let Ok(found) = read_superblock("", channel, capacity).await
        && let Some(end) = member_bytes(&found.label).filter(|end| *end <= capacity)
    {
        places.extend(Layout::superblocks_at(end).into_iter().flatten());
    }
    places.sort_unstable();
    places.dedup();
    let mut wiped = 0;
    // From the back: the copy that is looked at first goes last.
    for place in places.into_iter().rev() {
        if read_copy(channel, place).await != Err(Copy::Bad(DecodeError::NoMagic)) {
            io::write(channel, place, &vec![0; COPY_BYTES as usize]).await?;
            wiped += 1;
        }
    }
    Ok(wiped)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::metadata::testing::{Disk, Power, config, disks, table, targets};
    use crate::metadata::{MemberState, Reason};
    use reactor::run_simulated;

    async fn found(disk: &Disk) -> Result<Found, ReadError> {
        read_superblock("disk", &*disk.channel(), disk.capacity()).await
    }

    fn newest(found: &Found) -> u64 {
        found
            .copies
            .iter()
            .filter_map(|c| if let Copy::Valid(n) = c { Some(*n) } else { None })
            .max()
            .unwrap()
    }

    #[test]
    fn a_commit_leaves_the_copies_before_it_in_place() {
        run_simulated(1, |_| async {
            let (config, (disks, _)) = (config(2, 1), disks(3));
            let (targets, store) = (targets(&config, &disks), Store::new(3));
            let mut table = table(&config);
            for generation in 1..=5 {
                assert!(store.commit(&targets, &table).await.iter().all(|(_, result)| result.is_ok()));
                for (slot, disk) in disks.iter().enumerate() {
                    let found = found(disk).await.unwrap();
                    assert_eq!(newest(&found), generation);
                    let Label::Member(superblock) = &found.label else { panic!() };
                    assert_eq!((usize::from(superblock.slot), &superblock.table), (slot, &table));
                    let older = found.copies.iter().filter(|c| **c == Copy::Valid(generation - 1)).count();
                    assert_eq!(older, if generation == 1 { 0 } else { 2 });
                }
                table = table.next(generation);
            }
        });
    }

    #[test]
    fn a_table_in_one_copy_only_is_in_two_before_any_member_has_the_next() {
        run_simulated(1, |_| async {
            let (config, mut with_next) = (config(2, 1), 0);
            for round in 0..2000 {
                let (cut, lost) = (1 + round / 2 % 99, [0, 2][round as usize % 2]);
                let (disks, power) = disks(3);
                let (targets, table) = (targets(&config, &disks), table(&config));
                let (at, mut store) = (targets[1].layout.superblocks()[lost], Store::new(3));
                let is_refused = round < 1000;
                disks[1].fail_at(is_refused.then_some(at));
                assert!(store.commit(&targets, &table).await.iter().all(|(_, result)| result.is_ok()));
                disks[1].fail_at(None);
                if !is_refused {
                    disks[1].edit(|bytes| bytes[at as usize + 100] ^= 1);
                    store = Store::new(3);
                    for (slot, disk) in disks.iter().enumerate() {
                        store.note(slot, &found(disk).await.unwrap());
                    }
                }
                disks.iter().for_each(|disk| disk.be_slow(1000));
                power.fail_after(cut);
                let mut next = table.next(9);
                // Something in another sector than the generation changes too.
                next.members[2].state = MemberState::Rebuilding { cursor: round };
                store.commit(&targets, &next).await;
                power.restore();
                let mut copies = Vec::new();
                for disk in &disks {
                    copies.push(found(disk).await.unwrap().copies);
                }
                let has_next = copies.as_flattened().contains(&Copy::Valid(2));
                let whole = copies[1].iter().filter(|copy| matches!(copy, Copy::Valid(_))).count();
                assert!(!has_next || whole >= 2, "after {cut} sectors: {copies:?}");
                with_next += usize::from(has_next);
            }
            assert!((200..1800).contains(&with_next), "{with_next}");
        });
    }

    #[test]
    fn a_table_that_was_cut_off_is_not_completed_by_a_tear_of_the_next() {
        run_simulated(10, |_| async {
            let (config, mut torn) = (config(2, 1), 0);
            for round in 0..1400 {
                let (first, second) = (1 + round % 7, 1 + round / 7 % 40);
                let (disks, power) = disks(2);
                let (targets, mut base) = (targets(&config, &disks), table(&config));
                let store = Store::new(3);
                for _ in 0..2 {
                    store.commit(&targets, &base).await;
                    base = base.next(0);
                }
                // Two starts without the third member: the second must not see the first's table.
                let opening = |id: u64| {
                    let mut table = base.clone();
                    table.begin_unserved_epoch(id);
                    table.take_out(2, Reason::Absent);
                    table
                };
                power.fail_after(first);
                store.commit(&targets[..1], &opening(11)).await;
                power.restore();
                let store = Store::new(3);
                for (slot, disk) in disks.iter().enumerate() {
                    store.note(slot, &found(disk).await.unwrap());
                }
                let seen = found(&disks[0]).await.unwrap();
                if newest(&seen) == base.generation {
                    continue; // the second start would see it, and use the generation after it
                }
                torn += usize::from(seen.copies.iter().any(is_broken));
                disks[0].write_backwards();
                disks.iter().for_each(|disk| disk.be_slow(1000));
                power.fail_after(second);
                store.commit(&targets, &opening(22)).await;
                power.restore();
                let mut ids = Vec::new();
                for Target { channel, layout, .. } in &targets {
                    for place in layout.superblocks() {
                        if let Ok(Label::Member(superblock)) = read_copy(&**channel, place).await {
                            ids.extend(superblock.table.history.last().map(|epoch| epoch.id));
                        }
                    }
                }
                let has_both = ids.contains(&11) && ids.contains(&22);
                assert!(!has_both, "cut after {first} and {second} sectors: {ids:?}");
            }
            assert!(torn > 0);
        });
    }

    #[test]
    fn power_may_go_at_any_sector_of_a_commit_and_again_in_the_next() {
        run_simulated(2, |_| async {
            let config = config(2, 1);
            for round in 0..500 {
                let (disks, power) = disks(1);
                let targets = targets(&config, &disks);
                let (first, mut last) = (table(&config), 0);
                Store::new(3).commit(&targets, &first).await;
                disks[0].be_slow(1000);
                for cut in [1 + round % 17, 1 + round / 17 % 17, 3] {
                    let before = found(&disks[0]).await.unwrap();
                    assert!(newest(&before) >= last, "{round}");
                    last = newest(&before);
                    let Label::Member(superblock) = &before.label else { panic!() };
                    let store = Store::new(3);
                    store.note(0, &before);
                    power.fail_after(cut);
                    // Something in another sector than the generation changes too.
                    let mut table = superblock.table.next(9);
                    table.members[1].state = MemberState::Rebuilding { cursor: round };
                    let results = store.commit(&targets, &table).await;
                    power.restore();
                    if results[0].1.is_ok() {
                        last += 1;
                    }
                }
                assert!(newest(&found(&disks[0]).await.unwrap()) >= last);
            }
        });
    }

    #[test]
    fn three_broken_copies_do_not_matter_and_four_are_told() {
        run_simulated(3, |_| async {
            let (config, (disks, _)) = (config(2, 1), disks(1));
            let targets = targets(&config, &disks);
            Store::new(3).commit(&targets, &table(&config)).await;
            let places = targets[0].layout.superblocks();
            disks[0].edit(|bytes| bytes[places[0] as usize + 50] ^= 1);
            let one = found(&disks[0]).await.unwrap();
            assert_eq!(one.newest, 2);
            assert!(matches!(one.copies[0], Copy::Bad(DecodeError::Checksum { .. })));
            disks[0].edit(|bytes| bytes[places[2] as usize + 50] ^= 1);
            let error = found(&disks[0]).await.unwrap_err();
            assert!(matches!(error, ReadError::Bad { .. }), "{error}");
            let empty = Disk::new(1 << 20, &Power::default());
            assert_eq!(found(&empty).await, Err(ReadError::None { name: "disk".into() }));
            let tiny = Disk::new(4096, &Power::default());
            assert_eq!(found(&tiny).await, Err(ReadError::TooSmall { name: "disk".into(), capacity: 4096 }));
            disks[0].fail(Some(IoError::TimedOut));
            let error = found(&disks[0]).await.unwrap_err();
            assert_eq!(error, ReadError::Io { name: "disk".into(), error: IoError::TimedOut });
        });
    }

    /// A member that became larger after two commits, its target, and the table of the first.
    async fn grown_member() -> (Disk, Power, Vec<Target>, Table) {
        let (config, (mut disks, power)) = (config(2, 1), disks(1));
        let targets = targets(&config, &disks);
        let (store, table) = (Store::new(3), table(&config));
        store.commit(&targets, &table).await;
        store.commit(&targets, &table.next(0)).await;
        disks[0].edit(|bytes| bytes.resize(3 << 20, 0));
        (disks.remove(0), power, targets, table)
    }

    #[test]
    fn a_device_that_grew_is_still_a_member_and_can_be_wiped() {
        run_simulated(4, |_| async {
            let (disk, ..) = grown_member().await;
            let grown = found(&disk).await.unwrap();
            assert!(grown.copies.iter().all(|copy| matches!(copy, Copy::Valid(_))), "{grown:?}");
            assert_eq!(zero_superblock(&*disk.channel(), 3 << 20).await, Ok(4));
            disk.edit(|bytes| bytes.truncate(1 << 20));
            assert!(found(&disk).await.is_err());
        });
    }

    #[test]
    fn a_device_that_grew_is_found_after_two_commits_that_were_cut_off() {
        run_simulated(6, |_| async {
            for round in 0..400u64 {
                let (disk, power, targets, ..) = grown_member().await;
                disk.be_slow(1000);
                // Copies have three sectors that matter: one is whole, the other is torn in those.
                for cut in [9 + round % 2, [1, 2, 9, 10][round as usize / 2 % 4]] {
                    let before = found(&disk).await.unwrap();
                    let Label::Member(superblock) = &before.label else { panic!() };
                    let store = Store::new(3);
                    store.note(0, &before);
                    power.fail_after(cut);
                    let mut table = superblock.table.next(9);
                    // Something in another sector than the generation changes too.
                    table.members[1].state = MemberState::Rebuilding { cursor: 1000 * cut + round };
                    store.commit(&targets, &table).await;
                    power.restore();
                }
                let last = found(&disk).await;
                assert!(last.is_ok_and(|last| newest(&last) >= 2), "{round}");
            }
        });
    }

    #[test]
    fn end_copies_are_sought_where_the_newest_table_says() {
        run_simulated(7, |_| async {
            let (config, (disks, _)) = (config(2, 1), disks(1));
            let mut targets = targets(&config, &disks);
            let (store, table) = (Store::new(3), table(&config));
            store.commit(&targets, &table).await;
            disks[0].edit(|bytes| bytes.resize(3 << 20, 0));
            // Copies 1 and 3 are the first of the larger array; 0 and 2 stay as they were.
            targets[0].layout = targets[0].layout.grown(3 << 20);
            store.commit(&targets, &table.next(0)).await;
            disks[0].edit(|bytes| bytes.resize(5 << 20, 0));
            let twice_grown = found(&disks[0]).await.unwrap();
            // Those of the older table are found, too.
            assert_eq!(twice_grown.copies, [1, 2, 1, 2].map(Copy::Valid));
        });
    }

    #[test]
    fn a_device_that_grew_is_found_after_damage_and_a_commit_that_was_cut_off() {
        run_simulated(8, |_| async {
            for round in 0..60u64 {
                let (disk, power, targets, table) = grown_member().await;
                let store = Store::new(3);
                store.note(0, &found(&disk).await.unwrap());
                let damaged = targets[0].layout.superblocks()[round as usize % 2] as usize;
                disk.edit(|bytes| bytes[damaged + 100] ^= 1);
                disk.be_slow(1000);
                power.fail_after(1 + round / 2);
                let mut next = table.next(0).next(9);
                // Something in another sector than the generation changes too.
                next.members[1].state = MemberState::Rebuilding { cursor: 1000 + round };
                store.commit(&targets, &next).await;
                power.restore();
                let last = found(&disk).await;
                assert!(last.is_ok_and(|last| newest(&last) >= 2), "{round}");
            }
        });
    }

    #[test]
    fn a_table_that_was_never_committed_is_superseded_in_all_copies() {
        run_simulated(9, |_| async {
            let (config, (disks, _)) = (config(2, 1), disks(3));
            let (targets, store, table) = (targets(&config, &disks), Store::new(3), table(&config));
            for newest in [table.next(0).next(0), table.next(0)] {
                store.commit(&targets, &newest).await;
                let before = found(&disks[1]).await.unwrap();
                let Label::Member(superblock) = &before.label else { panic!() };
                // Its generation may be lower.
                supersede(&*disks[1].channel(), &before, &table).await.unwrap();
                let after = found(&disks[1]).await.unwrap();
                assert_eq!(after.copies, [const { Copy::Valid(1) }; COPIES]);
                let Label::Member(superseded) = &after.label else { panic!() };
                assert_eq!(**superseded, Superblock { table: table.clone(), ..(**superblock).clone() });
            }
        });
    }

    #[test]
    fn a_spare_says_so() {
        run_simulated(5, |_| async {
            let (disks, _) = disks(1);
            let label = Label::Spare(crate::metadata::Spare {
                member: crate::Uuid([5; 16]),
                array: None,
                array_name: String::new(),
                member_bytes: 1 << 20,
                created_ns: 0,
                owner: "host".into(),
            });
            write_label(&*disks[0].channel(), 1 << 20, &label).await.unwrap();
            assert_eq!(found(&disks[0]).await.unwrap().label, label);
        });
    }
}
