//! The copies of a pool's table, damaged and repaired under a daemon that has the pool open.

use crate::common::{Daemon, MIB};
use reqwest::Method;
use serde_json::{Value, json};
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Where the copies of tables begin: those with an even sequence number, then those with an odd
/// one.
const COPIES: [u64; 4] = [64 << 10, 3 * MIB, 2 * MIB, MIB];

fn damage(disk: &Path, at: u64) {
    let file = std::fs::File::options().write(true).open(disk).unwrap();
    file.write_all_at(&[0xa5; 512], at).unwrap();
}

/// A daemon with the volume `v1` on the device `data`, in a file of that name.
fn with_pool() -> Daemon {
    let daemon = Daemon::new();
    let disk = daemon.file("data", 16 * MIB);
    daemon.post("/v1/devices", &json!({ "name": "data", "spec": disk }));
    daemon.volume("v1", MIB);
    daemon
}

fn damaged(pool: &Value) -> Vec<u64> {
    let copies = pool["copies"].as_array().unwrap().iter();
    copies
        .filter(|copy| copy["is_damaged"] == true)
        .map(|copy| copy["offset_bytes"].as_u64().unwrap())
        .collect()
}

fn repair(daemon: &Daemon) -> Value {
    daemon.post("/v1/pools/data/actions", &json!({ "action": "repair" }))
}

#[test]
fn damaged_copies_are_named_and_repaired_while_the_pool_is_open() {
    let daemon = with_pool();
    let disk = daemon.path("data");
    let pool = daemon.get("/v1/pools/data");
    assert_eq!(
        (&pool["backing"], &pool["sequence"], &pool["volumes"], &pool["damaged"]),
        (&json!("data"), &json!(3), &json!(["v1"]), &json!(0))
    );
    let whole = std::fs::read(&disk).unwrap();
    // Any of the four, both of the table in use, all of them: the table in memory is whole.
    for places in [&COPIES[..1], &COPIES[1..2], &COPIES[2..3], &COPIES[3..], &COPIES[2..], &COPIES[..]] {
        places.iter().for_each(|at| damage(&disk, *at));
        let mut expected = places.to_vec();
        let pool = daemon.get("/v1/pools/data");
        assert_eq!(damaged(&pool), expected, "{pool}");
        assert_eq!(daemon.get("/v1/volumes/v1")["size_bytes"], MIB);
        let done = repair(&daemon);
        let mut offsets: Vec<u64> = serde_json::from_value(done["offsets_bytes"].clone()).unwrap();
        offsets.sort_unstable();
        expected.sort_unstable();
        assert_eq!((offsets, &done["pool"]["damaged"]), (expected, &json!(0)), "{done}");
        assert_eq!(damaged(&daemon.get("/v1/pools/data")), Vec::<u64>::new());
        if places != COPIES {
            assert!(std::fs::read(&disk).unwrap() == whole, "{places:?}: the device holds what it held");
        }
    }
    assert_eq!(repair(&daemon)["offsets_bytes"], json!([]), "nothing is left to repair");
    assert_eq!(daemon.get("/v1/pools/data")["rewritten"], json!(10));
    let metrics = daemon.metrics();
    assert!(metrics.contains("freestone_pool_rewritten_copies_total{backing=\"data\"} 10"), "{metrics}");
    let events = daemon.get("/v1/events").to_string();
    assert_eq!(events.matches("\"repaired\"").count(), 6, "{events}");
    // The next change finds nothing in its way, and the next start the change.
    let mut daemon = daemon;
    daemon.volume("v2", MIB);
    daemon.restart("-KILL");
    assert_eq!(daemon.get("/v1/pools/data")["volumes"], json!(["v1", "v2"]));
}

#[test]
fn an_opening_that_rewrites_a_copy_is_an_event_and_counted() {
    let mut daemon = with_pool();
    daemon.end("-TERM");
    damage(&daemon.path("data"), COPIES[2]);
    daemon.start();
    let pool = daemon.get("/v1/pools/data");
    assert_eq!((&pool["damaged"], &pool["rewritten"]), (&json!(0), &json!(1)), "{pool}");
    let events = daemon.get("/v1/events");
    let is_it = |event: &&Value| event["kind"] == "pool" && event["what"] == "repaired";
    let event = events.as_array().unwrap().iter().find(is_it).unwrap();
    assert_eq!(
        (&event["name"], &event["text"]),
        (&json!("data"), &json!("damaged copies of the table rewritten at 2097152"))
    );
}

#[test]
fn a_device_without_a_pool_is_named() {
    let daemon = with_pool();
    let bare = daemon.file("bare", 16 * MIB);
    daemon.post("/v1/devices", &json!({ "name": "bare", "spec": bare }));
    for (path, detail) in [
        ("/v1/pools/bare", "bare: it has no pool of volumes"),
        ("/v1/pools/nope", "no array or device \"nope\""),
    ] {
        let refused = daemon.refusal(Method::GET, path, &Value::Null);
        assert_eq!((refused.0, &*refused.2), (404, detail), "{path}");
    }
    let dance = json!({ "action": "dance" });
    assert_eq!(daemon.refusal(Method::POST, "/v1/pools/data/actions", &dance).0, 422);
}
