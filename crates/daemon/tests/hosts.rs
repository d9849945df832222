//! Hosts of an NVMe/TCP export, which the API adds and removes while it serves.

use crate::common::{Daemon, MIB};
use block::{Device, Flags, Op};
use reqwest::Method;
use serde_json::{Value, json};
use stack::kinds::member::member;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const NQN: &str = "nqn.2014-08.org.example:disk";
const ONE: &str = "nqn.2014-08.org.example:one";
const TWO: &str = "nqn.2014-08.org.example:two";
// nvme gen-dhchap-key -n nqn.2014-08.org.example:one -m 0, and two others.
const SECRET: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
const OF_TARGET: &str = "DHHC-1:00:UXd4h42Y65lhbGJjuMYxBibkg5fTSyqamwk98bpgfR7eJWVa:";
const PSK: &str = "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
const EXPORT: &str = "/v1/exports/e1";

/// A daemon with an export of a volume, and these options of it.
fn daemon(args: &[&str], options: &[(&str, &str)]) -> Daemon {
    let daemon = Daemon::with(&[&["--member-timeout", "1", "--json", "--log", "debug"], args].concat());
    let disk = daemon.file("disk", 64 * MIB);
    daemon.post("/v1/devices", &json!({ "name": "data", "spec": disk }));
    daemon.volume("v1", MIB);
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let mut all = json!({ "listen": format!("127.0.0.1:{port}"), "nqn": NQN });
    options.iter().for_each(|(key, value)| all[*key] = json!(value));
    daemon
        .post("/v1/exports", &json!({ "name": "e1", "kind": "nvme-tcp", "volumes": ["v1"], "options": all }));
    daemon
}

/// The specification of the disk for a host, which gives up as soon as its connection is lost.
fn spec(daemon: &Daemon, host: &str) -> String {
    let listen = daemon.get(EXPORT)["options"]["listen"].as_str().unwrap().to_owned();
    format!("nvme-tcp:address={listen},nqn={NQN},hostnqn={host},queues=1,ctrl-loss-tmo=0")
}

fn open(spec: &str) -> Option<Arc<dyn Device>> {
    member(spec, false, false).unwrap().open().ok()
}

fn can_connect(daemon: &Daemon, host: &str) -> bool {
    open(&spec(daemon, host)).is_some()
}

fn change(daemon: &Daemon, change: &Value) -> Value {
    daemon.patch(EXPORT, &json!({ "hosts": change }))["hosts"].clone()
}

fn add(daemon: &Daemon, hosts: &[&str]) -> Value {
    let hosts: Vec<Value> = hosts.iter().map(|nqn| json!({ "nqn": nqn })).collect();
    change(daemon, &json!({ "add": hosts }))
}

#[track_caller]
fn refused(daemon: &Daemon, change: &Value) -> (u16, String) {
    let (status, _, detail) = daemon.refusal(Method::PATCH, EXPORT, &json!({ "hosts": change }));
    assert!(!detail.contains("AAEC") && !detail.contains("UXd4"), "{detail}");
    (status, detail)
}

/// Nothing that the daemon says has a secret.
fn check_silence(daemon: &Daemon) {
    let state = fs::read_to_string(daemon.path("state/state.json")).unwrap();
    for (place, text) in [
        ("the log", daemon.log()),
        ("events", daemon.get("/v1/events").to_string()),
        ("exports", daemon.get("/v1/exports").to_string()),
        ("state.json", state),
    ] {
        assert!(!text.contains("AAEC") && !text.contains("UXd4"), "{place}: {text}");
    }
}

#[test]
fn hosts_come_and_go_while_an_export_serves_and_a_kill_changes_nothing() {
    for args in [&[][..], &["--process-per-export"]] {
        let mut daemon = daemon(args, &[("hosts", "none")]);
        assert_eq!(daemon.get(EXPORT)["hosts"], json!([]));
        assert!(!can_connect(&daemon, ONE), "no host is listed");
        assert_eq!(add(&daemon, &[ONE, TWO]), json!([ONE, TWO]));
        assert!(can_connect(&daemon, ONE) && can_connect(&daemon, TWO));
        assert_eq!(change(&daemon, &json!({ "remove": [ONE] })), json!([TWO]));
        for signal in ["-KILL", "-TERM"] {
            assert!(!can_connect(&daemon, ONE) && can_connect(&daemon, TWO), "{signal}");
            assert_eq!(daemon.get(EXPORT)["hosts"], json!([TWO]));
            daemon.restart(signal);
            daemon.wait_for("the export", || daemon.get(EXPORT)["state"] == "active");
        }
        // A change may be made again: the answer to the first may have been lost.
        assert_eq!(change(&daemon, &json!({ "remove": [ONE] })), json!([TWO]));
        assert_eq!(change(&daemon, &json!({ "remove": [TWO] })), json!([]), "no host, rather than any");
        assert!(!can_connect(&daemon, TWO));
        daemon.restart("-KILL");
        daemon.wait_for("the export", || daemon.get(EXPORT)["state"] == "active");
        assert!(!can_connect(&daemon, TWO));
        assert_eq!(add(&daemon, &[TWO]), json!([TWO]));
        assert!(can_connect(&daemon, TWO));
        let events = daemon.get("/v1/events").to_string();
        assert!(events.contains(&format!("hosts added: {TWO}")), "{events}");
    }
}

#[test]
fn secrets_are_kept_and_required_and_never_shown() {
    for args in [&[][..], &["--process-per-export"]] {
        let mut daemon = daemon(args, &[("hosts", "none")]);
        let one = json!({ "nqn": ONE, "dhchap": SECRET });
        assert_eq!(change(&daemon, &json!({ "add": [one, { "nqn": TWO }] })), json!([ONE, TWO]));
        let key = |name: &str, text: &str| {
            secrets::write(&daemon.path(name), format!("{text}\n")).unwrap();
            daemon.path(name).display().to_string()
        };
        let (of_host, of_target) = (key("host-key", SECRET), key("target-key", OF_TARGET));
        let with_key = |daemon: &Daemon| format!("{},dhchap-key={of_host}", spec(daemon, ONE));
        assert!(!can_connect(&daemon, ONE), "it must authenticate");
        assert!(can_connect(&daemon, TWO) && open(&with_key(&daemon)).is_some());
        // A secret that comes later leaves the first one.
        let both = |daemon: &Daemon| format!("{},dhchap-ctrl-key={of_target}", with_key(daemon));
        assert!(open(&both(&daemon)).is_none());
        change(&daemon, &json!({ "add": [{ "nqn": ONE, "dhchap": SECRET, "dhchap_ctrl": OF_TARGET }] }));
        change(&daemon, &json!({ "add": [{ "nqn": ONE }] }));
        let path = daemon.path("state/host-secrets/e1.json");
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        for signal in ["-KILL", "-TERM"] {
            assert!(open(&both(&daemon)).is_some() && !can_connect(&daemon, ONE), "{signal}");
            daemon.restart(signal);
            daemon.wait_for("the export", || daemon.get(EXPORT)["state"] == "active");
        }
        check_silence(&daemon);
        // A removed host leaves no secret behind.
        change(&daemon, &json!({ "remove": [ONE] }));
        assert!(!path.exists() && open(&both(&daemon)).is_none());
        add(&daemon, &[ONE]);
        assert!(can_connect(&daemon, ONE));
        // A key for TLS keeps out the host that comes without it.
        change(&daemon, &json!({ "add": [{ "nqn": ONE, "tls_psk": PSK }] }));
        assert!(!can_connect(&daemon, ONE) && can_connect(&daemon, TWO) && path.exists());
        check_silence(&daemon);
        daemon.delete(EXPORT);
        assert!(!path.exists());
    }
}

#[test]
fn an_export_that_any_host_may_use_is_closed_by_its_first_host_and_never_opened() {
    let daemon = daemon(&[], &[]);
    assert_eq!(daemon.get(EXPORT)["hosts"], Value::Null);
    let (status, detail) = refused(&daemon, &json!({ "remove": [ONE] }));
    assert!(status == 409 && detail.starts_with("export e1: any host may connect, so none can"), "{detail}");
    assert!(can_connect(&daemon, ONE));
    assert_eq!(add(&daemon, &[TWO]), json!([TWO]));
    assert!(can_connect(&daemon, TWO) && !can_connect(&daemon, ONE));
    assert_eq!(change(&daemon, &json!({ "remove": [TWO] })), json!([]));
    assert!(!can_connect(&daemon, TWO) && !can_connect(&daemon, ONE));
}

#[test]
fn a_state_that_is_damaged_brings_no_removed_host_back() {
    let mut daemon = daemon(&[], &[]);
    let damage_and_restart = |daemon: &mut Daemon| {
        daemon.end("-KILL");
        fs::write(daemon.path("state/state.json"), "{").unwrap();
        daemon.start();
        daemon.wait_for("the export", || daemon.get(EXPORT)["state"] == "active");
    };
    // Any host could connect before.
    change(&daemon, &json!({ "add": [{ "nqn": ONE, "dhchap": SECRET }, { "nqn": TWO }] }));
    damage_and_restart(&mut daemon);
    assert_eq!(daemon.get(EXPORT)["hosts"], json!([ONE, TWO]));
    change(&daemon, &json!({ "remove": [ONE] }));
    damage_and_restart(&mut daemon);
    assert!(!can_connect(&daemon, ONE) && can_connect(&daemon, TWO));
    assert_eq!(daemon.get(EXPORT)["hosts"], json!([TWO]));
}

#[test]
fn a_host_whose_secrets_are_lost_keeps_the_export_closed_until_it_is_added_again() {
    let mut daemon = daemon(&[], &[("hosts", "none")]);
    let hosts = [json!({ "nqn": ONE, "dhchap": SECRET }), json!({ "nqn": TWO, "dhchap": OF_TARGET })];
    change(&daemon, &json!({ "add": hosts }));
    daemon.end("-TERM");
    fs::remove_file(daemon.path("state/host-secrets/e1.json")).unwrap();
    daemon.start();
    let error = daemon.get(EXPORT)["error"].as_str().unwrap().to_owned();
    assert!(error.contains(&format!("e1.json: the secrets of host {ONE} are missing")), "{error}");
    // It is not served, and its hosts change all the same.
    change(&daemon, &json!({ "add": [hosts[0]], "remove": [TWO] }));
    daemon.wait_for("the export", || daemon.get(EXPORT)["state"] == "active");
    assert!(!can_connect(&daemon, ONE), "it must authenticate");
    assert_eq!(daemon.get(EXPORT)["hosts"], json!([ONE]));
}

#[test]
fn a_change_that_is_refused_names_the_host_and_changes_nothing() {
    let daemon = daemon(&[], &[("hosts", ONE)]);
    let before = fs::read(daemon.path("state/state.json")).unwrap();
    for (change, fault) in [
        (json!({ "add": [{ "nqn": "host" }] }), "export e1: host \"host\": an NVMe name"),
        (json!({ "add": [{ "nqn": "nqn.a+b" }] }), "host \"nqn.a+b\": a listed name has no plus sign"),
        (json!({ "add": [{ "nqn": TWO }], "remove": [TWO] }), "two: it is both added and removed"),
        (json!({ "add": [{ "nqn": TWO }, { "nqn": TWO }] }), "a host is added twice"),
        (json!({ "add": [{ "nqn": TWO, "dhchap": PSK }] }), "two: the host's secret: a secret looks like"),
        (json!({ "add": [{ "nqn": TWO, "dhchap_ctrl": SECRET }] }), "takes a secret of the host (dhchap)"),
        (json!({ "add": [{ "nqn": TWO, "tls_psk": SECRET }] }), "two: the TLS key: a key looks like"),
    ] {
        let (status, detail) = refused(&daemon, &change);
        assert!(status == 422 && detail.contains(fault), "{change}: {status} {detail}");
    }
    assert_eq!(fs::read(daemon.path("state/state.json")).unwrap(), before);
    assert!(!daemon.path("state/host-secrets").exists());
    check_silence(&daemon);
    daemon.post("/v1/exports", &json!({ "name": "e2", "kind": "nbd", "volumes": ["v1"] }));
    let body = json!({ "hosts": { "add": [{ "nqn": ONE }] } });
    let (status, _, detail) = daemon.refusal(Method::PATCH, "/v1/exports/e2", &body);
    assert_eq!((status, &*detail), (422, "export e2: exports of kind nbd have no list of hosts"));
}

#[test]
fn an_export_that_requires_a_secret_takes_no_host_without_one() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    secrets::write(&keys, format!("{ONE} {SECRET}\n")).unwrap();
    let sandbox = ["--sandbox-path", folder.path().to_str().unwrap()];
    let daemon = daemon(&sandbox, &[("hosts", ONE), ("auth-keys", keys.to_str().unwrap())]);
    let (status, detail) = refused(&daemon, &json!({ "add": [{ "nqn": TWO }] }));
    let fault = format!("export e1: host {TWO}: authentication is required, and the host has no secret");
    assert_eq!((status, detail), (422, fault));
    // The file is not read again, so its loss keeps no host from being removed.
    fs::remove_file(&keys).unwrap();
    change(&daemon, &json!({ "add": [{ "nqn": TWO, "dhchap": OF_TARGET }] }));
    let with = |host: &str, text: &str| {
        let path = daemon.path("one-key");
        secrets::write(&path, format!("{text}\n")).unwrap();
        open(&format!("{},dhchap-key={}", spec(&daemon, host), path.display())).is_some()
    };
    assert!(with(ONE, SECRET) && with(TWO, OF_TARGET) && !with(TWO, SECRET));
    assert_eq!(change(&daemon, &json!({ "remove": [ONE] })), json!([TWO]));
    assert!(!with(ONE, SECRET) && with(TWO, OF_TARGET));
}

/// Writes growing numbers to the block at `offset` until a write fails or `stop` is set. Returns
/// whether all succeeded.
fn write(device: Arc<dyn Device>, offset: u64, last: Arc<AtomicU64>, stop: Arc<AtomicBool>) -> bool {
    reactor::run(async move {
        let channel = device.open_channel().unwrap();
        let mut buffer = reactor::current().buffers().take(4096).await;
        let mut number = 1u64;
        while !stop.load(Ordering::Relaxed) {
            buffer.as_mut_slice()[..8].copy_from_slice(&number.to_le_bytes());
            let (back, written) = buffer.transfer(&*channel, Op::Write, Flags::NONE, offset).await;
            buffer = back;
            if written.is_err() {
                return false;
            }
            last.store(number, Ordering::SeqCst);
            number += 1;
        }
        true
    })
}

#[test]
fn a_removed_host_that_writes_changes_nothing_after_the_answer_and_others_write_on() {
    let daemon = daemon(&[], &[("hosts", "none")]);
    add(&daemon, &[ONE, TWO]);
    let (stop, never) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
    let (steady, other) = (Arc::<AtomicU64>::default(), open(&spec(&daemon, TWO)).unwrap());
    let writer = {
        let (steady, stop) = (steady.clone(), stop.clone());
        std::thread::spawn(move || write(other, 4096, steady, stop))
    };
    let reader = open(&spec(&daemon, TWO)).unwrap();
    let stored = || {
        let device = reader.clone();
        reactor::run(async move {
            let channel = device.open_channel().unwrap();
            let buffer = reactor::current().buffers().take(4096).await;
            let (buffer, read) = buffer.transfer(&*channel, Op::Read, Flags::NONE, 0).await;
            read.unwrap();
            u64::from_le_bytes(buffer.as_slice()[..8].try_into().unwrap())
        })
    };
    for _ in 0..5 {
        let (last, device) = (Arc::<AtomicU64>::default(), open(&spec(&daemon, ONE)).unwrap());
        let removed = {
            let (last, never) = (last.clone(), never.clone());
            std::thread::spawn(move || write(device, 0, last, never))
        };
        daemon.wait_for("a write", || last.load(Ordering::SeqCst) > 3);
        change(&daemon, &json!({ "remove": [ONE] }));
        let at_return = stored();
        assert!(!removed.join().unwrap());
        let before = steady.load(Ordering::SeqCst);
        daemon.wait_for("writes of the other", || steady.load(Ordering::SeqCst) > before + 3);
        assert_eq!(stored(), at_return);
        assert!(last.load(Ordering::SeqCst) <= at_return);
        add(&daemon, &[ONE]);
    }
    stop.store(true, Ordering::Relaxed);
    assert!(writer.join().unwrap(), "the other host saw no error");
}
