//! A device that moves while it is in use: a copy takes its place.
//!
//! ```text
//!   plain     submit ─► child
//!   tracked   submit ─► child ─► marked as to be copied (again)         a copier follows
//!   held      waits until the copy is the child, or the child still is
//! ```
//!
//! The child alone counts until its copy, which by then has every byte and is durable, takes its place at once on every core:
//! [`Relocatable::begin`], copy until little is [`Dirty`], [`Relocation::hold`], copy the rest, [`Relocation::complete`].
//! Whoever gives up in between drops the [`Relocation`], and nothing has happened.
//!
//! A channel is changed by its own core, which is sent a message: no request pays for what other cores may do. Requests are
//! counted as [`Stats`](crate::stats::Stats) does it, by which the layer knows when none is on its way.

mod dirty;

pub use dirty::Dirty;

use crate::stats::{Book, Counters, Snapshot};
use block::{Channel, Device, DeviceError, IoFuture, IoResult, Limits, MemoryRegion, Request};
use reactor::{Core, CoreRef};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

/// Bytes that are copied as one.
const CHUNK: u64 = 1 << 20;
/// How long requests that are on their way may take to end before a move gives up.
const PATIENCE_NS: u64 = 30_000_000_000;
/// Between two looks whether they have.
const LOOK_NS: u64 = 20_000;

thread_local! {
    /// The channels of this core, and whose they are.
    static CHANNELS: RefCell<Vec<(u64, Weak<RelocatableChannel>)>> = const { RefCell::new(Vec::new()) };
}

/// Runs `work` for each channel of a device on this core.
fn each_channel(id: u64, work: impl FnMut(&Rc<RelocatableChannel>)) {
    let of_device = |(device, channel): &(u64, Weak<RelocatableChannel>)| {
        (*device == id).then(|| channel.upgrade()).flatten()
    };
    // Not under the borrow: what is closed there takes itself off the list.
    let channels: Vec<_> = CHANNELS.with_borrow(|all| all.iter().filter_map(of_device).collect());
    channels.iter().for_each(work);
}

/// A device whose place a copy can take.
pub struct Relocatable {
    name: String,
    id: u64,
    book: Arc<Book>,
    state: Mutex<State>,
    /// What requests point into. Held while a child is told: never by a core.
    regions: Mutex<Vec<MemoryRegion>>,
}

struct State {
    child: Arc<dyn Device>,
    /// The copy that is to take its place.
    next: Option<Arc<dyn Device>>,
    mode: Mode,
    /// Where there may be channels.
    cores: Vec<CoreRef>,
}

#[derive(Clone, Default)]
enum Mode {
    #[default]
    Plain,
    Tracked(Arc<Dirty>),
    Held,
}

impl Relocatable {
    /// `child`, until a copy takes its place.
    pub fn new(child: Arc<dyn Device>) -> Relocatable {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Relocatable {
            name: child.name().to_owned(),
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            book: Arc::default(),
            state: Mutex::new(State { child, next: None, mode: Mode::Plain, cores: Vec::new() }),
            regions: Mutex::default(),
        }
    }

    /// What all channels have counted so far, those that are closed included.
    pub fn snapshot(&self) -> Snapshot {
        self.book.snapshot()
    }

    /// Begins to mark what is written, for `next` to take the child's place. Not to be called on a core.
    ///
    /// # Errors
    /// When a move is on, `next` is no place for this device's bytes, or it `is_served` and `next` cannot do all that its users
    /// were told.
    pub fn begin(
        self: &Arc<Self>,
        next: Arc<dyn Device>,
        is_served: bool,
    ) -> Result<Relocation, DeviceError> {
        let refuse = |why: String| Err(DeviceError::new(next.name(), why));
        let regions = self.regions.lock().unwrap_or_else(PoisonError::into_inner);
        let child = self.child().limits();
        if let Some(why) = why_not(&child, &next.limits(), is_served) {
            return refuse(why);
        }
        if self.lock().next.is_some() {
            return refuse(format!("{} moves already", self.name));
        }
        for (place, region) in regions.iter().enumerate() {
            if let Err(error) = next.map_region(region) {
                regions[..place].iter().for_each(|region| next.unmap_region(region));
                return Err(error);
            }
        }
        let dirty = Arc::new(Dirty::new(child.capacity, CHUNK));
        let mut state = self.lock();
        state.next = Some(next);
        state.mode = Mode::Tracked(dirty.clone());
        drop((state, regions));
        let relocation = Relocation { device: self.clone(), dirty: dirty.clone() };
        self.on_each_core(move |channel| *channel.dirty.borrow_mut() = Some(dirty.clone()));
        Ok(relocation)
    }

    fn child(&self) -> Arc<dyn Device> {
        self.lock().child.clone()
    }

    /// Runs `work` for every channel, each on its core.
    fn on_each_core(&self, work: impl Fn(&RelocatableChannel) + Clone + Send + 'static) {
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

/// Why what `child` holds cannot move to a place with the limits of `copy`: it does not hold it; or it cannot do all that users
/// of a device that `is_served` were told.
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
    let at_most = [
        ("the alignment of memory", u64::from(copy.memory_alignment), u64::from(child.memory_alignment)),
        ("the volatile cache", copy.volatile_cache.into(), child.volatile_cache.into()),
    ];
    let less = at_least.into_iter().find(|(_, copy, child)| copy < child);
    let worse = less.or_else(|| at_most.into_iter().find(|(_, copy, child)| copy > child));
    let (what, is, was) = worse.filter(|_| is_served)?;
    Some(format!("{what} is {is}, and users were told {was}"))
}

/// What both can do: promises to users who come while a device moves.
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

impl Device for Relocatable {
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
        // A core is told of a change after it has been made here, and by itself: what is seen here holds until then.
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
        let channel = Rc::new(RelocatableChannel {
            child: RefCell::new(child.open_channel()?),
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
}

/// A move that is on. Dropped before it is complete, it has not been.
pub struct Relocation {
    device: Arc<Relocatable>,
    dirty: Arc<Dirty>,
}

impl Relocation {
    /// What is to be copied.
    pub fn dirty(&self) -> &Arc<Dirty> {
        &self.dirty
    }

    /// Lets new requests wait, and waits for the end of those that are on their way: what is dirty then is the rest.
    ///
    /// # Errors
    /// When the copy cannot be opened on a core, or requests do not end; then nothing is held any more.
    pub fn hold(&self) -> Result<(), DeviceError> {
        let mut state = self.device.lock();
        state.mode = Mode::Held;
        let next = state.next.clone().expect("it is there as long as the move");
        let cores = state.cores.clone();
        drop(state);
        let held = cores.iter().try_for_each(|core| self.hold_on(core, next.clone()));
        let drained = held.and_then(|()| cores.iter().try_for_each(|core| self.drain(core)));
        drained.inspect_err(|_| self.release())
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

    /// Waits for the requests of a core that are on their way.
    fn drain(&self, core: &CoreRef) -> Result<(), DeviceError> {
        let (id, name) = (self.device.id, self.device.name.clone());
        let drained = core.block_on(move |core| async move {
            let mut channels = Vec::new();
            each_channel(id, |channel| channels.push(channel.clone()));
            let begin_ns = core.now_ns();
            while channels.iter().any(|channel| channel.is_busy()) {
                if core.now_ns() - begin_ns > PATIENCE_NS {
                    return Err(DeviceError::new(name, "requests that are on their way do not end"));
                }
                core.sleep(LOOK_NS).await;
            }
            Ok(())
        });
        // As above.
        drained.unwrap_or(Ok(()))
    }

    /// Lets the copy take the device's place. It has every byte, and is durable: whoever calls this has seen to that.
    ///
    /// # Panics
    /// When nothing is held.
    pub fn complete(self) {
        let regions = self.device.regions.lock().unwrap_or_else(PoisonError::into_inner);
        let mut state = self.device.lock();
        assert!(matches!(state.mode, Mode::Held), "{} is still written to", self.device.name);
        state.mode = Mode::Plain;
        let next = state.next.take().expect("it is there as long as the move");
        let before = std::mem::replace(&mut state.child, next);
        drop(state);
        regions.iter().for_each(|region| before.unmap_region(region));
        drop(regions);
        self.device.on_each_core(|channel| {
            if let Some(next) = channel.next.take() {
                channel.child.replace(next);
            }
            channel.release(None);
        });
    }

    /// Goes on with the child, and marks what is written.
    fn release(&self) {
        self.device.lock().mode = Mode::Tracked(self.dirty.clone());
        let dirty = self.dirty.clone();
        self.device.on_each_core(move |channel| {
            channel.next.take();
            channel.release(Some(dirty.clone()));
        });
    }
}

impl Drop for Relocation {
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

struct RelocatableChannel {
    child: RefCell<Rc<dyn Channel>>,
    /// The copy's, while requests are held.
    next: RefCell<Option<Rc<dyn Channel>>>,
    /// Where writes that end are marked.
    dirty: RefCell<Option<Arc<Dirty>>>,
    is_held: Cell<bool>,
    waiting: RefCell<Vec<Waker>>,
    /// Requests that have begun and wait.
    held: Cell<u64>,
    counters: Arc<Counters>,
    book: Arc<Book>,
    core: Core,
}

impl RelocatableChannel {
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

impl Channel for RelocatableChannel {
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
}

impl Drop for RelocatableChannel {
    fn drop(&mut self) {
        self.book.close(&self.counters);
        CHANNELS.with_borrow_mut(|all| all.retain(|(_, channel)| channel.strong_count() > 0));
    }
}

#[cfg(test)]
mod tests;
