//! One core: its turn, its sleep, and its tasks, timers, sources and buffers.

pub(crate) mod posts;

use crate::buffer::{BufferPool, WeakPool};
use crate::clock::{Clock, MonotonicClock, VirtualClock};
use crate::doorbell::Doorbell;
use crate::park::{Park, UringPark, VirtualPark};
use crate::remote::{CoreRef, Inbox};
use crate::route::{Route, Sender};
use crate::source::{PollWindow, Registered, Source, SourceHandle};
use crate::task::{Body, Task, TaskFuture};
use crate::timer::{Sleep, Timers};
use base::Rng;
use block::IoFuture;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Configuration of a core.
#[derive(Clone, Debug, Default)]
pub struct CoreConfig {
    /// Processor to which the thread is bound; `None`: the scheduler chooses.
    pub cpu: Option<usize>,
    /// How long the core polls a source without work.
    pub poll: PollWindow,
    /// Seed of the core's random numbers; 0 derives one from the process id and the core's index.
    pub seed: u64,
}

/// The executor of one thread. A cheap handle that is not `Send`.
#[derive(Clone)]
pub struct Core(Rc<Inner>);

struct Inner {
    index: usize,
    body: &'static Body,
    inbox: Arc<Inbox>,
    /// Routes from other cores.
    routes: RefCell<Vec<Arc<Route>>>,
    /// Routes to other cores.
    senders: RefCell<Vec<Sender>>,
    /// Something was sent that the receiving core may not have noticed, as it sleeps or has ended.
    has_unannounced: Cell<bool>,
    /// Turns without work before the core sleeps: more posts may be about to come.
    patience: Cell<u32>,
    clock: Box<dyn Clock>,
    rng: RefCell<Rng>,
    timers: Timers,
    buffers: BufferPool,
    /// Other pools that are trimmed before the core sleeps, and the bytes that each keeps.
    trimmed: RefCell<Vec<(WeakPool, usize)>>,
    ready: RefCell<VecDeque<&'static Task>>,
    free_tasks: RefCell<Vec<&'static Task>>,
    /// Headers of the body that this core has not used yet.
    unused_tasks: RefCell<Vec<&'static Task>>,
    /// Headers that this core has used, in the order of their first use.
    used_tasks: RefCell<Vec<&'static Task>>,
    park: RefCell<Box<dyn Park>>,
    sources: RefCell<Vec<Option<Rc<Registered>>>>,
    active: RefCell<Vec<Rc<Registered>>>,
    next_generation: Cell<u64>,
    poll: PollWindow,
    turns: Cell<u64>,
    /// The last reading of the clock in this turn; `u64::MAX` before the first.
    recent_ns: Cell<u64>,
    sleeps: Cell<u64>,
    messages: Cell<u64>,
    foreign_wakes: Cell<u64>,
    /// Time up to which turns without work are counted; `u64::MAX` after a turn with work.
    idle_since_ns: Cell<u64>,
    is_stopping: Cell<bool>,
}

/// The start of a request ([`Core::stopwatch`]).
#[derive(Clone, Copy, Debug)]
pub struct Stopwatch {
    start_ns: u64,
    turn: u64,
}

/// Turns between two readings of the clock while the core has work. Idle sources and timers wait
/// that much longer.
const TURNS_PER_TICK: u64 = 8;
/// Messages of other threads run in one turn.
const MESSAGES_PER_TURN: usize = 32;
/// Bits of a park token that hold the source's place. The rest is a generation, which distinguishes
/// late events of a removed source from those of its successor.
const PLACE_BITS: u32 = 24;

thread_local! {
    static CURRENT: Cell<*const Inner> = const { Cell::new(ptr::null()) };
}

/// The core of the calling thread.
///
/// # Panics
/// If no core runs on this thread.
pub fn current() -> Core {
    let inner = CURRENT.get();
    assert!(!inner.is_null(), "no core runs on this thread");
    // SAFETY: `Entered` keeps the core alive while it is current, and the pointer came from its
    // `Rc`.
    unsafe {
        Rc::increment_strong_count(inner);
        Core(Rc::from_raw(inner))
    }
}

/// Makes a core the current one of its thread until dropped.
struct Entered<'a> {
    before: *const Inner,
    _core: &'a Core,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        CURRENT.set(self.before);
    }
}

impl Inner {
    #[inline]
    fn queue(&self, task: &'static Task) {
        if !task.is_queued.replace(true) {
            self.ready.borrow_mut().push_back(task);
        }
    }
}

impl Core {
    /// A core of the calling thread with the machine's clock.
    ///
    /// # Errors
    /// If the kernel refuses an io_uring or an eventfd.
    pub fn start(index: usize, config: &CoreConfig) -> io::Result<Core> {
        let clock = MonotonicClock::default();
        let seed =
            if config.seed == 0 { u64::from(std::process::id()) << 32 | index as u64 } else { config.seed };
        Ok(Core::with(index, Box::new(clock), Box::new(UringPark::new()?), seed, config.poll))
    }

    /// A core with injected clock and park, as the simulator uses.
    pub fn with(
        index: usize,
        clock: Box<dyn Clock>,
        mut park: Box<dyn Park>,
        seed: u64,
        poll: PollWindow,
    ) -> Core {
        let body = Body::take(park.take_wake_fd().map(Doorbell::new));
        let inbox = Inbox::new(body);
        body.set_inbox(inbox.clone());
        Core(Rc::new(Inner {
            index,
            body,
            inbox,
            routes: RefCell::default(),
            senders: RefCell::default(),
            has_unannounced: Cell::new(false),
            patience: Cell::new(0),
            clock,
            rng: RefCell::new(Rng::new(seed)),
            timers: Timers::default(),
            buffers: BufferPool::default(),
            trimmed: RefCell::default(),
            ready: RefCell::default(),
            free_tasks: RefCell::default(),
            unused_tasks: RefCell::new(body.tasks()),
            used_tasks: RefCell::default(),
            park: RefCell::new(park),
            sources: RefCell::default(),
            active: RefCell::default(),
            next_generation: Cell::new(0),
            poll,
            turns: Cell::new(0),
            recent_ns: Cell::new(u64::MAX),
            sleeps: Cell::new(0),
            messages: Cell::new(0),
            foreign_wakes: Cell::new(0),
            idle_since_ns: Cell::new(u64::MAX),
            is_stopping: Cell::new(false),
        }))
    }

    /// A core under virtual time.
    pub(crate) fn simulated(index: usize, clock: &VirtualClock, seed: u64) -> Core {
        let park = Box::new(VirtualPark(clock.clone()));
        Core::with(index, Box::new(clock.clone()), park, seed, PollWindow::up_to(0))
    }

    /// The core's number among those that were started together.
    pub fn index(&self) -> usize {
        self.0.index
    }

    /// The core as other threads see it.
    pub fn remote(&self) -> CoreRef {
        CoreRef { inbox: self.0.inbox.clone(), index: self.0.index }
    }

    /// Nanoseconds on the core's clock.
    #[inline]
    pub fn now_ns(&self) -> u64 {
        let now_ns = self.0.clock.now_ns();
        self.0.recent_ns.set(now_ns);
        now_ns
    }

    /// Starts to measure the duration of a request. Requests that begin or end in one turn share a
    /// reading of the clock. This costs far less than two readings a request; a time may be wrong
    /// by about a turn.
    #[inline]
    pub fn stopwatch(&self) -> Stopwatch {
        Stopwatch { start_ns: self.recent_ns(), turn: self.0.turns.get() }
    }

    /// Nanoseconds since a stopwatch of this core was started.
    #[inline]
    pub fn elapsed_ns(&self, stopwatch: &Stopwatch) -> u64 {
        // A request that ends in the turn in which it began has taken time within that turn.
        let is_same = stopwatch.turn == self.0.turns.get();
        let now_ns = if is_same { self.now_ns() } else { self.recent_ns() };
        now_ns.saturating_sub(stopwatch.start_ns)
    }

    #[inline]
    fn recent_ns(&self) -> u64 {
        match self.0.recent_ns.get() {
            u64::MAX => self.now_ns(),
            recent_ns => recent_ns,
        }
    }

    /// A random number from the core's seeded generator; not for secrets.
    pub fn random_u64(&self) -> u64 {
        self.0.rng.borrow_mut().draw()
    }

    /// Waits for `ns` nanoseconds.
    pub fn sleep(&self, ns: u64) -> Sleep {
        Sleep::new(self.clone(), self.now_ns().saturating_add(ns))
    }

    /// The buffers of this core.
    pub fn buffers(&self) -> &BufferPool {
        &self.0.buffers
    }

    /// Returns free buffers of `pool` beyond `stock` bytes to the system whenever this core goes to
    /// sleep.
    pub fn trim_when_idle(&self, pool: &BufferPool, stock: usize) {
        self.0.trimmed.borrow_mut().push((pool.downgrade(), stock));
    }

    /// Number of sleeps of the core so far; between them it polled or worked.
    pub fn sleeps(&self) -> u64 {
        self.0.sleeps.get()
    }

    /// Number of messages of other threads that the core has taken so far.
    pub fn messages(&self) -> u64 {
        self.0.messages.get()
    }

    /// Number of tasks of the core that others have woken so far.
    pub fn foreign_wakes(&self) -> u64 {
        self.0.foreign_wakes.get()
    }

    pub(crate) fn timers(&self) -> &Timers {
        &self.0.timers
    }

    /// Adds a task. The call boxes the future: tasks are made when queues start, not for each
    /// request.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        let task = self.new_task_of(TaskFuture::Boxed(Box::pin(future)));
        self.0.queue(task);
    }

    /// Carries out a request, whose result is dropped: now as far as it gets without waiting, and
    /// the rest as a task. The request's memory is from the core's free list, and so is the task:
    /// the call allocates nothing once the core is warm.
    pub fn start_request(&self, request: IoFuture<'static>) {
        let task = self.new_task_of(TaskFuture::Pooled(request));
        // SAFETY: a task that has just been made is not running.
        unsafe { self.poll(task) };
    }

    fn new_task_of(&self, future: TaskFuture) -> &'static Task {
        let free = self.0.free_tasks.borrow_mut().pop();
        let task = free.unwrap_or_else(|| self.new_task());
        // SAFETY: the task was free, so its future is not running. This is its core's thread, as
        // `Core` is not `Send`.
        unsafe { task.set_future(Some(future)) };
        task
    }

    /// Polls a task, and frees it if it has ended.
    ///
    /// # Safety
    /// The task is not running.
    #[inline]
    unsafe fn poll(&self, task: &'static Task) {
        // SAFETY: this is the core's thread, and by contract the future does not run.
        if unsafe { task.poll() } {
            // SAFETY: the future has just returned.
            unsafe { task.set_future(None) };
            self.0.free_tasks.borrow_mut().push(task);
        }
    }

    #[cold]
    fn new_task(&self) -> &'static Task {
        let unused = self.0.unused_tasks.borrow_mut().pop();
        let task = unused.unwrap_or_else(|| self.0.body.new_task());
        self.0.used_tasks.borrow_mut().push(task);
        task
    }

    /// Wakes one of the tasks that exist or existed, as a stale waker may. `number` chooses it.
    pub(crate) fn wake_any(&self, number: u64) {
        let used = self.0.used_tasks.borrow();
        if !used.is_empty() {
            self.0.queue(used[(number % used.len() as u64) as usize]);
        }
    }

    /// Polls `source` until the handle is dropped. The core does not keep the source alive.
    pub fn register(&self, source: &Rc<dyn Source>) -> SourceHandle {
        let registered = Registered::new(source, self.0.poll);
        let mut sources = self.0.sources.borrow_mut();
        let place = sources.iter().position(Option::is_none).unwrap_or_else(|| {
            sources.push(None);
            sources.len() - 1
        });
        let generation = self.0.next_generation.replace(self.0.next_generation.get() + 1);
        registered.token.set(generation << PLACE_BITS | place as u64);
        sources[place] = Some(registered.clone());
        drop(sources);
        self.activate(&registered);
        SourceHandle::new(self.clone(), registered)
    }

    /// Adds a source to the active list.
    #[cold]
    pub(crate) fn activate(&self, registered: &Rc<Registered>) {
        if registered.is_gone.get() || registered.is_active.replace(true) {
            return;
        }
        registered.note_work();
        if let Some(source) = registered.source.upgrade() {
            source.disarm();
        }
        self.0.active.borrow_mut().push(registered.clone());
    }

    pub(crate) fn forget_source(&self, registered: &Rc<Registered>) {
        registered.is_gone.set(true);
        let token = registered.token.get();
        self.0.sources.borrow_mut()[place_of(token)] = None;
        if registered.is_watched.get() {
            self.0.park.borrow_mut().unwatch(token);
        }
    }

    pub(crate) fn request_stop(&self) {
        self.0.is_stopping.set(true);
    }

    fn enter(&self) -> Entered<'_> {
        Entered { before: CURRENT.replace(Rc::as_ptr(&self.0)), _core: self }
    }

    /// Runs until [`Core::request_stop`].
    pub(crate) fn run(&self) {
        let _entered = self.enter();
        while !self.0.is_stopping.get() {
            self.turn_or_sleep();
        }
    }

    /// Runs `work` with this core as the thread's [`current`] one, for callers that schedule turns
    /// themselves.
    pub fn with_current<R>(&self, work: impl FnOnce() -> R) -> R {
        let _entered = self.enter();
        let result = work();
        self.0.announce_posts();
        result
    }

    /// Runs one turn, for callers that schedule several cores themselves. Returns whether the turn
    /// found work.
    pub fn turn(&self) -> bool {
        let _entered = self.enter();
        self.turn_entered()
    }

    /// Closes the inbox and drops all tasks. A task with a request in flight ends the process here:
    /// the users of a core must stop before the core.
    pub(crate) fn drop_tasks(&self) {
        let _entered = self.enter();
        self.0.inbox.close();
        let mut routes = self.0.routes.take();
        routes.extend(self.0.inbox.take_new_routes());
        routes.iter().for_each(|route| route.drain());
        let tasks = self.0.body.tasks();
        for task in &tasks {
            // SAFETY: no task runs now, and this is the core's thread.
            unsafe { task.set_future(None) };
        }
        // Last, because dropping a future may wake tasks that were dropped before.
        self.0.ready.borrow_mut().clear();
        tasks.iter().for_each(|task| task.is_queued.set(false));
        self.0.announce_posts();
    }

    /// Ends a simulated core before the others, as the end of its thread does. It still takes
    /// turns, without work. None of its tasks may have a request in flight.
    pub fn end_simulated(&self) {
        self.drop_tasks();
    }

    /// Ends the core. The thread keeps its free memory until [`block::release_pool`].
    pub(crate) fn end(self) {
        self.drop_tasks();
        // From here on a stray wake takes the remote path, to the next core of the body.
        self.0.body.give_back();
    }

    fn turn_or_sleep(&self) {
        if self.turn_entered() {
            self.0.idle_since_ns.set(u64::MAX);
        } else if self.0.active.borrow().is_empty() && self.0.ready.borrow().is_empty() {
            if let Some(patience) = self.0.patience.get().checked_sub(1) {
                self.0.patience.set(patience);
                std::hint::spin_loop();
                return;
            }
            self.0.idle_since_ns.set(u64::MAX);
            self.sleep_until_event();
        } else if self.0.turns.get().is_multiple_of(TURNS_PER_TICK) {
            self.note_idle();
        }
    }

    /// Counts the time since the last tick as polled, if no turn since then has found work.
    fn note_idle(&self) {
        let now_ns = self.now_ns();
        if let Some(ns) = now_ns.checked_sub(self.0.idle_since_ns.replace(now_ns)) {
            // Only this core writes.
            let polled_ns = &self.0.inbox.polled_ns.0;
            polled_ns.store(polled_ns.load(Ordering::Relaxed) + ns, Ordering::Relaxed);
        }
    }

    #[inline]
    fn turn_entered(&self) -> bool {
        let inner = &*self.0;
        let turns = inner.turns.get() + 1;
        inner.turns.set(turns);
        inner.recent_ns.set(u64::MAX);
        let mut is_busy = false;
        if !inner.inbox.is_empty() {
            is_busy |= self.run_messages();
        }
        if inner.inbox.has_new_routes() {
            self.take_new_routes();
        }
        is_busy |= self.run_posts();
        if inner.body.has_woken() {
            inner.body.take_woken(|task| {
                inner.foreign_wakes.set(inner.foreign_wakes.get() + 1);
                inner.queue(task);
            });
        }
        is_busy |= self.run_ready();
        let is_tick = turns.is_multiple_of(TURNS_PER_TICK);
        is_busy |= self.serve_sources(is_tick);
        if !inner.timers.is_empty() && (is_tick || !is_busy) {
            is_busy |= inner.timers.fire(inner.clock.now_ns()) > 0;
        }
        inner.park.borrow_mut().check(&mut |token, goes_on| self.note_event(token, goes_on));
        inner.announce_posts();
        is_busy
    }

    #[cold]
    fn run_messages(&self) -> bool {
        for _ in 0..MESSAGES_PER_TURN {
            let Some(message) = self.0.inbox.take() else { break };
            self.0.messages.set(self.0.messages.get() + 1);
            message.run(self);
        }
        true
    }

    /// Runs the tasks that are ready now. Tasks that they wake run after the sources.
    #[inline]
    fn run_ready(&self) -> bool {
        let count = self.0.ready.borrow().len();
        for _ in 0..count {
            let Some(task) = self.0.ready.borrow_mut().pop_front() else { break };
            task.is_queued.set(false);
            // SAFETY: tasks that were made before run from here only, one at a time.
            unsafe { self.poll(task) };
        }
        count > 0
    }

    #[inline]
    fn serve_sources(&self, is_tick: bool) -> bool {
        let mut found = 0;
        let mut now_ns = None;
        let mut i = 0;
        loop {
            let Some(registered) = self.0.active.borrow().get(i).cloned() else { break };
            let source = if registered.is_gone.get() { None } else { registered.source.upgrade() };
            let Some(source) = source else {
                self.0.active.borrow_mut().swap_remove(i);
                continue;
            };
            source.flush();
            let count = source.poll();
            found += count;
            if count > 0 {
                registered.note_work();
            } else if is_tick {
                let now_ns = *now_ns.get_or_insert_with(|| self.now_ns());
                if registered.is_window_over(now_ns) && self.arm(&registered, &*source, now_ns) {
                    self.0.active.borrow_mut().swap_remove(i);
                    continue;
                }
            }
            i += 1;
        }
        found > 0
    }

    #[cold]
    fn arm(&self, registered: &Registered, source: &dyn Source, now_ns: u64) -> bool {
        if !source.arm() {
            registered.note_work();
            return false;
        }
        if let Some(fd) = registered.event_fd
            && !registered.is_watched.replace(true)
        {
            self.0.park.borrow_mut().watch(fd, registered.token.get());
        }
        registered.note_armed(now_ns);
        true
    }

    fn note_event(&self, token: u64, goes_on: bool) {
        let registered = match self.0.sources.borrow().get(place_of(token)) {
            Some(Some(registered)) if registered.token.get() == token => registered.clone(),
            _ => return,
        };
        registered.is_watched.set(goes_on);
        if !registered.is_active.get() {
            registered.note_event(self.0.poll, self.now_ns());
            self.activate(&registered);
        }
    }

    #[cold]
    fn sleep_until_event(&self) {
        let inner = &*self.0;
        inner.buffers.trim();
        inner.trimmed.borrow_mut().retain(|(pool, stock)| pool.trim(*stock));
        self.forget_routes();
        inner.body.begin_sleep();
        if inner.inbox.is_empty() && !inner.body.has_woken() && !self.has_posts() {
            inner.sleeps.set(inner.sleeps.get() + 1);
            let timeout_ns = inner.timers.next_deadline().map(|at| at.saturating_sub(self.now_ns()));
            let mut park = inner.park.borrow_mut();
            park.wait(timeout_ns, &mut |token, goes_on| self.note_event(token, goes_on));
        }
        inner.body.woke_up();
    }

    /// Whether the core has no work until time passes or another thread acts.
    pub(crate) fn is_idle(&self) -> bool {
        let inner = &*self.0;
        let is_due = || inner.timers.next_deadline().is_some_and(|at| at <= self.now_ns());
        inner.ready.borrow().is_empty()
            && inner.inbox.is_empty()
            && !inner.body.has_woken()
            && !self.has_posts()
            && inner.active.borrow().is_empty()
            && !is_due()
    }

    fn run_until_set<R: 'static>(&self, future: impl Future<Output = R> + 'static) -> R {
        let result = Rc::new(Cell::new(None));
        let target = result.clone();
        let entered = self.enter();
        self.spawn(async move { target.set(Some(future.await)) });
        loop {
            self.turn_or_sleep();
            if let Some(result) = result.take() {
                drop(entered);
                self.clone().end();
                block::release_pool();
                return result;
            }
        }
    }
}

fn place_of(token: u64) -> usize {
    (token & ((1 << PLACE_BITS) - 1)) as usize
}

/// Runs a core on the calling thread until `future` ends.
///
/// # Panics
/// If the kernel refuses an io_uring or an eventfd.
pub fn run<R: 'static>(future: impl Future<Output = R> + 'static) -> R {
    let core = Core::start(0, &CoreConfig::default()).expect("an io_uring for the core");
    core.run_until_set(future)
}

/// Runs a core under virtual time until the future that `make` returns ends. The same seed gives
/// the same run.
///
/// # Panics
/// If no task is ready and no timer runs before the future ends.
pub fn run_simulated<R: 'static, F: Future<Output = R> + 'static>(
    seed: u64,
    make: impl FnOnce(VirtualClock) -> F,
) -> R {
    let clock = VirtualClock::default();
    let core = Core::simulated(0, &clock, seed);
    core.run_until_set(make(clock))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cores, yield_now};
    use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
    use std::task::{Poll, Waker};

    #[test]
    fn virtual_time_passes_only_while_all_tasks_wait() {
        let trace = run_simulated(7, |_| async {
            let core = current();
            let trace = Rc::new(RefCell::new(Vec::new()));
            for ns in [30, 10, 20] {
                let (core, trace) = (core.clone(), trace.clone());
                core.clone().spawn(async move {
                    core.sleep(ns).await;
                    trace.borrow_mut().push((core.now_ns(), core.random_u64()));
                });
            }
            core.sleep(1_000_000_000_000).await;
            trace.take()
        });
        assert_eq!(trace.iter().map(|t| t.0).collect::<Vec<_>>(), [10, 20, 30]);
    }

    #[test]
    fn a_timer_that_is_dropped_does_not_fire_and_its_slot_serves_again() {
        run_simulated(1, |clock| async move {
            let core = current();
            for _ in 0..3 {
                let mut sleep = Box::pin(core.sleep(5));
                std::future::poll_fn(|cx| {
                    assert!(sleep.as_mut().poll(cx).is_pending());
                    Poll::Ready(())
                })
                .await;
                drop(sleep);
                core.sleep(10).await;
            }
            assert_eq!(clock.now_ns(), 30);
        });
    }

    /// Counts the edges of an eventfd.
    struct Doorbell {
        fd: OwnedFd,
        handle: RefCell<Option<SourceHandle>>,
        work: Arc<std::sync::atomic::AtomicUsize>,
        seen: Cell<usize>,
        waker: RefCell<Option<Waker>>,
        arms: Cell<usize>,
    }

    impl Source for Doorbell {
        fn flush(&self) {}
        fn poll(&self) -> usize {
            let new = self.work.load(std::sync::atomic::Ordering::SeqCst) - self.seen.get();
            self.seen.set(self.seen.get() + new);
            if new > 0
                && let Some(waker) = self.waker.take()
            {
                waker.wake();
            }
            new
        }
        fn event_fd(&self) -> Option<RawFd> {
            Some(self.fd.as_raw_fd())
        }
        fn arm(&self) -> bool {
            self.arms.set(self.arms.get() + 1);
            self.work.load(std::sync::atomic::Ordering::SeqCst) == self.seen.get()
        }
        fn disarm(&self) {}
    }

    #[test]
    fn an_idle_core_sleeps_and_no_doorbell_is_missed() {
        const RINGS: usize = 200;
        // SAFETY: a fresh descriptor.
        let fd = unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_CLOEXEC)) };
        let bell = fd.try_clone().unwrap();
        let work = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let theirs = work.clone();
        let ringer = std::thread::spawn(move || {
            for i in 0..RINGS {
                theirs.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                // SAFETY: writes 8 bytes of a live value.
                unsafe { libc::write(bell.as_raw_fd(), ptr::from_ref(&1u64).cast(), 8) };
                if i % 20 == 0 {
                    std::thread::sleep(std::time::Duration::from_millis(2));
                }
            }
        });
        let sleeps = run(async move {
            let source = Rc::new(Doorbell {
                fd,
                handle: RefCell::new(None),
                work,
                seen: Cell::new(0),
                waker: RefCell::new(None),
                arms: Cell::new(0),
            });
            let erased: Rc<dyn Source> = source.clone();
            *source.handle.borrow_mut() = Some(current().register(&erased));
            std::future::poll_fn(|cx| {
                *source.waker.borrow_mut() = Some(cx.waker().clone());
                if source.seen.get() == RINGS { Poll::Ready(()) } else { Poll::Pending }
            })
            .await;
            assert!(source.arms.get() >= 5);
            current().sleeps()
        });
        ringer.join().unwrap();
        assert!(sleeps >= 5, "slept {sleeps} times");
    }

    /// A source that never has work.
    struct Nothing;

    impl Source for Nothing {
        fn flush(&self) {}
        fn poll(&self) -> usize {
            0
        }
        fn event_fd(&self) -> Option<RawFd> {
            None
        }
        fn arm(&self) -> bool {
            true
        }
        fn disarm(&self) {}
    }

    #[test]
    fn a_stopwatch_measures_requests_over_several_turns_and_within_one() {
        run_simulated(1, |_| async {
            let core = current();
            let stopwatch = core.stopwatch();
            assert_eq!(core.elapsed_ns(&stopwatch), 0);
            core.sleep(80_000).await;
            let (other, elapsed_ns) = (core.stopwatch(), core.elapsed_ns(&stopwatch));
            assert_eq!((elapsed_ns, core.elapsed_ns(&other)), (80_000, 0));
        });
        run(async {
            let core = current();
            for _ in 0..3 {
                let stopwatch = core.stopwatch();
                std::thread::sleep(std::time::Duration::from_millis(2));
                let ns = core.elapsed_ns(&stopwatch);
                assert!((2_000_000..60_000_000_000).contains(&ns), "{ns}: it took the thread's time");
            }
        });
    }

    #[test]
    fn polling_is_counted_and_neither_work_nor_sleep() {
        const MS: u64 = 1_000_000;
        let poll = PollWindow::up_to(u64::MAX);
        let cores = Cores::start(&[CoreConfig { poll, ..CoreConfig::default() }]).unwrap();
        let (core, before) = (cores.get(0), Cell::new(0));
        let polled = || core.polled_ns() - before.replace(core.polled_ns());
        core.block_on(|core| async move { core.sleep(60 * MS).await }).unwrap();
        assert_eq!(polled(), 0, "it slept");
        let remote = core.clone();
        core.block_on(|core| async move {
            let source: Rc<dyn Source> = Rc::new(Nothing);
            let handle = core.register(&source);
            // Each sleep counts except for a tick at either end. How much that is depends on the
            // load of this machine.
            while remote.polled_ns() < 30 * MS {
                core.sleep(10 * MS).await;
            }
            drop((handle, source));
        })
        .unwrap();
        assert!(polled() >= 30 * MS);
        core.block_on(|core| async move {
            let source: Rc<dyn Source> = Rc::new(Nothing);
            let handle = core.register(&source);
            let begin_ns = core.now_ns();
            while core.now_ns() - begin_ns < 60 * MS {
                crate::yield_now().await;
            }
            drop((handle, source));
        })
        .unwrap();
        let ns = polled();
        assert!(ns < 20 * MS, "it worked, and polled for {ns} ns");
    }

    #[test]
    fn cores_answer_calls_and_wake_each_others_tasks() {
        let cores = Cores::start(&[CoreConfig::default(), CoreConfig::default()]).unwrap();
        assert_eq!(cores.get(1).call(|core| core.index()), Ok(1));
        let (sender, receiver) = std::sync::mpsc::channel::<Waker>();
        let flag = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let theirs = flag.clone();
        let waker_thread = std::thread::spawn(move || {
            for waker in receiver {
                theirs.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
                waker.wake();
            }
        });
        let rounds = cores.get(0).block_on(move |_| async move {
            for round in 1..=100 {
                let mut is_sent = false;
                std::future::poll_fn(|cx| {
                    if !std::mem::replace(&mut is_sent, true) {
                        sender.send(cx.waker().clone()).unwrap();
                    }
                    if flag.load(std::sync::atomic::Ordering::SeqCst) >= round {
                        Poll::Ready(())
                    } else {
                        Poll::Pending
                    }
                })
                .await;
            }
            100
        });
        assert_eq!(rounds, Ok(100));
        waker_thread.join().unwrap();
        let second = cores.get(1);
        drop(cores);
        assert_eq!(second.call(|_| ()), Err(crate::CoreStopped));
    }

    /// Wakes a task when it is dropped.
    struct WakesWhenDropped(Waker);

    impl Drop for WakesWhenDropped {
        fn drop(&mut self) {
            self.0.wake_by_ref();
        }
    }

    #[test]
    fn a_header_that_was_woken_while_its_core_ended_serves_the_next_core() {
        let core = Core::simulated(0, &VirtualClock::default(), 1);
        core.with_current(|| {
            let (core, waker) = (core.clone(), Rc::new(RefCell::new(None)));
            for _ in 0..3 {
                let waker = waker.clone();
                core.spawn(async move {
                    // Each task has a waker of the first, also those that are dropped after it.
                    let first = std::future::poll_fn(|cx| {
                        let first = waker.borrow_mut().get_or_insert_with(|| cx.waker().clone()).clone();
                        Poll::Ready(WakesWhenDropped(first))
                    });
                    let _first = first.await;
                    std::future::pending::<()>().await;
                });
            }
        });
        core.turn();
        core.drop_tasks();
        assert!(core.0.body.tasks().iter().all(|task| !task.is_queued.get()) && core.is_idle());
        core.end();
    }

    #[test]
    fn a_task_that_yields_lets_the_others_run() {
        run(async {
            let turn = Rc::new(Cell::new(0));
            let other = turn.clone();
            current().spawn(async move { other.set(1) });
            while turn.get() == 0 {
                yield_now().await;
            }
        });
    }

    #[test]
    fn a_core_that_panics_returns_an_error_to_threads_that_wait_for_it() {
        let cores = Cores::start(&[CoreConfig::default()]).unwrap();
        let core = cores.get(0);
        assert_eq!(core.block_on(|_| async { panic!("a task's bug") }), Err::<(), _>(crate::CoreStopped));
        assert_eq!(core.call(|_| ()), Err(crate::CoreStopped));
    }

    #[test]
    fn a_processor_that_does_not_exist_is_an_error_that_names_it() {
        let config = CoreConfig { cpu: Some(1000), ..CoreConfig::default() };
        let error = Cores::start(&[CoreConfig::default(), config]).err().unwrap();
        assert!(error.to_string().contains("cpu 1000"), "{error}");
    }
}
