//! Disks of another size: QEMU reads their bytes, and finds nothing wrong.

use crate::damage::{CLEAN, check, verdict};
use crate::repair::{stopping, writable};
use crate::tools::{Folder, file, mixed_writes};
use base::Rng;
use block::Device;
use qcow2::offline::resize::resize;
use qcow2::{Error, Level};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

fn grow_or_shrink(path: &Path, backing: Option<&Path>, size: u64) -> Result<(), Error> {
    resize(&writable(path), backing.map(file), size, true)
}

/// Resizes, writes, and makes snapshots in turn with QEMU.
fn exercise(options: &str, base: Option<u64>, seed: u64) {
    let folder = Folder::new();
    let path = folder.path("disk");
    let mut names = String::new();
    let (mut disk, mut backing) = (vec![0; 1 << 20], None);
    if let Some(base) = base {
        let data: Vec<u8> = (0..base).map(|at| (at / 512 % 251) as u8 + 1).collect();
        std::fs::write(folder.path("base.raw"), &data).unwrap();
        let shared = disk.len().min(data.len());
        disk[..shared].copy_from_slice(&data[..shared]);
        names = "-F raw -b base.raw".into();
        backing = Some(folder.path("base.raw"));
    }
    folder.img(&format!("create -f qcow2 {names} -o {options} disk 1M"));
    let is_v3 = !options.contains("0.10");
    let can_have_snapshots = is_v3 && !options.contains("refcount_bits=1,");
    let mut random = Rng::new(seed);
    let mut snapshots: Vec<(String, Vec<u8>)> = Vec::new();
    for round in 0..12 {
        // QEMU's commands may have another idea of bytes that a discard leaves.
        let mut writes = mixed_writes(seed * 100 + round, disk.len() as u64 / 4096 * 4096, 4096, is_v3);
        writes.retain(|command| is_v3 || base.is_none() || !command.starts_with("discard"));
        folder.io("disk", &writes[..8]);
        disk = folder.raw("", "disk");
        if can_have_snapshots && round % 5 == 2 {
            folder.img(&format!("snapshot -c s{round} disk"));
            snapshots.push((format!("s{round}"), disk.clone()));
        }
        let sectors = 32 + random.below(if round % 4 == 3 { 200 } else { 9000 });
        let size = sectors * 512;
        let when = format!("{options}, base {base:?}, round {round}: {} to {size}", disk.len());
        let hides = base.is_some_and(|base| base > disk.len() as u64) && size > disk.len() as u64;
        let done = grow_or_shrink(&path, backing.as_deref(), size);
        match done {
            Err(error) if hides && !is_v3 => {
                assert!(error.to_string().contains("version 2 has no entry"), "{when}: {error}")
            }
            result => {
                result.unwrap_or_else(|error| panic!("{when}: {error}"));
                disk.resize(size as usize, 0);
            }
        }
        let report = check(file(&path));
        assert_eq!(verdict(&report), CLEAN, "{when}: {report:?}");
        folder.img("check -f qcow2 disk");
        let now = folder.raw("", "disk");
        assert_eq!(now.len(), disk.len(), "{when}");
        let different = now.iter().zip(&disk).position(|(a, b)| a != b);
        assert_eq!(different, None, "{when}");
        for (name, bytes) in &snapshots {
            // QEMU gives every snapshot the size that the disk has now.
            let snapshot = folder.raw(&format!("-l {name}"), "disk");
            let both = snapshot.len().min(bytes.len());
            assert!(snapshot[..both] == bytes[..both], "{when}: {name} has changed");
        }
    }
}

#[test]
fn disks_grow_and_shrink_and_new_bytes_are_zeroes() {
    for (seed, (options, base)) in [
        ("cluster_size=512", None),
        ("cluster_size=512,refcount_bits=64", Some(3 << 20)),
        ("cluster_size=4096", Some(2 << 20)),
        ("refcount_bits=1,cluster_size=4096", Some((2 << 20) + 1536)),
        ("cluster_size=65536", Some(5 << 20)),
        ("extended_l2=on,cluster_size=16384", Some(5 << 20)),
        ("extended_l2=on,cluster_size=65536", None),
        ("compat=0.10,cluster_size=512", None),
        ("compat=0.10,cluster_size=4096", Some(2 << 20)),
    ]
    .into_iter()
    .enumerate()
    {
        exercise(options, base, seed as u64);
    }
}

#[test]
fn a_table_moves_only_if_its_cluster_is_full_and_the_header_keeps_its_bytes() {
    let folder = Folder::new();
    folder.img("create -f qcow2 disk 1G");
    let path = folder.path("disk");
    let before = std::fs::read(&path).unwrap();
    grow_or_shrink(&path, None, 4 << 40).unwrap();
    let after = std::fs::read(&path).unwrap();
    let changed: Vec<usize> = (0..before.len()).filter(|at| before[*at] != after[*at]).collect();
    assert!(changed.iter().all(|at| (24..32).contains(at) || (36..40).contains(at)), "{changed:?}");
    assert_eq!(before.len().next_multiple_of(65536), after.len());
    grow_or_shrink(&path, None, 5 << 40).unwrap();
    folder.img("check disk");
    folder.io("disk", &["write -P 7 4095G 64k".into(), "write -P 8 5119G 64k".into()]);
    folder.img("check disk");
    grow_or_shrink(&path, None, 512).unwrap();
    folder.img("check disk");
    assert!(std::fs::metadata(&path).unwrap().len() < 1 << 20, "the file has shrunk");
    folder.img("create -f qcow2 -o extended_l2=on extended 1M");
    folder.io("extended", &["write -P 1 0 1M".into()]);
    grow_or_shrink(&folder.path("extended"), None, 1 << 30).unwrap();
    folder.img("check extended");
}

#[test]
fn sizes_that_an_image_cannot_have_are_refused_and_change_nothing() {
    let folder = Folder::new();
    folder.img("create -f qcow2 plain 1M");
    folder.img("create -f qcow2 -o cluster_size=512 small 1M");
    folder.img("create -f qcow2 -o data_file=data.raw data 1M");
    folder.img("create -f qcow2 bitmaps 1M");
    folder.img("bitmap --add bitmaps b");
    folder.img("create -f qcow2 -o compat=0.10 old 1M");
    folder.img("snapshot -c snap old");
    folder.img("create -f raw base.raw 2M");
    folder.img("create -f qcow2 -F raw -b base.raw over 1M");
    for (image, size, may_shrink, why) in [
        ("plain", 1000, true, "size 1000: want a multiple of 512 bytes"),
        ("plain", 0, true, "size 0: want a multiple of 512 bytes"),
        ("plain", 512, false, "size 512: less than 1048576 (--shrink allows that)"),
        ("small", 1 << 40, false, "size 1099511627776: too large for clusters of 512 bytes"),
        ("data", 2 << 20, false, "images with an external data file are not resized yet"),
        ("bitmaps", 2 << 20, false, "1 dirty bitmaps, which are not resized yet"),
        ("old", 2 << 20, false, "version 2 with snapshots, which do not state their size"),
        ("over", 2 << 20, false, "the backing file \"base.raw\" is not open"),
    ] {
        let path = folder.path(image);
        let before = std::fs::read(&path).unwrap();
        let text = resize(&writable(&path), None, size, may_shrink).unwrap_err().to_string();
        assert!(text.ends_with(why), "{image}: {text}");
        assert!(std::fs::read(&path).unwrap() == before, "{image} has changed");
    }
}

#[test]
fn a_resize_that_is_interrupted_leaves_the_old_size_or_the_new_one() {
    let folder = Folder::new();
    let path = folder.path("disk");
    std::fs::write(folder.path("base.raw"), vec![9; 2 << 20]).unwrap();
    folder.img("create -f qcow2 -F raw -b base.raw -o cluster_size=512 disk 1M");
    folder.io("disk", &["write -P 1 0 100k".into(), "write -P 2 900k 124k".into()]);
    let bytes = std::fs::read(&path).unwrap();
    let disk = folder.raw("", "disk");
    let mut interrupted = 0;
    for size in [100 << 10, 3 << 20] {
        let mut writes = 0;
        loop {
            std::fs::write(&path, &bytes).unwrap();
            let left = Arc::new(AtomicU64::new(writes));
            let device: Arc<dyn Device> = stopping(writable(&path), left, false);
            let backing = Some(file(&folder.path("base.raw")));
            let is_done = resize(&device, backing, size as u64, true).is_ok();
            drop(device);
            let when = format!("{size}, after {writes} writes");
            let now = folder.raw("", "disk");
            let both = disk.len().min(size);
            assert!(now.len() == disk.len() || now.len() == size, "{when}");
            assert!(now[..both] == disk[..both], "{when}: other bytes");
            if now.len() > disk.len() {
                assert!(now[disk.len()..].iter().all(|byte| *byte == 0), "{when}: the backing file is seen");
            }
            let device = writable(&path);
            let repaired = reactor::run(async move { qcow2::repair(&device, Level::All).await.unwrap() });
            assert_eq!(repaired.before.corruptions, 0, "{when}: {repaired:?}");
            folder.img("check disk");
            if is_done {
                assert_eq!(now.len(), size, "{when}");
                break;
            }
            interrupted += 1;
            writes += 1 + writes / 8;
        }
    }
    assert!(interrupted > 20, "{interrupted}");
}
