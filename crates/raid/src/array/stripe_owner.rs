//! One core's part of an array: the stripes that it owns, and what it needs to work on them.

use super::batch::Batch;
use super::coalesce::WriteCoalescer;
use super::committer::MetadataCommitter;
use super::forward::SpareCalls;
use super::gate::{Gate, Inside};
use super::hedge::Waiting;
use super::members::{MemberChannel, MemberChannels, MemberRole, SlotState};
use super::registry;
use super::remote::{self, LocalFuture};
use super::reshape_router::RequestTracker;
use super::shared::Shared;
use super::snapshot::{Checksums, NewData};
use crate::config::{MAX_GROUP_MEMBERS, MAX_PARITY};
use crate::log::{Log, Nonce};
use crate::metadata::{BadBlocksError, MemberFailures, Target, Targets};
use crate::mutant::{self, Mutant};
use crate::parity::Decoder;
use crate::stripe::rect::Rect;
use crate::stripe::rows::{RowLocks, StripeHasher};
use arrayvec::ArrayVec;
use block::{Channel, Data, Flags, IoError, IoResult};
use reactor::{Buffer, BufferPool, Core, CoreRef, Permits};
use std::cell::RefCell;
use std::collections::HashMap;
use std::future::Future;
use std::hash::BuildHasherDefault;
use std::ops::Range;
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::Poll;

/// Bytes of buffers that a core's stripe operations use at a time, unless one needs more.
const MEMORY_BYTES: usize = 64 << 20;
/// Bytes of free buffers that an idle core keeps: some stripes' worth.
const STOCK_BYTES: usize = 4 << 20;
/// How long a region without writes keeps its mark, at least.
const SWEEP_NS: u64 = 1_000_000_000;
/// How long after a member has gone it is first looked again whether unlogged writes have ended.
const FIRST_LOOK_NS: u64 = 100_000;
/// … and how often at least from then on: until their marks are gone, power loss leaves their
/// regions without redundancy.
const LOOK_AGAIN_NS: u64 = 10_000_000;
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
    /// Commits metadata, on the committing core.
    pub committer: RefCell<Option<Rc<MetadataCommitter>>>,
    /// This core's part of the shape that the array changes from.
    pub old: Option<Rc<StripeOwner>>,
    /// Where requests sign in while there are two shapes.
    pub tracker: RequestTracker,
    /// The owners as this core last saw them, and their generation. A copy: its references are
    /// counted by this core alone.
    owners: RefCell<(u64, Rc<[CoreRef]>)>,
    /// For requests to other owners.
    pub calls: SpareCalls,
    pool: BufferPool,
    memory: Permits,
    memory_bytes: usize,
    #[expect(clippy::vec_box, reason = "they are handed about, and large")]
    scratch: RefCell<Vec<Box<Scratch>>>,
    decoders: RefCell<HashMap<u64, Rc<Decoder>, BuildHasherDefault<StripeHasher>>>,
}

/// Lists of one stripe operation, kept for reuse.
#[derive(Default)]
pub(crate) struct Scratch {
    pub batch: Batch,
    /// New data, by data strip.
    pub new: Vec<Option<NewData>>,
    /// Old data, by data strip.
    pub old: Vec<Option<Buffer>>,
    /// Parity, by parity: old, partial, new.
    pub parity: Vec<Option<Buffer>>,
    /// Parities that are those of `new`, a full stripe; bit `j` for parity `j`.
    pub encoded: u64,
    /// Checksums of `new`, a full stripe, or nothing.
    pub checksums: Checksums,
    /// The members that get a copy of the log's entry.
    pub copies: ArrayVec<LogCopy, MAX_PARITY>,
    /// The log may have an entry of this write, on some members at least.
    pub is_logged: bool,
    /// Bytes of the strips that contradict each other and keep doing so: parity takes the change of
    /// data alone.
    pub kept: Vec<Range<usize>>,
    /// Data that this write does not replace could be computed in two ways.
    pub is_ambiguous: bool,
}

/// A parity member that gets a copy of an entry.
pub(crate) struct LogCopy {
    pub parity: usize,
    pub slot: usize,
    pub role: MemberRole,
    pub channel: Rc<dyn Channel>,
    pub log_offset: u64,
}

impl Scratch {
    /// The place of a strip as it was read or computed: old data, or parity.
    pub fn strip(&self, strip: usize) -> &Option<Buffer> {
        let data = self.old.len();
        if strip < data { &self.old[strip] } else { &self.parity[strip - data] }
    }

    /// See [`Scratch::strip`].
    pub fn strip_mut(&mut self, strip: usize) -> &mut Option<Buffer> {
        let data = self.old.len();
        if strip < data { &mut self.old[strip] } else { &mut self.parity[strip - data] }
    }

    /// The bytes of a strip that were read or computed.
    pub fn bytes(&self, strip: usize) -> &[u8] {
        self.strip(strip).as_ref().expect("read or computed").as_slice()
    }

    /// Some bytes of the strips in `mask`, all of which were read or computed, by strip.
    pub fn present(&self, mask: u64, bytes: Range<usize>) -> ArrayVec<Option<&[u8]>, MAX_GROUP_MEMBERS> {
        let strips = 0..self.old.len() + self.parity.len();
        strips.map(|strip| (mask >> strip & 1 == 1).then(|| &self.bytes(strip)[bytes.clone()])).collect()
    }
}

/// Memory that an operation may use; given back when dropped.
pub(crate) struct MemoryGrant<'a>(&'a Permits, usize);

impl Drop for MemoryGrant<'_> {
    fn drop(&mut self) {
        self.0.release(self.1);
    }
}

/// The new content of a write.
#[derive(Clone, Copy)]
pub(crate) enum Source<'a> {
    /// The caller's memory.
    Data(Data<'a>),
    /// Zeroes.
    Zeroes,
    /// The scratch's own content: zeroes in place of strips that cannot be reconstructed. They stay
    /// bad.
    Lost,
}

/// A write of a rectangle of one stripe.
#[derive(Clone, Copy)]
pub(crate) struct WriteRequest<'a> {
    pub rect: Rect,
    pub source: Source<'a>,
    pub flags: Flags,
}

/// A caller's memory on its way to another core.
#[derive(Clone, Copy)]
pub(crate) struct Caller<'a>(Data<'a>);

// SAFETY: the caller keeps memory and segment list valid until its request has completed, and waits
// on its own core while another copies. `Data` holds nothing that belongs to a thread.
unsafe impl Send for Caller<'_> {}

impl Caller<'static> {
    /// # Safety
    /// The caller's request does not complete before the copy is no longer used.
    pub unsafe fn new(data: Data<'_>) -> Caller<'static> {
        // SAFETY: only the lifetime changes; the caller of this function answers for it.
        Caller(unsafe { std::mem::transmute::<Data<'_>, Data<'static>>(data) })
    }

    /// The memory.
    pub fn data(self) -> Data<'static> {
        self.0
    }
}

/// A strip of which something could not be read.
pub(crate) enum ReadFailure {
    /// The blocks are bad; the member may be fine.
    Medium,
    /// The member is gone.
    Fatal(IoError),
}

/// Returns whether an error of a read is the medium's or fails the member.
pub(crate) fn read_failure(error: IoError) -> ReadFailure {
    match error {
        IoError::Medium | IoError::Corrupt if !mutant::is(Mutant::OutForReadError) => ReadFailure::Medium,
        error => ReadFailure::Fatal(error),
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
            committer: RefCell::default(),
            old,
            tracker: RequestTracker::default(),
            owners: RefCell::new((0, Rc::from([]))),
            calls: SpareCalls::default(),
            locks: RowLocks::default(),
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
        let generation = self.shared.common.owners_generation();
        let mut owners = self.owners.borrow_mut();
        if owners.0 != generation {
            *owners = (generation, self.shared.common.owner_cores().iter().cloned().collect());
        }
        let lane = usize::from(self.shared.config.lane_of(stripe));
        work(&owners.1, lane % owners.1.len())
    }

    /// Whether this core owns a stripe. Asked inside the gate, where it does not change.
    #[inline]
    pub fn owns(&self, stripe: u64) -> bool {
        self.with_owner(stripe, |owners, owner| owners[owner].is_same(&self.here))
    }

    /// Runs work on the owner of a stripe, another core than this one. When that core has ended,
    /// another owns it. Requests go by [`StripeOwner::on_owner`], which allocates nothing.
    pub async fn forward<R, W>(&self, stripe: u64, work: W) -> Result<R, IoError>
    where
        R: Send + 'static,
        W: FnOnce(Rc<StripeOwner>) -> LocalFuture<Result<R, IoError>> + Clone + Send + 'static,
    {
        loop {
            let (core, id, work) = (self.owner_of(stripe), self.shared.id, work.clone());
            let answer = remote::call(&core, move || match registry::find(id) {
                Some(owner) => work(owner),
                None => Box::pin(std::future::ready(Err(IoError::DeviceGone))),
            });
            match answer.await {
                Ok(result) => return result,
                Err(_) => self.shared.take_over().await?,
            }
        }
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
        self.pool.take(len as usize).await
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
        let Scratch { batch: _, new, old, parity, encoded, checksums, copies, is_logged, kept, is_ambiguous } =
            &mut *scratch;
        (*encoded, *is_logged, *is_ambiguous) = (0, false, false);
        checksums.clear();
        kept.clear();
        copies.clear();
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
        channel.layout.data_offset + self.shared.members.geometry().member_offset(stripe) + u64::from(offset)
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
            let MemberChannel { channel, layout } = self.channels.get(slot, role)?;
            Some(Target { slot, channel, layout })
        };
        (0..members.count()).filter_map(target).collect()
    }
}

/// Takes marks away from regions without writes, for as long as the array lives. Every core looks,
/// and the committing one works: when that core has ended, another one continues although no
/// request asks for a commit.
pub(crate) async fn keep_regions(owner: Weak<StripeOwner>) {
    let mut memory = Vec::new();
    loop {
        let Some(core) = owner.upgrade().map(|owner| owner.core.clone()) else { return };
        core.sleep(SWEEP_NS).await;
        let Some(owner) = owner.upgrade() else { return };
        let shared = &owner.shared;
        shared.ensure_committer();
        if owner.committer.borrow().is_none() || shared.common.is_frozen() {
            continue;
        }
        if shared.common.regions.sweep(&mut memory) > 0
            && let Err(MemberFailures(failures)) = shared.common.regions.settle(&*owner).await
        {
            let _ = owner.members_failed(failures).await; // the next write finds out as well
        }
    }
}

/// Takes away the marks of writes that were in flight when the array began to log, as soon as they
/// have ended. Parity fits there then, and a later crash leaves nothing open.
pub(crate) async fn clear_marks(owner: Weak<StripeOwner>) {
    // Where a write may still be in flight that is not logged; its mark may be yet to come.
    let mut left: Option<Vec<u64>> = None;
    let mut wait_ns = FIRST_LOOK_NS;
    loop {
        let Some(owner) = owner.upgrade() else { return };
        let shared = &owner.shared;
        if !shared.common.is_logging() || shared.common.is_frozen() {
            return;
        }
        let is_busy = |region: &u64| !shared.common.regions.sweep_idle(*region);
        let busy = match left.take() {
            None => (0..shared.common.regions.regions()).filter(is_busy).collect(),
            Some(before) => before.into_iter().filter(is_busy).collect::<Vec<_>>(),
        };
        // Marks that a sync has cleared before are written with it.
        while let Err(MemberFailures(failures)) = shared.common.regions.settle(&*owner).await {
            if owner.members_failed(failures).await.is_err() {
                return;
            }
        }
        if busy.is_empty() {
            return;
        }
        left = Some(busy);
        let core = owner.core.clone();
        drop(owner);
        core.sleep(wait_ns).await;
        wait_ns = (2 * wait_ns).min(LOOK_AGAIN_NS);
    }
}

/// Bytes that a buffer of `len` bytes takes from the pool.
fn buffer_bytes(len: usize) -> usize {
    len.next_power_of_two().max(4096)
}
