//! A listening socket of any family.

use super::{Address, Origin, UnixSocket, inherited, passed};
use crate::Error;
use socket2::{Domain, SockAddr, Socket, TcpKeepalive};
use std::io;
use std::net::TcpListener;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::PathBuf;
use std::time::Duration;

/// TCP keepalive: a silent peer is probed after 60 s, and declared dead after 6 probes, 10 s apart.
const KEEPALIVE: (Duration, Duration, u32) = (Duration::from_secs(60), Duration::from_secs(10), 6);

/// Send buffer of a Unix socket, in bytes; the system may limit it to less.
const SEND_BUFFER: usize = 1 << 20;

/// A listening socket in non-blocking mode.
pub enum Listener {
    Unix(UnixSocket),
    Other { socket: Socket, name: String },
}

/// An accepted connection in non-blocking mode.
pub struct Accepted {
    pub socket: OwnedFd,
    /// The peer's name, for logs.
    pub peer: String,
    /// The peer's origin, for limits.
    pub origin: Origin,
}

impl Listener {
    /// Listens at `address`, or takes the socket that was passed for it.
    ///
    /// # Errors
    /// When the operating system refuses, or another process listens there.
    pub fn bind(address: &Address) -> Result<Listener, Error> {
        let name = address.to_string();
        let failed = |source| Error::Socket { path: PathBuf::from(&name), action: "listen on", source };
        let socket = match address {
            Address::Unix { path, permissions } => {
                return Ok(Listener::Unix(UnixSocket::bind(path, *permissions)?));
            }
            other => match (passed::take(&name), other) {
                (Some(socket), _) => Socket::from(socket),
                (None, Address::Systemd(name)) => {
                    Socket::from(inherited::take(name.as_deref()).map_err(failed)?)
                }
                _ => Socket::from(TcpListener::bind(&name).map_err(failed)?),
            },
        };
        let is_listening = socket.is_listener().map_err(failed)?;
        if !is_listening {
            return Err(failed(io::Error::new(
                io::ErrorKind::InvalidInput,
                "the passed socket is not listening",
            )));
        }
        socket.set_nonblocking(true).map_err(failed)?;
        Ok(Listener::Other { socket, name })
    }

    /// The address that clients connect to, including a port that the system chose.
    pub fn local_address(&self) -> String {
        match self {
            Listener::Unix(socket) => socket.path().display().to_string(),
            Listener::Other { socket, name } => {
                let address = socket.local_addr().ok();
                address
                    .and_then(|address| address.as_socket())
                    .map_or(name.clone(), |address| address.to_string())
            }
        }
    }

    /// Accepts a waiting client.
    ///
    /// # Errors
    /// An error of accept(2); `WouldBlock` when no client waits.
    pub fn accept(&self) -> io::Result<Accepted> {
        let (socket, address) = match self {
            Listener::Unix(listener) => {
                let (stream, _) = listener.socket().accept()?;
                (Socket::from(OwnedFd::from(stream)), None)
            }
            Listener::Other { socket, .. } => {
                let (socket, address) = socket.accept()?;
                (socket, Some(address))
            }
        };
        socket.set_nonblocking(true)?;
        let peer = address.as_ref().and_then(SockAddr::as_socket);
        if peer.is_some() {
            set_up_tcp(&socket)?;
        } else {
            // As much as the system allows: if a reply does not fit a Unix socket's buffer, client
            // and export wait for each other. TCP tunes its own buffers.
            socket.set_send_buffer_size(SEND_BUFFER)?;
        }
        let origin = peer.map_or(Origin::Local, |address| address.ip().into());
        let peer = peer.map_or_else(|| peer_process(&socket), |address| address.to_string());
        Ok(Accepted { socket: socket.into(), peer, origin })
    }
}

impl AsRawFd for Listener {
    fn as_raw_fd(&self) -> RawFd {
        match self {
            Listener::Unix(socket) => socket.socket().as_raw_fd(),
            Listener::Other { socket, .. } => socket.as_raw_fd(),
        }
    }
}

fn set_up_tcp(socket: &Socket) -> io::Result<()> {
    let (time, interval, retries) = KEEPALIVE;
    // The outbox batches replies already: the system need not wait for more.
    socket.set_tcp_nodelay(true)?;
    socket
        .set_tcp_keepalive(&TcpKeepalive::new().with_time(time).with_interval(interval).with_retries(retries))
}

/// The process at the other end of a Unix socket.
fn peer_process(socket: &Socket) -> String {
    // SAFETY: plain data, valid when zeroed.
    let mut peer: libc::ucred = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::ucred>() as libc::socklen_t;
    let is_local = socket.domain().is_ok_and(|domain| domain == Domain::UNIX);
    // SAFETY: writes into a live variable of the size that is given.
    let result = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut peer).cast(),
            &raw mut len,
        )
    };
    if is_local && result == 0 { format!("process {}", peer.pid) } else { "unknown".into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::net::TcpStream;
    use std::os::unix::net::UnixStream;

    fn accept(listener: &Listener) -> Accepted {
        crate::stop::poll(
            &mut [libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 }],
            -1,
        );
        listener.accept().unwrap()
    }

    #[test]
    fn clients_of_either_family_are_taken_and_named() {
        let tcp = Listener::bind(&Address::Tcp("127.0.0.1:0".into())).unwrap();
        assert_eq!(tcp.accept().err().unwrap().kind(), io::ErrorKind::WouldBlock);
        let mut client = TcpStream::connect(tcp.local_address()).unwrap();
        let accepted = accept(&tcp);
        assert_eq!(accepted.peer, client.local_addr().unwrap().to_string());
        assert_eq!(accepted.origin, Origin::V4([127, 0, 0, 1]));
        client.write_all(b"x").unwrap();
        let mut byte = [0];
        let mut stream = TcpStream::from(accepted.socket);
        stream.set_nonblocking(false).unwrap();
        stream.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"x");

        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("s");
        let unix = Listener::bind(&Address::Unix { path: path.clone(), permissions: 0o600 }).unwrap();
        let _client = UnixStream::connect(&path).unwrap();
        assert_eq!(accept(&unix).peer, format!("process {}", std::process::id()));
        assert_eq!(unix.local_address(), path.display().to_string());
    }

    #[test]
    fn an_address_that_is_taken_or_makes_no_sense_is_named_in_the_error() {
        let first = Listener::bind(&Address::Tcp("127.0.0.1:0".into())).unwrap();
        let address = first.local_address();
        let error = Listener::bind(&Address::Tcp(address.clone())).err().unwrap().to_string();
        assert!(error.contains(&address), "{error}");
        let error = Listener::bind(&Address::Tcp("127.0.0.1".into())).err().unwrap().to_string();
        assert!(error.contains("cannot listen on socket 127.0.0.1"), "{error}");
    }
}
