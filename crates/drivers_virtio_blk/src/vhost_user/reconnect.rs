//! An attempt to reconnect: the next server gets all that the last one had.
//!
//! ```text
//!   connect ─► negotiate ─► the same disk? ─► in-flight memory ─► regions ─► rings ─► enable ─► report
//!                               └► no: the session ends
//! ```
//!
//! No ring runs before the server has accepted all of them. A server is refused for good if it
//! lacks features, virtqueues or regions that are in use, or if its disk has shrunk or has stricter
//! limits. A disk that has grown is taken over as after a change of the configuration.

use super::super::doorbell::Doorbell;
use super::super::failure::Failure;
use super::super::limits;
use super::super::peer::lock;
use super::connection::{Connection, Inflight};
use super::rings::{EmptyRing, RingSetup};
use super::{Control, Frontend, Shared};
use drivers::stream::reconnect::Failed;
use drivers::stream::{Address, Deadline, Stream, StreamError};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use virtio::blk::{ConfigSpace, VIRTIO_BLK_F_MQ};

/// A new connection, as the listening thread watches it.
pub struct Returned {
    pub socket: UnixStream,
    pub backend: Option<UnixStream>,
}

/// A server that has agreed to everything, before it is in use.
struct Agreed {
    connection: Connection,
    backend: Option<UnixStream>,
    config: ConfigSpace,
    given: Given,
}

/// The virtqueues that a server got.
struct Given {
    /// A doorbell for each virtqueue in use.
    doorbells: Vec<Doorbell>,
    /// `None`: the server continues the present rings.
    renewal: Option<Renewal>,
}

/// Replacements of the last server's rings.
struct Renewal {
    rings: Vec<RingSetup>,
    empty: Vec<EmptyRing>,
    inflight: Option<Inflight>,
}

impl Shared {
    /// Reports to all queues that requests fail until the server returns.
    pub fn be_late(&self) {
        // First, because the next server must not execute requests that their callers gave up.
        lock(&self.control).must_start_empty = true;
        self.peer.set_late();
    }

    /// Attempts to connect, for at most `most_ms` milliseconds.
    ///
    /// # Errors
    /// Final, if the server cannot replace the last one.
    pub fn attempt(&self, most_ms: u64) -> Result<Returned, Failed> {
        let timeout_ms = self.options.timeout_ms.min(most_ms);
        let ends_at = Instant::now() + Duration::from_millis(timeout_ms);
        let socket = self.connect(timeout_ms)?;
        let mut control = lock(&self.control);
        self.begin_attempt(&socket)?;
        let agreed = match self.is_ending.load(Ordering::Acquire) {
            true => Err(Failed::Cancelled),
            false => self.agree(&mut control, socket, ends_at),
        };
        let mut sockets = lock(&self.sockets);
        sockets.attempt = None;
        let agreed = agreed?;
        let clone = || agreed.connection.stream().try_clone().map_err(passing);
        let (current, socket) = (clone()?, clone()?);
        sockets.current = current;
        drop(sockets);
        let config = agreed.config;
        let backend = control.take_over(agreed);
        drop(control);
        let is_resized = config != self.peer.config();
        self.peer.set_back();
        if is_resized {
            self.peer.config_changed::<Failure>(Ok(config));
        }
        Ok(Returned { socket, backend })
    }

    /// Lets other threads interrupt the attempt over `socket`.
    fn begin_attempt(&self, socket: &UnixStream) -> Result<(), Failed> {
        let attempt = socket.try_clone().map_err(passing)?;
        let mut sockets = lock(&self.sockets);
        if sockets.waiting > 0 {
            return Err(passing("a core waits for the end of the attempt"));
        }
        sockets.attempt = Some(attempt);
        Ok(())
    }

    fn connect(&self, timeout_ms: u64) -> Result<UnixStream, Failed> {
        let deadline = Deadline::new(timeout_ms, &self.stop);
        let connected = Stream::connect(&Address::Unix(self.options.path.clone()), &deadline);
        let socket = connected.map_err(|error| match error {
            StreamError::Cancelled => Failed::Cancelled,
            other => Failed::Passing(other.to_string()),
        })?;
        let socket = UnixStream::from(OwnedFd::from(socket.into_socket()));
        socket.set_nonblocking(false).map_err(passing)?;
        Ok(socket)
    }

    /// Negotiates, and gives the server memory and virtqueues.
    fn agree(&self, control: &mut Control, socket: UnixStream, ends_at: Instant) -> Result<Agreed, Failed> {
        let options = &self.options;
        let mut frontend = Frontend::new(socket, options.timeout()).map_err(passing)?;
        frontend.set_end(Some(ends_at));
        let opened = Connection::open(frontend, options.inflight, options.timeout());
        let (mut connection, backend) = opened.map_err(passing)?;
        control.check(&connection).map_err(Failed::Final)?;
        connection.set_features(control.features).map_err(passing)?;
        let config = connection.read_config().map_err(passing)?;
        let ConfigSpace { capacity, writeback, .. } = self.peer.config();
        let before = ConfigSpace { capacity, writeback, ..control.config };
        control.check_disk(&before, &config).map_err(Failed::Final)?;
        let given = control.set_up(&mut connection).map_err(passing)?;
        connection.set_end(None);
        Ok(Agreed { connection, backend, config, given })
    }
}

impl Control {
    /// Whether the server has all that is in use.
    fn check(&self, connection: &Connection) -> Result<(), String> {
        let Connection { offered, max_queues, max_regions, .. } = *connection;
        let missing = self.features & !offered;
        if missing != 0 {
            return Err(format!(
                "the server lacks features {missing:#x}: it offers {offered:#x}, and {:#x} are in use",
                self.features
            ));
        }
        if max_queues < u64::from(self.queues) {
            return Err(format!("the server has {max_queues} queues, and {} are in use", self.queues));
        }
        if max_regions < self.regions.len() as u64 {
            let count = self.regions.len();
            return Err(format!("the server allows {max_regions} memory regions, and {count} are in use"));
        }
        Ok(())
    }

    /// Whether the server's disk can replace the one of the configuration space `before`.
    fn check_disk(&self, before: &ConfigSpace, now: &ConfigSpace) -> Result<(), String> {
        if self.features & VIRTIO_BLK_F_MQ != 0 && now.num_queues < self.queues {
            let (has, used) = (now.num_queues, self.queues);
            return Err(format!("the disk has {has} queues, and {used} are in use"));
        }
        limits::check_successor(self.features, before, now)
    }

    /// Gives the server in-flight memory, regions and virtqueues, and has it serve all of them.
    fn set_up(&mut self, connection: &mut Connection) -> Result<Given, Failure> {
        let inflight = self.inflight.as_ref().filter(|_| connection.has_inflight() && !self.must_start_empty);
        // A server that fails from here on may have changed rings and in-flight memory, or refuse
        // them for ever.
        self.must_start_empty = true;
        let Some(inflight) = inflight else { return self.set_up_empty(connection) };
        connection.set_inflight(inflight)?;
        connection.set_regions(&self.regions)?;
        let doorbells = self.rings.iter().map(RingSetup::doorbell).collect::<Result<_, _>>()?;
        for ring in &self.rings {
            connection.set_ring(ring, ring.next_base())?;
        }
        self.rings.iter().try_for_each(|ring| connection.enable_ring(ring.index))?;
        Ok(Given { doorbells, renewal: None })
    }

    /// As [`Control::set_up`], with empty rings.
    fn set_up_empty(&mut self, connection: &mut Connection) -> Result<Given, Failure> {
        let mut inflight = None;
        if connection.has_inflight() && self.queues > 0 {
            let memory = connection.create_inflight(self.queues, self.ring_size)?;
            connection.set_inflight(&memory)?;
            inflight = Some(memory);
        }
        connection.set_regions(&self.regions)?;
        let (mut rings, mut empty, mut doorbells) = (Vec::new(), Vec::new(), Vec::new());
        for present in &mut self.rings {
            let queue = present.prepare_empty()?;
            let ring = present.with_empty(&queue)?;
            connection.set_ring(&ring, ring.first_base())?;
            doorbells.push(ring.doorbell()?);
            rings.push(ring);
            empty.push(queue);
        }
        rings.iter().try_for_each(|ring| connection.enable_ring(ring.index))?;
        Ok(Given { doorbells, renewal: Some(Renewal { rings, empty, inflight }) })
    }

    /// Uses the server from now on. Returns the channel of its own messages.
    fn take_over(&mut self, agreed: Agreed) -> Option<UnixStream> {
        let Agreed { connection, backend, given: Given { mut doorbells, renewal }, .. } = agreed;
        self.connection = connection;
        (self.is_connected, self.must_start_empty) = (true, false);
        // A server may wait for the first kick.
        doorbells.iter_mut().for_each(Doorbell::ring);
        let Some(Renewal { rings, empty, inflight }) = renewal else {
            self.rings.iter().for_each(|ring| ring.report_return(None));
            return backend;
        };
        (self.rings, self.inflight) = (rings, inflight);
        for ((ring, empty), doorbell) in self.rings.iter().zip(empty).zip(doorbells) {
            ring.report_return(Some(empty.into_renewed(doorbell)));
        }
        backend
    }
}

/// The failure of an attempt, with its source.
fn passing(error: impl Into<Failure>) -> Failed {
    let error = error.into();
    let source = error.source().map_or(String::new(), |source| format!(": {source}"));
    Failed::Passing(format!("{error}{source}"))
}
