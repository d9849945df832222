//! The socket of a queue, as its controller sees it.

use nvme_target::Connection;
use socket2::SockRef;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// A connection's socket, which any thread may shut down.
pub(crate) struct Socket(pub(crate) Arc<OwnedFd>);

impl Connection for Socket {
    /// Shuts down the receiving side. The connection's core sees the end of the stream and answers
    /// what was received. If `is_silent`, both sides are shut down, so the host gets no answers.
    fn disconnect(&self, is_silent: bool) {
        let how = if is_silent { Shutdown::Both } else { Shutdown::Read };
        // Fails only when the peer has disconnected already.
        let _ = SockRef::from(&*self.0).shutdown(how);
    }
}
