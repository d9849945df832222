//! The side that is connected to.

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

/// Who we are to those who connect, and whom we let in. Clones share it.
#[derive(Clone)]
pub struct Server {
    context: SslContext,
    identities: Arc<[Box<str>]>,
}

impl Server {
    /// With `server-cert.pem` and `server-key.pem` of `directory`. With `verifies_peer` a client
    /// must have a certificate for which an authority in `ca-cert.pem` vouches.
    ///
    /// # Errors
    /// When a file is missing or not what it should be.
    pub fn with_certificates(directory: &Path, verifies_peer: bool) -> Result<Server, Error> {
        let mut context = context(SslMethod::tls_server())?;
        let (certificate, key) = (within(directory, "server-cert.pem"), within(directory, "server-key.pem"));
        certificates::identify(&mut context, &certificate, &key)?;
        if verifies_peer {
            certificates::trust(&mut context, &within(directory, AUTHORITY))?;
            context.set_verify(SslVerifyMode::PEER | SslVerifyMode::FAIL_IF_NO_PEER_CERT);
        }
        Ok(Server { context: context.build(), identities: Arc::default() })
    }

    /// With the keys in `file`: lines `identity:hexadecimal key`. A client must have one of them.
    ///
    /// # Errors
    /// When the file is missing or not what it should be.
    pub fn with_keys(file: &Path) -> Result<Server, Error> {
        let context = context(SslMethod::tls_server())?;
        Server::accepting(context, psk::read_keys(file)?)
    }

    /// With keys that others have made, by the identities that go with them; TLS 1.3 only. A client
    /// must have one of them.
    ///
    /// # Errors
    /// When a key cannot be used.
    pub fn with_secrets(
        secrets: impl IntoIterator<Item = (String, Zeroizing<Vec<u8>>)>,
    ) -> Result<Server, Error> {
        let mut context = context(SslMethod::tls_server())?;
        context.set_min_proto_version(Some(SslVersion::TLS1_3))?;
        let keys = secrets.into_iter().map(|(identity, secret)| Key { identity, secret }).collect();
        Server::accepting(context, keys)
    }

    fn accepting(mut context: SslContextBuilder, keys: Vec<Key>) -> Result<Server, Error> {
        let identities = keys.iter().map(|key| key.identity.as_str().into()).collect();
        psk::accept(&mut context, keys)?;
        Ok(Server { context: context.build(), identities })
    }

    /// The identities of clients that have keys; none where clients come by certificates.
    pub fn identities(&self) -> &[Box<str>] {
        &self.identities
    }

    /// The host names of the certificate, such as `storage.example` and `*.example`. None where
    /// clients come by keys.
    pub fn host_names(&self) -> Vec<String> {
        let names = self.context.certificate().and_then(|certificate| certificate.subject_alt_names());
        let names = names.into_iter().flatten();
        names.filter_map(|name| name.dnsname().map(str::to_owned)).collect()
    }

    /// The library's own state for a connection, for callers whose I/O the library does.
    ///
    /// # Errors
    /// Without memory.
    pub fn ssl(&self) -> Result<Ssl, SessionError> {
        Ssl::new(&self.context).map_err(|stack| SessionError::Handshake(reasons(&stack)))
    }

    /// A session with someone who has just connected.
    ///
    /// # Errors
    /// Without memory.
    pub fn session(&self) -> Result<Session, SessionError> {
        Session::new(&self.context, Side::Server)
    }
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Server")
    }
}

/// What both sides have in common.
pub(crate) fn context(method: SslMethod) -> Result<SslContextBuilder, Error> {
    let mut context = SslContextBuilder::new(method)?;
    context.set_min_proto_version(Some(SslVersion::TLS1_2))?;
    context.set_options(SslOptions::NO_RENEGOTIATION | SslOptions::NO_COMPRESSION | SslOptions::NO_TICKET);
    // A connection that says nothing keeps no buffers.
    context.set_mode(SslMode::RELEASE_BUFFERS);
    context.set_session_cache_mode(SslSessionCacheMode::OFF);
    context.set_num_tickets(0)?;
    Ok(context)
}
