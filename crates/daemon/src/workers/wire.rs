//! The messages of daemon and worker on the control socket: lines of JSON, and descriptors before
//! the first reply.
//!
//! ```text
//!   daemon                                                   worker
//!   Task, then a descriptor for each device and socket  ──►
//!                                                       ◄──  Report::Started | Failed
//!   Command, Command, … (end: stop)                     ──►
//!                                                       ◄──  Report::Done, Report::Totals, …
//! ```
//!
//! A worker may be hostile: what it says is bounded, and only counted, shown or compared.

use exports::{ClientsReport, Totals};
use exports_nvme_tcp::{HostSecrets, SecretText};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use secrets::ReadFile;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, IoSlice, IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use zeroize::Zeroizing;

/// Longest line: an export over as many devices as there may be.
const MAX_LINE: u64 = 1 << 20;
/// Most bytes of files in [`Action::Reload`]: as JSON they fit a line.
pub const MAX_KEY_BYTES: usize = 512 << 10;

/// Most connections in [`Report::Clients`]: with names of hosts they fit a line.
pub const MAX_CLIENTS: usize = 1024;

/// The task of a worker.
#[derive(Debug, Serialize, Deserialize)]
pub struct Task {
    /// The export's name.
    pub name: String,
    /// The export, as a command line has it.
    pub text: String,
    /// Secrets of its hosts that the text does not name.
    pub host_secrets: Vec<HostSecrets>,
    /// The processor of each core.
    pub cpus: Vec<Option<usize>>,
    /// Places of the cores that serve it; none: all.
    pub core_map: Vec<usize>,
    /// Names of its devices. A connection for each follows.
    pub devices: Vec<String>,
    /// Addresses of its listening sockets, which follow the connections.
    pub sockets: Vec<String>,
}

/// A command to a worker that serves.
#[derive(Debug, Serialize, Deserialize)]
pub struct Command {
    /// Repeated in [`Report::Done`].
    pub number: u64,
    /// The action.
    pub action: Action,
}

/// See [`Command`].
#[derive(Debug, Serialize, Deserialize)]
pub enum Action {
    /// Look at the size of the devices, and tell clients.
    Resize,
    /// Serve from these cores.
    Remap(Vec<usize>),
    /// Use the keys and certificates in these files for new connections.
    Reload(Vec<KeyFile>),
}

/// A file of keys or certificates, which the daemon has read for the worker.
#[derive(Debug, Serialize, Deserialize)]
pub struct KeyFile {
    /// Its path, as the export's text has it.
    pub path: PathBuf,
    /// All of its content.
    pub content: SecretText,
}

impl KeyFile {
    /// A file that was read.
    ///
    /// # Errors
    /// With its name, when it is not text.
    pub fn new(file: &ReadFile) -> Result<KeyFile, String> {
        let text = str::from_utf8(&file.content).map_err(|_| format!("{}: not text", file.path.display()))?;
        Ok(KeyFile { path: file.path.clone(), content: text.to_owned().into() })
    }
}

impl From<KeyFile> for ReadFile {
    fn from(file: KeyFile) -> ReadFile {
        let content = file.content.reveal().as_bytes().to_vec();
        ReadFile { path: file.path, content: Zeroizing::new(content) }
    }
}

/// A report of a worker.
#[derive(Debug, Serialize, Deserialize)]
pub enum Report {
    /// Clients are served.
    Started,
    /// The configuration is impossible; the worker ends.
    Invalid(String),
    /// The export cannot be served for another reason; the worker ends.
    Failed(String),
    /// A command was carried out, or not for this reason.
    Done(u64, Result<(), String>),
    /// Counters since the worker started.
    Totals(Totals),
    /// The clients: the first [`MAX_CLIENTS`] connections.
    Clients(ClientsReport),
}

/// Writes one message.
///
/// # Errors
/// When the other side is gone, or does not read.
pub fn write(mut socket: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    socket.write_all(&line)
}

/// Reads the next message; `None` at the end.
///
/// # Errors
/// When the socket fails, or no message comes.
pub fn read<T: DeserializeOwned>(socket: &mut impl BufRead) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    socket.take(MAX_LINE).read_until(b'\n', &mut line)?;
    match line.last() {
        None => Ok(None),
        Some(b'\n') => Ok(Some(serde_json::from_slice(&line)?)),
        Some(_) => Err(io::Error::new(io::ErrorKind::InvalidData, "a message that does not end")),
    }
}

/// Passes a descriptor, with one byte.
///
/// # Errors
/// When the other side is gone, or does not read.
pub fn pass(socket: &UnixStream, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let descriptors = [descriptor];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut message = SendAncillaryBuffer::new(&mut space);
    message.push(SendAncillaryMessage::ScmRights(&descriptors));
    let mut send = || rustix::net::sendmsg(socket, &[IoSlice::new(b"d")], &mut message, SendFlags::NOSIGNAL);
    rustix::io::retry_on_intr(&mut send)?;
    Ok(())
}

/// Takes a descriptor that [`pass`] has sent.
///
/// # Errors
/// When something else comes.
pub fn take(socket: &UnixStream) -> io::Result<OwnedFd> {
    let mut byte = [0];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    rustix::io::retry_on_intr(|| {
        rustix::net::recvmsg(socket, &mut [IoSliceMut::new(&mut byte)], &mut control, RecvFlags::CMSG_CLOEXEC)
    })?;
    let passed = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut passed) => passed.next(),
        _ => None,
    });
    passed.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "no descriptor was passed"))
}

/// Reads a line byte by byte, so that nothing behind it is read: descriptors follow.
///
/// # Errors
/// As [`read`].
pub fn read_alone<T: DeserializeOwned>(mut socket: &UnixStream) -> io::Result<Option<T>> {
    let mut line = Vec::new();
    let mut byte = [0];
    while line.len() < MAX_LINE as usize && socket.read(&mut byte)? == 1 {
        line.push(byte[0]);
        if byte[0] == b'\n' {
            break;
        }
    }
    read(&mut &line[..])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::BufReader;
    use std::os::fd::AsFd;

    #[test]
    fn a_task_comes_with_its_descriptors_and_messages_after_it() {
        let (daemon, worker) = UnixStream::pair().unwrap();
        let (mut far, near) = UnixStream::pair().unwrap();
        let task = Task {
            name: "a".into(),
            text: "nbd:socket=s".into(),
            host_secrets: Vec::new(),
            cpus: vec![None],
            core_map: vec![0],
            devices: vec!["d".into()],
            sockets: Vec::new(),
        };
        write(&daemon, &task).unwrap();
        pass(&daemon, near.as_fd()).unwrap();
        write(&daemon, &Command { number: 7, action: Action::Remap(vec![1]) }).unwrap();
        drop((daemon, near));
        let got: Task = read_alone(&worker).unwrap().unwrap();
        assert_eq!((&*got.text, &*got.devices[0]), ("nbd:socket=s", "d"));
        let passed = take(&worker).unwrap();
        let mut reader = BufReader::new(&worker);
        let command: Command = read(&mut reader).unwrap().unwrap();
        assert!(matches!(command, Command { number: 7, action: Action::Remap(cores) } if cores == [1]));
        assert!(read::<Command>(&mut reader).unwrap().is_none(), "that is the end");
        UnixStream::from(passed).write_all(b"x").unwrap();
        let mut byte = [0];
        far.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");
    }

    #[test]
    fn an_invalid_message_is_an_error() {
        assert!(read::<Report>(&mut &b"\"Started\"\n"[..]).is_ok_and(|report| report.is_some()));
        for bytes in [&b"\"Started\""[..], b"{}\n", b"\n", b"\"Else\"\n"] {
            assert!(read::<Report>(&mut &*bytes).is_err(), "{bytes:?}");
        }
        let endless = vec![b'x'; MAX_LINE as usize + 1];
        assert!(read::<Report>(&mut &*endless).is_err());
        let (daemon, worker) = UnixStream::pair().unwrap();
        (&daemon).write_all(b"d").unwrap();
        assert!(take(&worker).is_err(), "no descriptor comes with that");
    }
}
