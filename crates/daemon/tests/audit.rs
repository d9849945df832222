//! The audit log and idempotency keys. Every change leaves a request and an outcome, also when its
//! client disconnects or the daemon ends. A key is answered as before, also by the next daemon.

use crate::common::{Daemon, MIB, names, refusal};
use block::Op;
use layers::fault::{Action, Rule};
use reqwest::blocking::{Client, Response};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::fs::File;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

/// How long a volume takes to be made on a slow device, in nanoseconds.
const SLOW_NS: u64 = 1_000_000_000;
/// Valid as part of a name, a path, a number and an escape.
const CANARY: &str = "c0ffee5ec2e7c0ffee";

/// Lines of the audit log, the oldest first.
fn audit(daemon: &Daemon) -> Vec<Value> {
    let log = daemon.log();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    lines.filter(|line| line["target"] == "audit").collect()
}

fn with_message<'a>(lines: &'a [Value], message: &str) -> Vec<&'a Value> {
    lines.iter().filter(|line| line["message"] == message).collect()
}

fn count(daemon: &Daemon, message: &str) -> usize {
    with_message(&audit(daemon), message).len()
}

fn post(daemon: &Daemon, path: &str, key: &str, body: &Value) -> Response {
    daemon.request(Method::POST, path).header("idempotency-key", key).json(body).send().unwrap()
}

/// Sends a POST, and returns the connection, on which no answer has been read.
fn send_raw(daemon: &Daemon, path: &str, key: &str, body: &Value) -> UnixStream {
    let mut stream = UnixStream::connect(daemon.path("d.sock")).unwrap();
    let body = body.to_string();
    let len = body.len();
    let head = format!(
        "POST {path} HTTP/1.1\r\nHost: d\r\nContent-Type: application/json\r\nContent-Length: {len}\r\nIdempotency-Key: {key}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes())).unwrap();
    stream
}

/// Has the next change of the state wait for ever: the daemon opens a pipe that has no reader.
fn block_state(daemon: &Daemon) {
    let pipe = daemon.path("state/state.json.new");
    assert!(Command::new("mkfifo").arg(pipe).status().unwrap().success());
}

/// Waits until the first key is recorded.
fn wait_for_key(daemon: &Daemon) {
    let is_whole = |file: std::fs::DirEntry| file.path().extension().is_none();
    let files = || std::fs::read_dir(daemon.path("state/idempotency")).unwrap().flatten();
    daemon.wait_for("the key", || files().any(is_whole));
}

#[test]
fn a_client_that_hangs_up_leaves_a_request_and_an_outcome_and_its_key_is_answered() {
    let daemon = Daemon::with(&["--member-timeout", "1", "--json"]);
    daemon.file("disk", 64 * MIB);
    let disk = daemon.served("disk");
    daemon.post("/v1/devices", &json!({ "name": "data", "spec": disk.spec }));
    let before = count(&daemon, "change answered");
    disk.fault.add(Rule::new(Action::Delay(SLOW_NS)).on(&[Op::WriteZeroes]));
    let new = |number: usize| json!({ "name": format!("v{number}"), "backing": "data", "size_bytes": MIB });
    let key = |number: usize| format!("k{number}");
    let clients: Vec<UnixStream> =
        (0..10).map(|number| send_raw(&daemon, "/v1/volumes", &key(number), &new(number))).collect();
    daemon.wait_for("ten requests", || count(&daemon, "change requested") == before + 10);
    drop(clients);
    disk.fault.clear();
    daemon.wait_for("ten outcomes", || count(&daemon, "change answered") == before + 10);
    let lines = audit(&daemon);
    let (requested, answered) =
        (with_message(&lines, "change requested"), with_message(&lines, "change answered"));
    let ids: HashSet<&str> = requested.iter().map(|line| line["id"].as_str().unwrap()).collect();
    assert_eq!(ids.len(), requested.len());
    for number in 0..10 {
        let is_asked = |line: &&&Value| {
            line["asked"].as_str().and_then(|text| serde_json::from_str(text).ok()) == Some(new(number))
        };
        let request = requested.iter().find(is_asked).unwrap();
        let outcome = answered.iter().find(|line| line["id"] == request["id"]).unwrap();
        for line in [request, outcome] {
            assert_eq!((&line["method"], &line["path"]), (&json!("POST"), &json!("/v1/volumes")));
            assert!(line["who"].as_str().unwrap().starts_with("user "), "{line}");
            assert_eq!(line["role"], "admin");
        }
        assert_eq!(outcome["status"], 201, "{outcome}");
        assert!(outcome["duration_ms"].is_u64() && outcome["error"].is_null(), "{outcome}");
        // The answer that the client did not read.
        let answer = post(&daemon, "/v1/volumes", &key(number), &new(number));
        assert_eq!(answer.status(), StatusCode::CREATED);
        assert_eq!(answer.json::<Value>().unwrap(), daemon.get(&format!("/v1/volumes/v{number}")));
    }
    let lines = audit(&daemon);
    let replayed =
        with_message(&lines, "change answered").iter().filter(|line| line["replayed"] == true).count();
    assert_eq!((replayed, names(&daemon.get("/v1/volumes")).len()), (10, 10));
}

#[test]
fn a_key_is_answered_by_the_next_daemon() {
    let mut daemon = Daemon::with(&["--member-timeout", "1", "--json"]);
    let disk = daemon.file("disk", 64 * MIB);
    daemon.post("/v1/devices", &json!({ "name": "data", "spec": disk }));
    let new = |name: &str| json!({ "name": name, "backing": "data", "size_bytes": MIB });
    let seen = |response: Response| {
        let tag = response.headers()["etag"].to_str().unwrap().to_owned();
        (response.status(), tag, response.json::<Value>().unwrap())
    };
    let first = seen(post(&daemon, "/v1/volumes", "k1", &new("v1")));
    assert_eq!(first.0, StatusCode::CREATED);
    for signal in ["-TERM", "-KILL"] {
        daemon.restart(signal);
        assert_eq!(seen(post(&daemon, "/v1/volumes", "k1", &new("v1"))), first, "{signal}");
        assert_eq!(refusal(post(&daemon, "/v1/volumes", "k1", &new("v2"))).1, "key-reused", "{signal}");
    }
    assert_eq!(names(&daemon.get("/v1/volumes")), ["v1"]);
}

#[test]
fn a_change_that_a_kill_interrupts_leaves_a_request_and_a_key_with_an_unknown_outcome() {
    let mut daemon = Daemon::with(&["--member-timeout", "1", "--json"]);
    let device = json!({ "name": "data", "spec": daemon.file("disk", 64 * MIB) });
    block_state(&daemon);
    let client = send_raw(&daemon, "/v1/devices", "k1", &device);
    daemon.wait_for("the request", || count(&daemon, "change requested") == 1);
    wait_for_key(&daemon);
    assert_eq!(refusal(post(&daemon, "/v1/devices", "k1", &device)).1, "in-progress");
    daemon.end("-KILL");
    drop(client);
    std::fs::remove_file(daemon.path("state/state.json.new")).unwrap();
    daemon.start();
    let (status, kind, detail) = refusal(post(&daemon, "/v1/devices", "k1", &device));
    assert_eq!((status, &*kind), (409, "interrupted"));
    assert!(detail.contains("Idempotency-Key k1") && detail.contains("look at the object"), "{detail}");
    let lines = audit(&daemon);
    let first = lines.iter().find(|line| line["message"] == "change requested").unwrap();
    assert_eq!(lines.iter().filter(|line| line["id"] == first["id"]).count(), 1);
    assert_eq!(post(&daemon, "/v1/devices", "k2", &device).status(), StatusCode::CREATED);
}

#[test]
fn a_daemon_that_stops_writes_the_outcome_of_a_change_in_flight() {
    let mut daemon = Daemon::with(&["--member-timeout", "1", "--json"]);
    let device = json!({ "name": "data", "spec": daemon.file("disk", 64 * MIB) });
    block_state(&daemon);
    let client = send_raw(&daemon, "/v1/devices", "k1", &device);
    daemon.wait_for("the request", || count(&daemon, "change requested") == 1);
    wait_for_key(&daemon);
    drop(client);
    daemon.signal("-TERM");
    daemon.wait_for("the end to begin", || daemon.log().contains("stopping: finishing what is in flight"));
    // The pipe has a reader and a writer now, and the change fails: a pipe cannot be made durable.
    let pipe = File::options().read(true).write(true).open(daemon.path("state/state.json.new")).unwrap();
    assert_eq!(daemon.wait().code(), Some(0));
    drop(pipe);
    let lines = audit(&daemon);
    let (requested, ended) = (with_message(&lines, "change requested"), &lines[lines.len() - 1]);
    assert_eq!((requested.len(), &ended["id"]), (1, &requested[0]["id"]));
    assert_eq!((&ended["message"], &ended["status"]), (&json!("change answered"), &json!(500)), "{ended}");
}

#[test]
fn two_tokens_with_one_key_do_not_see_each_others_answers() {
    let (one, other) = ("0123456789abcdef01234567", "fedcba9876543210fedcba98");
    let (daemon, address) = Daemon::listening(&format!("provisioner one {one}\nprovisioner other {other}\n"));
    let disk = daemon.file("disk", 64 * MIB);
    daemon.post("/v1/devices", &json!({ "name": "data", "spec": disk }));
    daemon.volume("first", MIB);
    let http = Client::new();
    let make = |token: &str, name: &str| {
        let request = http.post(format!("http://{address}/v1/volumes")).bearer_auth(token);
        let new = json!({ "name": name, "backing": "data", "size_bytes": MIB });
        request.header("idempotency-key", "k").json(&new).send().unwrap()
    };
    let first = make(one, "v1");
    assert_eq!(first.status(), StatusCode::CREATED);
    // Neither the answer nor that the key is known.
    assert_eq!(refusal(make(other, "v1")).1, "exists");
    assert_eq!(make(other, "v2").json::<Value>().unwrap()["name"], "v2");
    assert_eq!(make(one, "v1").json::<Value>().unwrap(), first.json::<Value>().unwrap());
    // Nor does the user of the Unix socket.
    let new = json!({ "name": "v1", "backing": "data", "size_bytes": MIB });
    assert_eq!(refusal(post(&daemon, "/v1/volumes", "k", &new)).1, "exists");
}

#[test]
fn no_secret_in_a_request_is_in_the_audit_log_or_in_the_file_of_a_key() {
    let daemon = Daemon::with(&["--member-timeout", "1", "--json"]);
    let disk = daemon.file("disk", 64 * MIB);
    daemon.post("/v1/devices", &json!({ "name": "data", "spec": disk }));
    daemon.volume("v1", MIB);
    let export =
        |options: Value| json!({ "name": "e1", "kind": "nbd", "volumes": ["v1"], "options": options });
    let uri = format!("nbd:uri=nbd://alice:{CANARY}@127.0.0.1:1/x");
    let requests = [
        ("/v1/volumes", json!({ "name": "v2", "backing": "data", "size_bytes": MIB, "password": CANARY })),
        ("/v1/volumes", json!({ "name": "v2", "backing": "data", "size_bytes": MIB, CANARY: 1 })),
        ("/v1/exports", export(json!({ "tls-psk": CANARY, "listen": "127.0.0.1:0" }))),
        ("/v1/exports", export(json!({ "psk": CANARY }))),
        ("/v1/exports", export(json!({ CANARY: "on" }))),
        ("/v1/devices", json!({ "name": "d1", "spec": format!("nbd:host=127.0.0.1,psk={CANARY}") })),
        (
            "/v1/devices",
            json!({ "name": "d2", "spec": format!("nvme-tcp:address=127.0.0.1:1,nqn=nqn.2014-08.org:x,dhchap-key={CANARY}") }),
        ),
        ("/v1/devices", json!({ "name": "d3", "spec": uri })),
        ("/v1/devices", json!([CANARY])),
        ("/v1/devices", json!(CANARY)),
    ];
    let mut made = 0;
    for (number, (path, body)) in requests.iter().enumerate() {
        made += usize::from(post(&daemon, path, &format!("k{number}"), body).status().is_success());
    }
    // One that is made, so that its answer is kept.
    daemon.file("other", 64 * MIB);
    let served = daemon.served("other");
    let socket = served.spec.strip_prefix("nbd:path=").unwrap();
    let spec = format!("nbd:uri=nbd+unix://alice:{CANARY}@/?socket={socket}");
    made += usize::from(
        post(&daemon, "/v1/devices", "k", &json!({ "name": "d4", "spec": spec })).status().is_success(),
    );
    for line in audit(&daemon) {
        assert!(!line.to_string().contains(CANARY), "{line}");
    }
    assert!(count(&daemon, "change answered") >= requests.len() + 2);
    let files: Vec<_> = std::fs::read_dir(daemon.path("state/idempotency")).unwrap().collect();
    assert_eq!(files.len(), made);
    for file in files {
        let text = std::fs::read_to_string(file.unwrap().path()).unwrap();
        assert!(!text.contains(CANARY), "{text}");
    }
}

#[test]
fn a_failed_login_is_logged_without_its_token_and_answered_late() {
    let token = "0123456789abcdef01234567";
    let (daemon, address) = Daemon::listening(&format!("read-only me {token}\n"));
    let http = Client::new();
    let ask = |token: Option<&str>| {
        let request = http.get(format!("http://{address}/v1/system"));
        token.into_iter().fold(request, |request, token| request.bearer_auth(token)).send().unwrap()
    };
    let began = Instant::now();
    for _ in 0..3 {
        assert_eq!(refusal(ask(Some(CANARY))).0, 401);
    }
    assert!(began.elapsed() >= Duration::from_millis(100 + 200 + 400), "{:?}", began.elapsed());
    assert_eq!(refusal(ask(None)).0, 401);
    assert_eq!(ask(Some(token)).status(), StatusCode::OK);
    let lines = audit(&daemon);
    let failed = with_message(&lines, "login failed");
    let seen = |name: &str| failed.iter().map(|line| line[name].clone()).collect::<Vec<Value>>();
    assert_eq!(seen("peer"), ["127.0.0.1"; 4]);
    assert_eq!(seen("failures"), [1, 2, 3, 3]);
    let reasons = seen("reason");
    assert!(reasons[0] == reasons[2] && reasons[0] != reasons[3] && reasons[3] != "", "{reasons:?}");
    assert!(!daemon.log().contains(CANARY) && !daemon.log().contains(token), "{}", daemon.log());
}
