//! Supervision: virtiofsd, or freestone-fs, is started, watched, restarted where no guest has used
//! it, and ended.
//!
//! ```text
//!   Starting ─ "Waiting for…" ─► Waiting ─ "Client connected" ─► Serving
//!      │ ends: failed               │ ends: started again          │ ends: the guest has left, or has lost its mount
//! ```
//!
//! virtiofsd keeps the table of the guest's inodes in its memory. A new one does not know them, so
//! nothing is restarted once a guest has used it.

use super::ServePlan;
use super::process::{Heard, Process};
use crate::error::Error;
use crate::output::Output;
use crate::serve::notify_service_manager;
use crate::serve::signals::{Signal, Signals};
use exports::stream::SocketPath;
use sd_notify::NotifyState;
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::os::unix::net::UnixListener;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::time::{Duration, Instant};

/// Words of the log of virtiofsd since its first version, and of freestone-fs.
const WAITING: &str = "Waiting for vhost-user socket connection";
const CONNECTED: &str = "Client connected";
const DISCONNECTED: &str = "Client disconnected";
/// Lines of the log that an end is reported with.
const LAST_LINES: usize = 20;
/// A virtiofsd that still runs then is ready, whatever its log says.
const READY_WITHOUT_WORD: Duration = Duration::from_secs(10);
/// Wait for its end after SIGTERM, before it is killed.
const TERMINATION: Duration = Duration::from_secs(10);
/// Wait for a signal after an unexpected end: a service manager may signal all processes at once.
const SAME_MOMENT: Duration = Duration::from_secs(1);
/// Pause before the first restart. Doubles with each further one.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
/// Restarts in a row.
const MAX_RESTARTS: u32 = 5;
/// A virtiofsd that ran so long is no part of a row.
const ROW: Duration = Duration::from_secs(60);

/// Serves until a signal, until the guest has left, or until virtiofsd fails.
///
/// # Errors
/// When the socket cannot be made, when virtiofsd fails, or when a guest has lost its mount.
pub fn run(plan: &ServePlan, output: Output) -> Result<(), Error> {
    let signals = Signals::install()?;
    let (listener, _claim) = listen(plan)?;
    let (sender, events) = mpsc::channel();
    let asked = sender.clone();
    let forward = move || while asked.send(Event::Signal(signals.wait())).is_ok() {};
    reactor::spawn_thread("fs-signals", forward)
        .map_err(|error| Error::Runtime(format!("cannot handle signals: {error}")))?;
    let mut row = Row::default();
    let mut supervisor =
        Supervisor { plan, output, events, sender, listener: Some(listener), was_ready: false };
    loop {
        let run = supervisor.run_once()?;
        let next = row.after(&run, plan);
        supervisor.report(&run, &next);
        let pause = match next {
            Next::Restart(pause) => pause,
            Next::End(Ok(())) => break,
            Next::End(Err(text)) => return Err(Error::Runtime(text)),
        };
        if supervisor.is_stopped_within(pause) {
            break;
        }
    }
    output.event("stopped", "stopped", json!({}));
    Ok(())
}

fn listen(plan: &ServePlan) -> Result<(UnixListener, SocketPath), Error> {
    let path = &plan.socket;
    SocketPath::free(path)
        .and_then(|()| exports::stream::listen(path, plan.permissions, plan.group))
        .map_err(|error| Error::Runtime(format!("socket {}: {error}", path.display())))
}

/// Something to react to.
enum Event {
    Signal(Signal),
    Heard(Heard),
}

/// How far a virtiofsd has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Phase {
    #[default]
    Starting,
    /// For a client.
    Waiting,
    /// A client has connected.
    Serving,
}

/// A virtiofsd from its start to its end.
#[derive(Debug, Default)]
struct Run {
    phase: Phase,
    /// How it has ended.
    status: ExitStatus,
    /// A signal has asked for the end.
    is_stopped: bool,
    lasted: Duration,
    /// The last lines of its log.
    lines: VecDeque<String>,
}

impl Run {
    /// Takes a line of the log; whether it begins another phase.
    fn follow(&mut self, line: String, name: &str) -> bool {
        tracing::debug!("{name}: {line}");
        let before = self.phase;
        self.phase = before.after(&line);
        self.lines.push_back(line);
        if self.lines.len() > LAST_LINES {
            self.lines.pop_front();
        }
        self.phase != before
    }

    /// How it has ended, with the last error of its log, or the last line.
    fn ending(&self) -> String {
        let is_error = |line: &&String| line.contains("ERROR") || line.starts_with("error:");
        let reason = self.lines.iter().rfind(is_error).or(self.lines.back());
        let reason = reason.map(|line| format!(": {line}")).unwrap_or_default();
        format!("{}{reason}", self.status)
    }

    /// Whether the guest has closed the connection. virtiofsd also exits with 0 when it does not
    /// understand the guest.
    fn is_disconnected(&self) -> bool {
        self.status.success() && self.lines.iter().any(|line| line.contains(DISCONNECTED))
    }
}

/// The reaction to an end of virtiofsd.
#[derive(Debug, PartialEq, Eq)]
enum Next {
    /// Start it again after this pause.
    Restart(Duration),
    /// End the program; with an error, fail.
    End(Result<(), String>),
}

/// Counts restarts in a row.
#[derive(Default)]
struct Row {
    restarts: u32,
}

impl Row {
    fn after(&mut self, run: &Run, plan: &ServePlan) -> Next {
        let (ending, name) = (run.ending(), plan.program.name);
        if run.is_stopped {
            return Next::End(Ok(()));
        }
        match run.phase {
            Phase::Starting => Next::End(Err(format!("{name} ended before it was ready: {ending}"))),
            Phase::Serving if run.is_disconnected() => Next::End(Ok(())),
            Phase::Serving => Next::End(Err(format!(
                "{name} ended while a guest used {}: {ending}; the guest has lost its mount: restart the guest, or \
                 start this command again, replace the guest's device, and mount again",
                plan.directory.display()
            ))),
            Phase::Waiting => {
                if run.lasted >= ROW {
                    self.restarts = 0;
                }
                if self.restarts == MAX_RESTARTS {
                    let times = MAX_RESTARTS + 1;
                    return Next::End(Err(format!("{name} ended {times} times in a row: {ending}")));
                }
                self.restarts += 1;
                Next::Restart(FIRST_PAUSE * (1 << (self.restarts - 1)))
            }
        }
    }
}

struct Supervisor<'a> {
    plan: &'a ServePlan,
    output: Output,
    events: Receiver<Event>,
    sender: Sender<Event>,
    /// Open until a client has connected: virtiofsd accepts no second one, which would wait.
    listener: Option<UnixListener>,
    was_ready: bool,
}

impl Supervisor<'_> {
    /// Runs a virtiofsd to its end.
    fn run_once(&mut self) -> Result<Run, Error> {
        let sender = self.sender.clone();
        let hear = move |heard| {
            let _ = sender.send(Event::Heard(heard)); // fails where the program is ending
        };
        let listener = self.listener.as_ref().expect("no restart after a client has connected");
        let mut process = Process::start(self.plan.program.name, &self.plan.command(), listener, hear)?;
        let started = Instant::now();
        let mut run = Run::default();
        let mut deadline = Some(started + READY_WITHOUT_WORD);
        loop {
            match self.next_event(deadline) {
                Some(Event::Heard(Heard::Ended)) => break,
                Some(Event::Heard(Heard::Line(line))) => {
                    if run.follow(line, self.plan.program.name) {
                        deadline = deadline.filter(|_| run.is_stopped);
                        self.announce(run.phase, &process);
                    }
                }
                Some(Event::Signal(Signal::Stop)) if !run.is_stopped => {
                    run.is_stopped = true;
                    deadline = Some(Instant::now() + TERMINATION);
                    notify_service_manager(NotifyState::Stopping);
                    process.terminate();
                }
                Some(Event::Signal(_)) => {}
                None if run.is_stopped => {
                    process.kill();
                    deadline = None;
                }
                None => {
                    let name = self.plan.program.name;
                    tracing::warn!("{name}: its log does not report that it is ready; it runs");
                    run.phase = Phase::Waiting;
                    deadline = None;
                    self.announce(run.phase, &process);
                }
            }
        }
        run.status = process.wait()?;
        run.lasted = started.elapsed();
        let is_unexpected = !run.is_stopped && run.phase != Phase::Starting && !run.is_disconnected();
        run.is_stopped = run.is_stopped || is_unexpected && self.is_stopped_within(SAME_MOMENT);
        Ok(run)
    }

    /// The next event; `None` at the deadline.
    fn next_event(&self, deadline: Option<Instant>) -> Option<Event> {
        let received = match deadline {
            Some(deadline) => self.events.recv_timeout(deadline.saturating_duration_since(Instant::now())),
            None => self.events.recv().map_err(RecvTimeoutError::from),
        };
        received.ok()
    }

    /// Whether a signal asks for the end during this pause.
    fn is_stopped_within(&self, pause: Duration) -> bool {
        let deadline = Instant::now() + pause;
        loop {
            match self.next_event(Some(deadline)) {
                Some(Event::Signal(Signal::Stop)) => {
                    notify_service_manager(NotifyState::Stopping);
                    return true;
                }
                Some(_) => {}
                None => return false,
            }
        }
    }

    fn announce(&mut self, phase: Phase, process: &Process) {
        let pid = process.pid().as_raw_nonzero();
        match phase {
            Phase::Starting => {}
            Phase::Waiting if self.was_ready => {
                let text = format!("{} runs again", self.plan.program.name);
                self.output.event("restarted", text, json!({ "virtiofsd": pid }));
            }
            Phase::Waiting => {
                self.was_ready = true;
                let mut fields = self.plan.json();
                fields["pid"] = json!(std::process::id());
                fields["virtiofsd"] = json!(pid);
                self.output.event("ready", format!("ready: {}", self.plan.line()), fields);
                notify_service_manager(NotifyState::Ready);
            }
            Phase::Serving => {
                if !self.was_ready {
                    self.announce(Phase::Waiting, process);
                }
                self.listener = None;
                self.output.event("connected", "a guest has connected", json!({}));
            }
        }
    }

    /// Says how a virtiofsd has ended, unless that was asked for.
    fn report(&self, run: &Run, next: &Next) {
        if run.is_stopped {
            return;
        }
        if run.phase == Phase::Serving && *next == Next::End(Ok(())) {
            self.output.event("disconnected", "the guest has disconnected", json!({}));
            return;
        }
        let name = self.plan.program.name;
        tracing::error!("{name}: ended with {}; the last lines of its log:", run.status);
        run.lines.iter().for_each(|line| tracing::error!("{name}: {line}"));
        let fields = json!({
            "exit_code": run.status.code(),
            "signal": run.status.signal(),
            "had_guest": run.phase == Phase::Serving,
            "restarts_after_ms": match next {
                Next::Restart(pause) => json!(pause.as_millis() as u64),
                Next::End(_) => Value::Null,
            },
            "log": run.lines,
        });
        self.output.event("ended", format!("{name} ended with {}", run.status), fields);
    }
}

impl Phase {
    /// The phase after a line of the log.
    fn after(self, line: &str) -> Phase {
        match self {
            Phase::Starting if line.contains(WAITING) => Phase::Waiting,
            Phase::Starting | Phase::Waiting if line.contains(CONNECTED) => Phase::Serving,
            phase => phase,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fs::tests::plan;

    /// Exited with this code; negative: killed by the signal.
    fn run(phase: Phase, code: i32, last: &str) -> Run {
        let status = ExitStatus::from_raw(if code < 0 { -code } else { code << 8 });
        let lines = VecDeque::from([last.to_owned()]);
        Run { phase, status, is_stopped: false, lasted: Duration::ZERO, lines }
    }

    fn failure(run: &Run) -> String {
        match Row::default().after(run, &plan("/")) {
            Next::End(Err(text)) => text,
            next => panic!("{next:?}"),
        }
    }

    #[test]
    fn a_virtiofsd_that_no_guest_used_is_restarted_with_growing_pauses_and_not_for_ever() {
        let mut row = Row::default();
        let ended = run(Phase::Waiting, -9, "Waiting");
        for pause in [100, 200, 400, 800, 1600] {
            assert_eq!(row.after(&ended, &plan("/")), Next::Restart(Duration::from_millis(pause)));
        }
        let text = "virtiofsd ended 6 times in a row: signal: 9 (SIGKILL): Waiting";
        assert_eq!(row.after(&ended, &plan("/")), Next::End(Err(text.into())));
        let long = Run { lasted: ROW, ..run(Phase::Waiting, 1, "") };
        assert_eq!(row.after(&long, &plan("/")), Next::Restart(FIRST_PAUSE));
    }

    #[test]
    fn a_virtiofsd_that_a_guest_used_is_never_restarted() {
        let left = run(Phase::Serving, 0, "Client disconnected, shutting down");
        assert_eq!(Row::default().after(&left, &plan("/")), Next::End(Ok(())));
        for (code, last) in [(-9, ""), (1, "Client disconnected"), (0, "Waiting for daemon failed")] {
            let text = failure(&run(Phase::Serving, code, last));
            assert!(text.starts_with("virtiofsd ended while a guest used /: "), "{text}");
            assert!(text.contains(last) && text.contains("the guest has lost its mount"), "{text}");
        }
    }

    #[test]
    fn a_failed_start_is_reported_with_the_reason_in_the_log() {
        let text = failure(&run(Phase::Starting, 1, "Error entering sandbox"));
        assert_eq!(text, "virtiofsd ended before it was ready: exit status: 1: Error entering sandbox");
        let mut with_hint = run(Phase::Starting, 2, "error: unexpected argument '--x' found");
        with_hint.lines.push_back("For more information, try '--help'.".into());
        assert!(failure(&with_hint).ends_with("exit status: 2: error: unexpected argument '--x' found"));
        for phase in [Phase::Starting, Phase::Waiting, Phase::Serving] {
            let stopped = Run { is_stopped: true, ..run(phase, 1, "") };
            assert_eq!(Row::default().after(&stopped, &plan("/")), Next::End(Ok(())));
        }
    }

    #[test]
    fn a_log_tells_when_it_waits_and_when_a_guest_connects() {
        let after = |phase: Phase, line: &str| phase.after(&format!("[2026 INFO  virtiofsd] {line}"));
        assert_eq!(after(Phase::Starting, "Waiting for vhost-user socket connection..."), Phase::Waiting);
        assert_eq!(after(Phase::Waiting, "Client connected, servicing requests"), Phase::Serving);
        assert_eq!(after(Phase::Serving, "Waiting for vhost-user socket connection..."), Phase::Serving);
        assert_eq!(after(Phase::Starting, "other"), Phase::Starting);
    }
}
