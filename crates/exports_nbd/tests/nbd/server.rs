//! An export over a device, with everything it stands on.

use crate::client::{Client, Form};
use block::{Device, Limits};
use conformance::slow::SlowDevice;
use exports::Export;
use exports_nbd::{Address, Config, Nbd};
use reactor::{CoreConfig, Cores, PollWindow};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const MIB: u64 = 1 << 20;

pub struct Server {
    pub export: Option<Nbd>,
    _cores: Cores,
    pub device: Arc<SlowDevice>,
    pub socket: PathBuf,
    _dir: tempfile::TempDir,
}

impl Server {
    /// Over a device with a volatile cache.
    pub fn start(len: u64) -> Server {
        let limits = Limits { volatile_cache: true, ..Limits::new(len) };
        Server::over(SlowDevice::with_limits(limits), |config| config)
    }

    pub fn over(device: SlowDevice, change: impl FnOnce(Config) -> Config) -> Server {
        let device = Arc::new(device);
        let (export, _cores, socket, _dir) = export(device.clone(), 2, change);
        Server { export: Some(export), _cores, device, socket, _dir }
    }

    pub fn connect(&self, form: Form) -> Client {
        Client::connect(&self.socket, form)
    }

    pub fn export(&self) -> &Nbd {
        self.export.as_ref().expect("not stopped")
    }

    pub fn failed(&self) -> u64 {
        self.export().stats().queues.iter().map(|queue| queue.failed()).sum()
    }

    /// Waits until `count` clients are connected.
    pub fn wait_for_clients(&self, count: u64) {
        wait_until(|| self.export().stats().clients() == count);
    }
}

/// Exports `device` on a fresh socket, from so many cores.
pub fn export(
    device: Arc<dyn Device>,
    cores: usize,
    change: impl FnOnce(Config) -> Config,
) -> (Nbd, Cores, PathBuf, tempfile::TempDir) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("nbd.sock");
    // Short polling: tests share two processors with everything else.
    let core = CoreConfig { poll: PollWindow::up_to(20_000), ..CoreConfig::default() };
    let cores = Cores::start(&vec![core; cores]).unwrap();
    let address = Address::Unix { path: socket.clone(), permissions: 0o600 };
    let config = change(Config { name: "disk".into(), description: "a test".into(), ..Config::new(address) });
    let export = Nbd::start(device, cores.all(), config).unwrap();
    (export, cores, socket, dir)
}

pub fn wait_until(is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60), "it never came to it");
        std::thread::sleep(Duration::from_millis(1));
    }
}
