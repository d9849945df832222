//! Test helpers: a device that can be slow, and a handwritten VMM with a guest, which can follow or
//! violate the protocol.

#![allow(dead_code, unused_imports, reason = "each test binary uses its part")]

mod buffers;
mod guest;
mod vmm;

pub use buffers::SharedBuffers;
pub use conformance::slow::{SlowDevice, pattern};
pub use guest::{Buffer, Data, GUEST_BASE, Guest, GuestConfig, Io, QueueMemory, pair};
pub use vmm::{Request, Vmm, eventfd, is_signalled, wait_signal};

use exports_virtio::vhost_user_blk::{Config, VhostUserBlk};
use reactor::{CoreConfig, Cores, PollWindow};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An export over a device, with everything it stands on.
pub struct Server {
    pub export: Option<VhostUserBlk>,
    pub cores: Cores,
    pub device: Arc<SlowDevice>,
    pub socket: PathBuf,
    _dir: tempfile::TempDir,
}

impl Server {
    pub fn start(cores: usize, device: SlowDevice, change: impl FnOnce(Config) -> Config) -> Server {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("blk.sock");
        // Short polling: tests share two processors with everything else.
        let config = CoreConfig { poll: PollWindow::up_to(20_000), ..CoreConfig::default() };
        let cores = Cores::start(&vec![config; cores]).unwrap();
        let device = Arc::new(device);
        let config = change(Config { serial: "freestone-test".into(), ..Config::new(&socket) });
        let export = VhostUserBlk::start(device.clone(), cores.all(), config).unwrap();
        Server { export: Some(export), cores, device, socket, _dir: dir }
    }

    pub fn export(&self) -> &VhostUserBlk {
        self.export.as_ref().unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        drop(self.export.take());
    }
}

/// Waits until `is_so`, ten seconds at most.
pub fn eventually(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < Duration::from_secs(60), "{what}: not within a minute");
        std::thread::sleep(Duration::from_millis(1));
    }
}
