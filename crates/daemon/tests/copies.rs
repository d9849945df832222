//! Volumes with a copy of a device, an image or another volume. Needs `qemu-utils`.

use crate::common::{Daemon, MIB, Served, names};
use crate::images::qemu_img;
use crate::waiting_jobs::{bring_back, check_waits, restart_without};
use block::{Flags, IoError, Op};
use layers::fault::{Action, Rule};
use reqwest::Method;
use serde_json::{Value, json};
use stack::kinds::member::member;
use std::time::Duration;

const SIZE: u64 = 16 * MIB;
/// Time of a write to a slow device.
const LATE: Duration = Duration::from_secs(4);

/// Bytes of a disk: data, zeroes and a few bytes at odd places.
fn pattern(len: u64) -> Vec<u8> {
    let mut bytes = vec![0; len as usize];
    for (number, byte) in bytes.iter_mut().enumerate() {
        let (block, mib) = (number / 512, number >> 20);
        if mib % 4 == 1 || (mib % 4 == 2 && block % 5 == 0) {
            *byte = (block % 251) as u8 + 1;
        }
    }
    *bytes.last_mut().unwrap() = 77;
    bytes
}

/// Registers a file with this content as a device.
fn source(daemon: &Daemon, name: &str, bytes: &[u8]) {
    std::fs::write(daemon.path(name), bytes).unwrap();
    let spec = daemon.path(name).display().to_string();
    daemon.post("/v1/devices", &json!({ "name": name, "spec": spec }));
}

fn copy(daemon: &Daemon, name: &str, backing: &str, from: &str) -> Value {
    daemon.post("/v1/volumes", &json!({ "name": name, "backing": backing, "from": from }))
}

fn wait_for_copy(daemon: &Daemon, name: &str) -> Value {
    let path = format!("/v1/volumes/{name}");
    daemon.wait_for("a copy", || {
        let volume = daemon.get(&path);
        assert_eq!(volume["error"], Value::Null, "{}", daemon.log());
        volume["copying_from"].is_null()
    });
    daemon.get(&path)
}

/// The bytes of a volume or device, read by a client of an export.
fn content(daemon: &Daemon, name: &str) -> Vec<u8> {
    let export = json!({ "name": "reader", "kind": "nbd", "volumes": [name], "read_only": true });
    let export = daemon.post("/v1/exports", &export);
    let socket = export["options"]["socket"].as_str().unwrap();
    let spec = format!("nbd:path={socket},export=reader");
    let device = member(&spec, true, false).unwrap().open().unwrap();
    let bytes = reactor::run(async move {
        let channel = device.open_channel().unwrap();
        let (mut bytes, size) = (Vec::new(), device.limits().capacity);
        while (bytes.len() as u64) < size {
            let len = MIB.min(size - bytes.len() as u64);
            let buffer = reactor::current().buffers().take(len as usize).await;
            let (buffer, read) = buffer.transfer(&*channel, Op::Read, Flags::NONE, bytes.len() as u64).await;
            assert_eq!(read, Ok(()));
            bytes.extend_from_slice(buffer.as_slice());
        }
        bytes
    });
    daemon.delete("/v1/exports/reader");
    bytes
}

/// Compares without printing megabytes.
#[track_caller]
fn check(found: &[u8], expected: &[u8]) {
    assert!(found.len() >= expected.len(), "{} bytes, not {}", found.len(), expected.len());
    let rest = std::iter::repeat(&0);
    let differs = found.iter().zip(expected.iter().chain(rest)).position(|(found, wanted)| found != wanted);
    assert_eq!(differs, None, "the first byte that differs");
}

/// A daemon with a source `disk` and a device `data` that serves requests late.
fn slow() -> (Daemon, Served, Vec<u8>) {
    let daemon = Daemon::new();
    let bytes = pattern(SIZE);
    source(&daemon, "disk", &bytes);
    // Former content, which must never be seen.
    std::fs::write(daemon.path("data"), vec![0xee; 4 * SIZE as usize]).unwrap();
    let served = daemon.served("data");
    daemon.post("/v1/devices", &json!({ "name": "data", "spec": served.spec }));
    daemon.post("/v1/volumes", &json!({ "name": "v1", "backing": "data", "size_bytes": MIB, "force": true }));
    served.fault.add(late());
    (daemon, served, bytes)
}

fn late() -> Rule {
    let late = Rule::new(Action::Delay(LATE.as_nanos() as u64)).on(&[Op::Write, Op::WriteZeroes]);
    late.within(4 * MIB..3 * SIZE) // not the table of the pool
}

fn free(daemon: &Daemon) -> u64 {
    daemon.get("/v1/devices/data")["free_bytes"].as_u64().unwrap()
}

#[test]
fn a_volume_made_from_an_image_or_a_volume_has_its_content() {
    let daemon = Daemon::new();
    let bytes = pattern(SIZE + 512);
    std::fs::write(daemon.path("raw"), &bytes).unwrap();
    let file = |name: &str| daemon.path(name).display().to_string();
    let images = [("small", "cluster_size=512"), ("usual", "cluster_size=64k,compression_type=zstd")];
    for (image, options) in images {
        let convert = format!("convert -q -f raw -O qcow2 -o {options} raw {image}.qcow2");
        assert_eq!(qemu_img(&daemon, &convert), 0);
        let spec = format!("qcow2:file={},readonly=on", file(&format!("{image}.qcow2")));
        daemon.post("/v1/devices", &json!({ "name": image, "spec": spec }));
    }
    daemon.file("data", 8 * SIZE);
    for (name, spec) in [("data", file("data")), ("big-blocks", "mem:size=160M,block-size=4096".into())] {
        daemon.post("/v1/devices", &json!({ "name": name, "spec": spec }));
        for (image, _) in images {
            let volume = format!("{image}-on-{name}");
            assert_eq!(copy(&daemon, &volume, name, image)["copying_from"], image);
            let size = wait_for_copy(&daemon, &volume)["size_bytes"].as_u64().unwrap();
            assert_eq!(size, if name == "data" { SIZE + 512 } else { SIZE + 4096 });
            check(&content(&daemon, &volume), &bytes);
        }
    }
    // A copy of a copy, which is larger, and keeps its settings.
    let new = json!({
        "name": "larger", "backing": "data", "from": "small-on-big-blocks", "size_bytes": 2 * SIZE,
        "qos": { "iops": { "per_s": 5000 } }
    });
    daemon.post("/v1/volumes", &new);
    let volume = wait_for_copy(&daemon, "larger");
    assert_eq!((&volume["size_bytes"], &volume["qos"]["iops"]["per_s"]), (&json!(2 * SIZE), &json!(5000)));
    let found = content(&daemon, "larger");
    assert_eq!(found.len() as u64, 2 * SIZE);
    check(&found, &bytes);
    // Nothing holds the sources any more, and the image is as it was.
    daemon.delete("/v1/volumes/small-on-big-blocks");
    daemon.delete("/v1/devices/small");
    assert_eq!(qemu_img(&daemon, "compare -q -f qcow2 -F raw small.qcow2 raw"), 0);
    let events = daemon.get("/v1/events").to_string();
    assert!(events.contains("bytes on data, a copy of usual"), "{events}");
}

#[test]
fn a_volume_is_not_used_until_its_copy_is_complete_and_the_source_does_not_change() {
    let (daemon, served, bytes) = slow();
    let began = copy(&daemon, "v2", "data", "disk");
    assert_eq!((&began["copying_from"], &began["size_bytes"]), (&json!("disk"), &json!(SIZE)));
    daemon.patch("/v1/jobs/v2.copy", &json!({ "is_paused": true }));
    let job = daemon.get("/v1/jobs/v2.copy");
    assert_eq!(
        (&job["kind"], &job["volume"], &job["backing"], &job["total_bytes"]),
        (&json!("copy"), &json!("v2"), &json!("data"), &json!(SIZE))
    );
    assert_eq!(names(&daemon.get("/v1/volumes")), ["v1", "v2"]);
    let export = |of: &str| json!({ "name": "e1", "kind": "nbd", "volumes": [of] });
    let copied = json!({ "name": "v3", "backing": "data", "from": "v2" });
    let spare = daemon.file("spare", 4 * SIZE);
    daemon.post("/v1/devices", &json!({ "name": "spare", "spec": spare }));
    for (method, path, body, text) in [
        (Method::POST, "/v1/exports", export("v2"), "volume v2: the copy of disk is not complete"),
        (Method::POST, "/v1/volumes", copied, "volume v2: the copy of disk is not complete"),
        (Method::POST, "/v1/volumes/v2/move", json!({ "backing": "spare" }), "is not complete"),
        (Method::PATCH, "/v1/volumes/v2", json!({ "size_bytes": 2 * SIZE }), "is not complete"),
        (Method::PATCH, "/v1/volumes/v2", json!({ "name": "v4" }), "is not complete"),
        (Method::DELETE, "/v1/volumes/v2", Value::Null, "volume v2: job v2.copy is at work on it"),
        (Method::POST, "/v1/exports", export("disk"), "disk: it is copied to volume v2"),
        (Method::DELETE, "/v1/devices/disk", Value::Null, "disk: it is copied to volume v2"),
        (Method::DELETE, "/v1/devices/data", Value::Null, "volume v1 is on it"),
    ] {
        let (status, kind, detail) = daemon.refusal(method, path, &body);
        assert!(status == 409 && kind == "in-use" && detail.contains(text), "{path} {body}: {kind} {detail}");
    }
    let over = json!({ "name": "v3", "backing": "disk", "size_bytes": MIB, "force": true });
    assert_eq!(daemon.refusal(Method::POST, "/v1/volumes", &over).1, "in-use");
    let again = json!({ "name": "v2", "backing": "data", "size_bytes": MIB });
    assert_eq!(daemon.refusal(Method::POST, "/v1/volumes", &again).1, "exists");
    // Clients may read the source, and a second volume may be a copy of it.
    check(&content(&daemon, "disk"), &bytes);
    copy(&daemon, "v5", "spare", "disk");
    check(
        &{
            wait_for_copy(&daemon, "v5");
            content(&daemon, "v5")
        },
        &bytes,
    );
    served.fault.clear();
    daemon.patch("/v1/jobs/v2.copy", &json!({ "is_paused": false }));
    wait_for_copy(&daemon, "v2");
    check(&content(&daemon, "v2"), &bytes);
    // The source of a volume is held as a device is.
    served.fault.add(late());
    daemon.post("/v1/volumes", &json!({ "name": "v6", "backing": "data", "from": "v5" }));
    daemon.patch("/v1/jobs/v6.copy", &json!({ "is_paused": true }));
    for (method, path, body) in [
        (Method::DELETE, "/v1/volumes/v5", Value::Null),
        (Method::PATCH, "/v1/volumes/v5", json!({ "size_bytes": 2 * SIZE })),
        (Method::POST, "/v1/volumes/v5/move", json!({ "backing": "data" })),
        (Method::POST, "/v1/exports", export("v5")),
    ] {
        let (_, kind, detail) = daemon.refusal(method, path, &body);
        assert!(kind == "in-use" && detail.contains("v5: it is copied to volume v6"), "{detail}");
    }
    let before = free(&daemon);
    daemon.delete("/v1/jobs/v6.copy");
    assert_eq!(names(&daemon.get("/v1/volumes")), ["v1", "v2", "v5"]);
    assert_eq!((free(&daemon), daemon.get("/v1/jobs")), (before + SIZE, json!([])));
    daemon.delete("/v1/volumes/v5");
}

#[test]
fn whenever_the_daemon_ends_the_next_one_completes_a_copy() {
    let (mut daemon, served, bytes) = slow();
    let before = free(&daemon);
    copy(&daemon, "v2", "data", "disk");
    for signal in ["-KILL", "-TERM", "-KILL"] {
        daemon.wait_for("a part", || daemon.get("/v1/jobs/v2.copy")["done_bytes"].as_u64() > Some(0));
        daemon.restart(signal);
        daemon.wait_for("the job", || daemon.get("/v1/jobs").to_string().contains("v2.copy"));
        assert_eq!(daemon.get("/v1/volumes/v2")["copying_from"], "disk");
        assert_eq!(daemon.refusal(Method::DELETE, "/v1/devices/disk", &Value::Null).1, "in-use");
    }
    served.fault.clear();
    let volume = wait_for_copy(&daemon, "v2");
    check(&content(&daemon, "v2"), &bytes);
    assert_eq!(free(&daemon), before - SIZE);
    // The pool has the name before the state forgets the copy.
    daemon.end("-KILL");
    let record = json!({
        "name": "v2", "backing": "data", "size_bytes": SIZE, "source": { "device": "disk" }, "source_bytes": SIZE
    });
    let copies = json!({ volume["uuid"].as_str().unwrap(): record });
    change_state(&daemon, |state| state["copies"] = copies);
    daemon.start();
    daemon.wait_for("the volume", || daemon.get("/v1/volumes/v2")["copying_from"].is_null());
    assert_eq!(daemon.get("/v1/jobs"), json!([]));
    check(&content(&daemon, "v2"), &bytes);
    // Room that no state knows is no volume.
    served.fault.add(late());
    copy(&daemon, "v3", "data", "disk");
    daemon.end("-KILL");
    change_state(&daemon, |state| drop(state.as_object_mut().unwrap().remove("copies")));
    daemon.start();
    daemon.wait_for("the room", || free(&daemon) == before - SIZE);
    assert_eq!(names(&daemon.get("/v1/volumes")), ["v1", "v2"]);
}

#[test]
fn a_copy_that_waits_for_its_source_can_be_cancelled() {
    let (mut daemon, served, _) = slow();
    let before = free(&daemon);
    copy(&daemon, "v2", "data", "disk");
    restart_without(&mut daemon, "disk");
    check_waits(&daemon, "v2.copy", "disk");
    daemon.delete("/v1/jobs/v2.copy");
    assert_eq!((free(&daemon), daemon.get("/v1/jobs")), (before, json!([])));
    assert_eq!(names(&daemon.get("/v1/volumes")), ["v1"]);
    bring_back(&daemon, "disk", "disk");
    // Whether a copy is complete is known to the pool of its volume only.
    copy(&daemon, "v3", "data", "disk");
    daemon.end("-KILL");
    drop(served);
    daemon.start();
    check_waits(&daemon, "v3.copy", "data");
    let (status, _, detail) = daemon.refusal(Method::DELETE, "/v1/jobs/v3.copy", &Value::Null);
    assert!(status == 409 && detail.starts_with("job v3.copy: data: "), "{status} {detail}");
}

fn change_state(daemon: &Daemon, change: impl FnOnce(&mut Value)) {
    let path = daemon.path("state/state.json");
    let mut state = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    change(&mut state);
    std::fs::write(&path, state.to_string()).unwrap();
}

#[test]
fn a_source_that_fails_leaves_a_volume_that_can_only_be_deleted() {
    let mut daemon = Daemon::new();
    std::fs::write(daemon.path("disk"), pattern(SIZE)).unwrap();
    let served = daemon.served("disk");
    let data = daemon.file("data", 4 * SIZE);
    for (name, spec) in [("disk", &served.spec), ("data", &data)] {
        daemon.post("/v1/devices", &json!({ "name": name, "spec": spec }));
    }
    daemon.volume("v1", MIB);
    let before = free(&daemon);
    served.fault.add(Rule::new(Action::Error(IoError::Medium)).on(&[Op::Read]).within(5 * MIB..6 * MIB));
    copy(&daemon, "v2", "data", "disk");
    daemon.wait_for("an error", || !daemon.get("/v1/volumes/v2")["error"].is_null());
    daemon.wait_for("the end of the job", || daemon.get("/v1/jobs") == json!([]));
    daemon.restart("-KILL");
    let volume = daemon.get("/v1/volumes/v2");
    assert_eq!(volume["copying_from"], "disk");
    assert!(volume["error"].as_str().unwrap().starts_with("copying: "), "{volume}");
    let export = json!({ "name": "e1", "kind": "nbd", "volumes": ["v2"] });
    let (_, kind, detail) = daemon.refusal(Method::POST, "/v1/exports", &export);
    assert!(kind == "in-use" && detail.contains("volume v2: the copy of disk has failed"), "{detail}");
    // It does not hold the source, and its name is free when it is deleted.
    daemon.delete("/v1/devices/disk");
    daemon.delete("/v1/volumes/v2");
    assert_eq!((free(&daemon), names(&daemon.get("/v1/volumes"))), (before, vec!["v1".to_owned()]));
    daemon.volume("v2", MIB);
}

#[test]
fn a_source_that_does_not_do_is_refused_by_name_and_changes_nothing() {
    let daemon = Daemon::new();
    source(&daemon, "disk", &pattern(SIZE));
    source(&daemon, "written", &pattern(4 * MIB));
    let data = daemon.file("data", 2 * SIZE);
    daemon.post("/v1/devices", &json!({ "name": "data", "spec": data }));
    daemon.post("/v1/devices", &json!({ "name": "spare", "spec": "mem:size=64M" }));
    daemon.volume("v1", SIZE);
    daemon.post("/v1/exports", &json!({ "name": "e1", "kind": "nbd", "volumes": ["v1"] }));
    daemon.post("/v1/exports", &json!({ "name": "e2", "kind": "nbd", "volumes": ["written"] }));
    let generation = daemon.get("/v1/system")["generation"].clone();
    let writers = "only a source that does not change is copied";
    for (on, from, size, status, text) in [
        ("data", "nope", 0, 404, "no volume, array or device \"nope\""),
        ("data", "data", 0, 409, "data: it is prepared for volumes"),
        ("disk", "disk", 0, 422, "disk: it cannot hold a copy of itself"),
        ("data", "v1", 0, 409, writers),
        ("data", "written", 0, 409, "written: clients of export e2 may write to it"),
        ("data", "disk", MIB, 422, "volume new: 1048576 bytes: disk has 16777216"),
        ("spare", "disk", SIZE + 100, 422, "blocks of 512 bytes"),
        ("data", "disk", 0, 409, "data: 16777216 bytes"),
    ] {
        let new = json!({ "name": "new", "backing": on, "from": from, "size_bytes": size, "force": true });
        let refused = daemon.refusal(Method::POST, "/v1/volumes", &new);
        assert!(refused.0 == status && refused.2.contains(text), "{new}: {refused:?}");
    }
    let none = json!({ "name": "new", "backing": "data" });
    assert_eq!(daemon.refusal(Method::POST, "/v1/volumes", &none).1, "invalid");
    assert_eq!(daemon.get("/v1/system")["generation"], generation);
    assert_eq!(names(&daemon.get("/v1/volumes")), ["v1"]);
}

#[test]
fn ranges_that_the_source_knows_to_be_zeroes_are_not_read() {
    let daemon = Daemon::new();
    daemon.file("disk", SIZE);
    let served = daemon.served("disk");
    std::fs::write(daemon.path("data"), vec![0xee; 2 * SIZE as usize]).unwrap();
    let data = daemon.path("data").display().to_string();
    for (name, spec) in [("disk", &served.spec), ("data", &data)] {
        daemon.post("/v1/devices", &json!({ "name": name, "spec": spec }));
    }
    served.fault.add(Rule::new(Action::Error(IoError::Medium)).on(&[Op::Read]));
    let new = json!({ "name": "v1", "backing": "data", "from": "disk", "force": true });
    daemon.post("/v1/volumes", &new);
    wait_for_copy(&daemon, "v1");
    check(&content(&daemon, "v1"), &vec![0; SIZE as usize]);
}
