//! Disk images as devices of the daemon. Needs `qemu-utils`.

use crate::common::Daemon;
use block::{Flags, Op};
use serde_json::json;
use stack::kinds::member::member;
use std::process::Command;

/// The exit code of `qemu-img` in the directory of a daemon.
pub fn qemu_img(daemon: &Daemon, arguments: &str) -> i32 {
    let mut command = Command::new("qemu-img");
    let status = command.args(arguments.split(' ')).current_dir(daemon.path("")).status();
    status.unwrap_or_else(|error| panic!("qemu-img (package qemu-utils): {error}")).code().unwrap()
}

/// Writes, or reads, 64 KiB at 1 MiB of the export `disk`. Returns the first byte.
fn transfer(daemon: &Daemon, op: Op, byte: u8) -> u8 {
    let export = format!("nbd:path={}", daemon.path("disk.sock").display());
    let device = member(&export, false, false).unwrap().open().unwrap();
    reactor::run(async move {
        let channel = device.open_channel().unwrap();
        let mut buffer = reactor::current().buffers().take(64 << 10).await;
        buffer.as_mut_slice().fill(byte);
        let (buffer, result) = buffer.transfer(&*channel, op, Flags::NONE, 1 << 20).await;
        assert_eq!(result, Ok(()));
        buffer.as_slice()[0]
    })
}

#[test]
fn an_image_keeps_writes_through_a_kill_and_is_clean_after_the_end_of_the_daemon() {
    let mut daemon = Daemon::new();
    assert_eq!(qemu_img(&daemon, "create -q -f qcow2 disk.qcow2 64M"), 0);
    let spec = format!("qcow2:file={}", daemon.path("disk.qcow2").display());
    daemon.post("/v1/devices", &json!({ "name": "disk", "spec": spec }));
    daemon.post("/v1/exports", &json!({ "name": "disk", "kind": "nbd", "volumes": ["disk"] }));
    for (byte, signal) in [(7, "-KILL"), (8, "-TERM"), (9, "-TERM")] {
        transfer(&daemon, Op::Write, byte);
        assert_eq!(daemon.end(signal).success(), signal == "-TERM");
        if signal == "-TERM" {
            assert_eq!(qemu_img(&daemon, "check -q disk.qcow2"), 0);
        }
        daemon.start();
        assert_eq!(transfer(&daemon, Op::Read, 0), byte);
    }
    // The image is closed with its device.
    daemon.delete("/v1/exports/disk");
    daemon.delete("/v1/devices/disk");
    assert_eq!(qemu_img(&daemon, "check -q disk.qcow2"), 0);
}
