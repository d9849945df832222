//! The disks after a power loss at some moment of the log, and the content that an array on them
//! must have.

use crate::disk::{BLOCK, Change, Disk, Event, Note, SECTOR};
use crate::story::{fill, start};
use block::{Device, Flags, Op};
use raid::admin::check::check;
use raid::admin::open::{Candidate, Wanted, select};
use raid::admin::verify::{Difference, Observer};
use raid::array::Array;
use raid::jobs::Options;
use raid::metadata::{Label, read_superblock};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// A write that is not durable.
struct Pending {
    number: usize,
    change: Change,
    is_fua: bool,
    is_done: bool,
}

/// The state at one moment of the log.
#[derive(Default)]
pub struct Moment {
    /// The durable content, by disk.
    disks: Vec<Vec<u8>>,
    /// Writes that may be durable, oldest first.
    pending: Vec<Pending>,
    /// Flushes in flight: their disks, and the writes that they make durable.
    flushes: BTreeMap<usize, Vec<usize>>,
    /// The last acknowledged tag, by sector of the array.
    acknowledged: BTreeMap<u64, u64>,
    /// Writes of the array in flight: their tags and sectors.
    open: BTreeMap<u64, (u64, Range<u64>)>,
    /// Whether the array was made.
    pub is_created: bool,
    /// Members that may be lost.
    pub redundancy: usize,
    /// Whether every member is live, and was made so durably.
    pub is_whole: bool,
    /// Whether blocks may be lost; they never get other content.
    is_exposed: bool,
}

/// The effect of a power loss on writes in flight and on the members.
#[derive(Clone, Copy, Debug)]
pub struct Cut {
    /// The writes in flight that survive.
    pub survival: Survival,
    /// A disk that is missing afterwards.
    pub missing: Option<usize>,
    /// Whether the array is started by force.
    pub force: bool,
    /// Seed of random choices.
    pub seed: u64,
    /// Metadata that is damaged afterwards.
    pub damage: Option<Damage>,
}

/// Damage to a block of metadata, the same on each of some disks.
#[derive(Clone, Copy, Debug)]
pub struct Damage {
    /// The block, of 4 KiB.
    pub block: usize,
    /// The disks: a bit for each.
    pub disks: u32,
    /// Whether the block has other content without an error; otherwise it is unreadable.
    pub is_rotten: bool,
    /// Whether it belongs to the log.
    pub is_log: bool,
}

impl Damage {
    /// Whether the damage affects a disk.
    fn is_on(&self, disk: usize) -> bool {
        self.disks >> disk & 1 == 1
    }
}

/// The places of metadata on every disk, in blocks of 4 KiB.
#[derive(Clone, Debug)]
pub struct Places {
    /// All metadata.
    pub blocks: Vec<usize>,
    /// The log.
    pub log: Range<usize>,
}

/// The sectors of writes in flight that survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Survival {
    /// No write.
    None,
    /// Every write.
    All,
    /// The first half of each, and of the short ones every other.
    Half,
    /// Any.
    Any,
}

/// Blocks of the two copies of the superblock at the end.
const SUPERBLOCKS_BEHIND: usize = 6;

impl Cut {
    /// A power loss without another fault.
    pub fn plain(survival: Survival, seed: u64) -> Cut {
        Cut { survival, missing: None, force: false, seed, damage: None }
    }
}

impl Moment {
    /// The moment before any write, for `count` disks of `bytes` bytes.
    pub fn new(count: usize, bytes: usize) -> Moment {
        Moment { disks: vec![vec![0; bytes]; count], ..Moment::default() }
    }

    /// Applies an event. Returns whether more is durable than before: a point for a power loss.
    pub fn advance(&mut self, event: &Event) -> bool {
        match event {
            Event::Write { number, change, is_fua } => {
                let (number, change, is_fua) = (*number, change.clone(), *is_fua);
                self.pending.push(Pending { number, change, is_fua, is_done: false });
                false
            }
            Event::Flush { number, disk } => {
                let is_covered = |write: &&Pending| write.is_done && write.change.disk == *disk;
                let covered = self.pending.iter().filter(is_covered).map(|write| write.number).collect();
                self.flushes.insert(*number, covered);
                false
            }
            Event::Done { number } => self.done(*number),
            Event::Note(note) => {
                self.note(note);
                false
            }
        }
    }

    fn done(&mut self, number: usize) -> bool {
        if let Some(covered) = self.flushes.remove(&number) {
            covered.iter().for_each(|write| self.settle(*write));
            return !covered.is_empty();
        }
        let at = self.pending.iter().position(|write| write.number == number);
        let Some(at) = at else { return false };
        // Completed writes come first, in the order of completion.
        let mut write = self.pending.remove(at);
        write.is_done = true;
        let is_fua = write.is_fua;
        let place = self.pending.iter().take_while(|other| other.is_done).count();
        self.pending.insert(place, write);
        if is_fua {
            self.settle(number);
        }
        is_fua
    }

    /// Makes a write durable, and before it the older completed writes that overlap it.
    fn settle(&mut self, number: usize) {
        let Some(at) = self.pending.iter().position(|write| write.number == number) else { return };
        let write = self.pending.remove(at);
        let is_older = |other: &Pending| other.is_done && other.change.overlaps(&write.change);
        while let Some(older) = self.pending[..at].iter().position(is_older) {
            let change = self.pending.remove(older).change;
            change.apply(&mut self.disks[change.disk], 0..change.sectors());
        }
        let change = write.change;
        change.apply(&mut self.disks[change.disk], 0..change.sectors());
    }

    /// The number of the write that an event completes, if the write has FUA and so becomes
    /// durable.
    pub fn fua_of(&self, event: &Event) -> Option<usize> {
        let Event::Done { number } = event else { return None };
        self.pending.iter().find(|write| write.number == *number && write.is_fua).map(|write| write.number)
    }

    /// Loses a completed write, as a disk that lies does.
    pub fn forget(&mut self, number: usize) {
        self.pending.retain(|write| write.number != number);
    }

    fn note(&mut self, note: &Note) {
        match note {
            Note::Created => self.is_created = true,
            Note::Redundancy(members) => {
                self.is_whole = *members >= self.redundancy;
                self.redundancy = *members;
            }
            Note::Exposed(is_exposed) => self.is_exposed = *is_exposed,
            Note::Begin { write, tag, sectors } => {
                self.open.insert(*write, (*tag, sectors.clone()));
            }
            Note::Acknowledged { write } => {
                let (tag, sectors) = self.open.remove(write).expect("it was begun");
                self.acknowledged.extend(sectors.map(|sector| (sector, tag)));
            }
        }
    }

    /// Number of writes that may or may not be durable.
    pub fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Whether the array has writes in flight: it was not stopped cleanly.
    pub fn is_busy(&self) -> bool {
        !self.open.is_empty()
    }

    /// The disks after a cut.
    pub fn damaged(&self, cut: Cut) -> Vec<Arc<Disk>> {
        let unreadable = cut.damage.filter(|damage| !damage.is_rotten);
        let disk = |(index, bytes)| {
            let disk = Disk::holding(index, bytes);
            Arc::new(match unreadable.filter(|damage| damage.is_on(index)) {
                Some(damage) => disk.with_unreadable(damage.block),
                None => disk,
            })
        };
        let present = |(index, _): &(usize, Vec<u8>)| cut.missing != Some(*index);
        self.images(cut).into_iter().enumerate().filter(present).map(disk).collect()
    }

    /// The places of the metadata. The array must have been created.
    pub fn places(&self) -> Places {
        let image = self.images(Cut::plain(Survival::None, 1)).swap_remove(0);
        let (layout, blocks) = reactor::run_simulated(1, move |_| async move {
            let (blocks, bytes) = (image.len() / BLOCK, image.len() as u64);
            let channel = Disk::holding(0, image).open_channel().expect("a channel");
            let found = read_superblock("disk0", &*channel, bytes).await.expect("a superblock");
            let Label::Member(superblock) = found.label else { panic!("a member") };
            (superblock.layout, blocks)
        });
        let block = |offset: u64| offset as usize / BLOCK;
        let front = 1..block(layout.reserve_offset);
        Places {
            blocks: front.chain(blocks - SUPERBLOCKS_BEHIND..blocks).collect(),
            log: block(layout.log_offset)..block(layout.log_offset + layout.log_bytes),
        }
    }

    /// The content of the disks after a cut.
    fn images(&self, cut: Cut) -> Vec<Vec<u8>> {
        let mut disks = self.disks.clone();
        let mut state = cut.seed | 1;
        for (i, Pending { change, .. }) in self.pending.iter().enumerate() {
            let sectors = change.sectors();
            let disk = &mut disks[change.disk];
            match cut.survival {
                Survival::None => {}
                Survival::All => change.apply(disk, 0..sectors),
                Survival::Half if sectors == 1 => change.apply(disk, 0..i % 2),
                Survival::Half => change.apply(disk, 0..sectors / 2),
                Survival::Any => {
                    for sector in 0..sectors {
                        state = state.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(0x1405_7B7E_F767_814F);
                        if state >> 63 == 1 {
                            change.apply(disk, sector..sector + 1);
                        }
                    }
                }
            }
        }
        for (index, disk) in disks.iter_mut().enumerate() {
            if let Some(damage) = cut.damage.filter(|damage| damage.is_rotten && damage.is_on(index)) {
                let block = &mut disk[damage.block * BLOCK..][..BLOCK];
                block.iter_mut().step_by(7).for_each(|byte| *byte ^= 0x5a);
            }
        }
        disks
    }

    /// Starts the array on the disks after a cut, and reads all of it. Runs its jobs, reads it
    /// again, stops it, and checks its members. Returns an error if a result is wrong.
    pub fn judge(&self, cut: Cut) -> Result<(), String> {
        let disks: Vec<Arc<dyn Device>> =
            self.damaged(cut).into_iter().map(|disk| disk as Arc<dyn Device>).collect();
        let expected = Expected::new(self, cut);
        reactor::run_simulated(cut.seed, move |_| async move { expected.judge(&disks).await })
    }
}

/// The correct results after a cut.
struct Expected {
    /// The tags that sectors may hold: one, except for sectors with a write in flight.
    tags: BTreeMap<u64, Vec<u64>>,
    is_created: bool,
    is_exposed: bool,
    has_missing: bool,
    force: bool,
    /// Whether parity of a stripe with a write in flight may be wrong: its log entry has other
    /// content.
    may_be_open: bool,
    /// Whether a resync of parity is pending, which waits for missing members: the log was
    /// unreadable.
    may_be_unsynced: bool,
    /// Whether every member must be live: neither power loss nor damaged metadata costs a member.
    must_be_whole: bool,
}

impl Expected {
    fn new(moment: &Moment, cut: Cut) -> Expected {
        let mut tags: BTreeMap<u64, Vec<u64>> =
            moment.acknowledged.iter().map(|(sector, tag)| (*sector, vec![*tag])).collect();
        for (tag, sectors) in moment.open.values() {
            for sector in sectors.clone() {
                tags.entry(sector).or_insert_with(|| vec![0]).push(*tag);
            }
        }
        let Moment { is_created, is_exposed, .. } = *moment;
        Expected {
            tags,
            is_created,
            is_exposed,
            has_missing: cut.missing.is_some(),
            force: cut.force,
            may_be_open: cut.damage.is_some_and(|damage| damage.is_log && damage.is_rotten),
            must_be_whole: cut.missing.is_none() && moment.is_whole,
            may_be_unsynced: cut.damage.is_some_and(|damage| damage.is_log && !damage.is_rotten),
        }
    }

    async fn judge(&self, disks: &[Arc<dyn Device>]) -> Result<(), String> {
        let array = match start(disks, self.force).await {
            Err(_) if !self.is_created => return Ok(()),
            result => result?,
        };
        if self.must_be_whole && array.table().is_degraded() {
            return Err(format!("members have failed: {:?}", array.table().members));
        }
        let first = self.read(&array).await?;
        if self.is_exposed {
            return array.stop().await.map_err(|error| format!("stop: {error}"));
        }
        let jobs = array.keep(Options::default()).map_err(|error| error.to_string())?;
        jobs.idle().await;
        jobs.stop().await;
        if self.read(&array).await? != first {
            return Err("the second read returns other content".into());
        }
        array.stop().await.map_err(|error| format!("stop: {error}"))?;
        drop((jobs, array));
        self.check(disks).await
    }

    /// Reads all sectors that may have been written, and a few more, and checks each.
    async fn read(&self, array: &Arc<Array>) -> Result<Vec<u8>, String> {
        let channel = array.open_channel().map_err(|error| error.to_string())?;
        let end = self.tags.keys().last().map_or(0, |sector| sector + 1).next_multiple_of(8) + 8;
        let mut found = Vec::new();
        for lba in 0..end {
            let buffer = reactor::current().buffers().take(SECTOR).await;
            let at = lba * SECTOR as u64;
            let (buffer, result) = buffer.transfer(&*channel, Op::Read, Flags::NONE, at).await;
            let tags = self.tags.get(&lba).map_or(&[0][..], |tags| tags);
            match result {
                Ok(()) => found.extend_from_slice(buffer.as_slice()),
                // The power failed in the middle of a write, and a member is missing.
                Err(_) if self.is_exposed || self.has_missing && tags.len() > 1 => {
                    found.extend_from_slice(&[0; SECTOR]);
                    continue;
                }
                Err(error) => return Err(format!("sector {lba} cannot be read: {error}")),
            }
            let mut sector = [0; SECTOR];
            let is_right = tags.iter().any(|tag| {
                fill(&mut sector, *tag, lba);
                sector == buffer.as_slice()
            });
            if !is_right {
                let start = u64::from_le_bytes(buffer.as_slice()[..8].try_into().expect("eight bytes"));
                return Err(format!("sector {lba} may hold writes {tags:?} and begins with {start:#x}"));
            }
        }
        Ok(found)
    }

    async fn check(&self, disks: &[Arc<dyn Device>]) -> Result<(), String> {
        let candidate = |disk: &Arc<dyn Device>| Candidate {
            name: disk.name().to_owned(),
            device: Ok(disk.clone()),
            is_named: false,
        };
        let wanted = Wanted { run: true, ..Wanted::default() };
        let selection = select(disks.iter().map(candidate).collect(), &wanted).await;
        let selection = selection.map_err(|error| format!("after a stop: {error}"))?;
        let checked = check(&selection, false, &mut Silent).await.map_err(|error| error.to_string())?;
        let is_readable = self.has_missing || checked.bad_blocks.is_empty();
        let is_in_sync = self.may_be_open || checked.parity.is_clean();
        let waits = self.may_be_unsynced && selection.assembly.table.is_degraded();
        match is_in_sync && (waits || checked.regions_out_of_sync == 0) && is_readable {
            true => Ok(()),
            false => Err(format!("array check: {checked:?}")),
        }
    }
}

/// An observer that ignores everything.
pub struct Silent;

impl Observer for Silent {
    fn progress(&mut self, _: u64, _: u64) {}
    fn difference(&mut self, _: &Difference) {}
}
