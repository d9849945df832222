//! From superblocks to a running array.

use super::Array;
use super::crossing::{Crossing, Walk};
use super::members::{Attached, Members, Shift};
use super::shared::{Clock, Common, OLD_STRIPES, Shared};
use crate::config::ROW_BYTES;
use crate::log::{self, Nonce, RecoverError, Recovery, RecoveryMember};
use crate::metadata::region_map::{self, RegionMap};
use crate::metadata::{
    self, Assembly, BadBlocks, BadBlocksError, BadRange, Found, Label, Layout, LoadError, MemberFailures,
    MemberSet, MemberState, Reason, Store, Table, Target,
};
use crate::mutant::{self, Mutant};
use crate::{ArrayConfig, ConfigError, Consistency};
use block::{Channel, Device, DeviceError, IoError, Limits, SharedLimits};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

/// What an array is started from: the outcome of assembling.
pub struct Start {
    /// The table to commit first ([`Assembly::opening_table`]). Members that are not given below are taken out.
    pub table: Table,
    /// A member for each slot, those that the table calls live or rebuilding.
    pub members: Vec<Option<StartMember>>,
    /// Nanoseconds since 1970.
    pub wall_ns: u64,
    /// Take randomness from the core, not from the system: the simulator's runs can be repeated.
    pub is_simulated: bool,
    /// Parity must be made again everywhere: a forced start.
    pub needs_sync: bool,
    /// What is missing is computed even where a crash has left parity open: a forced start.
    pub trusts_parity: bool,
}

impl Start {
    /// From what was assembled; `device` finds the device that was found. On a core.
    pub fn new(
        assembly: Assembly,
        wall_ns: u64,
        is_simulated: bool,
        mut device: impl FnMut(&Found) -> Option<Arc<dyn Device>>,
    ) -> Start {
        let table = assembly.opening_table(reactor::current().random_u64(), wall_ns);
        let member = |found: Option<Found>| {
            let found = found?;
            let Label::Member(superblock) = &found.label else { return None };
            let layout = superblock.layout;
            Some(StartMember { device: device(&found)?, found, layout })
        };
        let members = assembly.members.into_iter().map(member).collect();
        let (needs_sync, trusts_parity) = (assembly.needs_sync, assembly.is_forced);
        Start { table, members, wall_ns, is_simulated, needs_sync, trusts_parity }
    }
}

/// A member to start with.
pub struct StartMember {
    /// The device.
    pub device: Arc<dyn Device>,
    /// Its superblock as it was found.
    pub found: Found,
    /// Where things lie on it.
    pub layout: Layout,
}

/// Why an array cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The superblock describes no array that this program can serve.
    #[error("array {name}: {error}")]
    Config {
        /// The array.
        name: String,
        /// What is wrong.
        error: ConfigError,
    },
    /// More members are missing than parity stands for.
    #[error("array {name}: group {group} has {present} of its {members} members and needs {needed}")]
    TooFew {
        /// The array.
        name: String,
        /// The group.
        group: usize,
        /// Members that are there.
        present: usize,
        /// Members it has.
        members: usize,
        /// Members it needs.
        needed: usize,
    },
    /// Members fail while regions that were being written have not been made consistent.
    #[error(
        "array {name}: members {slots:?} fail, and it was not stopped cleanly: blocks that were being written may be lost"
    )]
    DirtyDegraded {
        /// The array.
        name: String,
        /// The members.
        slots: Vec<usize>,
    },
    /// A member cannot be opened.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// A member does not take what the array needs.
    #[error("array {name}: member {member}: {what}")]
    Unfit {
        /// The array.
        name: String,
        /// The device.
        member: String,
        /// What it lacks.
        what: String,
    },
    /// Writes may have been in flight whose log entries cannot be read, and which need the members that are missing.
    #[error(
        "array {name}: group {group}: members {slots:?} cannot read all of their logs, {missing} more are missing, and \
         the array was not stopped cleanly: blocks that were being written may be lost (start with force to accept that)"
    )]
    LogUnreadable {
        /// The array.
        name: String,
        /// The group.
        group: usize,
        /// Slots of the members whose logs have unreadable blocks.
        slots: Vec<usize>,
        /// Members of the group that are missing or being rebuilt.
        missing: usize,
    },
    /// No copy of the list of bad blocks is valid.
    #[error(
        "array {name}: no copy of the bad block list on members {slots:?} is valid: blocks without data would read as \
         zeroes (start with force to accept that)"
    )]
    BadBlocksLost {
        /// The array.
        name: String,
        /// Slots of the members that were read.
        slots: Vec<usize>,
    },
    /// There is no room to remember what a crash has left unreadable.
    #[error("array {name}: too many bad blocks to remember those of stripe {stripe}")]
    TooManyBad {
        /// The array.
        name: String,
        /// The stripe.
        stripe: u64,
    },
    /// It is to be read only, and would have to be written first.
    #[error("array {name}: it cannot be served read-only: {what}; readonly=on writes nothing")]
    ReadOnly {
        /// The array.
        name: String,
        /// What would have to be written.
        what: String,
    },
    /// The log cannot be replayed.
    #[error("array {name}: {error}")]
    Recovery {
        /// The array.
        name: String,
        /// Why.
        error: RecoverError,
    },
}

/// A shape of the array: what it has, or changes from.
#[derive(Clone)]
struct Shape {
    config: Arc<ArrayConfig>,
    shift: Shift,
    /// Stripes below this one have another shape by now.
    first_stripe: u64,
    /// By how much the number of a stripe exceeds its step of the walk that fills a slot.
    skipped: u64,
    /// Added to stripes in the list of bad blocks.
    bad_base: u64,
}

impl Shape {
    /// The one that an array has, or changes to.
    fn of(config: &Arc<ArrayConfig>) -> Shape {
        Shape { config: config.clone(), shift: Shift::default(), first_stripe: 0, skipped: 0, bad_base: 0 }
    }

    /// The one that an array changes from.
    fn old(table: &Table) -> Option<Shape> {
        let reshape = table.reshape?;
        let config = reshape.old_config(&table.config);
        let log = u64::from(config.lanes) * u64::from(config.lane_bytes);
        Some(Shape {
            shift: Shift { log, data: reshape.shift },
            first_stripe: reshape.cursor / config.geometry.stripe_bytes(),
            skipped: Walk::of(&config.geometry, &table.config.geometry, reshape.cursor).skipped(),
            config: Arc::new(config),
            bad_base: OLD_STRIPES,
        })
    }
}

/// An array on its way up.
struct Starting {
    config: Arc<ArrayConfig>,
    /// The shape that it changes from.
    old: Option<Shape>,
    crossing: Option<Crossing>,
    table: Table,
    members: Vec<Option<StartMember>>,
    channels: Vec<Option<Rc<dyn Channel>>>,
    store: Store,
    clock: Clock,
    needs_sync: bool,
    trusts_parity: bool,
    /// Whether the table is durable on every member that it trusts.
    is_durable: bool,
    /// Whether the log is replayed and regions that were being written are marked.
    is_recovered: bool,
    /// Whether nothing may be written.
    is_read_only: bool,
    /// Blocks of members' logs that cannot be read: slot, and offset on the member in bytes.
    unreadable_log: Vec<(usize, u64)>,
}

impl Array {
    /// Starts an array: takes absent members out, replays the log. On a core; any core may use the array afterwards.
    ///
    /// # Errors
    /// See [`StartError`]. The members are as they were, but for superblocks and what was replayed.
    pub async fn start(start: Start) -> Result<Arc<Array>, StartError> {
        let mut starting = Starting::open(start)?;
        let limits = starting.limits()?;
        starting.take_out_absent().await?;
        let (regions, bad) = starting.recover().await?;
        starting.finish(limits, regions, bad).await
    }

    /// Starts an array that is only read: nothing is written to any member, now or later. On a core.
    ///
    /// Nothing of this start is remembered, and nobody is kept from serving the array for writing: the caller sees to
    /// that.
    ///
    /// # Errors
    /// See [`StartError`]; [`StartError::ReadOnly`] when something would have to be recovered first.
    pub async fn start_read_only(start: Start) -> Result<Arc<Array>, StartError> {
        let mut starting = Starting::open(start)?;
        starting.is_read_only = true;
        let limits = starting.limits()?;
        let (regions, bad) = starting.look().await?;
        Ok(starting.into_array(limits, regions, bad))
    }
}

impl Starting {
    fn open(start: Start) -> Result<Starting, StartError> {
        let Start { table, members, wall_ns, is_simulated, needs_sync, trusts_parity } = start;
        let config = Arc::new(table.config.clone());
        let refuse = |error| StartError::Config { name: config.name.clone(), error };
        config.check().map_err(refuse)?;
        table.reshape.map_or(Ok(()), |reshape| reshape.check(&config)).map_err(refuse)?;
        let crossing = table.reshape.map(|reshape| Crossing::new(&table, reshape));
        let store = Store::new(config.geometry.members());
        let mut channels = Vec::new();
        for (slot, member) in members.iter().enumerate() {
            channels.push(match member {
                Some(member) => {
                    store.note(slot, &member.found);
                    Some(member.device.open_channel()?)
                }
                None => None,
            });
        }
        let clock = Clock { wall_ns, core_ns: reactor::current().now_ns(), is_simulated };
        Ok(Starting {
            config,
            old: Shape::old(&table),
            crossing,
            table,
            members,
            channels,
            store,
            clock,
            needs_sync,
            trusts_parity,
            is_durable: false,
            is_recovered: false,
            is_read_only: false,
            unreadable_log: Vec::new(),
        })
    }

    fn limits(&self) -> Result<Limits, StartError> {
        let geometry = &self.config.geometry;
        let is_plain = geometry.parity == 0;
        let mut limits = Limits {
            block_size: self.config.block_size,
            optimal_io_size: u32::try_from(geometry.stripe_bytes()).unwrap_or(0),
            discard_alignment: u32::try_from(geometry.stripe_bytes()).unwrap_or(self.config.block_size),
            read_only: self.is_read_only,
            // Until everything is moved it is as large as it was.
            ..Limits::new(self.old.as_ref().map_or(geometry, |old| &old.config.geometry).capacity())
        };
        let logs = if self.old.is_some() { 2 } else { 1 };
        let lanes = self.config.lanes.saturating_mul(logs);
        let laid_out = ArrayConfig { lanes, ..ArrayConfig::clone(&self.config) };
        for member in self.members.iter().flatten() {
            let theirs = member.device.limits();
            let unfit = |what: String| StartError::Unfit {
                name: self.config.name.clone(),
                member: member.device.name().to_owned(),
                what,
            };
            if theirs.capacity < member.layout.member_bytes {
                let needed = member.layout.member_bytes;
                return Err(unfit(format!("{} bytes, {needed} were in use", theirs.capacity)));
            }
            if let Err(error) = member.layout.check(&laid_out) {
                return Err(unfit(error.to_string()));
            }
            if theirs.read_only && !self.is_read_only {
                return Err(unfit("it is read-only".into()));
            }
            if theirs.block_size > self.config.block_size {
                let needed = self.config.block_size;
                return Err(unfit(format!("blocks of {} bytes, the array has {needed}", theirs.block_size)));
            }
            if theirs.max_transfer < geometry.strip_bytes {
                let strip = geometry.strip_bytes;
                return Err(unfit(format!(
                    "transfers of {} bytes at most, a strip has {strip}",
                    theirs.max_transfer
                )));
            }
            limits.memory_alignment = limits.memory_alignment.max(theirs.memory_alignment);
            limits.max_segments = limits.max_segments.min(theirs.max_segments);
            limits.physical_block_size = limits.physical_block_size.max(theirs.physical_block_size);
            limits.rotational |= theirs.rotational;
            limits.volatile_cache |= is_plain && theirs.volatile_cache;
            limits.native_fua &= !is_plain || theirs.native_fua;
            if is_plain {
                limits.max_discard = limits.max_discard.min(theirs.max_discard);
                limits.max_write_zeroes = limits.max_write_zeroes.min(theirs.max_write_zeroes);
            }
        }
        Ok(limits)
    }

    /// Members that take metadata.
    fn targets(&self) -> Vec<Target> {
        let target = |(slot, member): (usize, &Option<StartMember>)| {
            let (member, channel) = (member.as_ref()?, self.channels[slot].clone()?);
            self.table.members[slot].is_in().then_some(Target { slot, channel, layout: member.layout })
        };
        self.members.iter().enumerate().filter_map(target).collect()
    }

    fn live_targets(&self) -> Vec<Target> {
        self.targets().into_iter().filter(|target| self.table.members[target.slot].is_live()).collect()
    }

    /// Commits that absent members are out; also those that fail meanwhile.
    async fn take_out_absent(&mut self) -> Result<(), StartError> {
        let is_absent = |slot: &usize| self.members[*slot].is_none() && self.table.members[*slot].is_in();
        let absent: Vec<usize> = (0..self.members.len()).filter(is_absent).collect();
        self.take_out(&absent, Reason::Absent);
        self.check_redundancy()?;
        self.commit(|_| ()).await
    }

    fn take_out(&mut self, slots: &[usize], reason: Reason) {
        for slot in slots {
            self.table.take_out(*slot, reason);
            self.channels[*slot] = None;
        }
        if !slots.is_empty() {
            self.table.begin_unserved_epoch(reactor::current().random_u64());
        }
    }

    fn check_redundancy(&self) -> Result<(), StartError> {
        for MemberSet { group, slots, needed } in self.table.sets() {
            let members = slots.len();
            let present = slots.filter(|slot| self.table.members[*slot].is_live()).count();
            if present < needed {
                let name = self.config.name.clone();
                return Err(StartError::TooFew { name, group, present, members, needed });
            }
        }
        Ok(())
    }

    /// Takes members out that have failed, and says so to the others.
    async fn fail(&mut self, failures: Vec<(usize, IoError)>) -> Result<(), StartError> {
        for (slot, error) in &failures {
            tracing::error!(array = self.config.name, slot, %error, "a member fails while the array starts");
        }
        self.begin_change();
        let slots: Vec<usize> = failures.into_iter().map(|(slot, _)| slot).collect();
        self.take_out(&slots, Reason::ReadError);
        self.check_redundancy()?;
        let is_unlogged = self.config.consistency == Consistency::Bitmap && !self.table.is_logging;
        let is_dirty = is_unlogged && !self.table.is_clean && !self.is_recovered;
        if is_dirty && self.config.geometry.data > 1 && !self.trusts_parity {
            return Err(StartError::DirtyDegraded { name: self.config.name.clone(), slots });
        }
        self.commit(|_| ()).await
    }

    fn begin_change(&mut self) {
        let now = self.clock.wall_ns;
        if std::mem::replace(&mut self.is_durable, false) {
            self.table = self.table.next(now);
        }
    }

    async fn commit(&mut self, change: impl Fn(&mut Table)) -> Result<(), StartError> {
        self.begin_change();
        loop {
            change(&mut self.table);
            // Until regions that were being written are marked, what the table said about them stands.
            if self.is_recovered {
                self.table.is_logging =
                    self.config.consistency == Consistency::Ppl || self.table.is_degraded();
            }
            let targets = self.targets();
            let results = self.store.commit(&targets, &self.table).await;
            let failed: Vec<usize> =
                results.iter().filter(|(_, result)| result.is_err()).map(|(slot, _)| *slot).collect();
            if failed.is_empty() {
                self.is_durable = true;
                return Ok(());
            }
            self.table = self.table.retry(self.clock.wall_ns);
            self.take_out(&failed, Reason::WriteError);
            self.check_redundancy()?;
        }
    }

    /// Reads region map and bad blocks, and replays the log.
    async fn recover(&mut self) -> Result<(RegionMap, BadBlocks), StartError> {
        let was_logging = self.table.is_logging;
        let regions = loop {
            match RegionMap::load(&self.config, self.table.initial_region, &self.live_targets()).await {
                Ok(regions) => break regions,
                Err(MemberFailures(failures)) => self.fail(failures).await?,
            }
        };
        let bad = loop {
            match BadBlocks::load(self.config.uuid, &self.live_targets(), self.trusts_parity).await {
                Ok(bad) => break bad,
                Err(LoadError::Members(MemberFailures(failures))) => self.fail(failures).await?,
                Err(LoadError::Lost(slots)) => return Err(self.bad_blocks_lost(slots)),
            }
        };
        if was_logging && !self.table.is_clean {
            self.replay(&regions, &bad).await?;
        }
        while let Err(MemberFailures(failures)) =
            regions.change_all(&self.targets(), |_, bits| self.after_crash(bits)).await
        {
            self.fail(failures).await?;
        }
        Ok((regions, bad))
    }

    /// What a region's bits are when the array starts: writes that were in flight have ended.
    fn after_crash(&self, bits: u8) -> u8 {
        use region_map::{DIRTY, NEED_SYNC, OPEN, STALE};
        let mut now = bits & !DIRTY;
        if bits & DIRTY != 0 || self.needs_sync {
            now |= NEED_SYNC;
            // A mirror's copies are each as good as the other.
            if self.config.consistency == Consistency::Bitmap && self.config.geometry.data > 1 {
                now |= OPEN;
            }
        }
        if self.trusts_parity {
            now &= !OPEN;
        }
        // Which copy of what was in flight counts is decided without those that are missing.
        if now & NEED_SYNC != 0 && self.table.is_degraded() {
            now |= STALE;
        }
        now
    }

    /// Sets bits of all regions for which `is_chosen` holds, durably.
    async fn mark(
        &mut self,
        regions: &RegionMap,
        bits: u8,
        is_chosen: impl Fn(u64, u8) -> bool,
    ) -> Result<(), StartError> {
        while let Err(MemberFailures(failures)) = regions.set_where(bits, &self.targets(), &is_chosen).await {
            self.fail(failures).await?;
        }
        Ok(())
    }

    async fn replay(&mut self, regions: &RegionMap, bad: &BadBlocks) -> Result<(), StartError> {
        for shape in std::iter::once(Shape::of(&self.config)).chain(self.old.clone()) {
            self.replay_log(&shape, regions, bad).await?;
        }
        Ok(())
    }

    fn bad_blocks_lost(&self, slots: Vec<usize>) -> StartError {
        StartError::BadBlocksLost { name: self.config.name.clone(), slots }
    }

    /// What unreadable blocks of the log mean for the array, by the rules of [`crate::log::recover()`]: parity is made again
    /// everywhere, and until then replaces no data where a hidden write may have left it open.
    async fn account_for_unreadable_log(
        &mut self,
        shape: &Shape,
        regions: &RegionMap,
        report: &log::Report,
    ) -> Result<(), StartError> {
        for unit in &report.unreadable {
            let member = self.members[unit.slot].as_ref().expect("its log was read");
            let log_offset = shape.shift.apply(member.layout).log_offset;
            let lane_at = log_offset + u64::from(unit.lane) * u64::from(shape.config.lane_bytes);
            tracing::warn!(
                array = self.config.name,
                slot = unit.slot,
                offset = lane_at + u64::from(unit.position),
                "a block of the member's log cannot be read: it is taken for empty and rewritten"
            );
            self.unreadable_log.push((unit.slot, lane_at + u64::from(unit.position)));
        }
        if report.suspects.is_empty() {
            return Ok(());
        }
        let geometry = shape.config.geometry;
        let mut may_hide_all = false;
        for group in 0..geometry.groups {
            let slots = group * geometry.group_members()..(group + 1) * geometry.group_members();
            let missing = slots.clone().filter(|slot| !self.table.members[*slot].is_live()).count();
            let suspects: Vec<usize> =
                report.suspects.iter().copied().filter(|slot| slots.contains(slot)).collect();
            if missing > 0 && !suspects.is_empty() && missing + suspects.len() > geometry.parity {
                if !self.trusts_parity {
                    let name = self.config.name.clone();
                    return Err(StartError::LogUnreadable { name, group, slots: suspects, missing });
                }
                tracing::error!(
                    array = self.config.name,
                    group,
                    "forced: log entries of members {suspects:?} cannot be read: blocks that were being written may be \
                     wrong"
                );
            }
            may_hide_all |= missing == 0 && suspects.len() >= geometry.parity;
        }
        tracing::warn!(
            array = self.config.name,
            "members {:?} cannot read all of their logs: parity is computed again everywhere",
            report.suspects
        );
        let open = if may_hide_all && !self.trusts_parity { region_map::OPEN } else { 0 };
        let stale = if self.table.is_degraded() { region_map::STALE } else { 0 };
        let bits = region_map::NEED_SYNC | open | stale;
        self.mark(regions, bits, |_, bits| bits & region_map::WRITTEN != 0).await
    }

    /// Replays the log of a shape.
    async fn replay_log(
        &mut self,
        shape: &Shape,
        regions: &RegionMap,
        bad: &BadBlocks,
    ) -> Result<(), StartError> {
        let geometry = shape.config.geometry;
        let mut tries = 0;
        let mut noted: Vec<log::BadRange> = Vec::new();
        loop {
            tries += 1;
            let member = |(slot, member): (usize, &Option<StartMember>)| {
                let (member, channel) = (member.as_ref()?, self.channels[slot].clone()?);
                let Layout { log_offset, data_offset, .. } = shape.shift.apply(member.layout);
                self.table.members[slot].is_in().then_some(RecoveryMember {
                    channel,
                    log_offset,
                    data_offset,
                })
            };
            let members = self.members[..geometry.members()].iter().enumerate();
            let members: Vec<Option<RecoveryMember>> = members.map(member).collect();
            let table = &self.table;
            let is_live = |stripe: u64, slot: usize| match table.members[slot].state {
                MemberState::Live => true,
                // Stripes below `first_stripe` are not asked about.
                MemberState::Rebuilding { cursor } => {
                    geometry.member_offset(stripe.saturating_sub(shape.skipped)) < cursor
                }
                MemberState::Missing { .. } => false,
            };
            let recovery = Recovery {
                config: &shape.config,
                nonce: Nonce(table.nonce),
                members: &members,
                is_live: &is_live,
                first_stripe: shape.first_stripe,
                noted: &noted,
            };
            match log::recover(&recovery).await {
                Ok(report) => {
                    tracing::info!(
                        array = self.config.name,
                        replayed = report.replayed,
                        bad = report.bad.len(),
                        "the log was replayed"
                    );
                    self.account_for_unreadable_log(shape, regions, &report).await?;
                    self.mark_replayed(shape, regions, &report.stripes).await?;
                    return Ok(());
                }
                // Blocks are noted before replay writes their rows: power may go in between.
                Err(RecoverError::NotNoted { ranges }) => {
                    tries = 0;
                    for range in ranges {
                        let log::BadRange { stripe, strip, offset, len } = range;
                        let stripe = shape.bad_base + stripe;
                        self.note_bad(bad, BadRange { stripe, strips: 1 << strip, offset, len }).await?;
                        noted.push(range);
                    }
                }
                // A block has become unreadable since the log was scanned: another scan finds it.
                Err(RecoverError::Member { error: IoError::Medium | IoError::Corrupt, .. })
                    if tries < MOST_SCANS => {}
                Err(RecoverError::Member { slot, error }) => self.fail(vec![(slot, error)]).await?,
                Err(error) => {
                    return Err(StartError::Recovery { name: self.config.name.clone(), error });
                }
            }
        }
    }

    /// A member that is out has missed what was replayed, and what was written shortly before it was lost.
    async fn mark_replayed(
        &mut self,
        shape: &Shape,
        regions: &RegionMap,
        stripes: &[u64],
    ) -> Result<(), StartError> {
        if !self.table.is_degraded() || mutant::is(Mutant::ReplayedNotStale) {
            return Ok(());
        }
        let position = |stripe: &u64| shape.config.geometry.member_offset(*stripe) + shape.shift.data;
        let region = |stripe: &u64| self.config.region_at(position(stripe));
        let written: BTreeSet<u64> = stripes.iter().map(region).collect();
        self.mark(regions, region_map::STALE, |region, _| written.contains(&region)).await
    }

    async fn note_bad(&mut self, bad: &BadBlocks, range: BadRange) -> Result<(), StartError> {
        loop {
            match bad.add(range, &self.targets()).await {
                Ok(()) => return Ok(()),
                Err(BadBlocksError::Members(MemberFailures(failures))) => self.fail(failures).await?,
                Err(BadBlocksError::Full(_)) => {
                    let name = self.config.name.clone();
                    return Err(StartError::TooManyBad { name, stripe: range.stripe });
                }
            }
        }
    }

    /// Reads region map and bad blocks of an array that is only read, if it can be served as it is.
    async fn look(&mut self) -> Result<(RegionMap, BadBlocks), StartError> {
        let refuse = |what: String| Err(StartError::ReadOnly { name: self.config.name.clone(), what });
        if !self.table.is_clean {
            return refuse(
                "it was not stopped in good order, or is served now: it may have to be recovered".into(),
            );
        }
        if self.needs_sync {
            return refuse("it was forced, so its parity has to be made again".into());
        }
        if self.table.reshape.is_some() {
            return refuse("it is changing its shape".into());
        }
        // What is being filled does not hold everything: it is left alone, as are those that are not here.
        let is_out = |slot: &usize| self.members[*slot].is_none() || !self.table.members[*slot].is_live();
        let out: Vec<usize> = (0..self.members.len()).filter(is_out).collect();
        self.leave_out(&out)?;
        let regions = loop {
            let (config, initial, live) = (&self.config, self.table.initial_region, self.live_targets());
            let found = match mutant::is(Mutant::ReadOnlyRepairs) {
                false => RegionMap::look(config, initial, &live).await,
                true => RegionMap::load(config, initial, &live).await,
            };
            match found {
                Ok(regions) => break regions,
                Err(MemberFailures(failures)) => self.leave_out(&slots_of(&failures))?,
            }
        };
        let bad = loop {
            match BadBlocks::look(self.config.uuid, &self.live_targets(), self.trusts_parity).await {
                Ok(bad) => break bad,
                Err(LoadError::Members(MemberFailures(failures))) => self.leave_out(&slots_of(&failures))?,
                Err(LoadError::Lost(slots)) => return Err(self.bad_blocks_lost(slots)),
            }
        };
        let unsynced = regions.count(region_map::NEED_SYNC);
        if self.config.geometry.data == 1 && self.config.geometry.parity > 0 && unsynced > 0 {
            let name = self.config.name.clone();
            let what = format!("copies of {unsynced} regions may differ until they are synced");
            return Err(StartError::ReadOnly { name, what });
        }
        Ok((regions, bad))
    }

    /// Goes on without members, and tells nobody.
    fn leave_out(&mut self, slots: &[usize]) -> Result<(), StartError> {
        self.take_out(slots, Reason::Absent);
        slots.iter().for_each(|slot| self.members[*slot] = None);
        self.check_redundancy()
    }

    /// From here on entries of the log are of this assembly.
    async fn finish(
        mut self,
        limits: Limits,
        regions: RegionMap,
        bad: BadBlocks,
    ) -> Result<Arc<Array>, StartError> {
        self.is_recovered = true;
        let nonce = match mutant::is(Mutant::NoNonce) {
            false => self.clock.new_nonce(),
            true => self.table.nonce,
        };
        // Nothing is logged yet, so lanes may change: an array that has changed its shape has all of them again.
        let lanes = self.lanes();
        self.config = Arc::new(ArrayConfig { lanes, ..ArrayConfig::clone(&self.config) });
        let serve = |table: &mut Table| {
            (table.nonce, table.is_clean, table.served_epoch) = (nonce, false, table.epoch);
            table.config.lanes = lanes;
        };
        self.commit(serve).await?;
        // Entries of the log count no more: what could not be read of it may become readable, as zeroes.
        while let Some(failure) = self.rewrite_log().await {
            self.fail(vec![failure]).await?;
            self.commit(serve).await?;
        }
        Ok(self.into_array(limits, regions, bad))
    }

    /// Writes zeroes to the blocks of logs that could not be read; the first member that fails.
    async fn rewrite_log(&mut self) -> Option<(usize, IoError)> {
        while let Some((slot, offset)) = self.unreadable_log.pop() {
            let Some(channel) = self.channels[slot].clone() else { continue };
            if let Err(error) = metadata::write(&*channel, offset, &[0; ROW_BYTES as usize]).await {
                return Some((slot, error));
            }
        }
        None
    }

    /// Lanes that every member's log has room for; while there are two shapes each has half of them.
    fn lanes(&self) -> u16 {
        match self.old {
            Some(_) => self.config.lanes,
            None => self.config.lanes_in(self.members.iter().flatten().map(|member| member.layout)),
        }
    }

    fn into_array(self, limits: Limits, regions: RegionMap, bad: BadBlocks) -> Arc<Array> {
        let Starting { config, old, crossing, table, members, channels, store, clock, .. } = self;
        let mut own = Vec::new();
        let mut filling = Vec::new();
        for (slot, member) in members.into_iter().enumerate() {
            let attached = member.map(|member| Attached { device: member.device, layout: member.layout });
            let state = table.members[slot].state;
            own.push(attached.clone().filter(|_| state == MemberState::Live));
            if let (Some(attached), MemberState::Rebuilding { cursor }) = (attached, state) {
                let rows = cursor / u64::from(config.geometry.strip_bytes);
                // In steps of the walk: as many as there are groups in each row.
                filling.push((slot, attached, rows * config.geometry.groups as u64));
            }
        }
        drop(channels);
        let members = Members::new(config.clone(), own);
        let skipped = old.as_ref().map_or(0, |old| old.skipped);
        filling
            .into_iter()
            .for_each(|(slot, attached, cursor)| members.start_filling(slot, attached, cursor, skipped));
        let limits = SharedLimits::new(limits);
        let name = format!("raid:{}", config.name);
        let common = Arc::new(Common::new(limits, (regions, bad), (store, table), clock, crossing));
        let old = old.map(|old| {
            let members = members.of_shape(old.config.clone(), old.shift);
            Arc::new(Shared::old(old.config, members, common.clone()))
        });
        let shared = Arc::new(Shared::new(config, Arc::new(members), common));
        Arc::new(Array { name, shared, old })
    }
}

/// Most times that a log is scanned before a member of which a block cannot be read has failed.
const MOST_SCANS: usize = 3;

fn slots_of(failures: &[(usize, IoError)]) -> Vec<usize> {
    failures.iter().map(|(slot, _)| *slot).collect()
}
