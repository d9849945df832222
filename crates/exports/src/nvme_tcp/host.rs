//! The identity of a host.

use nvme::fabrics::Nqn;

/// A host's identity.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Host {
    pub(super) nqn: Nqn,
    pub(super) id: [u8; 16],
}
