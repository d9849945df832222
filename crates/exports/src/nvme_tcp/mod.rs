//! An NVMe/TCP subsystem that exports block devices to hosts on a network.
//!
//! ```text
//!   host ──► portal: accept, ICReq, Connect (pure) ──► a core, by queue ─► Session ─► device
//!            one control thread per address            one connection is one queue
//! ```
//!
//! A host connects an admin queue, which creates a [`controller`], then any number of I/O queues.
//! One core serves each queue. Short write data arrives in the command capsule. Longer data is
//! requested (R2T) once there is memory for it, so a queue never blocks.
//!
//! Several exports may share a [`portal`]; otherwise an export has one of its own. The discovery
//! subsystem of a portal lists its subsystems.
//!
//! A portal may listen on several addresses, each a port of its subsystems. Hosts then have several
//! paths, and learn which is best ([`ports`]). A controller belongs to the port that its host
//! connected to.
//!
//! | module | purpose |
//! |---|---|
//! | [`portal`], [`directory`], [`service`] | listening addresses, and the subsystems that hosts find there |
//! | [`handshake`] | negotiates with a newcomer until its queue exists |
//! | [`authentication`] | authenticates the host, if required |
//! | [`ports`] | the addresses of the subsystem, and their access states |
//! | [`access`] | the hosts that may connect, which change while the export serves |
//! | [`subsystem`], [`controller`] | admission, and the state that the queues of a host share |
//! | [`reading`], [`transfers`] | PDUs to commands and data |
//! | [`session`] | a queue: from a command to its completion |
//! | [`reservations`] | write access of hosts that share a namespace |
//! | [`io`], [`copy`], [`admin`], [`log_pages`], [`discovery`], [`lba_status`] | execution of commands |
//!
//! Source: NVM Express Base Specification 2.0, NVM Command Set Specification 1.0 (for Get LBA
//! Status 1.1), NVMe/TCP Transport Specification 1.0.

mod access;
mod admin;
mod authentication;
mod controller;
mod copy;
mod directory;
mod discovery;
mod failures;
mod features;
mod handshake;
mod host;
mod io;
mod lba_status;
mod log_pages;
mod portal;
mod ports;
mod reading;
mod refusal;
mod reservations;
mod service;
mod session;
mod subsystem;
mod transfers;

pub use crate::stream::{Address, MemoryBudget};
pub use crate::stream::{DEFAULT_PORTAL_CLIENTS, MAX_PORTAL_CLIENTS};
pub use access::{Access, Auth, Hosts, HostsError, MAX_HOSTS, NO_HOST, Security};
pub use directory::MAX_SUBSYSTEMS;
pub use nvme::fabrics::{Nqn, NqnError};
pub use nvme_auth::{Choices, Group, Hash, HostSecrets, Keys, SecretText, SecretsError, TlsKeys};
pub use portal::{Portal, PortalConfig};
pub use ports::{AccessState, PortConfig, port_at};

use crate::stream::{ConnectionLimits, Memory, Minimum};
use crate::{Error, Export, Stats, check_cores};
use access::AdmittedHosts;
use block::{Device, Limits, SharedRole};
use nvme::tcp::{DIGEST_BYTES, DataDigest};
use reactor::CoreRef;
use reservations::{Registrar, Reserved};
use service::{Service, ServiceCores};
use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use subsystem::{Namespace, Subsystem};

/// Default number of concurrent connections.
pub const DEFAULT_CLIENTS: usize = 256;
/// Maximum number of concurrent connections.
pub const MAX_CLIENTS: usize = 4096;
/// Default number of I/O queues of a controller.
pub const DEFAULT_QUEUES: u16 = 64;
/// Maximum number of I/O queues of a controller.
pub const MAX_QUEUES: u16 = 1024;
/// Maximum number of ports.
pub const MAX_PORTS: usize = crate::stream::MAX_ADDRESSES;
/// Maximum number of namespaces.
pub const MAX_NAMESPACES: usize = 1024;
/// Every controller identifier (Base 3.1.1).
pub const CONTROLLER_IDS: RangeInclusive<u16> = 1..=0xffef;
/// Longest serial number (Base 5.17.2.1).
pub const MAX_SERIAL: usize = 20;

/// Maximum data in a command's capsule, in bytes.
const IN_CAPSULE_BYTES: u32 = 16 << 10;
/// Longest transfer of a command: MDTS.
const MAX_TRANSFER: u32 = 1 << 20;
/// Maximum data of one H2CData PDU.
const MAX_H2C_DATA: u32 = MAX_TRANSFER;

/// Buffers of a connection that are not tied to requests: the stream buffer, and those of Compare,
/// Copy and Verify.
const FIXED_BYTES: usize = ::stream::BUFFER_BYTES + 2 * io::PART;
/// Memory guaranteed to an I/O queue: its longest command, and a few commands with in-capsule data.
const IO_MINIMUM: Minimum =
    Minimum { requests: MAX_TRANSFER as usize, capsules: 4 * IN_CAPSULE_BYTES as usize, fixed: FIXED_BYTES };
/// Memory guaranteed to an admin queue, whose responses are short.
const ADMIN_MINIMUM: Minimum =
    Minimum { requests: 128 << 10, capsules: 2 * IN_CAPSULE_BYTES as usize, fixed: FIXED_BYTES };

/// A namespace: a device and its identity.
#[derive(Clone)]
pub struct NamespaceConfig {
    /// The device.
    pub device: Arc<dyn Device>,
    /// The namespace's UUID, which hosts remember. `None`: derived from the names of subsystem and
    /// device.
    pub uuid: Option<[u8; 16]>,
}

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

    fn check(&self, cores: usize, namespaces: &[NamespaceConfig]) -> Result<(), Error> {
        check_cores(&self.core_map, cores)?;
        let is_text = |serial: &&String| {
            (1..=MAX_SERIAL).contains(&serial.len())
                && serial.bytes().all(|byte| (b' '..=b'~').contains(&byte))
        };
        let block_size =
            namespaces.iter().map(|n| n.device.limits().block_size).find(|size| *size > 64 << 10);
        let uuids: Vec<[u8; 16]> = namespaces.iter().filter_map(|namespace| namespace.uuid).collect();
        let is_twice = uuids.iter().collect::<BTreeSet<_>>().len() < uuids.len();
        let fault = if self.portal.is_some() && !self.ports.is_empty() {
            "addresses of its own: the portal has the addresses".into()
        } else if self.portal.is_none() && !(1..=MAX_PORTS).contains(&self.ports.len()) {
            format!("{} addresses: want 1 to {MAX_PORTS}", self.ports.len())
        } else if !(1..=MAX_CLIENTS).contains(&self.clients) {
            format!("{} clients: want 1 to {MAX_CLIENTS}", self.clients)
        } else if self.address_clients == Some(0) || self.host_clients == Some(0) {
            "0 clients of an address or a host: want at least 1".into()
        } else if !(1..=MAX_QUEUES).contains(&self.queues) {
            format!("{} queues: want 1 to {MAX_QUEUES}", self.queues)
        } else if !CONTROLLER_IDS.contains(self.controller_ids.start())
            || !CONTROLLER_IDS.contains(self.controller_ids.end())
            || self.controller_ids.is_empty()
        {
            let (first, last) = (self.controller_ids.start(), self.controller_ids.end());
            format!("controller identifiers {first} to {last}: want a range in 1 to {}", CONTROLLER_IDS.end())
        } else if self.role.is_some() && self.reservations.is_some() {
            "reservations: this host does not share them with the others that serve the device".into()
        } else if !(1..=MAX_NAMESPACES).contains(&namespaces.len()) {
            format!("{} namespaces: want 1 to {MAX_NAMESPACES}", namespaces.len())
        } else if self.nqn.is_discovery() {
            format!("subsystem name {}: reserved for the discovery subsystem", self.nqn.as_str())
        } else if self.access.auth.as_ref().is_some_and(|auth| auth.choices.is_empty()) {
            "authentication without a hash or a group: want at least one of each".into()
        } else if let Some(serial) = self.serial.as_ref().filter(|serial| !is_text(serial)) {
            format!("serial number {serial:?}: want 1 to {MAX_SERIAL} printable ASCII characters")
        } else if uuids.contains(&[0; 16]) || is_twice {
            "namespace UUIDs: want distinct and non-zero values".into()
        } else if let Some(size) = block_size {
            format!("block size {size} bytes: NVMe supports at most 65536")
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
        config.check(cores.len(), namespaces)?;
        let name: Arc<str> = config.name().into();
        let service_cores = ServiceCores::new(cores, &config.core_map)?;
        let open = |(id, namespace): (u32, &NamespaceConfig)| namespace.open(id, &config);
        let namespaces = (1..).zip(namespaces).map(open).collect::<Result<_, _>>()?;
        let admitted = AdmittedHosts::new(config.access.clone(), &config.nqn);
        let registrar = Registrar::new(cores.to_vec(), config.reservations.is_some())?;
        if !config.nqn.is_qualified() {
            let nqn = config.nqn.as_str();
            tracing::warn!(
                export = &*name,
                nqn,
                "subsystem name does not begin with \"nqn.\": some hosts refuse it"
            );
        }
        let serial = config.serial.clone().unwrap_or_else(|| hex(&identity(&[config.nqn.as_str()])[..10]));
        let limits = config.connection_limits();
        let Config { portal, ports, access_states, nqn, queues, memory, controller_ids, role, .. } = config;
        let is_own = portal.is_none();
        let portal = match portal {
            Some(portal) => portal,
            None => {
                let (name, serial, cores) = (name.clone(), serial.clone(), service_cores.clone());
                Portal::of_export(name, serial, ports, limits.clone(), memory.clone(), cores)?
            }
        };
        let ports = portal.ports_of_subsystem(role.as_ref());
        for (port, state) in ports.iter().zip(portal.states(&access_states)?) {
            port.set_state(state);
        }
        let subsystem = Subsystem::new(
            nqn,
            None,
            serial,
            ports,
            namespaces,
            admitted,
            queues,
            controller_ids,
            role,
            name,
            registrar,
        );
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
        let Some(port) = self.service.subsystem.ports.get(port) else { return false };
        if port.set_state(state) {
            let (export, port, state) = (&*self.service.subsystem.export, port.id, state.name());
            tracing::info!(export, port, state, "access state of a port changed");
            self.service.subsystem.note_access(port);
        }
        true
    }
}

impl NamespaceConfig {
    fn open(&self, id: u32, config: &Config) -> Result<Namespace, Error> {
        let limits = self.device.limits();
        let uuid = self.uuid.unwrap_or_else(|| identity(&[config.nqn.as_str(), self.device.name()]));
        Ok(Namespace {
            id,
            device: self.device.clone(),
            capacity: AtomicU64::new(limits.capacity),
            uuid,
            is_read_only: config.read_only || limits.read_only,
            limits,
            reserved: Reserved::open(config.reservations.as_deref(), &config.nqn, &uuid)?,
        })
    }
}

/// A UUID derived from words: the same words give the same UUID (RFC 9562, version 8).
fn identity(words: &[&str]) -> [u8; 16] {
    let mut uuid = [0; 16];
    for (half, seed) in uuid.chunks_exact_mut(8).zip([0xcbf2_9ce4_8422_2325u64, 0x8422_2325_cbf2_9ce4]) {
        // FNV-1a, twice: collisions by intent are no concern here.
        let bytes = words.iter().flat_map(|word| word.bytes().chain([0]));
        let hash = bytes.fold(seed, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
        half.copy_from_slice(&hash.to_be_bytes());
    }
    uuid[6] = uuid[6] & 0x0f | 0x80;
    uuid[8] = uuid[8] & 0x3f | 0x80;
    uuid
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
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
        self.service.subsystem.namespaces[0].device.limits()
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
