//! A device that migrates while it is in use: a copy replaces it.
//!
//! ```text
//!   plain     submit ─► child
//!   tracked   submit ─► child ─► its range is marked for the copier
//!   held      submit ─► waits until the copy replaces the child, or the migration is cancelled
//! ```
//!
//! The child stays authoritative until its copy replaces it, at once on all cores. By then the copy
//! has all bytes and is durable. The steps:
//!
//! 1. [`Migratable::begin`]
//! 2. Copy until few bytes are [`Dirty`].
//! 3. [`Migration::hold`]
//! 4. Copy the rest.
//! 5. [`Migration::complete`]
//!
//! Dropping the [`Migration`] before the last step cancels the migration without effect.
//!
//! A child may have a place in the kernel, or dirty bitmaps, which its copy has not. They are lent
//! to users while no migration is in progress, and no migration begins while they are in use.
//!
//! Only its own core changes a channel, on a message, so requests pay nothing for the control by
//! other threads. Channels count requests as those of [`Stats`](crate::stats::Stats) do; from the
//! counters the layer knows when none is in flight.

mod dirty;
mod lent;

pub use dirty::Dirty;

use crate::stats::{Book, Counters, Snapshot};
use block::{
    Channel, Device, DeviceError, DirtyBitmap, IoError, IoFuture, IoResult, KernelBacking, Limits,
    MemoryRegion, Request, StatusReport,
};
use lent::{Lent, Loans};
use reactor::{Core, CoreRef};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// Bytes of a range that is copied as one.
const CHUNK: u64 = 1 << 20;
/// Time that requests in flight may take to end before the migration fails.
const DRAIN_TIMEOUT_NS: u64 = 30_000_000_000;
/// Time between two checks whether they have ended.
const LOOK_NS: u64 = 20_000;

thread_local! {
    /// The channels of this core, each with the number of its device.
    static CHANNELS: RefCell<Vec<(u64, Weak<MigratableChannel>)>> = const { RefCell::new(Vec::new()) };
}

/// Runs `work` for each channel of a device on this core.
fn each_channel(id: u64, work: impl FnMut(&Rc<MigratableChannel>)) {
    let of_device = |(device, channel): &(u64, Weak<MigratableChannel>)| {
        (*device == id).then(|| channel.upgrade()).flatten()
    };
    // Not under the borrow: a channel that is closed meanwhile removes itself from the list.
    let channels: Vec<_> = CHANNELS.with_borrow(|all| all.iter().filter_map(of_device).collect());
    channels.iter().for_each(work);
}

/// A device that a copy can replace.
pub struct Migratable {
    name: String,
    id: u64,
    book: Arc<Book>,
    state: Mutex<State>,
    /// Memory that requests point into. Locked while a child registers a region or lends something,
    /// and while a migration begins; never by a core.
    regions: Mutex<Vec<MemoryRegion>>,
    /// Kernel backings in use.
    backings: Loans,
    /// Dirty bitmaps in use.
    bitmaps: Loans,
}

struct State {
    child: Arc<dyn Device>,
    /// The copy that will replace it.
    next: Option<Arc<dyn Device>>,
    mode: Mode,
    /// Cores that may have channels.
    cores: Vec<CoreRef>,
}

#[derive(Clone, Default)]
enum Mode {
    #[default]
    Plain,
    Tracked(Arc<Dirty>),
    Held,
}

impl Migratable {
    /// `child`, until a copy replaces it.
    pub fn new(child: Arc<dyn Device>) -> Migratable {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Migratable {
            name: child.name().to_owned(),
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            book: Arc::default(),
            state: Mutex::new(State { child, next: None, mode: Mode::Plain, cores: Vec::new() }),
            regions: Mutex::default(),
            backings: Loans::default(),
            bitmaps: Loans::default(),
        }
    }

    /// The same device under another name.
    #[must_use]
    pub fn named(self, name: String) -> Migratable {
        Migratable { name, ..self }
    }

    /// The counters of all channels so far, including closed ones.
    pub fn snapshot(&self) -> Snapshot {
        self.book.snapshot()
    }

    /// Begins to mark the ranges of writes, so that `next` can replace the child. Must not be
    /// called on a core.
    ///
    /// # Errors
    /// If [`Migratable::refusal`] has a reason, or `next` cannot register the memory.
    pub fn begin(self: &Arc<Self>, next: Arc<dyn Device>, is_served: bool) -> Result<Migration, DeviceError> {
        let regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(why) = self.refusal(&next.limits(), is_served) {
            return Err(DeviceError::new(next.name(), why));
        }
        for (place, region) in regions.iter().enumerate() {
            if let Err(error) = next.map_region(region) {
                regions[..place].iter().for_each(|region| next.unmap_region(region));
                return Err(error);
            }
        }
        let dirty = Arc::new(Dirty::new(self.child().limits().capacity, CHUNK));
        let mut state = self.lock();
        state.next = Some(next);
        state.mode = Mode::Tracked(dirty.clone());
        drop((state, regions));
        let migration = Migration { device: self.clone(), dirty: dirty.clone() };
        self.on_each_core(move |channel| *channel.dirty.borrow_mut() = Some(dirty.clone()));
        Ok(migration)
    }

    /// The reason why a migration to a device with the limits of `copy` cannot begin now, if any:
    /// that of [`why_not`], a migration in progress, or something that is lent.
    pub fn refusal(&self, copy: &Limits, is_served: bool) -> Option<String> {
        let name = &self.name;
        if let Some(why) = why_not(&self.child().limits(), copy, is_served) {
            return Some(why);
        }
        if self.lock().next.is_some() {
            return Some(format!("{name} is already being migrated"));
        }
        if self.backings.any() {
            return Some(format!("the kernel serves clients of {name}"));
        }
        self.bitmaps.any().then(|| format!("an export offers the dirty bitmaps of {name}"))
    }

    fn child(&self) -> Arc<dyn Device> {
        self.lock().child.clone()
    }

    /// Runs `work` for every channel, each on its core.
    fn on_each_core(&self, work: impl Fn(&MigratableChannel) + Clone + Send + 'static) {
        let cores = self.lock().cores.clone();
        for core in &cores {
            let (id, work) = (self.id, work.clone());
            // A core that has ended has no channels.
            let _ = core.call(move |_| each_channel(id, |channel| work(channel)));
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The reason why a device with the limits of `copy` cannot replace `child`, if any. It must hold
/// the content of the child. If the child `is_served`, it must also keep the limits that clients
/// rely on. The alignment of memory is none of them: a device copies what is not aligned.
pub fn why_not(child: &Limits, copy: &Limits, is_served: bool) -> Option<String> {
    if copy.capacity < child.capacity || copy.block_size != child.block_size || copy.read_only {
        return Some(format!(
            "{} bytes in blocks of {} (read-only: {}) do not hold {} bytes in blocks of {}",
            copy.capacity, copy.block_size, copy.read_only, child.capacity, child.block_size
        ));
    }
    let at_least = [
        ("the longest transfer", u64::from(copy.max_transfer), u64::from(child.max_transfer)),
        ("the number of segments", copy.max_segments.into(), child.max_segments.into()),
        ("the longest discard", copy.max_discard, child.max_discard),
        ("the longest write of zeroes", copy.max_write_zeroes, child.max_write_zeroes),
    ];
    let cache = ("the volatile cache", u64::from(copy.volatile_cache), child.volatile_cache.into());
    let less = at_least.into_iter().find(|(_, copy, child)| copy < child);
    let worse = less.or_else(|| Some(cache).filter(|(_, copy, child)| copy > child));
    let (what, is, was) = worse.filter(|_| is_served)?;
    Some(format!("{what} is {is}, but clients rely on {was}"))
}

/// Limits that both devices keep, for clients that connect during the migration.
fn common(child: Limits, copy: &Limits) -> Limits {
    Limits {
        max_transfer: child.max_transfer.min(copy.max_transfer),
        max_segments: child.max_segments.min(copy.max_segments),
        max_discard: child.max_discard.min(copy.max_discard),
        max_write_zeroes: child.max_write_zeroes.min(copy.max_write_zeroes),
        memory_alignment: child.memory_alignment.max(copy.memory_alignment),
        volatile_cache: child.volatile_cache || copy.volatile_cache,
        ..child
    }
}

impl Device for Migratable {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> Limits {
        let state = self.lock();
        let (child, next) = (state.child.clone(), state.next.clone());
        drop(state);
        match next {
            Some(next) => common(child.limits(), &next.limits()),
            None => child.limits(),
        }
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        let core = reactor::current();
        // A change is made here first, and then by a message to each core. So the state read here
        // is valid until that message.
        let mut state = self.lock();
        state.cores.retain(|other| !other.is_stopped());
        if !state.cores.iter().any(|other| other.is_same(&core.remote())) {
            state.cores.push(core.remote());
        }
        let (child, next, mode) = (state.child.clone(), state.next.clone(), state.mode.clone());
        drop(state);
        let is_held = matches!(mode, Mode::Held);
        let next = next.filter(|_| is_held).map(|next| next.open_channel()).transpose()?;
        let dirty = match mode {
            Mode::Tracked(dirty) => Some(dirty),
            Mode::Plain | Mode::Held => None,
        };
        let channel = Rc::new(MigratableChannel {
            child: RefCell::new(child.open_channel()?),
            takes_registered: Cell::new(child.takes_registered()),
            next: RefCell::new(next),
            dirty: RefCell::new(dirty),
            is_held: Cell::new(is_held),
            waiting: RefCell::default(),
            held: Cell::new(0),
            counters: self.book.open(),
            book: self.book.clone(),
            core,
        });
        CHANNELS.with_borrow_mut(|all| all.push((self.id, Rc::downgrade(&channel))));
        Ok(channel)
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
        self.child().refresh()?;
        Ok(self.limits())
    }

    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        let (child, next) = (self.child(), self.lock().next.clone());
        child.map_region(region)?;
        if let Some(next) = next
            && let Err(error) = next.map_region(region)
        {
            child.unmap_region(region);
            return Err(error);
        }
        regions.push(*region);
        Ok(())
    }

    fn unmap_region(&self, region: &MemoryRegion) {
        let mut regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(place) = regions.iter().position(|known| known == region) {
            regions.swap_remove(place);
        }
        let (child, next) = (self.child(), self.lock().next.clone());
        child.unmap_region(region);
        if let Some(next) = next {
            next.unmap_region(region);
        }
    }

    fn takes_registered(&self) -> bool {
        self.child().takes_registered()
    }

    /// The bitmaps of the child; none during a migration, because its copy has none.
    fn bitmaps(&self) -> Vec<Arc<dyn DirtyBitmap>> {
        let _regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        if self.lock().next.is_some() {
            return Vec::new();
        }
        let lend = |bitmap| Arc::new(Lent::new(bitmap, &self.bitmaps)) as Arc<dyn DirtyBitmap>;
        self.child().bitmaps().into_iter().map(lend).collect()
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        let _regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        if self.lock().next.is_some() {
            let reason = "requests that the kernel serves would not be tracked for the migration";
            return Err(DeviceError::new(&self.name, reason));
        }
        Ok(Arc::new(Lent::new(self.child().kernel_backing()?, &self.backings)))
    }
}

/// A migration in progress. Dropping it before it is complete cancels it.
pub struct Migration {
    device: Arc<Migratable>,
    dirty: Arc<Dirty>,
}

impl Migration {
    /// The ranges that must be copied.
    pub fn dirty(&self) -> &Arc<Dirty> {
        &self.dirty
    }

    /// Holds new requests, and waits for those in flight. No range becomes dirty afterwards.
    ///
    /// # Errors
    /// If the copy cannot be opened on a core, requests in flight do not end within 30 s, or the
    /// child has another size than at the beginning. Then the held requests continue.
    pub fn hold(&self) -> Result<(), DeviceError> {
        let mut state = self.device.lock();
        state.mode = Mode::Held;
        let next = state.next.clone().expect("set during the migration");
        let cores = state.cores.clone();
        drop(state);
        let held = cores.iter().try_for_each(|core| self.hold_on(core, next.clone()));
        let drained = held.and_then(|()| cores.iter().try_for_each(|core| self.drain(core)));
        drained.and_then(|()| self.check_size()).inspect_err(|_| self.release())
    }

    /// Checks that the ranges of all writes were marked: those behind the size at the beginning
    /// were not.
    fn check_size(&self) -> Result<(), DeviceError> {
        let (was, is) = (self.dirty.capacity(), self.device.child().limits().capacity);
        match is == was {
            true => Ok(()),
            false => {
                let reason = format!("it has {is} bytes, and had {was} when the migration began");
                Err(DeviceError::new(&self.device.name, reason))
            }
        }
    }

    /// Holds the requests of a core, and opens the copy there.
    fn hold_on(&self, core: &CoreRef, next: Arc<dyn Device>) -> Result<(), DeviceError> {
        let id = self.device.id;
        let held = core.call(move |_| {
            let mut opened = Ok(());
            each_channel(id, |channel| {
                channel.is_held.set(true);
                match next.open_channel() {
                    Ok(next) => drop(channel.next.replace(Some(next))),
                    Err(error) => opened = Err(error),
                }
            });
            opened
        });
        // A core that has ended has no channels.
        held.unwrap_or(Ok(()))
    }

    /// Waits for the requests in flight on a core.
    fn drain(&self, core: &CoreRef) -> Result<(), DeviceError> {
        let (id, name) = (self.device.id, self.device.name.clone());
        let drained = core.block_on(move |core| async move {
            let mut channels = Vec::new();
            each_channel(id, |channel| channels.push(channel.clone()));
            let begin_ns = core.now_ns();
            while channels.iter().any(|channel| channel.is_busy()) {
                if core.now_ns() - begin_ns > DRAIN_TIMEOUT_NS {
                    return Err(DeviceError::new(name, "requests in flight do not end"));
                }
                core.sleep(LOOK_NS).await;
            }
            Ok(())
        });
        // As above.
        drained.unwrap_or(Ok(()))
    }

    /// Replaces the child by the copy. The caller ensures that the copy has all bytes and is
    /// durable.
    ///
    /// # Panics
    /// If requests are not held.
    pub fn complete(self) {
        let regions = self.device.regions.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.device.lock();
        assert!(matches!(state.mode, Mode::Held), "{} is still written to", self.device.name);
        state.mode = Mode::Plain;
        let next = state.next.take().expect("set during the migration");
        let takes_registered = next.takes_registered();
        let before = std::mem::replace(&mut state.child, next);
        drop(state);
        regions.iter().for_each(|region| before.unmap_region(region));
        drop(regions);
        self.device.on_each_core(move |channel| {
            if let Some(next) = channel.next.take() {
                channel.child.replace(next);
                channel.takes_registered.set(takes_registered);
            }
            channel.release(None);
        });
    }

    /// Continues with the child, and marks the ranges of writes again.
    fn release(&self) {
        self.device.lock().mode = Mode::Tracked(self.dirty.clone());
        let dirty = self.dirty.clone();
        self.device.on_each_core(move |channel| {
            channel.next.take();
            channel.release(Some(dirty.clone()));
        });
    }
}

impl Drop for Migration {
    fn drop(&mut self) {
        let regions = self.device.regions.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.device.lock();
        let Some(next) = state.next.take() else { return };
        state.mode = Mode::Plain;
        drop(state);
        regions.iter().for_each(|region| next.unmap_region(region));
        drop(regions);
        self.device.on_each_core(|channel| {
            channel.next.take();
            channel.release(None);
        });
    }
}

struct MigratableChannel {
    child: RefCell<Rc<dyn Channel>>,
    /// Whether the child takes registered buffers; its copy may not.
    takes_registered: Cell<bool>,
    /// The copy's channel, while requests are held.
    next: RefCell<Option<Rc<dyn Channel>>>,
    /// Marks of writes that have ended.
    dirty: RefCell<Option<Arc<Dirty>>>,
    is_held: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
    /// Requests that have begun and are held.
    held: Cell<u64>,
    counters: Arc<Counters>,
    book: Arc<Book>,
    core: Core,
}

impl MigratableChannel {
    /// Whether the child has requests.
    fn is_busy(&self) -> bool {
        self.counters.in_flight() > self.held.get()
    }

    fn release(&self, dirty: Option<Arc<Dirty>>) {
        self.dirty.replace(dirty);
        self.is_held.set(false);
        self.waiting.take().into_iter().for_each(Waker::wake);
    }

    #[cold]
    async fn released(&self) {
        self.held.set(self.held.get() + 1);
        poll_fn(|cx| {
            if !self.is_held.get() {
                return Poll::Ready(());
            }
            self.waiting.borrow_mut().push(cx.waker().clone());
            Poll::Pending
        })
        .await;
        self.held.set(self.held.get() - 1);
    }

    async fn carry_out(&self, req: &Request<'_>, offset: u64) -> IoResult {
        if self.is_held.get() {
            self.released().await;
        }
        if req.data.is_registered() && !self.takes_registered.get() {
            return Err(IoError::Unsupported);
        }
        let child = self.child.borrow().clone();
        let result = child.submit(req, offset).await;
        if req.op.is_modifying()
            && let Some(dirty) = &*self.dirty.borrow()
        {
            dirty.mark(offset, req.len);
        }
        result
    }
}

impl Channel for MigratableChannel {
    #[inline]
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        self.counters.begin(req.op);
        let stopwatch = self.core.stopwatch();
        IoFuture::new(async move {
            let result = self.carry_out(req, offset).await;
            self.counters.end(req.op, req.len, self.core.elapsed_ns(&stopwatch), result);
            result
        })
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        let child = self.child.borrow().clone();
        IoFuture::new(async move { child.block_status(report, offset, len).await })
    }
}

impl Drop for MigratableChannel {
    fn drop(&mut self) {
        self.book.close(&self.counters);
        CHANNELS.with_borrow_mut(|all| all.retain(|(_, channel)| channel.strong_count() > 0));
    }
}

#[cfg(test)]
mod tests;
