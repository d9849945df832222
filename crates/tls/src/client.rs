//! The side that connects.

use crate::certificates::{self, AUTHORITY, exists, within};
use crate::server::context;
use crate::session::{Session, Side};
use crate::{Error, SessionError, psk};
use openssl::ssl::{SslContext, SslContextBuilder, SslMethod, SslVerifyMode};
use std::fmt;
use std::path::Path;
use std::sync::Arc;

/// Whom we trust, and who we are if they ask. Clones share it.
#[derive(Clone)]
pub struct Client {
    shared: Arc<Shared>,
}

struct Shared {
    context: SslContext,
    checks_name: bool,
}

impl PartialEq for Client {
    /// Whether both are clones of one.
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
    /// name that they are asked for. `client-cert.pem` and `client-key.pem`, if they are there, say
    /// who we are.
    ///
    /// # Errors
    /// When a file is missing or not what it should be.
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
    /// When the system's authorities cannot be had.
    pub fn with_system_authorities() -> Result<Client, Error> {
        let mut context = context(SslMethod::tls_client())?;
        context.set_default_verify_paths()?;
        context.set_verify(SslVerifyMode::PEER);
        Ok(Client::new(context, true))
    }

    /// Has a key of `file`, lines `identity:hexadecimal key`: the one of `identity`, or the only
    /// one. A server that has it, too, needs no certificate.
    ///
    /// # Errors
    /// When the file is missing or not what it should be, or there is no such key.
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
        // Whoever has no key must not get away with some certificate.
        context.set_verify(SslVerifyMode::PEER);
        Ok(Client::new(context, false))
    }

    /// A session with a server that is called `host`: a name, or an IP address without brackets.
    ///
    /// # Errors
    /// When `host` cannot be the name of a server.
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
