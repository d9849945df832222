//! The control side's handles of queues that cores serve.

use super::queue::{QueueParts, Served};
use exports::Error;
use reactor::CoreRef;
use std::cell::RefCell;
use std::collections::HashMap;
use std::fs::File;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

thread_local! {
    /// The queues of this core, by number, so that control messages find them.
    static SERVED: RefCell<HashMap<u64, Rc<Served>>> = RefCell::default();
}

/// A queue on its core. Must not be used on a core.
pub(super) struct Serving {
    core: CoreRef,
    id: u64,
}

impl Serving {
    /// Prepares `core` to serve the queue.
    pub(super) fn prepare(core: &CoreRef, parts: QueueParts) -> Result<Serving, Error> {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        let id = NEXT_ID.fetch_add(1, Ordering::Relaxed);
        core.call(move |core| {
            let served = Served::prepare(core, parts)?;
            SERVED.with_borrow_mut(|all| all.insert(id, served));
            Ok::<_, Error>(())
        })??;
        Ok(Serving { core: core.clone(), id })
    }

    /// Fetches requests from the kernel: see [`Served::fetch`].
    pub(super) fn fetch(&self, file: Arc<File>) -> Result<(), Error> {
        let id = self.id;
        self.core.call(move |_| {
            let served =
                SERVED.with_borrow(|all| all.get(&id).cloned()).expect("the queue has not been stopped");
            served.fetch(file)
        })?
    }

    /// Ends the queue of a stopped disk: see [`Served::stop`].
    pub(super) fn stop(self) {
        self.end(async |served| served.stop().await);
    }

    /// Leaves the queue to another server: see [`Served::leave`].
    pub(super) fn leave(self) {
        self.end(async |served| served.leave().await);
    }

    fn end(self, how: impl AsyncFnOnce(Rc<Served>) + Send + 'static) {
        let id = self.id;
        let ended = self.core.block_on(move |_| async move {
            let served = SERVED.with_borrow_mut(|all| all.remove(&id)).expect("a queue ends once");
            how(served).await;
        });
        if ended.is_err() {
            tracing::warn!("core stopped before the queues that it served");
        }
    }
}
