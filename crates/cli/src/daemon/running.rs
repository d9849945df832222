//! An array that a daemon runs, reached over the daemon's API: no other process is asked.

use super::Session;
use crate::error::Error;
use api::{Array, ArrayAction, ArrayState, Done, Job, ScrubWindow, System};
use raid::Uuid;
use raid::admin::report::{self, ArrayReport, JobReport, MemberReport, SpareReport};
use raid::jobs::ScrubReport;
use raid::metadata::{Maintenance, MaintenanceChange, Window};
use reqwest::Method;
use serving::control::protocol::{self, Command};
use std::path::Path;

/// An array of a daemon.
pub struct RunningArray {
    session: Session,
    array: Array,
}

impl RunningArray {
    /// The array that the daemon at `socket` has by this name or UUID, if it has one.
    ///
    /// # Errors
    /// When the daemon does not answer.
    pub fn find(socket: &Path, name: &str) -> Result<Option<RunningArray>, Error> {
        let session = Session::at(socket, false, false, false)?;
        let array = session.client.find(&["arrays", name])?;
        Ok(array.map(|array| RunningArray { session, array }))
    }

    /// Every array of the daemon at `socket`.
    ///
    /// # Errors
    /// As [`RunningArray::find`].
    pub fn all(socket: &Path) -> Result<Vec<Array>, Error> {
        Session::at(socket, false, false, false)?.client.get(&["arrays"])
    }

    /// The array.
    pub fn array(&self) -> &Array {
        &self.array
    }

    /// Carries a command out.
    ///
    /// # Errors
    /// With the daemon's refusal.
    pub fn ask(&self, command: Command) -> Result<protocol::Done, Error> {
        let Array { name, uuid, .. } = &self.array;
        let client = &self.session.client;
        let pid = client.get::<System>(&["system"])?.pid;
        let action = action(command).ok_or_else(|| {
            Error::Runtime(format!(
                "array {name}: freestoned (process {pid}) runs it and serves other devices too: \
                 freestone array delete --keep {name} ends the array alone"
            ))
        })?;
        let done: Option<Done> = client.change(Method::POST, &["arrays", uuid, "actions"], &action)?;
        let text = done.map(|done| done.text).unwrap_or_default();
        Ok(protocol::Done { text, pid, ..protocol::Done::default() })
    }
}

/// The API's word for a command; `None` for one that it does not have.
fn action(command: Command) -> Option<ArrayAction> {
    Some(match command {
        Command::Show | Command::Stop => return None,
        Command::Fail { members } => ArrayAction::Fail { members },
        Command::Remove { members } => ArrayAction::Remove { members },
        Command::Add { devices, force, global } => ArrayAction::Add { devices, force, global },
        Command::ReAdd { devices } => ArrayAction::ReAdd { devices },
        Command::Replace { member, device, force } => ArrayAction::Replace { member, device, force },
        Command::Grow { size } => ArrayAction::Grow { member_bytes: size },
        Command::Scrub { repair } => ArrayAction::Scrub { repair },
        Command::Set(MaintenanceChange { scrub_period_s, scrub_window, read_errors }) => ArrayAction::Set {
            scrub_period_s,
            scrub_window: scrub_window.map(window),
            read_error_budget: read_errors,
        },
        Command::Pause => ArrayAction::Pause,
        Command::Resume => ArrayAction::Resume,
        Command::Cancel => ArrayAction::Cancel,
    })
}

/// A window as the API has it.
pub fn window(Window { start_minute, end_minute }: Window) -> ScrubWindow {
    ScrubWindow { start_minute, end_minute }
}

/// The array as `freestone array show` prints arrays; `None` when it does not run. The API does not
/// tell its generation.
pub fn report(array: &Array) -> Option<ArrayReport> {
    let state = match array.state {
        ArrayState::Optimal => report::ArrayState::Optimal,
        ArrayState::Degraded => report::ArrayState::Degraded,
        ArrayState::Failed => report::ArrayState::Failed,
        ArrayState::Offline => return None,
    };
    let member = |member: &api::Member| MemberReport {
        slot: member.slot,
        uuid: member.uuid.as_deref().and_then(Uuid::parse),
        device: member.device.clone(),
        state: member.state.clone(),
        reason: member.reason.clone(),
        read_errors: member.read_errors,
    };
    let scrub = |scrub: &api::Scrub| ScrubReport {
        is_repairing: scrub.is_repairing,
        is_complete: scrub.is_complete,
        stripes: scrub.stripes,
        mismatched_rows: scrub.mismatched_rows,
        unreadable: scrub.unreadable,
        ..ScrubReport::default()
    };
    Some(ArrayReport {
        name: array.name.clone(),
        uuid: Uuid::parse(&array.uuid).unwrap_or_default(),
        level: array.level.clone(),
        consistency: array.consistency.clone(),
        groups: array.groups,
        data: array.data,
        parity: array.parity,
        strip_bytes: array.strip_bytes,
        block_size: array.block_size,
        capacity: array.capacity,
        reshape: None,
        state,
        is_running: true,
        is_clean: true,
        generation: 0,
        members: array.members.iter().map(member).collect(),
        spares: array
            .spares
            .iter()
            .map(|spare| SpareReport { uuid: None, device: spare.device.clone() })
            .collect(),
        jobs: array.jobs.iter().filter_map(job).collect(),
        maintenance: Maintenance {
            scrub_period_s: array.scrub_period_s,
            scrub_window: array
                .scrub_window
                .map(|ScrubWindow { start_minute, end_minute }| Window { start_minute, end_minute }),
            read_errors: array.read_error_budget,
        },
        scrubbed_ns: array.last_scrub_ns,
        next_scrub_ns: array.next_scrub_ns,
        is_scheduled_scrub: array.is_scheduled_scrub,
        scrub: array.scrub.as_ref().map(scrub),
        contradictions: array.contradictions,
    })
}

/// A job of the array itself; those of its volumes are none.
fn job(job: &Job) -> Option<JobReport> {
    Some(JobReport {
        kind: serde_json::from_value(job.kind.clone().into()).ok()?,
        slot: job.slot,
        done: job.done_bytes,
        total: job.total_bytes,
        rate: job.bytes_per_s,
        is_paused: job.is_paused,
        is_urgent: job.is_urgent,
    })
}
