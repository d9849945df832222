//! `freestone array grow`, under a client and without a server, as processes over files.

use crate::common::{Server, failure_in, path_value, run_json_in, wait_for, write};
use serde_json::Value;
use std::fs::File;
use std::io::Write;

const MIB: u64 = 1 << 20;

fn resize(members: &[String], bytes: u64) {
    members
        .iter()
        .for_each(|member| File::options().write(true).open(member).unwrap().set_len(bytes).unwrap());
}

#[test]
fn an_array_grows_under_its_clients_and_without_a_server() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = dir.path();
    std::fs::create_dir(runtime.join("members")).unwrap();
    let path = |i| runtime.join("members").join(format!("m{i}")).to_str().unwrap().to_owned();
    let members: Vec<String> = (0..4).map(path).collect();
    members.iter().for_each(|member| File::create(member).unwrap().set_len(16 * MIB).unwrap());
    let list: Vec<&str> = members.iter().map(String::as_str).collect();
    let array = |args: &[&str], rest: &[&str]| {
        run_json_in(runtime, &[&["array"], args, &["--json"], rest].concat()).pop().unwrap()
    };
    let created = array(&["create", "data", "--level", "5"], &list);
    let before = created["capacity_bytes"].as_u64().unwrap();

    let socket = runtime.join("vhost.sock");
    let export = format!("vhost-user-blk:{},queues=2", path_value("socket", &socket));
    let device = format!("raid:members={}", members.join("+"));
    let (mut server, _) = Server::start_in(runtime, &["--device", &device, "--export", &export]);
    write(&socket);
    let (said, code) = failure_in(runtime, &["array", "grow", "data"]);
    assert!(said.contains("m0 has 16777216 usable bytes") && code == 1, "{said}");
    resize(&members, 24 * MIB);
    let grown = array(&["grow", "data"], &[]);
    assert_eq!((&grown["event"], &grown["running"]), (&"grown".into(), &true.into()), "{grown}");
    let refreshed = server.event("refreshed");
    let online = refreshed["capacity"].as_u64().unwrap();
    assert!(online >= before + 3 * 7 * MIB, "{before} bytes became {refreshed}");
    assert_eq!(array(&["show", "data"], &[])["capacity_bytes"], online);
    write(&socket);
    assert_eq!(server.stop().0, 0);
    assert_eq!(array(&["check"], &list)["clean"], true);

    let members_dir = runtime.join("members");
    let scan = ["--scan", members_dir.to_str().unwrap()];
    resize(&members, 40 * MIB);
    let (said, code) = failure_in(runtime, &["array", "grow", "data"]);
    assert!(said.contains("its members are needed") && code == 1, "{said}");
    let grown = array(&["grow", "data", "--size", "32M"], &scan);
    assert_eq!((&grown["running"], &grown["before_bytes"]), (&false.into(), &online.into()), "{grown}");
    assert!(grown["capacity_bytes"].as_u64() >= Some(online + 3 * 7 * MIB), "{grown}");
    let all = array(&["grow", "data"], &scan);
    assert!(all["capacity_bytes"].as_u64() >= Some(before + 3 * 23 * MIB), "{all}");
    let (server, ready) = Server::start_in(runtime, &["--device", &device, "--export", &export]);
    assert_eq!(ready["devices"][0]["capacity"], all["capacity_bytes"]);
    write(&socket);
    assert_eq!(server.stop().0, 0);
    assert_eq!(array(&["check"], &list)["clean"], true);
}

/// Empty files that can be members, in a folder of their own.
fn make_members(runtime: &std::path::Path, count: usize) -> Vec<String> {
    std::fs::create_dir(runtime.join("members")).unwrap();
    let path = |i| runtime.join("members").join(format!("m{i}")).to_str().unwrap().to_owned();
    let members: Vec<String> = (0..count).map(path).collect();
    members.iter().for_each(|member| File::create(member).unwrap().set_len(16 * MIB).unwrap());
    members
}

#[test]
fn an_array_that_was_killed_gets_a_group_more_and_grows_by_size_afterwards() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = dir.path();
    let members = make_members(runtime, 9);
    let list: Vec<&str> = members.iter().map(String::as_str).collect();
    let array = |args: &[&str], rest: &[&str]| {
        run_json_in(runtime, &[&["array"], args, &["--json"], rest].concat()).pop().unwrap()
    };
    let before = array(&["create", "data", "--level", "5"], &list[..4])["capacity_bytes"].as_u64().unwrap();
    let socket = runtime.join("vhost.sock");
    let export = format!("vhost-user-blk:{},queues=2", path_value("socket", &socket));
    let device = |count: usize| format!("raid:members={}", members[..count].join("+"));
    let (server, _) = Server::start_in(runtime, &["--device", &device(4), "--export", &export]);
    write(&socket);
    let members_dir = runtime.join("members");
    let scan = ["--scan", members_dir.to_str().unwrap()];
    let add =
        |count: usize| [&["array", "grow", "data"][..], &scan, &["--add"], &list[4..4 + count]].concat();
    let (said, code) = failure_in(runtime, &add(4));
    assert!(said.contains("new members join only while it is stopped") && code == 1, "{said}");
    server.kill();

    let (said, code) = failure_in(runtime, &add(5));
    assert!(said.contains("array data: 5 devices: groups of 4 are needed") && code == 1, "{said}");
    let mut spoilt = File::options().write(true).open(&members[5]).unwrap();
    spoilt.write_all(b"XFSB").unwrap();
    let (said, code) = failure_in(runtime, &add(4));
    assert!(said.contains("m5 holds XFS at byte 0") && code == 1, "{said}");
    let grown = run_json_in(runtime, &[&add(4)[..], &["--force", "--json"]].concat()).pop().unwrap();
    assert_eq!((&grown["level"], &grown["groups"]), (&"50".into(), &2.into()), "{grown}");
    assert_eq!(
        (&grown["before_bytes"], &grown["capacity_bytes"]),
        (&before.into(), &(2 * before).into()),
        "{grown}"
    );
    assert_eq!(grown["slots"], serde_json::json!([4, 5, 6, 7]));
    assert_eq!(array(&["check"], &list[..8])["clean"], true);

    members[..8].iter().for_each(|member| resize(std::slice::from_ref(member), 24 * MIB));
    let larger = array(&["grow", "data"], &scan)["capacity_bytes"].as_u64().unwrap();
    assert!(larger >= 2 * (before + 3 * 7 * MIB), "{larger}");
    let (server, ready) = Server::start_in(runtime, &["--device", &device(8), "--export", &export]);
    assert_eq!(ready["devices"][0]["capacity"], larger);
    write(&socket);
    assert_eq!(server.stop().0, 0);
    assert_eq!(array(&["check"], &list[..8])["clean"], true);
    let (said, code) = failure_in(runtime, &["array", "show", "data", "--member", &members[8]]);
    assert!(said.contains("no superblock") && code == 1, "{said}");
}

#[test]
fn an_array_that_does_not_run_begins_to_change_its_shape() {
    let dir = tempfile::tempdir().unwrap();
    let runtime = dir.path();
    let members = make_members(runtime, 6);
    let list: Vec<&str> = members.iter().map(String::as_str).collect();
    let array = |args: &[&str], rest: &[&str]| {
        run_json_in(runtime, &[&["array"], args, &["--json"], rest].concat()).pop().unwrap()
    };
    let before = array(&["create", "data", "--level", "5"], &list[..4])["capacity_bytes"].as_u64().unwrap();
    let members_dir = runtime.join("members");
    let scan = ["--scan", members_dir.to_str().unwrap()];
    fn command<'a>(scan: [&'a str; 2], rest: &[&'a str]) -> Vec<&'a str> {
        [&["array", "grow", "data"], &scan[..], rest].concat()
    }
    let refused = |args: &[&str], part: &str| {
        let (said, code) = failure_in(runtime, args);
        assert!(said.contains(part) && code == 1, "{said}");
    };

    // Nothing is changed by what cannot be.
    refused(&command(scan, &["--level", "6"]), "2 of 4 members for parity leave 2 for data, the array has 3");
    refused(
        &command(scan, &["--members", "7", "--add", list[4]]),
        "7 members requested: the array has 4, and 1 devices were given",
    );
    refused(&command(scan, &["--level", "60", "--add", list[4]]), "a reshape to level 60 is unsupported");
    refused(&command(scan, &["--level", "5"]), "the array already has 3 data and 1 parity strips");
    refused(&command(scan, &["--level", "6", "--add", list[3]]), "m3: device is already slot 3");
    assert_eq!(array(&["check"], &list[..4])["clean"], true);
    let socket = runtime.join("vhost.sock");
    let export = format!("vhost-user-blk:{},queues=2", path_value("socket", &socket));
    let device = format!("raid:members={}", members[..4].join("+"));
    let (server, _) = Server::start_in(runtime, &["--device", &device, "--export", &export]);
    write(&socket);
    refused(&command(scan, &["--level", "6", "--add", list[4]]), "a reshape begins only while it is stopped");
    server.kill();

    // Writes in flight are recovered first.
    let begun = command(scan, &["--level", "6", "--members", "6", "--add", list[4], list[5], "--json"]);
    let begun = run_json_in(runtime, &begun).pop().unwrap();
    assert_eq!((&begun["event"], &begun["level"]), (&"reshaping".into(), &"6".into()), "{begun}");
    assert_eq!((&begun["data"], &begun["parity"]), (&4.into(), &2.into()));
    assert_eq!((&begun["slots"], &begun["before_bytes"]), (&serde_json::json!([4, 5]), &before.into()));
    assert!(begun["capacity_bytes"].as_u64() > Some(before + before / 4), "{begun}");

    let shown = array(&["show", "data"], &scan);
    assert_eq!((&shown["level"], &shown["capacity_bytes"]), (&"6".into(), &before.into()), "{shown}");
    let reshape = &shown["reshape"];
    assert_eq!(
        (&reshape["level"], &reshape["data"], &reshape["done_bytes"]),
        (&"5".into(), &3.into(), &0.into())
    );
    assert_eq!(shown["members"].as_array().map(Vec::len), Some(6));
    let examined = array(&["examine", list[0]], &[]);
    assert_eq!(&examined["array"]["reshape"], reshape);
    refused(
        &[&["array", "check"][..], &list].concat(),
        "array data: it is being reshaped: serve it until the reshape has ended",
    );
    refused(&command(scan, &["--members", "6"]), "array data: a reshape is in progress");
    refused(&command(scan, &["--add", list[0]]), "device is already slot 0");

    // The rest is done while it is served, whatever happens to the server.
    let device = format!("raid:members={}", members.join("+"));
    let serve = || Server::start_in(runtime, &["--device", &device, "--export", &export]).0;
    serve().kill();
    let server = serve();
    write(&socket);
    let is_over = |shown: &Value| shown.get("reshape").is_none_or(Value::is_null);
    wait_for(|| array(&["show", "data"], &[]), is_over);
    write(&socket);
    let shown = array(&["show", "data"], &[]);
    assert_eq!(
        (&shown["level"], &shown["capacity_bytes"]),
        (&"6".into(), &begun["capacity_bytes"]),
        "{shown}"
    );
    assert_eq!(server.stop().0, 0);
    assert_eq!(array(&["check"], &list)["clean"], true);
}
