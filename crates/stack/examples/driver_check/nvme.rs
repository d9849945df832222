//! Checks of the NVMe drivers on a namespace. All but `tcp` need CAP_SYS_ADMIN.
//!
//! ```text
//! driver_check nvme facts  DEVICE                  prints the properties of the namespace
//! driver_check nvme suite  DEVICE [poll]           the conformance suite, over the engine's device
//! driver_check nvme direct DEVICE [poll]           queues and memory as the C API uses them
//! driver_check nvme zones  DEVICE [poll]           the requests of zoned namespaces
//! driver_check nvme tcp    ADDRESS NQN [digests]   the conformance suite over an NVMe/TCP target
//! ```

use super::driver::{Disk, Shape};
use super::{direct, zones};
use conformance::Suite;
use drivers::nvme_uring::{NvmeDevice, NvmeFile, NvmeQueue, Options};
use drivers_nvme_tcp::{Nqn, NvmeTcpDevice, parse_address};
use std::error::Error;
use std::io;
use std::path::Path;
use std::sync::Arc;

const USAGE: &str = "usage: driver_check nvme facts|suite|direct|zones DEVICE [poll], or tcp …";

pub fn run(words: &[&str]) -> Result<(), Box<dyn Error>> {
    if let ["tcp", address, nqn, ref digests @ ..] = *words {
        return run_tcp(address, nqn, digests == ["digests"]);
    }
    let (check, path, is_polled) = match *words {
        [check, path] => (check, path, false),
        [check, path, "poll"] => (check, path, true),
        _ => return Err(USAGE.into()),
    };
    if check == "suite" {
        let options = Options { iopoll: is_polled, ..Options::new(path) };
        Suite::new(Arc::new(NvmeDevice::open(&options)?)).run();
        println!("suite passed");
        return Ok(());
    }
    let file = NvmeFile::open(Path::new(path), false)?;
    if is_polled && !file.facts().can_poll {
        return Err(format!("{path} has no poll queues").into());
    }
    match check {
        "facts" => println!("{:#?}", file.facts()),
        "direct" => direct::run(&file, is_polled),
        "zones" => zones::run(&file, is_polled),
        other => return Err(format!("no check {other}").into()),
    }
    println!("{check} passed");
    Ok(())
}

impl Disk for NvmeFile {
    type Queue = NvmeQueue;

    fn open_queue(&self, depth: u32, is_polled: bool) -> io::Result<NvmeQueue> {
        self.open_queue(depth, is_polled)
    }

    fn shape(&self) -> Shape {
        let facts = self.facts();
        Shape {
            capacity: facts.capacity,
            block_size: facts.block_size() as usize,
            max_transfer: facts.max_transfer as usize,
            memory_alignment: 1, // the kernel copies data that is not aligned to a dword
            has_zones: facts.zones.is_some(),
        }
    }
}

fn run_tcp(address: &str, nqn: &str, has_digests: bool) -> Result<(), Box<dyn Error>> {
    let (header_digest, data_digest) = (has_digests, has_digests);
    let options = drivers_nvme_tcp::Options::new(parse_address(address)?, Nqn::new(nqn)?);
    let options = drivers_nvme_tcp::Options { header_digest, data_digest, ..options };
    Suite::new(Arc::new(NvmeTcpDevice::open(&options)?)).run();
    println!("suite passed");
    Ok(())
}
