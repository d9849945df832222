//! `qcow2` devices from their text, over files that `qemu-img` makes. Needs `qemu-utils`.

use block::{Device, Flags, Op};
use graph::kinds::device;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use tempfile::TempDir;

/// Runs a program of QEMU in the folder, with arguments that spaces separate.
fn qemu(folder: &TempDir, program: &str, arguments: &[&str]) {
    let mut command = Command::new(program);
    let output = command.args(arguments).current_dir(folder.path()).output();
    let output = output.unwrap_or_else(|error| panic!("{program} (package qemu-utils): {error}"));
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
}

fn img(folder: &TempDir, arguments: &str) {
    qemu(folder, "qemu-img", &arguments.split(' ').collect::<Vec<_>>());
}

fn write(folder: &TempDir, image: &str, command: &str) {
    qemu(folder, "qemu-io", &["-f", "qcow2", "-c", command, image]);
}

fn open(text: &str) -> Result<Arc<dyn Device>, String> {
    let (config, _) = device::parse(text).map_err(|error| error.to_string())?;
    config.open().map_err(|error| error.to_string())
}

/// The first byte of each of the first `count` clusters.
fn first_bytes(device: Arc<dyn Device>, count: u64) -> Vec<u8> {
    reactor::run(async move {
        let channel = device.open_channel().unwrap();
        let mut bytes = Vec::new();
        for cluster in 0..count {
            let buffer = reactor::current().buffers().take(512).await;
            let (buffer, read) = buffer.transfer(&*channel, Op::Read, Flags::NONE, cluster << 16).await;
            assert_eq!(read, Ok(()));
            bytes.push(buffer.as_slice()[0]);
        }
        bytes
    })
}

/// `low.qcow2` below `mid.qcow2` below `top.qcow2`.
fn chain() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    img(&folder, "create -q -f qcow2 low.qcow2 1M");
    img(&folder, "create -q -f qcow2 -F qcow2 -b low.qcow2 mid.qcow2");
    img(&folder, "create -q -f qcow2 -F qcow2 -b mid.qcow2 top.qcow2");
    write(&folder, "low.qcow2", "write -P 1 0 256k");
    write(&folder, "mid.qcow2", "write -P 2 64k 128k");
    write(&folder, "top.qcow2", "write -P 3 128k 64k");
    folder
}

fn at(folder: &Path, rest: &str) -> String {
    format!("qcow2:file={}/{rest}", folder.display())
}

#[test]
fn backing_files_are_opened_only_on_request() {
    let folder = chain();
    let device = open(&at(folder.path(), "top.qcow2,backing=auto")).unwrap();
    assert!(!device.limits().read_only);
    assert_eq!(first_bytes(device, 5), [1, 2, 3, 1, 0]);
    let error = open(&at(folder.path(), "top.qcow2")).err().unwrap();
    assert!(
        error.contains(r#"top.qcow2: names the backing file "mid.qcow2", which backing=auto would"#),
        "{error}"
    );
    // Names are relative to the name that the image was opened by.
    std::fs::create_dir(folder.path().join("store")).unwrap();
    std::fs::rename(folder.path().join("top.qcow2"), folder.path().join("store/top")).unwrap();
    std::os::unix::fs::symlink("store/top", folder.path().join("top.qcow2")).unwrap();
    let device = open(&at(folder.path(), "top.qcow2,backing=auto")).unwrap();
    assert_eq!(first_bytes(device, 5), [1, 2, 3, 1, 0]);
    // Several readers share the files; a writer is not among them.
    let devices: Vec<_> = ["top.qcow2,backing=auto", "mid.qcow2,backing=auto", "low.qcow2"]
        .map(|rest| open(&at(folder.path(), &format!("{rest},readonly=on"))).unwrap())
        .into();
    assert_eq!(devices.len(), 3);
    let writer = format!("io_uring:path={}/low.qcow2", folder.path().display());
    let error = open(&writer).err().unwrap();
    assert!(error.contains("is read by a program that allows no writer"), "{error}");
    drop(devices);
    let writer = open(&writer).unwrap();
    let error = open(&at(folder.path(), "top.qcow2,backing=auto")).err().unwrap();
    assert!(error.contains("low.qcow2 is open for writing elsewhere"), "{error}");
    drop(writer);
}

#[test]
fn writes_go_to_the_top_of_a_chain_and_nowhere_else() {
    let folder = chain();
    let below = || ["low.qcow2", "mid.qcow2"].map(|image| std::fs::read(folder.path().join(image)).unwrap());
    let before = below();
    let device = open(&at(folder.path(), "top.qcow2,backing=auto")).unwrap();
    let second = open(&at(folder.path(), "top.qcow2,backing=auto")).err().unwrap();
    assert!(second.contains("top.qcow2 is open for writing elsewhere"), "{second}");
    reactor::run(async move {
        let channel = device.open_channel().unwrap();
        for cluster in [1, 4] {
            let mut buffer = reactor::current().buffers().take(512).await;
            buffer.as_mut_slice().fill(9);
            let (_, written) = buffer.transfer(&*channel, Op::Write, Flags::NONE, cluster << 16).await;
            assert_eq!(written, Ok(()));
        }
    });
    img(&folder, "check -q top.qcow2");
    let device = open(&at(folder.path(), "top.qcow2,backing=auto,readonly=on")).unwrap();
    assert!(device.limits().read_only);
    assert_eq!(first_bytes(device, 5), [1, 9, 3, 1, 9]);
    assert!(below() == before, "a backing file has changed");
}

#[test]
fn a_data_file_is_written_when_the_image_is() {
    let folder = tempfile::tempdir().unwrap();
    img(&folder, "create -q -f qcow2 -o data_file=data.raw,data_file_raw=on disk.qcow2 1M");
    let data = folder.path().join("data.raw");
    let text = at(folder.path(), &format!("disk.qcow2,data={}", data.display()));
    let error = open(&at(folder.path(), "disk.qcow2")).err().unwrap();
    assert!(error.contains(r#"the data file "data.raw" is not open"#), "{error}");
    assert!(open(&format!("{text},readonly=on")).unwrap().limits().read_only);
    let device = open(&text).unwrap();
    reactor::run(async move {
        let channel = device.open_channel().unwrap();
        let mut buffer = reactor::current().buffers().take(512).await;
        buffer.as_mut_slice().fill(9);
        assert_eq!(buffer.transfer(&*channel, Op::Write, Flags::NONE, 3 << 16).await.1, Ok(()));
    });
    assert!(std::fs::read(&data).unwrap()[3 << 16..][..512] == [9; 512]);
    img(&folder, "check -q disk.qcow2");
}

#[test]
fn a_chain_that_ends_nowhere_or_elsewhere_is_refused() {
    let folder = chain();
    img(&folder, "rebase -u -F qcow2 -b top.qcow2 low.qcow2");
    let refusal = |rest: &str| open(&at(folder.path(), rest)).err().unwrap();
    let error = refusal("top.qcow2,backing=auto");
    assert!(
        error.contains(r#"low.qcow2: backing file "top.qcow2": the file is its own backing file"#),
        "{error}"
    );
    for (backing, reason) in [
        ("-F raw -b /etc/passwd", "an absolute name needs image-dir="),
        ("-F raw -b nbd:localhost:1", r#"names with the protocol "nbd" are not opened"#),
        ("-F raw -b json:{}", r#"names with the protocol "json" are not opened"#),
        ("-F vmdk -b mid.qcow2", r#"the format "vmdk" is unsupported"#),
        ("-F raw -b missing", "No such file or directory"),
    ] {
        img(&folder, &format!("rebase -u {backing} top.qcow2"));
        let error = refusal("top.qcow2,backing=auto");
        assert!(error.contains(reason), "{error}");
    }
    let error = refusal("top.qcow2,backing=auto,image-dir=/nowhere");
    assert!(error.contains("/nowhere: cannot find the directory"), "{error}");
}

#[test]
fn a_chain_has_a_depth_limit() {
    let folder = tempfile::tempdir().unwrap();
    img(&folder, "create -q -f qcow2 -o cluster_size=512 0 64k");
    for number in 1..=65 {
        let below = number - 1;
        img(&folder, &format!("create -q -u -f qcow2 -o cluster_size=512 -F qcow2 -b {below} {number} 64k"));
    }
    assert_eq!(first_bytes(open(&at(folder.path(), "64,backing=auto")).unwrap(), 1), [0]);
    let error = open(&at(folder.path(), "65,backing=auto")).err().unwrap();
    assert!(error.contains("more than 64 backing files below each other"), "{error}");
}

#[test]
fn data_file_and_snapshot_are_chosen_by_key() {
    let folder = tempfile::tempdir().unwrap();
    img(&folder, "create -q -f qcow2 -o data_file=data.raw disk.qcow2 1M");
    write(&folder, "disk.qcow2", "write -P 5 0 64k");
    let data = folder.path().join("data.raw");
    let device =
        open(&at(folder.path(), &format!("disk.qcow2,readonly=on,data={}", data.display()))).unwrap();
    assert_eq!(first_bytes(device, 2), [5, 0]);
    let error = open(&at(folder.path(), "disk.qcow2,readonly=on")).err().unwrap();
    assert!(error.ends_with(r#"disk.qcow2: the data file "data.raw" is not open"#), "{error}");
    img(&folder, "create -q -f qcow2 snap.qcow2 1M");
    write(&folder, "snap.qcow2", "write -P 6 0 64k");
    img(&folder, "snapshot -c before snap.qcow2");
    write(&folder, "snap.qcow2", "write -P 7 0 64k");
    for (rest, expected) in
        [("snap.qcow2", 7), ("snap.qcow2,snapshot=before", 6), ("snap.qcow2,snapshot=1", 6)]
    {
        assert_eq!(first_bytes(open(&at(folder.path(), rest)).unwrap(), 1), [expected], "{rest}");
    }
}
