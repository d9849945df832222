//! Which process `freestone array` asks when several run, and where `--socket` may stand. Daemons
//! are played by the test.

use crate::common::played::Played;
use crate::common::{Server, failure, failure_in, freestone, path_value, run_json_in};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Output;

const MEMBER_BYTES: u64 = 16 << 20;
const UUID: &str = "0b5b2c9e-7d1c-4a0c-9d34-6d3f0a3b8a11";

/// A `freestone serve` of a mirror called `data` whose members lie in `folder`, with its control
/// socket in `runtime`.
fn serve_mirror(runtime: &Path, folder: &Path) -> Server {
    std::fs::create_dir_all(folder).unwrap();
    let members: Vec<String> =
        (0..2).map(|slot| folder.join(format!("m{slot}")).to_str().unwrap().into()).collect();
    for member in &members {
        std::fs::File::create(member).unwrap().set_len(MEMBER_BYTES).unwrap();
    }
    let created = run_json_in(
        runtime,
        &["array", "create", "data", "--level", "1", "--json", &members[0], &members[1]],
    );
    assert_eq!(created[0]["event"], "created");
    let export = format!("vhost-user-blk:{}", path_value("socket", &folder.join("vhost.sock")));
    let device = format!("raid:name=data,scan={}", folder.display());
    Server::start_in(runtime, &["--device", &device, "--export", &export]).0
}

/// States of the arrays that run in `runtime`, by UUID.
fn states(runtime: &Path) -> Vec<(String, String)> {
    let text = |value: &Value| value.as_str().unwrap().to_owned();
    let arrays = run_json_in(runtime, &["array", "show", "--json"]);
    arrays.iter().map(|array| (text(&array["uuid"]), text(&array["state"]))).collect()
}

fn array() -> Value {
    json!({
        "name": "data", "uuid": UUID, "state": "optimal", "is_running": true, "is_clean": true, "generation": 3,
        "level": "1", "reshape": null, "consistency": "bitmap", "groups": 1, "data": 1,
        "parity": 1, "strip_bytes": 65536, "block_bytes": 512, "capacity_bytes": 8 << 20, "free_bytes": null,
        "members": [
            { "slot": 0, "uuid": null, "device": "/dev/x", "state": "live", "reason": null, "read_errors": 0 },
            { "slot": 1, "uuid": null, "device": "/dev/y", "state": "live", "reason": null, "read_errors": 0 },
        ],
        "spares": [], "jobs": [], "scrub": null, "contradictions": 0, "scrub_period_s": 0, "scrub_window": null,
        "is_scheduled_scrub": false, "last_scrub_ns": null, "next_scrub_ns": null, "read_error_budget": 20,
        "volumes": [], "exports": [], "error": null,
    })
}

fn system() -> Value {
    json!({
        "version": "0.1.0", "state": "ready", "start": null, "pid": 77, "started_ns": 1, "user": 0, "capabilities": [],
        "state_dir": "/s", "generation": 3, "cores": [],
    })
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn run_beside(runtime: &Path, args: &[&str]) -> Output {
    freestone().env("XDG_RUNTIME_DIR", runtime).args(args).output().unwrap()
}

#[test]
fn a_name_that_two_running_arrays_have_is_refused_with_the_candidates() {
    let dir = tempfile::tempdir().unwrap();
    let servers = ["a", "b"].map(|name| serve_mirror(dir.path(), &dir.path().join(name)));
    let before = states(dir.path());
    assert_eq!(before.len(), 2);
    for args in [&["array", "fail", "data", "1"][..], &["array", "show", "data"], &["array", "stop", "data"]]
    {
        let (said, code) = failure_in(dir.path(), args);
        assert_eq!(code, 1, "{said}");
        assert!(said.starts_with("freestone: array data: 2 arrays of this name run: "), "{said}");
        for (uuid, _) in &before {
            assert!(said.contains(uuid), "{said}");
        }
        for server in &servers {
            assert!(said.contains(&format!("(process {})", server.pid())), "{said}");
        }
    }
    assert_eq!(states(dir.path()), before, "a refused command has changed an array");
    let (first, _) = &before[0];
    run_json_in(dir.path(), &["array", "fail", first, "1", "--json"]);
    let degraded: Vec<_> = states(dir.path()).into_iter().filter(|(_, state)| state == "degraded").collect();
    assert_eq!(degraded, [(first.clone(), "degraded".to_owned())]);
}

#[test]
fn a_daemon_that_is_named_is_the_only_process_that_array_commands_ask() {
    let dir = tempfile::tempdir().unwrap();
    let _server = serve_mirror(dir.path(), &dir.path().join("a"));
    let before = states(dir.path());
    let done = json!({ "text": "slot 1 failed", "array": array() });
    let answers = || vec![(200, array()), (200, system()), (200, done.clone())];
    // Before the noun, behind it, behind the verb, and by the environment.
    for (head, middle, tail, env) in [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)] {
        let daemon = Played::new(answers());
        let socket = daemon.socket();
        let socket = socket.to_str().unwrap();
        let option = |count: i32| if count > 0 { vec!["--socket", socket] } else { Vec::new() };
        let args =
            [option(head), vec!["array"], option(middle), vec!["fail", "data", "1"], option(tail)].concat();
        let mut command = freestone();
        command.env("XDG_RUNTIME_DIR", dir.path()).args(args);
        if env > 0 {
            command.env("FREESTONE_SOCKET", socket);
        }
        let output = command.output().unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        assert_eq!(text(&output.stdout), "array data (running, process 77): slot 1 failed\n");
        let requests = daemon.requests();
        assert_eq!(requests[0].0, "GET /v1/arrays/data HTTP/1.1");
        assert_eq!(requests[2].0, format!("POST /v1/arrays/{UUID}/actions HTTP/1.1"));
        assert_eq!(requests[2].1, r#"{"action":"fail","members":["1"]}"#);
    }
    assert_eq!(states(dir.path()), before, "another process's array was changed");
    // It is shown as others are, and one that the daemon does not have is not looked for elsewhere.
    let daemon = Played::new(vec![(200, array())]);
    let output =
        run_beside(dir.path(), &["array", "show", "data", "--socket", daemon.socket().to_str().unwrap()]);
    let shown = text(&output.stdout);
    assert!(shown.starts_with(&format!("array data ({UUID}): optimal, running\n")), "{shown}");
    assert!(shown.contains("\n  slot 1        live        /dev/y"), "{shown}");
    let problem = json!({ "type": "not-found", "title": "x", "status": 404, "detail": "no array \"data\"" });
    for verb in [&["fail", "data", "1"][..], &["show", "data"], &["scrub", "data"]] {
        let daemon = Played::new(vec![(404, problem.clone())]);
        let socket = daemon.socket();
        let args = [&["--socket", socket.to_str().unwrap(), "array"], verb].concat();
        let output = run_beside(dir.path(), &args);
        assert_eq!(output.status.code(), Some(1), "{verb:?}");
        let said = text(&output.stderr);
        assert!(
            said.contains(&format!("array data: the daemon at {} has no such array", socket.display())),
            "{said}"
        );
    }
    let daemon = Played::new(vec![(200, array()), (200, system())]);
    let stop = ["array", "stop", "data", "--socket", daemon.socket().to_str().unwrap()].map(str::to_owned);
    let output = run_beside(dir.path(), &stop.each_ref().map(String::as_str));
    assert!(text(&output.stderr).contains("freestone array delete --keep data"), "{}", text(&output.stderr));
    assert_eq!(states(dir.path()), before, "another process's array was changed");
}

#[test]
fn a_socket_before_the_command_is_for_commands_that_ask_a_daemon() {
    let daemon = Played::new(vec![(200, json!([]))]);
    let socket = daemon.socket();
    let socket = socket.to_str().unwrap();
    let output = freestone().args(["--socket", socket, "volume", "list", "--json"]).output().unwrap();
    assert_eq!(text(&output.stdout), "[]\n", "{}", text(&output.stderr));
    let (said, code) = failure(&["--socket", socket, "info", "--device", "null"]);
    assert_eq!((said, code), (format!("freestone: --socket {socket}: freestone info asks no daemon\n"), 2));
    let (said, code) = failure(&["--socket", socket, "volume", "list", "--socket", "/other"]);
    let twice = format!("freestone: --socket {socket}: it is given before and behind volume\n");
    assert_eq!((said, code), (twice, 2));
}
