//! `freestone serve` on qcow2 images that clients write, killed and stopped. Needs `qemu-utils`.

use crate::common::{PATIENCE, Server, freestone, path_value, write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

fn qemu_img(folder: &Path, arguments: &str) -> i32 {
    let mut command = Command::new("qemu-img");
    let status = command
        .args(arguments.split(' '))
        .current_dir(folder)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status();
    status.unwrap_or_else(|error| panic!("qemu-img (package qemu-utils): {error}")).code().unwrap()
}

/// Checks the image, when the process that had it open has given it up: the kernel may close the
/// files of a killed one a moment later.
fn check(folder: &Path) -> i32 {
    let started = Instant::now();
    loop {
        match qemu_img(folder, "check -q top.qcow2") {
            1 if started.elapsed() < PATIENCE => std::thread::sleep(Duration::from_millis(20)),
            code => return code,
        }
    }
}

fn serve(folder: &Path, more: &str) -> Server {
    let device = format!("qcow2:{},id=disk{more}", path_value("file", &folder.join("top.qcow2")));
    let export = format!("vhost-user-blk:{},queues=2", path_value("socket", &folder.join("s")));
    Server::start(&["--cores", "0,1", "--device", &device, "--export", &export]).0
}

#[test]
fn a_killed_server_leaves_a_valid_image_and_a_stopped_one_a_clean_image() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    assert_eq!(qemu_img(folder, "create -q -f raw base.raw 24M"), 0);
    let options = "-o cluster_size=4096 -F raw -b base.raw";
    assert_eq!(qemu_img(folder, &format!("create -q -f qcow2 {options} top.qcow2 32M")), 0);
    for after in [100, 300, 600] {
        let server = serve(folder, ",backing=auto,cache=64K");
        let client = format!("virtio-blk-vhost-user:{}", path_value("path", &folder.join("s")));
        let mut load = freestone();
        let load =
            load.args(["bench", "--device", &client, "--rw", "randall", "--queues", "2", "--time", "60"]);
        let mut load = load.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        std::thread::sleep(Duration::from_millis(after));
        server.kill();
        load.kill().unwrap();
        load.wait().unwrap();
        let code = check(folder);
        assert!(code == 0 || code == 3, "qemu-img check ends with {code} after {after} ms");
        assert_eq!(qemu_img(folder, "check -q -r leaks top.qcow2"), 0);
        let server = serve(folder, ",backing=auto,cache=64K");
        write(&folder.join("s"));
        let (code, said) = server.stop();
        assert_eq!((code, said.as_str()), (0, ""));
        assert_eq!(check(folder), 0);
    }
}

#[test]
fn an_image_that_was_not_closed_is_repaired_before_it_is_served() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    assert_eq!(qemu_img(folder, "create -q -f qcow2 -o lazy_refcounts=on top.qcow2 32M"), 0);
    let mut io = Command::new("qemu-io");
    io.args(["-f", "qcow2", "-c", "write 0 16M", "-c", "flush", "-c", "abort", "top.qcow2"]);
    let output = io.current_dir(folder).output().unwrap();
    let features = || std::fs::read(folder.join("top.qcow2")).unwrap()[72..88].to_vec();
    assert_eq!((features()[7], features()[15]), (1, 1), "dirty, with lazy refcounts: {output:?}");
    let server = serve(folder, "");
    write(&folder.join("s"));
    let (code, said) = server.stop();
    assert!(code == 0 && said.contains("an image that was not closed was repaired"), "{code}: {said}");
    assert_eq!(check(folder), 0);
    assert_eq!((features()[7], features()[15]), (0, 1));
}
