//! Labels of volumes and exports, lists that they select, and pages of lists.

use crate::common::{Daemon, MIB, names};
use reqwest::Method;
use serde_json::{Value, json};

fn daemon() -> Daemon {
    let daemon = Daemon::new();
    let disk = daemon.file("disk", 64 * MIB);
    daemon.post("/v1/devices", &json!({ "name": "data", "spec": disk }));
    daemon
}

fn volume(daemon: &Daemon, name: &str, labels: &Value) -> Value {
    let new = json!({ "name": name, "backing": "data", "size_bytes": MIB, "labels": labels });
    daemon.post("/v1/volumes", &new)
}

#[test]
fn labels_are_set_at_creation_changed_and_survive_a_kill() {
    let mut daemon = daemon();
    assert_eq!(volume(&daemon, "v1", &json!({ "csi.name": "pvc-1" }))["labels"]["csi.name"], "pvc-1");
    let export = json!({ "name": "e1", "kind": "nbd", "volumes": ["v1"], "labels": { "node": "a" } });
    assert_eq!(daemon.post("/v1/exports", &export)["labels"], json!({ "node": "a" }));
    let change = json!({ "labels": { "zone": "b", "csi.name": "pvc-2" } });
    let after = json!({ "csi.name": "pvc-2", "zone": "b" });
    assert_eq!(daemon.patch("/v1/volumes/v1", &change)["labels"], after);
    let change = json!({ "labels": { "node": null, "zone": "x".repeat(256) } });
    assert_eq!(daemon.patch("/v1/exports/e1", &change)["labels"], json!({ "zone": "x".repeat(256) }));
    daemon.restart("-KILL");
    assert_eq!(daemon.get("/v1/volumes/v1")["labels"], after);
    assert_eq!(daemon.get("/v1/exports/e1")["labels"], json!({ "zone": "x".repeat(256) }));
    daemon.delete("/v1/exports/e1");
    daemon.delete("/v1/volumes/v1");
    let events = daemon.get("/v1/events");
    let deleted: Vec<&Value> =
        events.as_array().unwrap().iter().filter(|event| event["what"] == "deleted").collect();
    assert_eq!(deleted[0]["labels"], json!({ "zone": "x".repeat(256) }), "{events}");
    assert_eq!(deleted[1]["labels"], after);
}

#[test]
fn a_change_of_labels_is_an_event_with_them() {
    let daemon = daemon();
    volume(&daemon, "v1", &json!({ "a": "1" }));
    daemon.patch("/v1/volumes/v1", &json!({ "labels": { "b": "2" } }));
    let events = daemon.get("/v1/events");
    let last = events.as_array().unwrap().last().unwrap();
    assert_eq!((&last["what"], &last["text"]), (&json!("labelled"), &json!("labels: a=1, b=2")));
    assert_eq!(last["labels"], json!({ "a": "1", "b": "2" }));
}

#[test]
fn invalid_labels_are_refused_by_key_and_change_nothing() {
    let daemon = daemon();
    volume(&daemon, "v1", &json!({ "a": "1" }));
    let many: Value = (0..33).map(|n| (n.to_string(), json!(""))).collect::<serde_json::Map<_, _>>().into();
    for (labels, fault) in [
        (json!({ "a=b": "" }), "volume v1: label \"a=b\": want a key"),
        (json!({ "k".repeat(64): "" }), "want a key of 1 to 63"),
        (json!({ "b": "\n" }), "label \"b\": a value with control characters"),
        (json!({ "b": "v".repeat(257) }), "labels.b: 257 bytes: at most 256"),
        (many, "34 labels: at most 32"),
    ] {
        let (status, _, detail) =
            daemon.refusal(Method::PATCH, "/v1/volumes/v1", &json!({ "labels": labels }));
        assert!(status == 422 && detail.contains(fault), "{detail}");
    }
    let export = json!({ "name": "e1", "kind": "nbd", "volumes": ["v1"], "labels": { "": "" } });
    let (status, _, detail) = daemon.refusal(Method::POST, "/v1/exports", &export);
    assert!(status == 422 && detail.starts_with("export e1: label \"\": want a key"), "{detail}");
    assert_eq!(daemon.get("/v1/volumes/v1")["labels"], json!({ "a": "1" }));
}

#[test]
fn lists_are_selected_by_labels() {
    let daemon = daemon();
    volume(&daemon, "v1", &json!({ "csi.name": "a=b", "zone": "x" }));
    volume(&daemon, "v2", &json!({ "zone": "x" }));
    volume(&daemon, "v3", &json!({}));
    let export = |name: &str, labels: Value| json!({ "name": name, "kind": "nbd", "volumes": ["v3"], "labels": labels });
    daemon.post("/v1/exports", &export("e1", json!({ "zone": "y" })));
    daemon.post("/v1/exports", &export("e2", json!({})));
    let list = |path: &str| names(&daemon.get(path));
    assert_eq!(list("/v1/volumes?label=zone=x"), ["v1", "v2"]);
    assert_eq!(list("/v1/volumes?label=zone%3Dx&label=csi.name=a%3Db"), ["v1"]);
    assert_eq!(list("/v1/exports?label=zone=y"), ["e1"]);
    assert!(list("/v1/volumes?label=zone=").is_empty() && list("/v1/volumes?label=other=x").is_empty());
}

/// The names on all pages of a list, and the number of pages.
fn pages(daemon: &Daemon, first: &str) -> (Vec<String>, usize) {
    let (mut path, mut found, mut count) = (first.to_owned(), Vec::new(), 0);
    loop {
        let response = daemon.request(Method::GET, &path).send().unwrap();
        let link = response.headers().get("link").map(|link| link.to_str().unwrap().to_owned());
        found.extend(names(&response.json().unwrap()));
        count += 1;
        match link {
            None => return (found, count),
            Some(link) => {
                let next = link.strip_prefix('<').and_then(|link| link.strip_suffix(">; rel=\"next\""));
                path = next.unwrap_or_else(|| panic!("{link}")).to_owned();
            }
        }
    }
}

#[test]
fn pages_have_every_object_once_also_when_others_are_deleted_meanwhile() {
    let daemon = daemon();
    let mut by_uuid: Vec<(String, String)> = (0..7)
        .map(|number| {
            let labels = if number == 3 { json!({}) } else { json!({ "zone": "x y" }) };
            let made = volume(&daemon, &format!("v{number}"), &labels);
            (made["uuid"].as_str().unwrap().to_owned(), made["name"].as_str().unwrap().to_owned())
        })
        .collect();
    by_uuid.sort();
    let all: Vec<String> = by_uuid.iter().map(|(_, name)| name.clone()).collect();
    for (limit, count) in [(1, 7), (3, 3), (7, 1), (1000, 1)] {
        assert_eq!(pages(&daemon, &format!("/v1/volumes?limit={limit}")), (all.clone(), count));
    }
    let labelled: Vec<String> = all.iter().filter(|name| *name != "v3").cloned().collect();
    assert_eq!(pages(&daemon, "/v1/volumes?label=zone=x%20y&limit=4"), (labelled, 2));
    // The object that a page begins behind may be gone.
    let (last, _) = &by_uuid[2];
    daemon.delete(&format!("/v1/volumes/{last}"));
    assert_eq!(names(&daemon.get(&format!("/v1/volumes?after={last}"))), all[3..]);
    for name in ["a", "b", "c"] {
        let export = json!({ "name": name, "kind": "nbd", "volumes": [all[0]] });
        daemon.post("/v1/exports", &export);
    }
    assert_eq!(pages(&daemon, "/v1/exports?limit=2"), (vec!["a".into(), "b".into(), "c".into()], 2));
    assert_eq!(names(&daemon.get("/v1/exports?after=a&limit=1")), ["b"]);
}

#[test]
fn a_query_that_an_operation_does_not_have_is_refused_by_name() {
    let daemon = daemon();
    volume(&daemon, "v1", &json!({}));
    for (method, path, fault) in [
        (
            Method::GET,
            "/v1/volumes?labels=a=b",
            "unknown query parameter \"labels\": GET /v1/volumes has label",
        ),
        (
            Method::GET,
            "/v1/volumes/v1?limit=1",
            "unknown query parameter \"limit\": GET /v1/volumes/{name} has none",
        ),
        (Method::DELETE, "/v1/volumes/v1?force=1", "unknown query parameter \"force\""),
        (Method::GET, "/v1/volumes?label=zone", "label=zone: want KEY=VALUE"),
        (Method::GET, "/v1/volumes?limit=0", "limit=0: want 1 to 1000"),
        (Method::GET, "/v1/exports?limit=1001", "limit=1001: want 1 to 1000"),
        (Method::GET, "/v1/exports?limit=x", "limit=x: want 1 to 1000"),
    ] {
        let (status, _, detail) = daemon.refusal(method, path, &Value::Null);
        assert!(status == 400 && detail.starts_with(fault), "{path}: {status} {detail}");
    }
    assert_eq!(names(&daemon.get("/v1/volumes")), ["v1"]);
}
