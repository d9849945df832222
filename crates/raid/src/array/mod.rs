//! A running array.
//!
//! ```text
//!   start: superblocks ─► members that are absent go out ─► region map ─► log replayed ─► new nonce ─► serving
//!
//!   core A                        core B (home)                    core C
//!   channel ─ healthy read ─► member
//!           └ write ─────────────────────────────────────────────► owner of the stripe ─► members
//!                                 superblocks ◄─ "member 3 is out" ┘
//! ```
//!
//! Stripes belong to cores by the lane of the log that they use, so neither rows nor lanes need a lock. The first core
//! that opens a channel owns all; each further one joins while the gates are closed.

mod batch;
mod boundary;
mod channel;
mod contradictions;
mod crossing;
mod fill;
mod gate;
mod gather;
mod grow;
mod home;
mod latency;
mod log_check;
pub mod members;
mod owner;
mod patience;
mod progress;
mod read_errors;
mod registry;
mod remote;
mod reshape;
mod scrub;
mod shared;
mod snapshot;
mod spare;
mod start;
#[cfg(test)]
mod tests;
mod upkeep;
mod write;

pub use fill::{Before, Filled, FilledSlots, Wanted};
pub use grow::{GrowError, Growth};
pub use latency::{Counts, Samples};
pub use log_check::LOG_PART_BYTES;
pub use patience::{Patience, Soft};
pub use read_errors::{ReadErrors, WINDOW_NS};
pub use reshape::Moved;
pub use scrub::ScrubResult;
pub use shared::Counters;
pub use start::{Start, StartError, StartMember};

use crate::metadata::{Reason, Table};
use crate::{ArrayConfig, Uuid};
use block::{Channel, Device, DeviceError, IoError, IoResult, Limits, MemoryRegion};
use channel::ArrayChannel;
use home::Home;
use members::{Attached, SlotState, Which};
use owner::Owner;
use reactor::CoreRef;
use shared::Shared;
use std::rc::Rc;
use std::sync::Arc;

/// A running array: a device over its members.
pub struct Array {
    name: String,
    shared: Arc<Shared>,
    /// The shape that it changes from.
    old: Option<Arc<Shared>>,
}

/// A slot of a running array.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotStatus {
    /// The slot.
    pub slot: usize,
    /// The name of its device, if it has one.
    pub device: Option<String>,
    /// What its device may be used for.
    pub state: SlotState,
    /// Steps of the walk over all stripes ([`crate::Geometry::stripe_at_step`]) that a device that is being filled has
    /// behind it.
    pub filled: Option<u64>,
    /// Corrected read errors of its member since the array started, or since it became a member.
    pub read_errors: u64,
}

impl Array {
    /// The array's shape, as large as it is now.
    pub fn config(&self) -> &Arc<ArrayConfig> {
        self.shared.configs.newest()
    }

    /// What has happened since it was assembled.
    pub fn counters(&self) -> &Counters {
        &self.shared.counters
    }

    /// Corrected read errors of the members.
    pub fn read_errors(&self) -> &ReadErrors {
        &self.shared.read_errors
    }

    /// How long members are waited for from now on. Without redundancy nothing can be raced, and nobody is taken out.
    pub fn set_patience(&self, patience: Patience) {
        self.shared.patience.set(patience);
    }

    /// Whether it was started for reading only.
    pub fn is_read_only(&self) -> bool {
        self.shared.is_read_only
    }

    /// Whether nothing can be served any more.
    pub fn is_frozen(&self) -> bool {
        self.shared.is_frozen()
    }

    /// The slots as they are now.
    pub fn slots(&self) -> Vec<SlotStatus> {
        let members = &self.shared.members;
        let status = |slot: usize| {
            let [own, incoming] = members.attached(slot);
            SlotStatus {
                slot,
                device: own.or(incoming).map(|attached| attached.device.name().to_owned()),
                state: members.state(slot),
                filled: members.is_filling(slot).then(|| members.cursor(slot)),
                read_errors: self.shared.read_errors.total(slot),
            }
        };
        (0..self.shared.config.geometry.members()).map(status).collect()
    }

    /// The table as it was committed last.
    pub fn table(&self) -> Table {
        self.shared.table()
    }

    /// Whether the array survives the loss of the members of all these slots.
    pub fn can_lose(&self, slots: &[usize]) -> bool {
        self.shared.can_lose_all(slots)
    }

    /// Takes a member out, as if it had failed. Returns when every live member knows. On a core.
    ///
    /// # Errors
    /// [`IoError::Invalid`] when the array would not survive it; what the commit says.
    pub async fn fail(&self, slot: usize) -> IoResult {
        if slot >= self.shared.config.geometry.members() || !self.shared.can_lose(slot) {
            return Err(IoError::Invalid);
        }
        self.owner();
        self.shared.take_out(slot, Which::Own, Reason::Failed).await
    }

    /// Starts to fill a slot with a device: an empty slot's strips are computed from the others', a live one's are
    /// copied. The device's superblock is written; it counts as a member once it is full. On a core.
    ///
    /// # Errors
    /// When the device cannot take part; [`IoError::Invalid`] when the slot is being filled already, or its member is live and
    /// the array has no redundancy. While the array changes
    /// its shape only an empty slot can be filled, and only between two windows.
    pub async fn start_filling(&self, slot: usize, uuid: Uuid, incoming: Attached) -> IoResult {
        let members = &self.shared.members;
        let is_copy = slot < members.count() && members.is_live(slot);
        // Writes of an array without redundancy go to the live member alone, and no map tells what was written.
        let can_copy = !self.is_reshaping() && self.shared.config.geometry.parity > 0;
        if slot >= members.count() || members.is_filling(slot) || is_copy && !can_copy {
            return Err(IoError::Invalid);
        }
        self.owner();
        self.shared
            .at_home(move |home| Box::pin(async move { home.start_filling(slot, uuid, incoming, 0).await }))
            .await
    }

    /// Ends the array's service cleanly: waits for what is under way, and commits that nothing was. Requests that
    /// come later wait for ever, so whoever uses it is gone by then. On a core.
    ///
    /// # Errors
    /// When the commit fails; the array is recovered at its next start then.
    pub async fn stop(&self) -> IoResult {
        let Some(home) = self.shared.home() else { return Ok(()) };
        let result = self.shared.at_home(|home| Box::pin(async move { home.stop().await })).await;
        let _ = home;
        result
    }

    /// This core's part of the array, made when it is first asked for.
    fn owner(&self) -> Rc<Owner> {
        if let Some(owner) = registry::find(self.shared.id) {
            return owner;
        }
        let old = self.old.as_ref().map(|old| Rc::new(Owner::new(old.clone(), None)));
        if let (Some(old), Some(crossing)) = (&old, &self.shared.crossing) {
            registry::add(old.shared.id, old.clone());
            crossing.add_front(old.core.remote());
        }
        let owner = Rc::new(Owner::new(self.shared.clone(), old));
        registry::add(self.shared.id, owner.clone());
        let core = owner.core.remote();
        if self.shared.claim_home(&core) {
            Home::settle(&owner);
        }
        let owners = self.shared.owner_cores();
        // A core that joins brings a new log, which is written; and without writes there is little to own.
        let has_work = self.shared.config.geometry.parity > 0 && !self.shared.is_read_only;
        if has_work && !owners.iter().any(|other| other.is_same(&core)) {
            self.join(&owner, core);
        }
        owner
    }

    /// Has a core own stripes, some time soon; until then it sends its writes to others.
    fn join(&self, owner: &Rc<Owner>, core: CoreRef) {
        let shared = self.shared.clone();
        owner.core.spawn(async move {
            let join = move |home: Rc<Home>| -> remote::LocalFuture<IoResult> {
                Box::pin(async move {
                    home.drop_dead_owners().await?;
                    home.join(core).await
                })
            };
            let joined = shared.at_home(join).await;
            if let Err(error) = joined {
                tracing::warn!(array = shared.config.name, %error, "a core cannot own stripes");
            }
        });
    }
}

impl Device for Array {
    fn name(&self) -> &str {
        &self.name
    }

    fn limits(&self) -> Limits {
        self.shared.limits.get()
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
}

impl Drop for Array {
    fn drop(&mut self) {
        for id in std::iter::once(&self.shared).chain(&self.old).map(|shared| shared.id) {
            registry::remove(id);
            for core in self.shared.owner_cores().iter() {
                // A core that has ended has forgotten it already.
                let _ = core.try_run(Box::new(move |_| registry::remove(id)));
            }
        }
    }
}
