//! Keys and certificates of exports, which the daemon reads again at SIGHUP.

use crate::common::{Daemon, block};
use block::{Device, Op};
use reqwest::Method;
use secrets::keyring::testing::TestKeyring;
use serde_json::{Value, json};
use stack::kinds::member::member;
use std::fs;
use std::net::TcpListener;
use std::path::Path;
use std::sync::Arc;
use tempfile::TempDir;
use tls::authority::write_all;

const NQN: &str = "nqn.2014-08.org.example:disk";
const SECRET: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
const KEPT: &str = "keys and certificates not reloaded: those in use stay";

/// An address whose port is free.
fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

/// A daemon with an export of a small disk. Its keys are outside of the directories that the
/// sandbox keeps for later: the configuration file names them.
fn daemon(args: &[&str], kind: &str, options: &str) -> Daemon {
    let mut daemon = Daemon::prepare(&[&["--member-timeout", "1", "--json"], args].concat());
    let config = daemon.path("config.toml");
    let text = format!(
        "[[device]]\nname = 'disk'\nspec = 'mem:size=64M'\n\
         [[export]]\nname = 'e'\nkind = '{kind}'\nvolumes = ['disk']\noptions = {{ {options} }}\n"
    );
    fs::write(&config, text).unwrap();
    daemon.args.extend(["--config".into(), config.display().to_string()]);
    daemon.start();
    daemon
}

/// An address as clients of NBD take it.
fn place(address: &str) -> String {
    address.replace("127.0.0.1:", "host=127.0.0.1,port=")
}

fn open(spec: &str) -> Option<Arc<dyn Device>> {
    member(spec, false, false).unwrap().open().ok()
}

/// Puts a file in the place of another, as tools that renew certificates do.
fn replace(path: &Path, content: impl AsRef<[u8]>) {
    let new = path.with_extension("new");
    secrets::write(&new, content).unwrap();
    fs::rename(new, path).unwrap();
}

fn reload(daemon: &Daemon) {
    let keys = |event: &Value| event["what"] == "keys-reloaded";
    let count = || daemon.logged("new connections use the keys and certificates that its files hold now");
    let before = count().count();
    daemon.signal("-HUP");
    daemon.wait_for("the event", || count().count() > before);
    assert!(count().all(|line| keys(&line)));
    assert_eq!(daemon.get("/v1/health"), json!([]));
}

/// Has the daemon read a file that it refuses, and returns its reason.
fn fail_to_reload(daemon: &Daemon) -> String {
    let before = daemon.logged(KEPT).count();
    daemon.signal("-HUP");
    daemon.wait_for("the refusal", || daemon.logged(KEPT).count() > before);
    let said = daemon.logged(KEPT).last().unwrap();
    assert_eq!((&said["level"], &said["name"]), (&json!("ERROR"), &json!("e")));
    daemon.wait_for("the problem", || daemon.get("/v1/health") != json!([]));
    let problem = daemon.get("/v1/health")[0].clone();
    assert_eq!(
        (&problem["code"], &problem["severity"], &problem["object"]),
        (&json!("keys-not-reloaded"), &json!("warning"), &json!("e"))
    );
    let error = said["error"].as_str().unwrap().to_owned();
    assert!(problem["text"].as_str().unwrap().contains(&error), "{problem}");
    error
}

fn connections(daemon: &Daemon) -> Value {
    daemon.get("/v1/exports/e")["traffic"]["connections"].clone()
}

fn a_rotated_authority_counts_for_new_connections(args: &[&str]) {
    let (files, address) = (tempfile::tempdir().unwrap(), free_address());
    write_all(files.path());
    let path = files.path().display();
    let options = format!("listen = '{address}', tls-certificates = '{path}', tls-verify-peer = 'on'");
    let daemon = daemon(args, "nbd", &options);
    // Clients have copies of their files.
    let copy = || {
        let copy = tempfile::tempdir().unwrap();
        for entry in fs::read_dir(files.path()).unwrap().flatten() {
            fs::copy(entry.path(), copy.path().join(entry.file_name())).unwrap();
        }
        copy
    };
    let spec = |files: &TempDir| {
        format!("nbd:{},export=e,tls-certificates={},connections=1", place(&address), files.path().display())
    };
    let first = copy();
    // Its first channel gets the connection that it has now.
    let client = open(&spec(&first)).unwrap();

    let key = fs::read(files.path().join("server-key.pem")).unwrap();
    replace(&files.path().join("server-key.pem"), "no key");
    let said = fail_to_reload(&daemon);
    assert!(said.contains("server-key.pem: no PEM private key"), "{said}");
    assert!(open(&spec(&first)).is_some(), "the certificates in use stay");
    replace(&files.path().join("server-key.pem"), key);
    fs::remove_file(files.path().join("ca-cert.pem")).unwrap();
    let said = fail_to_reload(&daemon);
    assert!(said.contains("ca-cert.pem: No such file"), "{said}");
    assert!(open(&spec(&first)).is_some(), "the authority in use stays");

    write_all(files.path());
    let second = copy();
    assert!(open(&spec(&second)).is_none());
    // The counters of another process come late: those of the client and of two that were let in.
    let are_all = || connections(&daemon) == 3;
    daemon.wait_for("the counters", are_all);
    reload(&daemon);
    assert!(open(&spec(&first)).is_none(), "its authority counts no more");
    block(&client, Op::Read, 0).unwrap();
    daemon.wait_for("the counters", are_all);
    block(&open(&spec(&second)).unwrap(), Op::Read, 0).unwrap();
}

#[test]
fn a_new_authority_and_certificate_are_used_for_new_connections() {
    a_rotated_authority_counts_for_new_connections(&[]);
}

#[test]
fn a_process_of_its_own_gets_new_certificates_and_keeps_its_connections() {
    a_rotated_authority_counts_for_new_connections(&["--process-per-export"]);
}

#[test]
fn clients_get_and_lose_their_keys_in_a_file_that_is_replaced() {
    let (files, address) = (tempfile::tempdir().unwrap(), free_address());
    let (keys, all) = (files.path().join("keys"), files.path().join("all"));
    let key = |name: &str, digit: &str| format!("{name}:{}\n", digit.repeat(32));
    secrets::write(&keys, key("alice", "a")).unwrap();
    secrets::write(&all, key("alice", "a") + &key("bob", "b")).unwrap();
    let daemon = daemon(&[], "nbd", &format!("listen = '{address}', tls-psk = '{}'", keys.display()));
    let spec = |name: &str| {
        let all = all.display();
        format!("nbd:{},export=e,tls-psk={all},tls-username={name},connections=1", place(&address))
    };
    // Its first channel gets the connection that it has now.
    let alice = open(&spec("alice")).unwrap();
    assert!(open(&spec("bob")).is_none());
    replace(&keys, key("bob", "b"));
    reload(&daemon);
    assert!(open(&spec("alice")).is_none() && open(&spec("bob")).is_some());
    block(&alice, Op::Read, 0).unwrap();
    replace(&keys, "bob:5e5e");
    let said = fail_to_reload(&daemon);
    assert!(said.contains("/keys: line 1: a key of 2 bytes") && !said.contains("5e5e"), "{said}");
    assert!(open(&spec("bob")).is_some());
}

fn hosts_get_and_lose_their_secrets(args: &[&str]) {
    let (files, address) = (tempfile::tempdir().unwrap(), free_address());
    let (keys, secret) = (files.path().join("keys"), files.path().join("secret"));
    let host = |name: &str| format!("nqn.2014-08.org.example:{name}");
    let line = |name: &str| format!("{} {SECRET}\n", host(name));
    secrets::write(&secret, SECRET).unwrap();
    secrets::write(&keys, line("one") + &line("two")).unwrap();
    let options = format!("listen = '{address}', nqn = '{NQN}', auth-keys = '{}'", keys.display());
    let daemon = daemon(args, "nvme-tcp", &options);
    let spec = |name: &str| {
        let (host, secret) = (host(name), secret.display());
        format!(
            "nvme-tcp:address={address},nqn={NQN},hostnqn={host},queues=1,ctrl-loss-tmo=0,dhchap-key={secret}"
        )
    };
    let [one, two] = ["one", "two"].map(|name| open(&spec(name)).unwrap());
    assert!(open(&spec("three")).is_none());
    let before = connections(&daemon);
    replace(&keys, line("two") + &line("three"));
    reload(&daemon);
    // As a host that the API removes.
    assert!(block(&one, Op::Read, 0).is_err() && open(&spec("one")).is_none());
    block(&two, Op::Read, 0).unwrap();
    daemon.wait_for("the counters", || connections(&daemon).as_u64() >= before.as_u64());
    assert!(open(&spec("three")).is_some());
    replace(&keys, "nonsense");
    let said = fail_to_reload(&daemon);
    assert!(said.contains("/keys") && !said.contains("nonsense"), "{said}");
    block(&two, Op::Read, 0).unwrap();
}

#[test]
fn hosts_get_and_lose_their_secrets_in_a_file() {
    hosts_get_and_lose_their_secrets(&[]);
}

#[test]
fn hosts_of_a_process_of_its_own_get_and_lose_their_secrets() {
    hosts_get_and_lose_their_secrets(&["--process-per-export"]);
}

/// The daemon, or the process of the export, looks keys up in its sandbox.
#[test]
fn hosts_have_their_keys_in_a_keyring() {
    const HOST: &str = "nqn.2014-08.org.example:host";
    let identity = format!("NVMe0R01 {HOST} {NQN}");
    for args in [&[][..], &["--process-per-export"]] {
        let (Some(ring), Some(of_host)) = (TestKeyring::new(), TestKeyring::new()) else { return };
        of_host.add(&identity, &[7; 32]);
        let address = free_address();
        let options = format!("listen = '{address}', nqn = '{NQN}', tls-keyring = '{}'", ring.name);
        let mut daemon = daemon(args, "nvme-tcp", &options);
        let spec = format!(
            "nvme-tcp:address={address},nqn={NQN},hostnqn={HOST},queues=1,tls-keyring={}",
            of_host.name
        );
        assert!(open(&spec).is_none(), "there is no key yet");
        ring.add(&identity, &[7; 32]);
        assert!(open(&spec).is_some());
        daemon.restart("-TERM");
        daemon.wait_for("the export", || daemon.get("/v1/exports/e")["state"] == "active");
        assert!(open(&spec).is_some());
        ring.remove(&identity);
        assert!(open(&spec).is_none());
        // The sandbox serves an option that comes later.
        let later = json!({ "listen": free_address(), "nqn": NQN, "tls-keyring": "freestone-none" });
        let new = json!({ "name": "later", "kind": "nvme-tcp", "volumes": ["disk"], "options": later });
        let (status, _, detail) = daemon.refusal(Method::POST, "/v1/exports", &new);
        assert!(status == 422 && detail.contains("keyring freestone-none: no keyring of root"), "{detail}");
    }
}
