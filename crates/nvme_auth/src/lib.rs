//! NVMe in-band authentication by DH-HMAC-CHAP: keys, calculations, and who says what when, for both sides; and the keys
//! of TLS.
//!
//! A host and a controller prove to each other that they know a secret, without saying it: the one sends random bytes,
//! the other a keyed hash of them. With a Diffie-Hellman group beside it, who listens cannot even try secrets at leisure.
//!
//! | module | what it does |
//! |---|---|
//! | [`key`] | a secret as people hand it around (`DHHC-1:…`) |
//! | [`keys`] | the secrets of many hosts, in a file |
//! | [`tls_key`] | likewise keys for TLS |
//! | [`group`], `primes` | Diffie-Hellman |
//! | [`response`] | what is sent as a proof |
//! | [`controller`], [`host`] | the two sides, as state machines without side effects |
//!
//! Secrets are wiped when they are dropped, compared in constant time, and not printed: their `Debug` says nothing.
//! Exponents are taken by `crypto-bigint`, in constant time and without `unsafe` or a library of the system's, which
//! libblkio.so would bring into every program. The layout of messages is in [`nvme::fabrics::auth`].
//!
//! Source: Base Specification 2.0, 8.13; RFC 7919 (the groups).

#![forbid(unsafe_code)]

pub mod controller;
pub mod group;
pub mod host;
pub mod key;
pub mod keys;
mod primes;
pub mod response;
pub mod tls_key;

pub use controller::{Choices, Controller};
pub use host::Host;
pub use key::{Key, KeyError};
pub use keys::{HostKeys, Keys, KeysError};
pub use nvme::fabrics::auth::{Failure, Group, Hash};
pub use tls_key::{TlsKey, TlsKeys};

use std::sync::atomic::{AtomicU32, Ordering};

/// Fills `bytes` with what nobody can guess. The system has always some, except where it is forbidden to ask for it:
/// then nobody is authenticated.
pub(crate) fn random(bytes: &mut [u8]) -> Result<(), Failure> {
    getrandom::fill(bytes).map_err(|error| {
        tracing::error!(%error, "the system gives no random bytes: nobody can authenticate");
        Failure::Failed
    })
}

/// The next sequence number: not 0, which says that there is none (Base 8.13.5.3).
pub(crate) fn next_sequence() -> Result<u32, Failure> {
    static LAST: AtomicU32 = AtomicU32::new(0);
    if LAST.load(Ordering::Relaxed) == 0 {
        let mut start = [0; 4];
        random(&mut start)?;
        // Whoever comes second keeps what the first has set.
        let _ = LAST.compare_exchange(0, u32::from_le_bytes(start), Ordering::Relaxed, Ordering::Relaxed);
    }
    let next = |last: u32| Some(if last == u32::MAX { 1 } else { last + 1 });
    let last = LAST.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).expect("there is always a next");
    Ok(next(last).expect("there is always a next"))
}
