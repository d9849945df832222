//! The secrets of hosts that were added to exports by the API: a file of JSON for each export.
//!
//! The state names a secret by the generation in which it was added
//! ([`ExportRecord::host_secrets`]), so a secret that the state does not name means nothing.
//! Secrets are written before a state that names them, and deleted after a state that does not.

use crate::api_error::ApiError;
use crate::state::ExportRecord;
use atomic_file::{Folder, SystemFolder};
use exports::nvme_tcp::HostSecrets;
use serde::{Deserialize, Serialize};
use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use zeroize::Zeroizing;

/// The format that is written and read.
const VERSION: u32 = 1;
/// Longest file that is accepted, in bytes: as many hosts as an export may have, twice.
const MAX_BYTES: u64 = 4 << 20;

/// The folder of the files.
pub struct SecretFiles {
    directory: PathBuf,
    folder: SystemFolder,
}

/// The content of a file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    version: u32,
    /// With the generation of the state in which each was added.
    secrets: Vec<(u64, HostSecrets)>,
}

impl SecretFiles {
    /// The files in a state directory.
    pub fn new(state_dir: &Path) -> SecretFiles {
        let directory = state_dir.join("host-secrets");
        SecretFiles { folder: SystemFolder::new(&directory, 0o600), directory }
    }

    /// The secrets that a record names.
    ///
    /// # Errors
    /// When the file cannot be read, or a secret is missing.
    pub fn read(&self, record: &ExportRecord) -> Result<Vec<HostSecrets>, ApiError> {
        let stored = self.stored(record)?;
        let find = |(nqn, number): (&String, &u64)| {
            let found = stored.iter().find(|(of, secrets)| of == number && secrets.nqn == *nqn);
            found.map(|(_, secrets)| secrets.clone()).ok_or_else(|| {
                let path = self.directory.join(file_of(record));
                let detail =
                    format!("{}: the secrets of host {nqn} are missing: add the host again", path.display());
                ApiError::failed(detail)
            })
        };
        record.host_secrets.iter().map(find).collect()
    }

    /// Adds secrets to those that a record names, durably.
    ///
    /// # Errors
    /// When the file cannot be written; it is as before then.
    pub fn add(&self, record: &ExportRecord, new: Vec<(u64, HostSecrets)>) -> Result<(), ApiError> {
        // A file that cannot be read has nothing that could be kept.
        let mut secrets = self.stored(record).unwrap_or_default();
        secrets.retain(|stored| is_named(record, stored));
        secrets.extend(new);
        self.write(record, secrets)
    }

    /// Deletes the secrets that a record does not name.
    ///
    /// # Errors
    /// When the file cannot be read or written.
    pub fn prune(&self, record: &ExportRecord) -> Result<(), ApiError> {
        let mut secrets = self.stored(record)?;
        let before = secrets.len();
        secrets.retain(|stored| is_named(record, stored));
        if secrets.len() == before { Ok(()) } else { self.write(record, secrets) }
    }

    fn stored(&self, record: &ExportRecord) -> Result<Vec<(u64, HostSecrets)>, ApiError> {
        let name = file_of(record);
        let failed = |error: io::Error| self.failed(&name, &error);
        let Some(bytes) = self.folder.read(&name, MAX_BYTES).map_err(failed)? else { return Ok(Vec::new()) };
        let bytes = Zeroizing::new(bytes);
        // The message of the parser could repeat a part of the file.
        let wrong = |_| failed(io::Error::new(io::ErrorKind::InvalidData, "not a file of secrets"));
        let stored: Stored = serde_json::from_slice(&bytes).map_err(wrong)?;
        match stored.version {
            VERSION => Ok(stored.secrets),
            version => Err(failed(io::Error::other(format!("version {version}: only {VERSION} is known")))),
        }
    }

    fn write(&self, record: &ExportRecord, secrets: Vec<(u64, HostSecrets)>) -> Result<(), ApiError> {
        let name = file_of(record);
        let replace = || {
            DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
            if secrets.is_empty() {
                return atomic_file::remove(&self.folder, &name);
            }
            let bytes = Zeroizing::new(serde_json::to_vec(&Stored { version: VERSION, secrets })?);
            atomic_file::replace(&self.folder, &name, &bytes, None)
        };
        replace().map_err(|error| self.failed(&file_of(record), &error))
    }

    fn failed(&self, name: &str, error: &io::Error) -> ApiError {
        ApiError::failed(format!("{}: {error}", self.directory.join(name).display()))
    }
}

fn file_of(record: &ExportRecord) -> String {
    format!("{}.json", record.name)
}

fn is_named(record: &ExportRecord, (number, secrets): &(u64, HostSecrets)) -> bool {
    record.host_secrets.get(&secrets.nqn) == Some(number)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    const SECRET: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";

    fn record(named: &[(&str, u64)]) -> ExportRecord {
        let host_secrets = named.iter().map(|(nqn, number)| ((*nqn).to_owned(), *number)).collect();
        ExportRecord { name: "e".into(), host_secrets, ..ExportRecord::default() }
    }

    fn secrets(nqn: &str) -> HostSecrets {
        HostSecrets {
            nqn: nqn.into(),
            dhchap: Some(SECRET.to_owned().into()),
            dhchap_ctrl: None,
            tls_psk: None,
        }
    }

    #[test]
    fn only_secrets_that_the_state_names_are_read_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let files = SecretFiles::new(folder.path());
        let path = folder.path().join("host-secrets/e.json");
        assert_eq!(files.read(&record(&[])).unwrap(), []);
        files.add(&record(&[]), vec![(3, secrets("nqn.a"))]).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::metadata(path.parent().unwrap()).unwrap().permissions().mode() & 0o777, 0o700);
        assert_eq!(files.read(&record(&[])).unwrap(), [], "the state does not name it");
        let named = record(&[("nqn.a", 3)]);
        assert_eq!(files.read(&named).unwrap(), [secrets("nqn.a")]);
        files.add(&named, vec![(4, secrets("nqn.b"))]).unwrap();
        // Removed and added again, a host does not get its old secret.
        let missing = files.read(&record(&[("nqn.a", 5)])).unwrap_err().detail;
        assert!(missing.ends_with("the secrets of host nqn.a are missing: add the host again"), "{missing}");
        files.prune(&record(&[("nqn.b", 4)])).unwrap();
        assert!(files.read(&named).is_err() && !fs::read_to_string(&path).unwrap().contains("nqn.a"));
        files.prune(&record(&[])).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn an_invalid_file_is_refused_by_name_and_not_repeated() {
        let folder = tempfile::tempdir().unwrap();
        let files = SecretFiles::new(folder.path());
        let named = record(&[("nqn.a", 3)]);
        files.add(&named, vec![(3, secrets("nqn.a"))]).unwrap();
        let path = folder.path().join("host-secrets/e.json");
        let good = fs::read_to_string(&path).unwrap();
        for (bad, fault) in [
            (good.replace("\"version\":1", "\"version\":2"), "version 2: only 1 is known"),
            (good.replace("dhchap", SECRET), "not a file of secrets"),
            (String::new(), "not a file of secrets"),
        ] {
            fs::write(&path, bad).unwrap();
            let error = files.read(&named).unwrap_err().detail;
            assert!(error.contains("host-secrets/e.json: ") && error.ends_with(fault), "{error}");
            assert!(!error.contains("AAEC"), "{error}");
        }
        // Adding the host again replaces the file.
        files.add(&named, vec![(3, secrets("nqn.a"))]).unwrap();
        assert_eq!(files.read(&named).unwrap(), [secrets("nqn.a")]);
    }
}
