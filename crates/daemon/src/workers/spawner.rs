//! The process that starts workers: one program, without capabilities. It reads names and
//! descriptors, nothing else.
//!
//! It has one thread, so that a process is never killed after its number was given to another:
//! processes are reaped and killed in turn.

use super::WORKER;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use std::io::{self, IoSliceMut, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, Stdio};

/// This very program, whatever lies at its path meanwhile.
const PROGRAM: &str = "/proc/self/exe";
/// Longest name of an export.
const MAX_NAME: usize = 255;

/// Starts workers until the daemon is gone. `arguments` are passed on to each.
///
/// # Errors
/// When the daemon's socket fails.
pub fn run(arguments: &[String]) -> io::Result<()> {
    let daemon = io::stdin().as_fd().try_clone_to_owned()?;
    let mut workers: Vec<Worker> = Vec::new();
    loop {
        let (has_order, is_ready) = wait(&daemon, &workers)?;
        for (worker, [has_ended, is_closed]) in workers.iter_mut().zip(is_ready) {
            if has_ended {
                worker.reap();
            } else if is_closed {
                worker.kill();
            }
        }
        workers.retain(|worker| !worker.has_ended);
        if has_order {
            match receive(&daemon)? {
                Received::Order { name, control, status } => {
                    workers.extend(start(arguments, &name, control, status));
                }
                Received::Nonsense => {}
                // Workers end with this process.
                Received::End => return Ok(()),
            }
        }
    }
}

/// A process that runs.
struct Worker {
    process: Child,
    /// Readable when the process has ended.
    ended: OwnedFd,
    status: UnixStream,
    /// The daemon has closed its end of `status`.
    is_killed: bool,
    has_ended: bool,
}

impl Worker {
    fn reap(&mut self) {
        // An error means that it was reaped, which only this thread does.
        if let Ok(Some(exit)) = self.process.try_wait() {
            self.has_ended = true;
            let _ = writeln!(self.status, "{exit}"); // fails where the daemon does not read it
        }
    }

    fn kill(&mut self) {
        let _ = self.process.kill(); // fails where it has ended
        self.is_killed = true;
    }
}

/// Whether the daemon has an order, and of each worker whether it has ended and whether it is to be
/// killed.
fn wait(daemon: &OwnedFd, workers: &[Worker]) -> io::Result<(bool, Vec<[bool; 2]>)> {
    let mut fds = vec![PollFd::new(daemon, PollFlags::IN)];
    for worker in workers {
        fds.push(PollFd::new(&worker.ended, PollFlags::IN));
        // One that is killed already is watched for its end alone.
        let status = if worker.is_killed { worker.ended.as_fd() } else { worker.status.as_fd() };
        fds.push(PollFd::from_borrowed_fd(status, PollFlags::IN));
    }
    match poll(&mut fds, None) {
        Ok(_) | Err(Errno::INTR) => {}
        Err(error) => return Err(error.into()),
    }
    let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
    let workers = fds[1..].chunks(2).map(|pair| [is_ready(&pair[0]), is_ready(&pair[1])]).collect();
    Ok((is_ready(&fds[0]), workers))
}

/// A message from the daemon.
enum Received {
    Order { name: String, control: OwnedFd, status: OwnedFd },
    Nonsense,
    End,
}

fn receive(daemon: &OwnedFd) -> io::Result<Received> {
    let mut bytes = [0; MAX_NAME];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        rustix::net::recvmsg(daemon, parts, &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let mut descriptors = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = message {
            descriptors.extend(passed);
        }
    }
    if received.bytes == 0 {
        return Ok(Received::End);
    }
    let name = std::str::from_utf8(&bytes[..received.bytes]).unwrap_or_default();
    let is_name = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let is_whole = !received.flags.contains(ReturnFlags::TRUNC);
    match <[OwnedFd; 2]>::try_from(descriptors) {
        Ok([control, status]) if is_whole && !name.is_empty() && name.bytes().all(is_name) => {
            Ok(Received::Order { name: name.to_owned(), control, status })
        }
        _ => Ok(Received::Nonsense),
    }
}

/// Starts a worker, and says so, or why not.
fn start(arguments: &[String], name: &str, control: OwnedFd, status: OwnedFd) -> Option<Worker> {
    let mut status = UnixStream::from(status);
    let started = Command::new(PROGRAM)
        .arg(WORKER)
        .args(arguments)
        .arg(name)
        .stdin(Stdio::from(control))
        .stdout(Stdio::null())
        .spawn()
        .and_then(|process| {
            let ended = pidfd_open(Pid::from_child(&process), PidfdFlags::empty())?;
            Ok((process, ended))
        });
    // A daemon that does not listen any more closes its end, which is found in the next round.
    let (told, worker) = match started {
        Ok((process, ended)) => (format!("pid {}", process.id()), Some((process, ended))),
        Err(error) => (format!("cannot start a process: {error}"), None),
    };
    let _ = writeln!(status, "{told}");
    worker.map(|(process, ended)| Worker { process, ended, status, is_killed: false, has_ended: false })
}
