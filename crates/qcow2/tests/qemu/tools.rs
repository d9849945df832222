//! QEMU's programs, and images opened by this crate.

use block::{Device, Flags, IoResult, Op, Status, StatusReport};
use drivers::io_uring::{Options, UringDevice};
use qcow2::{Error, Image, Others, Qcow2};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use tempfile::TempDir;

/// Longest read of a test in bytes.
pub const PART: u64 = 1 << 20;

/// A folder of images.
pub struct Folder(TempDir);

impl Folder {
    pub fn new() -> Folder {
        Folder(tempfile::tempdir().unwrap())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs one of QEMU's programs in the folder.
    pub fn run(&self, program: &str, arguments: &[&str]) -> Output {
        let mut command = Command::new(program);
        command.args(arguments).current_dir(self.0.path());
        command.output().unwrap_or_else(|error| panic!("{program} (package qemu-utils): {error}"))
    }

    /// Runs `qemu-img` with arguments that spaces separate.
    pub fn img(&self, arguments: &str) -> String {
        let arguments: Vec<&str> = arguments.split_whitespace().collect();
        let output = self.run("qemu-img", &arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "qemu-img {arguments:?}: {said}");
        String::from_utf8(output.stdout).unwrap()
    }

    /// Runs commands of `qemu-io` on an image.
    pub fn io(&self, image: &str, commands: &[String]) {
        for some in commands.chunks(200) {
            let mut arguments = vec!["-t", "unsafe", "-f", "qcow2"];
            some.iter().for_each(|command| arguments.extend(["-c", command]));
            arguments.push(image);
            let output = self.run("qemu-io", &arguments);
            let said = String::from_utf8_lossy(&output.stdout);
            assert!(output.status.success() && !said.contains("failed"), "{arguments:?}: {said}");
        }
    }

    /// The disk of an image, as `qemu-img convert` reads it.
    pub fn raw(&self, options: &str, image: &str) -> Vec<u8> {
        self.img(&format!("convert -t unsafe {options} -f qcow2 -O raw {image} raw.out"));
        std::fs::read(self.path("raw.out")).unwrap()
    }

    /// The file as a device.
    pub fn file(&self, name: &str) -> Arc<dyn Device> {
        file(&self.path(name))
    }

    /// The disk of an image, and of others it needs.
    pub fn open(&self, image: &str, others: Others) -> Arc<dyn Device> {
        let device = self.file(image);
        Arc::new(reactor::run(async move { open(device, others, None).await }).unwrap())
    }
}

/// The file as a device that is only read.
pub fn file(path: &Path) -> Arc<dyn Device> {
    Arc::new(UringDevice::open(&Options { read_only: true, ..Options::new(path) }).unwrap())
}

/// The disk of the image on `device`, or of a snapshot in it.
pub async fn open(device: Arc<dyn Device>, others: Others, snapshot: Option<&str>) -> Result<Qcow2, Error> {
    let mut image = Image::open(device).await?;
    if let Some(name) = snapshot {
        image = image.at_snapshot(name).await?;
    }
    // A cache of 64 KiB makes these small images evict.
    Qcow2::new(image, others, 64 << 10)
}

/// Every byte of a device.
pub fn contents(device: &Arc<dyn Device>) -> Vec<u8> {
    let device = device.clone();
    reactor::run(async move {
        let channel = device.open_channel().unwrap();
        let capacity = device.limits().capacity;
        let mut bytes = Vec::new();
        while (bytes.len() as u64) < capacity {
            let at = bytes.len() as u64;
            let (part, result) = read(&*channel, at, PART.min(capacity - at)).await;
            assert_eq!(result, Ok(()), "{} at {at}", device.name());
            bytes.extend_from_slice(&part);
        }
        bytes
    })
}

/// A read of `len` bytes into memory that has other content.
pub async fn read(channel: &dyn block::Channel, offset: u64, len: u64) -> (Vec<u8>, IoResult) {
    let mut buffer = reactor::current().buffers().take(len as usize).await;
    buffer.as_mut_slice().fill(0xee);
    let (buffer, result) = buffer.transfer(channel, Op::Read, Flags::NONE, offset).await;
    (buffer.as_slice().to_vec(), result)
}

/// A write of `len` bytes with this value.
pub async fn write(channel: &dyn block::Channel, offset: u64, len: u64, value: u8) -> IoResult {
    let mut buffer = reactor::current().buffers().take(len as usize).await;
    buffer.as_mut_slice().fill(value);
    buffer.transfer(channel, Op::Write, Flags::NONE, offset).await.1
}

/// Compares a device with the bytes that QEMU reads: as a whole, and in random parts.
pub fn compare(device: &Arc<dyn Device>, expected: &[u8]) {
    let got = contents(device);
    assert_eq!(got.len(), expected.len(), "{}", device.name());
    if let Some(at) = got.iter().zip(expected).position(|(a, b)| a != b) {
        panic!("{}: byte {at} is {:#x}, QEMU has {:#x}", device.name(), got[at], expected[at]);
    }
    let (device, expected) = (device.clone(), expected.to_vec());
    reactor::run(async move {
        let channel = device.open_channel().unwrap();
        let mut random = base::Rng::new(1);
        let blocks = expected.len() as u64 / 512;
        for _ in 0..500 {
            let at = random.draw() % blocks;
            let len = (1 + random.draw() % 300).min(blocks - at) * 512;
            let (got, result) = read(&*channel, at * 512, len).await;
            assert_eq!(result, Ok(()));
            assert!(got == expected[(at * 512) as usize..][..len as usize], "{len} bytes at {}", at * 512);
        }
        let mut at = 0;
        for (len, status) in statuses(&*channel, expected.len() as u64).await {
            let bytes = &expected[at..at + len as usize];
            assert!(!status.contains(Status::ZERO) || bytes.iter().all(|byte| *byte == 0), "status at {at}");
            at += len as usize;
        }
        assert_eq!(at, expected.len());
    });
}

/// The block status of `size` bytes.
pub async fn statuses(channel: &dyn block::Channel, size: u64) -> Vec<(u64, Status)> {
    let (report, mut all, mut at) = (StatusReport::new(), Vec::new(), 0);
    while at < size {
        report.clear();
        channel.block_status(&report, at, size - at).await.unwrap();
        assert!(report.covered() > 0, "no status at {at}");
        at += report.covered();
        all.extend(report.extents().map(|extent| (extent.len, extent.status)));
    }
    all
}

/// Commands that put every kind of cluster on a disk of `size` bytes with clusters of `cluster`.
pub fn mixed_writes(seed: u64, size: u64, cluster: u64, is_v3: bool) -> Vec<String> {
    let mut random = base::Rng::new(seed);
    let blocks = size / 512;
    let mut commands = Vec::new();
    for round in 0..60u64 {
        let at = random.draw() % blocks * 512;
        let most = (3 * cluster).min(size - at).min(1 << 20) / 512;
        let len = (1 + random.draw() % most) * 512;
        let byte = 1 + random.draw() % 255;
        commands.push(match round % 6 {
            3 if is_v3 => format!("write -z {at} {len}"),
            4 => format!("discard {} {cluster}", at / cluster * cluster),
            5 if is_v3 => format!("write -z -u {at} {len}"),
            _ => format!("write -P {byte} {at} {len}"),
        });
    }
    commands
}
