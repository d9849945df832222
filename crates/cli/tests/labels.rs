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
}

#[test]
fn create_sends_the_label_of_an_export() {
    let create = ["export", "create", "vm1", "--kind", "nbd", "--volume", "vm1"];
    assert_eq!(asked(&[&create[..], &["--label", "tenant-a"]].concat())["label"], "tenant-a");
    assert_eq!(asked(&create).get("label"), None);
}
