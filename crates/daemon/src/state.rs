//! The state of the daemon: devices, arrays, exports and settings, in one file of readable JSON.
//!
//! A change is in the file before it is acknowledged. The file is replaced as a whole
//! ([`durable`]), and its predecessor is kept as `state.json.previous`. Metadata of disks is not
//! repeated here: the members of an array and the volumes of a pool are found by their own
//! metadata. The file says where to look.

use api::{DEFAULT_PORTAL_KIND, DataPlane, Labels, MinQos, NewPortal, Qos};
use atomic_file::{Folder, Meaning, RecoverError, Recovered, SystemFolder};
pub use moves::MoveRecord;
use serde::{Deserialize, Serialize};
use spec::field;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

/// The format of a state with portals of several kinds, with portals of NVMe/TCP, and without
/// portals. Earlier versions refuse a format that they do not know rather than taking it for
/// damaged.
const VERSION: u32 = 4;
const VERSION_WITH_NVME_PORTALS: u32 = 3;
const VERSION_WITHOUT_PORTALS: u32 = 2;
/// Longer files are not ours.
const MAX_BYTES: u64 = 64 << 20;
/// The longest state that a change may lead to: ten thousand objects, and half of what is read.
const MAX_WRITTEN: u64 = 32 << 20;
const NAME: &str = "state.json";
const PREVIOUS: &str = "state.json.previous";
const DAMAGED: &str = "state.json.damaged";

/// The option that names the server of an export's rings.
pub const DATA_PLANE: &str = "data-plane";

/// The state of the daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct State {
    /// Counts changes.
    pub generation: u64,
    /// Devices to be opened.
    pub devices: Vec<DeviceRecord>,
    /// Arrays to be run.
    pub arrays: Vec<ArrayRecord>,
    /// Settings of volumes, by UUID; volumes without settings are not listed.
    pub volumes: BTreeMap<String, VolumeRecord>,
    /// Limits of groups of volumes, by name.
    pub groups: BTreeMap<String, Qos>,
    /// Portals to be opened.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub portals: Vec<PortalRecord>,
    /// Exports to be served.
    pub exports: Vec<ExportRecord>,
    /// Volumes that move to other arrays or devices, by UUID.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub moves: BTreeMap<String, MoveRecord>,
    /// Volumes that are incomplete copies of other objects, by UUID.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub copies: BTreeMap<String, CopyRecord>,
    /// Devices whose image gets the data of its backing file.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub streams: BTreeSet<String>,
    /// Devices whose image is committed to its backing file.
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub commits: BTreeSet<String>,
}

impl State {
    /// Removes the settings of a volume, and its copy.
    pub fn forget_volume(&mut self, uuid: &str) {
        self.volumes.remove(uuid);
        self.copies.remove(uuid);
    }

    /// Removes an array or device, and what failed moves have left on it.
    pub fn forget_base(&mut self, name: &str) {
        self.devices.retain(|device| device.name != name);
        self.arrays.retain(|array| array.name != name);
        self.moves.retain(|_, record| !record.has_failed() || record.to != name);
    }

    /// Removes the copy of a complete volume. After a pivot, exports of the source serve it.
    pub fn complete_copy(&mut self, uuid: &str) {
        let Some(CopyRecord { source, pivot: Some(pivot), .. }) = self.copies.remove(uuid) else { return };
        self.volumes.entry(uuid.into()).or_default().device_name = Some(pivot.device_name);
        let targets = self.exports.iter_mut().flat_map(|export| &mut export.targets);
        targets.filter(|target| **target == source).for_each(|target| *target = Target::Volume(uuid.into()));
    }
}

/// A volume that is an incomplete copy of another object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CopyRecord {
    /// The name of the volume.
    pub name: String,
    /// The array or device that it is on.
    pub backing: String,
    /// Its size in bytes.
    pub size_bytes: u64,
    /// The object that is copied.
    pub source: Target,
    /// Size of the source in bytes.
    pub source_bytes: u64,
    /// The reason why the copy has failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub error: Option<String>,
    /// Present if the volume then takes the place of the source in its exports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pivot: Option<PivotRecord>,
}

/// A pivot: a volume takes the place of its source.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PivotRecord {
    /// Name of the source's device, from which exports derive the identity of their disks.
    pub device_name: String,
    /// Whether the volume may have taken the place: its name in the pool decides.
    pub is_due: bool,
}

/// A device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DeviceRecord {
    /// Its name.
    pub name: String,
    /// How it is opened.
    pub spec: String,
    /// After a commit: the name of the device that was the image, from which exports derive the
    /// identity of their disks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_name: Option<String>,
}

/// An array.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ArrayRecord {
    /// Its name.
    pub name: String,
    /// Its identity.
    pub uuid: String,
    /// Devices that were its members or spares: where to look for them.
    pub devices: Vec<String>,
}

/// Settings of a volume.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VolumeRecord {
    /// Its limits.
    pub qos: Qos,
    /// The group whose limits it shares.
    pub group: Option<String>,
    /// Its guaranteed minimum of them.
    #[serde(default, alias = "floor")]
    pub min_qos: MinQos,
    /// Name of the `provisioner` token that may change it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Its labels.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// Name of the device whose place it has taken: clients know the disk by it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device_name: Option<String>,
}

/// A portal.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PortalRecord {
    /// Its name.
    pub name: String,
    /// The kind of its exports.
    #[serde(default = "api::default_portal_kind", skip_serializing_if = "is_nvme_tcp")]
    pub kind: String,
    /// Its ports, as the API takes them.
    pub listen: Vec<String>,
    /// Most connections of each.
    pub clients: u32,
    /// Options of its kind.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, String>,
}

impl PortalRecord {
    /// Its description, as the API takes it.
    pub fn description(&self) -> NewPortal {
        let PortalRecord { name, kind, listen, clients, options } = self.clone();
        NewPortal { name, kind: Some(kind), listen, clients: Some(clients), options }
    }
}

fn is_nvme_tcp(kind: &str) -> bool {
    kind == DEFAULT_PORTAL_KIND
}

/// An export.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExportRecord {
    /// Its name.
    pub name: String,
    /// Its kind.
    pub kind: String,
    /// The volumes, arrays or devices that it serves.
    #[serde(alias = "of")]
    pub targets: Vec<Target>,
    /// Options of its kind.
    pub options: BTreeMap<String, String>,
    /// Whether it refuses writes.
    pub read_only: bool,
    /// Processors that serve it; none: all.
    pub cores: Vec<usize>,
    /// Name of the `provisioner` token that may delete it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
    /// Its labels.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
    /// Hosts that have secrets in [`crate::host_secrets`], each with the generation in which its
    /// secrets were added.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub host_secrets: BTreeMap<String, u64>,
}

impl ExportRecord {
    /// Whether the kernel must serve its rings.
    pub fn is_in_kernel(&self) -> bool {
        self.options.get(DATA_PLANE).is_some_and(|plane| *plane == DataPlane::Kernel.to_string())
    }

    /// Its specification, as `freestone serve --export` takes it.
    pub fn text(&self) -> String {
        let mut fields: Vec<String> = self.options.iter().map(|(key, value)| field(key, value)).collect();
        if self.read_only {
            fields.push("readonly=on".into());
        }
        format!("{}:{}", self.kind, fields.join(","))
    }
}

/// The target of an export, by an identity that never changes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Target {
    /// A volume, by UUID.
    Volume(String),
    /// All of an array, by name.
    Array(String),
    /// All of a device, by name.
    Device(String),
}

/// The file, with its format.
#[derive(Serialize, Deserialize)]
struct Stored {
    version: u32,
    #[serde(flatten)]
    state: serde_json::Value,
}

/// Where the state is. One daemon at a time has it.
#[derive(Debug)]
pub struct Store<F = SystemFolder> {
    directory: PathBuf,
    folder: F,
    /// Locked as long as the store lives.
    _lock: File,
    write_failures: AtomicU64,
}

/// Why there is no state.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The system refuses something.
    #[error("state {}: {error}", .path.display())]
    Io {
        /// The file or directory.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// A change was refused, and the file may hold it all the same.
    #[error("state {}: {refused}; the state before is not restored, the next start may find the change made: {error}", .path.display())]
    Unsettled {
        /// The file.
        path: PathBuf,
        /// Why the change was refused.
        refused: String,
        /// Why the state before was not restored.
        error: io::Error,
    },
    /// There is too much to be remembered.
    #[error("state {}: {bytes} bytes: at most {MAX_WRITTEN} are kept: delete something first", .path.display())]
    Full {
        /// The file.
        path: PathBuf,
        /// Its length with the change.
        bytes: usize,
    },
    /// Another daemon has it.
    #[error("state {}: another freestoned uses it", .0.display())]
    InUse(PathBuf),
    /// A later version has written it.
    #[error("state {}: it has format {found}, and only up to {VERSION} is known here", .path.display())]
    Version {
        /// The file.
        path: PathBuf,
        /// Its format.
        found: u64,
    },
    /// Neither the file nor the one before it can be read.
    #[error("state {}: {error}; what was before it, {PREVIOUS}, does not help: {previous}", .path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The error in it.
        error: String,
        /// The error in its predecessor.
        previous: String,
    },
}

impl Store {
    /// The state in a directory, which is made if it is not there. A damaged file is put aside as
    /// `state.json.damaged`, and the one before it counts.
    ///
    /// # Errors
    /// When there is a state that cannot be used.
    pub fn open(directory: &Path) -> Result<(Store, State), StateError> {
        let io = |path: &Path| {
            let path = path.to_owned();
            move |error| StateError::Io { path, error }
        };
        DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(io(directory))?;
        let lock_path = directory.join("lock");
        let lock = File::options()
            .write(true)
            .create(true)
            .truncate(false)
            .open(&lock_path)
            .map_err(io(&lock_path))?;
        match lock.try_lock() {
            Ok(()) => {}
            Err(fs::TryLockError::WouldBlock) => return Err(StateError::InUse(directory.into())),
            Err(fs::TryLockError::Error(error)) => return Err(io(&lock_path)(error)),
        }
        let folder = SystemFolder::new(directory, 0o600);
        let store =
            Store { directory: directory.into(), folder, _lock: lock, write_failures: AtomicU64::new(0) };
        let path = directory.join(NAME);
        let state =
            match atomic_file::recover(&store.folder, [NAME, PREVIOUS, DAMAGED], MAX_BYTES + 1, decode) {
                Ok(Recovered::Current(state)) => state,
                Ok(Recovered::None) => State::default(),
                Ok(Recovered::Previous { value: state, damage: error }) => {
                    tracing::error!(
                        state = %path.display(), error, generation = state.generation,
                        kept = %directory.join(DAMAGED).display(),
                        "the state is damaged: the one before it counts, and the last change may be missing"
                    );
                    state
                }
                Err(RecoverError::Io(name, error)) => return Err(io(&directory.join(name))(error)),
                Err(RecoverError::Later(name, found)) => {
                    return Err(StateError::Version { path: directory.join(name), found });
                }
                Err(RecoverError::Damaged { error, backup: previous }) => {
                    return Err(StateError::Damaged { path, error, previous });
                }
            };
        Ok((store, state))
    }
}

impl<F: Folder> Store<F> {
    /// Makes `state` durable in the place of `before`.
    ///
    /// # Errors
    /// When that fails: the file holds `before` then. [`StateError::Unsettled`] when it may hold
    /// `state`.
    pub fn replace(&self, before: &State, state: &State) -> Result<(), StateError> {
        self.put(before, state, Some(PREVIOUS))
    }

    /// Makes `state` durable in the place of `before`, the state of a change that failed: `before`
    /// does not become the previous state.
    ///
    /// # Errors
    /// As [`Store::replace`].
    pub fn take_back(&self, before: &State, state: &State) -> Result<(), StateError> {
        self.put(before, state, None)
    }

    /// Changes so far that the directory did not take.
    pub fn write_failures(&self) -> u64 {
        self.write_failures.load(Ordering::Relaxed)
    }

    fn put(&self, before: &State, state: &State, backup: Option<&str>) -> Result<(), StateError> {
        let bytes = self.encode(state)?;
        // A state that makes room may be too long all the same.
        if bytes.len() as u64 > MAX_WRITTEN && bytes.len() > self.encode(before)?.len() {
            return Err(StateError::Full { path: self.directory.join(NAME), bytes: bytes.len() });
        }
        let saved =
            atomic_file::replace(&self.folder, NAME, &bytes, backup).map_err(|error| self.failed(error));
        let Err(refused) = saved else { return Ok(()) };
        self.write_failures.fetch_add(1, Ordering::Relaxed);
        match self.restore(before) {
            Ok(()) => Err(refused),
            Err(error) => {
                let path = self.directory.join(NAME);
                Err(StateError::Unsettled { path, refused: refused.to_string(), error })
            }
        }
    }

    /// Writes `state` to the file again, durably. The previous state is kept: a refused state never
    /// becomes the previous one.
    fn restore(&self, state: &State) -> io::Result<()> {
        let bytes = encode(state)?;
        match self.folder.read(NAME, MAX_BYTES + 1) {
            // The new state was refused before it took the file's place.
            Ok(Some(found)) if found == bytes => Ok(()),
            _ => atomic_file::replace(&self.folder, NAME, &bytes, None),
        }
    }

    /// A state as the file holds it.
    fn encode(&self, state: &State) -> Result<Vec<u8>, StateError> {
        encode(state).map_err(|error| self.failed(error))
    }

    fn failed(&self, error: io::Error) -> StateError {
        StateError::Io { path: self.directory.join(NAME), error }
    }

    /// Where it is.
    pub fn directory(&self) -> &Path {
        &self.directory
    }
}

fn encode(state: &State) -> io::Result<Vec<u8>> {
    let version = match &*state.portals {
        [] => VERSION_WITHOUT_PORTALS,
        portals if portals.iter().all(|portal| is_nvme_tcp(&portal.kind)) => VERSION_WITH_NVME_PORTALS,
        _ => VERSION,
    };
    let stored = Stored { version, state: serde_json::to_value(state)? };
    let mut bytes = serde_json::to_vec_pretty(&stored)?;
    bytes.push(b'\n');
    Ok(bytes)
}

fn decode(bytes: &[u8]) -> Meaning<State> {
    if bytes.len() as u64 > MAX_BYTES {
        return Meaning::Damaged(format!("longer than {MAX_BYTES} bytes"));
    }
    let stored: Stored = match serde_json::from_slice(bytes) {
        Ok(stored) => stored,
        Err(error) => return Meaning::Damaged(error.to_string()),
    };
    if stored.version > VERSION {
        return Meaning::Later(stored.version.into());
    }
    match serde_json::from_value(stored.state) {
        Ok(state) => Meaning::Value(state),
        Err(error) => Meaning::Damaged(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(generation: u64) -> State {
        let qos = Qos { iops: Some(api::Rate { per_s: 100, burst: 10 }), ..Qos::default() };
        State {
            generation,
            devices: vec![DeviceRecord {
                name: "disk".into(),
                spec: "mem:size=1M".into(),
                device_name: None,
            }],
            arrays: vec![ArrayRecord { name: "data".into(), uuid: "u".into(), devices: vec!["/a".into()] }],
            volumes: [("v".into(), VolumeRecord { qos, group: Some("g".into()), ..VolumeRecord::default() })]
                .into(),
            groups: [("g".into(), Qos::default())].into(),
            portals: Vec::new(),
            exports: vec![ExportRecord {
                name: "e".into(),
                kind: "nbd".into(),
                targets: vec![
                    Target::Volume("v".into()),
                    Target::Array("data".into()),
                    Target::Device("d".into()),
                ],
                options: [("socket".into(), "/s".into())].into(),
                read_only: true,
                cores: vec![1],
                ..ExportRecord::default()
            }],
            moves: BTreeMap::new(),
            copies: BTreeMap::new(),
            streams: BTreeSet::new(),
            commits: BTreeSet::new(),
        }
    }

    #[test]
    fn a_saved_state_is_read_again_and_belongs_to_one_daemon() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/b");
        let (store, found) = Store::open(&path).unwrap();
        assert_eq!(found, State::default());
        store.replace(&found, &state(1)).unwrap();
        store.replace(&state(1), &state(2)).unwrap();
        let refusal = Store::open(&path).unwrap_err().to_string();
        assert!(refusal.ends_with("another freestoned uses it"), "{refusal}");
        drop(store);
        assert_eq!(Store::open(&path).unwrap().1, state(2));
        let bytes = fs::read(path.join(PREVIOUS)).unwrap();
        assert_eq!(decode(&bytes), Meaning::Value(state(1)));
    }

    /// A folder whose names are not made durable so many times.
    struct Reluctant(SystemFolder, std::cell::Cell<u32>);

    impl Folder for Reluctant {
        fn read(&self, name: &str, most: u64) -> io::Result<Option<Vec<u8>>> {
            self.0.read(name, most)
        }
        fn write(&self, name: &str, bytes: &[u8]) -> io::Result<()> {
            self.0.write(name, bytes)
        }
        fn sync(&self, name: &str) -> io::Result<()> {
            self.0.sync(name)
        }
        fn link(&self, from: &str, to: &str) -> io::Result<()> {
            self.0.link(from, to)
        }
        fn rename(&self, from: &str, to: &str) -> io::Result<()> {
            self.0.rename(from, to)
        }
        fn remove(&self, name: &str) -> io::Result<()> {
            self.0.remove(name)
        }
        fn sync_names(&self) -> io::Result<()> {
            match self.1.get() {
                0 => self.0.sync_names(),
                left => {
                    self.1.set(left - 1);
                    Err(io::Error::other("the disk is full"))
                }
            }
        }
    }

    #[test]
    fn a_state_that_was_refused_after_it_had_taken_the_place_is_taken_back() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        let (store, empty) = Store::open(path).unwrap();
        store.replace(&empty, &state(1)).unwrap();
        let Store { directory, folder, _lock, write_failures } = store;
        let store = Store { directory, folder: Reluctant(folder, 1.into()), _lock, write_failures };
        let holds = |name: &str, generation| {
            decode(&fs::read(path.join(name)).unwrap()) == Meaning::Value(state(generation))
        };
        let refused = store.replace(&state(1), &state(2)).unwrap_err();
        assert!(matches!(refused, StateError::Io { .. }), "{refused}");
        assert!(holds(NAME, 1) && holds(PREVIOUS, 1));
        // Where that fails too, the error says so, and the next change settles it.
        store.folder.1.set(2);
        let refused = store.replace(&state(1), &state(2)).unwrap_err();
        assert!(refused.to_string().contains("the next start may find the change made"), "{refused}");
        store.replace(&state(1), &state(3)).unwrap();
        assert!(holds(NAME, 3));
        assert_eq!(store.write_failures(), 2);
    }

    #[test]
    fn a_state_that_is_too_long_is_refused_and_may_be_made_shorter() {
        let folder = tempfile::tempdir().unwrap();
        let (store, empty) = Store::open(folder.path()).unwrap();
        store.replace(&empty, &state(1)).unwrap();
        let before = fs::read(folder.path().join(NAME)).unwrap();
        let with = |bytes: u64| {
            let mut long = state(2);
            long.devices[0].spec = "x".repeat(bytes as usize);
            long
        };
        let refused = store.replace(&state(1), &with(MAX_WRITTEN)).unwrap_err().to_string();
        assert!(refused.contains("are kept: delete something first"), "{refused}");
        assert_eq!(store.write_failures(), 0, "nothing was written");
        assert_eq!(fs::read(folder.path().join(NAME)).unwrap(), before);
        // One that was written before there was a limit.
        store.replace(&with(MAX_WRITTEN + 1), &with(MAX_WRITTEN)).unwrap();
    }

    #[test]
    fn a_damaged_state_is_put_aside_and_the_one_before_it_counts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path();
        for damage in ["", "{", r#"{"version":1,"surprise":2}"#, r#"{"version":1}"#, "\u{fffd}"] {
            let _ = fs::remove_file(path.join(PREVIOUS));
            fs::write(path.join(NAME), damage).unwrap();
            let refusal = Store::open(path).unwrap_err().to_string();
            assert!(refusal.contains("does not help: there is none"), "{damage}: {refusal}");
            fs::write(path.join(PREVIOUS), encode(&state(7)).unwrap()).unwrap();
            assert_eq!(Store::open(path).unwrap().1, state(7), "{damage}");
            assert_eq!(fs::read_to_string(path.join("state.json.damaged")).unwrap(), damage);
            assert_eq!(Store::open(path).unwrap().1, state(7), "it is the state now");
            let before = fs::read(path.join(PREVIOUS)).unwrap();
            assert_eq!(decode(&before), Meaning::Value(state(7)), "the one before is still whole");
        }
    }

    #[test]
    fn the_state_of_a_later_version_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(NAME), r#"{"version":5,"sensible":true}"#).unwrap();
        let refusal = Store::open(folder.path()).unwrap_err().to_string();
        assert!(refusal.contains("format 5, and only up to 4 is known"), "{refusal}");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2, "the state and the lock");
    }

    /// The format of each release, as it wrote it: none of these files is ever changed.
    #[test]
    fn the_states_of_all_releases_are_understood() {
        for bytes in [&include_bytes!("state/version-1.json")[..], include_bytes!("state/version-2.json")] {
            assert_eq!(decode(bytes), Meaning::Value(state(42)));
        }
        let bytes = include_bytes!("state/version-3.json");
        assert_eq!(decode(bytes), Meaning::Value(with_portal(state(42))));
        let bytes = include_bytes!("state/version-4.json");
        assert_eq!(decode(bytes), Meaning::Value(with_nbd_portal(with_portal(state(42)))));
    }

    fn with_nbd_portal(mut state: State) -> State {
        state.portals.push(PortalRecord {
            name: "disks".into(),
            kind: "nbd".into(),
            listen: vec!["10.0.0.1:10809".into()],
            clients: 100,
            options: [("default-export".into(), "vm1".into())].into(),
        });
        state
    }

    fn with_portal(state: State) -> State {
        let listen = vec!["10.0.0.1:4420".into(), "10.0.1.1:4420@non-optimized".into()];
        let portal = PortalRecord {
            name: "p".into(),
            kind: DEFAULT_PORTAL_KIND.into(),
            listen,
            clients: 4096,
            options: BTreeMap::new(),
        };
        State { portals: vec![portal], ..state }
    }

    #[test]
    fn each_kind_of_portals_has_a_format_that_earlier_versions_refuse() {
        let version = |state: &State| {
            let stored: Stored = serde_json::from_slice(&encode(state).unwrap()).unwrap();
            (stored.version, stored.state.get("portals").is_some())
        };
        assert_eq!(version(&state(1)), (2, false));
        let with = with_portal(state(1));
        assert_eq!(version(&with), (3, true));
        assert_eq!(decode(&encode(&with).unwrap()), Meaning::Value(with.clone()));
        let with = with_nbd_portal(with);
        assert_eq!(version(&with), (4, true));
        assert_eq!(decode(&encode(&with).unwrap()), Meaning::Value(with));
    }
}
