//! Volumes whose room takes long to be made ready.

use crate::common::{Daemon, MIB, names, refusal};
use block::{Device, Op};
use exports::stream::Address;
use exports_nbd::{Config, Nbd};
use layers::fault::{Action, Fault, Rule};
use reactor::{CoreConfig, Cores};
use reqwest::blocking::Response;
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use stack::kinds::member::member;
use std::os::unix::net::UnixDatagram;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Size of a volume that takes a hundred seconds to zero while the device is slow.
const LARGE: u64 = 8 << 30;
/// Time of a zeroing request on the slow device.
const SLOW: Duration = Duration::from_millis(200);

/// Limit for operations that wait for no job: far less than the time of the job.
const SOON: Duration = Duration::from_secs(45);

fn late() -> Rule {
    Rule::new(Action::Delay(SLOW.as_nanos() as u64)).on(&[Op::WriteZeroes])
}

/// A daemon with a device `data` that is slow to make zeroes.
struct Slow {
    daemon: Daemon,
    device: Arc<Fault>,
    _served: Nbd,
    _cores: Cores,
}

impl Slow {
    fn new() -> Slow {
        let daemon = Daemon::new();
        let cores = Cores::start(&[CoreConfig::default()]).unwrap();
        let file = member(&daemon.file("disk", 4 * LARGE), false, false).unwrap().open().unwrap();
        let slow = Arc::new(Fault::new(file));
        slow.add(late());
        let socket = daemon.path("slow.sock");
        let config = Config::new(Address::Unix { path: socket.clone(), permissions: 0o600 });
        let served = Nbd::start(slow.clone() as Arc<dyn Device>, &[cores.get(0)], config).unwrap();
        daemon.post(
            "/v1/devices",
            &json!({ "name": "data", "spec": format!("nbd:path={}", socket.display()) }),
        );
        daemon.volume("v1", MIB);
        Slow { daemon, device: slow, _served: served, _cores: cores }
    }

    fn ask(&self, method: Method, path: &str, body: &Value) -> Response {
        self.daemon.request(method, path).header("prefer", "wait=9, respond-async").json(body).send().unwrap()
    }

    /// Asks for a large volume, which is a job then.
    fn begin(&self, name: &str) -> Value {
        let new = json!({ "name": name, "backing": "data", "size_bytes": LARGE });
        let began = Instant::now();
        let answer = self.ask(Method::POST, "/v1/volumes", &new);
        assert_eq!(answer.status(), StatusCode::ACCEPTED);
        assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
        answer.json().unwrap()
    }

    fn state(&self) -> (Vec<String>, u64, Value) {
        let free = self.daemon.get("/v1/devices/data")["free_bytes"].as_u64().unwrap();
        (names(&self.daemon.get("/v1/volumes")), free, self.daemon.get("/v1/jobs"))
    }
}

#[test]
fn no_request_waits_for_a_volume_that_takes_long_to_be_made() {
    let slow = Slow::new();
    let daemon = &slow.daemon;
    let free = slow.state().1;
    let job = slow.begin("big");
    assert_eq!(
        (&job["id"], &job["kind"], &job["volume"]),
        (&json!("big.create"), &json!("create"), &json!("big"))
    );
    assert_eq!((&job["backing"], &job["total_bytes"]), (&json!("data"), &json!(LARGE)));
    let began = Instant::now();
    assert_eq!(daemon.volume("v2", MIB)["name"], "v2");
    daemon.patch("/v1/volumes/v1", &json!({ "qos": { "iops": { "per_s": 500 } } }));
    assert_eq!((slow.state().0, slow.state().1), (vec!["v1".into(), "v2".into()], free - LARGE - MIB));
    let again = json!({ "name": "big", "backing": "data", "size_bytes": MIB });
    assert_eq!(daemon.refusal(Method::POST, "/v1/volumes", &again).1, "exists");
    let rename = json!({ "name": "big" });
    assert_eq!(daemon.refusal(Method::PATCH, "/v1/volumes/v1", &rename).1, "exists");
    let done = || daemon.get("/v1/jobs/big.create")["done_bytes"].as_u64().unwrap();
    daemon.wait_for("the first part", || done() > 0);
    daemon.patch("/v1/jobs/big.create", &json!({ "is_paused": true }));
    assert!(began.elapsed() < SOON, "others have waited {:?}", began.elapsed());
    // Requests in flight complete.
    daemon.wait_for("a job that stands still", || {
        let before = done();
        std::thread::sleep(4 * SLOW);
        done() == before
    });
    assert!(done() < LARGE, "{} of {LARGE}", done());
    slow.device.clear();
    daemon.patch("/v1/jobs/big.create", &json!({ "is_paused": false }));
    daemon.wait_for("the volume", || slow.state().2 == json!([]));
    assert_eq!(daemon.get("/v1/volumes/big")["size_bytes"], LARGE);
    // It grows in the same way, its users continue, and the job can be cancelled.
    slow.device.add(late());
    daemon.post("/v1/exports", &json!({ "name": "e1", "kind": "nbd", "volumes": ["big"] }));
    let before = slow.state();
    let grow = json!({ "name": "large", "size_bytes": 2 * LARGE, "qos": { "iops": { "per_s": 700 } } });
    let settings = daemon.get("/v1/volumes/big")["qos"].clone();
    let answer = slow.ask(Method::PATCH, "/v1/volumes/big", &grow);
    assert_eq!(answer.status(), StatusCode::ACCEPTED);
    assert_eq!(answer.json::<Value>().unwrap()["id"], "large.grow");
    let refused = |method: Method, path: &str, body: Value| {
        let (_, kind, detail) = daemon.refusal(method, path, &body);
        assert_eq!(kind, "in-use", "{detail}");
        detail
    };
    let detail = refused(Method::PATCH, "/v1/volumes/large", json!({ "size_bytes": 3 * LARGE }));
    assert_eq!(detail, "volume large: job large.grow is at work on it");
    refused(Method::DELETE, "/v1/devices/data", Value::Null);
    daemon.delete("/v1/jobs/large.grow");
    let after = slow.state();
    assert_eq!(
        (after.0, after.1, after.2),
        (vec!["v1".into(), "v2".into(), "big".into()], before.1, json!([]))
    );
    let kept = daemon.get("/v1/volumes/big");
    assert_eq!(
        (&kept["size_bytes"], &kept["qos"]),
        (&json!(LARGE), &settings),
        "nothing of the change is left"
    );
    let events = daemon.get("/v1/events").to_string();
    assert!(events.contains("large.grow was given up"), "{events}");
    assert_eq!(daemon.get("/v1/exports/e1")["error"], Value::Null);
}

#[test]
fn a_volume_that_is_not_ready_at_the_end_was_never_created() {
    let mut slow = Slow::new();
    let before = slow.state();
    for signal in ["-KILL", "-TERM"] {
        slow.begin("big");
        let began = Instant::now();
        slow.daemon.restart(signal);
        assert!(began.elapsed() < SOON, "{signal}: {:?}", began.elapsed());
        slow.daemon.wait_for("the device", || names(&slow.daemon.get("/v1/volumes")) == ["v1"]);
        assert_eq!(slow.state(), before, "after {signal}");
    }
    slow.begin("big");
    let cancelled = slow.daemon.request(Method::DELETE, "/v1/jobs/big.create").send().unwrap();
    assert_eq!(cancelled.status(), StatusCode::NO_CONTENT);
    assert_eq!(slow.state(), before);
    let none = slow.daemon.request(Method::DELETE, "/v1/jobs/big.create").send().unwrap();
    assert_eq!(refusal(none).1, "not-found");
}

#[test]
fn a_configuration_that_takes_long_can_be_watched_and_stopped_while_it_is_made() {
    let mut slow = Slow::new();
    let before = slow.state();
    let manager = UnixDatagram::bind(slow.daemon.path("notify")).unwrap();
    manager.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let told = || {
        let mut message = [0; 256];
        let len = manager.recv(&mut message).unwrap();
        String::from_utf8(message[..len].to_vec()).unwrap()
    };
    let wanted = format!("[[volume]]\nname = 'big'\nbacking = 'data'\nsize_bytes = {LARGE}\n");
    std::fs::write(slow.daemon.path("c.toml"), wanted).unwrap();
    slow.daemon.env.push(("NOTIFY_SOCKET", slow.daemon.path("notify")));
    slow.daemon.args.extend(["--config".into(), slow.daemon.path("c.toml").to_str().unwrap().to_owned()]);
    let begin = |slow: &mut Slow| {
        let began = Instant::now();
        slow.daemon.start_without_waiting_for_ready();
        assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
        assert_eq!(slow.daemon.get("/v1/jobs/big.create")["total_bytes"], LARGE);
        assert_eq!(slow.state().0, before.0, "nothing of it is there yet");
        assert!(told().starts_with("EXTEND_TIMEOUT_USEC=30000000\n"));
    };
    slow.daemon.end("-TERM");
    begin(&mut slow);
    // Cancelling the job ends the start, possibly before the answer: the wanted volume is missing.
    let _ = slow.daemon.request(Method::DELETE, "/v1/jobs/big.create").send();
    assert_eq!(slow.daemon.wait().code(), Some(1));
    let why = "freestoned: configuration: make volume big of 8589934592 bytes on data: volume big: job big.create was given up";
    assert!(slow.daemon.log().contains(why), "{}", slow.daemon.log());
    // A signal stops the daemon at once, and cleanly.
    while !told().starts_with("STOPPING") {}
    begin(&mut slow);
    let began = Instant::now();
    assert_eq!(slow.daemon.end("-TERM").code(), Some(0));
    assert!(began.elapsed() < SOON, "{:?}", began.elapsed());
    while !told().starts_with("STOPPING") {}
    begin(&mut slow);
    slow.device.clear();
    let mut message = told();
    while message.starts_with("EXTEND") {
        message = told();
    }
    assert!(message.starts_with("READY=1\n"), "{message}");
    assert_eq!(slow.daemon.get("/v1/volumes/big")["size_bytes"], LARGE);
}

#[test]
fn the_api_says_whether_the_daemon_starts_is_ready_or_stops() {
    let mut slow = Slow::new();
    assert_eq!(slow.daemon.get("/v1/system")["state"], "ready");
    slow.daemon.end("-TERM");
    // Longer than a look at the API takes on a busy machine.
    slow.device.clear();
    slow.device.add(Rule::new(Action::Delay(5_000_000_000)).on(&[Op::WriteZeroes]));
    let wanted = format!(
        "[[volume]]\nname = 'big'\nbacking = 'data'\nsize_bytes = {LARGE}\n[[export]]\nname = 'e1'\nkind = 'nbd'\nvolumes = ['big']\n"
    );
    std::fs::write(slow.daemon.path("c.toml"), wanted).unwrap();
    slow.daemon.args.extend(["--config".into(), slow.daemon.path("c.toml").to_str().unwrap().to_owned()]);
    slow.daemon.start_without_waiting_for_ready();
    assert_eq!(slow.daemon.get("/v1/system")["state"], "starting");
    slow.daemon.wait_for("progress", || {
        let start = &slow.daemon.get("/v1/system")["start"];
        start["total_bytes"] == LARGE && start["done_bytes"].as_u64().is_some_and(|done| done > 0)
    });
    let start = &slow.daemon.get("/v1/system")["start"];
    assert_eq!(start["step"], format!("make volume big of {LARGE} bytes on data"));
    assert_eq!((&start["done_steps"], &start["total_steps"]), (&json!(0), &json!(2)));
    assert_eq!(slow.daemon.get("/v1/exports"), json!([]), "an export is there before the daemon is ready");
    // While it stops, it reads and does not write.
    slow.daemon.signal("-TERM");
    slow.daemon.wait_for("a daemon that stops", || slow.daemon.get("/v1/system")["state"] == "stopping");
    let refused = slow.daemon.refusal(
        Method::POST,
        "/v1/volumes",
        &json!({ "name": "v2", "backing": "data", "size_bytes": MIB }),
    );
    assert_eq!((refused.0, &*refused.1), (503, "stopping"));
    assert_eq!(slow.daemon.wait().code(), Some(0));
    slow.device.clear();
    slow.daemon.start();
    assert_eq!(slow.daemon.get("/v1/system")["start"], Value::Null);
    assert_eq!(slow.daemon.get("/v1/exports/e1")["state"], "active");
}
