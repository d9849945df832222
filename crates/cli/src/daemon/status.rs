//! `freestone status`: readiness and problems of a daemon.

use super::table::fields;
use super::{DaemonArgs, Session};
use crate::error::Error;
use api::{HealthProblem, Severity, StartProgress, System, SystemState};
use base::Size;
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Interval between two queries of a daemon that is not ready.
const LOOK: Duration = Duration::from_millis(100);
/// Seconds without an answer after which the command fails.
const SILENCE_S: u64 = 60;
/// Minimum time between two lines of progress.
const REPORT: Duration = Duration::from_secs(5);

/// The arguments of `freestone status`.
#[derive(clap::Args, Debug)]
pub struct StatusArgs {
    /// Wait until the daemon has applied its configuration. Fails after 60 s without an answer, or
    /// after TIMEOUT seconds in total
    #[arg(long, value_name = "TIMEOUT", num_args = 0..=1, require_equals = true)]
    wait: Option<Option<u64>>,
    /// Print problems only, and exit as monitoring plugins do: 0 none, 1 warnings, 2 critical
    /// problems, 3 no answer
    #[arg(long)]
    check: bool,
    #[command(flatten)]
    pub(crate) daemon: DaemonArgs,
}

impl StatusArgs {
    /// Carries the command out.
    ///
    /// # Errors
    /// When the daemon does not answer, or is not ready in time.
    pub fn run(&self) -> Result<ExitCode, Error> {
        let code = self.report();
        match code {
            Err(error) if self.check => {
                eprintln!("freestone: {error}");
                Ok(ExitCode::from(UNKNOWN))
            }
            code => code,
        }
    }

    fn report(&self) -> Result<ExitCode, Error> {
        let session = Session::new(&self.daemon)?;
        let system = match self.wait {
            None => ask(&session, Duration::from_secs(SILENCE_S))?,
            Some(timeout) => wait(&session, timeout.map(Duration::from_secs))?,
        };
        let problems = || session.client.get::<Vec<HealthProblem>>(&["health"]);
        if self.check {
            let problems = problems()?;
            session.print(&problems, || list(&problems));
            return Ok(ExitCode::from(severity(&problems)));
        }
        session.print(&system, || show(&system));
        Ok(ExitCode::SUCCESS)
    }
}

/// Exit code of `--check` without an answer.
const UNKNOWN: u8 = 3;

/// Exit code of `--check`.
fn severity(problems: &[HealthProblem]) -> u8 {
    let code = |problem: &HealthProblem| match problem.severity {
        Severity::Warning => 1,
        Severity::Critical => 2,
    };
    problems.iter().map(code).max().unwrap_or(0)
}

fn list(problems: &[HealthProblem]) -> String {
    let line = |problem: &HealthProblem| format!("{}: {}", problem.severity, problem.text);
    match problems {
        [] => "no problems".into(),
        problems => problems.iter().map(line).collect::<Vec<_>>().join("\n"),
    }
}

fn ask(session: &Session, within: Duration) -> Result<System, Error> {
    Ok(session.client.get_within(&["system"], within)?)
}

/// Asks until the daemon is ready; its progress goes to standard error.
fn wait(session: &Session, timeout: Option<Duration>) -> Result<System, Error> {
    let began = Instant::now();
    let (mut heard, mut said) = (began, None::<(Instant, String)>);
    loop {
        let left = timeout.map_or(Duration::MAX, |timeout| timeout.saturating_sub(began.elapsed()));
        let answer = ask(session, left.clamp(LOOK, Duration::from_secs(SILENCE_S)));
        let text = match &answer {
            Ok(system) if system.state == SystemState::Ready => return answer,
            Ok(system) => {
                heard = Instant::now();
                progress(system)
            }
            Err(error) => error.to_string(),
        };
        let limit = timeout.filter(|timeout| began.elapsed() >= *timeout).map(|timeout| timeout.as_secs());
        let silence = (heard.elapsed() >= Duration::from_secs(SILENCE_S)).then_some(SILENCE_S);
        if let Some(seconds) = limit.or(silence) {
            return Err(Error::Runtime(format!("not ready within {seconds} s: {text}")));
        }
        let is_due = said.as_ref().is_none_or(|(at, before)| at.elapsed() >= REPORT && text != *before);
        if answer.is_ok() && is_due {
            eprintln!("{text}");
            said = Some((Instant::now(), text));
        }
        std::thread::sleep(LOOK);
    }
}

/// One line about a daemon that is not ready: `starting: step 2 of 5, make volume v1 …: 64 MiB of
/// 256 MiB zeroed`.
fn progress(system: &System) -> String {
    let Some(start) = &system.start else { return system.state.name().to_owned() };
    let StartProgress { step, done_steps, total_steps, done_bytes, total_bytes } = start;
    let zeroed = match (done_bytes, total_bytes) {
        (Some(done), Some(total)) => format!(": {} of {} zeroed", Size(*done), Size(*total)),
        _ => String::new(),
    };
    format!("{}: step {} of {total_steps}, {step}{zeroed}", system.state.name(), done_steps + 1)
}

fn show(system: &System) -> String {
    let state =
        if system.state == SystemState::Starting { progress(system) } else { system.state.name().into() };
    fields(&[
        ("state", state),
        ("version", system.version.clone()),
        ("process", system.pid.to_string()),
        ("state-dir", system.state_dir.clone()),
        ("generation", system.generation.to_string()),
        ("cores", system.cores.len().to_string()),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn starting(done_bytes: Option<u64>) -> System {
        let start = StartProgress {
            step: "make volume v1 of 4194304 bytes on data".into(),
            done_steps: 1,
            total_steps: 5,
            done_bytes,
            total_bytes: done_bytes.map(|_| 4 << 20),
        };
        System {
            version: "1".into(),
            host: String::new(),
            role: None,
            state: SystemState::Starting,
            start: Some(start),
            pid: 1,
            started_ns: 0,
            user: 0,
            capabilities: Vec::new(),
            state_dir: "/s".into(),
            generation: 0,
            cores: Vec::new(),
        }
    }

    #[test]
    fn progress_names_the_step_and_the_bytes_that_are_zeroed() {
        let step = "starting: step 2 of 5, make volume v1 of 4194304 bytes on data";
        assert_eq!(progress(&starting(None)), step);
        assert_eq!(progress(&starting(Some(1 << 20))), format!("{step}: 1 MiB of 4 MiB zeroed"));
        assert_eq!(
            progress(&System { start: None, state: SystemState::Stopping, ..starting(None) }),
            "stopping"
        );
    }
}
