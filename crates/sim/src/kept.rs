//! An array with its keeper (`raid::jobs`), which fills, syncs and scrubs in the background while the workload runs.

use crate::array::{RunningArray, text};
use crate::disk::SimDisk;
use crate::plan::Shape;
use crate::subject::{Local, Running, Scrubbed};
use block::Device;
use raid::Geometry;
use raid::jobs::{JobError, Jobs, Options};
use raid::metadata::region_map::NEED_SYNC;
use std::ops::Range;
use std::sync::Arc;

/// Nanoseconds between two attempts to give the keeper a disk.
const ATTEMPT_NS: u64 = 100_000_000;
/// Attempts after which the keeper counts as one that does not take the disk.
const MOST_ATTEMPTS: usize = 100;

/// See the module.
pub(crate) struct Kept {
    array: RunningArray,
    jobs: Jobs,
}

impl Kept {
    /// Starts the keeper on the current core.
    pub(crate) fn new(array: RunningArray, shape: &Shape) -> Result<Kept, block::DeviceError> {
        let strip_bytes = shape.geometry.strip_bytes as usize;
        let options = Options {
            window_bytes: 2 * strip_bytes * shape.members(),
            checkpoint_ns: 20 * shape.latency_ns,
            checkpoint_bytes: 2 * strip_bytes as u64,
            ..Options::default()
        };
        let jobs = array.array.keep(options)?;
        Ok(Kept { array, jobs })
    }

    /// Whether the disk is the live member in a slot.
    fn is_live(&self, slot: usize, disk: &SimDisk) -> bool {
        let [own, _] = self.array.array.members().attached(slot);
        self.array.live()[slot] && own.is_some_and(|own| own.device.name() == disk.name())
    }

    /// Gives the keeper a disk for a slot: a former member if it is one.
    async fn give(&self, slot: usize, disk: &SimDisk) -> Result<(), JobError> {
        let device: Arc<dyn Device> = Arc::new(disk.clone());
        match self.jobs.re_add(device.clone()).await {
            Ok(_) => Ok(()),
            Err(JobError::Busy(slot)) => Err(JobError::Busy(slot)),
            Err(_) => self.jobs.replace(slot, device).await,
        }
    }

    async fn fill(&self, slot: usize, disk: &SimDisk) -> Result<(), String> {
        let mut last = String::new();
        for _ in 0..MOST_ATTEMPTS {
            self.jobs.idle().await;
            if self.is_live(slot, disk) {
                return Ok(());
            }
            match self.give(slot, disk).await {
                Ok(()) => continue,
                Err(error @ JobError::Busy(_)) => last = error.to_string(),
                Err(error) => return Err(error.to_string()),
            }
            reactor::current().sleep(ATTEMPT_NS).await;
        }
        Err(format!("the keeper does not fill slot {slot}: {last}; {:?}", self.jobs.status()))
    }

    /// The keeper finds all disks when it looks, and fills them in one pass.
    async fn fill_all(&self, disks: &[(usize, SimDisk)]) -> Result<(), String> {
        self.jobs.pause();
        for (slot, disk) in disks {
            let _ = self.jobs.replace(*slot, Arc::new(disk.clone())).await; // else it is given below
        }
        self.jobs.resume();
        for (slot, disk) in disks {
            self.fill(*slot, disk).await?;
        }
        Ok(())
    }

    async fn sync(&self) -> Result<(), String> {
        self.jobs.idle().await;
        let open = self.array.array.count_regions(NEED_SYNC);
        let is_whole = !self.live().contains(&false);
        if open > 0 && is_whole {
            return Err(format!("the keeper leaves {open} regions open"));
        }
        Ok(())
    }

    /// The keeper passes over what was never written; that is compared here.
    async fn scrub_all(&self, is_repairing: bool) -> Result<Scrubbed, String> {
        self.jobs.scrub(is_repairing);
        self.jobs.idle().await;
        let report = self.jobs.status().scrub.filter(|report| report.is_repairing == is_repairing);
        let Some(report) = report.filter(|report| report.is_complete) else {
            return Err(format!("the scrub has not ended: {:?}", self.jobs.status()));
        };
        let named = report.wrong_strips.iter().map(|(slot, _)| *slot).collect();
        let mut scrubbed = Scrubbed { stripes: report.mismatched_stripes, named };
        if report.skipped > 0 {
            let rest = self.array.scrub(is_repairing).await?;
            // Mended stripes fit now; those that were only compared are counted there, too.
            scrubbed.stripes = if is_repairing { scrubbed.stripes + rest.stripes } else { rest.stripes };
            scrubbed.named.extend(rest.named);
        }
        Ok(scrubbed)
    }
}

impl Running for Kept {
    fn device(&self) -> Arc<dyn Device> {
        self.array.device()
    }

    fn geometry(&self) -> Option<Geometry> {
        self.array.geometry()
    }

    fn live(&self) -> Vec<bool> {
        self.array.live()
    }

    fn fail(&self, slot: usize) -> Local<'_, Result<(), String>> {
        self.array.fail(slot)
    }

    fn add<'a>(&'a self, slot: usize, disk: &'a SimDisk) -> Local<'a, Result<(), String>> {
        Box::pin(self.fill(slot, disk))
    }

    fn add_all<'a>(&'a self, disks: &'a [(usize, SimDisk)]) -> Local<'a, Result<(), String>> {
        Box::pin(self.fill_all(disks))
    }

    fn scrub(&self, repair: bool) -> Local<'_, Result<Scrubbed, String>> {
        Box::pin(self.scrub_all(repair))
    }

    fn strips_at(&self, slot: usize) -> Option<Range<u64>> {
        self.array.strips_at(slot)
    }

    fn resync(&self) -> Local<'_, Result<(), String>> {
        Box::pin(self.sync())
    }

    fn grow(&self) -> Local<'_, Result<(), String>> {
        self.array.grow()
    }

    fn is_reshaping(&self) -> bool {
        self.array.is_reshaping()
    }

    fn reshape(&self) -> Local<'_, Result<(), String>> {
        Box::pin(async move {
            self.jobs.idle().await;
            match self.is_reshaping() {
                true => Err(format!("the keeper does not go on: {:?}", self.jobs.status())),
                false => Ok(()),
            }
        })
    }

    fn stop(&self) -> Local<'_, Result<(), String>> {
        Box::pin(async move {
            self.jobs.stop().await;
            self.array.array.stop().await.map_err(text("stop"))
        })
    }
}
