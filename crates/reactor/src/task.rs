//! Tasks and their wakers.
//!
//! A waker is a plain pointer to a task header: cloning and dropping it is free. That is sound
//! because headers are never freed: when a core ends, its [`Body`] (headers and what other threads
//! touch of it) goes to a pool for the next core. A stale waker can at worst wake a task that has
//! nothing to do.

use crate::doorbell::Doorbell;
use crate::sync::{AtomicBool, AtomicPtr, Mutex, MutexGuard, fence, is_broken};
use std::cell::{Cell, UnsafeCell};
use std::future::Future;
use std::pin::Pin;
use std::ptr;
use std::sync::atomic::Ordering;
use std::task::{RawWaker, RawWakerVTable, Waker};

type BoxedFuture = Pin<Box<dyn Future<Output = ()>>>;

/// A task header. Fields without an atomic belong to the thread of the core that runs the body.
pub(crate) struct Task {
    future: UnsafeCell<Option<BoxedFuture>>,
    pub(crate) is_queued: Cell<bool>,
    is_woken_remotely: AtomicBool,
    next_remote: AtomicPtr<Task>,
    pub(crate) body: &'static Body,
}

impl Task {
    /// The task's waker; it may be used on any thread.
    pub(crate) fn waker(&'static self) -> Waker {
        // SAFETY: the vtable's functions need a `&'static Task`, and that is what they get.
        unsafe { Waker::from_raw(RawWaker::new(ptr::from_ref(self).cast(), &VTABLE)) }
    }

    /// # Safety
    /// Only the core's thread, and not while the future runs.
    pub(crate) unsafe fn set_future(&self, future: Option<BoxedFuture>) {
        // SAFETY: by contract nobody else looks at the cell.
        let old = unsafe { std::mem::replace(&mut *self.future.get(), future) };
        drop(old);
    }

    /// Runs the future once; whether it has ended.
    ///
    /// # Safety
    /// As for [`Task::set_future`].
    #[inline]
    pub(crate) unsafe fn poll(&'static self) -> bool {
        let waker = std::mem::ManuallyDrop::new(self.waker());
        // SAFETY: by contract.
        let future = unsafe { &mut *self.future.get() };
        match future {
            Some(f) => f.as_mut().poll(&mut std::task::Context::from_waker(&waker)).is_ready(),
            None => false,
        }
    }
}

static VTABLE: RawWakerVTable = RawWakerVTable::new(clone, wake, wake, |_| ());

fn clone(task: *const ()) -> RawWaker {
    RawWaker::new(task, &VTABLE)
}

fn wake(task: *const ()) {
    // SAFETY: wakers are made by `Task::waker` only, and headers live for ever.
    let task: &'static Task = unsafe { &*task.cast::<Task>() };
    if !crate::core::wake_locally(task) {
        task.body.wake_remotely(task);
    }
}

/// What other threads touch of a core. Never freed, used by one core after the other.
pub(crate) struct Body {
    woken: AtomicPtr<Task>,
    is_asleep: AtomicBool,
    /// What the core's park watches; `None` while no core runs this body.
    doorbell: Mutex<Option<Doorbell>>,
    headers: Mutex<Vec<&'static Task>>,
}

// SAFETY: the cells in the headers are touched by the one thread whose core runs the body.
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
            woken: AtomicPtr::new(ptr::null_mut()),
            is_asleep: AtomicBool::new(false),
            doorbell: Mutex::new(None),
            headers: Mutex::new(Vec::new()),
        }))
    }

    /// Gives the body back when its core ends. Every future of its tasks has been dropped.
    pub(crate) fn give_back(&'static self) {
        lock(&self.doorbell).take();
        self.take_woken(|_| ());
        FREE_BODIES.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(self);
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

    /// Every header this body ever made.
    pub(crate) fn tasks(&self) -> Vec<&'static Task> {
        lock(&self.headers).clone()
    }

    fn wake_remotely(&self, task: &'static Task) {
        if task.is_woken_remotely.swap(true, Ordering::AcqRel) {
            return; // already on the list
        }
        let pointer = ptr::from_ref(task).cast_mut();
        let mut head = self.woken.load(Ordering::Relaxed);
        loop {
            task.next_remote.store(head, Ordering::Relaxed);
            match self.woken.compare_exchange_weak(head, pointer, Ordering::Release, Ordering::Relaxed) {
                Ok(_) => break,
                Err(now) => head = now,
            }
        }
        self.end_sleep();
    }

    /// Whether another thread has woken a task.
    #[inline]
    pub(crate) fn has_woken(&self) -> bool {
        !self.woken.load(Ordering::Relaxed).is_null()
    }

    /// Takes the tasks that other threads have woken.
    pub(crate) fn take_woken(&self, mut with: impl FnMut(&'static Task)) {
        let mut head = self.woken.swap(ptr::null_mut(), Ordering::Acquire);
        while !head.is_null() {
            // SAFETY: the list holds headers, which live for ever.
            let task: &'static Task = unsafe { &*head };
            head = task.next_remote.load(Ordering::Relaxed);
            // Acquire: who found the task on the list wrote before what it woke it for, and the
            // task must see that.
            match is_broken("the mark is taken away with acquire") {
                false => task.is_woken_remotely.swap(false, Ordering::AcqRel),
                true => task.is_woken_remotely.swap(false, Ordering::Relaxed),
            };
            with(task);
        }
    }

    /// The core is about to sleep: it must look for messages and foreign wakes once more after
    /// this.
    pub(crate) fn begin_sleep(&self) {
        // The flag changes by read-modify-write alone, here and below: loom takes a store beside
        // one for unordered.
        self.is_asleep.swap(true, Ordering::Relaxed);
        if !is_broken("a core that goes to sleep puts a fence before its last look") {
            fence(Ordering::SeqCst);
        }
    }

    pub(crate) fn woke_up(&self) {
        self.is_asleep.swap(false, Ordering::Relaxed);
    }

    /// Wakes the core if it sleeps; called after something was put where it looks.
    pub(crate) fn end_sleep(&self) {
        if !is_broken("a thread that wakes a core puts a fence before its look") {
            fence(Ordering::SeqCst);
        }
        if self.is_asleep.load(Ordering::Relaxed) && self.is_asleep.swap(false, Ordering::Relaxed) {
            // Under the lock, so that the descriptor cannot be closed and reused in between.
            if let Some(doorbell) = lock(&self.doorbell).as_ref() {
                doorbell.ring();
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Nothing that can panic runs under these locks.
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

#[cfg(all(test, loom))]
mod models;
