//! The listening thread of a connection: detects its end and serves the server's own messages.

use super::super::peer::{Peer, Watch};
use super::frontend::{self, FLAG_NEED_REPLY, FLAG_REPLY, FLAG_VERSION};
use super::read_config;
use super::{Frontend, Shared};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use vhost::vhost_user::message::BackendReq;

/// Connection and channel that the thread watches.
pub struct Link {
    peer: Arc<Peer>,
    frontend: Shared<Frontend>,
    socket: UnixStream,
    backend: Option<UnixStream>,
}

impl Link {
    /// Watches the connection of `frontend`, and the channel for the server's own messages, if any.
    ///
    /// # Errors
    /// When the operating system refuses a further descriptor.
    pub fn new(peer: Arc<Peer>, frontend: Shared<Frontend>, backend: Option<UnixStream>) -> io::Result<Link> {
        let socket = super::super::peer::lock(&frontend).stream().try_clone()?;
        Ok(Link { peer, frontend, socket, backend })
    }
}

impl Watch for Link {
    fn wanted(&self) -> Vec<(RawFd, i16)> {
        let backend = self.backend.as_ref().map_or(-1, AsRawFd::as_raw_fd);
        vec![(self.socket.as_raw_fd(), libc::POLLRDHUP), (backend, libc::POLLIN)]
    }

    fn period(&self) -> Option<Duration> {
        None
    }

    fn handle(&mut self, came: &[bool]) -> bool {
        if came[0] {
            self.peer.set_gone("the vhost-user server closed the connection");
            return false;
        }
        if came[1]
            && let Some(stream) = &self.backend
        {
            match serve(stream) {
                Ok(true) => self.peer.config_changed(read_config(&self.frontend)),
                Ok(false) => {}
                Err(_) => self.backend = None,
            }
        }
        true
    }
}

/// Serves one message of the server. Returns whether it reports a configuration change.
fn serve(stream: &UnixStream) -> io::Result<bool> {
    let (request, flags, _) = frontend::read_message(stream)?;
    let is_config = request == u32::from(BackendReq::CONFIG_CHANGE_MSG);
    if flags & FLAG_NEED_REPLY != 0 {
        // The reply comes before the configuration is read: the server may serve nothing else while
        // it waits.
        let code = if is_config { 0 } else { libc::ENOSYS as u64 };
        let reply = frontend::message(request, FLAG_VERSION | FLAG_REPLY, &code.to_le_bytes());
        frontend::write_all(stream, &reply, &[])?;
    }
    Ok(is_config)
}
