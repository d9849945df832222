//! The side that accepts connections.

use crate::certificates::{self, AUTHORITY, within};
use crate::error::reasons;
use crate::psk::Key;
use crate::session::{Session, Side};
use crate::{Error, SessionError, psk};
use openssl::ssl::{Ssl, SslContext, SslContextBuilder, SslMethod, SslMode, SslOptions, SslSessionCacheMode};
use openssl::ssl::{SslVerifyMode, SslVersion};
use std::fmt;
use std::path::Path;
use std::sync::Arc;
use zeroize::Zeroizing;

/// The own certificate or keys, and the clients that are accepted. Clones share it.
#[derive(Clone)]
pub struct Server {
    context: SslContext,
    identities: Arc<[Box<str>]>,
    /// Keys that one identity has at most.
    keys: usize,
}

impl Server {
    /// Uses `server-cert.pem` and `server-key.pem` of `directory`. With `verifies_peer`, a client
    /// must present a certificate for which an authority in `ca-cert.pem` vouches.
    ///
    /// # Errors
    /// A file is missing or invalid.
    pub fn with_certificates(directory: &Path, verifies_peer: bool) -> Result<Server, Error> {
        let mut context = context(SslMethod::tls_server())?;
        let (certificate, key) = (within(directory, "server-cert.pem"), within(directory, "server-key.pem"));
        certificates::identify(&mut context, &certificate, &key)?;
        if verifies_peer {
            certificates::trust(&mut context, &within(directory, AUTHORITY))?;
            context.set_verify(SslVerifyMode::PEER | SslVerifyMode::FAIL_IF_NO_PEER_CERT);
        }
        Ok(Server { context: context.build(), identities: Arc::default(), keys: 0 })
    }

    /// Uses the keys in `file`: lines `identity:hexadecimal key`. A client must have one of them.
    ///
    /// # Errors
    /// The file is missing or invalid.
    pub fn with_keys(file: &Path) -> Result<Server, Error> {
        let mut context = context(SslMethod::tls_server())?;
        let keys = psk::read_keys(file)?;
        let identities = identities(&keys);
        psk::accept(&mut context, keys)?;
        Ok(Server { context: context.build(), identities, keys: 1 })
    }

    /// Uses keys of the caller, each with its identity; TLS 1.3 only. A client must have one of
    /// them. Several may have the same identity: a session tries these in their order. A key of 48
    /// bytes is for suites with SHA-384, and any other for those with SHA-256.
    ///
    /// # Errors
    /// A key cannot be used.
    pub fn with_secrets(
        secrets: impl IntoIterator<Item = (String, Zeroizing<Vec<u8>>)>,
    ) -> Result<Server, Error> {
        let mut context = context(SslMethod::tls_server())?;
        context.set_min_proto_version(Some(SslVersion::TLS1_3))?;
        let keys: Vec<_> = secrets.into_iter().map(|(identity, secret)| Key { identity, secret }).collect();
        let identities = identities(&keys);
        let keys = psk::bound::accept(&mut context, keys)?;
        Ok(Server { context: context.build(), identities, keys })
    }

    /// Returns the identities of clients that have keys; empty if clients use certificates.
    pub fn identities(&self) -> &[Box<str>] {
        &self.identities
    }

    /// Returns the host names of the certificate, such as `storage.example` and `*.example`. Empty
    /// if clients use keys.
    pub fn host_names(&self) -> Vec<String> {
        let names = self.context.certificate().and_then(|certificate| certificate.subject_alt_names());
        let names = names.into_iter().flatten();
        names.filter_map(|name| name.dnsname().map(str::to_owned)).collect()
    }

    /// Creates the library's state of a connection, for callers whose I/O the library does.
    ///
    /// # Errors
    /// Out of memory.
    pub fn ssl(&self) -> Result<Ssl, SessionError> {
        Ssl::new(&self.context).map_err(|stack| SessionError::Handshake(reasons(&stack)))
    }

    /// Starts a session with a client that has just connected.
    ///
    /// # Errors
    /// Out of memory.
    pub fn session(&self) -> Result<Session, SessionError> {
        Session::new(&self.context, Side::Server { keys: self.keys })
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Server")
    }
}

fn identities(keys: &[Key]) -> Arc<[Box<str>]> {
    keys.iter().map(|key| key.identity.as_str().into()).collect()
}

/// Returns the settings that client and server share.
pub(crate) fn context(method: SslMethod) -> Result<SslContextBuilder, Error> {
    let mut context = SslContextBuilder::new(method)?;
    context.set_min_proto_version(Some(SslVersion::TLS1_2))?;
    context.set_options(SslOptions::NO_RENEGOTIATION | SslOptions::NO_COMPRESSION | SslOptions::NO_TICKET);
    // An idle connection keeps no buffers.
    context.set_mode(SslMode::RELEASE_BUFFERS);
    context.set_session_cache_mode(SslSessionCacheMode::OFF);
    context.set_num_tickets(0)?;
    Ok(context)
}
