//! A table, its format, and each core's view of it.

use crate::directory::Directory;
use crate::leaf::{ENTRIES, Leaf};
use crate::mutant::{self, Mutant};
use crate::owner::{Found, Leaves, Owned};
use block::{DeviceError, IoError, IoResult};
use futures_channel::oneshot;
use reactor::fence::{self, Gate, Running};
use reactor::{Call, CallRequest, Core, CoreRef, NotSent, Reply, yield_now};
use std::any::Any;
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::future::{Future, poll_fn};
use std::ops::Range;
use std::rc::{Rc, Weak};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Poll, Waker};

thread_local! {
    /// The views of this thread, by the number of their table and their core.
    static VIEWS: RefCell<HashMap<(u64, usize), Weak<dyn Any>>> = RefCell::default();
}

/// Maximum entries of a table: 64 PiB in parts of 64 KiB. A directory then has 32 MiB.
pub const MAX_ENTRIES: u64 = 1 << 40;

/// The size of a table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Number of entries.
    pub entries: u64,
    /// Bytes of leaves that all owners together keep in memory. Each owner keeps one leaf at least,
    /// and those in use.
    pub cache_bytes: u64,
}

/// The part of a table that its format has: its bytes on the disk.
pub trait Format: Send + Sync + Sized + 'static {
    /// The state of one core, such as its channels.
    type Local: 'static;

    /// Opens the state of the calling core.
    ///
    /// # Errors
    /// If a device cannot be opened there.
    fn open(&self) -> Result<Self::Local, DeviceError>;

    /// Reads the entries of a leaf into `entries`, whose entries are 0. `view` is its owner's.
    fn load(view: &Rc<View<Self>>, leaf: u64, entries: &Leaf) -> impl Future<Output = IoResult>;

    /// Writes the entries of `slots`. Entries may change meanwhile; each is written as it was at
    /// some moment of the call. The format decides whether they are durable then. `view` is the
    /// owner's.
    fn save(
        view: &Rc<View<Self>>,
        leaf: u64,
        entries: &Leaf,
        slots: Range<usize>,
    ) -> impl Future<Output = IoResult>;
}

/// A table whose leaves belong to some cores, and which any core can read. Its drop ends the views
/// of the owners.
pub struct Table<F: Format> {
    shared: Arc<Shared<F>>,
    /// Each ends the view of an owner when it is dropped.
    _open: Vec<oneshot::Sender<()>>,
}

struct Shared<F> {
    format: F,
    number: u64,
    /// The cores that own leaves. Their views live as long as the table.
    owners: Vec<Member>,
    members: Mutex<Members>,
    config: Config,
}

/// The view of a core. A later view of the same core has another serial number.
#[derive(Clone)]
struct Member {
    core: CoreRef,
    serial: u64,
}

/// The views that there are, of owners and of other cores.
#[derive(Default)]
struct Members {
    all: Vec<Member>,
    /// Number of holds, which a new view starts with.
    holds: u32,
}

impl<F> Shared<F> {
    /// The place of a leaf's owner. Neighbouring leaves have different owners.
    fn owner_of(&self, leaf: u64) -> usize {
        (leaf % self.owners.len() as u64) as usize
    }

    fn members(&self) -> MutexGuard<'_, Members> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<F: Format> Table<F> {
    /// Opens a table whose leaves belong to the cores `owners`. Must not be called on a core.
    ///
    /// # Errors
    /// If the table has more than [`MAX_ENTRIES`] entries, the format cannot be opened on an owner,
    /// or an owner has ended.
    ///
    /// # Panics
    /// Without owners.
    pub fn open(format: F, owners: &[CoreRef], config: Config) -> Result<Table<F>, DeviceError> {
        assert!(!owners.is_empty(), "a table needs an owner");
        if config.entries > MAX_ENTRIES {
            let message = format!("{} entries: at most {MAX_ENTRIES}", config.entries);
            return Err(DeviceError::new("mapping", message));
        }
        let number = fence::new_number();
        let owners =
            owners.iter().map(|core| Member { core: core.clone(), serial: fence::new_number() }).collect();
        let shared = Arc::new(Shared { format, number, owners, members: Mutex::default(), config });
        let mut open = Vec::new();
        for (place, owner) in shared.owners.iter().enumerate() {
            let (sender, ended) = oneshot::channel();
            let (shared, serial) = (shared.clone(), owner.serial);
            let opened = owner.core.call(move |core| {
                let view = View::new(shared, Some(place), serial, core)?;
                core.spawn(async move {
                    let _ = ended.await;
                    drop(view);
                });
                Ok(())
            });
            let index = owner.core.index();
            opened.map_err(|_| DeviceError::new("mapping", format!("core {index} has ended")))??;
            open.push(sender);
        }
        Ok(Table { shared, _open: open })
    }

    /// The view of the calling core, which opens it with the first call. It is open as long as it
    /// is in use.
    ///
    /// # Errors
    /// If the format cannot be opened on the core.
    pub fn view(&self) -> Result<Rc<View<F>>, DeviceError> {
        let core = reactor::current();
        match View::of(self.shared.number, &core) {
            Some(view) => Ok(view),
            None => View::new(self.shared.clone(), None, fence::new_number(), &core),
        }
    }
}

/// A table as one core uses it.
pub struct View<F: Format> {
    shared: Arc<Shared<F>>,
    core: Core,
    serial: u64,
    /// The place of this core among the owners, if it is one.
    place: Option<usize>,
    local: F::Local,
    gate: Gate,
    directory: RefCell<Directory>,
    /// Leaves that are on their way to the directory, and whether they were evicted meanwhile.
    fetched: RefCell<Vec<(u64, Rc<Cell<bool>>)>>,
    /// The leaves that this core owns.
    leaves: Leaves,
    /// Number of holds.
    holds: Cell<u32>,
    held: RefCell<Vec<Waker>>,
}

impl<F: Format> View<F> {
    fn new(
        shared: Arc<Shared<F>>,
        place: Option<usize>,
        serial: u64,
        core: &Core,
    ) -> Result<Rc<View<F>>, DeviceError> {
        let leaves = shared.config.cache_bytes / shared.owners.len() as u64 / size_of::<Leaf>() as u64;
        let local = shared.format.open()?;
        // A hold that begins later reaches the view by a message.
        let holds = {
            let mut members = shared.members();
            members.all.push(Member { core: core.remote(), serial });
            members.holds
        };
        let view = Rc::new(View {
            local,
            serial,
            place,
            core: core.clone(),
            gate: Gate::default(),
            directory: RefCell::new(Directory::new(shared.config.entries)),
            fetched: RefCell::default(),
            leaves: Leaves::new(usize::try_from(leaves).unwrap_or(usize::MAX).max(1)),
            holds: Cell::new(holds),
            held: RefCell::default(),
            shared,
        });
        let key = (view.shared.number, core.index());
        let weak: Weak<dyn Any> = Rc::<View<F>>::downgrade(&view);
        VIEWS.with_borrow_mut(|views| {
            views.retain(|_, view| view.strong_count() > 0);
            views.insert(key, weak);
        });
        Ok(view)
    }

    /// The view of a core, if there is one.
    fn of(number: u64, core: &Core) -> Option<Rc<View<F>>> {
        let view = VIEWS.with_borrow(|views| views.get(&(number, core.index())).and_then(Weak::upgrade))?;
        view.downcast().ok()
    }

    /// The view of a core with this serial number, if it has not ended.
    fn with_serial(number: u64, core: &Core, serial: u64) -> Option<Rc<View<F>>> {
        View::of(number, core).filter(|view| view.serial == serial)
    }

    /// The format.
    pub fn format(&self) -> &F {
        &self.shared.format
    }

    /// The format's state on this core.
    pub fn local(&self) -> &F::Local {
        &self.local
    }

    /// Begins a request that reads the table.
    #[inline]
    pub fn begin(&self) -> Running {
        self.gate.pass()
    }

    /// Begins a request that may change the table or the data that it points to. Waits while the
    /// table is held.
    pub async fn begin_change(&self) -> Running {
        poll_fn(|cx| {
            if self.holds.get() == 0 {
                return Poll::Ready(());
            }
            self.held.borrow_mut().push(cx.waker().clone());
            Poll::Pending
        })
        .await;
        self.gate.pass()
    }

    /// As [`View::begin_change`]; `None` while the table is held.
    #[inline]
    pub fn try_begin_change(&self) -> Option<Running> {
        (self.holds.get() == 0).then(|| self.gate.pass())
    }

    /// The entry `index`, if its leaf is in this core's directory.
    #[inline]
    pub fn entry(&self, index: u64) -> Option<u64> {
        let (leaf, slot) = split(index);
        let directory = self.directory.borrow();
        let leaf = directory.get(leaf)?;
        leaf.note_use();
        Some(leaf.get(slot))
    }

    /// The entries `index`, which is even, and `index + 1`, which change together. `None` if their
    /// leaf is not in this core's directory, or while they change.
    #[inline]
    pub fn entry_pair(&self, index: u64) -> Option<(u64, u64)> {
        let (leaf, slot) = split(index);
        let directory = self.directory.borrow();
        let leaf = directory.get(leaf)?;
        leaf.note_use();
        leaf.get_pair(slot)
    }

    /// The entry `index`, after its leaf was loaded if that is needed.
    ///
    /// # Errors
    /// [`IoError::OutOfRange`] behind the table's end; the error of the load;
    /// [`IoError::DeviceGone`] if the owner's core has ended.
    pub async fn fetch(self: &Rc<Self>, index: u64) -> Result<u64, IoError> {
        self.check(index)?;
        let (number, slot) = split(index);
        loop {
            if let Some(entry) = self.entry(index) {
                return Ok(entry);
            }
            let is_stale = Rc::new(Cell::new(false));
            self.fetched.borrow_mut().push((number, is_stale.clone()));
            let found = self
                .at_owner(self.shared.owner_of(number), move |view| async move {
                    view.find(number).await.map(|owned| owned.leaf.clone())
                })
                .await;
            self.fetched.borrow_mut().retain(|(_, other)| !Rc::ptr_eq(other, &is_stale));
            let leaf = found??;
            if is_stale.get() && !mutant::is(Mutant::StaleFetch) {
                continue;
            }
            leaf.note_use();
            let entry = leaf.get(slot);
            self.directory.borrow_mut().insert(number, leaf);
            return Ok(entry);
        }
    }

    /// Locks the slot of the entry `index`. Tasks get the lock in the order in which they asked
    /// its owner.
    ///
    /// # Errors
    /// As [`View::fetch`].
    pub async fn lock(self: &Rc<Self>, index: u64) -> Result<Slot<F>, IoError> {
        self.check(index)?;
        let (number, slot) = split(index);
        let shared = self.shared.clone();
        let locked = self.at_owner(self.shared.owner_of(number), move |view| async move {
            let owned = view.find(number).await?;
            owned.lock(slot).await;
            let lock = Lock::<F> { shared, index };
            Ok((lock, owned.leaf.get(slot)))
        });
        let (lock, entry) = locked.await??;
        Ok(Slot { view: self.clone(), lock, entry })
    }

    /// The slot of the entry `index` without a lock, for a caller that changes it before it waits.
    /// `None` if another core owns the leaf, the leaf is not in memory, or a task has locked the
    /// slot.
    pub fn unlocked(&self, index: u64) -> Option<Unlocked> {
        let (number, slot) = split(index);
        // Only its owner has a leaf here.
        let owned = self.leaves.get(number).filter(|owned| owned.is_unlocked(slot))?;
        Some(Unlocked { owned, slot })
    }

    /// Waits until all requests that had begun before, on any core, have ended.
    pub async fn grace(self: &Rc<Self>) {
        let (hold, released) = fence::hold();
        for member in self.members() {
            let is_skipped = mutant::is(Mutant::GraceOfOneCore) && member.serial != self.serial;
            if is_skipped || mutant::is(Mutant::NoGrace) {
                continue;
            }
            let hold = hold.clone();
            // A core that has ended has no requests.
            let _ = send(self.shared.number, &member, move |view: Rc<View<F>>| view.gate.close(hold)).await;
        }
        drop(hold);
        released.await;
    }

    /// Keeps changes from beginning, on all cores, until the result is dropped. Changes that have
    /// begun continue: [`View::grace`] waits for them.
    pub async fn hold(self: &Rc<Self>) -> Held<F> {
        let held = Held { view: self.clone() };
        let members = {
            let mut members = self.shared.members();
            members.holds += 1;
            members.all.clone()
        };
        for member in members {
            if mutant::is(Mutant::HoldOfOneCore) && member.serial != self.serial {
                continue;
            }
            let _ = self.ask(&member, |view| async move { view.holds.set(view.holds.get() + 1) }).await;
        }
        held
    }

    /// Saves all entries that were set before the call.
    ///
    /// # Errors
    /// The first error of a save. Its entries count as not saved.
    pub async fn flush(self: &Rc<Self>) -> IoResult {
        let mut result = Ok(());
        for place in 0..self.shared.owners.len() {
            let saved = self.at_owner(place, |view| async move { view.save_all().await }).await;
            result = result.and(saved.and_then(|saved| saved));
        }
        result
    }

    fn check(&self, index: u64) -> IoResult {
        if index < self.shared.config.entries { Ok(()) } else { Err(IoError::OutOfRange) }
    }

    /// The leaf `number` at its owner, which this is.
    async fn find(self: &Rc<Self>, number: u64) -> Result<Rc<Owned>, IoError> {
        let owned = match self.leaves.find(number).await? {
            Found::Ready(owned) => return Ok(owned),
            Found::ToLoad(owned) => owned,
        };
        let loaded = F::load(self, number, &owned.leaf).await;
        self.leaves.end_load(&owned, loaded);
        loaded?;
        if self.leaves.is_over() && !self.leaves.is_evicting.replace(true) {
            let view = self.clone();
            self.core.spawn(async move { view.evict().await });
        }
        Ok(owned)
    }

    async fn save_all(self: &Rc<Self>) -> IoResult {
        let mut result = Ok(());
        for owned in self.leaves.dirty() {
            result = result.and(self.save(&owned).await);
        }
        result
    }

    /// Saves a leaf. Waits for a save that has begun before.
    async fn save(self: &Rc<Self>, owned: &Owned) -> IoResult {
        if !mutant::is(Mutant::FlushOvertakes) {
            owned.saving.acquire(1).await;
        }
        let mut result = Ok(());
        if let Some(slots) = owned.take_changes() {
            result = F::save(self, owned.number, &owned.leaf, slots.clone()).await;
            owned.end_save();
            if result.is_err() && !mutant::is(Mutant::FailedSave) {
                owned.note_change(slots);
            }
        }
        if !mutant::is(Mutant::FlushOvertakes) {
            owned.saving.release(1);
        }
        result
    }

    /// Evicts leaves until no more are in memory than the budget allows, or all are in use.
    async fn evict(self: &Rc<Self>) {
        while self.leaves.is_over() {
            let Some(owned) = self.leaves.victim() else { break };
            // A leaf that cannot be saved stays.
            if !mutant::is(Mutant::DirtyEviction) && self.save(&owned).await.is_err() {
                break;
            }
            if !self.leaves.begin_eviction(&owned) {
                continue;
            }
            let number = owned.number;
            for member in self.members() {
                if mutant::is(Mutant::NoForgetting) && member.serial != self.serial {
                    continue;
                }
                let _ = self.ask(&member, move |view| async move { view.forget(number) }).await;
            }
            self.leaves.end_eviction(&owned);
        }
        self.leaves.is_evicting.set(false);
    }

    fn forget(&self, leaf: u64) {
        self.directory.borrow_mut().remove(leaf);
        self.fetched
            .borrow()
            .iter()
            .filter(|(number, _)| *number == leaf)
            .for_each(|(_, flag)| flag.set(true));
    }

    fn release(&self) {
        // A broken variant holds less than it releases.
        self.holds.set(self.holds.get().saturating_sub(1));
        if self.holds.get() == 0 {
            self.held.take().into_iter().for_each(Waker::wake);
        }
    }

    fn members(&self) -> Vec<Member> {
        self.shared.members().all.clone()
    }

    /// The leaf `number` at its owner, which this is, if it is in memory or on its way there. A
    /// format sets entries of it when it has changed them on the disk, and keeps changes from
    /// beginning meanwhile.
    pub fn loaded(&self, number: u64) -> Option<Arc<Leaf>> {
        self.leaves.get(number).map(|owned| owned.leaf.clone())
    }

    /// Whether this core is the only one that has a view.
    pub fn is_alone(&self) -> bool {
        self.shared.members().all.len() == 1
    }

    /// Runs `work` with the view of the owner at `place`, on its core, and waits for its end.
    ///
    /// # Errors
    /// [`IoError::DeviceGone`] if the owner's core has ended, or the table is closed.
    ///
    /// # Panics
    /// If there are fewer owners.
    pub async fn at_owner<R, W>(
        self: &Rc<Self>,
        place: usize,
        work: impl FnOnce(Rc<View<F>>) -> W + Send + 'static,
    ) -> Result<R, IoError>
    where
        R: Send + 'static,
        W: Future<Output = R> + 'static,
    {
        self.ask(&self.shared.owners[place], work).await
    }

    /// As [`View::at_owner`], for work that does not wait. It goes by the route between the two
    /// cores, which costs less, and may overtake messages that were sent before.
    ///
    /// # Errors
    /// As [`View::at_owner`].
    ///
    /// # Panics
    /// If there are fewer owners.
    pub async fn at_owner_at_once<R: Send + 'static>(
        self: &Rc<Self>,
        place: usize,
        work: impl FnOnce(&Rc<View<F>>) -> R + Send + 'static,
    ) -> Result<R, IoError> {
        let Member { core, serial } = &self.shared.owners[place];
        if *serial == self.serial {
            return Ok(work(self));
        }
        let (number, serial) = (self.shared.number, *serial);
        let work = move |core: &Core| View::with_serial(number, core, serial).map(|view| work(&view));
        let done = Call::default().run(core, AtOnce(Box::new(work))).await;
        done.ok().flatten().ok_or(IoError::DeviceGone)
    }

    /// Runs `work` later with the view of the owner at `place`, on its core, unless that view or
    /// its core has ended. Keeps no view alive meanwhile.
    ///
    /// # Panics
    /// If there are fewer owners.
    pub fn post(&self, place: usize, work: impl FnOnce(Rc<View<F>>) + Send + 'static) {
        send_later(self.shared.number, self.shared.owners[place].clone(), work);
    }

    /// Runs `work` with the view of a core, and waits for its end.
    async fn ask<R, W>(
        self: &Rc<Self>,
        member: &Member,
        work: impl FnOnce(Rc<View<F>>) -> W + Send + 'static,
    ) -> Result<R, IoError>
    where
        R: Send + 'static,
        W: Future<Output = R> + 'static,
    {
        if member.serial == self.serial {
            return Ok(work(self.clone()).await);
        }
        let (sender, answer) = oneshot::channel();
        let start = move |view: Rc<View<F>>| {
            let core = view.core.clone();
            core.spawn(async move { drop(sender.send(work(view).await)) });
        };
        send(self.shared.number, member, start).await?;
        answer.await.map_err(|_| IoError::DeviceGone)
    }
}

impl<F: Format> Drop for View<F> {
    fn drop(&mut self) {
        self.shared.members().all.retain(|member| member.serial != self.serial);
    }
}

/// Sends `work` to a view of the table `number`, which drops it if the view has ended. Waits while
/// the core's inbox is full.
async fn send<F: Format>(
    number: u64,
    member: &Member,
    work: impl FnOnce(Rc<View<F>>) + Send + 'static,
) -> Result<(), IoError> {
    let serial = member.serial;
    let mut message: Box<dyn FnOnce(&Core) + Send> = Box::new(move |core| {
        if let Some(view) = View::with_serial(number, core, serial) {
            work(view);
        }
    });
    loop {
        match member.core.try_run(message) {
            Ok(()) => return Ok(()),
            Err(NotSent::Stopped) => return Err(IoError::DeviceGone),
            // Two cores that wait for room in each other's inbox would deadlock.
            Err(NotSent::Full(back)) => message = back,
        }
        yield_now().await;
    }
}

/// Sends `work` to a view of the table `number` at some time, from any core.
fn send_later<F: Format>(number: u64, member: Member, work: impl FnOnce(Rc<View<F>>) + Send + 'static) {
    reactor::current().spawn(async move {
        let _ = send(number, &member, work).await;
    });
}

/// Work of [`View::at_owner_at_once`]. Its answer is `None` if the view has ended.
struct AtOnce<R>(Box<WorkAtOnce<R>>);

type WorkAtOnce<R> = dyn FnOnce(&Core) -> Option<R> + Send;

impl<R: Send + 'static> CallRequest for AtOnce<R> {
    type Answer = Option<R>;

    const IS_ORDERED: bool = false;

    fn start(self, core: &Core, reply: Reply<AtOnce<R>>) {
        reply.send((self.0)(core));
    }
}

/// The leaf and the slot of an entry.
#[inline]
fn split(index: u64) -> (u64, usize) {
    (index / ENTRIES as u64, (index % ENTRIES as u64) as usize)
}

/// A locked slot. Its drop frees the lock.
pub struct Slot<F: Format> {
    view: Rc<View<F>>,
    lock: Lock<F>,
    entry: u64,
}

impl<F: Format> Slot<F> {
    /// The entry, which no other task changes.
    pub fn entry(&self) -> u64 {
        self.entry
    }

    /// Sets the entry. When that has happened, every core reads the new one.
    ///
    /// # Errors
    /// [`IoError::DeviceGone`] if the owner's core has ended.
    pub async fn set(&mut self, entry: u64) -> IoResult {
        let (_, slot) = split(self.lock.index);
        self.at_leaf(move |owned| owned.set(slot, entry)).await?;
        self.entry = entry;
        Ok(())
    }

    /// As [`Slot::set`], also sets the next entry, which this lock covers: the index is even. Cores
    /// that use [`View::entry_pair`] read both old entries or both new ones. The first entry must
    /// not be `u64::MAX`.
    ///
    /// # Errors
    /// As [`Slot::set`].
    pub async fn set_pair(&mut self, entry: u64, next: u64) -> IoResult {
        let (_, slot) = split(self.lock.index);
        self.at_leaf(move |owned| owned.set_pair(slot, entry, next)).await?;
        self.entry = entry;
        Ok(())
    }

    /// Changes the leaf at its owner.
    async fn at_leaf(&self, change: impl FnOnce(&Owned) + Send + 'static) -> IoResult {
        let (number, _) = split(self.lock.index);
        let changed = self.view.at_owner(self.view.shared.owner_of(number), move |view| async move {
            // A leaf with a locked slot is in memory.
            view.leaves.get(number).map(|owned| change(&owned)).ok_or(IoError::DeviceGone)
        });
        changed.await?
    }
}

/// A slot that no task has locked, on the core that owns its leaf, until the caller waits.
pub struct Unlocked {
    owned: Rc<Owned>,
    slot: usize,
}

impl Unlocked {
    /// The entry.
    pub fn entry(&self) -> u64 {
        self.owned.leaf.get(self.slot)
    }

    /// The entry of the next slot, which changes together with this one.
    pub fn next(&self) -> u64 {
        self.owned.leaf.get(self.slot + 1)
    }

    /// As [`Slot::set`].
    pub fn set(&self, entry: u64) {
        self.owned.set(self.slot, entry);
    }

    /// As [`Slot::set_pair`].
    pub fn set_pair(&self, entry: u64, next: u64) {
        self.owned.set_pair(self.slot, entry, next);
    }
}

/// The lock of a slot, on its way between cores.
struct Lock<F: Format> {
    shared: Arc<Shared<F>>,
    index: u64,
}

impl<F: Format> Drop for Lock<F> {
    fn drop(&mut self) {
        let (number, slot) = split(self.index);
        let place = self.shared.owner_of(number);
        let unlock = move |view: Rc<View<F>>| {
            if let Some(owned) = view.leaves.get(number) {
                owned.unlock(slot);
            }
        };
        let core = reactor::current();
        match View::of(self.shared.number, &core).filter(|view: &Rc<View<F>>| view.place == Some(place)) {
            Some(view) => unlock(view),
            None => send_later(self.shared.number, self.shared.owners[place].clone(), unlock),
        }
    }
}

/// A hold of a table. Changes begin again soon after its drop.
pub struct Held<F: Format> {
    view: Rc<View<F>>,
}

impl<F: Format> Drop for Held<F> {
    fn drop(&mut self) {
        let shared = &self.view.shared;
        let members = {
            let mut members = shared.members();
            members.holds -= 1;
            members.all.clone()
        };
        for member in members {
            send_later(shared.number, member, |view: Rc<View<F>>| view.release());
        }
    }
}
