//! Runs the program as a user does.
#![allow(dead_code)] // each test file uses a part

pub mod played;

use serde_json::Value;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Output, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// How long a test waits for an event. It bounds failures alone: a machine whose disk is busy with
/// other work takes seconds for a durable write.
pub const PATIENCE: Duration = Duration::from_secs(180);

/// Waits until what `show` returns is as wanted.
#[track_caller]
pub fn wait_for(show: impl Fn() -> Value, is_so: impl Fn(&Value) -> bool) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let shown = show();
        if is_so(&shown) {
            return;
        }
        assert!(Instant::now() < deadline, "not within {PATIENCE:?}: {shown}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// The program under test.
pub fn freestone() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_freestone"));
    command
        .env_remove("FREESTONE_LOG")
        .env_remove("FREESTONE_SOCKET")
        .env_remove("NOTIFY_SOCKET")
        .stdin(Stdio::null());
    command
}

/// Runs the program to its end.
pub fn run(args: &[&str]) -> Output {
    freestone().args(args).output().expect("the program starts")
}

/// The program's standard error and exit code.
pub fn failure(args: &[&str]) -> (String, i32) {
    let output = run(args);
    (String::from_utf8(output.stderr).unwrap(), output.status.code().unwrap_or(-1))
}

/// Runs the program to its end and returns its JSON lines.
pub fn run_json(args: &[&str]) -> Vec<Value> {
    json_lines(&run(args))
}

/// As [`run`], with control sockets in `runtime`.
pub fn run_in(runtime: &Path, args: &[&str]) -> Output {
    freestone().env("XDG_RUNTIME_DIR", runtime).args(args).output().expect("the program starts")
}

/// As [`failure`], with control sockets in `runtime`.
pub fn failure_in(runtime: &Path, args: &[&str]) -> (String, i32) {
    let output = run_in(runtime, args);
    (String::from_utf8(output.stderr).unwrap(), output.status.code().unwrap_or(-1))
}

/// As [`run_json`], with control sockets in `runtime`.
pub fn run_json_in(runtime: &Path, args: &[&str]) -> Vec<Value> {
    json_lines(&run_in(runtime, args))
}

pub fn json_lines(output: &Output) -> Vec<Value> {
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    text.lines().map(|line| serde_json::from_str(line).expect(line)).collect()
}

/// Sends a signal by its name.
pub fn kill(signal: &str, pid: u32) {
    let status = Command::new("kill").args(["-s", signal, &pid.to_string()]).status();
    assert!(status.expect("kill runs").success());
}

/// A `serve --json` that is ready.
pub struct Server {
    child: Child,
    events: mpsc::Receiver<Value>,
}

impl Server {
    /// Starts it and waits until clients may connect; the ready event comes with it.
    pub fn start(args: &[&str]) -> (Server, Value) {
        Server::start_with(freestone(), args)
    }

    /// As [`Server::start`], with control sockets in `runtime`.
    pub fn start_in(runtime: &Path, args: &[&str]) -> (Server, Value) {
        let mut command = freestone();
        command.env("XDG_RUNTIME_DIR", runtime);
        Server::start_with(command, args)
    }

    /// As [`Server::start`], by another user, from a copy of the program that it can execute.
    pub fn start_as(uid: u32, program: &Path, args: &[&str]) -> (Server, Value) {
        let mut command = Command::new(program);
        command
            .env_remove("FREESTONE_LOG")
            .env_remove("FREESTONE_SOCKET")
            .env_remove("NOTIFY_SOCKET")
            .stdin(Stdio::null());
        std::os::unix::process::CommandExt::uid(&mut command, uid);
        std::os::unix::process::CommandExt::gid(&mut command, uid);
        Server::start_with(command, args)
    }

    fn start_with(mut command: Command, args: &[&str]) -> (Server, Value) {
        command.args(["serve", "--json", "--log", "warn"]).args(args);
        let mut child =
            command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("the program starts");
        let events = read_events(child.stdout.take().expect("piped"));
        let mut server = Server { child, events };
        let ready = server.event("ready");
        (server, ready)
    }

    /// The next event of this name; others are skipped.
    pub fn event(&mut self, name: &str) -> Value {
        loop {
            match self.events.recv_timeout(PATIENCE) {
                Ok(event) if event["event"] == name => return event,
                Ok(_) => {}
                Err(_) => panic!("no event {name}: {}", self.stderr()),
            }
        }
    }

    fn stderr(&mut self) -> String {
        let _ = self.child.kill();
        let mut text = String::new();
        let _ = self.child.stderr.take().map(|mut pipe| pipe.read_to_string(&mut text));
        text
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Sends a signal by its name.
    pub fn signal(&self, name: &str) {
        kill(name, self.child.id());
    }

    /// Waits until it has ended by itself; returns the exit code.
    pub fn wait(mut self) -> i32 {
        self.child.wait().expect("it is our child").code().unwrap_or(-1)
    }

    /// Kills it with SIGKILL.
    pub fn kill(mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Sends SIGTERM; returns the exit code and what was said on standard error.
    pub fn stop(mut self) -> (i32, String) {
        self.signal("TERM");
        let code = self.child.wait().expect("it is our child").code().unwrap_or(-1);
        let mut text = String::new();
        let _ = self.child.stderr.take().map(|mut pipe| pipe.read_to_string(&mut text));
        (code, text)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read_events(stdout: ChildStdout) -> mpsc::Receiver<Value> {
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            let event = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"));
            if sender.send(event).is_err() {
                return;
            }
        }
    });
    receiver
}

/// `key=value` with a path; commas doubled.
pub fn path_value(key: &str, path: &Path) -> String {
    format!("{key}={}", path.display().to_string().replace(',', ",,"))
}

/// Writes everywhere, checking whatever is read.
pub fn write(socket: &Path) {
    let device = format!("virtio-blk-vhost-user:{}", path_value("path", socket));
    let args = ["bench", "--json", "--device", &device, "--rw", "randall", "--verify", "--queues", "2"];
    let result = run_json(&[&args[..], &["--time", "0.5", "--ramp", "0"]].concat()).pop().unwrap();
    assert!(result["verified"].as_u64() > Some(0), "{result}");
    assert_eq!((&result["mismatches"], &result["failed"]), (&0.into(), &0.into()), "{result}");
}
