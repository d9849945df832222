//! The transport to a PCI function of this machine through VFIO.
//!
//! ```text
//!   VfioPci ─► Common (registers) ─► Bar, mapped ──►  function ──► IOMMU ──► rings and buffers
//!      │                      doorbells ──┘              └── MSI-X ──► eventfds
//!      └─ Events, on the listening thread: configuration changes, errors, release requests
//! ```
//!
//! The function can access exactly the memory that was mapped for it, at addresses that the driver
//! chooses. The driver resets it at the start and at the end and enables access to memory (bus
//! master) only in between. Virtqueues are set up before the device runs: without another feature
//! none can be stopped individually.
//!
//! Source: VIRTIO 1.3, 4.1 (PCI), 3.1 (initialization).

mod bar;
mod capability;
mod common;
mod doorbell;
mod vfio;

pub use doorbell::DoorbellRegister;

use super::doorbell::Doorbell;
use super::failure::Failure;
use super::options::Options;
use super::peer::{Listener, Peer, Watch, lock};
use super::regions::Region;
use super::transport::{NewQueue, RunningQueue, Traits, Transport};
use bar::{Bar, Window};
use capability::{Place, Places};
use common::{COMMON_BYTES, Common, NO_VECTOR};
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Arc, Mutex};
use std::time::Duration;
use vfio::Vfio;
use vfio_bindings::bindings::vfio::{
    VFIO_PCI_ERR_IRQ_INDEX, VFIO_PCI_MSIX_IRQ_INDEX, VFIO_PCI_REQ_IRQ_INDEX,
};
use virtio::blk::ConfigSpace;
use virtio::status;
use vmm_sys_util::eventfd::EventFd;

/// Bits of the command register: memory decoding, bus mastering, no INTx.
const COMMAND_MEMORY: u16 = 1 << 1;
const COMMAND_MASTER: u16 = 1 << 2;
const COMMAND_NO_INTX: u16 = 1 << 10;
/// Bytes of the configuration space of every block device: the capacity.
const MIN_CONFIG: u64 = 8;

/// A virtio-blk PCI function.
pub struct VfioPci {
    peer: Arc<Peer>,
    shared: Arc<Shared>,
    offered: u64,
    traits: Traits,
    notify: Window,
    notify_step: u32,
    /// Events of virtqueues that are set up, and the number of interrupts available to them.
    calls: Mutex<Vec<EventFd>>,
    vectors: u16,
    config_event: EventFd,
    _listener: Listener,
}

/// State shared with the listening thread.
struct Shared {
    vfio: Arc<Vfio>,
    common: Mutex<Common>,
    device: Window,
    timeout: Duration,
}

impl VfioPci {
    /// Opens the function, resets it and announces a driver.
    ///
    /// # Errors
    /// When the function cannot be opened ([`Vfio::open`]), or does not conform to the
    /// specification of a virtio block device.
    pub fn open(peer: Arc<Peer>, options: &Options) -> Result<VfioPci, Failure> {
        if options.fd.is_some() {
            return Err("a PCI function must be opened by its path, not by a descriptor".into());
        }
        let vfio = Arc::new(Vfio::open(&options.path)?);
        let iommu = vfio.iommu()?;
        vfio.change_command(COMMAND_MEMORY | COMMAND_NO_INTX, COMMAND_MASTER)?;
        let places = capability::find(&vfio.config_space()?)?;
        let [common, notify, device] = windows(&vfio, &places)?;
        let common = Common(common);
        if !common.reset(options.timeout()) {
            return Err("the function did not reset in time".into());
        }
        common.add_status(status::ACKNOWLEDGE)?;
        common.add_status(status::DRIVER)?;
        let offered = common.offered()?;
        let traits = Traits {
            max_queues: common.num_queues()?,
            max_queue_size: largest_power(common.max_queue_size(0)?),
            max_regions: iommu.max_mappings,
            region_alignment: iommu.page,
            needs_region_fd: false,
            addresses: iommu.addresses,
            own_alignment: 1,
            starts_together: true,
            reconnects: false,
        };
        if traits.max_queues == 0 || traits.max_queue_size == 0 {
            return Err("the function has no virtqueue".into());
        }
        let vectors = vfio.interrupts(VFIO_PCI_MSIX_IRQ_INDEX).min(NO_VECTOR.into()) as u16;
        let common = Mutex::new(common);
        let shared = Arc::new(Shared { vfio, common, device, timeout: options.timeout() });
        let config_event = EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)?;
        let events = Events::new(peer.clone(), shared.clone(), config_event.try_clone()?)?;
        Ok(VfioPci {
            peer,
            shared,
            offered,
            traits,
            notify,
            notify_step: places.notify_step,
            calls: Mutex::new(Vec::new()),
            vectors,
            config_event,
            _listener: Listener::start(events)?,
        })
    }

    /// The virtio features that the device offers.
    pub fn offered(&self) -> u64 {
        self.offered
    }

    /// The interrupt of virtqueue `index`. The first interrupt is for configuration changes.
    fn vector(&self, index: u16) -> u16 {
        index.checked_add(1).filter(|vector| *vector < self.vectors).unwrap_or(NO_VECTOR)
    }

    fn connect_interrupts(&self, calls: &[EventFd]) -> Result<(), Failure> {
        if self.vectors == 0 {
            return Ok(());
        }
        let mut events = vec![self.config_event.as_raw_fd()];
        events.extend(calls.iter().map(AsRawFd::as_raw_fd).take(usize::from(self.vectors) - 1));
        Ok(self.shared.vfio.set_interrupts(VFIO_PCI_MSIX_IRQ_INDEX, &events)?)
    }
}

impl Transport for VfioPci {
    fn traits(&self) -> &Traits {
        &self.traits
    }

    fn read_config(&self) -> Result<ConfigSpace, Failure> {
        self.shared.read_config()
    }

    fn set_features(&self, features: u64) -> Result<(), Failure> {
        let common = lock(&self.shared.common);
        common.set_features(features)?;
        if common.add_status(status::FEATURES_OK)? & status::FEATURES_OK == 0 {
            return Err(format!("the device refused the features {features:#x}").into());
        }
        Ok(())
    }

    fn prepare(&self, _queues: u16, _ring_size: u16) -> Result<(), Failure> {
        Ok(self.shared.vfio.change_command(COMMAND_MASTER, 0)?)
    }

    fn map(&self, region: Region) -> Result<(), Failure> {
        Ok(self.shared.vfio.map(region)?)
    }

    fn unmap(&self, region: Region) -> Result<(), Failure> {
        Ok(self.shared.vfio.unmap(region)?)
    }

    fn start_queue(&self, new: NewQueue<'_>) -> Result<RunningQueue, Failure> {
        let (index, size) = (new.index, new.queue.config().ring.size);
        let common = lock(&self.shared.common);
        let max_size = common.max_queue_size(index)?;
        if size > max_size {
            return Err(format!("virtqueue {index}: {size} entries: at most {max_size}").into());
        }
        let areas = new.areas().map(|area| area.guest_addr);
        let number = common.set_queue(index, size, areas)?;
        let doorbell = DoorbellRegister::new(&self.notify, number, self.notify_step, index)?;
        lock(&self.calls).push(new.call.try_clone()?);
        let has_event = self.vector(index) != NO_VECTOR;
        Ok(RunningQueue { doorbell: Doorbell::Register(doorbell), has_event })
    }

    fn run(&self) -> Result<(), Failure> {
        let calls = lock(&self.calls);
        self.connect_interrupts(&calls)?;
        let common = lock(&self.shared.common);
        let config_vector = if self.vectors > 0 { 0 } else { NO_VECTOR };
        if !common.set_config_vector(config_vector)? {
            return Err("the device has no interrupt for its configuration".into());
        }
        for index in 0..calls.len() as u16 {
            if !common.enable_queue(index, self.vector(index))? {
                return Err(format!("the device has no interrupt for virtqueue {index}").into());
            }
        }
        let got = common.add_status(status::DRIVER_OK)?;
        if got & status::DRIVER_OK == 0 || got & (status::NEEDS_RESET | status::FAILED) != 0 {
            return Err(format!("the device's status is {got:#x}").into());
        }
        Ok(())
    }

    fn stop_queue(&self, index: u16) -> Result<(), Failure> {
        Err(format!("virtqueue {index} of a PCI function cannot be stopped individually").into())
    }

    fn shutdown(&self) {
        self.shared.end(&self.peer, "shut down");
    }
}

impl Drop for VfioPci {
    fn drop(&mut self) {
        // The rings and regions are dropped next.
        self.shared.stop();
    }
}

impl Shared {
    fn read_config(&self) -> Result<ConfigSpace, Failure> {
        Ok(lock(&self.common).read_config(&self.device)?)
    }

    /// Stops the function. It accesses no memory after this returns.
    fn stop(&self) {
        let common = lock(&self.common);
        let is_reset = common.reset(self.timeout);
        let is_cut_off = self.vfio.change_command(0, COMMAND_MASTER).is_ok();
        if !is_reset {
            tracing::warn!(is_cut_off, "PCI function did not reset in time");
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
    config_event: EventFd,
    /// A request to release the function; an error that the bus reports.
    ends: [EventFd; 2],
}

impl Events {
    fn new(peer: Arc<Peer>, shared: Arc<Shared>, config_event: EventFd) -> Result<Events, Failure> {
        let new_event = || EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK);
        let ends = [new_event()?, new_event()?];
        for (index, event) in [VFIO_PCI_REQ_IRQ_INDEX, VFIO_PCI_ERR_IRQ_INDEX].into_iter().zip(&ends) {
            if shared.vfio.interrupts(index) > 0 {
                shared.vfio.set_interrupts(index, &[event.as_raw_fd()])?;
            }
        }
        Ok(Events { peer, shared, config_event, ends })
    }
}

impl Watch for Events {
    fn wanted(&self) -> Vec<(RawFd, i16)> {
        let [wanted_back, error] = &self.ends;
        [&self.config_event, wanted_back, error].map(|event| (event.as_raw_fd(), libc::POLLIN)).into()
    }

    fn period(&self) -> Option<Duration> {
        None
    }

    fn handle(&mut self, came: &[bool]) -> bool {
        let why = match *came {
            [_, true, _] => "it is wanted back",
            [_, _, true] => "the bus has reported an error",
            [true, ..] => {
                let _ = self.config_event.read();
                if !lock(&self.shared.common).is_broken() {
                    self.peer.config_changed(self.shared.read_config());
                    return true;
                }
                "it needs a reset"
            }
            _ => return true,
        };
        self.shared.end(&self.peer, why);
        false
    }
}

/// The windows of a function's registers, each in its BAR: common, doorbells, configuration space.
fn windows(vfio: &Arc<Vfio>, places: &Places) -> Result<[Window; 3], Failure> {
    let mut bars: Vec<(u8, Arc<Bar>)> = Vec::new();
    let mut window = |place: Place, needed| -> Result<Window, Failure> {
        let known = bars.iter().find(|(index, _)| *index == place.bar);
        let bar = match known {
            Some((_, bar)) => bar.clone(),
            None => {
                let bar = Arc::new(Bar::open(vfio, place.bar)?);
                bars.push((place.bar, bar.clone()));
                bar
            }
        };
        Ok(Window::new(&bar, place, needed)?)
    };
    Ok([window(places.common, COMMON_BYTES)?, window(places.notify, 2)?, window(places.device, MIN_CONFIG)?])
}

/// The largest power of two up to `size`; 0 for 0.
fn largest_power(size: u16) -> u16 {
    if size == 0 { 0 } else { 1 << size.ilog2() }
}
