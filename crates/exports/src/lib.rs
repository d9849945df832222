//! What clients attach to.
//!
//! An [`Export`] speaks one protocol to its clients and hands their requests to a [`block::Device`], on the cores
//! its queues are mapped to. Control (connections, negotiation, mappings) runs on the export's own thread and
//! reaches the cores by message; the data path takes no lock.

mod error;
mod stats;
mod target;
pub mod vhost_user_blk;
mod virtio_blk;

pub use error::Error;
pub use stats::{QueueStats, Stats};
pub use virtio::contain_truncation;

use block::Limits;
use target::Target;

/// A running export of any kind. Dropping it ends its clients' sessions and the export: requests in flight are completed
/// first. Not to be done on a core.
pub trait Export: Send {
    /// Counters since the start.
    fn stats(&self) -> &Stats;

    /// The device's limits have changed (it grew): clients are told where their protocol can say it. Returns what
    /// they will find. Not to be called on a core.
    fn notify_resize(&self) -> Limits;
}
