//! The connections that a core serves, by export: how messages of the control side find them.

use super::connection::{Connection, Parts};
use crate::stream::Store;
use reactor::{Core, CoreRef, CoreStopped};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// What an export has on one core.
struct Served {
    /// Of this export alone: what a device leaves in it must not reach clients of another.
    store: Store,
    connections: Vec<Rc<Connection>>,
}

thread_local! {
    static SERVED: RefCell<HashMap<u64, Served>> = RefCell::default();
}

/// Has `core` serve a connection of export `id`.
///
/// # Errors
/// When the core has stopped.
pub(super) fn serve(core: &CoreRef, id: u64, parts: Parts) -> Result<(), CoreStopped> {
    core.run(move |core| start(core, id, parts))
}

fn start(core: &Core, id: u64, parts: Parts) {
    let store = SERVED.with_borrow_mut(|all| {
        let new = || Served { store: Store::new(core), connections: Vec::new() };
        all.entry(id).or_insert_with(new).store.clone()
    });
    let (export, peer) = (parts.export.clone(), parts.peer.clone());
    match Connection::start(core, parts, store) {
        Ok(connection) => {
            SERVED.with_borrow_mut(|all| {
                if let Some(served) = all.get_mut(&id) {
                    served.connections.push(connection.clone());
                }
            });
            core.spawn(async move {
                connection.live().await;
                forget(id, &connection);
            });
        }
        Err(error) => tracing::error!(export = &*export, peer, %error, "client dropped"),
    }
}

fn forget(id: u64, gone: &Rc<Connection>) {
    SERVED.with_borrow_mut(|all| {
        if let Some(served) = all.get_mut(&id) {
            served.connections.retain(|connection| !Rc::ptr_eq(connection, gone));
        }
    });
}

/// Ends every connection of export `id` on `core`, and waits until nothing of them is left.
pub(super) fn drain(core: &CoreRef, id: u64) {
    let drained = core.block_on(move |_| async move {
        let served = SERVED.with_borrow_mut(|all| all.remove(&id));
        let connections = served.map_or(Vec::new(), |served| served.connections);
        connections.iter().for_each(|connection| connection.stop());
        for connection in connections {
            connection.gone().await;
        }
    });
    if drained.is_err() {
        tracing::warn!("a core stopped before the NBD clients that it served");
    }
}
