//! An array with its keeper (`raid::jobs`), which fills, syncs and scrubs in the background while
//! the workload runs.

use crate::array::{RunningArray, text};
use crate::disk::SimDisk;
use crate::plan::Shape;
use crate::subject::{Local, Running, Scrubbed};
use block::Device;
use raid::Geometry;
use raid::array::members::Attached;
use raid::jobs::{JobError, Jobs, Options};
use raid::metadata::intent_bitmap::NEED_SYNC;
use raid::metadata::{Found, read_superblock};
use reactor::Core;
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// Nanoseconds between two attempts to give the keeper a disk.
const ATTEMPT_NS: u64 = 100_000_000;
/// Attempts after which the keeper counts as one that does not take the disk.
const MOST_ATTEMPTS: usize = 100;

/// Syncs after which a region counts as one that the keeper leaves open. A block may become
/// unreadable after a sync has mended it and before the sync reads it again.
const MOST_SYNCS: usize = 3;

/// See the module.
pub(crate) struct Kept {
    array: RunningArray,
    options: Options,
    jobs: RefCell<Rc<Jobs>>,
}

impl Kept {
    /// Starts the keeper on the current core, with the spares that were found.
    pub(crate) fn new(
        array: RunningArray,
        shape: &Shape,
        spares: &[(Arc<dyn Device>, Found)],
    ) -> Result<Kept, block::DeviceError> {
        let strip_bytes = shape.geometry.strip_bytes as usize;
        let options = Options {
            window_bytes: 2 * strip_bytes * shape.members(),
            checkpoint_ns: 20 * shape.latency_ns,
            checkpoint_bytes: 2 * strip_bytes as u64,
            ..Options::default()
        };
        let jobs = array.array.keep(options.clone())?;
        for (device, found) in spares {
            // One that does not fit is left alone, as the daemon does.
            let _ = jobs.add_found_spare(device.clone(), found);
        }
        Ok(Kept { array, options, jobs: RefCell::new(Rc::new(jobs)) })
    }

    fn jobs(&self) -> Rc<Jobs> {
        self.jobs.borrow().clone()
    }

    /// Another keeper begins, on that core. It finds the array's spares among the disks.
    async fn keep_on(&self, core: &Core, disks: &[SimDisk]) -> Result<(), String> {
        let kept = core.with_current(|| self.array.array.keep(self.options.clone()));
        let jobs = Rc::new(kept.map_err(|error| error.to_string())?);
        *self.jobs.borrow_mut() = jobs.clone();
        for disk in disks {
            let device: Arc<dyn Device> = Arc::new(disk.clone());
            let Ok(channel) = device.open_channel() else { continue };
            let found = read_superblock(disk.name(), &*channel, disk.limits().capacity).await;
            if let Ok(found) = found {
                // The array refuses a disk that it has already.
                let _ = jobs.add_found_spare(device, &found);
            }
        }
        Ok(())
    }

    /// Whether the disk is the live member in a slot.
    fn is_live(&self, slot: usize, disk: &SimDisk) -> bool {
        let [own, _] = self.array.array.members().attached(slot);
        self.array.live()[slot] && own.is_some_and(|own| own.device.name() == disk.name())
    }

    /// Gives the keeper a disk for a slot: a former member if it is one.
    async fn give(&self, slot: usize, disk: &SimDisk) -> Result<(), JobError> {
        let device: Arc<dyn Device> = Arc::new(disk.clone());
        match self.jobs().re_add(device.clone()).await {
            Ok(_) => Ok(()),
            Err(JobError::Busy(slot)) => Err(JobError::Busy(slot)),
            Err(_) => self.jobs().replace(slot, device).await,
        }
    }

    async fn fill(&self, slot: usize, disk: &SimDisk) -> Result<(), String> {
        let mut last = String::new();
        for _ in 0..MOST_ATTEMPTS {
            self.jobs().idle().await;
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
        Err(format!("the keeper does not fill slot {slot}: {last}; {:?}", self.jobs().status()))
    }

    /// The keeper finds all disks when it looks, and fills them in one pass.
    async fn fill_all(&self, disks: &[(usize, SimDisk)]) -> Result<(), String> {
        self.jobs().pause();
        for (slot, disk) in disks {
            let _ = self.jobs().replace(*slot, Arc::new(disk.clone())).await; // else it is given below
        }
        self.jobs().resume();
        for (slot, disk) in disks {
            self.fill(*slot, disk).await?;
        }
        Ok(())
    }

    async fn sync(&self) -> Result<(), String> {
        let is_open = || self.array.array.count_regions(NEED_SYNC) > 0 && !self.live().contains(&false);
        for _ in 0..MOST_SYNCS {
            self.jobs().idle().await;
            if !is_open() {
                return Ok(());
            }
        }
        Err(format!("the keeper leaves regions open: {:?}", self.jobs().status()))
    }

    /// The keeper passes over what was never written; that is compared here.
    async fn scrub_all(&self, is_repairing: bool) -> Result<Scrubbed, String> {
        self.jobs().scrub(is_repairing);
        self.jobs().idle().await;
        let report = self.jobs().status().scrub.filter(|report| report.is_repairing == is_repairing);
        let Some(report) = report.filter(|report| report.is_complete) else {
            return Err(format!("the scrub has not ended: {:?}", self.jobs().status()));
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
            self.jobs().idle().await;
            match self.is_reshaping() {
                true => Err(format!("the keeper does not continue: {:?}", self.jobs().status())),
                false => Ok(()),
            }
        })
    }

    fn devices(&self, slot: usize) -> [Option<String>; 2] {
        let name = |attached: Attached| attached.device.name().to_owned();
        self.array.array.members().attached(slot).map(|attached| attached.map(name))
    }

    fn replace_live<'a>(&'a self, slot: usize, disk: &'a SimDisk) -> Local<'a, Result<(), String>> {
        Box::pin(async move {
            self.jobs().replace(slot, Arc::new(disk.clone())).await.map_err(|error| error.to_string())
        })
    }

    fn add_spare<'a>(&'a self, disk: &'a SimDisk, is_global: bool) -> Local<'a, Result<(), String>> {
        Box::pin(async move {
            let device: Arc<dyn Device> = Arc::new(disk.clone());
            let added = match is_global {
                true => self.jobs().add_global_spare(device).await,
                false => self.jobs().add(device).await,
            };
            added.map_err(|error| error.to_string())
        })
    }

    fn spares(&self) -> Vec<String> {
        let status = self.jobs().status();
        status.spares.into_iter().chain(status.global_spares).collect()
    }

    fn jobs_end(&self) -> Local<'_, ()> {
        Box::pin(async move { self.jobs().idle().await })
    }

    fn is_beyond_help(&self) -> bool {
        self.array.array.is_frozen()
    }

    fn stop_keeper(&self) -> Local<'_, ()> {
        Box::pin(async move { self.jobs().stop().await })
    }

    fn start_keeper<'a>(&'a self, core: &'a Core, disks: &'a [SimDisk]) -> Local<'a, Result<(), String>> {
        Box::pin(self.keep_on(core, disks))
    }

    fn read_error_budget(&self) -> Option<u32> {
        Some(self.array.array.table().maintenance.read_errors)
    }

    fn stop(&self) -> Local<'_, Result<(), String>> {
        Box::pin(async move {
            self.jobs().stop().await;
            self.array.array.stop().await.map_err(text("stop"))
        })
    }
}
