//! Connections that a core serves, by export, so that control messages find them.

use super::connection::{Connection, Protocol, Serving};
use super::{Parts, Store};
use crate::Error;
use reactor::{Core, CoreRef, CoreStopped};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The state of an export on one core.
struct Served {
    /// Used by this export alone: device data left in it must not reach clients of another export.
    store: Store,
    connections: Vec<Rc<dyn Serving>>,
}

thread_local! {
    static SERVED: RefCell<HashMap<u64, Served>> = RefCell::default();
}

/// Identifies one export in the per-core tables.
#[derive(Clone, Copy, Debug)]
pub struct Registry(u64);

impl Registry {
    /// Registers an export without connections.
    #[expect(clippy::new_without_default, reason = "each is another one")]
    pub fn new() -> Registry {
        static NEXT_ID: AtomicU64 = AtomicU64::new(0);
        Registry(NEXT_ID.fetch_add(1, Ordering::Relaxed))
    }

    /// Starts a connection on `core`, with at most `max_requests` at a time. `open` creates its
    /// protocol there.
    ///
    /// # Errors
    /// When the core has stopped.
    pub fn serve<P: Protocol>(
        self,
        core: &CoreRef,
        parts: Parts,
        max_requests: usize,
        open: impl FnOnce() -> Result<P, Error> + Send + 'static,
    ) -> Result<(), CoreStopped> {
        core.run(move |core| self.start(core, parts, max_requests, open))
    }

    fn start<P: Protocol>(
        self,
        core: &Core,
        parts: Parts,
        max_requests: usize,
        open: impl FnOnce() -> Result<P, Error>,
    ) {
        let store = SERVED.with_borrow_mut(|all| {
            let new = || Served { store: Store::new(core), connections: Vec::new() };
            all.entry(self.0).or_insert_with(new).store.clone()
        });
        let (export, peer) = (parts.export.clone(), parts.peer.clone());
        let started =
            open().and_then(|protocol| Connection::start(core, parts, store, max_requests, protocol));
        match started {
            Ok(connection) => {
                SERVED.with_borrow_mut(|all| {
                    if let Some(served) = all.get_mut(&self.0) {
                        served.connections.push(connection.clone());
                    }
                });
                core.spawn(async move {
                    connection.live().await;
                    self.forget(&(connection as Rc<dyn Serving>));
                });
            }
            Err(error) => {
                tracing::error!(export = &*export, peer, %error, "client disconnected: its connection could not be set up")
            }
        }
    }

    fn forget(self, gone: &Rc<dyn Serving>) {
        SERVED.with_borrow_mut(|all| {
            if let Some(served) = all.get_mut(&self.0) {
                served.connections.retain(|connection| !Rc::ptr_eq(connection, gone));
            }
        });
    }

    /// Ends every connection of the export on `cores`, and waits until they are gone.
    pub fn drain(self, cores: &[CoreRef]) {
        let mut drained: Vec<&CoreRef> = Vec::new();
        for core in cores {
            if !drained.iter().any(|other| other.is_same(core)) {
                self.drain_core(core);
                drained.push(core);
            }
        }
    }

    fn drain_core(self, core: &CoreRef) {
        let drained = core.block_on(move |_| async move {
            let served = SERVED.with_borrow_mut(|all| all.remove(&self.0));
            let connections = served.map_or(Vec::new(), |served| served.connections);
            connections.iter().for_each(|connection| connection.stop());
            for connection in connections {
                connection.gone().await;
            }
        });
        if drained.is_err() {
            tracing::warn!("core stopped before the connections that it served");
        }
    }
}
