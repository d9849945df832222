//! Disk images as devices of the daemon. Needs `qemu-utils`.

use crate::common::Daemon;
use block::{Flags, Op};
use reqwest::Method;
use serde_json::json;
use stack::kinds::member::member;
use std::process::Command;

/// The exit code of `qemu-img` in the directory of a daemon.
pub fn qemu_img(daemon: &Daemon, arguments: &str) -> i32 {
    let mut command = Command::new("qemu-img");
    let status = command.args(arguments.split(' ')).current_dir(daemon.path("")).status();
    status.unwrap_or_else(|error| panic!("qemu-img (package qemu-utils): {error}")).code().unwrap()
}

/// A daemon with the device `disk`, a new image.
fn with_image() -> Daemon {
    let daemon = Daemon::new();
    assert_eq!(qemu_img(&daemon, "create -q -f qcow2 disk.qcow2 64M"), 0);
    let spec = format!("qcow2:file={}", daemon.path("disk.qcow2").display());
    daemon.post("/v1/devices", &json!({ "name": "disk", "spec": spec }));
    daemon
}

/// Writes, or reads, 64 KiB at 1 MiB of the export `disk`. Returns the first byte.
fn transfer(daemon: &Daemon, op: Op, byte: u8) -> u8 {
    let export = format!("nbd:path={}", daemon.path("disk.sock").display());
    let device = member(&export, false, false).unwrap().open().unwrap();
    reactor::run(async move {
        let channel = device.open_channel().unwrap();
        let mut buffer = reactor::current().buffers().take(64 << 10).await;
        buffer.as_mut_slice().fill(byte);
        let (buffer, result) = buffer.transfer(&*channel, op, Flags::NONE, 1 << 20).await;
        assert_eq!(result, Ok(()));
        buffer.as_slice()[0]
    })
}

#[test]
fn an_image_keeps_writes_through_a_kill_and_is_clean_after_the_end_of_the_daemon() {
    let mut daemon = with_image();
    daemon.post("/v1/exports", &json!({ "name": "disk", "kind": "nbd", "volumes": ["disk"] }));
    for (byte, signal) in [(7, "-KILL"), (8, "-TERM"), (9, "-TERM")] {
        transfer(&daemon, Op::Write, byte);
        assert_eq!(daemon.end(signal).success(), signal == "-TERM");
        if signal == "-TERM" {
            assert_eq!(qemu_img(&daemon, "check -q disk.qcow2"), 0);
        }
        daemon.start();
        assert_eq!(transfer(&daemon, Op::Read, 0), byte);
    }
    // The image is closed with its device.
    daemon.delete("/v1/exports/disk");
    daemon.delete("/v1/devices/disk");
    assert_eq!(qemu_img(&daemon, "check -q disk.qcow2"), 0);
}

#[test]
fn snapshots_of_an_image_are_made_and_deleted_while_an_export_serves_it() {
    let mut daemon = with_image();
    daemon.post("/v1/exports", &json!({ "name": "disk", "kind": "nbd", "volumes": ["disk"] }));
    transfer(&daemon, Op::Write, 7);
    let made = daemon.post("/v1/devices/disk/snapshots", &json!({ "name": "first" }));
    assert_eq!((&made["id"], &made["name"]), (&json!("1"), &json!("first")));
    assert_eq!(made["size_bytes"], 64 << 20);
    transfer(&daemon, Op::Write, 8);
    daemon.post("/v1/devices/disk/snapshots", &json!({ "name": "second" }));
    transfer(&daemon, Op::Write, 9);
    let names = |daemon: &Daemon| {
        let known = daemon.get("/v1/devices/disk/snapshots");
        known
            .as_array()
            .unwrap()
            .iter()
            .map(|known| known["name"].as_str().unwrap().to_owned())
            .collect::<Vec<_>>()
    };
    assert_eq!(names(&daemon), ["first", "second"]);
    // A kill loses neither snapshots nor writes.
    daemon.end("-KILL");
    daemon.start();
    assert_eq!(names(&daemon), ["first", "second"]);
    assert_eq!(transfer(&daemon, Op::Read, 0), 9);
    daemon.delete("/v1/devices/disk/snapshots/second");
    assert_eq!(names(&daemon), ["first"]);
    daemon.delete("/v1/exports/disk");
    daemon.delete("/v1/devices/disk");
    assert_eq!(qemu_img(&daemon, "check -q disk.qcow2"), 0);
    assert_eq!(qemu_img(&daemon, "convert -l first -O raw disk.qcow2 first.raw"), 0);
    assert_eq!(std::fs::read(daemon.path("first.raw")).unwrap()[1 << 20], 7);
}

#[test]
fn a_snapshot_that_cannot_be_made_is_refused_with_its_reason() {
    let daemon = with_image();
    daemon.post("/v1/devices", &json!({ "name": "memory", "spec": "mem:size=64M" }));
    daemon.post("/v1/devices/disk/snapshots", &json!({ "name": "first" }));
    let new = |name: &str| json!({ "name": name });
    for (method, path, body, status, why) in [
        (Method::POST, "disk/snapshots", new("first"), 422, "the image has one with this name"),
        (Method::POST, "disk/snapshots", new(""), 422, "name of 0 bytes: want 1 to 255"),
        (
            Method::POST,
            "memory/snapshots",
            new("first"),
            422,
            "device memory: no qcow2 image that is written",
        ),
        (Method::POST, "other/snapshots", new("first"), 404, "other"),
        (Method::DELETE, "disk/snapshots/second", json!(null), 404, "second"),
    ] {
        let (answer, _, text) = daemon.refusal(method.clone(), &format!("/v1/devices/{path}"), &body);
        assert!(answer == status && text.contains(why), "{method} {path}: {answer} {text}");
    }
}

/// A daemon with the device `disk`, an image over a backing file of 64 MiB, and its export.
pub fn with_overlay() -> Daemon {
    let daemon = Daemon::new();
    std::fs::write(daemon.path("base.raw"), vec![5; 64 << 20]).unwrap();
    assert_eq!(qemu_img(&daemon, "create -q -f qcow2 -F raw -b base.raw disk.qcow2"), 0);
    let spec = format!("qcow2:file={},backing=auto", daemon.path("disk.qcow2").display());
    daemon.post("/v1/devices", &json!({ "name": "disk", "spec": spec }));
    daemon.post("/v1/exports", &json!({ "name": "disk", "kind": "nbd", "volumes": ["disk"] }));
    daemon
}

#[test]
fn an_image_in_use_gets_the_data_of_its_backing_file() {
    let mut daemon = with_overlay();
    transfer(&daemon, Op::Write, 7);
    let job = daemon.post("/v1/devices/disk/stream", &json!({ "max_bytes_per_s": 1 << 30 }));
    let named = ["id", "kind", "backing", "volume", "total_bytes"].map(|field| job[field].clone());
    assert_eq!(json!(named), json!(["disk.stream", "stream", "disk", null, 64 << 20]));
    transfer(&daemon, Op::Write, 8);
    daemon.wait_for("a stream", || daemon.get("/v1/jobs") == json!([]));
    std::fs::remove_file(daemon.path("base.raw")).unwrap();
    assert_eq!(transfer(&daemon, Op::Read, 0), 8);
    let refusal = daemon.refusal(Method::POST, "/v1/devices/disk/stream", &json!({}));
    assert!(refusal.0 == 422 && refusal.2.ends_with("the image has no backing file"), "{refusal:?}");
    daemon.end("-TERM");
    assert_eq!(qemu_img(&daemon, "check -q disk.qcow2"), 0);
    assert_eq!(qemu_img(&daemon, "convert -O raw disk.qcow2 disk.raw"), 0);
    let mut expected = vec![5; 64 << 20];
    expected[1 << 20..][..64 << 10].fill(8);
    assert!(std::fs::read(daemon.path("disk.raw")).unwrap() == expected);
    daemon.start();
    assert_eq!(transfer(&daemon, Op::Read, 0), 8);
}

#[test]
fn a_stream_can_be_cancelled_and_continues_after_a_kill() {
    let mut daemon = with_overlay();
    let paused = json!({ "is_paused": true });
    let stream = "/v1/devices/disk/stream";
    daemon.post(stream, &paused);
    transfer(&daemon, Op::Write, 9);
    let snapshot = json!({ "name": "s" });
    for (path, body) in [(stream, &json!({})), ("/v1/devices/disk/snapshots", &snapshot)] {
        let refusal = daemon.refusal(Method::POST, path, body);
        assert!(refusal.0 == 422 && refusal.2.contains("is copied at the moment"), "{path}: {refusal:?}");
    }
    daemon.delete("/v1/exports/disk");
    let refusal = daemon.refusal(Method::DELETE, "/v1/devices/disk", &json!(null));
    assert!(refusal.0 == 409 && refusal.2.contains("the data of its backing file is copied"), "{refusal:?}");
    daemon.post("/v1/exports", &json!({ "name": "disk", "kind": "nbd", "volumes": ["disk"] }));
    daemon.delete("/v1/jobs/disk.stream");
    assert_eq!(daemon.get("/v1/jobs"), json!([]));
    daemon.post("/v1/devices/disk/snapshots", &snapshot);
    let refusal = daemon.refusal(Method::POST, stream, &json!({}));
    assert!(refusal.2.ends_with("1 internal snapshots need the backing file"), "{refusal:?}");
    daemon.delete("/v1/devices/disk/snapshots/s");
    let pace = json!({ "min_bytes_per_s": 2, "max_bytes_per_s": 1 });
    assert_eq!(daemon.refusal(Method::POST, stream, &pace).0, 422);
    for signal in ["-TERM", "-KILL"] {
        daemon.post(stream, &paused);
        daemon.end(signal);
        daemon.start();
        let has_ended = || {
            let image = std::fs::read(daemon.path("disk.qcow2")).unwrap();
            image[8..16] == [0; 8]
        };
        daemon.wait_for("the end of a stream that was interrupted", has_ended);
        daemon.wait_for("the end of its job", || daemon.get("/v1/jobs") == json!([]));
        assert_eq!(transfer(&daemon, Op::Read, 0), 9);
        daemon.end("-TERM");
        assert_eq!(qemu_img(&daemon, "check -q disk.qcow2"), 0);
        assert_eq!(qemu_img(&daemon, "rebase -u -F raw -b base.raw disk.qcow2"), 0);
        daemon.start();
    }
}
