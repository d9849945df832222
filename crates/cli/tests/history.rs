//! `freestone history`, with a daemon that is played by the test.

use crate::common::freestone;
use crate::common::played::Played;
use serde_json::{Value, json};
use std::process::Output;

/// The first line of the request, and what the command prints.
fn asked(arguments: &[&str], answer: (u16, Value)) -> (String, Output) {
    let daemon = Played::new(vec![answer]);
    let command = freestone().arg("--socket").arg(daemon.socket()).arg("history").args(arguments).output();
    (daemon.requests().remove(0).0, command.unwrap())
}

#[test]
fn history_asks_for_an_object_and_prints_its_rates() {
    let point = json!({ "at_ns": 1_800_000_060_000_000_000_u64, "reads": 600, "writes": 0, "read_bytes": 2_457_600,
        "written_bytes": 0, "p50_ns": 80_000, "p99_ns": null });
    let marker = json!({ "at_ns": 1_800_000_001_000_000_000_u64, "kind": "volume", "name": "v1", "what": "grown",
        "text": "to 2 MiB" });
    let history =
        json!({ "object": "volumes/v1", "resolution_s": 60, "points": [point], "markers": [marker] });
    let (request, output) = asked(&["volumes/v1"], (200, history.clone()));
    assert!(
        request.starts_with("GET /v1/history?object=volumes%2Fv1&seconds=3600&resolution_s=60 "),
        "{request}"
    );
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && text.lines().count() == 3, "{text}");
    assert!(text.contains("2027-01-15T08:01:00Z") && text.contains("40 KiB/s"), "{text}");
    assert!(text.ends_with("volume v1  grown: to 2 MiB\n"), "{text}");
    let (request, output) =
        asked(&["members/data/0", "--last", "24h", "--every", "10min", "--json"], (200, history.clone()));
    assert!(request.contains("?object=members%2Fdata%2F0&seconds=86400&resolution_s=600 "), "{request}");
    assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap(), history);
}

#[test]
fn wrong_times_and_unknown_objects_are_errors_that_name_them() {
    let output = freestone().args(["history", "volumes/v1", "--last", "15s"]).output().unwrap();
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(2) && error.contains("15s"), "{error}");
    assert!(error.contains("want a multiple of 10s from 10s to 24h"), "{error}");
    let refusal = json!({ "type": "about:blank", "title": "Not Found", "status": 404,
        "detail": "history of \"volumes/v9\" does not exist" });
    let (_, output) = asked(&["volumes/v9"], (404, refusal));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && error.contains("volumes/v9"), "{error}");
}
