//! The atomics of protocols between threads: std's, or loom's in models of such a protocol.
//!
//! A model is a test under `cfg(loom)` that runs the protocol's own source (`tests/loom`). It
//! covers all orders of the threads and all values that the memory model lets a load return.
//!
//! Loom treats a `SeqCst` access as `AcqRel`; only its fences are sequentially consistent. So the
//! types here put such a fence before and after each `SeqCst` access. That is at least as strong
//! as std's promise, and no stronger for weaker orders.

#[cfg(not(loom))]
pub use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64, fence};
#[cfg(not(loom))]
pub use std::sync::{Mutex, MutexGuard};

#[cfg(loom)]
pub use self::modelled::{AtomicBool, AtomicPtr, AtomicU8, AtomicU32, AtomicU64};
#[cfg(loom)]
pub(crate) use loom::cell::UnsafeCell;
#[cfg(loom)]
pub use loom::sync::atomic::fence;
#[cfg(loom)]
pub use loom::sync::{Mutex, MutexGuard};

/// A cell accessed through closures, as loom's is, so that a model knows when an access begins and
/// ends.
#[cfg(not(loom))]
pub(crate) struct UnsafeCell<T>(std::cell::UnsafeCell<T>);

#[cfg(not(loom))]
impl<T> UnsafeCell<T> {
    pub(crate) fn new(value: T) -> Self {
        UnsafeCell(std::cell::UnsafeCell::new(value))
    }

    #[inline(always)]
    pub(crate) fn with<R>(&self, access: impl FnOnce(*const T) -> R) -> R {
        access(self.0.get())
    }

    #[inline(always)]
    pub(crate) fn with_mut<R>(&self, access: impl FnOnce(*mut T) -> R) -> R {
        access(self.0.get())
    }
}

#[cfg(loom)]
mod modelled {
    use loom::sync::atomic::{self, Ordering, fence};

    /// Runs an access between two fences if it is sequentially consistent.
    fn ordered<R>(order: Ordering, access: impl FnOnce() -> R) -> R {
        let fence_if_needed = || {
            if order == Ordering::SeqCst {
                fence(Ordering::SeqCst);
            }
        };
        fence_if_needed();
        let result = access();
        fence_if_needed();
        result
    }

    macro_rules! atomic {
        ($name:ident $(<$t:ident>)?, $inner:ty, $value:ty $(, $fetch:ident)*) => {
            #[doc = concat!("As std's `", stringify!($name), "`.")]
            #[derive(Debug)]
            pub struct $name $(<$t>)? ($inner);

            #[allow(missing_docs)]
            impl $(<$t>)? $name $(<$t>)? {
                pub fn new(value: $value) -> Self {
                    Self(<$inner>::new(value))
                }
                pub fn load(&self, order: Ordering) -> $value {
                    ordered(order, || self.0.load(order))
                }
                pub fn store(&self, value: $value, order: Ordering) {
                    ordered(order, || self.0.store(value, order));
                }
                pub fn swap(&self, value: $value, order: Ordering) -> $value {
                    ordered(order, || self.0.swap(value, order))
                }
                pub fn compare_exchange(
                    &self, old: $value, new: $value, order: Ordering, failed: Ordering,
                ) -> Result<$value, $value> {
                    ordered(order, || self.0.compare_exchange(old, new, order, failed))
                }
                pub fn compare_exchange_weak(
                    &self, old: $value, new: $value, order: Ordering, failed: Ordering,
                ) -> Result<$value, $value> {
                    ordered(order, || self.0.compare_exchange_weak(old, new, order, failed))
                }
                $(
                    pub fn $fetch(&self, value: $value, order: Ordering) -> $value {
                        ordered(order, || self.0.$fetch(value, order))
                    }
                )*
            }
        };
    }

    atomic!(AtomicBool, atomic::AtomicBool, bool);
    atomic!(AtomicU8, atomic::AtomicU8, u8, fetch_and, fetch_or);
    atomic!(AtomicU32, atomic::AtomicU32, u32, fetch_add);
    atomic!(AtomicU64, atomic::AtomicU64, u64, fetch_add, fetch_and, fetch_or);
    atomic!(AtomicPtr<T>, atomic::AtomicPtr<T>, *mut T);

    impl Default for AtomicBool {
        fn default() -> AtomicBool {
            AtomicBool::new(false)
        }
    }

    impl Default for AtomicU8 {
        fn default() -> AtomicU8 {
            AtomicU8::new(0)
        }
    }

    impl Default for AtomicU64 {
        fn default() -> AtomicU64 {
            AtomicU64::new(0)
        }
    }
}

/// Locks a mutex whose content is whole even if a thread has panicked with the lock.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

/// Whether a model breaks this rule of a protocol, to show that it detects that. Always `false`
/// outside of models.
#[cfg(not(loom))]
#[inline(always)]
pub const fn is_broken(_: &str) -> bool {
    false
}

#[cfg(loom)]
pub use self::checking::{is_broken, model, must_fail};

#[cfg(loom)]
mod checking {
    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    thread_local! {
        // Loom runs all threads of a model on the thread that checks it.
        static BROKEN: Cell<Option<&'static str>> = const { Cell::new(None) };
    }

    /// Whether [`must_fail`] is breaking this rule.
    pub fn is_broken(rule: &str) -> bool {
        BROKEN.get() == Some(rule)
    }

    /// Checks a model in all orders with at most three preemptions, or `LOOM_MAX_PREEMPTIONS`.
    pub fn model(run: impl Fn() + Sync + Send + 'static) {
        let mut builder = loom::model::Builder::new();
        builder.preemption_bound = builder.preemption_bound.or(Some(3));
        builder.check(run);
    }

    /// Checks that a model fails while a rule is broken.
    ///
    /// # Panics
    /// If the model passes: it does not depend on the rule, or no code reads it.
    pub fn must_fail(rule: &'static str, run: impl Fn() + Sync + Send + 'static) {
        BROKEN.set(Some(rule));
        let result = catch_unwind(AssertUnwindSafe(|| model(run)));
        BROKEN.set(None);
        assert!(result.is_err(), "the model does not notice that a rule is broken: {rule}");
    }
}
