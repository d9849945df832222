//! TLS for connections whose I/O is elsewhere: who we are and whom we trust ([`Server`],
//! [`Client`]), and a [`Session`] that turns bytes into bytes.
//!
//! ```text
//!   socket ── feed ──► ┌─────────┐ ── read ──► what the peer says
//!                      │ Session │
//!   socket ◄─ unsent ─ └─────────┘ ◄─ write ── what we say
//! ```
//!
//! A session makes no system call and knows no clock, so it lives as well on a control thread as on
//! a core, and every bound on its memory is visible: what was fed is used up before more is wanted,
//! and what was written stays until the caller says that it was sent. [`Wire`] is a session
//! together with the buffers that a socket wants.
//!
//! Secrets are certificates in a directory in the habit of nbdkit and QEMU, or keys that both sides
//! have beforehand (PSK) in the format of GnuTLS's `psktool`. TLS 1.2 is the least that is spoken;
//! there is no renegotiation and no resumption.
//!
//! Without the feature `openssl` every configuration is refused, so that there are no sessions:
//! whoever uses this needs no second way through its own code.
//!
//! Source of truth: RFC 8446 (TLS 1.3), RFC 5246 (TLS 1.2), RFC 4279 (keys of TLS 1.2).

#![forbid(unsafe_code)]

#[cfg(not(feature = "openssl"))]
mod absent;
#[cfg(any(test, feature = "testing"))]
pub mod authority;
mod came;
#[cfg(feature = "openssl")]
mod certificates;
#[cfg(feature = "openssl")]
mod client;
mod error;
#[cfg(feature = "openssl")]
mod psk;
#[cfg(feature = "openssl")]
mod server;
#[cfg(feature = "openssl")]
mod session;
#[cfg(feature = "openssl")]
mod wire;

#[cfg(not(feature = "openssl"))]
pub use absent::{Client, Server, Session, Wire};
pub use came::{Came, Plain, RECORD};
#[cfg(feature = "openssl")]
pub use client::Client;
pub use error::{Error, SessionError};
#[cfg(feature = "openssl")]
pub use server::Server;
#[cfg(feature = "openssl")]
pub use session::Session;
#[cfg(feature = "openssl")]
pub use wire::Wire;
