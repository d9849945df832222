//! The identity of a host.

use nvme::fabrics::Nqn;

/// A host's identity.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Host {
    /// Its name.
    pub nqn: Nqn,
    /// HOSTID.
    pub id: [u8; 16],
}
