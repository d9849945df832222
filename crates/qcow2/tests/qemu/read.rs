//! The disk that this crate reads is the disk that `qemu-img convert` reads.

use crate::tools::{Folder, compare, contents, mixed_writes, open, statuses};
use block::Status;
use conformance::Suite;
use qcow2::Others;
use std::sync::Arc;

/// Makes an image with these options of `qemu-img create`, writes to it, and compares.
fn check(options: &str, size: u64, cluster: u64) {
    let folder = Folder::new();
    let with = format!("{options},cluster_size={cluster}");
    folder.img(&format!("create -f qcow2 -o {with} disk.qcow2 {size}"));
    let is_v3 = !options.contains("compat=0.10");
    folder.io("disk.qcow2", &mixed_writes(cluster, size, cluster, is_v3));
    folder.img("check disk.qcow2");
    compare(&folder.open("disk.qcow2", Others::default()), &folder.raw("", "disk.qcow2"));
}

#[test]
fn clusters_of_every_size_are_read() {
    for version in ["compat=0.10", "compat=1.1"] {
        check(version, 3 << 20, 512);
        check(version, 9 << 20, 4096);
        check(version, 20 << 20, 64 << 10);
        check(version, 20 << 20, 2 << 20);
    }
}

#[test]
fn extended_l2_entries_are_read() {
    for cluster in [16 << 10, 64 << 10, 128 << 10, 2 << 20] {
        check("compat=1.1,extended_l2=on", 10 << 20, cluster);
    }
}

#[test]
fn refcounts_of_every_width_are_read() {
    for bits in [1, 2, 4, 8, 16, 32, 64] {
        check(&format!("compat=1.1,refcount_bits={bits}"), 3 << 20, 4096);
    }
}

#[test]
fn preallocated_images_are_read() {
    for mode in ["off", "metadata", "falloc", "full"] {
        check(&format!("compat=1.1,preallocation={mode}"), 3 << 20, 64 << 10);
    }
}

/// Text of words, which compresses; and some bytes that do not.
fn source(folder: &Folder, len: usize) {
    let mut random = base::Rng::new(7);
    let words: Vec<[u8; 8]> = (0..64).map(|_| random.draw().to_le_bytes()).collect();
    let mut bytes: Vec<u8> = (0..len / 8).flat_map(|_| words[(random.draw() % 64) as usize]).collect();
    bytes[len / 2..len / 2 + (1 << 20)].chunks_exact_mut(8).for_each(|chunk| {
        chunk.copy_from_slice(&random.draw().to_le_bytes());
    });
    bytes[len / 4..len / 4 + (1 << 20)].fill(0);
    std::fs::write(folder.path("source.raw"), bytes).unwrap();
}

#[test]
fn compressed_clusters_are_read() {
    let folder = Folder::new();
    source(&folder, (4 << 20) + 512);
    for kind in ["zlib", "zstd"] {
        for (cluster, more) in [(512, ""), (4096, ""), (65536, ""), (65536, ",extended_l2=on"), (2 << 20, "")]
        {
            let options = format!("-o compression_type={kind},cluster_size={cluster}{more}");
            folder.img(&format!("convert -t unsafe -c -f raw -O qcow2 {options} source.raw disk.qcow2"));
            let expected = folder.raw("", "disk.qcow2");
            compare(&folder.open("disk.qcow2", Others::default()), &expected);
            folder.io("disk.qcow2", &mixed_writes(cluster, 4 << 20, cluster, true));
            compare(&folder.open("disk.qcow2", Others::default()), &folder.raw("", "disk.qcow2"));
        }
    }
}

#[test]
fn a_chain_of_three_with_shorter_backing_files_is_read() {
    let folder = Folder::new();
    source(&folder, (4 << 20) + 1536);
    let formats =
        [("raw", "source.raw", 4096), ("qcow2", "base.qcow2", 65536), ("qcow2", "mid.qcow2", 16384)];
    let images = [("base.qcow2", 5 << 20), ("mid.qcow2", 3 << 20), ("top.qcow2", 6 << 20)];
    for ((format, backing, cluster), (image, size)) in formats.into_iter().zip(images) {
        let extended = if cluster == 16384 { ",extended_l2=on" } else { "" };
        let options = format!("-F {format} -b {backing} -o cluster_size={cluster}{extended}");
        folder.img(&format!("create -f qcow2 {options} {image} {size}"));
        folder.io(image, &mixed_writes(size, size, cluster, true));
    }
    let base = folder.open("base.qcow2", backed(folder.file("source.raw")));
    let mid = folder.open("mid.qcow2", backed(base.clone()));
    let top = folder.open("top.qcow2", backed(mid.clone()));
    for (device, image) in [(base, "base.qcow2"), (mid, "mid.qcow2"), (top, "top.qcow2")] {
        compare(&device, &folder.raw("", image));
    }
}

fn backed(backing: Arc<dyn block::Device>) -> Others {
    Others { backing: Some(backing), ..Others::default() }
}

#[test]
fn data_in_another_file_is_read() {
    for raw in ["on", "off"] {
        let folder = Folder::new();
        let options = format!("-o data_file=data.raw,data_file_raw={raw}");
        folder.img(&format!("create -f qcow2 {options} disk.qcow2 {}", 9 << 20));
        folder.io("disk.qcow2", &mixed_writes(3, 9 << 20, 65536, true));
        let data_file = Some(folder.file("data.raw"));
        let device = folder.open("disk.qcow2", Others { data_file, backing: None });
        compare(&device, &folder.raw("", "disk.qcow2"));
    }
}

#[test]
fn internal_snapshots_are_read_by_name_and_by_id() {
    let folder = Folder::new();
    folder.img("create -f qcow2 -o cluster_size=4096 disk.qcow2 9M");
    for name in ["first", "second"] {
        folder.io("disk.qcow2", &mixed_writes(name.len() as u64, 9 << 20, 4096, true));
        folder.img(&format!("snapshot -c {name} disk.qcow2"));
    }
    folder.img("resize disk.qcow2 12M");
    folder.io("disk.qcow2", &mixed_writes(9, 12 << 20, 4096, true));
    compare(&folder.open("disk.qcow2", Others::default()), &folder.raw("", "disk.qcow2"));
    for (wanted, name) in [("first", "first"), ("second", "second"), ("1", "first")] {
        let device = folder.file("disk.qcow2");
        let disk = reactor::run(async move { open(device, Others::default(), Some(wanted)).await }).unwrap();
        // QEMU keeps the size of the image, which has grown since.
        let grown = folder.raw(&format!("-l {name}"), "disk.qcow2");
        assert!(grown[9 << 20..].iter().all(|byte| *byte == 0));
        compare(&(Arc::new(disk) as _), &grown[..9 << 20]);
    }
    let device = folder.file("disk.qcow2");
    let missing = reactor::run(async move { open(device, Others::default(), Some("third")).await });
    let text = missing.err().unwrap().to_string();
    assert!(text.ends_with(r#"no snapshot "third": the image has [first, second]"#), "{text}");
}

#[test]
fn it_passes_the_suite_of_read_only_devices() {
    let folder = Folder::new();
    folder.img("create -f qcow2 disk.qcow2 64M");
    folder.io("disk.qcow2", &mixed_writes(1, 64 << 20, 65536, true));
    Suite::new(folder.open("disk.qcow2", Others::default())).run();
}

#[test]
fn a_file_that_was_cut_short_is_an_error_and_not_zeroes() {
    let folder = Folder::new();
    folder.img("create -f qcow2 disk.qcow2 9M");
    folder.io("disk.qcow2", &["write -P 1 0 1M".into()]);
    let len = std::fs::metadata(folder.path("disk.qcow2")).unwrap().len();
    let file = std::fs::File::options().write(true).open(folder.path("disk.qcow2")).unwrap();
    file.set_len(len - (128 << 10)).unwrap();
    let device = folder.open("disk.qcow2", Others::default());
    reactor::run(async move {
        let channel = device.open_channel().unwrap();
        let (_, result) = crate::tools::read(&*channel, 0, 1 << 20).await;
        assert_eq!(result, Err(block::IoError::Corrupt));
    });
}

#[test]
fn files_that_an_image_names_are_never_left_out_silently() {
    let folder = Folder::new();
    folder.img("create -f raw base.raw 1M");
    folder.img("create -f qcow2 -F raw -b base.raw top.qcow2");
    folder.img("create -f qcow2 -o data_file=data.raw data.qcow2 1M");
    folder.img("create -f qcow2 alone.qcow2 1M");
    let refusal = |image: &str, others: Others| {
        let device = folder.file(image);
        reactor::run(async move { open(device, others, None).await }).err().unwrap().to_string()
    };
    let text = refusal("top.qcow2", Others::default());
    assert!(text.ends_with(r#"the backing file "base.raw" is not open"#), "{text}");
    let text = refusal("data.qcow2", Others::default());
    assert!(text.ends_with(r#"the data file "data.raw" is not open"#), "{text}");
    let text = refusal("alone.qcow2", backed(folder.file("base.raw")));
    assert!(text.contains("no backing file is named: io_uring:"), "{text}");
    assert_eq!(contents(&folder.open("top.qcow2", backed(folder.file("base.raw")))), vec![0; 1 << 20]);
}

#[test]
fn block_status_tells_holes_and_zeroes_from_data() {
    let folder = Folder::new();
    folder.img("create -f qcow2 base.qcow2 1M");
    folder.io("base.qcow2", &["write -P 1 0 64k".into(), "write -z 64k 64k".into()]);
    folder.img("create -f qcow2 -F qcow2 -b base.qcow2 top.qcow2 2M");
    folder.io("top.qcow2", &["write -P 2 128k 64k".into(), "write -z 128k 64k".into()]);
    folder.io("top.qcow2", &["write -P 3 192k 128k".into()]);
    let top = folder.open("top.qcow2", backed(folder.open("base.qcow2", Others::default())));
    let found = reactor::run(async move { statuses(&*top.open_channel().unwrap(), 2 << 20).await });
    let (data, hole, zero) = (Status::DATA, Status::ZERO_HOLE, Status::ZERO);
    let (cluster, rest) = (64 << 10, (2 << 20) - (320 << 10));
    assert_eq!(found, [(cluster, data), (cluster, hole), (cluster, zero), (2 * cluster, data), (rest, hole)]);
}
