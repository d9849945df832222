//! The secrets of the hosts that a target knows, in a file:
//!
//! ```text
//! # host                        its secret          the target's secret (optional)
//! nqn.2014-08.org.example:one   DHHC-1:00:…:
//! nqn.2014-08.org.example:two   DHHC-1:01:…:        DHHC-1:01:…:
//! ```

use crate::{Key, KeyError};
use nvme::fabrics::{Nqn, NqnError};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Limit of bytes of the file, enough for about three thousand hosts.
const MAX_FILE_BYTES: u64 = 1 << 20;

/// The secrets between the target and one host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostKeys {
    /// Proves the identity of the host.
    pub host: Key,
    /// Proves the identity of the controller, to a host that requires that.
    pub controller: Option<Key>,
}

impl HostKeys {
    /// Parses the secret of a host, and optionally that of the controller.
    ///
    /// # Errors
    /// If a secret is invalid, or both are equal.
    pub fn parse(host: &str, controller: Option<&str>) -> Result<HostKeys, Fault> {
        let key = |whose, text| Key::parse(text).map_err(|error| Fault::Key(whose, error));
        let controller = controller.map(|text| key("controller", text)).transpose()?;
        let keys = HostKeys { host: key("host", host)?, controller };
        if keys.controller.as_ref() == Some(&keys.host) { Err(Fault::Same) } else { Ok(keys) }
    }
}

/// The secrets of all hosts.
#[derive(Clone, Debug, Default)]
pub struct Keys(BTreeMap<Nqn, Arc<HostKeys>>);

/// Why a file is not a list of secrets, one line for each host. `F` is the error of a line.
#[derive(Debug, thiserror::Error)]
pub enum KeysError<F = Fault> {
    /// The file cannot be read, or other users have access to it.
    #[error(transparent)]
    File(#[from] secrets::Error),
    /// A line is invalid.
    #[error("{path}, line {line}: {fault}", path = .path.display())]
    Line {
        /// The file.
        path: PathBuf,
        /// The number of the line, from 1 on.
        line: usize,
        /// The reason.
        fault: F,
    },
    /// The file contains no host.
    #[error("{path}: the file contains no host", path = .0.display())]
    Empty(PathBuf),
}

/// Why a line is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// The line does not have two or three words.
    #[error("want the host's NQN, its secret, and optionally the controller's secret, with spaces between")]
    Words,
    /// The first word is not a name. The message does not repeat it: it may be a secret.
    #[error("the host's name: {0}")]
    Name(NqnError),
    /// An earlier line has the same host.
    #[error("an earlier line has the same host")]
    Twice,
    /// A secret is invalid.
    #[error("the {0}'s secret: {1}")]
    Key(&'static str, KeyError),
    /// Both secrets are equal, so one side could impersonate the other.
    #[error("host and controller have the same secret")]
    Same,
}

/// Calls `insert` for each line of a file, except for empty lines and those that begin with `#`.
pub(crate) fn read_lines<F>(
    path: &Path,
    mut insert: impl FnMut(&str) -> Result<(), F>,
) -> Result<(), KeysError<F>> {
    let text = secrets::read_text(path, MAX_FILE_BYTES)?;
    let mut is_empty = true;
    for (number, line) in (1..).zip(text.lines().map(str::trim)) {
        if !line.is_empty() && !line.starts_with('#') {
            let wrong = |fault| KeysError::Line { path: path.to_owned(), line: number, fault };
            insert(line).map_err(wrong)?;
            is_empty = false;
        }
    }
    if is_empty { Err(KeysError::Empty(path.to_owned())) } else { Ok(()) }
}

impl Keys {
    /// Reads a file of secrets; the module shows its format.
    ///
    /// # Errors
    /// If the file cannot be read, contains no host, or a line is invalid.
    pub fn read(path: &Path) -> Result<Keys, KeysError> {
        let mut keys = Keys::default();
        read_lines(path, |line| keys.insert(line))?;
        Ok(keys)
    }

    fn insert(&mut self, line: &str) -> Result<(), Fault> {
        let mut words = line.split_whitespace();
        let (Some(host), Some(secret), controller, None) =
            (words.next(), words.next(), words.next(), words.next())
        else {
            return Err(Fault::Words);
        };
        let host = Nqn::new(host).map_err(Fault::Name)?;
        let keys = HostKeys::parse(secret, controller)?;
        if self.0.contains_key(&host) {
            return Err(Fault::Twice);
        }
        self.0.insert(host, Arc::new(keys));
        Ok(())
    }

    /// The secrets of these hosts.
    pub fn of_hosts(hosts: impl IntoIterator<Item = (Nqn, HostKeys)>) -> Keys {
        Keys(hosts.into_iter().map(|(host, keys)| (host, Arc::new(keys))).collect())
    }

    /// These secrets and others, which replace those of the same hosts.
    pub fn with(&self, others: impl IntoIterator<Item = (Nqn, HostKeys)>) -> Keys {
        let Keys(mut all) = self.clone();
        all.extend(others.into_iter().map(|(host, keys)| (host, Arc::new(keys))));
        Keys(all)
    }

    /// The secrets between the target and a host, if the file names it.
    pub fn of(&self, host: &Nqn) -> Option<&Arc<HostKeys>> {
        self.0.get(host)
    }

    /// The hosts.
    pub fn hosts(&self) -> impl Iterator<Item = &Nqn> {
        self.0.keys()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
    const OTHER: &str = "DHHC-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

    fn read(text: &str) -> Result<Keys, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        secrets::write(&path, text).unwrap();
        let strip = |error: KeysError| error.to_string().replace(&*path.display().to_string(), "keys");
        Keys::read(&path).map_err(strip)
    }

    #[test]
    fn every_host_has_a_line_with_one_secret_or_two() {
        let keys = read(&format!("# hosts\n\n nqn.a {ONE}\nnqn.b\t{OTHER}  {ONE} \n")).unwrap();
        let of = |name| keys.of(&Nqn::new(name).unwrap());
        assert_eq!(of("nqn.a").unwrap().controller, None);
        let (one, other) = (Key::parse(ONE).unwrap(), Key::parse(OTHER).unwrap());
        assert_eq!(**of("nqn.b").unwrap(), HostKeys { host: other, controller: Some(one) });
        assert!(of("nqn.c").is_none());
        assert_eq!(keys.hosts().map(Nqn::as_str).collect::<Vec<_>>(), ["nqn.a", "nqn.b"]);
        assert!(!format!("{keys:?}").contains("AAEC"));
    }

    #[test]
    fn a_wrong_line_is_named() {
        let cases = [
            ("nqn.a".into(), "keys, line 1: want the host's NQN"),
            (format!("\nnqn.a {ONE} {OTHER} x"), "keys, line 2: want the host's NQN"),
            (format!("{ONE} nqn.a"), "keys, line 1: the host's name: an NVMe name starts with"),
            (format!("nqn.a {ONE}\nnqn.a {OTHER}"), "keys, line 2: an earlier line has the same host"),
            ("nqn.a DHHC-1:00:AAAA:".into(), "keys, line 1: the host's secret: the secret has 0 bytes"),
            (format!("nqn.a {ONE} x"), "keys, line 1: the controller's secret: a secret looks like"),
            (format!("nqn.a {ONE} {ONE}"), "keys, line 1: host and controller have the same secret"),
            ("# no host\n".into(), "keys: the file contains no host"),
        ];
        for (text, why) in cases {
            let error = read(&text).unwrap_err();
            assert!(error.starts_with(why) && !error.contains("AAEC"), "{error}");
        }
        assert!(read(&"#\n".repeat(600_000)).unwrap_err().contains("longer than 1048576 bytes"));
        assert!(
            Keys::read(Path::new("/nowhere")).unwrap_err().to_string().contains("/nowhere: No such file")
        );
    }
}
