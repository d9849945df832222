//! Images that this crate and the crate `imago` write in turn: what one writes, the other reads.
//!
//! `imago` knows versions 2 and 3 with backing files, zero clusters and compression by zlib, but no
//! other incompatible feature.

use crate::disk::{Disk, try_open};
use crate::tools::{Folder, compare, file};
use base::Rng;
use block::Device;
use imago::file::File as Storage;
use imago::qcow2::Qcow2;
use imago::{
    FormatAccess, FormatCreateBuilder, FormatDriverBuilder, PermissiveImplicitOpenGate, Storage as _,
    StorageOpenOptions,
};
use qcow2::write::{Options, Output, Writer};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

const IMAGE: &str = "disk.qcow2";
const BASE: &str = "base.raw";
/// Requests to a disk before its image is closed.
const REQUESTS: u64 = 100;
/// How often each of the two opens an image.
const ROUNDS: u64 = 2;

/// The file of an image that this crate creates.
struct ImageFile(File);

impl Output for ImageFile {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }
}

fn open(path: &Path, writable: bool) -> FormatAccess<Storage> {
    let builder = Qcow2::<Storage>::builder_path(path).write(writable);
    FormatAccess::new(builder.open(PermissiveImplicitOpenGate::default()).unwrap())
}

/// Makes random requests to a disk that `imago` has open.
fn work(disk: &mut Disk, image: &mut FormatAccess<Storage>, rng: &mut Rng) {
    let blocks = disk.bytes.len() as u64 / 512;
    for _ in 0..REQUESTS {
        let at = rng.below(blocks) * 512;
        let most = (3 * disk.cluster).min(disk.bytes.len() as u64 - at) / 512;
        let len = (1 + rng.log_uniform(most - 1)).min(most) * 512;
        let bytes = &mut disk.bytes[at as usize..][..len as usize];
        match rng.below(8) {
            0..5 => {
                bytes.fill_with(|| rng.draw() as u8);
                image.write(&*bytes, at).unwrap();
            }
            5 if disk.has_zeroes => {
                image.write_zeroes(at, len).unwrap();
                bytes.fill(0);
            }
            6 if disk.has_zeroes => {
                image.discard_to_zero(at, len).unwrap();
                bytes.fill(0);
            }
            _ => {
                let mut found = vec![0xee; bytes.len()];
                image.read(&mut found[..], at).unwrap();
                assert!(found == *bytes, "imago reads {len} bytes at {at}");
            }
        }
    }
}

/// Creates an image with every kind of cluster. Returns its disk.
fn create(folder: &Folder, options: &Options, base: &[u8], rng: &mut Rng) -> Vec<u8> {
    let file = File::create(folder.path(IMAGE)).unwrap();
    let mut writer = Writer::new(options.clone(), ImageFile(file)).unwrap();
    let mut bytes = base.to_vec();
    bytes.resize(options.size as usize, 0);
    let size = options.cluster_size() as usize;
    for (number, cluster) in bytes.chunks_exact_mut(size).enumerate() {
        let offset = (number * size) as u64;
        match rng.below(6) {
            0 | 1 => {
                cluster.fill_with(|| rng.draw() as u8);
                writer.write(offset, cluster).unwrap();
            }
            2 => {
                cluster.fill(1 + rng.draw() as u8 % 255);
                cluster[..size / 4].fill_with(|| rng.draw() as u8);
                writer.write_compressed(offset, cluster).unwrap();
            }
            3 => {
                cluster.fill(0);
                writer.write_zeroes(offset).unwrap();
            }
            4 => {
                cluster.fill(0);
                writer.reserve(offset).unwrap();
            }
            _ => {}
        }
    }
    let (ImageFile(file), len) = writer.finish().unwrap();
    file.set_len(len).unwrap();
    bytes
}

/// Checks an image, and that both read its disk.
fn verify(folder: &Folder, backing: &Option<Arc<dyn Device>>, disk: &Disk) {
    let device = folder.file(IMAGE);
    let report = reactor::run(async move { qcow2::check(&*device).await }).unwrap();
    assert_eq!(report.messages, [""; 0], "the image is clean");
    let others = qcow2::Others { backing: backing.clone(), data_file: None };
    compare(&folder.open(IMAGE, others), &disk.bytes);
    let mut found = vec![0xee; disk.bytes.len()];
    open(&folder.path(IMAGE), false).read(&mut found[..], 0).unwrap();
    let wrong = found.iter().zip(&disk.bytes).position(|(found, expected)| found != expected);
    assert_eq!(wrong, None, "imago reads another byte there");
}

/// Opens the image in turn, and changes its disk.
fn take_turns(folder: &Folder, backing: Option<Arc<dyn Device>>, mut disk: Disk, rng: &mut Rng) {
    verify(folder, &backing, &disk);
    for round in 0..ROUNDS {
        let device = Arc::new(try_open(&folder.path(IMAGE), backing.clone()).unwrap());
        disk.work(&device, disk.cluster + round, REQUESTS);
        drop(device);
        verify(folder, &backing, &disk);
        let mut image = open(&folder.path(IMAGE), true);
        work(&mut disk, &mut image, rng);
        image.flush().unwrap();
        drop(image);
        verify(folder, &backing, &disk);
    }
}

#[test]
fn imago_and_this_crate_write_an_image_of_this_crate_in_turn() {
    for (version, cluster_bits) in [(2, 9), (2, 16), (3, 9), (3, 12), (3, 16)] {
        for has_base in [false, true] {
            let folder = Folder::new();
            let mut rng = Rng::new(u64::from(cluster_bits * 10 + version));
            let size = 48 << cluster_bits;
            let mut base = Vec::new();
            if has_base {
                base.resize(size as usize * 2 / 3, 0);
                base.fill_with(|| rng.draw() as u8);
                std::fs::write(folder.path(BASE), &base).unwrap();
            }
            let backing = has_base.then(|| file(&folder.path(BASE)));
            let name = has_base.then(|| (BASE.into(), "raw".into()));
            let options = Options { version, cluster_bits, backing: name, ..Options::new(size) };
            let bytes = create(&folder, &options, &base, &mut rng);
            let (has_zeroes, has_discard) = (version > 2, version > 2 || !has_base);
            let disk = Disk { bytes, cluster: options.cluster_size(), has_zeroes, has_discard };
            take_turns(&folder, backing, disk, &mut rng);
        }
    }
}

#[test]
fn imago_and_this_crate_write_an_image_of_imago_in_turn() {
    for (cluster, width) in [(512, 16), (4096, 1), (65536, 64), (1 << 20, 8)] {
        let folder = Folder::new();
        let path = folder.path(IMAGE);
        File::create(&path).unwrap();
        let storage = Storage::open(StorageOpenOptions::new().filename(&path).write(true)).unwrap();
        let size = (40 * cluster).min(4 << 20) as u64;
        let builder = Qcow2::<Storage>::create_builder(storage).size(size);
        builder.cluster_size(cluster).refcount_width(width).create().unwrap();
        let disk = Disk {
            bytes: vec![0; size as usize],
            cluster: cluster as u64,
            has_zeroes: true,
            has_discard: true,
        };
        take_turns(&folder, None, disk, &mut Rng::new(width as u64));
    }
}
