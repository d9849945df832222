//! The suite that every device passes, through the export: device ─ server ─ socket ─ our own
//! client.

use crate::server::{MIB, export};
use block::Device;
use conformance::Suite;
use drivers::mem::{MemDevice, Options as MemOptions};
use drivers::null::{NullDevice, Options as NullOptions};
use drivers_nbd::{Address, NbdDevice, Options, Replies, Tls};
use exports_nbd::{Address as Listen, Config, Security};
use std::sync::Arc;

/// Runs the suite over a client of `device`.
fn exported(device: Arc<dyn Device>, replies: Replies, cores: usize, change: impl FnOnce(Suite) -> Suite) {
    let (export, _cores, socket, _dir) = export(device, cores, |config| config);
    let options = Options { replies, ..Options::new(Address::Unix(socket)) };
    let client = Arc::new(NbdDevice::open(&options).unwrap());
    change(Suite::new(client)).run();
    drop(export);
}

fn mem(change: impl FnOnce(&mut MemOptions)) -> Arc<MemDevice> {
    let mut options = MemOptions::new(32 * MIB);
    change(&mut options);
    Arc::new(MemDevice::new(&options).unwrap())
}

#[test]
fn a_ram_disk_passes_in_every_form_of_replies() {
    for (replies, cores) in [(Replies::Simple, 1), (Replies::Structured, 2), (Replies::Extended, 2)] {
        exported(mem(|_| ()), replies, cores, |suite| suite);
    }
}

#[test]
fn a_device_that_waits_passes() {
    let options = NullOptions { latency_ns: 30_000, ..NullOptions::new(32 * MIB) };
    exported(Arc::new(NullDevice::new(&options).unwrap()), Replies::Extended, 1, Suite::without_data);
}

#[test]
fn a_read_only_device_passes() {
    exported(mem(|options| options.read_only = true), Replies::Structured, 1, |suite| suite);
}

#[test]
fn large_blocks_pass() {
    exported(mem(|options| options.block_size = 4096), Replies::Extended, 2, |suite| suite);
}

#[test]
fn a_ram_disk_passes_over_tcp() {
    let (export, _cores, _socket, _dir) =
        export(mem(|_| ()), 1, |config| Config { address: Listen::Tcp("127.0.0.1:0".into()), ..config });
    let uri = format!("nbd://{}/disk", export.address());
    let client = NbdDevice::open(&Options::from_uri(&uri).unwrap()).unwrap();
    Suite::new(Arc::new(client)).run();
}

/// The suite over a client that trusts `client`, of a server that is `server` and demands TLS.
fn secured(server: tls::Server, client: Tls, over_tcp: bool, cores: usize) {
    let security = Security { server, is_required: true };
    let (export, _cores, socket, _dir) = export(mem(|_| ()), cores, |config| Config {
        address: if over_tcp { Listen::Tcp("127.0.0.1:0".into()) } else { config.address },
        tls: Some(security),
        ..config
    });
    let mut options = Options::new(Address::Unix(socket));
    if over_tcp {
        options = Options::from_uri(&format!("nbd://{}/disk", export.address())).unwrap();
    }
    options.tls = Some(client);
    Suite::new(Arc::new(NbdDevice::open(&options).unwrap())).run();
}

#[test]
fn a_ram_disk_passes_through_tls_with_certificates() {
    let files = tempfile::tempdir().unwrap();
    tls::authority::write_all(files.path());
    for over_tcp in [false, true] {
        let server = tls::Server::with_certificates(files.path(), true).unwrap();
        let client = Tls::new(Some(files.path()), None, None, None).unwrap();
        secured(server, client, over_tcp, 2);
    }
}

#[test]
fn a_ram_disk_passes_through_tls_with_a_key() {
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), format!("alice:{}\n", "5e".repeat(32))).unwrap();
    let server = tls::Server::with_keys(file.path()).unwrap();
    secured(server, Tls::new(None, Some(file.path()), Some("alice"), None).unwrap(), false, 1);
}
