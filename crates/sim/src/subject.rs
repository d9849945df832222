//! What a scenario drives: an array, seen as little as possible.

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

/// Something that makes one device of several disks and survives power loss.
pub trait Subject {
    /// Bytes of the device that it makes for a shape.
    fn capacity(&self, shape: &Shape) -> u64;

    /// Makes a new array whose blocks read as zeroes. Disk `i` becomes slot `i`.
    fn create<'a>(&'a self, shape: &'a Shape, disks: &'a [SimDisk]) -> Local<'a, Result<(), String>>;

    /// Adds blank disks to a whole array that was stopped, as groups more or to change its shape; says what shape it has
    /// then. `own` are its disks, and perhaps others.
    fn extend<'a>(
        &'a self,
        shape: &'a Shape,
        own: &'a [SimDisk],
        new: &'a [SimDisk],
    ) -> Local<'a, Result<Geometry, String>>;

    /// Brings the array up from those disks, which come in any order; `None` for a disk that is not there. Some may be
    /// stale. `force` accepts that blocks are lost.
    fn assemble<'a>(
        &'a self,
        shape: &'a Shape,
        disks: &'a [SimDisk],
        cores: &'a [Core],
        force: bool,
    ) -> Local<'a, Result<Rc<dyn Running>, Refusal>>;

    /// Does an operator's command to the array, which is stopped. `spare`: the device that it is about.
    fn command<'a>(
        &'a self,
        _disks: &'a [SimDisk],
        _command: Command,
        _spare: Option<String>,
    ) -> Local<'a, Said> {
        Box::pin(async { Said::Nothing })
    }

    /// Brings the array up from those disks without a write; `None` when something must be recovered first.
    fn look<'a>(&'a self, _disks: &'a [SimDisk]) -> Local<'a, Result<Option<Rc<dyn Running>>, Refusal>> {
        Box::pin(async { Ok(None) })
    }
}

/// Why an array was not assembled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// It was dirty and degraded: some blocks may be wrong, unless forced.
    DirtyDegraded,
    /// Two members say that the array went on without the other.
    SplitBrain(String),
    /// Too few members.
    TooFew,
    /// Anything else.
    Other(String),
}

/// What a scrub found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scrubbed {
    /// Stripes whose parity does not match.
    pub stripes: u64,
    /// Slots of the strips that are wrong, as far as parity tells.
    pub named: BTreeSet<usize>,
}

/// An array that runs.
pub trait Running {
    /// The array.
    fn device(&self) -> Arc<dyn Device>;

    /// Its shape, if it can ever have another than it was made with.
    fn geometry(&self) -> Option<Geometry>;

    /// For each slot whether its member is live.
    fn live(&self) -> Vec<bool>;

    /// Takes a member out, as an administrator does.
    fn fail(&self, slot: usize) -> Local<'_, Result<(), String>>;

    /// Gives a disk to an empty slot: a blank one or a former member; ends when the slot is live again.
    fn add<'a>(&'a self, slot: usize, disk: &'a SimDisk) -> Local<'a, Result<(), String>>;

    /// Gives disks to empty slots of a group at the same time; ends when all of them are live again.
    fn add_all<'a>(&'a self, disks: &'a [(usize, SimDisk)]) -> Local<'a, Result<(), String>> {
        Box::pin(async move {
            for (slot, disk) in disks {
                self.add(*slot, disk).await?;
            }
            Ok(())
        })
    }

    /// Compares data and parity of all stripes, and makes them fit if told.
    fn scrub(&self, repair: bool) -> Local<'_, Result<Scrubbed, String>>;

    /// The bytes of a slot's disk that hold strips; `None` if it is not there, or the subject does not say.
    fn strips_at(&self, slot: usize) -> Option<Range<u64>>;

    /// Makes parity right where a crash has left it open, as far as the array knows.
    fn resync(&self) -> Local<'_, Result<(), String>>;

    /// Makes the array as large as its disks allow.
    fn grow(&self) -> Local<'_, Result<(), String>>;

    /// Whether it changes its shape.
    fn is_reshaping(&self) -> bool {
        false
    }

    /// Goes on with a change of shape to its end.
    fn reshape(&self) -> Local<'_, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }

    /// The names of a slot's disk and of the one that is being filled for it.
    fn devices(&self, _slot: usize) -> [Option<String>; 2] {
        [None, None]
    }

    /// Has a live member copied onto a disk, which then takes its place. Returns when that is accepted.
    fn replace_live<'a>(&'a self, _slot: usize, _disk: &'a SimDisk) -> Local<'a, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }

    /// Adds a spare, of the array's own or of a pool.
    fn add_spare<'a>(&'a self, _disk: &'a SimDisk, _is_global: bool) -> Local<'a, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }

    /// The names of the spares that wait.
    fn spares(&self) -> Vec<String> {
        Vec::new()
    }

    /// Ends when no job is left.
    fn jobs_end(&self) -> Local<'_, ()> {
        Box::pin(async {})
    }

    /// Whether it serves nothing any more.
    fn is_beyond_help(&self) -> bool {
        false
    }

    /// Ends the keeper.
    fn stop_keeper(&self) -> Local<'_, ()> {
        Box::pin(async {})
    }

    /// Starts a keeper on a core, which finds its spares among those disks.
    fn start_keeper<'a>(&'a self, _core: &'a Core, _disks: &'a [SimDisk]) -> Local<'a, Result<(), String>> {
        Box::pin(async { Ok(()) })
    }

    /// Corrected read errors that a member may have in an hour, if the array has such a limit.
    fn read_error_budget(&self) -> Option<u32> {
        None
    }

    /// Stops the array cleanly. Nothing is in flight.
    fn stop(&self) -> Local<'_, Result<(), String>>;
}
