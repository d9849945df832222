//! The transport to a device of the kernel's vDPA bus: hardware, a simulator, or a process behind
//! VDUSE.
//!
//! ```text
//!   VhostVdpa ── ioctls ──► /dev/vhost-vdpa-N ─► vDPA bus ─► device      kick and call are eventfds
//!       └─ write(): IOTLB messages, "address 0x200000 is this memory of mine"
//! ```
//!
//! Virtqueues are set up before the device runs: a VDUSE server reads them once, when it receives
//! `DRIVER_OK`. The bus does not report that a server has died. So the listening thread asks the
//! device for the state of a virtqueue that holds requests and makes no progress. A VDUSE server
//! must answer, or the kernel gives up on it (`/sys/class/vduse/NAME/msg_timeout`). The time that a
//! server may take for a request is not limited.
//!
//! Source: Linux, include/uapi/linux/vhost.h and vhost_types.h.

use super::doorbell::Doorbell;
use super::failure::Failure;
use super::options::Options;
use super::peer::{Listener, Peer, Watch, lock};
use super::regions::Region;
use super::transport::{NewQueue, RunningQueue, Traits, Transport};
use drivers::shared_memory::{SharedMemory, page_size};
use std::fs::{File, OpenOptions};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;
use vhost::vdpa::VhostVdpa as _;
use vhost::vhost_kern::VhostKernFeatures;
use vhost::vhost_kern::vdpa::VhostKernVdpa;
use vhost::vhost_kern::vhost_binding::VHOST_BACKEND_F_IOTLB_MSG_V2;
use vhost::{VhostBackend, VringConfigData};
use virtio::VIRTIO_F_RING_PACKED;
use virtio::blk::ConfigSpace;
use virtio::status;
use vm_memory::GuestMemoryMmap;
use vmm_sys_util::eventfd::EventFd;

/// Virtio device ID of block devices.
const BLOCK_DEVICE: u32 = 2;
/// Length of the configuration space if the kernel does not report it: up to the fields of write
/// zeroes.
const CONFIG_BYTES: u32 = 60;

/// The kernel's side. It needs a guest's memory only for the kernel's own addresses, which are not
/// used here.
type Kernel = VhostKernVdpa<Arc<GuestMemoryMmap>>;

/// A vhost-vdpa character device.
pub struct VhostVdpa {
    peer: Arc<Peer>,
    shared: Arc<Shared>,
    offered: u64,
    traits: Traits,
    _listener: Listener,
}

/// State shared with the listening thread.
struct Shared {
    kernel: Kernel,
    /// Held for writing while the device is being stopped, so that no later command starts it
    /// again.
    is_stopped: RwLock<bool>,
    queues: Mutex<Vec<Movement>>,
}

impl VhostVdpa {
    /// Opens the device and announces a driver.
    ///
    /// # Errors
    /// When the device is not a block device, it is in use, or the kernel is too old.
    pub fn open(peer: Arc<Peer>, options: &Options) -> Result<VhostVdpa, Failure> {
        let mut kernel = Kernel::with(open_file(options)?, Arc::new(GuestMemoryMmap::new()), 0);
        let id = kernel.get_device_id().map_err(system_error)?;
        if id != BLOCK_DEVICE {
            return Err(format!("virtio device {id} is not a block device ({BLOCK_DEVICE})").into());
        }
        kernel.set_owner().map_err(system_error)?;
        let v2 = 1 << VHOST_BACKEND_F_IOTLB_MSG_V2;
        if kernel.get_backend_features().map_err(system_error)? & v2 == 0 {
            return Err("the kernel does not support IOTLB messages of version 2".into());
        }
        kernel.set_backend_features(v2).map_err(system_error)?;
        kernel.set_status(0).map_err(system_error)?;
        kernel.set_status(status::ACKNOWLEDGE).map_err(system_error)?;
        kernel.set_status(status::ACKNOWLEDGE | status::DRIVER).map_err(system_error)?;
        // The kernel passes on 16 of the 32 bits of a packed ring's base.
        let offered = kernel.get_features().map_err(system_error)? & !VIRTIO_F_RING_PACKED;
        let addresses = kernel.get_iova_range().map_or(0..=u64::MAX, |range| range.first..=range.last);
        let traits = Traits {
            // Linux 5.18 and later report it; before, the configuration space does.
            max_queues: kernel.get_vqs_count().map_or(u16::MAX, |count| count.min(u16::MAX.into()) as u16),
            max_queue_size: kernel.get_vring_num().map_err(system_error)?,
            max_regions: u64::MAX,
            region_alignment: page_size(),
            needs_region_fd: true,
            addresses: vec![addresses],
            own_alignment: 1,
            starts_together: true,
            reconnects: false,
        };
        let config_call = EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)?;
        kernel.set_config_call(&config_call).map_err(system_error)?;
        let shared =
            Arc::new(Shared { kernel, is_stopped: RwLock::new(false), queues: Mutex::new(Vec::new()) });
        let news =
            Events { peer: peer.clone(), shared: shared.clone(), config_call, period: options.timeout() / 2 };
        let listener = Listener::start(news)?;
        Ok(VhostVdpa { peer, shared, offered, traits, _listener: listener })
    }

    /// The virtio features that the device offers.
    pub fn offered(&self) -> u64 {
        self.offered
    }
}

impl Transport for VhostVdpa {
    fn traits(&self) -> &Traits {
        &self.traits
    }

    fn read_config(&self) -> Result<ConfigSpace, Failure> {
        self.shared.read_config()
    }

    fn set_features(&self, features: u64) -> Result<(), Failure> {
        self.shared.with_kernel(|kernel| {
            kernel.set_features(features).map_err(system_error)?;
            let wanted = status::ACKNOWLEDGE | status::DRIVER | status::FEATURES_OK;
            kernel.set_status(wanted).map_err(system_error)?;
            if kernel.get_status().map_err(system_error)? & status::FEATURES_OK == 0 {
                return Err(format!("the device refused the features {features:#x}").into());
            }
            Ok(())
        })
    }

    fn prepare(&self, _queues: u16, _ring_size: u16) -> Result<(), Failure> {
        Ok(())
    }

    fn map(&self, region: Region) -> Result<(), Failure> {
        let at = std::ptr::with_exposed_provenance(region.memory.addr);
        self.shared.with_kernel(|kernel| {
            kernel.dma_map(region.guest_addr, region.memory.len as u64, at, false).map_err(system_error)
        })
    }

    fn unmap(&self, region: Region) -> Result<(), Failure> {
        self.shared.kernel.dma_unmap(region.guest_addr, region.memory.len as u64).map_err(system_error)
    }

    fn start_queue(&self, new: NewQueue<'_>) -> Result<RunningQueue, Failure> {
        let kick = EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)?;
        let size = new.queue.config().ring.size;
        let [descriptors, driver, device] = new.areas().map(|area| area.guest_addr);
        let addresses = VringConfigData {
            queue_max_size: self.traits.max_queue_size,
            queue_size: size,
            flags: 0,
            desc_table_addr: descriptors,
            used_ring_addr: device,
            avail_ring_addr: driver,
            log_addr: None,
        };
        let index = usize::from(new.index);
        self.shared.with_kernel(|kernel| {
            kernel.set_vring_num(index, size).map_err(system_error)?;
            kernel.set_vring_base(index, 0).map_err(system_error)?;
            // The trait's method of the same name looks for the rings in a guest's memory.
            VhostKernVdpa::set_vring_addr(kernel, index, &addresses).map_err(system_error)?;
            kernel.set_vring_call(index, new.call).map_err(system_error)?;
            kernel.set_vring_kick(index, &kick).map_err(system_error)?;
            kernel.set_vring_enable(index, true).map_err(system_error)?;
            Ok(())
        })?;
        let [_, driver, device] = new.offsets();
        lock(&self.shared.queues).push(Movement::new(new.index, new.rings.clone(), driver, device));
        Ok(RunningQueue { doorbell: Doorbell::Event(kick), has_event: true })
    }

    fn run(&self) -> Result<(), Failure> {
        self.shared.with_kernel(|kernel| {
            let wanted = kernel.get_status().map_err(system_error)? | status::DRIVER_OK;
            kernel.set_status(wanted).map_err(system_error)?;
            let got = kernel.get_status().map_err(system_error)?;
            if got & status::DRIVER_OK == 0 || got & (status::NEEDS_RESET | status::FAILED) != 0 {
                return Err(format!("the device's status is {got:#x}").into());
            }
            Ok(())
        })
    }

    fn stop_queue(&self, index: u16) -> Result<(), Failure> {
        Err(format!("virtqueue {index} of a vDPA device cannot be stopped individually").into())
    }

    fn shutdown(&self) {
        self.shared.end(&self.peer, "shut down");
    }
}

impl Drop for VhostVdpa {
    fn drop(&mut self) {
        // The rings and regions are dropped next.
        self.shared.stop();
    }
}

impl Shared {
    /// Runs a command on the device, unless it has been stopped.
    fn with_kernel<T>(&self, tell: impl FnOnce(&Kernel) -> Result<T, Failure>) -> Result<T, Failure> {
        let is_stopped = self.is_stopped.read().unwrap_or_else(PoisonError::into_inner);
        if *is_stopped {
            return Err("the device is lost".into());
        }
        tell(&self.kernel)
    }

    fn read_config(&self) -> Result<ConfigSpace, Failure> {
        let len = self.kernel.get_config_size().unwrap_or(CONFIG_BYTES).min(ConfigSpace::BYTES as u32);
        let mut bytes = vec![0; len as usize];
        self.kernel.get_config(0, &mut bytes).map_err(system_error)?;
        Ok(ConfigSpace::from_bytes(&bytes))
    }

    /// Resets the device, which releases all memory.
    fn stop(&self) {
        let mut is_stopped = self.is_stopped.write().unwrap_or_else(PoisonError::into_inner);
        if !std::mem::replace(&mut *is_stopped, true) && self.kernel.set_status(0).is_err() {
            tracing::debug!("vDPA device not reset: closing it resets it");
        }
    }

    fn end(&self, peer: &Peer, why: &str) {
        self.stop();
        peer.set_gone(why);
    }
}

/// State of the listening thread.
struct Events {
    peer: Arc<Peer>,
    shared: Arc<Shared>,
    config_call: EventFd,
    /// Period of the checks for progress.
    period: Duration,
}

impl Watch for Events {
    fn wanted(&self) -> Vec<(RawFd, i16)> {
        vec![(self.config_call.as_raw_fd(), libc::POLLIN)]
    }

    fn period(&self) -> Option<Duration> {
        Some(self.period)
    }

    fn handle(&mut self, came: &[bool]) -> bool {
        if came[0] {
            let _ = self.config_call.read();
            let broken = status::NEEDS_RESET | status::FAILED;
            if self.shared.kernel.get_status().is_ok_and(|status| status & broken != 0) {
                self.shared.end(&self.peer, "it needs a reset");
                return false;
            }
            self.peer.config_changed(self.shared.read_config());
            return true;
        }
        let stalled: Vec<u16> = lock(&self.shared.queues).iter_mut().filter_map(Movement::stalled).collect();
        for index in stalled {
            if let Err(error) =
                self.shared.with_kernel(|kernel| kernel.get_vring_base(index.into()).map_err(system_error))
            {
                tracing::debug!(device = %self.peer.name(), queue = index, %error, "vDPA device did not answer");
                self.shared.end(&self.peer, "no answer");
                return false;
            }
        }
        true
    }
}

/// Detects progress of a split ring from its indexes.
struct Movement {
    index: u16,
    rings: Arc<SharedMemory>,
    /// Offsets of the available and used indexes in the rings' memory.
    at: [usize; 2],
    last: [u16; 2],
}

impl Movement {
    fn new(index: u16, rings: Arc<SharedMemory>, driver: usize, device: usize) -> Movement {
        Movement { index, rings, at: [driver + 2, device + 2], last: [0; 2] }
    }

    /// Returns the virtqueue's index if it holds requests and has not moved since the last call.
    fn stalled(&mut self) -> Option<u16> {
        let now = self.at.map(|at| {
            let mut bytes = [0; 2];
            self.rings.read(at, &mut bytes);
            u16::from_le_bytes(bytes)
        });
        let last = std::mem::replace(&mut self.last, now);
        (now == last && now[0] != now[1]).then_some(self.index)
    }
}

/// Extracts the operating system's error from one of the vhost crate.
fn system_error(error: vhost::Error) -> Failure {
    match error {
        vhost::Error::VhostOpen(e) | vhost::Error::IoctlError(e) | vhost::Error::IOError(e) => e.into(),
        other => other.into(),
    }
}

fn open_file(options: &Options) -> std::io::Result<File> {
    match options.fd {
        None => OpenOptions::new().read(true).write(true).custom_flags(libc::O_CLOEXEC).open(&options.path),
        // SAFETY: borrowed for this call; a number that is no descriptor gives EBADF.
        Some(fd) if fd >= 0 => Ok(unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()?.into()),
        Some(_) => Err(std::io::Error::from_raw_os_error(libc::EBADF)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_ring_that_has_work_and_does_not_move_is_stalled() {
        let rings = Arc::new(SharedMemory::new(4096).unwrap());
        let mut movement = Movement::new(3, rings.clone(), 0, 128);
        let mut look = |avail: u16, used: u16| {
            rings.write(2, &avail.to_le_bytes());
            rings.write(130, &used.to_le_bytes());
            movement.stalled()
        };
        assert_eq!(look(0, 0), None, "idle");
        assert_eq!(look(1, 0), None, "new work");
        assert_eq!(look(1, 0), Some(3));
        assert_eq!(look(5, 0), None, "more work: the next look tells");
        assert_eq!(look(5, 0), Some(3));
        assert_eq!(look(5, 2), None, "slow");
        assert_eq!(look(5, 5), None);
        assert_eq!(look(5, 5), None, "idle again");
    }

    #[test]
    fn opening_a_path_that_is_not_a_vdpa_device_fails_with_a_reason() {
        for options in [
            Options::new("/dev/vhost-vdpa-of-nobody"),
            Options::new("/dev/null"),
            Options { fd: Some(-1), ..Options::new("") },
            Options { fd: Some(i32::MAX), ..Options::new("") },
        ] {
            assert!(VhostVdpa::open(Peer::new("test".into()), &options).is_err(), "{options:?}");
        }
    }
}
