//! An NBD server for kernels, QEMU, libnbd and other hosts.
//!
//! ```text
//!   client ──► control thread: accept, handshake (pure) ──► a core, in turn ─► Connection ─► device
//!              one for all handshakes                       serves the socket to its end
//! ```
//!
//! One core serves a connection to its end. Its requests run concurrently and are answered as they
//! complete. Several connections of one client are spread over the cores: a flush on one covers the
//! writes that completed on any.
//!
//! Supported: the fixed newstyle handshake with every option and TLS; simple, structured and
//! extended requests and replies; every command. Block status has `base:allocation`, and
//! `qemu:dirty-bitmap:NAME` for each dirty bitmap of the device, with up to 64 extents of each in a
//! reply. Payload is at most 32 MiB. A connection has at most 32 MiB of memory and 512
//! requests. At the limit the export does not read from it until the client has read its replies.
//! While the memory budget for all network clients is used up, a connection has less, and its long
//! requests are split into [`fragments`].
//!
//! Source of truth: the NBD protocol (github.com/NetworkBlockDevice/nbd, doc/proto.md) and its
//! extension "extended headers".

mod blocks;
mod connection;
mod fragments;
mod handshake;
mod job;
mod long_write;
mod offer;
mod options;
mod reading;
mod request;
mod status;
mod wire;

pub use crate::stream::{Address, MemoryBudget, Security};

use crate::stream::{
    AcceptHandler, Acceptor, Admitted, Applicant, ConnectionLimits, ConnectionSlots, FRAGMENT, Listener,
    Minimum, Origin, Parts, Places, Registry,
};
use crate::{Error, Export, Stats, check_cores};
use block::{Device, DirtyBitmap, Limits};
use blocks::RangeLock;
use connection::{MAX_REQUESTS, Session};
use handshake::{NbdHandshake, Tls};
use offer::Offer;
use reactor::CoreRef;
use request::Rules;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

/// Default number of concurrent clients.
pub const DEFAULT_CLIENTS: usize = 64;
/// Maximum number of concurrent clients.
pub const MAX_CLIENTS: usize = 4096;
/// Memory guaranteed to a connection: short requests, a fragment in each direction, the stream
/// buffer, a block.
const MINIMUM: Minimum =
    Minimum { requests: FRAGMENT, capsules: 0, fixed: 2 * FRAGMENT + (66 << 10) + offer::MAX_BLOCK as usize };

/// Configuration of an NBD export.
#[derive(Clone, Debug)]
pub struct Config {
    /// The listening address.
    pub address: Address,
    /// The export's name. Clients may also request the export with the empty name.
    pub name: String,
    /// A description for people, shown in the listing.
    pub description: String,
    /// Refuse writes even if the device accepts them.
    pub read_only: bool,
    /// TLS, optional or required.
    pub tls: Option<Security>,
    /// Connections at a time, up to [`MAX_CLIENTS`]; more are refused.
    pub clients: usize,
    /// Connections from one address at a time, of clients without a key of their own. `None`: three
    /// quarters of `clients`, or all if these are fewer than 32. Unix sockets have no such limit.
    pub address_clients: Option<usize>,
    /// The memory budget of its connections.
    pub memory: MemoryBudget,
    /// The cores (places in the list given to [`Nbd::start`]) that serve connections, in turn.
    /// Empty: all.
    pub core_map: Vec<usize>,
}

impl Config {
    /// A configuration with empty name and description.
    pub fn new(address: Address) -> Config {
        Config {
            address,
            name: String::new(),
            description: String::new(),
            read_only: false,
            tls: None,
            clients: DEFAULT_CLIENTS,
            address_clients: None,
            memory: MemoryBudget::process(),
            core_map: Vec::new(),
        }
    }

    /// The connection limits; each client identity with a key has reserved slots.
    fn connection_limits(&self) -> ConnectionLimits {
        let (listed, is_closed) = self.tls.as_ref().map(listed).unwrap_or_default();
        ConnectionLimits {
            total: self.clients,
            of_address: self.address_clients,
            of_host: None,
            listed,
            is_closed,
        }
    }

    fn check(&self, cores: usize, limits: &Limits) -> Result<(), Error> {
        let fault = if !(1..=MAX_CLIENTS).contains(&self.clients) {
            format!("{} clients: want 1 to {MAX_CLIENTS}", self.clients)
        } else if self.address_clients == Some(0) {
            "0 clients of an address: want at least 1".into()
        } else if self.name.len() > options::MAX_STRING {
            format!("export name of {} bytes: want at most {}", self.name.len(), options::MAX_STRING)
        } else if self.description.len() > options::MAX_STRING {
            format!("description of {} bytes: want at most {}", self.description.len(), options::MAX_STRING)
        } else if limits.block_size > offer::MAX_BLOCK {
            format!("block size {} bytes: NBD supports at most {}", limits.block_size, offer::MAX_BLOCK)
        } else {
            return check_cores(&self.core_map, cores);
        };
        Err(Error::Config(fault))
    }
}

/// The clients with a key of their own, and whether no others may connect.
fn listed(security: &Security) -> (Vec<Box<str>>, bool) {
    let listed = security.server.identities().to_vec();
    let is_closed = !listed.is_empty() && security.is_required;
    (listed, is_closed)
}

/// TLS of an export, which may change while it serves. Clones share it.
#[derive(Clone)]
struct SharedSecurity(Arc<RwLock<Option<Security>>>);

impl SharedSecurity {
    fn new(security: Option<Security>) -> SharedSecurity {
        SharedSecurity(Arc::new(RwLock::new(security)))
    }

    fn get(&self) -> Option<Security> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Replaces it, if the export has TLS. Returns whether it has.
    fn replace(&self, security: Security) -> bool {
        let mut current = self.0.write().unwrap_or_else(PoisonError::into_inner);
        current.as_mut().map(|current| *current = security).is_some()
    }
}

/// A running export. Dropping it answers the requests in flight, disconnects the clients and
/// removes the socket.
pub struct Nbd {
    registry: Registry,
    device: Arc<dyn Device>,
    capacity: Arc<AtomicU64>,
    stats: Arc<Stats>,
    places: Arc<Places>,
    slots: Arc<ConnectionSlots>,
    security: SharedSecurity,
    acceptor: Option<Acceptor>,
}

impl Nbd {
    /// Starts to export `device`. Clients may connect once this returns.
    ///
    /// # Errors
    /// When the configuration is invalid, or the system refuses the socket or the thread.
    pub fn start(device: Arc<dyn Device>, cores: &[CoreRef], config: Config) -> Result<Nbd, Error> {
        let limits = device.limits();
        config.check(cores.len(), &limits)?;
        let bitmaps: Arc<[Arc<dyn DirtyBitmap>]> = device.bitmaps().into();
        let registry = Registry::new();
        let places = Places::new(cores, &config.core_map)?;
        let stats = Arc::new(Stats::new(cores.len()));
        let capacity = Arc::new(AtomicU64::new(limits.capacity));
        let name = format!("nbd:{}", config.address);
        let slots =
            ConnectionSlots::new(config.connection_limits(), config.memory.clone(), name.as_str().into());
        let security = SharedSecurity::new(config.tls.clone());
        let handler = NbdAcceptHandler {
            writes: RangeLock::new(cores, name.as_str().into()),
            contexts: offer::contexts(&bitmaps),
            bitmaps,
            slots: slots.clone(),
            security: security.clone(),
            registry,
            device: device.clone(),
            capacity: capacity.clone(),
            stats: stats.clone(),
            places: places.clone(),
            next: 0,
            name: name.clone().into(),
            config: config.clone(),
        };
        let acceptor = Acceptor::open(Listener::bind(&config.address)?, name, handler)?;
        Ok(Nbd { registry, device, capacity, stats, places, slots, security, acceptor: Some(acceptor) })
    }

    /// The address that clients connect to: the socket's path, or address and port as the system
    /// chose them.
    pub fn address(&self) -> &str {
        self.acceptor.as_ref().map_or("", Acceptor::address)
    }
}

impl Export for Nbd {
    fn stats(&self) -> &Stats {
        &self.stats
    }

    /// New clients see the new size. NBD cannot notify connected clients, but they may use the
    /// added range.
    fn notify_resize(&self) -> Limits {
        let limits = self.device.limits();
        self.capacity.store(limits.capacity, Ordering::Relaxed);
        limits
    }

    fn remap(&self, cores: &[usize]) -> Result<(), Error> {
        self.places.remap(cores)
    }

    fn set_security(&self, security: Security) -> Result<(), Error> {
        let (listed, is_closed) = listed(&security);
        if !self.security.replace(security) {
            return Err(Error::Config("the export has no TLS".into()));
        }
        self.slots.set_listed(listed, is_closed);
        Ok(())
    }
}

impl Drop for Nbd {
    fn drop(&mut self) {
        if let Some(acceptor) = self.acceptor.take() {
            acceptor.close();
        }
        self.registry.drain(self.places.cores());
    }
}

/// Starts handshakes and passes clients to cores, on the control thread.
struct NbdAcceptHandler {
    /// Serialises unaligned writes.
    writes: Arc<RangeLock>,
    contexts: Arc<[String]>,
    bitmaps: Arc<[Arc<dyn DirtyBitmap>]>,
    slots: Arc<ConnectionSlots>,
    security: SharedSecurity,
    registry: Registry,
    device: Arc<dyn Device>,
    capacity: Arc<AtomicU64>,
    stats: Arc<Stats>,
    places: Arc<Places>,
    /// The turn of the next connection.
    next: usize,
    name: Arc<str>,
    config: Config,
}

impl NbdAcceptHandler {
    fn offer(&self) -> Offer {
        let Config { name, description, .. } = &self.config;
        let limits = self.device.limits();
        let is_read_only = self.config.read_only || limits.read_only;
        let contexts = self.contexts.clone();
        Offer { name: name.clone(), description: description.clone(), limits, is_read_only, contexts }
    }
}

impl AcceptHandler for NbdAcceptHandler {
    type Handshake = NbdHandshake;

    /// Refuses, before the handshake, a client that has no slot and cannot authenticate for a
    /// reserved one.
    fn may_come(&mut self, peer: &str, origin: Origin) -> bool {
        let may_prove = self.security.get().is_some_and(|tls| !tls.server.identities().is_empty());
        may_prove || self.slots.check(Applicant { origin, host: None, is_proven: false }, peer).is_ok()
    }

    fn greet(&mut self, _peer: &str, _origin: Origin) -> NbdHandshake {
        let tls = match self.security.get() {
            None => Tls::Off,
            Some(Security { is_required: false, .. }) => Tls::Allowed,
            Some(Security { is_required: true, .. }) => Tls::Required,
        };
        NbdHandshake::new(self.offer(), tls)
    }

    fn tls(&self) -> Option<tls::Server> {
        self.security.get().map(|security| security.server)
    }

    fn admit(&mut self, admitted: Admitted<NbdHandshake>) {
        let host = admitted.handshake.identity();
        let applicant = Applicant { origin: admitted.origin, host, is_proven: host.is_some() };
        let Ok(slot) = self.slots.take(applicant, MINIMUM, &admitted.peer) else { return };
        let place = self.places.of_turn(self.next);
        self.next = self.next.wrapping_add(1);
        let agreed = admitted.handshake.agreed();
        let offer = self.offer();
        tracing::info!(
            export = &*self.name,
            peer = admitted.peer,
            core = place,
            tls = admitted.wire.agreed(),
            "client connected"
        );
        let parts = Parts {
            wire: admitted.wire,
            peer: admitted.peer,
            export: self.name.clone(),
            stats: self.stats.queues[place].clone(),
            slot,
            connected: self.stats.connect(),
        };
        let rules = Rules {
            form: agreed.form,
            selected: agreed.selected,
            is_read_only: offer.is_read_only,
            knows_blocks: agreed.knows_blocks,
            limits: offer.limits,
        };
        let (device, capacity, early) = (self.device.clone(), self.capacity.clone(), admitted.early);
        let (writes, bitmaps) = (self.writes.clone(), self.bitmaps.clone());
        let open = move || Session::open(rules, device, bitmaps, &writes, capacity, &early);
        if self.registry.serve(&self.places.cores()[place], parts, MAX_REQUESTS, open).is_err() {
            tracing::warn!(export = &*self.name, core = place, "client disconnected: the core has stopped");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_impossible_configuration_names_the_value() {
        let limits = Limits::new(1 << 20);
        let config = Config::new(Address::Tcp("127.0.0.1:0".into()));
        let refused = |config: Config| config.check(2, &limits).expect_err("impossible").to_string();
        assert!(refused(Config { clients: 0, ..config.clone() }).contains("0 clients"));
        assert!(refused(Config { clients: 5000, ..config.clone() }).contains("5000"));
        assert!(refused(Config { address_clients: Some(0), ..config.clone() }).contains("0 clients of an"));
        assert!(refused(Config { name: "x".repeat(4097), ..config.clone() }).contains("4097 bytes"));
        assert!(refused(Config { description: "x".repeat(9999), ..config.clone() }).contains("9999 bytes"));
        assert!(refused(Config { core_map: vec![0, 2], ..config.clone() }).contains("core 2"));
        let large = Limits { block_size: 128 << 10, ..limits.clone() };
        assert!(config.check(1, &large).unwrap_err().to_string().contains("131072"));
        config.check(1, &limits).unwrap();
    }
}
