//! What clients attach to.
//!
//! An [`Export`] speaks one protocol to its clients and hands their requests to a [`block::Device`], on the cores
//! its queues are mapped to. Control (connections, negotiation, mappings) runs on the export's own thread and
//! reaches the cores by message; the data path takes no lock.

mod error;
mod eventfd;
mod fence;
pub mod nbd;
pub mod nvme_tcp;
mod stats;
mod stop;
pub mod stream;
mod target;
pub mod ublk;
pub mod vduse;
pub mod vhost_user_blk;
mod virtio_blk;

pub use error::Error;
pub use stats::{QueueStats, Stats};
pub use stream::{MIN_MEMORY, MemoryBudget};
pub use virtio::contain_truncation;

use block::Limits;
use target::Target;

/// A running export of any kind. Dropping it ends its clients' sessions and the export: requests in flight are completed
/// first. Not to be done on a core.
pub trait Export: Send + Sync {
    /// Counters since the start.
    fn stats(&self) -> &Stats;

    /// The device's limits have changed (it grew): clients are told where their protocol can say it. Returns what
    /// they will find. Not to be called on a core.
    fn notify_resize(&self) -> Limits;

    /// Queues go round these cores (places among those of the start; none: all) from now on, those that are busy too; but
    /// connections over a stream stay where they are, and go there when they are made again. Not to be called on a core.
    ///
    /// # Errors
    /// When there is no such core, or exports of this kind cannot do that; then nothing has changed.
    fn remap(&self, cores: &[usize]) -> Result<(), Error>;

    /// Clients stay for the next server that starts this export, and wait, where that is possible; else nothing happens.
    /// What is left to do is to drop it. Not to be called on a core.
    fn hand_over(&self) {}
}

/// The core that serves each queue: those of `map` in turn, or all of them.
fn queue_cores(map: &[usize], num_queues: u16, cores: usize) -> Vec<usize> {
    let everyone: Vec<usize> = (0..cores).collect();
    let map = if map.is_empty() { &everyone } else { map };
    map.iter().copied().cycle().take(num_queues.into()).collect()
}

/// Whether there are cores, and those of `map` among them.
fn check_cores(map: &[usize], cores: usize) -> Result<(), Error> {
    if cores == 0 {
        return Err(Error::Config("no core to serve the export".into()));
    }
    match map.iter().find(|&&core| core >= cores) {
        Some(core) => Err(Error::Config(format!("core {core}: there are {cores}"))),
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
        assert_eq!(check_cores(&[0, 2], 2).unwrap_err().to_string(), "core 2: there are 2");
        assert!(check_cores(&[], 0).is_err());
    }
}
