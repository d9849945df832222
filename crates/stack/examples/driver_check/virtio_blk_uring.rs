//! Checks of the driver `virtio_blk_uring` on a disk.
//!
//! ```text
//! driver_check virtio-blk-uring facts  DEVICE          prints the properties of the disk
//! driver_check virtio-blk-uring suite  DEVICE [poll]   the conformance suite on the device
//! driver_check virtio-blk-uring direct DEVICE [poll]   queues and memory as the C API uses them
//! driver_check virtio-blk-uring fixed  DEVICE [poll]   registered memory
//! driver_check virtio-blk-uring grow   DEVICE BYTES    waits for this size, uses its end
//! ```

use super::direct;
use super::driver::{Disk, Driver, Shape, pattern};
use super::fixed;
use block::{Device, Flags};
use conformance::Suite;
use drivers::virtio_blk_uring::{Options, VirtioBlkUring, VirtioBlkUringFile, VirtioBlkUringQueue};
use std::error::Error;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Timeout after which a disk counts as one that does not grow.
const DEADLINE: Duration = Duration::from_secs(120);

const USAGE: &str =
    "usage: driver_check virtio-blk-uring facts|suite|direct|fixed DEVICE [poll], or grow DEVICE BYTES";

pub fn run(words: &[&str]) -> Result<(), Box<dyn Error>> {
    let (check, path, is_polled) = match *words {
        ["grow", path, bytes] => return grow(path, bytes.parse()?),
        [check, path] => (check, path, false),
        [check, path, "poll"] => (check, path, true),
        _ => return Err(USAGE.into()),
    };
    let file = VirtioBlkUringFile::open(Path::new(path), check == "facts", true)?;
    if is_polled && !file.facts().can_poll {
        return Err(format!("{path} has no poll queues").into());
    }
    match check {
        "facts" => println!("{:#?}", file.facts()),
        "suite" => {
            let options = Options { iopoll: is_polled, fixed_buffers: true, ..Options::new(path) };
            Suite::new(Arc::new(VirtioBlkUring::open(&options)?)).run();
        }
        "direct" => direct::run(&file, is_polled),
        "fixed" => fixed::run(&file, is_polled),
        other => return Err(format!("no check {other}").into()),
    }
    println!("{check} passed");
    Ok(())
}

/// Says when it has opened the disk, and returns when its new end holds data.
fn grow(path: &str, bytes: u64) -> Result<(), Box<dyn Error>> {
    let device = VirtioBlkUring::open(&Options::new(path))?;
    println!("opened {} bytes", device.limits().capacity);
    let start = Instant::now();
    while device.refresh()?.capacity != bytes {
        if start.elapsed() > DEADLINE {
            return Err(format!("{path} still has {} bytes", device.limits().capacity).into());
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let file = VirtioBlkUringFile::open(Path::new(path), false, false)?;
    let mut driver = Driver::new(&file, false);
    let content = pattern(bytes, 64 << 10, 1);
    let offset = bytes - content.len() as u64;
    assert_eq!(driver.write(offset, &content, Flags::FUA), Ok(()));
    assert!(*driver.read(offset, content.len()).expect("read") == *content);
    println!("grow passed");
    Ok(())
}

impl Disk for VirtioBlkUringFile {
    type Queue = VirtioBlkUringQueue;

    fn open_queue(&self, depth: u32, is_polled: bool) -> io::Result<VirtioBlkUringQueue> {
        self.open_queue(depth, is_polled)
    }

    fn shape(&self) -> Shape {
        let facts = self.facts();
        Shape {
            capacity: facts.capacity,
            block_size: facts.block_size() as usize,
            max_transfer: facts.max_transfer as usize,
            memory_alignment: facts.memory_alignment as usize,
            has_zones: false,
        }
    }
}
