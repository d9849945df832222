//! A connection's socket, and its TLS session if it has one.

use crate::send_queue::{MAX_SEGMENTS, SendQueue};
use crate::tls_buffers::{Came, TlsBuffers};
use socket2::SockRef;
use std::io;
use std::mem::MaybeUninit;
use std::net::Shutdown;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::Arc;

/// The transport to a peer, in the clear or with TLS.
pub struct Wire {
    socket: Arc<OwnedFd>,
    tls: Option<Box<TlsBuffers>>,
    sent: u64,
}

impl Wire {
    /// A transport over a non-blocking socket, with TLS if `session` is given.
    pub fn new(socket: Arc<OwnedFd>, session: Option<tls::Session>) -> Wire {
        Wire { socket, tls: session.map(|session| Box::new(TlsBuffers::new(session))), sent: 0 }
    }

    /// The socket itself.
    #[inline]
    pub fn socket(&self) -> &Arc<OwnedFd> {
        &self.socket
    }

    /// The socket's descriptor, for system calls.
    #[inline]
    pub fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// The TLS session and its socket; `None` without TLS.
    #[inline]
    pub(crate) fn tls(&mut self) -> Option<(&mut TlsBuffers, &OwnedFd)> {
        self.tls.as_deref_mut().map(|tls| (tls, &*self.socket))
    }

    /// Sends as much of `queue` as the socket takes now. With TLS, bytes leave the queue when the
    /// socket has all records that were made with them.
    ///
    /// # Errors
    /// An error of `sendmsg(2)` or TLS, except that the socket is full.
    pub fn send(&mut self, queue: &mut impl SendQueue) -> io::Result<()> {
        if let Some(tls) = &mut self.tls {
            return tls.send_queue(&self.socket, queue, &mut self.sent);
        }
        loop {
            let segments = queue.segments();
            let segments = &segments[..segments.len().min(MAX_SEGMENTS)];
            let offered: usize = segments.iter().map(|segment| segment.len).sum();
            if offered == 0 {
                return Ok(());
            }
            // SAFETY: all zeroes is a valid message without anything.
            let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
            // A `Segment` is laid out as an iovec.
            message.msg_iov = segments.as_ptr().cast_mut().cast();
            message.msg_iovlen = segments.len();
            let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
            // SAFETY: the segments can be read, by the contract of `SendQueue`.
            let sent = unsafe { libc::sendmsg(self.socket.as_raw_fd(), &raw const message, flags) };
            if sent < 0 {
                let error = io::Error::last_os_error();
                match error.kind() {
                    io::ErrorKind::Interrupted => continue,
                    io::ErrorKind::WouldBlock => return Ok(()),
                    _ => return Err(error),
                }
            }
            self.sent += sent as u64;
            queue.advance(sent as usize);
            if (sent as usize) < offered {
                return Ok(());
            }
        }
    }

    /// Total bytes of [`Wire::send`] that the socket has taken; with TLS, the bytes of records.
    #[inline]
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// Whether TLS has records that the socket has not taken, perhaps answers of its own.
    #[inline]
    pub fn owes(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.unsent() > 0)
    }

    /// Whether TLS may hold received data that no socket event reports.
    #[inline]
    pub fn has_more(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_more())
    }

    /// Whether the connection has TLS.
    pub fn is_secured(&self) -> bool {
        self.tls.is_some()
    }

    /// The negotiated TLS version and cipher suite, for logs.
    pub fn agreed(&self) -> Option<String> {
        self.tls.as_ref().map(|tls| tls.agreed())
    }

    /// Whether an idle connection is still open.
    pub fn is_alive(&mut self) -> bool {
        match self.tls() {
            None => {
                let peeked = SockRef::from(&self.socket).peek(&mut [MaybeUninit::uninit()]);
                peeked.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
            }
            // TLS records without data are not a reply.
            Some((tls, socket)) => matches!(tls.receive(socket, 1, |_| ()), Ok(Came::Nothing)),
        }
    }

    /// Sends a last message, as far as the socket takes it: the connection ends in any case.
    pub fn say(&mut self, message: &[u8]) {
        let _ = match self.tls() {
            None => SockRef::from(&self.socket).send_with_flags(message, libc::MSG_NOSIGNAL),
            Some((tls, socket)) => tls
                .say(message.len(), |to| to.copy_from_slice(message))
                .and_then(|()| tls.seal())
                .and_then(|()| tls.send(socket)),
        };
    }

    /// Sends the TLS closing alert, if there is a session.
    pub fn close(&mut self) {
        if let Some((tls, socket)) = self.tls() {
            tls.close(socket);
        }
    }
}

impl std::fmt::Debug for Wire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wire").field("socket", &self.socket).field("tls", &self.tls.is_some()).finish()
    }
}

/// Shuts a connection down in both directions, from any thread. The peer sees the end of the
/// stream, and so does the user of the [`Wire`].
pub fn disconnect(socket: &OwnedFd) {
    // Fails only when the peer has disconnected already.
    let _ = SockRef::from(socket).shutdown(Shutdown::Both);
}

/// Aborts a connection: unsent data is discarded, as it must not arrive after data of the next
/// connection.
pub fn abort(socket: &OwnedFd) {
    let nobody = libc::sockaddr { sa_family: libc::AF_UNSPEC as libc::sa_family_t, sa_data: [0; 14] };
    // SAFETY: the address outlives the call.
    unsafe {
        libc::connect(socket.as_raw_fd(), &raw const nobody, size_of::<libc::sockaddr>() as libc::socklen_t)
    };
    // For sockets other than TCP.
    disconnect(socket);
}
