//! The hosts that may connect, and their secrets.
//!
//! Both may change while the export serves:
//!
//! ```text
//!   set_access ─► admitted hosts ─► controllers of other hosts: revoked ─► disconnected ─► settle
//!                 └───── under one lock with the creation of controllers ┘             (writes end)
//! ```
//!
//! A revoked controller refuses every command that uses a namespace, also those that were received
//! before. [`crate::reservations::settle`] then waits for the writes that were admitted earlier.

use nvme::fabrics::Nqn;
use nvme_auth::Keyring;
use nvme_auth::access::Access;
use nvme_auth::tls_key::TlsSecret;

/// The access in force.
pub struct AdmittedHosts {
    /// The hosts, and their secrets.
    pub access: Access,
    /// The TLS keys of all hosts, for the subsystem and for discovery, except for those in a
    /// keyring.
    pub(crate) secrets: Vec<TlsSecret>,
}

impl AdmittedHosts {
    /// Access to a subsystem.
    pub fn new(access: Access, subsystem: &Nqn) -> AdmittedHosts {
        let keys = access.tls.as_ref().map(|tls| tls.keys.secrets(&[subsystem, &Nqn::discovery()]));
        AdmittedHosts { access, secrets: keys.unwrap_or_default() }
    }

    /// The keyring whose keys count, too.
    pub(crate) fn keyring(&self) -> Option<&Keyring> {
        self.access.tls.as_ref().and_then(|tls| tls.keys.keyring())
    }
}
