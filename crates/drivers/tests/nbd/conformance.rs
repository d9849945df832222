//! The suite that every device passes.

use crate::server::{Over, Server};
use conformance::Suite;
use drivers::nbd::{NbdDevice, Options, Replies};
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
    // The filter offers no FUA unless it is told to.
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
