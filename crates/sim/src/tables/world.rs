//! Clusters, the table's disk, and what each half of a block may hold.

use super::toy::{Disk, lock};
use reactor::Permits;
use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

/// Blocks of the simulated device.
pub const BLOCKS: usize = 40;
/// Entries between the entries of two blocks: few blocks share a leaf.
const STRIDE: u64 = 97;
/// Clusters: more than all blocks, snapshots and moves use at a time.
const CLUSTERS: usize = 8 * BLOCKS;
/// The content of a half of a free cluster.
const POISON: u64 = u64::MAX;

/// The content of a cluster: a value for each half; 0 is zeroes.
pub type Content = [u64; 2];

/// The versions of a half of a block. They are numbered, and version 0 is zeroes.
#[derive(Default)]
struct Half {
    /// The last version that was acknowledged.
    acked: u64,
    /// The last version that was begun.
    started: u64,
    /// Versions that are zeroes.
    zeroes: BTreeSet<u64>,
}

/// The entries that a slot has had.
struct History {
    entries: Vec<u64>,
    /// The number of them that are set for certain.
    set: usize,
}

/// All that a run is about.
pub struct World {
    /// The table's disk.
    pub disk: Disk,
    clusters: RefCell<Vec<Content>>,
    free: RefCell<Vec<usize>>,
    /// References to each cluster: from the table, and from snapshots.
    refs: RefCell<Vec<u32>>,
    halves: RefCell<Vec<[Half; 2]>>,
    /// One writer at a time for each half: what it holds is then known.
    writers: Vec<[Permits; 2]>,
    histories: RefCell<Vec<History>>,
    /// One snapshot at a time is made.
    pub snapshot: Permits,
    running: Cell<u32>,
    operations: Cell<u64>,
    failure: RefCell<Option<String>>,
}

impl World {
    pub fn new() -> Rc<World> {
        let entries = BLOCKS as u64 * STRIDE;
        let history = || History { entries: vec![0], set: 1 };
        Rc::new(World {
            disk: Arc::new(vec![0; entries as usize].into()),
            clusters: RefCell::new(vec![[POISON; 2]; CLUSTERS]),
            free: RefCell::new((0..CLUSTERS).collect()),
            refs: RefCell::new(vec![0; CLUSTERS]),
            halves: RefCell::new((0..BLOCKS).map(|_| Default::default()).collect()),
            writers: (0..BLOCKS).map(|_| [Permits::new(1), Permits::new(1)]).collect(),
            histories: RefCell::new((0..BLOCKS).map(|_| history()).collect()),
            snapshot: Permits::new(1),
            running: Cell::new(0),
            operations: Cell::new(0),
            failure: RefCell::default(),
        })
    }

    /// Entries of the table.
    pub fn entries(&self) -> u64 {
        BLOCKS as u64 * STRIDE
    }

    /// The entry of a block.
    pub fn index(&self, block: usize) -> u64 {
        block as u64 * STRIDE
    }

    pub fn begin(&self) {
        self.running.set(self.running.get() + 1);
    }

    pub fn end(&self) {
        self.running.set(self.running.get() - 1);
    }

    pub fn running(&self) -> u32 {
        self.running.get()
    }

    pub fn count(&self) {
        self.operations.set(self.operations.get() + 1);
    }

    pub fn operations(&self) -> u64 {
        self.operations.get()
    }

    pub fn fail(&self, why: String) {
        self.failure.borrow_mut().get_or_insert(why);
    }

    pub fn has_failed(&self) -> bool {
        self.failure.borrow().is_some()
    }

    pub fn failure(&self) -> Option<String> {
        self.failure.borrow().clone()
    }

    /// The permit to write a half.
    pub fn writer(&self, block: usize, half: usize) -> &Permits {
        &self.writers[block][half]
    }

    /// Takes a free cluster, with one reference. `None` if all are in use.
    pub fn allocate(&self) -> Option<usize> {
        let cluster = self.free.borrow_mut().pop()?;
        self.refs.borrow_mut()[cluster] = 1;
        Some(cluster)
    }

    pub fn add_reference(&self, cluster: usize) {
        self.refs.borrow_mut()[cluster] += 1;
    }

    /// Removes a reference. Returns whether it was the last.
    pub fn remove_reference(&self, cluster: usize) -> bool {
        let count = &mut self.refs.borrow_mut()[cluster];
        *count -= 1;
        *count == 0
    }

    /// Makes a cluster available again.
    pub fn release(&self, cluster: usize) {
        self.clusters.borrow_mut()[cluster] = [POISON; 2];
        self.free.borrow_mut().push(cluster);
    }

    /// The content of a cluster.
    pub fn content(&self, cluster: usize) -> Content {
        self.clusters.borrow()[cluster]
    }

    /// Writes a half of a cluster.
    pub fn set_half(&self, cluster: usize, half: usize, value: u64) {
        if self.refs.borrow()[cluster] == 0 {
            self.fail(format!("cluster {cluster} is written after it was freed"));
        }
        self.clusters.borrow_mut()[cluster][half] = value;
    }

    /// The value of a version.
    pub fn value(&self, block: usize, half: usize, version: u64) -> u64 {
        ((block as u64) << 40 | (half as u64) << 39 | version) + 1
    }

    /// Begins a version; `is_zero`: the half becomes zeroes.
    pub fn begin_version(&self, block: usize, half: usize, is_zero: bool) -> u64 {
        let state = &mut self.halves.borrow_mut()[block][half];
        state.started += 1;
        if is_zero {
            state.zeroes.insert(state.started);
        }
        state.started
    }

    /// The version that was begun last is acknowledged.
    pub fn end_version(&self, block: usize, half: usize) {
        let state = &mut self.halves.borrow_mut()[block][half];
        state.acked = state.started;
    }

    /// The version that a read must see at least.
    pub fn acked(&self, block: usize, half: usize) -> u64 {
        self.halves.borrow()[block][half].acked
    }

    /// Judges a value that was read, of a version from `least` to the last that was begun.
    pub fn judge(&self, block: usize, half: usize, least: u64, value: u64, what: &str) {
        let state = &self.halves.borrow()[block][half];
        let mut versions = least..=state.started;
        let is_zero = |version: &u64| *version == 0 || state.zeroes.contains(version);
        let is_right = versions.any(|version| match is_zero(&version) {
            true => value == 0,
            false => value == self.value(block, half, version),
        });
        if !is_right {
            let newest = state.started;
            self.fail(format!("{what} block {block}.{half}: {value:#x}; may be version {least} to {newest}"));
        }
    }

    /// The values that all halves have while no version is under way.
    pub fn values(&self) -> Vec<Content> {
        let halves = self.halves.borrow();
        let value = |block: usize, half: usize| {
            let state = &halves[block][half];
            if state.acked != state.started {
                self.fail(format!("block {block}.{half} changes while the table is held"));
            }
            let is_zero = state.acked == 0 || state.zeroes.contains(&state.acked);
            if is_zero { 0 } else { self.value(block, half, state.acked) }
        };
        (0..BLOCKS).map(|block| [value(block, 0), value(block, 1)]).collect()
    }

    /// An entry is about to be set.
    pub fn note_setting(&self, block: usize, entry: u64) {
        self.histories.borrow_mut()[block].entries.push(entry);
    }

    /// The entry that was about to be set is.
    pub fn note_set(&self, block: usize) {
        let history = &mut self.histories.borrow_mut()[block];
        history.set = history.entries.len();
    }

    /// For each block the place of the last entry that is set.
    pub fn set_entries(&self) -> Vec<usize> {
        self.histories.borrow().iter().map(|history| history.set - 1).collect()
    }

    /// After a flush: the disk has these entries, or later ones.
    pub fn check_disk(&self, least: &[usize]) {
        let disk = lock(&self.disk);
        for (block, least) in least.iter().enumerate() {
            let entry = disk[self.index(block) as usize];
            if !self.histories.borrow()[block].entries[*least..].contains(&entry) {
                self.fail(format!("block {block}: the disk has entry {entry:#x} after a flush"));
            }
        }
    }
}
