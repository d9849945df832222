//! An NVMe/TCP subsystem that exports block devices to hosts on a network.
//!
//! ```text
//!   host ──► portal: accept, ICReq, Connect (pure) ──► a core, by queue ─► Session ─► device
//!            one control thread per address            one connection is one queue
//! ```
//!
//! The crate [`nvme_target`] has the subsystem: everything that does not depend on the transport.
//! This crate has the transport. One connection is one queue, and one core serves it. Short write
//! data arrives in the command capsule. Longer data is requested (R2T) once there is memory for it,
//! so a queue never blocks.
//!
//! Several exports may share a [`portal`]; otherwise an export has one of its own. The discovery
//! subsystem of a portal lists its subsystems. A portal may listen on several addresses, each a
//! port of its subsystems.
//!
//! | module | purpose |
//! |---|---|
//! | [`portal`], [`service`] | listening addresses, and the subsystems that hosts find there |
//! | [`handshake`] | negotiates with a newcomer until its queue exists |
//! | [`reading`], [`transfers`] | PDUs to commands and data |
//! | [`session`] | a connection: from a command to its answer |
//!
//! Source: NVMe/TCP Transport Specification 1.0.

mod handshake;
mod portal;
mod reading;
mod service;
mod session;
mod socket;
mod transfers;

pub use exports::stream::{Address, MemoryBudget};
pub use exports::stream::{DEFAULT_PORTAL_CLIENTS, MAX_PORTAL_CLIENTS};
pub use exports::{PortConfig, port_at};
pub use nvme::AccessState;
pub use nvme::fabrics::{Nqn, NqnError};
pub use nvme_auth::access::{Access, Auth, Hosts, HostsError, MAX_HOSTS, NO_HOST, Security};
pub use nvme_auth::{Choices, Group, Hash, HostSecrets, Keyring, Keys, SecretText, SecretsError, TlsKeys};
pub use nvme_target::{
    CONTROLLER_IDS, DEFAULT_QUEUES, MAX_NAMESPACES, MAX_QUEUES, MAX_SERIAL, MAX_SUBSYSTEMS, NamespaceConfig,
};
pub use portal::{Portal, PortalConfig};

use block::{Limits, SharedRole};
use exports::stream::{ConnectionLimits, Memory, Minimum};
use exports::{DataMemory, Error, Export, Stats, check_cores};
use nvme::tcp::{DIGEST_BYTES, DataDigest};
use nvme_target::{MAX_TRANSFER, Subsystem, SubsystemConfig};
use reactor::CoreRef;
use service::{Service, ServiceCores};
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;

/// Default number of concurrent connections.
pub const DEFAULT_CLIENTS: usize = 256;
/// Maximum number of concurrent connections.
pub const MAX_CLIENTS: usize = 4096;
/// Maximum number of ports.
pub const MAX_PORTS: usize = exports::stream::MAX_ADDRESSES;

/// Maximum data in a command's capsule, in bytes.
const IN_CAPSULE_BYTES: u32 = 16 << 10;
/// Maximum data of one H2CData PDU.
const MAX_H2C_DATA: u32 = MAX_TRANSFER;

/// Buffers of a connection that are not tied to requests: the stream buffer, and those of Compare,
/// Copy and Verify.
const FIXED_BYTES: usize = ::stream::BUFFER_BYTES + nvme_target::SCRATCH_BYTES;
/// Memory guaranteed to an I/O queue: its longest command, and a few commands with in-capsule data.
const IO_MINIMUM: Minimum =
    Minimum { requests: MAX_TRANSFER as usize, capsules: 4 * IN_CAPSULE_BYTES as usize, fixed: FIXED_BYTES };
/// Memory guaranteed to an admin queue, whose responses are short.
const ADMIN_MINIMUM: Minimum =
    Minimum { requests: 128 << 10, capsules: 2 * IN_CAPSULE_BYTES as usize, fixed: FIXED_BYTES };

/// Configuration of an NVMe/TCP export.
#[derive(Clone, Debug)]
pub struct Config {
    /// The portal that it shares with other exports. `None`: it has a portal of its own.
    pub portal: Option<Arc<Portal>>,
    /// The listening addresses of its own portal; the first one names the export. None with a
    /// shared portal.
    pub ports: Vec<PortConfig>,
    /// Initial access states over some of the ports, its own or those of the portal, instead of
    /// theirs.
    pub access_states: Vec<PortConfig>,
    /// The subsystem's name.
    pub nqn: Nqn,
    /// Serial number, up to [`MAX_SERIAL`] printable ASCII characters. `None`: derived from the
    /// subsystem's name.
    pub serial: Option<String>,
    /// Refuse writes even if the devices accept them.
    pub read_only: bool,
    /// The hosts that may connect, and their secrets.
    pub access: Access,
    /// Directory for reservations that persist through power loss. `None`: reservations end with
    /// the export.
    pub reservations: Option<PathBuf>,
    /// Maximum I/O queues of a controller, up to [`MAX_QUEUES`].
    pub queues: u16,
    /// Identifiers of controllers: a part of [`CONTROLLER_IDS`] that no other server of the
    /// subsystem uses.
    pub controller_ids: RangeInclusive<u16>,
    /// The role of this host, if other hosts serve the devices too. While it is not the active one,
    /// all ports are inaccessible. Reservations are unsupported, because hosts do not share them.
    pub role: Option<Arc<SharedRole>>,
    /// Maximum concurrent connections of each port, up to [`MAX_CLIENTS`]; more are refused.
    /// Discovery does not count.
    pub clients: usize,
    /// Maximum unauthenticated connections of one address to a port. `None`: three quarters of
    /// `clients`, or all if these are fewer than 32.
    pub address_clients: Option<usize>,
    /// Maximum connections of one host to a port. `None`: as many as the shares of other listed
    /// hosts leave. If no host is listed, the default of `address_clients` applies.
    pub host_clients: Option<usize>,
    /// The memory budget of its connections.
    pub memory: MemoryBudget,
    /// The cores (places in the list given to [`NvmeTcp::start`]) that serve queues, in turn.
    /// Empty: all.
    pub core_map: Vec<usize>,
}

impl Config {
    /// A subsystem that any host may use.
    pub fn new(address: Address, nqn: Nqn) -> Config {
        Config::at(vec![PortConfig { address, state: AccessState::Optimized }], nqn)
    }

    /// As [`Config::new`], with these ports of its own; none if it is to share a portal.
    pub fn at(ports: Vec<PortConfig>, nqn: Nqn) -> Config {
        Config {
            portal: None,
            ports,
            access_states: Vec::new(),
            nqn,
            serial: None,
            read_only: false,
            access: Access::default(),
            reservations: None,
            queues: DEFAULT_QUEUES,
            controller_ids: CONTROLLER_IDS,
            role: None,
            clients: DEFAULT_CLIENTS,
            address_clients: None,
            host_clients: None,
            memory: MemoryBudget::process(),
            core_map: Vec::new(),
        }
    }

    /// A subsystem at a shared portal, that any host may use.
    pub fn at_portal(portal: Arc<Portal>, nqn: Nqn) -> Config {
        Config { portal: Some(portal), ..Config::at(Vec::new(), nqn) }
    }

    /// `nvme-tcp:` and the first address, or the names of portal and subsystem.
    pub fn name(&self) -> String {
        if let Some(portal) = &self.portal {
            return Config::name_at(portal.name(), &self.nqn);
        }
        let addresses = self.ports.iter().map(|port| port.address.to_string());
        format!("nvme-tcp:{}", addresses.take(1).collect::<String>())
    }

    /// The name of the export of a subsystem at a shared portal.
    pub fn name_at(portal: &str, nqn: &Nqn) -> String {
        format!("nvme-tcp:{portal}:{}", nqn.as_str())
    }

    fn subsystem(&self) -> SubsystemConfig {
        SubsystemConfig {
            nqn: self.nqn.clone(),
            serial: self.serial.clone(),
            read_only: self.read_only,
            access: self.access.clone(),
            reservations: self.reservations.clone(),
            queues: self.queues,
            controller_ids: self.controller_ids.clone(),
            role: self.role.clone(),
        }
    }

    /// The connection limits of one port; each listed host has reserved slots.
    fn connection_limits(&self) -> ConnectionLimits {
        ConnectionLimits {
            is_closed: self.access.is_closed(),
            total: self.clients,
            of_address: self.address_clients,
            of_host: self.host_clients,
            listed: self.access.listed(),
        }
    }

    fn check(&self, cores: usize) -> Result<(), Error> {
        check_cores(&self.core_map, cores)?;
        let fault = if self.portal.is_some() && !self.ports.is_empty() {
            "addresses of its own: the portal has the addresses".into()
        } else if self.portal.is_none() && !(1..=MAX_PORTS).contains(&self.ports.len()) {
            format!("{} addresses: want 1 to {MAX_PORTS}", self.ports.len())
        } else if !(1..=MAX_CLIENTS).contains(&self.clients) {
            format!("{} clients: want 1 to {MAX_CLIENTS}", self.clients)
        } else if self.address_clients == Some(0) || self.host_clients == Some(0) {
            "0 clients of an address or a host: want at least 1".into()
        } else {
            return Ok(());
        };
        Err(Error::Config(fault))
    }
}

/// A running export. Dropping it completes the commands in flight, then disconnects its hosts.
pub struct NvmeTcp {
    portal: Arc<Portal>,
    /// Whether the portal ends with the export.
    is_own: bool,
    service: Arc<Service>,
}

impl NvmeTcp {
    /// Starts to export devices as namespaces, numbered from 1. Hosts may connect once this
    /// returns, and the portal accepts hosts.
    ///
    /// # Errors
    /// When the configuration is invalid, the portal has a subsystem of this name, or the system
    /// refuses a socket or thread.
    pub fn start(
        namespaces: &[NamespaceConfig],
        cores: &[CoreRef],
        config: Config,
    ) -> Result<NvmeTcp, Error> {
        config.check(cores.len())?;
        let name: Arc<str> = config.name().into();
        let service_cores = ServiceCores::new(cores, &config.core_map)?;
        let subsystem_config = config.subsystem();
        let mut subsystem = Subsystem::open(&subsystem_config, namespaces, cores, name.clone())?;
        let limits = config.connection_limits();
        let Config { portal, ports, access_states, memory, role, .. } = config;
        let is_own = portal.is_none();
        let portal = match portal {
            Some(portal) => portal,
            None => {
                let (serial, cores) = (subsystem_config.serial(), service_cores.clone());
                Portal::of_export(name, serial, ports, limits.clone(), memory.clone(), cores)?
            }
        };
        let ports = portal.ports_of_subsystem(role.as_ref());
        for (port, state) in ports.iter().zip(portal.states(&access_states)?) {
            port.set_state(state);
        }
        subsystem.ports = ports;
        let service = portal.add(Arc::new(subsystem), &limits, &memory, service_cores)?;
        let export = NvmeTcp { portal, is_own, service };
        if is_own {
            export.portal.accept()?;
        }
        Ok(export)
    }

    /// The address of the first port: address and TCP port as the system chose them.
    pub fn address(&self) -> &str {
        self.addresses().next().unwrap_or("")
    }

    /// As [`NvmeTcp::address`], for every port.
    pub fn addresses(&self) -> impl Iterator<Item = &str> {
        self.portal.addresses()
    }

    /// The access state of a port, given its index in the configuration.
    pub fn access_state(&self, port: usize) -> Option<AccessState> {
        self.service.subsystem.ports.get(port).map(|port| port.state())
    }

    /// Sets the access state of a port. Commands in flight complete as before; hosts that enabled
    /// the event are notified. Returns `false` when the port does not exist.
    pub fn set_access_state(&self, port: usize, state: AccessState) -> bool {
        self.service.subsystem.set_access_state(port, state)
    }
}

/// The data digest of `len` bytes of `memory` from `start` on.
fn data_digest(memory: &mut Memory, start: usize, len: usize) -> [u8; DIGEST_BYTES] {
    let mut digest = DataDigest::new();
    memory.look(start, len, |piece| digest.update(piece));
    digest.to_bytes()
}

impl Export for NvmeTcp {
    fn stats(&self) -> &Stats {
        &self.service.cores.stats
    }

    /// Notifies hosts that enabled the events of the namespaces that have changed, and of a change
    /// of this host's role.
    fn notify_resize(&self) -> Limits {
        self.service.subsystem.refresh();
        self.service.subsystem.limits()
    }

    fn remap(&self, cores: &[usize]) -> Result<(), Error> {
        self.service.cores.places.remap(cores)
    }

    fn set_access(&self, access: Access) -> Result<(), Error> {
        self.portal.set_access(&self.service, access)
    }

    fn set_access_states(&self, states: &[PortConfig]) -> Result<(), Error> {
        for (port, state) in self.portal.states(states)?.into_iter().enumerate() {
            self.set_access_state(port, state);
        }
        Ok(())
    }
}

impl Drop for NvmeTcp {
    fn drop(&mut self) {
        match self.is_own {
            true => self.portal.close(),
            false => self.portal.remove(&self.service),
        }
        self.service.cores.drain();
    }
}
