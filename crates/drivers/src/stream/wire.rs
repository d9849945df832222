//! A connection's socket, and TLS over it where that was agreed on.

use super::inbox::{Inbox, Received};
use super::outbox::Outbox;
use block::Data;
use socket2::Socket;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, RawFd};
use tls::Came;

/// The way to a server: bytes as they are, or sealed.
pub(crate) struct Wire {
    socket: Socket,
    tls: Option<Box<tls::Wire>>,
}

impl Wire {
    /// Bytes as they are, over a socket that does not block; or what `session` makes of them.
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

    /// As [`Outbox::send`]: what TLS has sealed counts as sent, and [`Wire::owes`] says whether the kernel has it.
    #[inline]
    pub(crate) fn send<const H: usize>(&mut self, outbox: &mut Outbox<H>) -> io::Result<()> {
        match &mut self.tls {
            None => outbox.send(self.socket.as_raw_fd()),
            Some(tls) => outbox.send_sealed(tls, &self.socket),
        }
    }

    /// Whether TLS has something that the kernel has not taken.
    #[inline]
    pub(crate) fn owes(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.unsent() > 0)
    }

    /// Whether there may be something that no event of the socket tells of.
    #[inline]
    pub(crate) fn has_more(&self) -> bool {
        self.tls.as_ref().is_some_and(|tls| tls.has_more())
    }

    /// Whether a connection on which nothing is due is still there.
    pub(crate) fn is_alive(&mut self) -> bool {
        match &mut self.tls {
            None => {
                let peeked = self.socket.peek(&mut [MaybeUninit::uninit()]);
                peeked.is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock)
            }
            // What TLS says of its own accord is no answer to anything.
            Some(tls) => matches!(tls.receive(&self.socket, 1, |_| ()), Ok(Came::Nothing)),
        }
    }

    /// Says goodbye, where there is a way to say it.
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
