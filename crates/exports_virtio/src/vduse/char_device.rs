//! The operations of a VDUSE server on `/dev/vduse/control` and `/dev/vduse/NAME`.

use super::uapi::{self, ConfigData, DevConfig, IotlbEntry, Message, VqConfig, VqEventfd, VqInfo};
use crate::virtio_blk::signal::Interrupt;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use virtio::memory::RegionSpec;

const CONTROL: &str = "/dev/vduse/control";
/// The virtio device id of block devices: virtio 1.3, 5.
const BLOCK_DEVICE: u32 = 2;
/// Alignment of virtqueues that Linux uses.
const VQ_ALIGN: u32 = 4096;
/// Time within which the node of a new device must appear.
const NODE_WITHIN: Duration = Duration::from_secs(2);

/// A request kind of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Ask {
    /// Report the position of a virtqueue.
    QueueState(u32),
    /// The driver has set the device's status.
    Status(u8),
    /// An address mapping has changed.
    Iotlb,
    /// A kind that this server does not know.
    Unknown(u32),
}

impl Ask {
    fn of(message: &Message) -> Ask {
        match message.words[0] {
            uapi::GET_VQ_STATE => Ask::QueueState(message.union[0]),
            uapi::SET_STATUS => Ask::Status(message.union[0] as u8),
            uapi::UPDATE_IOTLB => Ask::Iotlb,
            other => Ask::Unknown(other),
        }
    }
}

/// A request of the kernel, which waits for an answer.
#[derive(Debug)]
pub(super) struct KernelRequest {
    id: u32,
    pub(super) ask: Ask,
}

/// The control device.
pub(super) struct Control(File);

impl Control {
    /// Opens it.
    pub(super) fn open() -> io::Result<Control> {
        let file =
            OpenOptions::new().read(true).write(true).open(CONTROL).map_err(|error| match error.kind() {
                io::ErrorKind::NotFound => {
                    io::Error::new(error.kind(), format!("{CONTROL}: no such file (modprobe vduse)"))
                }
                _ => io::Error::new(error.kind(), format!("{CONTROL}: {error}")),
            })?;
        let version = uapi::API_VERSION;
        // SAFETY: the kernel reads the number.
        unsafe { ioctl(file.as_raw_fd(), uapi::SET_API_VERSION, &raw const version as usize) }?;
        Ok(Control(file))
    }

    /// Creates a block device.
    ///
    /// # Errors
    /// `AlreadyExists` when the name is in use; else the error of the kernel.
    pub(super) fn create(&self, name: &str, features: u64, num_queues: u16, space: &[u8]) -> io::Result<()> {
        let config = DevConfig {
            name: name_bytes(name),
            vendor_id: 0,
            device_id: BLOCK_DEVICE,
            features,
            vq_num: num_queues.into(),
            vq_align: VQ_ALIGN,
            reserved: [0; 13],
            config_size: space.len() as u32,
        };
        let mut bytes = Vec::new();
        // SAFETY: the structure has no gaps, so each of its bytes is initialised.
        bytes.extend_from_slice(unsafe {
            std::slice::from_raw_parts((&raw const config).cast::<u8>(), size_of::<DevConfig>())
        });
        bytes.extend_from_slice(space);
        // SAFETY: the kernel reads the structure and the `config_size` bytes behind it.
        unsafe { ioctl(self.0.as_raw_fd(), uapi::CREATE_DEV, bytes.as_ptr() as usize) }
    }

    /// Removes a device.
    ///
    /// # Errors
    /// `ResourceBusy` while it is on the vDPA bus.
    pub(super) fn destroy(&self, name: &str) -> io::Result<()> {
        let name = name_bytes(name);
        // SAFETY: the kernel reads `NAME_MAX` bytes.
        unsafe { ioctl(self.0.as_raw_fd(), uapi::DESTROY_DEV, name.as_ptr() as usize) }
    }
}

fn name_bytes(name: &str) -> [u8; uapi::NAME_MAX] {
    let mut bytes = [0; uapi::NAME_MAX];
    bytes[..name.len()].copy_from_slice(name.as_bytes());
    bytes
}

/// A device of this server. One process can have it open at a time.
#[derive(Debug)]
pub(super) struct CharDevice(File);

impl CharDevice {
    /// Opens the device and waits briefly for its node.
    ///
    /// # Errors
    /// `ResourceBusy` when another process serves it.
    pub(super) fn open(name: &str) -> io::Result<CharDevice> {
        let path = format!("/dev/vduse/{name}");
        let deadline = Instant::now() + NODE_WITHIN;
        loop {
            let opened = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(&path);
            match opened {
                Ok(file) => return Ok(CharDevice(file)),
                Err(error) if error.kind() == io::ErrorKind::NotFound && Instant::now() < deadline => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                    return Err(io::Error::new(error.kind(), format!("{path}: another process serves it")));
                }
                Err(error) => return Err(io::Error::new(error.kind(), format!("{path}: {error}"))),
            }
        }
    }

    /// Declares a virtqueue. Only allowed before the device is on the bus.
    pub(super) fn set_up_queue(&self, index: u16, max_size: u16) -> io::Result<()> {
        let config = VqConfig { index: index.into(), max_size, reserved: [0; 13] };
        self.ioctl(uapi::VQ_SETUP, &config)
    }

    /// The driver's settings of a virtqueue.
    pub(super) fn queue(&self, index: u16) -> io::Result<VqInfo> {
        let mut info = VqInfo { index: index.into(), ..VqInfo::default() };
        // SAFETY: the kernel reads and fills in the structure.
        unsafe { ioctl(self.fd(), uapi::VQ_GET_INFO, &raw mut info as usize) }?;
        Ok(info)
    }

    /// Sets the eventfd that signals new entries of a virtqueue.
    pub(super) fn set_kick(&self, index: u16, kick: &OwnedFd) -> io::Result<()> {
        self.ioctl(uapi::VQ_SETUP_KICKFD, &VqEventfd { index: index.into(), fd: kick.as_raw_fd() })
    }

    /// The negotiated features.
    pub(super) fn features(&self) -> io::Result<u64> {
        let mut features = 0u64;
        // SAFETY: the kernel fills in the number.
        unsafe { ioctl(self.fd(), uapi::DEV_GET_FEATURES, &raw mut features as usize) }?;
        Ok(features)
    }

    /// Changes the configuration space and notifies the driver.
    pub(super) fn set_config(&self, space: &[u8]) -> io::Result<()> {
        let head = ConfigData { offset: 0, length: space.len() as u32 };
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&head.offset.to_ne_bytes());
        bytes.extend_from_slice(&head.length.to_ne_bytes());
        bytes.extend_from_slice(space);
        // SAFETY: the kernel reads the structure and the `length` bytes behind it.
        unsafe { ioctl(self.fd(), uapi::DEV_SET_CONFIG, bytes.as_ptr() as usize) }?;
        // Refused while no driver runs: a driver reads the space when it starts.
        // SAFETY: nothing is passed.
        let _ = unsafe { ioctl(self.fd(), uapi::DEV_INJECT_CONFIG_IRQ, 0) };
        Ok(())
    }

    /// All memory that the driver has mapped for the device, by rising address.
    pub(super) fn regions(&self) -> io::Result<Vec<RegionSpec>> {
        let mut regions = Vec::new();
        let mut start = 0;
        loop {
            let mut entry = IotlbEntry { start, last: u64::MAX, ..IotlbEntry::default() };
            // SAFETY: the kernel reads and fills in the structure.
            let fd = unsafe { libc::ioctl(self.fd(), uapi::IOTLB_GET_FD as _, &raw mut entry) };
            if fd < 0 {
                let error = io::Error::last_os_error();
                let is_end = matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOENT));
                return if is_end { Ok(regions) } else { Err(error) };
            }
            // SAFETY: the descriptor is new and ours alone.
            let fd = unsafe { OwnedFd::from_raw_fd(fd) };
            let IotlbEntry { offset: fd_offset, start: first, last, .. } = entry;
            let len = (last - first).saturating_add(1);
            regions.push(RegionSpec { guest_addr: first, len, user_addr: first, fd, fd_offset });
            match last.checked_add(1) {
                Some(next) => start = next,
                None => return Ok(regions),
            }
        }
    }

    /// The next request of the kernel; `None` when there is none now.
    pub(super) fn next_request(&self) -> io::Result<Option<KernelRequest>> {
        let mut bytes = [0u8; Message::BYTES];
        match (&self.0).read(&mut bytes) {
            Ok(Message::BYTES) => {}
            Ok(len) => return Err(io::Error::other(format!("request of {len} bytes: invalid length"))),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        }
        let word = |at: usize| u32::from_ne_bytes(std::array::from_fn(|i| bytes[4 * at + i]));
        let message =
            Message { words: std::array::from_fn(word), union: std::array::from_fn(|at| word(6 + at)) };
        Ok(Some(KernelRequest { id: message.words[1], ask: Ask::of(&message) }))
    }

    /// Whether the kernel waits for the answer to an unread request.
    pub(super) fn is_asking(&self) -> bool {
        let mut fd = libc::pollfd { fd: self.fd(), events: libc::POLLIN, revents: 0 };
        // SAFETY: works on a live local variable.
        unsafe { libc::poll(&raw mut fd, 1, 0) == 1 && fd.revents & libc::POLLIN != 0 }
    }

    /// Answers a request. `state` is the answer to [`Ask::QueueState`].
    pub(super) fn answer(&self, request: KernelRequest, is_ok: bool, state: uapi::VqState) -> io::Result<()> {
        let mut words = [0u32; Message::BYTES / 4];
        words[0] = request.id;
        words[1] = if is_ok { uapi::RESULT_OK } else { uapi::RESULT_FAILED };
        if let Ask::QueueState(index) = request.ask {
            let pair = |low: u16, high: u16| {
                let [a, b] = low.to_ne_bytes();
                let [c, d] = high.to_ne_bytes();
                u32::from_ne_bytes([a, b, c, d])
            };
            words[6] = index;
            words[7] = pair(state[0], state[1]);
            words[8] = pair(state[2], state[3]);
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_ne_bytes()).collect();
        (&self.0).write_all(&bytes)
    }

    /// The descriptor that becomes readable with the next request.
    pub(super) fn fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    fn ioctl<T>(&self, code: u64, argument: &T) -> io::Result<()> {
        // SAFETY: the code says how much the kernel reads: the size of `T`.
        unsafe { ioctl(self.fd(), code, std::ptr::from_ref(argument) as usize) }
    }
}

/// Interrupts the driver for one virtqueue.
pub(super) struct InjectIrq {
    pub(super) device: Arc<CharDevice>,
    pub(super) queue: u16,
}

impl Interrupt for InjectIrq {
    fn raise(&mut self) {
        // Refused while the driver does not run: then it needs no interrupt.
        let _ = self.device.ioctl(uapi::VQ_INJECT_IRQ, &u32::from(self.queue));
    }
}

/// # Safety
/// `argument` is what the ioctl takes.
unsafe fn ioctl(fd: RawFd, code: u64, argument: usize) -> io::Result<()> {
    // SAFETY: the caller's matter.
    match unsafe { libc::ioctl(fd, code as _, argument) } {
        n if n < 0 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(kind: u32, union: u32) -> Message {
        let mut message = Message { words: [0; 6], union: [0; 32] };
        (message.words[0], message.union[0]) = (kind, union);
        message
    }

    #[test]
    fn requests_of_the_kernel_are_told_apart() {
        assert_eq!(Ask::of(&message(0, 3)), Ask::QueueState(3));
        assert_eq!(Ask::of(&message(1, 0xf)), Ask::Status(0xf));
        assert_eq!(Ask::of(&message(2, 7)), Ask::Iotlb);
        assert_eq!(Ask::of(&message(9, 0)), Ask::Unknown(9));
    }
}
