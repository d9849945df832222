//! Devices of the kind `rbd`, over the stub of librbd (`tests/rbd/stub`), whose cluster is a
//! directory.

use crate::common::{Daemon, MIB};
use reqwest::Method;
use serde_json::json;
use std::fs;
use std::path::Path;
use std::process::Command;

/// A daemon that finds the stub, and a cluster with the pool `rbd` in its directory.
fn with_cluster() -> Daemon {
    let mut daemon = Daemon::prepare(&["--member-timeout", "1"]);
    let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/rbd/stub/build");
    assert!(Command::new(build).arg(daemon.dir.path()).status().unwrap().success());
    fs::create_dir(daemon.path("rbd")).unwrap();
    fs::write(daemon.path("ceph.conf"), "").unwrap();
    daemon.env.push(("LD_LIBRARY_PATH", daemon.dir.path().into()));
    daemon.env.push(("CEPH_CONF", daemon.path("ceph.conf")));
    daemon.start();
    daemon
}

#[test]
fn an_image_is_created_with_its_device_and_grows_in_use() {
    let daemon = with_cluster();
    let new = json!({ "name": "vm1", "spec": "rbd:pool=rbd,image=vm1", "size_bytes": 16 * MIB });
    let device = daemon.post("/v1/devices", &new);
    assert_eq!((&device["capacity_bytes"], &device["error"]), (&json!(16 * MIB), &json!(null)));
    daemon.post("/v1/exports", &json!({ "name": "e1", "kind": "nbd", "volumes": ["vm1"] }));
    let path = "/v1/devices/vm1";
    let grown = daemon.patch(path, &json!({ "size_bytes": 32 * MIB }));
    assert_eq!(grown["capacity_bytes"], 32 * MIB);
    assert_eq!(fs::metadata(daemon.path("rbd/vm1")).unwrap().len(), 32 * MIB);
    let refusal = daemon.refusal(Method::PATCH, path, &json!({ "size_bytes": MIB }));
    assert!(refusal.2.contains("it has 33554432, and only grows"), "{refusal:?}");
    assert_eq!(daemon.get(path)["capacity_bytes"], 32 * MIB);
}

#[test]
fn an_image_that_exists_is_not_created_and_a_file_has_no_image() {
    let daemon = with_cluster();
    fs::File::create(daemon.path("rbd/old")).unwrap().set_len(8 * MIB).unwrap();
    let spec = "rbd:pool=rbd,image=old";
    let refusal = daemon.refusal(
        Method::POST,
        "/v1/devices",
        &json!({ "name": "old", "spec": spec, "size_bytes": 16 * MIB }),
    );
    assert!(refusal.2.contains("cannot create the image with 16777216 bytes: File exists"), "{refusal:?}");
    assert_eq!(fs::metadata(daemon.path("rbd/old")).unwrap().len(), 8 * MIB);
    let device = daemon.post("/v1/devices", &json!({ "name": "old", "spec": spec }));
    assert_eq!(device["capacity_bytes"], 8 * MIB);
    let file = daemon.file("disk", 8 * MIB);
    let new = json!({ "name": "disk", "spec": file, "size_bytes": MIB });
    let reason = "size_bytes: the daemon creates and grows only devices of the kind rbd";
    let refusal = daemon.refusal(Method::POST, "/v1/devices", &new);
    assert_eq!((&*refusal.1, refusal.2.contains(reason)), ("invalid", true), "{refusal:?}");
    daemon.post("/v1/devices", &json!({ "name": "disk", "spec": file }));
    let refusal = daemon.refusal(Method::PATCH, "/v1/devices/disk", &json!({ "size_bytes": 16 * MIB }));
    assert_eq!((&*refusal.1, refusal.2.contains(reason)), ("invalid", true), "{refusal:?}");
}
