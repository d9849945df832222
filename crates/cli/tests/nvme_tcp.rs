//! The host and the target of NVMe/TCP, each in a process of its own.

use crate::common::{Server, freestone};
use drivers_nvme_tcp::{Nqn, TlsKey};
use secrets::keyring::testing::TestKeyring;
use std::net::TcpListener;
use std::process::Stdio;
use std::time::Duration;

const NQN: &str = "nqn.2014-08.org.example:killed";
const KILLS: usize = 2;
const HOST: &str = "nqn.2014-08.org.example:host";
const KEY: &str = "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
const OTHER: &str = "NVMeTLSkey-1:01:ICEiIyQlJicoKSorLC0uLzAxMjM0NTY3ODk6Ozw9Pj/jBqb2:";

#[test]
fn a_target_that_is_killed_under_load_loses_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let disk = dir.path().join("disk");
    std::fs::File::create(&disk).unwrap().set_len(16 << 20).unwrap();
    // No other process takes a port that was assigned a moment ago.
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let device = format!("io_uring:path={}", disk.display());
    let export = format!("nvme-tcp:listen={address},nqn={NQN}");
    let start = || Server::start(&["--device", &device, "--export", &export]).0;
    let mut server = start();
    let host = format!("nvme-tcp:address={address},nqn={NQN},hdgst=on,ddgst=on");
    let bench =
        ["bench", "--json", "--device", &host, "--rw", "randall", "--verify", "--qd", "16", "--time", "6"];
    let load = freestone().args(bench).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    for _ in 0..KILLS {
        std::thread::sleep(Duration::from_millis(1500));
        server.kill();
        std::thread::sleep(Duration::from_millis(300));
        server = start();
    }
    let output = load.wait_with_output().unwrap();
    let (said, complaints) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}\n{complaints}");
    // On a busy machine the load may end before the last kill.
    let losses = complaints.matches("connection lost: reconnecting").count();
    assert!((1..=KILLS).contains(&losses), "{complaints}");
    assert_eq!(server.stop().0, 0);
}

/// A file that only its owner may read.
fn secret_file(dir: &tempfile::TempDir, name: &str, text: &str) -> String {
    let path = dir.path().join(name);
    secrets::write(&path, text).unwrap();
    path.display().to_string()
}

/// Loads a device for a second. Returns whether all was well, and what was printed, in which none
/// of these secrets is.
fn verified_load(device: &str, secrets: &[&str]) -> (bool, String) {
    let args = ["bench", "--log", "trace", "--device", device, "--rw", "randall", "--verify", "--time", "1"];
    let output = freestone().args(args).output().unwrap();
    let said = [&output.stdout[..], &output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    assert!(!secrets.iter().any(|secret| said.contains(secret)), "{said}");
    (output.status.success(), said)
}

#[test]
fn host_and_target_prove_to_each_other_who_they_are() {
    const SECRET: &str = "DHHC-1:01:Rf8y5+e9Ojte9c9rSi2001pCK3PD9ldfyFwjgMZGmppOqurY:";
    const OF_TARGET: &str = "DHHC-1:00:UXd4h42Y65lhbGJjuMYxBibkg5fTSyqamwk98bpgfR7eJWVa:";
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| secret_file(&dir, name, text);
    let keys = file("keys", &format!("# ours\n{HOST} {SECRET} {OF_TARGET}\n"));
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let export = format!("nvme-tcp:listen={address},nqn={NQN},auth-keys={keys}");
    let (server, _) = Server::start(&["--device", "mem:size=4M", "--export", &export]);
    let bench = |more: &str| {
        let device = format!("nvme-tcp:address={address},nqn={NQN},hostnqn={HOST}{more}");
        verified_load(&device, &[&SECRET[10..], &OF_TARGET[10..]])
    };
    let (key, of_target) = (file("key", SECRET), file("of-target", &format!("{OF_TARGET}\n")));
    let both = format!(",dhchap-key={key},dhchap-ctrl-key={of_target}");
    let (is_good, said) = bench(&both);
    assert!(is_good && said.contains("verified"), "{said}");
    let wrong = [
        (String::new(), "no secret is configured (dhchap-key)"),
        (format!(",dhchap-key={of_target}"), "the target refuses the host: authentication failed"),
        (format!(",dhchap-ctrl-key={of_target}"), "requires a secret of the host"),
        (format!(",dhchap-key={keys}"), "/keys: a secret looks like DHHC-1:00:"),
        (",dhchap-key=/nowhere".into(), "dhchap-key: /nowhere: No such file"),
    ];
    for (more, why) in wrong {
        let (is_good, said) = bench(&more);
        assert!(!is_good && said.contains(why), "{said}");
    }
    assert_eq!(server.stop().0, 0);
}

#[test]
fn host_and_target_encrypt_what_they_say() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| secret_file(&dir, name, text);
    let (key, other) = (file("key", &format!("{KEY}\n")), file("other", OTHER));
    let keys = file("keys", &format!("{HOST} {KEY}\n"));
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let export = format!("nvme-tcp:listen={address},nqn={NQN},tls-keys={keys}");
    let (server, _) = Server::start(&["--device", "mem:size=4M", "--export", &export]);
    let bench = |more: &str| {
        let device = format!("nvme-tcp:address={address},nqn={NQN},hostnqn={HOST}{more}");
        verified_load(&device, &[&KEY[16..], &OTHER[16..]])
    };
    let (is_good, said) = bench(&format!(",tls-key={key}"));
    assert!(is_good && said.contains("verified"), "{said}");
    let wrong = [
        (String::new(), "the server closed it"),
        (format!(",tls-key={other}"), "the target does not accept the TLS key of this host (tls-key): "),
        (format!(",tls-key={keys}"), "/keys: a key looks like NVMeTLSkey-1:01:"),
        (",tls-key=/nowhere".into(), "tls-key: /nowhere: No such file"),
    ];
    for (more, why) in wrong {
        let (is_good, said) = bench(&more);
        assert!(!is_good && said.contains(why), "{said}");
    }
    let service = format!("nvme-tcp:address={address},hostnqn={HOST},tls-key={key}");
    let found = crate::common::run_json(&["discover", "--json", &service]);
    assert!(found.iter().any(|entry| entry["nqn"] == NQN), "{found:?}");
    assert_eq!(server.stop().0, 0);
}

/// A server in its sandbox reads its key again when the target has restarted with another one.
#[test]
fn a_key_that_has_changed_is_read_again_in_the_sandbox() {
    let dir = tempfile::tempdir().unwrap();
    let (key, keys) = (dir.path().join("key"), dir.path().join("keys"));
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let export = format!("nvme-tcp:listen={address},nqn={NQN},tls-keys={}", keys.display());
    let start = |text: &str| {
        secrets::write(&keys, format!("{HOST} {text}\n")).unwrap();
        Server::start(&["--device", "mem:size=4M", "--export", &export]).0
    };
    let target = start(KEY);
    secrets::write(&key, KEY).unwrap();
    let device = format!("nvme-tcp:address={address},nqn={NQN},hostnqn={HOST},tls-key={}", key.display());
    let socket = dir.path().join("nbd");
    let export = format!("nbd:socket={}", socket.display());
    let (server, _) = Server::start(&["--device", &device, "--export", &export]);
    target.kill();
    // Replaced as editors do, by a file of another inode.
    secrets::write(&dir.path().join("new"), OTHER).unwrap();
    std::fs::rename(dir.path().join("new"), &key).unwrap();
    let target = start(OTHER);
    let client = format!("nbd:path={}", socket.display());
    crate::common::run(&["bench", "--device", &client, "--rw", "randall", "--verify", "--time", "1"]);
    assert_eq!(server.stop().0, 0);
    assert_eq!(target.stop().0, 0);
}

/// Puts the key that HOST has for a subsystem into a keyring, as version 1 of the specification has
/// it.
fn insert(ring: &TestKeyring, key: &str, subsystem: &str) {
    let name = |text: &str| Nqn::new(text).unwrap();
    let secret = TlsKey::parse(key).unwrap().secrets(&name(HOST), &name(subsystem)).swap_remove(0);
    ring.add(&secret.identity, &secret.key);
}

/// Target and host look keys up while they are in their sandboxes.
#[test]
fn host_and_target_have_their_keys_in_keyrings() {
    let dir = tempfile::tempdir().unwrap();
    let (Some(keys), Some(of_host)) = (TestKeyring::new(), TestKeyring::new()) else { return };
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let export = format!("nvme-tcp:listen={address},nqn={NQN},tls-keyring={}", keys.name);
    let start = || Server::start(&["--device", "mem:size=4M", "--export", &export]).0;
    let target = start();
    let device =
        |keyring: &str| format!("nvme-tcp:address={address},nqn={NQN},hostnqn={HOST},tls-keyring={keyring}");
    let bench = |keyring: &str| verified_load(&device(keyring), &[&KEY[16..], &OTHER[16..]]);
    let wrong = |keyring: &str, why: &str| {
        let (is_good, said) = bench(keyring);
        assert!(!is_good && said.contains(why), "{said}");
    };
    wrong(&of_host.name, &format!("no TLS key of the host {HOST} for the subsystem {NQN}"));
    wrong("freestone-none", "tls-keyring: keyring freestone-none: no keyring of root or of this user");
    wrong("@x", "tls-keyring: keyring \"@x\": want the name or the serial number");
    wrong(&format!("{},tls-key=/nowhere", of_host.name), "tls-key and tls-keyring: want one of them");
    insert(&of_host, KEY, NQN);
    wrong(&of_host.name, "the target does not accept the TLS key of this host (tls-keyring): ");
    insert(&keys, KEY, NQN);
    let (is_good, said) = bench(&of_host.serial.to_string());
    assert!(is_good && said.contains("verified"), "{said}");
    for ring in [&keys, &of_host] {
        insert(ring, OTHER, "nqn.2014-08.org.nvmexpress.discovery");
    }
    let service = format!("nvme-tcp:address={address},hostnqn={HOST},tls-keyring={}", of_host.name);
    let found = crate::common::run_json(&["discover", "--json", &service]);
    assert!(found.iter().any(|entry| entry["nqn"] == NQN), "{found:?}");
    // A key that has changed while the target is away.
    let socket = dir.path().join("nbd");
    let nbd = format!("nbd:socket={}", socket.display());
    let (server, _) = Server::start(&["--device", &device(&of_host.name), "--export", &nbd]);
    target.kill();
    for ring in [&keys, &of_host] {
        ring.clear();
        insert(ring, OTHER, NQN);
    }
    let target = start();
    let client = format!("nbd:path={}", socket.display());
    crate::common::run(&["bench", "--device", &client, "--rw", "randall", "--verify", "--time", "1"]);
    assert_eq!(server.stop().0, 0);
    assert_eq!(target.stop().0, 0);
}

#[test]
fn a_target_is_asked_what_there_is() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let export = format!("nvme-tcp:listen={address},nqn={NQN},hosts=nqn.2014-08.org.example:host");
    let (server, _) = Server::start(&["--device", "mem:size=4M", "--export", &export]);
    let ask = |host: &str| {
        let service = format!("nvme-tcp:address={address},hostnqn=nqn.2014-08.org.example:{host},ddgst=on");
        let entries = crate::common::run_json(&["discover", "--json", &service]);
        entries.iter().map(|entry| entry["nqn"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let discovery = "nqn.2014-08.org.nvmexpress.discovery";
    assert_eq!(ask("host"), [discovery, NQN]);
    assert_eq!(ask("stranger"), [discovery]);
    let service = format!("nvme-tcp:address={address},hostnqn=nqn.2014-08.org.example:host");
    let said = String::from_utf8(crate::common::run(&["discover", &service]).stdout).unwrap();
    let lines: Vec<Vec<&str>> = said.lines().map(|line| line.split_whitespace().collect()).collect();
    let address = address.to_string();
    assert_eq!(lines, [["discovery", "tcp", &address, discovery], ["nvm", "tcp", &address, NQN]]);
    assert_eq!(server.stop().0, 0);
    let (said, code) = crate::common::failure(&["discover", &service]);
    assert!(code == 1 && said.contains(&format!("{address}: ")) && said.contains("refused"), "{said}");
    let (said, code) = crate::common::failure(&["discover", "nvme-tcp:nqn=x"]);
    assert!(code == 2 && said.contains("discovery service nvme-tcp:nqn=x"), "{said}");
}

#[test]
fn exports_with_the_same_address_share_a_listener_that_lists_them() {
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (one, other) = (format!("{NQN}-a"), format!("{NQN}-b"));
    let export = |nqn: &str, device: &str| format!("nvme-tcp:listen={address},nqn={nqn},device={device}");
    let (a, b) = (export(&one, "a"), export(&other, "b"));
    let devices = ["--device", "mem:size=4M,id=a", "--device", "mem:size=8M,id=b"];
    let exports = ["--export", &*a, "--export", &*b];
    let (server, ready) = Server::start(&[&devices[..], &exports[..]].concat());
    let listens: Vec<_> =
        ready["exports"].as_array().unwrap().iter().map(|export| &export["listen"][0]["address"]).collect();
    assert_eq!(listens, [&address.to_string(), &address.to_string()]);
    let run = |args: &[&str]| {
        let output = freestone().args(args).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let found = run(&["discover", &format!("nvme-tcp:address={address}")]);
    assert!(found.contains(&one) && found.contains(&other), "{found}");
    for (nqn, size) in [(&one, 4 << 20), (&other, 8 << 20)] {
        let info = run(&["info", "--json", "--device", &format!("nvme-tcp:address={address},nqn={nqn}")]);
        assert!(info.contains(&format!("\"capacity\":{size}")), "{info}");
    }
    assert_eq!(server.stop().0, 0);
}
