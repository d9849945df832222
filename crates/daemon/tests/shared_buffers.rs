//! Disks of vhost-user servers as devices and members: `--share-buffers`.

use crate::common::{Daemon, MIB, block, shared_buffers};
use block::{Device, Op};
use reqwest::Method;
use serde_json::json;
use stack::kinds::member::member;
use std::sync::Arc;

/// A file of a daemon as a disk over vhost-user.
fn disk(server: &Daemon, name: &str) -> String {
    let spec = server.file(name, 32 * MIB);
    server.post("/v1/devices", &json!({ "name": name, "spec": spec }));
    let options = json!({ "queues": "8" });
    let export = json!({ "name": name, "kind": "vhost-user-blk", "volumes": [name], "options": options });
    let export = server.post("/v1/exports", &export);
    format!("virtio-blk-vhost-user:path={}", export["options"]["socket"].as_str().unwrap())
}

/// A client of an export of a daemon, which maps the buffers of this program if it has to.
fn client(daemon: &Daemon, export: &str) -> Arc<dyn Device> {
    let found = daemon.get(&format!("/v1/exports/{export}"));
    let socket = found["options"]["socket"].as_str().unwrap();
    let spec = match found["kind"].as_str().unwrap() {
        "nbd" => format!("nbd:path={socket},export={export}"),
        _ => format!("virtio-blk-vhost-user:path={socket}"),
    };
    let device = member(&spec, true, false).unwrap().open().unwrap();
    if found["kind"] != "nbd" {
        device.map_region(&shared_buffers()).unwrap();
    }
    device
}

#[test]
fn disks_of_vhost_user_servers_are_devices_and_members() {
    shared_buffers(); // before the first core of this program
    let server = Daemon::new();
    let specs: Vec<String> = (0..5).map(|number| disk(&server, &format!("disk{number}"))).collect();
    let place = server.path("").display().to_string();
    let new = json!({ "name": "alone", "spec": specs[4] });

    let without = Daemon::with(&["--sandbox-path", &place]);
    let array = json!({ "name": "data", "level": "5", "members": specs[..4] });
    for (path, body) in [("/v1/devices", &new), ("/v1/arrays", &array)] {
        let (_, kind, detail) = without.refusal(Method::POST, path, body);
        assert!(kind == "cannot-open" && detail.contains("see --share-buffers"), "{path}: {kind}: {detail}");
    }
    drop(without);

    let mut daemon = Daemon::with(&["--share-buffers", "--member-timeout", "1", "--sandbox-path", &place]);
    daemon.post("/v1/devices", &new);
    daemon.post("/v1/arrays", &array);
    for (number, backing) in ["data", "alone"].into_iter().enumerate() {
        let volume = json!({ "name": format!("v{number}"), "backing": backing, "size_bytes": 8 * MIB });
        daemon.post("/v1/volumes", &volume);
    }
    daemon.post("/v1/exports", &json!({ "name": "network", "kind": "nbd", "volumes": ["v0"] }));
    daemon.post("/v1/exports", &json!({ "name": "guest", "kind": "vhost-user-blk", "volumes": ["v1"] }));
    for fill in [7, 8] {
        for export in ["network", "guest"] {
            let device = client(&daemon, export);
            assert_eq!(block(&device, Op::Read, 0), Ok(if fill == 7 { 0 } else { 7 }), "{export}");
            assert_eq!(block(&device, Op::Write, fill), Ok(fill), "{export}");
            assert_eq!(block(&device, Op::Read, 0), Ok(fill), "{export}");
        }
        daemon.restart("-KILL");
        daemon.wait_for("the exports", || {
            let states =
                ["network", "guest"].map(|name| daemon.get(&format!("/v1/exports/{name}"))["state"].clone());
            states.iter().all(|state| state == "active")
        });
    }
    // A guest keeps its memory while its volume moves to such a disk.
    let plain = daemon.file("plain", 32 * MIB);
    daemon.post("/v1/devices", &json!({ "name": "plain", "spec": plain }));
    daemon.post("/v1/volumes", &json!({ "name": "v2", "backing": "plain", "size_bytes": 8 * MIB }));
    daemon.post("/v1/exports", &json!({ "name": "moved", "kind": "vhost-user-blk", "volumes": ["v2"] }));
    let guest = client(&daemon, "moved");
    assert_eq!(block(&guest, Op::Write, 9), Ok(9));
    daemon.post("/v1/volumes/v2/move", &json!({ "backing": "alone" }));
    daemon.wait_for("the move", || daemon.get("/v1/volumes/v2")["moving_to"].is_null());
    assert_eq!(daemon.get("/v1/volumes/v2")["backing"], "alone");
    assert_eq!(block(&guest, Op::Read, 0), Ok(9));
}
