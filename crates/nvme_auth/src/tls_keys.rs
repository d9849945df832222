//! The keys of TLS of all hosts of a target: in a file of lines `HOSTNQN KEY`, and in a keyring.

use crate::keyring::{self, Keyring};
use crate::keys::{KeysError, read_lines};
use crate::tls_key::{TlsKey, TlsKeyError, TlsSecret};
use nvme::fabrics::{Nqn, NqnError};
use std::collections::BTreeMap;
use std::path::Path;

/// The keys of all hosts.
#[derive(Clone, Debug, Default)]
pub struct TlsKeys {
    of_hosts: BTreeMap<Nqn, TlsKey>,
    /// Keys in there count, too. They are looked up for each connection.
    keyring: Option<Keyring>,
}

/// Why a line is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TlsFault {
    /// The line does not have two words.
    #[error("want the host's NQN and its key, with a space between")]
    Words,
    /// The first word is not a name. The message does not repeat it: it may be a key.
    #[error("the host's name: {0}")]
    Name(NqnError),
    /// An earlier line has the same host.
    #[error("an earlier line has the same host")]
    Twice,
    /// The second word is not a supported key.
    #[error(transparent)]
    Key(TlsKeyError),
}

impl TlsKeys {
    /// Reads a file of lines `HOSTNQN KEY`; empty lines and those that begin with `#` are ignored.
    ///
    /// # Errors
    /// If the file cannot be read, contains no host, or a line is invalid.
    pub fn read(path: &Path) -> Result<TlsKeys, KeysError<TlsFault>> {
        let mut keys = TlsKeys::default();
        read_lines(path, |line| keys.insert(line))?;
        Ok(keys)
    }

    fn insert(&mut self, line: &str) -> Result<(), TlsFault> {
        let mut words = line.split_whitespace();
        let (Some(host), Some(key), None) = (words.next(), words.next(), words.next()) else {
            return Err(TlsFault::Words);
        };
        let host = Nqn::new(host).map_err(TlsFault::Name)?;
        let key = TlsKey::parse(key).map_err(TlsFault::Key)?;
        match self.of_hosts.insert(host, key) {
            None => Ok(()),
            Some(_) => Err(TlsFault::Twice),
        }
    }

    /// The keys of these hosts.
    pub fn of_hosts(hosts: impl IntoIterator<Item = (Nqn, TlsKey)>) -> TlsKeys {
        TlsKeys { of_hosts: hosts.into_iter().collect(), keyring: None }
    }

    /// The keys in a keyring.
    ///
    /// # Errors
    /// When the keyring cannot be used.
    pub fn of_keyring(keyring: Keyring) -> Result<TlsKeys, secrets::keyring::Error> {
        keyring.check()?;
        Ok(TlsKeys { of_hosts: BTreeMap::new(), keyring: Some(keyring) })
    }

    /// The keyring whose keys count, too.
    pub fn keyring(&self) -> Option<&Keyring> {
        self.keyring.as_ref()
    }

    /// These keys and others, which replace those of the same hosts.
    pub fn with(&self, others: impl IntoIterator<Item = (Nqn, TlsKey)>) -> TlsKeys {
        let mut all = self.clone();
        all.of_hosts.extend(others);
        all
    }

    /// Whether a host may have a key: one in a keyring can be added at any time.
    pub fn may_have(&self, host: &Nqn) -> bool {
        self.of_hosts.contains_key(host) || self.keyring.is_some()
    }

    /// Whether a host has a key for a subsystem now; true if the keyring cannot be used.
    pub fn have(&self, host: &Nqn, subsystem: &Nqn) -> bool {
        let in_keyring = |keyring| keyring::has(keyring, host, subsystem).unwrap_or(true);
        self.of_hosts.contains_key(host) || self.keyring.as_ref().is_some_and(in_keyring)
    }

    /// The hosts that have a key, except for those in a keyring.
    pub fn hosts(&self) -> impl Iterator<Item = &Nqn> {
        self.of_hosts.keys()
    }

    /// The keys for TLS, for all hosts and each of these subsystems, except for those in a keyring.
    pub fn secrets(&self, subsystems: &[&Nqn]) -> Vec<TlsSecret> {
        let of_host = |(host, key): (&Nqn, &TlsKey)| {
            subsystems.iter().flat_map(|subsystem| key.secrets(host, subsystem)).collect::<Vec<_>>()
        };
        self.of_hosts.iter().flat_map(of_host).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOUND: &str = "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

    fn nqn(text: &str) -> Nqn {
        Nqn::new(text).unwrap()
    }

    #[test]
    fn a_file_has_a_line_for_each_host() {
        let read = |text: &str| {
            let file = tempfile::NamedTempFile::new().unwrap();
            std::fs::write(file.path(), text).unwrap();
            TlsKeys::read(file.path()).map_err(|error| error.to_string())
        };
        let keys = read(&format!("# ours\n\n nqn.a  {BOUND}\nnqn.b {BOUND}\n")).unwrap();
        let (a, b, subsystem) = (nqn("nqn.a"), nqn("nqn.b"), nqn("nqn.sub"));
        assert!(keys.have(&a, &subsystem) && keys.have(&b, &subsystem) && !keys.have(&subsystem, &a));
        assert!(keys.may_have(&a) && !keys.may_have(&subsystem));
        assert_eq!(keys.secrets(&[&subsystem, &Nqn::discovery()]).len(), 16);
        assert!(!format!("{keys:?}").contains("AAEC"));
        for (text, fault) in [
            (String::new(), ": the file contains no host"),
            ("nqn.a".into(), ", line 1: want the host's NQN and its key"),
            (format!("nqn.a {BOUND} x"), ", line 1: want the host's NQN"),
            (format!("{BOUND} nqn.a"), ", line 1: the host's name"),
            (format!("\nnqn.a {BOUND}\nnqn.a {BOUND}"), ", line 3: an earlier line has the same host"),
            ("nqn.a NVMeTLSkey-1:".into(), ", line 1: a key looks like"),
        ] {
            let error = read(&text).unwrap_err();
            assert!(error.contains(fault) && !error.contains("AAEC"), "{error}");
        }
    }
}
