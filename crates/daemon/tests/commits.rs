//! Disk images that are committed to their backing files while clients are connected. Needs
//! `qemu-utils`.

use crate::common::load::{
    BLOCK, Client, Expected, check_all_acknowledged, killed_under_load, restart, under_load, wait_for_export,
};
use crate::common::{Daemon, MIB, read_state};
use crate::images::qemu_img;
use reqwest::Method;
use serde_json::{Value, json};
use std::time::Duration;

const SIZE: u64 = 8 * MIB;
const BLOCKS: u64 = SIZE / BLOCK;
const COMMIT: &str = "/v1/devices/disk/commit";
/// Options of `qemu-img convert` for a backing file of the size of the disk, and its format.
const BASES: [(&str, &str); 4] = [
    ("-O raw", "raw"),
    ("-O qcow2", "qcow2"),
    ("-O qcow2 -c -o cluster_size=16k", "qcow2"),
    ("-O qcow2 -c -o cluster_size=2M", "qcow2"),
];

/// Makes the device `disk`, an image with subclusters over a new backing file, and its export.
fn add_disk(daemon: &Daemon, (options, format): (&str, &str)) -> Expected {
    let blocks: Vec<u64> = (0..BLOCKS).map(|number| (1 << 60) + number).collect();
    let bytes: Vec<u8> = blocks.iter().flat_map(|value| value.to_le_bytes().repeat(512)).collect();
    std::fs::write(daemon.path("data"), bytes).unwrap();
    assert_eq!(qemu_img(daemon, &format!("convert -q -f raw {options} data base")), 0);
    let create = format!("create -q -f qcow2 -o extended_l2=on -F {format} -b base top");
    assert_eq!(qemu_img(daemon, &create), 0);
    let spec = format!("qcow2:file={},backing=auto", daemon.path("top").display());
    daemon.post("/v1/devices", &json!({ "name": "disk", "spec": spec }));
    daemon.post("/v1/exports", &json!({ "name": "e1", "kind": "nbd", "volumes": ["disk"] }));
    Expected { blocks, maybe: None }
}

fn wait_for_commit(daemon: &Daemon) {
    daemon.wait_for("a commit", || daemon.get("/v1/jobs") == json!([]));
}

fn at_full_speed() -> Value {
    json!({ "min_bytes_per_s": u64::MAX })
}

/// The specification of the backing file.
fn base_spec(daemon: &Daemon, format: &str) -> String {
    let path = daemon.path("base").canonicalize().unwrap();
    match format {
        "raw" => format!("io_uring:path={}", path.display()),
        _ => format!("qcow2:file={}", path.display()),
    }
}

/// Checks that the backing file alone has the disk.
fn check_base(daemon: &Daemon, format: &str, expected: &mut Expected) {
    if format == "qcow2" {
        assert_eq!(qemu_img(daemon, "check -q base"), 0);
    }
    assert_eq!(qemu_img(daemon, &format!("convert -f {format} -O raw base found")), 0);
    let found = std::fs::read(daemon.path("found")).unwrap();
    let words = found.chunks(BLOCK as usize).map(|block| u64::from_le_bytes(block[..8].try_into().unwrap()));
    expected.check(&words.collect::<Vec<_>>());
}

#[test]
fn clients_do_not_notice_that_their_image_is_committed() {
    for (options, format) in BASES {
        let mut daemon = Daemon::new();
        let mut expected = add_disk(&daemon, (options, format));
        let client = Client::new(&daemon);
        expected.note(&under_load(&client, BLOCKS, 0, || ()));
        let log = under_load(&client, BLOCKS, 1 << 33, || {
            let job = daemon.post(COMMIT, &at_full_speed());
            let named = ["id", "kind", "backing", "volume", "total_bytes"].map(|field| job[field].clone());
            assert_eq!(json!(named), json!(["disk.commit", "commit", "disk", null, SIZE]));
            wait_for_commit(&daemon);
        });
        check_all_acknowledged(&log);
        expected.note(&log);
        expected.check(&client.read(BLOCKS));
        let device = daemon.get("/v1/devices/disk");
        assert_eq!(
            (&device["spec"], &device["exports"]),
            (&json!(base_spec(&daemon, format)), &json!(["e1"]))
        );
        // Nothing holds the image any more.
        assert_eq!(qemu_img(&daemon, "check -q -U top"), 0);
        std::fs::remove_file(daemon.path("top")).unwrap();
        expected.note(&under_load(&client, BLOCKS, 1 << 40, || ()));
        expected.check(&client.read(BLOCKS));
        drop(client);
        for signal in ["-TERM", "-KILL"] {
            restart(&mut daemon, signal);
            expected.check(&Client::new(&daemon).read(BLOCKS));
        }
        let state = read_state(&daemon.path("state/state.json")).unwrap();
        let name = state["devices"][0]["device_name"].as_str().unwrap();
        assert!(name.starts_with("qcow2(") && name.contains("top"), "identities derive from {name}");
        daemon.end("-TERM");
        check_base(&daemon, format, &mut expected);
    }
}

#[test]
fn a_commit_that_cannot_be_remembered_leaves_the_image_in_its_place() {
    for (options, format) in BASES {
        let mut daemon = Daemon::new();
        let mut expected = add_disk(&daemon, (options, format));
        let client = Client::new(&daemon);
        expected.note(&under_load(&client, BLOCKS, 0, || ()));
        let obstacle = daemon.path("state/state.json.new");
        let log = under_load(&client, BLOCKS, 1 << 33, || {
            daemon.post(COMMIT, &json!({ "is_paused": true }));
            std::fs::create_dir(&obstacle).unwrap();
            let go = json!({ "is_paused": false, "min_bytes_per_s": u64::MAX });
            daemon.patch("/v1/jobs/disk.commit", &go);
            daemon.wait_for("a switch that fails", || {
                daemon.log().contains("cannot remember that a commit has failed")
            });
            std::fs::remove_dir(&obstacle).unwrap();
            wait_for_commit(&daemon);
        });
        check_all_acknowledged(&log);
        expected.note(&log);
        // All that the image has is in the backing file, whose tables have changed under it.
        expected.check(&client.read(BLOCKS));
        let events = daemon.get("/v1/events").to_string();
        assert!(events.contains("not committed") && events.contains("state.json"), "{events}");
        let spec = daemon.get("/v1/devices/disk")["spec"].clone();
        assert!(spec.as_str().unwrap().contains("top,backing=auto"), "{spec}");
        drop(client);
        for signal in ["-KILL", "-TERM"] {
            restart(&mut daemon, signal);
            let client = Client::new(&daemon);
            expected.check(&client.read(BLOCKS));
            expected.note(&under_load(&client, BLOCKS, 1 << 40, || ()));
        }
        daemon.post(COMMIT, &at_full_speed());
        wait_for_commit(&daemon);
        expected.check(&Client::new(&daemon).read(BLOCKS));
        daemon.end("-TERM");
        check_base(&daemon, format, &mut expected);
    }
}

#[test]
fn whenever_the_daemon_is_killed_during_a_commit_nothing_is_lost() {
    let mut daemon = Daemon::new();
    let mut value = 0;
    for round in 0..16u64 {
        let (options, format) = BASES[round as usize % BASES.len()];
        let mut expected = add_disk(&daemon, (options, format));
        let client = Client::new(&daemon);
        let log = killed_under_load(&mut daemon, &client, BLOCKS, value, |daemon| {
            std::thread::sleep(Duration::from_millis(20));
            daemon.post(COMMIT, &at_full_speed());
            std::thread::sleep(Duration::from_millis(round / 4 * 12));
        });
        value += log.len() as u64 + 1;
        expected.note(&log);
        drop(client);
        daemon.start();
        wait_for_export(&daemon);
        // The commit continues.
        let client = Client::new(&daemon);
        expected.check(&client.read(BLOCKS));
        expected.note(&under_load(&client, BLOCKS, value, || wait_for_commit(&daemon)));
        value += 1 << 33;
        expected.check(&client.read(BLOCKS));
        drop(client);
        let events = daemon.get("/v1/events");
        assert_eq!(daemon.get("/v1/devices/disk")["spec"], base_spec(&daemon, format), "{events}");
        restart(&mut daemon, "-TERM");
        expected.check(&Client::new(&daemon).read(BLOCKS));
        daemon.delete("/v1/exports/e1");
        daemon.delete("/v1/devices/disk");
        check_base(&daemon, format, &mut expected);
        ["top", "base"].iter().for_each(|name| std::fs::remove_file(daemon.path(name)).unwrap());
    }
}

/// The state before the last change counts when `state.json` is damaged.
#[test]
fn a_damaged_state_does_not_bring_the_image_back() {
    let mut daemon = Daemon::new();
    let mut expected = add_disk(&daemon, BASES[1]);
    let client = Client::new(&daemon);
    expected.note(&under_load(&client, BLOCKS, 0, || ()));
    daemon.post(COMMIT, &at_full_speed());
    wait_for_commit(&daemon);
    expected.note(&under_load(&client, BLOCKS, 1 << 40, || ()));
    drop(client);
    daemon.end("-KILL");
    std::fs::write(daemon.path("state/state.json"), "{ damaged").unwrap();
    daemon.start();
    wait_for_export(&daemon);
    expected.check(&Client::new(&daemon).read(BLOCKS));
}

#[test]
fn a_commit_can_be_cancelled_and_keeps_other_writers_out() {
    let daemon = Daemon::new();
    let mut expected = add_disk(&daemon, BASES[1]);
    let client = Client::new(&daemon);
    expected.note(&under_load(&client, BLOCKS, 0, || ()));
    let grow = "resize -q base +1M";
    assert_eq!(qemu_img(&daemon, grow), 1, "the backing file is read");
    daemon.post(COMMIT, &json!({ "is_paused": true }));
    assert_eq!(qemu_img(&daemon, grow), 1, "the backing file is written");
    let snapshot = ("/v1/devices/disk/snapshots", json!({ "name": "s" }), 422, "gets the data of the image");
    let copy = json!({ "name": "v1", "backing": "disk", "from": "disk", "size_bytes": SIZE });
    for (path, body, status, why) in [
        snapshot,
        (COMMIT, json!({}), 422, "the backing file gets the data of the image at the moment"),
        ("/v1/devices/disk/stream", json!({}), 422, "the backing file gets the data of the image"),
        ("/v1/volumes", copy, 409, "disk"),
    ] {
        let refusal = daemon.refusal(Method::POST, path, &body);
        assert!(refusal.0 == status && refusal.2.contains(why), "{path}: {refusal:?}");
    }
    daemon.delete("/v1/exports/e1");
    let refusal = daemon.refusal(Method::DELETE, "/v1/devices/disk", &json!(null));
    assert!(refusal.0 == 409 && refusal.2.contains("job disk.commit"), "{refusal:?}");
    daemon.post("/v1/exports", &json!({ "name": "e1", "kind": "nbd", "volumes": ["disk"] }));
    daemon.delete("/v1/jobs/disk.commit");
    assert_eq!(daemon.get("/v1/jobs"), json!([]));
    assert_eq!(qemu_img(&daemon, grow), 1, "the backing file is read again");
    assert_eq!(qemu_img(&daemon, "check -q -U base"), 0);
    expected.check(&Client::new(&daemon).read(BLOCKS));
    daemon.post("/v1/devices/disk/snapshots", &json!({ "name": "s" }));
    let refusal = daemon.refusal(Method::POST, COMMIT, &json!({}));
    assert!(
        refusal.0 == 422 && refusal.2.ends_with("1 internal snapshots need the backing file"),
        "{refusal:?}"
    );
}

#[test]
fn a_commit_that_cannot_be_made_is_refused_and_changes_nothing() {
    let daemon = Daemon::new();
    daemon.post("/v1/devices", &json!({ "name": "memory", "spec": "mem:size=8M" }));
    let image = |name: &str, create: &str| {
        assert_eq!(qemu_img(&daemon, &format!("create -q -f qcow2 {create}")), 0);
        let spec = format!("qcow2:file={},backing=auto", daemon.path(name).display());
        daemon.post("/v1/devices", &json!({ "name": name, "spec": spec }));
    };
    image("alone", "alone 8M");
    assert_eq!(qemu_img(&daemon, "create -q -f raw base 8M"), 0);
    image("first", "-F raw -b base first");
    image("second", "-F raw -b base second");
    assert_eq!(qemu_img(&daemon, "create -q -f qcow2 -F raw -b base marked"), 0);
    assert_eq!(qemu_img(&daemon, "bitmap --add marked b0"), 0);
    let spec = format!("qcow2:file={},backing=auto", daemon.path("marked").display());
    daemon.post("/v1/devices", &json!({ "name": "marked", "spec": spec }));
    for (name, status, why) in [
        ("memory", 422, "no qcow2 image that is written"),
        ("alone", 422, "the image has no backing file"),
        ("marked", 422, "the image has dirty bitmaps"),
        ("first", 422, "is read by a program that allows no writer"),
        ("other", 404, "other"),
    ] {
        let path = format!("/v1/devices/{name}/commit");
        let refusal = daemon.refusal(Method::POST, &path, &json!({}));
        assert!(refusal.0 == status && refusal.2.contains(why), "{name}: {refusal:?}");
    }
    let pace = json!({ "min_bytes_per_s": 2, "max_bytes_per_s": 1 });
    assert_eq!(daemon.refusal(Method::POST, "/v1/devices/first/commit", &pace).0, 422);
    assert_eq!(daemon.get("/v1/jobs"), json!([]));
    // The other readers of the backing file are gone.
    daemon.delete("/v1/devices/second");
    daemon.delete("/v1/devices/marked");
    daemon.post("/v1/devices/first/commit", &json!({}));
    wait_for_commit(&daemon);
    let spec = daemon.get("/v1/devices/first")["spec"].clone();
    assert!(spec.as_str().unwrap().ends_with("/base"), "{spec}");
}

#[test]
fn a_backing_file_that_is_smaller_grows_and_hides_what_is_below_it() {
    for (format, below) in [("raw", ""), ("qcow2", "-F raw -b below ")] {
        let mut daemon = Daemon::new();
        std::fs::write(daemon.path("below"), vec![9; SIZE as usize]).unwrap();
        assert_eq!(qemu_img(&daemon, &format!("create -q -f {format} {below}base 1M")), 0);
        assert_eq!(qemu_img(&daemon, &format!("create -q -f qcow2 -F {format} -b base top 8M")), 0);
        let spec = format!("qcow2:file={},backing=auto", daemon.path("top").display());
        daemon.post("/v1/devices", &json!({ "name": "disk", "spec": spec }));
        daemon.post("/v1/exports", &json!({ "name": "e1", "kind": "nbd", "volumes": ["disk"] }));
        let client = Client::new(&daemon);
        let blocks = client.read(BLOCKS);
        assert!(blocks[MIB as usize / BLOCK as usize..].iter().all(|value| *value == 0));
        let mut expected = Expected { blocks, maybe: None };
        expected.note(&under_load(&client, BLOCKS, 0, || {
            daemon.post(COMMIT, &at_full_speed());
            wait_for_commit(&daemon);
        }));
        expected.check(&client.read(BLOCKS));
        drop(client);
        restart(&mut daemon, "-TERM");
        assert_eq!(daemon.get("/v1/devices/disk")["capacity_bytes"], SIZE);
        expected.check(&Client::new(&daemon).read(BLOCKS));
        daemon.end("-TERM");
        check_base(&daemon, format, &mut expected);
    }
}
