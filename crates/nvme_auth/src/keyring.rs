//! Keys of TLS in a keyring of the kernel, where `nvme gen-tls-key --insert` and
//! `nvme check-tls-key --insert` put them: derived already, and described by their identities.
//!
//! Identities are those of [`crate::tls_key`]. Keys that in-band authentication generated
//! (`NVMe0G01` and the like) are for one connection and do not count.

use crate::tls_key::{TlsSecret, hash_of, named_by};
use nvme::fabrics::Nqn;
use secrets::keyring::{Error, KeyFault};
use std::cmp::Reverse;
use std::fmt;

pub use secrets::keyring::Keyring;

/// The keys of a keyring that match a request.
#[derive(Default)]
pub struct KeyringSecrets {
    /// Those of the later version first, then those for SHA-384.
    pub secrets: Vec<TlsSecret>,
    /// Those that cannot be used.
    pub unusable: Vec<UnusableKey>,
}

/// A key that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("keyring {keyring}: the key {identity}: {fault}")]
pub struct UnusableKey {
    keyring: Keyring,
    identity: String,
    fault: SecretFault,
}

#[derive(Debug)]
enum SecretFault {
    Length { found: usize, wanted: usize },
    Key(KeyFault),
}

impl fmt::Display for SecretFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SecretFault::Length { found, wanted } => write!(f, "{found} bytes: want {wanted}"),
            SecretFault::Key(fault) => fault.fmt(f),
        }
    }
}

/// Why a host has no key of TLS in a keyring.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum NoTlsSecret {
    /// The keyring cannot be used.
    #[error(transparent)]
    Keyring(#[from] Error),
    /// It has no key for these names.
    #[error(
        "keyring {0}: no TLS key of the host {1} for the subsystem {2} (NVMe0R01, NVMe1R01, NVMe0R02 or NVMe1R02)"
    )]
    Missing(Keyring, Nqn, Nqn),
    /// The only keys for these names cannot be used.
    #[error(transparent)]
    Unusable(UnusableKey),
}

/// The keys of those hosts and subsystems in a keyring for which `wants` returns true.
///
/// # Errors
/// When the keyring cannot be used.
pub fn find(keyring: &Keyring, wants: impl Fn(&Nqn, &Nqn) -> bool) -> Result<KeyringSecrets, Error> {
    let wanted =
        |identity: &str| named_by(identity).is_some_and(|(host, subsystem)| wants(&host, &subsystem));
    let mut found = KeyringSecrets::default();
    for key in keyring.keys(wanted)? {
        let (wanted, identity) = (hash_of(&key.description).bytes(), key.description);
        let fault = match key.content {
            Ok(key) if key.len() == wanted => {
                found.secrets.push(TlsSecret { identity, key });
                continue;
            }
            Ok(key) => SecretFault::Length { found: key.len(), wanted },
            Err(fault) => SecretFault::Key(fault),
        };
        found.unusable.push(UnusableKey { keyring: keyring.clone(), identity, fault });
    }
    found.secrets.sort_by_key(|secret| rank(&secret.identity));
    Ok(found)
}

/// The keys of one host for one subsystem: at least one.
///
/// # Errors
/// When there is none that can be used.
pub fn secrets_of(keyring: &Keyring, host: &Nqn, subsystem: &Nqn) -> Result<Vec<TlsSecret>, NoTlsSecret> {
    let found = find(keyring, |of_host, of_subsystem| of_host == host && of_subsystem == subsystem)?;
    match (found.secrets.is_empty(), found.unusable.into_iter().next()) {
        (false, _) => Ok(found.secrets),
        (true, Some(unusable)) => Err(NoTlsSecret::Unusable(unusable)),
        (true, None) => Err(NoTlsSecret::Missing(keyring.clone(), host.clone(), subsystem.clone())),
    }
}

/// Whether a keyring has a key of a host for a subsystem, usable or not.
///
/// # Errors
/// When the keyring cannot be used.
pub fn has(keyring: &Keyring, host: &Nqn, subsystem: &Nqn) -> Result<bool, Error> {
    let names = |identity: String| named_by(&identity).is_some_and(|(a, b)| a == *host && b == *subsystem);
    Ok(keyring.descriptions()?.into_iter().any(names))
}

/// The digits of the version and of the hash: `NVMe1R02`.
fn rank(identity: &str) -> Reverse<(Option<char>, Option<char>)> {
    Reverse((identity.chars().nth(4), identity.chars().nth(7)))
}
