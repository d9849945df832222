//! `freestone disks`, with a daemon that is played by the test.

use crate::common::freestone;
use crate::common::played::Played;
use serde_json::{Value, json};
use std::process::Output;

/// The first line of the request, and what the command prints.
fn asked(arguments: &[&str], answer: (u16, Value)) -> (String, Output) {
    let daemon = Played::new(vec![answer]);
    let command = freestone().arg("--socket").arg(daemon.socket()).arg("disks").args(arguments).output();
    (daemon.requests().remove(0).0, command.unwrap())
}

fn disk(name: &str, more: Value) -> Value {
    let mut disk = json!({ "name": name, "path": format!("/dev/{name}"), "partition_of": null, "size_bytes": 2u64 << 40,
        "logical_block_bytes": 512, "physical_block_bytes": 4096, "is_rotational": false, "transport": null,
        "model": null, "serial": null, "read_only": false, "is_free": false, "uses": [] });
    disk.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    disk
}

fn used(kind: &str, text: &str) -> Value {
    json!({ "kind": kind, "text": text })
}

#[test]
fn disks_lists_names_uses_and_stable_paths() {
    let disks = json!([
        disk(
            "sda",
            json!({ "transport": "sata", "model": "Big", "serial": "S1",
            "uses": [used("partitions", "partition table: sda1")] })
        ),
        disk(
            "sda1",
            json!({ "partition_of": "sda", "size_bytes": 4096, "uses": [used("mounted", "mounted at /")] })
        ),
        disk(
            "nvme0n1",
            json!({ "path": "/dev/disk/by-id/nvme-Fast_S2", "transport": "nvme", "is_free": true })
        ),
        disk("sdb", json!({ "read_only": true })),
        disk("sdc", json!({ "read_only": true, "uses": [used("signature", "XFS at byte 0")] })),
    ]);
    let (request, output) = asked(&[], (200, disks.clone()));
    assert!(request.starts_with("GET /v1/disks "), "{request}");
    let text = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<&str> = text.lines().collect();
    let columns = |i: usize| lines[i].split_whitespace().collect::<Vec<_>>().join(" ");
    assert_eq!(columns(0), "NAME SIZE TRANSPORT MODEL SERIAL USE PATH");
    assert_eq!(columns(1), "sda 2 TiB sata Big S1 partition table: sda1 /dev/sda");
    assert!(lines[2].starts_with("  sda1 "), "{text}");
    assert_eq!(columns(2), "sda1 4 KiB mounted at / /dev/sda1");
    assert_eq!(columns(3), "nvme0n1 2 TiB nvme free /dev/disk/by-id/nvme-Fast_S2");
    assert_eq!(columns(4), "sdb 2 TiB read-only /dev/sdb");
    assert_eq!(columns(5), "sdc 2 TiB read-only; XFS at byte 0 /dev/sdc");
    assert_eq!(lines.len(), 6);
    let (_, output) = asked(&["--json"], (200, disks.clone()));
    assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap(), disks);
    let (_, output) = asked(&["--free", "--json"], (200, disks.clone()));
    assert_eq!(serde_json::from_slice::<Value>(&output.stdout).unwrap(), json!([disks[2]]));
}

#[test]
fn the_reason_why_disks_cannot_be_listed_is_printed() {
    let refusal = json!({ "type": "about:blank", "title": "Failed", "status": 500,
        "detail": "the disks of this host cannot be listed: /sys/block: No such file or directory" });
    let (_, output) = asked(&[], (500, refusal));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(1) && error.contains("/sys/block: No such file"), "{error}");
}
