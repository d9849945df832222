//! State of the data plane of a session: the server of its rings, and the kernel's instance.

use super::Config;
use super::kernel::{KernelPlane, Opener};
use crate::virtio_blk::queue::Serving;
use block::Device;
use exports::{DataPlane, Error, QueueStats};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The server of a running ring.
pub(super) enum Running {
    /// A core of this process.
    OnCore(Serving),
    /// The kernel: [`Plane`] has its instance.
    InKernel,
}

/// Features that the kernel's vhost does not have.
pub(super) const WITHHELD: u64 = virtio::VIRTIO_F_RING_PACKED | virtio::VIRTIO_F_IN_ORDER;

/// The present server of the rings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Server {
    Cores,
    /// The cores complete what a dead predecessor has left in flight; then the kernel serves.
    Recovering,
    Kernel,
}

/// The data plane of a session.
pub(super) struct Plane {
    pub(super) server: Server,
    pub(super) opener: Opener,
    /// Present while the kernel serves a client, or waits for the disk.
    pub(super) instance: Option<KernelPlane>,
    /// Whether rings wait for the disk.
    pub(super) is_waiting: bool,
    /// Whether the kernel may serve a client to come, so that clients must be able to do without
    /// [`WITHHELD`].
    pub(super) may_use_kernel: bool,
}

impl Plane {
    /// The data plane that `config` asks for. `is_connected`: the client is another process of
    /// ours, and maps no memory here.
    ///
    /// # Errors
    /// When the kernel must serve the rings and cannot; the message names the device and the
    /// reason.
    pub(super) fn choose(
        device: &Arc<dyn Device>,
        config: &Config,
        is_connected: bool,
        opener: Opener,
    ) -> Result<Plane, Error> {
        let is_possible = match config.data_plane {
            DataPlane::User => false,
            _ if is_connected => false,
            DataPlane::Kernel => {
                check(device, &opener, config.num_queues).map_err(required)?;
                true
            }
            DataPlane::Auto => match check(device, &opener, config.num_queues) {
                Ok(()) => true,
                Err(reason) => {
                    let export = config.socket.display();
                    tracing::info!(%export, %reason, "data-plane=auto: this process serves the rings");
                    false
                }
            },
        };
        let server = if is_possible { Server::Kernel } else { Server::Cores };
        Ok(Plane { server, opener, instance: None, is_waiting: false, may_use_kernel: is_possible })
    }

    /// Whether the kernel serves the rings that start now.
    pub(super) fn is_in_kernel(&self) -> bool {
        self.server == Server::Kernel
    }

    /// Features that clients are not offered.
    pub(super) fn withheld_features(&self) -> u64 {
        if self.may_use_kernel { WITHHELD } else { 0 }
    }

    /// Lets the kernel forget a client whose rings have been taken back.
    pub(super) fn end_client(&mut self) {
        self.instance = None;
        self.is_waiting = false;
        if self.may_use_kernel {
            self.server = Server::Kernel;
        }
    }

    pub(super) fn set_call(&self, index: usize, call: Option<&Arc<OwnedFd>>) -> Result<(), Error> {
        self.instance.as_ref().map_or(Ok(()), |instance| instance.set_call(index, call))
    }

    /// Stops a ring that the kernel serves. Returns its position.
    pub(super) fn stop(&mut self, index: usize, stats: &QueueStats) -> Result<u32, Error> {
        let instance = self.instance.as_mut().expect("the kernel serves the ring");
        let base = instance.stop(index);
        instance.count(index, stats);
        base
    }
}

/// Checks that the kernel can serve a device.
pub(super) fn check(device: &Arc<dyn Device>, opener: &Opener, num_queues: u16) -> Result<(), Error> {
    KernelPlane::open(opener, device.kernel_backing()?, num_queues).map(drop)
}

pub(super) fn required(reason: Error) -> Error {
    Error::Config(format!("data-plane=kernel: {reason}"))
}
