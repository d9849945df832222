//! The listening addresses of an NVMe subsystem, and the access state over each.

use crate::stream::Address;
use nvme::AccessState;

/// The configuration of a port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PortConfig {
    /// The listening address.
    pub address: Address,
    /// The initial access state.
    pub state: AccessState,
}

impl PortConfig {
    /// The access state that `chosen` has for this address; else its own.
    pub fn state_within(&self, chosen: &[PortConfig]) -> AccessState {
        chosen.iter().find(|port| port.address == self.address).map_or(self.state, |port| port.state)
    }
}

/// The port at this address.
///
/// # Errors
/// Names the addresses of all ports, when none is at this one.
pub fn port_at<'a>(
    ports: impl IntoIterator<Item = &'a PortConfig, IntoIter: Clone>,
    address: &Address,
) -> Result<&'a PortConfig, String> {
    let mut ports = ports.into_iter();
    let all = ports.clone();
    ports.find(|port| port.address == *address).ok_or_else(|| {
        let known: Vec<String> = all.map(|port| port.address.to_string()).collect();
        format!("ana: \"{address}\" is no port: want one of {}", known.join(", "))
    })
}
