//! `freestone job`: work that takes long.

use super::table::table;
use super::{DaemonArgs, Session};
use crate::error::Error;
use crate::parse;
use api::{Job, JobChange};
use base::Size;
use client::Method;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::time::Duration;

/// Interval between two queries of a job.
const LOOK: Duration = Duration::from_millis(500);

/// The arguments of `freestone job`.
#[derive(clap::Args, Debug)]
pub struct JobArgs {
    /// The command
    #[command(subcommand)]
    command: JobCommand,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

/// The commands.
#[derive(Debug, clap::Subcommand)]
enum JobCommand {
    /// List running and paused jobs
    List,
    /// Show a job
    Show {
        /// Name of the job
        id: String,
    },
    /// Pause a job, and all other jobs of its array
    Pause {
        /// Name of the job
        id: String,
    },
    /// Resume a job, and all other jobs of its array
    Resume {
        /// Name of the job
        id: String,
    },
    /// Set the rate of a job; without limits it yields to clients so that their latency does not
    /// suffer
    Rate {
        /// Name of the job
        id: String,
        /// Bytes a second at most, of each member or of the volume
        #[arg(long, value_name = "SIZE", value_parser = parse::value::<Size>)]
        max: Option<Size>,
        /// Bytes a second at least, of each member or of the volume
        #[arg(long, value_name = "SIZE", value_parser = parse::value::<Size>)]
        min: Option<Size>,
    },
    /// Cancel a job: a move (the volume stays), the creation or growth of a volume, a copy, a
    /// stream, a scrub or a replacement
    Cancel {
        /// Name of the job
        id: String,
    },
    /// Wait until one job, or every job, has ended
    Wait {
        /// Name of the job
        id: Option<String>,
    },
}

impl JobArgs {
    /// Carries the command out.
    ///
    /// # Errors
    /// When the daemon refuses the request or does not answer.
    pub fn run(&self) -> Result<(), Error> {
        let session = Session::new(&self.daemon)?;
        let change = |id: &str, change: JobChange| {
            let job = session.client.change::<Job>(Method::PATCH, &["jobs", id], &change)?;
            session.print_change(job, |job| list(std::slice::from_ref(job)));
            Ok(())
        };
        let held = |is_paused| JobChange { is_paused: Some(is_paused), ..JobChange::default() };
        match &self.command {
            JobCommand::List => {
                let jobs: Vec<Job> = session.client.get(&["jobs"])?;
                session.print(&jobs, || list(&jobs));
                Ok(())
            }
            JobCommand::Show { id } => {
                let job: Job = session.client.get(&["jobs", id])?;
                session.print(&job, || list(std::slice::from_ref(&job)));
                Ok(())
            }
            JobCommand::Pause { id } => change(id, held(true)),
            JobCommand::Resume { id } => change(id, held(false)),
            JobCommand::Rate { id, max, min } => {
                let (max, min) = (max.map_or(0, |size| size.0), min.map(|size| size.0));
                change(id, JobChange { max_bytes_per_s: Some(max), min_bytes_per_s: min, is_paused: None })
            }
            JobCommand::Cancel { id } => session.client.delete(&["jobs", id], &[]),
            JobCommand::Wait { id } => wait(&session, id.as_deref()),
        }
    }
}

/// Waits until a job has ended, or all have.
pub(super) fn wait(session: &Session, id: Option<&str>) -> Result<(), Error> {
    let style = "{msg} [{wide_bar}] {bytes}/{total_bytes} {binary_bytes_per_sec} {eta}";
    let style = ProgressStyle::with_template(style).expect("it makes sense").progress_chars("=> ");
    let target = if session.is_json { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(Some(0), target).with_style(style);
    loop {
        let jobs: Vec<Job> = session.client.get(&["jobs"])?;
        let Some(job) = jobs.iter().find(|job| id.is_none_or(|id| id == job.id)) else { break };
        let waits_for = job.waits_for.as_ref();
        let message = waits_for.map_or(job.id.clone(), |missing| format!("{} waits: {missing}", job.id));
        if bar.message() != message {
            bar.reset();
            bar.set_message(message);
        }
        bar.set_length(job.total_bytes);
        bar.set_position(job.done_bytes);
        std::thread::sleep(LOOK);
    }
    bar.finish_and_clear();
    Ok(())
}

fn state(job: &Job) -> String {
    match (&job.waits_for, job.is_paused, job.is_urgent) {
        (Some(missing), ..) => format!("waits: {missing}"),
        (None, true, _) => "paused".to_owned(),
        (None, false, true) => "urgent".to_owned(),
        (None, false, false) => "running".to_owned(),
    }
}

/// Jobs as a table.
pub(super) fn list(jobs: &[Job]) -> String {
    let row = |job: &Job| {
        let percent = job.done_bytes as f64 * 100.0 / job.total_bytes.max(1) as f64;
        [
            job.id.clone(),
            job.kind.to_string(),
            format!("{percent:.1}%"),
            format!("{}/s", Size(job.bytes_per_s)),
            job.eta_s.map(|seconds| format!("{seconds} s")).unwrap_or_default(),
            state(job),
        ]
    };
    table(["JOB", "KIND", "DONE", "RATE", "LEFT", "STATE"], &jobs.iter().map(row).collect::<Vec<_>>())
}
