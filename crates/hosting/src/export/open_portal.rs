//! A portal of any kind: to be opened, and open.

use exports::Error;
use exports::stream::Security;
use reactor::CoreRef;
use std::sync::Arc;

/// A portal to be opened.
#[derive(Clone, Debug)]
pub enum PortalPlan {
    /// Of NVMe subsystems.
    NvmeTcp(exports_nvme_tcp::PortalConfig),
    /// Of NBD exports.
    Nbd(exports_nbd::PortalConfig),
}

impl PortalPlan {
    /// Opens it. Clients wait until [`OpenPortal::accept`] is called.
    ///
    /// # Errors
    /// When the system refuses a socket.
    pub fn open(self, cores: &[CoreRef]) -> Result<OpenPortal, Error> {
        match self {
            PortalPlan::NvmeTcp(config) => {
                Ok(OpenPortal::NvmeTcp(exports_nvme_tcp::Portal::bind(cores, config)?))
            }
            PortalPlan::Nbd(config) => Ok(OpenPortal::Nbd(exports_nbd::Portal::bind(&config)?)),
        }
    }
}

/// An open portal. Clones share it.
#[derive(Clone, Debug)]
pub enum OpenPortal {
    /// Of NVMe subsystems.
    NvmeTcp(Arc<exports_nvme_tcp::Portal>),
    /// Of NBD exports.
    Nbd(Arc<exports_nbd::Portal>),
}

impl OpenPortal {
    /// Its name.
    pub fn name(&self) -> &str {
        match self {
            OpenPortal::NvmeTcp(portal) => portal.name(),
            OpenPortal::Nbd(portal) => portal.name(),
        }
    }

    /// Its kind.
    pub fn kind(&self) -> &'static str {
        match self {
            OpenPortal::NvmeTcp(_) => "nvme-tcp",
            OpenPortal::Nbd(_) => "nbd",
        }
    }

    /// Accepts clients, also those that wait already.
    ///
    /// # Errors
    /// When the system refuses a thread.
    pub fn accept(&self) -> Result<(), Error> {
        match self {
            OpenPortal::NvmeTcp(portal) => portal.accept(),
            OpenPortal::Nbd(portal) => portal.accept(),
        }
    }

    /// Stops accepting clients. Those that are connected stay. Must not be called on a core.
    pub fn close(&self) {
        match self {
            OpenPortal::NvmeTcp(portal) => portal.close(),
            OpenPortal::Nbd(portal) => portal.close(),
        }
    }

    /// The listening addresses, with the TCP ports that the system chose.
    pub fn addresses(&self) -> Vec<String> {
        match self {
            OpenPortal::NvmeTcp(portal) => portal.addresses().map(str::to_owned).collect(),
            OpenPortal::Nbd(portal) => portal.addresses().map(str::to_owned).collect(),
        }
    }

    /// The connections of all exports, at each address.
    pub fn connections(&self) -> Vec<u32> {
        match self {
            OpenPortal::NvmeTcp(portal) => portal.connections().map(|count| count as u32).collect(),
            OpenPortal::Nbd(portal) => portal.connections().map(|count| count as u32).collect(),
        }
    }

    /// Connected discovery clients. NBD has none: its list of exports is a part of the handshake.
    pub fn discovery_clients(&self) -> u64 {
        match self {
            OpenPortal::NvmeTcp(portal) => portal.stats().clients(),
            OpenPortal::Nbd(_) => 0,
        }
    }

    /// Uses other keys and certificates for new connections, if it has TLS of this form.
    ///
    /// # Errors
    /// When the portal was opened without TLS.
    pub fn set_security(&self, security: Security) -> Result<(), Error> {
        match self {
            OpenPortal::NvmeTcp(_) => Ok(()),
            OpenPortal::Nbd(portal) => portal.set_security(security),
        }
    }
}
