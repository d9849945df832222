//! The identity with which a host connects: its names, and the key of TLS that belongs to them.

use super::error::OpenError;
use super::options::{Options, host};
use crate::stream::connect::{Deadline, Stream};
use crate::stream::{Address, StreamError};
use nvme::fabrics::{ConnectData, Nqn};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The host, and the subsystem that it connects to.
pub(super) struct Identity {
    host_id: [u8; 16],
    pub(super) name: Nqn,
    pub(super) subsystem: Nqn,
    /// `None`: connections are not encrypted.
    pub(super) security: Option<Security>,
}

impl Identity {
    /// The identity that the options state, or that of this machine.
    ///
    /// # Errors
    /// When TLS cannot use the key or the names.
    pub(super) fn new(options: &Options) -> Result<Identity, OpenError> {
        let ((host_id, name), subsystem) = (host(options), options.nqn.clone());
        let security = match &options.tls_key {
            Some(key) => Some(Security::new(key.secrets(&name, &subsystem))?),
            None => None,
        };
        Ok(Identity { host_id, name, subsystem, security })
    }

    /// The data of a Connect command to the controller with this identifier.
    pub(super) fn connect_data(&self, controller_id: u16) -> ConnectData {
        let (host_id, subsystem, host) = (self.host_id, self.subsystem.clone(), self.name.clone());
        ConnectData { host_id, controller_id, subsystem, host }
    }
}

/// A key of TLS in each of the ways in which targets derive it. TLS presents one at a time.
pub(super) struct Security {
    ways: Vec<tls::Client>,
    /// The way that the target accepted last.
    accepted: AtomicUsize,
}

impl Security {
    fn new(secrets: Vec<nvme_auth::TlsSecret>) -> Result<Security, OpenError> {
        let client = |secret: nvme_auth::TlsSecret| tls::Client::with_secret(secret.identity, secret.key);
        let ways = secrets.into_iter().map(client).collect::<Result<_, _>>();
        let ways = ways.map_err(|error| OpenError::Options(format!("tls-key: {error}")))?;
        Ok(Security { ways, accepted: AtomicUsize::new(0) })
    }

    /// Connects and performs the TLS handshake, with one connection for each way until the target
    /// accepts one.
    ///
    /// # Errors
    /// When the target accepts none, or the connection fails otherwise.
    pub(super) fn connect(&self, address: &Address, deadline: &Deadline<'_>) -> Result<Stream, OpenError> {
        let first = self.accepted.load(Ordering::Relaxed);
        let mut refusal = None;
        for way in (first..self.ways.len()).chain(0..first) {
            let mut stream = Stream::connect(address, deadline)?;
            // A key needs no name of the server.
            let session = self.ways[way].session("").map_err(StreamError::Tls)?;
            match stream.secure(session, deadline) {
                Ok(()) => {
                    self.accepted.store(way, Ordering::Relaxed);
                    return Ok(stream);
                }
                // The reason of the first attempt is that of the specified way.
                Err(error @ (StreamError::Tls(_) | StreamError::Io(_))) => refusal = refusal.or(Some(error)),
                Err(error) => return Err(error.into()),
            }
        }
        Err(OpenError::Untrusted(refusal.expect("a key is derived in one way at least")))
    }
}
