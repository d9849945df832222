//! The side that connects.

use crate::certificates::{self, AUTHORITY, exists, within};
use crate::psk::Key;
use crate::server::context;
use crate::session::{Session, Side};
use crate::{Error, SessionError, psk};
use openssl::ssl::{SslContext, SslContextBuilder, SslMethod, SslVerifyMode, SslVersion};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use zeroize::Zeroizing;

/// The trusted authorities, and the own certificate if the server requests one. Clones share it.
#[derive(Clone)]
pub struct Client {
    shared: Arc<Shared>,
}

struct Shared {
    context: SslContext,
    checks_name: bool,
}

impl PartialEq for Client {
    /// Returns whether both are clones of one client.
    fn eq(&self, other: &Client) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl Eq for Client {}

impl Client {
    fn new(context: SslContextBuilder, checks_name: bool) -> Client {
        Client { shared: Arc::new(Shared { context: context.build(), checks_name }) }
    }

    /// Trusts servers for which an authority in `ca-cert.pem` of `directory` vouches, under the
    /// name that the session requests. If `client-cert.pem` or `client-key.pem` exists, the client
    /// presents that certificate.
    ///
    /// # Errors
    /// A file is missing or invalid.
    pub fn with_certificates(directory: &Path) -> Result<Client, Error> {
        let mut context = context(SslMethod::tls_client())?;
        certificates::trust(&mut context, &within(directory, AUTHORITY))?;
        let (certificate, key) = (within(directory, "client-cert.pem"), within(directory, "client-key.pem"));
        if exists(&certificate) || exists(&key) {
            certificates::identify(&mut context, &certificate, &key)?;
        }
        context.set_verify(SslVerifyMode::PEER);
        Ok(Client::new(context, true))
    }

    /// Trusts servers for which an authority vouches that this system trusts.
    ///
    /// # Errors
    /// The system's authorities cannot be loaded.
    pub fn with_system_authorities() -> Result<Client, Error> {
        let mut context = context(SslMethod::tls_client())?;
        context.set_default_verify_paths()?;
        context.set_verify(SslVerifyMode::PEER);
        Ok(Client::new(context, true))
    }

    /// Uses a key of `file`, lines `identity:hexadecimal key`: the one of `identity`, or the only
    /// one. A server with the same key needs no certificate.
    ///
    /// # Errors
    /// The file is missing or invalid, or holds no such key.
    pub fn with_key(file: &Path, identity: Option<&str>) -> Result<Client, Error> {
        let mut keys = psk::read_keys(file)?;
        let place = match identity {
            Some(identity) => keys
                .iter()
                .position(|key| key.identity == identity)
                .ok_or_else(|| Error::content(file, format!("holds no key of {identity:?}")))?,
            None if keys.len() == 1 => 0,
            None => {
                let fault = format!("holds {} keys, and none was chosen", keys.len());
                return Err(Error::content(file, fault));
            }
        };
        let mut context = context(SslMethod::tls_client())?;
        psk::present(&mut context, keys.swap_remove(place))?;
        Ok(Client::presenting(context))
    }

    /// Uses a key of the caller with its identity; TLS 1.3 only. A server with the same key needs
    /// no certificate. A key of 48 bytes is for suites with SHA-384, and any other for those with
    /// SHA-256.
    ///
    /// # Errors
    /// The key cannot be used.
    pub fn with_secret(identity: String, secret: Zeroizing<Vec<u8>>) -> Result<Client, Error> {
        let mut context = context(SslMethod::tls_client())?;
        context.set_min_proto_version(Some(SslVersion::TLS1_3))?;
        psk::bound::present(&mut context, Key { identity, secret })?;
        Ok(Client::presenting(context))
    }

    fn presenting(mut context: SslContextBuilder) -> Client {
        // A server without the key must not be accepted because of some certificate.
        context.set_verify(SslVerifyMode::PEER);
        Client::new(context, false)
    }

    /// Starts a session with the server `host`: a name, or an IP address without brackets.
    ///
    /// # Errors
    /// `host` cannot be the name of a server.
    pub fn session(&self, host: &str) -> Result<Session, SessionError> {
        let Shared { context, checks_name } = &*self.shared;
        Session::new(context, Side::Client { host, checks_name: *checks_name })
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Client")
    }
}
