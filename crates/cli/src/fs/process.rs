//! A running virtiofsd, which ends with this process.

use crate::error::Error;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{
    Pid, PidfdFlags, Signal, getppid, kill_process, pidfd_open, set_parent_process_death_signal,
};
use std::ffi::OsString;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::os::unix::process::CommandExt;
use std::process::{Child, ChildStderr, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// First argument of the process that becomes virtiofsd. No part of the command line.
pub const EXEC: &str = "exec-virtiofsd";
/// This very program, whatever lies at its path meanwhile.
const SELF: &str = "/proc/self/exe";
/// Longest line of the log that is kept, in bytes.
const MAX_LINE: usize = 1024;
/// Wait for the end of the log after the process has ended: its sandbox has processes of its own,
/// which end with it.
const LINGER: Duration = Duration::from_secs(10);

/// A line of the log, or the end.
#[derive(Debug)]
pub enum Heard {
    /// A line of its log, cut to [`MAX_LINE`].
    Line(String),
    /// It has ended, and nothing more comes.
    Ended,
}

/// A process, which is killed when this is dropped.
pub struct Process {
    name: &'static str,
    child: Child,
}

impl Process {
    /// Starts `command` (program and arguments), which messages call `name`, with the listener as
    /// its standard input. `hear` is called by another thread.
    ///
    /// # Errors
    /// When the process or the thread cannot be started.
    pub fn start(
        name: &'static str,
        command: &[OsString],
        listener: &UnixListener,
        hear: impl Fn(Heard) + Send + 'static,
    ) -> Result<Process, Error> {
        let failed = |error: io::Error| Error::Runtime(format!("{name}: cannot be started: {error}"));
        let listener = OwnedFd::from(listener.try_clone().map_err(failed)?);
        let mut child = Command::new(SELF);
        child.arg(EXEC).arg(std::process::id().to_string()).args(command);
        // RUST_LOG would replace --log-level; the state of the service is not virtiofsd's.
        child.env_remove("RUST_LOG").env_remove("NOTIFY_SOCKET");
        // A terminal's signals are for the supervisor, which ends virtiofsd.
        child.process_group(0);
        child.stdin(listener).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut process = Process { name, child: child.spawn().map_err(failed)? };
        let log = process.child.stderr.take().expect("piped");
        let ended = pidfd_open(process.pid(), PidfdFlags::empty()).map_err(|error| failed(error.into()))?;
        let follow = move || follow(log, &ended, &hear);
        reactor::spawn_thread("fs-log", follow).map_err(failed)?;
        Ok(process)
    }

    /// Its process ID.
    pub fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    /// Asks it to end.
    pub fn terminate(&self) {
        let _ = kill_process(self.pid(), Signal::TERM); // fails where it has ended: it is not reaped yet
    }

    /// Ends it at once.
    pub fn kill(&mut self) {
        let _ = self.child.kill(); // as above
    }

    /// How it has ended. A process that has not is killed.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn wait(&mut self) -> Result<ExitStatus, Error> {
        self.kill();
        let name = self.name;
        self.child.wait().map_err(|error| Error::Runtime(format!("{name}: its end is unknown: {error}")))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
        let _ = self.child.wait();
    }
}

/// Becomes the program, which the kernel ends when the process `arguments[0]` has ended.
///
/// The standard library has no safe way to run code between `fork` and `exec`, so this program is
/// started in between.
pub fn exec(arguments: &[OsString]) -> io::Error {
    let [parent, program, arguments @ ..] = arguments else {
        return io::Error::other(format!("{EXEC} is for freestone alone"));
    };
    if let Err(error) = set_parent_process_death_signal(Some(Signal::KILL)) {
        return error.into();
    }
    // The parent may have ended before the line above.
    let is_orphan = getppid().is_none_or(|pid| parent.to_str() != Some(&pid.as_raw_nonzero().to_string()));
    if is_orphan {
        return io::Error::other("the process that started virtiofsd has ended");
    }
    Command::new(program).args(arguments).exec()
}

/// Passes the log on until the process has ended and all of its log is read.
fn follow(mut log: ChildStderr, ended: &OwnedFd, hear: &dyn Fn(Heard)) {
    let mut lines = Lines::default();
    let mut is_open = true;
    let mut deadline: Option<Instant> = None;
    while is_open || deadline.is_none() {
        let Ok([has_data, has_ended]) = wait(is_open.then_some(&log), ended, deadline) else { break };
        if has_ended && deadline.is_none() {
            deadline = Some(Instant::now() + LINGER);
        }
        if has_data {
            is_open = lines.read(&mut log, hear);
        }
        if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
            break;
        }
    }
    lines.finish(hear);
    hear(Heard::Ended);
}

/// Waits until the log has data or its end, or, unless there is a deadline for that, the process
/// has ended.
fn wait(log: Option<&ChildStderr>, ended: &OwnedFd, deadline: Option<Instant>) -> io::Result<[bool; 2]> {
    let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(2);
    fds.extend(log.map(|log| PollFd::new(log, PollFlags::IN)));
    if deadline.is_none() {
        fds.push(PollFd::new(ended, PollFlags::IN));
    }
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
    let left = left.map(|left| Timespec::try_from(left).expect("LINGER is short"));
    match poll(&mut fds, left.as_ref()) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
    let has_data = log.is_some() && is_ready(&fds[0]);
    Ok([has_data, deadline.is_none() && fds.last().is_some_and(is_ready)])
}

/// Bytes of a log, in lines.
#[derive(Default)]
struct Lines {
    line: Vec<u8>,
}

impl Lines {
    /// Reads once; `false` at the end of the log.
    fn read(&mut self, log: &mut impl Read, hear: &dyn Fn(Heard)) -> bool {
        let mut bytes = [0; 4096];
        let len = match log.read(&mut bytes) {
            Ok(0) => return false,
            Ok(len) => len,
            Err(error) => return error.kind() == io::ErrorKind::Interrupted,
        };
        for byte in &bytes[..len] {
            match byte {
                b'\n' => self.finish(hear),
                _ if self.line.len() < MAX_LINE => self.line.push(*byte),
                _ => {}
            }
        }
        true
    }

    /// Ends the line, if it has anything. Names of a guest's files may be in it: it goes to a
    /// terminal without control characters.
    fn finish(&mut self, hear: &dyn Fn(Heard)) {
        if !self.line.is_empty() {
            let text = String::from_utf8_lossy(&self.line);
            hear(Heard::Line(text.replace(char::is_control, "?")));
            self.line.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[test]
    fn a_log_is_read_in_lines_of_bounded_length() {
        let said = RefCell::new(Vec::new());
        let hear = |heard: Heard| match heard {
            Heard::Line(line) => said.borrow_mut().push(line),
            Heard::Ended => unreachable!(),
        };
        let long = "x".repeat(10_000);
        let text = format!("one\n\ntwo\x1b[2J\n{long}\nlast");
        let (mut log, mut lines) = (text.as_bytes(), Lines::default());
        while lines.read(&mut log, &hear) {}
        lines.finish(&hear);
        assert_eq!(said.into_inner(), ["one", "two?[2J", &long[..MAX_LINE], "last"]);
    }
}
