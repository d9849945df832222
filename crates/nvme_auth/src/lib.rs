//! NVMe in-band authentication with DH-HMAC-CHAP: keys, calculations and the protocol of both
//! sides; and the keys of TLS.
//!
//! A host and a controller prove to each other that they know a secret, without sending it: one
//! side sends random bytes, the other a keyed hash of them. A Diffie-Hellman group also prevents an
//! eavesdropper from testing guesses of the secret offline.
//!
//! | module | purpose |
//! |---|---|
//! | [`key`] | a secret in its text form (`DHHC-1:…`) |
//! | [`keys`] | the secrets of many hosts, in a file |
//! | [`tls_key`] | a key for TLS, as text and in a file |
//! | [`tls_keys`] | the keys for TLS of many hosts |
//! | [`keyring`] | keys for TLS in a keyring of the kernel |
//! | [`host_secrets`] | the secrets of one host as text |
//! | [`group`], `primes` | Diffie-Hellman |
//! | `mac` | the hashes, plain and with a key |
//! | [`response`] | the keyed hashes that prove knowledge of a secret |
//! | [`controller`], [`host`] | the two sides, as state machines without side effects |
//! | [`access`] | the hosts that may connect to a subsystem, and their secrets |
//!
//! Secrets are wiped when dropped and compared in constant time, and their `Debug` hides them.
//! `crypto-bigint` computes powers in constant time, without `unsafe`. It also needs no system
//! library, which libblkio.so would load into every program. [`nvme::fabrics::auth`] has the layout
//! of messages.
//!
//! Source: Base Specification 2.0, 8.13; RFC 7919 (the groups).

#![forbid(unsafe_code)]

pub mod access;
pub mod controller;
pub mod group;
pub mod host;
pub mod host_secrets;
pub mod key;
pub mod keyring;
pub mod keys;
mod mac;
mod primes;
pub mod response;
pub mod tls_key;
pub mod tls_keys;

pub use controller::{Choices, Controller};
pub use host::Host;
pub use host_secrets::{HostSecrets, SecretText, SecretsError};
pub use key::{Key, KeyError};
pub use keyring::Keyring;
pub use keys::{HostKeys, Keys, KeysError};
pub use nvme::fabrics::auth::{Failure, Group, Hash};
pub use tls_key::{TlsKey, TlsSecret};
pub use tls_keys::TlsKeys;

use std::sync::atomic::{AtomicU32, Ordering};

/// Fills `bytes` with random bytes for secrets. Fails only where the process may not call
/// `getrandom(2)`; then no authentication succeeds.
pub(crate) fn random(bytes: &mut [u8]) -> Result<(), Failure> {
    getrandom::fill(bytes).map_err(|error| {
        tracing::error!(%error, "authentication failed: no random bytes from the operating system");
        Failure::Failed
    })
}

/// The next sequence number. Never 0, which means "none" (Base 8.13.5.3).
pub(crate) fn next_sequence() -> Result<u32, Failure> {
    static LAST: AtomicU32 = AtomicU32::new(0);
    if LAST.load(Ordering::Relaxed) == 0 {
        let mut start = [0; 4];
        random(&mut start)?;
        // Of two threads the second keeps the number that the first has set.
        let _ = LAST.compare_exchange(0, u32::from_le_bytes(start), Ordering::Relaxed, Ordering::Relaxed);
    }
    let next = |last: u32| Some(if last == u32::MAX { 1 } else { last + 1 });
    let last = LAST.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).expect("there is always a next");
    Ok(next(last).expect("there is always a next"))
}
