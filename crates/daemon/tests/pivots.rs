//! Volumes that take the place of a device or array while its clients are connected. Needs
//! `qemu-utils`.

use crate::common::load::{
    BLOCK, Client, Expected, check_all_acknowledged, killed_under_load, restart, under_load, wait_for_export,
};
use crate::common::{Daemon, MIB, Served, names, read_state, shared_buffers};
use crate::images::qemu_img;
use block::{IoError, Op};
use layers::fault::{Action, Rule};
use reqwest::{Method, StatusCode};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const SIZE: u64 = 8 * MIB;
const BLOCKS: u64 = SIZE / BLOCK;
/// The words of a disk that is not empty.
const DATA: u64 = 5;
/// Time of a read of a slow disk.
const LATE: Duration = Duration::from_secs(4);

fn device(daemon: &Daemon, name: &str, spec: &str) {
    daemon.post("/v1/devices", &json!({ "name": name, "spec": spec }));
}

/// Registers a file of zeroes as a device.
fn file(daemon: &Daemon, name: &str, size: u64) {
    device(daemon, name, &daemon.file(name, size));
}

/// An array over three files.
fn array(daemon: &Daemon, name: &str, level: &str, size: u64) {
    let members: Vec<String> = (0..3).map(|slot| daemon.file(&format!("{name}{slot}"), size)).collect();
    daemon.post("/v1/arrays", &json!({ "name": name, "level": level, "members": members }));
}

fn export(daemon: &Daemon, name: &str, of: &str) {
    daemon.post("/v1/exports", &json!({ "name": name, "kind": "nbd", "volumes": [of] }));
}

/// A daemon with the device `disk`, its NBD export `e1`, and the device `pool` for volumes.
fn with_disk() -> Daemon {
    let daemon = Daemon::new();
    file(&daemon, "disk", SIZE);
    file(&daemon, "pool", 3 * SIZE);
    export(&daemon, "e1", "disk");
    daemon
}

fn pivot(from: &str) -> Value {
    json!({ "name": "v1", "backing": "pool", "from": from, "pivot": true })
}

/// Begins a pivot of `disk` that takes what it can, whatever users want.
fn begin(daemon: &Daemon) -> Value {
    let volume = daemon.post("/v1/volumes", &pivot("disk"));
    change_job(daemon, &json!({ "min_bytes_per_s": u64::MAX }));
    volume
}

fn change_job(daemon: &Daemon, change: &Value) {
    let set = daemon.send(Method::PATCH, "/v1/jobs/v1.copy", change).status();
    assert!([StatusCode::OK, StatusCode::NOT_FOUND].contains(&set), "{set}");
}

/// As [`with_disk`], with a disk of data that this program serves.
fn with_served_disk() -> (Daemon, Served) {
    with_data("disk")
}

/// The same, with a pool that this program serves.
fn with_served_pool() -> (Daemon, Served) {
    with_data("pool")
}

fn with_data(served: &str) -> (Daemon, Served) {
    let daemon = Daemon::new();
    let word = DATA.to_le_bytes();
    std::fs::write(daemon.path("disk"), word.repeat(SIZE as usize / word.len())).unwrap();
    daemon.file("pool", 3 * SIZE);
    let remote = daemon.served(served);
    for name in ["disk", "pool"] {
        let local = daemon.path(name).display().to_string();
        device(&daemon, name, if name == served { &remote.spec } else { &local });
    }
    export(&daemon, "e1", "disk");
    (daemon, remote)
}

fn only_data() -> Expected {
    Expected { blocks: vec![DATA; BLOCKS as usize], maybe: None }
}

/// Begins a pivot that stands still, however fast the machine is.
fn begin_paused(daemon: &Daemon, served: &Served) {
    served.fault.add(Rule::new(Action::Delay(LATE.as_nanos() as u64)).on(&[Op::Read]));
    daemon.post("/v1/volumes", &pivot("disk"));
    daemon.patch("/v1/jobs/v1.copy", &json!({ "is_paused": true }));
    served.fault.clear();
}

/// The same, of a volume on a pool that this program serves.
fn begin_paused_at_pool(daemon: &Daemon, served: &Served) {
    let late = Rule::new(Action::Delay(LATE.as_nanos() as u64)).on(&[Op::Write]);
    served.fault.add(late.within(4 * MIB..3 * SIZE)); // not the table of the pool
    daemon.post("/v1/volumes", &pivot("disk"));
    daemon.patch("/v1/jobs/v1.copy", &json!({ "is_paused": true }));
    served.fault.clear();
}

fn wait_for_pivot(daemon: &Daemon) {
    daemon.wait_for("a pivot", || {
        let volume = daemon.get("/v1/volumes/v1");
        assert_eq!(volume["error"], Value::Null, "{}", daemon.log());
        volume["copying_from"].is_null() && daemon.get("/v1/jobs") == json!([])
    });
}

fn serves(daemon: &Daemon, export: &str) -> Value {
    daemon.get(&format!("/v1/exports/{export}"))["volumes"].clone()
}

fn nothing_written() -> Expected {
    Expected { blocks: vec![0; BLOCKS as usize], maybe: None }
}

/// A pivot of the device or array `disk` to `pool` under load.
fn check_pivot(mut daemon: Daemon, kind: &str) -> Daemon {
    export(&daemon, "e1", "disk");
    let client = Client::new(&daemon);
    let mut expected = nothing_written();
    let log = under_load(&client, BLOCKS, 0, || {
        assert_eq!(begin(&daemon)["copying_from"], "disk");
        wait_for_pivot(&daemon);
    });
    check_all_acknowledged(&log);
    expected.note(&log);
    expected.check(&client.read(BLOCKS));
    assert_eq!(serves(&daemon, "e1"), json!(["v1"]));
    assert_eq!(daemon.get("/v1/volumes/v1")["exports"], json!(["e1"]));
    let samples = daemon.get("/v1/samples");
    assert!(samples["volumes"]["v1"]["writes"].as_u64().unwrap() >= log.len() as u64, "{samples}");
    // Nothing holds the source any more. The client stays connected.
    daemon.delete(&format!("/v1/{kind}/disk"));
    let log = under_load(&client, BLOCKS, 1 << 40, || ());
    expected.note(&log);
    expected.check(&client.read(BLOCKS));
    let events = daemon.get("/v1/events").to_string();
    assert!(events.contains("it serves volume v1, which has replaced disk"), "{events}");
    restart(&mut daemon, "-TERM");
    expected.check(&Client::new(&daemon).read(BLOCKS));
    restart(&mut daemon, "-KILL");
    expected.check(&Client::new(&daemon).read(BLOCKS));
    daemon
}

#[test]
fn a_raw_device_becomes_a_volume_and_its_clients_do_not_notice() {
    let daemon = Daemon::with(&["--member-timeout", "1", "--cores", "0,1"]);
    file(&daemon, "disk", SIZE);
    file(&daemon, "pool", 3 * SIZE);
    check_pivot(daemon, "devices");
}

#[test]
fn an_image_becomes_a_volume_and_its_clients_do_not_notice() {
    let daemon = Daemon::new();
    assert_eq!(qemu_img(&daemon, "create -q -f qcow2 disk.qcow2 8M"), 0);
    device(&daemon, "disk", &format!("qcow2:file={}", daemon.path("disk.qcow2").display()));
    array(&daemon, "pool", "5", 6 * SIZE);
    let daemon = check_pivot(daemon, "devices");
    assert_eq!(qemu_img(&daemon, "check -q disk.qcow2"), 0);
}

#[test]
fn an_array_becomes_a_volume_and_its_clients_do_not_notice() {
    let daemon = Daemon::new();
    array(&daemon, "disk", "1", 3 * SIZE);
    array(&daemon, "pool", "1", 6 * SIZE);
    daemon.wait_for("the resync", || daemon.get("/v1/jobs") == json!([]));
    check_pivot(daemon, "arrays");
}

#[test]
fn a_device_whose_exports_have_processes_of_their_own_becomes_a_volume() {
    let daemon = Daemon::with(&["--member-timeout", "1", "--process-per-export"]);
    file(&daemon, "disk", SIZE);
    file(&daemon, "pool", 3 * SIZE);
    check_pivot(daemon, "devices");
}

#[test]
fn all_exports_of_a_source_pivot_together_and_hosts_know_their_namespaces_again() {
    let mut daemon = with_disk();
    file(&daemon, "other", SIZE);
    // An address of this test alone.
    let [_, x, y, z] = std::process::id().to_be_bytes();
    let address = format!("127.{}.{y}.{z}:4421", x | 128);
    let nqn = "nqn.2014-08.org.example:pivot";
    let options = json!({ "listen": address, "nqn": nqn });
    let new = json!({ "name": "e2", "kind": "nvme-tcp", "volumes": ["other", "disk"], "options": options });
    daemon.post("/v1/exports", &new);
    daemon
        .post("/v1/exports", &json!({ "name": "e3", "kind": "nbd", "volumes": ["disk"], "read_only": true }));
    let guest = json!({ "name": "e4", "kind": "vhost-user-blk", "volumes": ["disk"] });
    daemon.post("/v1/exports", &guest);
    let host = Client::open(&format!("nvme-tcp:address={address},nqn={nqn},nsid=2,reconnect-delay=1"));
    let other = Client::open(&format!("nvme-tcp:address={address},nqn={nqn},nsid=1,reconnect-delay=1"));
    let client = Client::new(&daemon);
    let guest = Client::open(&format!("virtio-blk-vhost-user:path={}", daemon.path("e4.sock").display()));
    guest.device.map_region(&shared_buffers()).unwrap();
    let mut mine = 0..100;
    other.write(move || mine.next().map(|number| (number, number + 7)));
    let mut expected = nothing_written();
    let (of_guest, of_host) = std::thread::scope(|scope| {
        let of_guest = scope.spawn(|| {
            let mut numbers = (0..100_000u64).cycle().take(20_000);
            guest.write(move || numbers.next().map(|number| (number % 100, number + 1)))
        });
        let of_host = under_load(&host, BLOCKS, 1 << 40, || {
            // An export that is added meanwhile pivots with the others, and one may go.
            begin(&daemon);
            export(&daemon, "e5", "disk");
            wait_for_pivot(&daemon);
        });
        (of_guest.join().unwrap(), of_host)
    });
    check_all_acknowledged(&of_guest);
    check_all_acknowledged(&of_host);
    for (name, targets) in [
        ("e1", json!(["v1"])),
        ("e2", json!(["other", "v1"])),
        ("e3", json!(["v1"])),
        ("e4", json!(["v1"])),
        ("e5", json!(["v1"])),
    ] {
        assert_eq!(serves(&daemon, name), targets);
    }
    assert_eq!(daemon.get("/v1/devices/disk")["exports"], json!([]));
    // All see the same bytes.
    let mut next = Some((BLOCKS - 1, 99));
    client.write(move || next.take());
    let blocks = host.read(BLOCKS);
    assert_eq!(blocks[BLOCKS as usize - 1], 99);
    expected.note(
        &of_host
            .iter()
            .copied()
            .filter(|(number, ..)| (100..BLOCKS - 1).contains(number))
            .collect::<Vec<_>>(),
    );
    expected.blocks[..100].copy_from_slice(&blocks[..100]);
    expected.blocks[BLOCKS as usize - 1] = 99;
    expected.check(&blocks);
    for reader in [&client, &guest, &Client::of(&daemon, "e3"), &Client::of(&daemon, "e5")] {
        assert!(reader.read(BLOCKS) == blocks);
    }
    // The next daemon serves the same namespaces: the driver refuses others.
    drop(guest);
    restart(&mut daemon, "-TERM");
    assert!(host.read(BLOCKS) == blocks);
    assert_eq!(other.read(BLOCKS)[..2], [7, 8]);
    // The source can be served again, but not together with the volume.
    let twins = json!({ "name": "e6", "kind": "nvme-tcp", "volumes": ["v1", "disk"], "options": { "listen": "127.0.0.1:0", "nqn": "nqn.2014-08.org.example:twins" } });
    let (status, _, detail) = daemon.refusal(Method::POST, "/v1/exports", &twins);
    assert!(status == 422 && detail.contains("clients know v1 and disk by the same identity"), "{detail}");
    export(&daemon, "e6", "disk");
    let source = Client::of(&daemon, "e6").read(BLOCKS);
    assert!(source[BLOCKS as usize - 1] != 99, "it does not change after the pivot");
}

#[test]
fn limits_of_the_volume_apply_after_the_pivot() {
    let daemon = with_disk();
    let mut new = pivot("disk");
    new["qos"] = json!({ "write_iops": { "per_s": 100_000 } });
    daemon.post("/v1/volumes", &new);
    // Changed while it is copied.
    daemon.patch("/v1/volumes/v1", &json!({ "qos": { "write_iops": { "per_s": 2 } } }));
    wait_for_pivot(&daemon);
    let mut numbers = 0..5;
    let begin = Instant::now();
    Client::new(&daemon).write(move || numbers.next().map(|number| (number, 1)));
    assert!(begin.elapsed() > Duration::from_millis(1500), "{:?}", begin.elapsed());
}

#[test]
fn a_pivot_that_is_cancelled_or_fails_leaves_the_source_in_its_place() {
    let (mut daemon, served) = with_served_disk();
    let client = Client::new(&daemon);
    let mut expected = only_data();
    begin_paused(&daemon, &served);
    for (method, path, body, text) in [
        (Method::DELETE, "/v1/devices/disk", Value::Null, "disk: it is copied to volume v1 (job v1.copy)"),
        (Method::DELETE, "/v1/volumes/v1", Value::Null, "volume v1: job v1.copy is at work on it"),
        (
            Method::POST,
            "/v1/exports",
            json!({ "name": "e2", "kind": "nbd", "volumes": ["v1"] }),
            "is not complete",
        ),
        (Method::POST, "/v1/volumes/v1/move", json!({ "backing": "pool" }), "is not complete"),
        (
            Method::POST,
            "/v1/volumes",
            json!({ "name": "v2", "backing": "pool", "from": "disk", "pivot": true }),
            "disk: job v1.copy is about to replace it by volume v1",
        ),
        (
            Method::POST,
            "/v1/volumes",
            json!({ "name": "v2", "backing": "pool", "from": "disk" }),
            "clients of export e1 may write to it",
        ),
        (
            Method::PATCH,
            "/v1/devices/disk",
            json!({ "size_bytes": 2 * SIZE }),
            "disk: it keeps its size until job v1.copy has ended",
        ),
    ] {
        let (status, kind, detail) = daemon.refusal(method, path, &body);
        assert!(status == 409 && kind == "in-use" && detail.contains(text), "{path} {body}: {kind} {detail}");
    }
    expected.note(&under_load(&client, BLOCKS, 0, || ()));
    daemon.delete("/v1/jobs/v1.copy");
    assert_eq!((names(&daemon.get("/v1/volumes")), daemon.get("/v1/jobs")), (vec![], json!([])));
    expected.note(&under_load(&client, BLOCKS, 1 << 20, || ()));
    expected.check(&client.read(BLOCKS));
    assert_eq!(serves(&daemon, "e1"), json!(["disk"]));
    // The source fails for the copy alone: clients do not read that range.
    let free = |daemon: &Daemon| daemon.get("/v1/devices/pool")["free_bytes"].as_u64().unwrap();
    let before = free(&daemon);
    served.fault.add(Rule::new(Action::Error(IoError::Medium)).on(&[Op::Read]));
    begin(&daemon);
    daemon.wait_for("an error", || !daemon.get("/v1/volumes/v1")["error"].is_null());
    daemon.wait_for("the end of the job", || daemon.get("/v1/jobs") == json!([]));
    served.fault.clear();
    expected.note(&under_load(&client, BLOCKS, 1 << 30, || ()));
    drop(client);
    restart(&mut daemon, "-KILL");
    assert_eq!(serves(&daemon, "e1"), json!(["disk"]));
    expected.check(&Client::new(&daemon).read(BLOCKS));
    assert!(daemon.get("/v1/volumes/v1")["error"].as_str().unwrap().starts_with("copying: "));
    daemon.delete("/v1/volumes/v1");
    assert_eq!(free(&daemon), before);
    // And after all that it works.
    begin(&daemon);
    wait_for_pivot(&daemon);
    expected.check(&Client::new(&daemon).read(BLOCKS));
}

#[test]
fn a_source_that_grows_meanwhile_keeps_its_place() {
    let (mut daemon, served) = with_served_pool();
    let grow = |daemon: &Daemon, size| {
        std::fs::File::options().write(true).open(daemon.path("disk")).unwrap().set_len(size).unwrap();
    };
    begin_paused_at_pool(&daemon, &served);
    grow(&daemon, 2 * SIZE);
    daemon.signal("-HUP");
    daemon.wait_for("its size", || daemon.get("/v1/devices/disk")["capacity_bytes"] == 2 * SIZE);
    daemon.patch("/v1/jobs/v1.copy", &json!({ "is_paused": false }));
    daemon.wait_for("an error", || !daemon.get("/v1/volumes/v1")["error"].is_null());
    let volume = daemon.get("/v1/volumes/v1");
    let error = volume["error"].as_str().unwrap();
    assert!(error.contains("it has 16777216 bytes, and had 8388608"), "{volume}");
    let client = Client::new(&daemon);
    check_all_acknowledged(&under_load(&client, BLOCKS, 0, || ()));
    assert_eq!(serves(&daemon, "e1"), json!(["disk"]));
    drop(client);
    // A start finds that it has grown.
    daemon.delete("/v1/volumes/v1");
    begin_paused_at_pool(&daemon, &served);
    daemon.end("-KILL");
    grow(&daemon, 3 * SIZE);
    daemon.start();
    wait_for_export(&daemon);
    daemon.wait_for("an error", || !daemon.get("/v1/volumes/v1")["error"].is_null());
    let volume = daemon.get("/v1/volumes/v1");
    assert!(volume["error"].as_str().unwrap().contains("do not hold 25165824 bytes"), "{volume}");
    assert_eq!(serves(&daemon, "e1"), json!(["disk"]));
}

#[test]
fn an_array_keeps_its_size_while_a_volume_is_about_to_replace_it() {
    let mut daemon = Daemon::new();
    array(&daemon, "disk", "1", 3 * SIZE);
    file(&daemon, "pool", 3 * SIZE);
    daemon.end("-TERM");
    // A pivot waits for its pool.
    std::fs::remove_file(daemon.path("pool")).unwrap();
    let path = daemon.path("state/state.json");
    let mut state = read_state(&path).unwrap();
    state["copies"] = json!({ "0f0e0d0c-0b0a-4908-8706-050403020100": {
        "name": "v1", "backing": "pool", "size_bytes": SIZE, "source": { "array": "disk" }, "source_bytes": SIZE,
        "pivot": { "device_name": "disk", "is_due": false }
    } });
    std::fs::write(&path, state.to_string()).unwrap();
    daemon.start();
    for (method, path, body, text) in [
        (
            Method::POST,
            "/v1/arrays/disk/actions",
            json!({ "action": "grow" }),
            "disk: it keeps its size until job v1.copy has ended",
        ),
        (Method::DELETE, "/v1/arrays/disk", Value::Null, "disk: it is copied to volume v1 (job v1.copy)"),
    ] {
        let (status, kind, detail) = daemon.refusal(method, path, &body);
        assert!(status == 409 && kind == "in-use" && detail == text, "{kind} {detail}");
    }
    // Without the pool's device the pivot is lost, and holds nothing.
    daemon.delete("/v1/devices/pool");
    daemon.delete("/v1/arrays/disk");
}

#[test]
fn a_name_that_the_pool_may_have_does_not_count_after_an_error() {
    let (mut daemon, served) = with_served_pool();
    let client = Client::new(&daemon);
    begin_paused_at_pool(&daemon, &served);
    // One copy of the table gets the name. Neither the other nor the former table is written.
    let torn =
        Rule { after: 1, ..Rule::new(Action::Error(IoError::Medium)).on(&[Op::Write]).within(0..4 * MIB) };
    served.fault.add(torn);
    let mut expected = only_data();
    expected.note(&under_load(&client, BLOCKS, 0, || {
        daemon.patch("/v1/jobs/v1.copy", &json!({ "is_paused": false, "min_bytes_per_s": u64::MAX }));
        daemon.wait_for("an error", || !daemon.get("/v1/volumes/v1")["error"].is_null());
    }));
    let volume = daemon.get("/v1/volumes/v1");
    assert!(volume["error"].as_str().unwrap().contains("the previous table is not restored"), "{volume}");
    drop(client);
    daemon.end("-KILL");
    served.fault.clear();
    daemon.start();
    wait_for_export(&daemon);
    assert_eq!(serves(&daemon, "e1"), json!(["disk"]));
    expected.check(&Client::new(&daemon).read(BLOCKS));
    daemon.delete("/v1/volumes/v1");
}

#[test]
fn a_pivot_that_clients_would_notice_is_refused_and_changes_nothing() {
    let mut daemon = with_disk();
    let text = daemon.path("state/state.json");
    device(&daemon, "big-blocks", "mem:size=64M,block-size=4096");
    assert_eq!(qemu_img(&daemon, "create -q -f qcow2 image.qcow2 16M"), 0);
    assert_eq!(qemu_img(&daemon, "bitmap --add image.qcow2 b0"), 0);
    let image = format!("qcow2:file={}", daemon.path("image.qcow2").display());
    device(&daemon, "image", &image);
    file(&daemon, "sealed.img", SIZE);
    daemon.delete("/v1/devices/sealed.img");
    assert_eq!(qemu_img(&daemon, "create -q -f qcow2 sealed.qcow2 16M"), 0);
    device(&daemon, "sealed", &format!("qcow2:file={},readonly=on", daemon.path("sealed.qcow2").display()));
    export(&daemon, "e2", "image");
    daemon.post("/v1/volumes", &json!({ "name": "v0", "backing": "pool", "size_bytes": MIB }));
    // An export that only a kernel with the module can serve.
    file(&daemon, "kernels", SIZE);
    daemon.end("-TERM");
    let mut state: Value = serde_json::from_slice(&std::fs::read(&text).unwrap()).unwrap();
    let socket = daemon.path("e3.sock").display().to_string();
    state["exports"].as_array_mut().unwrap().push(json!({
        "name": "e3", "kind": "vhost-user-blk", "targets": [{ "device": "kernels" }], "read_only": false, "cores": [],
        "options": { "data-plane": "kernel", "socket": socket }
    }));
    std::fs::write(&text, state.to_string()).unwrap();
    daemon.start();
    let generation = daemon.get("/v1/system")["generation"].clone();
    for (from, on, size, status, text) in [
        ("v0", "pool", 0, 422, "v0: it is a volume: `freestone volume move` moves it"),
        ("disk", "pool", SIZE + MIB, 422, "volume v1: 9437184 bytes: disk has 8388608"),
        ("disk", "pool", MIB, 422, "volume v1: 1048576 bytes: disk has 8388608"),
        ("disk", "big-blocks", 0, 422, "disk: a volume on big-blocks cannot replace it"),
        ("image", "pool", 0, 422, "an export offers the dirty bitmaps of"),
        ("sealed", "pool", 0, 422, "sealed: it is read-only"),
        ("kernels", "pool", 0, 409, "kernels: the kernel serves it for export e3"),
        ("nope", "pool", 0, 404, "no volume, array or device \"nope\""),
    ] {
        let new = json!({ "name": "v1", "backing": on, "from": from, "pivot": true, "size_bytes": size, "force": true });
        let refused = daemon.refusal(Method::POST, "/v1/volumes", &new);
        assert!(refused.0 == status && refused.2.contains(text), "{new}: {refused:?}");
    }
    let none = json!({ "name": "v1", "backing": "pool", "size_bytes": MIB, "pivot": true });
    let refused = daemon.refusal(Method::POST, "/v1/volumes", &none);
    assert!(refused.0 == 422 && refused.2.contains("volume v1: pivot: from is missing"), "{refused:?}");
    assert_eq!(daemon.get("/v1/system")["generation"], generation);
    assert_eq!(names(&daemon.get("/v1/volumes")), ["v0"]);
    // Without the export that offers the bitmaps it is possible.
    daemon.delete("/v1/exports/e2");
    daemon.post("/v1/volumes", &pivot("image"));
    wait_for_pivot(&daemon);
}

/// Waits until the record says that the volume may replace the source. `false`: it has replaced it
/// already.
fn wait_until_due(daemon: &Daemon) -> bool {
    let path = daemon.path("state/state.json");
    loop {
        let state = read_state(&path).unwrap_or_default();
        match state["copies"].as_object().and_then(|copies| copies.values().next()) {
            Some(copy) if copy["pivot"]["is_due"] == true => return true,
            Some(_) => {}
            None => return false,
        }
    }
}

#[test]
fn whenever_the_daemon_is_killed_the_source_or_the_volume_has_what_was_acknowledged() {
    let mut daemon = Daemon::new();
    file(&daemon, "pool", 3 * SIZE);
    let (mut were_due, mut value) = (0, 0);
    for round in 0..14u64 {
        file(&daemon, "disk", SIZE);
        export(&daemon, "e1", "disk");
        let mut expected = nothing_written();
        let client = Client::new(&daemon);
        let log = killed_under_load(&mut daemon, &client, BLOCKS, value, |daemon| {
            begin(daemon);
            match round % 7 {
                0 => {}
                step => {
                    were_due += u32::from(wait_until_due(daemon));
                    // Before, between and after the steps of the switch.
                    std::thread::sleep(Duration::from_millis((step - 1) * 4 + round / 7));
                }
            }
        });
        value += log.len() as u64 + 1;
        expected.note(&log);
        drop(client);
        daemon.start();
        wait_for_export(&daemon);
        // A client that connects again writes to whichever counts.
        let client = Client::new(&daemon);
        expected.check(&client.read(BLOCKS));
        expected.note(&under_load(&client, BLOCKS, value, || {
            change_job(&daemon, &json!({ "min_bytes_per_s": u64::MAX }))
        }));
        value += 1 << 33;
        wait_for_pivot(&daemon);
        expected.check(&client.read(BLOCKS));
        drop(client);
        assert_eq!(serves(&daemon, "e1"), json!(["v1"]));
        restart(&mut daemon, "-TERM");
        expected.check(&Client::new(&daemon).read(BLOCKS));
        daemon.delete("/v1/exports/e1");
        daemon.delete("/v1/volumes/v1");
        daemon.delete("/v1/devices/disk");
        assert_eq!(daemon.get("/v1/devices/pool")["volumes"], json!([]), "nothing is left behind");
    }
    assert!(were_due > 0, "no kill came between the record and the end of a pivot");
}

/// Makes the state of a daemon that was killed before its last change count, whose file is damaged
/// if it `is_damaged`.
fn forget_last_change(daemon: &Daemon, is_damaged: bool) {
    let (state, previous) = (daemon.path("state/state.json"), daemon.path("state/state.json.previous"));
    match is_damaged {
        true => std::fs::write(&state, "{ damaged").unwrap(),
        false => drop(std::fs::copy(&previous, &state).unwrap()),
    }
}

#[test]
fn after_the_name_in_the_pool_no_start_serves_the_source() {
    for is_damaged in [false, true] {
        let mut daemon = with_disk();
        let client = Client::new(&daemon);
        let mut expected = nothing_written();
        let log = under_load(&client, BLOCKS, 0, || {
            begin(&daemon);
            wait_for_pivot(&daemon);
        });
        expected.note(&log);
        drop(client);
        daemon.end("-KILL");
        let found = read_state(&daemon.path("state/state.json.previous")).unwrap();
        let copies = found["copies"].as_object().unwrap();
        assert_eq!(copies.values().next().unwrap()["pivot"]["is_due"], true, "{found}");
        forget_last_change(&daemon, is_damaged);
        // Only the pool knows which counts.
        let (pool, away) = (daemon.path("pool"), daemon.path("away"));
        std::fs::rename(&pool, &away).unwrap();
        daemon.start();
        let export = daemon.get("/v1/exports/e1");
        assert_eq!(export["state"], "waiting", "{export}");
        let error = export["error"].as_str().unwrap();
        assert!(error.contains("disk: volume v1 on pool may have replaced it"), "{error}");
        let second = json!({ "name": "e2", "kind": "nbd", "volumes": ["disk"] });
        assert_eq!(daemon.refusal(Method::POST, "/v1/exports", &second).1, "unavailable");
        std::fs::rename(&away, &pool).unwrap();
        wait_for_export(&daemon);
        assert_eq!((serves(&daemon, "e1"), daemon.get("/v1/jobs")), (json!(["v1"]), json!([])));
        expected.check(&Client::new(&daemon).read(BLOCKS));
        restart(&mut daemon, "-KILL");
        expected.check(&Client::new(&daemon).read(BLOCKS));
    }
}

#[test]
fn the_state_before_the_last_change_says_too_that_the_volume_may_count() {
    let (mut daemon, served) = with_served_pool();
    begin_paused_at_pool(&daemon, &served);
    let late = Rule::new(Action::Delay(LATE.as_nanos() as u64)).on(&[Op::Write]).within(0..4 * MIB);
    served.fault.add(late);
    daemon.patch("/v1/jobs/v1.copy", &json!({ "is_paused": false, "min_bytes_per_s": u64::MAX }));
    daemon.wait_for("the name on its way", || served.fault.rules().iter().any(|(.., hits)| *hits > 0));
    daemon.end("-KILL");
    drop(served); // the pool is missing
    forget_last_change(&daemon, true);
    daemon.start();
    let export = daemon.get("/v1/exports/e1");
    assert!(export["error"].as_str().unwrap().contains("volume v1 on pool may have replaced it"), "{export}");
}

#[test]
fn before_the_name_in_the_pool_every_start_serves_the_source() {
    let (mut daemon, served) = with_served_disk();
    let client = Client::new(&daemon);
    let mut expected = only_data();
    begin_paused(&daemon, &served);
    expected.note(&under_load(&client, BLOCKS, 0, || ()));
    drop(client);
    daemon.end("-KILL");
    // The pool is not needed as long as the pivot is not due.
    let (pool, away) = (daemon.path("pool"), daemon.path("away"));
    std::fs::rename(&pool, &away).unwrap();
    daemon.start();
    wait_for_export(&daemon);
    let client = Client::new(&daemon);
    expected.check(&client.read(BLOCKS));
    expected.note(&under_load(&client, BLOCKS, 1 << 20, || ()));
    drop(client);
    daemon.end("-KILL");
    std::fs::rename(&away, &pool).unwrap();
    // Killed right before the name is written.
    for name in ["state/state.json", "state/state.json.previous"] {
        let mut state = read_state(&daemon.path(name)).unwrap();
        for copy in state["copies"].as_object_mut().into_iter().flat_map(|copies| copies.values_mut()) {
            copy["pivot"]["is_due"] = json!(true);
        }
        std::fs::write(daemon.path(name), state.to_string()).unwrap();
    }
    daemon.start();
    wait_for_export(&daemon);
    let client = Client::new(&daemon);
    expected.check(&client.read(BLOCKS));
    expected.note(&under_load(&client, BLOCKS, 1 << 30, || {
        change_job(&daemon, &json!({ "min_bytes_per_s": u64::MAX }));
        wait_for_pivot(&daemon);
    }));
    expected.check(&client.read(BLOCKS));
    assert_eq!(serves(&daemon, "e1"), json!(["v1"]));
}
