//! Internal snapshots of images that are in use. QEMU reads and checks them.

use crate::disk::{Disk, try_open};
use crate::tools::{Folder, contents, file, open};
use base::Rng;
use block::{Channel, Device, Flags, Op};
use qcow2::{LiveImage, Others, RestartLog};
use reactor::{CoreConfig, Cores};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

const NOW: Duration = Duration::new(1_700_000_000, 5);

/// Makes and deletes snapshots of an image with these options between random requests.
fn exercise(options: &str, size: u64, cluster: u64, seed: u64) {
    let folder = Folder::new();
    folder.img(&format!("create -f qcow2 -o {options},cluster_size={cluster} disk {size}"));
    let is_v3 = !options.contains("compat=0.10");
    let bytes = vec![0; size as usize];
    let mut disk = Disk { bytes, cluster, has_zeroes: is_v3, has_discard: true };
    let mut kept: Vec<(String, Vec<u8>)> = Vec::new();
    let mut random = Rng::new(seed);
    for boot in 0..2 {
        let device = Arc::new(try_open(&folder.path("disk"), None).unwrap());
        for round in 0..5 {
            disk.work(&device, seed * 100 + boot * 10 + round, 60);
            if random.one_in(3) && !kept.is_empty() {
                let (name, _) = kept.remove(random.below(kept.len() as u64) as usize);
                device.delete_snapshot(&name).unwrap();
            } else {
                let name = format!("snap{boot}{round}");
                device.create_snapshot(&name, NOW).unwrap();
                kept.push((name, disk.bytes.clone()));
            }
            let names: Vec<String> =
                device.snapshots().unwrap().into_iter().map(|known| known.name).collect();
            assert_eq!(names, kept.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>());
        }
        assert!(contents(&(device.clone() as _)) == disk.bytes, "{options}, boot {boot}");
        drop(device);
        let when = format!("{options}, {cluster}, boot {boot}");
        folder.img("check disk");
        assert!(folder.raw("", "disk") == disk.bytes, "{when}");
        for (name, bytes) in &kept {
            assert!(folder.raw(&format!("-l {name}"), "disk") == *bytes, "{when}: {name} has changed");
        }
        folder.io("disk", &[format!("write -P 77 {} 512", size / 2 / 512 * 512)]);
        disk.bytes[(size / 2 / 512 * 512) as usize..][..512].fill(77);
        // QEMU deletes a snapshot of ours, too.
        if let Some((name, _)) = kept.pop() {
            folder.img(&format!("snapshot -d {name} disk"));
            folder.img("check disk");
        }
    }
}

#[test]
fn snapshots_of_an_image_in_use_have_their_bytes_and_qemu_finds_nothing_wrong() {
    for (seed, (options, cluster)) in [
        ("compat=1.1", 4096),
        ("compat=1.1", 65536),
        ("compat=1.1,refcount_bits=64", 512),
        ("compat=1.1,refcount_bits=4", 512),
        ("compat=0.10", 512),
        ("compat=1.1,extended_l2=on", 16384),
        ("compat=1.1,lazy_refcounts=on", 65536),
    ]
    .into_iter()
    .enumerate()
    {
        exercise(options, 3 << 20, cluster, seed as u64);
    }
}

/// Writes the numbers 1, 2, … to blocks in turn, each after the one before it has completed.
async fn count(channel: &dyn Channel, blocks: u64, done: &AtomicU64, is_over: &AtomicBool) {
    while !is_over.load(Ordering::Relaxed) {
        let number = done.load(Ordering::Relaxed) + 1;
        let mut buffer = reactor::current().buffers().take(512).await;
        buffer.as_mut_slice().fill(0);
        buffer.as_mut_slice()[..8].copy_from_slice(&number.to_le_bytes());
        // 7 has no common divisor with the number of blocks: neighbours are written far apart.
        let at = number * 7 % blocks * 512;
        assert_eq!(buffer.transfer(channel, Op::Write, Flags::NONE, at).await.1, Ok(()));
        done.store(number, Ordering::Relaxed);
    }
}

/// The last number that [`count`] had written when the disk had these bytes.
fn counted(bytes: &[u8]) -> u64 {
    let blocks = bytes.len() as u64 / 512;
    let at = |number: u64| {
        let at = (number * 7 % blocks * 512) as usize;
        u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap())
    };
    let last = bytes.chunks_exact(512).map(|block| u64::from_le_bytes(block[..8].try_into().unwrap())).max();
    let last = last.unwrap();
    for number in (last.saturating_sub(blocks - 1).max(1))..=last {
        assert_eq!(at(number), number, "the snapshot has {last}, and lacks an earlier write");
    }
    last
}

#[test]
fn a_snapshot_is_the_disk_at_one_moment_while_cores_write() {
    const BLOCKS: u64 = 4096;
    let folder = Folder::new();
    folder.img(&format!("create -f qcow2 -o cluster_size=4096 disk {}", BLOCKS * 512));
    let device: Arc<LiveImage> = Arc::new(try_open(&folder.path("disk"), None).unwrap());
    let cores = Cores::start(&[CoreConfig::default()]).unwrap();
    let (done, is_over) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let writer = std::thread::spawn({
        let (core, device, done, is_over) = (cores.get(0), device.clone(), done.clone(), is_over.clone());
        move || {
            let counting = core.block_on(move |_| async move {
                let channel = device.open_channel().unwrap();
                count(&*channel, BLOCKS, &done, &is_over).await;
            });
            counting.unwrap();
        }
    });
    let mut between = Vec::new();
    for number in 1..=8u64 {
        // Writes that change tables, and writes in place.
        while done.load(Ordering::Relaxed) < number * 1500 && !writer.is_finished() {
            std::thread::yield_now();
        }
        let before = done.load(Ordering::Relaxed);
        device.create_snapshot(&format!("s{number}"), NOW).unwrap();
        between.push((before, done.load(Ordering::Relaxed) + 1));
        if number % 3 == 0 {
            device.delete_snapshot(&format!("s{}", number - 2)).unwrap();
        }
    }
    is_over.store(true, Ordering::Relaxed);
    writer.join().unwrap();
    drop((device, cores));
    folder.img("check disk");
    for (number, (before, after)) in (1..).zip(between).filter(|(number, _)| ![1, 4].contains(number)) {
        let device = file(&folder.path("disk"));
        let name = format!("s{number}");
        let disk = reactor::run(async move { open(device, Others::default(), Some(&name)).await });
        let last = counted(&contents(&(Arc::new(disk.unwrap()) as _)));
        assert!((before..=after).contains(&last), "snapshot {number}: {last} of {before} to {after}");
    }
}

#[test]
fn a_snapshot_that_cannot_be_made_leaves_the_image_as_it_was() {
    let folder = Folder::new();
    folder.img("create -f qcow2 -o refcount_bits=1 narrow 1M");
    folder.img("create -f qcow2 -o data_file=data.raw data 1M");
    folder.img("create -f qcow2 taken 1M");
    folder.img("snapshot -c snap taken");
    let long = "x".repeat(256);
    for (image, name, why) in [
        ("narrow", "snap", "would have more than 1 references"),
        ("taken", "snap", "the image has one with this name"),
        ("taken", "", "name of 0 bytes: want 1 to 255"),
        ("taken", &long, "name of 256 bytes: want 1 to 255"),
    ] {
        folder.io(image, &["write -P 1 0 64k".into()]);
        let before = std::fs::read(folder.path(image)).unwrap();
        let device = try_open(&folder.path(image), None).unwrap();
        let text = device.create_snapshot(name, NOW).unwrap_err().to_string();
        assert!(text.ends_with(why), "{image}: {text}");
        let text = device.delete_snapshot("other").unwrap_err().to_string();
        assert!(text.contains("no snapshot \"other\""), "{image}: {text}");
        drop(device);
        assert!(std::fs::read(folder.path(image)).unwrap() == before, "{image} has changed");
    }
}

/// The features of the header: incompatible, compatible, autoclear.
fn features(folder: &Folder) -> [u64; 3] {
    let bytes = std::fs::read(folder.path("disk")).unwrap();
    [72, 80, 88].map(|at| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()))
}

#[test]
fn an_image_with_a_snapshot_keeps_its_restart_log_by_another_mark() {
    const SESSION: u64 = 7 << 32;
    for (options, marks) in [("lazy_refcounts=off", [1, SESSION, 0]), ("lazy_refcounts=on", [0, 1, 0])] {
        let folder = Folder::new();
        folder.img(&format!("create -f qcow2 -o {options} disk 1M"));
        let lazy = features(&folder)[1];
        let log = RestartLog::new(tempfile::tempfile().unwrap(), [1; 16], 7, 100);
        let device = Arc::new(crate::disk::try_open_with(&folder.path("disk"), None, Some(log)).unwrap());
        assert_eq!(features(&folder), [0, lazy, SESSION]);
        device.create_snapshot("snap", NOW).unwrap();
        assert_eq!(features(&folder), marks, "{options}");
        device.delete_snapshot("snap").unwrap();
        drop(device);
        assert_eq!(features(&folder), [0, lazy, 0], "{options}");
        folder.img("check disk");
    }
}
