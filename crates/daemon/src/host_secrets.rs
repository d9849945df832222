//! The secrets of hosts that were added to exports by the API: a file of JSON for each export.
//!
//! The state names a secret by the generation in which it was added
//! ([`ExportRecord::host_secrets`]), so a secret that the state does not name means nothing.
//! Secrets are written before a state that names them, and deleted after a state that does not.

use crate::api_error::ApiError;
use crate::state::ExportRecord;
use atomic_file::{Folder, SystemFolder};
use exports_nvme_tcp::HostSecrets;
use serde::{Deserialize, Serialize};
use std::fmt::Display;
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
    secrets: Numbered,
}

/// Secrets, each with its number.
type Numbered = Vec<(u64, HostSecrets)>;

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
        if record.host_secrets.is_empty() {
            return Ok(Vec::new());
        }
        let stored = self.stored(record)?.map_err(|fault| self.failed(record, &fault))?;
        let find = |(nqn, number): (&String, &u64)| {
            let found = stored.iter().find(|(of, secrets)| of == number && secrets.nqn == *nqn);
            let fault = || format!("the secrets of host {nqn} are missing: add the host again, or remove it");
            found.map(|(_, secrets)| secrets.clone()).ok_or_else(|| self.failed(record, &fault()))
        };
        record.host_secrets.iter().map(find).collect()
    }

    /// As [`SecretFiles::read`], without those that are missing.
    ///
    /// # Errors
    /// When the system refuses to read the file.
    pub fn found(&self, record: &ExportRecord) -> Result<Vec<HostSecrets>, ApiError> {
        Ok(self.named(record)?.into_iter().map(|(_, secrets)| secrets).collect())
    }

    /// Adds secrets to those that a record names, durably.
    ///
    /// # Errors
    /// When the file cannot be read or written; it is as before then.
    pub fn add(&self, record: &ExportRecord, new: Numbered) -> Result<(), ApiError> {
        let mut secrets = self.named(record)?;
        secrets.extend(new);
        self.write(record, secrets)
    }

    /// Deletes the secrets that a record does not name.
    ///
    /// # Errors
    /// When the file cannot be read or written.
    pub fn prune(&self, record: &ExportRecord) -> Result<(), ApiError> {
        match self.stored(record)? {
            Ok(secrets) if secrets.iter().all(|stored| is_named(record, stored)) => Ok(()),
            _ => self.write(record, self.named(record)?),
        }
    }

    /// The stored secrets that a record names. An invalid file has none.
    fn named(&self, record: &ExportRecord) -> Result<Numbered, ApiError> {
        let mut secrets = self.stored(record)?.unwrap_or_default();
        secrets.retain(|stored| is_named(record, stored));
        Ok(secrets)
    }

    /// The content of a file, or why it is invalid.
    fn stored(&self, record: &ExportRecord) -> Result<Result<Numbered, String>, ApiError> {
        let bytes = self.folder.read(&file_of(record), MAX_BYTES);
        let bytes = bytes.map_err(|error| self.failed(record, &error))?.map(Zeroizing::new);
        Ok(bytes.map_or(Ok(Vec::new()), |bytes| parse(&bytes)))
    }

    fn write(&self, record: &ExportRecord, secrets: Numbered) -> Result<(), ApiError> {
        let name = file_of(record);
        let replace = || {
            DirBuilder::new().recursive(true).mode(0o700).create(&self.directory)?;
            if secrets.is_empty() {
                return atomic_file::remove(&self.folder, &name);
            }
            let bytes = Zeroizing::new(serde_json::to_vec(&Stored { version: VERSION, secrets })?);
            atomic_file::replace(&self.folder, &name, &bytes, None)
        };
        replace().map_err(|error: io::Error| self.failed(record, &error))
    }

    fn failed(&self, record: &ExportRecord, fault: &impl Display) -> ApiError {
        ApiError::failed(format!("{}: {fault}", self.directory.join(file_of(record)).display()))
    }
}

/// Parses the content of a file. The message repeats no part of it.
fn parse(bytes: &[u8]) -> Result<Numbered, String> {
    let stored: Stored = serde_json::from_slice(bytes).map_err(|_| "not a file of secrets".to_owned())?;
    match stored.version {
        VERSION => Ok(stored.secrets),
        version => Err(format!("version {version}: only {VERSION} is known")),
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
        assert!(
            missing.ends_with("the secrets of host nqn.a are missing: add the host again, or remove it"),
            "{missing}"
        );
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
        assert_eq!(files.read(&record(&[])).unwrap(), [], "no secret of it is needed");
        // Adding the host again replaces the file.
        files.add(&named, vec![(3, secrets("nqn.a"))]).unwrap();
        assert_eq!(files.read(&named).unwrap(), [secrets("nqn.a")]);
        fs::write(&path, "{").unwrap();
        files.prune(&record(&[])).unwrap();
        assert!(!path.exists());
    }
}
