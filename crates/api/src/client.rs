//! Clients that are connected to an export.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A client that is connected to an export: a controller of an NVMe/TCP host with its queues, an
/// NBD connection, or the VMM or kernel that uses the export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Client {
    /// Address; null for kinds without addresses.
    pub address: Option<String>,
    /// NQN of an NVMe/TCP host, or the identity that an NBD client has proven by TLS.
    pub host: Option<String>,
    /// Controller of an NVMe/TCP host.
    pub controller: Option<u16>,
    /// I/O queues of an NVMe/TCP host.
    pub queues: Option<u16>,
    /// Time of the first connection in nanoseconds since 1970.
    pub since_ns: u64,
    /// Whether TLS protects its connections.
    pub is_secured: bool,
    /// Whether the client has proven its name, by TLS or by DH-HMAC-CHAP.
    pub is_authenticated: bool,
    /// Bytes that its present connections have read; null for kinds without addresses.
    pub read_bytes: Option<u64>,
    /// Bytes that its present connections have written; null for kinds without addresses.
    pub written_bytes: Option<u64>,
}
