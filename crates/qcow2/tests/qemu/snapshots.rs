//! Internal snapshots that this crate makes, applies and deletes; QEMU reads and checks them.

use crate::damage::check;
use crate::repair::{stopping, too_low, writable};
use crate::tools::{Folder, contents, file, mixed_writes, open};
use base::Rng;
use block::Device;
use qcow2::offline::snapshots;
use qcow2::{Error, Image, Level, Others};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::time::Duration;

/// A step of a test.
#[derive(Clone, Copy, Debug)]
enum Change {
    Create,
    Apply,
    Delete,
}

fn change(device: Arc<dyn Device>, change: Change, name: &str) -> Result<(), Error> {
    let name = name.to_owned();
    reactor::run(async move {
        match change {
            Change::Create => {
                snapshots::create(&device, &name, Duration::new(1_700_000_000, 5)).await.map(drop)
            }
            Change::Apply => snapshots::apply(&device, &name).await,
            Change::Delete => snapshots::delete(&device, &name).await,
        }
    })
}

fn assert_clean(folder: &Folder, when: &str) {
    let output = folder.run("qemu-img", &["check", "-f", "qcow2", "disk"]);
    assert_eq!(output.status.code(), Some(0), "{when}: {}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(check(file(&folder.path("disk"))).unwrap().messages, [""; 0], "{when}");
}

/// Makes, applies and deletes snapshots in turn with QEMU, and writes between.
fn exercise(options: &str, size: u64, seed: u64) {
    let folder = Folder::new();
    match options.contains("compression_type") {
        false => drop(folder.img(&format!("create -f qcow2 -o {options} disk {size}"))),
        true => {
            let words: Vec<u8> = (0..size).map(|at| (at / 100 % 251) as u8).collect();
            std::fs::write(folder.path("words"), words).unwrap();
            folder.img(&format!("convert -c -f raw -O qcow2 -o {options} words disk"));
        }
    }
    let path = folder.path("disk");
    let mut random = Rng::new(seed);
    let mut disks: Vec<(String, Vec<u8>)> = Vec::new();
    let is_v3 = !options.contains("0.10");
    for round in 0..14 {
        let when = format!("{options}, seed {seed}, round {round}");
        let mut writes = mixed_writes(seed * 100 + round, size, 4096, is_v3);
        writes.truncate(12);
        folder.io("disk", &writes);
        let now = folder.raw("", "disk");
        let is_ours = random.below(3) > 0;
        let step = |action: Change, name: &str| {
            let letter = match action {
                Change::Create => "-c",
                Change::Apply => "-a",
                Change::Delete => "-d",
            };
            match is_ours {
                true => change(writable(&path), action, name).unwrap(),
                false => drop(folder.img(&format!("snapshot {letter} {name} disk"))),
            }
        };
        match random.below(5) {
            0 if !disks.is_empty() => {
                let (name, disk) = disks[random.below(disks.len() as u64) as usize].clone();
                step(Change::Apply, &name);
                assert!(folder.raw("", "disk") == disk, "{when}: {name} was applied");
            }
            1 if disks.len() > 1 => {
                let at = random.below(disks.len() as u64) as usize;
                step(Change::Delete, &disks.remove(at).0);
                assert!(folder.raw("", "disk") == now, "{when}: the disk has changed");
            }
            _ => {
                let name = format!("snap{round}");
                step(Change::Create, &name);
                assert!(folder.raw("", "disk") == now, "{when}: the disk has changed");
                disks.push((name, now));
            }
        }
        assert_clean(&folder, &when);
        for (name, disk) in &disks {
            assert!(folder.raw(&format!("-l {name}"), "disk") == *disk, "{when}: {name} has changed");
        }
    }
    for (name, _) in disks {
        change(writable(&path), Change::Delete, &name).unwrap();
        assert_clean(&folder, &name);
    }
    assert!(!folder.img("info disk").contains("Snapshot list"));
}

#[test]
fn snapshots_have_their_bytes_and_qemu_finds_nothing_wrong() {
    for (seed, options) in [
        "cluster_size=4096",
        "cluster_size=512,refcount_bits=64",
        "cluster_size=512,refcount_bits=4",
        "compat=0.10,cluster_size=512",
        "cluster_size=16384,extended_l2=on",
        "cluster_size=65536,lazy_refcounts=on",
        "cluster_size=4096,compression_type=zstd",
    ]
    .into_iter()
    .enumerate()
    {
        exercise(options, 3 << 20, seed as u64);
    }
}

#[test]
fn a_snapshot_that_cannot_be_made_changes_nothing() {
    let folder = Folder::new();
    folder.img("create -f qcow2 -o refcount_bits=1 narrow 1M");
    folder.io("narrow", &["write 0 64k".into()]);
    folder.img("create -f qcow2 -o data_file=data.raw data 1M");
    folder.img("create -f qcow2 taken 1M");
    folder.img("snapshot -c snap taken");
    folder.img("create -f qcow2 damaged 1M");
    folder.io("damaged", &["write 0 64k".into()]);
    let path = folder.path("damaged");
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[(2 << 16) + 9] = 0;
    std::fs::write(&path, &bytes).unwrap();
    let long = "x".repeat(256);
    for (image, step, name, why) in [
        ("narrow", Change::Create, "snap", "would have more than 1 references"),
        ("data", Change::Create, "snap", "an image with an external data file cannot have snapshots"),
        ("taken", Change::Create, "snap", "the image has one with this name"),
        ("taken", Change::Create, "", "name of 0 bytes: want 1 to 255"),
        ("taken", Change::Create, &long, "name of 256 bytes: want 1 to 255"),
        ("taken", Change::Apply, "other", "no snapshot \"other\": the image has [snap]"),
        ("taken", Change::Delete, "other", "no snapshot \"other\": the image has [snap]"),
        ("damaged", Change::Create, "snap", "2 errors in the metadata (freestone image repair may end that)"),
    ] {
        let path = folder.path(image);
        let before = std::fs::read(&path).unwrap();
        let text = change(writable(&path), step, name).unwrap_err().to_string();
        assert!(text.ends_with(why), "{image}: {text}");
        assert!(std::fs::read(&path).unwrap() == before, "{image} has changed");
    }
}

/// The bytes of the disk and of its snapshots, by name.
fn everything(path: &Path) -> Vec<(String, Vec<u8>)> {
    let device = file(path);
    let opened = device.clone();
    let names = reactor::run(async move { Image::open(opened).await.unwrap().snapshots });
    let mut all = vec![("the disk".to_owned(), None)];
    all.extend(names.into_iter().map(|snapshot| (snapshot.name.clone(), Some(snapshot.name))));
    let read = |snapshot: Option<String>| {
        let device = device.clone();
        let disk = reactor::run(async move { open(device, Others::default(), snapshot.as_deref()).await });
        contents(&(Arc::new(disk.unwrap()) as _))
    };
    all.into_iter().map(|(name, snapshot)| (name, read(snapshot))).collect()
}

#[test]
fn a_change_of_snapshots_that_is_interrupted_has_happened_or_not() {
    let folder = Folder::new();
    let path = folder.path("disk");
    let mut interrupted = 0;
    for options in ["cluster_size=4096", "cluster_size=512,refcount_bits=64"] {
        folder.img(&format!("create -f qcow2 -o {options} disk 1M"));
        folder.io("disk", &mixed_writes(1, 1 << 20, 4096, true)[..12]);
        change(writable(&path), Change::Create, "first").unwrap();
        folder.io("disk", &mixed_writes(2, 1 << 20, 4096, true)[..12]);
        let bytes = std::fs::read(&path).unwrap();
        for (step, name) in [(Change::Create, "second"), (Change::Apply, "first"), (Change::Delete, "first")]
        {
            let reset = || std::fs::write(&path, &bytes).unwrap();
            reset();
            let before = everything(&path);
            change(writable(&path), step, name).unwrap();
            let after = everything(&path);
            assert_ne!(before, after);
            for writes in 0.. {
                reset();
                let left = Arc::new(AtomicU64::new(writes));
                let device = stopping(writable(&path), left, false);
                let is_done = change(device, step, name).is_ok();
                let (when, now) = (format!("{options}, {step:?}, after {writes} writes"), everything(&path));
                assert!(now == before || now == after, "{when}");
                let repaired = reactor::run({
                    let device = writable(&path);
                    async move { qcow2::repair(&device, Level::All).await.unwrap() }
                });
                assert!(too_low(&repaired.before).is_empty(), "{when}: {repaired:?}");
                assert_clean(&folder, &when);
                assert!(everything(&path) == now, "{when}: the repair has changed bytes");
                if is_done {
                    break;
                }
                interrupted += 1;
            }
        }
    }
    assert!(interrupted > 60, "{interrupted}");
}

#[test]
fn a_table_whose_cluster_has_other_uses_stops_a_command_before_it_writes() {
    use std::os::unix::fs::FileExt;
    let folder = Folder::new();
    folder.img("create -f qcow2 disk 1M");
    folder.io("disk", &["write -P 1 0 64k".into(), "write -P 2 64k 64k".into()]);
    // The refcount table, its block, the L1 table and the L2 table are the clusters 1 to 4.
    let parts = [(1_u64, "refcount table"), (3, "L1 table"), (4, "L2 table")];
    let original = std::fs::read(folder.path("disk")).unwrap();
    for (cluster, part) in parts {
        std::fs::write(folder.path("disk"), &original).unwrap();
        // Data of the disk is in such a cluster, with the refcount of two references.
        let image = std::fs::File::options().write(true).open(folder.path("disk")).unwrap();
        image.write_all_at(&(cluster << 16).to_be_bytes(), 4 << 16).unwrap();
        image.write_all_at(&2_u16.to_be_bytes(), (2 << 16) + 2 * cluster).unwrap();
        image.write_all_at(&0_u16.to_be_bytes(), (2 << 16) + 2 * 5).unwrap();
        if cluster == 4 {
            // The entry of the L1 table has a COPIED bit, which its second reference forbids.
            image.write_all_at(&(4_u64 << 16).to_be_bytes(), 3 << 16).unwrap();
        }
        assert_eq!(check(file(&folder.path("disk"))).unwrap().messages, [""; 0], "{part}");
        let before = std::fs::read(folder.path("disk")).unwrap();
        let error = change(writable(&folder.path("disk")), Change::Create, "name").unwrap_err().to_string();
        let expected = format!("{part} at byte {}: its cluster has other uses", cluster << 16);
        assert!(error.ends_with(&expected), "{error}");
        assert!(std::fs::read(folder.path("disk")).unwrap() == before, "{part}");
    }
}
