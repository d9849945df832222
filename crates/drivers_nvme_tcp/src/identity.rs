//! The identity with which a host connects: its names, its secrets, and TLS with them.

use super::error::OpenError;
use super::options::{Options, host};
use drivers::stream::{Address, Deadline, Stream, StreamError};
use nvme::fabrics::{ConnectData, Nqn};
use nvme_auth::keyring::{self, Keyring};
use nvme_auth::tls_key::TlsSecret;
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

/// The keys of TLS with which a host may connect. TLS presents one at a time.
pub(super) struct Security {
    keys: Keys,
    /// The position of the key that the target accepted last.
    accepted: AtomicUsize,
}

enum Keys {
    /// One key, in each of the ways in which targets derive it.
    Derived(Vec<tls::Client>),
    /// Those in a keyring at the time of a connection.
    InKeyring { keyring: Keyring, host: Nqn, subsystem: Nqn },
}

impl Security {
    /// The keys of the options for the host of this name, if there are any.
    fn of(options: &Options, name: &Nqn) -> Result<Option<Security>, OpenError> {
        let subsystem = &options.nqn;
        let keys = match (&options.tls_key, &options.tls_keyring) {
            (_, Some(keyring)) => {
                let (keyring, host) = (keyring.clone(), name.clone());
                Keys::InKeyring { keyring, host, subsystem: subsystem.clone() }
            }
            (Some(key), None) => Keys::Derived(clients("tls-key", key.secrets(name, subsystem))?),
            (None, None) => return Ok(None),
        };
        Ok(Some(Security { keys, accepted: AtomicUsize::new(0) }))
    }

    /// Connects and performs the TLS handshake, with one connection for each key until the target
    /// accepts one.
    ///
    /// # Errors
    /// When there is no key, the target accepts none, or the connection fails otherwise.
    pub(super) fn connect(&self, address: &Address, deadline: &Deadline<'_>) -> Result<Stream, OpenError> {
        let found;
        let (option, clients) = match &self.keys {
            Keys::Derived(clients) => ("tls-key", clients),
            Keys::InKeyring { keyring, host, subsystem } => {
                found = clients("tls-keyring", keyring::secrets_of(keyring, host, subsystem)?)?;
                ("tls-keyring", &found)
            }
        };
        // The keyring may have fewer keys now.
        let first = self.accepted.load(Ordering::Relaxed).min(clients.len() - 1);
        let mut refusal = None;
        for place in (first..clients.len()).chain(0..first) {
            let mut stream = Stream::connect(address, deadline)?;
            // A key needs no name of the server.
            let session = clients[place].session("").map_err(StreamError::Tls)?;
            match stream.secure(session, deadline) {
                Ok(()) => {
                    self.accepted.store(place, Ordering::Relaxed);
                    return Ok(stream);
                }
                // The reason of the first attempt is that of the specified way.
                Err(error @ (StreamError::Tls(_) | StreamError::Io(_))) => refusal = refusal.or(Some(error)),
                Err(error) => return Err(error.into()),
            }
        }
        Err(OpenError::Untrusted { option, error: refusal.expect("there is one key at least") })
    }
}

/// TLS with each of these keys.
fn clients(option: &str, secrets: Vec<TlsSecret>) -> Result<Vec<tls::Client>, OpenError> {
    let clients = secrets.into_iter().map(|secret| tls::Client::with_secret(secret.identity, secret.key));
    let clients = clients.collect::<Result<_, _>>();
    clients.map_err(|error| OpenError::Options(format!("{option}: {error}")))
}
