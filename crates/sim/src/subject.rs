//! The minimal interface of an array under test.

use crate::commands::{Command, Said};
use crate::disk::SimDisk;
use crate::plan::Shape;
use block::Device;
use raid::Geometry;
use reactor::Core;
use std::collections::BTreeSet;
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;

/// A future of the simulation's thread.
pub type Local<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// Combines several disks into one device that survives power failures.
pub trait Subject {
    /// Bytes of the device for a shape.
    fn capacity(&self, shape: &Shape) -> u64;

    /// Creates an array whose blocks read as zeroes, if the disks do not have it. Disk `i` becomes
    /// slot `i`.
    fn create<'a>(&'a self, shape: &'a Shape, disks: &'a [SimDisk]) -> Local<'a, Result<(), String>>;

    /// Leaves a former array on the disks.
    fn soil<'a>(&'a self, _shape: &'a Shape, _disks: &'a [SimDisk]) -> Local<'a, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }

    /// Adds blank disks to a complete, stopped array, as further groups or for a reshape. Returns
    /// its new shape. `own` are its disks, and possibly others.
    fn extend<'a>(
        &'a self,
        shape: &'a Shape,
        own: &'a [SimDisk],
        new: &'a [SimDisk],
    ) -> Local<'a, Result<Geometry, String>>;

    /// Assembles and starts the array from these disks, in any order; `None` for a missing disk.
    /// Some may be stale. `force` accepts lost blocks.
    fn assemble<'a>(
        &'a self,
        shape: &'a Shape,
        disks: &'a [SimDisk],
        cores: &'a [Core],
        force: bool,
    ) -> Local<'a, Result<Rc<dyn Running>, Refusal>>;

    /// Runs an operator's command on the stopped array. `named`: the device of the command.
    fn command<'a>(
        &'a self,
        _disks: &'a [SimDisk],
        _command: Command,
        _named: Option<String>,
    ) -> Local<'a, Said> {
        Box::pin(async { Said::Nothing })
    }

    /// Starts the array from the disks without a write; `None` when it must recover first.
    fn look<'a>(&'a self, _disks: &'a [SimDisk]) -> Local<'a, Result<Option<Rc<dyn Running>>, Refusal>> {
        Box::pin(async { Ok(None) })
    }
}

/// Why an array was not assembled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The array was dirty and degraded: some blocks may be wrong, unless forced.
    DirtyDegraded,
    /// Two members report that the array was used without the other.
    SplitBrain(String),
    /// The array has too few members.
    TooFew,
    /// Any other reason.
    Other(String),
}

/// Result of a scrub.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scrubbed {
    /// Stripes whose parity does not match.
    pub stripes: u64,
    /// Slots with wrong strips, if parity identifies them.
    pub named: BTreeSet<usize>,
}

/// A running array.
pub trait Running {
    /// The array.
    fn device(&self) -> Arc<dyn Device>;

    /// Its shape, if that can change.
    fn geometry(&self) -> Option<Geometry>;

    /// For each slot whether its member is live.
    fn live(&self) -> Vec<bool>;

    /// Marks a member as failed, as an administrator does.
    fn fail(&self, slot: usize) -> Local<'_, Result<(), String>>;

    /// Adds a disk to an empty slot: a blank one or a former member. Ends when the slot is live.
    fn add<'a>(&'a self, slot: usize, disk: &'a SimDisk) -> Local<'a, Result<(), String>>;

    /// Adds disks to empty slots of a group concurrently. Ends when all of them are live.
    fn add_all<'a>(&'a self, disks: &'a [(usize, SimDisk)]) -> Local<'a, Result<(), String>> {
        Box::pin(async move {
            for (slot, disk) in disks {
                self.add(*slot, disk).await?;
            }
            Ok(())
        })
    }

    /// Compares data and parity of all stripes, and repairs differences if `repair`.
    fn scrub(&self, repair: bool) -> Local<'_, Result<Scrubbed, String>>;

    /// Range of a slot's disk that contains strips, in bytes; `None` if the disk is missing, or
    /// unknown.
    fn strips_at(&self, slot: usize) -> Option<Range<u64>>;

    /// Resyncs parity after a crash, in the regions that the array marked.
    fn resync(&self) -> Local<'_, Result<(), String>>;

    /// Grows the array to the size that its disks allow.
    fn grow(&self) -> Local<'_, Result<(), String>>;

    /// Whether the array is being reshaped.
    fn is_reshaping(&self) -> bool {
        false
    }

    /// Continues a reshape to its end.
    fn reshape(&self) -> Local<'_, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }

    /// The names of a slot's disk and of the disk that is being rebuilt for it.
    fn devices(&self, _slot: usize) -> [Option<String>; 2] {
        [None, None]
    }

    /// Starts to copy a live member to a disk that then replaces it. Returns when the array has
    /// accepted.
    fn replace_live<'a>(&'a self, _slot: usize, _disk: &'a SimDisk) -> Local<'a, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }

    /// Adds a spare, of the array or of a pool.
    fn add_spare<'a>(&'a self, _disk: &'a SimDisk, _is_global: bool) -> Local<'a, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }

    /// The names of the idle spares.
    fn spares(&self) -> Vec<String> {
        Vec::new()
    }

    /// Waits until no job is left.
    fn jobs_end(&self) -> Local<'_, ()> {
        Box::pin(async {})
    }

    /// Whether the array refuses all requests.
    fn is_beyond_help(&self) -> bool {
        false
    }

    /// Stops the background jobs.
    fn stop_keeper(&self) -> Local<'_, ()> {
        Box::pin(async {})
    }

    /// Starts the background jobs on a core; they find their spares among the disks.
    fn start_keeper<'a>(&'a self, _core: &'a Core, _disks: &'a [SimDisk]) -> Local<'a, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }

    /// Corrected read errors that a member may have per hour, if the array has such a limit.
    fn read_error_budget(&self) -> Option<u32> {
        None
    }

    /// Stops the array cleanly. No request is in flight.
    fn stop(&self) -> Local<'_, Result<(), String>>;
}
