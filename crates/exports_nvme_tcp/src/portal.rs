//! A portal: listening addresses where hosts find many subsystems.
//!
//! ```text
//!   host ──► control thread: accept, ICReq, Connect ──► the subsystem with the name in the Connect
//!            one per address, for all subsystems   └──► discovery: lists the subsystems for this host
//! ```
//!
//! Each address is a port of every subsystem. A portal has a limit of connections, and each
//! subsystem its own. An export without a shared portal opens one of its own, with one subsystem.

use crate::handshake::{Entrance, NvmeHandshake};
use crate::service::{Service, ServiceCores};
use crate::session::Session;
use crate::socket::Socket;
use crate::{ADMIN_MINIMUM, Access, AccessState, PortConfig, port_at};
use block::SharedRole;
use exports::ConnectionStats;
use exports::stream::{
    AcceptHandler, Admitted, ConnectionLimits, ConnectionSlots, DEFAULT_PORTAL_CLIENTS, Listeners,
    MemoryBudget, Origin, Parts, fault_of_portal,
};
use exports::{Error, NvmeQueue, Peer, Stats};
use nvme::fabrics::discovery::TRANSPORT_TCP;
use nvme_target::{AdmittedHosts, Connection, Directory, Port, Subsystem, default_serial};
use reactor::CoreRef;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Pending handshakes at an address, for each subsystem: after a restart, hosts connect to all of
/// them at once.
const NEWCOMERS_OF_SUBSYSTEM: usize = 128;
/// Maximum number of pending handshakes at an address.
const MAX_NEWCOMERS: usize = 1024;

/// Configuration of a portal.
#[derive(Clone, Debug)]
pub struct PortalConfig {
    /// Its name, for messages.
    pub name: String,
    /// The listening addresses, and the initial access state of each subsystem there.
    pub ports: Vec<PortConfig>,
    /// Maximum concurrent connections of each address, up to
    /// [`MAX_PORTAL_CLIENTS`](super::MAX_PORTAL_CLIENTS). Discovery does not count. One address,
    /// and one host name, may have three quarters of them.
    pub clients: usize,
    /// The memory budget of discovery connections.
    pub memory: MemoryBudget,
}

impl PortalConfig {
    /// A portal with default limits.
    pub fn new(name: String, ports: Vec<PortConfig>) -> PortalConfig {
        PortalConfig { name, ports, clients: DEFAULT_PORTAL_CLIENTS, memory: MemoryBudget::process() }
    }

    /// Checks the numbers of addresses and of connections.
    ///
    /// # Errors
    /// Names the number and its range.
    pub fn check(&self) -> Result<(), Error> {
        match fault_of_portal(self.ports.len(), self.clients) {
            Some(fault) => Err(Error::Config(format!("portal {}: {fault}", self.name))),
            None => Ok(()),
        }
    }
}

/// A portal. Dropping it disconnects its discovery connections; exports that use it keep it open.
/// Must not be dropped on a core.
pub struct Portal {
    name: Arc<str>,
    directory: Arc<Directory<Service>>,
    discovery: Arc<Service>,
    /// Whether several exports use it.
    is_shared: bool,
    bound: Vec<BoundPort>,
    listeners: Listeners,
    /// The core of the next subsystem's first controller.
    next: AtomicUsize,
}

/// A listening address.
struct BoundPort {
    config: PortConfig,
    /// With the TCP port that the system chose.
    address: String,
}

impl Portal {
    /// Opens a portal that exports share. Hosts that connect wait until [`Portal::accept`] is
    /// called, so that a server that restarts refuses no subsystem that it is about to serve.
    ///
    /// # Errors
    /// When the configuration is invalid, or the system refuses a socket.
    pub fn bind(cores: &[CoreRef], config: PortalConfig) -> Result<Arc<Portal>, Error> {
        config.check()?;
        exports::check_cores(&[], cores.len())?;
        let limits = ConnectionLimits { total: config.clients, ..ConnectionLimits::default() };
        let PortalConfig { name, ports, memory, .. } = config;
        let (name, serial) = (Arc::<str>::from(name), default_serial("portal"));
        Ok(Arc::new(Portal::open(name, serial, ports, limits, memory, ServiceCores::new(cores, &[])?, true)?))
    }

    /// Opens the portal of a single export, whose cores serve discovery, too.
    pub(crate) fn of_export(
        name: Arc<str>,
        serial: String,
        ports: Vec<PortConfig>,
        limits: ConnectionLimits,
        memory: MemoryBudget,
        cores: ServiceCores,
    ) -> Result<Arc<Portal>, Error> {
        Ok(Arc::new(Portal::open(name, serial, ports, limits, memory, cores, false)?))
    }

    fn open(
        name: Arc<str>,
        serial: String,
        ports: Vec<PortConfig>,
        limits: ConnectionLimits,
        memory: MemoryBudget,
        cores: ServiceCores,
        is_shared: bool,
    ) -> Result<Portal, Error> {
        let listeners = Listeners::bind(name.clone(), ports.iter().map(|port| &port.address))?;
        let addresses = listeners.addresses().iter().cloned();
        let bound: Vec<BoundPort> =
            ports.into_iter().zip(addresses).map(|(config, address)| BoundPort { config, address }).collect();
        let directory = Directory::new(name.clone());
        let ports = ports_of(&bound, None);
        let places = cores.places.cores();
        let subsystem = directory.discovery(serial, ports, places)?;
        let slots = |_: &BoundPort| ConnectionSlots::new(limits.clone(), memory.clone(), name.clone());
        let slots = bound.iter().map(slots).collect();
        let discovery = Service::new(Arc::new(subsystem), slots, cores, 0);
        Ok(Portal { name, directory, discovery, is_shared, bound, listeners, next: AtomicUsize::new(0) })
    }

    /// Accepts hosts, also those that wait already. Later calls do nothing.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub fn accept(&self) -> Result<(), Error> {
        self.listeners.accept(|port| {
            let (directory, discovery) = (self.directory.clone(), self.discovery.clone());
            let entrance = Entrance { directory, discovery, port, portal: self.name.clone() };
            PortalAcceptHandler(Arc::new(entrance))
        })
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The listening addresses: address and TCP port as the system chose them.
    pub fn addresses(&self) -> impl Iterator<Item = &str> {
        self.bound.iter().map(|port| &*port.address)
    }

    /// The ports: each address as the system chose it, and its configuration.
    pub fn ports(&self) -> impl Iterator<Item = (&str, &PortConfig)> {
        self.bound.iter().map(|port| (&*port.address, &port.config))
    }

    /// The access state over each port: those of `chosen`, and else its own.
    ///
    /// # Errors
    /// When `chosen` names another port.
    pub(crate) fn states(&self, chosen: &[PortConfig]) -> Result<Vec<AccessState>, Error> {
        let ports = || self.bound.iter().map(|port| &port.config);
        for port in chosen {
            port_at(ports(), &port.address).map_err(Error::Config)?;
        }
        Ok(ports().map(|port| port.state_within(chosen)).collect())
    }

    /// The number of subsystems.
    pub fn subsystems(&self) -> usize {
        self.directory.count()
    }

    /// The connections of hosts to all subsystems, of each port.
    pub fn connections(&self) -> impl Iterator<Item = usize> {
        self.discovery.slots.iter().map(|slots| slots.connected())
    }

    /// Counters of discovery connections. The exports count those of their hosts.
    pub fn stats(&self) -> &Stats {
        &self.discovery.cores.stats
    }

    /// The ports of a subsystem here.
    pub(crate) fn ports_of_subsystem(&self, role: Option<&Arc<SharedRole>>) -> Vec<Arc<Port>> {
        ports_of(&self.bound, role)
    }

    /// Adds the subsystem of an export, whose connections have these limits at each port.
    ///
    /// # Errors
    /// When its name is taken, there are too many, or TLS refuses the keys.
    pub(crate) fn add(
        &self,
        subsystem: Arc<Subsystem>,
        limits: &ConnectionLimits,
        memory: &MemoryBudget,
        cores: ServiceCores,
    ) -> Result<Arc<Service>, Error> {
        let slots = self.discovery.slots.iter().map(|shared| {
            let shared = self.is_shared.then(|| shared.clone());
            ConnectionSlots::within(shared, limits.clone(), memory.clone(), subsystem.export.clone())
        });
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let service = Service::new(subsystem.clone(), slots.collect(), cores, first);
        self.directory.add(service.clone())?;
        self.discovery.subsystem.note_listing();
        Ok(service)
    }

    /// Removes the subsystem of an export. Returns when no host can connect to it any more; those
    /// that are connected stay. Must not be called on a core.
    pub(crate) fn remove(&self, service: &Arc<Service>) {
        self.directory.remove(service);
        service.close();
        self.listeners.settle();
        self.discovery.subsystem.note_listing();
    }

    /// Replaces the hosts of a subsystem. Returns when the controllers of others are gone, and none
    /// of their writes is in flight. Must not be called on a core.
    ///
    /// # Errors
    /// When TLS refuses the keys; then nothing changes.
    pub(crate) fn set_access(&self, service: &Service, access: Access) -> Result<(), Error> {
        let admitted = AdmittedHosts::new(access, &service.subsystem.nqn);
        let (listed, is_closed) = (admitted.access.listed(), admitted.access.is_closed());
        let revoked = self.directory.admit(service, admitted)?;
        service.slots.iter().for_each(|slots| slots.set_listed(listed.clone(), is_closed));
        self.discovery.subsystem.note_listing();
        service.subsystem.disconnect(&revoked);
        Ok(())
    }

    /// Stops accepting hosts. Those that are connected stay. Must not be called on a core.
    pub fn close(&self) {
        self.listeners.close();
    }
}

impl fmt::Debug for Portal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Portal({})", self.name)
    }
}

impl Drop for Portal {
    fn drop(&mut self) {
        self.close();
        self.discovery.cores.drain();
    }
}

/// The ports of one subsystem at these addresses.
fn ports_of(bound: &[BoundPort], role: Option<&Arc<SharedRole>>) -> Vec<Arc<Port>> {
    let port = |(id, BoundPort { config, address }): (u16, &BoundPort)| {
        let address = address.parse::<SocketAddr>().ok();
        Arc::new(Port::new(id, TRANSPORT_TCP, config.state, address, role.cloned()))
    };
    (1..).zip(bound).map(port).collect()
}

/// Starts handshakes at one port and passes queues to cores, on its control thread.
struct PortalAcceptHandler(Arc<Entrance>);

impl AcceptHandler for PortalAcceptHandler {
    type Handshake = NvmeHandshake;

    fn max_newcomers(&self) -> usize {
        (self.0.directory.count() * NEWCOMERS_OF_SUBSYSTEM).clamp(NEWCOMERS_OF_SUBSYSTEM, MAX_NEWCOMERS)
    }

    fn greet(&mut self, peer: &str, origin: Origin) -> NvmeHandshake {
        NvmeHandshake::new(self.0.clone(), peer, origin)
    }

    fn tls(&self) -> Option<tls::Server> {
        self.0.directory.tls_server()
    }

    fn admit(&mut self, admitted: Admitted<NvmeHandshake>) {
        let Some((service, agreed, slot)) = admitted.handshake.agreed() else { return };
        let port = self.0.port;
        // Only discovery connections have no slot yet.
        let visit = || {
            let slots = &service.slots[port];
            slots.visit(admitted.origin, ADMIN_MINIMUM, admitted.wire.socket(), &admitted.peer)
        };
        let Ok(slot) = slot.map_or_else(visit, Ok) else { return };
        let controller = agreed.admission.controller().clone();
        let (queue, entries) = (agreed.admission.queue_id, agreed.admission.entries);
        let ServiceCores { registry, stats, places } = &service.cores;
        let place = service.place(port, queue);
        let (peer, host, export) = (admitted.peer, controller.host.nqn.as_str(), &service.subsystem.export);
        tracing::info!(
            export = &**export,
            peer,
            host,
            controller = controller.id,
            port = controller.port.id,
            queue,
            tls = admitted.wire.agreed(),
            core = place,
            "host connected"
        );
        let socket = Arc::new(Socket(admitted.wire.socket().clone()));
        let connection: Arc<dyn Connection> = socket.clone();
        controller.attach(queue, &connection);
        let is_secured = admitted.wire.is_secured();
        let client = Peer {
            address: Some(peer.clone()),
            host: Some(host.to_owned()),
            is_secured,
            // TLS has keys of hosts alone.
            is_authenticated: is_secured || agreed.admission.proof.is_some(),
            queue: Some(NvmeQueue { controller: controller.id, queue }),
        };
        let early = admitted.early;
        let parts = Parts {
            wire: admitted.wire,
            peer,
            export: export.clone(),
            stats: ConnectionStats::new(stats.queues[place].clone(), stats.connect_peer(client)),
            slot,
        };
        let open = move || Session::open(agreed, &early, socket);
        if registry.serve(&places.cores()[place], parts, entries.into(), open).is_err() {
            tracing::warn!(export = &**export, core = place, "host disconnected: the core has stopped");
        }
    }
}
