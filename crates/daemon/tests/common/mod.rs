//! A daemon as a process, and its API.

#![allow(dead_code, missing_docs)] // each test program uses its part

pub mod load;

use block::{Device, Flags, IoError, MemoryRegion, Op};
use exports::stream::Address;
use exports_nbd::{Config, Nbd};
use layers::fault::Fault;
use reactor::{CoreConfig, Cores};
use reqwest::blocking::{Client, RequestBuilder, Response};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use stack::kinds::member::member;
use std::fs::File;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

pub const MIB: u64 = 1 << 20;
/// How long a test waits for an event. It bounds failures alone: a machine whose disk is busy with
/// other work takes seconds for a durable write.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// The buffers of this program's cores, in memory that a server over vhost-user maps. All tests
/// share it.
pub fn shared_buffers() -> MemoryRegion {
    static BUFFERS: OnceLock<MemoryRegion> = OnceLock::new();
    *BUFFERS.get_or_init(|| stack::passed::share_buffers(1 << 30).unwrap())
}

/// Fills the first block of 4 KiB, or reads it. Returns its first byte.
pub fn block(device: &Arc<dyn Device>, op: Op, fill: u8) -> Result<u8, IoError> {
    let device = device.clone();
    reactor::run(async move {
        let channel = device.open_channel().map_err(|_| IoError::DeviceGone)?;
        let mut buffer = reactor::current().buffers().take(4096).await;
        buffer.as_mut_slice().fill(fill);
        let (buffer, result) = buffer.transfer(&*channel, op, Flags::NONE, 0).await;
        result.map(|()| buffer.as_slice()[0])
    })
}

/// A directory for members, sockets and state, and the daemon that runs there.
pub struct Daemon {
    pub dir: tempfile::TempDir,
    pub args: Vec<String>,
    pub env: Vec<(&'static str, PathBuf)>,
    child: Option<Child>,
    http: Client,
}

impl Daemon {
    pub fn new() -> Daemon {
        Daemon::with(&["--member-timeout", "1"])
    }

    pub fn with(args: &[&str]) -> Daemon {
        let mut daemon = Daemon::prepare(args);
        daemon.start();
        daemon
    }

    /// A place for a daemon.
    pub fn prepare(args: &[&str]) -> Daemon {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("d.sock");
        let http = Client::builder().unix_socket(socket).timeout(PATIENCE).build().unwrap();
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        Daemon { dir, args, env: Vec::new(), child: None, http }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub fn command(&self) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_freestoned"));
        command
            .arg("--state-dir")
            .arg(self.path("state"))
            .arg("--socket")
            .arg(self.path("d.sock"))
            .arg("--sandbox-path")
            .arg(self.dir.path())
            .args(&self.args);
        command
            .env("XDG_RUNTIME_DIR", self.dir.path())
            .env_remove("FREESTONE_SOCKET")
            .env_remove("FREESTONE_LOG")
            .envs(self.env.iter().cloned());
        command
    }

    /// Starts the daemon, and waits until it is ready.
    pub fn start(&mut self) {
        self.start_without_waiting_for_ready();
        self.wait_for("a daemon that is ready", || self.get("/v1/system")["state"] == "ready");
    }

    /// Starts the daemon with its directory as the current one and relative paths, and waits until
    /// it answers.
    pub fn start_in_its_directory(&mut self) {
        let mut command = Command::new(env!("CARGO_BIN_EXE_freestoned"));
        command.current_dir(self.dir.path()).args(["--state-dir", "state", "--socket", "d.sock"]);
        command.env("XDG_RUNTIME_DIR", self.dir.path()).env_remove("FREESTONE_LOG");
        self.spawn(command);
    }

    /// Starts the daemon, and waits until it answers.
    pub fn start_without_waiting_for_ready(&mut self) {
        self.spawn(self.command());
    }

    fn spawn(&mut self, mut command: Command) {
        let log = File::options().create(true).append(true).open(self.path("log")).unwrap();
        self.child = Some(command.stdin(Stdio::null()).stderr(log).spawn().unwrap());
        let deadline = Instant::now() + PATIENCE;
        while self.http.get("http://d/v1/system").send().is_err() {
            let ended = self.child.as_mut().unwrap().try_wait().unwrap();
            assert!(ended.is_none() && Instant::now() < deadline, "{ended:?}: {}", self.log());
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// A daemon that listens over TCP too, for tokens in these lines, and the address.
    pub fn listening(tokens: &str) -> (Daemon, String) {
        Daemon::listening_with(tokens, &[])
    }

    /// As [`Daemon::listening`], with more arguments.
    pub fn listening_with(tokens: &str, more: &[&str]) -> (Daemon, String) {
        let mut daemon =
            Daemon::prepare(&["--member-timeout", "1", "--json", "--listen", "127.0.0.1:0", "--tokens"]);
        let path = daemon.path("tokens");
        let mut file = File::options().create_new(true).write(true).mode(0o600).open(&path).unwrap();
        file.write_all(tokens.as_bytes()).unwrap();
        daemon.args.push(path.to_str().unwrap().into());
        daemon.args.extend(more.iter().map(|arg| (*arg).to_owned()));
        daemon.start();
        daemon.wait_for("the log", || daemon.logged("ready").next().is_some());
        let address = daemon.logged("ready").next().unwrap()["listen"].as_str().unwrap().to_owned();
        (daemon, address)
    }

    /// Lines of the log with this message, if it is JSON.
    pub fn logged(&self, message: &'static str) -> impl Iterator<Item = Value> + use<> {
        let lines: Vec<Value> =
            self.log().lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
        lines.into_iter().filter(move |line: &Value| line["message"] == message)
    }

    pub fn pid(&self) -> u32 {
        self.child.as_ref().unwrap().id()
    }

    /// Sends a signal.
    pub fn signal(&self, signal: &str) {
        let pid = self.pid().to_string();
        assert!(Command::new("kill").arg(signal).arg(pid).status().unwrap().success());
    }

    /// Sends a signal, and waits for the end.
    pub fn end(&mut self, signal: &str) -> std::process::ExitStatus {
        self.signal(signal);
        self.wait()
    }

    /// Waits for the end.
    pub fn wait(&mut self) -> std::process::ExitStatus {
        self.child.take().unwrap().wait().unwrap()
    }

    pub fn restart(&mut self, signal: &str) {
        self.end(signal);
        self.start();
    }

    pub fn log(&self) -> String {
        std::fs::read_to_string(self.path("log")).unwrap_or_default()
    }

    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        self.http.request(method, format!("http://d{path}"))
    }

    pub fn send(&self, method: Method, path: &str, body: &Value) -> Response {
        self.request(method, path).json(body).send().unwrap()
    }

    pub fn get(&self, path: &str) -> Value {
        let response = self.request(Method::GET, path).send().unwrap();
        assert_eq!(response.status(), StatusCode::OK, "{path}: {}", self.log());
        response.json().unwrap()
    }

    /// The page of metrics.
    pub fn metrics(&self) -> String {
        self.request(Method::GET, "/metrics").send().unwrap().text().unwrap()
    }

    #[track_caller]
    pub fn post(&self, path: &str, body: &Value) -> Value {
        let response = self.send(Method::POST, path, body);
        let status = response.status();
        let answer: Value = response.json().unwrap();
        assert!(status.is_success(), "{path} {body}: {answer}");
        answer
    }

    #[track_caller]
    pub fn patch(&self, path: &str, body: &Value) -> Value {
        let response = self.send(Method::PATCH, path, body);
        let status = response.status();
        let answer: Value = response.json().unwrap();
        assert_eq!(status, StatusCode::OK, "{path} {body}: {answer}");
        answer
    }

    #[track_caller]
    pub fn delete(&self, path: &str) {
        let response = self.request(Method::DELETE, path).send().unwrap();
        let status = response.status();
        assert_eq!(status, StatusCode::NO_CONTENT, "{path}: {}", response.text().unwrap());
    }

    /// The status and the problem that a request is refused with.
    #[track_caller]
    pub fn refusal(&self, method: Method, path: &str, body: &Value) -> (u16, String, String) {
        refusal(self.send(method, path, body))
    }

    pub fn file(&self, name: &str, size: u64) -> String {
        let path = self.path(name);
        File::create(&path).unwrap().set_len(size).unwrap();
        path.to_str().unwrap().to_owned()
    }

    /// The file `name`, served by this program.
    pub fn served(&self, name: &str) -> Served {
        let file = member(self.path(name).to_str().unwrap(), false, false).unwrap().open().unwrap();
        let (fault, cores) = (Arc::new(Fault::new(file)), Cores::start(&[CoreConfig::default()]).unwrap());
        let socket = self.path(&format!("{name}.served"));
        let config = Config::new(Address::Unix { path: socket.clone(), permissions: 0o600 });
        let nbd = Nbd::start(fault.clone() as Arc<dyn Device>, &[cores.get(0)], config).unwrap();
        Served { fault, spec: format!("nbd:path={}", socket.display()), _nbd: nbd, _cores: cores }
    }

    /// A RAID 5 called `data` over four files.
    pub fn array(&self) -> Vec<String> {
        let members: Vec<String> = (0..4).map(|slot| self.file(&format!("m{slot}"), 32 * MIB)).collect();
        self.post("/v1/arrays", &json!({ "name": "data", "level": "5", "members": members }));
        members
    }

    pub fn volume(&self, name: &str, size: u64) -> Value {
        self.post("/v1/volumes", &json!({ "name": name, "backing": "data", "size_bytes": size }))
    }

    /// Waits until something holds.
    #[track_caller]
    pub fn wait_for(&self, what: &str, mut holds: impl FnMut() -> bool) {
        let deadline = Instant::now() + PATIENCE;
        while !holds() {
            assert!(Instant::now() < deadline, "{what}: not within {PATIENCE:?}: {}", self.log());
            std::thread::sleep(Duration::from_millis(50));
        }
    }
}

/// A file that the test serves to the daemon over NBD, and whose requests it delays or lets fail.
pub struct Served {
    pub fault: Arc<Fault>,
    /// How the daemon opens it.
    pub spec: String,
    _nbd: Nbd,
    _cores: Cores,
}

impl Drop for Daemon {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
        let said = self.log();
        let is_refused = said.contains("the sandbox refused system call");
        assert!(
            !is_refused || std::thread::panicking(),
            "the daemon needs a system call that its sandbox lacks: {said}"
        );
    }
}

#[track_caller]
pub fn refusal(response: Response) -> (u16, String, String) {
    let status = response.status();
    assert!(!status.is_success(), "{status}");
    assert_eq!(response.headers()["content-type"], "application/problem+json");
    let problem: Value = response.json().unwrap();
    assert_eq!(problem["status"], status.as_u16());
    let text = |key: &str| problem[key].as_str().unwrap().to_owned();
    (status.as_u16(), text("type"), text("detail"))
}

pub fn names(list: &Value) -> Vec<String> {
    list.as_array().unwrap().iter().map(|thing| thing["name"].as_str().unwrap().to_owned()).collect()
}

/// The state of a daemon in a file; `None` if there is none.
pub fn read_state(path: &std::path::Path) -> Option<Value> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}
