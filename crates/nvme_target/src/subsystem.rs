//! The subsystem: its namespaces, access control, and controllers.

use crate::access::AdmittedHosts;
use crate::config::{NamespaceConfig, SubsystemConfig, identity};
use crate::controller::Controller;
use crate::discovery::Catalog;
use crate::failures::Failures;
use crate::host::Host;
use crate::ports::Port;
use crate::refusal::Refusal;
use crate::reservations::{self, Registrar, Reserved};
use block::{Device, Limits, SharedRole};
use exports::Error;
use nvme::fabrics::{ANY_CONTROLLER, Connect, ConnectData, InvalidParameter, Nqn};
use nvme::{AccessState, Status};
use nvme_auth::access::{Access, Proof};
use reactor::CoreRef;
use std::collections::BTreeMap;
use std::ops::RangeInclusive;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Maximum entries of a queue: commands that one connection may have in flight.
pub const MAX_ENTRIES: u32 = 128;
/// Minimum entries of a queue (Base 3.3.3.1).
const MIN_ENTRIES: u32 = 2;

/// A device as a namespace.
pub(crate) struct Namespace {
    /// The identifier, from 1 on.
    pub(crate) id: u32,
    pub(crate) device: Arc<dyn Device>,
    pub(crate) limits: Limits,
    pub(crate) capacity: AtomicU64,
    pub(crate) uuid: [u8; 16],
    pub(crate) is_read_only: bool,
    pub(crate) reserved: Reserved,
}

impl Namespace {
    fn open(id: u32, namespace: &NamespaceConfig, config: &SubsystemConfig) -> Result<Namespace, Error> {
        let NamespaceConfig { device, uuid } = namespace;
        let limits = device.limits();
        let uuid = uuid.unwrap_or_else(|| identity(&[config.nqn.as_str(), device.name()]));
        Ok(Namespace {
            id,
            device: device.clone(),
            capacity: AtomicU64::new(limits.capacity),
            uuid,
            is_read_only: config.read_only || limits.read_only,
            limits,
            reserved: Reserved::open(config.reservations.as_deref(), &config.nqn, &uuid)?,
        })
    }

    /// The current size in bytes.
    #[inline]
    pub(crate) fn capacity(&self) -> u64 {
        self.capacity.load(Ordering::Relaxed)
    }

    /// log2 of the block size.
    #[inline]
    pub(crate) fn block_shift(&self) -> u32 {
        self.limits.block_size.trailing_zeros()
    }
}

/// The subsystem of an export, or the discovery subsystem of a portal.
pub struct Subsystem {
    /// The name.
    pub nqn: Nqn,
    /// The subsystems that it lists, if it is the discovery subsystem. It has no namespaces then,
    /// and is open to all.
    pub(crate) catalog: Option<Arc<dyn Catalog>>,
    pub(crate) serial: String,
    /// In the order of their identifiers.
    pub ports: Vec<Arc<Port>>,
    /// In the order of their identifiers, without gaps.
    pub(crate) namespaces: Vec<Namespace>,
    /// Recent authentication failures.
    pub(crate) failures: Failures,
    /// Maximum I/O queues of a controller.
    pub(crate) max_queues: u16,
    controller_ids: RangeInclusive<u16>,
    /// The role of this host, if other hosts serve the namespaces too.
    role: Option<Arc<SharedRole>>,
    /// The changes of the role that hosts were notified of.
    noted_changes: AtomicU64,
    /// The export's name, for logs.
    pub export: Arc<str>,
    /// Executes reservation changes.
    pub(crate) registrar: Registrar,
    controllers: Mutex<Controllers>,
}

struct Controllers {
    /// The hosts that may connect. Under this lock, so that no controller of a host is created
    /// after its access has ended.
    admitted: Arc<AdmittedHosts>,
    open: BTreeMap<u16, Arc<Controller>>,
    /// Also those whose admin queue is gone: their I/O queues may have commands in flight.
    living: Vec<Weak<Controller>>,
    /// The identifier that was assigned last.
    last: u16,
}

/// A queue that a host may use.
pub struct Admission {
    pub(crate) membership: Membership,
    /// The queue; 0 for the admin queue.
    pub queue_id: u16,
    /// Commands that the host may have in flight.
    pub entries: u16,
    /// Whether the host uses the head of the submission queue.
    pub has_flow_control: bool,
    /// The proof that the host owes before the queue is served.
    pub proof: Option<Proof>,
}

/// A queue's membership in its controller. The controller ends with the admin queue.
pub(crate) struct Membership {
    pub(crate) controller: Arc<Controller>,
    queue_id: u16,
    /// Whether the queue was added to the controller.
    has_joined: bool,
}

impl Membership {
    /// Adds the queue to the controller, if that has not happened yet. Called once the host has
    /// authenticated, so that no other peer can take the queue identifiers of a host.
    pub(crate) fn join(&mut self) -> Result<(), Refusal> {
        if !self.has_joined {
            self.controller.join(self.queue_id)?;
            self.has_joined = true;
        }
        Ok(())
    }
}

impl Admission {
    /// The controller of the queue.
    pub fn controller(&self) -> &Arc<Controller> {
        &self.membership.controller
    }

    /// Adds the queue to the controller. Called once the host has given its proof.
    ///
    /// # Errors
    /// When the controller has ended, or has the queue already.
    pub fn join(&mut self) -> Result<(), Refusal> {
        self.membership.join()
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        if self.has_joined {
            self.controller.leave(self.queue_id);
        }
    }
}

impl Subsystem {
    /// Opens a subsystem, without ports. `export` is its name in logs; `cores` serve its queues.
    ///
    /// # Errors
    /// When the configuration is invalid, or stored reservations cannot be read.
    pub fn open(
        config: &SubsystemConfig,
        namespaces: &[NamespaceConfig],
        cores: &[CoreRef],
        export: Arc<str>,
    ) -> Result<Subsystem, Error> {
        config.check(namespaces)?;
        let open = |(id, namespace): (u32, &NamespaceConfig)| Namespace::open(id, namespace, config);
        let namespaces = (1..).zip(namespaces).map(open).collect::<Result<_, _>>()?;
        let admitted = AdmittedHosts::new(config.access.clone(), &config.nqn);
        let registrar = Registrar::new(cores.to_vec(), config.reservations.is_some())?;
        if !config.nqn.is_qualified() {
            let nqn = config.nqn.as_str();
            tracing::warn!(
                export = &*export,
                nqn,
                "subsystem name does not begin with \"nqn.\": some hosts refuse it"
            );
        }
        Ok(Subsystem::new(config, namespaces, admitted, None, export, registrar))
    }

    fn new(
        config: &SubsystemConfig,
        namespaces: Vec<Namespace>,
        admitted: AdmittedHosts,
        catalog: Option<Arc<dyn Catalog>>,
        export: Arc<str>,
        registrar: Registrar,
    ) -> Subsystem {
        let admitted = Arc::new(admitted);
        let controllers = Controllers { admitted, open: BTreeMap::new(), living: Vec::new(), last: 0 };
        Subsystem {
            nqn: config.nqn.clone(),
            catalog,
            serial: config.serial(),
            ports: Vec::new(),
            namespaces,
            failures: Failures::default(),
            max_queues: config.queues,
            controller_ids: config.controller_ids.clone(),
            role: config.role.clone(),
            noted_changes: AtomicU64::new(config.role.as_ref().map_or(0, |role| role.changes())),
            export,
            registrar,
            controllers: Mutex::new(controllers),
        }
    }

    /// The discovery subsystem of a portal, which lists the subsystems of `catalog`.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub(crate) fn discovery(
        catalog: Arc<dyn Catalog>,
        serial: String,
        ports: Vec<Arc<Port>>,
        cores: &[CoreRef],
        portal: Arc<str>,
    ) -> Result<Subsystem, Error> {
        let name = Nqn::discovery();
        let admitted = AdmittedHosts::new(Access::default(), &name);
        let config = SubsystemConfig { serial: Some(serial), queues: 1, ..SubsystemConfig::new(name) };
        let registrar = Registrar::new(cores.to_vec(), false)?;
        let subsystem = Subsystem::new(&config, Vec::new(), admitted, Some(catalog), portal, registrar);
        Ok(Subsystem { ports, ..subsystem })
    }

    /// The limits of the device of its first namespace.
    pub fn limits(&self) -> Limits {
        self.namespaces[0].device.limits()
    }

    /// Sets the access state of the port with this index. Commands in flight complete as before;
    /// hosts that enabled the event are notified. Returns `false` when the port does not exist.
    pub fn set_access_state(&self, port: usize, state: AccessState) -> bool {
        let Some(port) = self.ports.get(port) else { return false };
        if port.set_state(state) {
            let (export, port, state) = (&*self.export, port.id, state.name());
            tracing::info!(export, port, state, "access state of a port changed");
            self.note_access(port);
        }
        true
    }

    /// Whether this is the discovery subsystem.
    pub(crate) fn is_discovery(&self) -> bool {
        self.catalog.is_some()
    }

    /// Looks up a namespace by identifier.
    #[inline]
    pub(crate) fn namespace(&self, id: u32) -> Option<&Namespace> {
        self.namespaces.get(id.checked_sub(1)? as usize)
    }

    /// Validates a Connect, and creates the controller if it is for an admin queue.
    pub(crate) fn connect(
        self: &Arc<Self>,
        port: &Arc<Port>,
        connect: &Connect,
        data: &ConnectData,
    ) -> Result<Admission, Refusal> {
        // Discovery is open to all; a host without access finds no entry.
        let admitted = self.admitted();
        if !admitted.access.allows(&data.host) {
            return Err(Status::CONNECT_INVALID_HOST.into());
        }
        if data.host_id == [0; 16] {
            return Err(InvalidParameter::HOST_ID.into());
        }
        if !(MIN_ENTRIES..=MAX_ENTRIES).contains(&connect.entries) {
            return Err(InvalidParameter::QUEUE_SIZE.into());
        }
        let host = Host { nqn: data.host.clone(), id: data.host_id };
        let controller = match connect.queue_id {
            0 => self.create(port, host, connect.keep_alive_ms, data.controller_id)?,
            _ => self.join(port, &host, connect.queue_id, data.controller_id)?,
        };
        let mut membership =
            Membership { controller, queue_id: connect.queue_id, has_joined: connect.queue_id == 0 };
        let proof = admitted.access.proof(&data.host);
        match proof {
            Some(_) => membership.controller.check_join(connect.queue_id)?,
            None => membership.join()?,
        }
        Ok(Admission {
            membership,
            queue_id: connect.queue_id,
            entries: connect.entries as u16,
            has_flow_control: connect.attributes & Connect::NO_FLOW_CONTROL == 0,
            proof,
        })
    }

    /// The hosts that may connect at present.
    pub fn admitted(&self) -> Arc<AdmittedHosts> {
        self.lock().admitted.clone()
    }

    /// Admits these hosts from now on, and revokes the controllers of others. Returns those.
    pub(crate) fn admit(&self, admitted: AdmittedHosts) -> Vec<Arc<Controller>> {
        let mut controllers = self.lock();
        controllers.admitted = Arc::new(admitted);
        controllers.living.retain(|controller| controller.strong_count() > 0);
        let access = &controllers.admitted.access;
        let living = controllers.living.iter().filter_map(Weak::upgrade);
        let lost: Vec<Arc<Controller>> =
            living.filter(|controller| !access.allows(&controller.host.nqn)).collect();
        lost.iter().for_each(|controller| controller.revoke());
        controllers.open.retain(|_, controller| !controller.is_revoked());
        lost
    }

    /// Ends revoked controllers. Returns when none of their commands is in flight that can change a
    /// namespace. Must not be called on a core.
    pub fn disconnect(&self, revoked: &[Arc<Controller>]) {
        for controller in revoked {
            controller.end();
            let (export, host, id) = (&*self.export, controller.host.nqn.as_str(), controller.id);
            tracing::info!(export, host, controller = id, "host disconnected: it may not connect any more");
        }
        // Also without such a controller: a caller that repeats a change after a lost answer waits
        // for the same writes.
        reservations::settle(self);
    }

    fn create(
        self: &Arc<Self>,
        port: &Arc<Port>,
        host: Host,
        keep_alive_ms: u32,
        wanted: u16,
    ) -> Result<Arc<Controller>, Refusal> {
        if wanted != ANY_CONTROLLER {
            return Err(InvalidParameter::CONTROLLER_ID.into());
        }
        let mut controllers = self.lock();
        // Again: it may have lost its access since the first check.
        if !controllers.admitted.access.allows(&host.nqn) {
            return Err(Status::CONNECT_INVALID_HOST.into());
        }
        let (first, last) = (*self.controller_ids.start(), *self.controller_ids.end());
        let mut after_last = (controllers.last.max(first - 1) + 1..=last).chain(first..=last);
        let id = after_last.find(|id| !controllers.open.contains_key(id));
        let id = id.ok_or(Status::CONNECT_CONTROLLER_BUSY)?;
        controllers.last = id;
        let controller = Arc::new(Controller::new(id, host, keep_alive_ms, self, port));
        controllers.open.insert(id, controller.clone());
        controllers.living.retain(|controller| controller.strong_count() > 0);
        controllers.living.push(Arc::downgrade(&controller));
        drop(controllers);
        // Later changes of rights reach the new controller.
        for namespace in &self.namespaces {
            namespace.reserved.publish_rights(&controller.host, |rights| {
                controller.set_rights(namespace.id, rights);
            });
        }
        Ok(controller)
    }

    fn join(
        &self,
        port: &Arc<Port>,
        host: &Host,
        queue_id: u16,
        id: u16,
    ) -> Result<Arc<Controller>, Refusal> {
        let controller = self.lock().open.get(&id).cloned();
        let is_its = |controller: &Arc<Controller>| {
            let is_hers = controller.host.nqn == host.nqn && Arc::ptr_eq(&controller.port, port);
            is_hers && !self.is_discovery()
        };
        let controller = controller.filter(is_its).ok_or(InvalidParameter::CONTROLLER_ID)?;
        if controller.host.id != host.id {
            self.check_other_id(&controller)?;
        }
        if queue_id > self.max_queues {
            return Err(InvalidParameter::QUEUE_ID.into());
        }
        Ok(controller)
    }

    /// Checks an I/O queue whose host identifier differs from that of its admin queue: some hosts
    /// use a new one for each connection. The identifier of the admin queue counts. If reservations
    /// tell hosts apart by it, both must be equal.
    fn check_other_id(&self, controller: &Controller) -> Result<(), Refusal> {
        let Some(namespace) = self.namespaces.iter().find(|namespace| namespace.reserved.is_in_use()) else {
            return Ok(());
        };
        tracing::warn!(
            export = &*self.export,
            host = controller.host.nqn.as_str(),
            controller = controller.id,
            namespace = namespace.id,
            "I/O queue refused: its host identifier differs from the admin queue's, and the namespace has reservations"
        );
        Err(InvalidParameter::HOST_ID.into())
    }

    /// Removes a controller. Its identifier may already be that of another.
    pub(crate) fn forget(&self, controller: &Controller) {
        let mut controllers = self.lock();
        if controllers.open.get(&controller.id).is_some_and(|open| std::ptr::eq(&**open, controller)) {
            controllers.open.remove(&controller.id);
        }
    }

    /// Whether hosts can reserve namespaces: not if other hosts serve these too.
    pub(crate) fn has_reservations(&self) -> bool {
        self.role.is_none()
    }

    /// Queries the sizes of all devices and the role of this host, and notifies hosts of changes.
    pub fn refresh(&self) {
        let changes = self.role.as_ref().map_or(0, |role| role.changes());
        if self.noted_changes.swap(changes, Ordering::Relaxed) != changes {
            self.ports.iter().for_each(|port| self.note_access(port.id));
        }
        for namespace in &self.namespaces {
            let capacity = namespace.device.limits().capacity;
            if namespace.capacity.swap(capacity, Ordering::Relaxed) != capacity {
                self.controllers().iter().for_each(|controller| controller.note_change(namespace.id));
            }
        }
    }

    /// Notifies hosts that the access state of a port has changed.
    pub(crate) fn note_access(&self, port: u16) {
        let controllers = self.controllers();
        let of_port = controllers.iter().filter(|controller| controller.port.id == port);
        of_port.for_each(|controller| controller.note_access());
    }

    /// Notifies hosts of the discovery subsystem that the listed subsystems, or their hosts, have
    /// changed.
    pub fn note_listing(&self) {
        self.controllers().iter().for_each(|controller| controller.note_listing());
    }

    /// The controllers, in the order of their identifiers.
    pub(crate) fn controllers(&self) -> Vec<Arc<Controller>> {
        self.lock().open.values().cloned().collect()
    }

    fn lock(&self) -> MutexGuard<'_, Controllers> {
        self.controllers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
