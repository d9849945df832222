//! One core's part of an array: the stripes that it owns, and what it needs to work on them.

use super::calls::SpareCalls;
use super::coalesce::WriteCoalescer;
use super::deadlines::{Waiting, buffer_bytes};
use super::gate::{Gate, Inside};
use super::members::{MemberChannel, MemberChannels, MemberRole, SlotState};
use super::reshape_router::RequestTracker;
use super::scratch::Scratch;
use super::shared::Shared;
use super::turns::Turns;
use crate::log::{Log, Nonce};
use crate::metadata::{BadBlocksError, MemberFailures, Target, Targets};
use crate::mutant::{self, Mutant};
use crate::parity::Decoder;
use crate::stripe::hasher::StripeHasher;
use crate::stripe::rect::Rect;
use crate::stripe::rows::RowLocks;
use block::{IoError, IoResult};
use reactor::{Buffer, BufferPool, Core, CoreRef, Permits};
use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;
use std::hash::BuildHasherDefault;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::Poll;

/// Bytes of buffers that a core's stripe operations use at a time, unless one needs more.
const MEMORY_BYTES: usize = 64 << 20;
/// Bytes of free buffers that an idle core keeps: some stripes' worth.
const STOCK_BYTES: usize = 4 << 20;
/// How often an operation at a closed gate looks whether the core that closed it has ended.
const GATE_NS: u64 = 100_000_000;
/// Scratch lists that are kept for reuse.
const SPARE_SCRATCH: usize = 64;
/// Decoders that are kept: patterns of missing strips, each in a few readings.
const DECODERS: usize = 1024;

/// One core's part of an array.
pub(crate) struct StripeOwner {
    pub shared: Arc<Shared>,
    pub core: Core,
    /// This core, to be compared with owners.
    pub here: CoreRef,
    pub channels: MemberChannels,
    pub locks: RowLocks,
    pub gate: Gate,
    /// Writes that came in here and follow each other, for whatever stripes.
    pub coalescer: WriteCoalescer,
    /// Reads that members owe answers to.
    pub waiting: Waiting,
    pub log: Log,
    /// Only the committing core has them.
    pub turns: RefCell<Option<Rc<Turns>>>,
    /// This core's part of the shape that the array changes from.
    pub old: Option<Rc<StripeOwner>>,
    /// Where requests sign in while there are two shapes.
    pub tracker: RequestTracker,
    owners: RefCell<OwnersSeen>,
    /// For requests to other owners.
    pub calls: SpareCalls,
    pool: BufferPool,
    memory: Permits,
    memory_bytes: usize,
    #[expect(clippy::vec_box, reason = "they are handed about, and large")]
    scratch: RefCell<Vec<Box<Scratch>>>,
    decoders: RefCell<HashMap<u64, Rc<Decoder>, BuildHasherDefault<StripeHasher>>>,
}

/// The owners as a core last saw them. A copy: its references are counted by this core alone.
#[derive(Default)]
struct OwnersSeen {
    generation: u64,
    cores: Rc<[CoreRef]>,
    /// Whether this core is one of them.
    is_here: bool,
}

/// Memory that an operation may use; given back when dropped.
pub(crate) struct MemoryGrant<'a>(&'a Permits, usize);

impl Drop for MemoryGrant<'_> {
    fn drop(&mut self) {
        self.0.release(self.1);
    }
}

impl StripeOwner {
    /// With `old`, this core's part of the shape that the array changes from.
    pub fn new(shared: Arc<Shared>, old: Option<Rc<StripeOwner>>) -> StripeOwner {
        let core = reactor::current();
        let members = shared.members.clone();
        let (geometry, members_count) = (*members.geometry(), members.count());
        let everything = 2 * geometry.group_members() * buffer_bytes(geometry.strip_bytes as usize);
        let memory_bytes = MEMORY_BYTES.max(2 * everything);
        let pool = BufferPool::new(2 * memory_bytes);
        core.trim_when_idle(&pool, STOCK_BYTES);
        StripeOwner {
            log: Log::new(
                shared.config.clone(),
                shared.common.log_identity().0,
                shared.common.log_identity().1,
            ),
            channels: MemberChannels::new(members),
            turns: RefCell::default(),
            old,
            tracker: RequestTracker::default(),
            owners: RefCell::default(),
            calls: SpareCalls::default(),
            locks: shared.lock_words.clone().map_or_else(RowLocks::default, RowLocks::with_words),
            gate: Gate::default(),
            coalescer: WriteCoalescer::default(),
            waiting: Waiting::new(members_count),
            pool,
            memory: Permits::new(memory_bytes),
            memory_bytes,
            scratch: RefCell::default(),
            decoders: RefCell::default(),
            shared,
            here: core.remote(),
            core,
        }
    }

    /// Enters the gate, once it is open.
    #[inline]
    pub async fn enter(&self) -> Inside<'_> {
        loop {
            if let Some(inside) = self.gate.try_enter() {
                return inside;
            }
            Box::pin(self.wait_at_gate()).await;
        }
    }

    /// Waits until the gate may be open. If the committing core has ended and left it closed, its
    /// successor opens it.
    async fn wait_at_gate(&self) {
        let mut timer = self.core.sleep(GATE_NS);
        std::future::poll_fn(|cx| match self.gate.poll_open(cx) {
            Poll::Ready(()) => Poll::Ready(()),
            Poll::Pending => Pin::new(&mut timer).poll(cx),
        })
        .await;
        if self.gate.is_abandoned() {
            let _ = self.shared.take_over().await; // tried again as long as the gate is closed
        }
    }

    /// Lets no stripe operation in any more, on behalf of the committing core `closer`, and waits
    /// for those under way, in both shapes.
    pub async fn close_gates(&self, closer: CoreRef) {
        self.gate.close(closer.clone()).await;
        if let Some(old) = &self.old {
            old.gate.close(closer).await;
        }
    }

    /// Undoes one [`StripeOwner::close_gates`].
    pub fn open_gates(&self) {
        self.gate.open();
        self.old.iter().for_each(|old| old.gate.open());
    }

    /// Starts the logs over. Behind closed gates.
    pub async fn reset_logs(&self, nonce: Nonce, epoch: u64) {
        self.log.reset(nonce, epoch).await;
        if let Some(old) = &self.old {
            old.log.reset(nonce, epoch).await;
        }
    }

    /// Waits for what was given up and is still on its way, in both shapes.
    pub async fn wait_for_all_late(&self) {
        self.wait_for_late().await;
        if let Some(old) = &self.old {
            old.wait_for_late().await;
        }
    }

    /// The core that owns a stripe: that of its lane, so that a lane has one owner.
    pub fn owner_of(&self, stripe: u64) -> CoreRef {
        self.with_owner(stripe, |owners, owner| owners[owner].clone())
    }

    /// The cores that own stripes, and the place of a stripe's owner among them.
    pub fn owners_with(&self, stripe: u64) -> (Rc<[CoreRef]>, usize) {
        self.with_owner(stripe, |owners, owner| (owners.clone(), owner))
    }

    fn with_owner<R>(&self, stripe: u64, work: impl FnOnce(&Rc<[CoreRef]>, usize) -> R) -> R {
        let lane = usize::from(self.shared.config.lane_of(stripe));
        self.with_owners(|seen| work(&seen.cores, lane % seen.cores.len()))
    }

    #[inline]
    fn with_owners<R>(&self, work: impl FnOnce(&OwnersSeen) -> R) -> R {
        let generation = self.shared.common.owners_generation();
        let mut seen = self.owners.borrow_mut();
        if seen.generation != generation {
            let cores: Rc<[CoreRef]> = self.shared.common.owner_cores().iter().cloned().collect();
            let is_here = cores.iter().any(|core| core.is_same(&self.here));
            *seen = OwnersSeen { generation, cores, is_here };
        }
        work(&seen)
    }

    /// Whether this core owns stripes: its gate is closed whenever those of the others are. Asked
    /// inside the gate, where it does not change.
    #[inline]
    pub fn is_owner(&self) -> bool {
        self.with_owners(|seen| seen.is_here)
    }

    /// Whether this core owns a stripe. Asked inside the gate, where it does not change.
    #[inline]
    pub fn owns(&self, stripe: u64) -> bool {
        self.with_owner(stripe, |owners, owner| owners[owner].is_same(&self.here))
    }

    /// Whether this core writes to a stripe that another core owns.
    ///
    /// Nothing is logged then, and no member of the group is missing or incoming. Asked inside the
    /// gate, where no member comes in. A write that finds later that it is logged goes to the
    /// owner.
    #[inline]
    pub fn is_writer(&self, stripe: u64) -> bool {
        let shared = &self.shared;
        let is_unlogged = !shared.common.is_logging() && shared.members.is_settled(stripe);
        shared.lock_words.is_some() && self.is_owner() && (is_unlogged || mutant::is(Mutant::OtherCoresLog))
    }

    /// Waits for the memory of `buffers` buffers of `len` bytes. Asked for once in an operation,
    /// after its rows.
    pub async fn grant(&self, buffers: usize, len: usize) -> MemoryGrant<'_> {
        let bytes = (buffers * buffer_bytes(len)).min(self.memory_bytes);
        self.memory.acquire(bytes).await;
        MemoryGrant(&self.memory, bytes)
    }

    /// A buffer of what was granted.
    pub async fn buffer(&self, len: u32) -> Buffer {
        match self.pool.try_take(len as usize) {
            Some(buffer) => buffer,
            None => self.pool.take(len as usize).await,
        }
    }

    pub fn scratch(&self) -> Box<Scratch> {
        if let Some(scratch) = self.scratch.borrow_mut().pop() {
            return scratch;
        }
        let geometry = self.shared.members.geometry();
        let mut scratch = Box::<Scratch>::default();
        scratch.new.resize_with(geometry.data, || None);
        scratch.old.resize_with(geometry.data, || None);
        scratch.parity.resize_with(geometry.parity, || None);
        scratch
    }

    pub fn recycle(&self, mut scratch: Box<Scratch>) {
        scratch.batch.clear();
        let Scratch {
            batch: _,
            new,
            old,
            parity,
            encoded,
            checksums,
            targets,
            roles,
            is_logged,
            partial,
            kept,
            is_ambiguous,
        } = &mut *scratch;
        (*encoded, *partial, *is_logged, *is_ambiguous) = (0, 0, false, false);
        checksums.clear();
        kept.clear();
        targets.clear();
        roles.clear();
        new.iter_mut().for_each(|data| *data = None);
        [old, parity].into_iter().flatten().for_each(|buffer| *buffer = None);
        let mut spare = self.scratch.borrow_mut();
        if spare.len() < SPARE_SCRATCH {
            spare.push(scratch);
        }
    }

    /// The channel by which a strip of a stripe is read.
    pub fn reader(&self, stripe: u64, strip: usize) -> Option<(usize, MemberRole, MemberChannel)> {
        let slot = self.shared.members.geometry().member(stripe, strip);
        let role = self.shared.members.role(slot);
        self.channels.get(slot, role).map(|channel| (slot, role, channel))
    }

    /// Where a strip's bytes lie on its member.
    pub fn position(&self, channel: &MemberChannel, stripe: u64, offset: u32) -> u64 {
        channel.data_offset + self.shared.members.geometry().member_offset(stripe) + u64::from(offset)
    }

    /// How to compute `lost` from what is readable.
    pub fn decoder(&self, lost: u64, readable: u64) -> Result<Rc<Decoder>, IoError> {
        let strips = self.shared.config.geometry.group_members();
        // Both masks fit a word for up to 32 strips; wider groups are not kept.
        let key = (strips <= 32).then_some(lost << 32 | readable);
        if let Some(decoder) = key.and_then(|key| self.decoders.borrow().get(&key).cloned()) {
            return Ok(decoder);
        }
        let list: Vec<usize> = (0..strips).filter(|strip| lost >> strip & 1 == 1).collect();
        let decoder = self.shared.code.decoder(&list, readable).map_err(|_| IoError::Medium)?;
        let decoder = Rc::new(decoder);
        if let Some(key) = key {
            let mut decoders = self.decoders.borrow_mut();
            if decoders.len() >= DECODERS {
                decoders.clear();
            }
            decoders.insert(key, decoder.clone());
        }
        Ok(decoder)
    }

    /// Sets at least the marks `needed` for a stripe in the write-intent bitmap, durably.
    #[inline]
    pub async fn set_region(&self, stripe: u64, needed: u8) -> IoResult {
        let region = self.shared.region_of(stripe);
        if self.shared.common.regions.has(region, needed) || mutant::is(Mutant::IntentBitmapNotAwaited) {
            return Ok(());
        }
        Box::pin(self.commit_region(region, needed)).await
    }

    async fn commit_region(&self, region: u64, needed: u8) -> IoResult {
        while let Err(MemberFailures(failures)) = self.shared.common.regions.set(region, needed, self).await {
            self.members_failed(failures).await?;
        }
        Ok(())
    }

    /// Blocks that were written are no longer bad.
    #[inline]
    pub async fn clear_bad(&self, rect: &Rect) -> IoResult {
        match self.shared.has_bad(rect.stripe) {
            true => Box::pin(self.commit_good(rect)).await,
            false => Ok(()),
        }
    }

    async fn commit_good(&self, rect: &Rect) -> IoResult {
        let range = self.shared.bad_range(rect.stripe, rect.mask(), rect.offset, rect.len);
        loop {
            match self.shared.common.bad.remove(range, self).await {
                Ok(()) => return Ok(()),
                Err(BadBlocksError::Members(MemberFailures(failures))) => {
                    self.members_failed(failures).await?
                }
                // It stays bad although it is not: an error, never wrong data.
                Err(BadBlocksError::Full(_)) => return Ok(()),
            }
        }
    }

    pub async fn members_failed(&self, failures: Vec<(usize, IoError)>) -> IoResult {
        self.shared.common.check_frozen()?;
        if failures.is_empty() {
            return Err(IoError::DeviceGone); // there is no member to write to, and trying again finds none
        }
        for (slot, error) in failures {
            let role = self.shared.members.role(slot);
            self.shared.member_failed(slot, role, error).await?;
        }
        Ok(())
    }
}

impl Targets for StripeOwner {
    /// The members that take metadata: live ones, and those that fill an empty slot.
    fn targets(&self) -> Vec<Target> {
        let members = &self.shared.members;
        let target = |slot: usize| {
            let role = match members.is_live(slot) {
                true => MemberRole::Current,
                false if members.state(slot) == SlotState::Out && members.is_filling(slot) => {
                    MemberRole::Replacement
                }
                false => return None,
            };
            let (channel, layout) = self.channels.with_layout(slot, role)?;
            Some(Target { slot, channel, layout })
        };
        (0..members.count()).filter_map(target).collect()
    }
}
