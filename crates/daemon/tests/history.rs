//! The history of the last day.

use crate::common::load::{BLOCK, Client};
use crate::common::{Daemon, MIB};
use reqwest::Method;
use serde_json::{Value, json};

/// Blocks that a client reads.
const BLOCKS: u64 = 64;

fn sum(history: &Value, field: &str) -> u64 {
    let points = history["points"].as_array().unwrap();
    points.iter().map(|point| point[field].as_u64().unwrap()).sum()
}

#[test]
fn the_load_of_objects_and_their_events_are_remembered() {
    let daemon = Daemon::new();
    daemon.array();
    daemon.volume("v1", MIB);
    daemon.post("/v1/exports", &json!({ "name": "e1", "kind": "nbd", "volumes": ["v1"] }));
    Client::new(&daemon).read(BLOCKS);
    daemon.post("/v1/arrays/data/actions", &json!({ "action": "fail", "members": ["1"] }));
    let path = |object: &str| format!("/v1/history?object={object}&seconds=600&resolution_s=10");
    for object in ["volumes/v1", "arrays/data", "members/data/0", "exports/e1"] {
        assert!(daemon.get(&path(object))["points"].is_array(), "{object}: also before the first sample");
    }
    let has_point =
        || daemon.get(&path("volumes/v1"))["points"].as_array().is_some_and(|points| !points.is_empty());
    daemon.wait_for("the first sample", has_point);
    for object in ["volumes/v1", "arrays/data", "exports/e1"] {
        let history = daemon.get(&path(object));
        assert_eq!((&history["object"], &history["resolution_s"]), (&json!(object), &json!(10)));
        assert!(sum(&history, "reads") > 0, "{history}");
        assert_eq!(sum(&history, "read_bytes"), BLOCKS * BLOCK, "{history}");
        let point = &history["points"][0];
        let is_timed = object != "exports/e1";
        assert!(point["p50_ns"].is_u64() == is_timed && point["p99_ns"].is_u64() == is_timed, "{history}");
        let markers = history["markers"].as_array().unwrap().iter();
        let markers: Vec<String> = markers
            .map(|m| format!("{} {}", m["name"].as_str().unwrap(), m["what"].as_str().unwrap()))
            .collect();
        let is_array = object == "arrays/data";
        for (marker, is_there) in
            [("e1 created", !is_array), ("data degraded", true), ("data member failed", true)]
        {
            assert_eq!(markers.contains(&marker.to_owned()), is_there, "{object} {marker}: {markers:?}");
        }
    }
    assert!(sum(&daemon.get(&path("members/data/0")), "writes") > 0, "superblocks are written");
    assert_eq!(daemon.get("/v1/history?object=volumes/v1&seconds=86400")["resolution_s"], 240);
    let bytes = daemon.metrics();
    let bytes = bytes.lines().find_map(|line| line.strip_prefix("freestone_history_bytes ")).unwrap();
    assert!((10_000..1_000_000).contains(&bytes.parse::<u64>().unwrap()), "{bytes}");
}

#[test]
fn invalid_spans_and_unknown_objects_are_named() {
    let daemon = Daemon::new();
    for (query, status, said) in [
        ("object=volumes/v1&seconds=15", 422, "seconds 15: want a multiple of 10 from 10 to 86400"),
        ("object=volumes/v1&seconds=0", 422, "seconds 0: want"),
        ("object=volumes/v1&resolution_s=86410", 422, "resolution_s 86410: want"),
        ("object=volumes/v1", 404, "no history of \"volumes/v1\""),
        ("object=", 404, "no history of \"\""),
        ("object=members/data/0", 404, "no history of \"members/data/0\""),
        ("seconds=10", 400, "object"),
        ("object=volumes/v1&seconds=-1", 400, "seconds"),
    ] {
        let refusal = daemon.refusal(Method::GET, &format!("/v1/history?{query}"), &Value::Null);
        assert!(refusal.0 == status && refusal.2.contains(said), "{query}: {refusal:?}");
    }
}
