//! Waits of volumes for their limits and for those of their groups.

use crate::common::load::Client;
use crate::common::{Daemon, MIB};
use reqwest::{Method, StatusCode};
use serde_json::json;

/// Blocks that a client reads at a time: with four requests, which limits space by 62 ms.
const BLOCKS: u64 = 256;

#[test]
fn waits_for_limits_are_counted_for_the_volume_that_waits() {
    let daemon = Daemon::new();
    daemon.array();
    let limits = json!({ "bandwidth": { "per_s": 4 * MIB } });
    let group = daemon.send(Method::PUT, "/v1/groups/g", &limits);
    assert_eq!(group.status(), StatusCode::OK);
    let settings = [
        ("own", json!({ "qos": limits })),
        ("shared", json!({ "group": "g" })),
        ("free", json!({ "qos": { "write_iops": { "per_s": 1 } } })),
    ];
    for (volume, settings) in settings {
        daemon.volume(volume, 2 * MIB);
        daemon.patch(&format!("/v1/volumes/{volume}"), &settings);
        daemon.post("/v1/exports", &json!({ "name": volume, "kind": "nbd", "volumes": [volume] }));
    }
    let sample = |volume: &str| daemon.get("/v1/samples")["volumes"][volume].clone();
    let number = |volume: &str, field: &str| sample(volume)[field].as_u64().unwrap();
    for volume in ["own", "shared", "free"] {
        assert_eq!(number(volume, "throttled_requests"), 0);
    }
    Client::of(&daemon, "free").read(BLOCKS);
    for volume in ["own", "shared"] {
        let client = Client::of(&daemon, volume);
        daemon.wait_for("a read that waits", || {
            client.read(BLOCKS);
            number(volume, "throttled_requests") > 0
        });
    }
    for (volume, is_own) in [("own", true), ("shared", false)] {
        let sample = sample(volume);
        let of = |field: &str| sample[field].as_u64().unwrap();
        let (reads, waited, ns) = (of("reads"), of("throttled_requests"), of("throttled_ns"));
        assert!(waited < reads && ns > 0, "the first read does not wait: {sample}");
        assert!(of("read_sum_ns") as f64 > 0.9 * ns as f64, "latency includes waits: {sample}");
        assert_eq!(of("group_throttled_ns"), if is_own { 0 } else { ns });
    }
    assert_eq!((number("free", "reads"), number("free", "throttled_ns")), (4, 0));
    let metrics = daemon.metrics();
    let value = |name: &str, volume: &str, limit: &str| -> f64 {
        let sample = format!("freestone_volume_throttled_{name}{{volume=\"{volume}\",limit=\"{limit}\"}} ");
        let value = metrics.lines().find_map(|line| line.strip_prefix(&sample));
        value.unwrap_or_else(|| panic!("{sample}: {metrics}")).parse().unwrap()
    };
    for (volume, limit, waits) in [
        ("own", "volume", true),
        ("own", "group", false),
        ("shared", "volume", false),
        ("shared", "group", true),
        ("free", "volume", false),
        ("free", "group", false),
    ] {
        let (requests, seconds) =
            (value("requests_total", volume, limit), value("seconds_total", volume, limit));
        let expected = if waits {
            let ns = number(volume, "throttled_ns") as f64;
            (number(volume, "throttled_requests") as f64, ns / 1e9)
        } else {
            (0.0, 0.0)
        };
        assert_eq!((requests, seconds), expected, "{volume} {limit}");
    }
}
