//! Reservations: hosts that share a namespace agree on who may write.
//!
//! ```text
//!   command ─► change: one at a time ─► rules ─► store ─► rights of each controller ─► news ─► fence ─► completion
//!              (rare)                   (pure)   (file)   (a byte that I/O looks at)            (writes before it end)
//! ```
//!
//! Reads and writes look at one byte of their controller, which nobody writes otherwise. Whoever takes the right to
//! write from another is told so when what the other had on its way has ended ([`crate::fence`]).
//!
//! A host is who its name and its identifier say, over however many controllers; where hosts have to prove who they
//! are, nobody can be another by its identifier alone.
//!
//! | module | what it does |
//! |---|---|
//! | [`rules`] | what follows from a command: a state machine |
//! | [`store`] | keeps it over a loss of power |
//!
//! Source: Base Specification 2.0, 8.19.

mod rules;
mod store;

pub(super) use crate::fence::{Gate, Running};
pub(super) use rules::{Change, Rights};

use super::controller::Host;
use super::subsystem::Subsystem;
use crate::{Error, fence};
use nvme::Status;
use nvme::fabrics::Nqn;
use nvme::reservation::{NO_CONTROLLER, RegisterAction, Registrant, Report};
use reactor::{CoreRef, spawn_thread};
use rules::Reservations;
use std::path::Path;
use std::rc::Rc;
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use store::Store;

/// The reservations of one namespace.
pub(super) struct Reserved {
    /// What no other namespace of this program has.
    number: u64,
    state: Mutex<Reservations>,
    /// Held while something changes, which may take as long as a file is written.
    changes: Mutex<()>,
    store: Option<Store>,
}

impl Reserved {
    /// Of the namespace `uuid`; with a directory, as it was left there.
    ///
    /// # Errors
    /// When what is there cannot be read.
    pub(super) fn open(
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

    /// Whether reservations can outlive a loss of power.
    pub(super) fn can_persist(&self) -> bool {
        self.store.is_some()
    }

    /// Whether a host is registered, or a reservation held.
    pub(super) fn is_in_use(&self) -> bool {
        let state = self.state();
        !state.keys.is_empty() || state.held.is_some()
    }

    /// Whether they do.
    pub(super) fn persists(&self) -> bool {
        self.state().persists
    }

    /// Where writes of the calling core pass.
    pub(super) fn gate(&self) -> Rc<Gate> {
        Gate::of(self.number)
    }

    /// What a host may do. `publish` hears it before it can become another.
    pub(super) fn publish_rights(&self, host: &Host, publish: impl FnOnce(Rights)) {
        publish(self.state().rights(host));
    }

    fn state(&self) -> MutexGuard<'_, Reservations> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Does what a host asks for, up to the rights of controllers. Returns whether writes may be on their way that would
    /// not be admitted any more.
    fn change(&self, subsystem: &Subsystem, nsid: u32, by: &Host, change: &Change) -> Result<bool, Status> {
        let _one_at_a_time = self.changes.lock().unwrap_or_else(PoisonError::into_inner);
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

    /// Who is registered, and who holds the reservation: a host's controllers, or itself if it has none.
    pub(super) fn report(&self, subsystem: &Subsystem) -> Report {
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

/// Who carries out changes.
pub(super) struct Registrar {
    /// Those that serve queues.
    cores: Vec<CoreRef>,
    /// The thread that waits for files, so that no core has to.
    files: Option<Sender<Job>>,
}

impl Registrar {
    /// For the queues of some cores; `has_files`: of namespaces whose reservations can persist.
    ///
    /// # Errors
    /// When the thread is refused.
    pub(super) fn new(cores: Vec<CoreRef>, has_files: bool) -> Result<Registrar, Error> {
        let mut files = None;
        if has_files {
            let (sender, jobs) = mpsc::channel::<Job>();
            // Ends with the last sender, that of the subsystem.
            spawn_thread("reservations", move || jobs.iter().for_each(|job| job()))
                .map_err(|source| Error::System { action: "start the thread of reservations", source })?;
            files = Some(sender);
        }
        Ok(Registrar { cores, files })
    }

    /// Runs `work` where it may wait for files.
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

/// Does what a host asks of a namespace; done when nothing that it forbids is on its way any more. On a core.
///
/// # Errors
/// How the command ends; nothing has changed.
pub(super) async fn change(
    subsystem: &Arc<Subsystem>,
    nsid: u32,
    host: &Host,
    change: Change,
) -> Result<(), Status> {
    let number = subsystem.namespace(nsid).ok_or(Status::INVALID_NAMESPACE)?.reserved.number;
    let (its, by) = (subsystem.clone(), host.clone());
    let work = move || {
        let namespace = its.namespace(nsid).ok_or(Status::INVALID_NAMESPACE)?;
        namespace.reserved.change(&its, nsid, &by, &change)
    };
    let is_to_wait = subsystem.registrar.run(work).await.unwrap_or(Err(Status::INTERNAL_ERROR))?;
    let (export, host) = (&*subsystem.export, host.nqn.as_str());
    tracing::debug!(export, namespace = nsid, host, ?change, "reservations have changed");
    if is_to_wait {
        fence::wait_for_writes(number, &subsystem.registrar.cores).await;
    }
    Ok(())
}
