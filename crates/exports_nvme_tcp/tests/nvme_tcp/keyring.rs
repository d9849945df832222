//! Keys of TLS in keyrings of the kernel, on both sides.

use crate::host::HOST;
use crate::portal::Site;
use crate::server::{MIB, SUBSYSTEM, Server};
use crate::tls::{
    FIRST, OTHER, SECOND, behind_tls, connect, key, longer_key, name, options, other_key, refusal,
    through_tls, through_tls_with, tls_fails, with_key,
};
use block::Device;
use drivers_nvme_tcp::{NvmeTcpDevice, Options};
use exports_nvme_tcp::{Access, Config, Keyring, Security, TlsKeys};
use nvme::Status;
use nvme::fabrics::nqn;
use nvme_auth::TlsSecret;
use secrets::keyring::testing::TestKeyring;
use std::sync::Arc;
use std::sync::atomic::Ordering;

fn named(ring: &TestKeyring) -> Keyring {
    Keyring::new(&ring.name).unwrap()
}

/// The key that HOST has for SUBSYSTEM, derived in the way with this number.
fn secret(key: &nvme_auth::TlsKey, way: usize) -> TlsSecret {
    key.secrets(&name(HOST), &name(SUBSYSTEM)).swap_remove(way)
}

fn add(ring: &TestKeyring, secret: &TlsSecret) {
    ring.add(&secret.identity, &secret.key);
}

/// The options of our initiator, as HOST with the keys of a keyring.
fn with_keyring(address: &str, ring: &TestKeyring) -> Options {
    Options { tls_key: None, tls_keyring: Some(named(ring)), ..options(address, key()) }
}

/// Access with the keys of a keyring.
fn access(ring: &TestKeyring, is_required: bool) -> Access {
    let keys = Arc::new(TlsKeys::of_keyring(named(ring)).unwrap());
    Access { tls: Some(Security { keys, is_required }), ..Access::default() }
}

/// Keys of both hashes, and the ways in which they are derived.
fn all_ways() -> impl Iterator<Item = (nvme_auth::TlsKey, usize)> {
    [key(), longer_key()].into_iter().flat_map(|key| (0..4).map(move |way| (key.clone(), way)))
}

#[test]
fn our_host_has_its_keys_in_a_keyring_whatever_their_version_and_hash() {
    let server = Server::start(8 * MIB);
    for (key, way) in all_ways() {
        let Some(ring) = TestKeyring::new() else { return };
        add(&ring, &secret(&key, way));
        let (address, connections) = behind_tls(server.address(), &key, way);
        let device = NvmeTcpDevice::open(&with_keyring(&address, &ring)).unwrap();
        assert_eq!(device.limits().capacity, 8 * MIB);
        assert_eq!(connections.load(Ordering::SeqCst), 1, "there is one key");
    }
}

#[test]
fn our_host_tries_later_versions_and_longer_hashes_first() {
    let server = Server::start(8 * MIB);
    let Some(ring) = TestKeyring::new() else { return };
    // Version 1 with SHA-384 and SHA-256, then version 0 with both.
    let order = [(longer_key(), 0), (key(), 0), (longer_key(), 2), (key(), 2)];
    order.iter().rev().for_each(|(key, way)| add(&ring, &secret(key, *way)));
    for (before, (key, way)) in order.iter().enumerate() {
        let (address, connections) = behind_tls(server.address(), key, *way);
        NvmeTcpDevice::open(&with_keyring(&address, &ring)).unwrap();
        assert_eq!(connections.load(Ordering::SeqCst), before + 1);
    }
}

#[test]
fn our_host_looks_its_key_up_for_each_connection() {
    let server = Server::with(8 * MIB, |config| Config { access: with_key(key(), true), ..config });
    let Some(ring) = TestKeyring::new() else { return };
    let mut options = with_keyring(server.address(), &ring);
    options.read_keys().unwrap();
    let missing = format!("no TLS key of the host {HOST} for the subsystem {SUBSYSTEM}");
    let none = refusal(&options);
    assert!(none.contains(&format!("tls-keyring: keyring {}: {missing}", ring.name)), "{none}");
    // The keys of another host, for another subsystem, of another purpose, and of another kind.
    let own = secret(&key(), 2);
    add(&ring, &key().secrets(&name(OTHER), &name(SUBSYSTEM)).swap_remove(2));
    add(&ring, &key().secrets(&name(HOST), &name(FIRST)).swap_remove(2));
    ring.add(&own.identity.replace("NVMe0R01", "NVMe0G01"), &own.key);
    assert!(refusal(&options).contains(&missing));
    add(&ring, &own);
    let device = NvmeTcpDevice::open(&options).unwrap();
    ring.remove(&own.identity);
    assert_eq!(device.limits().capacity, 8 * MIB, "a connection stays");
    assert!(refusal(&options).contains(&missing));
    ring.add(&own.identity, &own.key[1..]);
    let short = refusal(&options);
    assert!(short.contains(&format!("the key {}: 31 bytes: want 32", own.identity)), "{short}");
    add(&ring, &own);
    NvmeTcpDevice::open(&options).unwrap();
    ring.revoke(&own.identity);
    let revoked = refusal(&options);
    // The kernel removes a revoked key at some time.
    assert!(revoked.contains("Key has been revoked") || revoked.contains(&missing), "{revoked}");
    add(&ring, &secret(&other_key(), 2));
    let wrong = refusal(&options);
    assert!(wrong.contains("does not accept the TLS key of this host (tls-keyring): "), "{wrong}");
}

#[test]
fn a_keyring_excludes_a_file_and_must_exist() {
    let Some(ring) = TestKeyring::new() else { return };
    let mut options = with_keyring("127.0.0.1", &ring);
    options.key_files.tls_key = Some("/nowhere".into());
    assert_eq!(options.read_keys().unwrap_err(), "tls-key and tls-keyring: want one of them");
    options.key_files.tls_key = None;
    options.tls_keyring = Some(Keyring::new("freestone-none").unwrap());
    let said = options.read_keys().unwrap_err();
    assert!(said.starts_with("tls-keyring: keyring freestone-none: no keyring "), "{said}");
}

#[test]
fn a_target_has_the_keys_of_its_hosts_in_a_keyring_whatever_their_version_and_hash() {
    let Some(ring) = TestKeyring::new() else { return };
    let server = Server::with(8 * MIB, |config| Config { access: access(&ring, true), ..config });
    for (key, way) in all_ways() {
        let secret = secret(&key, way);
        add(&ring, &secret);
        let address = through_tls_with(&key, server.address(), HOST, SUBSYSTEM, way);
        assert_eq!(connect(&address, SUBSYSTEM, HOST).1, Status::SUCCESS, "{}", secret.identity);
        assert_eq!(connect(&address, SUBSYSTEM, OTHER).1, Status::CONNECT_INVALID_HOST);
        ring.remove(&secret.identity);
        assert!(tls_fails(&through_tls_with(&key, server.address(), HOST, SUBSYSTEM, way)));
    }
}

#[test]
fn a_target_looks_keys_up_for_each_connection() {
    let Some(ring) = TestKeyring::new() else { return };
    let server = Server::with(8 * MIB, |config| Config { access: access(&ring, true), ..config });
    // Host and target share the keyring.
    let host = with_keyring(server.address(), &ring);
    let own = secret(&longer_key(), 0);
    let fails = || tls_fails(&through_tls_with(&longer_key(), server.address(), HOST, SUBSYSTEM, 0));
    assert!(fails(), "there is no key yet");
    ring.add(&own.identity, &own.key[1..]);
    assert!(fails(), "the key is too short");
    add(&ring, &own);
    let device = NvmeTcpDevice::open(&host).unwrap();
    ring.revoke(&own.identity);
    assert!(fails(), "the key was revoked");
    assert_eq!(device.limits().capacity, 8 * MIB, "a connection stays");
    add(&ring, &own);
    NvmeTcpDevice::open(&host).unwrap();
    drop(ring);
    assert!(fails(), "the keyring is gone");
}

#[test]
fn where_tls_is_allowed_a_host_with_a_key_in_the_keyring_must_use_it() {
    let Some(ring) = TestKeyring::new() else { return };
    let server = Server::with(8 * MIB, |config| Config { access: access(&ring, false), ..config });
    let clear = |host: &str| connect(server.address(), SUBSYSTEM, host).1;
    assert_eq!(clear(HOST), Status::SUCCESS);
    add(&ring, &secret(&key(), 0));
    assert_eq!((clear(HOST), clear(OTHER)), (Status::CONNECT_INVALID_HOST, Status::SUCCESS));
    let address = through_tls(server.address(), HOST, SUBSYSTEM, 0);
    assert_eq!(connect(&address, SUBSYSTEM, HOST).1, Status::SUCCESS);
    drop(ring);
    // The target cannot know which hosts have a key.
    assert_eq!(clear(OTHER), Status::CONNECT_INVALID_HOST);
}

/// The keyring of one subsystem has a key for another one, which has keys of its own.
#[test]
fn a_keyring_leads_to_its_subsystem_at_a_portal_and_to_no_other() {
    let Some(ring) = TestKeyring::new() else { return };
    let mut site = Site::new(|config| config);
    site.add(FIRST, |config| Config { access: access(&ring, true), ..config });
    site.add(SECOND, |config| Config { access: with_key(other_key(), true), ..config });
    for subsystem in [FIRST, SECOND, nqn::DISCOVERY] {
        key().secrets(&name(HOST), &name(subsystem)).iter().for_each(|secret| add(&ring, secret));
    }
    let with =
        |key: &nvme_auth::TlsKey, subsystem: &str| through_tls_with(key, site.address(), HOST, subsystem, 0);
    assert_eq!(connect(&with(&key(), FIRST), FIRST, HOST).1, Status::SUCCESS);
    assert_eq!(connect(&with(&key(), nqn::DISCOVERY), nqn::DISCOVERY, HOST).1, Status::SUCCESS);
    assert_eq!(connect(&with(&other_key(), SECOND), SECOND, HOST).1, Status::SUCCESS);
    assert!(tls_fails(&with(&key(), SECOND)));
}
