//! The control thread, which serves one client at a time.

use super::config_change::BackendChannel;
use super::lock;
use super::session::Session;
use super::socket::Endpoint;
use exports::stop::{StopSignal, Wait};
use exports::{Error, Stats};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use vhost::vhost_user::{BackendReqHandler, Error as ProtocolError};

/// The thread parses small messages, and a process may have many exports.
const STACK_BYTES: usize = 256 << 10;

/// The running control thread and its stop signal.
pub(super) struct Control {
    shared: Arc<Shared>,
    thread: JoinHandle<()>,
}

struct Shared {
    stop: StopSignal,
    /// The client's socket, to be shut down while the thread waits for the rest of a message.
    client: Mutex<Option<UnixStream>>,
}

impl Control {
    pub(super) fn start(
        session: Arc<Mutex<Session>>,
        stats: Arc<Stats>,
        endpoint: Endpoint,
    ) -> Result<Control, Error> {
        let failed = |source| Error::System { action: "start the export's control thread", source };
        let shared = Arc::new(Shared { stop: StopSignal::new().map_err(failed)?, client: Mutex::new(None) });
        let thread = std::thread::Builder::new()
            .name("vhost-user-blk".into())
            .stack_size(STACK_BYTES)
            .spawn({
                let shared = shared.clone();
                move || shared.serve_clients(endpoint, &session, &stats)
            })
            .map_err(failed)?;
        Ok(Control { shared, thread })
    }

    /// Ends the session and the thread. Returns once no core serves the export any more.
    pub(super) fn stop(self) {
        self.shared.stop.raise();
        self.shared.hang_up();
        if self.thread.join().is_err() {
            tracing::error!("the control thread of an export panicked");
        }
    }
}

impl Shared {
    fn serve_clients(&self, mut endpoint: Endpoint, session: &Arc<Mutex<Session>>, stats: &Arc<Stats>) {
        while let Some(client) = endpoint.next_client(&self.stop) {
            let name = lock(session).name().to_owned();
            tracing::info!(export = name, "client connected");
            let _connected = stats.connect();
            match self.serve(client, session) {
                Ok(()) => tracing::info!(export = name, "client disconnected: the export stops"),
                Err(ProtocolError::Disconnected | ProtocolError::SocketBroken(_)) => {
                    tracing::info!(export = name, "client disconnected");
                }
                Err(error) => tracing::warn!(export = name, %error, "client disconnected: protocol error"),
            }
            lock(session).end();
        }
    }

    /// Serves one client until it disconnects (an error) or the export ends.
    fn serve(&self, client: UnixStream, session: &Arc<Mutex<Session>>) -> Result<(), ProtocolError> {
        let own = client.try_clone().map_err(ProtocolError::SocketError)?;
        *self.client.lock().unwrap_or_else(PoisonError::into_inner) =
            Some(client.try_clone().map_err(ProtocolError::SocketError)?);
        let mut handler = BackendReqHandler::from_stream(client, session.clone());
        let result = loop {
            let pause = lock(session).retry_after();
            match self.stop.wait_readable_for(own.as_raw_fd(), pause) {
                Wait::Stopped => break Ok(()),
                Wait::TimedOut => match lock(session).retry() {
                    Ok(()) => continue,
                    Err(error) => break Err(error.into()),
                },
                Wait::Readable => {}
            }
            let channel = BackendChannel::peek(&own);
            if let Err(error) = handler.handle_request() {
                break Err(error);
            }
            if let Some(channel) = channel {
                lock(session).set_backend_channel(channel);
            }
        };
        self.hang_up();
        result
    }

    fn hang_up(&self) {
        if let Some(client) = self.client.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = client.shutdown(Shutdown::Both);
        }
    }
}
