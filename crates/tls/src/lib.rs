//! TLS for connections whose I/O is elsewhere: the own identity and the trusted peers ([`Server`],
//! [`Client`]), and a [`Session`] that turns bytes into bytes.
//!
//! ```text
//!   socket ── feed ──► ┌─────────┐ ── read ──► what the peer says
//!                      │ Session │
//!   socket ◄─ unsent ─ └─────────┘ ◄─ write ── what we say
//! ```
//!
//! A session makes no system call and reads no clock, so it can run on a control thread or on a
//! core. Its memory is bounded visibly. Bytes that were fed are used up before the session wants
//! more. Bytes that were written stay until the caller reports them as sent.
//!
//! Secrets are certificates in a directory, named as by nbdkit and QEMU, or keys that both sides
//! share beforehand (PSK) in the format of GnuTLS's `psktool`, or of the caller. TLS 1.2 is the
//! oldest version; there is no renegotiation and no resumption.
//!
//! Without the feature `openssl` every configuration is refused, so no session exists and callers
//! need no second code path.
//!
//! Source of truth: RFC 8446 (TLS 1.3), RFC 5246 (TLS 1.2), RFC 4279 (keys of TLS 1.2).

#![deny(unsafe_code)]

#[cfg(not(feature = "openssl"))]
mod absent;
#[cfg(any(test, feature = "testing"))]
pub mod authority;
#[cfg(feature = "openssl")]
mod certificates;
#[cfg(feature = "openssl")]
mod client;
mod error;
mod plain;
#[cfg(feature = "openssl")]
mod psk;
#[cfg(feature = "openssl")]
mod server;
#[cfg(feature = "openssl")]
mod session;

#[cfg(not(feature = "openssl"))]
pub use absent::{Client, Server, Session};
#[cfg(feature = "openssl")]
pub use client::Client;
pub use error::{Error, SessionError};
pub use plain::{Plain, RECORD};
#[cfg(feature = "openssl")]
pub use server::Server;
#[cfg(feature = "openssl")]
pub use session::Session;
