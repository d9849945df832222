//! `freestone serve` on qcow2 images that clients write, killed and stopped. Needs `qemu-utils`.

use crate::common::{PATIENCE, Server, failure_in, freestone, path_value, write};
use block::{Channel, Flags, Op};
use reactor::Permits;
use stack::kinds::member::member;
use std::cell::RefCell;
use std::path::Path;
use std::process::{Command, Stdio};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
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
    Server::start_in(folder, &["--cores", "0,1", "--device", &device, "--export", &export]).0
}

fn serve_nbd(folder: &Path, more: &str) -> Server {
    let device = format!("qcow2:{}{more}", path_value("file", &folder.join("top.qcow2")));
    let export = format!("nbd:{}", path_value("socket", &folder.join("s")));
    Server::start_in(folder, &["--device", &device, "--export", &export]).0
}

fn open_nbd(folder: &Path) -> Arc<dyn block::Device> {
    let export = format!("nbd:{}", path_value("path", &folder.join("s")));
    member(&export, false, false).unwrap().open().unwrap()
}

#[test]
fn an_export_is_converted_to_an_image() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let mut bytes = vec![0; 9 << 20];
    bytes[3 << 20..5 << 20].iter_mut().enumerate().for_each(|(number, byte)| *byte = (number / 700) as u8);
    std::fs::write(folder.join("disk"), &bytes).unwrap();
    let export = format!("nbd:{},readonly=on", path_value("socket", &folder.join("s")));
    let device = format!("io_uring:{}", path_value("path", &folder.join("disk")));
    let (server, _) = Server::start_in(folder, &["--device", &device, "--export", &export]);
    let source = format!("nbd:{}", path_value("path", &folder.join("s")));
    for options in [&["-O", "qcow2", "-c"][..], &["-O", "raw"]] {
        let convert = [&["image", "convert", "-f", "raw", "--force"], options, &[&source, "copy"]].concat();
        assert!(freestone().args(convert).current_dir(folder).status().unwrap().success());
        let compare = format!("compare -q -f raw -F {} disk copy", options[1]);
        assert_eq!(qemu_img(folder, &compare), 0);
    }
    server.stop();
    let (error, code) = failure_in(folder, &["image", "convert", "-f", "raw", &source, "copy2"]);
    assert!(error.contains("nbd+unix") && code == 1, "{error}");
    assert!(!folder.join("copy2").exists());
}

/// Blocks between those that are written: each gets a cluster of its own, or shares it with one.
const STRIDE: u64 = 10;
/// Writes at a time.
const WRITERS: u64 = 8;

/// Writes blocks without a flush, several at a time, until `most` have completed or one fails. Each
/// has the number of its write in all bytes. Returns the first and the last write of those blocks
/// that completed, and may add more to the number `completed` meanwhile.
fn write_until_the_end(folder: &Path, most: u64, seed: u64, completed: Arc<AtomicU64>) -> Vec<(u64, u8)> {
    let device = open_nbd(folder);
    reactor::run(async move {
        let channel: Rc<dyn Channel> = device.open_channel().unwrap();
        let (found, ended) = (Rc::new(RefCell::new(Vec::new())), Rc::new(Permits::new(0)));
        for writer in 0..WRITERS {
            let (channel, found, completed) = (channel.clone(), found.clone(), completed.clone());
            let ended = ended.clone();
            reactor::current().spawn(async move {
                for number in (writer..most).step_by(WRITERS as usize) {
                    let (block, byte) = (number * STRIDE, (number + seed) as u8);
                    let mut buffer = reactor::current().buffers().take(4096).await;
                    buffer.as_mut_slice().fill(byte);
                    if buffer.transfer(&*channel, Op::Write, Flags::NONE, block * 4096).await.1.is_err() {
                        break;
                    }
                    found.borrow_mut().push((block, byte));
                    completed.fetch_add(1, Ordering::Relaxed);
                }
                ended.release(1);
            });
        }
        ended.acquire(WRITERS as usize).await;
        found.take()
    })
}

fn check_blocks(folder: &Path, blocks: &[(u64, u8)]) {
    let (device, blocks) = (open_nbd(folder), blocks.to_vec());
    reactor::run(async move {
        let channel = device.open_channel().unwrap();
        for (block, byte) in blocks {
            let buffer = reactor::current().buffers().take(4096).await;
            let (buffer, result) = buffer.transfer(&*channel, Op::Read, Flags::NONE, block * 4096).await;
            assert_eq!(result, Ok(()));
            assert!(buffer.as_slice().iter().all(|found| *found == byte), "block {block} lacks write {byte}");
        }
    });
}

/// Kills a server after so many completed writes. Returns what they wrote.
fn killed_under_writes(folder: &Path, server: Server, least: u64, seed: u64) -> Vec<(u64, u8)> {
    let completed = Arc::new(AtomicU64::new(0));
    let (seen, place) = (completed.clone(), folder.to_owned());
    let client = std::thread::spawn(move || write_until_the_end(&place, 6000, seed, seen));
    while completed.load(Ordering::Relaxed) < least {
        std::thread::sleep(Duration::from_millis(1));
    }
    server.kill();
    client.join().unwrap()
}

#[test]
fn a_kill_loses_no_completed_write_unless_another_program_wrote_to_the_image() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    for options in ["", " -o cluster_size=4096", " -o extended_l2=on"] {
        assert_eq!(qemu_img(folder, &format!("create -q -f qcow2{options} top.qcow2 256M")), 0, "{options}");
        for (seed, least) in [(0, 700), (1, 1500), (2, 1)] {
            let server = serve_nbd(folder, "");
            let written = killed_under_writes(folder, server, least, seed);
            assert!(matches!(check(folder), 0 | 3), "{options}");
            let server = serve_nbd(folder, "");
            check_blocks(folder, &written);
            let (code, said) = server.stop();
            // Later writes may need no new cluster.
            let is_restored = seed > 0 || said.contains("writes of a killed server were restored");
            assert!(code == 0 && is_restored, "{code}: {said}");
            assert_eq!(check(folder), 0, "{options}");
        }
    }
    // A log that is not the image's is left alone.
    assert_eq!(qemu_img(folder, "create -q -f qcow2 top.qcow2 256M"), 0);
    let server = serve_nbd(folder, "");
    killed_under_writes(folder, server, 100, 3);
    assert!(matches!(check(folder), 0 | 3));
    let image = folder.join("top.qcow2").display().to_string();
    let (refusal, code) = failure_in(folder, &["image", "resize", &image, "+1M"]);
    assert!(code == 1 && refusal.contains("was killed") && refusal.contains("/restart-log"), "{refusal}");
    assert_eq!(qemu_img(folder, "check -q -r all top.qcow2"), 0);
    let io = ["-f", "qcow2", "-c", "discard 0 256M", "-c", "write -P 9 0 64M", "top.qcow2"];
    assert!(
        Command::new("qemu-io")
            .args(io)
            .current_dir(folder)
            .stdout(Stdio::null())
            .status()
            .unwrap()
            .success()
    );
    let server = serve_nbd(folder, "");
    check_blocks(folder, &[(0, 9), (STRIDE, 9), (16383, 9), (16384, 0)]);
    let (code, said) = server.stop();
    assert_eq!((code, said.as_str()), (0, ""));
    assert_eq!(check(folder), 0);
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

/// The bytes of a dirty bitmap that QEMU's client finds dirty in the export.
fn dirty_bytes(folder: &Path, name: &str) -> Vec<(u64, u64)> {
    let options = format!(
        "driver=nbd,server.type=unix,server.path={},x-dirty-bitmap=qemu:dirty-bitmap:{name}",
        folder.join("s").display()
    );
    let map = Command::new("qemu-img").args(["map", "--output=json", "--image-opts", &options]).output();
    let map = map.unwrap();
    assert!(map.status.success(), "{}", String::from_utf8_lossy(&map.stderr));
    let map: serde_json::Value = serde_json::from_slice(&map.stdout).unwrap();
    let number = |extent: &serde_json::Value, name: &str| extent[name].as_u64().unwrap();
    // A dirty extent is one without data.
    let dirty = map.as_array().unwrap().iter().filter(|extent| extent["data"] == false);
    dirty.map(|extent| (number(extent, "start"), number(extent, "length"))).collect()
}

fn qemu_write(folder: &Path, offset: u64) {
    let (export, command) =
        (format!("nbd+unix:///?socket={}", folder.join("s").display()), format!("write {offset} 4k"));
    let output = Command::new("qemu-io").args(["-f", "raw", "-c", &command, &export]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}

#[test]
fn dirty_bitmaps_are_served_and_survive_a_stop_and_not_a_kill() {
    let dir = tempfile::tempdir().unwrap();
    let folder = dir.path();
    assert_eq!(qemu_img(folder, "create -q -f qcow2 top.qcow2 32M"), 0);
    for arguments in ["--add top.qcow2 on", "--add -g 4096 --disable top.qcow2 off"] {
        assert_eq!(qemu_img(folder, &format!("bitmap {arguments}")), 0);
    }
    let granule = 64 << 10;
    for (round, more) in (1..4).zip(["", "", ",restart-log=none"]) {
        let server = serve_nbd(folder, more);
        let (before, now): (Vec<_>, _) = (
            (1..round).map(|round| (round * 3 * granule, granule)).collect(),
            (round * 3 * granule, granule),
        );
        assert_eq!(dirty_bytes(folder, "on"), before, "round {round}");
        qemu_write(folder, round * 3 * granule);
        assert_eq!(dirty_bytes(folder, "on"), [before, vec![now]].concat(), "round {round}");
        assert_eq!(dirty_bytes(folder, "off"), [], "round {round}");
        let (code, said) = server.stop();
        assert_eq!((code, check(folder)), (0, 0), "round {round}: {said}");
        assert!(!said.contains("bitmap"), "round {round}: {said}");
    }
    let server = serve_nbd(folder, ",readonly=on");
    assert_eq!(dirty_bytes(folder, "on").len(), 3);
    server.stop();
    let server = serve_nbd(folder, "");
    qemu_write(folder, 20 << 20);
    server.kill();
    assert!(matches!(check(folder), 0 | 3));
    let checked = freestone().args(["image", "check", "top.qcow2"]).current_dir(folder).output().unwrap();
    let said = String::from_utf8(checked.stderr).unwrap();
    assert!(said.contains("bitmap \"on\": in use since a crash: it lacks writes\n"), "{said}");
    assert!(!said.contains("\"off\""), "{said}");
    let server = serve_nbd(folder, "");
    let list = Command::new("qemu-nbd").args(["--list", "-k"]).arg(folder.join("s")).output().unwrap();
    let list = String::from_utf8(list.stdout).unwrap();
    assert!(list.contains("qemu:dirty-bitmap:off") && !list.contains("qemu:dirty-bitmap:on"), "{list}");
    assert_eq!(server.stop().0, 0);
    assert_eq!(check(folder), 0);
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
