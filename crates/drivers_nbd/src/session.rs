//! An open export: its limits, and its connections, one per queue.

use super::error::OpenError;
use super::handshake::negotiate;
use super::options::{MAX_CONNECTIONS, Options, Tls};
use ::stream::Wire;
use block::{Limits, SharedLimits};
use drivers::stream::{Cancel, Deadline, Stream, Timed};
use nbd::client::{Agreed, Facts};
use nbd::request::{Header, MAX_HEADER};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Maximum physical block size: a larger preferred size (a cluster, a stripe) is a hint, not a
/// sector.
const MAX_PHYSICAL_BLOCK: u32 = 4096;
/// Longest range of a discard or of zeroes. Its parts are sent one after the other.
const MAX_RANGE: u64 = 1 << 40;
/// Longest read or write. Longer than any payload, so its parts are sent one after the other, too.
const MAX_TRANSFER: u32 = 1 << 30;

/// An open export. Queues create and release connections; the first one exists from the start.
#[derive(Debug)]
pub struct Session {
    name: String,
    options: Options,
    /// The properties at the first connection. The size may have grown since.
    facts: Facts,
    limits: Arc<SharedLimits>,
    connections: Mutex<Connections>,
    /// The certificates or keys of further connections.
    tls: Mutex<Option<Tls>>,
}

/// A connection after its handshake.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) wire: Wire,
    /// The identifier of `base:allocation`; `None` if the server does not have it.
    pub(super) context: Option<u32>,
}

#[derive(Debug)]
struct Connections {
    /// The first connection, until a queue takes it.
    spare: Option<Connection>,
    in_use: u32,
}

impl Session {
    /// Connects to the server and opens the export. Blocks for at most the options' timeout.
    ///
    /// # Errors
    /// When there is no server, the export does not exist, or `cancel` was called.
    pub fn open(options: &Options, cancel: &Cancel) -> Result<Arc<Session>, OpenError> {
        options.check().map_err(OpenError::Options)?;
        Session::new(options, connect(options, cancel)?)
    }

    /// As [`Session::open`], over a connected socket. Connections for more queues use the address
    /// in the options.
    pub fn over(socket: OwnedFd, options: &Options, cancel: &Cancel) -> Result<Arc<Session>, OpenError> {
        options.check().map_err(OpenError::Options)?;
        let deadline = Deadline::new(options.timeout_ms, cancel);
        let mut stream = Timed::new(Stream::over(socket.into())?, &deadline);
        let Agreed { facts, context } = negotiate(&mut stream, options)?;
        Session::new(options, (Connection { wire: stream.into_inner().into_wire(), context }, facts))
    }

    fn new(options: &Options, (connection, facts): (Connection, Facts)) -> Result<Arc<Session>, OpenError> {
        if options.connections > 1 && !facts.can_multi_conn() {
            return Err(OpenError::Export(format!(
                "connections={}: the server does not allow more than one (no CAN_MULTI_CONN)",
                options.connections
            )));
        }
        let limits = SharedLimits::new(limits(&facts, options)?);
        let name = options.name();
        tracing::info!(device = %name, size = facts.size, replies = ?facts.replies, flags = facts.flags, "connected");
        let connections = Mutex::new(Connections { spare: Some(connection), in_use: 0 });
        let (options, tls) = (options.clone(), Mutex::new(options.tls.clone()));
        Ok(Arc::new(Session { name, options, facts, limits, connections, tls }))
    }

    /// A name for people: the export as a URI.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The properties of the export, as the server reported them at the first connection.
    pub fn facts(&self) -> &Facts {
        &self.facts
    }

    /// The limits of the device, with the size that the server reported last.
    pub fn limits(&self) -> Limits {
        self.limits.get()
    }

    /// The limits as all queues see them.
    pub fn shared_limits(&self) -> &Arc<SharedLimits> {
        &self.limits
    }

    /// Asks the server for the size, over a further connection: the protocol has no message for
    /// it. A server that allows one connection only is not asked.
    ///
    /// # Errors
    /// As [`Session::open`]; when the export has changed otherwise than by growing.
    pub fn refresh(&self, cancel: &Cancel) -> Result<(), OpenError> {
        if !self.facts.can_multi_conn() {
            return Ok(());
        }
        let deadline = Deadline::new(self.options.timeout_ms, cancel);
        let mut stream = Timed::new(Stream::connect(&self.options.address, &deadline)?, &deadline);
        let Agreed { facts, .. } = negotiate(&mut stream, &self.options_now())?;
        let mut bytes = [0; MAX_HEADER];
        let len = Header::DISCONNECT.encode(facts.replies, &mut bytes);
        // Best effort; the server sees the end of the connection in any case.
        let _ = stream.write(&bytes[..len]);
        self.check_same(&facts)
    }

    /// Compares the export of a further connection with the first one. Its size may have grown,
    /// which counts from now on.
    fn check_same(&self, facts: &Facts) -> Result<(), OpenError> {
        let Facts { size, .. } = self.facts;
        if (Facts { size, ..*facts }) != self.facts {
            return Err(OpenError::Changed(format!("{:?} to {facts:?}", self.facts)));
        }
        // One connection after the other, so that the size does not fall back.
        let _connections = self.lock();
        let (before, now) = (self.limits.capacity(), capacity(facts));
        if now < before {
            return Err(OpenError::Changed(format!("size {before} to {now} bytes")));
        }
        if now > before {
            tracing::info!(device = %self.name, capacity = now, "export capacity changed");
            self.limits.set_capacity(now);
        }
        Ok(())
    }

    /// Maximum number of concurrent queues.
    pub fn max_queues(&self) -> u32 {
        match self.options.connections {
            _ if !self.facts.can_multi_conn() => 1,
            0 => MAX_CONNECTIONS,
            connections => connections,
        }
    }

    /// Takes a connection for a queue of `depth` requests; connects unless the first one is free.
    pub(super) fn take_connection(
        self: &Arc<Self>,
        depth: u32,
        cancel: &Cancel,
    ) -> Result<(Connection, Lease), OpenError> {
        Options { queue_depth: depth, ..self.options.clone() }.check().map_err(OpenError::Options)?;
        let lease = Lease::take(self)?;
        let spare = self.lock().spare.take();
        let spare = spare.and_then(|mut spare| spare.wire.is_alive().then_some(spare));
        if let Some(connection) = spare {
            return Ok((connection, lease));
        }
        Ok((self.connect_again(u64::MAX, cancel)?, lease))
    }

    /// Makes a further connection, within the options' timeout and `most_ms`.
    ///
    /// # Errors
    /// As [`Session::open`]; when the export has changed.
    pub(super) fn connect_again(&self, most_ms: u64, cancel: &Cancel) -> Result<Connection, OpenError> {
        let timeout_ms = self.options.timeout_ms.min(most_ms);
        let (connection, facts) = connect(&Options { timeout_ms, ..self.options_now() }, cancel)?;
        self.check_same(&facts)?;
        Ok(connection)
    }

    /// The options of a further connection, with the certificates or keys as they are now. If they
    /// cannot be read, those of the connection before are used.
    fn options_now(&self) -> Options {
        let mut tls = self.tls.lock().unwrap_or_else(PoisonError::into_inner);
        match tls.as_ref().map(Tls::renewed).transpose() {
            Ok(renewed) => *tls = renewed,
            Err(why) => tracing::warn!(device = %self.name, %why, "TLS files not read again"),
        }
        Options { tls: tls.clone(), ..self.options.clone() }
    }

    /// Time that requests wait for a new connection; 0: the queue does not reconnect.
    pub(super) fn reconnect_delay(&self) -> Duration {
        Duration::from_secs(self.options.reconnect_delay_s.into())
    }

    /// Maximum requests of a queue, if its caller names no other number.
    pub(super) fn queue_depth(&self) -> u32 {
        self.options.queue_depth
    }

    fn lock(&self) -> MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The right to a connection; released when dropped.
#[derive(Debug)]
pub(super) struct Lease {
    session: Arc<Session>,
}

impl Lease {
    fn take(session: &Arc<Session>) -> Result<Lease, OpenError> {
        let (mut connections, most) = (session.lock(), session.max_queues());
        if connections.in_use >= most {
            return Err(OpenError::AllInUse(most));
        }
        connections.in_use += 1;
        Ok(Lease { session: session.clone() })
    }

    pub(super) fn session(&self) -> &Arc<Session> {
        &self.session
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.session.lock().in_use -= 1;
    }
}

fn connect(options: &Options, cancel: &Cancel) -> Result<(Connection, Facts), OpenError> {
    let deadline = Deadline::new(options.timeout_ms, cancel);
    let mut stream = Timed::new(Stream::connect(&options.address, &deadline)?, &deadline);
    let Agreed { facts, context } = negotiate(&mut stream, options)?;
    Ok((Connection { wire: stream.into_inner().into_wire(), context }, facts))
}

/// Bytes of the export in whole blocks.
fn capacity(facts: &Facts) -> u64 {
    facts.size & !(u64::from(facts.min_block) - 1)
}

fn limits(facts: &Facts, options: &Options) -> Result<Limits, OpenError> {
    let (block, capacity) = (facts.min_block, capacity(facts));
    if capacity == 0 {
        return Err(OpenError::Export(format!("size {} bytes: less than one block of {block}", facts.size)));
    }
    if capacity < facts.size {
        let (size, rest) = (facts.size, facts.size - capacity);
        tracing::warn!(
            "{}: size {size} is not a multiple of the block size {block}: the last {rest} bytes are not used",
            options.address
        );
    }
    let physical = facts.preferred_block.min(MAX_PHYSICAL_BLOCK).max(block);
    let is_read_only = facts.is_read_only() || options.read_only;
    Ok(Limits {
        block_size: block,
        physical_block_size: physical,
        optimal_io_size: if facts.preferred_block > physical { facts.preferred_block } else { 0 },
        memory_alignment: 1,
        max_transfer: MAX_TRANSFER & !(block - 1),
        max_segments: 1024,
        max_discard: if facts.has_trim() { MAX_RANGE } else { 0 },
        discard_alignment: physical,
        max_write_zeroes: MAX_RANGE,
        read_only: is_read_only,
        volatile_cache: facts.has_flush() && !is_read_only,
        native_fua: facts.has_fua(),
        rotational: facts.is_rotational(),
        ..Limits::new(capacity)
    })
}
