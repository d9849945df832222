//! Tasks and their wakers.
//!
//! A waker is a plain pointer to a task header, so cloning and dropping it is free. This is sound
//! because headers are never freed. When a core ends, its [`Body`] (headers and the state that
//! other threads access) goes to a pool for the next core. At worst, a stale waker wakes a task
//! without work.

use crate::doorbell::Doorbell;
use crate::remote::Inbox;
use crate::ring::Padded;
use crate::sync::{AtomicBool, AtomicPtr, Mutex, fence, is_broken, lock};
use block::IoFuture;
use std::cell::{Cell, UnsafeCell};
use std::future::Future;
use std::pin::Pin;
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, RawWaker, RawWakerVTable, Waker};

/// The future of a task.
pub(crate) enum TaskFuture {
    Boxed(Pin<Box<dyn Future<Output = ()>>>),
    /// A request in memory of the core's free list.
    Pooled(IoFuture<'static>),
}

/// A task header. Fields without an atomic belong to the thread of the core that runs the body. It
/// has cache lines of its own: a wake by another core takes no neighbour away.
#[repr(align(64))]
pub(crate) struct Task {
    future: UnsafeCell<Option<TaskFuture>>,
    pub(crate) is_queued: Cell<bool>,
    is_woken_remotely: AtomicBool,
    next_remote: AtomicPtr<Task>,
    pub(crate) body: &'static Body,
}

impl Task {
    /// The task's waker; it may be used on any thread.
    pub(crate) fn waker(&'static self) -> Waker {
        // SAFETY: the vtable's functions need a `&'static Task`, and they get one.
        unsafe { Waker::from_raw(RawWaker::new(ptr::from_ref(self).cast(), &VTABLE)) }
    }

    /// # Safety
    /// Only the core's thread, and not while the future runs.
    pub(crate) unsafe fn set_future(&self, future: Option<TaskFuture>) {
        // SAFETY: by contract nothing else accesses the cell.
        let old = unsafe { std::mem::replace(&mut *self.future.get(), future) };
        drop(old);
    }

    /// Polls the future once; returns whether it has ended.
    ///
    /// # Safety
    /// As for [`Task::set_future`].
    #[inline]
    pub(crate) unsafe fn poll(&'static self) -> bool {
        let waker = std::mem::ManuallyDrop::new(self.waker());
        // SAFETY: by contract.
        let future = unsafe { &mut *self.future.get() };
        let cx = &mut Context::from_waker(&waker);
        match future {
            Some(TaskFuture::Boxed(future)) => future.as_mut().poll(cx).is_ready(),
            Some(TaskFuture::Pooled(request)) => Pin::new(request).poll(cx).is_ready(),
            None => false,
        }
    }
}

static VTABLE: RawWakerVTable = RawWakerVTable::new(clone, wake, wake, |_| ());

fn clone(task: *const ()) -> RawWaker {
    RawWaker::new(task, &VTABLE)
}

fn wake(task: *const ()) {
    wake_for(task, ptr::null());
}

/// Wakes a task that is about to read what is at `hint`, or at an unknown place.
fn wake_for(task: *const (), hint: *const u8) {
    // SAFETY: wakers are made by `Task::waker` only, and headers live for ever.
    let task: &'static Task = unsafe { &*task.cast::<Task>() };
    if !crate::core::posts::wake_from_core(task, hint) {
        task.body.wake_remotely(task);
    }
}

/// The task that waits for another thread. Left and taken without a lock, unlike a [`Waker`].
pub(crate) struct WaitingTask(AtomicPtr<Task>);

impl Default for WaitingTask {
    fn default() -> WaitingTask {
        WaitingTask(AtomicPtr::new(ptr::null_mut()))
    }
}

impl WaitingTask {
    /// Leaves the task of `waker`, in place of an earlier one. The caller then looks again for what
    /// it waits for: a thread that called [`WaitingTask::wake`] before has not seen this task.
    ///
    /// # Panics
    /// If the waker is not that of a core's task.
    pub(crate) fn set(&self, waker: &Waker) {
        assert!(ptr::eq(waker.vtable(), &VTABLE), "only a task of a core waits for another core");
        self.0.swap(waker.data().cast_mut().cast(), Ordering::AcqRel);
    }

    /// Wakes the task, if one waits. It is about to read what is near this.
    pub(crate) fn wake(&self) {
        let hint = ptr::from_ref(self).cast();
        let task = self.0.swap(ptr::null_mut(), Ordering::AcqRel);
        if !task.is_null() {
            wake_for(task.cast_const().cast(), hint);
        }
    }
}

/// The state of a core that other threads access. Never freed; one core after the other uses it.
pub(crate) struct Body {
    woken: Padded<AtomicPtr<Task>>,
    /// Apart from `woken`: others read it for every message, and it rarely changes.
    is_asleep: Padded<AtomicBool>,
    /// The doorbell that the core's park watches; `None` while no core runs this body.
    doorbell: Mutex<Option<Doorbell>>,
    headers: Mutex<Vec<&'static Task>>,
    /// The inbox of the core that runs this body; `None` while no core does.
    inbox: Mutex<Option<Arc<Inbox>>>,
}

// SAFETY: only the one thread whose core runs the body accesses the cells in the headers.
unsafe impl Sync for Body {}
// SAFETY: as above.
unsafe impl Send for Body {}

static FREE_BODIES: std::sync::Mutex<Vec<&'static Body>> = std::sync::Mutex::new(Vec::new());

impl Body {
    pub(crate) fn take(doorbell: Option<Doorbell>) -> &'static Body {
        let free = FREE_BODIES.lock().unwrap_or_else(std::sync::PoisonError::into_inner).pop();
        let body = free.unwrap_or_else(Body::new);
        *lock(&body.doorbell) = doorbell;
        body
    }

    fn new() -> &'static Body {
        Box::leak(Box::new(Body {
            woken: Padded(AtomicPtr::new(ptr::null_mut())),
            is_asleep: Padded(AtomicBool::new(false)),
            doorbell: Mutex::new(None),
            headers: Mutex::new(Vec::new()),
            inbox: Mutex::new(None),
        }))
    }

    /// Returns the body to the pool when its core ends. All futures of its tasks were dropped.
    pub(crate) fn give_back(&'static self) {
        lock(&self.doorbell).take();
        lock(&self.inbox).take();
        self.take_woken(|_| ());
        FREE_BODIES.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(self);
    }

    /// The inbox of the core that runs this body.
    pub(crate) fn inbox(&self) -> Option<Arc<Inbox>> {
        lock(&self.inbox).clone()
    }

    /// Sets the inbox of the core that runs this body.
    pub(crate) fn set_inbox(&self, inbox: Arc<Inbox>) {
        *lock(&self.inbox) = Some(inbox);
    }

    /// A header for a new task.
    pub(crate) fn new_task(&'static self) -> &'static Task {
        let task: &'static Task = Box::leak(Box::new(Task {
            future: UnsafeCell::new(None),
            is_queued: Cell::new(false),
            is_woken_remotely: AtomicBool::new(false),
            next_remote: AtomicPtr::new(ptr::null_mut()),
            body: self,
        }));
        lock(&self.headers).push(task);
        task
    }

    /// All headers that this body has made.
    pub(crate) fn tasks(&self) -> Vec<&'static Task> {
        lock(&self.headers).clone()
    }

    fn wake_remotely(&self, task: &'static Task) {
        if task.is_woken_remotely.swap(true, Ordering::AcqRel) {
            return; // already on the list
        }
        let pointer = ptr::from_ref(task).cast_mut();
        let mut head = self.woken.0.load(Ordering::Relaxed);
        loop {
            task.next_remote.store(head, Ordering::Relaxed);
            match self.woken.0.compare_exchange_weak(head, pointer, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => head = now,
            }
        }
        self.end_sleep();
    }

    /// Whether another thread has woken a task.
    #[inline]
    pub(crate) fn has_woken(&self) -> bool {
        !self.woken.0.load(Ordering::Relaxed).is_null()
    }

    /// Takes the tasks that other threads have woken.
    pub(crate) fn take_woken(&self, mut with: impl FnMut(&'static Task)) {
        let mut head = self.woken.0.swap(ptr::null_mut(), Ordering::Acquire);
        while !head.is_null() {
            // SAFETY: the list holds headers, which live for ever.
            let task: &'static Task = unsafe { &*head };
            head = task.next_remote.load(Ordering::Relaxed);
            // Acquire: a thread that found the task on the list had written data before. The task
            // must see that data.
            match is_broken("the mark is taken away with acquire") {
                false => task.is_woken_remotely.swap(false, Ordering::AcqRel),
                true => task.is_woken_remotely.swap(false, Ordering::Relaxed),
            };
            with(task);
        }
    }

    /// Marks the core as asleep. It must look for messages and wakes of other threads once more
    /// after this call.
    pub(crate) fn begin_sleep(&self) {
        // The flag changes by read-modify-write only, here and below: loom treats a plain store to
        // it as unordered.
        self.is_asleep.0.swap(true, Ordering::Relaxed);
        if !is_broken("a core that goes to sleep puts a fence before its last look") {
            fence(Ordering::SeqCst);
        }
    }

    pub(crate) fn woke_up(&self) {
        self.is_asleep.0.swap(false, Ordering::Relaxed);
    }

    /// Whether the core sleeps, or did a short time ago.
    #[inline]
    pub(crate) fn is_perhaps_asleep(&self) -> bool {
        self.is_asleep.0.load(Ordering::Relaxed)
    }

    /// Wakes the core if it sleeps. Called after a message or a woken task was added.
    pub(crate) fn end_sleep(&self) {
        if !is_broken("a thread that wakes a core puts a fence before its look") {
            fence(Ordering::SeqCst);
        }
        if self.is_asleep.0.load(Ordering::Relaxed) && self.is_asleep.0.swap(false, Ordering::Relaxed) {
            // Under the lock, so that the descriptor cannot be closed and reused in between.
            if let Some(doorbell) = lock(&self.doorbell).as_ref() {
                doorbell.ring();
            }
        }
    }
}

#[cfg(all(test, loom))]
mod models;
