//! Repaired images: `qemu-img check` says what the repair says, and the disk has its bytes.

use crate::damage::{CLEAN, Damaged, SEEDS, check, damage, each_damaged, images, verdict};
use crate::over::over;
use crate::tools::{Folder, contents, file, open};
use block::{Channel, Device, IoError, IoFuture, Op, Request, StatusReport};
use drivers::io_uring::{Options, UringDevice};
use qcow2::{Error, Level, Others, Repaired, Report};
use std::collections::BTreeSet;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes that are read at a time: a cluster of most images.
const PART: u64 = 4096;

pub fn writable(path: &Path) -> Arc<dyn Device> {
    Arc::new(UringDevice::open(&Options::new(path)).unwrap())
}

fn repair(device: Arc<dyn Device>, level: Level) -> Result<Repaired, Error> {
    reactor::run(async move { qcow2::repair(&device, level).await })
}

/// The bytes of the disk, part by part: `None` for an error.
fn readable(path: &Path, needs_data: bool) -> Vec<Option<Vec<u8>>> {
    let device = file(path);
    let data_file = needs_data.then(|| file(&path.with_file_name("data.raw")));
    reactor::run(async move {
        let others = Others { data_file, backing: None };
        let Ok(disk) = open(device, others, None).await else { return Vec::new() };
        let channel = disk.open_channel().unwrap();
        let end = disk.limits().capacity.min(4 << 20);
        let mut parts = Vec::new();
        for at in (0..end).step_by(PART as usize) {
            let (bytes, result) = crate::tools::read(&*channel, at, PART.min(end - at)).await;
            parts.push(result.ok().map(|()| bytes));
        }
        parts
    })
}

/// Parts that could be read before, and have other bytes now.
fn changed(before: &[Option<Vec<u8>>], after: &[Option<Vec<u8>>]) -> Vec<usize> {
    let is_changed = |part: &usize| before[*part].is_some() && before[*part] != after[*part];
    (0..before.len()).filter(is_changed).collect()
}

#[test]
fn repaired_images_have_the_verdict_of_qemu_and_their_bytes() {
    let folder = Folder::new();
    let mut verdicts = [0; 4];
    let mut different = Vec::new();
    each_damaged(&folder, |damaged| {
        let Damaged { name, what, bytes, path } = damaged;
        let before = readable(path, name == "data");
        let result = repair(writable(path), Level::All);
        let ours = verdict(&result.clone().map(|repaired| repaired.after));
        verdicts[ours as usize] += 1;
        if let Err(error) = &result {
            assert!(std::fs::read(path).unwrap() == *bytes, "{name}, {what}: {error}: changed");
            return;
        }
        let theirs = damaged.compare(&folder, ours, &result, &mut different);
        // QEMU makes empty snapshots of a snapshot table that is not in the file.
        if ours != CLEAN && !what.ends_with("header, 1 bytes at 66") {
            std::fs::write(folder.path("theirs"), bytes).unwrap();
            let arguments = ["check", "-T", "unsafe", "-f", "qcow2", "-r", "all", "theirs"];
            let best = folder.run("qemu-img", &arguments).status.code().unwrap();
            if best < ours && !theirs.lacks_data {
                different.push(format!("{name}, {what}: {ours}, QEMU leaves {best}\n  {result:?}"));
            }
        }
        let changed = changed(&before, &readable(path, name == "data"));
        if !changed.is_empty() {
            different.push(format!("{name}, {what}: parts {changed:?} have changed\n  {result:?}"));
        }
    });
    assert!(different.is_empty(), "{verdicts:?}: {} differ:\n{}", different.len(), different.join("\n"));
    assert!(verdicts[CLEAN as usize] > 300, "{verdicts:?}");
}

/// A device whose writes all fail when none is `left`, as seen from a disk after a crash.
/// `is_fixed`: it cannot grow, as a block device.
pub fn stopping(child: Arc<dyn Device>, left: Arc<AtomicU64>, is_fixed: bool) -> Arc<dyn Device> {
    over(child, is_fixed, move |channel| Rc::new(StoppingChannel(channel, left.clone())))
}

struct StoppingChannel(Rc<dyn Channel>, Arc<AtomicU64>);

impl Channel for StoppingChannel {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        let may_write = |left: u64| left.checked_sub(1);
        let is_write = req.op != Op::Read;
        if is_write && self.1.fetch_update(Ordering::Relaxed, Ordering::Relaxed, may_write).is_err() {
            return IoFuture::ready(Err(IoError::DeviceGone));
        }
        self.0.submit(req, offset)
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        self.0.block_status(report, offset, len)
    }
}

/// Clusters whose refcount is lower than their references.
pub fn too_low(report: &Report) -> BTreeSet<String> {
    let number = |text: &str| text.split([',', ' ']).next().unwrap().parse::<u64>().unwrap();
    let is_too_low = |message: &&String| {
        let (refcount, references) = message.split_once(", references ").unwrap_or_default();
        let refcount = refcount.split_once("refcount ").map(|(_, refcount)| number(refcount));
        refcount.is_some_and(|refcount| refcount < number(references))
    };
    let messages = report.messages.iter().filter(is_too_low);
    messages.map(|message| message.split(':').next().unwrap().to_owned()).collect()
}

#[test]
fn a_repair_that_is_interrupted_leaves_an_image_that_is_no_worse() {
    let folder = Folder::new();
    let path = folder.path("damaged");
    let mut interrupted = 0;
    for name in images(&folder).into_iter().filter(|name| name != "data") {
        let intact = std::fs::read(folder.path(&name)).unwrap();
        for seed in (0..SEEDS).step_by(3) {
            let mut bytes = intact.clone();
            let what = damage(&mut bytes, seed);
            let reset = || std::fs::write(&path, &bytes).unwrap();
            reset();
            let Ok(Repaired { before, after }) = repair(writable(&path), Level::All) else { continue };
            if before == after {
                continue;
            }
            let wanted = std::fs::read(&path).unwrap();
            reset();
            let (disk, low) = (readable(&path, false), too_low(&check(file(&path)).unwrap()));
            for writes in [0, 1, 2, 3, 4, 5, 8, 13, 21, 34, 55] {
                reset();
                let left = Arc::new(AtomicU64::new(writes));
                let device = stopping(writable(&path), left, false);
                if repair(device, Level::All).is_ok() {
                    break;
                }
                interrupted += 1;
                let when = format!("{name}, {what}, after {writes} writes");
                assert_eq!(changed(&disk, &readable(&path, false)), [0; 0], "{when}");
                let more: Vec<_> = too_low(&check(file(&path)).unwrap()).difference(&low).cloned().collect();
                assert_eq!(more, [""; 0], "{when}");
                let again = repair(writable(&path), Level::All).unwrap();
                assert_eq!(again.after.messages, after.messages, "{when}");
                let is_same = std::fs::read(&path).unwrap().len() >= wanted.len();
                assert!(is_same, "{when}: the file is shorter");
            }
        }
    }
    assert!(interrupted > 100, "{interrupted}");
}

#[test]
fn leaks_are_freed_and_nothing_else_is_changed() {
    let folder = Folder::new();
    folder.img("create -f qcow2 disk 3M");
    folder.io("disk", &["write -P 1 0 256k".into()]);
    let path = folder.path("disk");
    let mut bytes = std::fs::read(&path).unwrap();
    let block = 2 << 16;
    // The second cluster has 5 references too many, the fifth has one too few.
    (bytes[block + 3], bytes[block + 9]) = (6, 0);
    std::fs::write(&path, &bytes).unwrap();
    let repaired = repair(writable(&path), Level::Leaks).unwrap();
    assert_eq!((repaired.leaks_fixed(), repaired.corruptions_fixed()), (1, 0));
    assert!(repaired.after.leaks == 0 && repaired.after.corruptions > 0, "{repaired:?}");
    bytes[block + 3] = 1;
    assert!(std::fs::read(&path).unwrap() == bytes, "another byte has changed");
    let repaired = repair(writable(&path), Level::All).unwrap();
    assert_eq!(repaired.after.messages, [""; 0]);
    bytes[block + 9] = 1;
    assert!(std::fs::read(&path).unwrap() == bytes, "another byte has changed");
    folder.img("check disk");
}

#[test]
fn lost_refcounts_are_written_again_behind_the_file() {
    for (options, size) in [
        ("cluster_size=512", 3 << 20),
        ("cluster_size=512,refcount_bits=64", 20 << 20),
        ("cluster_size=4096,refcount_bits=1", 3 << 20),
        ("compat=0.10", 3 << 20),
        ("cluster_size=2M", 64 << 20),
    ] {
        let folder = Folder::new();
        folder.img(&format!("create -f qcow2 -o {options} disk {size}"));
        folder.io("disk", &crate::tools::mixed_writes(5, size, 4096, !options.contains("0.10")));
        folder.io("disk", &[format!("write -P 7 {} 512", size - 512)]);
        let (path, disk) = (folder.path("disk"), folder.raw("", "disk"));
        let mut bytes = std::fs::read(&path).unwrap();
        let table = u64::from_be_bytes(bytes[48..56].try_into().unwrap()) as usize;
        bytes[table..table + 8].copy_from_slice(&0x201u64.to_be_bytes());
        std::fs::write(&path, &bytes).unwrap();
        let repaired = repair(writable(&path), Level::All).unwrap();
        assert_eq!(repaired.after.messages, [""; 0], "{options}");
        folder.img("check disk");
        assert!(folder.raw("", "disk") == disk, "{options}: the disk has changed");
        let now = std::fs::read(&path).unwrap();
        let is_kept = |at: &usize| now[*at] == bytes[*at];
        assert!((0..512).filter(|at| !(48..60).contains(at)).all(|at| is_kept(&at)), "{options}: header");
        // New clusters are found, and the old refcounts are free.
        folder.io("disk", &[format!("write -P 9 0 {}", size / 2)]);
        folder.img("check disk");
    }
}

#[test]
fn lost_refcounts_of_a_block_device_are_written_behind_the_last_cluster() {
    let folder = Folder::new();
    folder.img("create -f qcow2 -o cluster_size=4096 disk 3M");
    folder.io("disk", &["write -P 1 0 1M".into()]);
    let (path, disk) = (folder.path("disk"), folder.raw("", "disk"));
    let mut bytes = std::fs::read(&path).unwrap();
    let table = u64::from_be_bytes(bytes[48..56].try_into().unwrap()) as usize;
    bytes[table..table + 8].fill(0);
    for (room, is_enough) in [(0, false), (1 << 20, true)] {
        bytes.resize(bytes.len() + room, 0);
        std::fs::write(&path, &bytes).unwrap();
        let left = Arc::new(AtomicU64::new(u64::MAX));
        let device = stopping(writable(&path), left, true);
        match repair(device, Level::All) {
            Ok(repaired) => assert_eq!((repaired.after.messages, is_enough), (Vec::new(), true)),
            Err(error) => assert!(!is_enough && error.to_string().contains("no room for"), "{error}"),
        }
    }
    assert_eq!(std::fs::read(&path).unwrap().len(), bytes.len());
    folder.img("check disk");
    assert!(folder.raw("", "disk") == disk);
}

#[test]
fn an_image_that_was_not_closed_is_repaired_and_keeps_lazy_refcounts() {
    let folder = Folder::new();
    folder.img("create -f qcow2 -o lazy_refcounts=on,cluster_size=4096 disk 3M");
    let commands = ["write -P 1 0 1M", "flush", "write -P 2 2M 64k", "discard 0 64k", "flush", "abort"];
    let arguments = commands.iter().flat_map(|command| ["-c", command]);
    let arguments: Vec<&str> = ["-f", "qcow2"].into_iter().chain(arguments).chain(["disk"]).collect();
    assert!(!folder.run("qemu-io", &arguments).status.success(), "the program has ended itself");
    let path = folder.path("disk");
    assert_eq!(std::fs::read(&path).unwrap()[79], 1, "the image is dirty");
    let disk = contents(&folder.open("disk", Others::default()));
    let repaired = repair(writable(&path), Level::All).unwrap();
    assert!(repaired.corruptions_fixed() > 0 && repaired.after.messages.is_empty(), "{repaired:?}");
    let said = folder.img("info disk");
    assert!(!said.contains("cleanly shut down: no") && said.contains("lazy refcounts: true"), "{said}");
    folder.img("check disk");
    assert!(folder.raw("", "disk") == disk);
}

#[test]
fn the_mark_of_a_corrupt_image_goes_with_the_last_error() {
    let folder = Folder::new();
    folder.img("create -f qcow2 disk 3M");
    folder.io("disk", &["write -P 1 0 256k".into()]);
    let path = folder.path("disk");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[79] = 2;
    let l2 = u64::from_be_bytes(bytes[3 << 16..][..8].try_into().unwrap()) as usize & 0xff_ffff_ffff;
    // A reserved bit, which no repair can explain.
    bytes[l2 + 7] |= 2;
    std::fs::write(&path, &bytes).unwrap();
    let left = repair(writable(&path), Level::All).unwrap();
    assert_eq!((verdict(&Ok(left.after)), std::fs::read(&path).unwrap()[79]), (2, 2));
    bytes[l2 + 7] &= !2;
    std::fs::write(&path, &bytes).unwrap();
    repair(writable(&path), Level::Leaks).unwrap();
    assert_eq!(std::fs::read(&path).unwrap()[79], 2, "only leaks");
    let repaired = repair(writable(&path), Level::All).unwrap();
    assert_eq!((verdict(&Ok(repaired.after)), std::fs::read(&path).unwrap()[79]), (CLEAN, 0));
    folder.img("check disk");
    let read_only = repair(file(&path), Level::All).unwrap_err().to_string();
    assert!(read_only.ends_with("the file is open for reading only"), "{read_only}");
}
