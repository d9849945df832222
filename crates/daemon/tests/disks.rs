//! Block devices of the host.

use crate::common::{Daemon, MIB};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::path::Path;

/// The names in `/sys/block` of devices that are listed: with a medium, neither hidden, optical nor
/// floppy.
fn names_of_this_host() -> BTreeSet<String> {
    let entries = std::fs::read_dir("/sys/block").unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let attribute = |name: &str, attribute: &str| {
        let text = std::fs::read_to_string(Path::new("/sys/block").join(name).join(attribute));
        text.unwrap_or_default().trim().to_owned()
    };
    let is_listed = |name: &String| {
        let major = attribute(name, "dev");
        attribute(name, "size") != "0"
            && attribute(name, "hidden") != "1"
            && !["2:", "11:"].iter().any(|left_out| major.starts_with(left_out))
    };
    names.filter(is_listed).collect()
}

#[test]
fn the_disks_of_the_host_are_listed_with_their_uses() {
    let daemon = Daemon::new();
    let spec = daemon.file("disk", 64 * MIB);
    daemon.post("/v1/devices", &json!({ "name": "file", "spec": spec }));
    let before = names_of_this_host();
    let disks = daemon.get("/v1/disks");
    let after = names_of_this_host();
    let disks = disks.as_array().unwrap();
    let text = |disk: &Value, field: &str| disk[field].as_str().unwrap().to_owned();
    let whole = disks.iter().filter(|disk| disk["partition_of"].is_null());
    let names: BTreeSet<String> = whole.map(|disk| text(disk, "name")).collect();
    // Other programs may add and remove devices meanwhile.
    assert!(names.is_subset(&(&before | &after)), "{names:?} {before:?} {after:?}");
    assert!(names.is_superset(&(&before & &after)), "{names:?} {before:?} {after:?}");
    for disk in disks {
        assert!(text(disk, "path").starts_with("/dev/"), "{disk}");
        assert!(disk["size_bytes"].as_u64().unwrap() > 0, "{disk}");
        let uses = disk["uses"].as_array().unwrap();
        assert_eq!(disk["is_free"], json!(uses.is_empty() && disk["read_only"] == false), "{disk}");
        assert!(uses.iter().all(|item| !text(item, "text").is_empty()), "{disk}");
    }
    // The root file system is on a disk, unless it is an overlay or the like.
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    let root = mounts.lines().find(|line| line.split(' ').nth(4) == Some("/")).unwrap();
    let source = root.split(" - ").nth(1).unwrap().split(' ').nth(1).unwrap();
    let mounted = disks.iter().find(|disk| text(disk, "name") == source.trim_start_matches("/dev/"));
    if let Some(disk) = mounted {
        assert_eq!(disk["uses"][0]["kind"], "mounted", "{disk}");
        assert!(text(&disk["uses"][0], "text").starts_with("mounted at /"), "{disk}");
    }
}
