//! Checks the NVMe drivers on a real namespace, all of whose data is lost; `tests/lab` runs it in a guest. All but
//! `tcp` need CAP_SYS_ADMIN.
//!
//! ```text
//! nvme_check facts  DEVICE            prints what is known about the namespace
//! nvme_check suite  DEVICE [poll]     the conformance suite, over the device as the engine opens it
//! nvme_check direct DEVICE [poll]     what the C API does with queues and memory
//! nvme_check zones  DEVICE [poll]     everything that only zoned namespaces have
//! nvme_check tcp    ADDRESS NQN [digests]   the conformance suite over an NVMe/TCP target
//! ```

mod direct;
mod driver;
mod zones;

use conformance::Suite;
use drivers::nvme_tcp::{self, Nqn, NvmeTcpDevice, parse_address};
use drivers::nvme_uring::{NvmeDevice, NvmeFile, Options};
use std::error::Error;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nvme_check: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    if let ["tcp", address, nqn, ref digests @ ..] = words[..] {
        return run_tcp(address, nqn, digests == ["digests"]);
    }
    let (check, path, is_polled) = match words[..] {
        [check, path] => (check, path, false),
        [check, path, "poll"] => (check, path, true),
        _ => return Err("usage: nvme_check facts|suite|direct|zones DEVICE [poll]".into()),
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

fn run_tcp(address: &str, nqn: &str, has_digests: bool) -> Result<(), Box<dyn Error>> {
    let (header_digest, data_digest) = (has_digests, has_digests);
    let options = nvme_tcp::Options::new(parse_address(address)?, Nqn::new(nqn)?);
    let options = nvme_tcp::Options { header_digest, data_digest, ..options };
    Suite::new(Arc::new(NvmeTcpDevice::open(&options)?)).run();
    println!("suite passed");
    Ok(())
}
