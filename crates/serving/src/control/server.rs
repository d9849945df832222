//! The side of the control socket that `freestone serve` has: a thread that listens, and one for
//! each client.

use super::protocol::{Command, Done, MAX_LINE, Reply, Request, parse_request};
use exports::stream::{SocketPath, listen};
use socket2::Socket;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

/// Most clients at a time: people, and what looks after the array.
const MAX_CLIENTS: usize = 16;
/// How long a client may take to say or read something. One that sleeps longer has to connect
/// again.
const CLIENT_TIMEOUT: Duration = Duration::from_secs(30);

/// The receiver of a control socket's commands. Called on a client's thread, which may wait.
pub trait Controlled: Send + Sync {
    /// Carries a command out, for an array by name or UUID if one was named.
    ///
    /// # Errors
    /// With a sentence that names object and value.
    fn control(&self, array: Option<&str>, command: Command) -> Result<Done, String>;
}

/// A socket that is being listened on. Dropping it ends that, and removes the socket.
pub struct ControlSocket {
    path: PathBuf,
    claim: Option<SocketPath>,
    listener: Arc<Socket>,
    is_ending: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl ControlSocket {
    /// Listens at `path`, whose directory is made if need be.
    ///
    /// # Errors
    /// When another process listens there, or the directory cannot be written.
    pub fn listen(path: &Path, controlled: Arc<dyn Controlled>) -> io::Result<ControlSocket> {
        if let Some(directory) = path.parent().filter(|directory| !directory.as_os_str().is_empty()) {
            std::fs::create_dir_all(directory)?;
        }
        SocketPath::free(path)?;
        let (listener, claim) = listen(path, 0o600, None)?;
        let listener = Arc::new(Socket::from(OwnedFd::from(listener)));
        let is_ending = Arc::new(AtomicBool::new(false));
        let (accepting, ending) = (listener.clone(), is_ending.clone());
        let run = move || accept(&accepting, &ending, &controlled);
        let thread = Some(reactor::spawn_thread("array-control", run)?);
        Ok(ControlSocket { path: path.into(), claim: Some(claim), listener, is_ending, thread })
    }

    /// Where it listens.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for ControlSocket {
    fn drop(&mut self) {
        self.is_ending.store(true, Ordering::SeqCst);
        self.claim = None;
        // Ends the accept that the thread waits in.
        let _ = self.listener.shutdown(std::net::Shutdown::Both);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn accept(listener: &Socket, is_ending: &AtomicBool, controlled: &Arc<dyn Controlled>) {
    let clients = Arc::new(AtomicUsize::new(0));
    while !is_ending.load(Ordering::SeqCst) {
        let stream: UnixStream = match listener.accept() {
            Ok((socket, _)) => OwnedFd::from(socket).into(),
            Err(_) if is_ending.load(Ordering::SeqCst) => return,
            Err(error) => {
                // Out of descriptors, most likely: the next try may have one.
                tracing::warn!(%error, "a client of the control socket was lost");
                std::thread::sleep(Duration::from_millis(100));
                continue;
            }
        };
        if clients.fetch_add(1, Ordering::SeqCst) >= MAX_CLIENTS {
            clients.fetch_sub(1, Ordering::SeqCst);
            let _ = answer(&stream, Err(format!("{MAX_CLIENTS} clients are connected: try again later")));
            continue;
        }
        let (controlled, count) = (controlled.clone(), clients.clone());
        let run = move || {
            if let Err(error) = serve(&stream, &*controlled) {
                tracing::debug!(%error, "a client of the control socket is gone");
            }
            count.fetch_sub(1, Ordering::SeqCst);
        };
        if let Err(error) = reactor::spawn_thread("array-client", run) {
            clients.fetch_sub(1, Ordering::SeqCst);
            tracing::warn!(%error, "no thread for a client of the control socket");
        }
    }
}

fn serve(stream: &UnixStream, controlled: &dyn Controlled) -> io::Result<()> {
    stream.set_read_timeout(Some(CLIENT_TIMEOUT))?;
    stream.set_write_timeout(Some(CLIENT_TIMEOUT))?;
    let mut reader = BufReader::new(stream);
    let mut line = Vec::new();
    loop {
        line.clear();
        let read = (&mut reader).take(MAX_LINE as u64).read_until(b'\n', &mut line)?;
        if read == 0 {
            return Ok(());
        }
        if line.last() != Some(&b'\n') {
            let why = match read {
                MAX_LINE => format!("a line of more than {MAX_LINE} bytes"),
                _ => "the line does not end".into(),
            };
            return answer(stream, Err(why));
        }
        let carry_out = |request: Request| controlled.control(request.array.as_deref(), request.command);
        answer(stream, parse_request(&line).and_then(carry_out))?;
    }
}

fn answer(mut stream: &UnixStream, result: Result<Done, String>) -> io::Result<()> {
    let mut line = serde_json::to_vec(&Reply::new(result))?;
    line.push(b'\n');
    stream.write_all(&line)
}

#[cfg(test)]
mod tests {
    use super::super::client::Client;
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    struct Echo;

    impl Controlled for Echo {
        fn control(&self, _: Option<&str>, command: Command) -> Result<Done, String> {
            match command {
                Command::Fail { members } => Ok(Done { text: members.join(" "), ..Done::default() }),
                _ => Err("not here".into()),
            }
        }
    }

    fn listen() -> (tempfile::TempDir, ControlSocket) {
        let dir = tempfile::tempdir().unwrap();
        let socket = ControlSocket::listen(&dir.path().join("below/s"), Arc::new(Echo)).unwrap();
        (dir, socket)
    }

    #[test]
    fn commands_are_answered_in_turn_and_only_the_owner_may_ask() {
        let (dir, socket) = listen();
        let mode = std::fs::metadata(socket.path()).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let mut client = Client::connect(socket.path()).unwrap();
        for name in ["a", "b"] {
            let done = client.ask(Command::Fail { members: vec![name.into()] }).unwrap();
            assert_eq!(done.text, name);
        }
        assert_eq!(client.ask(Command::Show).unwrap_err(), "not here");
        let path = socket.path().to_owned();
        drop(socket);
        assert!(!path.exists() && Client::connect(&path).is_err());
        drop(dir);
    }

    #[test]
    fn a_socket_that_nobody_listens_at_is_taken_over_and_another_is_not() {
        let (dir, socket) = listen();
        let again = ControlSocket::listen(socket.path(), Arc::new(Echo)).err().unwrap();
        assert_eq!(again.to_string(), "another process listens there");
        let stale = dir.path().join("stale");
        drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
        drop(ControlSocket::listen(&stale, Arc::new(Echo)).unwrap());
        let file = dir.path().join("file");
        std::fs::write(&file, "data").unwrap();
        let refused = ControlSocket::listen(&file, Arc::new(Echo)).err().unwrap();
        assert_eq!(refused.to_string(), "a file that is not a socket is there");
        assert_eq!(std::fs::read(&file).unwrap(), b"data");
    }

    #[test]
    fn what_is_no_request_gets_an_answer_and_harms_nobody_else() {
        let (_dir, socket) = listen();
        let said = |bytes: &[u8]| {
            let mut stream = UnixStream::connect(socket.path()).unwrap();
            stream.write_all(bytes).unwrap();
            stream.shutdown(std::net::Shutdown::Write).unwrap();
            let mut text = String::new();
            stream.read_to_string(&mut text).unwrap();
            text
        };
        assert!(said(b"\n").contains("no request of this protocol"));
        assert!(said(b"{\"version\":1,\"command\":\"show\"}\n").contains("\"error\":\"not here\""));
        assert!(said(b"\xff\xfe\0\n\n").lines().count() == 2);
        assert!(said(b"{").contains("the line does not end"));
        assert_eq!(said(b""), "");
        let _idle: Vec<UnixStream> = (0..3).map(|_| UnixStream::connect(socket.path()).unwrap()).collect();
        let mut client = Client::connect(socket.path()).unwrap();
        assert!(client.ask(Command::Fail { members: vec![] }).is_ok());
    }
}
