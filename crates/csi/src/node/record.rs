//! Records of attached volumes: what was asked for, so that it can be undone.

use crate::capability::Mount;
use crate::fault::{Fault, Result};
use crate::ids::{VolumeId, fingerprint};
use atomic_file::SystemFolder;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A volume that is attached, or was to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Record {
    /// Identity of the volume, for people.
    pub volume: String,
    /// NQN of its subsystem.
    pub nqn: String,
    /// UUID of its namespace.
    pub uuid: String,
    /// Staging path.
    pub staging: PathBuf,
    /// Its file system; nothing for a block volume.
    pub mount: Option<Mount>,
    /// Target paths, and whether each is read-only.
    pub targets: BTreeMap<String, bool>,
    /// Of a direct volume of Kata.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub direct: Option<Direct>,
}

/// The state of a volume that a guest of Kata mounts.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Direct {
    /// Size that its file system has at least, in bytes; 0 before the file system was prepared.
    pub file_system_bytes: u64,
}

/// The records of a machine, a file each.
pub(super) struct Records {
    folder: PathBuf,
}

impl Records {
    /// Those in a directory, which is made.
    pub fn new(folder: &Path) -> Result<Records> {
        std::fs::create_dir_all(folder)
            .map_err(|error| Fault::internal(format!("--state-dir {}: {error}", folder.display())))?;
        Ok(Records { folder: folder.to_owned() })
    }

    /// The record of a volume.
    pub fn find(&self, id: &VolumeId) -> Result<Option<Record>> {
        let path = self.folder.join(name(id));
        match std::fs::read(&path) {
            Ok(bytes) => serde_json::from_slice(&bytes)
                .map(Some)
                .map_err(|error| Fault::internal(format!("{}: {error}", path.display()))),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(Fault::of_file(&path, error)),
        }
    }

    /// Replaces the record of a volume.
    pub fn save(&self, id: &VolumeId, record: &Record) -> Result<()> {
        let bytes = serde_json::to_vec(record).expect("plain data");
        let folder = SystemFolder::new(&self.folder, 0o600);
        atomic_file::replace(&folder, &name(id), &bytes, None).map_err(|error| self.fault(id, error))
    }

    /// Removes the record of a volume.
    pub fn remove(&self, id: &VolumeId) -> Result<()> {
        let folder = SystemFolder::new(&self.folder, 0o600);
        atomic_file::remove(&folder, &name(id)).map_err(|error| self.fault(id, error))
    }

    fn fault(&self, id: &VolumeId, error: std::io::Error) -> Fault {
        Fault::of_file(&self.folder.join(name(id)), error)
    }
}

/// The file of a volume, whatever characters its backend's name has.
fn name(id: &VolumeId) -> String {
    format!("{}.json", &fingerprint(&id.to_string())[..32])
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the release wrote it: the file is never changed.
    #[test]
    fn the_records_of_all_releases_are_read() {
        let bytes = include_bytes!("../../../../tests/formats/fixtures/0.1.0/csi-node-record.json");
        let record: Record = serde_json::from_slice(bytes).unwrap();
        assert_eq!(record.volume, "rack1/10a1617c-396d-4f5f-babc-1703bbf9a544");
        assert_eq!(record.mount.as_ref().map(|mount| &*mount.fs_type), Some("ext4"));
        assert_eq!(record.targets, [("/var/lib/kubelet/target".into(), true)].into());
        assert_eq!(record.direct, None);
        assert_eq!(serde_json::to_vec(&record).unwrap(), bytes);
    }
}
