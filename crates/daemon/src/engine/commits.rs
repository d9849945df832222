//! Commits: devices that are qcow2 images give their data to their backing files, as jobs, while
//! exports serve them. Then the device is the backing file.
//!
//! ```text
//!   record set ─► backing file opened for writing ─► copied, and what is written meanwhile again
//!       ─► clients wait ─► rest copied, flushed ─► the device's record names the backing file, twice
//!       ─► clients use it
//! ```
//!
//! - The image alone counts until the record of its device names the backing file, and from then on
//!   the backing file alone. Both are the same at that moment, because clients wait.
//! - Until then the image has all that changes in its backing file, and hides it: nothing is copied
//!   that the image has no place for. So a crash, or a commit that ends early, changes no byte of
//!   the disk. A start copies from the beginning.
//! - The state before the last change names the backing file, too. So a damaged state file does not
//!   bring the image back. An error of either change means that the image counts: that is durable
//!   before clients continue.
//! - The device keeps its name, and the name from which exports derive the identity of disks.

use super::bases::Base;
use super::change::Effects;
use super::jobs::check_pace;
use super::moves::RETRY;
use super::snapshots::failed;
use super::work::{Control, Pacer, Stop, Task, join};
use super::{Engine, Live};
use crate::api_error::{ApiError, Kind};
use crate::state::DeviceRecord;
use ::moves::Parts;
use api::{Job, JobChange, JobKind};
use block::{Device, DeviceError, IoError};
use layers::migrate::Migration;
use stack::kinds::device::open_with_image;
use stack::kinds::member::member;
use stack::kinds::qcow2::{self, Commit, CommitChannel, Opened, WritersAllowed};
use std::ops::Range;
use std::sync::Arc;
use std::time::Instant;

/// A commit whose backing file is open. Dropped in this order, it leaves the image in its place.
struct Begun {
    migration: Migration,
    /// The backing file, open for writing.
    backing: Opened,
    writers: WritersAllowed,
    commit: Commit,
    /// The image.
    image: Arc<dyn Device>,
    /// The record of the device afterwards.
    record: DeviceRecord,
}

/// The parts that the image has.
struct OfImage(CommitChannel);

impl Parts for OfImage {
    async fn next(&self, range: Range<u64>) -> Result<Range<u64>, IoError> {
        self.0.next(range).await
    }
}

impl Live {
    /// Commits in progress, as jobs.
    pub fn commit_jobs(&self) -> impl Iterator<Item = Job> {
        self.jobs_of_devices(JobKind::Commit, &self.commits, &self.state.commits)
    }

    /// The job called `id`.
    pub fn commit_called(&self, id: &str) -> Option<&Task> {
        self.commits.get(id.strip_suffix(".commit")?)
    }

    /// The commit of a device.
    pub fn commit_about(&self, device: &str) -> Option<String> {
        let is_committed = self.state.commits.contains(device);
        is_committed.then(|| format!("its data is copied to its backing file (job {device}.commit)"))
    }

    fn device_record(&self, name: &str) -> Result<&DeviceRecord, ApiError> {
        let found = self.state.devices.iter().find(|device| device.name == name);
        found.ok_or_else(|| ApiError::not_found("device", name))
    }
}

impl Engine {
    /// Begins to copy the data of a device's image to its backing file, at this pace. Then the
    /// device is the backing file. The device may be in use.
    ///
    /// # Errors
    /// When there is no such device, or it is no image that is written. When the image has no
    /// backing file, or one that cannot take its place, or it has internal snapshots or dirty
    /// bitmaps.
    pub fn commit_device(&self, name: &str, pace: &JobChange) -> Result<Job, ApiError> {
        let _alone = self.change();
        check_pace(&format!("{name}.{}", JobKind::Commit), pace)?;
        let begun = self.begin_commit(name)?;
        let mut effects = Effects::new(self, "device", name);
        effects.remember(
            |state| {
                state.commits.insert(name.to_owned());
            },
            |state| {
                state.commits.remove(name);
            },
        )?;
        let spec = begun.record.spec.clone();
        self.start_commit(name, begun, pace)?;
        effects.keep();
        self.events.emit("device", name, "committing", format!("to {spec}"));
        Ok(self.live().commits[name].control.job_of_device(JobKind::Commit, name))
    }

    /// Opens the backing file of a device's image for writing. Within a change.
    fn begin_commit(&self, name: &str) -> Result<Begun, ApiError> {
        let image = self.image(name)?;
        let (base, record, about) = {
            let live = self.live();
            (live.base(name)?.clone(), live.device_record(name)?.clone(), live.copy_about(name))
        };
        let about = about.or_else(|| base.pool.as_ref().map(|_| "a pool of volumes is on it".into()));
        if let Some(about) = about {
            return Err(ApiError::new(Kind::InUse, format!("{name}: {about}")));
        }
        let commit = image.begin_commit().map_err(failed)?;
        let overlay = member(&record.spec, true, false)?;
        let (Some(file), Some(options)) = (&base.backing_file, overlay.options::<qcow2::Options>()) else {
            return Err(ApiError::invalid(format!("device {name}: the image has no backing file")));
        };
        let committed = options.committed()?;
        self.check_is_open(&committed.spec)?;
        let config = member(&committed.spec, true, false)?;
        let writers = file.allow_writers();
        committed.grow(image.limits().capacity)?;
        let backing = open_with_image(&committed.spec, &*config)?;
        // A kill may have ended a commit before. Data that only the backing file has since then
        // must not be lost after the next flush of clients.
        hosting::flush(&backing.device, &self.core())?;
        let migration = base.served.begin(backing.device.clone(), true)?;
        let device_name = Some(base.served.name().to_owned());
        let record = DeviceRecord { spec: committed.spec, device_name, ..record };
        Ok(Begun { migration, backing, writers, commit, image: base.device, record })
    }

    /// Continues recorded commits that do not run, if their devices are open. Runs within a change.
    pub(super) fn go_on_with_commits(&self) {
        let devices = self.live().state.commits.clone();
        for device in devices {
            if self.live().commits.contains_key(&device) || self.live().base(&device).is_err() {
                continue;
            }
            let continued = self
                .begin_commit(&device)
                .and_then(|begun| self.start_commit(&device, begun, &JobChange::default()));
            if let Err(error) = continued {
                self.note_failed_commit(&device, &error.to_string());
            }
        }
    }

    fn start_commit(&self, device: &str, begun: Begun, pace: &JobChange) -> Result<(), ApiError> {
        let engine = self.this.upgrade().ok_or_else(|| ApiError::failed("the daemon ends"))?;
        let (name, size) = (device.to_owned(), begun.image.limits().capacity);
        let task = Task::start("commit", size, move |control| engine.carry_out_commit(&name, begun, control));
        let task = task.map_err(ApiError::failed)?;
        // The work waits for the end of this change.
        task.control.change(pace);
        self.live_mut().commits.insert(device.into(), task);
        Ok(())
    }

    /// The commit, on a thread of its own.
    fn carry_out_commit(&self, device: &str, begun: Begun, control: &Arc<Control>) {
        // The request that started the commit first completes its change.
        drop(self.change());
        let pacer = Pacer::new(control, self.live().users_of(&[device]));
        let copied = self.copy_image(&begun, control, Some(pacer));
        let _alone = self.change();
        let committed = match copied {
            Ok(()) => self.switch_to_backing_file(begun, control),
            Err(stop) => {
                drop(begun);
                Err(stop)
            }
        };
        match committed {
            Ok(()) => {
                self.refresh_one(device);
                self.events.emit("device", device, "committed", "it is its former backing file");
            }
            Err(Stop::Later) => {}
            Err(Stop::Cancelled) => self.note_failed_commit(device, "cancelled"),
            Err(Stop::Error(error)) => self.note_failed_commit(device, &error.to_string()),
        }
        self.live_mut().commits.remove(device);
    }

    /// Copies what the image has: with a pacer all but the last writes of clients, else all.
    fn copy_image(&self, begun: &Begun, control: &Arc<Control>, pacer: Option<Pacer>) -> Result<(), Stop> {
        let Begun { migration, backing, commit, image, .. } = begun;
        let (commit, is_last) = (commit.clone(), pacer.is_none());
        let cluster_size = backing.live.as_ref().map_or(1, |backing| backing.cluster_size());
        let open = move || Ok::<_, DeviceError>(OfImage(commit.open_channel(cluster_size)?));
        self.copy_parts(migration.dirty(), [image, &backing.device], open, control, pacer, is_last)
    }

    /// The last part of a commit: clients wait, and then use the backing file. Within a change.
    fn switch_to_backing_file(&self, begun: Begun, control: &Arc<Control>) -> Result<(), Stop> {
        control.check()?;
        let begin = Instant::now();
        begun.migration.hold()?;
        self.copy_image(&begun, control, None)?;
        hosting::flush(&begun.backing.device, &self.core())?;
        let name = begun.record.name.clone();
        let before = self.live().device_record(&name)?.clone();
        if let Err(error) = self.set_device_record(&begun.record) {
            // The file may have the change all the same. Clients wait until the image counts.
            while let Err(error) = self.set_device_record(&before) {
                tracing::error!(device = name, %error, "cannot remember that a commit has failed");
                std::thread::sleep(RETRY);
            }
            return Err(error.into());
        }
        let Begun { migration, backing: Opened { device, live: image, backing_file }, writers, .. } = begun;
        migration.complete();
        // The backing file keeps other writers out by itself.
        writers.keep();
        let mut live = self.live_mut();
        let served = live.base(&name)?.served.clone();
        let base = Base { device, served, pool: None, image, backing_file };
        let former = live.bases.insert(name.clone(), Ok(base));
        drop(live);
        drop(former); // not under the lock: closing may wait
        tracing::info!(device = name, waited = ?begin.elapsed(), "committed");
        Ok(())
    }

    /// Replaces the record of a device, and ends its commit, in both files of the state.
    fn set_device_record(&self, record: &DeviceRecord) -> Result<(), ApiError> {
        self.commit(|state| {
            state.commits.remove(&record.name);
            let of_device = state.devices.iter_mut().filter(|device| device.name == record.name);
            of_device.for_each(|device| device.clone_from(record));
        })?;
        self.commit(|_| {})
    }

    /// As [`Engine::forget_commit`], with a failure in the log.
    fn note_failed_commit(&self, device: &str, why: &str) {
        if let Err(error) = self.forget_commit(device, why) {
            tracing::error!(device, %error, "the end of a commit is not recorded yet");
        }
    }

    /// Forgets a commit that does not run any more, and has failed or is cancelled.
    pub(super) fn forget_commit(&self, device: &str, why: &str) -> Result<(), ApiError> {
        self.commit(|state| {
            state.commits.remove(device);
        })?;
        self.events.emit("device", device, "not committed", why);
        Ok(())
    }

    /// Gives such a job up; `false` when this is none. The image then has its place, and all data.
    ///
    /// # Errors
    /// When it was done already.
    pub(super) fn cancel_commit(&self, job: &Job) -> Result<bool, ApiError> {
        let (thread, before) = {
            let live = self.live();
            let Some(task) = live.commit_called(&job.id) else { return Ok(false) };
            (task.cancel(), live.device_record(&job.backing)?.clone())
        };
        join(thread)?;
        match *self.live().device_record(&job.backing)? == before {
            true => Ok(true),
            false => Err(ApiError::new(Kind::Stale, format!("job {}: it has ended already", job.id))),
        }
    }
}
