//! A process for each export (`--process-per-export`): a client that takes an export over gets one
//! tenant's data.
//!
//! ```text
//!   freestoned ──► spawner ──► worker of export a          worker: protocol, keys, clients' memory
//!    │ arrays,        one program,      ▲                  sandbox: no path of a device, no state, no port
//!    │ pools,         no capability     │
//!    │ volumes                          │ descriptors: a control socket, listening sockets,
//!    └─ RemoteExport ───────────────────┘ and for each device a vhost-user-blk connection
//! ```
//!
//! `freestoned` cannot execute programs in its sandbox, so it starts the [`spawner`] before.
//! Devices stay in the daemon, which serves each to the worker over vhost-user-blk on a socket
//! pair. The worker's buffers lie in one memfd that the daemon maps as it maps a guest's memory;
//! data is not copied between the two. The engine sees a [`RemoteExport`], which is an
//! [`exports::Export`] as every other.
//!
//! A worker that ends is started again. Before that the daemon completes the requests that the
//! worker had submitted to devices: a successor never runs while writes of its predecessor are in
//! flight.

pub mod process;
mod remote;
pub mod spawner;
mod wire;

pub use remote::{Order, RemoteExport, Tell};

use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, PoisonError};

/// The first argument of the spawner's process.
pub const SPAWNER: &str = "export-spawner";
/// The first argument of a worker's process.
pub const WORKER: &str = "export-worker";

/// How processes of exports are started.
#[derive(Clone, Debug)]
pub struct WorkerOptions {
    /// The program `freestoned`.
    pub program: PathBuf,
    /// Arguments of every process after the first.
    pub arguments: Vec<String>,
}

/// The way to the spawner, which ends when this is dropped.
pub struct Workers {
    spawner: Mutex<OwnedFd>,
    _process: Child,
}

impl Workers {
    /// Starts the spawner. Before the process enters its sandbox.
    ///
    /// # Errors
    /// When the system refuses it.
    pub fn start(options: &WorkerOptions) -> io::Result<Workers> {
        let flags = SocketFlags::CLOEXEC;
        let (ours, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)?;
        let process = Command::new(&options.program)
            .arg(SPAWNER)
            .args(&options.arguments)
            .env_remove("NOTIFY_SOCKET") // the daemon alone speaks with the service manager
            .stdin(Stdio::from(theirs))
            .stdout(Stdio::null())
            .process_group(0) // keys of a terminal are for the daemon
            .spawn()?;
        Ok(Workers { spawner: Mutex::new(ours), _process: process })
    }

    /// Starts a process for the export called `name`. It gets `control` as its standard input. The
    /// spawner writes to `status` its number and, after its end, its exit status, and kills it when
    /// the other end of `status` is closed or shut down for writing.
    ///
    /// # Errors
    /// When the spawner is gone.
    pub fn spawn(&self, name: &str, control: OwnedFd, status: OwnedFd) -> io::Result<()> {
        let descriptors = [control.as_fd(), status.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut message = SendAncillaryBuffer::new(&mut space);
        message.push(SendAncillaryMessage::ScmRights(&descriptors));
        let spawner = self.spawner.lock().unwrap_or_else(PoisonError::into_inner);
        let send = || {
            rustix::net::sendmsg(
                &*spawner,
                &[IoSlice::new(name.as_bytes())],
                &mut message,
                SendFlags::NOSIGNAL,
            )
        };
        rustix::io::retry_on_intr(send)?;
        Ok(())
    }
}
