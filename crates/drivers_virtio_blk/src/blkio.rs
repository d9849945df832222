//! Drivers `virtio-blk-*`: virtio-blk devices over vhost-user, vhost-vdpa and VFIO.

use super::{Frontend, Options, Session, TransportKind};
use block::DeviceError;
use drivers::blkio::{
    Capacity, Codes, Driver, DriverKind, Error, Properties, Region, Result, Source, Spec, Value,
    check_reconnect_delay, memory_region, source,
};
use drivers::direct::DirectQueue;
use drivers::shared_memory::HUGE_PAGE;
use std::net::Shutdown;
use std::os::fd::{FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// The driver of the library over vhost-user.
pub static VHOST_USER: DriverKind = DriverKind {
    name: "virtio-blk-vhost-user",
    create: || Ok(Box::new(VirtioBlk::new(TransportKind::VhostUser))),
};

/// The driver of the library over vhost-vdpa.
pub static VHOST_VDPA: DriverKind = DriverKind {
    name: "virtio-blk-vhost-vdpa",
    create: || Ok(Box::new(VirtioBlk::new(TransportKind::VhostVdpa))),
};

/// The driver of the library over VFIO.
pub static VFIO_PCI: DriverKind = DriverKind {
    name: "virtio-blk-vfio-pci",
    create: || Ok(Box::new(VirtioBlk::new(TransportKind::VfioPci))),
};

/// Largest virtqueue of the specification.
const MAX_QUEUE_SIZE: i32 = 32768;

struct VirtioBlk {
    transport: TransportKind,
    session: Option<Arc<Session>>,
    /// The device's descriptor, where the caller gave it: it is ours once the instance is
    /// connected.
    _fd: Option<OwnedFd>,
    handshake: Arc<Handshake>,
}

/// A vhost-user handshake, for whoever cancels it: the server may leave it waiting.
#[derive(Default)]
struct Handshake(Mutex<Progress>);

#[derive(Default)]
enum Progress {
    #[default]
    None,
    Talking(UnixStream),
    Cancelled,
}

impl Handshake {
    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Connects to the server and agrees with it.
    fn open(&self, path: &str, options: &Options) -> Result<Arc<Session>> {
        let os = |e| Error::os(&format!("cannot connect to {path}"), &e);
        let stream = UnixStream::connect(path).map_err(os)?;
        match &mut *self.progress() {
            Progress::Cancelled => return Err(os(std::io::Error::from_raw_os_error(libc::ECANCELED))),
            progress => *progress = Progress::Talking(stream.try_clone().map_err(os)?),
        }
        let frontend = Frontend::new(stream, Duration::from_millis(options.timeout_ms)).map_err(os)?;
        Session::negotiate(&format!("virtio_blk:{path}"), frontend, options).map_err(|e| failed(&e))
    }

    fn cancel(&self) {
        if let Progress::Talking(stream) = std::mem::replace(&mut *self.progress(), Progress::Cancelled) {
            // Fails only when the server has hung up, which ends the handshake as well.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

impl VirtioBlk {
    fn new(transport: TransportKind) -> VirtioBlk {
        VirtioBlk { transport, session: None, _fd: None, handshake: Arc::default() }
    }

    fn name(&self) -> &'static str {
        match self.transport {
            TransportKind::VhostUser => "virtio-blk-vhost-user",
            TransportKind::VhostVdpa => "virtio-blk-vhost-vdpa",
            TransportKind::VfioPci => "virtio-blk-vfio-pci",
        }
    }

    fn session(&self) -> &Arc<Session> {
        self.session.as_ref().expect("the instance is connected")
    }
}

impl Driver for VirtioBlk {
    fn specs(&self) -> Vec<Spec> {
        let mut specs = vec![
            Spec::setting("fd", -1),
            Spec::setting("path", ""),
            Spec::fact("max-queue-size", MAX_QUEUE_SIZE),
            Spec::tuning("queue-size", 256),
        ];
        if self.transport == TransportKind::VhostUser {
            // As in libblkio, requests fail at once unless the program asks for more.
            specs.push(Spec::setting("reconnect-delay", 0));
        }
        specs
    }

    fn can_add_queues(&self) -> bool {
        false
    }

    fn codes(&self) -> Codes {
        Codes::Virtio
    }

    fn check(&self, name: &str, value: &Value) -> Result<()> {
        match (name, value) {
            ("fd", _) if self.transport != TransportKind::VhostVdpa => {
                let message = format!("{} does not support the property fd", self.name());
                Err(Error::new(libc::ENOENT, message))
            }
            ("queue-size", Value::Int(size))
                if !(1..=MAX_QUEUE_SIZE).contains(size) || !(*size as u32).is_power_of_two() =>
            {
                let message =
                    format!("property queue-size: {size} is not a power of two from 1 to {MAX_QUEUE_SIZE}");
                Err(Error::new(libc::EINVAL, message))
            }
            ("reconnect-delay", Value::Int(seconds)) => check_reconnect_delay(*seconds),
            _ => Ok(()),
        }
    }

    fn connect(&mut self, p: &mut Properties) -> Result<()> {
        let source = source(p)?;
        let mut options = match &source {
            Source::Path(path) => Options::with(self.transport, path),
            Source::Fd(fd) => Options { fd: Some(*fd), ..Options::with(self.transport, "") },
        };
        if self.transport == TransportKind::VhostUser {
            options.reconnect_delay_s = p.int("reconnect-delay") as u32;
        }
        let session = match &source {
            Source::Path(path) if self.transport == TransportKind::VhostUser => {
                let session = self.handshake.open(path, &options);
                *self.handshake.progress() = Progress::None;
                session?
            }
            _ => Session::connect(&options).map_err(|e| failed(&e))?,
        };
        // SAFETY: the caller gives the descriptor away with the success of this call.
        self._fd = options.fd.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) });
        state_facts(p, &session);
        self.session = Some(session);
        Ok(())
    }

    fn start(&mut self, p: &Properties) -> Result<()> {
        let session = self.session();
        if session.limits().read_only && !p.bool("read-only") {
            let message = format!("{} is read-only, but the property read-only is false", session.name());
            return Err(Error::new(libc::EROFS, message));
        }
        let (size, max_size) = (p.int("queue-size"), p.int("max-queue-size"));
        if size > max_size {
            let message = format!("property queue-size: {size} is more than max-queue-size ({max_size})");
            return Err(Error::new(libc::EINVAL, message));
        }
        let queues = p.int("num-queues") + p.int("num-poll-queues");
        session.start(queues as u16, p.int("queue-size") as u16).map_err(|e| failed(&e))
    }

    fn open_queue(&mut self, _: &Properties, is_poll: bool) -> Result<Box<dyn DirectQueue>> {
        let session = self.session();
        let queue = if is_poll { session.start_poll_queue() } else { session.start_queue() };
        Ok(Box::new(queue.map_err(|e| failed(&e))?))
    }

    fn capacity(&self) -> Capacity {
        let session = self.session().clone();
        Arc::new(move || session.refresh().map_err(|e| failed(&e)))
    }

    fn own_alignment(&self) -> usize {
        match self.transport {
            TransportKind::VhostUser => HUGE_PAGE,
            // The kernel pins the memory, so it has no more than the program needs.
            TransportKind::VhostVdpa | TransportKind::VfioPci => 1,
        }
    }

    fn map_region(&mut self, region: &Region) -> Result<()> {
        self.session().add_region(&memory_region(region)).map_err(|e| failed(&e))
    }

    fn unmap_region(&mut self, region: &Region) {
        self.session().remove_region(&memory_region(region));
    }

    fn canceller(&self) -> Option<Arc<dyn Fn() + Send + Sync>> {
        let handshake = self.handshake.clone();
        Some(Arc::new(move || handshake.cancel()))
    }
}

fn failed(error: &DeviceError) -> Error {
    Error::device(error, libc::EIO)
}

fn state_facts(p: &mut Properties, session: &Session) {
    let (facts, limits) = (session.facts(), session.limits());
    // A limit that is absent, or too large for a property, is unspecified.
    let int = |value: u32| i32::try_from(value).unwrap_or(0);
    p.put("max-queues", i32::from(facts.max_queues));
    let max_queue_size = i32::from(facts.max_queue_size);
    p.put("max-queue-size", max_queue_size);
    p.put("queue-size", p.int("queue-size").min(max_queue_size));
    p.put("supports-poll-queues", true);
    p.put("max-mem-regions", facts.max_regions);
    p.put("may-pin-mem-regions", facts.may_pin_regions);
    p.put("mem-region-alignment", facts.region_alignment);
    p.put("needs-mem-regions", true);
    p.put("needs-mem-region-fd", facts.needs_region_fd);
    p.put("request-alignment", int(limits.block_size));
    p.put("optimal-io-alignment", int(limits.physical_block_size.max(limits.block_size)));
    p.put("optimal-io-size", int(limits.optimal_io_size));
    p.put("flush-needed", limits.volatile_cache);
    p.put("max-segments", int(facts.max_segments).max(1));
    // No "max-segment-len": the queue splits what is longer than the server takes. Programs that
    // look at max-transfer only (QEMU) would exceed it.
    p.put("max-write-zeroes-len", limits.max_write_zeroes);
    p.put("max-discard-len", limits.max_discard);
    p.put("discard-alignment", int(limits.discard_alignment));
}
