//! Jobs whose device is missing after a start of the daemon. Needs `qemu-utils`.

use crate::common::Daemon;
use crate::images::with_overlay;
use reqwest::Method;
use serde_json::json;

/// Ends the daemon, and starts it without the file `away`, which is then in `FILE.away`.
pub fn restart_without(daemon: &mut Daemon, away: &str) {
    daemon.end("-KILL");
    std::fs::rename(daemon.path(away), daemon.path(&format!("{away}.away"))).unwrap();
    daemon.start();
}

/// Brings the file back, and waits until its device is open.
pub fn bring_back(daemon: &Daemon, away: &str, device: &str) {
    std::fs::rename(daemon.path(&format!("{away}.away")), daemon.path(away)).unwrap();
    let path = format!("/v1/devices/{device}");
    daemon.wait_for("the device", || daemon.get(&path)["error"].is_null());
}

/// Checks that the only job waits for this object, and that no request but its cancellation counts.
pub fn check_waits(daemon: &Daemon, id: &str, object: &str) {
    let jobs = daemon.get("/v1/jobs");
    let waits_for = jobs[0]["waits_for"].as_str().unwrap_or_else(|| panic!("{jobs}")).to_owned();
    assert_eq!((jobs.as_array().unwrap().len(), &jobs[0]["id"]), (1, &json!(id)), "{jobs}");
    assert!(waits_for.starts_with(&format!("{object}: ")), "{waits_for}");
    let path = format!("/v1/jobs/{id}");
    let refused = daemon.refusal(Method::PATCH, &path, &json!({ "is_paused": true }));
    assert_eq!(refused, (409, "unavailable".into(), format!("job {id}: it waits: {waits_for}")));
}

#[test]
fn streams_and_commits_wait_for_their_device_and_can_be_cancelled() {
    for kind in ["stream", "commit"] {
        let mut daemon = with_overlay();
        let id = format!("disk.{kind}");
        let (begin, job) = (format!("/v1/devices/disk/{kind}"), format!("/v1/jobs/{id}"));
        daemon.post(&begin, &json!({ "is_paused": true }));
        restart_without(&mut daemon, "disk.qcow2");
        check_waits(&daemon, &id, "disk");
        bring_back(&daemon, "disk.qcow2", "disk");
        daemon.wait_for("the end of the job", || daemon.get("/v1/jobs") == json!([]));
        let event = if kind == "stream" { "\"streamed\"" } else { "\"committed\"" };
        assert!(daemon.get("/v1/events").to_string().contains(event), "{kind}");

        let mut daemon = with_overlay();
        daemon.post(&begin, &json!({ "is_paused": true }));
        restart_without(&mut daemon, "disk.qcow2");
        daemon.delete(&job);
        assert_eq!(daemon.get("/v1/jobs"), json!([]));
        let events = daemon.get("/v1/events").to_string();
        assert!(events.contains("\"cancelled\""), "{events}");
        bring_back(&daemon, "disk.qcow2", "disk");
        assert_eq!(daemon.get("/v1/jobs"), json!([]));
        // The image still has its backing file: it can begin again.
        daemon.post(&begin, &json!({ "min_bytes_per_s": u64::MAX }));
        daemon.wait_for("the end of the job", || daemon.get("/v1/jobs") == json!([]));
    }
}
