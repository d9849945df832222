//! The data of a backing file is copied into an image that is in use. QEMU reads and checks it.

use crate::disk::{Disk, try_open};
use crate::tools::{Folder, contents, file};
use block::Device;
use drivers::io_uring::{Options, UringDevice};
use qcow2::{Image, LiveImage, Others, Stream};
use reactor::{CoreConfig, Cores};
use std::sync::Arc;
use std::time::Duration;

/// Bytes that are copied at a time: of several clusters, and not all.
const PART: u64 = 300 << 10;

/// A backing file with data in every other part of `step` bytes, and the disk over it.
fn base(folder: &Folder, bytes: u64, step: u64, size: u64) -> Vec<u8> {
    let byte = |at: u64| if (at / step).is_multiple_of(2) { (at / 512 % 251) as u8 + 1 } else { 0 };
    let data: Vec<u8> = (0..bytes).map(byte).collect();
    std::fs::write(folder.path("base.raw"), &data).unwrap();
    // The file has holes.
    folder.img("convert -f raw -O raw base.raw holes.raw");
    std::fs::rename(folder.path("holes.raw"), folder.path("base.raw")).unwrap();
    let mut disk = data;
    disk.resize(size as usize, 0);
    disk
}

fn open(folder: &Folder) -> Arc<LiveImage> {
    Arc::new(try_open(&folder.path("disk"), Some(file(&folder.path("base.raw")))).unwrap())
}

/// Copies up to `parts` parts on a core of its own.
fn copy(stream: &Stream, parts: usize) -> std::thread::JoinHandle<u64> {
    let stream = stream.clone();
    std::thread::spawn(move || {
        let cores = Cores::start(&[CoreConfig::default()]).unwrap();
        let copied = cores.get(0).block_on(move |_| async move {
            let channel = stream.open_channel().unwrap();
            let mut left = u64::MAX;
            for _ in 0..parts {
                left = channel.copy(PART).await.unwrap();
                if left == 0 {
                    break;
                }
            }
            left
        });
        copied.unwrap()
    })
}

/// Streams an image with these options of `qemu-img create` between, and during, random requests.
fn exercise(options: &str, cluster: u64, base_bytes: u64, step: u64) {
    let size = (3 << 20) + 512;
    let folder = Folder::new();
    let bytes = base(&folder, base_bytes, step, size);
    folder
        .img(&format!("create -f qcow2 -F raw -b base.raw -o {options},cluster_size={cluster} disk {size}"));
    let is_v3 = !options.contains("compat=0.10");
    let mut disk = Disk { bytes, cluster, has_zeroes: is_v3, has_discard: is_v3 };
    let device = open(&folder);
    disk.work(&device, cluster, 40);
    // One stream that does not end, and one that does.
    let stream = device.begin_stream().unwrap();
    assert!(copy(&stream, 1).join().unwrap() > 0);
    let error = stream.finish().unwrap_err().to_string();
    assert!(error.contains("bytes of the backing file were copied"), "{error}");
    disk.work(&device, cluster + 1, 40);
    let stream = device.begin_stream().unwrap();
    let copying = copy(&stream, usize::MAX);
    disk.work(&device, cluster + 2, 150);
    assert_eq!(copying.join().unwrap(), 0);
    assert!(contents(&(device.clone() as _)) == disk.bytes, "{options} {cluster}");
    stream.finish().unwrap();
    // Nothing reads the old backing file any more.
    std::fs::write(folder.path("base.raw"), vec![0xee; base_bytes as usize]).unwrap();
    assert!(contents(&(device.clone() as _)) == disk.bytes, "{options} {cluster}: the old file is read");
    let error = device.begin_stream().err().unwrap().to_string();
    assert!(error.contains("no backing file"), "{error}");
    disk.has_discard = false;
    disk.work(&device, cluster + 3, 60);
    drop(device);
    folder.img("check disk");
    assert!(!folder.img("info disk").contains("backing"), "{options}");
    assert!(folder.raw("", "disk") == disk.bytes, "{options} {cluster}");
    let device = Arc::new(try_open(&folder.path("disk"), None).unwrap());
    assert!(contents(&(device.clone() as _)) == disk.bytes, "{options} {cluster}");
}

#[test]
fn an_image_keeps_its_bytes_and_needs_no_backing_file() {
    for (version, cluster) in [("compat=0.10", 4096), ("compat=1.1", 512), ("compat=1.1", 64 << 10)] {
        for (base_bytes, step) in [(1 << 20, 8192), ((2 << 20) + 1536, 200 << 10), (5 << 20, 1 << 20)] {
            exercise(version, cluster, base_bytes, step);
        }
    }
    exercise("compat=1.1,lazy_refcounts=on", 256 << 10, 3 << 20, 64 << 10);
}

#[test]
fn subclusters_are_streamed() {
    for (cluster, step) in [(16 << 10, 1536), (64 << 10, 8192), (128 << 10, 300 << 10)] {
        exercise("compat=1.1,extended_l2=on", cluster, (2 << 20) + 1536, step);
    }
}

/// Bytes of a disk that have data in its image, by what `qemu-img map --output json` said.
fn bytes_of_data(map: &str) -> u64 {
    let lines = map.lines().filter(|line| line.contains("\"data\": true"));
    let length = |line: &str| line.split_once("\"length\": ")?.1.split_once(',')?.0.parse::<u64>().ok();
    lines.map(|line| length(line).unwrap_or_else(|| panic!("{line}"))).sum()
}

#[test]
fn parts_without_data_take_no_room() {
    let folder = Folder::new();
    let disk = base(&folder, 8 << 20, 1 << 20, 16 << 20);
    folder.img("create -f qcow2 -F raw -b base.raw disk 16M");
    let device = open(&folder);
    let stream = device.begin_stream().unwrap();
    assert_eq!(copy(&stream, usize::MAX).join().unwrap(), 0);
    stream.finish().unwrap();
    drop(device);
    folder.img("check disk");
    let map = folder.img("map --output json disk");
    // Clusters of a part are allocated in the order in which their reads end: runs may be short.
    assert_eq!(bytes_of_data(&map), 4 << 20, "{map}");
    assert!(std::fs::metadata(folder.path("disk")).unwrap().len() < 5 << 20);
    assert!(folder.raw("", "disk") == disk);
}

#[test]
fn an_image_with_a_data_file_is_streamed() {
    let folder = Folder::new();
    let bytes = base(&folder, (2 << 20) + 1536, 40 << 10, 3 << 20);
    folder.img("create -f qcow2 -F raw -b base.raw -o data_file=data disk 3M");
    let [file_of_image, data] = ["disk", "data"].map(|name| {
        let device = UringDevice::open(&Options::new(folder.path(name))).unwrap();
        Arc::new(device) as Arc<dyn Device>
    });
    let image = reactor::run(async move { Image::open(file_of_image).await }).unwrap();
    let others = Others { backing: Some(file(&folder.path("base.raw"))), data_file: Some(data) };
    let device = Arc::new(LiveImage::open(image, others, 16 << 10, None).unwrap());
    let mut disk = Disk { bytes, cluster: 64 << 10, has_zeroes: true, has_discard: true };
    disk.work(&device, 1, 40);
    let stream = device.begin_stream().unwrap();
    let copying = copy(&stream, usize::MAX);
    disk.work(&device, 2, 80);
    assert_eq!(copying.join().unwrap(), 0);
    stream.finish().unwrap();
    std::fs::remove_file(folder.path("base.raw")).unwrap();
    assert!(contents(&(device.clone() as _)) == disk.bytes);
    drop(device);
    folder.img("check disk");
    assert!(folder.raw("", "disk") == disk.bytes);
}

#[test]
fn a_disk_that_ends_inside_a_block_keeps_the_backing_file() {
    let folder = Folder::new();
    base(&folder, 1 << 20, 1 << 20, 1 << 20);
    folder.img("create -f qcow2 -F raw -b base.raw disk 1M");
    let mut image = std::fs::read(folder.path("disk")).unwrap();
    image[24..32].copy_from_slice(&((1u64 << 20) - 112).to_be_bytes());
    std::fs::write(folder.path("disk"), image).unwrap();
    let error = open(&folder).begin_stream().err().unwrap().to_string();
    assert!(error.ends_with("size 1048464: the last 400 bytes are no whole block"), "{error}");
}

#[test]
fn snapshots_keep_the_backing_file() {
    let folder = Folder::new();
    let disk = base(&folder, 1 << 20, 1 << 20, 1 << 20);
    folder.img("create -f qcow2 -F raw -b base.raw disk 1M");
    folder.img("snapshot -c before disk");
    let device = open(&folder);
    let error = device.begin_stream().err().unwrap().to_string();
    assert!(error.ends_with("1 internal snapshots need the backing file"), "{error}");
    device.delete_snapshot("before").unwrap();
    let stream = device.begin_stream().unwrap();
    for (what, error) in [
        ("snapshot", device.create_snapshot("during", Duration::ZERO).err()),
        ("stream", device.begin_stream().err()),
    ] {
        let error = error.expect(what).to_string();
        assert!(error.contains("is copied"), "{what}: {error}");
    }
    drop(stream);
    device.create_snapshot("after", Duration::ZERO).unwrap();
    drop(device);
    folder.img("check disk");
    assert!(folder.raw("-l after", "disk") == disk);
}
