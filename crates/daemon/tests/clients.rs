//! Clients that are connected to exports.

use crate::common::load::{BLOCK, Client};
use crate::common::{Daemon, MIB};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;

/// Blocks that a client reads.
const BLOCKS: u64 = 64;
const NQN: &str = "nqn.2014-08.org.example:disk";
const HOST: &str = "nqn.2014-08.org.example:one";
const SECRET: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

fn clients(daemon: &Daemon, export: &str) -> Vec<Value> {
    daemon.get(&format!("/v1/exports/{export}/clients")).as_array().unwrap().clone()
}

/// A daemon with a volume, and an NBD and an NVMe/TCP export of it.
fn daemon(args: &[&str]) -> (Daemon, String) {
    let daemon = Daemon::with(&[&["--member-timeout", "1"], args].concat());
    daemon.array();
    daemon.volume("v1", MIB);
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let listen = format!("127.0.0.1:{port}");
    daemon.post("/v1/exports", &json!({ "name": "e1", "kind": "nbd", "volumes": ["v1"] }));
    daemon.post(
        "/v1/exports",
        &json!({
            "name": "e2", "kind": "nvme-tcp", "volumes": ["v1"], "read_only": true,
            "options": { "listen": listen, "nqn": NQN },
        }),
    );
    (daemon, listen)
}

fn check(daemon: &Daemon, listen: &str) {
    assert_eq!((clients(daemon, "e1"), clients(daemon, "e2")), (vec![], vec![]));
    let nbd = Client::new(daemon);
    daemon
        .wait_for("the client", || clients(daemon, "e1").iter().any(|client| client["read_bytes"].is_u64()));
    let client = &clients(daemon, "e1")[0];
    assert!(
        client["since_ns"].as_u64().unwrap() > 0 && client["host"].is_null() && client["queues"].is_null()
    );
    assert_eq!((&client["is_secured"], &client["is_authenticated"]), (&json!(false), &json!(false)));

    let nvme = Client::open(&format!("nvme-tcp:address={listen},nqn={NQN},hostnqn={HOST},queues=1"));
    nvme.read(BLOCKS);
    // The queue that has read may be gone, and its bytes are counted.
    let metric =
        format!("freestone_nvme_host_read_bytes_total{{export=\"e2\",host=\"{HOST}\"}} {}", BLOCKS * BLOCK);
    daemon.wait_for("the bytes of the host", || daemon.metrics().lines().any(|line| line == metric));
    daemon.wait_for("the host", || clients(daemon, "e2").iter().any(|client| client["host"] == HOST));
    let host = clients(daemon, "e2")[0].clone();
    assert!(host["queues"].is_u64() && host["written_bytes"] == 0, "{host}");
    assert!(host["address"].as_str().unwrap().starts_with("127.0.0.1:") && host["controller"].is_u64());
    drop((nbd, nvme));
    daemon.wait_for("their end", || clients(daemon, "e1").is_empty() && clients(daemon, "e2").is_empty());
    assert!(daemon.metrics().lines().any(|line| line == metric), "the bytes stay");
}

#[test]
fn clients_of_an_export_are_listed_with_their_hosts_and_bytes() {
    let (daemon, listen) = daemon(&[]);
    check(&daemon, &listen);
    daemon.patch("/v1/exports/e2", &json!({ "hosts": { "add": [{ "nqn": HOST, "dhchap": SECRET }] } }));
    let secret = daemon.path("host-key");
    std::fs::write(&secret, SECRET).unwrap();
    std::fs::set_permissions(&secret, std::fs::Permissions::from_mode(0o600)).unwrap();
    let keys = format!("dhchap-key={}", secret.display());
    let _host = Client::open(&format!("nvme-tcp:address={listen},nqn={NQN},hostnqn={HOST},queues=1,{keys}"));
    let host = clients(&daemon, "e2")[0].clone();
    assert_eq!((&host["host"], &host["is_authenticated"]), (&json!(HOST), &json!(true)));
}

#[test]
fn clients_of_an_export_in_a_process_of_its_own_are_listed_too() {
    let (daemon, listen) = daemon(&["--process-per-export"]);
    check(&daemon, &listen);
}
