//! Portals: listeners that exports share.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// A portal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Portal {
    /// Name.
    pub name: String,
    /// Kind of its exports: `nvme-tcp` or `nbd`.
    #[serde(default = "default_portal_kind")]
    pub kind: String,
    /// Configured ports, each `ADDR:PORT` or, for `nvme-tcp`, `ADDR:PORT@STATE`.
    pub listen: Vec<String>,
    /// Addresses that it listens at, with the TCP ports that the system chose; empty if it is not
    /// open.
    pub addresses: Vec<String>,
    /// Maximum connections of each address.
    pub clients: u32,
    /// Options of its kind.
    #[serde(default)]
    pub options: BTreeMap<String, String>,
    /// Connections at each of the addresses, in their order, of all exports together.
    #[serde(default)]
    pub connections: Vec<u32>,
    /// Names of the exports that use the portal.
    pub exports: Vec<String>,
    /// Connected discovery clients; 0 for `nbd`. The exports count their own clients.
    pub discovery_clients: u64,
    /// Reason why the portal is not open; the daemon retries.
    pub error: Option<String>,
}

/// Request to open a portal now and at each start of the daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewPortal {
    /// Name.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    pub name: String,
    /// Kind of its exports: `nvme-tcp` (the default) or `nbd`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Ports to listen at, 1 to 16, each `ADDR:PORT`. With `@STATE`, the namespaces of every export
    /// of kind `nvme-tcp` have this ANA state there: `optimized` (the default), `non-optimized`,
    /// `inaccessible`, `persistent-loss` or `change`.
    pub listen: Vec<String>,
    /// Maximum connections of each address, one queue each, 1 to 65536. Discovery does not count.
    /// Default: 4096. Each export also has its own limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub clients: Option<u32>,
    /// Options of its kind: for `nbd`, `default-export`, `tls`, `tls-certificates`, `tls-psk`,
    /// `tls-verify-peer` and `address-clients`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, String>,
}

/// The kind of portals that do not name it.
pub const DEFAULT_PORTAL_KIND: &str = "nvme-tcp";

/// [`DEFAULT_PORTAL_KIND`], for fields that may be absent.
pub fn default_portal_kind() -> String {
    DEFAULT_PORTAL_KIND.into()
}
