//! `freestone array grow`, under a client and without a server, as processes over files.

mod common;

use common::{Server, failure_in, path_value, run_json_in, write};
use std::fs::File;

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
    let before = created["capacity"].as_u64().unwrap();

    let socket = runtime.join("vhost.sock");
    let export = format!("vhost-user-blk:{},queues=2", path_value("socket", &socket));
    let device = format!("raid:members={}", members.join("+"));
    let (mut server, _) = Server::start_in(runtime, &["--device", &device, "--export", &export]);
    write(&socket);
    let (said, code) = failure_in(runtime, &["array", "grow", "data"]);
    assert!(said.contains("m0 has 16777216 bytes that may be used") && code == 1, "{said}");
    resize(&members, 24 * MIB);
    let grown = array(&["grow", "data"], &[]);
    assert_eq!((&grown["event"], &grown["running"]), (&"grown".into(), &true.into()), "{grown}");
    let refreshed = server.event("refreshed");
    let online = refreshed["capacity"].as_u64().unwrap();
    assert!(online >= before + 3 * 7 * MIB, "{before} bytes became {refreshed}");
    assert_eq!(array(&["show", "data"], &[])["capacity"], online);
    write(&socket);
    assert_eq!(server.stop().0, 0);
    assert_eq!(array(&["check"], &list)["clean"], true);

    let members_dir = runtime.join("members");
    let scan = ["--scan", members_dir.to_str().unwrap()];
    resize(&members, 40 * MIB);
    let (said, code) = failure_in(runtime, &["array", "grow", "data"]);
    assert!(said.contains("its members are needed") && code == 1, "{said}");
    let grown = array(&["grow", "data", "--size", "32M"], &scan);
    assert_eq!((&grown["running"], &grown["before"]), (&false.into(), &online.into()), "{grown}");
    assert!(grown["capacity"].as_u64() >= Some(online + 3 * 7 * MIB), "{grown}");
    let all = array(&["grow", "data"], &scan);
    assert!(all["capacity"].as_u64() >= Some(before + 3 * 23 * MIB), "{all}");
    let (server, ready) = Server::start_in(runtime, &["--device", &device, "--export", &export]);
    assert_eq!(ready["devices"][0]["capacity"], all["capacity"]);
    write(&socket);
    assert_eq!(server.stop().0, 0);
    assert_eq!(array(&["check"], &list)["clean"], true);
}
