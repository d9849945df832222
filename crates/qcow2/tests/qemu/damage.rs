//! Damaged images: the verdict of a check is that of `qemu-img check`, and every read ends.

use crate::tools::{Folder, file, mixed_writes, open};
use block::{Device, IoError};
use qcow2::{Image, Others, Report};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Damages of each image.
pub const SEEDS: u64 = 48;

/// Verdicts of `qemu-img check`.
pub const CLEAN: i32 = 0;
const ERROR: i32 = 1;
const CORRUPT: i32 = 2;
const LEAKS: i32 = 3;

pub fn check(device: Arc<dyn Device>) -> Result<Report, qcow2::Error> {
    reactor::run(async move { qcow2::check(&*device).await })
}

pub fn verdict(result: &Result<Report, qcow2::Error>) -> i32 {
    match result {
        Err(_) => ERROR,
        Ok(report) if report.check_errors > 0 => ERROR,
        Ok(report) if report.corruptions > 0 => CORRUPT,
        Ok(report) if report.leaks > 0 => LEAKS,
        Ok(_) => CLEAN,
    }
}

/// Images with every structure, by name.
pub fn images(folder: &Folder) -> Vec<String> {
    let kinds = [
        ("v2", "compat=0.10,cluster_size=512", 1 << 20),
        ("v3", "cluster_size=4096", 3 << 20),
        ("large", "cluster_size=65536", 3 << 20),
        ("extended", "cluster_size=16384,extended_l2=on", 3 << 20),
        ("one_bit", "cluster_size=512,refcount_bits=1", 1 << 20),
        ("wide", "cluster_size=512,refcount_bits=64", 1 << 20),
        ("data", "cluster_size=4096,data_file=data.raw", 3 << 20),
        ("allocated", "cluster_size=4096,preallocation=metadata", 3 << 20),
    ];
    for (name, options, size) in kinds {
        folder.img(&format!("create -f qcow2 -o {options} {name} {size}"));
        folder.io(name, &mixed_writes(size, size, 4096, name != "v2"));
    }
    for name in ["v2", "v3", "large"] {
        folder.img(&format!("snapshot -c before {name}"));
        folder.io(name, &mixed_writes(3, 1 << 20, 4096, name != "v2"));
        folder.img(&format!("snapshot -c after {name}"));
    }
    folder.img("bitmap --add v3 some");
    let words: Vec<u8> = (0..1_u32 << 20).map(|i| (i / 100).to_le_bytes()[(i % 3) as usize]).collect();
    std::fs::write(folder.path("words"), words).unwrap();
    for kind in ["zlib", "zstd"] {
        let options = format!("cluster_size=4096,compression_type={kind}");
        folder.img(&format!("convert -c -f raw -O qcow2 -o {options} words {kind}"));
    }
    let names = kinds.into_iter().map(|(name, ..)| name).chain(["zlib", "zstd"]);
    names.map(str::to_owned).collect()
}

#[test]
fn intact_images_are_clean_with_the_figures_of_qemu() {
    let folder = Folder::new();
    for name in images(&folder) {
        let text = folder.img(&format!("check -f qcow2 --output json {name}"));
        let figure = |key: &str| {
            let value = text.split_once(&format!("\"{key}\":")).map_or("0", |(_, rest)| rest.trim_start());
            value.split([',', '\n', ' ']).next().unwrap().parse::<u64>().unwrap()
        };
        let report = check(folder.file(&name)).unwrap();
        assert_eq!(report.messages, [""; 0], "{name}");
        let ours = [
            ("total-clusters", report.total_clusters),
            ("allocated-clusters", report.allocated_clusters),
            ("fragmented-clusters", report.fragmented_clusters),
            ("compressed-clusters", report.compressed_clusters),
            ("image-end-offset", report.image_end_offset),
            ("check-errors", report.check_errors),
        ];
        ours.iter().for_each(|(key, value)| assert_eq!(*value, figure(key), "{name}: {key}"));
    }
}

/// A part of the metadata: name, first byte, and the byte behind the last.
pub type Part = (&'static str, usize, usize);

/// Where the metadata of an image begins and ends.
pub fn metadata(bytes: &[u8]) -> Vec<Part> {
    let be64 = |at: usize| u64::from_be_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
    let be32 = |at: usize| u32::from_be_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
    let cluster = 1 << be32(20);
    let (l1, table, snapshots) = (be64(40), be64(48), be64(64));
    let place = |entry: usize| entry & 0x00ff_ffff_ffff_fe00;
    let l2 = (0..be32(36)).map(|i| place(be64(l1 + 8 * i))).find(|at| *at != 0).unwrap();
    let extensions = if be32(4) == 2 { 72 } else { be32(100) };
    let mut parts = vec![
        ("header", 0, extensions),
        ("extensions", extensions, (extensions + 400).min(cluster)),
        ("L1", l1, l1 + 8 * be32(36)),
        ("L2", l2, l2 + cluster.min(512)),
        ("refcount table", table, table + 64),
        ("refcount block", place(be64(table)), place(be64(table)) + 64),
    ];
    if be32(60) > 0 {
        parts.push(("snapshots", snapshots, snapshots + 150));
    }
    parts
}

/// Changes a number in the metadata. Returns what was changed.
pub fn damage(bytes: &mut [u8], seed: u64) -> String {
    damage_part(&metadata(bytes), bytes, seed)
}

/// Changes a number in one of these parts.
pub fn damage_part(parts: &[Part], bytes: &mut [u8], seed: u64) -> String {
    let mut random = base::Rng::new(seed);
    let (part, start, end) = parts[(seed % parts.len() as u64) as usize];
    let end = end.min(bytes.len());
    let width = random.pick(&[1, 4, 8]);
    let at = start + (random.draw() as usize % (end - start)) / width * width;
    let width = width.min(bytes.len() - at);
    let field = &mut bytes[at..at + width];
    match random.below(5) {
        0 => field.fill(0),
        1 => field.fill(0xff),
        2 => field[width - 1] = field[width - 1].wrapping_add(1),
        3 => field.iter_mut().for_each(|byte| *byte = random.draw() as u8),
        _ => field[random.draw() as usize % width] ^= 1 << random.below(8),
    }
    format!("seed {seed}: {part}, {width} bytes at {at}")
}

/// Reads the whole disk. Errors of the metadata are expected, anything else is not.
fn read_all(path: &Path, needs_data: bool) {
    let device = file(path);
    let data_file = needs_data.then(|| file(&path.with_file_name("data.raw")));
    reactor::run(async move {
        let Ok(image) = Image::open(device.clone()).await else { return };
        let snapshots = image.snapshots.clone();
        let others = Others { data_file, backing: None };
        let mut disks = vec![open(device.clone(), others, None).await];
        for snapshot in snapshots {
            disks.push(open(device.clone(), Others::default(), Some(&snapshot.id)).await);
        }
        for disk in disks.into_iter().flatten() {
            let channel = disk.open_channel().unwrap();
            let end = disk.limits().capacity.min(4 << 20);
            for at in (0..end).step_by(64 << 10) {
                let (_, result) = crate::tools::read(&*channel, at, (64 << 10).min(end - at)).await;
                assert!(matches!(result, Ok(()) | Err(IoError::Corrupt | IoError::OutOfRange)), "{result:?}");
            }
        }
    });
}

/// An image with a damage.
pub struct Damaged {
    /// The name of the image before.
    pub name: String,
    /// The damage.
    pub what: String,
    pub bytes: Vec<u8>,
    /// The file with these bytes.
    pub path: PathBuf,
}

/// The verdict of `qemu-img check` about a damaged image.
pub struct Theirs {
    pub code: i32,
    /// Whether the code says nothing. QEMU opens the data file. The check here reads only the
    /// image: a name that is damaged is an error when the disk is opened.
    pub lacks_data: bool,
}

impl Damaged {
    /// Lets QEMU check the file as it is now. Notes a verdict that differs from `ours`, which
    /// `result` is about.
    pub fn compare<R: std::fmt::Debug>(
        &self,
        folder: &Folder,
        ours: i32,
        result: &R,
        different: &mut Vec<String>,
    ) -> Theirs {
        let output = folder.run("qemu-img", &["check", "-f", "qcow2", "damaged"]);
        let code = output.status.code().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        let is_missing = said.contains("'data-file' is required") || said.contains("No such file");
        let lacks_data = self.name == "data" && is_missing;
        if ours != code && !lacks_data {
            let Damaged { name, what, .. } = self;
            different.push(format!("{name}, {what}: {ours}, QEMU {code}\n  {result:?}\n  {said}"));
        }
        Theirs { code, lacks_data }
    }
}

/// Runs `work` for each image with each damage.
pub fn each_damaged(folder: &Folder, mut work: impl FnMut(&Damaged)) {
    let path = folder.path("damaged");
    for name in images(folder) {
        let intact = std::fs::read(folder.path(&name)).unwrap();
        for seed in 0..SEEDS {
            let mut bytes = intact.clone();
            let what = damage(&mut bytes, seed);
            std::fs::write(&path, &bytes).unwrap();
            work(&Damaged { name: name.clone(), what, bytes, path: path.clone() });
        }
    }
}

#[test]
fn damaged_images_have_the_verdict_of_qemu_and_every_read_of_them_ends() {
    let folder = Folder::new();
    let mut verdicts = [0; 4];
    let mut different = Vec::new();
    each_damaged(&folder, |damaged| {
        let result = check(file(&damaged.path));
        let theirs = damaged.compare(&folder, verdict(&result), &result, &mut different);
        verdicts[theirs.code as usize] += 1;
        read_all(&damaged.path, damaged.name == "data");
    });
    assert!(different.is_empty(), "{verdicts:?}: {} differ:\n{}", different.len(), different.join("\n"));
    assert!(verdicts.iter().all(|count| *count > 10), "{verdicts:?}");
}
