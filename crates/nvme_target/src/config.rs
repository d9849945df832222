//! The configuration of a subsystem.

use block::{Device, SharedRole};
use exports::Error;
use nvme::fabrics::Nqn;
use nvme_auth::access::Access;
use std::collections::BTreeSet;
use std::ops::RangeInclusive;
use std::path::PathBuf;
use std::sync::Arc;

/// Default number of I/O queues of a controller.
pub const DEFAULT_QUEUES: u16 = 64;
/// Maximum number of I/O queues of a controller.
pub const MAX_QUEUES: u16 = 1024;
/// Maximum number of namespaces.
pub const MAX_NAMESPACES: usize = 1024;
/// Every controller identifier (Base 3.1.1).
pub const CONTROLLER_IDS: RangeInclusive<u16> = 1..=0xffef;
/// Longest serial number (Base 5.17.2.1).
pub const MAX_SERIAL: usize = 20;

/// A namespace: a device and its identity.
#[derive(Clone)]
pub struct NamespaceConfig {
    /// The device.
    pub device: Arc<dyn Device>,
    /// The namespace's UUID, which hosts remember. `None`: derived from the names of subsystem and
    /// device.
    pub uuid: Option<[u8; 16]>,
}

/// The configuration of a subsystem.
#[derive(Clone, Debug)]
pub struct SubsystemConfig {
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
    /// the subsystem.
    pub reservations: Option<PathBuf>,
    /// Maximum I/O queues of a controller, up to [`MAX_QUEUES`].
    pub queues: u16,
    /// Identifiers of controllers: a part of [`CONTROLLER_IDS`] that no other server of the
    /// subsystem uses.
    pub controller_ids: RangeInclusive<u16>,
    /// The role of this host, if other hosts serve the devices too. While it is not the active one,
    /// all ports are inaccessible. Reservations are unsupported, because hosts do not share them.
    pub role: Option<Arc<SharedRole>>,
}

impl SubsystemConfig {
    /// A subsystem that any host may use.
    pub fn new(nqn: Nqn) -> SubsystemConfig {
        SubsystemConfig {
            nqn,
            serial: None,
            read_only: false,
            access: Access::default(),
            reservations: None,
            queues: DEFAULT_QUEUES,
            controller_ids: CONTROLLER_IDS,
            role: None,
        }
    }

    /// The serial number.
    pub fn serial(&self) -> String {
        self.serial.clone().unwrap_or_else(|| default_serial(self.nqn.as_str()))
    }

    /// Checks the values, and those of the namespaces.
    ///
    /// # Errors
    /// Names the value and its range.
    pub(crate) fn check(&self, namespaces: &[NamespaceConfig]) -> Result<(), Error> {
        let is_text = |serial: &&String| {
            (1..=MAX_SERIAL).contains(&serial.len())
                && serial.bytes().all(|byte| (b' '..=b'~').contains(&byte))
        };
        let block_size =
            namespaces.iter().map(|n| n.device.limits().block_size).find(|size| *size > 64 << 10);
        let uuids: Vec<[u8; 16]> = namespaces.iter().filter_map(|namespace| namespace.uuid).collect();
        let is_twice = uuids.iter().collect::<BTreeSet<_>>().len() < uuids.len();
        let fault = if !(1..=MAX_QUEUES).contains(&self.queues) {
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

/// The serial number that is derived from a name: the same name gives the same number.
pub fn default_serial(name: &str) -> String {
    hex(&identity(&[name])[..MAX_SERIAL / 2])
}

/// A UUID derived from words: the same words give the same UUID (RFC 9562, version 8).
pub(crate) fn identity(words: &[&str]) -> [u8; 16] {
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

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
