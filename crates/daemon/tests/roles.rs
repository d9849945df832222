//! Roles: the table, every operation with every role, and what each role cannot reach.

use crate::common::{Daemon, MIB, names};
use daemon::rest::{Ask, MATRIX, Role, Row};
use reqwest::blocking::Client;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// The tokens of the daemon under test: one for each role, and a second provisioner.
const TOKENS: [(&str, &str, &str); 5] = [
    ("read-only", "page", "page-0123456789abcdef0123456789"),
    ("provisioner", "csi", "csi-0123456789abcdef01234567890"),
    ("provisioner", "nova", "nova-0123456789abcdef0123456789"),
    ("operator", "ops", "ops-0123456789abcdef01234567890"),
    ("admin", "boss", "boss-0123456789abcdef0123456789"),
];

struct Subject {
    daemon: Daemon,
    address: String,
    http: Client,
}

impl Subject {
    /// A daemon with a device of volumes `data`, a bare device `bare`, and a mirror `mirror`.
    fn new() -> Subject {
        let tokens = TOKENS.map(|(role, name, token)| format!("{role} {name} {token}\n")).concat();
        let (daemon, address) = Daemon::listening(&tokens);
        for name in ["data", "bare"] {
            let spec = daemon.file(name, 64 * MIB);
            daemon.post("/v1/devices", &json!({ "name": name, "spec": spec }));
        }
        daemon.volume("theirs", MIB);
        let members = ["m0", "m1"].map(|name| daemon.file(name, 24 * MIB));
        daemon.post("/v1/arrays", &json!({ "name": "mirror", "level": "1", "members": members }));
        Subject { daemon, address, http: Client::new() }
    }

    /// The status and the answer, of a request with the token called `name`.
    fn ask(&self, name: &str, method: Method, path: &str, body: &Value) -> (u16, Value) {
        let (.., token) = TOKENS.into_iter().find(|(_, known, _)| *known == name).unwrap();
        let mut request =
            self.http.request(method, format!("http://{}{path}", self.address)).bearer_auth(token);
        if !body.is_null() {
            request = request.json(body);
        }
        let answer = request.send().unwrap();
        let status = answer.status().as_u16();
        let is_stream = answer.headers().get("content-type").is_some_and(|kind| kind == "text/event-stream");
        (status, if is_stream { Value::Null } else { answer.json().unwrap_or(Value::Null) })
    }

    #[track_caller]
    fn done(&self, name: &str, method: Method, path: &str, body: &Value) -> Value {
        let (status, answer) = self.ask(name, method.clone(), path, body);
        assert!(
            StatusCode::from_u16(status).unwrap().is_success(),
            "{name}: {method} {path} {body}: {answer}"
        );
        answer
    }

    /// The word for programs and the sentence that a request is refused with.
    #[track_caller]
    fn refused(&self, name: &str, method: Method, path: &str, body: &Value) -> (String, String) {
        let (status, answer) = self.ask(name, method.clone(), path, body);
        assert!(status >= 400, "{name}: {method} {path} {body}: {answer}");
        let text = |key: &str| answer[key].as_str().unwrap().to_owned();
        (text("type"), text("detail"))
    }
}

/// A request for each operation, which asks for nothing else (`None`) or for that. Where it is
/// allowed it may fail for another reason, so that nothing comes of most of them.
fn sample(daemon: &Daemon, row: &Row, ask: Option<Ask>) -> (String, Value) {
    let path = ["{name}", "{id}", "{backing}", "{snapshot}"].iter();
    let path = path.fold(row.path.to_owned(), |path, part| path.replace(part, "nope"));
    let disk = daemon.path("nowhere").display().to_string();
    let volume = |field: &str, value: Value| {
        let mut new = json!({ "name": "v", "backing": "nope", "size_bytes": MIB });
        new[field] = value;
        new
    };
    let export =
        |of: &str, options: Value| json!({ "name": "e", "kind": "nbd", "volumes": [of], "options": options });
    let body = match (row.method.as_str(), row.path, ask) {
        ("GET" | "DELETE", _, None) => Value::Null,
        ("POST", "/v1/devices", None) => json!({ "name": "d", "spec": disk }),
        ("PATCH", "/v1/devices/{name}", None) => json!({ "size_bytes": MIB }),
        ("POST", "/v1/devices/{name}/snapshots", None) => json!({ "name": "s" }),
        ("POST", "/v1/devices/{name}/stream", None) => json!({}),
        ("POST", "/v1/devices/{name}/commit", None) => json!({}),
        ("POST", "/v1/arrays", None) => json!({ "name": "a", "level": "1", "members": [disk, disk] }),
        ("POST", "/v1/arrays/{name}/actions", None) => json!({ "action": "fail", "members": ["0"] }),
        ("POST", "/v1/arrays/{name}/actions", Some(Ask::Force)) => {
            json!({ "action": "replace", "member": "0", "device": disk, "force": true })
        }
        ("POST", "/v1/arrays/{name}/actions", Some(Ask::RawDevice)) => {
            return (path.replace("nope", "mirror"), json!({ "action": "re-add", "devices": [disk] }));
        }
        ("POST", "/v1/volumes", None) => volume("qos", json!({})),
        ("POST", "/v1/volumes", Some(Ask::Force)) => volume("force", json!(true)),
        ("POST", "/v1/volumes", Some(Ask::Settings)) => volume("group", json!("nope")),
        ("PATCH", "/v1/volumes/{name}", None) => json!({ "size_bytes": MIB }),
        ("PATCH", "/v1/volumes/{name}", Some(Ask::Settings)) => json!({ "name": "other" }),
        ("POST", "/v1/volumes/{name}/move", None) => json!({ "backing": "nope" }),
        ("POST", "/v1/volumes/{name}/move", Some(Ask::Force)) => json!({ "backing": "nope", "force": true }),
        ("POST", "/v1/pools/{backing}/actions", None) => json!({ "action": "repair" }),
        ("PUT", "/v1/groups/{name}", None) => json!({}),
        // The address is no address of this machine.
        ("POST", "/v1/portals", None) => json!({ "name": "p", "listen": ["192.0.2.1:4420"] }),
        ("POST", "/v1/exports", None) => export("nope", json!({})),
        ("POST", "/v1/exports", Some(Ask::RawDevice)) => export("bare", json!({})),
        ("POST", "/v1/exports", Some(Ask::Path)) => export("nope", json!({ "tls-psk": disk })),
        ("POST", "/v1/exports", Some(Ask::OpenListener)) => export("nope", json!({ "listen": "0.0.0.0:0" })),
        ("POST", "/v1/exports", Some(Ask::Settings)) => {
            json!({ "name": "e", "kind": "nbd", "volumes": ["nope"], "label": "other" })
        }
        ("PATCH", "/v1/exports/{name}", None) => json!({ "hosts": {} }),
        ("PATCH", "/v1/exports/{name}", Some(Ask::Settings)) => json!({ "cores": [] }),
        ("PATCH", "/v1/jobs/{id}", None) => json!({ "is_paused": true }),
        (method, path, ask) => panic!("{method} {path} {ask:?}: no request for it"),
    };
    (path, body)
}

#[test]
fn the_table_has_every_operation_of_the_document_and_the_document_shows_it() {
    let daemon = Daemon::new();
    let document = daemon.get("/v1/openapi.json");
    let mut shown = BTreeSet::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let row =
                MATRIX.iter().find(|row| row.path == path && row.method.as_str().to_lowercase() == *method);
            let row = row.unwrap_or_else(|| panic!("{method} {path} is not in the table of roles"));
            let names = |roles: &[Role]| json!(roles.iter().map(|role| role.name()).collect::<Vec<_>>());
            let roles = &operation["x-roles"];
            assert_eq!(roles["operation"], names(row.roles), "{method} {path}");
            row.asks
                .iter()
                .for_each(|ask| assert_eq!(roles[ask.name()], names(ask.roles()), "{method} {path}"));
            assert_eq!(roles.as_object().unwrap().len(), 1 + row.asks.len(), "{method} {path}");
            shown.insert((row.method.to_string(), row.path));
        }
    }
    let others = MATRIX.iter().map(|row| (row.method.to_string(), row.path));
    let others: Vec<_> = others.filter(|row| !shown.contains(row)).map(|(_, path)| path).collect();
    assert_eq!(others, ["/", "/web/{name}", "/v1/openapi.json", "/metrics"], "without a description");
    assert_eq!(shown.len() + others.len(), MATRIX.len(), "an operation stands twice in the table");
}

#[test]
fn every_operation_is_refused_to_the_roles_that_the_table_does_not_name() {
    let subject = Subject::new();
    let daemon = &subject.daemon;
    let (mut allowed, mut refused) = (0, 0);
    // With the least roles first: what they are refused is not there for the next.
    for row in MATRIX {
        for ask in [None].into_iter().chain(row.asks.iter().map(|ask| Some(*ask))) {
            let (path, body) = sample(daemon, row, ask);
            for (role, name, _) in TOKENS {
                let role = Role::from_name(role).unwrap();
                let may = row.roles.contains(&role) && ask.is_none_or(|ask| ask.roles().contains(&role));
                let (status, answer) = subject.ask(name, row.method.clone(), &path, &body);
                let request = format!("{name}: {} {path} {body}: {status} {answer}", row.method);
                // For a provisioner there are no devices, so none that it may not export.
                let is_hidden = role == Role::Provisioner && ask == Some(Ask::RawDevice) && status == 404;
                assert_eq!(status == 403 || (is_hidden && !may), !may, "{request}");
                if status == 403 {
                    assert_eq!(answer["type"], "forbidden", "{request}");
                    assert!(answer["detail"].as_str().unwrap().contains("takes the role"), "{request}");
                }
                *if may { &mut allowed } else { &mut refused } += 1;
            }
        }
    }
    assert!(allowed > 100 && refused > 80, "{allowed} allowed, {refused} refused");
    // A method that no row has takes the role admin, and then there is none.
    assert_eq!(subject.ask("ops", Method::PUT, "/v1/volumes", &Value::Null).0, 403);
    assert_eq!(subject.ask("boss", Method::PUT, "/v1/volumes", &Value::Null).0, 405);
    assert_eq!(subject.ask("page", Method::GET, "/v1/nope", &Value::Null).0, 404);
}

/// Every field and option in which an operator could name a path is tried with an existing file and
/// with a missing one. The answers differ only in the path, and the file is untouched.
#[test]
fn an_operator_neither_learns_of_a_file_nor_reaches_it() {
    let subject = Subject::new();
    let daemon = &subject.daemon;
    let there = daemon.path("secret").display().to_string();
    std::fs::write(&there, "root:$6$secret\n").unwrap();
    let gone = daemon.path("absent").display().to_string();
    daemon.volume("v1", MIB);
    let export = |kind: &str, options: Value| json!({ "name": "e", "kind": kind, "volumes": ["v1"], "options": options });
    let requests = |path: &str| {
        let nqn = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-0000-0000-000000000001";
        let nvme = |key: &str| {
            let mut options = json!({ "listen": "127.0.0.1:0", "nqn": nqn });
            options[key] = json!(path);
            ("/v1/exports", export("nvme-tcp", options))
        };
        vec![
            ("/v1/exports", export("nbd", json!({ "socket": path }))),
            ("/v1/exports", export("nbd", json!({ "listen": "127.0.0.1:0", "tls-psk": path }))),
            ("/v1/exports", export("nbd", json!({ "listen": "127.0.0.1:0", "tls-certificates": path }))),
            ("/v1/exports", export("nbd", json!({ "listen": "127.0.0.1:0", "tls_psk": path }))),
            ("/v1/exports", export("vhost-user-blk", json!({ "socket": path }))),
            ("/v1/exports", export("vhost-user-blk", json!({ "socket": path, "mode": "client" }))),
            ("/v1/exports", export("vduse", json!({ "name": "x", "journal": path }))),
            nvme("auth-keys"),
            nvme("tls-keys"),
            nvme("reservations"),
            ("/v1/arrays/mirror/actions", json!({ "action": "add", "devices": [path] })),
            ("/v1/arrays/mirror/actions", json!({ "action": "re-add", "devices": [path] })),
            ("/v1/arrays/mirror/actions", json!({ "action": "replace", "member": "0", "device": path })),
            ("/v1/devices", json!({ "name": "d", "spec": path })),
            ("/v1/arrays", json!({ "name": "a", "level": "1", "members": [path, path] })),
        ]
    };
    for ((target, one), (_, other)) in requests(&there).into_iter().zip(requests(&gone)) {
        let refused = |body: &Value| subject.refused("ops", Method::POST, target, body);
        let (kind, said) = refused(&one);
        assert_eq!(kind, "forbidden", "{one}: {said}");
        assert_eq!(said, refused(&other).1.replace(&gone, &there), "{one}");
    }
    // Options that come with the kind.
    let injected = export(&format!("nbd:socket={there},name=x"), json!({}));
    let (kind, said) = subject.refused("ops", Method::POST, "/v1/exports", &injected);
    assert!(kind == "invalid" && said.contains("no such export"), "{kind}: {said}");
    assert_eq!(subject.daemon.refusal(Method::POST, "/v1/exports", &injected).1, "invalid");
    // Members are compared with the names that the array knows.
    for action in ["fail", "remove"] {
        let say = |path: &str| {
            let body = json!({ "action": action, "members": [path] });
            subject.refused("ops", Method::POST, "/v1/arrays/mirror/actions", &body).1
        };
        assert_eq!(say(&there), say(&gone).replace(&gone, &there));
    }
    assert_eq!(std::fs::read_to_string(&there).unwrap(), "root:$6$secret\n");
    assert!(!std::path::Path::new(&gone).exists());
    assert_eq!(names(&daemon.get("/v1/exports")), [""; 0]);
    // In the daemon's own directories an operator chooses.
    let socket = daemon.path("e.sock").display().to_string();
    subject.done("ops", Method::POST, "/v1/exports", &export("nbd", json!({ "socket": socket })));
}

/// An operator may re-add a device that left an array, since the array knows it.
#[test]
fn an_operator_takes_a_member_back() {
    let subject = Subject::new();
    let actions = "/v1/arrays/mirror/actions";
    subject.daemon.wait_for("the mirror", || subject.daemon.get("/v1/jobs") == json!([]));
    let member = subject.daemon.path("m1").display().to_string();
    for action in [
        json!({ "action": "fail", "members": ["1"] }),
        json!({ "action": "remove", "members": ["1"] }),
        json!({ "action": "re-add", "devices": [member] }),
    ] {
        subject.done("ops", Method::POST, actions, &action);
    }
}

#[test]
fn a_provisioner_has_its_own_volumes_and_exports_and_no_others() {
    let mut subject = Subject::new();
    let new = |name: &str, on: &str| json!({ "name": name, "backing": on, "size_bytes": MIB });
    let made = subject.done("csi", Method::POST, "/v1/volumes", &new("mine", "data"));
    assert_eq!(made["label"], "csi");
    subject.done("nova", Method::POST, "/v1/volumes", &new("other", "data"));
    assert_eq!(
        subject.done("csi", Method::PATCH, "/v1/volumes/mine", &json!({ "size_bytes": 2 * MIB }))["label"],
        "csi"
    );
    let export = |name: &str, of: &str| json!({ "name": name, "kind": "nbd", "volumes": [of] });
    subject.done("csi", Method::POST, "/v1/exports", &export("e1", "mine"));
    subject.done("ops", Method::POST, "/v1/exports", &export("e2", "theirs"));
    let seen = |subject: &Subject, path: &str| names(&subject.done("csi", Method::GET, path, &Value::Null));
    for signal in ["-KILL", "-TERM"] {
        assert_eq!(seen(&subject, "/v1/volumes"), ["mine"]);
        assert_eq!(seen(&subject, "/v1/exports"), ["e1"]);
        subject.daemon.restart(signal);
        // Over TCP it listens elsewhere now.
        let ready = || subject.daemon.logged("ready").map(|line| line["listen"].clone()).collect::<Vec<_>>();
        let before = json!(subject.address);
        subject.daemon.wait_for("the log", || ready().last() != Some(&before));
        let now = ready().last().unwrap().as_str().unwrap().to_owned();
        subject.address = now;
        subject.daemon.wait_for("the exports", || {
            subject
                .daemon
                .get("/v1/exports")
                .as_array()
                .unwrap()
                .iter()
                .all(|export| export["state"] == "active")
        });
    }
    // It copies its own volumes, and neither those of others nor devices.
    let copy = |of: &str| json!({ "name": "copy", "backing": "data", "from": of });
    subject.daemon.delete("/v1/exports/e2");
    let pivot = |of: &str| json!({ "name": "copy", "backing": "data", "from": of, "pivot": true });
    for of in ["theirs", "other", "bare", "mirror"] {
        for new in [copy(of), pivot(of)] {
            let (kind, detail) = subject.refused("csi", Method::POST, "/v1/volumes", &new);
            assert_eq!((&*kind, &*detail), ("not-found", &*format!("no volume, array or device {of:?}")));
        }
    }
    subject.done("csi", Method::DELETE, "/v1/exports/e1", &Value::Null);
    for new in [copy("bare"), pivot("bare")] {
        let (kind, detail) = subject.refused("ops", Method::POST, "/v1/volumes", &new);
        assert!(kind == "forbidden" && detail.contains("copying a whole device"), "{detail}");
    }
    assert_eq!(subject.done("csi", Method::POST, "/v1/volumes", &copy("mine"))["label"], "csi");
    subject.daemon.wait_for("the copy", || {
        subject.done("csi", Method::GET, "/v1/volumes/copy", &Value::Null)["copying_from"].is_null()
    });
    subject.done("csi", Method::DELETE, "/v1/volumes/copy", &Value::Null);
    subject.done("csi", Method::POST, "/v1/exports", &export("e1", "mine"));
    subject.done("ops", Method::POST, "/v1/exports", &export("e2", "theirs"));
    // Things of others are answered as things that are not there.
    for (method, of_others, of_nobody, body) in [
        (Method::GET, "/v1/volumes/theirs", "/v1/volumes/nope", Value::Null),
        (Method::GET, "/v1/volumes/other", "/v1/volumes/nope", Value::Null),
        (Method::PATCH, "/v1/volumes/other", "/v1/volumes/nope", json!({ "size_bytes": 2 * MIB })),
        (Method::DELETE, "/v1/volumes/other", "/v1/volumes/nope", Value::Null),
        (Method::GET, "/v1/exports/e2", "/v1/exports/nope", Value::Null),
        (Method::GET, "/v1/exports/e2/attach", "/v1/exports/nope/attach", Value::Null),
        (Method::DELETE, "/v1/exports/e2", "/v1/exports/nope", Value::Null),
        (Method::PATCH, "/v1/exports/e2", "/v1/exports/nope", json!({ "hosts": {} })),
    ] {
        let name = of_others.trim_start_matches("/v1/").split('/').nth(1).unwrap();
        let others = subject.refused("csi", method.clone(), of_others, &body);
        let nobody = subject.refused("csi", method, of_nobody, &body);
        assert_eq!(others.0, "not-found");
        assert_eq!(others.1, nobody.1.replace("nope", name), "{of_others}");
    }
    for of in ["theirs", "other", "bare", "mirror", "nope"] {
        let (kind, said) = subject.refused("csi", Method::POST, "/v1/exports", &export("e3", of));
        assert_eq!((&*kind, said), ("not-found", format!("no volume, array or device {of:?}")));
    }
    let refused = |method: Method, path: &str, body: Value| subject.refused("csi", method, path, &body).0;
    assert_eq!(
        refused(Method::POST, "/v1/volumes", new("v", "bare")),
        "forbidden",
        "it would prepare the device"
    );
    for settings in [json!({ "name": "x" }), json!({ "group": "g" }), json!({ "min_qos": { "iops": 1 } })] {
        assert_eq!(refused(Method::PATCH, "/v1/volumes/mine", settings), "forbidden");
    }
    let mut labelled = new("v", "data");
    labelled["label"] = json!("nova");
    assert_eq!(refused(Method::POST, "/v1/volumes", labelled.clone()), "forbidden");
    labelled["label"] = json!("csi");
    subject.done("csi", Method::POST, "/v1/volumes", &labelled);
    subject.done("csi", Method::DELETE, "/v1/volumes/v", &Value::Null);
    // An operator hands over what it makes.
    subject.done("ops", Method::POST, "/v1/volumes", &labelled);
    subject.done("csi", Method::DELETE, "/v1/volumes/v", &Value::Null);
    assert_eq!(refused(Method::DELETE, "/v1/volumes/mine", Value::Null), "in-use");
    subject.done("csi", Method::DELETE, "/v1/exports/e1", &Value::Null);
    subject.done("csi", Method::DELETE, "/v1/volumes/mine", &Value::Null);
    assert_eq!(names(&subject.daemon.get("/v1/volumes")), ["theirs", "other"]);
}

/// A provisioner changes the limits of its own volumes, and asks for the room of pools. It learns
/// of no volume of others, and of no device that has no volumes.
#[test]
fn a_provisioner_limits_its_own_volumes_and_sees_the_room_for_more() {
    let subject = Subject::new();
    let new = json!({ "name": "mine", "backing": "data", "size_bytes": MIB });
    subject.done("csi", Method::POST, "/v1/volumes", &new);
    let limits = json!({ "qos": { "iops": { "per_s": 700, "burst": 0 } } });
    let limited = subject.done("csi", Method::PATCH, "/v1/volumes/mine", &limits);
    assert_eq!(limited["qos"]["iops"]["per_s"], 700);
    assert_eq!(subject.daemon.get("/v1/volumes/mine")["qos"], limited["qos"]);
    assert_eq!(subject.refused("csi", Method::PATCH, "/v1/volumes/theirs", &limits).0, "not-found");
    assert_eq!(subject.refused("nova", Method::PATCH, "/v1/volumes/mine", &limits).0, "not-found");
    assert_eq!(subject.refused("page", Method::PATCH, "/v1/volumes/mine", &limits).0, "forbidden");
    assert_eq!(subject.daemon.get("/v1/volumes/theirs")["qos"], json!({}));

    let room = |name: &str| subject.done(name, Method::GET, "/v1/pools/data/capacity", &Value::Null);
    let free = |name: &str| room(name)["free_bytes"].as_u64().unwrap();
    let device = subject.daemon.get("/v1/devices/data");
    assert_eq!(json!(free("csi")), device["free_bytes"]);
    let fields: Vec<String> = room("csi").as_object().unwrap().keys().cloned().collect();
    assert_eq!(fields, ["backing", "capacity_bytes", "free_bytes"]);
    let before = free("nova");
    subject.done("csi", Method::PATCH, "/v1/volumes/mine", &json!({ "size_bytes": 3 * MIB }));
    assert_eq!(before - free("nova"), 2 * MIB);
    for (name, of) in [("csi", "bare"), ("csi", "mirror"), ("csi", "nope"), ("boss", "bare")] {
        let path = format!("/v1/pools/{of}/capacity");
        let (kind, detail) = subject.refused(name, Method::GET, &path, &Value::Null);
        assert_eq!((&*kind, &*detail), ("not-found", &*format!("no array or device {of:?} with volumes")));
    }
}
