//! The suite that every device passes.

use crate::server::{Over, Secret, Server};
use conformance::Suite;
use drivers_nbd::{NbdDevice, Options, Replies, Tls};
use std::sync::Arc;

fn run(server: Option<Server>, change: impl FnOnce(&mut Options)) {
    let Some(server) = server else { return };
    let mut options = server.options.clone();
    change(&mut options);
    let device = NbdDevice::open(&options).unwrap();
    Suite::new(Arc::new(device)).run();
}

#[test]
fn nbdkit_over_a_unix_socket() {
    run(Server::nbdkit(Over::Unix, &["memory", "32M"]), |_| ());
}

#[test]
fn nbdkit_over_tcp() {
    run(Server::nbdkit(Over::Tcp, &["memory", "32M"]), |_| ());
}

#[test]
fn nbdkit_with_simple_replies_and_a_shallow_queue() {
    run(Server::nbdkit(Over::Unix, &["memory", "32M"]), |options| {
        options.replies = Replies::Simple;
        options.queue_depth = 3;
    });
}

#[test]
fn nbdkit_with_block_sizes_that_cut_requests() {
    let policy = [
        "--filter=blocksize-policy",
        "memory",
        "32M",
        "blocksize-minimum=4096",
        "blocksize-preferred=16384",
        "blocksize-maximum=61440",
        "blocksize-error-policy=error",
    ];
    run(Server::nbdkit(Over::Unix, &policy), |_| ());
}

#[test]
fn nbdkit_without_zeroes_trim_and_fua() {
    // The filter offers no FUA by default.
    let poor = ["--filter=nozero", "--filter=fua", "memory", "32M", "zeromode=none"];
    run(Server::nbdkit(Over::Unix, &poor), |_| ());
}

#[test]
fn nbdkit_read_only() {
    run(Server::nbdkit(Over::Unix, &["--readonly", "memory", "32M"]), |_| ());
    run(Server::nbdkit(Over::Unix, &["memory", "32M"]), |options| options.read_only = true);
}

#[test]
fn qemu_nbd_with_structured_replies() {
    run(Server::qemu_nbd(Over::Unix, 8), |options| options.replies = Replies::Structured);
    run(Server::qemu_nbd(Over::Tcp, 8), |options| options.replies = Replies::Structured);
}

#[test]
fn qemu_with_the_richest_replies_that_it_has() {
    run(Server::storage_daemon(Over::Unix), |_| ());
    run(Server::storage_daemon(Over::Tcp), |_| ());
}

#[test]
fn nbdkit_through_tls() {
    for (secret, over) in Secret::ALL.into_iter().zip([Over::Tcp, Over::Unix]) {
        run(Server::nbdkit_secured(over, secret), |_| ());
    }
}

#[test]
fn nbdkit_that_does_not_know_us_says_so() {
    let files = tempfile::tempdir().unwrap();
    tls::authority::write_all(files.path());
    let keys = files.path().join("keys.psk");
    secrets::write(&keys, format!("alice:{}\n", "00".repeat(32))).unwrap();
    for secret in Secret::ALL {
        let Some(server) = Server::nbdkit_secured(Over::Unix, secret) else { return };
        let stranger = match secret {
            Secret::Certificates => Tls::new(Some(files.path()), None, None, None),
            Secret::Key => Tls::new(None, Some(&keys), None, None),
        };
        let said = |tls| {
            let options = Options { tls, ..server.options.clone() };
            NbdDevice::open(&options).err().expect("not let in").to_string()
        };
        let refused = said(Some(stranger.unwrap()));
        assert!(refused.contains("TLS"), "{secret:?}: {refused}");
        assert!(said(None).contains("the server demands TLS"));
    }
    let Some(plain) = Server::nbdkit(Over::Unix, &["memory", "32M"]) else { return };
    let tls = Some(Tls::new(Some(files.path()), None, None, None).unwrap());
    let error = NbdDevice::open(&Options { tls, ..plain.options.clone() }).err().unwrap().to_string();
    assert!(error.contains("the server does not support TLS"), "{error}");
}
