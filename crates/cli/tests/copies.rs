//! `freestone volume create --from`, asked of a daemon that is played by the test.

use crate::common::freestone;
use crate::common::played::Played;
use serde_json::{Value, json};

fn volume(more: &Value) -> Value {
    let mut volume = json!({
        "name": "vm1", "uuid": "0f0e0d0c-0b0a-4908-8706-050403020100", "backing": "data", "size_bytes": 4096,
        "extents": 1, "qos": {}, "group": null, "min_qos": {}, "exports": [], "moving_to": null
    });
    volume.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    volume
}

/// The requests of the command, its exit code and its last error, with a volume that is this in the
/// end.
fn create(end: Value) -> (Vec<(String, String)>, Option<i32>, String) {
    let begun = volume(&json!({ "copying_from": "disk" }));
    let daemon = Played::new(vec![(201, begun), (200, json!([])), (200, end)]);
    let command = ["volume", "create", "vm1", "--backing", "data", "--from", "disk", "--socket"];
    let output = freestone().args(command).arg(daemon.socket()).output().unwrap();
    (daemon.requests(), output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn create_waits_for_the_copy_and_fails_with_it() {
    let (requests, code, _) = create(volume(&json!({})));
    let asked: Value = serde_json::from_str(&requests[0].1).unwrap();
    assert_eq!((&asked["from"], &asked["size_bytes"]), (&json!("disk"), &json!(0)));
    assert!(requests[1].0.starts_with("GET /v1/jobs "), "{requests:?}");
    assert_eq!(code, Some(0));
    let (_, code, error) = create(volume(&json!({ "copying_from": "disk", "error": "copying: medium" })));
    assert!(error.contains("volume vm1: it is not complete"), "{error}");
    assert_eq!(code, Some(1));
}

#[test]
fn a_pivot_is_asked_for_with_a_source() {
    let daemon = Played::new(vec![(201, volume(&json!({})))]);
    let command = ["volume", "create", "vm1", "--backing", "data", "--from", "disk", "--pivot", "--socket"];
    assert!(freestone().args(command).arg(daemon.socket()).status().unwrap().success());
    let asked: Value = serde_json::from_str(&daemon.requests()[0].1).unwrap();
    assert_eq!((&asked["from"], &asked["pivot"]), (&json!("disk"), &json!(true)));
    let command = ["volume", "create", "vm1", "--backing", "data", "--size", "1G", "--pivot"];
    let output = freestone().args(command).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("--from <DEVICE|ARRAY|VOLUME>") && output.status.code() == Some(2), "{error}");
}

#[test]
fn a_size_may_be_missing_with_a_source_only() {
    let output = freestone().args(["volume", "create", "vm1", "--backing", "data"]).output().unwrap();
    let error = String::from_utf8(output.stderr).unwrap();
    assert!(error.contains("--size <SIZE>") && output.status.code() == Some(2), "{error}");
}
