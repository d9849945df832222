//! Connects to an address, and exchanges complete messages during the handshake. Every step has a
//! deadline, and another thread can cancel it at any time.

use ::stream::Wire;
use socket2::{Domain, SockAddr, Socket, TcpKeepalive, Type};
use std::fmt;
use std::io::{self, Read};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsRawFd, RawFd};
use std::path::PathBuf;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};
use tls::{Plain, Session, SessionError};
use vmm_sys_util::eventfd::EventFd;

/// Interval of connection attempts to a Unix socket with a full backlog: no event reports free
/// space.
const RETRY: Duration = Duration::from_millis(10);
/// A silent server is considered dead after this time and three unanswered keepalive probes.
const DEAD_AFTER: Duration = Duration::from_secs(40);
const ASK_AFTER: Duration = Duration::from_secs(10);

/// The address of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Address {
    /// A host by name or IP address, and a port.
    Tcp {
        /// Name or address, without brackets.
        host: String,
        /// TCP port.
        port: u16,
    },
    /// A Unix socket. A path that starts with a zero byte is an abstract name.
    Unix(PathBuf),
}

impl Address {
    /// Keeps the needs of connections to this address in a sandbox, the first and later ones.
    #[cfg(feature = "sandbox")]
    pub fn keep(&self, profile: &mut sandbox::Profile) {
        match self {
            Address::Tcp { host, port } => {
                profile.connect(*port);
                if host.parse::<std::net::IpAddr>().is_err() {
                    profile.resolve_names();
                }
            }
            Address::Unix(path) => profile.connect_to(path),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Address::Tcp { host, port } if host.contains(':') => write!(f, "[{host}]:{port}"),
            Address::Tcp { host, port } => write!(f, "{host}:{port}"),
            Address::Unix(path) => write!(f, "{}", path.display().to_string().replace('\0', "@")),
        }
    }
}

/// The reason why a connection failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StreamError {
    /// No connection to the server.
    #[error("cannot connect to {address}: {error}")]
    Connect {
        /// The address.
        address: String,
        /// The error of the system.
        error: io::Error,
    },
    /// The connection failed before the reply arrived.
    #[error("the connection failed: {}", told(.0))]
    Io(#[source] io::Error),
    /// The timeout expired.
    #[error("no answer within {0} ms")]
    TimedOut(u64),
    /// TLS failed: one side does not trust the other.
    #[error(transparent)]
    Tls(#[from] SessionError),
    /// [`Cancel::cancel`] was called.
    #[error("cancelled")]
    Cancelled,
    /// The operating system refused a resource.
    #[error("no socket: {0}")]
    System(#[source] io::Error),
}

fn told(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::UnexpectedEof => "the server closed it".into(),
        _ => error.to_string(),
    }
}

impl StreamError {
    /// The closest Linux error number (positive), for C callers.
    pub fn errno(&self) -> i32 {
        match self {
            StreamError::Connect { error, .. } => error.raw_os_error().unwrap_or(libc::EHOSTUNREACH),
            StreamError::Io(error) => error.raw_os_error().unwrap_or(libc::ECONNRESET),
            StreamError::Tls(_) => libc::EKEYREJECTED,
            StreamError::TimedOut(_) => libc::ETIMEDOUT,
            StreamError::Cancelled => libc::ECANCELED,
            StreamError::System(error) => error.raw_os_error().unwrap_or(libc::ENOMEM),
        }
    }
}

/// Cancels slow operations, from any thread. Clones share the state.
#[derive(Clone, Debug)]
pub struct Cancel {
    event: Option<Arc<EventFd>>,
}

impl Cancel {
    /// Creates a handle for [`Cancel::cancel`].
    ///
    /// # Errors
    /// Without a file descriptor.
    pub fn new() -> io::Result<Cancel> {
        let event = EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)?;
        Ok(Cancel { event: Some(Arc::new(event)) })
    }

    /// A handle that is never cancelled.
    pub const fn never() -> Cancel {
        Cancel { event: None }
    }

    /// Ends every operation that uses this handle or a clone with [`StreamError::Cancelled`], now
    /// or when it starts.
    pub fn cancel(&self) {
        if let Some(event) = &self.event {
            // Fails only when the counter is full; then the event is raised already.
            let _ = event.write(1);
        }
    }
}

/// A deadline and a cancellation handle.
#[derive(Debug)]
pub struct Deadline<'c> {
    timeout_ms: u64,
    ends_at: Instant,
    cancel: &'c Cancel,
}

impl<'c> Deadline<'c> {
    /// A deadline `timeout_ms` from now, at most a year.
    pub fn new(timeout_ms: u64, cancel: &'c Cancel) -> Deadline<'c> {
        // At most a year, so that no sum with it overflows.
        let timeout = Duration::from_millis(timeout_ms).min(Duration::from_secs(365 * 86400));
        Deadline { timeout_ms, ends_at: Instant::now() + timeout, cancel }
    }

    /// Reads exactly `to.len()` bytes from a non-blocking socket.
    pub fn read(&self, mut socket: &Socket, mut to: &mut [u8]) -> Result<(), StreamError> {
        while !to.is_empty() {
            self.wait(socket.as_raw_fd(), libc::POLLIN, None)?;
            match socket.read(to) {
                Ok(0) => return Err(StreamError::Io(io::ErrorKind::UnexpectedEof.into())),
                Ok(count) => to = &mut to[count..],
                Err(error) => passing(error)?,
            }
        }
        Ok(())
    }

    /// Writes all of `bytes` to a non-blocking socket. A server that has closed it is an error, not
    /// a signal, which would end a C program.
    pub fn write(&self, socket: &Socket, mut bytes: &[u8]) -> Result<(), StreamError> {
        while !bytes.is_empty() {
            match socket.send_with_flags(bytes, libc::MSG_NOSIGNAL) {
                Ok(count) => bytes = &bytes[count..],
                Err(error) => {
                    passing(error)?;
                    self.wait(socket.as_raw_fd(), libc::POLLOUT, None)?;
                }
            }
        }
        Ok(())
    }

    /// Pauses for `time`, or until the deadline.
    ///
    /// # Errors
    /// When the operation is cancelled, or at the deadline.
    pub fn pause(&self, time: Duration) -> Result<(), StreamError> {
        self.wait(-1, 0, Some(time))
    }

    /// Waits until `fd` is ready, or for `at_most`.
    pub fn wait(
        &self,
        fd: RawFd,
        events: libc::c_short,
        at_most: Option<Duration>,
    ) -> Result<(), StreamError> {
        let cancel = self.cancel.event.as_ref().map_or(-1, |event| event.as_raw_fd());
        loop {
            let left = self.ends_at.saturating_duration_since(Instant::now());
            let timeout = at_most.map_or(left, |most| most.min(left));
            // Rounded up, or the last millisecond would be a busy loop.
            let timeout_ms = i32::try_from(timeout.as_millis() + 1).unwrap_or(i32::MAX);
            let entry = |fd, events| libc::pollfd { fd, events, revents: 0 };
            let mut fds = [entry(fd, events), entry(cancel, libc::POLLIN)];
            // SAFETY: the array outlives the call.
            let ready = unsafe { libc::poll(fds.as_mut_ptr(), 2, timeout_ms) };
            if fds[1].revents != 0 {
                return Err(StreamError::Cancelled);
            }
            if ready > 0 || (ready == 0 && at_most.is_some()) && Instant::now() < self.ends_at {
                return Ok(());
            }
            if ready < 0 {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(StreamError::System(error));
                }
            }
            if Instant::now() >= self.ends_at {
                return Err(StreamError::TimedOut(self.timeout_ms));
            }
        }
    }
}

/// A connected non-blocking socket, with TLS or without it, for complete messages. Each wait is
/// bounded by a [`Deadline`].
pub struct Stream {
    socket: Socket,
    session: Option<Box<Session>>,
}

impl Stream {
    /// Connects to `address`.
    pub fn connect(address: &Address, deadline: &Deadline<'_>) -> Result<Stream, StreamError> {
        let failed = |error| StreamError::Connect { address: address.to_string(), error };
        let socket = match address {
            Address::Unix(path) => {
                let to = SockAddr::unix(path).map_err(failed)?;
                connect_to(&to, Domain::UNIX, deadline)?.map_err(failed)?
            }
            Address::Tcp { host, port } => {
                let addresses = resolve(host, *port, deadline)?.map_err(failed)?;
                let mut last = io::Error::new(io::ErrorKind::NotFound, "the name has no address");
                let mut connected = None;
                for to in addresses {
                    match connect_to(&to.into(), Domain::for_address(to), deadline)? {
                        Ok(socket) => {
                            connected = Some(socket);
                            break;
                        }
                        Err(error) => last = error,
                    }
                }
                let socket = connected.ok_or_else(|| failed(last))?;
                set_up_tcp(&socket).map_err(failed)?;
                socket
            }
        };
        Ok(Stream { socket, session: None })
    }

    /// A stream over a connected socket.
    pub fn over(socket: Socket) -> Result<Stream, StreamError> {
        socket.set_nonblocking(true).map_err(StreamError::System)?;
        Ok(Stream { socket, session: None })
    }

    /// The socket's descriptor, to wait for bytes.
    pub fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// Reads exactly `to.len()` bytes.
    pub fn read(&mut self, mut to: &mut [u8], deadline: &Deadline<'_>) -> Result<(), StreamError> {
        if self.session.is_none() {
            return deadline.read(&self.socket, to);
        }
        while let Some(session) = &mut self.session
            && !to.is_empty()
        {
            match session.read(to)? {
                Plain::Bytes(len) => to = &mut to[len..],
                Plain::Nothing => self.fetch(deadline)?,
                Plain::End => return Err(StreamError::Io(io::ErrorKind::UnexpectedEof.into())),
            }
        }
        Ok(())
    }

    /// Writes all of `bytes`.
    pub fn write(&mut self, bytes: &[u8], deadline: &Deadline<'_>) -> Result<(), StreamError> {
        match &mut self.session {
            None => deadline.write(&self.socket, bytes),
            Some(session) => {
                session.write(bytes)?;
                self.send(deadline).map_err(|error| self.last_words(error))
            }
        }
    }

    /// Performs the TLS handshake of `session`; all later data goes through it.
    pub fn secure(&mut self, session: Session, deadline: &Deadline<'_>) -> Result<(), StreamError> {
        self.session = Some(Box::new(session));
        while let Some(session) = &mut self.session {
            let result = session.handshake();
            // If the handshake failed, this sends the alert.
            let sent = self.send(deadline);
            match result {
                Ok(true) => return sent,
                Ok(false) => sent?,
                Err(error) => return Err(StreamError::Tls(error)),
            }
            self.fetch(deadline)?;
        }
        Ok(())
    }

    /// Whether TLS has bytes for [`Stream::read`] that no event of the socket reports.
    pub fn has_unread(&mut self) -> bool {
        self.session.as_mut().is_some_and(|session| session.is_readable())
    }

    /// Whether a readable socket has bytes for [`Stream::read`], or has ended. A record of TLS may
    /// hold none.
    pub fn has_arrived(&mut self, deadline: &Deadline<'_>) -> Result<bool, StreamError> {
        if self.session.is_none() {
            return Ok(true);
        }
        if !self.has_unread() {
            self.fetch(deadline)?;
        }
        Ok(self.has_unread())
    }

    /// Sends the session's pending records.
    fn send(&mut self, deadline: &Deadline<'_>) -> Result<(), StreamError> {
        if let Some(session) = &mut self.session {
            deadline.write(&self.socket, session.unsent())?;
            session.sent(session.unsent().len());
        }
        Ok(())
    }

    /// The server's alert, if it sent one before it disconnected: a TLS 1.3 client finishes the
    /// handshake before the server has checked it.
    #[cold]
    fn last_words(&mut self, error: StreamError) -> StreamError {
        let (Some(session), StreamError::Io(_)) = (&mut self.session, &error) else { return error };
        let mut bytes = [0; 4096];
        // An alert is short; other data is not an error.
        if let Ok(len) = (&self.socket).read(&mut bytes) {
            session.feed(&bytes[..len]);
        }
        match session.read(&mut [0]) {
            Err(why) => StreamError::Tls(why),
            Ok(_) => error,
        }
    }

    /// Waits for data from the socket and passes it to the session.
    fn fetch(&mut self, deadline: &Deadline<'_>) -> Result<(), StreamError> {
        let Some(session) = &mut self.session else { return Ok(()) };
        deadline.wait(self.socket.as_raw_fd(), libc::POLLIN, None)?;
        let mut bytes = [0; 4096];
        match (&self.socket).read(&mut bytes) {
            Ok(0) => session.feed_end(),
            Ok(len) => session.feed(&bytes[..len]),
            Err(error) => passing(error)?,
        }
        Ok(())
    }

    /// The connection after the handshake.
    pub fn into_wire(self) -> Wire {
        Wire::new(Arc::new(self.socket.into()), self.session.map(|session| *session))
    }

    /// The socket of a stream without TLS.
    pub fn into_socket(self) -> Socket {
        self.socket
    }
}

/// A [`Stream`] during a handshake whose steps have one deadline.
pub struct Timed<'p, 'c> {
    stream: Stream,
    deadline: &'p Deadline<'c>,
}

impl<'p, 'c> Timed<'p, 'c> {
    /// `stream` until `deadline`.
    pub fn new(stream: Stream, deadline: &'p Deadline<'c>) -> Timed<'p, 'c> {
        Timed { stream, deadline }
    }

    /// As [`Stream::read`].
    pub fn read(&mut self, to: &mut [u8]) -> Result<(), StreamError> {
        self.stream.read(to, self.deadline)
    }

    /// As [`Stream::write`].
    pub fn write(&mut self, bytes: &[u8]) -> Result<(), StreamError> {
        self.stream.write(bytes, self.deadline)
    }

    /// As [`Stream::secure`].
    pub fn secure(&mut self, session: Session) -> Result<(), StreamError> {
        self.stream.secure(session, self.deadline)
    }

    /// The stream after the handshake.
    pub fn into_inner(self) -> Stream {
        self.stream
    }
}

/// Ignores an error that only asks to try again.
fn passing(error: io::Error) -> Result<(), StreamError> {
    match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted => Ok(()),
        _ => Err(StreamError::Io(error)),
    }
}

/// Connects, or returns the error of the system; the outer error ends the whole attempt.
fn connect_to(
    to: &SockAddr,
    domain: Domain,
    deadline: &Deadline<'_>,
) -> Result<io::Result<Socket>, StreamError> {
    let socket =
        Socket::new(domain, Type::STREAM.nonblocking().cloexec(), None).map_err(StreamError::System)?;
    loop {
        match socket.connect(to).map_err(|error| (error.raw_os_error(), error)) {
            Ok(()) => return Ok(Ok(socket)),
            Err((Some(libc::EINPROGRESS | libc::EINTR), _)) => break,
            // A Unix socket with a full backlog.
            Err((Some(libc::EAGAIN), _)) => deadline.wait(-1, 0, Some(RETRY))?,
            Err((_, error)) => return Ok(Err(error)),
        }
    }
    deadline.wait(socket.as_raw_fd(), libc::POLLOUT, None)?;
    Ok(match socket.take_error() {
        Ok(None) => Ok(socket),
        Ok(Some(error)) | Err(error) => Err(error),
    })
}

/// The addresses of a host. The system's resolver can neither be sped up nor interrupted. So it
/// runs on a thread, which is left behind after a timeout.
fn resolve(
    host: &str,
    port: u16,
    deadline: &Deadline<'_>,
) -> Result<io::Result<Vec<SocketAddr>>, StreamError> {
    if let Ok(ip) = host.parse::<IpAddr>() {
        return Ok(Ok(vec![SocketAddr::new(ip, port)]));
    }
    let done = Arc::new(EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK).map_err(StreamError::System)?);
    let (sender, receiver) = mpsc::channel();
    let (name, event) = (host.to_owned(), done.clone());
    let look_up = move || {
        let _ = sender.send((name, port).to_socket_addrs().map(Iterator::collect));
        let _ = event.write(1);
    };
    reactor::spawn_thread("resolve", look_up).map_err(StreamError::System)?;
    deadline.wait(done.as_raw_fd(), libc::POLLIN, None)?;
    Ok(receiver.recv().unwrap_or_else(|_| Err(io::Error::other("the resolver failed"))))
}

fn set_up_tcp(socket: &Socket) -> io::Result<()> {
    socket.set_tcp_nodelay(true)?;
    // A host that is gone does not answer at all; without keepalive, requests to it would never
    // end.
    let keepalive = TcpKeepalive::new().with_time(ASK_AFTER).with_interval(ASK_AFTER).with_retries(3);
    socket.set_tcp_keepalive(&keepalive)?;
    socket.set_tcp_user_timeout(Some(DEAD_AFTER))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::os::unix::net::UnixStream;

    thread_local! {
        /// Whether this thread got SIGPIPE.
        static IS_RAISED: Cell<bool> = const { Cell::new(false) };
    }

    extern "C" fn note(_: libc::c_int) {
        IS_RAISED.set(true);
    }

    /// A C program may have any handler for SIGPIPE, and the default one ends it.
    #[test]
    fn no_signal_comes_from_a_socket_that_the_server_has_closed() {
        // SAFETY: the handler only sets a flag of its thread; the structure is valid when zeroed.
        unsafe {
            let mut action: libc::sigaction = std::mem::zeroed();
            action.sa_sigaction = note as *const () as usize;
            libc::sigaction(libc::SIGPIPE, &raw const action, std::ptr::null_mut());
        }
        let closed = || Socket::from(std::os::fd::OwnedFd::from(UnixStream::pair().unwrap().0));
        let never = Cancel::never();
        let error = Deadline::new(1000, &never).write(&closed(), &[1]).unwrap_err();
        assert!(
            matches!(&error, StreamError::Io(error) if error.kind() == io::ErrorKind::BrokenPipe),
            "{error}"
        );
        Wire::new(Arc::new(closed().into()), None).say(&[1]);
        assert!(!IS_RAISED.get());
    }
}
