//! State that all cores of a running array share.

use super::contradictions::Contradictions;
use super::deadlines::SharedDeadlines;
use super::latency::Samples;
use super::members::Members;
use super::read_errors::ReadErrors;
use super::reshape_router::ReshapeRouter;
use crate::log::Nonce;
use crate::metadata::intent_bitmap::OPEN;
use crate::metadata::{BadBlocks, BadRange, Identities, IntentBitmap, MemberSet, Store, Table};
use crate::stripe::lock_words::LockWords;
use crate::{ArrayConfig, Code, Consistency};
use block::{IoError, IoResult, SharedLimits};
use reactor::CoreRef;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

/// State of one shape of a running array, shared by all cores. An array has two shapes during a
/// reshape.
pub(crate) struct Shared {
    /// Its number in this process.
    pub id: u64,
    /// As the array was when it started: nothing changes but how many stripes it has.
    pub config: Arc<ArrayConfig>,
    pub configs: Configs,
    pub code: Code,
    pub members: Arc<Members>,
    pub common: Arc<Common>,
    /// Of an array that logs nothing while it is healthy: any core writes to its stripes.
    pub lock_words: Option<Arc<LockWords>>,
    /// Bytes of a strip that an entry of the log can cover, by modified strips that have redo data.
    entry_limits: Vec<u32>,
    /// Bytes by which a member's data is shifted, for the write-intent bitmap.
    shift: u64,
    /// Added to stripes in the list of bad blocks.
    bad_base: u64,
}

/// State that all cores of a running array share, whatever shape a stripe has.
pub(crate) struct Common {
    /// The number of its shape, of the new one while there are two.
    pub lead: u64,
    pub limits: Arc<SharedLimits>,
    /// Whether nothing may be written to any member.
    pub is_read_only: bool,
    pub regions: IntentBitmap,
    pub bad: BadBlocks,
    pub store: Store,
    /// The reshape that was under way when the array started.
    router: Option<ReshapeRouter>,
    /// The table as it was committed last.
    committed: Mutex<Table>,
    pub counters: Counters,
    pub read_errors: ReadErrors,
    pub samples: Samples,
    pub deadlines: SharedDeadlines,
    /// A mirror takes its caller's memory as it is; see [`Array::set_snapshot`](super::Array).
    pub is_in_place: AtomicBool,
    is_frozen: AtomicBool,
    /// A commit has begun and not succeeded.
    is_committing: AtomicBool,
    /// The flag of the committed table; see [`Table::is_logging`].
    is_logging: AtomicBool,
    owners: Mutex<Owners>,
    /// Moves with every change of the owners.
    owners_generation: AtomicU64,
    log_identity: Mutex<(Nonce, u64)>,
    clock: Clock,
}

/// The shapes that an array has now.
#[derive(Clone, Copy)]
pub(crate) enum Shapes<'a> {
    /// One, of all its bytes.
    One,
    /// Two: the router of the reshape that is under way has the shape of each byte.
    Two(&'a ReshapeRouter),
}

/// The configuration of an array that grows, newest last. None goes away before the array does, so
/// that they can be borrowed.
pub(crate) struct Configs {
    first: Arc<ArrayConfig>,
    next: OnceLock<Box<Configs>>,
}

impl Configs {
    pub fn new(config: Arc<ArrayConfig>) -> Configs {
        Configs { first: config, next: OnceLock::new() }
    }

    /// Returns the present configuration.
    pub fn newest(&self) -> &Arc<ArrayConfig> {
        let mut newest = self;
        while let Some(next) = newest.next.get() {
            newest = next;
        }
        &newest.first
    }

    /// From now on another one holds. Called by one task at a time.
    pub fn push(&self, config: ArrayConfig) {
        let mut newest = self;
        while let Some(next) = newest.next.get() {
            newest = next;
        }
        let is_new = newest.next.set(Box::new(Configs::new(Arc::new(config)))).is_ok();
        assert!(is_new, "an array grows once at a time");
    }
}

/// The time when the array started, and the source of its randomness.
pub(crate) struct Clock {
    /// Nanoseconds since 1970.
    pub wall_ns: u64,
    /// The starting core's clock at that time; those of other cores are about the same.
    pub core_ns: u64,
    /// Whether randomness is the core's: the simulator's runs can be repeated.
    pub is_simulated: bool,
}

impl Clock {
    /// Random bits that are unknown outside the array. On a core.
    pub fn new_nonce(&self) -> [u8; 16] {
        if !self.is_simulated {
            return Identities::System.bits();
        }
        let (low, high) = (reactor::current().random_u64(), reactor::current().random_u64());
        (u128::from(high) << 64 | u128::from(low)).to_le_bytes()
    }
}

/// A write, from before the write-intent bitmap is asked until it has ended. Dropped before it has
/// changed anything, it never was; dropped later without [`RegionWrite::end`], its region keeps its
/// mark: parity may not fit there.
pub(crate) struct RegionWrite<'a> {
    shared: &'a Shared,
    /// The core of the write.
    core: usize,
    /// The region that must be marked as dirty meanwhile.
    dirty: Option<u64>,
    is_logged: bool,
    has_changed: bool,
}

impl RegionWrite<'_> {
    /// Whether the log stands for parity during this write. Decided once: a member that fails
    /// meanwhile does not change it.
    pub fn is_logged(&self) -> bool {
        self.is_logged
    }

    /// Whether the region must be marked as dirty.
    pub fn is_dirty(&self) -> bool {
        self.dirty.is_some()
    }

    /// From here on members hold some of it, perhaps.
    pub fn change(&mut self) {
        self.has_changed = true;
    }

    /// It is durable everywhere.
    pub fn end(mut self) {
        self.has_changed = false;
    }
}

impl Drop for RegionWrite<'_> {
    fn drop(&mut self) {
        if let (Some(region), false) = (self.dirty, self.has_changed) {
            self.shared.common.regions.end(region, self.core);
        }
    }
}

/// Stripes of a shape that is changed from this one on, in the list of bad blocks.
pub(crate) const OLD_STRIPES: u64 = 1 << 62;

/// Which cores own stripes.
#[derive(Default)]
struct Owners {
    /// The core that commits superblocks, write-intent bitmap and bad blocks.
    committer: Option<CoreRef>,
    cores: Arc<Vec<CoreRef>>,
}

/// Counts of events since an array was assembled.
#[derive(Debug, Default)]
pub struct Counters {
    /// Reads of members that failed.
    pub read_errors: AtomicU64,
    /// Blocks that were computed and written again.
    pub repairs: AtomicU64,
    /// Rows whose strips contradicted each other when they were compared.
    pub contradictions: Contradictions,
    /// Requests that computed data from other strips.
    pub degraded_reads: AtomicU64,
    /// Reads that a member had not answered at the soft deadline.
    pub late_reads: AtomicU64,
    /// Late reads that the other members answered first.
    pub raced_reads: AtomicU64,
    /// Parts of requests that were written together with others of the same stripe.
    pub joined_writes: AtomicU64,
}

impl Common {
    pub fn new(
        limits: Arc<SharedLimits>,
        (regions, bad): (IntentBitmap, BadBlocks),
        (store, table): (Store, Table),
        clock: Clock,
        router: Option<ReshapeRouter>,
    ) -> Common {
        Common {
            lead: next_id(),
            is_read_only: limits.get().read_only,
            limits,
            regions,
            bad,
            store,
            router,
            log_identity: Mutex::new((Nonce(table.nonce), table.epoch)),
            is_logging: AtomicBool::new(table.is_logging),
            committed: Mutex::new(table),
            counters: Counters::default(),
            read_errors: ReadErrors::default(),
            samples: Samples::default(),
            deadlines: SharedDeadlines::default(),
            is_in_place: AtomicBool::new(false),
            is_frozen: AtomicBool::new(false),
            is_committing: AtomicBool::new(false),
            owners: Mutex::default(),
            owners_generation: AtomicU64::new(0),
            clock,
        }
    }

    /// The shapes that the array has now. A reshape ends once, and none begins while the array
    /// runs.
    #[inline]
    pub fn shapes(&self) -> Shapes<'_> {
        match &self.router {
            Some(router) if router.is_on() => Shapes::Two(router),
            _ => Shapes::One,
        }
    }

    /// Nanoseconds since 1970. On a core.
    pub fn wall_ns(&self) -> u64 {
        self.clock.wall_ns.saturating_add(reactor::current().now_ns().saturating_sub(self.clock.core_ns))
    }

    /// Random bits that are unknown outside the array. On a core.
    pub fn new_nonce(&self) -> [u8; 16] {
        self.clock.new_nonce()
    }

    /// The nonce that makes entries of the log valid now, and the array's epoch.
    pub fn log_identity(&self) -> (Nonce, u64) {
        *self.log_identity.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The table as it was committed last.
    pub fn table(&self) -> Table {
        self.committed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Looks at the table that was committed last, without a copy of it.
    pub fn look_at_table<R>(&self, look: impl FnOnce(&Table) -> R) -> R {
        look(&self.committed.lock().unwrap_or_else(PoisonError::into_inner))
    }

    /// A commit begins. Returns whether an earlier one was cut off, by the end of its core.
    pub fn begin_commit(&self) -> bool {
        self.is_committing.swap(true, Ordering::AcqRel)
    }

    /// A table has been committed.
    pub fn set_table(&self, table: Table) {
        self.is_committing.store(false, Ordering::Release);
        *self.log_identity.lock().unwrap_or_else(PoisonError::into_inner) = (Nonce(table.nonce), table.epoch);
        self.is_logging.store(table.is_logging, Ordering::SeqCst);
        *self.committed.lock().unwrap_or_else(PoisonError::into_inner) = table;
    }

    /// Whether writes go through the log, and recovery will look there.
    pub fn is_logging(&self) -> bool {
        self.is_logging.load(Ordering::SeqCst)
    }

    pub fn count_read_error(&self) {
        self.counters.read_errors.fetch_add(1, Ordering::Relaxed);
    }

    pub fn count_repair(&self) {
        self.counters.repairs.fetch_add(1, Ordering::Relaxed);
    }

    #[inline]
    pub fn is_frozen(&self) -> bool {
        self.is_frozen.load(Ordering::Relaxed)
    }

    #[inline]
    pub fn check_frozen(&self) -> IoResult {
        if self.is_frozen() { Err(IoError::Medium) } else { Ok(()) }
    }

    /// The committing core.
    pub fn committer(&self) -> Option<CoreRef> {
        self.lock_owners().committer.clone()
    }

    /// Makes `core` the committing core when there is none, or it has ended. Returns whether it has
    /// become that now.
    pub fn claim_committer(&self, core: &CoreRef) -> bool {
        let mut owners = self.lock_owners();
        if owners.committer.as_ref().is_some_and(|committer| !committer.is_stopped()) {
            return false;
        }
        owners.committer = Some(core.clone());
        if owners.cores.is_empty() {
            owners.cores = Arc::new(vec![core.clone()]);
            self.owners_generation.fetch_add(1, Ordering::Release);
        }
        true
    }

    /// The cores that own stripes.
    pub fn owner_cores(&self) -> Arc<Vec<CoreRef>> {
        self.lock_owners().cores.clone()
    }

    /// Changes who owns stripes. No stripe operation runs meanwhile.
    pub fn set_owner_cores(&self, cores: Vec<CoreRef>) {
        self.lock_owners().cores = Arc::new(cores);
        self.owners_generation.fetch_add(1, Ordering::Release);
    }

    /// Moves whenever [`Common::owner_cores`] changes.
    #[inline]
    pub fn owners_generation(&self) -> u64 {
        self.owners_generation.load(Ordering::Acquire)
    }

    fn lock_owners(&self) -> MutexGuard<'_, Owners> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A number that no other array of this process has.
fn next_id() -> u64 {
    static NEXT_ID: AtomicU64 = AtomicU64::new(1);
    NEXT_ID.fetch_add(1, Ordering::Relaxed)
}

impl Shared {
    /// The shape that the array has, or changes to.
    pub fn new(config: Arc<ArrayConfig>, members: Arc<Members>, common: Arc<Common>) -> Shared {
        Shared::of_shape(common.lead, config, members, common)
    }

    /// The shape that an array changes from.
    pub fn old(config: Arc<ArrayConfig>, members: Members, common: Arc<Common>) -> Shared {
        let (shift, bad_base) = (members.shift().data, OLD_STRIPES);
        let shared = Shared::of_shape(next_id(), config, Arc::new(members), common);
        Shared { shift, bad_base, ..shared }
    }

    fn of_shape(id: u64, config: Arc<ArrayConfig>, members: Arc<Members>, common: Arc<Common>) -> Shared {
        let geometry = &config.geometry;
        let limit =
            |strips| crate::log::max_len(&config, strips).clamp(config.block_size, geometry.strip_bytes);
        let entry_limits = match geometry.data > 1 && geometry.parity > 0 {
            true => (0..=geometry.data).map(limit).collect(),
            false => vec![geometry.strip_bytes; geometry.data + 1],
        };
        let is_unlogged = geometry.parity > 0 && config.consistency != Consistency::Ppl;
        let lock_words = is_unlogged.then(|| Arc::new(LockWords::new(geometry.strip_bytes)));
        Shared {
            id,
            code: config.code(),
            lock_words,
            configs: Configs::new(config.clone()),
            config,
            members,
            common,
            entry_limits,
            shift: 0,
            bad_base: 0,
        }
    }

    /// Bytes of a strip that one write of `count` strips may cover.
    pub fn entry_limit(&self, count: usize) -> u32 {
        self.entry_limits[count]
    }

    /// Whether every member of a stripe is live and none is being replaced.
    #[inline]
    pub fn is_whole(&self, stripe: u64) -> bool {
        self.members.group_slots(stripe).all(|slot| self.members.is_live(slot))
    }

    /// The region of a stripe.
    #[inline]
    pub fn region_of(&self, stripe: u64) -> u64 {
        self.config.region_at(self.config.geometry.member_offset(stripe) + self.shift)
    }

    /// A part of a stripe as the list of bad blocks calls it.
    #[inline]
    pub fn bad_range(&self, stripe: u64, strips: u64, offset: u32, len: u32) -> BadRange {
        BadRange { stripe: stripe + self.bad_base, strips, offset, len }
    }

    /// The write-intent bitmap's byte for a stripe.
    #[inline]
    pub fn region(&self, stripe: u64) -> u8 {
        self.common.regions.get(self.region_of(stripe))
    }

    /// A write into a stripe begins. Its region's mark, if it needs one, is not taken away before
    /// it has ended.
    #[inline]
    pub fn begin_write(&self, stripe: u64, core: usize) -> RegionWrite<'_> {
        let write =
            |dirty, is_logged| RegionWrite { shared: self, core, dirty, is_logged, has_changed: false };
        match self.config.consistency {
            Consistency::None => write(None, false),
            Consistency::Ppl => write(None, true),
            Consistency::Bitmap => {
                let region = self.region_of(stripe);
                let has_log = self.config.geometry.data > 1;
                let is_logged =
                    self.common.regions.begin_unless(region, core, || has_log && self.common.is_logging());
                write((!is_logged).then_some(region), is_logged)
            }
        }
    }

    /// Whether what is missing of a stripe can be computed: a crash has not left its parity open.
    #[inline]
    pub fn can_compute(&self, stripe: u64) -> bool {
        self.region(stripe) & OPEN == 0
    }

    /// Whether some block of a stripe is known to be bad.
    #[inline]
    pub fn has_bad(&self, stripe: u64) -> bool {
        let strips = u64::MAX;
        !self.common.bad.is_empty()
            && self.common.bad.strips_in(&self.bad_range(stripe, strips, 0, u32::MAX)) != 0
    }

    /// Refuses a read of blocks that nothing can bring back.
    pub fn check_bad(&self, stripe: u64, strip: usize, offset: u32, len: u32) -> IoResult {
        let range = self.bad_range(stripe, 1 << strip, offset, len);
        let is_bad = !self.common.bad.is_empty() && self.common.bad.strips_in(&range) != 0;
        if is_bad { Err(IoError::Medium) } else { Ok(()) }
    }

    /// Nothing can be served any more: more members are missing than parity stands for.
    pub fn freeze(&self, why: &str) {
        if !self.common.is_frozen.swap(true, Ordering::SeqCst) {
            tracing::error!(array = self.config.name, "the array is frozen: {why}");
        }
    }

    /// Whether a slot's group can do without its member, in each shape.
    pub fn can_lose(&self, slot: usize) -> bool {
        self.can_lose_all(&[slot])
    }

    /// Whether the groups of some slots can do without all of their members, in each shape.
    pub fn can_lose_all(&self, slots: &[usize]) -> bool {
        let others = |set: &MemberSet| {
            let is_live = |other: &usize| !slots.contains(other) && self.members.is_live(*other);
            set.slots.clone().filter(is_live).count() >= set.needed
        };
        let survives = |slot: &usize| self.sets_of(*slot).all(|set| others(&set));
        self.config.geometry.parity > 0 && slots.iter().all(survives)
    }

    /// Freezes when a group has lost more members than parity stands for, in any shape.
    pub fn check_redundancy(&self, slot: usize) {
        for MemberSet { slots, needed, .. } in self.sets_of(slot) {
            let live = slots.clone().filter(|slot| self.members.is_live(*slot)).count();
            if live < needed {
                let (first, last) = (slots.start, slots.end - 1);
                self.freeze(&format!("of slots {first} to {last} {live} are live and {needed} are needed"));
            }
        }
    }

    /// Whether the data of a slot's group, in any shape, is lost if another member fails.
    pub fn is_unprotected(&self, slot: usize) -> bool {
        let has_spare =
            |set: MemberSet| set.slots.filter(|slot| self.members.is_live(*slot)).count() > set.needed;
        !self.sets_of(slot).all(has_spare)
    }

    /// The slots that stand for each other, of every group of every shape that a slot is in.
    fn sets_of(&self, slot: usize) -> impl Iterator<Item = MemberSet> + use<> {
        self.common.table().sets().filter(move |set| set.slots.contains(&slot))
    }
}
