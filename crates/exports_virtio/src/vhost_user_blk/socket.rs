//! The export's Unix socket: accepts clients, connects to a VMM, or has one given connection.

use super::{Config, SocketMode};
use exports::Error;
use exports::stop::StopSignal;
use exports::stream::UnixSocket;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Initial pause between attempts to connect; doubles up to [`MAX_PAUSE`].
const MIN_PAUSE: Duration = Duration::from_millis(20);
/// Maximum pause: a VMM that restarted is found within a second.
const MAX_PAUSE: Duration = Duration::from_secs(1);

/// The source of clients.
pub(super) enum Endpoint {
    Listen(UnixSocket),
    Connect {
        path: PathBuf,
        pause: Duration,
    },
    /// A client that is connected already; there is no other.
    Connected(Option<UnixStream>),
}

impl Endpoint {
    pub(super) fn open(config: &Config) -> Result<Endpoint, Error> {
        Ok(match config.mode {
            SocketMode::Listen => Endpoint::Listen(UnixSocket::bind(&config.socket, config.permissions)?),
            SocketMode::Connect => Endpoint::Connect { path: config.socket.clone(), pause: MIN_PAUSE },
        })
    }

    /// Returns the next client, or `None` once `stop` has been raised or no further client can
    /// come.
    pub(super) fn next_client(&mut self, stop: &StopSignal) -> Option<UnixStream> {
        match self {
            Endpoint::Listen(listener) => accept(listener, stop),
            Endpoint::Connect { path, pause } => connect(path, pause, stop),
            Endpoint::Connected(client) => client.take(),
        }
    }
}

fn connect(path: &Path, pause: &mut Duration, stop: &StopSignal) -> Option<UnixStream> {
    // A VMM that accepts and disconnects at once must not cause a busy loop either.
    while !stop.wait(*pause) {
        match UnixStream::connect(path) {
            Ok(stream) => {
                *pause = MIN_PAUSE;
                return Some(stream);
            }
            Err(error) => {
                tracing::debug!(socket = %path.display(), %error, "cannot connect to the VMM yet");
                *pause = (*pause * 2).min(MAX_PAUSE);
            }
        }
    }
    None
}

/// Waits for the next client of a listening socket.
fn accept(listener: &UnixSocket, stop: &StopSignal) -> Option<UnixStream> {
    while stop.wait_readable(listener.socket().as_raw_fd()) {
        match listener.socket().accept() {
            Ok((stream, _)) => match stream.set_nonblocking(false) {
                Ok(()) => return Some(stream),
                Err(error) => {
                    tracing::warn!(socket = %listener.path().display(), %error, "cannot set up the client's socket")
                }
            },
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => {
                // Most likely the process has no free descriptor, and others may be closed soon.
                tracing::warn!(socket = %listener.path().display(), %error, "cannot accept a client");
                stop.wait(MAX_PAUSE);
            }
        }
    }
    None
}
