//! `freestone fs`, with a virtiofsd that tests play (`fake-virtiofsd`).

use crate::common::{PATIENCE, failure, freestone, kill, run};
use serde_json::{Value, json};
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};
use tempfile::TempDir;

const FAKE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fake-virtiofsd");

/// A folder with a directory to serve, a place for the socket, and the orders of the fake.
struct Place {
    folder: TempDir,
    orders: fs::File,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("tree")).unwrap();
        let fifo = folder.path().join("orders");
        assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        // Open for reading, too: so it does not wait for a reader, and keeps what is not read yet.
        let orders = fs::File::options().read(true).write(true).open(fifo).unwrap();
        Place { folder, orders }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn order(&self, text: &str) {
        writeln!(&self.orders, "{text}").unwrap();
    }

    fn arguments(&self) -> Vec<String> {
        let text = fs::read_to_string(self.path("arguments")).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    fn pids(&self) -> Vec<u32> {
        let text = fs::read_to_string(self.path("pids")).unwrap();
        text.lines().map(|line| line.parse().unwrap()).collect()
    }

    /// `freestone fs serve` on the directory.
    fn command(&self, more: &[&str]) -> Command {
        let mut command = freestone();
        command.env("FAKE_DIRECTORY", self.folder.path()).args(["fs", "serve", "--json"]);
        command
            .arg(self.path("tree"))
            .arg("--socket")
            .arg(self.path("s"))
            .args(["--virtiofsd", FAKE])
            .args(more);
        command
    }

    /// One that is ready.
    fn serve(&self, more: &[&str]) -> Running {
        let mut running = Running::start(self.command(more));
        running.event("ready");
        running
    }
}

struct Running {
    child: Child,
    events: mpsc::Receiver<Value>,
}

impl Running {
    fn start(mut command: Command) -> Running {
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let (sender, events) = mpsc::channel();
        let stdout = BufReader::new(child.stdout.take().unwrap());
        std::thread::spawn(move || {
            stdout.lines().map_while(Result::ok).for_each(|line| {
                let _ = sender.send(serde_json::from_str(&line).unwrap());
            });
        });
        Running { child, events }
    }

    /// The next event, which has this name.
    #[track_caller]
    fn event(&mut self, name: &str) -> Value {
        match self.events.recv_timeout(PATIENCE) {
            Ok(event) if event["event"] == name => event,
            other => {
                let _ = self.child.kill();
                panic!("no event {name} but {other:?}: {}", self.said());
            }
        }
    }

    fn said(&mut self) -> String {
        let mut text = String::new();
        self.child.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        text
    }

    /// Its exit code and its standard error.
    fn end(mut self) -> (i32, String) {
        let said = self.said();
        (self.child.wait().unwrap().code().unwrap_or(-1), said)
    }

    fn stop(self) -> (i32, String) {
        kill("TERM", self.child.id());
        self.end()
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until the process has ended. Its new parent may reap it later.
fn wait_for_end(pid: u32) {
    let deadline = Instant::now() + PATIENCE;
    let is_running = || {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with('Z'))
    };
    while is_running() {
        assert!(Instant::now() < deadline, "process {pid} runs");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn virtiofsd_gets_the_flags_of_the_profile_and_a_socket_that_listens() {
    let place = Place::new();
    let tree = place.path("tree").canonicalize().unwrap();
    let common =
        [&format!("--shared-dir={}", tree.display()), "--fd=0", "--log-level=info", "--sandbox=namespace"];
    let cases: [(&[&str], &[&str]); 4] = [
        (&[], &["--thread-pool-size=0", "--cache=auto"]),
        (
            &["--profile", "throughput", "--vcpus", "6"],
            &["--thread-pool-size=6", "--cache=never", "--allow-direct-io", "--inode-file-handles=prefer"],
        ),
        (&["--profile", "cache"], &["--thread-pool-size=0", "--cache=always", "--writeback"]),
        (
            &["--profile", "dense", "--nofile", "4096", "--", "--xattr", "--cache=never"],
            &[
                "--thread-pool-size=0",
                "--cache=metadata",
                "--inode-file-handles=prefer",
                "--rlimit-nofile=4096",
                "--xattr",
                "--cache=never",
            ],
        ),
    ];
    for (given, expected) in cases {
        let running = place.serve(given);
        assert_eq!(place.arguments(), [&common[..], &["--announce-submounts"], expected].concat());
        let mode = fs::metadata(place.path("s")).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        UnixStream::connect(place.path("s")).unwrap();
        assert_eq!(running.stop(), (0, String::new()));
        assert!(!place.path("s").exists());
        wait_for_end(*place.pids().last().unwrap());
    }
}

#[test]
fn reasons_are_explained_without_a_start() {
    let place = Place::new();
    let output = place.command(&["--profile", "throughput", "--explain"]).output().unwrap();
    assert!(output.status.success());
    let event: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&event["event"], &event["profile"]), (&json!("explain"), &json!("throughput")));
    assert_eq!((&event["argv"][0], &event["version"]), (&json!(FAKE), &json!("1.13.2")));
    let flags = event["flags"].as_array().unwrap();
    let has = |text: &str| flags.iter().any(|flag| flag["flag"] == text && flag["why"] != "");
    assert!(has("--thread-pool-size=4") && has("--fd=0"), "{event}");
    assert!(!place.path("arguments").exists() && !place.path("s").exists());
}

#[test]
fn a_socket_gets_permissions_and_a_group() {
    let place = Place::new();
    let mode = || fs::metadata(place.path("s")).unwrap().permissions().mode() & 0o777;
    let group = std::os::unix::fs::MetadataExt::gid(&fs::metadata(place.folder.path()).unwrap()).to_string();
    for (more, bits) in [(&["--socket-group", &group][..], 0o660), (&["--socket-permissions", "640"], 0o640)]
    {
        let running = place.serve(more);
        assert_eq!(mode(), bits);
        assert_eq!(running.stop().0, 0);
    }
}

#[test]
fn invalid_arguments_are_refused_before_anything_starts() {
    let place = Place::new();
    let (tree, socket) = (place.path("tree"), place.path("s"));
    fs::write(place.path("file"), b"").unwrap();
    let [missing, file, inside, nowhere] =
        ["missing", "file", "tree/s", "missing/s"].map(|name| place.path(name));
    let long = format!("/tmp/{}", "x".repeat(103));
    let cases: &[(&[&str], String)] = &[
        (&[text(&missing), "--socket", text(&socket)], "missing: No such file".into()),
        (&[text(&file), "--socket", text(&socket)], "file: it is not a directory".into()),
        (&[text(&tree), "--socket", &long], format!("--socket {long}: 108 bytes: want 107 at most")),
        (&[text(&tree), "--socket", text(&inside)], "where the guest could replace it".into()),
        (&[text(&tree), "--socket", text(&nowhere)], "missing/s: its directory: No such file".into()),
        (&[text(&tree), "--socket", text(&socket), "--vcpus", "0"], "0 is not in 1..=1024".into()),
        (&[text(&tree), "--socket", text(&socket), "--vcpus", "1025"], "1025 is not in 1..=1024".into()),
        (&[text(&tree), "--socket", text(&socket), "--nofile", "1"], "1 is not in 1024..".into()),
        (&[text(&tree), "--socket", text(&socket), "--queues", "0"], "0 is not in 1..=63".into()),
        (&[text(&tree), "--socket", text(&socket), "--queues", "64"], "64 is not in 1..=63".into()),
        (
            &[text(&tree), "--socket", text(&socket), "--", "--queues=2"],
            "--queues: freestone fs serve".into(),
        ),
        (&[text(&tree), "--socket", text(&socket), "--profile", "fast"], "throughput, latency, cache".into()),
        (&[text(&tree), "--socket", text(&socket), "--", "--fd=3"], "--fd: freestone fs serve sets".into()),
        (&[text(&tree), "--socket", text(&socket), "--", "xattr"], "xattr: want a flag of virtiofsd".into()),
        (&[text(&tree)], "--socket <PATH>".into()),
    ];
    for (args, expected) in cases {
        let (said, code) = failure(&[&["fs", "serve"], *args].concat());
        assert!(said.contains(expected) && said.lines().count() == 1 && code == 2, "{args:?}: {code} {said}");
    }
    assert!(!socket.exists());
}

#[test]
fn a_virtiofsd_that_is_missing_old_or_another_program_is_named() {
    let place = Place::new();
    let said = |version: &str| {
        let output = place.command(&[]).env("FAKE_VERSION", version).output().unwrap();
        assert_eq!(output.status.code(), Some(1));
        String::from_utf8(output.stderr).unwrap()
    };
    for (version, reason) in [
        ("virtiofsd 1.10.9", "version 1.10.9 is too old"),
        ("virtiofsd version 7.2.17 (Debian 1:7.2)", "version 7.2.17 is of QEMU's former program"),
        ("cat 1.13.2", "does not print a version of virtiofsd"),
    ] {
        let said = said(version);
        assert!(
            said.starts_with(&format!("freestone: virtiofsd {FAKE}: ")) && said.contains(reason),
            "{said}"
        );
        assert!(said.contains("want 1.11 or newer: install the package virtiofsd"), "{said}");
    }
    let (said, code) = failure(&[
        "fs",
        "serve",
        text(&place.path("tree")),
        "--socket",
        text(&place.path("s")),
        "--virtiofsd",
        "/nowhere/v",
    ]);
    assert!(said.contains("/nowhere/v: cannot be started: No such file") && code == 1, "{said}");
    assert!(!place.path("s").exists());
}

#[test]
fn several_queues_are_served_by_freestone_fs() {
    let place = Place::new();
    let ours = format!("freestone-fs {} (library virtiofsd 1.14.0)", env!("CARGO_PKG_VERSION"));
    let start = |version: &str, more: &[&str]| {
        let mut command = place.command(more);
        command.env("FAKE_VERSION", version);
        Running::start(command)
    };
    let mut running = start(&ours, &["--queues", "4", "--profile", "cache", "--vcpus", "8"]);
    let event = running.event("ready");
    assert_eq!(
        (&event["program"], &event["version"]),
        (&json!("freestone-fs"), &json!(env!("CARGO_PKG_VERSION")))
    );
    assert!(place.arguments().ends_with(&["--queues=4", "--cache=always", "--writeback"].map(str::to_owned)));
    place.order("[INFO  freestone_fs::serve] Client connected, servicing requests");
    running.event("connected");
    place.order("exit 1");
    running.event("ended");
    let (code, said) = running.end();
    assert!(said.contains("freestone-fs ended while a guest used ") && code == 1, "{said}");
    for (version, queues, reason) in [
        ("virtiofsd 1.13.2", "2", "--version does not print a version of freestone-fs; want "),
        ("freestone-fs 0.0.1", "2", "version 0.0.1 is of another release than this program; want "),
        (&ours, "1", "does not print a version of virtiofsd; want 1.11 or newer"),
    ] {
        let (code, said) = start(version, &["--queues", queues]).end();
        assert!(said.contains(reason) && said.lines().count() == 1 && code == 1, "{said}");
    }
}

#[test]
fn a_freestone_fs_is_searched_next_to_this_program_and_in_libexec() {
    let place = Place::new();
    let [bin, libexec] = ["bin", "libexec"].map(|name| place.path(name));
    let program = bin.join("freestone");
    fs::create_dir(&bin).unwrap();
    fs::create_dir(&libexec).unwrap();
    fs::copy(freestone().get_program(), &program).unwrap();
    let explain = || {
        Command::new(&program)
            .args(["fs", "serve", "--explain", "--queues", "2", text(&place.path("tree"))])
            .args(["--socket", text(&place.path("s"))])
            .env("FAKE_VERSION", concat!("freestone-fs ", env!("CARGO_PKG_VERSION")))
            .env("PATH", "/usr/bin:/bin")
            .output()
            .unwrap()
    };
    let said = String::from_utf8(explain().stderr).unwrap();
    assert!(
        said.contains(&format!("not found in {}, {} and PATH", bin.display(), libexec.display())),
        "{said}"
    );
    for directory in [libexec, bin] {
        let fake = directory.join("freestone-fs");
        fs::copy(FAKE, &fake).unwrap();
        let line = String::from_utf8(explain().stdout).unwrap();
        assert!(line.starts_with(&format!("{} ", fake.display())), "{line}");
    }
}

#[test]
fn a_socket_of_another_process_and_a_file_stay() {
    let place = Place::new();
    let first = place.serve(&[]);
    let (code, said) = Running::start(place.command(&[])).end();
    assert!(said.contains("/s: the socket is in use by another process") && code == 1, "{said}");
    UnixStream::connect(place.path("s")).unwrap();
    assert_eq!(first.stop().0, 0);
    fs::write(place.path("s"), b"data").unwrap();
    let (code, said) = Running::start(place.command(&[])).end();
    assert!(said.contains("/s: the path exists and is not a socket") && code == 1, "{said}");
    assert_eq!(fs::read(place.path("s")).unwrap(), b"data");
}

#[test]
fn a_failed_start_ends_the_command_with_the_reason() {
    let place = Place::new();
    let mut command = place.command(&[]);
    command.env("FAKE_FAILURE", "Error entering sandbox");
    let mut running = Running::start(command);
    let event = running.event("ended");
    assert_eq!((&event["exit_code"], &event["had_guest"]), (&json!(1), &json!(false)));
    assert_eq!(event["log"], json!(["[ERROR virtiofsd] Error entering sandbox"]));
    let (code, said) = running.end();
    let reason =
        "virtiofsd ended before it was ready: exit status: 1: [ERROR virtiofsd] Error entering sandbox";
    assert!(said.contains(reason) && code == 1, "{said}");
    assert!(!place.path("s").exists());
}

#[test]
fn a_virtiofsd_without_a_guest_is_restarted_behind_the_same_socket() {
    let place = Place::new();
    let mut running = place.serve(&[]);
    kill("KILL", place.pids()[0]);
    let event = running.event("ended");
    assert_eq!((&event["signal"], &event["restarts_after_ms"]), (&json!(9), &json!(100)));
    UnixStream::connect(place.path("s")).expect("clients may connect meanwhile");
    running.event("restarted");
    assert_eq!(place.pids().len(), 2);
    let (code, said) = running.stop();
    assert!(code == 0 && said.contains("the last lines of its log"), "{code} {said}");
}

#[test]
fn a_guest_that_loses_its_virtiofsd_is_reported_and_nothing_is_restarted() {
    let place = Place::new();
    let mut running = place.serve(&[]);
    place.order("[INFO  virtiofsd] Client connected, servicing requests");
    running.event("connected");
    kill("KILL", place.pids()[0]);
    let event = running.event("ended");
    assert_eq!((&event["had_guest"], &event["restarts_after_ms"]), (&json!(true), &json!(null)));
    let (code, said) = running.end();
    assert!(said.contains("the guest has lost its mount") && said.contains("restart the guest"), "{said}");
    assert!(said.contains("signal: 9 (SIGKILL)") && code == 1, "{said}");
    assert_eq!(place.pids().len(), 1);
    assert!(!place.path("s").exists());
}

#[test]
fn one_guest_is_served_and_its_end_is_the_end() {
    let place = Place::new();
    let mut running = place.serve(&[]);
    place.order("close"); // as virtiofsd does after it has accepted
    place.order("[INFO  virtiofsd] Client connected, servicing requests");
    running.event("connected");
    let refused = UnixStream::connect(place.path("s")).unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ConnectionRefused);
    place.order("[INFO  virtiofsd] Client disconnected, shutting down");
    place.order("exit 0");
    running.event("disconnected");
    running.event("stopped");
    assert_eq!(running.end(), (0, String::new()));
    assert!(!place.path("s").exists());
}

#[test]
fn virtiofsd_ends_with_a_killed_supervisor() {
    let place = Place::new();
    let mut running = place.serve(&[]);
    running.child.kill().unwrap();
    running.child.wait().unwrap();
    wait_for_end(place.pids()[0]);
    // The path that it left behind is taken over.
    assert_eq!(place.serve(&[]).stop().0, 0);
}

#[test]
fn an_interrupt_of_the_terminal_is_an_orderly_end() {
    let place = Place::new();
    let mut command = place.command(&[]);
    std::os::unix::process::CommandExt::process_group(&mut command, 0);
    let mut running = Running::start(command);
    running.event("ready");
    place.order("[INFO  virtiofsd] Client connected, servicing requests");
    running.event("connected");
    let stat = fs::read_to_string(format!("/proc/{}/stat", place.pids()[0])).unwrap();
    let group = stat.rsplit(") ").next().unwrap().split(' ').nth(2).unwrap();
    assert_eq!(group, place.pids()[0].to_string(), "the signal reaches virtiofsd, too");
    let group = format!("-{}", running.child.id());
    assert!(Command::new("kill").args(["-s", "INT", "--", &group]).status().unwrap().success());
    running.event("stopped");
    assert_eq!(running.end(), (0, String::new()));
}

#[test]
fn a_stop_of_all_processes_at_once_is_an_orderly_end() {
    let place = Place::new();
    let mut running = place.serve(&[]);
    place.order("[INFO  virtiofsd] Client connected, servicing requests");
    running.event("connected");
    // The supervisor finds both at the same moment.
    let (supervisor, virtiofsd) = (running.child.id(), place.pids()[0]);
    kill("STOP", supervisor);
    kill("TERM", virtiofsd);
    wait_for_end(virtiofsd);
    kill("TERM", supervisor);
    kill("CONT", supervisor);
    running.event("stopped");
    assert_eq!(running.end(), (0, String::new()));
}

#[test]
fn a_socket_may_have_any_name() {
    let place = Place::new();
    let name = std::ffi::OsStr::from_bytes(b"s\xff");
    let mut command = freestone();
    command.env("FAKE_DIRECTORY", place.folder.path()).args(["fs", "serve", "--json"]);
    command
        .arg(place.path("tree"))
        .arg("--socket")
        .arg(place.folder.path().join(name))
        .args(["--virtiofsd", FAKE]);
    let mut running = Running::start(command);
    assert!(running.event("ready")["socket"].as_str().unwrap().ends_with("/s\u{fffd}"));
    assert_eq!(running.stop().0, 0);
}

#[test]
fn systemd_is_notified_when_a_guest_may_connect() {
    let place = Place::new();
    let notify = std::os::unix::net::UnixDatagram::bind(place.path("notify")).unwrap();
    notify.set_read_timeout(Some(PATIENCE)).unwrap();
    let next = || {
        let mut message = [0; 64];
        let len = notify.recv(&mut message).unwrap();
        String::from_utf8_lossy(&message[..len]).trim().to_owned()
    };
    let mut command = place.command(&[]);
    command.env("NOTIFY_SOCKET", place.path("notify"));
    let running = Running::start(command);
    assert_eq!(next(), "READY=1");
    kill("TERM", running.child.id());
    assert_eq!(next(), "STOPPING=1");
    assert_eq!(running.end().0, 0);
}

#[test]
fn lines_for_hypervisors_name_the_socket_and_the_tag() {
    let output = run(&["fs", "attach", "qemu", "--socket", "/run/fs.sock", "--tag", "home"]);
    let line = String::from_utf8(output.stdout).unwrap();
    assert!(line.contains("share=on") && line.contains("id=virtiofs-home,path=/run/fs.sock"), "{line}");
    assert!(line.ends_with("vhost-user-fs-pci,chardev=virtiofs-home,tag=home,queue-size=1024\n"), "{line}");
    let many = run(&["fs", "attach", "qemu", "--socket", "/s", "--queues", "4"]).stdout;
    assert!(String::from_utf8(many).unwrap().ends_with("queue-size=1024,num-request-queues=4\n"));
    let all = String::from_utf8(run(&["fs", "attach", "--socket", "/s"]).stdout).unwrap();
    for name in ["qemu:", "libvirt-domain:", "libvirt-filesystem:", "cloud-hypervisor:", "mount:", "fstab:"] {
        assert!(all.contains(name), "{all}");
    }
    let (said, code) = failure(&["fs", "attach", "floppy", "--socket", "/s"]);
    assert!(
        said.contains("floppy: nothing is known for it, but for cloud-hypervisor") && code == 2,
        "{said}"
    );
    let (said, code) = failure(&["fs", "attach", "--socket", "/s", "--tag", "a,b"]);
    assert!(said.contains("expected 1 to 36 letters") && code == 2, "{said}");
}
