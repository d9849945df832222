//! The suite that every device passes, through the export: device ─ target ─ TCP ─ our own
//! initiator.

use crate::host::HOST;
use crate::server::{MIB, SUBSYSTEM, export};
use crate::tls::{key, with_key};
use block::Device;
use conformance::Suite;
use drivers::mem::{MemDevice, Options as MemOptions};
use drivers::null::{NullDevice, Options as NullOptions};
use drivers_nvme_tcp::{Nqn, NvmeTcpDevice, Options, parse_address};
use exports_nvme_tcp::Config;
use std::sync::Arc;

/// Runs the suite over an initiator on `device`.
fn exported<D: Device + 'static>(
    device: Arc<D>,
    digests: (bool, bool),
    cores: usize,
    change: impl FnOnce(Suite) -> Suite,
) {
    let (export, _cores) = export(&[device], cores, |config| config);
    let (header_digest, data_digest) = digests;
    let options = Options { header_digest, data_digest, ..options(export.address()) };
    let host = Arc::new(NvmeTcpDevice::open(&options).unwrap());
    change(Suite::new(host)).run();
    drop(export);
}

/// The options of our initiator for the subsystem at `address`.
fn options(address: &str) -> Options {
    Options::new(parse_address(address).unwrap(), Nqn::new(SUBSYSTEM).unwrap())
}

fn mem(change: impl FnOnce(&mut MemOptions)) -> Arc<MemDevice> {
    let mut options = MemOptions::new(32 * MIB);
    change(&mut options);
    Arc::new(MemDevice::new(&options).unwrap())
}

#[test]
fn a_ram_disk_passes_with_every_kind_of_digests() {
    for (digests, cores) in [((false, false), 1), ((true, false), 2), ((false, true), 2), ((true, true), 1)] {
        exported(mem(|_| ()), digests, cores, |suite| suite);
    }
}

#[test]
fn a_ram_disk_passes_through_tls() {
    for (digest, cores) in [(false, 2), (true, 1)] {
        let (export, _cores) =
            export(&[mem(|_| ())], cores, |config| Config { access: with_key(key(), true), ..config });
        let host_nqn = Some(Nqn::new(HOST).unwrap());
        let digests = Options { header_digest: digest, data_digest: digest, ..options(export.address()) };
        let options = Options { tls_key: Some(key()), host_nqn, ..digests };
        Suite::new(Arc::new(NvmeTcpDevice::open(&options).unwrap())).run();
        drop(export);
    }
}

#[test]
fn a_device_that_waits_passes() {
    let options = NullOptions { latency_ns: 30_000, ..NullOptions::new(32 * MIB) };
    let device = Arc::new(NullDevice::new(&options).unwrap());
    exported(device, (false, false), 1, Suite::without_data);
}

#[test]
fn a_read_only_device_passes() {
    exported(mem(|options| options.read_only = true), (false, false), 1, |suite| suite);
}

#[test]
fn large_blocks_pass() {
    exported(mem(|options| options.block_size = 4096), (true, true), 2, |suite| suite);
}
