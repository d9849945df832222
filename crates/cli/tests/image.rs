//! `freestone image` prints what `qemu-img` prints, with its exit codes. Needs `qemu-utils`.

use drivers::io_uring;
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};

fn run(program: &str, folder: &Path, arguments: &str) -> Output {
    let arguments: Vec<&str> = arguments.split(' ').collect();
    let output = Command::new(program).args(arguments).current_dir(folder).env("TZ", "UTC").output();
    output.unwrap_or_else(|error| panic!("{program} (package qemu-utils): {error}"))
}

fn qemu(folder: &Path, arguments: &str) -> Output {
    run("qemu-img", folder, arguments)
}

fn ours(folder: &Path, arguments: &str) -> Output {
    run(env!("CARGO_BIN_EXE_freestone"), folder, &format!("image {arguments}"))
}

fn write(folder: &Path, image: &str, commands: &[&str]) {
    for command in commands {
        let mut io = Command::new("qemu-io");
        let output = io.args(["-f", "qcow2", "-c", command, image]).current_dir(folder).output().unwrap();
        assert!(output.status.success(), "{command}: {output:?}");
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn json(bytes: &[u8]) -> Value {
    serde_json::from_slice(bytes).unwrap_or_else(|error| panic!("{error}: {}", text(bytes)))
}

/// Images of every kind that the commands tell apart.
fn images(folder: &Path) -> Vec<&'static str> {
    std::fs::create_dir(folder.join("sub")).unwrap();
    for arguments in [
        "create -q -f qcow2 sub/base.qcow2 1M",
        "create -q -f qcow2 -F qcow2 -b sub/base.qcow2 -o cluster_size=4096 top.qcow2 1500K",
        "create -q -f qcow2 -o compat=0.10 v2.qcow2 1M",
        "create -q -f qcow2 -o lazy_refcounts=on,refcount_bits=64,compression_type=zstd lazy.qcow2 3M",
        "create -q -f qcow2 -o extended_l2=on extended.qcow2 3M",
        "create -q -f qcow2 -o data_file=data.raw,data_file_raw=on data.qcow2 3M",
    ] {
        let output = qemu(folder, arguments);
        assert!(output.status.success(), "{arguments}: {output:?}");
    }
    write(folder, "sub/base.qcow2", &["write 256k 64k"]);
    write(folder, "top.qcow2", &["write 0 64k", "write -z 128k 8k", "write 200k 4k", "write -z 200k 4k"]);
    write(folder, "v2.qcow2", &["write 64k 128k"]);
    write(folder, "extended.qcow2", &["write 4k 8k", "write 512k 96k", "write -z 520k 4k"]);
    write(folder, "data.qcow2", &["write 64k 64k"]);
    for arguments in
        ["snapshot -c first v2.qcow2", "snapshot -c second v2.qcow2", "bitmap --add lazy.qcow2 changes"]
    {
        assert!(qemu(folder, arguments).status.success(), "{arguments}");
    }
    vec!["sub/base.qcow2", "top.qcow2", "v2.qcow2", "lazy.qcow2", "extended.qcow2", "data.qcow2"]
}

#[test]
fn information_is_that_of_qemu() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for image in images(folder) {
        let theirs = json(&qemu(folder, &format!("info --output json {image}")).stdout);
        let mine = json(&ours(folder, &format!("info --output json {image}")).stdout);
        // Newer versions of QEMU add the list of child nodes.
        let mut theirs = theirs.as_object().unwrap().clone();
        theirs.remove("children");
        assert_eq!(mine, Value::Object(theirs), "{image}");
        // They also changed the columns of the list of snapshots.
        let theirs = text(&qemu(folder, &format!("info {image}")).stdout);
        let theirs = theirs.split("Child node").next().unwrap();
        let mine = text(&ours(folder, &format!("info {image}")).stdout);
        match image {
            "v2.qcow2" => {
                assert!(mine.contains("\n1         first ") && mine.contains("\n2         second "))
            }
            _ => assert_eq!(mine, theirs, "{image}"),
        }
    }
}

#[test]
fn checks_have_the_output_and_the_exit_codes_of_qemu() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for image in images(folder) {
        assert_check(folder, image, 0);
    }
    let intact = std::fs::read(folder.join("v2.qcow2")).unwrap();
    let refcounts = 2 << 16;
    for (at, value, code) in [(refcounts + 3, 5, 3), (refcounts + 3, 0, 2), (23, 40, 1), (0, 0, 63)] {
        let mut bytes = intact.clone();
        bytes[at] = value;
        std::fs::write(folder.join("damaged.qcow2"), bytes).unwrap();
        assert_check(folder, "damaged.qcow2", code);
    }
    let missing = ours(folder, "check missing.qcow2");
    assert_eq!(missing.status.code(), Some(1));
    assert!(text(&missing.stderr).contains("missing.qcow2"), "{missing:?}");
}

fn assert_check(folder: &Path, image: &str, code: i32) {
    for form in ["human", "json"] {
        let theirs = qemu(folder, &format!("check --output {form} {image}"));
        let mine = ours(folder, &format!("check --output {form} {image}"));
        assert_eq!((mine.status.code(), theirs.status.code()), (Some(code), Some(code)), "{image}: {mine:?}");
        match form {
            _ if [1, 63].contains(&code) => assert!(text(&mine.stderr).contains(image), "{mine:?}"),
            "human" => assert_eq!(text(&mine.stdout), text(&theirs.stdout), "{image}"),
            _ => assert_eq!(json(&mine.stdout), json(&theirs.stdout), "{image}"),
        }
    }
}

#[test]
fn repairs_have_the_exit_codes_and_figures_of_qemu() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    images(folder);
    let intact = std::fs::read(folder.join("v2.qcow2")).unwrap();
    let l2 = u64::from_be_bytes(intact[3 << 16..][..8].try_into().unwrap()) as usize & 0xff_ffff_ffff;
    // A leak, an error, both, and one that stays: a reserved bit of an L2 entry.
    let (leak, low, stays) = ((0x20003, 5), (0x20009, 0), (l2 + 15, 4));
    for damages in [vec![], vec![leak], vec![low], vec![leak, low], vec![leak, stays]] {
        let mut bytes = intact.clone();
        damages.iter().for_each(|(at, value)| bytes[*at] = *value);
        for level in ["leaks", "all"] {
            for image in ["mine.qcow2", "theirs.qcow2"] {
                std::fs::write(folder.join(image), &bytes).unwrap();
            }
            let theirs = qemu(folder, &format!("check -r {level} --output json theirs.qcow2"));
            let mine = ours(folder, &format!("check -r {level} --output json mine.qcow2"));
            let when = format!("{damages:?} {level}: {mine:?} {theirs:?}");
            // QEMU frees no leaks where a used cluster has the refcount 0.
            if level == "leaks" && damages.contains(&low) {
                assert_eq!((mine.status.code(), theirs.status.code()), (Some(2), Some(1)), "{when}");
                continue;
            }
            assert_eq!(mine.status.code(), theirs.status.code(), "{when}");
            let figures = |output: &Output| {
                let mut figures = json(&output.stdout);
                // QEMU moves the refcounts, and counts an error for each use of a table.
                for key in ["filename", "image-end-offset", "corruptions"] {
                    figures.as_object_mut().unwrap().remove(key);
                }
                figures
            };
            assert_eq!(figures(&mine), figures(&theirs), "{when}");
        }
    }
    // Clusters that are not shared any more get their COPIED bits.
    let mut bytes = intact.clone();
    assert!(qemu(folder, "snapshot -d first v2.qcow2").status.success());
    assert!(qemu(folder, "snapshot -d second v2.qcow2").status.success());
    let alone = std::fs::read(folder.join("v2.qcow2")).unwrap();
    bytes[60..72].copy_from_slice(&alone[60..72]);
    std::fs::write(folder.join("mine.qcow2"), &bytes).unwrap();
    assert_check(folder, "mine.qcow2", 3);
    assert_eq!(ours(folder, "check -r leaks mine.qcow2").status.code(), Some(0));
    assert_check(folder, "mine.qcow2", 0);
    std::fs::write(folder.join("mine.qcow2"), &intact).unwrap();
    let said = text(&ours(folder, "repair mine.qcow2").stdout);
    assert!(said.starts_with("No errors were found"), "{said}");
    assert_eq!(std::fs::read(folder.join("mine.qcow2")).unwrap(), intact);
    let refused = ours(folder, "check -U -r all mine.qcow2");
    assert_eq!(refused.status.code(), Some(2), "{refused:?}");
}

#[test]
fn snapshots_are_those_of_qemu() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    images(folder);
    let done = |arguments: &str| {
        let output = ours(folder, &format!("snapshot {arguments}"));
        assert!(output.status.success() && output.stdout.is_empty(), "{arguments}: {output:?}");
    };
    done("list sub/base.qcow2");
    done("create v2.qcow2 third");
    write(folder, "v2.qcow2", &["write -P 9 0 64k"]);
    let info = |image: &str| json(&qemu(folder, &format!("info --output json {image}")).stdout);
    let listed = json(&ours(folder, "snapshot list --output json v2.qcow2").stdout);
    assert_eq!(listed, info("v2.qcow2")["snapshots"]);
    let names: Vec<_> = listed.as_array().unwrap().iter().map(|entry| entry["name"].clone()).collect();
    assert_eq!(names, ["first", "second", "third"]);
    let said = text(&ours(folder, "snapshot list v2.qcow2").stdout);
    assert!(said.starts_with("Snapshot list:\nID") && said.contains("\n3         third "), "{said}");
    done("apply v2.qcow2 3");
    assert!(qemu(folder, "convert -f qcow2 -O raw -l third v2.qcow2 third.raw").status.success());
    assert!(qemu(folder, "compare -f raw -F qcow2 third.raw v2.qcow2").status.success());
    done("delete v2.qcow2 first");
    done("delete v2.qcow2 second");
    done("delete v2.qcow2 third");
    assert!(info("v2.qcow2").get("snapshots").is_none());
    assert_check(folder, "v2.qcow2", 0);
    let missing = ours(folder, "snapshot delete v2.qcow2 third");
    assert_eq!(missing.status.code(), Some(1));
    assert!(text(&missing.stderr).contains("no snapshot \"third\": the image has []"), "{missing:?}");
}

#[test]
fn bitmaps_are_those_of_qemu() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for image in ["ours.qcow2", "theirs.qcow2", "other.qcow2"] {
        assert!(qemu(folder, &format!("create -q -f qcow2 {image} 3M")).status.success());
    }
    assert!(qemu(folder, "bitmap --add -g 4K other.qcow2 source").status.success());
    write(folder, "other.qcow2", &["write 1M 5k"]);
    for options in [
        "--add FILE b",
        "--add --disable -g 4096 FILE c",
        "--add -g 512 --merge c --merge b FILE d",
        "--merge source -b other.qcow2 -F qcow2 FILE d",
        "--remove --add -f qcow2 FILE c",
        "--clear FILE d",
        "--disable FILE b",
        "--remove FILE d",
        // These fail.
        "--add FILE b",
        "--remove FILE x",
        "--merge x FILE b",
        "--merge source -b theirs.qcow2 -F qcow2 FILE b",
    ] {
        let run = |image: &str| format!("bitmap {}", options.replace("FILE", image));
        let (mine, theirs) = (ours(folder, &run("ours.qcow2")), qemu(folder, &run("theirs.qcow2")));
        assert_eq!(mine.status.code(), theirs.status.code(), "{options}: {}", text(&mine.stderr));
        let bitmaps = |image: &str| {
            let mut info = json(&qemu(folder, &format!("info --output json {image}")).stdout);
            info["format-specific"]["data"]["bitmaps"].take()
        };
        assert_eq!(bitmaps("ours.qcow2"), bitmaps("theirs.qcow2"), "{options}");
        assert!(qemu(folder, "check -q ours.qcow2").status.success(), "{options}");
    }
    let refused = ours(folder, "bitmap --clear -g 4K ours.qcow2 b");
    assert!(text(&refused.stderr).contains("--granularity: only with --add"), "{}", text(&refused.stderr));
}

#[test]
fn disks_are_resized_as_by_qemu() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    images(folder);
    let size = |image: &str| {
        json(&qemu(folder, &format!("info --output json {image}")).stdout)["virtual-size"].clone()
    };
    let done = |arguments: &str, image: &str, bytes: u64| {
        let output = ours(folder, &format!("resize {arguments}"));
        assert!(output.status.success(), "{arguments}: {output:?}");
        assert_eq!(text(&output.stdout), "Image resized.\n");
        assert_eq!(size(image), bytes, "{arguments}");
    };
    done("sub/base.qcow2 3M", "sub/base.qcow2", 3 << 20);
    done("--backing auto top.qcow2 +1M", "top.qcow2", 2524 << 10);
    assert!(qemu(folder, "convert -f qcow2 -O raw top.qcow2 top.raw").status.success());
    let bytes = std::fs::read(folder.join("top.raw")).unwrap();
    assert!(bytes[1500 << 10..].iter().all(|byte| *byte == 0), "the backing file is seen");
    done("--shrink top.qcow2 -1500K", "top.qcow2", 1 << 20);
    done("--shrink extended.qcow2 +0", "extended.qcow2", 3 << 20);
    for image in ["sub/base.qcow2", "top.qcow2", "extended.qcow2"] {
        assert_eq!(qemu(folder, &format!("check -q {image}")).status.code(), Some(0), "{image}");
    }
    std::fs::write(folder.join("disk.raw"), [1; 4096]).unwrap();
    done("-f raw disk.raw 1M", "disk.raw", 1 << 20);
    done("-f raw --shrink disk.raw 512", "disk.raw", 512);
    for (arguments, code, why) in [
        ("sub/base.qcow2 1M", 1, "size 1048576: less than 3145728 (--shrink allows that)"),
        ("-f raw disk.raw -512", 2, "a disk of 512 bytes cannot change by -512 bytes"),
        ("top.qcow2 +1M", 1, "names the backing file \"sub/base.qcow2\", which --backing auto would open"),
        ("top.qcow2 1X", 2, "want a number with K, M, G or T"),
        ("v2.qcow2 2M", 1, "version 2 with snapshots"),
    ] {
        let output = ours(folder, &format!("resize {arguments}"));
        assert!(output.status.code() == Some(code) && text(&output.stderr).contains(why), "{output:?}");
    }
}

#[test]
fn images_are_rebased_as_by_qemu() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    images(folder);
    std::fs::write(folder.join("other.raw"), [7; 300 << 10]).unwrap();
    assert!(qemu(folder, "create -q -f qcow2 -F raw -b ../other.raw sub/new.qcow2 1M").status.success());
    let done = |arguments: &str, expected: &str| {
        std::fs::copy(folder.join("top.qcow2"), folder.join("theirs.qcow2")).unwrap();
        let output = ours(folder, &format!("rebase {arguments} top.qcow2"));
        assert!(output.status.success() && output.stdout.is_empty(), "{arguments}: {output:?}");
        let mut theirs = vec!["rebase"];
        theirs.extend(expected.split(' ').map(|part| if part == "none" { "" } else { part }));
        theirs.push("theirs.qcow2");
        let qemu_img = Command::new("qemu-img").args(theirs).current_dir(folder).output().unwrap();
        assert!(qemu_img.status.success(), "{expected}: {qemu_img:?}");
        let can_open = !arguments.contains("missing");
        assert!(!can_open || qemu(folder, "check -q top.qcow2").status.success(), "{arguments}");
        let [mine, theirs] = ["top.qcow2", "theirs.qcow2"].map(|image| {
            let info = json(&qemu(folder, &format!("info --output json {image}")).stdout);
            ["backing-filename", "backing-filename-format"].map(|key| info.get(key).cloned())
        });
        assert_eq!(mine, theirs, "{arguments}");
    };
    let same = || {
        let same = qemu(folder, "compare -q top.qcow2 theirs.qcow2");
        assert_eq!(same.status.code(), Some(0), "{same:?}");
    };
    done("--open-backing auto -b other.raw -F raw", "-F raw -b other.raw");
    same();
    done("--open-backing auto --image-dir . -b sub/new.qcow2 -F qcow2", "-F qcow2 -b sub/new.qcow2");
    same();
    done("-u -b missing.raw -F raw", "-u -F raw -b missing.raw");
    done("--unsafe --backing sub/base.qcow2 --backing-format qcow2", "-u -F qcow2 -b sub/base.qcow2");
    same();
    done("--open-backing auto --backing none", "-b none");
    same();
    done("-b other.raw -F raw", "-F raw -b other.raw");
    same();
    let before = std::fs::read(folder.join("top.qcow2")).unwrap();
    let auto = "--open-backing auto";
    for (arguments, code, why) in [
        ("top.qcow2".to_owned(), 2, "--backing <NAME|none>"),
        ("-b other.raw top.qcow2".into(), 2, "--backing-format is missing"),
        ("-b none -F raw top.qcow2".into(), 2, "--backing-format: there is no backing file"),
        ("-b none top.qcow2".into(), 1, "\"other.raw\", which --open-backing auto would open"),
        (format!("{auto} -b missing -F raw top.qcow2"), 1, "missing"),
        (format!("{auto} -b nbd:host -F raw top.qcow2"), 1, "names with the protocol \"nbd\" are not opened"),
        ("-u -b sub/../top.qcow2 -F qcow2 top.qcow2".into(), 1, "the file is its own backing file"),
        (format!("{auto} -b sub/new.qcow2 -F qcow2 top.qcow2"), 1, "a name with \"..\" needs image-dir="),
        (format!("{auto} -b other.raw -F qcow2 top.qcow2"), 1, "no qcow2 image"),
        ("-b sub/new.qcow2 -F qcow2 sub/base.qcow2".into(), 1, "sub/new.qcow2"),
        ("-u -b other.raw -F raw data.qcow2".into(), 1, "a raw external data file has no backing file"),
    ] {
        let output = ours(folder, &format!("rebase {arguments}"));
        assert_eq!(output.status.code(), Some(code), "{arguments}: {output:?}");
        assert!(text(&output.stderr).contains(why), "{arguments}: {output:?}");
        assert!(std::fs::read(folder.join("top.qcow2")).unwrap() == before, "{arguments}");
    }
    let device = io_uring::Options::new(folder.join("other.raw"));
    let writer = io_uring::UringDevice::open(&device).unwrap();
    let refused = ours(folder, "rebase --open-backing auto -b none top.qcow2");
    assert!(text(&refused.stderr).contains("other.raw is open for writing elsewhere"), "{refused:?}");
    drop(writer);
    let _writer = io_uring::UringDevice::open(&io_uring::Options::new(folder.join("top.qcow2"))).unwrap();
    let refused = ours(folder, "rebase -u -b none top.qcow2");
    assert!(text(&refused.stderr).contains("top.qcow2 is open for writing elsewhere"), "{refused:?}");
    assert!(std::fs::read(folder.join("top.qcow2")).unwrap() == before);
}

#[test]
fn a_streamed_image_has_the_data_of_its_backing_files() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    images(folder);
    let raw = || {
        assert!(qemu(folder, "convert -f qcow2 -O raw top.qcow2 disk.raw").status.success());
        std::fs::read(folder.join("disk.raw")).unwrap()
    };
    let disk = raw();
    let refused = ours(folder, "stream top.qcow2");
    assert!(text(&refused.stderr).contains("which --backing auto would open"), "{refused:?}");
    let streamed = ours(folder, "stream --backing auto top.qcow2");
    assert!(streamed.status.success() && streamed.stdout.is_empty(), "{streamed:?}");
    std::fs::remove_file(folder.join("sub/base.qcow2")).unwrap();
    assert!(raw() == disk);
    assert!(qemu(folder, "check -q top.qcow2").status.success());
    let refused = ours(folder, "stream --backing auto top.qcow2");
    assert!(text(&refused.stderr).contains("top.qcow2: the image has no backing file"), "{refused:?}");
}

#[test]
fn images_are_committed_as_by_qemu() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    images(folder);
    std::fs::write(folder.join("other.raw"), [7; 300 << 10]).unwrap();
    assert!(qemu(folder, "create -q -f qcow2 -F raw -b other.raw over.qcow2 1M").status.success());
    write(folder, "over.qcow2", &["write -P 1 100k 100k", "write -z 0 64k", "write -P 2 800k 10k"]);
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    let raw = |image: &str| {
        assert!(qemu(folder, &format!("convert -f qcow2 -O raw {image} disk.raw")).status.success());
        read("disk.raw")
    };
    for (image, backing, option) in [
        ("top.qcow2", "sub/base.qcow2", "--keep"),
        ("top.qcow2", "sub/base.qcow2", ""),
        ("over.qcow2", "other.raw", "-d"),
        ("over.qcow2", "other.raw", ""),
    ] {
        let (disk, [old_image, old_backing]) = (raw(image), [image, backing].map(read));
        let arguments = format!("commit --backing auto {option} {image}").replace("  ", " ");
        let output = ours(folder, &arguments);
        assert!(output.status.success(), "{arguments}: {output:?}");
        assert_eq!(text(&output.stdout), "Image committed.\n");
        assert!(raw(image) == disk, "{arguments}");
        let [mine, my_backing] = [image, backing].map(read);
        std::fs::write(folder.join(image), &old_image).unwrap();
        std::fs::write(folder.join(backing), old_backing).unwrap();
        let theirs =
            format!("commit {} {image}", if option.is_empty() { "" } else { "-d" }).replace("  ", " ");
        assert!(qemu(folder, &theirs).status.success(), "{theirs}");
        std::fs::write(folder.join("mine"), &my_backing).unwrap();
        let same = qemu(folder, &format!("compare -q mine {backing}"));
        assert_eq!(same.status.code(), Some(0), "{arguments}: {same:?}");
        assert_eq!(mine == old_image, !option.is_empty(), "{arguments}");
        std::fs::write(folder.join(image), if option.is_empty() { &mine } else { &old_image }).unwrap();
        std::fs::write(folder.join(backing), my_backing).unwrap();
        assert_eq!(qemu(folder, &format!("check -q {image}")).status.code(), Some(0), "{arguments}");
    }
    let before = ["over.qcow2", "other.raw"].map(read);
    for (arguments, why) in [
        ("over.qcow2", "\"other.raw\", which --backing auto would open"),
        ("--backing auto v2.qcow2", "v2.qcow2: the image has no backing file"),
        ("--backing auto missing.qcow2", "missing.qcow2"),
        ("--backing auto other.raw", "no qcow2 image"),
    ] {
        let output = ours(folder, &format!("commit {arguments}"));
        assert_eq!(output.status.code(), Some(1), "{arguments}: {output:?}");
        assert!(text(&output.stderr).contains(why), "{arguments}: {output:?}");
    }
    for file in ["over.qcow2", "other.raw"] {
        let reader = io_uring::Options {
            refuse_writers: true,
            read_only: true,
            ..io_uring::Options::new(folder.join(file))
        };
        let _reader = io_uring::UringDevice::open(&reader).unwrap();
        let refused = ours(folder, "commit --backing auto over.qcow2");
        let why = format!("{file} is read by a program that allows no writer");
        assert!(text(&refused.stderr).contains(&why), "{refused:?}");
    }
    assert!(["over.qcow2", "other.raw"].map(read) == before);
}

#[test]
fn a_commit_has_the_options_of_qemu() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    std::fs::create_dir(folder.join("sub")).unwrap();
    std::fs::write(folder.join("sub/base.raw"), [7; 1 << 20]).unwrap();
    for arguments in ["-F raw -b base.raw sub/middle.qcow2", "-F qcow2 -b sub/middle.qcow2 top.qcow2"] {
        assert!(qemu(folder, &format!("create -q -f qcow2 {arguments} 1M")).status.success());
    }
    write(folder, "sub/middle.qcow2", &["write -P 1 0 512k"]);
    write(folder, "top.qcow2", &["write -P 2 256k 512k"]);
    let absolute = folder.join("sub/base.raw");
    let files = ["top.qcow2", "sub/middle.qcow2", "sub/base.raw"];
    let read = || files.map(|name| std::fs::read(folder.join(name)).unwrap());
    let before = read();
    let restore = || {
        files.iter().zip(&before).for_each(|(name, bytes)| std::fs::write(folder.join(name), bytes).unwrap());
    };
    let on_base = [[1; 256 << 10].as_slice(), &[2; 512 << 10], &[7; 256 << 10]].concat();
    for (options, changed) in [
        ("-q", 1),
        ("-f qcow2 -d", 1),
        ("-b sub/middle.qcow2", 1),
        // The name is relative to the folder of the image over it.
        ("-b base.raw -q -p", 2),
        (&format!("-r 64M -b {}", absolute.display()), 2),
    ] {
        let is_kept = options.contains("-d") || options.contains("-b");
        let theirs = qemu(folder, &format!("commit {options} top.qcow2"));
        assert!(theirs.status.success(), "{options}: {theirs:?}");
        let by_qemu = read();
        restore();
        let mine = ours(folder, &format!("commit --backing auto {options} top.qcow2"));
        assert!(mine.status.success(), "{options}: {mine:?}");
        assert_eq!(text(&mine.stdout), text(&theirs.stdout), "{options}");
        let [top, middle, base] = read();
        assert_eq!((top == before[0], middle == before[1]), (is_kept, changed == 2), "{options}");
        assert!(base == if changed == 2 { &*on_base } else { &before[2] }, "{options}");
        assert!(base == by_qemu[2], "{options}");
        std::fs::write(folder.join("sub/theirs.qcow2"), &by_qemu[1]).unwrap();
        std::fs::write(folder.join("sub/mine.qcow2"), middle).unwrap();
        let same = qemu(folder, "compare -q -f qcow2 -F qcow2 sub/theirs.qcow2 sub/mine.qcow2");
        assert!(same.status.success(), "{options}: {same:?}");
        restore();
    }
    let printed = text(&ours(folder, "commit --backing auto -p top.qcow2").stdout);
    assert!(
        printed.starts_with("    (0.00/100%)\r") && printed.contains("    (25.00/100%)\r"),
        "{printed:?}"
    );
    assert!(printed.ends_with("    (100.00/100%)\r\nImage committed.\n"), "{printed:?}");
    restore();
    let start = std::time::Instant::now();
    assert!(ours(folder, "commit --backing auto -r 2M top.qcow2").status.success());
    assert!(start.elapsed() >= std::time::Duration::from_millis(250), "512 KiB at 2 MiB a second");
    restore();
    for (options, why) in [
        ("-b sub/base.raw", "top.qcow2: --base \"sub/base.raw\": no backing file of the image has this name"),
        ("-b top.qcow2", "top.qcow2: --base \"top.qcow2\": no backing file of the image has this name"),
        ("-f raw", "top.qcow2: the image has no backing file"),
    ] {
        let refused = ours(folder, &format!("commit --backing auto {options} top.qcow2"));
        assert_eq!(refused.status.code(), Some(1), "{options}: {refused:?}");
        assert!(text(&refused.stderr).contains(why), "{options}: {refused:?}");
    }
    assert!(read() == before);
}

#[test]
fn maps_are_those_of_qemu() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for image in images(folder) {
        let theirs = json(&qemu(folder, &format!("map --output json {image}")).stdout);
        let mine = json(&ours(folder, &format!("map --output json --backing auto {image}")).stdout);
        let (theirs, mut mine) = (theirs.as_array().unwrap().clone(), mine.as_array().unwrap().clone());
        // QEMU prints this key since 8.2.
        if !theirs[0].as_object().unwrap().contains_key("compressed") {
            mine.iter_mut().for_each(|extent| drop(extent.as_object_mut().unwrap().remove("compressed")));
        }
        assert_eq!(mine, joined(theirs), "{image}");
        let theirs = text(&qemu(folder, &format!("map {image}")).stdout);
        let mine = text(&ours(folder, &format!("map --backing auto {image}")).stdout);
        let root = format!("{}/", folder.canonicalize().unwrap().display());
        assert_eq!(mine.replace(&root, ""), theirs, "{image}");
    }
    std::fs::write(folder.join("zeroes.raw"), vec![1; 1 << 20]).unwrap();
    assert!(qemu(folder, "convert -c -f raw -O qcow2 zeroes.raw packed.qcow2").status.success());
    let [theirs, mine] = [qemu(folder, "map packed.qcow2"), ours(folder, "map packed.qcow2")];
    assert_eq!((mine.status.code(), theirs.status.code()), (Some(1), Some(1)));
    assert!(text(&mine.stderr).contains("compressed clusters"), "{mine:?}");
}

/// The map without the places that QEMU has for subclusters without data.
fn joined(extents: Vec<Value>) -> Vec<Value> {
    let mut list: Vec<Value> = Vec::new();
    for mut extent in extents {
        if extent["present"] == false {
            extent.as_object_mut().unwrap().remove("offset");
        }
        match list.last_mut() {
            Some(last)
                if last["present"] == false
                    && extent["present"] == false
                    && last["depth"] == extent["depth"] =>
            {
                last["length"] =
                    (last["length"].as_u64().unwrap() + extent["length"].as_u64().unwrap()).into();
            }
            _ => list.push(extent),
        }
    }
    list
}

#[test]
fn an_image_that_is_written_is_read_only_with_force_share() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    images(folder);
    let mut io = Command::new("qemu-io");
    let io = io.args(["-f", "qcow2", "v2.qcow2"]).current_dir(folder);
    let pipe = std::process::Stdio::piped;
    let mut writer = io.stdin(pipe()).stdout(pipe()).spawn().unwrap();
    // Its prompt appears once the image is open.
    let read = std::io::Read::read(writer.stdout.as_mut().unwrap(), &mut [0]).unwrap();
    let refused = ours(folder, "info v2.qcow2");
    let shared = ours(folder, "info -U v2.qcow2");
    drop(writer.stdin.take());
    writer.wait().unwrap();
    assert_eq!(read, 1);
    assert!(text(&refused.stderr).contains("v2.qcow2 is open for writing elsewhere"), "{refused:?}");
    assert_eq!((refused.status.code(), shared.status.code()), (Some(1), Some(0)));
}

#[test]
fn a_file_that_is_open_is_not_replaced() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    images(folder);
    let read = |name: &str| std::fs::read(folder.join(name)).unwrap();
    let before = ["v2.qcow2", "sub/base.qcow2"].map(read);
    let refuses = |arguments: &str, why: &str| {
        let refused = ours(folder, arguments);
        assert_eq!(refused.status.code(), Some(1), "{arguments}: {refused:?}");
        assert!(text(&refused.stderr).contains(why), "{arguments}: {refused:?}");
        assert_eq!(["v2.qcow2", "sub/base.qcow2"].map(read), before, "{arguments}");
    };
    // The source, and a backing file of it.
    let source = "read by a program that allows no writer";
    refuses("convert --force -f qcow2 -O qcow2 v2.qcow2 v2.qcow2", source);
    refuses("convert --force -f qcow2 --backing auto -O raw top.qcow2 sub/base.qcow2", source);
    // The disk of a server.
    let device = io_uring::Options::new(folder.join("v2.qcow2"));
    let _writer = io_uring::UringDevice::open(&device).unwrap();
    refuses("create --force -f qcow2 v2.qcow2 1M", "open for writing elsewhere");
    refuses("convert --force -f qcow2 -O qcow2 sub/base.qcow2 v2.qcow2", "open for writing elsewhere");
    let serve = "serve --device qcow2:file=v2.qcow2 --export nbd:socket=s";
    let refused = text(&run(env!("CARGO_BIN_EXE_freestone"), folder, serve).stderr);
    assert!(refused.contains("v2.qcow2 is open for writing elsewhere"), "{refused}");
    // An option of `io_uring:`, which images do not have.
    assert!(!refused.contains("share=on"), "{refused}");
}

#[test]
fn created_images_are_those_of_qemu() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let [theirs, mine] = [folders[0].path(), folders[1].path()];
    for folder in [theirs, mine] {
        assert!(qemu(folder, "create -q -f qcow2 base 3M").status.success());
    }
    for arguments in [
        "-f qcow2 image 1G",
        "-f qcow2 image 1025K",
        "-f qcow2 -o compat=0.10,cluster_size=512 image 100M",
        "-f qcow2 -o cluster_size=2M,refcount_bits=64,lazy_refcounts=on image 3T",
        "-f qcow2 -o cluster_size=4096,refcount_bits=1,compression_type=zstd image 5M",
        "-f qcow2 -o extended_l2=on,cluster_size=131072 image 5M",
        "-f qcow2 -o preallocation=metadata,cluster_size=4096,refcount_bits=8 image 40M",
        "-f qcow2 -o preallocation=metadata,extended_l2=on image 40M",
        "-f qcow2 -b base -F qcow2 image",
        "-f qcow2 -b base -F qcow2 -o compat=0.10 image 10M",
        "-f raw image 3M",
    ] {
        assert!(qemu(theirs, &format!("create -q {arguments}")).status.success(), "{arguments}");
        let created = ours(mine, &format!("create {arguments}"));
        assert!(created.status.success(), "{arguments}: {created:?}");
        if arguments.starts_with("-f qcow2") {
            let check = qemu(mine, "check -q image");
            assert_eq!(check.status.code(), Some(0), "{arguments}: {check:?}");
        }
        let info = |folder: &Path| {
            let format = arguments.split(' ').nth(1).unwrap();
            let mut info = json(&qemu(folder, &format!("info --output json -f {format} image")).stdout);
            info.as_object_mut()
                .unwrap()
                .retain(|key, _| !["actual-size", "children"].contains(&key.as_str()));
            info
        };
        assert_eq!(info(mine), info(theirs), "{arguments}");
        // An existing file is kept unless the user says otherwise.
        let refused = ours(mine, &format!("create {arguments}"));
        assert_eq!(refused.status.code(), Some(1), "{arguments}");
        assert!(text(&refused.stderr).contains("--force replaces it"), "{refused:?}");
        assert!(ours(mine, &format!("create --force {arguments}")).status.success(), "{arguments}");
        for folder in [theirs, mine] {
            std::fs::remove_file(folder.join("image")).unwrap();
        }
    }
}

#[test]
fn an_image_that_cannot_be_created_is_refused_and_leaves_no_file() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for (arguments, code, what) in [
        ("-f qcow2 -o cluster_size=3000 image 1M", 2, "a power of two"),
        ("-f qcow2 -o cluster_size=256 image 1M", 1, "cluster size 256"),
        ("-f qcow2 -o cluster_size=512 image 1P", 2, "K, M, G or T"),
        ("-f qcow2 -o cluster_size=512 image 1T", 1, "too large"),
        ("-f qcow2 -o colour=red image 1M", 2, "no option \"colour\""),
        ("-f qcow2 -o compat=0.10,refcount_bits=8 image 1M", 1, "need version 3"),
        ("-f raw -o cluster_size=4096 image 1M", 2, "a raw image has no options"),
        ("-f qcow2 -b missing -F raw image", 1, "missing"),
        ("-f qcow2 image", 2, "SIZE"),
    ] {
        let refused = ours(folder, &format!("create {arguments}"));
        assert_eq!(refused.status.code(), Some(code), "{arguments}: {refused:?}");
        assert!(text(&refused.stderr).contains(what), "{arguments}: {refused:?}");
        assert!(!folder.join("image").exists(), "{arguments}");
    }
}

#[test]
fn converted_images_have_the_same_data() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    images(folder);
    // Data that compresses well, data that does not, and holes in between.
    let mut seed = 1u64;
    let mut bytes = vec![0u8; 7 << 20];
    for (number, byte) in bytes.iter_mut().enumerate() {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        *byte = match number >> 17 {
            0..10 => (number >> 9) as u8,
            10..20 => (seed >> 56) as u8,
            20..30 => 0,
            _ => (number >> 4) as u8 & 7,
        };
    }
    std::fs::write(folder.join("plain.raw"), &bytes).unwrap();
    for (source, format) in [
        ("plain.raw", "raw"),
        ("sub/base.qcow2", "qcow2"),
        ("top.qcow2 --backing auto", "qcow2"),
        ("v2.qcow2", "qcow2"),
        ("extended.qcow2", "qcow2"),
        ("data.qcow2 --data data.raw", "qcow2"),
    ] {
        let name = source.split(' ').next().unwrap();
        for target in [
            "-O raw",
            "-O qcow2",
            "-O qcow2 -c",
            "-O qcow2 -c -o compression_type=zstd,cluster_size=2M",
            "-O qcow2 -c -o cluster_size=512,compat=0.10",
            "-O qcow2 -c -o cluster_size=4096,refcount_bits=1",
            "-O qcow2 -c -o extended_l2=on,refcount_bits=64",
        ] {
            let made = ours(folder, &format!("convert -f {format} {target} {source} new"));
            assert!(made.status.success(), "{source} to {target}: {made:?}");
            let is_raw = target == "-O raw";
            let new = if is_raw { "raw" } else { "qcow2" };
            let same = qemu(folder, &format!("compare -q -f {format} -F {new} {name} new"));
            assert_eq!(same.status.code(), Some(0), "{source} to {target}: {same:?}");
            if !is_raw {
                let check = qemu(folder, "check -q new");
                assert_eq!(check.status.code(), Some(0), "{source} to {target}: {check:?}");
                let back = ours(folder, "convert -f qcow2 new back");
                assert!(back.status.success(), "{source} to {target}: {back:?}");
                let same = qemu(folder, &format!("compare -q -f {format} -F raw {name} back"));
                assert_eq!(same.status.code(), Some(0), "{source} to {target} and back: {same:?}");
                std::fs::remove_file(folder.join("back")).unwrap();
            }
            std::fs::remove_file(folder.join("new")).unwrap();
        }
    }
    let refused = ours(folder, "convert -f qcow2 -O raw top.qcow2 new");
    assert!(text(&refused.stderr).contains("backing=auto"), "{refused:?}");
    let snapshot = ours(folder, "convert -f qcow2 -l first v2.qcow2 new");
    assert!(snapshot.status.success(), "{snapshot:?}");
    assert!(!ours(folder, "convert -f raw -l first v2.qcow2 other").status.success());
    assert!(!folder.join("other").exists());
}
