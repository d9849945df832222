//! Rebased and committed images: QEMU reads the bytes that its own commands leave.

use crate::losing::{Replaced, losing};
use crate::repair::{stopping, writable};
use crate::tools::{Folder, file, mixed_writes};
use base::Rng;
use block::Device;
use qcow2::offline::backing::{self, Backing};
use qcow2::offline::commit::{Options, Target, commit};
use qcow2::offline::rebase::rebase;
use qcow2::{Error, Image, Level, Others};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

/// Format and size of a backing file.
type Base = Option<(&'static str, u64)>;

/// Options and size of an image, and backing files for it.
type Case = (&'static str, u64, Base, Base);

const CASES: [Case; 9] = [
    ("cluster_size=512", 600 << 10, Some(("raw", 400 << 10)), Some(("qcow2", 800 << 10))),
    ("cluster_size=4096", (1 << 20) + 512, Some(("qcow2", 2 << 20)), Some(("raw", 1 << 20))),
    ("cluster_size=4096,refcount_bits=1", 1 << 20, Some(("raw", (1 << 20) + 100)), None),
    ("cluster_size=65536", 3 << 20, Some(("qcow2", 1 << 20)), Some(("qcow2", (2 << 20) + 1536))),
    ("cluster_size=2M,lazy_refcounts=on", 9 << 20, Some(("raw", 7 << 20)), Some(("qcow2", 8 << 20))),
    ("extended_l2=on,cluster_size=16384", 1 << 20, Some(("raw", 1 << 20)), Some(("raw", 900 << 10))),
    ("extended_l2=on,cluster_size=65536", 3 << 20, Some(("qcow2", 2 << 20)), Some(("qcow2", 2 << 20))),
    ("compat=0.10,cluster_size=512", 300 << 10, Some(("raw", 200 << 10)), Some(("qcow2", 400 << 10))),
    ("compat=0.10,cluster_size=65536", 2 << 20, Some(("qcow2", 1 << 20)), Some(("raw", 2 << 20))),
];

/// A backing file: each part is zero, or the same for all seeds, or not.
fn make_base(folder: &Folder, name: &str, base: Base, seed: u64) {
    let Some((format, size)) = base else { return };
    let (mut shared, mut own) = (Rng::new(7), Rng::new(seed));
    let mut bytes = Vec::new();
    while (bytes.len() as u64) < size {
        let (kind, len) = (shared.below(5), (1 + shared.below(40)) * 512);
        let byte = if kind < 2 { shared.draw() } else { own.draw() } as u8;
        let is_zero = kind == 4 || kind == 3 && own.one_in(2);
        bytes.resize(bytes.len() + len as usize, if is_zero { 0 } else { byte | 1 });
    }
    bytes.truncate(size as usize);
    std::fs::write(folder.path("base.tmp"), bytes).unwrap();
    folder.img(&format!("convert -f raw -O {format} base.tmp {name}"));
}

/// An image over `base` with clusters of every kind.
fn make_overlay(folder: &Folder, name: &str, base: &str, case: &Case, seed: u64) {
    let (options, size, old, _) = *case;
    let names = old.map_or(String::new(), |(format, _)| format!("-F {format} -b {base}"));
    folder.img(&format!("create -f qcow2 {names} -o {options} {name} {size}"));
    let cluster = cluster_size(folder, name);
    let is_v3 = !options.contains("0.10");
    let whole = size / cluster.max(4096) * cluster.max(4096);
    let mut writes = mixed_writes(seed, whole, cluster.min(64 << 10), is_v3);
    // QEMU's commands have another idea of bytes that a discard leaves in version 2.
    writes.retain(|command| is_v3 || !command.starts_with("discard"));
    writes.truncate(20);
    if cluster < 1 << 20 {
        // QEMU compresses only clusters that the image does not have.
        let mut random = Rng::new(seed);
        let places: BTreeSet<u64> = (0..4).map(|_| random.below(whole / cluster) * cluster).collect();
        let packed = places.into_iter().map(|at| format!("write -c -P 5 {at} {cluster}"));
        writes.splice(..0, packed);
    }
    folder.io(name, &writes);
}

fn cluster_size(folder: &Folder, name: &str) -> u64 {
    let device = file(&folder.path(name));
    reactor::run(async move { Image::open_header(&*device).await.unwrap() }).cluster_size()
}

/// The disk of a backing file.
fn disk(folder: &Folder, name: &str, base: Base) -> Option<Arc<dyn Device>> {
    base.map(|(format, _)| match format {
        "raw" => folder.file(name),
        _ => folder.open(name, Others::default()),
    })
}

fn named(name: &str, base: Base) -> Option<Backing> {
    base.map(|(format, _)| Backing { name: name.into(), format: format.into() })
}

fn target(path: &Path, base: Base) -> Target {
    match base {
        Some(("raw", _)) => Target::Raw(writable(path)),
        _ => Target::Qcow2 { file: writable(path), backing: None },
    }
}

/// Places of the disk that have bytes in the file of the image itself, or are zeroes there.
fn own(folder: &Folder, name: &str) -> BTreeSet<u64> {
    let device = file(&folder.path(name));
    reactor::run(async move {
        let image = Image::open(device).await.unwrap();
        let map = qcow2::Map::open(&image).unwrap();
        let mut places = BTreeSet::new();
        for at in (0..map.size()).step_by(512) {
            let run = map.run(at, 512).await.unwrap();
            if run.place != qcow2::entry::Place::Unallocated {
                places.insert(at);
            }
        }
        places
    })
}

#[test]
fn a_rebased_disk_has_its_bytes_and_the_clusters_that_qemu_gives_it() {
    for (seed, case) in (1..).zip(CASES) {
        let (options, _, old, new) = case;
        // To the new file, to none, and from none.
        for (old, new) in [(old, new), (old, None), (None, new)] {
            let when = format!("{options}, {old:?} to {new:?}");
            let folder = Folder::new();
            make_base(&folder, "old", old, seed);
            make_base(&folder, "new", new, seed + 100);
            make_overlay(&folder, "mine", "old", &(options, case.1, old, new), seed);
            std::fs::copy(folder.path("mine"), folder.path("theirs")).unwrap();
            let before = folder.raw("", "mine");
            let disks = (disk(&folder, "old", old), named("new", new).zip(disk(&folder, "new", new)));
            rebase(&writable(&folder.path("mine")), disks.0, disks.1)
                .unwrap_or_else(|error| panic!("{when}: {error}"));
            folder.img("check -f qcow2 mine");
            assert!(folder.raw("", "mine") == before, "{when}: other bytes");
            // QEMU 7.2 writes no zeroes there, and the new file shows.
            if old.is_none() && options.contains("0.10") {
                continue;
            }
            let arguments = match new {
                Some((format, _)) => vec!["rebase", "-F", format, "-b", "new", "theirs"],
                None => vec!["rebase", "-b", "", "theirs"],
            };
            let output = folder.run("qemu-img", &arguments);
            assert!(output.status.success(), "{when}: {output:?}");
            assert!(folder.raw("", "theirs") == before, "{when}: QEMU has other bytes");
            let (mine, theirs) = (own(&folder, "mine"), own(&folder, "theirs"));
            assert_eq!(mine.symmetric_difference(&theirs).collect::<Vec<_>>(), [&0; 0], "{when}");
            let info = |name: &str| folder.img(&format!("info {name}")).replace(name, "image");
            let lines = |text: String| {
                text.lines().filter(|line| line.contains("backing")).map(str::to_owned).collect::<Vec<_>>()
            };
            assert_eq!(lines(info("mine")), lines(info("theirs")), "{when}");
        }
    }
}

#[test]
fn a_committed_image_leaves_the_bytes_that_qemu_leaves() {
    for (seed, case) in (1..).zip(CASES) {
        let (options, size, old, new) = case;
        for (base, is_kept) in [(old, false), (new, false), (old, true)] {
            let Some((format, _)) = base else { continue };
            let when = format!("{options}, {base:?}, kept {is_kept}");
            let folder = Folder::new();
            make_base(&folder, "base.mine", base, seed);
            std::fs::copy(folder.path("base.mine"), folder.path("base.theirs")).unwrap();
            make_overlay(&folder, "mine", "base.mine", &(options, size, base, None), seed);
            std::fs::copy(folder.path("mine"), folder.path("theirs")).unwrap();
            folder.img(&format!("rebase -u -F {format} -b base.theirs theirs"));
            let (before, content) = (folder.raw("", "mine"), own(&folder, "mine"));
            let wanted = Options { is_kept, ..Options::default() };
            commit(&writable(&folder.path("mine")), target(&folder.path("base.mine"), base), wanted)
                .unwrap_or_else(|error| panic!("{when}: {error}"));
            folder.img(if is_kept { "commit -d theirs" } else { "commit theirs" });
            for image in ["mine", "base.mine"] {
                if image == "mine" || format == "qcow2" {
                    folder.img(&format!("check -f qcow2 {image}"));
                }
            }
            assert!(folder.raw("", "mine") == before, "{when}: other bytes");
            let bytes = |name: &str| match format {
                "raw" => std::fs::read(folder.path(name)).unwrap(),
                _ => folder.raw("", name),
            };
            assert!(bytes("base.mine") == bytes("base.theirs"), "{when}: QEMU has other bytes");
            assert!(folder.raw("", "theirs") == before, "{when}: QEMU has another disk");
            assert_eq!(own(&folder, "mine"), if is_kept { content } else { BTreeSet::new() }, "{when}");
            let lengths = ["mine", "theirs"].map(|name| std::fs::metadata(folder.path(name)).unwrap().len());
            assert!(is_kept || lengths[0] <= lengths[1].max(1 << 20), "{when}: {lengths:?}");
        }
    }
}

#[test]
fn an_image_whose_backing_file_has_one_is_committed() {
    let folder = Folder::new();
    make_base(&folder, "low", Some(("qcow2", 3 << 20)), 1);
    folder.img("create -f qcow2 -F qcow2 -b low -o cluster_size=4096 middle 2M");
    folder.io("middle", &["write -P 1 100k 200k".into(), "write -z 1M 100k".into()]);
    folder.img("create -f qcow2 -F qcow2 -b middle top 4M");
    folder.io("top", &["write -z 512k 1M".into(), "write -P 2 3M 64k".into(), "write -P 3 0 1000".into()]);
    folder.img("snapshot -c kept middle");
    let (before, kept) = (folder.raw("", "top"), folder.raw("-l kept", "middle"));
    let backing = Some(folder.open("low", Others::default()));
    let target = Target::Qcow2 { file: writable(&folder.path("middle")), backing };
    commit(&writable(&folder.path("top")), target, Options::default()).unwrap();
    ["top", "middle"].iter().for_each(|image| drop(folder.img(&format!("check {image}"))));
    assert!(folder.raw("", "top") == before && folder.raw("", "middle") == before);
    // The snapshot has now the size of the disk for QEMU.
    assert!(folder.raw("-l kept", "middle")[..kept.len()] == kept);
}

/// Makes the images `middle` and `top` over `base`; returns the disk of `top`. `sizes`: theirs.
fn make_chain(folder: &Folder, options: &'static str, base: Base, sizes: [u64; 2], seed: u64) -> Vec<u8> {
    make_base(folder, "base", base, seed);
    make_overlay(folder, "middle", "base", &(options, sizes[0], base, None), seed);
    make_overlay(folder, "top", "middle", &(options, sizes[1], Some(("qcow2", 0)), None), seed + 1);
    folder.raw("", "top")
}

#[test]
fn a_commit_to_a_file_further_below_leaves_the_bytes_that_qemu_leaves() {
    for (seed, (options, base, sizes)) in (1..).zip([
        ("cluster_size=4096", ("raw", 1 << 20), [1 << 20, 1 << 20]),
        // A shorter image between hides the target behind its end.
        ("cluster_size=4096", ("qcow2", 2 << 20), [600 << 10, 3 << 19]),
        ("cluster_size=65536", ("raw", 1 << 20), [3 << 20, 2 << 20]),
        ("extended_l2=on,cluster_size=16384", ("qcow2", 1 << 20), [(700 << 10) + 512, 1 << 20]),
    ]) {
        let when = format!("{options}, {base:?}, {sizes:?}");
        let folder = Folder::new();
        let before = make_chain(&folder, options, Some(base), sizes, seed);
        let read = |name: &str| std::fs::read(folder.path(name)).unwrap();
        let [top, middle, old] = ["top", "middle", "base"].map(read);
        let wanted = Options { between: vec![folder.file("middle")], ..Options::default() };
        commit(&writable(&folder.path("top")), target(&folder.path("base"), Some(base)), wanted)
            .unwrap_or_else(|error| panic!("{when}: {error}"));
        assert!(folder.raw("", "top") == before, "{when}: other bytes");
        assert!(
            read("top") == top && read("middle") == middle,
            "{when}: an image above the target has changed"
        );
        let bytes = || match base.0 {
            "raw" => read("base"),
            _ => folder.raw("", "base"),
        };
        let mine = bytes();
        if base.0 == "qcow2" {
            folder.img("check base");
        }
        std::fs::write(folder.path("base"), old).unwrap();
        folder.img("commit -b base top");
        assert!(mine == bytes(), "{when}: QEMU has other bytes");
    }
}

#[test]
fn a_commit_to_a_file_further_below_that_is_interrupted_leaves_the_bytes_of_the_disk() {
    let folder = Folder::new();
    let base = Some(("qcow2", 90 << 10));
    let before = make_chain(&folder, "cluster_size=4096", base, [60 << 10, 160 << 10], 3);
    let change = |open: &dyn Fn(&str) -> Arc<dyn Device>| {
        let between = vec![folder.file("middle")];
        let target = Target::Qcow2 { file: open("base"), backing: None };
        commit(&open("top"), target, Options { between, ..Options::default() })
    };
    let interrupted = interrupt(&folder, &["top", "base"], change, |when, _| {
        assert!(folder.raw("", "top") == before, "{when}: other bytes");
        assert_valid(&folder, "base", when);
    });
    assert!(interrupted > 20, "{interrupted}");
}

/// Copies the files back, and runs `change` with ever more writes until it is done, each time up to
/// a power loss. Calls `check` after each. Returns how often it was interrupted.
pub fn interrupt(
    folder: &Folder,
    files: &[&str],
    change: impl Fn(&dyn Fn(&str) -> Arc<dyn Device>) -> Result<(), Error>,
    check: impl Fn(&str, bool),
) -> u64 {
    let contents: Vec<Vec<u8>> = files.iter().map(|name| std::fs::read(folder.path(name)).unwrap()).collect();
    let mut random = Rng::new(1);
    for round in 0.. {
        // Random writes are lost, or all but the last one.
        let (writes, is_random) = (round / 2, round % 2 == 0);
        files
            .iter()
            .zip(&contents)
            .for_each(|(name, bytes)| std::fs::write(folder.path(name), bytes).unwrap());
        let left = Arc::new(AtomicU64::new(writes));
        let replaced = files.iter().map(|name| (*name, Replaced::new(&folder.path(name))));
        let replaced: BTreeMap<&str, Replaced> = replaced.collect();
        let open = |name: &str| -> Arc<dyn Device> {
            let (child, left) = (writable(&folder.path(name)), left.clone());
            let child = stopping(child, left, false);
            losing(child, replaced[name].clone())
        };
        let is_done = change(&open).is_ok();
        for replaced in replaced.values() {
            replaced.lose(|number| if is_random { random.one_in(2) } else { number == 0 });
        }
        check(&format!("after {writes} writes"), is_done);
        if is_done && !is_random {
            return writes;
        }
    }
    unreachable!("a change ends")
}

/// Repairs an image after an interruption, which has left nothing but leaks.
pub fn assert_valid(folder: &Folder, name: &str, when: &str) {
    let device = writable(&folder.path(name));
    let repaired = reactor::run(async move { qcow2::repair(&device, Level::All).await.unwrap() });
    assert_eq!(repaired.before.corruptions, 0, "{name}, {when}: {repaired:?}");
    folder.img(&format!("check {name}"));
}

#[test]
fn a_rebase_that_is_interrupted_leaves_the_bytes_of_the_disk() {
    let folder = Folder::new();
    let mut interrupted = 0;
    make_base(&folder, "old", Some(("raw", 90 << 10)), 1);
    make_base(&folder, "new", Some(("qcow2", 150 << 10)), 2);
    for options in ["cluster_size=4096", "compat=0.10,cluster_size=4096", "extended_l2=on,cluster_size=16384"]
    {
        for (old, new) in
            [(Some(("raw", 0)), Some(("qcow2", 0))), (Some(("raw", 0)), None), (None, Some(("qcow2", 0)))]
        {
            make_overlay(&folder, "disk", "old", &(options, 160 << 10, old, None), 5);
            let before = folder.raw("", "disk");
            let change = |open: &dyn Fn(&str) -> Arc<dyn Device>| {
                let new = named("new", new).zip(disk(&folder, "new", new));
                rebase(&open("disk"), disk(&folder, "old", old), new)
            };
            interrupted += interrupt(&folder, &["disk"], change, |when, is_done| {
                assert!(folder.raw("", "disk") == before, "{options}, {when}: other bytes");
                assert_valid(&folder, "disk", when);
                let device = folder.file("disk");
                let header = reactor::run(async move { Image::open_header(&*device).await.unwrap() });
                let found = header.backing_file.map(|name| (name, header.backing_format.unwrap()));
                let all = [named("old", old), named("new", new)];
                let all = all.map(|backing| backing.map(|backing| (backing.name, backing.format)));
                assert!(if is_done { all[1] == found } else { all.contains(&found) }, "{when}: {found:?}");
            });
        }
    }
    assert!(interrupted > 50, "{interrupted}");
}

#[test]
fn a_commit_that_is_interrupted_leaves_the_bytes_of_the_disk() {
    let folder = Folder::new();
    let mut interrupted = 0;
    for (options, base) in [
        ("cluster_size=4096", Some(("raw", 90 << 10))),
        ("cluster_size=4096", Some(("qcow2", 90 << 10))),
        ("compat=0.10,cluster_size=512", Some(("qcow2", 200 << 10))),
        ("extended_l2=on,cluster_size=16384", Some(("qcow2", 100 << 10))),
    ] {
        make_base(&folder, "base", base, 1);
        make_overlay(&folder, "disk", "base", &(options, 160 << 10, base, None), 6);
        let before = folder.raw("", "disk");
        let change = |open: &dyn Fn(&str) -> Arc<dyn Device>| {
            let target = match base {
                Some(("raw", _)) => Target::Raw(open("base")),
                _ => Target::Qcow2 { file: open("base"), backing: None },
            };
            commit(&open("disk"), target, Options::default())
        };
        interrupted += interrupt(&folder, &["disk", "base"], change, |when, is_done| {
            let when = format!("{options}, {base:?}, {when}");
            assert!(folder.raw("", "disk") == before, "{when}: other bytes");
            assert_valid(&folder, "disk", &when);
            if base.unwrap().0 == "qcow2" {
                assert_valid(&folder, "base", &when);
            }
            assert!(!is_done || own(&folder, "disk").is_empty(), "{when}: not empty");
        });
    }
    assert!(interrupted > 100, "{interrupted}");
}

#[test]
fn images_that_cannot_be_rebased_or_committed_are_refused_and_keep_their_bytes() {
    let folder = Folder::new();
    folder.img("create -f raw base 1M");
    let over = "-f qcow2 -F raw -b base";
    folder.img(&format!("create {over} plain 1M"));
    folder.img(&format!("create {over} bitmaps 1M"));
    folder.img("bitmap --add bitmaps b");
    folder.img(&format!("create {over} snapshots 1M"));
    folder.img("snapshot -c snap snapshots");
    folder.img(&format!("create {over} -o data_file=data.raw data 1M"));
    folder.img("create -f qcow2 -o data_file=raw.raw,data_file_raw=on raw 1M");
    folder.img("create -f qcow2 none 1M");
    folder.img("create -f qcow2 -o cluster_size=512 small 64k");
    for (name, at, value) in [("corrupt", 79, 2), ("odd", 31, 1)] {
        folder.img(&format!("create {over} {name} 1M"));
        let mut bytes = std::fs::read(folder.path(name)).unwrap();
        bytes[at] = value;
        std::fs::write(folder.path(name), bytes).unwrap();
    }
    let refused = |image: &str, change: &str, error: Error, why: &str| {
        assert!(error.to_string().ends_with(why), "{image}, {change}: {error}");
    };
    for (image, rebased, committed) in [
        (
            "bitmaps",
            "1 dirty bitmaps, which are not rebased yet",
            "1 dirty bitmaps, which are not committed yet",
        ),
        ("snapshots", "1 internal snapshots, whose content may change with the backing file", ""),
        ("data", "images with an external data file are not rebased yet", "data file are not committed yet"),
        ("corrupt", "marked as corrupt (freestone image repair ends that)", ""),
        ("odd", "size 1048577: want a multiple of 512 bytes", ""),
        ("none", "no backing file is named: ", "the image has no backing file"),
    ] {
        let path = folder.path(image);
        let before = [std::fs::read(&path).unwrap(), std::fs::read(folder.path("base")).unwrap()];
        let base = || Some(folder.file("base"));
        let error = rebase(&writable(&path), base(), None).unwrap_err();
        let unused = format!("{rebased}{} is unused", folder.file("base").name());
        refused(image, "rebase", error, if image == "none" { &unused } else { rebased });
        let error = commit(&writable(&path), Target::Raw(writable(&folder.path("base"))), Options::default())
            .unwrap_err();
        refused(image, "commit", error, if committed.is_empty() { rebased } else { committed });
        let after = [std::fs::read(&path).unwrap(), std::fs::read(folder.path("base")).unwrap()];
        assert!(before == after, "{image} has changed");
    }
    folder.img("create -f raw short 512k");
    let left = Arc::new(AtomicU64::new(u64::MAX));
    let fixed = stopping(writable(&folder.path("short")), left, true);
    let error = commit(&writable(&folder.path("plain")), Target::Raw(fixed), Options::default()).unwrap_err();
    assert!(error.to_string().contains(": 524288 bytes, not 1048576: "), "{error}");
    refused("short", "commit", error, "the size is fixed");
    let error = rebase(&writable(&folder.path("plain")), None, None).unwrap_err();
    refused("plain", "rebase", error, "the backing file \"base\" is not open");
    let set = |image: &str, name: &str, format: &str| {
        let (device, backing) =
            (writable(&folder.path(image)), Backing { name: name.into(), format: format.into() });
        reactor::run(async move { backing::set(&device, Some(&backing)).await })
    };
    for (image, name, format, why) in [
        ("raw", "base".into(), "raw", "an image with a raw external data file has no backing file"),
        ("corrupt", "base".into(), "raw", "marked as corrupt (freestone image repair ends that)"),
        ("plain", String::new(), "raw", "backing file name of 0 bytes: want 1 to 1023"),
        ("plain", "n".repeat(1024), "raw", "backing file name of 1024 bytes: want 1 to 1023"),
        ("plain", "base".into(), "a-format-too-long", "backing format of 17 bytes: want 1 to 15"),
        (
            "small",
            "n".repeat(400),
            "raw",
            "backing file name of 400 bytes: no room in the header of 512 bytes",
        ),
    ] {
        let before = std::fs::read(folder.path(image)).unwrap();
        refused(image, "set", set(image, &name, format).unwrap_err(), why);
        assert!(std::fs::read(folder.path(image)).unwrap() == before, "{image} has changed");
    }
}
