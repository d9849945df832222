//! The same types without the feature `openssl`; none of them can be created.

use crate::{Error, Plain, SessionError};
use std::path::Path;
use zeroize::Zeroizing;

/// A type without values.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Nothing {}

/// A server that cannot be created.
#[derive(Clone, Debug)]
pub struct Server(Nothing);

impl Server {
    /// Refused.
    ///
    /// # Errors
    /// [`Error::Absent`].
    pub fn with_certificates(_directory: &Path, _verifies_peer: bool) -> Result<Server, Error> {
        Err(Error::Absent)
    }

    /// Refused.
    ///
    /// # Errors
    /// [`Error::Absent`].
    pub fn with_keys(_file: &Path) -> Result<Server, Error> {
        Err(Error::Absent)
    }

    /// Refused.
    ///
    /// # Errors
    /// [`Error::Absent`].
    pub fn with_secrets(
        _secrets: impl IntoIterator<Item = (String, Zeroizing<Vec<u8>>)>,
    ) -> Result<Server, Error> {
        Err(Error::Absent)
    }

    /// Cannot be called.
    pub fn identities(&self) -> &[Box<str>] {
        match self.0 {}
    }

    /// Cannot be called.
    ///
    /// # Errors
    /// None.
    pub fn session(&self) -> Result<Session, SessionError> {
        match self.0 {}
    }
}

/// A client that cannot be created.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Client(Nothing);

impl Client {
    /// Refused.
    ///
    /// # Errors
    /// [`Error::Absent`].
    pub fn with_certificates(_directory: &Path) -> Result<Client, Error> {
        Err(Error::Absent)
    }

    /// Refused.
    ///
    /// # Errors
    /// [`Error::Absent`].
    pub fn with_system_authorities() -> Result<Client, Error> {
        Err(Error::Absent)
    }

    /// Refused.
    ///
    /// # Errors
    /// [`Error::Absent`].
    pub fn with_key(_file: &Path, _identity: Option<&str>) -> Result<Client, Error> {
        Err(Error::Absent)
    }

    /// Refused.
    ///
    /// # Errors
    /// [`Error::Absent`].
    pub fn with_secret(_identity: String, _secret: Zeroizing<Vec<u8>>) -> Result<Client, Error> {
        Err(Error::Absent)
    }

    /// Cannot be called.
    ///
    /// # Errors
    /// None.
    pub fn session(&self, _host: &str) -> Result<Session, SessionError> {
        match self.0 {}
    }
}

/// A session that cannot be created; none of its methods can be called.
#[derive(Debug)]
pub struct Session(Nothing);

#[allow(missing_docs, clippy::missing_errors_doc, reason = "none of this can be called")]
impl Session {
    pub fn feed(&mut self, _bytes: &[u8]) {
        match self.0 {}
    }

    pub fn feed_end(&mut self) {
        match self.0 {}
    }

    pub fn handshake(&mut self) -> Result<bool, SessionError> {
        match self.0 {}
    }

    pub fn is_established(&self) -> bool {
        match self.0 {}
    }

    pub fn read(&mut self, _to: &mut [u8]) -> Result<Plain, SessionError> {
        match self.0 {}
    }

    pub fn is_readable(&mut self) -> bool {
        match self.0 {}
    }

    pub fn write(&mut self, _bytes: &[u8]) -> Result<(), SessionError> {
        match self.0 {}
    }

    pub fn close(&mut self) {
        match self.0 {}
    }

    pub fn unsent(&self) -> &[u8] {
        match self.0 {}
    }

    pub fn sent(&mut self, _len: usize) {
        match self.0 {}
    }

    pub fn peer(&self) -> Option<&str> {
        match self.0 {}
    }

    pub fn agreed(&self) -> String {
        match self.0 {}
    }
}
