//! The daemon that all inputs share, and its objects at the beginning of each input.

use super::schema::{Document, Request};
use daemon::confinement::Confinement;
use daemon::engine::{Engine, Options};
use daemon::rest::{Listeners, UnixOptions};
use reactor::CoreConfig;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

/// Timeout for a request.
const DEADLINE: Duration = Duration::from_secs(20);
/// The longest answer, in bytes.
const MAX_ANSWER: usize = 4 << 20;
const MIB: u64 = 1 << 20;

/// The daemon. Users of the engine are declared before it, so that they are dropped first.
pub struct Server {
    /// The requests.
    pub document: Document,
    directory: PathBuf,
    /// The state after the fixture was built.
    fixture: Value,
    _listeners: Listeners,
    _engine: Arc<Engine>,
}

/// An answer of the daemon.
pub struct Answer {
    /// The status.
    pub status: u16,
    /// The header in lower case.
    pub head: String,
    /// The body.
    pub body: Vec<u8>,
}

/// The server.
///
/// # Panics
/// When the server cannot be started.
pub fn server() -> &'static Mutex<Server> {
    static SERVER: OnceLock<Mutex<Server>> = OnceLock::new();
    SERVER.get_or_init(|| Mutex::new(Server::start()))
}

impl Server {
    fn start() -> Server {
        let directory = std::env::temp_dir().join(format!("fuzz-rest-{}", std::process::id()));
        std::fs::create_dir_all(directory.join("state")).expect("a directory");
        // A relative path in a request stays inside the directory.
        std::env::set_current_dir(&directory).expect("it is there");
        let options = Options {
            workers: None,
            state_dir: directory.join("state"),
            runtime_dir: directory.clone(),
            cores: vec![CoreConfig::default()],
            scan: Vec::new(),
            member_timeout: Duration::from_secs(1),
            has_array_sockets: false,
            confinement: Confinement::new(sandbox::Mode::Off),
        };
        let engine = Engine::start(options).expect("an engine");
        let unix = UnixOptions { path: directory.join("d.sock"), permissions: 0o600, group: None };
        let listeners = Listeners::start(&engine, &unix, None, None).expect("a socket");
        let document = serde_json::to_value(daemon::rest::document()).expect("plain data");
        let document = Document::new(&document, directory.to_str().expect("plain text"));
        let fixture = Value::Null;
        let mut server = Server { document, directory, fixture, _listeners: listeners, _engine: engine };
        server.build();
        server
    }

    /// Sends a request and reads the answer.
    ///
    /// # Panics
    /// When no answer arrives in time.
    pub fn ask(&self, request: &Request) -> Answer {
        let mut stream = UnixStream::connect(self.directory.join("d.sock")).expect("the daemon listens");
        stream.set_read_timeout(Some(DEADLINE)).expect("a socket of ours");
        let Request { method, target, headers, body } = request;
        let lines: String = headers.iter().map(|line| format!("{line}\r\n")).collect();
        let len = body.len();
        let head = format!(
            "{method} {target} HTTP/1.1\r\nHost: d\r\nConnection: close\r\nContent-Length: {len}\r\n{lines}\r\n"
        );
        // The daemon may have answered and disconnected before it received everything.
        let _ = stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body));
        let (start, mut bytes) = (Instant::now(), Vec::new());
        let end = stream.read_to_end(&mut bytes);
        let waited = start.elapsed();
        assert!(waited < DEADLINE, "{method} {target}: no answer in {waited:?}: {end:?}");
        assert!(bytes.len() < MAX_ANSWER, "{method} {target}: {} bytes", bytes.len());
        let at = bytes.windows(4).position(|four| four == b"\r\n\r\n");
        let at = at.unwrap_or_else(|| panic!("{method} {target}: no answer: {end:?} {bytes:?}"));
        let head = String::from_utf8_lossy(&bytes[..at]).to_lowercase();
        let status = head.split(' ').nth(1).and_then(|status| status.parse().ok()).expect("a status");
        Answer { status, head, body: bytes.split_off(at + 4) }
    }

    /// Sends a request that must succeed.
    fn make(&self, method: &str, target: &str, body: &Value) {
        let answer = self.send(method, target, body);
        let text = String::from_utf8_lossy(&answer.body).into_owned();
        assert!((200..300).contains(&answer.status), "{method} {target}: {} {text}", answer.status);
    }

    fn send(&self, method: &str, target: &str, body: &Value) -> Answer {
        let body = if body.is_null() { Vec::new() } else { body.to_string().into_bytes() };
        let headers = vec!["Content-Type: application/json".to_owned()];
        self.ask(&Request { method: method.into(), target: target.into(), headers, body })
    }

    /// Content of the state file, without the generation.
    ///
    /// # Panics
    /// When the file is not JSON.
    pub fn state(&self) -> Value {
        let bytes = std::fs::read(self.directory.join("state/state.json")).unwrap_or(b"{}".to_vec());
        let mut state: Value = serde_json::from_slice(&bytes).expect("the state is JSON");
        state.as_object_mut().expect("an object").remove("generation");
        state
    }

    /// Whether the state equals that of the fixture.
    pub fn is_as_built(&self) -> bool {
        self.state() == self.fixture
    }

    /// Creates files and the objects that requests can name.
    fn build(&mut self) {
        for (name, size) in [("disk0", 16), ("disk1", 8), ("disk2", 8), ("m0", 8), ("m1", 8)] {
            let path = self.directory.join(name);
            let _ = std::fs::remove_file(&path);
            File::create(&path).and_then(|file| file.set_len(size * MIB)).expect("a file");
        }
        // Some file systems do not support direct I/O.
        let path = |name: &str| format!("io_uring:path={},direct=off", self.directory.join(name).display());
        self.make("POST", "/v1/devices", &json!({ "name": "d0", "spec": path("disk0") }));
        self.make("PUT", "/v1/groups/g0", &json!({}));
        let volume = json!({ "name": "v0", "on": "d0", "size": 2 * MIB, "group": "g0" });
        self.make("POST", "/v1/volumes", &volume);
        let export = json!({ "name": "e0", "kind": "vhost-user-blk", "of": ["v0"] });
        self.make("POST", "/v1/exports", &export);
        let members = [path("m0"), path("m1")];
        let array = json!({ "name": "data", "level": "1", "members": members, "force": true });
        self.make("POST", "/v1/arrays", &array);
        // The state includes the random identities.
        self.fixture = self.state();
    }

    /// Removes all objects and builds the fixture again.
    ///
    /// # Panics
    /// When an object cannot be removed.
    pub fn rebuild(&mut self) {
        for kind in ["jobs", "exports", "volumes", "groups", "arrays", "devices"] {
            let start = Instant::now();
            loop {
                let list = self.send("GET", &format!("/v1/{kind}"), &Value::Null);
                let list: Value = serde_json::from_slice(&list.body).expect("a list");
                let list = list.as_array().expect("a list");
                if list.is_empty() || kind == "jobs" && start.elapsed() > Duration::from_secs(2) {
                    break;
                }
                assert!(start.elapsed() < DEADLINE, "{kind} that cannot be removed: {list:?}");
                for thing in list {
                    let name = thing.get("name").or(thing.get("id")).and_then(Value::as_str);
                    self.send("DELETE", &format!("/v1/{kind}/{}", name.expect("a name")), &Value::Null);
                }
            }
        }
        self.build();
    }
}
