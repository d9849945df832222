//! Streams: devices that are qcow2 images get the data of their backing files, as jobs, while
//! exports serve them.
//!
//! ```text
//!   record set ─► data copied ─► header without the backing file ─► record removed
//! ```
//!
//! A start continues from the beginning: clusters that were copied before have a place, and are
//! passed over.

use super::change::Effects;
use super::jobs::check_pace;
use super::snapshots::failed;
use super::work::{Control, Pacer, Stop, Task, join};
use super::{Engine, Live};
use crate::api_error::{ApiError, Kind};
use api::{Job, JobChange, JobKind};
use block::IoError;
use stack::kinds::qcow2::Stream;
use std::sync::Arc;

/// Bytes that are copied at a time.
const PART: u64 = 4 << 20;

impl Live {
    /// Streams in progress, as jobs.
    pub fn stream_jobs(&self) -> impl Iterator<Item = Job> {
        self.jobs_of_devices(JobKind::Stream, &self.streams, &self.state.streams)
    }

    /// The job called `id`.
    pub fn stream_called(&self, id: &str) -> Option<&Task> {
        self.streams.get(id.strip_suffix(".stream")?)
    }

    /// The stream of a device.
    pub fn stream_about(&self, device: &str) -> Option<String> {
        let is_streaming = self.state.streams.contains(device);
        is_streaming.then(|| "the data of its backing file is copied to it".to_owned())
    }
}

impl Engine {
    /// Begins to copy the data of the backing file into the image of a device, at this pace. Then
    /// the image needs no backing file. The device may be in use.
    ///
    /// # Errors
    /// When there is no such device, it is no image that is written, or the image has no backing
    /// file, or internal snapshots.
    pub fn stream_device(&self, name: &str, pace: &JobChange) -> Result<Job, ApiError> {
        let _alone = self.change();
        check_pace(&format!("{name}.{}", JobKind::Stream), pace)?;
        let stream = self.image(name)?.begin_stream().map_err(failed)?;
        let mut effects = Effects::new(self, "device", name);
        effects.remember(
            |state| {
                state.streams.insert(name.to_owned());
            },
            |state| {
                state.streams.remove(name);
            },
        )?;
        self.start_stream(name, stream, pace)?;
        effects.keep();
        self.events.emit("device", name, "streaming", "the data of its backing file is copied to it");
        Ok(self.live().streams[name].control.job_of_device(JobKind::Stream, name))
    }

    /// Continues recorded streams that do not run, if their devices are open. Runs within a change.
    pub(super) fn go_on_with_streams(&self) {
        let devices = self.live().state.streams.clone();
        for device in devices {
            if self.live().streams.contains_key(&device) {
                continue;
            }
            let Ok(image) = self.image(&device) else { continue };
            let continued = match image.has_backing() {
                true => image
                    .begin_stream()
                    .map_err(failed)
                    .and_then(|stream| self.start_stream(&device, stream, &JobChange::default())),
                // The daemon ended before the stream was forgotten.
                false => self.forget_stream(&device, Ok(())),
            };
            if let Err(error) = continued {
                let ended = self.forget_stream(&device, Err(&error.to_string()));
                if let Err(error) = ended {
                    tracing::error!(device, %error, "the end of a stream is not recorded yet");
                }
            }
        }
    }

    fn start_stream(&self, device: &str, stream: Stream, pace: &JobChange) -> Result<(), ApiError> {
        let engine = self.this.upgrade().ok_or_else(|| ApiError::failed("the daemon ends"))?;
        let (name, size) = (device.to_owned(), stream.size());
        let task =
            Task::start("stream", size, move |control| engine.carry_out_stream(&name, stream, control));
        let task = task.map_err(ApiError::failed)?;
        // The work waits for the end of this change.
        task.control.change(pace);
        self.live_mut().streams.insert(device.into(), task);
        Ok(())
    }

    /// The stream, on a thread of its own.
    fn carry_out_stream(&self, device: &str, stream: Stream, control: &Arc<Control>) {
        // The request that started the stream first completes its change.
        drop(self.change());
        let streamed = match self.copy_backing(device, &stream, control) {
            Ok(()) => stream.finish().map_err(|error| Stop::Error(failed(error))),
            Err(stop) => {
                drop(stream);
                Err(stop)
            }
        };
        let _alone = self.change();
        let ended = match streamed {
            Ok(()) => self.forget_stream(device, Ok(())),
            Err(Stop::Later) => Ok(()),
            Err(Stop::Cancelled) => self.forget_stream(device, Err("cancelled")),
            Err(Stop::Error(error)) => self.forget_stream(device, Err(&error.to_string())),
        };
        self.live_mut().streams.remove(device);
        if let Err(error) = ended {
            tracing::error!(device, %error, "the end of a stream is not recorded yet");
        }
    }

    fn copy_backing(&self, device: &str, stream: &Stream, control: &Arc<Control>) -> Result<(), Stop> {
        let mut pacer = Pacer::new(control, self.live().users_of(&[device]));
        let (stream, control) = (stream.clone(), control.clone());
        let copied = self.core().block_on(move |core| async move {
            let channel = stream.open_channel()?;
            loop {
                pacer.wait(&core, &control, PART).await?;
                let left = channel.copy(PART).await;
                let left = left.map_err(|error: IoError| ApiError::failed(format!("copying: {error}")))?;
                control.set_left(left);
                if left == 0 {
                    return Ok(());
                }
            }
        });
        copied.map_err(ApiError::from)?
    }

    /// Ends a stream that does not run any more.
    pub(super) fn forget_stream(&self, device: &str, result: Result<(), &str>) -> Result<(), ApiError> {
        self.commit(|state| {
            state.streams.remove(device);
        })?;
        match result {
            Ok(()) => self.events.emit("device", device, "streamed", "it has no backing file any more"),
            Err(why) => self.events.emit("device", device, "not streamed", why),
        }
        Ok(())
    }

    /// Gives such a job up; `false` when this is none. Data that was copied stays in the image.
    ///
    /// # Errors
    /// When it was done already.
    pub(super) fn cancel_stream(&self, job: &Job) -> Result<bool, ApiError> {
        let thread = {
            let live = self.live();
            let Some(task) = live.stream_called(&job.id) else { return Ok(false) };
            task.cancel()
        };
        join(thread)?;
        match self.image(&job.backing)?.has_backing() {
            true => Ok(true),
            false => Err(ApiError::new(Kind::Stale, format!("job {}: it has ended already", job.id))),
        }
    }
}
