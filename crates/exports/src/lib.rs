//! Exports: protocols through which clients use a device.

mod clients;
mod data_memory;
mod data_plane;
mod error;
pub mod eventfd;
mod ports;
mod stats;
pub mod stop;
pub mod stream;
mod target;

pub use self::stream::{MIN_MEMORY, MemoryBudget};
pub use clients::{Connection, Moved, NvmeQueue, Peer};
pub use data_memory::DataMemory;
pub use data_plane::DataPlane;
pub use error::Error;
pub use ports::{PortConfig, port_at};
pub use stats::{ClientsReport, Connected, ConnectionStats, QueueStats, Stats, Totals};
pub use target::Target;

use block::Limits;
use nvme_auth::access::Access;

/// A running export of any kind. Dropping it completes the requests in flight, ends the sessions of
/// its clients and stops the export. Must not be dropped on a core.
pub trait Export: Send + Sync {
    /// Counters since the start.
    fn stats(&self) -> &Stats;

    /// Tells clients that the device's limits have changed (it grew), if their protocol can express
    /// it. Returns the limits that clients will see. Must not be called on a core.
    fn notify_resize(&self) -> Limits;

    /// Distributes queues over these cores from now on, busy queues too. `cores` holds indices into
    /// the cores of the start; empty: all. Existing stream connections keep their core; new ones
    /// use the new cores. Must not be called on a core.
    ///
    /// # Errors
    /// When `cores` names a core that does not exist, or exports of this kind cannot move queues.
    /// Then nothing changes.
    fn remap(&self, cores: &[usize]) -> Result<(), Error>;

    /// Switches to another data plane, with or without I/O in flight: each ring is drained once.
    /// [`DataPlane::Auto`] decides at once. Returns when the rings run again. Must not be called on
    /// a core.
    ///
    /// # Errors
    /// When the kernel cannot serve the device or the client, or exports of this kind have one data
    /// plane only. Then nothing changes.
    fn set_data_plane(&self, _data_plane: DataPlane) -> Result<(), Error> {
        Err(Error::Config("only exports of kind vhost-user-blk have a choice of data planes".into()))
    }

    /// Replaces the hosts that may connect, and their secrets. Other hosts are refused from now on.
    /// Returns when the controllers of those that were connected are gone, and no write of them is
    /// in flight. Must not be called on a core.
    ///
    /// # Errors
    /// When TLS refuses the keys, or exports of this kind know no hosts. Then nothing changes.
    fn set_access(&self, _access: Access) -> Result<(), Error> {
        Err(Error::Config("only exports of kind nvme-tcp have a list of hosts".into()))
    }

    /// Replaces the TLS identity and the accepted clients, for handshakes that begin from now on.
    /// Connections that are established stay.
    ///
    /// # Errors
    /// When the export was started without TLS, or exports of this kind have no such TLS. Then
    /// nothing changes.
    fn set_security(&self, _security: stream::Security) -> Result<(), Error> {
        Err(Error::Config("only exports of kind nbd have TLS of this form".into()))
    }

    /// Sets the access states (ANA) over the ports: those named here, and else those of the
    /// configuration of the ports. Commands in flight complete as before.
    ///
    /// # Errors
    /// When there is no such port, or exports of this kind have no access states. Then nothing
    /// changes.
    fn set_access_states(&self, _states: &[PortConfig]) -> Result<(), Error> {
        Err(Error::Config("only exports of kind nvme-tcp have access states".into()))
    }

    /// Prepares a handover: clients stay and wait for the next server that starts this export, if
    /// the protocol allows that. Otherwise it does nothing. The caller then drops the export. Must
    /// not be called on a core.
    fn hand_over(&self) {}
}

/// The core of each queue: those of `map` in turn, or all of them.
pub fn queue_cores(map: &[usize], num_queues: u16, cores: usize) -> Vec<usize> {
    let everyone: Vec<usize> = (0..cores).collect();
    let map = if map.is_empty() { &everyone } else { map };
    map.iter().copied().cycle().take(num_queues.into()).collect()
}

/// Checks that there are cores, and that `map` names existing ones.
///
/// # Errors
/// Names the core that does not exist, and the number of cores.
pub fn check_cores(map: &[usize], cores: usize) -> Result<(), Error> {
    if cores == 0 {
        return Err(Error::Config("no core to serve the export".into()));
    }
    match map.iter().find(|&&core| core >= cores) {
        Some(core) => Err(Error::Config(format!("core {core} does not exist: the export has {cores} cores"))),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_go_round_the_cores_they_are_mapped_to() {
        assert_eq!(queue_cores(&[2, 0], 5, 3), [2, 0, 2, 0, 2]);
        assert_eq!(queue_cores(&[], 5, 3), [0, 1, 2, 0, 1]);
    }

    #[test]
    fn cores_that_are_not_there_are_named() {
        check_cores(&[0, 1], 2).unwrap();
        assert_eq!(
            check_cores(&[0, 2], 2).unwrap_err().to_string(),
            "core 2 does not exist: the export has 2 cores"
        );
        assert!(check_cores(&[], 0).is_err());
    }
}
