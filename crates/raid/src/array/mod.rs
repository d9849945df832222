//! A running array.
//!
//! ```text
//!   start: superblocks ─► absent members failed ─► write-intent bitmap ─► log replayed ─► new nonce ─► serving
//!
//!   core A                        core B (committer)               core C
//!   channel ─ healthy read ─► member
//!           └ write ─────────────────────────────────────────────► owner of the stripe ─► members
//!                                 superblocks ◄─ "member 3 failed" ┘
//! ```
//!
//! Stripes belong to cores by the lane of the log that they use, so neither rows nor lanes need a
//! lock. The first core that opens a channel owns all stripes; each further one joins while the
//! gates are closed.

mod batch;
mod boundary;
mod calls;
mod channel;
mod coalesce;
mod commit_requests;
mod committer;
mod contradictions;
mod copies;
mod deadlines;
mod fill;
mod forward;
mod gate;
mod grow;
mod hedge;
mod latency;
mod log_check;
mod marks;
pub mod members;
mod progress;
mod read;
mod read_errors;
mod registry;
mod remote;
mod request;
mod reshape;
mod reshape_router;
mod scratch;
mod scrub;
mod shared;
mod snapshot;
mod spare;
mod start;
mod steps;
mod stop;
mod stripe_owner;
#[cfg(test)]
mod tests;
mod turns;
mod upkeep;
mod write;

pub use deadlines::{Deadlines, Soft};
pub use fill::{Before, Filled, FilledSlots, Wanted};
pub use grow::{GrowError, Growth};
pub use latency::{Counts, Samples};
pub use log_check::LOG_PART_BYTES;
pub use read_errors::{ReadErrors, WINDOW_NS};
pub use reshape::Moved;
pub use scrub::ScrubResult;
pub use shared::Counters;
pub use start::{Start, StartError, StartMember};

use crate::metadata::{Reason, Table};
use crate::{ArrayConfig, Consistency, Uuid};
use block::{Channel, Device, DeviceError, IoError, IoResult, KernelBacking, Limits, MemoryRegion};
use channel::ArrayChannel;
use committer::MetadataCommitter;
use marks::keep_regions;
use members::{Attached, MemberRole, SlotState};
use reactor::CoreRef;
use shared::{Shapes, Shared};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use stripe_owner::StripeOwner;

/// A running array: a device over its members.
pub struct Array {
    name: String,
    shared: Arc<Shared>,
    /// The layout before a reshape in progress.
    old: Option<Arc<Shared>>,
}

/// A slot of a running array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotStatus {
    /// The slot.
    pub slot: usize,
    /// The name of its device, if it has one.
    pub device: Option<String>,
    /// The state of its device.
    pub state: SlotState,
    /// Completed steps of the walk over all stripes ([`crate::Geometry::stripe_at_step`]), if it
    /// has an incoming device.
    pub filled: Option<u64>,
    /// Corrected read errors of its member since the array started, or since it became a member.
    pub read_errors: u64,
}

impl Array {
    /// The array's configuration at its present size.
    pub fn config(&self) -> &Arc<ArrayConfig> {
        self.shared.configs.newest()
    }

    /// Counters of events since the array was assembled.
    pub fn counters(&self) -> &Counters {
        &self.shared.common.counters
    }

    /// Corrected read errors of the members.
    pub fn read_errors(&self) -> &ReadErrors {
        &self.shared.common.read_errors
    }

    /// Sets how long the array waits for members. Without redundancy a read cannot be hedged, and a
    /// late member is not failed.
    pub fn set_deadlines(&self, deadlines: Deadlines) {
        self.shared.common.deadlines.set(deadlines);
    }

    /// Sets whether a mirror copies data that its caller may change during the write, as it does
    /// unless told otherwise. Without the copy, such a change can leave copies of a block that
    /// differ until the block is written again. An array with parity always copies.
    pub fn set_snapshot(&self, is_on: bool) {
        self.shared.common.is_in_place.store(!is_on, Ordering::Relaxed);
    }

    /// Whether the array was started for reading only.
    pub fn is_read_only(&self) -> bool {
        self.shared.common.is_read_only
    }

    /// Whether the array is frozen and serves no request.
    pub fn is_frozen(&self) -> bool {
        self.shared.common.is_frozen()
    }

    /// The present state of the slots.
    pub fn slots(&self) -> Vec<SlotStatus> {
        let members = &self.shared.members;
        let status = |slot: usize| {
            let [own, incoming] = members.attached(slot);
            SlotStatus {
                slot,
                device: own.or(incoming).map(|attached| attached.device.name().to_owned()),
                state: members.state(slot),
                filled: members.is_filling(slot).then(|| members.cursor(slot)),
                read_errors: self.shared.common.read_errors.total(slot),
            }
        };
        (0..self.shared.config.geometry.members()).map(status).collect()
    }

    /// The last committed table.
    pub fn table(&self) -> Table {
        self.shared.common.table()
    }

    /// Whether the array survives the loss of the members of all these slots.
    pub fn can_lose(&self, slots: &[usize]) -> bool {
        self.shared.can_lose_all(slots)
    }

    /// Marks a member as failed. Returns when every live member has the new table. Must run on a
    /// core.
    ///
    /// # Errors
    /// [`IoError::Invalid`] if the array would not survive it; an error of the commit.
    pub async fn fail(&self, slot: usize) -> IoResult {
        if slot >= self.shared.config.geometry.members() || !self.shared.can_lose(slot) {
            return Err(IoError::Invalid);
        }
        self.owner();
        self.shared.take_out(slot, MemberRole::Current, Reason::Failed).await
    }

    /// Starts to fill a slot with a device: an empty slot is rebuilt from the others, a live member
    /// is copied. The device's superblock is written; the device becomes a member once it is
    /// complete. Must run on a core.
    ///
    /// # Errors
    /// If the device is not suitable. [`IoError::Invalid`] if the slot already has an incoming
    /// device, or its member is live and the array has no redundancy. During a reshape only an
    /// empty slot can be filled, and only between two windows.
    pub async fn start_filling(&self, slot: usize, uuid: Uuid, incoming: Attached) -> IoResult {
        let members = &self.shared.members;
        let is_copy = slot < members.count() && members.is_live(slot);
        // Without redundancy, writes go to the live member alone, and no map records which regions
        // were written.
        let can_copy = !self.is_reshaping() && self.shared.config.geometry.parity > 0;
        if slot >= members.count() || members.is_filling(slot) || is_copy && !can_copy {
            return Err(IoError::Invalid);
        }
        self.owner();
        self.shared
            .on_committer(move |committer| {
                Box::pin(async move { committer.start_filling(slot, uuid, incoming, 0).await })
            })
            .await
    }

    /// Ends the array's service cleanly: waits for requests in flight, and commits a clean state.
    /// Later requests wait without end, so no client may use the array any more. Must run on a
    /// core.
    ///
    /// # Errors
    /// If the commit fails; then the next start of the array runs recovery.
    pub async fn stop(&self) -> IoResult {
        if self.shared.common.committer().is_none() {
            return Ok(());
        }
        self.shared.on_committer(|committer| Box::pin(async move { committer.stop().await })).await
    }

    /// This core's part of the array, created at the first use.
    fn owner(&self) -> Rc<StripeOwner> {
        if let Some(owner) = registry::find(self.shared.id) {
            return owner;
        }
        let old = self.old.as_ref().map(|old| Rc::new(StripeOwner::new(old.clone(), None)));
        if let Some(old) = &old {
            registry::add(old.shared.id, old.clone());
            if let Shapes::Two(router) = self.shared.common.shapes() {
                router.add_tracker(old.core.remote());
            }
        }
        let owner = Rc::new(StripeOwner::new(self.shared.clone(), old));
        registry::add(self.shared.id, owner.clone());
        let core = owner.core.remote();
        self.shared.ensure_committer();
        if self.shared.config.consistency == Consistency::Bitmap && !self.shared.common.is_read_only {
            owner.core.spawn(keep_regions(Rc::downgrade(&owner)));
        }
        let owners = self.shared.common.owner_cores();
        // A core that joins starts a new log, which costs writes; without writes ownership has
        // little use.
        let has_work = self.shared.config.geometry.parity > 0 && !self.shared.common.is_read_only;
        if has_work && !owners.iter().any(|other| other.is_same(&core)) {
            self.join(&owner, core);
        }
        owner
    }

    /// Makes a core an owner of stripes in the background; until then it sends its writes to
    /// others.
    fn join(&self, owner: &Rc<StripeOwner>, core: CoreRef) {
        let shared = self.shared.clone();
        owner.core.spawn(async move {
            let join = move |committer: MetadataCommitter| -> remote::LocalFuture<IoResult> {
                Box::pin(async move {
                    committer.take_over().await?;
                    committer.join(core).await
                })
            };
            let joined = shared.on_committer(join).await;
            if let Err(error) = joined {
                tracing::warn!(array = shared.config.name, %error, "core cannot become an owner of stripes");
            }
        });
    }
}

impl Device for Array {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> Limits {
        self.shared.common.limits.get()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Ok(Rc::new(ArrayChannel::new(self.owner())))
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
        Ok(self.limits()) // an array grows by its own command
    }

    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        self.shared.members.each_device(|device| device.map_region(region))
    }

    fn unmap_region(&self, region: &MemoryRegion) {
        let _ = self.shared.members.each_device(|device| {
            device.unmap_region(region);
            Ok(())
        });
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(self.name()))
    }
}

impl Drop for Array {
    fn drop(&mut self) {
        for id in std::iter::once(&self.shared).chain(&self.old).map(|shared| shared.id) {
            registry::remove(id);
            for core in self.shared.common.owner_cores().iter() {
                // A core that has ended has no registry any more.
                let _ = core.try_run(Box::new(move |_| registry::remove(id)));
            }
        }
    }
}
