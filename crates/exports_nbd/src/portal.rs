//! A portal: listening addresses where clients choose one of many exports by its name.
//!
//! ```text
//!   client ──► control thread: accept, TLS, options ──► the export with the name in GO
//!              one per address, for all exports    └──► LIST: the exports that this client may use
//! ```
//!
//! TLS belongs to the portal, because it starts before a client names an export. An export without
//! a shared portal opens one of its own, with one export.

use crate::directory::{DefaultExport, Directory};
use crate::handshake::{NbdHandshake, Tls};
use crate::options::MAX_STRING;
use crate::service::{Service, ServiceConfig};
use block::Device;
use exports::Error;
use exports::stream::{
    AcceptHandler, Address, Admitted, Applicant, ConnectionLimits, ConnectionSlots, DEFAULT_PORTAL_CLIENTS,
    Listeners, MemoryBudget, Origin, Security, fault_of_portal,
};
use reactor::CoreRef;
use std::fmt;
use std::sync::Arc;

/// Pending handshakes at an address, for each export: after a restart, clients connect to all of
/// them at once.
const NEWCOMERS_OF_EXPORT: usize = 16;
/// Minimum and maximum number of pending handshakes at an address.
const NEWCOMERS: [usize; 2] = [128, 1024];

/// Configuration of a portal.
#[derive(Clone, Debug)]
pub struct PortalConfig {
    /// Its name, for messages.
    pub name: String,
    /// The listening addresses.
    pub addresses: Vec<Address>,
    /// The name of the export for clients that name none, up to 4096 bytes. `None`: the portal
    /// refuses them.
    pub default: Option<String>,
    /// TLS of all exports, optional or required.
    pub tls: Option<Security>,
    /// Maximum concurrent connections of each address, up to
    /// [`MAX_PORTAL_CLIENTS`](crate::MAX_PORTAL_CLIENTS).
    pub clients: usize,
    /// Maximum connections from one address at a time, of clients without a key of their own.
    /// `None`: three quarters of `clients`, or all if these are fewer than 32.
    pub address_clients: Option<usize>,
}

impl PortalConfig {
    /// A portal with default limits, without TLS and without a default export.
    pub fn new(name: String, addresses: Vec<Address>) -> PortalConfig {
        let (default, tls, clients, address_clients) = (None, None, DEFAULT_PORTAL_CLIENTS, None);
        PortalConfig { name, addresses, default, tls, clients, address_clients }
    }

    /// Checks numbers and lengths.
    ///
    /// # Errors
    /// Names the value and its range.
    pub fn check(&self) -> Result<(), Error> {
        let default_len = self.default.as_ref().map_or(1, String::len);
        let fault = if let Some(fault) = fault_of_portal(self.addresses.len(), self.clients) {
            fault
        } else if self.address_clients == Some(0) {
            "0 clients of an address: want at least 1".into()
        } else if !(1..=MAX_STRING).contains(&default_len) {
            format!("default export name of {default_len} bytes: want 1 to {MAX_STRING}")
        } else {
            return Ok(());
        };
        Err(Error::Config(format!("portal {}: {fault}", self.name)))
    }
}

/// A portal. Exports that use it keep it open. Must not be dropped on a core.
pub struct Portal {
    name: String,
    /// Its name in logs.
    log_name: Arc<str>,
    directory: Arc<Directory>,
    /// Whether several exports use it.
    is_shared: bool,
    /// One per address.
    slots: Vec<Arc<ConnectionSlots>>,
    listeners: Listeners,
}

impl Portal {
    /// Opens a portal that exports share. Clients that connect wait until [`Portal::accept`] is
    /// called, so that a server that restarts refuses no export that it is about to serve.
    ///
    /// # Errors
    /// When the configuration is invalid, or the system refuses a socket.
    pub fn bind(config: &PortalConfig) -> Result<Arc<Portal>, Error> {
        config.check()?;
        let default = config.default.clone().map_or(DefaultExport::None, DefaultExport::Named);
        let limits = ConnectionLimits::with_tls(config.tls.as_ref(), config.clients, config.address_clients);
        let object = format!("portal {}", config.name);
        let directory = Directory::new(object.into(), default, config.tls.clone());
        let memory = MemoryBudget::process();
        let name = config.name.clone();
        Ok(Arc::new(Portal::open(name, directory, &config.addresses, &limits, &memory, true)?))
    }

    /// Opens the portal of a single export: it is named after the address, and has the limits of
    /// the export.
    pub(crate) fn of_export(
        address: &Address,
        log_name: &str,
        limits: &ConnectionLimits,
        tls: Option<Security>,
        memory: &MemoryBudget,
    ) -> Result<Arc<Portal>, Error> {
        let directory = Directory::new(log_name.into(), DefaultExport::Only, tls);
        let addresses = std::slice::from_ref(address);
        Ok(Arc::new(Portal::open(address.to_string(), directory, addresses, limits, memory, false)?))
    }

    fn open(
        name: String,
        directory: Directory,
        addresses: &[Address],
        limits: &ConnectionLimits,
        memory: &MemoryBudget,
        is_shared: bool,
    ) -> Result<Portal, Error> {
        let log_name: Arc<str> = format!("nbd:{name}").into();
        let listeners = Listeners::bind(log_name.clone(), addresses)?;
        let slots = |_: &String| ConnectionSlots::new(limits.clone(), memory.clone(), log_name.clone());
        Ok(Portal {
            directory: Arc::new(directory),
            is_shared,
            slots: listeners.addresses().iter().map(slots).collect(),
            listeners,
            name,
            log_name,
        })
    }

    /// Accepts clients, also those that wait already. Later calls do nothing.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub fn accept(&self) -> Result<(), Error> {
        self.listeners.accept(|address| {
            let (directory, slots) = (self.directory.clone(), self.slots[address].clone());
            PortalAcceptHandler { directory, slots, address }
        })
    }

    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The listening addresses: address and TCP port as the system chose them, or paths.
    pub fn addresses(&self) -> impl Iterator<Item = &str> {
        self.listeners.addresses().iter().map(String::as_str)
    }

    /// The number of exports.
    pub fn exports(&self) -> usize {
        self.directory.len()
    }

    /// The connections of all exports, at each address.
    pub fn connections(&self) -> impl Iterator<Item = usize> {
        self.slots.iter().map(|slots| slots.connected())
    }

    /// Replaces the TLS identity and the accepted clients, for handshakes that begin from now on.
    /// Connections that are established stay.
    ///
    /// # Errors
    /// When the portal was opened without TLS; then nothing changes.
    pub fn set_security(&self, security: Security) -> Result<(), Error> {
        let (listed, is_closed) = security.listed();
        if !self.directory.set_security(security) {
            return Err(Error::Config(format!("{}: it has no TLS", self.log_name)));
        }
        self.slots.iter().for_each(|slots| slots.set_listed(listed.clone(), is_closed));
        Ok(())
    }

    /// Adds an export, whose connections have these limits at each address of a shared portal.
    ///
    /// # Errors
    /// When its name is taken, there are too many, or it names a core that does not exist.
    pub(crate) fn add(
        &self,
        device: Arc<dyn Device>,
        cores: &[CoreRef],
        config: ServiceConfig,
        limits: &ConnectionLimits,
        memory: &MemoryBudget,
    ) -> Result<Arc<Service>, Error> {
        let slots = self.slots.iter().map(|slots| match self.is_shared {
            true => {
                let (limits, memory, name) = (limits.clone(), memory.clone(), config.log_name.clone());
                ConnectionSlots::within(Some(slots.clone()), limits, memory, name)
            }
            false => slots.clone(),
        });
        let slots = slots.collect();
        let service = Arc::new(Service::new(device, cores, config, slots)?);
        self.directory.add(service.clone())?;
        Ok(service)
    }

    /// Removes an export. Returns when no client can connect to it any more; those that are
    /// connected stay. Must not be called on a core.
    pub(crate) fn remove(&self, service: &Arc<Service>) {
        self.directory.remove(service);
        service.close();
        self.listeners.settle();
    }

    /// Stops accepting clients. Those that are connected stay. Must not be called on a core.
    pub fn close(&self) {
        self.listeners.close();
    }
}

impl fmt::Debug for Portal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Portal({})", self.name)
    }
}

/// Starts handshakes at one address and passes clients to exports, on its control thread.
struct PortalAcceptHandler {
    directory: Arc<Directory>,
    slots: Arc<ConnectionSlots>,
    /// The index of the address.
    address: usize,
}

impl AcceptHandler for PortalAcceptHandler {
    type Handshake = NbdHandshake<Directory>;

    fn max_newcomers(&self) -> usize {
        let [min, max] = NEWCOMERS;
        (self.directory.len() * NEWCOMERS_OF_EXPORT).clamp(min, max)
    }

    /// Refuses, before the handshake, a client that has no slot and cannot authenticate for a
    /// reserved one.
    fn may_come(&mut self, peer: &str, origin: Origin) -> bool {
        let security = self.directory.security();
        let may_prove = security.is_some_and(|security| !security.server.identities().is_empty());
        may_prove || self.slots.check(Applicant { origin, host: None, is_proven: false }, peer).is_ok()
    }

    fn greet(&mut self, _peer: &str, _origin: Origin) -> NbdHandshake<Directory> {
        let tls = match self.directory.security() {
            None => Tls::Off,
            Some(Security { is_required: false, .. }) => Tls::Allowed,
            Some(Security { is_required: true, .. }) => Tls::Required,
        };
        NbdHandshake::new(self.directory.clone(), tls)
    }

    fn tls(&self) -> Option<tls::Server> {
        self.directory.security().map(|security| security.server)
    }

    fn admit(&mut self, admitted: Admitted<NbdHandshake<Directory>>) {
        let Some(export) = admitted.handshake.chosen() else { return };
        export.serve(self.address, admitted);
    }
}
