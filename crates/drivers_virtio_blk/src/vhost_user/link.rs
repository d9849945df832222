//! The listening thread of a connection: detects its end, reconnects, and serves the server's own
//! messages.

use super::super::peer::{Watch, lock};
use super::Shared;
use super::frontend::{self, FLAG_NEED_REPLY, FLAG_REPLY, FLAG_VERSION};
use super::reconnect::Returned;
use drivers::stream::reconnect::{End, Outage};
use std::io;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::{Duration, Instant};
use vhost::vhost_user::message::BackendReq;

/// Reason of a loss.
const CLOSED: &str = "the vhost-user server closed the connection";

/// Connection and channel that the thread watches.
pub struct Link {
    shared: Arc<Shared>,
    socket: UnixStream,
    backend: Option<UnixStream>,
    /// When the server returned last.
    returned_at: Instant,
    /// Start of the last outage.
    outage: Option<Instant>,
}

impl Link {
    /// Watches the connection `socket`, and the channel for the server's own messages, if any.
    pub fn new(shared: Arc<Shared>, socket: UnixStream, backend: Option<UnixStream>) -> Link {
        Link { shared, socket, backend, returned_at: Instant::now(), outage: None }
    }

    /// Handles the end of the connection. Returns whether there is another one.
    fn lost(&mut self) -> bool {
        let shared = self.shared.clone();
        let peer = &shared.peer;
        if !shared.reconnects() {
            peer.set_gone(CLOSED);
            return false;
        }
        let device = peer.name();
        tracing::warn!(device, why = CLOSED, "connection lost: reconnecting");
        lock(&shared.control).is_connected = false;
        let delay = shared.options.reconnect_delay();
        let outage = Outage { device, since: self.since(delay), delay, stop: &shared.stop };
        match outage.reconnect(|| shared.be_late(), |most_ms| shared.attempt(most_ms)) {
            Ok(Returned { socket, backend }) => {
                (self.socket, self.backend, self.returned_at) = (socket, backend, Instant::now());
                true
            }
            Err(End::Cancelled) => shared.end("the session has ended"),
            Err(End::Dead(why)) => {
                tracing::error!(device, %why, "connection lost");
                shared.end(&why)
            }
        }
    }

    /// Start of the outage. A server may accept connections and complete no request for ever: then
    /// the outage continues.
    fn since(&mut self, delay: Duration) -> Instant {
        let has_served = self.shared.peer.take_progress() || self.returned_at.elapsed() >= delay;
        let since = self.outage.filter(|_| !has_served).unwrap_or_else(Instant::now);
        self.outage = Some(since);
        since
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
            return self.lost();
        }
        if came[1]
            && let Some(stream) = &self.backend
        {
            match serve(stream, Instant::now() + self.shared.options.timeout()) {
                Ok(true) => self.shared.peer.config_changed(self.shared.read_config()),
                Ok(false) => {}
                Err(_) => self.backend = None,
            }
        }
        true
    }
}

/// Serves one message of the server. Returns whether it reports a configuration change.
fn serve(stream: &UnixStream, until: Instant) -> io::Result<bool> {
    let (request, flags, _) = frontend::read_message(stream, until)?;
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
