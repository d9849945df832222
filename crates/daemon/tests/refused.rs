//! A refused change has changed nothing: not a byte of the state, no device, nothing that the API
//! shows.

use crate::common::{Daemon, MIB, Served};
use block::{IoError, Op};
use layers::fault::{Action, Rule};
use reqwest::Method;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// Everything that a refused request could have changed.
struct Everything {
    shown: Vec<(&'static str, Value)>,
    /// The file, byte for byte.
    state: String,
    /// The content of every file in the daemon's directory; members of the running array are left
    /// out, which writes to them on its own.
    files: BTreeMap<PathBuf, Vec<u8>>,
}

const COLLECTIONS: [&str; 6] =
    ["/v1/devices", "/v1/arrays", "/v1/volumes", "/v1/groups", "/v1/exports", "/v1/jobs"];

impl Everything {
    fn of(daemon: &Daemon) -> Everything {
        let state = std::fs::read_to_string(daemon.path("state/state.json")).unwrap();
        let shown = COLLECTIONS.map(|path| (path, daemon.get(path))).into();
        Everything { shown, state, files: files(daemon.dir.path()) }
    }

    #[track_caller]
    fn check(&self, daemon: &Daemon, request: &str) {
        let after = Everything::of(daemon);
        for (before, after) in self.shown.iter().zip(&after.shown) {
            assert_eq!(before, after, "{request}: {}", daemon.log());
        }
        assert_eq!(self.state, after.state, "{request}");
        let names = |all: &Everything| all.files.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(self), names(&after), "{request}: {}", daemon.log());
        for (path, content) in &self.files {
            assert!(*content == after.files[path], "{request}: {} has changed", path.display());
        }
    }
}

fn files(directory: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(directory).unwrap().map(Result::unwrap) {
        let (path, name) = (entry.path(), entry.file_name().into_string().unwrap());
        if ["state", "log", "m0", "m1"].contains(&&*name) {
            continue;
        }
        let content = match entry.file_type().unwrap() {
            kind if kind.is_file() => std::fs::read(&path).unwrap(),
            kind if kind.is_dir() => {
                files.extend(self::files(&path));
                Vec::new()
            }
            _ => Vec::new(),
        };
        files.insert(path, content);
    }
    files
}

/// A daemon with everything there is: a device of volumes, a device with a file system, a mirror,
/// groups, exports.
fn with_everything() -> Daemon {
    let daemon = Daemon::with(&["--member-timeout", "1", "--cores", "0"]);
    for name in ["data", "bare", "spare"] {
        let path = daemon.file(name, 24 * MIB);
        if name == "bare" {
            // Content that `force` would overwrite is kept when the request fails.
            let mut bytes = std::fs::read(&path).unwrap();
            bytes[1024 + 56..1024 + 58].copy_from_slice(&[0x53, 0xef]);
            bytes[64 << 10..8 << 20].fill(0x5a);
            std::fs::write(&path, &bytes).unwrap();
        }
        if name != "spare" {
            daemon.post("/v1/devices", &json!({ "name": name, "spec": path }));
        }
    }
    for name in ["n0", "n1", "other"] {
        daemon.file(name, 24 * MIB);
    }
    let members = ["m0", "m1"].map(|name| daemon.file(name, 24 * MIB));
    daemon.post("/v1/arrays", &json!({ "name": "mirror", "level": "1", "members": members }));
    for group in ["full", "empty"] {
        daemon.send(Method::PUT, &format!("/v1/groups/{group}"), &json!({ "iops": { "per_s": 900 } }));
    }
    daemon.volume("served", MIB);
    daemon.post(
        "/v1/volumes",
        &json!({ "name": "limited", "backing": "data", "size_bytes": MIB, "group": "full" }),
    );
    daemon.post("/v1/exports", &json!({ "name": "e1", "kind": "nbd", "volumes": ["served"] }));
    daemon.wait_for("the mirror", || daemon.get("/v1/jobs") == json!([]));
    daemon
}

/// Every request that changes the state.
fn requests(daemon: &Daemon) -> Vec<(Method, &'static str, Value)> {
    let path = |name: &str| daemon.path(name).display().to_string();
    let limits = json!({ "iops": { "per_s": 70 } });
    let volume = |on: &str| json!({ "name": format!("on-{on}"), "backing": on, "size_bytes": MIB, "force": true, "qos": limits });
    vec![
        (Method::POST, "/v1/devices", json!({ "name": "other", "spec": path("other") })),
        (Method::DELETE, "/v1/devices/bare", Value::Null),
        (
            Method::POST,
            "/v1/arrays",
            json!({ "name": "made", "level": "1", "members": [path("n0"), path("n1")] }),
        ),
        (Method::POST, "/v1/arrays/mirror/actions", json!({ "action": "add", "devices": [path("spare")] })),
        (
            Method::POST,
            "/v1/arrays/mirror/actions",
            json!({ "action": "replace", "member": "0", "device": path("spare") }),
        ),
        (Method::DELETE, "/v1/arrays/mirror", Value::Null),
        (Method::POST, "/v1/volumes", volume("data")),
        (Method::POST, "/v1/volumes", volume("bare")),
        (
            Method::PATCH,
            "/v1/volumes/served",
            json!({ "qos": limits, "name": "renamed", "size_bytes": 2 * MIB }),
        ),
        (Method::PATCH, "/v1/volumes/limited", json!({ "group": "" })),
        (Method::DELETE, "/v1/volumes/limited", Value::Null),
        (Method::POST, "/v1/volumes/served/move", json!({ "backing": "bare", "force": true })),
        (Method::PUT, "/v1/groups/new", limits.clone()),
        (Method::PUT, "/v1/groups/full", limits.clone()),
        (Method::DELETE, "/v1/groups/empty", Value::Null),
        (Method::POST, "/v1/exports", json!({ "name": "e2", "kind": "nbd", "volumes": ["limited"] })),
        (Method::POST, "/v1/exports", json!({ "name": "e3", "kind": "vhost-user-blk", "volumes": ["bare"] })),
        (Method::PATCH, "/v1/exports/e1", json!({ "cores": [0] })),
        (Method::DELETE, "/v1/exports/e1", Value::Null),
    ]
}

#[test]
fn a_change_that_cannot_be_remembered_has_changed_nothing() {
    let daemon = with_everything();
    let before = Everything::of(&daemon);
    // The new state cannot be written, as on a full disk.
    let obstacle = daemon.path("state/state.json.new");
    std::fs::create_dir(&obstacle).unwrap();
    for (method, path, body) in requests(&daemon) {
        let request = format!("{method} {path} {body}");
        let (status, kind, detail) = daemon.refusal(method, path, &body);
        assert_eq!((status, &*kind), (500, "failed"), "{request}: {detail}");
        assert!(detail.contains("state.json"), "{request}: {detail}");
        before.check(&daemon, &request);
    }
    std::fs::remove_dir(&obstacle).unwrap();
    // Nothing stands in the way of the same requests now, and nothing is left of the first ones.
    for (method, path, body) in requests(&daemon) {
        // Of what excludes each other the first is tried.
        let is_excluded = path.ends_with("/move") || path.ends_with("/actions") || body["name"] == "e3";
        if method != Method::DELETE && !is_excluded {
            let answer = daemon.send(method.clone(), path, &body);
            assert!(answer.status().is_success(), "{method} {path} {body}: {}", answer.text().unwrap());
        }
    }
}

/// A mistake at the end of a configuration is found before its beginning is made.
#[test]
fn a_configuration_with_a_mistake_makes_nothing() {
    let mut daemon = Daemon::prepare(&["--config"]);
    let members = ["n0", "n1"].map(|name| daemon.file(name, 24 * MIB));
    let path = daemon.path("config.toml");
    daemon.args.push(path.to_str().unwrap().into());
    let array = format!("[[array]]\nname = \"data\"\nlevel = \"1\"\nmembers = {members:?}\n");
    let volume =
        |more: &str| format!("[[volume]]\nname = \"v1\"\nbacking = \"data\"\nsize_bytes = 1048576\n{more}");
    let cases = [
        (volume("group = \"nope\"\n"), "group \"nope\""),
        (volume("qos.iops.per_s = 0\n"), "iops: 0"),
        (volume("from = \"disk\"\n"), "volume v1: from: the configuration only makes volumes"),
        (volume("").replace("size_bytes = 1048576\n", ""), "volume v1: size_bytes is missing"),
        (volume("").replace("\"data\"", "\"date\""), "array or device \"date\""),
        (volume("").replace("v1", "data"), "the name data is given twice"),
        (format!("{}[[export]]\nname = \"e1\"\nkind = \"nbd\"\nvolumes = [\"v2\"]\n", volume("")), "\"v2\""),
        (format!("{}[[export]]\nname = \"e1\"\nkind = \"nbdd\"\nvolumes = [\"v1\"]\n", volume("")), "nbdd"),
    ];
    for (mistake, text) in cases {
        std::fs::write(&path, format!("{array}{mistake}")).unwrap();
        let output = daemon.command().output().unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && said.contains(text), "{mistake}: {said}");
        assert!(!daemon.path("state/state.json").exists(), "{mistake}");
        for member in &members {
            assert!(std::fs::read(member).unwrap().iter().all(|byte| *byte == 0), "{mistake}: {member}");
        }
    }
}

/// Devices whose writes fail when the test wants it.
struct Failing([Served; 2]);

impl Failing {
    /// Registers `data` and `bare`, the second with a file system.
    fn new(daemon: &Daemon) -> Failing {
        Failing(["data", "bare"].map(|name| {
            let path = daemon.file(name, 24 * MIB);
            if name == "bare" {
                let file = std::fs::File::options().write(true).open(&path).unwrap();
                file.write_all_at(&vec![0x5a; 4 << 20], 0).unwrap();
                file.write_all_at(&[0x53, 0xef], 1024 + 56).unwrap();
            }
            let served = daemon.served(name);
            daemon.post("/v1/devices", &json!({ "name": name, "spec": served.spec }));
            served
        }))
    }

    /// From now on the write, zeroing or flush after `done` of them fails, once.
    fn fail_after(&self, done: u64) {
        let rule = Rule::new(Action::Error(IoError::Medium)).on(&[Op::Write, Op::WriteZeroes, Op::Flush]);
        self.0.iter().for_each(|Served { fault, .. }| {
            fault.add(Rule { after: done, ..rule.clone() }.once());
        });
    }

    /// How many failed.
    fn end(&self) -> u64 {
        let hits = self.0.iter().flat_map(|served| served.fault.rules()).map(|(.., hits)| hits).sum();
        self.0.iter().for_each(|served| served.fault.clear());
        hits
    }
}

/// Each write that a change makes fails once. The change is refused and has changed nothing, also
/// for the next start; or it is acknowledged, when nothing depended on that write.
#[test]
fn a_change_whose_device_fails_has_changed_nothing() {
    let mut daemon = Daemon::new();
    let failing = Failing::new(&daemon);
    let begin = |daemon: &Daemon| std::fs::read(daemon.path("bare")).unwrap()[..4 << 20].to_vec();
    daemon.volume("v1", MIB);
    let limits = json!({ "iops": { "per_s": 70 } });
    let change = json!({ "name": "renamed", "qos": limits, "size_bytes": 2 * MIB });
    let volume = |on: &str| json!({ "name": on.to_owned() + "2", "backing": on, "size_bytes": MIB, "force": true, "qos": limits });
    for (method, path, body) in [
        (Method::POST, "/v1/volumes", volume("data")),
        (Method::PATCH, "/v1/volumes/v1", change),
        (Method::DELETE, "/v1/volumes/data2", Value::Null),
        (Method::POST, "/v1/volumes", volume("bare")),
    ] {
        let request = format!("{method} {path} {body}");
        let bare = begin(&daemon);
        let mut refused = 0;
        for done in 0.. {
            let before = Everything::of(&daemon);
            failing.fail_after(done);
            let answer = daemon.send(method.clone(), path, &body);
            let is_done = answer.status().is_success();
            if failing.end() == 0 {
                assert!(is_done, "{request}: {}", answer.text().unwrap());
                break;
            }
            if is_done {
                break;
            }
            refused += 1;
            let check = |daemon: &Daemon| {
                let after = Everything::of(daemon);
                assert_eq!((&before.shown, &before.state), (&after.shown, &after.state), "{request} {done}");
                assert!(begin(daemon) == bare || path != "/v1/volumes", "{request} {done}");
                let damaged = daemon.get("/v1/pools/data")["damaged"].clone();
                assert_eq!(damaged, json!(0), "{request} {done}");
            };
            check(&daemon);
            let events = daemon.get("/v1/events").to_string();
            assert!(!events.contains("changed in part"), "{request} {done}: {events}");
            daemon.restart("-KILL");
            daemon.wait_for("the devices", || {
                daemon.get("/v1/devices").as_array().unwrap().iter().all(|device| device["error"].is_null())
            });
            check(&daemon);
        }
        assert!(refused > 3, "{request}: {refused}");
    }
}

/// A member whose superblock cannot be written: the others have theirs by then.
#[test]
fn an_array_that_cannot_be_made_leaves_no_superblock_and_no_record() {
    let daemon = with_everything();
    let other = daemon.served("other");
    other.fault.add(Rule::new(Action::Error(IoError::Medium)).on(&[Op::Write]));
    let before = Everything::of(&daemon);
    let members = [daemon.path("n0").display().to_string(), other.spec.clone()];
    let new = json!({ "name": "made", "level": "1", "members": members });
    let (_, _, detail) = daemon.refusal(Method::POST, "/v1/arrays", &new);
    assert!(detail.contains("cannot write the superblock"), "{detail}");
    let after = Everything::of(&daemon);
    assert_eq!((&before.shown, &before.state), (&after.shown, &after.state));
    other.fault.clear();
    // Without `force`: nothing is found on the members.
    daemon.post("/v1/arrays", &new);
}

/// The daemon is killed while it writes superblocks. The unfinished array is listed, does not run,
/// and can be deleted.
#[test]
fn an_array_whose_making_was_cut_off_is_deleted_and_made_again() {
    let mut daemon = Daemon::new();
    let members = ["n0", "n1"].map(|name| daemon.file(name, 24 * MIB));
    // Its end would wait for the request that is late.
    let late = std::mem::ManuallyDrop::new(daemon.served("n1"));
    let hour = std::time::Duration::from_secs(3600).as_nanos() as u64;
    late.fault.add(Rule::new(Action::Delay(hour)).on(&[Op::Write]));
    let new = json!({ "name": "made", "level": "1", "members": [members[0], late.spec] });
    std::thread::scope(|scope| {
        let asked = scope.spawn(|| daemon.request(Method::POST, "/v1/arrays").json(&new).send());
        daemon.wait_for("a superblock", || std::fs::read(&members[0]).unwrap().iter().any(|byte| *byte != 0));
        let killed = std::process::Command::new("kill").args(["-KILL", &daemon.pid().to_string()]).status();
        assert!(killed.unwrap().success() && asked.join().unwrap().is_err());
    });
    daemon.wait();
    late.fault.clear();
    daemon.start();
    assert_eq!(daemon.get("/v1/arrays/made")["state"], "offline");
    assert_eq!(daemon.refusal(Method::POST, "/v1/arrays", &new).1, "exists");
    daemon.delete("/v1/arrays/made");
    daemon.post("/v1/arrays", &new);
}

#[test]
fn an_action_on_several_devices_is_refused_before_the_first() {
    let daemon = with_everything();
    let path = |name: &str| daemon.path(name).display().to_string();
    let act = |body: Value| daemon.send(Method::POST, "/v1/arrays/mirror/actions", &body);
    assert!(act(json!({ "action": "add", "devices": [path("spare")] })).status().is_success());
    let before = Everything::of(&daemon);
    let cases = [
        (json!({ "action": "fail", "members": ["0", "1"] }), "would not survive"),
        (json!({ "action": "fail", "members": ["0", "7"] }), "slot 7"),
        (json!({ "action": "remove", "members": [path("spare"), "nonsense"] }), "nonsense"),
        (json!({ "action": "add", "devices": [path("other"), "/nowhere/disk"] }), "/nowhere/disk"),
        (json!({ "action": "add", "devices": [path("other"), path("bare")] }), "bare"),
        (json!({ "action": "add", "devices": [path("other"), path("other")] }), "other"),
        (json!({ "action": "re-add", "devices": [path("other")] }), "other"),
        (json!({ "action": "replace", "member": "9", "device": path("other") }), "slot 9"),
    ];
    for (body, text) in cases {
        let request = body.to_string();
        let (_, _, detail) = daemon.refusal(Method::POST, "/v1/arrays/mirror/actions", &body);
        assert!(detail.contains(text), "{request}: {detail}");
        before.check(&daemon, &request);
    }
}
