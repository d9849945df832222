//! A connection's socket, and TLS over it where that was agreed on.

use std::cell::{RefCell, RefMut};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;

/// The way to a client: bytes as they are, or sealed.
pub(crate) struct Wire {
    socket: Arc<OwnedFd>,
    tls: Option<Box<RefCell<tls::Wire>>>,
}

impl Wire {
    /// Bytes as they are, over a socket that does not block; or what `session` makes of them.
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

    /// TLS, and the socket below it; `None` where bytes go as they are.
    #[inline]
    pub(super) fn tls(&self) -> Option<(RefMut<'_, tls::Wire>, BorrowedFd<'_>)> {
        self.tls.as_ref().map(|tls| (tls.borrow_mut(), self.socket.as_fd()))
    }

    /// Whether TLS has something to be sent, whatever the client is owed.
    #[inline]
    pub(super) fn owes(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.borrow().unsent() > 0)
    }

    /// Whether there may be something that no event of the socket tells of.
    #[inline]
    pub(super) fn has_more(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.borrow().has_more())
    }

    /// What TLS agreed on, for logs: version and cipher suite.
    pub(crate) fn agreed(&self) -> Option<String> {
        self.tls.as_ref().map(|tls| tls.borrow().agreed())
    }

    /// Says goodbye, where there is a way to say it.
    pub(super) fn close(&self) {
        if let Some((mut tls, socket)) = self.tls() {
            tls.close(socket);
        }
    }
}

/// Ends a connection in both directions, from any thread; whoever serves it sees the end.
pub(super) fn disconnect(socket: &OwnedFd) {
    // SAFETY: a plain system call on a descriptor that is open.
    unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RDWR) };
}

/// TLS on an export: who may go without.
#[derive(Clone, Debug)]
pub struct Security {
    /// Who we are, and whom we let in.
    pub server: tls::Server,
    /// Without TLS nobody is told anything, or served.
    pub is_required: bool,
}
