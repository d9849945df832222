//! Starts an array from its superblocks.

use super::Array;
use super::members::{Attached, Members, Shift};
use super::reshape_router::{ReshapeRouter, Walk};
use super::shared::{Clock, Common, OLD_STRIPES, Shared};
use crate::config::ROW_BYTES;
use crate::log::{self, Nonce, RecoverError, Recovery, RecoveryMember};
use crate::metadata::intent_bitmap::{self, IntentBitmap};
use crate::metadata::{
    self, Assembly, BadBlocks, BadBlocksError, BadRange, Found, Label, Layout, LoadError, MemberFailures,
    MemberSet, MemberState, Reason, Store, Table, Target,
};
use crate::mutant::{self, Mutant};
use crate::{ArrayConfig, ConfigError, Consistency, Geometry};
use block::{Channel, Device, DeviceError, IoError, Limits, SharedLimits};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

/// The input of a start: the result of assembly.
pub struct Start {
    /// The table to commit first ([`Assembly::opening_table`]). Members without an entry below are
    /// marked failed.
    pub table: Table,
    /// One member for each slot that the table calls live or rebuilding.
    pub members: Vec<Option<StartMember>>,
    /// Members that get the table, but are not used ([`Assembly::disowned`]).
    pub disowned: Vec<StartMember>,
    /// Nanoseconds since 1970.
    pub wall_ns: u64,
    /// Takes randomness from the core, not from the system, so that a simulation can be repeated.
    pub is_simulated: bool,
    /// Parity must be resynced everywhere, after a forced start.
    pub needs_sync: bool,
    /// Reconstructs missing strips even where a crash has left parity inconsistent: a forced start.
    pub trusts_parity: bool,
}

impl Start {
    /// From an assembly; `device` returns the device of a found member. Must run on a core.
    pub fn new(
        assembly: Assembly,
        wall_ns: u64,
        is_simulated: bool,
        mut device: impl FnMut(&Found) -> Option<Arc<dyn Device>>,
    ) -> Start {
        let table = assembly.opening_table(reactor::current().random_u64(), wall_ns);
        let mut member = |found: Option<Found>| {
            let found = found?;
            let Label::Member(superblock) = &found.label else { return None };
            let layout = superblock.layout;
            Some(StartMember { device: device(&found)?, found, layout })
        };
        let members = assembly.members.into_iter().map(&mut member).collect();
        let disowned = assembly.disowned.into_iter().filter_map(|found| member(Some(found))).collect();
        let (needs_sync, trusts_parity) = (assembly.needs_sync, assembly.is_forced);
        Start { table, members, disowned, wall_ns, is_simulated, needs_sync, trusts_parity }
    }
}

/// A member for the start.
pub struct StartMember {
    /// The device.
    pub device: Arc<dyn Device>,
    /// Its superblock as found.
    pub found: Found,
    /// The layout of the member.
    pub layout: Layout,
}

/// Why an array cannot be started.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The superblock describes an array that this version cannot serve.
    #[error("array {name}: {error}")]
    Config {
        /// The array.
        name: String,
        /// The rule that the configuration violates.
        error: ConfigError,
    },
    /// More members are missing than parity can reconstruct.
    #[error("array {name}: group {group} has {present} of its {members} members and needs {needed}")]
    TooFew {
        /// The array.
        name: String,
        /// The group.
        group: usize,
        /// Members that are present.
        present: usize,
        /// Members of the group.
        members: usize,
        /// Members that the group needs.
        needed: usize,
    },
    /// Members fail while dirty regions have not been made consistent.
    #[error(
        "array {name}: members {slots:?} failed, and the array was not stopped cleanly: blocks of writes in flight may \
         be lost"
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
    /// A member does not meet the requirements of the array.
    #[error("array {name}: member {member}: {what}")]
    Unfit {
        /// The array.
        name: String,
        /// The device.
        member: String,
        /// The requirement.
        what: String,
    },
    /// Writes may have been in flight whose log entries are unreadable, and recovery would need the
    /// missing members.
    #[error(
        "array {name}: group {group}: members {slots:?} cannot read all of their logs, and {missing} more are missing: \
         blocks of writes in flight may be lost (force accepts that)"
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
    /// No copy of the bad-block list is valid.
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
    /// The bad-block list has no room for blocks that a crash has left unreadable.
    #[error("array {name}: bad-block list: no room for the lost blocks of stripe {stripe}")]
    TooManyBad {
        /// The array.
        name: String,
        /// The stripe.
        stripe: u64,
    },
    /// A read-only start was requested, but the array needs writes first.
    #[error("array {name}: read-only start refused: {what}; readonly=on writes nothing")]
    ReadOnly {
        /// The array.
        name: String,
        /// The reason.
        what: String,
    },
    /// The log cannot be replayed.
    #[error("array {name}: {error}")]
    Recovery {
        /// The array.
        name: String,
        /// The error of recovery.
        error: RecoverError,
    },
}

/// One geometry of the array: the present one, or the old one of a reshape.
#[derive(Clone)]
struct Shape {
    config: Arc<ArrayConfig>,
    shift: Shift,
    /// Stripes below this one have been moved by a reshape.
    first_stripe: u64,
    /// Difference between the number of a stripe and its step of the walk that fills a slot.
    skipped: u64,
    /// Offset of stripes in the bad-block list.
    bad_base: u64,
}

impl Shape {
    /// The present geometry of an array, or the target of a reshape.
    fn of(config: &Arc<ArrayConfig>) -> Shape {
        Shape { config: config.clone(), shift: Shift::default(), first_stripe: 0, skipped: 0, bad_base: 0 }
    }

    /// The old geometry of a reshape.
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

/// An array during its start.
struct Starting {
    config: Arc<ArrayConfig>,
    /// The old geometry of a reshape.
    old: Option<Shape>,
    router: Option<ReshapeRouter>,
    table: Table,
    members: Vec<Option<StartMember>>,
    disowned: Vec<StartMember>,
    channels: Vec<Option<Rc<dyn Channel>>>,
    store: Store,
    clock: Clock,
    needs_sync: bool,
    trusts_parity: bool,
    /// Whether the table is durable on every member that it trusts.
    is_durable: bool,
    /// Whether the log is replayed and dirty regions are marked for resync.
    is_recovered: bool,
    /// Whether nothing may be written.
    is_read_only: bool,
    /// Unreadable blocks of members' logs: slot, and offset on the member in bytes.
    unreadable_log: Vec<(usize, u64)>,
}

impl Array {
    /// Starts an array: marks absent members as failed, replays the log. Must run on a core; then
    /// any core may use the array.
    ///
    /// # Errors
    /// See [`StartError`]. The members are unchanged except for superblocks and replayed writes.
    pub async fn start(start: Start) -> Result<Arc<Array>, StartError> {
        let mut starting = Starting::open(start)?;
        let limits = starting.limits()?;
        starting.take_out_absent().await?;
        let (regions, bad) = starting.recover().await?;
        starting.finish(limits, regions, bad).await
    }

    /// Starts an array for reading only: no member is ever written. Must run on a core.
    ///
    /// The start leaves no record, and does not exclude another server that writes: the caller must
    /// prevent that.
    ///
    /// # Errors
    /// See [`StartError`]; [`StartError::ReadOnly`] if the array needs recovery first.
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
        let Start { table, members, disowned, wall_ns, is_simulated, needs_sync, trusts_parity } = start;
        let config = Arc::new(table.config.clone());
        let refuse = |error| StartError::Config { name: config.name.clone(), error };
        config.check().map_err(refuse)?;
        table.reshape.map_or(Ok(()), |reshape| reshape.check(&config)).map_err(refuse)?;
        let router = table.reshape.map(|reshape| ReshapeRouter::new(&table, reshape));
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
            router,
            table,
            members,
            disowned,
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
            // Until the end of a reshape the capacity is the old one.
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
                return Err(unfit(format!("capacity {} bytes: {needed} are in use", theirs.capacity)));
            }
            if let Err(error) = member.layout.check(&laid_out) {
                return Err(unfit(error.to_string()));
            }
            if theirs.read_only && !self.is_read_only {
                return Err(unfit("read-only device".into()));
            }
            if theirs.block_size > self.config.block_size {
                let needed = self.config.block_size;
                return Err(unfit(format!("block size {} bytes: the array has {needed}", theirs.block_size)));
            }
            if theirs.max_transfer < geometry.strip_bytes {
                let strip = geometry.strip_bytes;
                return Err(unfit(format!(
                    "largest transfer {} bytes: a strip has {strip}",
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

    /// Members that metadata is written to.
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

    /// Commits that absent members have failed, and also members that fail meanwhile.
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

    /// Marks members as failed and commits that to the others.
    async fn fail(&mut self, failures: Vec<(usize, IoError)>) -> Result<(), StartError> {
        for (slot, error) in &failures {
            tracing::error!(array = self.config.name, slot, %error, "member failed while the array starts");
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
            // Until dirty regions are marked for resync, the table keeps its old value.
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

    /// Reads write-intent bitmap and bad blocks, and replays the log.
    async fn recover(&mut self) -> Result<(IntentBitmap, BadBlocks), StartError> {
        let was_logging = self.table.is_logging;
        let regions = loop {
            match IntentBitmap::load(&self.config, self.table.initial_region, &self.live_targets()).await {
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

    /// The bits of a region at the start: writes in flight have ended.
    fn after_crash(&self, bits: u8) -> u8 {
        use intent_bitmap::{DIRTY, NEED_SYNC, OPEN, STALE};
        let mut now = bits & !DIRTY;
        if bits & DIRTY != 0 || self.needs_sync {
            now |= NEED_SYNC;
            // The copies of a mirror are equally valid.
            if self.config.consistency == Consistency::Bitmap && self.config.geometry.data > 1 {
                now |= OPEN;
            }
        }
        if self.trusts_parity {
            now &= !OPEN;
        }
        // Without the missing members, another copy of a write in flight may become the valid one.
        if now & NEED_SYNC != 0 && self.table.is_degraded() {
            now |= STALE;
        }
        now
    }

    /// Sets bits of all regions for which `is_chosen` holds, durably.
    async fn mark(
        &mut self,
        regions: &IntentBitmap,
        bits: u8,
        is_chosen: impl Fn(u64, u8) -> bool,
    ) -> Result<(), StartError> {
        while let Err(MemberFailures(failures)) = regions.set_where(bits, &self.targets(), &is_chosen).await {
            self.fail(failures).await?;
        }
        Ok(())
    }

    async fn replay(&mut self, regions: &IntentBitmap, bad: &BadBlocks) -> Result<(), StartError> {
        for shape in std::iter::once(Shape::of(&self.config)).chain(self.old.clone()) {
            self.replay_log(&shape, regions, bad).await?;
        }
        Ok(())
    }

    fn bad_blocks_lost(&self, slots: Vec<usize>) -> StartError {
        StartError::BadBlocksLost { name: self.config.name.clone(), slots }
    }

    /// Handles unreadable blocks of the log by the rules of [`crate::log::recover()`]. Parity is
    /// resynced everywhere. Until then it reconstructs no data where a hidden write may have left
    /// it inconsistent.
    async fn account_for_unreadable_log(
        &mut self,
        shape: &Shape,
        regions: &IntentBitmap,
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
                "a block of the member's log is unreadable: it counts as empty and is rewritten"
            );
            self.unreadable_log.push((unit.slot, lane_at + u64::from(unit.position)));
        }
        let geometry = shape.config.geometry;
        let all_suspects = self.without_rebuilds(&geometry, &report.suspects).await?;
        if all_suspects.is_empty() {
            return Ok(());
        }
        let mut may_hide_all = false;
        for group in 0..geometry.groups {
            let slots = group * geometry.group_members()..(group + 1) * geometry.group_members();
            let missing = slots.clone().filter(|slot| !self.table.members[*slot].is_live()).count();
            let suspects: Vec<usize> = all_suspects.range(slots).copied().collect();
            if self.may_lose_writes(&geometry, group, &all_suspects) {
                if !self.trusts_parity {
                    let name = self.config.name.clone();
                    return Err(StartError::LogUnreadable { name, group, slots: suspects, missing });
                }
                tracing::error!(
                    array = self.config.name,
                    group,
                    "log entries of members {suspects:?} are unreadable: blocks of writes in flight may be wrong \
                     (forced start)"
                );
            }
            may_hide_all |= missing == 0 && suspects.len() >= geometry.parity;
        }
        tracing::warn!(
            array = self.config.name,
            "members {all_suspects:?} cannot read all of their logs: parity is resynced everywhere"
        );
        let open = if may_hide_all && !self.trusts_parity { intent_bitmap::OPEN } else { 0 };
        let stale = if self.table.is_degraded() { intent_bitmap::STALE } else { 0 };
        let bits = intent_bitmap::NEED_SYNC | open | stale;
        self.mark(regions, bits, |_, bits| bits & intent_bitmap::WRITTEN != 0).await
    }

    /// Whether blocks of writes in flight may be lost: members of a group are missing, and entries
    /// may be hidden on more suspects than parity can replace.
    fn may_lose_writes(&self, geometry: &Geometry, group: usize, suspects: &BTreeSet<usize>) -> bool {
        let slots = group * geometry.group_members()..(group + 1) * geometry.group_members();
        let missing = slots.clone().filter(|slot| !self.table.members[*slot].is_live()).count();
        let hidden = suspects.range(slots).count();
        missing > 0 && hidden > 0 && missing + hidden > geometry.parity
    }

    /// Returns the suspects without members that are being rebuilt and would keep the array from
    /// starting. The rebuild of such a member starts over: neither its strips nor its log count
    /// then.
    async fn without_rebuilds(
        &mut self,
        geometry: &Geometry,
        suspects: &BTreeSet<usize>,
    ) -> Result<BTreeSet<usize>, StartError> {
        let is_live = |slot: &usize| self.table.members[*slot].is_live();
        let live: BTreeSet<usize> = suspects.iter().copied().filter(is_live).collect();
        let is_in_the_way = |slot: &usize| {
            let group = slot / geometry.group_members();
            self.may_lose_writes(geometry, group, suspects) && !self.may_lose_writes(geometry, group, &live)
        };
        let restarted: BTreeSet<usize> = suspects.difference(&live).copied().filter(is_in_the_way).collect();
        if !restarted.is_empty() {
            tracing::warn!(
                array = self.config.name,
                "members {restarted:?} cannot read all of their logs: their rebuild starts over"
            );
            self.begin_change();
            for slot in &restarted {
                self.table.members[*slot].state = MemberState::Rebuilding { cursor: 0 };
            }
            self.commit(|_| ()).await?;
        }
        Ok(suspects.difference(&restarted).copied().collect())
    }

    /// Replays the log of one geometry.
    async fn replay_log(
        &mut self,
        shape: &Shape,
        regions: &IntentBitmap,
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
                // Recovery does not ask about stripes below `first_stripe`.
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
                        "log replayed"
                    );
                    self.account_for_unreadable_log(shape, regions, &report).await?;
                    self.mark_replayed(shape, regions, &report.stripes).await?;
                    return Ok(());
                }
                // Blocks are noted before replay writes their rows: the power may fail in between.
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
                Err(
                    RecoverError::Member { error: IoError::Medium | IoError::Corrupt, .. }
                    | RecoverError::Log { .. },
                ) if tries < MOST_SCANS => {}
                Err(RecoverError::Member { slot, error } | RecoverError::Log { slot, error }) => {
                    self.fail(vec![(slot, error)]).await?
                }
                Err(error) => {
                    return Err(StartError::Recovery { name: self.config.name.clone(), error });
                }
            }
        }
    }

    /// A failed member has missed the replayed writes, and the writes shortly before its failure.
    async fn mark_replayed(
        &mut self,
        shape: &Shape,
        regions: &IntentBitmap,
        stripes: &[u64],
    ) -> Result<(), StartError> {
        if !self.table.is_degraded() || mutant::is(Mutant::ReplayedNotStale) {
            return Ok(());
        }
        let position = |stripe: &u64| shape.config.geometry.member_offset(*stripe) + shape.shift.data;
        let region = |stripe: &u64| self.config.region_at(position(stripe));
        let written: BTreeSet<u64> = stripes.iter().map(region).collect();
        self.mark(regions, intent_bitmap::STALE, |region, _| written.contains(&region)).await
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

    /// Reads write-intent bitmap and bad blocks for a read-only start, if the array needs no
    /// recovery.
    async fn look(&mut self) -> Result<(IntentBitmap, BadBlocks), StartError> {
        let refuse = |what: String| Err(StartError::ReadOnly { name: self.config.name.clone(), what });
        if !self.table.is_clean {
            return refuse(
                "the array was not stopped cleanly, or is served now: it may need recovery".into(),
            );
        }
        if self.needs_sync {
            return refuse("a forced start needs a resync of parity".into());
        }
        if self.table.reshape.is_some() {
            return refuse("a reshape is in progress".into());
        }
        // A member that is being rebuilt is incomplete: the start ignores it, like absent ones.
        let is_out = |slot: &usize| self.members[*slot].is_none() || !self.table.members[*slot].is_live();
        let out: Vec<usize> = (0..self.members.len()).filter(is_out).collect();
        self.leave_out(&out)?;
        let regions = loop {
            let (config, initial, live) = (&self.config, self.table.initial_region, self.live_targets());
            let found = match mutant::is(Mutant::ReadOnlyRepairs) {
                false => IntentBitmap::look(config, initial, &live).await,
                true => IntentBitmap::load(config, initial, &live).await,
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
        let unsynced = regions.count(intent_bitmap::NEED_SYNC);
        if self.config.geometry.data == 1 && self.config.geometry.parity > 0 && unsynced > 0 {
            let name = self.config.name.clone();
            let what = format!("copies of {unsynced} regions may differ until the resync");
            return Err(StartError::ReadOnly { name, what });
        }
        Ok((regions, bad))
    }

    /// Continues without members, and records that nowhere.
    fn leave_out(&mut self, slots: &[usize]) -> Result<(), StartError> {
        self.take_out(slots, Reason::Absent);
        slots.iter().for_each(|slot| self.members[*slot] = None);
        self.check_redundancy()
    }

    /// Commits the nonce that makes the log's entries belong to this assembly.
    async fn finish(
        mut self,
        limits: Limits,
        regions: IntentBitmap,
        bad: BadBlocks,
    ) -> Result<Arc<Array>, StartError> {
        self.is_recovered = true;
        let nonce = match mutant::is(Mutant::NoNonce) {
            false => self.clock.new_nonce(),
            true => self.table.nonce,
        };
        // Nothing is logged yet, so the number of lanes may change: after a reshape the array has
        // all lanes again.
        let lanes = self.lanes();
        self.config = Arc::new(ArrayConfig { lanes, ..ArrayConfig::clone(&self.config) });
        let serve = |table: &mut Table| {
            (table.nonce, table.is_clean, table.served_epoch) = (nonce, false, table.epoch);
            table.config.lanes = lanes;
        };
        self.commit(serve).await?;
        // Entries of the log are void now, so unreadable blocks of it may become readable as
        // zeroes.
        while let Some(failure) = self.rewrite_log().await {
            self.fail(vec![failure]).await?;
            self.commit(serve).await?;
        }
        self.supersede_disowned().await;
        Ok(self.into_array(limits, regions, bad))
    }

    /// Writes the table, which is committed, to members with one that never was. A failure leaves
    /// their tables for the next start to judge.
    async fn supersede_disowned(&self) {
        for StartMember { device, found, .. } in &self.disowned {
            let written = match device.open_channel() {
                Ok(channel) => metadata::supersede(&*channel, found, &self.table).await,
                Err(_) => Err(IoError::DeviceGone),
            };
            let (array, member, generation) = (&self.config.name, &found.name, self.table.generation);
            match written {
                Ok(()) => tracing::info!(
                    array,
                    member,
                    generation,
                    "table written over one that was never committed"
                ),
                Err(error) => {
                    tracing::warn!(array, member, %error, "table that was never committed stays on a device")
                }
            }
        }
    }

    /// Writes zeroes to unreadable blocks of logs; returns the first member that fails.
    async fn rewrite_log(&mut self) -> Option<(usize, IoError)> {
        while let Some((slot, offset)) = self.unreadable_log.pop() {
            let Some(channel) = self.channels[slot].clone() else { continue };
            if let Err(error) = metadata::write(&*channel, offset, &[0; ROW_BYTES as usize]).await {
                return Some((slot, error));
            }
        }
        None
    }

    /// Lanes that fit in every member's log; during a reshape each geometry has half of them.
    fn lanes(&self) -> u16 {
        match self.old {
            Some(_) => self.config.lanes,
            None => self.config.lanes_in(self.members.iter().flatten().map(|member| member.layout)),
        }
    }

    fn into_array(self, limits: Limits, regions: IntentBitmap, bad: BadBlocks) -> Arc<Array> {
        let Starting { config, old, router, table, members, channels, store, clock, .. } = self;
        let mut own = Vec::new();
        let mut filling = Vec::new();
        for (slot, member) in members.into_iter().enumerate() {
            let attached = member.map(|member| Attached { device: member.device, layout: member.layout });
            let state = table.members[slot].state;
            own.push(attached.clone().filter(|_| state == MemberState::Live));
            if let (Some(attached), MemberState::Rebuilding { cursor }) = (attached, state) {
                let rows = cursor / u64::from(config.geometry.strip_bytes);
                // In steps of the walk: each row has one for each group.
                let cursor = rows * config.geometry.groups as u64;
                filling.push((slot, table.members[slot].uuid, attached, cursor));
            }
        }
        drop(channels);
        let members = Members::new(config.clone(), own);
        let skipped = old.as_ref().map_or(0, |old| old.skipped);
        for (slot, uuid, attached, cursor) in filling {
            members.start_filling(slot, uuid, attached, cursor, skipped);
        }
        let limits = SharedLimits::new(limits);
        let name = format!("raid:{}", config.name);
        let common = Arc::new(Common::new(limits, (regions, bad), (store, table), clock, router));
        let old = old.map(|old| {
            let members = members.of_shape(old.config.clone(), old.shift);
            Arc::new(Shared::old(old.config, members, common.clone()))
        });
        let shared = Arc::new(Shared::new(config, Arc::new(members), common));
        Arc::new(Array { name, shared, old })
    }
}

/// Most scans of a log before a member with a newly unreadable block counts as failed.
const MOST_SCANS: usize = 3;

fn slots_of(failures: &[(usize, IoError)]) -> Vec<usize> {
    failures.iter().map(|(slot, _)| *slot).collect()
}
