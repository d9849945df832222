//! An export over devices, with everything it stands on.

use crate::host::Host;
use block::{Device, Limits};
use conformance::slow::SlowDevice;
use exports::Export;
use exports_nvme_tcp::{Access, Address, Config, Hosts, NamespaceConfig, Nqn, NvmeTcp};
use reactor::{CoreConfig, Cores, PollWindow};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const MIB: u64 = 1 << 20;
pub const SUBSYSTEM: &str = "nqn.2014-08.org.example:disk";

pub struct Server {
    pub export: Option<NvmeTcp>,
    pub device: Arc<SlowDevice>,
    _cores: Cores,
}

impl Server {
    /// Over a device with a volatile cache.
    pub fn start(len: u64) -> Server {
        Server::with(len, |config| config)
    }

    pub fn with(len: u64, change: impl FnOnce(Config) -> Config) -> Server {
        let limits = Limits { volatile_cache: true, ..Limits::new(len) };
        let device = Arc::new(SlowDevice::with_limits(limits));
        let (export, _cores) = export(std::slice::from_ref(&device), 2, change);
        Server { export: Some(export), device, _cores }
    }

    pub fn export(&self) -> &NvmeTcp {
        self.export.as_ref().expect("not stopped")
    }

    pub fn address(&self) -> &str {
        self.export().address()
    }

    /// A host with an admin queue.
    pub fn host(&self) -> Host {
        Host::admin(self.address(), SUBSYSTEM)
    }

    /// A host with an admin queue that is enabled, and an I/O queue.
    pub fn connect(&self) -> (Host, Host) {
        let mut admin = self.host();
        admin.enable();
        let io = admin.io_queue(1, 128);
        (admin, io)
    }

    /// Waits until `count` connections exist.
    pub fn wait_for_clients(&self, count: u64) {
        wait_until(|| self.export().stats().clients() == count);
    }
}

/// Exports devices from so many cores.
pub fn export<D: Device + 'static>(
    devices: &[Arc<D>],
    cores: usize,
    change: impl FnOnce(Config) -> Config,
) -> (NvmeTcp, Cores) {
    // Short polling: tests share two processors with everything else.
    let core = CoreConfig { poll: PollWindow::up_to(20_000), ..CoreConfig::default() };
    let cores = Cores::start(&vec![core; cores]).unwrap();
    let address = Address::Tcp("127.0.0.1:0".into());
    let config = change(Config::new(address, Nqn::new(SUBSYSTEM).unwrap()));
    let namespaces: Vec<NamespaceConfig> =
        devices.iter().map(|device| NamespaceConfig { device: device.clone(), uuid: None }).collect();
    let export = NvmeTcp::start(&namespaces, cores.all(), config).unwrap();
    (export, cores)
}

/// Access of these hosts only.
pub fn only(hosts: &[&str]) -> Access {
    let hosts = hosts.iter().map(|name| Nqn::new(name).unwrap()).collect();
    Access { hosts: Hosts::Listed(hosts), ..Access::default() }
}

pub fn wait_until(is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60), "it never came to it");
        std::thread::sleep(Duration::from_millis(1));
    }
}
