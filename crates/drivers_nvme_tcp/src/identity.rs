//! The identity with which a host connects: its names, its secrets, and TLS with them.

use super::error::OpenError;
use super::options::{Options, host};
use drivers::stream::{Address, Deadline, Stream, StreamError};
use nvme::fabrics::{ConnectData, Nqn};
use std::sync::atomic::{AtomicUsize, Ordering};

/// The options with the secrets as they are now, and the host's identity.
pub(super) struct Identity {
    pub(super) options: Options,
    host_id: [u8; 16],
    pub(super) name: Nqn,
    /// `None`: connections are not encrypted.
    pub(super) security: Option<Security>,
}

impl Identity {
    /// The identity that the options state, or that of this machine.
    ///
    /// # Errors
    /// When the options are invalid, or TLS cannot use the key or the names.
    pub(super) fn new(options: Options) -> Result<Identity, OpenError> {
        let (host_id, name) = host(&options);
        let security = Security::of(&options, &name)?;
        Ok(Identity { options, host_id, name, security })
    }

    /// Reads the secrets from their files again. If they cannot be used, the secrets before stay.
    pub(super) fn renew(&mut self) {
        let mut options = self.options.clone();
        let renewed = options.read_keys().and_then(|()| options.check()).map_err(OpenError::Options);
        let security = match renewed {
            Ok(()) if options == self.options => return,
            Ok(()) => Security::of(&options, &self.name),
            Err(error) => Err(error),
        };
        let device = self.options.name();
        match security {
            Ok(security) => {
                tracing::info!(%device, "secrets read again: they have changed");
                (self.options, self.security) = (options, security);
            }
            Err(error) => tracing::warn!(%device, %error, "secrets not read again"),
        }
    }

    /// The data of a Connect command to the controller with this identifier.
    pub(super) fn connect_data(&self, controller_id: u16) -> ConnectData {
        let (host_id, subsystem, host) = (self.host_id, self.options.nqn.clone(), self.name.clone());
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
    /// The key of the options for the host of this name, if there is one.
    fn of(options: &Options, name: &Nqn) -> Result<Option<Security>, OpenError> {
        let Some(key) = &options.tls_key else { return Ok(None) };
        let secrets = key.secrets(name, &options.nqn).into_iter();
        let ways = secrets.map(|secret| tls::Client::with_secret(secret.identity, secret.key));
        let ways = ways.collect::<Result<_, _>>();
        let ways = ways.map_err(|error| OpenError::Options(format!("tls-key: {error}")))?;
        Ok(Some(Security { ways, accepted: AtomicUsize::new(0) }))
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
