//! A connection's socket, and its TLS session if it has one.

use std::cell::{RefCell, RefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

/// The transport to a client, in the clear or with TLS.
pub(crate) struct Wire {
    socket: Arc<OwnedFd>,
    tls: Option<Box<RefCell<tls::Wire>>>,
}

impl Wire {
    /// A transport over a non-blocking socket, with TLS if `session` is given.
    pub(crate) fn new(socket: Arc<OwnedFd>, session: Option<tls::Session>) -> Wire {
        Wire { socket, tls: session.map(|session| Box::new(RefCell::new(tls::Wire::new(session)))) }
    }

    /// The socket itself.
    #[inline]
    pub(crate) fn socket(&self) -> &Arc<OwnedFd> {
        &self.socket
    }

    /// The socket's descriptor, for system calls.
    #[inline]
    pub(super) fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// The TLS session and its socket; `None` without TLS.
    #[inline]
    pub(super) fn tls(&self) -> Option<(RefMut<'_, tls::Wire>, BorrowedFd<'_>)> {
        self.tls.as_ref().map(|tls| (tls.borrow_mut(), self.socket.as_fd()))
    }

    /// Whether TLS has records to send, independent of replies.
    #[inline]
    pub(super) fn owes(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.borrow().unsent() > 0)
    }

    /// Whether TLS may hold received data that no socket event reports.
    #[inline]
    pub(super) fn has_more(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.borrow().has_more())
    }

    /// Whether the connection has TLS.
    pub(crate) fn is_secured(&self) -> bool {
        self.tls.is_some()
    }

    /// The negotiated TLS version and cipher suite, for logs.
    pub(crate) fn agreed(&self) -> Option<String> {
        self.tls.as_ref().map(|tls| tls.borrow().agreed())
    }

    /// Sends the TLS closing alert, if there is a session.
    pub(super) fn close(&self) {
        if let Some((mut tls, socket)) = self.tls() {
            tls.close(socket);
        }
    }
}

/// Shuts a connection down in both directions, from any thread. Its core sees the end of the
/// stream.
pub(super) fn disconnect(socket: &OwnedFd) {
    // SAFETY: a plain system call on a descriptor that is open.
    unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RDWR) };
}

/// The TLS settings of an export.
#[derive(Clone, Debug)]
pub struct Security {
    /// The server's identity, and the clients that it accepts.
    pub server: tls::Server,
    /// Whether clients without TLS are refused.
    pub is_required: bool,
}

impl Security {
    /// The clients with a key of their own, and whether no others may connect.
    pub(crate) fn listed(&self) -> (Vec<Box<str>>, bool) {
        let listed = self.server.identities().to_vec();
        let is_closed = !listed.is_empty() && self.is_required;
        (listed, is_closed)
    }
}
