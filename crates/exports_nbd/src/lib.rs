//! An NBD server for kernels, QEMU, libnbd and other hosts.
//!
//! ```text
//!   client ──► control thread: accept, handshake (pure) ──► a core, in turn ─► Connection ─► device
//!              one for all handshakes of an address         serves the socket to its end
//! ```
//!
//! Each export is served through a [`Portal`]: one of its own, or one that it shares with others.
//! A client chooses by the export's name.
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
//!
//! An NBD export on a Unix socket, and a client:
//!
//! ```
//! use block::{Device, Flags, Op};
//! use drivers::mem::MemDevice;
//! use drivers_nbd::NbdDevice;
//! use exports_nbd::{Address, Config, Nbd};
//! use reactor::{CoreConfig, Cores};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let directory = tempfile::tempdir()?;
//! let path = directory.path().join("disk.sock");
//! let cores = Cores::start(&[CoreConfig::default()])?;
//! let disk = Arc::new(MemDevice::new(&drivers::mem::Options::new(1 << 20))?);
//! let config = Config::new(Address::Unix { path: path.clone(), permissions: 0o600 });
//! let export = Nbd::start(disk, cores.all(), config)?;
//!
//! let address = drivers_nbd::Address::Unix(path);
//! let client = Arc::new(NbdDevice::open(&drivers_nbd::Options::new(address))?);
//! assert_eq!(client.limits().capacity, 1 << 20);
//! let written = reactor::run(async move {
//!     let channel = client.open_channel().unwrap();
//!     let buffer = reactor::current().buffers().take(4096).await;
//!     buffer.transfer(&*channel, Op::Write, Flags::FUA, 8192).await.1
//! });
//! assert_eq!(written, Ok(()));
//! drop(export); // before its cores
//! # Ok(())
//! # }
//! ```

mod blocks;
mod connection;
mod directory;
mod fragments;
mod handshake;
mod job;
mod long_write;
mod offer;
mod options;
mod portal;
mod reading;
mod request;
mod service;
mod status;

pub use directory::MAX_EXPORTS;
pub use exports::stream::{
    Address, DEFAULT_PORTAL_CLIENTS, MAX_ADDRESSES, MAX_PORTAL_CLIENTS, MemoryBudget, Security,
};
pub use portal::{Portal, PortalConfig};

use block::{Device, Limits};
use exports::stream::ConnectionLimits;
use exports::{Error, Export, Stats, check_cores};
use reactor::CoreRef;
use service::{Service, ServiceConfig};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Default number of concurrent clients.
pub const DEFAULT_CLIENTS: usize = 64;
/// Maximum number of concurrent clients.
pub const MAX_CLIENTS: usize = 4096;

/// Configuration of an NBD export.
#[derive(Clone, Debug)]
pub struct Config {
    /// The portal that it shares with other exports. `None`: it has a portal of its own.
    pub portal: Option<Arc<Portal>>,
    /// The listening address of its own portal. Not used with a shared portal.
    pub address: Address,
    /// The export's name, up to 4096 bytes. At a portal of its own, clients may also request the
    /// export with the empty name. A shared portal has each name once, and no empty one.
    pub name: String,
    /// A description for people, shown in the listing.
    pub description: String,
    /// Refuse writes even if the device accepts them.
    pub read_only: bool,
    /// TLS of its own portal, optional or required. `None` with a shared portal, which has TLS for
    /// all of its exports.
    pub tls: Option<Security>,
    /// The identities, of TLS with keys, of the clients that may use the export. `None`: all
    /// clients.
    pub identities: Option<BTreeSet<Box<str>>>,
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
            portal: None,
            address,
            name: String::new(),
            description: String::new(),
            read_only: false,
            tls: None,
            identities: None,
            clients: DEFAULT_CLIENTS,
            address_clients: None,
            memory: MemoryBudget::process(),
            core_map: Vec::new(),
        }
    }

    /// As [`Config::new`], at a shared portal, under this name.
    pub fn at_portal(portal: Arc<Portal>, name: String) -> Config {
        Config { portal: Some(portal), name, ..Config::new(Address::Tcp(String::new())) }
    }

    /// The name of an export at a shared portal, for messages.
    pub fn name_at(portal: &str, name: &str) -> String {
        format!("nbd:{portal}:{name}")
    }

    /// Its name in logs.
    fn log_name(&self) -> String {
        match &self.portal {
            Some(portal) => Config::name_at(portal.name(), &self.name),
            None => format!("nbd:{}", self.address),
        }
    }

    /// The connection limits; each client identity with a key has reserved slots.
    fn connection_limits(&self) -> ConnectionLimits {
        ConnectionLimits::with_tls(self.tls.as_ref(), self.clients, self.address_clients)
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
        } else if self.portal.is_some() && self.name.is_empty() {
            "an empty export name: clients of a portal choose by name".into()
        } else if self.portal.is_some() && self.tls.is_some() {
            "TLS of its own: the portal has TLS for all of its exports".into()
        } else if limits.block_size > offer::MAX_BLOCK {
            format!("block size {} bytes: NBD supports at most {}", limits.block_size, offer::MAX_BLOCK)
        } else {
            return check_cores(&self.core_map, cores);
        };
        Err(Error::Config(fault))
    }
}

/// A running export. Dropping it answers the requests in flight, and disconnects the clients. A
/// portal of its own ends with it, and its socket is removed.
pub struct Nbd {
    portal: Arc<Portal>,
    /// Whether the portal ends with the export.
    is_own: bool,
    service: Arc<Service>,
}

impl Nbd {
    /// Starts to export `device`. Clients may connect once this returns, and the portal accepts
    /// clients.
    ///
    /// # Errors
    /// When the configuration is invalid, the portal has an export of this name, or the system
    /// refuses the socket or the thread.
    pub fn start(device: Arc<dyn Device>, cores: &[CoreRef], config: Config) -> Result<Nbd, Error> {
        config.check(cores.len(), &device.limits())?;
        let is_own = config.portal.is_none();
        let (limits, log_name) = (config.connection_limits(), config.log_name());
        let Config { portal, address, tls, memory, .. } = config;
        let portal = match portal {
            Some(portal) => portal,
            None => Portal::of_export(&address, &log_name, &limits, tls, &memory)?,
        };
        let served = ServiceConfig {
            log_name: log_name.into(),
            name: config.name,
            description: config.description,
            is_read_only: config.read_only,
            identities: config.identities,
            core_map: config.core_map,
        };
        let service = portal.add(device, cores, served, &limits, &memory)?;
        let export = Nbd { portal, is_own, service };
        if is_own {
            export.portal.accept()?;
        }
        Ok(export)
    }

    /// The first address that clients connect to: the socket's path, or address and port as the
    /// system chose them.
    pub fn address(&self) -> &str {
        self.portal.addresses().next().unwrap_or("")
    }
}

impl Export for Nbd {
    fn stats(&self) -> &Stats {
        &self.service.stats
    }

    /// New clients see the new size. NBD cannot notify connected clients, but they may use the
    /// added range.
    fn notify_resize(&self) -> Limits {
        let limits = self.service.device.limits();
        self.service.capacity.store(limits.capacity, Ordering::Relaxed);
        limits
    }

    fn remap(&self, cores: &[usize]) -> Result<(), Error> {
        self.service.places.remap(cores)
    }

    fn set_security(&self, security: Security) -> Result<(), Error> {
        match self.is_own {
            true => self.portal.set_security(security),
            false => Err(Error::Config("the portal has TLS for all of its exports".into())),
        }
    }
}

impl Drop for Nbd {
    fn drop(&mut self) {
        match self.is_own {
            true => self.portal.close(),
            false => self.portal.remove(&self.service),
        }
        self.service.drain();
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
