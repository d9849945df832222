//! The acceptor: one control thread that accepts clients and drives their handshakes until each
//! client states its request.
//! ```text
//!   accept ─► newcomer: handshake, at most DEADLINE ─► AcceptHandler::admit: takes a slot, picks a core
//!                 │ too slow, protocol error, no slot
//!                 └─► disconnected
//! ```
//!
//! A handshake is a state machine without side effects ([`Handshake`]): bytes in, bytes out. The
//! number of pending handshakes is bounded. At the limit the acceptor drops the oldest handshake of
//! the address with the most. So a peer that only connects cannot keep other peers out, and takes
//! no connection slot.

use super::connection_slots::oldest_of_most;
use super::log_limit::LogLimit;
use super::{Listener, Origin};
use crate::Error;
use crate::stop::{StopSignal, poll};
use ::stream::Wire;
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tls::{Plain, Session, SessionError};

/// Time limit of a handshake: a program needs milliseconds; interactive use is not supported.
const DEADLINE: Duration = Duration::from_secs(10);
/// Maximum number of pending handshakes of one export: all queues of two hosts with the most
/// queues, which connect before the first is served.
const MAX_NEWCOMERS: usize = 128;
/// Maximum unparsed bytes of one newcomer.
const MAX_UNREAD: usize = 64 << 10;
/// Pause after an error of accept(2), most likely because the process ran out of descriptors.
const PAUSE: Duration = Duration::from_millis(200);
/// The thread parses small messages, and a process may have many exports.
const STACK_BYTES: usize = 256 << 10;

/// The handshake with one newcomer, as a state machine.
pub trait Handshake: Send + 'static {
    /// Parses as much of `input` as possible and appends the response to `output`. `input` is
    /// everything received and not yet consumed. The first call has no input and may produce a
    /// greeting. A call that consumes or appends bytes is followed by another one, after all output
    /// has been sent. Returns the number of bytes consumed, and the next step.
    ///
    /// # Errors
    /// A protocol error of the newcomer, for the log. The acceptor closes the connection without
    /// sending `output`.
    fn advance(&mut self, input: &[u8], output: &mut Vec<u8>) -> Result<(usize, HandshakeStep), String>;

    /// TLS is established. `identity` names the newcomer's key, if it authenticated with one.
    fn secured(&mut self, identity: Option<&str>) {
        let _ = identity;
    }

    /// Whether the newcomer must leave because its export is gone: see [`Acceptor::settle`].
    fn is_cancelled(&self) -> bool {
        false
    }
}

/// The state of a handshake after [`Handshake::advance`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandshakeStep {
    /// More input is needed.
    More,
    /// TLS starts once all output has been sent. Bytes received in the clear and not consumed are
    /// an error.
    Secure,
    /// TLS has started already: unconsumed bytes belong to it.
    Secured,
    /// The handshake succeeded: the client is to be served. Unconsumed bytes are its first
    /// requests.
    Serve,
    /// The handshake is over: the connection closes once all output has been sent.
    Leave,
}

/// Creates handshakes and receives the clients that complete them. Called by the control thread.
pub trait AcceptHandler: Send + 'static {
    /// The handshake of this protocol.
    type Handshake: Handshake;

    /// Maximum number of pending handshakes.
    fn max_newcomers(&self) -> usize {
        MAX_NEWCOMERS
    }

    /// Returns whether a peer that has just connected may start the handshake.
    fn may_come(&mut self, peer: &str, origin: Origin) -> bool {
        let _ = (peer, origin);
        true
    }

    /// Starts the handshake of a client that connected from `peer`.
    fn greet(&mut self, peer: &str, origin: Origin) -> Self::Handshake;
    /// The TLS configuration for a handshake that has reached [`HandshakeStep::Secure`] or
    /// [`HandshakeStep::Secured`].
    fn tls(&self) -> Option<tls::Server>;
    /// Takes over a client that completed its handshake.
    fn admit(&mut self, admitted: Admitted<Self::Handshake>);
}

/// A client that completed its handshake.
pub struct Admitted<T> {
    /// The connection, with or without TLS.
    pub wire: Wire,
    /// The peer's name, for logs.
    pub peer: String,
    /// The completed handshake, with the negotiated values.
    pub handshake: T,
    /// Bytes received after the handshake.
    pub early: Vec<u8>,
    /// The peer's origin, for limits.
    pub origin: Origin,
}

/// A running acceptor: its control thread and the orders for it.
pub struct Acceptor {
    orders: Arc<Orders>,
    thread: JoinHandle<()>,
}

/// Orders for a control thread.
struct Orders {
    signal: StopSignal,
    given: Mutex<Vec<Order>>,
}

enum Order {
    /// End.
    Stop,
    /// Disconnect cancelled newcomers, and report that.
    Settle(SyncSender<()>),
}

impl Orders {
    fn give(&self, order: Order) {
        self.given.lock().unwrap_or_else(PoisonError::into_inner).push(order);
        self.signal.raise();
    }

    fn take(&self) -> Vec<Order> {
        self.signal.lower();
        std::mem::take(&mut *self.given.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Acceptor {
    /// Accepts clients of `listener`, also those that wait there already.
    ///
    /// # Errors
    /// When the system refuses the thread.
    pub fn open<H: AcceptHandler>(listener: Listener, name: String, host: H) -> Result<Acceptor, Error> {
        let failed = |source| Error::System { action: "start the export's control thread", source };
        let signal = StopSignal::new().map_err(failed)?;
        let orders = Arc::new(Orders { signal, given: Mutex::default() });
        let acceptor = AcceptorThread {
            listener,
            host,
            newcomers: Vec::new(),
            rejections: LogLimit::default(),
            name: name.clone(),
        };
        let given = orders.clone();
        let thread = std::thread::Builder::new()
            .name(name.chars().take(15).collect())
            .stack_size(STACK_BYTES)
            .spawn(move || acceptor.run(&given))
            .map_err(failed)?;
        Ok(Acceptor { orders, thread })
    }

    /// Disconnects newcomers that are cancelled. Returns when they are gone, and every client that
    /// was admitted before is on its core.
    pub fn settle(&self) {
        let (done, settled) = sync_channel(1);
        self.orders.give(Order::Settle(done));
        let _ = settled.recv(); // fails when the thread is gone, and its newcomers with it
    }

    /// Stops accepting and disconnects clients in their handshake. Clients that are served stay
    /// connected.
    pub fn close(self) {
        self.orders.give(Order::Stop);
        if self.thread.join().is_err() {
            tracing::error!("the acceptor thread of an export panicked");
        }
    }
}

/// State of the control thread.
struct AcceptorThread<H: AcceptHandler> {
    listener: Listener,
    host: H,
    newcomers: Vec<Newcomer<H::Handshake>>,
    /// Limits the log lines about newcomers that were disconnected.
    rejections: LogLimit,
    name: String,
}

struct Newcomer<T> {
    stream: UnixStream,
    session: Option<Box<Session>>,
    /// The handshake has been told about the TLS session.
    knows_tls: bool,
    peer: String,
    origin: Origin,
    handshake: T,
    unread: Vec<u8>,
    unsent: Vec<u8>,
    step: HandshakeStep,
    deadline: Instant,
}

impl<H: AcceptHandler> AcceptorThread<H> {
    fn run(mut self, orders: &Orders) {
        let mut fds = Vec::new();
        loop {
            fds.clear();
            fds.push(libc::pollfd { fd: orders.signal.as_raw_fd(), events: libc::POLLIN, revents: 0 });
            fds.push(libc::pollfd { fd: self.listener.as_raw_fd(), events: libc::POLLIN, revents: 0 });
            fds.extend(self.newcomers.iter().map(Newcomer::interest));
            poll(&mut fds, self.timeout_ms());
            if fds[0].revents != 0 {
                match self.obey(orders) {
                    true => return,
                    // The newcomers are others now.
                    false => continue,
                }
            }
            // From the back: `swap_remove` fills the gap with the last entry, which has had its
            // turn.
            for place in (0..self.newcomers.len()).rev() {
                self.attend(place, fds[2 + place].revents != 0);
            }
            if fds[1].revents != 0 && !self.accept() {
                orders.signal.wait(PAUSE);
            }
        }
    }

    /// Carries orders out. Returns whether one of them is to stop.
    fn obey(&mut self, orders: &Orders) -> bool {
        for order in orders.take() {
            match order {
                Order::Stop => return true,
                Order::Settle(done) => {
                    self.newcomers.retain(|newcomer| !newcomer.handshake.is_cancelled());
                    let _ = done.send(());
                }
            }
        }
        false
    }

    /// Milliseconds until the next handshake deadline, or -1 without newcomers.
    fn timeout_ms(&self) -> libc::c_int {
        let now = Instant::now();
        let next =
            self.newcomers.iter().map(|newcomer| newcomer.deadline.saturating_duration_since(now)).min();
        next.map_or(-1, |left| left.as_millis() as libc::c_int + 1)
    }

    /// Accepts every waiting client. Returns `false` when the system refuses.
    fn accept(&mut self) -> bool {
        loop {
            let connection = match self.listener.accept() {
                Ok(connection) => connection,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return true,
                    // The client closed the connection before it was accepted.
                    io::ErrorKind::ConnectionAborted | io::ErrorKind::Interrupted => continue,
                    _ => {
                        tracing::warn!(export = self.name, %error, "cannot accept a client");
                        return false;
                    }
                },
            };
            if !self.host.may_come(&connection.peer, connection.origin) {
                continue;
            }
            if self.newcomers.len() >= self.host.max_newcomers() {
                self.evict();
            }
            let newcomer = Newcomer {
                handshake: self.host.greet(&connection.peer, connection.origin),
                stream: connection.socket.into(),
                session: None,
                knows_tls: false,
                peer: connection.peer,
                origin: connection.origin,
                unread: Vec::new(),
                unsent: Vec::new(),
                step: HandshakeStep::More,
                deadline: Instant::now() + DEADLINE,
            };
            self.newcomers.push(newcomer);
            self.attend(self.newcomers.len() - 1, true);
        }
    }

    /// Disconnects the oldest newcomer of the address that has the most.
    fn evict(&mut self) {
        let mut places: Vec<usize> = (0..self.newcomers.len()).collect();
        places.sort_by_key(|place| self.newcomers[*place].deadline);
        let by_age = places.iter().map(|place| (self.newcomers[*place].origin, *place));
        let Some(place) = oldest_of_most(by_age) else { return };
        let gone = self.newcomers.swap_remove(place);
        self.log_rejection(&gone.peer, "too many connections are in the handshake");
    }

    /// Logs, at a bounded rate, that a newcomer was disconnected.
    fn log_rejection(&self, peer: &str, reason: &str) {
        if let Some(count) = self.rejections.due() {
            tracing::warn!(export = self.name, peer, reason, count, "connection closed during its handshake");
        }
    }

    /// Advances one newcomer. `is_up`: its socket is ready.
    fn attend(&mut self, place: usize, is_up: bool) {
        let newcomer = &mut self.newcomers[place];
        let end = if is_up { newcomer.advance_or_alert(&self.host) } else { Ok(false) };
        match end {
            Ok(false) if newcomer.deadline > Instant::now() => {}
            Ok(false) => {
                let gone = self.newcomers.swap_remove(place);
                self.log_rejection(&gone.peer, "the handshake took longer than 10 s");
            }
            Ok(true) => {
                let gone = self.newcomers.swap_remove(place);
                match gone.step {
                    HandshakeStep::Serve => self.admit(gone),
                    HandshakeStep::More
                    | HandshakeStep::Secure
                    | HandshakeStep::Secured
                    | HandshakeStep::Leave => {
                        tracing::debug!(
                            export = self.name,
                            peer = gone.peer,
                            "client disconnected before its first request"
                        );
                    }
                }
            }
            Err(error) => {
                let gone = self.newcomers.swap_remove(place);
                self.log_rejection(&gone.peer, &error);
            }
        }
    }

    fn admit(&mut self, newcomer: Newcomer<H::Handshake>) {
        let wire = Wire::new(Arc::new(newcomer.stream.into()), newcomer.session.map(|session| *session));
        let Newcomer { peer, handshake, unread: early, origin, .. } = newcomer;
        self.host.admit(Admitted { wire, peer, handshake, early, origin });
    }
}

impl<T: Handshake> Newcomer<T> {
    fn interest(&self) -> libc::pollfd {
        let events = if self.owes() { libc::POLLOUT } else { libc::POLLIN };
        libc::pollfd { fd: self.stream.as_raw_fd(), events, revents: 0 }
    }

    /// Whether output waits to be sent.
    fn owes(&self) -> bool {
        !self.unsent.is_empty() || self.session.as_ref().is_some_and(|session| !session.unsent().is_empty())
    }

    /// As [`Newcomer::advance`]. After a TLS error it also sends the alert, as far as the socket
    /// takes it now.
    fn advance_or_alert(&mut self, host: &impl AcceptHandler) -> Result<bool, String> {
        let result = self.advance(host);
        if result.is_err() && self.session.is_some() {
            self.unsent.clear();
            let _ = self.send();
        }
        result
    }

    /// Reads, parses and answers without blocking. Returns whether the handshake is over.
    fn advance(&mut self, host: &impl AcceptHandler) -> Result<bool, String> {
        loop {
            let may_talk = self.session.as_ref().is_none_or(|session| session.is_established());
            // The newcomer takes an answer before the next one is made.
            let mut needs_input = !self.owes();
            if self.step == HandshakeStep::More && may_talk && needs_input {
                if let Some(session) = self.session.as_ref().filter(|_| !self.knows_tls) {
                    self.handshake.secured(session.peer());
                    self.knows_tls = true;
                }
                let (used, step) = self.handshake.advance(&self.unread, &mut self.unsent)?;
                self.unread.drain(..used);
                self.step = step;
                needs_input = used == 0 && self.unsent.is_empty();
            }
            if self.step == HandshakeStep::Secure && !self.unread.is_empty() {
                // An attacker in the middle could have injected these bytes: they must not count as
                // TLS data.
                return Err(format!("{} bytes received in the clear after STARTTLS", self.unread.len()));
            }
            if !self.send()? {
                return Ok(self.step == HandshakeStep::Leave);
            }
            if self.owes() {
                return Ok(false);
            }
            match self.step {
                HandshakeStep::More if needs_input => {}
                HandshakeStep::More => continue,
                HandshakeStep::Secure => self.secure(host)?,
                HandshakeStep::Secured => {
                    self.secure(host)?;
                    continue;
                }
                HandshakeStep::Serve | HandshakeStep::Leave => return Ok(true),
            }
            match self.receive()? {
                Some(0) => {
                    self.step = HandshakeStep::Leave;
                    return Ok(true);
                }
                Some(_) => {}
                None => return Ok(false),
            }
        }
    }

    /// Starts TLS.
    fn secure(&mut self, host: &impl AcceptHandler) -> Result<(), String> {
        let server = if self.session.is_none() { host.tls() } else { None };
        let session = server
            .ok_or("the export has no TLS configuration")?
            .session()
            .map_err(|error| error.to_string())?;
        let session = self.session.insert(Box::new(session));
        self.step = HandshakeStep::More;
        session.feed(&std::mem::take(&mut self.unread));
        session.handshake().map_err(|error| error.to_string())?;
        Ok(())
    }

    /// Sends pending output. Returns whether the client is still connected.
    fn send(&mut self) -> Result<bool, String> {
        if let Some(session) = &mut self.session
            && session.is_established()
        {
            session.write(&self.unsent).map_err(|error| error.to_string())?;
            self.unsent.clear();
        }
        while self.owes() {
            let bytes = self.session.as_ref().map_or(&self.unsent[..], |session| session.unsent());
            match (&self.stream).write(bytes) {
                Ok(sent) => match &mut self.session {
                    Some(session) => session.sent(sent),
                    None => drop(self.unsent.drain(..sent)),
                },
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(true),
                Err(_) => {
                    self.step = HandshakeStep::Leave;
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Returns the number of bytes received: 0 at the end of the stream, `None` when no data is
    /// available now.
    fn receive(&mut self) -> Result<Option<usize>, String> {
        let mut bytes = [0; 4096];
        let room = bytes.len().min(MAX_UNREAD - self.unread.len());
        loop {
            if let Some(session) = &mut self.session
                && session.is_established()
                && room > 0
            {
                match session.read(&mut bytes[..room]) {
                    Ok(Plain::Bytes(len)) => {
                        self.unread.extend(&bytes[..len]);
                        return Ok(Some(len));
                    }
                    Ok(Plain::End) | Err(SessionError::Truncated) => return Ok(Some(0)),
                    Ok(Plain::Nothing) => {}
                    Err(error) => return Err(error.to_string()),
                }
            }
            match (&self.stream).read(&mut bytes[..room]) {
                Ok(len) => match &mut self.session {
                    None => {
                        self.unread.extend(&bytes[..len]);
                        return Ok(Some(len));
                    }
                    Some(_) if len == 0 => return Ok(Some(0)),
                    Some(session) => {
                        session.feed(&bytes[..len]);
                        session.handshake().map_err(|error| error.to_string())?;
                        if self.owes() {
                            return Ok(Some(len));
                        }
                    }
                },
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(_) => return Ok(Some(0)),
            }
        }
    }
}
