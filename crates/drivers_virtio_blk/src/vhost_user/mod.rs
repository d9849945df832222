//! The transport to another process over a vhost-user socket: the client side.
//!
//! ```text
//!   VhostUser ─► Connection ─► Frontend ── Unix socket ──►  server  ◄── memory by descriptors, eventfds
//!      └─ Link, on the listening thread: the end of the connection, changes of the configuration
//!            └─ reconnect: the next connection, with the memory and virtqueues of the last one
//! ```
//!
//! # The return of a server
//!
//! With a reconnect delay ([`Options::reconnect_delay_s`]) the session outlives its server. The
//! listening thread reconnects, and no core waits for it. A server gets the virtqueues in one of
//! two ways:
//!
//! * **The same rings**, if the server tracks requests in flight in memory that the client keeps
//!   (`INFLIGHT_SHMFD`). The next server finds there the requests that its predecessor had taken
//!   and not completed, and executes them. The queue notices nothing.
//! * **Empty rings** in other memory, if there is no such memory, the next server refuses it, or a
//!   virtqueue was started, stopped or failed its requests during the outage. The queue starts all
//!   requests again that were not answered. No later server sees the former rings, so a server
//!   that was taken for dead completes nothing any more.
//!
//! Either way a request may be executed twice, and each is completed once. That is correct because
//! of what a caller may rely on:
//!
//! * Every request sets bytes of its own range (reads, those of its buffer), so a second execution
//!   has the effect of the first.
//! * A caller relies on a request only once it is answered, and only unanswered requests are
//!   executed again. The effect of a request that was answered is never repeated later.
//! * Requests that are unanswered at the same time have no order, as on any disk. A caller that
//!   needs an order submits the later write after the answer to the earlier one. That is after the
//!   last execution of the earlier one, so its repetition cannot destroy the later one. The queue
//!   nevertheless submits unanswered requests in their original order, before new ones.
//! * A write with FUA and the flush after it are repeated together on empty rings.
//!
//! Two duties remain with the server, as for any client that reconnects. Its former process
//! executes nothing after it has closed the connection, and completed writes survive its end even
//! without a flush (writes in the host's page cache do).
//!
//! A server that returns with another disk is refused: the module [`reconnect`].
//!
//! Source: QEMU, docs/interop/vhost-user.rst.

mod connection;
mod frontend;
mod link;
mod reconnect;
mod rings;

#[cfg(test)]
pub(crate) use frontend::{FLAG_NEED_REPLY, FLAG_REPLY, FLAG_VERSION, message, write_all};
pub use frontend::{Frontend, FrontendError, FrontendReq, Reply};

use super::failure::Failure;
use super::options::Options;
use super::peer::{Listener, Peer, lock};
use super::regions::Region;
use super::transport::{NewQueue, RunningQueue, Traits, Transport};
use connection::{Connection, Inflight};
use drivers::shared_memory::HUGE_PAGE;
use drivers::stream::Cancel;
use link::Link;
use rings::RingSetup;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use virtio::blk::ConfigSpace;
use virtio::ring::MAX_QUEUE_SIZE;

/// The connection to a vhost-user-blk server.
pub struct VhostUser {
    shared: Arc<Shared>,
    traits: Traits,
    offered: u64,
    _listener: Listener,
}

/// State shared with the listening thread.
struct Shared {
    peer: Arc<Peer>,
    options: Options,
    /// Held during every exchange with the server, and during an attempt to reconnect.
    control: Mutex<Control>,
    sockets: Mutex<Sockets>,
    /// Ends attempts to reconnect.
    stop: Cancel,
    is_ending: AtomicBool,
}

/// The sockets of exchanges that may wait for the server, for other threads to shut them down.
struct Sockets {
    current: UnixStream,
    /// The socket of an attempt to reconnect.
    attempt: Option<UnixStream>,
    /// Number of cores that wait for the end of an attempt; none begins before.
    waiting: usize,
}

/// The connection, and everything that every server of the session must get.
struct Control {
    connection: Connection,
    is_connected: bool,
    features: u64,
    /// The configuration space with which the features were negotiated.
    config: ConfigSpace,
    /// Number and size of the virtqueues; 0 before the start.
    queues: u16,
    ring_size: u16,
    regions: Vec<Region>,
    rings: Vec<RingSetup>,
    inflight: Option<Inflight>,
    /// Whether the next server must get empty rings.
    must_start_empty: bool,
}

impl VhostUser {
    /// Negotiates with the server.
    ///
    /// # Errors
    /// When the server violates the protocol, or lacks a required feature.
    pub fn new(peer: Arc<Peer>, frontend: Frontend, options: &Options) -> Result<VhostUser, Failure> {
        let (connection, backend) = Connection::open(frontend, options.inflight, options.timeout())?;
        let traits = Traits {
            max_queues: connection.max_queues.min(u16::MAX.into()) as u16,
            // No message of the protocol reports the server's limit.
            max_queue_size: MAX_QUEUE_SIZE,
            max_regions: connection.max_regions,
            region_alignment: 1,
            own_alignment: HUGE_PAGE,
            needs_region_fd: true,
            addresses: vec![0..=u64::MAX],
            starts_together: false,
            reconnects: options.reconnect_delay_s > 0,
        };
        let (offered, socket) = (connection.offered, connection.stream().try_clone()?);
        let current = connection.stream().try_clone()?;
        let shared = Arc::new(Shared {
            peer,
            options: options.clone(),
            control: Mutex::new(Control::new(connection)),
            sockets: Mutex::new(Sockets { current, attempt: None, waiting: 0 }),
            stop: Cancel::new()?,
            is_ending: AtomicBool::new(false),
        });
        let listener = Listener::start(Link::new(shared.clone(), socket, backend))?;
        Ok(VhostUser { shared, traits, offered, _listener: listener })
    }

    /// The virtio features that the server offers.
    pub fn offered(&self) -> u64 {
        self.offered
    }

    /// Performs an exchange with the server. `false`: there is none, and the next one gets the
    /// effect from `control`.
    fn tell(
        &self,
        control: &mut Control,
        exchange: impl FnOnce(&mut Connection, &[Region]) -> Result<(), FrontendError>,
    ) -> Result<bool, Failure> {
        Ok(self.shared.exchange(control, exchange)?.is_some())
    }
}

impl Shared {
    /// Whether the session reconnects.
    fn reconnects(&self) -> bool {
        self.options.reconnect_delay_s > 0 && !self.is_ending.load(Ordering::Acquire)
    }

    /// Ends an attempt to reconnect. Does not wait for it.
    fn interrupt(&self) {
        if let Some(attempt) = &lock(&self.sockets).attempt {
            shut_down(attempt);
        }
    }

    /// Takes [`Shared::control`] for a core, which a server that does not answer during an attempt
    /// must not delay.
    fn take_control(&self) -> MutexGuard<'_, Control> {
        lock(&self.sockets).waiting += 1;
        self.interrupt();
        let control = lock(&self.control);
        lock(&self.sockets).waiting -= 1;
        control
    }

    /// Performs an exchange with the server. `None`: there is no server, and a next one is awaited.
    fn exchange<R>(
        &self,
        control: &mut Control,
        exchange: impl FnOnce(&mut Connection, &[Region]) -> Result<R, FrontendError>,
    ) -> Result<Option<R>, Failure> {
        if !control.is_connected {
            return if self.reconnects() { Ok(None) } else { Err("the device is lost".into()) };
        }
        match exchange(&mut control.connection, &control.regions) {
            Ok(result) => Ok(Some(result)),
            Err(error) if self.reconnects() && !matches!(error, FrontendError::Refused { .. }) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// Ends attempts to reconnect, and those that would follow.
    fn give_up(&self) {
        self.is_ending.store(true, Ordering::Release);
        self.stop.cancel();
        self.interrupt();
    }

    /// Ends the session. Returns `false`: there is no connection.
    fn end(&self, why: &str) -> bool {
        self.peer.set_gone(why);
        self.is_ending.store(true, Ordering::Release);
        false
    }

    fn read_config(&self) -> Result<ConfigSpace, Failure> {
        let read = self.exchange(&mut lock(&self.control), |connection, _| connection.read_config())?;
        Ok(read.unwrap_or_else(|| self.peer.config()))
    }
}

impl Control {
    fn new(connection: Connection) -> Control {
        Control {
            connection,
            is_connected: true,
            features: 0,
            config: ConfigSpace::default(),
            queues: 0,
            ring_size: 0,
            regions: Vec::new(),
            rings: Vec::new(),
            inflight: None,
            must_start_empty: false,
        }
    }

    /// The connection while there is one.
    fn connected(&mut self) -> Result<&mut Connection, Failure> {
        match self.is_connected {
            true => Ok(&mut self.connection),
            false => Err("the server is not connected".into()),
        }
    }
}

impl Transport for VhostUser {
    fn traits(&self) -> &Traits {
        &self.traits
    }

    fn read_config(&self) -> Result<ConfigSpace, Failure> {
        self.shared.read_config()
    }

    fn set_features(&self, features: u64) -> Result<(), Failure> {
        let mut control = lock(&self.shared.control);
        control.connected()?.set_features(features)?;
        control.features = features;
        control.config = control.connection.read_config()?;
        Ok(())
    }

    fn prepare(&self, queues: u16, ring_size: u16) -> Result<(), Failure> {
        let mut control = lock(&self.shared.control);
        let connection = control.connected()?;
        if connection.has_inflight() {
            let inflight = connection.create_inflight(queues, ring_size)?;
            connection.set_inflight(&inflight)?;
            control.inflight = Some(inflight);
        }
        (control.queues, control.ring_size) = (queues, ring_size);
        Ok(())
    }

    fn map(&self, region: Region) -> Result<(), Failure> {
        let mut control = lock(&self.shared.control);
        control.regions.push(region);
        let told = self.tell(&mut control, |connection, regions| connection.add_region(region, regions));
        if told.is_err() {
            control.regions.pop();
        }
        told.map(drop)
    }

    fn unmap(&self, region: Region) -> Result<(), Failure> {
        let mut control = lock(&self.shared.control);
        control.regions.retain(|known| *known != region);
        if self.shared.peer.is_gone() {
            return Ok(());
        }
        self.tell(&mut control, |connection, rest| connection.remove_region(region, rest)).map(drop)
    }

    fn start_queue(&self, new: NewQueue<'_>) -> Result<RunningQueue, Failure> {
        let mut control = self.shared.take_control();
        let (setup, doorbell) = RingSetup::new(&new)?;
        let is_told = self.tell(&mut control, |connection, _| connection.start_ring(&setup))?;
        control.must_start_empty |= !is_told;
        control.rings.push(setup);
        Ok(RunningQueue { doorbell, has_event: true })
    }

    fn run(&self) -> Result<(), Failure> {
        Ok(())
    }

    fn stop_queue(&self, index: u16) -> Result<(), Failure> {
        let mut control = self.shared.take_control();
        control.rings.retain(|ring| ring.index != index);
        if self.shared.peer.is_gone() {
            return Ok(());
        }
        let is_told = self.tell(&mut control, |connection, _| connection.stop_ring(index))?;
        control.must_start_empty |= !is_told;
        Ok(())
    }

    fn shutdown(&self) {
        self.shared.give_up();
        // The listening thread notifies the queues.
        shut_down(&lock(&self.shared.sockets).current);
    }
}

impl Drop for VhostUser {
    fn drop(&mut self) {
        // The listening thread ends next.
        self.shared.give_up();
    }
}

/// Closes a socket in both directions, which wakes all waiting threads.
fn shut_down(socket: &UnixStream) {
    // Fails only if the server closed it before.
    let _ = socket.shutdown(std::net::Shutdown::Both);
}
