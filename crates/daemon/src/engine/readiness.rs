//! Readiness of the daemon, and changes in flight: what `GET /v1/system` reports, and what a stop
//! waits for.

use super::{Engine, Live};
use api::{StartProgress, SystemState};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The state of the daemon, shared with the API.
#[derive(Default)]
pub struct Readiness {
    inner: Mutex<Inner>,
    /// Notified when the last change in flight has been answered.
    idle: Condvar,
}

#[derive(Default)]
struct Inner {
    phase: Phase,
    changes: usize,
}

enum Phase {
    Starting(Option<Step>),
    Ready,
    Stopping,
}

impl Default for Phase {
    fn default() -> Phase {
        Phase::Starting(None)
    }
}

struct Step {
    text: String,
    volume: Option<String>,
    done: usize,
    total: usize,
}

impl Readiness {
    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A change in flight, from the request to the answer.
pub struct InFlight(Arc<Readiness>);

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut inner = self.0.inner();
        inner.changes -= 1;
        if inner.changes == 0 {
            self.0.idle.notify_all();
        }
    }
}

impl Engine {
    /// Notes that a step of the configuration begins: `done` of `total` steps are complete, and
    /// `volume` is the volume that the step makes or grows.
    pub fn begin_step(&self, text: String, volume: Option<&str>, done: usize, total: usize) {
        let mut inner = self.readiness.inner();
        if let Phase::Starting(step) = &mut inner.phase {
            *step = Some(Step { text, volume: volume.map(str::to_owned), done, total });
        }
    }

    /// Notes that the configuration is applied.
    pub fn set_ready(&self) {
        let mut inner = self.readiness.inner();
        if let Phase::Starting(_) = inner.phase {
            inner.phase = Phase::Ready;
        }
    }

    /// Refuses changes from now on, and waits until those in flight are answered, for `grace` at
    /// most.
    pub fn begin_stop(&self, grace: Duration) {
        let mut inner = self.readiness.inner();
        inner.phase = Phase::Stopping;
        let waited = self.readiness.idle.wait_timeout_while(inner, grace, |inner| inner.changes > 0);
        let left = waited.unwrap_or_else(PoisonError::into_inner).0.changes;
        if left > 0 {
            tracing::info!(changes = left, "stopping with changes in flight");
        }
    }

    /// Counts a change as in flight as long as the result lives; `None` when the daemon stops.
    pub fn begin_change(&self) -> Option<InFlight> {
        let mut inner = self.readiness.inner();
        if let Phase::Stopping = inner.phase {
            return None;
        }
        inner.changes += 1;
        Some(InFlight(self.readiness.clone()))
    }

    /// The state, and the progress while it is `starting`.
    pub(super) fn readiness(&self, live: &Live) -> (SystemState, Option<StartProgress>) {
        let inner = self.readiness.inner();
        let step = match &inner.phase {
            Phase::Starting(Some(step)) => step,
            Phase::Starting(None) => return (SystemState::Starting, None),
            Phase::Ready => return (SystemState::Ready, None),
            Phase::Stopping => return (SystemState::Stopping, None),
        };
        let job = live.zeroing_jobs().find(|job| job.volume.is_some() && job.volume == step.volume);
        let progress = StartProgress {
            step: step.text.clone(),
            done_steps: step.done,
            total_steps: step.total,
            done_bytes: job.as_ref().map(|job| job.done_bytes),
            total_bytes: job.as_ref().map(|job| job.total_bytes),
        };
        (SystemState::Starting, Some(progress))
    }
}
