//! The state of each virtqueue as the VMM sets it: a state machine without side effects.
//!
//! A ring runs when its size, addresses and kick are known and it is enabled. GET_VRING_BASE
//! removes the kick. After every message the session compares this state with the rings on the
//! cores. Source of truth: the vhost-user specification, "Ring states".

use exports::Error;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Largest ring that is served.
pub const MAX_QUEUE_SIZE: u16 = 1024;

/// Ring areas as SET_VRING_ADDR names them: addresses in the VMM's own address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Addresses {
    pub(super) descriptors: u64,
    pub(super) available: u64,
    pub(super) used: u64,
    /// Guest address of the used area, when writes to it are logged.
    pub(super) used_log: Option<u64>,
}

/// How the VMM signals new entries in the ring.
#[derive(Clone, Debug)]
pub(super) enum Kick {
    /// Through an eventfd.
    Event(Arc<OwnedFd>),
    /// Not at all: the ring must be polled.
    Polled,
}

/// The known state of one virtqueue.
#[derive(Debug, Default)]
pub(super) struct Ring {
    /// Entries of the ring; 0 while unknown.
    pub(super) size: u16,
    pub(super) addresses: Option<Addresses>,
    /// The ring's position, as SET_VRING_BASE and GET_VRING_BASE encode it.
    pub(super) base: u32,
    pub(super) kick: Option<Kick>,
    pub(super) call: Option<Arc<OwnedFd>>,
    pub(super) err: Option<Arc<OwnedFd>>,
    pub(super) is_enabled: bool,
}

impl Ring {
    /// SET_VRING_NUM.
    pub(super) fn set_size(&mut self, size: u32, is_packed: bool) -> Result<(), Error> {
        let fits = (1..=u32::from(MAX_QUEUE_SIZE)).contains(&size);
        if !fits || !(is_packed || size.is_power_of_two()) {
            return Err(Error::protocol(format!(
                "ring size {size}: want 1 to {MAX_QUEUE_SIZE}, a power of two unless packed"
            )));
        }
        self.size = size as u16;
        Ok(())
    }

    /// Whether a core should serve the ring now.
    pub(super) fn wants_to_run(&self) -> bool {
        self.size != 0 && self.addresses.is_some() && self.kick.is_some() && self.is_enabled
    }

    /// GET_VRING_BASE: the ring is stopped until it gets a kick again.
    pub(super) fn stop(&mut self) {
        self.kick = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn described() -> Ring {
        let addresses = Addresses { descriptors: 0x1000, available: 0x2000, used: 0x3000, used_log: None };
        Ring { size: 8, addresses: Some(addresses), ..Ring::default() }
    }

    #[test]
    fn a_ring_runs_when_everything_is_known_in_any_order() {
        let mut ring = described();
        assert!(!ring.wants_to_run());
        ring.kick = Some(Kick::Polled);
        assert!(!ring.wants_to_run());
        ring.is_enabled = true;
        assert!(ring.wants_to_run());
        ring.addresses = None;
        assert!(!ring.wants_to_run());
    }

    #[test]
    fn a_stopped_ring_stays_enabled_and_waits_for_a_kick() {
        let mut ring = Ring { kick: Some(Kick::Polled), is_enabled: true, ..described() };
        ring.stop();
        assert!(!ring.wants_to_run());
        ring.kick = Some(Kick::Polled);
        assert!(ring.wants_to_run());
    }

    #[test]
    fn only_sizes_of_the_specification_are_taken() {
        let mut ring = Ring::default();
        for size in [0, 3, 1025, 2048, 0x1_0000, u32::MAX] {
            assert!(ring.set_size(size, false).is_err(), "{size}");
        }
        ring.set_size(1024, false).unwrap();
        ring.set_size(3, true).unwrap();
        assert_eq!(ring.size, 3);
    }
}
