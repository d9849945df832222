//! The ports of a subsystem: its addresses, and the access state of its namespaces over each.
//!
//! All namespaces are in one ANA group, whose state is that of the port. The state may change at
//! any time. Later commands follow the new state, and hosts that enabled the event are notified.
//! I/O queues read one byte of the port, which is otherwise not written.
//!
//! If other hosts serve the device too, the port is inaccessible while this host is not the active
//! one. Its own state counts when it is.
//!
//! Source: Base Specification 2.0, 8.1 (asymmetric namespace access), 5.16.1.13 (its log page),
//! 5.17.2.1 (ANACAP).

use block::SharedRole;
use nvme::{AccessState, Status};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};

/// The ANA group of every namespace.
pub(crate) const GROUP: u32 = 1;
/// ANATT: maximum time that a host waits for [`AccessState::Change`] to end, in seconds.
pub(crate) const TRANSITION_S: u8 = 30;
/// ANACAP: all five states are reported (bits 4:0).
pub(crate) const CAPABILITIES: u8 = 0x1f;
/// Bytes of the page before its first group.
const HEADER_BYTES: usize = 16;

/// A port of the subsystem.
pub struct Port {
    /// The identifier, from 1 on.
    pub id: u16,
    /// TRTYPE of its transport.
    pub transport: u8,
    state: AtomicU8,
    changes: AtomicU64,
    /// The role of this host, if other hosts serve the device too.
    role: Option<Arc<SharedRole>>,
    /// The listening address; `None` if it is not an IP socket.
    address: Option<SocketAddr>,
}

impl Port {
    /// A port with this identifier, TRTYPE and initial state.
    pub fn new(
        id: u16,
        transport: u8,
        state: AccessState,
        address: Option<SocketAddr>,
        role: Option<Arc<SharedRole>>,
    ) -> Port {
        Port { id, transport, state: AtomicU8::new(state as u8), changes: AtomicU64::new(1), role, address }
    }

    /// The address of this port for a host that connected to `here` of another port. If this port
    /// listens on all addresses, the host should use the one that it connected to.
    pub(crate) fn address(&self, here: SocketAddr) -> Option<SocketAddr> {
        let own = self.address?;
        match own.ip().is_unspecified() {
            true => Some(SocketAddr::new(here.ip(), own.port())),
            false => Some(own),
        }
    }

    /// The present state.
    #[inline]
    pub fn state(&self) -> AccessState {
        let own = AccessState::ALL[usize::from(self.state.load(Ordering::Relaxed))].0;
        match &self.role {
            Some(role) if !role.is_active() && own != AccessState::PersistentLoss => {
                AccessState::Inaccessible
            }
            _ => own,
        }
    }

    /// How often the state may have changed.
    fn changes(&self) -> u64 {
        let of_role = self.role.as_ref().map_or(0, |role| role.changes());
        self.changes.load(Ordering::Relaxed) + of_role
    }

    /// Sets the state. Returns whether it changed.
    pub fn set_state(&self, state: AccessState) -> bool {
        let is_new = self.state.swap(state as u8, Ordering::Relaxed) != state as u8;
        if is_new {
            self.changes.fetch_add(1, Ordering::Relaxed);
        }
        is_new
    }

    /// Checks whether the access state permits a command to a namespace.
    ///
    /// # Errors
    /// The status of the command (Base 8.1.4, figure "ANA state and status codes").
    #[inline]
    pub(crate) fn check_access(&self) -> Result<(), Status> {
        match self.state() {
            AccessState::Optimized | AccessState::NonOptimized => Ok(()),
            AccessState::Inaccessible => Err(Status::ANA_INACCESSIBLE),
            AccessState::PersistentLoss => Err(Status::ANA_PERSISTENT_LOSS),
            AccessState::Change => Err(Status::ANA_TRANSITION),
        }
    }

    /// The access state log page. `only_groups` omits the namespace identifiers.
    pub(crate) fn log_page(&self, namespaces: u32, only_groups: bool) -> Vec<u8> {
        let listed = if only_groups { 0 } else { namespaces };
        let changes = self.changes().to_le_bytes();
        let mut page = vec![0; HEADER_BYTES];
        page[..8].copy_from_slice(&changes);
        page[8] = 1; // groups
        page.extend(GROUP.to_le_bytes());
        page.extend(listed.to_le_bytes());
        page.extend(changes);
        page.push(self.state().number());
        page.extend([0; 15]);
        (1..=listed).for_each(|namespace| page.extend(namespace.to_le_bytes()));
        page
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::HostRole;
    use nvme::fabrics::discovery::TRANSPORT_TCP;

    #[test]
    fn the_page_is_laid_out_as_the_specification_has_it() {
        let port = Port::new(2, TRANSPORT_TCP, AccessState::NonOptimized, None, None);
        let page = port.log_page(3, false);
        assert_eq!(page.len(), 16 + 32 + 3 * 4);
        assert_eq!(page[..10], [1, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
        assert_eq!(page[16..24], [1, 0, 0, 0, 3, 0, 0, 0]);
        assert_eq!((page[24], page[32]), (1, 2));
        assert_eq!(page[48..], [1, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0]);
        assert!(port.set_state(AccessState::Change) && !port.set_state(AccessState::Change));
        let page = port.log_page(3, true);
        assert_eq!((page.len(), page[0], page[20], page[24], page[32]), (48, 2, 0, 2, 0x0f));
    }

    #[test]
    fn all_states_but_two_keep_commands_off() {
        for (place, name) in AccessState::names().into_iter().enumerate() {
            let state = AccessState::parse(name).unwrap();
            let port = Port::new(1, TRANSPORT_TCP, state, None, None);
            assert_eq!(port.check_access().is_ok(), place < 2, "{name}");
            assert_eq!(port.state(), state);
        }
    }

    #[test]
    fn a_port_of_a_standby_is_inaccessible_and_counts_the_changes_of_its_role() {
        let role = SharedRole::new(HostRole::Standby);
        let port = Port::new(1, TRANSPORT_TCP, AccessState::NonOptimized, None, Some(role.clone()));
        let seen = || (port.state(), port.log_page(1, true)[0]);
        assert_eq!(seen(), (AccessState::Inaccessible, 1));
        role.set(HostRole::Active);
        assert_eq!(seen(), (AccessState::NonOptimized, 2));
        assert!(port.set_state(AccessState::PersistentLoss));
        role.set(HostRole::Fenced);
        assert_eq!(seen(), (AccessState::PersistentLoss, 4));
    }

    #[test]
    fn a_port_at_any_address_is_found_where_the_host_came() {
        let here: SocketAddr = "10.0.0.7:4420".parse().unwrap();
        let port =
            |address: &str| Port::new(1, TRANSPORT_TCP, AccessState::Optimized, address.parse().ok(), None);
        assert_eq!(port("/run/socket").address(here), None);
        assert_eq!(port("0.0.0.0:4421").address(here), Some("10.0.0.7:4421".parse().unwrap()));
        let port = port("192.168.0.1:4420");
        assert_eq!(port.address(here), Some("192.168.0.1:4420".parse().unwrap()));
    }
}
