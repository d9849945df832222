//! Direct volumes of Kata Containers: a guest of Kata mounts the volume, and this machine does not.
//!
//! ```text
//!   stage ────► export vhost-user-blk of this machine's daemon ──socket──► VMM of the guest
//!   publish ──► KATA_DIR/BASE64URL(target path)/mountInfo.json ──────────► Kata's runtime
//! ```
//!
//! The runtime finds the file by the source of a container's mount, and gives the socket to its VMM
//! as it does for volumes of SPDK. It adds a file with the identity of the sandbox, so the whole
//! directory goes when the volume is unpublished.
//!
//! Source: the design document "Direct block device assignment" of kata-containers, and its crate
//! kata-types for the names of fields and the alphabet of the directory.

use super::backend::{DISK_TIMEOUT, wait_for};
use super::local::LocalDaemon;
use super::mounts::gone;
use crate::capability::Mount;
use crate::fault::{Fault, Result};
use crate::ids::{DRIVER_LABEL, VolumeId};
use api::{Export, ExportState, Labels, NewExport, Volume};
use atomic_file::SystemFolder;
use base64::Engine;
use base64::engine::general_purpose::URL_SAFE;
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs::{self, DirBuilder};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use tonic::Code;

/// The file that Kata reads.
const FILE: &str = "mountInfo.json";
/// Kata's name for volumes behind a socket of vhost-user-blk.
const VOLUME_TYPE: &str = "spdkvol";
/// The longest name of a directory, in bytes.
const MAX_NAME: usize = 255;
/// Options of the export, which Kata gets as metadata.
const QUEUES: &str = "queues";
const QUEUE_SIZE: &str = "queue-size";
/// Most virtqueues of an export, and the size of each.
const MAX_QUEUES: u32 = 64;
const RING: &str = "256";

/// The daemon and the Kata of this machine.
pub struct Kata {
    daemon: LocalDaemon,
    /// Kata's directory of direct volumes.
    directory: PathBuf,
    /// Name of the driver, a label of its exports.
    driver: String,
}

/// The content of Kata's file.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct MountInfo {
    volume_type: &'static str,
    device: String,
    #[serde(rename = "fstype")]
    fs_type: String,
    metadata: BTreeMap<&'static str, String>,
    options: Vec<String>,
}

impl MountInfo {
    /// The file of a volume that an export serves; nothing if that is not such an export.
    pub fn new(export: &Export, mount: &Mount, read_only: bool) -> Option<MountInfo> {
        let option = |key: &str| export.options.get(key).cloned();
        let metadata = [("num_queues", option(QUEUES)?), ("queue_size", option(QUEUE_SIZE)?)];
        let mut options = mount.flags.clone();
        options.extend(read_only.then(|| "ro".to_owned()));
        Some(MountInfo {
            volume_type: VOLUME_TYPE,
            device: option("socket")?,
            fs_type: mount.fs_type.clone(),
            metadata: metadata.into(),
            options,
        })
    }
}

/// Name of the export of a volume to a guest of its own machine.
fn name(id: &VolumeId) -> String {
    format!("csi-kata-{}", id.uuid)
}

impl Kata {
    /// The daemon at a socket, which may be started later, and Kata's directory of direct volumes,
    /// for the driver of this name.
    ///
    /// # Errors
    /// When there can be no client.
    pub fn new(socket: &Path, directory: &Path, driver: &str) -> Result<Kata> {
        let daemon = LocalDaemon::new(socket)?;
        Ok(Kata { daemon, directory: directory.to_owned(), driver: driver.to_owned() })
    }

    /// The volume.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` when it is not on this machine.
    pub(super) fn volume(&self, id: &VolumeId) -> Result<Volume> {
        self.daemon.volume(id)
    }

    /// The export of a volume.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` when another program has made it.
    pub(super) fn export(&self, id: &VolumeId) -> Result<Option<Export>> {
        let found = self.daemon.export(&name(id))?;
        match found {
            Some(export) if export.labels.get(DRIVER_LABEL) != Some(&self.driver) => {
                let detail = format!("export {}: driver {} has not made it", export.name, self.driver);
                Err(Fault::precondition(detail))
            }
            found => Ok(found),
        }
    }

    /// Serves a volume to a guest, and waits until the daemon does so. `queues` is the number of
    /// virtqueues that the class asks for.
    ///
    /// # Errors
    /// `DEADLINE_EXCEEDED` when it does not in time.
    pub(super) fn serve(&self, id: &VolumeId, queues: Option<&str>) -> Result<()> {
        if self.export(id)?.is_none() {
            let queues = queues.and_then(|queues| queues.parse().ok()).unwrap_or(1).clamp(1, MAX_QUEUES);
            let options = [(QUEUES.to_owned(), queues.to_string()), (QUEUE_SIZE.to_owned(), RING.to_owned())];
            self.daemon.make(&NewExport {
                name: name(id),
                kind: "vhost-user-blk".into(),
                volumes: vec![id.uuid.clone()],
                options: options.into(),
                labels: Labels::from([(DRIVER_LABEL.to_owned(), self.driver.clone())]),
                ..NewExport::default()
            })?;
        }
        let active = || Ok(self.export(id)?.filter(|export| export.state == ExportState::Active));
        wait_for(DISK_TIMEOUT, active)?.map(drop).ok_or_else(|| {
            Fault::new(Code::DeadlineExceeded, format!("export {}: it is not served yet", name(id)))
        })
    }

    /// Ends the export of a volume, if there is one.
    ///
    /// # Errors
    /// As [`Kata::export`], and when the daemon refuses.
    pub(super) fn end(&self, id: &VolumeId) -> Result<()> {
        match self.export(id)? {
            Some(export) => self.daemon.remove(&export.name),
            None => Ok(()),
        }
    }

    /// Ends the export of a volume, if there is one, and no guest is connected to it.
    ///
    /// # Errors
    /// As [`Kata::end`], and `FAILED_PRECONDITION` while a guest is connected.
    pub(super) fn end_unused(&self, id: &VolumeId) -> Result<()> {
        match self.export(id)? {
            Some(Export { name, traffic: Some(traffic), .. }) if traffic.clients > 0 => {
                Err(Fault::precondition(format!("export {name}: a guest is connected to it")))
            }
            Some(export) => self.daemon.remove(&export.name),
            None => Ok(()),
        }
    }

    /// The directory for a target path.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` when the path is too long for a name.
    pub(super) fn place(&self, target: &Path) -> Result<PathBuf> {
        let text = target.as_os_str().as_encoded_bytes();
        let name = URL_SAFE.encode(text);
        match name.len() <= MAX_NAME {
            true => Ok(self.directory.join(name)),
            false => Err(Fault::invalid(format!(
                "target_path {}: {} bytes, and Kata takes {} at most",
                target.display(),
                text.len(),
                MAX_NAME / 4 * 3
            ))),
        }
    }

    /// Writes Kata's file of the volume behind a target path, and makes the path.
    ///
    /// # Errors
    /// When the system refuses.
    pub(super) fn publish(&self, target: &Path, info: &MountInfo) -> Result<()> {
        let place = self.place(target)?;
        fs::create_dir_all(target).map_err(|error| Fault::of_file(target, error))?;
        let made = DirBuilder::new().recursive(true).mode(0o700).create(&place);
        made.map_err(|error| Fault::of_file(&place, error))?;
        let bytes = serde_json::to_vec(info).expect("plain data");
        let written = atomic_file::replace(&SystemFolder::new(&place, 0o600), FILE, &bytes, None);
        written.map_err(|error| Fault::of_file(&place.join(FILE), error))
    }

    /// Whether Kata has the file of a volume at a target path.
    ///
    /// # Errors
    /// When the system cannot be asked.
    pub(super) fn is_published(&self, target: &Path) -> Result<bool> {
        let file = self.place(target)?.join(FILE);
        file.try_exists().map_err(|error| Fault::of_file(&file, error))
    }

    /// Removes Kata's directory of a target path, if there is one.
    ///
    /// # Errors
    /// When the system refuses.
    pub(super) fn unpublish(&self, target: &Path) -> Result<()> {
        let place = self.place(target)?;
        gone(&place, fs::remove_dir_all(&place))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use std::os::unix::fs::PermissionsExt;

    fn kata(folder: &Path) -> Kata {
        Kata::new(&folder.join("d.sock"), &folder.join("direct-volumes"), "freestone.csi").unwrap()
    }

    fn export(options: Value) -> Export {
        serde_json::from_value(json!({
            "name": "e", "kind": "vhost-user-blk", "volumes": ["v"], "options": options, "read_only": false,
            "cores": [], "state": "active", "error": null, "description": null, "traffic": null,
        }))
        .unwrap()
    }

    fn info(flags: &[&str], read_only: bool) -> MountInfo {
        let export = export(json!({ "socket": "/run/freestone/e.sock", "queues": "2", "queue-size": "256" }));
        let flags = flags.iter().map(|flag| (*flag).to_owned()).collect();
        MountInfo::new(&export, &Mount { fs_type: "ext4".into(), flags }, read_only).unwrap()
    }

    /// The directory of a path as kubelet has them: byte 80, `~`, needs the last two characters of
    /// the alphabet.
    #[test]
    fn a_directory_has_the_name_that_kata_derives_from_the_path() {
        let folder = tempfile::tempdir().unwrap();
        let name = |path: &str| {
            let place = kata(folder.path()).place(Path::new(path)).unwrap();
            place.file_name().unwrap().to_str().unwrap().to_owned()
        };
        assert_eq!(
            name("/kubelet/kata-test-vol-001/volume001"),
            "L2t1YmVsZXQva2F0YS10ZXN0LXZvbC0wMDEvdm9sdW1lMDAx"
        );
        assert_eq!(name("/a/~?~"), "L2Evfj9-");
        assert_eq!(name("/a/b"), "L2EvYg==");
    }

    #[test]
    fn a_path_that_is_too_long_for_kata_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = |bytes: usize| PathBuf::from(format!("/{}", "p".repeat(bytes - 1)));
        assert!(kata(folder.path()).place(&path(189)).is_ok());
        let fault = kata(folder.path()).publish(&path(190), &info(&[], false)).unwrap_err();
        assert_eq!(fault.code, Code::InvalidArgument);
        assert!(fault.message.contains("190 bytes") && fault.message.contains("189 at most"), "{fault}");
        assert!(!folder.path().join("direct-volumes").exists());
    }

    #[test]
    fn the_file_has_the_fields_of_kata() {
        let folder = tempfile::tempdir().unwrap();
        let (kata, target) = (kata(folder.path()), folder.path().join("target"));
        let place = kata.place(&target).unwrap();
        let read = || -> Value { serde_json::from_slice(&fs::read(place.join(FILE)).unwrap()).unwrap() };
        kata.publish(&target, &info(&[], false)).unwrap();
        let mut wanted = json!({
            "volume-type": "spdkvol",
            "device": "/run/freestone/e.sock",
            "fstype": "ext4",
            "metadata": { "num_queues": "2", "queue_size": "256" },
            "options": [],
        });
        assert_eq!(read(), wanted);
        kata.publish(&target, &info(&["noatime"], true)).unwrap();
        wanted["options"] = json!(["noatime", "ro"]);
        assert_eq!(read(), wanted);
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!((mode(&place), mode(&place.join(FILE))), (0o700, 0o600));
        assert!(target.is_dir());
    }

    #[test]
    fn an_export_without_a_socket_is_no_direct_volume() {
        let mount = Mount::default();
        assert_eq!(MountInfo::new(&export(json!({ "queues": "1", "queue-size": "4" })), &mount, false), None);
    }

    #[test]
    fn unpublishing_removes_what_kata_has_added_too() {
        let folder = tempfile::tempdir().unwrap();
        let (kata, target) = (kata(folder.path()), folder.path().join("target"));
        kata.unpublish(&target).unwrap();
        kata.publish(&target, &info(&[], false)).unwrap();
        fs::write(kata.place(&target).unwrap().join("sandbox-1"), "").unwrap();
        assert!(kata.is_published(&target).unwrap());
        for _ in 0..2 {
            kata.unpublish(&target).unwrap();
            assert!(!kata.is_published(&target).unwrap());
        }
        assert_eq!(fs::read_dir(folder.path().join("direct-volumes")).unwrap().count(), 0);
    }
}
