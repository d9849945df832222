//! QEMU reads the bytes that this crate writes, and `qemu-img check` finds nothing wrong.

use crate::disk::{Disk, try_open};
use crate::tools::{self, Folder, compare, contents, file};
use base::Rng;
use block::{Device, Flags, IoError, IoFuture, Op, Request};
use conformance::Suite;
use drivers::io_uring::{Options, UringDevice};
use drivers::mem::{MemDevice, Options as MemOptions};
use qcow2::{Image, LiveImage, Others};
use reactor::{CoreConfig, CoreRef, Cores};
use std::sync::Arc;

fn open(folder: &Folder, image: &str) -> Arc<LiveImage> {
    Arc::new(try_open(&folder.path(image), None).unwrap())
}

/// Writes to images with these options of `qemu-img create`. QEMU writes, too, and makes
/// snapshots, between.
fn check(options: &str, size: u64, cluster: u64, base: Option<u64>) {
    let folder = Folder::new();
    let is_v3 = !options.contains("compat=0.10");
    let mut names = String::new();
    let mut backing = None;
    let mut bytes = vec![0; size as usize];
    if let Some(base) = base {
        let data: Vec<u8> = (0..base).map(|at| (at / 512 % 251) as u8 + 1).collect();
        std::fs::write(folder.path("base.raw"), &data).unwrap();
        let shared = (base.min(size)) as usize;
        bytes[..shared].copy_from_slice(&data[..shared]);
        names = "-F raw -b base.raw".into();
        backing = Some(file(&folder.path("base.raw")));
    }
    folder.img(&format!("create -f qcow2 {names} -o {options},cluster_size={cluster} disk.qcow2 {size}"));
    let mut disk = Disk { bytes, cluster, has_zeroes: is_v3, has_discard: is_v3 || base.is_none() };
    for round in 0..3 {
        let device = Arc::new(try_open(&folder.path("disk.qcow2"), backing.clone()).unwrap());
        disk.work(&device, cluster + round, 120);
        compare(&(device.clone() as _), &disk.bytes);
        drop(device);
        folder.img("check disk.qcow2");
        assert!(folder.raw("", "disk.qcow2") == disk.bytes, "{options} {cluster} round {round}");
        if round == 1 && !options.ends_with("refcount_bits=1") {
            folder.img("snapshot -c snap disk.qcow2");
            std::fs::write(folder.path("snap.raw"), &disk.bytes).unwrap();
        }
        folder.io("disk.qcow2", &[format!("write -P 77 {} 512", size / 2 / 512 * 512)]);
        disk.bytes[(size / 2 / 512 * 512) as usize..][..512].fill(77);
    }
    if !options.ends_with("refcount_bits=1") {
        let snapshot = folder.raw("-l snap", "disk.qcow2");
        assert!(snapshot == std::fs::read(folder.path("snap.raw")).unwrap(), "the snapshot has changed");
        folder.img("snapshot -d snap disk.qcow2");
        folder.img("check disk.qcow2");
    }
}

#[test]
fn clusters_of_every_size_are_written() {
    for version in ["compat=0.10", "compat=1.1"] {
        check(version, 3 << 20, 512, None);
        check(version, 9 << 20, 4096, None);
        check(version, 20 << 20, 64 << 10, None);
        check(version, (20 << 20) + 512, 2 << 20, None);
    }
}

#[test]
fn refcounts_of_every_width_are_written() {
    for bits in [1, 2, 4, 8, 16, 32, 64] {
        check(&format!("compat=1.1,refcount_bits={bits}"), 3 << 20, 4096, None);
    }
}

#[test]
fn an_overlay_hides_a_backing_file_of_any_length() {
    for (version, cluster) in [("compat=0.10", 4096), ("compat=1.1", 512), ("compat=1.1", 64 << 10)] {
        for base in [1 << 20, (2 << 20) + 1536, 5 << 20] {
            check(version, 3 << 20, cluster, Some(base));
        }
    }
}

#[test]
fn subclusters_are_written() {
    for (cluster, base) in [(16 << 10, None), (64 << 10, Some((2 << 20) + 1536)), (128 << 10, Some(5 << 20))]
    {
        check("compat=1.1,extended_l2=on", (3 << 20) + 512, cluster, base);
    }
    check("compat=1.1,extended_l2=on,preallocation=metadata", 3 << 20, 64 << 10, None);
}

#[test]
fn a_write_to_a_subcluster_leaves_the_others_alone() {
    let folder = Folder::new();
    let base: Vec<u8> = vec![9; 1 << 20];
    std::fs::write(folder.path("base.raw"), base).unwrap();
    folder.img("create -f qcow2 -o extended_l2=on,cluster_size=128K -F raw -b base.raw disk.qcow2 1M");
    let device = try_open(&folder.path("disk.qcow2"), Some(file(&folder.path("base.raw")))).unwrap();
    reactor::run(async move {
        let channel = device.open_channel().unwrap();
        let buffer = reactor::current().buffers().take(4096).await;
        buffer.transfer(&*channel, Op::Write, Flags::NONE, 8192).await.1.unwrap();
        let zeroes = Request::write_zeroes(4096, Flags::NONE);
        channel.submit(&zeroes, 128 << 10).await.unwrap();
        drop(channel);
        drop(device);
    });
    let said = folder.img("map --output json disk.qcow2");
    for part in [
        r#"{ "start": 0, "length": 8192, "depth": 1, "present": true, "zero": false"#,
        r#"{ "start": 8192, "length": 4096, "depth": 0, "present": true, "zero": false"#,
        r#"{ "start": 12288, "length": 118784, "depth": 1, "present": true, "zero": false"#,
        r#"{ "start": 131072, "length": 4096, "depth": 0, "present": true, "zero": true"#,
    ] {
        assert!(said.contains(part), "{said}");
    }
}

/// The messages that the home of an image gets, and the channels of another core.
struct Messages {
    device: Arc<LiveImage>,
    home: CoreRef,
    user: CoreRef,
    _cores: Cores,
}

impl Messages {
    /// Opens an image with these first bytes on a device that has or gets them.
    fn open(device: Arc<dyn Device>, bytes: &[u8]) -> Messages {
        let mut bytes = bytes.to_vec();
        bytes.resize(bytes.len().next_multiple_of(512), 0);
        let image = reactor::run(async move {
            let channel = device.open_channel().unwrap();
            for (number, part) in (0..).zip(bytes.chunks(1 << 16)) {
                let mut buffer = reactor::current().buffers().take(part.len()).await;
                buffer.as_mut_slice().copy_from_slice(part);
                buffer.transfer(&*channel, Op::Write, Flags::NONE, number << 16).await.1.unwrap();
            }
            drop(channel);
            Image::open(device).await
        });
        let image = image.unwrap();
        let cores = Cores::start(&[CoreConfig::default(), CoreConfig::default()]).unwrap();
        let (home, user) = (cores.get(1), cores.get(0));
        let device = LiveImage::open_on(home.clone(), image, Others::default(), 1 << 20, None).unwrap();
        Messages { device: Arc::new(device), home, user, _cores: cores }
    }

    /// How many a new channel and its writes need, which begin at once: bytes and places. All of
    /// them are read.
    fn of(&self, writes: &'static [(usize, u64)]) -> u64 {
        let device = self.device.clone();
        let count = || self.home.call(|core| core.messages()).unwrap();
        let before = count();
        let written = self.user.block_on(move |_| async move {
            let channel = device.open_channel().unwrap();
            // The core has the table of entries before the writes begin, so that none waits for it.
            assert!(tools::read(&*channel, 0, 512).await.1.is_ok());
            let begun = (1..).zip(writes).map(|(value, (len, at))| {
                let channel = channel.clone();
                IoFuture::new(async move { tools::write(&*channel, *at, *len as u64, value).await })
            });
            block::join_all(begun).await.unwrap();
            for (value, (len, at)) in (1..).zip(writes) {
                let (bytes, result) = tools::read(&*channel, *at, *len as u64).await;
                assert!(result.is_ok() && bytes.iter().all(|byte| *byte == value), "byte {at}");
            }
        });
        written.unwrap();
        // A task of the channel's end, which is in the queue of its core, tells the home.
        self.user.block_on(|_| async {}).unwrap();
        count() - before - 1
    }
}

#[test]
fn a_write_of_whole_subclusters_asks_the_home_once_and_that_of_a_part_twice() {
    let folder = Folder::new();
    folder.img("create -f qcow2 -o extended_l2=on,cluster_size=128K disk.qcow2 1M");
    let device = UringDevice::open(&Options::new(folder.path("disk.qcow2"))).unwrap();
    let messages = Messages::open(Arc::new(device), &[]);
    messages.of(&[(4096, 0)]);
    // Opening a channel, which a write in place needs, too.
    let opened = messages.of(&[(4096, 0)]);
    assert_eq!(messages.of(&[(4096, 8192)]) - opened, 1);
    assert_eq!(messages.of(&[(8192, 16384)]) - opened, 1);
    assert_eq!(messages.of(&[(1024, 32768)]) - opened, 2);
    drop(messages);
    folder.img("check disk.qcow2");
}

#[test]
fn writes_whose_data_is_there_in_one_turn_ask_the_home_once() {
    let folder = Folder::new();
    folder.img("create -f qcow2 -o extended_l2=on,cluster_size=128K disk.qcow2 1M");
    let bytes = std::fs::read(folder.path("disk.qcow2")).unwrap();
    // A write to memory ends at once.
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(&MemOptions::new(8 << 20)).unwrap());
    let messages = Messages::open(device.clone(), &bytes);
    const CLUSTERS: [(usize, u64); 4] = [(4096, 0), (4096, 128 << 10), (4096, 256 << 10), (4096, 384 << 10)];
    messages.of(&CLUSTERS);
    let opened = messages.of(&CLUSTERS);
    const OTHERS: [(usize, u64); 4] =
        [(4096, 8192), (4096, (128 << 10) + 8192), (4096, (256 << 10) + 8192), (8192, (384 << 10) + 8192)];
    assert_eq!(messages.of(&OTHERS) - opened, 1);
    // A batch sets one entry of a cluster; the second write to it asks again.
    const TWICE: [(usize, u64); 4] =
        [(4096, 16384), (4096, 20480), (4096, (128 << 10) + 16384), (4096, (256 << 10) + 16384)];
    assert_eq!(messages.of(&TWICE) - opened, 2);
    drop(messages);
    let checked = reactor::run(async move { qcow2::check(&*device).await }).unwrap();
    assert_eq!((checked.corruptions, checked.check_errors, checked.leaks), (0, 0, 0));
}

#[test]
fn zeroes_beside_zeroes_of_a_backing_file_need_no_room() {
    let folder = Folder::new();
    folder.img("create -f qcow2 base.qcow2 1M");
    folder.io("base.qcow2", &["write -P 5 0 128k".into()]);
    folder.img("create -f qcow2 -F qcow2 -b base.qcow2 disk.qcow2 1M");
    let before = std::fs::metadata(folder.path("disk.qcow2")).unwrap().len();
    let device =
        try_open(&folder.path("disk.qcow2"), Some(folder.open("base.qcow2", Others::default()))).unwrap();
    reactor::run(async move {
        let channel = device.open_channel().unwrap();
        for at in [512, (192 << 10) + 512, (1 << 20) - 512] {
            channel.submit(&Request::write_zeroes(512, Flags::NONE), at).await.unwrap();
        }
        drop(channel);
        drop(device);
    });
    // An L2 table, and the cluster that the backing file has.
    let after = std::fs::metadata(folder.path("disk.qcow2")).unwrap().len();
    assert_eq!(after.next_multiple_of(65536) - before.next_multiple_of(65536), 2 << 16);
    let mut expected = vec![0; 1 << 20];
    expected[..128 << 10].fill(5);
    expected[512..1024].fill(0);
    assert!(folder.raw("", "disk.qcow2") == expected);
    folder.img("check disk.qcow2");
}

#[test]
fn external_data_files_are_written() {
    for (options, is_raw) in [("", false), ("data_file_raw=on,", true), ("extended_l2=on,", false)] {
        let folder = Folder::new();
        let size = (3 << 20) + 512;
        folder.img(&format!("create -f qcow2 -o {options}data_file=data.raw disk.qcow2 {size}"));
        // A data file that is too short grows.
        std::fs::File::options().write(true).open(folder.path("data.raw")).unwrap().set_len(1 << 20).unwrap();
        let mut disk = Disk { bytes: vec![0; size], cluster: 65536, has_zeroes: true, has_discard: !is_raw };
        for round in 0..3 {
            let image: Arc<dyn Device> =
                Arc::new(UringDevice::open(&Options::new(folder.path("disk.qcow2"))).unwrap());
            let image = reactor::run(async move { Image::open(image).await }).unwrap();
            let data: Arc<dyn Device> =
                Arc::new(UringDevice::open(&Options::new(folder.path("data.raw"))).unwrap());
            let others = Others { backing: None, data_file: Some(data) };
            let device = Arc::new(LiveImage::open(image, others, 16 << 10, None).unwrap());
            disk.work(&device, round, 150);
            compare(&(device.clone() as _), &disk.bytes);
            drop(device);
            folder.img("check disk.qcow2");
            assert!(folder.raw("", "disk.qcow2") == disk.bytes, "{options} round {round}");
            if is_raw {
                assert!(std::fs::read(folder.path("data.raw")).unwrap() == disk.bytes, "round {round}");
            }
            folder.io("disk.qcow2", &[format!("write -P 77 {} 512", size / 2 / 512 * 512)]);
            disk.bytes[size / 2 / 512 * 512..][..512].fill(77);
        }
    }
}

#[test]
fn preallocated_images_are_written() {
    for mode in ["metadata", "falloc", "full"] {
        check(&format!("compat=1.1,preallocation={mode}"), 3 << 20, 64 << 10, None);
    }
}

#[test]
fn compressed_clusters_are_overwritten() {
    for (kind, cluster) in [("zlib", 512), ("zlib", 64 << 10), ("zstd", 64 << 10), ("zstd", 2 << 20)] {
        let folder = Folder::new();
        let size = 6 << 20;
        let bytes: Vec<u8> = (0..size).map(|at| (at / 300 % 251) as u8 + 1).collect();
        std::fs::write(folder.path("source.raw"), &bytes).unwrap();
        let options = format!("-o compression_type={kind},cluster_size={cluster}");
        folder.img(&format!("convert -t unsafe -c -f raw -O qcow2 {options} source.raw disk.qcow2"));
        let mut disk = Disk { bytes, cluster, has_zeroes: true, has_discard: true };
        let device = open(&folder, "disk.qcow2");
        disk.work(&device, cluster, 200);
        compare(&(device.clone() as _), &disk.bytes);
        drop(device);
        folder.img("check disk.qcow2");
        assert!(folder.raw("", "disk.qcow2") == disk.bytes, "{kind} {cluster}");
    }
}

#[test]
fn it_passes_the_suite_of_devices() {
    for cluster in [512, 64 << 10] {
        let folder = Folder::new();
        folder.img(&format!("create -f qcow2 -o cluster_size={cluster} disk.qcow2 24M"));
        let device = open(&folder, "disk.qcow2");
        Suite::new(device).run();
        folder.img("check disk.qcow2");
    }
}

#[test]
fn two_cores_write_to_one_image() {
    for (cluster, has_backing) in [(512, false), (64 << 10, true)] {
        let folder = Folder::new();
        let size = 8 << 20;
        std::fs::write(folder.path("base.raw"), vec![9; size]).unwrap();
        let backing = if has_backing { "-F raw -b base.raw" } else { "" };
        folder.img(&format!("create -f qcow2 {backing} -o cluster_size={cluster} disk.qcow2 {size}"));
        let backing = has_backing.then(|| file(&folder.path("base.raw")));
        let device = Arc::new(try_open(&folder.path("disk.qcow2"), backing).unwrap());
        let cores = Cores::start(&[CoreConfig::default(), CoreConfig::default()]).unwrap();
        // Each core has every other block of 4 KiB.
        let started: Vec<_> = (0..2u64)
            .map(|number| {
                let (core, device) = (cores.get(number as usize), device.clone());
                std::thread::spawn(move || {
                    let work = core.block_on(move |_| async move {
                        let channel = device.open_channel().unwrap();
                        let mut rng = Rng::new(number);
                        let mut own = vec![None; size / 8192];
                        for round in 0..2000u64 {
                            let place = rng.below(own.len() as u64);
                            let at = place * 8192 + number * 4096;
                            let mut buffer = reactor::current().buffers().take(4096).await;
                            if let (Some(byte), 0) = (own[place as usize], round % 2) {
                                let (buffer, result) =
                                    buffer.transfer(&*channel, Op::Read, Flags::NONE, at).await;
                                assert!(result == Ok(()) && buffer.as_slice() == [byte; 4096], "at {at}");
                                continue;
                            }
                            let byte = 1 + rng.draw() as u8 % 255;
                            buffer.as_mut_slice().fill(byte);
                            let flags = if round % 64 == 7 { Flags::FUA } else { Flags::NONE };
                            assert_eq!(buffer.transfer(&*channel, Op::Write, flags, at).await.1, Ok(()));
                            own[place as usize] = Some(byte);
                        }
                        own
                    });
                    work.unwrap()
                })
            })
            .collect();
        let written: Vec<_> = started.into_iter().map(|thread| thread.join().unwrap()).collect();
        let empty = if has_backing { 9 } else { 0 };
        let mut expected = vec![empty; size];
        for (number, own) in written.iter().enumerate() {
            for (place, byte) in own.iter().enumerate().filter_map(|(place, byte)| Some((place, (*byte)?))) {
                expected[place * 8192 + number * 4096..][..4096].fill(byte);
            }
        }
        drop(cores);
        assert!(contents(&(device.clone() as _)) == expected);
        drop(device);
        folder.img("check disk.qcow2");
        assert!(folder.raw("", "disk.qcow2") == expected);
    }
}

#[test]
fn a_file_grows_ahead_and_is_cut_back_at_the_end() {
    let folder = Folder::new();
    folder.img("create -f qcow2 disk.qcow2 1G");
    let len = || std::fs::metadata(folder.path("disk.qcow2")).unwrap().len();
    let before = len();
    let device = open(&folder, "disk.qcow2");
    let mut disk = Disk { bytes: vec![0; 1 << 20], cluster: 65536, has_zeroes: true, has_discard: true };
    disk.work(&device, 1, 40);
    assert!(len() >= before + (1 << 20), "{} after {before}", len());
    drop(device);
    let end = len();
    assert!(end > before && end <= before + (1 << 20) + (128 << 10), "{end} after {before}");
    let said = folder.img("check disk.qcow2");
    assert!(said.contains(&format!("Image end offset: {end}")), "{said}");
}

#[test]
fn images_that_writes_would_damage_are_refused() {
    let folder = Folder::new();
    folder.img("create -f qcow2 -o lazy_refcounts=on dirty.qcow2 1M");
    folder.img("create -f qcow2 corrupt.qcow2 1M");
    let change = |image: &str, bytes: &[u8], at: u64| {
        use std::os::unix::fs::FileExt;
        let file = std::fs::File::options().write(true).open(folder.path(image)).unwrap();
        file.write_all_at(bytes, at).unwrap();
    };
    change("dirty.qcow2", &[1], 79);
    change("corrupt.qcow2", &[2], 79);
    for (image, why) in [
        ("dirty.qcow2", "marked as dirty (freestone image repair ends that)"),
        ("corrupt.qcow2", "marked as corrupt (freestone image repair ends that)"),
    ] {
        let before = std::fs::read(folder.path(image)).unwrap();
        let text = try_open(&folder.path(image), None).err().unwrap().to_string();
        let expected = format!("cannot be written: {why} (readonly=on only reads)");
        assert!(text.ends_with(&expected), "{text}");
        assert!(std::fs::read(folder.path(image)).unwrap() == before, "{image} has changed");
    }
    // The block of refcounts is behind the end of the file.
    folder.img("create -f qcow2 cut.qcow2 1M");
    change("cut.qcow2", &(4u64 << 20).to_be_bytes(), 64 << 10);
    let text = try_open(&folder.path("cut.qcow2"), None).err().unwrap().to_string();
    assert!(text.ends_with("the metadata is damaged, or the file was cut short"), "{text}");
}

#[test]
fn copied_bits_of_a_table_that_a_snapshot_shares_are_not_believed() {
    use std::os::unix::fs::FileExt;
    let folder = Folder::new();
    folder.img("create -f qcow2 disk.qcow2 1M");
    folder.io("disk.qcow2", &["write -P 1 0 128k".into()]);
    folder.img("snapshot -c snap disk.qcow2");
    let file = std::fs::File::options().read(true).write(true).open(folder.path("disk.qcow2")).unwrap();
    let mut word = [0; 8];
    let read = |at: u64, word: &mut [u8; 8]| file.read_exact_at(word, at).map(|()| u64::from_be_bytes(*word));
    let l1 = read(40, &mut word).unwrap();
    let table = read(l1, &mut word).unwrap();
    let entry = read(table, &mut word).unwrap();
    assert_eq!((table >> 63, entry >> 63), (0, 0), "QEMU has cleared the bits");
    file.write_all_at(&(entry | 1 << 63).to_be_bytes(), table).unwrap();
    let device = open(&folder, "disk.qcow2");
    let mut disk = Disk { bytes: vec![0; 1 << 20], cluster: 65536, has_zeroes: true, has_discard: true };
    disk.bytes[..128 << 10].fill(1);
    disk.work(&device, 3, 60);
    drop(device);
    assert!(folder.raw("", "disk.qcow2") == disk.bytes);
    let snapshot = folder.raw("-l snap", "disk.qcow2");
    assert!(snapshot[..128 << 10].iter().all(|byte| *byte == 1), "the snapshot has changed");
}

#[test]
fn an_entry_that_points_into_metadata_stops_writes_and_marks_the_image() {
    use std::os::unix::fs::FileExt;
    let folder = Folder::new();
    folder.img("create -f qcow2 disk.qcow2 1M");
    folder.io("disk.qcow2", &["write -P 1 0 64k".into(), "write -P 2 64k 64k".into()]);
    // The L2 table of this image is the fifth cluster; its second entry shall name the L1 table.
    let file = std::fs::File::options().read(true).write(true).open(folder.path("disk.qcow2")).unwrap();
    let mut l1 = [0; 8];
    file.read_exact_at(&mut l1, 3 << 16).unwrap();
    let table = u64::from_be_bytes(l1) & 0x00ff_ffff_ffff_fe00;
    file.write_all_at(&((1u64 << 63) | (3 << 16)).to_be_bytes(), table + 8).unwrap();
    let device = open(&folder, "disk.qcow2");
    let results = reactor::run(async move {
        let channel = device.open_channel().unwrap();
        let write = async |at| {
            let buffer = reactor::current().buffers().take(4096).await;
            buffer.transfer(&*channel, Op::Write, Flags::NONE, at).await.1
        };
        let first = write(65536).await;
        let (_, read) = crate::tools::read(&*channel, 0, 4096).await;
        (first, write(0).await, read)
    });
    assert_eq!(results, (Err(IoError::Corrupt), Err(IoError::Corrupt), Ok(())));
    let said = folder.img("info disk.qcow2");
    assert!(said.contains("corrupt: true"), "{said}");
}

#[test]
fn an_image_that_was_closed_can_be_opened_again_at_once() {
    let folder = Folder::new();
    folder.img("create -f qcow2 disk.qcow2 1M");
    let cores = Cores::start(&[CoreConfig::default(), CoreConfig::default()]).unwrap();
    for round in 0..100 {
        let path = folder.path("disk.qcow2");
        let opened = cores.get(0).block_on(move |_| async move {
            let device: Arc<dyn Device> = Arc::new(UringDevice::open(&Options::new(&path)).unwrap());
            Image::open(device).await.unwrap()
        });
        let image = opened.unwrap_or_else(|_| panic!("round {round}"));
        let live = LiveImage::open_on(cores.get(1), image, Others::default(), 16 << 10, None).unwrap();
        let live = Arc::new(live);
        let used = live.clone();
        let work = cores.get(0).block_on(move |core| async move {
            let channel = used.open_channel().unwrap();
            let buffer = core.buffers().take(512).await;
            buffer.transfer(&*channel, Op::Write, Flags::NONE, 0).await.1.unwrap();
            // Its clusters are freed in the background.
            channel.submit(&Request::discard(1 << 20), 0).await.unwrap();
            channel.submit(&Request::flush(), 0).await.unwrap();
        });
        work.unwrap();
        drop(live);
    }
    folder.img("check disk.qcow2");
}
