//! Jobs: what arrays are busy with, volumes that move, are made ready or copied, and images that
//! are streamed or committed.

use super::work::{Control, Task, pace, waiting};
use super::{Engine, Live};
use crate::api_error::{ApiError, Kind};
use api::{Job, JobChange, JobKind};
use hosting::vocabulary::job;
use std::collections::{BTreeMap, BTreeSet};

/// Refuses a pace that contradicts itself.
pub(super) fn check_pace(id: &str, change: &JobChange) -> Result<(), ApiError> {
    match (change.min_bytes_per_s, change.max_bytes_per_s) {
        (Some(least), Some(most @ 1..)) if least > most => {
            let detail = format!("job {id}: at least {least} and at most {most} bytes a second");
            Err(ApiError::invalid(detail))
        }
        _ => Ok(()),
    }
}

impl Live {
    /// Jobs of one kind: those of tasks, by device, and those of recorded devices without a task.
    /// A job ends with its task: after its end is recorded, and reported as an event.
    pub(super) fn jobs_of_devices<'a>(
        &'a self,
        kind: JobKind,
        tasks: &'a BTreeMap<String, Task>,
        recorded: &'a BTreeSet<String>,
    ) -> impl Iterator<Item = Job> + 'a {
        let running = tasks.iter().map(move |(device, task)| task.control.job_of_device(kind, device));
        let stopped = recorded.iter().filter(|device| !tasks.contains_key(*device));
        running.chain(
            stopped.map(move |device| {
                waiting(Control::new(0).job_of_device(kind, device), self.base(device).err())
            }),
        )
    }
}

impl Engine {
    /// Every job that runs, is paused, or waits for a missing array or device.
    pub fn jobs(&self) -> Vec<Job> {
        let live = self.live();
        let of_array = |(name, array): (&String, &super::ArrayLive)| {
            let status = array.status();
            let job = |progress| job(name, progress, status.is_paused);
            status.running.iter().map(job).collect::<Vec<_>>()
        };
        let jobs = live.arrays.iter().flat_map(of_array);
        jobs.chain(live.move_jobs())
            .chain(live.zeroing_jobs())
            .chain(live.copy_jobs())
            .chain(live.stream_jobs())
            .chain(live.commit_jobs())
            .collect()
    }

    /// The job with this id.
    ///
    /// # Errors
    /// When there is none: it may have ended.
    pub fn job(&self, id: &str) -> Result<Job, ApiError> {
        self.jobs().into_iter().find(|job| job.id == id).ok_or_else(|| ApiError::not_found("job", id))
    }

    /// Pauses or resumes a job, or changes its pace.
    ///
    /// # Errors
    /// When there is no such job, or the pace is invalid.
    pub fn change_job(&self, id: &str, change: &JobChange) -> Result<Job, ApiError> {
        let _alone = self.change();
        let Job { backing: array, waits_for, .. } = self.job(id)?;
        check_pace(id, change)?;
        if let Some(missing) = waits_for {
            return Err(ApiError::new(Kind::Unavailable, format!("job {id}: it waits: {missing}")));
        }
        if let Some(control) = self.control_of(id) {
            control.change(change);
            return self.changed_job(id);
        }
        let live = self.live();
        let jobs = live.arrays.get(&array).and_then(|array| array.jobs());
        let jobs = jobs.ok_or_else(|| ApiError::not_found("job", id))?;
        match change.is_paused {
            Some(true) => jobs.pause(),
            Some(false) => jobs.resume(),
            None => {}
        }
        if change.max_bytes_per_s.is_some() || change.min_bytes_per_s.is_some() {
            jobs.set_pace(pace(change));
        }
        drop(live);
        self.changed_job(id)
    }

    /// Gives up a job, other than a move, that waits for a missing array or device.
    ///
    /// # Errors
    /// When it has continued in the meantime, or must not end before the object is open.
    pub(super) fn cancel_waiting(&self, job: &Job) -> Result<(), ApiError> {
        let _alone = self.change();
        let job = self.job(&job.id)?;
        if job.waits_for.is_none() {
            return Err(ApiError::new(Kind::Stale, format!("job {}: it runs again", job.id)));
        }
        let cancelled = match job.kind {
            JobKind::Stream => self.forget_stream(&job.backing, Err("cancelled")),
            JobKind::Commit => self.forget_commit(&job.backing, "cancelled"),
            _ => self.cancel_waiting_copy(&job),
        };
        cancelled.map_err(|error| error.about(&format!("job {}", job.id)))
    }

    fn changed_job(&self, id: &str) -> Result<Job, ApiError> {
        let job = self.job(id)?;
        let text = if job.is_paused { "paused" } else { "resumed" };
        self.events.emit("job", id, "changed", text);
        Ok(job)
    }
}
