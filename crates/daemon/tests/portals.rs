//! Portals: listeners that NVMe/TCP exports share.

use crate::common::{Daemon, MIB, block, names, read_state};
use block::{Device, Op};
use reqwest::Method;
use serde_json::{Value, json};
use stack::kinds::member::member;
use std::net::TcpListener;
use std::sync::Arc;

const PORTALS: &str = "/v1/portals";

fn nqn(disk: &str) -> String {
    format!("nqn.2014-08.org.example:{disk}")
}

/// A daemon with volumes v1 to v3, and the address of a free port.
fn daemon(args: &[&str]) -> (Daemon, String) {
    let daemon = Daemon::with(&[&["--member-timeout", "1"], args].concat());
    let disk = daemon.file("disk", 64 * MIB);
    daemon.post("/v1/devices", &json!({ "name": "data", "spec": disk }));
    ["v1", "v2", "v3"].iter().for_each(|name| drop(daemon.volume(name, MIB)));
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    (daemon, free.to_string())
}

fn portal(daemon: &Daemon, address: &str) -> Value {
    daemon.post(PORTALS, &json!({ "name": "net", "listen": [address] }))
}

fn new_export(disk: &str) -> Value {
    let options = json!({ "portal": "net", "nqn": nqn(disk) });
    json!({ "name": disk, "kind": "nvme-tcp", "volumes": [disk], "options": options })
}

/// A host of a subsystem; one that does not wait gives up as soon as its connection is lost.
fn open(address: &str, disk: &str, waits: bool) -> Option<Arc<dyn Device>> {
    let wait = if waits { "" } else { ",ctrl-loss-tmo=0" };
    let spec = format!("nvme-tcp:address={address},nqn={},queues=1{wait}", nqn(disk));
    member(&spec, false, false).unwrap().open().ok()
}

/// Whether a new host is kept off the disk at an address.
fn keeps_off(address: &str, disk: &str) -> bool {
    open(address, disk, false).is_none_or(|host| block(&host, Op::Read, 0).is_err())
}

#[test]
fn exports_share_a_portal_that_restarts_keep_while_hosts_are_connected() {
    let (mut daemon, address) = daemon(&[]);
    let made = portal(&daemon, &address);
    assert_eq!(
        (&made["addresses"], &made["clients"], &made["error"]),
        (&json!([address]), &json!(4096), &json!(null))
    );
    let disks = ["v1", "v2", "v3"];
    disks.iter().for_each(|disk| drop(daemon.post("/v1/exports", &new_export(disk))));
    assert_eq!(daemon.get("/v1/portals/net")["exports"], json!(disks));
    let hosts = disks.map(|disk| open(&address, disk, true).unwrap());
    for (fill, host) in (1..).zip(&hosts) {
        block(host, Op::Write, fill).unwrap();
    }
    // Each host has its admin queue, and may have I/O queues.
    let least = disks.len() as u64;
    let connections = daemon.get("/v1/portals/net")["connections"].clone();
    assert!(connections[0].as_u64() >= Some(least), "{connections}");
    let sample = format!("freestone_portal_connections{{portal=\"net\",address=\"{address}\"}} ");
    let metrics = daemon.metrics();
    let measured = metrics.lines().find_map(|line| line.strip_prefix(&sample)?.parse().ok());
    assert!(measured >= Some(least), "{sample}: {measured:?}");
    let (host, port) = address.split_once(':').unwrap();
    let line = daemon.get("/v1/exports/v2/attach")["lines"]["nvme"].as_str().unwrap().to_owned();
    assert!(line.starts_with(&format!("nvme connect -t tcp -a {host} -s {port} -n {}", nqn("v2"))), "{line}");
    let description = daemon.get("/v1/exports/v2")["description"].to_string();
    assert!(description.contains(&format!("at portal net, listens on {address}")), "{description}");
    for signal in ["-KILL", "-TERM"] {
        daemon.restart(signal);
        for (fill, host) in (1..).zip(&hosts) {
            assert_eq!(block(host, Op::Read, 0), Ok(fill), "{signal}");
        }
    }
    // One export ends, and hosts of the others do not notice.
    daemon.patch("/v1/exports/v3", &json!({ "hosts": { "add": [{ "nqn": nqn("stranger") }] } }));
    assert!(open(&address, "v3", false).is_none());
    daemon.delete("/v1/exports/v1");
    assert!(open(&address, "v1", false).is_none());
    assert_eq!(block(&hosts[1], Op::Read, 0), Ok(2));
    let (status, kind, detail) = daemon.refusal(Method::DELETE, "/v1/portals/net", &json!(null));
    assert_eq!((status, &*kind, &*detail), (409, "in-use", "portal net: exports use it: v2, v3"));
    ["v2", "v3"].iter().for_each(|disk| daemon.delete(&format!("/v1/exports/{disk}")));
    daemon.delete("/v1/portals/net");
    assert_eq!(daemon.get(PORTALS), json!([]));
    TcpListener::bind(&address).expect("the address is free");
    daemon.restart("-KILL");
    assert_eq!(daemon.get(PORTALS), json!([]));
}

#[test]
fn only_a_state_with_portals_has_a_new_format() {
    let (daemon, address) = daemon(&[]);
    let version = || read_state(&daemon.path("state/state.json")).unwrap()["version"].clone();
    assert_eq!(version(), 2);
    portal(&daemon, &address);
    assert_eq!(version(), 3);
    daemon.delete("/v1/portals/net");
    assert_eq!(version(), 2);
}

#[test]
fn a_portal_that_cannot_be_opened_makes_its_exports_wait() {
    let (mut daemon, address) = daemon(&[]);
    portal(&daemon, &address);
    daemon.post("/v1/exports", &new_export("v1"));
    daemon.end("-KILL");
    let other = TcpListener::bind(&address).unwrap();
    daemon.start_without_waiting_for_ready();
    daemon.wait_for("the error", || daemon.get("/v1/portals/net")["error"].is_string());
    let shown = daemon.get("/v1/portals/net");
    assert!(shown["error"].as_str().unwrap().contains(&address), "{shown}");
    let health = daemon.get("/v1/health");
    let of_portal = health.as_array().unwrap().iter().find(|problem| problem["kind"] == "portal");
    assert_eq!(
        of_portal.map(|problem| (&problem["code"], &problem["severity"], &problem["object"])),
        Some((&json!("portal-not-open"), &json!("critical"), &json!("net"))),
        "{health}"
    );
    assert!(daemon.metrics().contains("freestone_portal_up{portal=\"net\"} 0\n"));
    daemon.wait_for("the reason", || {
        daemon.get("/v1/exports/v1")["error"].to_string().contains("portal net: ")
    });
    drop(other);
    daemon.wait_for("the export", || daemon.get("/v1/exports/v1")["state"] == "active");
    assert!(open(&address, "v1", false).is_some());
    assert_eq!(daemon.get("/v1/portals/net")["error"], json!(null));
}

/// The ANA states that the daemon reports.
fn states(daemon: &Daemon, export: &str) -> Value {
    daemon.get(&format!("/v1/exports/{export}"))["ana"].clone()
}

#[test]
fn ana_states_of_an_export_in_use_change_and_stay() {
    let (mut daemon, address) = daemon(&[]);
    let second = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let listen = [address.clone(), format!("{second}@non-optimized")];
    daemon.post(PORTALS, &json!({ "name": "net", "listen": listen }));
    ["v1", "v2"].iter().for_each(|disk| drop(daemon.post("/v1/exports", &new_export(disk))));
    let as_made = json!({ &address: "optimized", &second: "non-optimized" });
    assert_eq!(states(&daemon, "v1"), as_made);
    let host = open(&second, "v1", true).unwrap();
    block(&host, Op::Write, 1).unwrap();

    let change = json!({ "ana": { &address: "inaccessible", &second: "optimized" } });
    let changed = daemon.patch("/v1/exports/v1", &change);
    assert_eq!(changed["ana"], change["ana"]);
    let description = changed["description"].to_string();
    assert!(description.contains(&format!("{address}@inaccessible and {second}")), "{description}");
    assert_eq!(states(&daemon, "v2"), as_made, "another export of the portal");
    assert_eq!(block(&host, Op::Read, 0), Ok(1));
    assert!(keeps_off(&address, "v1") && !keeps_off(&second, "v1"));

    daemon.restart("-KILL");
    assert_eq!(states(&daemon, "v1"), change["ana"]);
    assert!(keeps_off(&address, "v1"));
    assert_eq!(block(&host, Op::Read, 0), Ok(1));
    let back = daemon.patch("/v1/exports/v1", &json!({ "ana": as_made }));
    assert_eq!((&back["ana"], &back["options"]["ana"]), (&as_made, &json!(null)));
    assert!(!keeps_off(&address, "v1"));

    let refused = |export: &str, states: Value| {
        daemon.refusal(Method::PATCH, &format!("/v1/exports/{export}"), &json!({ "ana": states })).2
    };
    let detail = refused("v1", json!({ "10.9.9.9:1": "optimized" }));
    assert!(
        detail.contains(&format!("\"10.9.9.9:1\" is no port: want one of {address}, {second}")),
        "{detail}"
    );
    let detail = refused("v1", json!({ &address: "best" }));
    assert!(detail.contains("best"), "{detail}");
    assert_eq!(states(&daemon, "v1"), as_made);
}

#[test]
fn ana_states_of_a_process_of_its_own_change_and_stay() {
    let (mut daemon, address) = daemon(&["--process-per-export"]);
    let options = json!({ "listen": address, "nqn": nqn("v1") });
    daemon.post(
        "/v1/exports",
        &json!({ "name": "v1", "kind": "nvme-tcp", "volumes": ["v1"], "options": options }),
    );
    assert!(!keeps_off(&address, "v1"));
    let change = json!({ "ana": { &address: "inaccessible" } });
    assert_eq!(daemon.patch("/v1/exports/v1", &change)["ana"], change["ana"]);
    assert!(keeps_off(&address, "v1"));
    daemon.restart("-TERM");
    assert!(keeps_off(&address, "v1"));
    daemon.patch("/v1/exports/v1", &json!({ "ana": { &address: "optimized" } }));
    assert!(!keeps_off(&address, "v1"));
    daemon.post("/v1/exports", &json!({ "name": "b", "kind": "nbd", "volumes": ["v2"] }));
    let (_, _, detail) = daemon.refusal(Method::PATCH, "/v1/exports/b", &change);
    assert!(detail.contains("export b: exports of kind nbd have no ANA states"), "{detail}");
}

#[test]
fn a_portal_or_export_that_cannot_be_is_refused_by_name() {
    let (daemon, address) = daemon(&[]);
    portal(&daemon, &address);
    daemon.post("/v1/exports", &new_export("v1"));
    let portal = |name: &str, listen: Value, clients: Value| json!({ "name": name, "listen": listen, "clients": clients });
    let mut export = new_export("v2");
    let mut with = |key: &str, value: &str| {
        export = new_export("v2");
        export["options"][key] = json!(value);
        export.clone()
    };
    for (path, body, status, fault) in [
        (PORTALS, portal("net", json!(["127.0.0.1:0"]), json!(1)), 409, "portal net exists already"),
        (PORTALS, portal("p", json!([]), json!(1)), 422, "portal p: 0 addresses: want 1 to 16"),
        (PORTALS, portal("p", json!(["127.0.0.1:0"]), json!(0)), 422, "portal p: 0 clients: want 1 to 65536"),
        (PORTALS, portal("p", json!(["127.0.0.1:0@best"]), json!(1)), 422, "\"best\" is none of optimized"),
        (PORTALS, portal("-", json!(["127.0.0.1:0"]), json!(1)), 422, "-"),
        (PORTALS, portal("p", json!([address]), json!(1)), 409, &*address),
        (PORTALS, portal("p", json!(["nowhere"]), json!(1)), 422, "cannot listen on socket nowhere"),
        (PORTALS, portal("p", json!(["nothing.invalid:1"]), json!(1)), 422, "nothing.invalid:1"),
        (PORTALS, portal("p", json!(["192.0.2.1:1"]), json!(1)), 422, "192.0.2.1:1"),
        ("/v1/exports", with("portal", "other"), 404, "export v2: no portal \"other\""),
        ("/v1/exports", with("listen", "127.0.0.1:0"), 422, "listen and portal: want one of them"),
        ("/v1/exports", with("nqn", &nqn("v1")), 409, "nvme-tcp:net:nqn.2014-08.org.example:v1 is export v1"),
    ] {
        let (found, _, detail) = daemon.refusal(Method::POST, path, &body);
        assert_eq!(found, status, "{body}: {detail}");
        assert!(detail.contains(fault), "{body}: {detail}");
    }
    assert_eq!(names(&daemon.get(PORTALS)), ["net"]);
    assert_eq!(daemon.refusal(Method::DELETE, "/v1/portals/other", &json!(null)).0, 404);
}

#[test]
fn a_process_of_its_own_has_no_portal() {
    let (daemon, address) = daemon(&["--process-per-export"]);
    portal(&daemon, &address);
    let (status, _, detail) = daemon.refusal(Method::POST, "/v1/exports", &new_export("v1"));
    assert_eq!(status, 422);
    assert!(detail.contains("not possible with --process-per-export: portal=net"), "{detail}");
}

#[test]
fn the_configuration_file_opens_portals_before_their_exports() {
    let mut daemon = Daemon::prepare(&["--member-timeout", "1"]);
    let (disk, config) = (daemon.file("disk", 64 * MIB), daemon.path("config.toml"));
    let text = |listen: &str| {
        format!(
            "[[device]]\nname = 'data'\nspec = '{disk}'\n\
             [[portal]]\nname = 'net'\nlisten = ['{listen}']\nclients = 9\n\
             [[export]]\nname = 'v1'\nkind = 'nvme-tcp'\nvolumes = ['data']\n\
             options = {{ portal = 'net', nqn = '{}' }}\n",
            nqn("v1")
        )
    };
    std::fs::write(&config, text("127.0.0.1:0")).unwrap();
    daemon.args.extend(["--config".into(), config.display().to_string()]);
    daemon.start();
    let shown = daemon.get("/v1/portals/net");
    assert_eq!((&shown["clients"], &shown["exports"]), (&json!(9), &json!(["v1"])));
    assert!(open(shown["addresses"][0].as_str().unwrap(), "v1", false).is_some());
    // Another address is left alone, as everything that differs.
    std::fs::write(&config, text("127.0.0.1:1")).unwrap();
    daemon.restart("-TERM");
    assert_eq!(daemon.get("/v1/portals/net")["listen"], json!(["127.0.0.1:0"]));
    assert!(daemon.log().contains("portal net: it listens on 127.0.0.1:0, not 127.0.0.1:1"));
}
