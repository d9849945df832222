//! A connection's socket, and its TLS session if it has one.

use super::inbox::{Inbox, Received};
use super::outbox::Outbox;
use block::Data;
use socket2::Socket;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use tls::Came;

/// The transport to a server, in the clear or with TLS.
pub(crate) struct Wire {
    socket: Socket,
    tls: Option<Box<tls::Wire>>,
}

impl Wire {
    /// A transport over a non-blocking socket, with TLS if `session` is given.
    pub(crate) fn new(socket: Socket, session: Option<tls::Session>) -> Wire {
        Wire { socket, tls: session.map(|session| Box::new(tls::Wire::new(session))) }
    }

    /// The socket itself.
    pub(crate) fn socket(&self) -> &Socket {
        &self.socket
    }

    /// The socket's descriptor, for system calls.
    #[inline]
    pub(crate) fn fd(&self) -> RawFd {
        self.socket.as_raw_fd()
    }

    /// As [`Inbox::receive`].
    #[inline]
    pub(crate) fn receive(&mut self, inbox: &mut Inbox, data: Data<'_>) -> io::Result<Option<Received>> {
        match &mut self.tls {
            None => inbox.receive(self.socket.as_raw_fd(), data),
            Some(tls) => inbox.unseal(tls, &self.socket, data),
        }
    }

    /// As [`Outbox::send`]. Data that TLS has sealed counts as sent; [`Wire::owes`] tells whether
    /// the kernel has taken it.
    #[inline]
    pub(crate) fn send<const H: usize>(&mut self, outbox: &mut Outbox<H>) -> io::Result<()> {
        match &mut self.tls {
            None => outbox.send(self.socket.as_raw_fd()),
            Some(tls) => outbox.send_sealed(tls, &self.socket),
        }
    }

    /// Whether TLS has records that the kernel has not taken.
    #[inline]
    pub(crate) fn owes(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.unsent() > 0)
    }

    /// Whether TLS may hold received data that no socket event reports.
    #[inline]
    pub(crate) fn has_more(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_more())
    }

    /// Whether an idle connection is still open.
    pub(crate) fn is_alive(&mut self) -> bool {
        match &mut self.tls {
            None => {
                let peeked = self.socket.peek(&mut [MaybeUninit::uninit()]);
                peeked.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
            }
            // TLS records without data are not a reply.
            Some(tls) => matches!(tls.receive(&self.socket, 1, |_| ()), Ok(Came::Nothing)),
        }
    }

    /// Sends a last message, as far as the socket takes it: the connection ends in any case.
    pub(crate) fn say(&mut self, message: &[u8]) {
        let _ = match &mut self.tls {
            None => self.socket.send_with_flags(message, libc::MSG_NOSIGNAL),
            Some(tls) => tls
                .say(message.len(), |to| to.copy_from_slice(message))
                .and_then(|()| tls.seal())
                .and_then(|()| tls.send(&self.socket)),
        };
    }

    /// Sends the TLS closing alert, if there is a session.
    pub(crate) fn close(&mut self) {
        if let Some(tls) = &mut self.tls {
            tls.close(&self.socket);
        }
    }
}

impl std::fmt::Debug for Wire {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Wire").field("socket", &self.socket).field("tls", &self.tls.is_some()).finish()
    }
}
