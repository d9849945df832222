//! The rights that the daemon gives up before it reads foreign data, and attacks from inside.

use crate::common::{Daemon, MIB};
use daemon::confinement::Confinement;
use daemon::engine::{Engine, Options};
use reactor::CoreConfig;
use reqwest::Method;
use sandbox::Mode;
use serde_json::json;
use std::fs::{self, File};
use std::io::ErrorKind::{self, PermissionDenied};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

/// In the environment of a test that runs itself again: the directory of the daemon in there.
const INNER: &str = "FREESTONE_CONFINED";
/// The text that such a test prints at its end.
const DONE: &str = "tried everything";

/// Whether this kernel can do all of it. CI's can.
fn has_sandbox() -> bool {
    let is_in_force = std::thread::spawn(|| {
        let mut sandbox = sandbox::Sandbox::new(Mode::Required, sandbox::Profile::default(), None);
        sandbox.confine().is_ok()
    });
    let is_in_force = is_in_force.join().unwrap();
    if !is_in_force {
        eprintln!("skipped: this kernel has no Landlock");
    }
    is_in_force
}

/// Runs the test called `name` again, in a process that has a daemon's engine, in its sandbox.
/// `attack` gets the daemon's directory; it runs on a thread that a thread of the engine started.
/// Returns `None` in that process.
fn confined(name: &str, attack: fn(&Path)) -> Option<Output> {
    if let Some(directory) = std::env::var_os(INNER) {
        let directory = Path::new(&directory);
        let options = Options {
            workers: None,
            state_dir: directory.join("state"),
            runtime_dir: directory.join("run"),
            cores: vec![CoreConfig::default()],
            scan: Vec::new(),
            member_timeout: Duration::ZERO,
            has_array_sockets: false,
            confinement: Confinement::new(Mode::Required),
        };
        let engine = Engine::start(options).unwrap();
        attack(directory);
        let directory = directory.to_owned();
        std::thread::spawn(move || attack(&directory)).join().unwrap();
        engine.stop(false);
        println!("{DONE}");
        return None;
    }
    let directory = tempfile::tempdir().unwrap();
    fs::write(directory.path().join("image"), b"x").unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", &format!("sandbox::{name}"), "--nocapture", "--test-threads=1"])
        .env(INNER, directory.path())
        .env("XDG_RUNTIME_DIR", directory.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    Some(output)
}

fn kind<T>(result: std::io::Result<T>) -> Option<ErrorKind> {
    result.err().map(|error| error.kind())
}

#[test]
fn files_outside_the_daemons_directories_are_closed_to_its_threads() {
    if !has_sandbox() {
        return;
    }
    let attack = |directory: &Path| {
        for secret in ["/etc/shadow", "/etc/passwd", "/proc/1/environ", "/root"] {
            assert_eq!(kind(File::open(secret)), Some(PermissionDenied), "{secret}");
        }
        // Next to its own directories, too, and no file can be created elsewhere.
        assert_eq!(kind(File::open(directory.join("image"))), Some(PermissionDenied));
        assert_eq!(kind(File::create_new(directory.join("new"))), Some(PermissionDenied));
        assert_eq!(kind(File::create_new("/dev/shm/freestone-escape")), Some(PermissionDenied));
        assert_eq!(kind(fs::remove_file(directory.join("image"))), Some(PermissionDenied));
        assert!(fs::write("/sys/kernel/mm/ksm/run", "0").is_err());
        // A link made in a directory that is open does not open what it leads to.
        let link = directory.join("run/link");
        assert!(std::os::unix::fs::symlink("/etc/shadow", &link).is_err());
        assert_eq!(kind(fs::read_dir("/sys/block")), None);
        assert_eq!(kind(File::open("/dev/null")), None);
        let own = directory.join("state").join(format!("{:?}", std::thread::current().id()));
        assert_eq!(kind(fs::write(own, "kept")), None);
    };
    let name = "files_outside_the_daemons_directories_are_closed_to_its_threads";
    let Some(output) = confined(name, attack) else { return };
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains(DONE), "{output:?}");
}

#[test]
fn a_thread_of_the_daemon_cannot_execute_a_program() {
    if !has_sandbox() {
        return;
    }
    let attack = |_: &Path| panic!("still there: {}", Command::new("/bin/true").exec());
    let Some(output) = confined("a_thread_of_the_daemon_cannot_execute_a_program", attack) else { return };
    assert_eq!(output.status.signal(), Some(signal_hook::consts::SIGSYS), "{output:?}");
}

#[test]
fn every_thread_of_the_daemon_is_confined() {
    if !has_sandbox() {
        return;
    }
    let daemon = Daemon::new();
    daemon.post("/v1/devices", &json!({ "name": "d", "spec": "mem:size=64M" }));
    daemon.post("/v1/exports", &json!({ "name": "e", "kind": "nbd", "volumes": ["d"] }));
    let threads = fs::read_dir(format!("/proc/{}/task", daemon.pid())).unwrap();
    // A thread that has ended meanwhile has no status.
    let status = |thread: fs::DirEntry| fs::read_to_string(thread.path().join("status")).ok();
    let statuses: Vec<String> = threads.filter_map(|thread| status(thread.unwrap())).collect();
    assert!(statuses.len() > 4, "{}", statuses.len());
    for status in &statuses {
        let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim();
        assert_eq!((field("Seccomp:"), field("NoNewPrivs:")), ("2", "1"), "{status}");
        let kept = u64::from_str_radix(field("CapPrm:"), 16).unwrap();
        // CAP_SYS_MODULE, CAP_SYS_RAWIO, CAP_SYS_PTRACE, CAP_NET_ADMIN, CAP_SETUID
        assert_eq!([16, 17, 19, 12, 7].map(|capability| kept >> capability & 1), [0; 5], "{status}");
    }
    assert!(daemon.log().contains("sandbox: landlock"), "{}", daemon.log());
}

#[test]
fn a_path_outside_the_sandbox_is_refused_by_path_and_option() {
    if !has_sandbox() {
        return;
    }
    let elsewhere = tempfile::tempdir().unwrap();
    let path = elsewhere.path().join("image");
    File::create(&path).unwrap().set_len(64 * MIB).unwrap();
    let path = path.display().to_string();
    let daemon = Daemon::new();
    let hint = format!(
        "Permission denied: it lies outside the sandbox of freestoned; --sandbox-path {}, ",
        elsewhere.path().display()
    );
    let (status, _, detail) =
        daemon.refusal(Method::POST, "/v1/devices", &json!({ "name": "d", "spec": path }));
    assert_eq!(status, 422);
    assert!(detail.starts_with(&format!("device d: {path}: {hint}")), "{detail}");
    let array = json!({ "name": "a", "level": "0", "members": [path] });
    let (_, _, detail) = daemon.refusal(Method::POST, "/v1/arrays", &array);
    assert!(detail.starts_with(&format!("array a: {path}: {hint}")), "{detail}");
    daemon.post("/v1/devices", &json!({ "name": "m", "spec": "mem:size=64M" }));
    let export = |options: serde_json::Value| json!({ "name": "e", "kind": "nbd", "volumes": ["m"], "options": options });
    let socket = export(json!({ "socket": elsewhere.path().join("s") }));
    let (_, _, detail) = daemon.refusal(Method::POST, "/v1/exports", &socket);
    assert!(detail.starts_with("export e: ") && detail.contains(&hint), "{detail}");
    let keys = export(json!({ "listen": "127.0.0.1:0", "tls-psk": "/etc/shadow" }));
    let (_, _, detail) = daemon.refusal(Method::POST, "/v1/exports", &keys);
    assert!(
        detail.starts_with("export e: /etc/shadow: Permission denied: it lies outside the sandbox of freestoned; --sandbox-path /etc/shadow, "),
        "{detail}"
    );
}

#[test]
fn devices_of_the_state_are_opened_again_in_any_directory() {
    let elsewhere = tempfile::tempdir().unwrap();
    let path = elsewhere.path().join("image");
    File::create(&path).unwrap().set_len(64 * MIB).unwrap();
    let mut daemon = Daemon::with(&["--sandbox-path", elsewhere.path().to_str().unwrap()]);
    daemon.post("/v1/devices", &json!({ "name": "d", "spec": path.display().to_string() }));
    let socket = elsewhere.path().join("s");
    let export = json!({ "name": "e", "kind": "nbd", "volumes": ["d"], "options": { "socket": socket } });
    daemon.post("/v1/exports", &export);
    daemon.end("-TERM");
    daemon.args.clear();
    daemon.start();
    assert_eq!(daemon.get("/v1/exports/e")["state"], "active", "{}", daemon.log());
}

#[test]
fn a_configuration_names_paths_and_opens_what_it_has() {
    let [listed, own] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    for folder in [&listed, &own] {
        File::create(folder.path().join("image")).unwrap().set_len(64 * MIB).unwrap();
    }
    let image = |folder: &tempfile::TempDir| folder.path().join("image").display().to_string();
    let mut daemon = Daemon::prepare(&[]);
    let text = format!(
        "sandbox_paths = [{:?}]\n[[device]]\nname = \"own\"\nspec = {:?}\n",
        listed.path(),
        image(&own)
    );
    fs::write(daemon.path("c.toml"), text).unwrap();
    daemon.args.extend(["--config".into(), daemon.path("c.toml").display().to_string()]);
    daemon.start();
    daemon.post("/v1/devices", &json!({ "name": "listed", "spec": image(&listed) }));
    let devices = daemon.get("/v1/devices");
    assert!(devices.to_string().contains(r#""name":"own""#), "{devices}");
}

#[test]
fn a_path_that_does_not_exist_stays_closed_with_a_warning() {
    if !has_sandbox() {
        return;
    }
    let elsewhere = tempfile::tempdir().unwrap();
    let later = elsewhere.path().join("later");
    let daemon = Daemon::with(&["--sandbox-path", later.to_str().unwrap()]);
    assert!(daemon.log().contains("sandbox path does not exist"), "{}", daemon.log());
    fs::create_dir(&later).unwrap();
    let image = later.join("image");
    File::create(&image).unwrap().set_len(64 * MIB).unwrap();
    let device = json!({ "name": "d", "spec": image.display().to_string() });
    let (status, _, detail) = daemon.refusal(Method::POST, "/v1/devices", &device);
    assert_eq!(status, 422, "{detail}");
    assert!(detail.contains("lies outside the sandbox of freestoned"), "{detail}");
}

#[test]
fn nothing_is_given_up_where_nothing_is_asked_for() {
    let elsewhere = tempfile::tempdir().unwrap();
    let path = elsewhere.path().join("image");
    File::create(&path).unwrap().set_len(64 * MIB).unwrap();
    let daemon = Daemon::with(&["--sandbox", "off"]);
    daemon.post("/v1/devices", &json!({ "name": "d", "spec": path.display().to_string() }));
    assert!(daemon.log().contains("sandbox: off"), "{}", daemon.log());
}
