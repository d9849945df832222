//! One connection's TLS: bytes in, bytes out.

use crate::error::reasons;
use crate::{Plain, SessionError, psk};
use openssl::error::ErrorStack;
use openssl::ssl::{self, ErrorCode, Ssl, SslContext, SslStream};
use openssl::x509::X509VerifyResult;
use std::io::{self, Read, Write};
use std::net::IpAddr;

/// Most bytes of answers that may wait for a peer to take them, in addition to the caller's bytes.
/// More than any handshake needs.
const MAX_ANSWERS: usize = 256 << 10;

/// The own side of the session.
pub(crate) enum Side<'a> {
    Server { keys: usize },
    Client { host: &'a str, checks_name: bool },
}

/// TLS on one connection.
pub struct Session {
    stream: SslStream<Pipe>,
    is_established: bool,
    /// Until the server has answered a hello, if its client may have one of several keys.
    retry: Option<Retry>,
}

/// The means to try the next one of the keys that have the client's identity.
struct Retry {
    context: SslContext,
    /// All bytes that were fed.
    hello: Vec<u8>,
    tried: usize,
    /// Keys that one identity has at most.
    keys: usize,
}

/// The transport that the library reads and writes.
#[derive(Default)]
struct Pipe {
    incoming: Vec<u8>,
    /// Bytes of `incoming` that the library has used.
    used: usize,
    outgoing: Vec<u8>,
    /// Bytes of `outgoing` that are sent.
    sent: usize,
    is_ended: bool,
}

impl Session {
    pub(crate) fn new(context: &SslContext, side: Side<'_>) -> Result<Session, SessionError> {
        let refused = |stack: ErrorStack| SessionError::Handshake(reasons(&stack));
        let mut ssl = Ssl::new(context).map_err(refused)?;
        let mut retry = None;
        match side {
            Side::Server { keys } => {
                ssl.set_accept_state();
                if keys > 1 {
                    retry = Some(Retry { context: context.to_owned(), hello: Vec::new(), tried: 0, keys });
                }
            }
            Side::Client { host, checks_name } => {
                ssl.set_connect_state();
                if checks_name {
                    call(&mut ssl, host).map_err(refused)?;
                }
            }
        }
        let stream = SslStream::new(ssl, Pipe::default()).map_err(refused)?;
        Ok(Session { stream, is_established: false, retry })
    }

    /// Takes received bytes, which the next [`Session::handshake`] or [`Session::read`] uses.
    /// Callers feed more only when those return without a result.
    pub fn feed(&mut self, bytes: &[u8]) {
        if let Some(retry) = &mut self.retry {
            retry.hello.extend_from_slice(bytes);
        }
        let pipe = self.stream.get_mut();
        if pipe.used == pipe.incoming.len() {
            pipe.incoming.clear();
            pipe.used = 0;
        }
        pipe.incoming.extend_from_slice(bytes);
    }

    /// Marks the end of the stream: no more bytes will be fed.
    pub fn feed_end(&mut self) {
        self.stream.get_mut().is_ended = true;
    }

    /// Continues the handshake; returns whether it is over. [`Session::unsent`] holds the bytes to
    /// send, also those of a failed handshake.
    ///
    /// # Errors
    /// The peer lacks a required feature, or is not trusted.
    pub fn handshake(&mut self) -> Result<bool, SessionError> {
        if self.is_established {
            return Ok(true);
        }
        loop {
            let result = self.shake();
            if result.is_err() && self.try_next_key() {
                continue;
            }
            // An answer without error follows from a key that client and server have.
            if !self.unsent().is_empty() {
                self.retry = None;
            }
            return result;
        }
    }

    /// Begins again with the next key that has the client's identity, and the bytes of its hello:
    /// the client has got no answer. Returns whether there may be one.
    fn try_next_key(&mut self) -> bool {
        let Some(retry) = &mut self.retry else { return false };
        retry.tried += 1;
        if retry.tried >= retry.keys {
            return false;
        }
        let is_ended = self.stream.get_ref().is_ended;
        let pipe = Pipe { incoming: retry.hello.clone(), is_ended, ..Pipe::default() };
        let stream = Ssl::new(&retry.context).and_then(|mut ssl| {
            ssl.set_accept_state();
            psk::bound::skip(&mut ssl, retry.tried)?;
            SslStream::new(ssl, pipe)
        });
        stream.map(|stream| self.stream = stream).is_ok()
    }

    fn shake(&mut self) -> Result<bool, SessionError> {
        match self.stream.do_handshake() {
            Ok(()) => {
                self.is_established = true;
                Ok(true)
            }
            Err(error) if error.code() == ErrorCode::WANT_READ => Ok(false),
            Err(error) => {
                let verdict = self.stream.ssl().verify_result();
                Err(SessionError::Handshake(match self.stream.get_ref().is_ended {
                    true if error.ssl_error().is_none_or(is_end) => "the peer hung up".into(),
                    _ if verdict != X509VerifyResult::OK => {
                        format!("the peer's certificate is not trusted: {}", verdict.error_string())
                    }
                    _ => said(&error),
                }))
            }
        }
    }

    /// Returns whether the handshake is over.
    pub fn is_established(&self) -> bool {
        self.is_established
    }

    /// Reads decrypted bytes of the peer, once the handshake is over.
    ///
    /// # Errors
    /// The fed bytes do not belong to this session; it ended without a close notification; or the
    /// peer causes answers and does not receive them.
    pub fn read(&mut self, to: &mut [u8]) -> Result<Plain, SessionError> {
        if to.is_empty() {
            return Ok(Plain::Nothing);
        }
        let before = self.unsent().len();
        let result = self.stream.ssl_read(to);
        let after = self.unsent().len();
        if after > before && after > MAX_ANSWERS {
            return Err(SessionError::Flood(after));
        }
        match result {
            Ok(len) => Ok(Plain::Bytes(len)),
            Err(error) => match error.code() {
                ErrorCode::WANT_READ => Ok(Plain::Nothing),
                ErrorCode::ZERO_RETURN => Ok(Plain::End),
                _ if self.stream.get_ref().is_ended && error.ssl_error().is_none_or(is_end) => {
                    Err(SessionError::Truncated)
                }
                _ => Err(SessionError::Broken(said(&error))),
            },
        }
    }

    /// Returns whether [`Session::read`] would return anything but [`Plain::Nothing`] now, once the
    /// handshake is over.
    pub fn is_readable(&mut self) -> bool {
        !matches!(self.stream.ssl_peek(&mut [0]), Err(error) if error.code() == ErrorCode::WANT_READ)
    }

    /// Encrypts all of `bytes`, once the handshake is over, and adds them to [`Session::unsent`].
    /// The caller limits how much waits there.
    ///
    /// # Errors
    /// The session has ended.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<(), SessionError> {
        while !bytes.is_empty() {
            let len = self.stream.ssl_write(bytes).map_err(|error| SessionError::Broken(said(&error)))?;
            bytes = &bytes[len..];
        }
        Ok(())
    }

    /// Adds a close notification to [`Session::unsent`]. The peer may still be read from.
    pub fn close(&mut self) {
        // Fails only if there is no session to close.
        let _ = self.stream.shutdown();
    }

    /// Returns the bytes to send.
    pub fn unsent(&self) -> &[u8] {
        let pipe = self.stream.get_ref();
        &pipe.outgoing[pipe.sent..]
    }

    /// Reports the first `len` bytes of [`Session::unsent`] as sent.
    ///
    /// # Panics
    /// When there are fewer.
    pub fn sent(&mut self, len: usize) {
        let pipe = self.stream.get_mut();
        assert!(len <= pipe.outgoing.len() - pipe.sent, "{len} bytes of {}", pipe.outgoing.len() - pipe.sent);
        pipe.sent += len;
        if pipe.sent == pipe.outgoing.len() {
            pipe.outgoing.clear();
            pipe.sent = 0;
        }
    }

    /// Returns the identity of the peer's key, if a server accepted the peer by key and the
    /// handshake is over.
    pub fn peer(&self) -> Option<&str> {
        psk::identity(self.stream.ssl()).filter(|_| self.is_established)
    }

    /// Returns the agreed version and cipher suite as text for users.
    pub fn agreed(&self) -> String {
        let ssl = self.stream.ssl();
        format!("{} {}", ssl.version_str(), ssl.current_cipher().map_or("", |cipher| cipher.name()))
    }
}

/// Sets the expected server: announced to it if it is a name, and checked against its certificate.
fn call(ssl: &mut Ssl, host: &str) -> Result<(), ErrorStack> {
    match host.parse::<IpAddr>() {
        Ok(ip) => ssl.param_mut().set_ip(ip),
        Err(_) => {
            ssl.set_hostname(host)?;
            ssl.param_mut().set_host(host)
        }
    }
}

/// Returns whether the library reports the end of the stream.
fn is_end(stack: &ErrorStack) -> bool {
    stack.errors().iter().any(|error| error.reason().is_some_and(|reason| reason.contains("unexpected eof")))
}

fn said(error: &ssl::Error) -> String {
    match error.ssl_error() {
        Some(stack) => reasons(stack),
        None => "the session is over".into(),
    }
}

impl Read for Pipe {
    fn read(&mut self, to: &mut [u8]) -> io::Result<usize> {
        let rest = &self.incoming[self.used..];
        if rest.is_empty() && !self.is_ended {
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let len = rest.len().min(to.len());
        to[..len].copy_from_slice(&rest[..len]);
        self.used += len;
        Ok(len)
    }
}

impl Write for Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.outgoing.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
