//! The refcounts of an image, on its home core: which clusters are free.
//!
//! Refcounts change in memory, and blocks that have changed are written before entries that need
//! them ([`Refcounts::write`]). A cluster whose refcount is 0 is free, and for no other reason.

use super::file::File;
use crate::header::{Header, MAX_REFCOUNT_TABLE_BYTES, at, be_bytes, be64};
use crate::mutant::{self, Mutant};
use crate::refcount::{BLOCK_OFFSET, Width, block_of};
use block::{Flags, IoError, IoResult};
use reactor::Permits;
use std::cell::{Cell, RefCell};
use std::collections::hash_map::{Entry, HashMap};
use std::collections::{BTreeMap, HashSet};
use std::future::ready;
use std::ops::Range;
use std::rc::Rc;

/// Bytes of refcount blocks that stay in memory if they need not be written.
const CACHE_BYTES: u64 = 16 << 20;

/// New clusters, one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Clusters {
    /// The first.
    pub first: u64,
    pub count: u64,
    /// Whether they read as zeroes: they have never been used.
    pub are_zero: bool,
}

/// See the module.
pub(super) struct Refcounts {
    file: Rc<File>,
    width: Width,
    cluster_size: u64,
    block_size: u64,
    state: RefCell<State>,
    /// One task changes refcounts at a time.
    changing: Permits,
    /// One task frees clusters at a time.
    freeing: Permits,
    /// Clusters that have lost their last reference and are being discarded. Their refcount is
    /// still 1, so that nothing takes them.
    discarding: RefCell<HashSet<u64>>,
    /// Clusters that are about to lose references, or are being discarded, and how many times.
    dropping: RefCell<HashMap<u64, u64>>,
    /// One task changes the header at a time.
    header: Permits,
    /// It is not known which refcount table the header names.
    is_lost: Cell<bool>,
    /// The end of a block that the refcount table may name, although the write of its entry failed.
    least_end: Cell<u64>,
}

struct State {
    table_offset: u64,
    /// The first byte of each block; 0 where there is none.
    table: Vec<u64>,
    blocks: BTreeMap<u64, Block>,
    /// No cluster before this one is free.
    cursor: u64,
    /// No cluster from this one on was ever used.
    high: u64,
}

struct Block {
    bytes: Vec<u8>,
    /// Bytes that must be written.
    changed: Option<Range<usize>>,
    is_being_written: bool,
}

impl Refcounts {
    /// Reads the refcount table.
    ///
    /// # Errors
    /// When it is not in the file, or has an invalid entry.
    pub(super) async fn open(
        file: &Rc<File>,
        header: &Header,
        block_size: u64,
    ) -> Result<Refcounts, IoError> {
        let cluster_size = header.cluster_size();
        let bytes = u64::from(header.refcount_table_clusters) * cluster_size;
        let table = file.reader.read_named(header.refcount_table_offset, bytes).await?;
        let table: Vec<u64> = table.chunks_exact(8).map(|entry| be64(entry, 0) & BLOCK_OFFSET).collect();
        if table.iter().any(|block| !block.is_multiple_of(cluster_size) || *block >= file.capacity()) {
            return Err(IoError::Corrupt);
        }
        file.note_metadata(header.refcount_table_offset, bytes);
        table.iter().filter(|block| **block != 0).for_each(|block| file.note_metadata(*block, cluster_size));
        let high = file.capacity().div_ceil(cluster_size);
        let table_offset = header.refcount_table_offset;
        let state = State { table_offset, table, blocks: BTreeMap::new(), cursor: 0, high };
        Ok(Refcounts {
            file: file.clone(),
            width: Width { order: header.refcount_order },
            cluster_size,
            block_size,
            state: state.into(),
            changing: Permits::new(1),
            freeing: Permits::new(1),
            discarding: RefCell::default(),
            dropping: RefCell::default(),
            header: Permits::new(1),
            is_lost: Cell::new(false),
            least_end: Cell::new(0),
        })
    }

    /// Refcounts of a block.
    fn per_block(&self) -> u64 {
        self.width.entries(self.cluster_size)
    }

    /// Clusters behind all that were ever used that the file has room for.
    pub(super) fn room(&self) -> u64 {
        (self.file.capacity() / self.cluster_size).saturating_sub(self.state.borrow().high)
    }

    /// Takes up to `wanted` clusters, each with one reference.
    ///
    /// # Errors
    /// [`IoError::NoSpace`] when none is free and the file cannot grow; [`IoError::Corrupt`] when a
    /// free cluster has metadata; the device's error.
    pub(super) async fn allocate(&self, wanted: u64) -> Result<Clusters, IoError> {
        let found = self.changing.during(1, self.find_free(wanted)).await;
        if found != Err(IoError::NoSpace) || self.discarding.borrow().is_empty() {
            return found;
        }
        // Some become free in a moment.
        self.freeing.during(1, ready(())).await;
        self.changing.during(1, self.find_free(wanted)).await
    }

    async fn find_free(&self, wanted: u64) -> Result<Clusters, IoError> {
        loop {
            if self.is_lost.get() {
                return Err(IoError::Medium);
            }
            let cursor = self.state.borrow().cursor;
            let number = cursor / self.per_block();
            self.load(number, true).await?;
            let found = self.free_in(number, cursor, wanted);
            let Some(Range { start, end }) = found else {
                self.state.borrow_mut().cursor = (number + 1) * self.per_block();
                continue;
            };
            if (start..end).any(|cluster| self.file.is_metadata(cluster)) {
                return Err(IoError::Corrupt);
            }
            // The last cluster of a device may be cut off.
            let inside = (self.file.capacity() / self.cluster_size).clamp(start, end);
            let end = match self.file.make_room(end * self.cluster_size) {
                Err(error) if inside == start => return Err(error),
                Err(_) => inside,
                Ok(()) => end,
            };
            (start..end).for_each(|cluster| self.set(cluster, 1));
            let mut state = self.state.borrow_mut();
            let are_zero = start >= state.high;
            state.high = state.high.max(end);
            state.cursor = end;
            return Ok(Clusters { first: start, count: end - start, are_zero });
        }
    }

    /// The first free clusters of a block in memory from `cursor` on, at most `wanted`.
    fn free_in(&self, number: u64, cursor: u64, wanted: u64) -> Option<Range<u64>> {
        let state = self.state.borrow();
        let block = state.blocks.get(&number)?;
        let (first, end) = (number * self.per_block(), (number + 1) * self.per_block());
        let is_free = |cluster: &u64| self.width.get(&block.bytes, (cluster - first) as usize) == 0;
        let start = (cursor.max(first)..end).find(is_free)?;
        // Clusters that were never used are not mixed with others.
        let border = if start < state.high { state.high.min(end) } else { end };
        let count = (start..border.min(start + wanted)).take_while(is_free).count() as u64;
        Some(start..start + count)
    }

    /// Gives a cluster a reference if it has none. With `is_only` it has one then: others that the
    /// file still counts were dropped.
    ///
    /// # Errors
    /// [`IoError::Corrupt`] when the cluster is not in the file, or no block counts it; the
    /// device's.
    pub(super) async fn claim(&self, cluster: u64, is_only: bool) -> IoResult {
        let claim = async {
            if cluster >= self.file.capacity().div_ceil(self.cluster_size) {
                return Err(IoError::Corrupt);
            }
            self.load(cluster / self.per_block(), false).await?;
            let count = self.get(cluster);
            if count == 0 || count > 1 && is_only {
                self.set(cluster, 1);
            }
            Ok(())
        };
        self.changing.during(1, claim).await
    }

    /// The refcounts of some clusters.
    ///
    /// # Errors
    /// [`IoError::Corrupt`] when no block counts a cluster; the device's.
    pub(super) async fn counts(&self, clusters: &[u64]) -> Result<Vec<u64>, IoError> {
        let count_each = async {
            let mut counts = Vec::with_capacity(clusters.len());
            for cluster in clusters {
                self.load(cluster / self.per_block(), false).await?;
                counts.push(self.get(*cluster));
            }
            Ok(counts)
        };
        self.changing.during(1, count_each).await
    }

    /// Adds references to clusters that have some.
    ///
    /// # Errors
    /// The device's. Some clusters have more then.
    pub(super) async fn add_references(&self, more: &[(u64, u64)]) -> IoResult {
        let add_each = async {
            for (cluster, more) in more {
                self.load(cluster / self.per_block(), false).await?;
                self.set(*cluster, self.get(*cluster) + more);
            }
            Ok(())
        };
        self.changing.during(1, add_each).await
    }

    /// The largest refcount.
    pub(super) fn most(&self) -> u64 {
        self.width.most()
    }

    /// Most clusters that are taken one behind the other: those of a block, but for the block.
    pub(super) fn longest_run(&self) -> u64 {
        self.per_block() - 1
    }

    /// Removes a reference to each of some clusters. Those that had no other are discarded, then
    /// free; meanwhile other clusters can be taken.
    ///
    /// # Errors
    /// [`IoError::Corrupt`] when a cluster had no reference; the device's error. Clusters from that
    /// one on keep theirs.
    pub(super) async fn drop_references(&self, clusters: &[u64]) -> IoResult {
        let drop_each = async {
            let mut last = Vec::new();
            let dropped = self.changing.during(1, self.drop_but_last(clusters, &mut last)).await;
            last.sort_unstable();
            let free = async || self.changing.during(1, self.free(&last)).await;
            let is_early = mutant::is(Mutant::FreeBeforeDiscard);
            let mut freed = if is_early { free().await } else { Ok(()) };
            for run in last.chunk_by(|one, next| one + 1 == *next) {
                self.file.discard(run[0], run.len() as u64).await;
            }
            if !is_early {
                freed = free().await;
            }
            dropped.and(freed)
        };
        // While it waits for other changes, a cluster may be in no table and in no list.
        for cluster in clusters {
            *self.dropping.borrow_mut().entry(*cluster).or_default() += 1;
        }
        let dropped = self.freeing.during(1, Box::pin(drop_each)).await;
        for cluster in clusters {
            if let Entry::Occupied(mut times) = self.dropping.borrow_mut().entry(*cluster) {
                *times.get_mut() -= 1;
                if *times.get() == 0 {
                    times.remove();
                }
            }
        }
        dropped
    }

    /// Removes a reference to each of some clusters, but the last of a cluster: these clusters are
    /// added to `last` and wait for [`Refcounts::free`].
    async fn drop_but_last(&self, clusters: &[u64], last: &mut Vec<u64>) -> IoResult {
        for &cluster in clusters {
            self.load(cluster / self.per_block(), false).await?;
            match self.get(cluster) {
                0 => return Err(IoError::Corrupt),
                1 if !self.discarding.borrow_mut().insert(cluster) => return Err(IoError::Corrupt),
                1 => last.push(cluster),
                count => self.set(cluster, count - 1),
            }
        }
        Ok(())
    }

    /// Lets clusters that have been discarded become free. One whose block cannot be read leaks.
    async fn free(&self, clusters: &[u64]) -> IoResult {
        let mut freed = Ok(());
        for &cluster in clusters {
            let loaded = self.load(cluster / self.per_block(), false).await;
            self.discarding.borrow_mut().remove(&cluster);
            match loaded {
                Ok(()) => self.set_free(cluster),
                Err(_) => freed = loaded,
            }
        }
        freed
    }

    /// Removes a reference to a cluster. The caller changes refcounts.
    async fn drop_reference(&self, cluster: u64) -> IoResult {
        self.load(cluster / self.per_block(), false).await?;
        let count = self.get(cluster).checked_sub(1).ok_or(IoError::Corrupt)?;
        if count > 0 {
            self.set(cluster, count);
        } else {
            self.file.discard(cluster, 1).await;
            self.set_free(cluster);
        }
        Ok(())
    }

    fn set_free(&self, cluster: u64) {
        self.set(cluster, 0);
        let mut state = self.state.borrow_mut();
        state.cursor = state.cursor.min(cluster);
    }

    /// Length of the refcount table.
    pub(super) fn blocks(&self) -> u64 {
        self.state.borrow().table.len() as u64
    }

    /// The clusters of the refcount table and of all blocks.
    fn own_clusters(&self) -> HashSet<u64> {
        let state = self.state.borrow();
        let first = state.table_offset / self.cluster_size;
        let table = first..first + (state.table.len() as u64 * 8).div_ceil(self.cluster_size);
        let blocks = state.table.iter().filter(|block| **block > 0).map(|block| block / self.cluster_size);
        table.chain(blocks).collect()
    }

    /// Lowers refcounts of a block to those that `wanted` names for a cluster and its refcount.
    /// Passes over the refcounts' own clusters, and those that lose references or become free.
    /// Returns how many it has lowered.
    ///
    /// # Errors
    /// The device's.
    pub(super) async fn lower(&self, number: u64, wanted: impl Fn(u64, u64) -> u64) -> Result<u64, IoError> {
        let lower = async {
            if self.state.borrow().table.get(number as usize).is_none_or(|block| *block == 0) {
                return Ok(0);
            }
            self.load(number, false).await?;
            let mut kept = self.own_clusters();
            if !mutant::is(Mutant::DiscardedClusterLowered) {
                kept.extend(self.dropping.borrow().keys());
            }
            let mut lowered = 0;
            for cluster in number * self.per_block()..(number + 1) * self.per_block() {
                let count = self.get(cluster);
                let is_other = count > 0 && !kept.contains(&cluster);
                let wanted = if is_other { wanted(cluster, count) } else { count };
                lowered += u64::from(wanted < count);
                match wanted {
                    wanted if wanted >= count => {}
                    0 => {
                        self.file.forget_metadata(cluster * self.cluster_size, 1);
                        self.set(cluster, 1);
                        self.drop_reference(cluster).await?;
                    }
                    wanted => self.set(cluster, wanted),
                }
            }
            Ok(lowered)
        };
        self.changing.during(1, lower).await
    }

    fn get(&self, cluster: u64) -> u64 {
        let state = self.state.borrow();
        let block = state.blocks.get(&(cluster / self.per_block()));
        block.map_or(0, |block| self.width.get(&block.bytes, (cluster % self.per_block()) as usize))
    }

    /// Sets a refcount of a block in memory.
    fn set(&self, cluster: u64, count: u64) {
        let (number, index) = (cluster / self.per_block(), (cluster % self.per_block()) as usize);
        if let Some(block) = self.state.borrow_mut().blocks.get_mut(&number) {
            self.width.set(&mut block.bytes, index, count);
            block.note_change(self.width.bytes_of(index));
        }
    }

    /// Brings a block into memory. With `is_needed` it is made if there is none.
    async fn load(&self, number: u64, is_needed: bool) -> IoResult {
        if self.state.borrow().blocks.contains_key(&number) {
            return Ok(());
        }
        self.shrink();
        let offset = self.state.borrow().table.get(number as usize).copied();
        let bytes = match offset {
            Some(0) | None if !is_needed => return Err(IoError::Corrupt),
            Some(0) => return self.add_block(number).await,
            None => return self.grow_table(number).await,
            Some(offset) => self.file.reader.read_padded(offset, self.cluster_size).await?,
        };
        self.state.borrow_mut().blocks.insert(number, Block::new(bytes));
        Ok(())
    }

    /// Forgets blocks that need not be written, if there are many.
    fn shrink(&self) {
        let most = (CACHE_BYTES / self.cluster_size).max(4) as usize;
        let blocks = &mut self.state.borrow_mut().blocks;
        if blocks.len() >= most {
            blocks.retain(|_, block| block.changed.is_some() || block.is_being_written);
        }
    }

    /// Adds a block to the table. It is the first cluster that it counts.
    async fn add_block(&self, number: u64) -> IoResult {
        let cluster = number * self.per_block();
        let offset = cluster * self.cluster_size;
        if self.file.is_metadata(cluster) {
            return Err(IoError::Corrupt);
        }
        self.file.make_room(offset + self.cluster_size)?;
        let bytes = block_of(&[1], self.width, self.cluster_size as usize);
        self.file.write(offset, &bytes, Flags::NONE).await?;
        if !mutant::is(Mutant::RefcountTableBeforeBlock) {
            self.file.flush().await?;
        }
        let in_block = self.block_size / 8;
        let first = number / in_block * in_block;
        let (at, mut part) = {
            let state = self.state.borrow();
            let part = state.table[first as usize..(first + in_block) as usize].to_vec();
            (state.table_offset + first * 8, part)
        };
        part[(number - first) as usize] = offset;
        self.least_end.set(self.least_end.get().max(offset + self.cluster_size));
        self.file.write(at, &be_bytes(part), Flags::FUA).await?;
        self.file.note_metadata(offset, self.cluster_size);
        let mut state = self.state.borrow_mut();
        state.table[number as usize] = offset;
        state.high = state.high.max(cluster + 1);
        state.blocks.insert(number, Block::new(bytes));
        Ok(())
    }

    /// Moves the refcount table to a larger one behind all clusters that it counts, so that there
    /// is a place for block `number`.
    async fn grow_table(&self, number: u64) -> IoResult {
        let (old_offset, mut table) = {
            let state = self.state.borrow();
            (state.table_offset, state.table.clone())
        };
        let old_entries = table.len() as u64;
        let first = old_entries * self.per_block();
        let most = MAX_REFCOUNT_TABLE_BYTES / self.cluster_size;
        let per_cluster = self.cluster_size / 8;
        let least = (number + 1).max(old_entries * 3 / 2);
        // The new blocks count the new table and themselves.
        let (mut clusters, mut blocks) = (0, 0);
        loop {
            let entries = least.max(old_entries + blocks);
            let needed =
                (entries.div_ceil(per_cluster), (clusters + blocks).div_ceil(self.per_block()).max(1));
            if needed == (clusters, blocks) {
                break;
            }
            (clusters, blocks) = needed;
        }
        if clusters > most {
            return Err(IoError::NoSpace);
        }
        let used = clusters + blocks;
        let offset = first * self.cluster_size;
        if (first..first + used).any(|cluster| self.file.is_metadata(cluster)) {
            return Err(IoError::Corrupt);
        }
        self.file.make_room(offset + used * self.cluster_size)?;
        for block in 0..blocks {
            let at = offset + (clusters + block) * self.cluster_size;
            let counted = (used - block * self.per_block()).min(self.per_block());
            let bytes = block_of(&vec![1; counted as usize], self.width, self.cluster_size as usize);
            self.file.write(at, &bytes, Flags::NONE).await?;
            table.push(at);
        }
        table.resize((clusters * per_cluster) as usize, 0);
        self.file.write(offset, &be_bytes(table.iter().copied()), Flags::NONE).await?;
        if !mutant::is(Mutant::HeaderBeforeRefcountTable) {
            self.file.flush().await?;
        }
        let mut fields = offset.to_be_bytes().to_vec();
        fields.extend((clusters as u32).to_be_bytes());
        // A write that failed may have happened. Then blocks would be added to the wrong table.
        self.write_header(at::REFCOUNT_TABLE, &fields).await.inspect_err(|_| self.is_lost.set(true))?;
        self.file.note_metadata(offset, used * self.cluster_size);
        let old_bytes = old_entries * 8;
        self.file.forget_metadata(old_offset, old_bytes);
        {
            let mut state = self.state.borrow_mut();
            (state.table_offset, state.table) = (offset, table);
            state.high = state.high.max(first + used);
        }
        for cluster in old_offset / self.cluster_size..(old_offset + old_bytes) / self.cluster_size {
            // A block that cannot be read leaves the old table as a leak.
            if Box::pin(self.drop_reference(cluster)).await.is_err() {
                break;
            }
        }
        Box::pin(self.load(number, true)).await
    }

    /// Replaces bytes of the header.
    ///
    /// # Errors
    /// The device's.
    pub(super) async fn write_header(&self, at: usize, bytes: &[u8]) -> IoResult {
        self.with_header(self.file.patch(at as u64, bytes, Flags::FUA)).await
    }

    /// Runs a change of the header: one at a time.
    pub(super) async fn with_header<R>(&self, change: impl Future<Output = R>) -> R {
        self.header.during(1, change).await
    }

    /// Writes the blocks that have changed. A caller makes them durable. One call at a time.
    ///
    /// # Errors
    /// The device's; the blocks then still count as changed.
    pub(super) async fn write(&self) -> IoResult {
        let changed: Vec<u64> = {
            let state = self.state.borrow();
            state
                .blocks
                .iter()
                .filter(|(_, block)| block.changed.is_some())
                .map(|(number, _)| *number)
                .collect()
        };
        for number in changed {
            let Some((offset, range, bytes)) = self.begin_write(number) else { continue };
            let result = self.file.write(offset, &bytes, Flags::NONE).await;
            let mut state = self.state.borrow_mut();
            if let Some(block) = state.blocks.get_mut(&number) {
                block.is_being_written = false;
                if result.is_err() {
                    block.note_change(range);
                }
            }
            result?;
        }
        Ok(())
    }

    /// Takes the changed bytes of a block, in whole blocks of the device, with their offset.
    fn begin_write(&self, number: u64) -> Option<(u64, Range<usize>, Vec<u8>)> {
        let mut state = self.state.borrow_mut();
        let offset = *state.table.get(number as usize)?;
        let block = state.blocks.get_mut(&number)?;
        let changed = block.changed.take()?;
        block.is_being_written = true;
        let unit = self.block_size as usize;
        let range = changed.start / unit * unit..changed.end.next_multiple_of(unit);
        Some((offset + range.start as u64, range.clone(), block.bytes[range].to_vec()))
    }

    /// The end of the last used cluster in bytes.
    ///
    /// # Errors
    /// The device's; [`IoError::Medium`] when it is not known.
    pub(super) async fn end(&self) -> Result<u64, IoError> {
        if self.is_lost.get() {
            return Err(IoError::Medium);
        }
        let end = self.changing.during(1, self.find_end()).await?;
        Ok(end.max(self.least_end.get()))
    }

    async fn find_end(&self) -> Result<u64, IoError> {
        let high = self.state.borrow().high;
        for number in (0..high.div_ceil(self.per_block())).rev() {
            match self.load(number, false).await {
                Err(IoError::Corrupt) => continue, // no block: all are free
                result => result?,
            }
            let first = number * self.per_block();
            let used = (first..first + self.per_block()).rev().find(|cluster| self.get(*cluster) > 0);
            if let Some(cluster) = used {
                return Ok((cluster + 1) * self.cluster_size);
            }
        }
        Ok(self.cluster_size)
    }
}

/// Each cluster as often as its number says.
pub(super) fn repeated(clusters: &[(u64, u64)]) -> Vec<u64> {
    clusters.iter().flat_map(|(cluster, count)| (0..*count).map(|_| *cluster)).collect()
}

impl Block {
    fn new(bytes: Vec<u8>) -> Block {
        Block { bytes, changed: None, is_being_written: false }
    }

    fn note_change(&mut self, bytes: Range<usize>) {
        self.changed = Some(match self.changed.take() {
            Some(before) => before.start.min(bytes.start)..before.end.max(bytes.end),
            None => bytes,
        });
    }
}
