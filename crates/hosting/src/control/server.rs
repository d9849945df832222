//! The side of the control socket that `freestone serve` has: a thread that listens, and one for
//! each client.

use super::protocol::{Command, Done, MAX_LINE, Reply, Request, parse_request};
use exports::stream::{SocketPath, listen};
use socket2::Socket;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
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
    unanswered: Arc<Unanswered>,
    thread: Option<JoinHandle<()>>,
}

/// The number of commands that are carried out, or whose answer is being sent.
#[derive(Default)]
struct Unanswered {
    count: Mutex<usize>,
    answered: Condvar,
}

impl Unanswered {
    fn change(&self, change: impl FnOnce(&mut usize)) {
        change(&mut self.count.lock().unwrap_or_else(PoisonError::into_inner));
        self.answered.notify_all();
    }

    fn wait_until_none(&self, timeout: Duration) {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = self.answered.wait_timeout_while(count, timeout, |count| *count > 0);
    }
}

/// One of [`Unanswered`], while it exists.
struct UnansweredCommand<'a>(&'a Unanswered);

impl UnansweredCommand<'_> {
    fn begin(all: &Unanswered) -> UnansweredCommand<'_> {
        all.change(|count| *count += 1);
        UnansweredCommand(all)
    }
}

impl Drop for UnansweredCommand<'_> {
    fn drop(&mut self) {
        self.0.change(|count| *count -= 1);
    }
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
        let unanswered = Arc::default();
        let (accepting, ending) = (listener.clone(), is_ending.clone());
        let commands = Arc::clone(&unanswered);
        let run = move || accept(&accepting, &ending, &controlled, &commands);
        let thread = Some(reactor::spawn_thread("array-control", run)?);
        Ok(ControlSocket { path: path.into(), claim: Some(claim), listener, is_ending, unanswered, thread })
    }

    /// Stops listening, and returns when received commands have been answered, at most after
    /// [`CLIENT_TIMEOUT`]. A process that ends because of a command calls this before it exits.
    pub fn end_after_answers(self) {
        let unanswered = self.unanswered.clone();
        drop(self);
        unanswered.wait_until_none(CLIENT_TIMEOUT);
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

fn accept(
    listener: &Socket,
    is_ending: &AtomicBool,
    controlled: &Arc<dyn Controlled>,
    unanswered: &Arc<Unanswered>,
) {
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
        let unanswered = unanswered.clone();
        let run = move || {
            if let Err(error) = serve(&stream, &*controlled, &unanswered) {
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

fn serve(stream: &UnixStream, controlled: &dyn Controlled, unanswered: &Unanswered) -> io::Result<()> {
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
        let _command = UnansweredCommand::begin(unanswered);
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
    use api::ArrayAction;
    use std::os::unix::fs::PermissionsExt;
    use std::sync::mpsc;

    struct Echo;

    impl Controlled for Echo {
        fn control(&self, _: Option<&str>, command: Command) -> Result<Done, String> {
            match command {
                Command::Act(ArrayAction::Fail { members }) => {
                    Ok(Done { text: members.join(" "), ..Done::default() })
                }
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
            let done = client.ask(Command::Act(ArrayAction::Fail { members: vec![name.into()] })).unwrap();
            assert_eq!(done.text, name);
        }
        assert_eq!(client.ask(Command::Show).unwrap_err(), "not here");
        let path = socket.path().to_owned();
        drop(socket);
        assert!(!path.exists() && Client::connect(&path).is_err());
        drop(dir);
    }

    /// Carries a command out when `go` says so.
    struct Slow {
        begun: mpsc::SyncSender<()>,
        go: Mutex<mpsc::Receiver<()>>,
    }

    impl Controlled for Slow {
        fn control(&self, _: Option<&str>, _: Command) -> Result<Done, String> {
            self.begun.send(()).unwrap();
            self.go.lock().unwrap().recv().unwrap();
            Ok(Done::default())
        }
    }

    #[test]
    fn a_socket_ends_after_its_commands_are_answered() {
        let dir = tempfile::tempdir().unwrap();
        let ((begun, has_begun), (let_go, go)) = (mpsc::sync_channel(1), mpsc::sync_channel(1));
        let slow = Arc::new(Slow { begun, go: Mutex::new(go) });
        let socket = ControlSocket::listen(&dir.path().join("s"), slow).unwrap();
        let mut client = UnixStream::connect(socket.path()).unwrap();
        client.write_all(b"{\"version\":2,\"command\":\"show\"}\n").unwrap();
        has_begun.recv().unwrap();
        let ending = std::thread::spawn(|| socket.end_after_answers());
        // The socket's file goes first: from then on its end waits for the answer alone.
        while dir.path().join("s").exists() {
            std::thread::yield_now();
        }
        assert!(!ending.is_finished());
        let_go.send(()).unwrap();
        ending.join().unwrap();
        client.set_nonblocking(true).unwrap();
        let mut answer = String::new();
        BufReader::new(client).read_line(&mut answer).expect("the answer has been sent");
        assert!(answer.contains("\"version\":2"), "{answer}");
    }

    #[test]
    fn a_socket_without_a_listener_is_taken_over_and_another_is_not() {
        let (dir, socket) = listen();
        let again = ControlSocket::listen(socket.path(), Arc::new(Echo)).err().unwrap();
        assert_eq!(again.to_string(), "the socket is in use by another process");
        let stale = dir.path().join("stale");
        drop(std::os::unix::net::UnixListener::bind(&stale).unwrap());
        drop(ControlSocket::listen(&stale, Arc::new(Echo)).unwrap());
        let file = dir.path().join("file");
        std::fs::write(&file, "data").unwrap();
        let refused = ControlSocket::listen(&file, Arc::new(Echo)).err().unwrap();
        assert_eq!(refused.to_string(), "the path exists and is not a socket");
        assert_eq!(std::fs::read(&file).unwrap(), b"data");
    }

    #[test]
    fn an_invalid_request_is_answered_and_leaves_other_clients_alone() {
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
        assert!(said(b"{\"version\":2,\"command\":\"show\"}\n").contains("\"error\":\"not here\""));
        assert!(said(b"\xff\xfe\0\n\n").lines().count() == 2);
        assert!(said(b"{").contains("the line does not end"));
        assert_eq!(said(b""), "");
        let _idle: Vec<UnixStream> = (0..3).map(|_| UnixStream::connect(socket.path()).unwrap()).collect();
        let mut client = Client::connect(socket.path()).unwrap();
        assert!(client.ask(Command::Act(ArrayAction::Fail { members: vec![] })).is_ok());
    }
}
