//! Reservations: write access of hosts that share a namespace.
//!
//! ```text
//!   command ─► change: serialised ─► rules ─► store ─► rights of each controller
//!              (rare)                (pure)   (file)   (a byte that I/O reads)
//!           ─► events ─► fence ─► completion
//!                        (earlier writes end)
//! ```
//!
//! Reads and writes check one byte of their controller, which is rarely written. A host that
//! preempts the write access of another gets its completion after the other's writes in flight have
//! ended ([`reactor::fence`]).
//!
//! A host is identified by its name and identifier, over any number of controllers. If hosts must
//! authenticate, a host identifier alone cannot impersonate another host.
//!
//! | module | purpose |
//! |---|---|
//! | [`rules`] | the state machine of reservation commands |
//! | [`store`] | persistence through power loss |
//!
//! Source: Base Specification 2.0, 8.19.

mod rules;
mod store;

pub(crate) use reactor::fence::{Gate, Running};
pub(crate) use rules::{Change, Rights};

use crate::controller::Controller;
use crate::host::Host;
use crate::subsystem::Subsystem;
use exports::Error;
use nvme::Status;
use nvme::fabrics::Nqn;
use nvme::reservation::{NO_CONTROLLER, RegisterAction, Registrant, Report};
use reactor::{CoreRef, fence, spawn_thread};
use rules::Reservations;
use std::path::Path;
use std::rc::Rc;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use store::Store;

/// The reservations of one namespace.
pub(crate) struct Reserved {
    /// The number of its gates, unique in this process.
    number: u64,
    state: Mutex<Reservations>,
    /// Held during a change, which may take as long as writing a file.
    changes: Mutex<()>,
    store: Option<Store>,
}

impl Reserved {
    /// Opens the reservations of the namespace `uuid`. With a directory, it loads the stored state.
    ///
    /// # Errors
    /// When the stored state cannot be read.
    pub(crate) fn open(
        directory: Option<&Path>,
        subsystem: &Nqn,
        uuid: &[u8; 16],
    ) -> Result<Reserved, Error> {
        let (store, state) = match directory {
            None => (None, Reservations::default()),
            Some(directory) => {
                let (store, state) = Store::open(directory, subsystem, uuid)?;
                (Some(store), state)
            }
        };
        Ok(Reserved {
            number: fence::new_number(),
            state: Mutex::new(state),
            changes: Mutex::default(),
            store,
        })
    }

    /// Whether reservations can persist through power loss.
    pub(crate) fn can_persist(&self) -> bool {
        self.store.is_some()
    }

    /// Whether a host is registered, or a reservation held.
    pub(crate) fn is_in_use(&self) -> bool {
        let state = self.state();
        !state.keys.is_empty() || state.held.is_some()
    }

    /// Whether reservations currently persist.
    pub(crate) fn persists(&self) -> bool {
        self.state().persists
    }

    /// The write counter of the calling core.
    pub(crate) fn gate(&self) -> Rc<Gate> {
        Gate::of(self.number)
    }

    /// Passes the rights of a host to `publish`, before they can change.
    pub(crate) fn publish_rights(&self, host: &Host, publish: impl FnOnce(Rights)) {
        publish(self.state().rights(host));
    }

    fn state(&self) -> MutexGuard<'_, Reservations> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Applies a host's change, up to the rights of controllers. Returns whether writes may be in
    /// flight that would be refused now.
    fn change(&self, controller: &Controller, nsid: u32, change: &Change) -> Result<bool, Status> {
        let _one_at_a_time = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
        let (subsystem, by) = (&*controller.subsystem, &controller.host);
        if controller.is_revoked() {
            return Err(Status::ABORTED_SQ_DELETION);
        }
        let before = self.state().clone();
        let mut after = before.clone();
        let news = after.apply(by, change)?;
        match &self.store {
            None if after.persists => return Err(Status::INVALID_FIELD),
            Some(store) if after != before && (after.persists || before.persists) => {
                if let Err(error) = store.write(&after) {
                    let export = &*subsystem.export;
                    tracing::error!(export, namespace = nsid, %error, "reservations cannot be made durable");
                    return Err(Status::INTERNAL_ERROR);
                }
            }
            _ => {}
        }
        let is_restricted = after.held.is_some();
        let mut state = self.state();
        *state = after;
        let controllers = subsystem.controllers();
        for controller in &controllers {
            controller.set_rights(nsid, state.rights(&controller.host));
        }
        drop(state);
        for (host, what) in news {
            let its = controllers.iter().filter(|controller| controller.host == host);
            its.for_each(|controller| controller.note_reservation(nsid, what));
        }
        let gives_only = match change {
            Change::Register(register) => register.action != RegisterAction::Unregister,
            Change::Persist(_) => true,
            Change::Acquire(_) | Change::Release(_) => false,
        };
        Ok(is_restricted && !gives_only)
    }

    /// The registrants and the reservation holder: a host's controllers, or the host itself if it
    /// has none.
    pub(crate) fn report(&self, subsystem: &Subsystem) -> Report {
        let state = self.state();
        let controllers = subsystem.controllers();
        let mut registrants = Vec::new();
        for (host, key) in &state.keys {
            let is_its = |id| Registrant {
                controller: id,
                is_holder: state.is_holder(host),
                key: *key,
                host_id: host.id,
            };
            let before = registrants.len();
            let its = controllers.iter().filter(|controller| controller.host == *host);
            registrants.extend(its.map(|controller| is_its(controller.id)));
            if registrants.len() == before {
                registrants.push(is_its(NO_CONTROLLER));
            }
        }
        let kind = state.held.as_ref().map(|held| held.kind);
        Report { generation: state.generation, kind, persists: state.persists, registrants }
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// Executes changes of reservations.
pub(crate) struct Registrar {
    /// The cores that serve queues.
    cores: Vec<CoreRef>,
    /// The thread that writes files, so that cores do not block.
    files: Option<Sender<Job>>,
}

impl Registrar {
    /// Creates a registrar for queues on `cores`. `has_files`: reservations of some namespaces can
    /// persist.
    ///
    /// # Errors
    /// When the system refuses the thread.
    pub(crate) fn new(cores: Vec<CoreRef>, has_files: bool) -> Result<Registrar, Error> {
        let mut files = None;
        if has_files {
            let (sender, jobs) = mpsc::channel::<Job>();
            // The thread ends when the subsystem drops the last sender.
            spawn_thread("reservations", move || jobs.iter().for_each(|job| job()))
                .map_err(|source| Error::System { action: "start the reservations thread", source })?;
            files = Some(sender);
        }
        Ok(Registrar { cores, files })
    }

    /// Runs `work` on the thread, which may block on files.
    async fn run<R: Send + 'static>(&self, work: impl FnOnce() -> R + Send + 'static) -> Option<R> {
        let Some(files) = &self.files else { return Some(work()) };
        let (hold, released) = fence::hold();
        let result = Arc::new(Mutex::new(None));
        let place = result.clone();
        let job: Job = Box::new(move || {
            *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(work());
            drop(hold);
        });
        files.send(job).ok()?;
        released.await;
        result.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Applies a host's change to a namespace. Completes when no write that the change forbids is in
/// flight. Must run on a core.
///
/// # Errors
/// The status of the command; nothing has changed.
pub(crate) async fn change(controller: &Arc<Controller>, nsid: u32, change: Change) -> Result<(), Status> {
    let subsystem = &controller.subsystem;
    let number = subsystem.namespace(nsid).ok_or(Status::INVALID_NAMESPACE)?.reserved.number;
    let its = controller.clone();
    let work = move || {
        let namespace = its.subsystem.namespace(nsid).ok_or(Status::INVALID_NAMESPACE)?;
        namespace.reserved.change(&its, nsid, &change)
    };
    let is_to_wait = subsystem.registrar.run(work).await.unwrap_or(Err(Status::INTERNAL_ERROR))?;
    let (export, host) = (&*subsystem.export, controller.host.nqn.as_str());
    tracing::debug!(export, namespace = nsid, host, ?change, "reservations changed");
    if is_to_wait {
        fence::wait(number, &subsystem.registrar.cores).await;
    }
    Ok(())
}

/// Waits until every write that was admitted before has ended, in all namespaces and on all cores,
/// and every change of reservations that had begun. Must not be called on a core.
pub(crate) fn settle(subsystem: &Subsystem) {
    let reserved = || subsystem.namespaces.iter().map(|namespace| &namespace.reserved);
    reserved().for_each(|reserved| {
        drop(reserved.changes.lock().unwrap_or_else(PoisonError::into_inner));
    });
    let numbers: Vec<u64> = reserved().map(|reserved| reserved.number).collect();
    let cores = subsystem.registrar.cores.clone();
    let waited = subsystem.registrar.cores[0].block_on(move |_| async move {
        for number in numbers {
            fence::wait(number, &cores).await;
        }
    });
    if waited.is_err() {
        tracing::warn!(export = &*subsystem.export, "core stopped before the writes that it carried out");
    }
}
