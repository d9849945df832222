//! The REST API: what is refused and how, tags, keys, roles, TLS, the document.

use crate::common::{Daemon, MIB, names, refusal};
use reqwest::blocking::{Client, RequestBuilder};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// A daemon with a device called `data`.
fn with_disk(daemon: &Daemon) {
    let disk = daemon.file("disk", 64 * MIB);
    daemon.post("/v1/devices", &json!({ "name": "data", "spec": disk }));
}

#[test]
fn an_invalid_request_is_refused_by_name_and_changes_nothing() {
    let daemon = Daemon::new();
    with_disk(&daemon);
    daemon.volume("v1", MIB);
    daemon.post("/v1/exports", &json!({ "name": "e1", "kind": "nbd", "volumes": ["v1"] }));
    let before = [daemon.get("/v1/volumes"), daemon.get("/v1/exports"), daemon.get("/v1/devices")];
    let generation = daemon.get("/v1/system")["generation"].clone();
    let cases = [
        (
            Method::POST,
            "/v1/volumes",
            json!({ "name": "v1", "backing": "data", "size_bytes": MIB }),
            409,
            "exists",
            "volume v1 exists already",
        ),
        (
            Method::POST,
            "/v1/volumes",
            json!({ "name": "data", "backing": "data", "size_bytes": MIB }),
            409,
            "exists",
            "device data exists already",
        ),
        (
            Method::POST,
            "/v1/volumes",
            json!({ "name": "a b", "backing": "data", "size_bytes": MIB }),
            422,
            "invalid",
            "a b",
        ),
        (
            Method::POST,
            "/v1/volumes",
            json!({ "name": "v2", "backing": "nope", "size_bytes": MIB }),
            404,
            "not-found",
            "nope",
        ),
        (
            Method::POST,
            "/v1/volumes",
            json!({ "name": "v2", "backing": "data", "size_bytes": 1 }),
            422,
            "invalid",
            "a volume of 1 bytes",
        ),
        (
            Method::POST,
            "/v1/volumes",
            json!({ "name": "v2", "backing": "data", "size_bytes": 1u64 << 40 }),
            409,
            "no-room",
            "are free",
        ),
        (
            Method::POST,
            "/v1/volumes",
            json!({ "name": "v2", "backing": "data", "size_bytes": MIB, "gruop": "g" }),
            422,
            "malformed",
            "gruop",
        ),
        (
            Method::POST,
            "/v1/volumes",
            json!({ "name": "v2", "backing": "data", "size_bytes": MIB, "min_qos": { "requests_per_s": 0 } }),
            422,
            "invalid",
            "min_qos: requests_per_s: 0",
        ),
        (
            Method::POST,
            "/v1/volumes",
            json!({ "name": "v2", "backing": "data", "size_bytes": MIB, "group": "g" }),
            404,
            "not-found",
            "group \"g\"",
        ),
        (
            Method::POST,
            "/v1/volumes",
            json!({ "name": "v2", "backing": "data", "size_bytes": MIB, "qos": { "iops": { "per_s": 0 } } }),
            422,
            "invalid",
            "iops: 0",
        ),
        (Method::PATCH, "/v1/volumes/v1", json!({ "size_bytes": 512 }), 422, "invalid", "does not shrink"),
        (Method::PATCH, "/v1/volumes/nope", json!({}), 404, "not-found", "volume \"nope\""),
        (Method::DELETE, "/v1/volumes/v1", Value::Null, 409, "in-use", "export e1 serves it"),
        (Method::DELETE, "/v1/devices/data", Value::Null, 409, "in-use", "volume v1 is on it"),
        (
            Method::POST,
            "/v1/exports",
            json!({ "name": "e2", "kind": "nbd", "volumes": [] }),
            422,
            "invalid",
            "no volume, array or device to serve",
        ),
        (
            Method::POST,
            "/v1/exports",
            json!({ "name": "e2", "kind": "nbd", "volumes": ["nope"] }),
            404,
            "not-found",
            "nope",
        ),
        (
            Method::POST,
            "/v1/exports",
            json!({ "name": "e2", "kind": "nbd", "volumes": ["data"] }),
            409,
            "in-use",
            "prepared for volumes",
        ),
        (
            Method::POST,
            "/v1/exports",
            json!({ "name": "e2", "kind": "floppy", "volumes": ["v1"] }),
            422,
            "invalid",
            "floppy",
        ),
        (
            Method::POST,
            "/v1/exports",
            json!({ "name": "e2", "kind": "nbd", "volumes": ["v1"], "options": { "readonly": "on" } }),
            422,
            "invalid",
            "readonly",
        ),
        (
            Method::POST,
            "/v1/exports",
            json!({ "name": "e2", "kind": "nbd", "volumes": ["v1"], "options": { "a=b,c": "on" } }),
            422,
            "invalid",
            "a=b,c",
        ),
        (
            Method::POST,
            "/v1/exports",
            json!({ "name": "e2", "kind": "nbd", "volumes": ["v1"], "options": { "socket": "s" } }),
            422,
            "invalid",
            "absolute",
        ),
        (
            Method::POST,
            "/v1/exports",
            json!({ "name": "e2", "kind": "nbd", "volumes": ["v1"], "options": { "socket": daemon.path("e1.sock") } }),
            409,
            "exists",
            "is export e1",
        ),
        (
            Method::POST,
            "/v1/exports",
            json!({ "name": "e2", "kind": "vhost-user-blk", "volumes": ["v1", "v1"] }),
            422,
            "invalid",
            "serves one",
        ),
        (
            Method::POST,
            "/v1/exports",
            json!({ "name": "e2", "kind": "nbd", "volumes": ["v1"], "cores": [777] }),
            422,
            "invalid",
            "processor 777",
        ),
        (
            Method::POST,
            "/v1/devices",
            json!({ "name": "d2", "spec": "/nowhere/disk" }),
            422,
            "cannot-open",
            "/nowhere/disk",
        ),
        (Method::POST, "/v1/devices", json!({ "name": "d2", "spec": "mem:sise=1M" }), 422, "invalid", "sise"),
        (
            Method::POST,
            "/v1/arrays",
            json!({ "name": "a", "level": "4", "members": [] }),
            422,
            "malformed",
            "unknown variant `4`",
        ),
        (Method::POST, "/v1/arrays/nope/actions", json!({ "action": "pause" }), 404, "not-found", "nope"),
        (Method::POST, "/v1/arrays/nope/actions", json!({ "action": "dance" }), 422, "malformed", "dance"),
        (Method::PATCH, "/v1/jobs/nope", json!({}), 404, "not-found", "nope"),
        (Method::DELETE, "/v1/groups/nope", Value::Null, 404, "not-found", "nope"),
        (Method::GET, "/v1/nope", Value::Null, 404, "not-found", "/v1/nope"),
        (Method::PUT, "/v1/volumes", Value::Null, 405, "no-such-method", "PUT"),
    ];
    for (method, path, body, status, kind, detail) in cases {
        let refusal = daemon.refusal(method.clone(), path, &body);
        assert_eq!((refusal.0, &*refusal.1), (status, kind), "{method} {path} {body}: {}", refusal.2);
        assert!(refusal.2.contains(detail), "{method} {path} {body}: {}", refusal.2);
    }
    let after = [daemon.get("/v1/volumes"), daemon.get("/v1/exports"), daemon.get("/v1/devices")];
    assert_eq!(before, after);
    assert_eq!(daemon.get("/v1/system")["generation"], generation);
    for body in ["", "{", "[]", &"[".repeat(100_000), &"x".repeat(2 << 20)] {
        let sent = daemon.request(Method::POST, "/v1/volumes").header("content-type", "application/json");
        let answer = sent.body(body.to_owned()).send().unwrap();
        assert!(answer.status().is_client_error());
        refusal(answer);
    }
    // A client that sends more than the daemon reads receives the reason.
    let send =
        |method: Method| daemon.request(method, "/v1/volumes").body("x".repeat(12 << 20)).send().unwrap();
    for _ in 0..20 {
        assert_eq!(refusal(send(Method::PUT)).0, 405);
    }
}

#[test]
fn lines_attach_an_export_read_only_when_it_or_its_device_refuses_writes() {
    let daemon = Daemon::new();
    with_disk(&daemon);
    let sealed = format!("io_uring:path={},readonly=on", daemon.file("sealed", MIB));
    daemon.post("/v1/devices", &json!({ "name": "sealed", "spec": sealed }));
    for (name, device, read_only) in [("a", "data", false), ("b", "data", true), ("c", "sealed", false)] {
        let new = json!({ "name": name, "kind": "nbd", "volumes": [device], "read_only": read_only });
        daemon.post("/v1/exports", &new);
        let lines = &daemon.get(&format!("/v1/exports/{name}/attach"))["lines"];
        let has = |program: &str, text| lines[program].as_str().unwrap().contains(text);
        let found = (has("libvirt-disk", "<readonly/>"), has("qemu", ",readonly=on,"));
        assert_eq!(found, (name != "a", name != "a"), "{lines}");
    }
}

#[test]
fn a_volume_is_served_by_several_exports_and_grows_limits_and_renames_meanwhile() {
    let daemon = Daemon::new();
    with_disk(&daemon);
    let uuid = daemon.volume("v1", MIB)["uuid"].as_str().unwrap().to_owned();
    for (name, read_only) in [("a", false), ("b", true)] {
        let new = json!({ "name": name, "kind": "nbd", "volumes": ["v1"], "read_only": read_only });
        assert_eq!(daemon.post("/v1/exports", &new)["state"], "active");
    }
    let change =
        json!({ "size_bytes": 2 * MIB, "name": "v2", "qos": { "read_bandwidth": { "per_s": 4096 } } });
    let volume = daemon.patch(&format!("/v1/volumes/{uuid}"), &change);
    assert_eq!(
        (&volume["name"], &volume["size_bytes"], &volume["exports"]),
        (&json!("v2"), &json!(2 * MIB), &json!(["a", "b"]))
    );
    assert_eq!(daemon.get("/v1/exports/a")["volumes"], json!(["v2"]));
    let line = daemon.get("/v1/exports/a/attach")["lines"]["nbdinfo"].as_str().unwrap().to_owned();
    assert_eq!(line, format!("nbdinfo nbd+unix:///a?socket={}", daemon.path("a.sock").display()));
    daemon.send(Method::PUT, "/v1/groups/g", &json!({}));
    let refusal = daemon.refusal(Method::PATCH, "/v1/volumes/v2", &json!({ "group": "g" }));
    assert_eq!((refusal.0, &*refusal.1), (409, "in-use"));
    daemon.delete("/v1/exports/a");
    daemon.delete("/v1/exports/b");
    daemon.patch("/v1/volumes/v2", &json!({ "group": "g" }));
    let refusal = daemon.refusal(Method::DELETE, "/v1/groups/g", &Value::Null);
    assert_eq!(refusal.2, "group g: volume v2 is in it");
    daemon.delete("/v1/volumes/v2");
    daemon.delete("/v1/groups/g");
    assert_eq!(names(&daemon.get("/v1/volumes")).len(), 0);
}

#[test]
fn an_export_moves_to_other_processors() {
    let mut daemon = Daemon::with(&["--cores", "0,1"]);
    with_disk(&daemon);
    daemon.volume("v1", MIB);
    daemon.post(
        "/v1/exports",
        &json!({ "name": "vm", "kind": "vhost-user-blk", "volumes": ["v1"], "cores": [0] }),
    );
    daemon.post("/v1/exports", &json!({ "name": "nbd", "kind": "nbd", "volumes": ["v1"] }));
    let served = |daemon: &Daemon, core: usize| daemon.get("/v1/system")["cores"][core]["exports"].clone();
    assert_eq!(served(&daemon, 1), json!(["nbd"]));
    assert_eq!(daemon.patch("/v1/exports/vm", &json!({ "cores": [1] }))["cores"], json!([1]));
    for name in ["vm", "nbd"] {
        let path = format!("/v1/exports/{name}");
        let refusal = daemon.refusal(Method::PATCH, &path, &json!({ "cores": [7] }));
        assert!(refusal.0 == 422 && refusal.2.contains("processor 7"), "{refusal:?}");
    }
    assert_eq!(daemon.patch("/v1/exports/nbd", &json!({ "cores": [0] }))["cores"], json!([0]));
    assert_eq!((served(&daemon, 0), served(&daemon, 1)), (json!(["nbd"]), json!(["vm"])));
    daemon.patch("/v1/exports/nbd", &json!({ "cores": [] }));
    for signal in ["-KILL", "-TERM"] {
        assert_eq!(
            (served(&daemon, 0), served(&daemon, 1)),
            (json!(["nbd"]), json!(["vm", "nbd"])),
            "{signal}"
        );
        daemon.restart(signal);
    }
    assert_eq!(daemon.patch("/v1/exports/vm", &json!({ "cores": [] }))["cores"], json!([]));
}

#[test]
fn a_device_that_holds_something_is_not_taken_for_volumes() {
    let daemon = Daemon::new();
    let disk = daemon.file("disk", 64 * MIB);
    let mut header = vec![0; 1024];
    header[510..512].copy_from_slice(&[0x55, 0xaa]);
    header[512..520].copy_from_slice(b"EFI PART");
    use std::os::unix::fs::FileExt;
    std::fs::File::options().write(true).open(&disk).unwrap().write_all_at(&header, 0).unwrap();
    daemon.post("/v1/devices", &json!({ "name": "data", "spec": disk }));
    let new = json!({ "name": "v1", "backing": "data", "size_bytes": MIB });
    let refusal = daemon.refusal(Method::POST, "/v1/volumes", &new);
    assert_eq!((refusal.0, &*refusal.1), (409, "in-use"));
    assert!(refusal.2.contains("GPT"), "{}", refusal.2);
    daemon.post("/v1/volumes", &json!({ "name": "v1", "backing": "data", "size_bytes": MIB, "force": true }));
    // A pool is content, too: it is not overwritten with an array by mistake.
    daemon.delete("/v1/volumes/v1");
    daemon.delete("/v1/devices/data");
    let members = [disk, daemon.file("other", 64 * MIB)];
    let refusal =
        daemon.refusal(Method::POST, "/v1/arrays", &json!({ "name": "a", "level": "1", "members": members }));
    assert!(refusal.2.contains("Freestone pool"), "{}", refusal.2);
}

#[test]
fn a_change_with_a_tag_is_made_if_no_other_was_made() {
    let daemon = Daemon::new();
    with_disk(&daemon);
    daemon.volume("v1", MIB);
    let tag = |path: &str| {
        let response = daemon.request(Method::GET, path).send().unwrap();
        response.headers()["etag"].to_str().unwrap().to_owned()
    };
    let first = tag("/v1/volumes/v1");
    assert_eq!(tag("/v1/volumes/v1"), first);
    daemon.patch("/v1/volumes/v1", &json!({ "size_bytes": 2 * MIB }));
    let second = tag("/v1/volumes/v1");
    assert_ne!(first, second);
    let with = |method: Method, tag: &str| {
        let change = json!({ "size_bytes": 3 * MIB });
        daemon.request(method, "/v1/volumes/v1").header("if-match", tag).json(&change).send().unwrap()
    };
    assert_eq!(refusal(with(Method::PATCH, &first)).1, "stale");
    assert_eq!(refusal(with(Method::DELETE, &first)).0, 412);
    assert_eq!(daemon.get("/v1/volumes/v1")["size_bytes"], 2 * MIB);
    assert_eq!(with(Method::PATCH, &format!("{first}, {second}")).status(), StatusCode::OK);
    assert_eq!(with(Method::DELETE, "*").status(), StatusCode::NO_CONTENT);
}

#[test]
fn a_request_with_a_key_is_carried_out_once() {
    let daemon = Daemon::new();
    with_disk(&daemon);
    let post = |key: &str, name: &str| {
        let new = json!({ "name": name, "backing": "data", "size_bytes": MIB });
        daemon.request(Method::POST, "/v1/volumes").header("idempotency-key", key).json(&new).send().unwrap()
    };
    let first: Value = post("k1", "v1").json().unwrap();
    let again = post("k1", "v1");
    assert_eq!(again.status(), StatusCode::CREATED);
    assert!(again.headers().contains_key("etag"));
    assert_eq!(again.json::<Value>().unwrap(), first);
    assert_eq!(refusal(post("k1", "v2")).1, "key-reused");
    assert_eq!(refusal(post("k2", "v1")).1, "exists");
    assert_eq!(refusal(post("k2", "v1")).1, "exists", "what failed may be tried again");
    assert_eq!(refusal(post(&"k".repeat(300), "v3")).0, 400);
    assert_eq!(names(&daemon.get("/v1/volumes")), ["v1"]);
}

const ADMIN: &str = "admin-0123456789abcdef012345";
const OPERATOR: &str = "operator-0123456789abcdef0123";
const WATCHER: &str = "watcher-0123456789abcdef01234";

fn write_tokens(path: &Path) {
    let text = format!("admin boss {ADMIN}\noperator ops {OPERATOR}\nread-only page {WATCHER}\n");
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600)).unwrap();
}

/// A daemon that listens on TCP too, and where.
fn over_tcp(more: &[&str]) -> (Daemon, String) {
    let mut daemon = Daemon::prepare(&["--listen", "127.0.0.1:0", "--json", "--tokens"]);
    let tokens = daemon.path("tokens");
    write_tokens(&tokens);
    daemon.args.push(tokens.to_str().unwrap().into());
    daemon.args.extend(more.iter().map(|arg| (*arg).to_owned()));
    daemon.start();
    let ready = || {
        let log = daemon.log();
        let mut lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.find(|line| line["message"] == "ready")
    };
    daemon.wait_for("the log", || ready().is_some());
    let address = ready().unwrap()["listen"].as_str().unwrap().to_owned();
    (daemon, address)
}

#[test]
fn over_tcp_a_token_says_what_one_may_do() {
    let (daemon, address) = over_tcp(&[]);
    let http = Client::new();
    let ask = |method: Method, path: &str, token: Option<&str>| -> RequestBuilder {
        let request = http.request(method, format!("http://{address}{path}"));
        token.into_iter().fold(request, |request, token| request.bearer_auth(token))
    };
    let nobody = ask(Method::GET, "/v1/system", None).send().unwrap();
    assert_eq!(nobody.headers()["www-authenticate"], "Bearer");
    assert_eq!(refusal(nobody).0, 401);
    let much = ask(Method::POST, "/v1/volumes", None).body("x".repeat(12 << 20));
    assert_eq!(refusal(much.send().unwrap()).0, 401);
    assert_eq!(refusal(ask(Method::GET, "/metrics", Some("wrong")).send().unwrap()).1, "unauthorized");
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
    for (token, role) in [(ADMIN, "admin"), (OPERATOR, "operator"), (WATCHER, "read-only")] {
        let answer = ask(Method::GET, "/v1/system", Some(token)).send().unwrap();
        assert_eq!(answer.status(), StatusCode::OK);
        let system: Value = answer.json().unwrap();
        assert_eq!((&system["role"], &system["host"]), (&json!(role), &json!(host.trim())));
    }
    assert_eq!(daemon.get("/v1/system")["role"], "admin", "over the Unix socket");
    let disk = json!({ "name": "data", "spec": daemon.file("disk", 64 * MIB) });
    let make_device = |token| ask(Method::POST, "/v1/devices", Some(token)).json(&disk).send().unwrap();
    assert_eq!(refusal(make_device(OPERATOR)).1, "forbidden");
    assert_eq!(make_device(ADMIN).status(), StatusCode::CREATED);
    let new = json!({ "name": "v1", "backing": "data", "size_bytes": MIB });
    let make = |token| ask(Method::POST, "/v1/volumes", Some(token)).json(&new).send().unwrap();
    assert_eq!(refusal(make(WATCHER)).0, 403);
    assert_eq!(make(OPERATOR).status(), StatusCode::CREATED);
    let delete = |token| ask(Method::DELETE, "/v1/volumes/v1", Some(token)).send().unwrap();
    assert_eq!(refusal(delete(OPERATOR)).0, 403);
    assert_eq!(delete(ADMIN).status(), StatusCode::NO_CONTENT);
    let log = daemon.log();
    let audit: Vec<Value> = log
        .lines()
        .filter_map(|line| serde_json::from_str::<Value>(line).ok())
        .filter(|line| line["target"] == "audit")
        .collect();
    let refused = audit.iter().find(|line| line["status"] == 403 && line["who"] == "token page").unwrap();
    assert_eq!((&refused["method"], &refused["path"]), (&json!("POST"), &json!("/v1/volumes")));
    assert!(![ADMIN, OPERATOR, WATCHER].iter().any(|token| log.contains(token)), "a token is in the log");
}

#[test]
fn the_page_needs_no_token_and_takes_nothing_from_elsewhere() {
    let (_daemon, address) = over_tcp(&[]);
    let get = |path: &str| reqwest::blocking::get(format!("http://{address}{path}")).unwrap();
    let page = get("/");
    assert_eq!(
        (page.status(), &page.headers()["content-type"]),
        (StatusCode::OK, &"text/html; charset=utf-8".parse().unwrap())
    );
    let policy = page.headers()["content-security-policy"].to_str().unwrap().to_owned();
    assert!(policy.starts_with("default-src 'self'"), "{policy}");
    let text = page.text().unwrap();
    let parts: Vec<&str> = text.split('"').filter(|part| part.starts_with("/web/")).collect();
    assert!(parts.len() >= 3, "{text}");
    for part in parts {
        assert_eq!(get(part).status(), StatusCode::OK, "{part}");
    }
    assert_eq!(refusal(get("/web/nope.js")).0, 404);
    assert_eq!(refusal(get("/web/..%2fsrc%2fmain.rs")).0, 404);
    assert_eq!(refusal(get("/v1/volumes")).0, 401);
}

#[test]
fn the_socket_is_for_its_owner_and_group() {
    let daemon = Daemon::new();
    let mode = std::fs::metadata(daemon.path("d.sock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o660);
    let mode = std::fs::metadata(daemon.path("state/lock")).unwrap().permissions().mode();
    let directory = std::fs::metadata(daemon.path("state")).unwrap().permissions().mode();
    assert_eq!((directory & 0o777, mode & 0o133), (0o700, 0));
    // A second daemon reports the process in its way, and disturbs no client.
    let second = daemon.command().output().unwrap();
    let said = String::from_utf8(second.stderr).unwrap();
    assert!(!second.status.success() && said.contains("another freestoned uses it"), "{said}");
    daemon.get("/v1/system");
}

#[test]
fn a_file_at_the_path_of_the_socket_is_left_alone() {
    let mut daemon = Daemon::prepare(&[]);
    let (socket, beside) = (daemon.path("d.sock"), daemon.path("d.new"));
    std::fs::write(&socket, "data").unwrap();
    std::fs::write(&beside, "more data").unwrap();
    let output = daemon.command().output().unwrap();
    let said = String::from_utf8(output.stderr).unwrap();
    let why = format!("cannot listen on {}: the path exists and is not a socket", socket.display());
    assert!(!output.status.success() && said.contains(&why), "{said}");
    assert_eq!(std::fs::read(&socket).unwrap(), b"data");
    // A socket without a listener, which a killed daemon leaves, is replaced.
    std::fs::remove_file(&socket).unwrap();
    drop(std::os::unix::net::UnixListener::bind(&socket).unwrap());
    daemon.start();
    assert_eq!(std::fs::read(&beside).unwrap(), b"more data");
    // At its end the daemon removes its own socket, and no file that has taken the place.
    std::fs::remove_file(&socket).unwrap();
    std::fs::write(&socket, "data").unwrap();
    daemon.end("-TERM");
    assert_eq!(std::fs::read(&socket).unwrap(), b"data");
}

#[test]
fn events_are_streamed_from_where_one_was() {
    let daemon = Daemon::new();
    with_disk(&daemon);
    let stream = |last: &str| {
        let request = daemon.request(Method::GET, "/v1/events/stream").header("last-event-id", last);
        BufReader::new(request.send().unwrap()).lines()
    };
    let data = |lines: &mut dyn Iterator<Item = std::io::Result<String>>| -> Value {
        let line = lines.map(Result::unwrap).find(|line| line.starts_with("data:")).unwrap();
        serde_json::from_str(line.strip_prefix("data:").unwrap()).unwrap()
    };
    let mut lines = stream("1");
    let created = data(&mut lines);
    assert_eq!(
        (&created["id"], &created["kind"], &created["name"]),
        (&json!(2), &json!("device"), &json!("data"))
    );
    daemon.volume("v1", MIB);
    let created = data(&mut lines);
    assert_eq!((&created["kind"], &created["what"]), (&json!("volume"), &json!("created")));
}

#[test]
fn metrics_are_what_prometheus_reads() {
    let daemon = Daemon::new();
    daemon.array();
    daemon.volume("v1", MIB);
    daemon.post("/v1/exports", &json!({ "name": "e1", "kind": "nbd", "volumes": ["v1"] }));
    let text = daemon.request(Method::GET, "/metrics").send().unwrap().text().unwrap();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (series, value) = line.rsplit_once(' ').unwrap();
        assert!(series.starts_with("freestone_") && value.parse::<f64>().is_ok(), "{line}");
    }
    for wanted in [
        "freestone_array_state{array=\"data\",state=\"optimal\"} 1",
        "freestone_array_members{array=\"data\",state=\"live\"} 4",
        "freestone_volume_size_bytes{volume=\"v1\",backing=\"data\"} 1048576",
        "freestone_export_up{export=\"e1\",kind=\"nbd\"} 1",
        "freestone_volume_requests_total{volume=\"v1\",op=\"read\"} 0",
    ] {
        assert!(text.lines().any(|line| line == wanted), "{wanted}: {text}");
    }
    for of_core in ["cpu", "poll"] {
        assert!(text.contains(&format!("freestone_core_{of_core}_seconds_total{{core=\"0\"}}")), "{text}");
    }
}

#[test]
fn an_export_moves_to_other_processors_without_the_files_of_its_start() {
    let daemon = Daemon::with(&["--cores", "0,1"]);
    with_disk(&daemon);
    let keys = daemon.file("keys.psk", 0);
    std::fs::write(&keys, format!("alice:{}\n", "5a".repeat(32))).unwrap();
    std::fs::set_permissions(&keys, std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
    let options = json!({ "tls": "require", "tls-psk": keys });
    daemon.post(
        "/v1/exports",
        &json!({ "name": "nbd", "kind": "nbd", "volumes": ["data"], "options": options }),
    );
    std::fs::remove_file(&keys).unwrap();
    assert_eq!(daemon.patch("/v1/exports/nbd", &json!({ "cores": [1] }))["cores"], json!([1]));
}

#[test]
fn an_export_changes_its_data_plane_or_stays_as_it_is() {
    let mut daemon = Daemon::with(&["--cores", "0,1"]);
    with_disk(&daemon);
    daemon.volume("v1", MIB);
    let vm = json!({ "name": "vm", "kind": "vhost-user-blk", "volumes": ["v1"], "cores": [0] });
    daemon.post("/v1/exports", &vm);
    daemon.post("/v1/exports", &json!({ "name": "nbd", "kind": "nbd", "volumes": ["v1"] }));
    let before = daemon.get("/v1/exports/vm");
    assert_eq!(daemon.patch("/v1/exports/vm", &json!({ "data_plane": "user" })), before, "as it is");
    // The kernel cannot serve a volume, so the cores stay, too.
    let both = json!({ "cores": [1], "data_plane": "kernel" });
    let refusal = daemon.refusal(Method::PATCH, "/v1/exports/vm", &both);
    assert!(refusal.0 == 422 && refusal.2.starts_with("export vm: data-plane=kernel: "), "{refusal:?}");
    let refusal = daemon.refusal(Method::PATCH, "/v1/exports/nbd", &json!({ "data_plane": "user" }));
    assert_eq!(refusal.2, "export nbd: exports of kind nbd have no choice of data planes");
    let refusal = daemon.refusal(Method::PATCH, "/v1/exports/vm", &json!({ "data_plane": "gpu" }));
    assert!(refusal.1 == "malformed" && refusal.2.contains("`user`, `kernel`"), "{refusal:?}");
    assert_eq!(daemon.get("/v1/exports/vm"), before);
    let auto = daemon.patch("/v1/exports/vm", &json!({ "cores": [1], "data_plane": "auto" }));
    assert_eq!((&auto["cores"], &auto["options"]["data-plane"]), (&json!([1]), &json!("auto")));
    assert!(auto["description"].as_str().unwrap().ends_with("served by the kernel where it can"), "{auto}");
    daemon.restart("-KILL");
    assert_eq!(daemon.get("/v1/exports/vm"), auto);
}

/// `docs/openapi.json` is this daemon's document. With UPDATE=1 it is written.
#[test]
fn the_document_in_docs_is_the_daemons() {
    let daemon = Daemon::new();
    let served = daemon.request(Method::GET, "/v1/openapi.json").send().unwrap().text().unwrap();
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/openapi.json");
    if std::env::var_os("UPDATE").is_some() {
        std::fs::write(&path, format!("{served}\n")).unwrap();
    }
    let checked_in = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(checked_in.trim_end() == served, "docs/openapi.json is old: run this test with UPDATE=1");
}

#[test]
fn a_refused_volume_leaves_the_device_as_it_is() {
    let daemon = Daemon::new();
    let path = daemon.file("data", 16 * MIB);
    // A file system, which `force` would overwrite.
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[1024 + 56..1024 + 58].copy_from_slice(&[0x53, 0xef]);
    bytes[64 << 10..5 << 20].fill(0x5a);
    std::fs::write(&path, &bytes).unwrap();
    daemon.post("/v1/devices", &json!({ "name": "data", "spec": path }));
    let state = std::fs::read(daemon.path("state/state.json")).unwrap();
    let cases = [
        (json!({ "name": "v1", "backing": "data", "size_bytes": 64 * MIB, "force": true }), "no-room"),
        (json!({ "name": "v1", "backing": "data", "size_bytes": 1000, "force": true }), "invalid"),
        (json!({ "name": "v1", "backing": "data", "size_bytes": 0, "force": true }), "invalid"),
        (json!({ "name": "v1", "backing": "data", "size_bytes": MIB }), "in-use"),
    ];
    for (new, kind) in cases {
        assert_eq!(daemon.refusal(Method::POST, "/v1/volumes", &new).1, kind, "{new}");
        assert!(std::fs::read(&path).unwrap() == bytes, "{new}: the device was written to");
        assert_eq!(std::fs::read(daemon.path("state/state.json")).unwrap(), state, "{new}");
    }
}
