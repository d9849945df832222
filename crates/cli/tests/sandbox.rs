//! The privileges that `freestone serve` drops before it serves, and service without them.

use crate::common::{Server, failure_in, path_value, run_json_in, write};
use serde_json::{Value, json};
use std::fs;
use std::os::unix::fs::{MetadataExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

const NOBODY: u32 = 65534;
const MEMBER_BYTES: u64 = 16 << 20;

/// One line of each thread's `/proc/…/status`, without its name.
fn of_threads(ready: &Value, field: &str) -> Vec<String> {
    let threads = format!("/proc/{}/task", ready["pid"]);
    let value = |thread: fs::DirEntry| {
        let status = fs::read_to_string(thread.path().join("status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':')).expect(field);
        line.trim().to_owned()
    };
    fs::read_dir(threads).unwrap().map(|thread| value(thread.unwrap())).collect()
}

fn all_are(ready: &Value, field: &str, value: &str) {
    let found = of_threads(ready, field);
    assert!(found.len() > 2 && found.iter().all(|found| found == value), "{field}: {found:?}");
}

fn is_root() -> bool {
    fs::metadata("/proc/self").unwrap().uid() == 0
}

fn file(directory: &Path, name: &str) -> String {
    fs::create_dir_all(directory).unwrap();
    let path = directory.join(name);
    fs::File::create(&path).unwrap().set_len(MEMBER_BYTES).unwrap();
    path.to_str().unwrap().to_owned()
}

fn export(socket: &Path) -> String {
    format!("vhost-user-blk:{},queues=2", path_value("socket", socket))
}

#[test]
fn every_thread_is_confined() {
    let dir = tempfile::tempdir().unwrap();
    let (socket, image) = (dir.path().join("s"), file(dir.path(), "image"));
    let device = format!("io_uring:path={image}");
    let nbd = format!("nbd:socket={}", dir.path().join("nbd").display());
    let (mut server, ready) =
        Server::start(&["--device", &device, "--export", &export(&socket), "--export", &nbd]);
    if ready["sandbox"]["seccomp"] != true || ready["sandbox"]["landlock"] == Value::Null {
        return; // a kernel that cannot do it
    }
    all_are(&ready, "NoNewPrivs", "1");
    all_are(&ready, "Seccomp", "2");
    all_are(&ready, "CapEff", "0000000000000000");
    all_are(&ready, "CapPrm", "0000000000000000");
    assert_eq!(ready["sandbox"]["capabilities"], json!([]));
    write(&socket);
    fs::OpenOptions::new().write(true).open(&image).unwrap().set_len(2 * MEMBER_BYTES).unwrap();
    server.signal("HUP");
    assert_eq!(server.event("refreshed")["capacity"], 2 * MEMBER_BYTES);
    write(&socket);
    let (code, said) = server.stop();
    assert_eq!(code, 0);
    assert!(!said.contains("refused") && !said.contains("ERROR"), "{said}");
    assert!(!socket.exists());
}

#[test]
fn nothing_is_given_up_where_nothing_is_asked_for() {
    let dir = tempfile::tempdir().unwrap();
    let args = ["--device", "null", "--export", &export(&dir.path().join("s")), "--sandbox", "off"];
    let (server, ready) = Server::start(&args);
    all_are(&ready, "Seccomp", &of_threads(&json!({ "pid": std::process::id() }), "Seccomp")[0]);
    assert_eq!(ready["sandbox"]["mode"], "off");
    assert_eq!(server.stop().0, 0);
}

#[test]
fn each_supported_restriction_is_in_force() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let (server, ready) = Server::start(&["--device", "null", "--export", &export(&socket)]);
    let is_complete = ready["sandbox"]["seccomp"] == true && ready["sandbox"]["landlock"] != Value::Null;
    assert_eq!(server.stop().0, 0);
    if is_complete {
        let (server, _) =
            Server::start(&["--device", "null", "--export", &export(&socket), "--sandbox", "required"]);
        assert_eq!(server.stop().0, 0);
    }
}

/// An array of two files in a directory of their own, being served.
struct Array {
    dir: tempfile::TempDir,
    socket: PathBuf,
}

impl Array {
    fn serve(more: &[&str]) -> (Array, Server, Value) {
        let dir = tempfile::tempdir().unwrap();
        let members = ["a", "b"].map(|name| file(&dir.path().join("members"), name));
        let mut args = vec!["array", "create", "data", "--level", "1", "--json"];
        args.extend(members.iter().map(String::as_str));
        run_json_in(dir.path(), &args);
        let (socket, device) = (dir.path().join("s"), format!("raid:members={}", members.join("+")));
        let mut args = vec!["--device", &device];
        let export = export(&socket);
        args.extend(["--export", &export].into_iter().chain(more.iter().copied()));
        let (server, ready) = Server::start_in(dir.path(), &args);
        (Array { dir, socket }, server, ready)
    }

    fn file(&self, directory: &str, name: &str) -> String {
        file(&self.dir.path().join(directory), name)
    }

    fn add(&self, path: &str) -> Value {
        run_json_in(self.dir.path(), &["array", "add", "data", path, "--json"]).remove(0)
    }
}

#[test]
fn an_array_takes_new_members_where_its_members_are_and_nowhere_else() {
    let (array, server, ready) = Array::serve(&[]);
    array.add(&array.file("members", "c"));
    if ready["sandbox"]["landlock"] != Value::Null {
        let elsewhere = array.file("elsewhere", "d");
        let (said, code) = failure_in(array.dir.path(), &["array", "add", "data", &elsewhere]);
        assert_eq!(code, 1);
        let hint = format!("the sandbox lets members be opened in /dev, {}", array.dir.path().display());
        assert!(said.contains("ermission denied") && said.contains(&hint), "{said}");
        assert!(said.contains("--sandbox-path adds to that"), "{said}");
    }
    write(&array.socket);
    assert_eq!(server.stop(), (0, String::new()));
}

#[test]
fn members_come_from_where_people_say_that_they_may() {
    let elsewhere = tempfile::tempdir().unwrap();
    let (array, server, _) = Array::serve(&["--sandbox-path", elsewhere.path().to_str().unwrap()]);
    array.add(&file(elsewhere.path(), "c"));
    write(&array.socket);
    assert_eq!(server.stop(), (0, String::new()));
}

#[test]
fn root_serves_as_another_user_what_only_root_can_open() {
    if !is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let image = file(dir.path(), "image");
    fs::set_permissions(&image, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    chown(dir.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    let (socket, device) = (dir.path().join("s"), format!("io_uring:path={image}"));
    let user = format!("{NOBODY}:{NOBODY}");
    for sandbox in ["auto", "off"] {
        let args = ["--device", &device, "--export", &export(&socket), "--user", &user, "--sandbox", sandbox];
        let (mut server, ready) = Server::start(&args);
        all_are(&ready, "Uid", &[NOBODY; 4].map(|id| id.to_string()).join("\t"));
        all_are(&ready, "Gid", &[NOBODY; 4].map(|id| id.to_string()).join("\t"));
        all_are(&ready, "CapPrm", "0000000000000000");
        assert_eq!(fs::metadata(&socket).unwrap().uid(), NOBODY);
        write(&socket);
        server.signal("HUP");
        server.event("refreshed");
        let (code, said) = server.stop();
        assert_eq!(code, 0);
        assert!(!said.contains("refused") && !said.contains("ERROR"), "{said}");
        assert!(!socket.exists());
    }
}

#[test]
fn a_server_that_does_not_belong_to_root_says_nothing_more() {
    if !is_root() {
        return; // the other tests are this one
    }
    let dir = tempfile::tempdir().unwrap();
    chown(dir.path(), Some(NOBODY), Some(NOBODY)).unwrap();
    let (socket, image) = (dir.path().join("s"), file(dir.path(), "image"));
    chown(&image, Some(NOBODY), Some(NOBODY)).unwrap();
    let program = dir.path().join("freestone");
    // By another process: a file that a parallel test may hold open for writing cannot be executed.
    let copied = Command::new("cp").arg(env!("CARGO_BIN_EXE_freestone")).arg(&program).status();
    assert!(copied.unwrap().success());
    let device = format!("io_uring:path={image}");
    let (server, ready) =
        Server::start_as(NOBODY, &program, &["--device", &device, "--export", &export(&socket)]);
    all_are(&ready, "Uid", &[NOBODY; 4].map(|id| id.to_string()).join("\t"));
    write(&socket);
    let (code, said) = server.stop();
    assert_eq!((code, said.as_str()), (0, ""));
}
