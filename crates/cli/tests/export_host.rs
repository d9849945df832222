//! `freestone export host`, asked of a daemon that is played by the test.

use crate::common::freestone;
use crate::common::played::Played;
use serde_json::{Value, json};
use std::process::Output;

const SECRET: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

fn export(hosts: &Value) -> (u16, Value) {
    let export = json!({
        "name": "vm1", "kind": "nvme-tcp", "volumes": ["vm1"], "options": {}, "hosts": hosts, "read_only": false,
        "cores": [], "state": "active", "error": null, "description": null, "traffic": null,
    });
    (200, export)
}

fn host(daemon: &Played, arguments: &[&str]) -> Output {
    freestone()
        .args(["export", "host"])
        .args(arguments)
        .arg("--socket")
        .arg(daemon.socket())
        .output()
        .unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn add_reads_secrets_from_files_and_sends_them_once() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("key");
    secrets::write(&path, format!("{SECRET}\n")).unwrap();
    let key = ["--dhchap-key", path.to_str().unwrap()];
    let daemon = Played::new(vec![export(&json!([])), export(&json!(["nqn.a"]))]);
    let output = host(&daemon, &[&["add", "vm1", "nqn.a"][..], &key].concat());
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert!(!text(&output.stdout).contains("DHHC"));
    let (first, body) = daemon.requests().pop().unwrap();
    assert!(first.starts_with("PATCH /v1/exports/vm1 "), "{first}");
    let body: Value = serde_json::from_str(&body).unwrap();
    assert_eq!(body, json!({ "hosts": { "add": [{ "nqn": "nqn.a", "dhchap": SECRET }] } }));
    let daemon = Played::new(vec![export(&json!([]))]);
    let output = host(&daemon, &[&["add", "vm1", "nqn.a", "--dry-run"][..], &key].concat());
    let said = text(&output.stdout);
    assert!(said.contains("nqn.a") && !said.contains("DHHC"), "{said}");
}

#[test]
fn the_first_host_of_an_open_export_is_added_only_if_that_is_meant() {
    let daemon = Played::new(vec![export(&Value::Null)]);
    let output = host(&daemon, &["add", "vm1", "nqn.a"]);
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    assert!(said.contains("export vm1: any host may connect so far, and only nqn.a then"), "{said}");
    let daemon = Played::new(vec![export(&Value::Null), export(&json!(["nqn.a"]))]);
    assert!(host(&daemon, &["add", "vm1", "nqn.a", "--yes"]).status.success());
}

#[test]
fn remove_and_list_name_the_host() {
    let daemon = Played::new(vec![export(&json!([]))]);
    assert!(host(&daemon, &["remove", "vm1", "nqn.a"]).status.success());
    let body: Value = serde_json::from_str(&daemon.requests()[0].1).unwrap();
    assert_eq!(body, json!({ "hosts": { "remove": ["nqn.a"] } }));
    for (hosts, said) in [
        (Value::Null, "any host may connect\n"),
        (json!([]), "no host may connect\n"),
        (json!(["nqn.a", "nqn.b"]), "nqn.a\nnqn.b\n"),
    ] {
        let daemon = Played::new(vec![export(&hosts)]);
        assert_eq!(text(&host(&daemon, &["list", "vm1"]).stdout), said);
    }
}
