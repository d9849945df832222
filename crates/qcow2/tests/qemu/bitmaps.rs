//! Dirty bitmaps: QEMU reads those that this crate has written, and the other way round.

use crate::damage::check;
use crate::disk::try_open;
use crate::tools::{Folder, file, write};
use base::Rng;
use block::{Channel, Device, Flags, Request};
use qcow2::{Bitmap, Image, LiveImage, Others, Qcow2, RestartLog};
use reactor::{CoreConfig, Cores};
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::Arc;

const SIZE: u64 = 3 << 20;

/// The dirty granules of a bitmap, as QEMU's NBD server and client see them.
pub fn dirty_in_qemu(folder: &Folder, image: &str, name: &str, granularity: u64) -> Vec<bool> {
    let socket = folder.path("nbd.sock");
    let mut server = Command::new("qemu-nbd");
    server
        .args(["-r", "-f", "qcow2", "-B", name, "-k"])
        .arg(&socket)
        .arg(image)
        .current_dir(folder.path("."));
    let mut server = server.spawn().expect("qemu-nbd (package qemu-utils)");
    let path = socket.display();
    let options =
        format!("driver=nbd,server.type=unix,server.path={path},x-dirty-bitmap=qemu:dirty-bitmap:{name}");
    let map = loop {
        let map = folder.run("qemu-img", &["map", "--output=json", "--image-opts", &options]);
        if map.status.success() {
            break String::from_utf8(map.stdout).unwrap();
        }
        let said = String::from_utf8_lossy(&map.stderr);
        assert!(server.try_wait().unwrap().is_none(), "qemu-nbd has ended: {said}");
        std::thread::yield_now();
    };
    assert!(server.wait().unwrap().success());
    let mut dirty = Vec::new();
    let field = |line: &str, name: &str| {
        let rest = line.split(&format!("\"{name}\": ")).nth(1).unwrap().to_owned();
        rest.split([',', '}']).next().unwrap().to_owned()
    };
    for line in map.lines() {
        let (start, len): (u64, u64) =
            (field(line, "start").parse().unwrap(), field(line, "length").parse().unwrap());
        assert_eq!(start.div_ceil(granularity) as usize, dirty.len(), "{map}");
        // A dirty extent is one without data.
        let granules = (start + len).div_ceil(granularity) as usize;
        dirty.resize(granules, field(line, "data") == "false");
    }
    dirty
}

/// The dirty granules of a bitmap of a device.
pub fn dirty(device: &dyn Device, name: &str) -> Option<Vec<bool>> {
    let bitmap = device.bitmaps().into_iter().find(|bitmap| bitmap.name() == name)?;
    let (size, mut at, mut dirty) = (device.limits().capacity, 0, Vec::new());
    while at < size {
        let (is_dirty, len) = bitmap.run(at, size - at);
        at += len;
        dirty.resize(at.div_ceil(bitmap.granularity()) as usize, is_dirty);
    }
    Some(dirty)
}

/// The disk of an image, only read.
pub fn read_only(folder: &Folder, image: &str) -> Qcow2 {
    let device = folder.file(image);
    let image = reactor::run(async move {
        let mut image = Image::open(device).await.unwrap();
        image.load_bitmaps().await.unwrap();
        image
    });
    let data_file = image.header.data_file.as_ref().map(|name| folder.file(name));
    Qcow2::new(image, Others { data_file, backing: None }, 64 << 10).unwrap()
}

pub fn bitmaps(folder: &Folder, image: &str) -> Vec<Bitmap> {
    let device = folder.file(image);
    reactor::run(async move { Image::open(device).await.unwrap().bitmaps().await.unwrap() })
}

pub fn assert_clean(folder: &Folder, image: &str, when: &str) {
    let output = folder.run("qemu-img", &["check", "-f", "qcow2", image]);
    assert_eq!(output.status.code(), Some(0), "{when}: {}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(check(file(&folder.path(image))).unwrap().messages, [""; 0], "{when}");
}

/// Writes, discards and writes zeroes on a core. Marks the granules that change.
fn work(device: &Arc<LiveImage>, seed: u64, requests: u64, granularity: u64, dirty: &mut [bool]) {
    let cores = Cores::start(&[CoreConfig::default()]).unwrap();
    let device = device.clone();
    let ranges = cores.get(0).block_on(move |_| async move {
        let channel = device.open_channel().unwrap();
        let (mut rng, mut ranges) = (Rng::new(seed), Vec::new());
        for _ in 0..requests {
            let at = rng.below(SIZE / 512) * 512;
            let len = (1 + rng.log_uniform(200)).min((SIZE - at) / 512) * 512;
            request(&*channel, rng.below(4), at, len).await;
            ranges.push((at, len));
        }
        ranges
    });
    for (at, len) in ranges.unwrap() {
        dirty[(at / granularity) as usize..(at + len).div_ceil(granularity) as usize].fill(true);
    }
}

async fn request(channel: &dyn Channel, kind: u64, at: u64, len: u64) {
    let done = match kind {
        0 => channel.submit(&Request::discard(len), at).await,
        1 => channel.submit(&Request::write_zeroes(len, Flags::NONE), at).await,
        _ => write(channel, at, len, 7).await,
    };
    assert_eq!(done, Ok(()), "{at}+{len}");
}

#[test]
fn enabled_bitmaps_have_the_granules_that_were_written_and_disabled_ones_stay() {
    for (seed, (options, granularity)) in [
        ("cluster_size=512", 512),
        ("cluster_size=512,refcount_bits=64", 4096),
        ("cluster_size=4096", 4096),
        ("cluster_size=16384,extended_l2=on", 65536),
        ("cluster_size=65536,lazy_refcounts=on", 512),
    ]
    .into_iter()
    .enumerate()
    {
        let folder = Folder::new();
        folder.img(&format!("create -f qcow2 -o {options} disk {SIZE}"));
        folder.io("disk", &["write 1M 100k".into()]);
        folder.img(&format!("bitmap --add -g {granularity} disk on"));
        folder.img(&format!("bitmap --add -g {granularity} disk off"));
        folder.io("disk", &["write 0 64k".into(), "write 2M 512".into()]);
        folder.img("bitmap --disable disk off");
        let mut expected = dirty_in_qemu(&folder, "disk", "on", granularity);
        let disabled = expected.clone();
        for round in 0..3 {
            let when = format!("{options}, round {round}");
            let device = Arc::new(try_open(&folder.path("disk"), None).unwrap());
            work(&device, seed as u64 * 10 + round, 1 + round * 12, granularity, &mut expected);
            assert_eq!(dirty(&*device, "on").as_ref(), Some(&expected), "{when}, open");
            drop(device);
            assert_clean(&folder, "disk", &when);
            assert_eq!(dirty_in_qemu(&folder, "disk", "on", granularity), expected, "{when}");
            assert_eq!(dirty_in_qemu(&folder, "disk", "off", granularity), disabled, "{when}");
            let disk = read_only(&folder, "disk");
            assert_eq!(dirty(&disk, "on").as_ref(), Some(&expected), "{when}");
            assert_eq!(dirty(&disk, "off").as_ref(), Some(&disabled), "{when}");
        }
    }
}

#[test]
fn a_bitmap_of_a_killed_writer_stays_in_use_and_qemu_keeps_it() {
    let folder = Folder::new();
    folder.img(&format!("create -f qcow2 disk {SIZE}"));
    folder.img("bitmap --add disk on");
    folder.img("bitmap --add --disable disk off");
    let (device, log) = (crate::repair::writable(&folder.path("disk")), tempfile::tempfile().unwrap());
    let image = reactor::run(async move { Image::open(device).await.unwrap() });
    let log = RestartLog::new(log, [1; 16], 9, 64);
    let device = Arc::new(LiveImage::open(image, Others::default(), 16 << 10, Some(log)).unwrap());
    work(&device, 1, 20, 65536, &mut [false; 48]);
    // The file of a process that was killed here.
    std::fs::copy(folder.path("disk"), folder.path("killed")).unwrap();
    drop(device);
    let flags = |image: &str| {
        let flags = |bitmap: &Bitmap| (bitmap.name.clone(), bitmap.is_in_use, bitmap.is_auto);
        bitmaps(&folder, image).iter().map(flags).collect::<Vec<_>>()
    };
    let names = [("on".to_owned(), true, true), ("off".to_owned(), false, false)];
    assert_eq!(flags("killed"), names);
    assert!(folder.img("info killed").contains("[0]: in-use"));
    folder.run("qemu-img", &["check", "-r", "all", "killed"]);
    assert_clean(&folder, "killed", "after a repair by QEMU");
    for when in ["after a repair by QEMU", "after another writer"] {
        assert_eq!(flags("killed"), names, "{when}");
        let disk = read_only(&folder, "killed");
        assert_eq!(dirty(&disk, "on"), None, "{when}");
        assert_eq!(dirty(&disk, "off"), Some(vec![false; 48]), "{when}");
        let device = Arc::new(try_open(&folder.path("killed"), None).unwrap());
        work(&device, 1, 20, 65536, &mut [false; 48]);
        assert_eq!(dirty(&*device, "on"), None, "{when}");
    }
    assert_clean(&folder, "killed", "after another writer");
    assert_eq!(flags("disk"), [("on".to_owned(), false, true), ("off".to_owned(), false, false)]);
}

#[test]
fn a_bitmap_stays_in_use_if_a_core_still_has_the_image_at_its_end() {
    let folder = Folder::new();
    folder.img(&format!("create -f qcow2 disk {SIZE}"));
    folder.img("bitmap --add disk on");
    let cores = Cores::start(&[CoreConfig::default()]).unwrap();
    let device = try_open(&folder.path("disk"), None).unwrap();
    cores
        .get(0)
        .block_on(move |_| async move {
            let channel = device.open_channel().unwrap();
            request(&*channel, 2, 0, 4096).await;
            drop(device);
            drop(channel);
        })
        .unwrap();
    drop(cores);
    assert!(bitmaps(&folder, "disk")[0].is_in_use);
}

#[test]
fn bitmaps_that_are_invalid_are_refused_and_the_image_stays_as_it_is() {
    let folder = Folder::new();
    folder.img(&format!("create -f qcow2 -o cluster_size=4096 disk {SIZE}"));
    folder.img("bitmap --add -g 512 disk one");
    folder.img("bitmap --add -g 512 disk two");
    folder.io("disk", &["write 0 4k".into()]);
    let original = std::fs::read(folder.path("disk")).unwrap();
    let word = |at: u64| u64::from_be_bytes(original[at as usize..][..8].try_into().unwrap());
    // The bitmaps extension is behind the names of features, and its type is unique.
    let kind = 0x2385_2875_u32.to_be_bytes();
    let extension = original.windows(4).position(|bytes| bytes == kind).unwrap() as u64;
    let directory = word(extension + 24);
    let [one, two] = [0, 32].map(|entry| word(directory + entry));
    let data = word(one);
    let several = |offset: u64| format!("bitmaps: cluster {} has several uses", offset / 4096);
    let invalid = |entry: u64| format!("bitmap \"one\": table entry {entry:#x}: invalid");
    for (at, value, why) in [
        (one, 3, invalid(3)),
        (one, data | 512, invalid(data | 512)),
        (one, data | 1, invalid(data | 1)),
        (two, data, several(data)),
        (two, 1 << 40, "bitmap \"two\": table entry 0x10000000000: invalid".into()),
        (directory + 32, one, several(one)),
        (directory + 32, word(40), several(word(40))),
        (directory, word(48), several(word(48))),
        (extension + 24, 0, several(0)),
        (directory + 8, 1 << 32 | 4, "bitmap directory: invalid entry at byte 0".into()),
        (extension + 8, 3 << 32, "bitmap directory: 2 entries of 3".into()),
        (directory + 8, u64::from(u32::MAX) << 32 | 2, "bitmap directory: invalid entry at byte 0".into()),
    ] {
        let mut bytes = original.clone();
        bytes[at as usize..][..8].copy_from_slice(&value.to_be_bytes());
        std::fs::write(folder.path("disk"), &bytes).unwrap();
        let text = try_open(&folder.path("disk"), None).err().unwrap().to_string();
        assert!(text.contains(&why), "{text}, not {why}");
        assert!(std::fs::read(folder.path("disk")).unwrap() == bytes, "{why}");
    }
    // A longer disk does not fit its bitmaps.
    std::fs::write(folder.path("disk"), &original).unwrap();
    let image = std::fs::File::options().write(true).open(folder.path("disk")).unwrap();
    image.write_all_at(&(20_u64 << 20).to_be_bytes(), 24).unwrap();
    let l1_entries = 20_u32.to_be_bytes();
    image.write_all_at(&l1_entries, 36).unwrap();
    let text = try_open(&folder.path("disk"), None).err().unwrap().to_string();
    assert!(text.ends_with("bitmap \"one\": table of 1 entries: want 2"), "{text}");
}
