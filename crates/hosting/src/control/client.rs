//! The side of the control socket that `freestone array` has.

use super::protocol::{Command, Done, MAX_LINE, Reply, Request, VERSION};
use super::{directory, path_of};
use api::Array;
use raid::Uuid;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// How long a server may take to answer: a change waits for requests in flight, which may wait for
/// a drive.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(120);
/// How long it may take to say what it is: one server that hangs must not keep people from the
/// others.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection to a running array.
pub struct Client {
    stream: BufReader<UnixStream>,
    path: PathBuf,
    /// The array that is meant, where a socket may be for several.
    array: Option<String>,
    /// The process that serves it, once it has said so.
    pid: u32,
}

impl Client {
    /// Connects to the array whose control socket is `path`.
    ///
    /// # Errors
    /// When no server listens there.
    pub fn connect(path: &Path) -> io::Result<Client> {
        let stream = BufReader::new(UnixStream::connect(path)?);
        let client = Client { stream, path: path.into(), array: None, pid: 0 };
        client.wait_at_most(ANSWER_TIMEOUT)?;
        Ok(client)
    }

    /// Waits until the server has closed the connection: it has ended, or is about to.
    pub fn wait_for_end(&mut self) {
        let mut rest = Vec::new();
        let _ = (&mut self.stream).take(MAX_LINE as u64).read_to_end(&mut rest);
    }

    fn wait_at_most(&self, timeout: Duration) -> io::Result<()> {
        self.stream.get_ref().set_read_timeout(Some(timeout))?;
        self.stream.get_ref().set_write_timeout(Some(timeout))
    }

    /// Asks for something and waits for the answer.
    ///
    /// # Errors
    /// The error of the server, or of the connection.
    pub fn ask(&mut self, command: Command) -> Result<Done, String> {
        let failed = |error: io::Error| format!("control socket {}: {error}", self.path.display());
        let request = Request { version: VERSION, array: self.array.clone(), command };
        let mut line = serde_json::to_vec(&request).expect("plain data");
        line.push(b'\n');
        self.stream.get_mut().write_all(&line).map_err(failed)?;
        let mut answer = Vec::new();
        (&mut self.stream).take(MAX_LINE as u64).read_until(b'\n', &mut answer).map_err(failed)?;
        if answer.is_empty() {
            return Err(format!("control socket {}: closed without an answer", self.path.display()));
        }
        let reply: Reply = serde_json::from_slice(&answer)
            .map_err(|error| format!("control socket {}: {error}", self.path.display()))?;
        reply.into_result()
    }
}

/// The array of that name or UUID that is served with its control socket at `path`.
///
/// # Errors
/// When no server listens there, or it does not serve the array.
pub fn at(path: &Path, array: &str) -> Result<(Client, Array), String> {
    let mut client = reach(path)?;
    client.array = Some(array.to_owned());
    let done = client.ask(Command::Show)?;
    let report = done.array.ok_or_else(|| format!("control socket {}: no answer", path.display()))?;
    Ok((client, report))
}

/// All arrays of the server whose control socket is `path`.
///
/// # Errors
/// When no server listens there.
pub fn all_at(path: &Path) -> Result<Vec<Array>, String> {
    let done = reach(path)?.ask(Command::Show)?;
    Ok(done.array.into_iter().chain(done.arrays).collect())
}

fn reach(path: &Path) -> Result<Client, String> {
    Client::connect(path).map_err(|error| format!("control socket {}: {error}", path.display()))
}

/// The running array of that name or UUID, and its report; `None` when none runs.
///
/// # Errors
/// When several arrays of that name run: with the UUID and the process of each.
pub fn find(array: &str) -> Result<Option<(Client, Array)>, String> {
    if let Some(uuid) = Uuid::parse(array) {
        return Ok(greet(&path_of(uuid)));
    }
    let mut found: Vec<_> = running().into_iter().filter(|(_, report)| report.name == array).collect();
    if found.len() > 1 {
        let candidate =
            |(client, report): &(Client, Array)| format!("{} (process {})", report.uuid, client.pid);
        let candidates: Vec<String> = found.iter().map(candidate).collect();
        return Err(format!(
            "{} arrays of this name run: {}; name one by UUID",
            found.len(),
            candidates.join(", ")
        ));
    }
    Ok(found.pop())
}

/// All running arrays that this user may control.
pub fn running() -> Vec<(Client, Array)> {
    let Ok(entries) = std::fs::read_dir(directory()) else { return Vec::new() };
    let is_socket = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        name.starts_with("array-") && name.ends_with(".sock")
    };
    let mut arrays: Vec<_> = entries
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(is_socket)
        .filter_map(|path| greet(&path))
        .collect();
    arrays.sort_by(|(_, a), (_, b)| (&a.name, &a.uuid).cmp(&(&b.name, &b.uuid)));
    arrays
}

/// Connects and asks what the array is. The socket of a killed server does not answer.
fn greet(path: &Path) -> Option<(Client, Array)> {
    let mut client = Client::connect(path).ok()?;
    client.wait_at_most(GREETING_TIMEOUT).ok()?;
    let done = client.ask(Command::Show).ok()?;
    let report = done.array?;
    client.pid = done.pid;
    client.wait_at_most(ANSWER_TIMEOUT).ok()?;
    Some((client, report))
}
