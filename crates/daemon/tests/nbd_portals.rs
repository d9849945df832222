//! Portals of NBD exports.

use crate::common::{Daemon, MIB, block, names};
use block::{Device, Op};
use reqwest::Method;
use serde_json::{Value, json};
use stack::kinds::member::member;
use std::net::TcpListener;
use std::sync::Arc;
use tls::authority::write_all;

const PORTALS: &str = "/v1/portals";

/// A daemon with disks v1 to v3, and the address of a free port.
fn daemon(args: &[&str]) -> (Daemon, String) {
    let daemon = Daemon::with(&[&["--member-timeout", "1", "--json"], args].concat());
    let disk = daemon.file("disk", 64 * MIB);
    daemon.post("/v1/devices", &json!({ "name": "data", "spec": disk }));
    ["v1", "v2", "v3"].iter().for_each(|name| drop(daemon.volume(name, MIB)));
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    (daemon, free.to_string())
}

fn portal(daemon: &Daemon, address: &str, options: &Value) -> Value {
    daemon.post(PORTALS, &json!({ "name": "net", "kind": "nbd", "listen": [address], "options": options }))
}

fn new_export(name: &str, disk: &str) -> Value {
    json!({ "name": name, "kind": "nbd", "volumes": [disk], "options": { "portal": "net" } })
}

/// A client of an export; the reason if it is refused.
fn open(address: &str, name: &str, more: &str) -> Result<Arc<dyn Device>, String> {
    let place = address.replace("127.0.0.1:", "host=127.0.0.1,port=");
    let export = if name.is_empty() { String::new() } else { format!(",export={name}") };
    let spec = format!("nbd:{place}{export},connections=1{more}");
    member(&spec, false, false).unwrap().open().map_err(|error| error.to_string())
}

#[test]
fn nbd_exports_share_a_portal_that_restarts_keep() {
    let (mut daemon, address) = daemon(&[]);
    let made = portal(&daemon, &address, &json!({ "default-export": "v2" }));
    assert_eq!(
        (&made["kind"], &made["addresses"], &made["options"], &made["discovery_clients"]),
        (&json!("nbd"), &json!([address]), &json!({ "default-export": "v2" }), &json!(0))
    );
    let disks = ["v1", "v2", "v3"];
    disks.iter().for_each(|disk| drop(daemon.post("/v1/exports", &new_export(disk, disk))));
    let shown = daemon.get("/v1/exports/v1");
    assert_eq!((&shown["options"]["name"], &shown["ana"]), (&json!("v1"), &json!(null)));
    let description = shown["description"].to_string();
    assert!(description.contains(&format!("at portal net, listens on {address}")), "{description}");
    let lines = daemon.get("/v1/exports/v1/attach")["lines"].clone();
    assert_eq!(lines["nbdinfo"], format!("nbdinfo nbd://{address}/v1"));
    for (fill, disk) in (1..).zip(disks) {
        block(&open(&address, disk, "").unwrap(), Op::Write, fill).unwrap();
    }
    for signal in ["-KILL", "-TERM"] {
        daemon.restart(signal);
        for (fill, disk) in (1..).zip(disks) {
            assert_eq!(block(&open(&address, disk, "").unwrap(), Op::Read, 0), Ok(fill), "{signal}");
        }
    }
    assert_eq!(block(&open(&address, "", "").unwrap(), Op::Read, 0), Ok(2), "the default export");
    // Each client has its connection until its first channel takes it.
    let [first, second] = ["v1", "v3"].map(|disk| open(&address, disk, "").unwrap());
    daemon.wait_for("the connections", || daemon.get("/v1/portals/net")["connections"] == json!([2]));
    let sample = format!("freestone_portal_connections{{portal=\"net\",address=\"{address}\"}} 2\n");
    assert!(daemon.metrics().contains(&sample));
    daemon.delete("/v1/exports/v1");
    assert_eq!(daemon.get("/v1/portals/net")["connections"], json!([1]), "an export that has ended");
    assert!(block(&first, Op::Read, 0).is_err());
    let refused = open(&address, "v1", "").err().unwrap();
    assert!(refused.contains("v1"), "{refused}");
    assert_eq!(block(&second, Op::Read, 0), Ok(3));
    // Another disk gets the name, also one that differs from the export's.
    let mut other = new_export("again", "v1");
    other["options"]["name"] = json!("v1");
    daemon.post("/v1/exports", &other);
    assert_eq!(block(&open(&address, "v1", "").unwrap(), Op::Read, 0), Ok(1));
    let (status, _, detail) = daemon.refusal(Method::DELETE, "/v1/portals/net", &json!(null));
    assert_eq!((status, &*detail), (409, "portal net: exports use it: v2, v3, again"));
    ["v2", "v3", "again"].iter().for_each(|name| daemon.delete(&format!("/v1/exports/{name}")));
    daemon.delete("/v1/portals/net");
    TcpListener::bind(&address).expect("the address is free");
}

#[test]
fn only_a_state_with_portals_of_nbd_has_a_new_format() {
    let (daemon, address) = daemon(&[]);
    let version = || crate::common::read_state(&daemon.path("state/state.json")).unwrap()["version"].clone();
    daemon.post(PORTALS, &json!({ "name": "nvme", "listen": ["127.0.0.1:0"] }));
    assert_eq!(version(), 3);
    portal(&daemon, &address, &json!({}));
    assert_eq!(version(), 4);
    daemon.delete("/v1/portals/net");
    assert_eq!(version(), 3);
}

#[test]
fn a_portal_or_nbd_export_that_cannot_be_is_refused_by_name() {
    let (daemon, address) = daemon(&[]);
    portal(&daemon, &address, &json!({}));
    daemon.post(PORTALS, &json!({ "name": "nvme", "listen": ["127.0.0.1:0"] }));
    daemon.post("/v1/exports", &new_export("v1", "v1"));
    let new = |kind: &str, listen: Value, options: Value| json!({ "name": "p", "kind": kind, "listen": listen, "options": options });
    let export = |key: &str, value: &str| {
        let mut export = new_export("e", "v2");
        export["options"][key] = json!(value);
        export
    };
    let files = daemon.path("none").display().to_string();
    let nqn = json!({ "name": "e", "kind": "nvme-tcp", "volumes": ["v2"], "options": { "portal": "net", "nqn": "nqn.a" } });
    for (path, body, status, fault) in [
        (PORTALS, new("iscsi", json!(["127.0.0.1:0"]), json!({})), 422, "portal p: "),
        (PORTALS, new("nbd", json!([]), json!({})), 422, "portal p: 0 addresses: want 1 to 16"),
        (PORTALS, new("nbd", json!([address]), json!({})), 409, &*address),
        (PORTALS, new("nbd", json!(["127.0.0.1:0"]), json!({ "nqn": "x" })), 422, "portal p: "),
        (
            PORTALS,
            new("nbd", json!(["127.0.0.1:0"]), json!({ "tls": "require" })),
            422,
            "tls needs tls-certificates",
        ),
        (
            PORTALS,
            new("nbd", json!(["127.0.0.1:0"]), json!({ "tls-psk": files })),
            422,
            "/none: No such file",
        ),
        (
            PORTALS,
            new("nbd", json!(["127.0.0.1:0"]), json!({ "tls-psk": "/etc/shadow" })),
            422,
            "/etc/shadow: Permission denied",
        ),
        (PORTALS, new("nvme-tcp", json!(["127.0.0.1:0"]), json!({ "tls": "off" })), 422, "portal p: "),
        ("/v1/exports", export("portal", "other"), 404, "export e: no portal \"other\""),
        (
            "/v1/exports",
            export("portal", "nvme"),
            422,
            "export e: portal nvme: it has exports of kind nvme-tcp",
        ),
        ("/v1/exports", nqn, 422, "export e: portal net: it has exports of kind nbd"),
        ("/v1/exports", export("listen", "127.0.0.1:0"), 422, "listen and portal"),
        ("/v1/exports", export("tls-psk", &files), 422, "tls-psk"),
        ("/v1/exports", export("name", "v1"), 409, "nbd:net:v1 is export v1"),
        ("/v1/exports", export("name", ""), 422, "an empty export name"),
        ("/v1/exports", export("identities", "alice"), 422, "identities need TLS with keys"),
    ] {
        let (found, _, detail) = daemon.refusal(Method::POST, path, &body);
        assert!(found == status && detail.contains(fault), "{body}: {found}: {detail}");
    }
    assert_eq!(names(&daemon.get(PORTALS)), ["net", "nvme"]);
    assert_eq!(names(&daemon.get("/v1/exports")), ["v1"]);
}

#[test]
fn a_process_of_its_own_has_no_nbd_portal() {
    let (daemon, address) = daemon(&["--process-per-export"]);
    portal(&daemon, &address, &json!({}));
    let (status, _, detail) = daemon.refusal(Method::POST, "/v1/exports", &new_export("v1", "v1"));
    assert_eq!(status, 422);
    assert!(detail.contains("not possible with --process-per-export: portal=net"), "{detail}");
}

#[test]
fn keys_of_a_portal_are_read_again_and_choose_its_exports() {
    let (mut daemon, address) = daemon(&[]);
    let (keys, all) = (daemon.path("keys"), daemon.path("all"));
    let key = |name: &str, digit: &str| format!("{name}:{}\n", digit.repeat(32));
    let (alice, bob) = (key("alice", "a"), key("bob", "b"));
    secrets::write(&all, format!("{alice}{bob}")).unwrap();
    secrets::write(&keys, &alice).unwrap();
    portal(&daemon, &address, &json!({ "tls-psk": keys.to_str().unwrap() }));
    let mut export = new_export("v1", "v1");
    export["options"]["identities"] = json!("bob+carol");
    daemon.post("/v1/exports", &export);
    daemon.post("/v1/exports", &new_export("v2", "v2"));
    let can = |daemon: &Daemon, name: &str, disk: &str| {
        assert_eq!(daemon.get("/v1/portals/net")["error"], json!(null));
        open(&address, disk, &format!(",tls-psk={},tls-username={name}", all.display())).is_ok()
    };
    assert!(can(&daemon, "alice", "v2") && !can(&daemon, "alice", "v1") && !can(&daemon, "bob", "v1"));
    assert!(open(&address, "v2", "").is_err(), "TLS is required");
    secrets::write(&keys, format!("{alice}{bob}")).unwrap();
    let reload = |daemon: &Daemon, message: &'static str| {
        let before = daemon.logged(message).count();
        daemon.signal("-HUP");
        daemon.wait_for(message, || daemon.logged(message).count() > before);
        daemon.logged(message).last().unwrap()
    };
    let said = reload(&daemon, "new connections use the keys and certificates that its files hold now");
    assert_eq!((&said["kind"], &said["name"]), (&json!("portal"), &json!("net")));
    assert!(can(&daemon, "bob", "v1") && can(&daemon, "bob", "v2") && !can(&daemon, "alice", "v1"));
    std::fs::remove_file(&keys).unwrap();
    let said = reload(&daemon, "keys and certificates not reloaded: those in use stay");
    assert!(said["error"].as_str().unwrap().contains("/keys: No such file"), "{said}");
    daemon.wait_for("the problem", || daemon.get("/v1/health") != json!([]));
    let problem = daemon.get("/v1/health")[0].clone();
    assert_eq!(
        (&problem["code"], &problem["kind"], &problem["object"]),
        (&json!("keys-not-reloaded"), &json!("portal"), &json!("net"))
    );
    assert!(can(&daemon, "bob", "v1"));
    // A portal without its keys does not open until they exist.
    daemon.end("-TERM");
    daemon.start_without_waiting_for_ready();
    daemon
        .wait_for("the reason", || daemon.get("/v1/portals/net")["error"].to_string().contains("/keys: No"));
    secrets::write(&keys, &bob).unwrap();
    daemon.wait_for("the portal", || daemon.get("/v1/portals/net")["error"] == json!(null));
    daemon.wait_for("the exports", || daemon.get("/v1/exports/v1")["state"] == "active");
    assert!(can(&daemon, "bob", "v1") && !can(&daemon, "alice", "v2"));
}

#[test]
fn the_configuration_file_opens_portals_of_nbd() {
    let mut daemon = Daemon::prepare(&["--member-timeout", "1"]);
    let (disk, config) = (daemon.file("disk", 64 * MIB), daemon.path("config.toml"));
    let files = tempfile::tempdir().unwrap();
    write_all(files.path());
    let text = |kind: &str, options: &str| {
        format!(
            "[[device]]\nname = 'data'\nspec = '{disk}'\n\
             [[portal]]\nname = 'net'\nkind = '{kind}'\nlisten = ['127.0.0.1:0']\n{options}\n\
             [[export]]\nname = 'v1'\nkind = 'nbd'\nvolumes = ['data']\noptions = {{ portal = 'net' }}\n"
        )
    };
    // Outside of the directories that the sandbox keeps for later.
    let path = files.path().display();
    std::fs::write(&config, text("nbd", &format!("options = {{ tls-certificates = '{path}' }}"))).unwrap();
    daemon.args.extend(["--config".into(), config.display().to_string()]);
    daemon.start();
    let shown = daemon.get("/v1/portals/net");
    assert_eq!((&shown["kind"], &shown["exports"]), (&json!("nbd"), &json!(["v1"])));
    let address = shown["addresses"][0].as_str().unwrap();
    assert!(
        open(address, "v1", &format!(",tls-certificates={path}")).is_ok() && open(address, "v1", "").is_err()
    );
    std::fs::write(&config, text("nvme-tcp", "")).unwrap();
    daemon.restart("-TERM");
    assert_eq!(daemon.get("/v1/portals/net")["kind"], "nbd");
    assert!(daemon.log().contains("portal net: it is of kind nbd, not nvme-tcp"));
}
