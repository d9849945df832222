//! Who has just come: one control thread that accepts clients and speaks with all of them until they say what they want.
//!
//! ```text
//!   accept ─► newcomer: handshake, at most DEADLINE ─► AcceptHandler::admit, which takes a slot and hands it to a core
//!                 │ too slow, nonsense, no slot
//!                 └─► hung up on
//! ```
//!
//! What is said is a state machine without side effects ([`Handshake`]): bytes in, bytes out. Newcomers are few at a time;
//! when there are too many, the oldest one goes of the address that has most. So a peer that only connects keeps no
//! other peer out, and takes no place of those that are served.

use super::connection_slots::oldest_of_most;
use super::log_limit::LogLimit;
use super::{Address, Listener, Origin, Wire};
use crate::Error;
use crate::stop::{StopSignal, poll};
use std::io::{self, Read, Write};
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use tls::{Plain, Session, SessionError};

/// How long a client may take until it has said what it wants: a program needs milliseconds, a person who types the
/// protocol has other means.
const DEADLINE: Duration = Duration::from_secs(10);
/// Newcomers at a time: all queues of two hosts with the most queues, which connect before the first is served.
const MAX_NEWCOMERS: usize = 128;
/// Bytes of one newcomer that wait to be understood.
const MAX_UNREAD: usize = 64 << 10;
/// After an error of accept(2), for want of descriptors most likely: others may give some back.
const PAUSE: Duration = Duration::from_millis(200);
/// The thread parses small messages; exports are many.
const STACK_BYTES: usize = 256 << 10;

/// What is said with a newcomer.
pub(crate) trait Handshake: Send + 'static {
    /// Understands as much as it can of `input`, all that came and was not used before, and adds to `output` what is
    /// to be said: at first, without any input, a greeting. Returns how many bytes were used, and how it goes on.
    ///
    /// # Errors
    /// What the newcomer did wrong, for the log: the connection ends, what was added before is not sent.
    fn advance(&mut self, input: &[u8], output: &mut Vec<u8>) -> Result<(usize, HandshakeStep), String>;

    /// From here on everything goes through TLS; `identity` is whose key the newcomer has, if it came by a key.
    fn secured(&mut self, identity: Option<&str>) {
        let _ = identity;
    }
}

/// How a talk goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HandshakeStep {
    /// With what comes next.
    More,
    /// With what comes through TLS, once what there is to say has been sent. What came and was not used came too early.
    Secure,
    /// With what comes through TLS, which has begun already: what came and was not used belongs to it.
    Secured,
    /// It is over: the client is to be served. What came and was not used is its first requests.
    Serve,
    /// It is over: the client leaves when it has been told what there is to say.
    Leave,
}

/// Who speaks, and to whom clients go then. Called by the control thread.
pub(crate) trait AcceptHandler: Send + 'static {
    /// What is said with one newcomer.
    type Handshake: Handshake;
    /// Whether a peer that has just connected may go on to the handshake.
    fn may_come(&mut self, peer: &str, origin: Origin) -> bool {
        let _ = (peer, origin);
        true
    }

    /// Someone has come from `peer`.
    fn greet(&mut self, peer: &str, origin: Origin) -> Self::Handshake;
    /// TLS for those whose talk comes to [`HandshakeStep::Secure`].
    fn tls(&self) -> Option<tls::Server>;
    /// Someone is to be served.
    fn admit(&mut self, admitted: Admitted<Self::Handshake>);
}

/// A client that is to be served.
pub(crate) struct Admitted<T> {
    /// The way to it.
    pub(crate) wire: Wire,
    /// Who it is, for logs.
    pub(crate) peer: String,
    /// What was agreed.
    pub(crate) handshake: T,
    /// Bytes that came and belong to what follows.
    pub(crate) early: Vec<u8>,
    /// Where it comes from.
    pub(crate) origin: Origin,
}

/// The control thread, and what ends it.
pub(crate) struct Acceptor {
    stop: Arc<StopSignal>,
    thread: JoinHandle<()>,
    address: String,
}

impl Acceptor {
    /// Listens at `address`; clients may come when this returns.
    ///
    /// # Errors
    /// When socket or thread are refused.
    pub(crate) fn open<H: AcceptHandler>(
        address: &Address,
        name: String,
        host: H,
    ) -> Result<Acceptor, Error> {
        let failed = |source| Error::System { action: "start the export's control thread", source };
        let listener = Listener::bind(address)?;
        let address = listener.local_address();
        let stop = Arc::new(StopSignal::new().map_err(failed)?);
        let acceptor = AcceptorThread {
            listener,
            host,
            newcomers: Vec::new(),
            rejections: LogLimit::default(),
            name: name.clone(),
        };
        let signal = stop.clone();
        let thread = std::thread::Builder::new()
            .name(name.chars().take(15).collect())
            .stack_size(STACK_BYTES)
            .spawn(move || acceptor.run(&signal))
            .map_err(failed)?;
        Ok(Acceptor { stop, thread, address })
    }

    /// Where clients connect to.
    pub(crate) fn address(&self) -> &str {
        &self.address
    }

    /// Takes no one any more, and hangs up on who is not served yet. Clients that are served stay.
    pub(crate) fn close(self) {
        self.stop.raise();
        if self.thread.join().is_err() {
            tracing::error!("the control thread of an export panicked");
        }
    }
}

/// What the thread has.
struct AcceptorThread<H: AcceptHandler> {
    listener: Listener,
    host: H,
    newcomers: Vec<Newcomer<H::Handshake>>,
    /// Newcomers that did not come to be served.
    rejections: LogLimit,
    name: String,
}

struct Newcomer<T> {
    stream: UnixStream,
    /// What makes a session when the talk wants one.
    tls: Option<tls::Server>,
    session: Option<Box<Session>>,
    /// The talk knows that there is a session.
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
    fn run(mut self, stop: &StopSignal) {
        let mut fds = Vec::new();
        loop {
            fds.clear();
            fds.push(libc::pollfd { fd: stop.as_raw_fd(), events: libc::POLLIN, revents: 0 });
            fds.push(libc::pollfd { fd: self.listener.as_raw_fd(), events: libc::POLLIN, revents: 0 });
            fds.extend(self.newcomers.iter().map(Newcomer::interest));
            poll(&mut fds, self.timeout_ms());
            if fds[0].revents != 0 {
                return;
            }
            // From the back: who goes is replaced by the last, who has had a turn.
            for place in (0..self.newcomers.len()).rev() {
                self.attend(place, fds[2 + place].revents != 0);
            }
            if fds[1].revents != 0 && !self.accept() && stop.wait(PAUSE) {
                return;
            }
        }
    }

    /// Until the next newcomer has had its time.
    fn timeout_ms(&self) -> libc::c_int {
        let now = Instant::now();
        let next =
            self.newcomers.iter().map(|newcomer| newcomer.deadline.saturating_duration_since(now)).min();
        next.map_or(-1, |left| left.as_millis() as libc::c_int + 1)
    }

    /// Takes everybody who waits. `false` when the system cannot.
    fn accept(&mut self) -> bool {
        loop {
            let connection = match self.listener.accept() {
                Ok(connection) => connection,
                Err(error) => match error.kind() {
                    io::ErrorKind::WouldBlock => return true,
                    // Gone again before anybody looked.
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
            if self.newcomers.len() == MAX_NEWCOMERS {
                self.evict();
            }
            let newcomer = Newcomer {
                handshake: self.host.greet(&connection.peer, connection.origin),
                stream: connection.socket.into(),
                tls: self.host.tls(),
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

    /// Disconnects the oldest newcomer of the address that has most.
    fn evict(&mut self) {
        let mut places: Vec<usize> = (0..self.newcomers.len()).collect();
        places.sort_by_key(|place| self.newcomers[*place].deadline);
        let by_age = places.iter().map(|place| (self.newcomers[*place].origin, *place));
        let Some(place) = oldest_of_most(by_age) else { return };
        let gone = self.newcomers.swap_remove(place);
        self.log_rejection(&gone.peer, "too many connections are in the handshake");
    }

    /// Says at a bounded rate that a newcomer was disconnected.
    fn log_rejection(&self, peer: &str, reason: &str) {
        if let Some(count) = self.rejections.due() {
            tracing::warn!(export = self.name, peer, reason, count, "connection closed before it was served");
        }
    }

    /// Goes on with a newcomer; `is_up`: its socket has something.
    fn attend(&mut self, place: usize, is_up: bool) {
        let newcomer = &mut self.newcomers[place];
        let end = if is_up { newcomer.advance_or_alert() } else { Ok(false) };
        match end {
            Ok(false) if newcomer.deadline > Instant::now() => {}
            Ok(false) => {
                let gone = self.newcomers.swap_remove(place);
                self.log_rejection(&gone.peer, "the handshake takes longer than 10 s");
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
                            "client left without a request"
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

    /// Whether something waits to be sent.
    fn owes(&self) -> bool {
        !self.unsent.is_empty() || self.session.as_ref().is_some_and(|session| !session.unsent().is_empty())
    }

    /// As [`Newcomer::talk`]; who fails at TLS is told why, as far as that goes without waiting.
    fn advance_or_alert(&mut self) -> Result<bool, String> {
        let result = self.advance();
        if result.is_err() && self.session.is_some() {
            self.unsent.clear();
            let _ = self.send();
        }
        result
    }

    /// Reads, understands, answers as far as that goes without waiting. Whether it is over.
    fn advance(&mut self) -> Result<bool, String> {
        loop {
            let may_talk = self.session.as_ref().is_none_or(|session| session.is_established());
            if self.step == HandshakeStep::More && may_talk {
                if let Some(session) = self.session.as_ref().filter(|_| !self.knows_tls) {
                    self.handshake.secured(session.peer());
                    self.knows_tls = true;
                }
                let (used, step) = self.handshake.advance(&self.unread, &mut self.unsent)?;
                self.unread.drain(..used);
                self.step = step;
            }
            if self.step == HandshakeStep::Secure && !self.unread.is_empty() {
                // Somebody between may have put it there: it must not be taken for what comes through TLS.
                return Err(format!("{} bytes came in the clear behind STARTTLS", self.unread.len()));
            }
            if !self.send()? {
                return Ok(self.step == HandshakeStep::Leave);
            }
            if self.owes() {
                return Ok(false);
            }
            match self.step {
                HandshakeStep::More => {}
                HandshakeStep::Secure => self.secure()?,
                HandshakeStep::Secured => {
                    self.secure()?;
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

    /// From here on everything goes through TLS.
    fn secure(&mut self) -> Result<(), String> {
        let server = self.tls.as_ref().filter(|_| self.session.is_none());
        let session =
            server.ok_or("there is no TLS to be had")?.session().map_err(|error| error.to_string())?;
        let session = self.session.insert(Box::new(session));
        self.step = HandshakeStep::More;
        session.feed(&std::mem::take(&mut self.unread));
        session.handshake().map_err(|error| error.to_string())?;
        Ok(())
    }

    /// Whether the client is still there.
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

    /// How many bytes came; 0 at the end, `None` when there is nothing now.
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
