//! Drives below devices and members.

use crate::common::{Daemon, MIB};
use reqwest::Method;
use serde_json::{Value, json};

#[test]
fn a_device_without_a_drive_of_the_host_says_so_and_keeps_its_tag() {
    let daemon = Daemon::new();
    daemon.array();
    let file = daemon.file("disk", 64 * MIB);
    daemon.post("/v1/devices", &json!({ "name": "file", "spec": &file }));
    daemon.post("/v1/devices", &json!({ "name": "memory", "spec": "mem:size=64M" }));
    let tag = || {
        let answer = daemon.send(Method::GET, "/v1/devices/file", &Value::Null);
        answer.headers()["etag"].to_str().unwrap().to_owned()
    };
    let before = tag();
    let reason = |path: &str| {
        daemon.wait_for("facts of a drive", || daemon.get(path)["drive"].is_object());
        daemon.get(path)["drive"]["reason"].as_str().unwrap().to_owned()
    };
    assert_eq!(reason("/v1/devices/file"), format!("{} is a regular file, not a drive", file));
    assert_eq!(reason("/v1/devices/memory"), "the device is no drive of this host");
    assert_eq!(tag(), before);
    daemon.wait_for("facts of a member", || daemon.get("/v1/arrays/data/members")[0]["drive"].is_object());
    let member = daemon.get("/v1/arrays/data/members")[0].clone();
    let reason = member["drive"]["reason"].as_str().unwrap();
    assert!(reason.ends_with("is a regular file, not a drive"), "{member}");
    let metrics = daemon.metrics();
    assert!(!metrics.contains("freestone_device_info{"), "nothing is known");
    assert!(metrics.contains("\nfreestone_devices_left_out 0\n"));
}
