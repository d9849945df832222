//! Follows the size of an image, which other clients change.
//!
//! librbd must not be called in its callback, so a thread reads the size.

use super::error::OpenError;
use super::queue::RbdShared;
use block::SharedLimits;
use std::ffi::c_void;
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::thread::JoinHandle;

/// The thread, and librbd's watch that wakes it. Ends with the device.
pub(super) struct SizeWatch {
    shared: Arc<RbdShared>,
    bell: Arc<Bell>,
    handle: u64,
    thread: Option<JoinHandle<()>>,
}

/// Wakes the thread.
#[derive(Default)]
struct Bell {
    reason: Mutex<Reason>,
    rung: Condvar,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Reason {
    #[default]
    None,
    Changed,
    Closed,
}

impl Bell {
    fn ring(&self, reason: Reason) {
        *self.reason.lock().unwrap_or_else(PoisonError::into_inner) = reason;
        self.rung.notify_one();
    }

    fn wait(&self) -> Reason {
        let reason = self.reason.lock().unwrap_or_else(PoisonError::into_inner);
        let is_idle = |reason: &mut Reason| *reason == Reason::None;
        let mut reason = self.rung.wait_while(reason, is_idle).unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *reason)
    }
}

/// Called by librbd when the image has changed.
unsafe extern "C" fn changed(argument: *mut c_void) {
    // SAFETY: the watch keeps the bell until librbd has ended this callback.
    unsafe { &*argument.cast_const().cast::<Bell>() }.ring(Reason::Changed);
}

impl SizeWatch {
    /// Starts the thread, which inherits the processors of the caller.
    ///
    /// # Errors
    /// When the cluster refuses the watch, or a thread cannot be started.
    pub(super) fn start(shared: &Arc<RbdShared>, limits: &Arc<SharedLimits>) -> Result<SizeWatch, OpenError> {
        let bell = Arc::new(Bell::default());
        let work = {
            let (shared, limits, bell) = (shared.clone(), limits.clone(), bell.clone());
            move || {
                while bell.wait() == Reason::Changed {
                    read_size(&shared, &limits);
                }
            }
        };
        // SAFETY: the bell lives until drop has ended the watch.
        let handle = unsafe { shared.image.watch(changed, Arc::as_ptr(&bell).cast_mut().cast()) }?;
        let mut watch = SizeWatch { shared: shared.clone(), bell, handle, thread: None };
        let thread = reactor::spawn_thread("rbd-size", work);
        watch.thread =
            Some(thread.map_err(|error| OpenError::Refused(format!("cannot start a thread: {error}")))?);
        // The size may have changed before the watch.
        watch.bell.ring(Reason::Changed);
        Ok(watch)
    }
}

fn read_size(shared: &RbdShared, limits: &SharedLimits) {
    match shared.image.size() {
        Ok(size) => {
            let before = limits.capacity();
            limits.set_capacity(size);
            let capacity = limits.capacity();
            if capacity != before {
                tracing::info!(device = shared.name, capacity, "image capacity changed");
            }
        }
        Err(error) => tracing::warn!(device = shared.name, %error, "image capacity cannot be read"),
    }
}

impl Drop for SizeWatch {
    fn drop(&mut self) {
        self.shared.image.unwatch(self.handle);
        self.bell.ring(Reason::Closed);
        if let Some(thread) = self.thread.take() {
            // The thread does not panic.
            let _ = thread.join();
        }
    }
}
