//! One connection's TLS: bytes in, bytes out.

use crate::error::reasons;
use crate::{Plain, SessionError, psk};
use openssl::error::ErrorStack;
use openssl::ssl::{self, ErrorCode, Ssl, SslContext, SslStream};
use openssl::x509::X509VerifyResult;
use std::io::{self, Read, Write};
use std::net::IpAddr;

/// Answers that may wait for a peer to take them, beside what the caller writes: more than any
/// handshake has.
const MAX_ANSWERS: usize = 256 << 10;

/// Which side we are.
pub(crate) enum Side<'a> {
    Server,
    Client { host: &'a str, checks_name: bool },
}

/// TLS on one connection.
pub struct Session {
    stream: SslStream<Pipe>,
    is_established: bool,
}

/// What the library takes for its transport.
#[derive(Default)]
struct Pipe {
    incoming: Vec<u8>,
    /// Bytes of `incoming` that were used.
    used: usize,
    outgoing: Vec<u8>,
    /// Bytes of `outgoing` that were sent.
    sent: usize,
    is_ended: bool,
}

impl Session {
    pub(crate) fn new(context: &SslContext, side: Side<'_>) -> Result<Session, SessionError> {
        let refused = |stack: ErrorStack| SessionError::Handshake(reasons(&stack));
        let mut ssl = Ssl::new(context).map_err(refused)?;
        match side {
            Side::Server => ssl.set_accept_state(),
            Side::Client { host, checks_name } => {
                ssl.set_connect_state();
                if checks_name {
                    call(&mut ssl, host).map_err(refused)?;
                }
            }
        }
        let stream = SslStream::new(ssl, Pipe::default()).map_err(refused)?;
        Ok(Session { stream, is_established: false })
    }

    /// Takes bytes that came. They are used by the next [`Session::handshake`] or
    /// [`Session::read`]; more should be fed only when those want more.
    pub fn feed(&mut self, bytes: &[u8]) {
        let pipe = self.stream.get_mut();
        if pipe.used == pipe.incoming.len() {
            pipe.incoming.clear();
            pipe.used = 0;
        }
        pipe.incoming.extend_from_slice(bytes);
    }

    /// No more will be fed: the stream has ended.
    pub fn feed_end(&mut self) {
        self.stream.get_mut().is_ended = true;
    }

    /// Goes on with the handshake; whether it is over. What is to be sent, also of one that failed,
    /// is [`Session::unsent`].
    ///
    /// # Errors
    /// When the peer cannot do what we want, or is not whom we trust.
    pub fn handshake(&mut self) -> Result<bool, SessionError> {
        if self.is_established {
            return Ok(true);
        }
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

    /// Whether the handshake is over.
    pub fn is_established(&self) -> bool {
        self.is_established
    }

    /// Takes what the peer says, once the handshake is over.
    ///
    /// # Errors
    /// When what was fed is not of this session; when it ended without a goodbye; when the peer
    /// makes us answer and takes no answers.
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

    /// Says all of `bytes`, once the handshake is over: adds to [`Session::unsent`]. How much may
    /// wait there is up to the caller.
    ///
    /// # Errors
    /// When the session has ended.
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<(), SessionError> {
        while !bytes.is_empty() {
            let len = self.stream.ssl_write(bytes).map_err(|error| SessionError::Broken(said(&error)))?;
            bytes = &bytes[len..];
        }
        Ok(())
    }

    /// Says goodbye: adds to [`Session::unsent`]. The peer may still be read from.
    pub fn close(&mut self) {
        // Fails only where there is no session to be closed.
        let _ = self.stream.shutdown();
    }

    /// What is to be sent.
    pub fn unsent(&self) -> &[u8] {
        let pipe = self.stream.get_ref();
        &pipe.outgoing[pipe.sent..]
    }

    /// The first `len` bytes of [`Session::unsent`] were sent.
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

    /// Whose key the peer has, where a server took it by its key and the handshake is over.
    pub fn peer(&self) -> Option<&str> {
        psk::identity(self.stream.ssl()).filter(|_| self.is_established)
    }

    /// What was agreed on, for people: version and cipher suite.
    pub fn agreed(&self) -> String {
        let ssl = self.stream.ssl();
        format!("{} {}", ssl.version_str(), ssl.current_cipher().map_or("", |cipher| cipher.name()))
    }
}

/// Whom we want to talk with: said to the server if it is a name, and checked against its
/// certificate.
fn call(ssl: &mut Ssl, host: &str) -> Result<(), ErrorStack> {
    match host.parse::<IpAddr>() {
        Ok(ip) => ssl.param_mut().set_ip(ip),
        Err(_) => {
            ssl.set_hostname(host)?;
            ssl.param_mut().set_host(host)
        }
    }
}

/// Whether that is what the library says of a stream that ended.
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
