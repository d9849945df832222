//! Dirty bitmaps that commands add, remove and change: those of `qemu-img bitmap`.

use crate::backing::{assert_valid, interrupt};
use crate::bitmaps::{assert_clean, bitmaps, dirty, dirty_in_qemu, read_only};
use crate::damage::{CLEAN, check, damage_part, verdict};
use crate::disk::try_open;
use crate::repair::writable;
use crate::tools::{Folder, file};
use block::{Device, DirtyBitmap, Flags, Op};
use qcow2::offline::bitmaps::{Change, Source, change};
use qcow2::{Error, Image, LiveImage, Qcow2};
use reactor::{CoreConfig, Cores};
use std::sync::Arc;

/// The change that `qemu-img bitmap` makes with an option.
fn parse(option: &str) -> Change {
    match option.split_once('=') {
        Some(("add", granularity)) => Change::Add(Some(granularity.parse().unwrap())),
        Some((_, source)) => Change::Merge(Source::Own(source.to_owned())),
        None => match option {
            "add" => Change::Add(None),
            "remove" => Change::Remove,
            "clear" => Change::Clear,
            "enable" => Change::Enable,
            "disable" => Change::Disable,
            other => panic!("{other}"),
        },
    }
}

fn ours(device: Arc<dyn Device>, name: &str, options: &str) -> Result<(), Error> {
    let (name, changes): (_, Vec<Change>) = (name.to_owned(), options.split(' ').map(parse).collect());
    reactor::run(async move { change(&device, &name, &changes).await })
}

fn qemu(folder: &Folder, image: &str, name: &str, options: &str) {
    let mut arguments = String::new();
    for option in options.split(' ') {
        arguments += &match option.split_once('=') {
            Some(("add", granularity)) => format!("--add -g {granularity} "),
            Some((option, value)) => format!("--{option} {value} "),
            None => format!("--{option} "),
        };
    }
    folder.img(&format!("bitmap {arguments}{image} {name}"));
}

/// Name, granularity, whether it is enabled, and the dirty granules of each bitmap.
fn everything(folder: &Folder, image: &str) -> Vec<(String, u64, bool, Vec<bool>)> {
    let disk = read_only(folder, image);
    let all = bitmaps(folder, image).into_iter();
    all.map(|bitmap| {
        let dirty = dirty(&disk, &bitmap.name).unwrap();
        (bitmap.name, bitmap.granularity, bitmap.is_auto, dirty)
    })
    .collect()
}

const SIZE: u64 = 3 << 20;

#[test]
fn changed_bitmaps_are_those_of_qemu() {
    for options in [
        "cluster_size=512",
        "cluster_size=4096,refcount_bits=1",
        "cluster_size=65536",
        "cluster_size=16384,extended_l2=on",
        "cluster_size=2M",
        "data_file=data.raw",
    ] {
        let folder = Folder::new();
        folder.img(&format!("create -f qcow2 -o {options} ours {SIZE}"));
        folder.io("ours", &["write 1M 64k".into()]);
        std::fs::copy(folder.path("ours"), folder.path("theirs")).unwrap();
        for (round, (name, options)) in [
            ("a", "add"),
            ("b", "add=512 disable"),
            ("a", "disable"),
            ("b", "enable"),
            ("c", "add=65536 merge=a merge=b disable"),
            ("a", "enable clear"),
            ("b", "merge=c"),
            ("c", "clear merge=b"),
            ("b", "remove add=4096 merge=c"),
            ("a", "remove"),
            ("c", "remove"),
            ("b", "remove"),
            ("again", "add"),
        ]
        .into_iter()
        .enumerate()
        {
            let when = format!("round {round}: {name} {options}");
            for image in ["ours", "theirs"] {
                folder.io(image, &[format!("write {} 5k", (round * 77) << 10)]);
            }
            ours(writable(&folder.path("ours")), name, options).unwrap();
            qemu(&folder, "theirs", name, options);
            assert_clean(&folder, "ours", &when);
            assert_eq!(everything(&folder, "ours"), everything(&folder, "theirs"), "{when}");
            for (name, granularity, _, dirty) in everything(&folder, "ours") {
                assert_eq!(dirty_in_qemu(&folder, "ours", &name, granularity), dirty, "{when}: {name}");
            }
        }
    }
}

#[test]
fn a_bitmap_gets_the_bits_of_a_bitmap_of_another_image() {
    let folder = Folder::new();
    for image in ["source", "target"] {
        folder.img(&format!("create -f qcow2 {image} {SIZE}"));
        folder.img(&format!("bitmap --add -g 4096 {image} b"));
    }
    folder.io("source", &["write 1M 5k".into()]);
    folder.img("create -f qcow2 larger 4M");
    folder.img("bitmap --add larger b");
    let merge = |target: &str, source: &Qcow2| {
        let bitmap: Arc<dyn DirtyBitmap> = source.bitmaps().pop().unwrap();
        let source = Source::Other(bitmap, source.limits().capacity);
        let device = writable(&folder.path(target));
        reactor::run(async move { change(&device, "b", &[Change::Merge(source)]).await })
    };
    let source = read_only(&folder, "source");
    merge("target", &source).unwrap();
    assert_eq!(everything(&folder, "target"), everything(&folder, "source"));
    let text = merge("larger", &source).unwrap_err().to_string();
    assert!(text.ends_with("bitmap \"b\": of a disk of 3145728 bytes, which has 4194304 here"), "{text}");
}

#[test]
fn a_change_that_is_impossible_changes_nothing() {
    let folder = Folder::new();
    folder.img("create -f qcow2 -o compat=0.10 old 1M");
    folder.img("create -f qcow2 disk 1M");
    folder.img("bitmap --add disk b");
    folder.img("create -f qcow2 stale 1M");
    folder.img("bitmap --add stale b");
    folder.img("create -f qcow2 huge 4T");
    // A bitmap that a crash has left in use.
    let live = crate::disk::try_open(&folder.path("stale"), None).unwrap();
    std::fs::copy(folder.path("stale"), folder.path("killed")).unwrap();
    drop(live);
    let long = "x".repeat(1024);
    let in_use = "bitmap \"b\": in use since a crash: it can only be removed";
    for (image, name, options, why) in [
        ("old", "b", "add", "version 2 has no dirty bitmaps"),
        ("disk", "b", "add", "bitmap \"b\": the image has one with this name"),
        ("disk", "c", "add add", "bitmap \"c\": the image has one with this name"),
        ("disk", "", "add", "name of 0 bytes: want 1 to 1023"),
        ("disk", &long, "add", "name of 1024 bytes: want 1 to 1023"),
        ("disk", "c", "add=256", "granularity 256: want a power of two, 512 to 2147483648"),
        ("disk", "c", "add=0", "granularity 0: want a power of two, 512 to 2147483648"),
        ("disk", "c", "add=5000", "granularity 5000: want a power of two, 512 to 2147483648"),
        ("disk", "c", "remove", "no bitmap \"c\": the image has [b]"),
        ("disk", "c", "clear", "no bitmap \"c\": the image has [b]"),
        ("disk", "b", "clear merge=c", "no bitmap \"c\": the image has [b]"),
        ("killed", "b", "clear", in_use),
        ("killed", "b", "enable", in_use),
        ("killed", "c", "add merge=b", in_use),
        ("huge", "b", "add=512", "the bitmap would have 1073741824 bytes, more than 536870912"),
    ] {
        let before = std::fs::read(folder.path(image)).unwrap();
        let text = ours(writable(&folder.path(image)), name, options).unwrap_err().to_string();
        assert!(text.ends_with(why), "{image}: {text}");
        assert!(std::fs::read(folder.path(image)).unwrap() == before, "{image} has changed: {why}");
    }
    ours(writable(&folder.path("killed")), "b", "remove add").unwrap();
    assert_clean(&folder, "killed", "after the bitmap was removed");
    assert!(!bitmaps(&folder, "killed")[0].is_in_use);
}

#[test]
fn a_change_that_is_interrupted_has_happened_or_not() {
    let folder = Folder::new();
    let mut interrupted = 0;
    for options in ["cluster_size=4096", "cluster_size=512,refcount_bits=64"] {
        folder.img(&format!("create -f qcow2 -o {options} disk 1M"));
        for (name, changes) in
            [("a", "add=512"), ("b", "add disable merge=a"), ("a", "clear"), ("a", "remove"), ("b", "remove")]
        {
            folder.io("disk", &["write 300k 5k".into()]);
            let original = std::fs::read(folder.path("disk")).unwrap();
            let before = everything(&folder, "disk");
            ours(writable(&folder.path("disk")), name, changes).unwrap();
            let after = everything(&folder, "disk");
            assert_ne!(before, after, "{name} {changes}");
            std::fs::write(folder.path("disk"), &original).unwrap();
            interrupted += interrupt(
                &folder,
                &["disk"],
                |open| ours(open("disk"), name, changes),
                |when, is_done| {
                    let now = everything(&folder, "disk");
                    assert!(now == after || now == before && !is_done, "{options}, {name} {changes}, {when}");
                    assert_valid(&folder, "disk", when);
                },
            );
            assert_eq!(everything(&folder, "disk"), after);
        }
    }
    assert!(interrupted > 60, "{interrupted}");
}

/// Writes to the disk of a damaged image, which may refuse that, and closes it.
fn write_somewhere(image: LiveImage, seed: u64) {
    let cores = Cores::start(&[CoreConfig::default()]).unwrap();
    let image = Arc::new(image);
    let device = image.clone();
    let written = cores.get(0).block_on(move |_| async move {
        let channel = device.open_channel().unwrap();
        for at in [seed * 4096, 1 << 20] {
            let buffer = reactor::current().buffers().take(512).await;
            let _ = buffer.transfer(&*channel, Op::Write, Flags::NONE, at).await;
        }
    });
    written.unwrap();
}

#[test]
fn every_use_of_damaged_bitmaps_ends_and_leaves_no_other_error() {
    let folder = Folder::new();
    let path = folder.path("damaged");
    folder.img(&format!("create -f qcow2 -o cluster_size=4096 damaged {SIZE}"));
    for name in ["one", "another"] {
        folder.img(&format!("bitmap --add -g 512 damaged {name}"));
        folder.io("damaged", &["write 1M 64k".into()]);
    }
    let intact = std::fs::read(&path).unwrap();
    let kind = intact.windows(4).position(|bytes| bytes == 0x2385_2875_u32.to_be_bytes()).unwrap();
    let word = |at: usize| u64::from_be_bytes(intact[at..at + 8].try_into().unwrap()) as usize;
    let directory = word(kind + 24);
    let table = word(directory);
    let parts = [
        ("extension", kind, kind + 32),
        ("directory", directory, directory + 72),
        ("table", table, table + 16),
    ];
    let (mut used, mut refused) = (0, 0);
    for seed in 0..300 {
        let mut bytes = intact.clone();
        let what = damage_part(&parts, &mut bytes, seed);
        let reset = || std::fs::write(&path, &bytes).unwrap();
        reset();
        let before = check(file(&path));
        let device = file(&path);
        let _ = reactor::run(async move { Image::open(device).await?.load_bitmaps().await });
        // An overlap with other metadata stops writes.
        match try_open(&path, None) {
            Ok(image) => {
                write_somewhere(image, seed);
                let after = check(file(&path)).unwrap();
                let before = before.as_ref().unwrap();
                assert!(after.corruptions <= before.corruptions, "{what}: {before:?} {after:?}");
                used += 1;
            }
            Err(_) => refused += 1,
        }
        reset();
        match ours(writable(&path), "new", "add merge=one") {
            Ok(()) => {
                assert_eq!(verdict(&check(file(&path))), CLEAN, "{what}");
                used += 1;
            }
            Err(_) => refused += 1,
        }
    }
    assert!(used > 100 && refused > 100, "{used} {refused}");
}
