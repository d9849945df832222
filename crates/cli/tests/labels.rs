//! The label of new volumes and exports, asked of a daemon that is played by the test.

use crate::common::freestone;
use crate::common::played::Played;
use serde_json::{Value, json};

/// The body of the request that a command makes, which the daemon refuses.
fn asked(arguments: &[&str]) -> Value {
    let refusal = json!({ "type": "about:blank", "title": "Conflict", "status": 409, "detail": "refused" });
    let daemon = Played::new(vec![(409, refusal)]);
    let output = freestone().arg("--socket").arg(daemon.socket()).args(arguments).output().unwrap();
    assert!(!output.status.success());
    let requests = daemon.requests();
    serde_json::from_str(&requests[0].1).unwrap()
}

#[test]
fn create_sends_the_label_of_a_volume() {
    let create = ["volume", "create", "vm1", "--backing", "data", "--size", "1G"];
    assert_eq!(asked(&[&create[..], &["--label", "tenant-a"]].concat())["label"], "tenant-a");
    assert_eq!(asked(&create).get("label"), None);
    let labels = ["--labels", "csi.name=a=b", "--labels", "zone="];
    assert_eq!(asked(&[&create[..], &labels].concat())["labels"], json!({ "csi.name": "a=b", "zone": "" }));
}

#[test]
fn label_sets_and_removes_labels() {
    for kind in ["volume", "export"] {
        let change = asked(&[kind, "label", "vm1", "zone=x", "node-"]);
        assert_eq!(change, json!({ "labels": { "zone": "x", "node": null } }));
    }
    let output = freestone().args(["volume", "label", "vm1", "zone"]).output().unwrap();
    assert!(String::from_utf8_lossy(&output.stderr).contains("zone: want KEY=VALUE or KEY-"));
}

#[test]
fn list_asks_for_objects_with_all_labels() {
    for kind in ["volume", "export"] {
        let daemon = Played::new(vec![(200, json!([]))]);
        let mut command = freestone();
        command.arg("--socket").arg(daemon.socket());
        command.args([kind, "list", "--labels", "zone=x", "--labels", "csi.name=a b"]);
        assert!(command.output().unwrap().status.success());
        let first = &daemon.requests()[0].0;
        assert!(
            first.starts_with(&format!("GET /v1/{kind}s?label=zone%3Dx&label=csi.name%3Da+b ")),
            "{first}"
        );
    }
}

#[test]
fn create_sends_the_label_of_an_export() {
    let create = ["export", "create", "vm1", "--kind", "nbd", "--volume", "vm1"];
    assert_eq!(asked(&[&create[..], &["--label", "tenant-a"]].concat())["label"], "tenant-a");
    assert_eq!(asked(&create).get("label"), None);
}
