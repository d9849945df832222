//! Persists the registrations and the reservation of a namespace in a file.

use super::rules::{Held, MAX_REGISTRANTS, Reservations};
use crate::host::Host;
use atomic_file::SystemFolder;
use exports::Error;
use nvme::fabrics::Nqn;
use nvme::reservation::ReservationType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{DirBuilder, File};
use std::io::{self, ErrorKind};
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// The supported format version; others are refused.
const VERSION: u32 = 1;
/// Longest file that is accepted, in bytes.
const MAX_BYTES: u64 = 1 << 20;

/// The file of one namespace.
pub(super) struct Store {
    path: PathBuf,
    subsystem: Nqn,
}

/// The content of the file.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    version: u32,
    subsystem: String,
    generation: u32,
    /// The type as the specification numbers it, and the host that acquired it.
    reservation: Option<(u8, StoredHost)>,
    registrants: Vec<(StoredHost, u64)>,
}

#[derive(Serialize, Deserialize, Clone)]
#[serde(deny_unknown_fields)]
struct StoredHost {
    nqn: String,
    /// HOSTID, 32 hexadecimal digits.
    id: String,
}

impl Store {
    /// Opens the file of a namespace, and creates its directory if it does not exist. Returns the
    /// stored state, too.
    ///
    /// # Errors
    /// When the file cannot be read, or was not written for this subsystem.
    pub(super) fn open(
        directory: &Path,
        subsystem: &Nqn,
        uuid: &[u8; 16],
    ) -> Result<(Store, Reservations), Error> {
        let path = directory.join(format!("{}.json", crate::config::hex(uuid)));
        let failed = |error: io::Error| Error::Config(format!("reservations: {}: {error}", path.display()));
        DirBuilder::new().recursive(true).mode(0o700).create(directory).map_err(failed)?;
        let store = Store { path: path.clone(), subsystem: subsystem.clone() };
        let state = match File::open(&path) {
            Ok(file) => store.read(file).map_err(failed)?,
            Err(error) if error.kind() == ErrorKind::NotFound => Reservations::default(),
            Err(error) => return Err(failed(error)),
        };
        Ok((store, state))
    }

    fn read(&self, file: File) -> io::Result<Reservations> {
        if file.metadata()?.len() > MAX_BYTES {
            return Err(invalid(format!("longer than {MAX_BYTES} bytes")));
        }
        let stored: Stored = serde_json::from_str(&io::read_to_string(file)?)?;
        if stored.version != VERSION {
            return Err(invalid(format!("version {}: only {VERSION} is known", stored.version)));
        }
        if stored.subsystem != self.subsystem.as_str() {
            return Err(invalid(format!("the file belongs to subsystem {}", stored.subsystem)));
        }
        let mut keys = BTreeMap::new();
        for (host, key) in &stored.registrants {
            let is_new = keys.insert(host.parse()?, *key).is_none();
            if !is_new || *key == 0 || keys.len() > MAX_REGISTRANTS {
                return Err(invalid(format!("{} with key {key:#x} cannot be registered", host.nqn)));
            }
        }
        let held = match &stored.reservation {
            None => None,
            Some((number, holder)) => {
                let kind = ReservationType::parse(*number);
                let kind = kind.ok_or_else(|| invalid(format!("invalid reservation type {number}")))?;
                Some(Held { kind, holder: holder.parse()? })
            }
        };
        let state = Reservations { generation: stored.generation, keys, held, persists: true };
        match state.held.is_none() || state.keys.keys().any(|host| state.is_holder(host)) {
            true => Ok(state),
            false => Err(invalid("the holder of the reservation is not registered".into())),
        }
    }

    /// Makes `state` durable, or removes the file if the state is not to persist.
    ///
    /// # Errors
    /// When that fails; then the file has either the old or the new state.
    pub(super) fn write(&self, state: &Reservations) -> io::Result<()> {
        let folder = SystemFolder::new(self.path.parent().unwrap_or(Path::new("")), 0o600);
        let name = self.path.file_name().and_then(OsStr::to_str).expect("its name is a UUID");
        match state.persists {
            true => {
                atomic_file::replace(&folder, name, &serde_json::to_vec_pretty(&self.stored(state))?, None)
            }
            false => atomic_file::remove(&folder, name),
        }
    }

    fn stored(&self, state: &Reservations) -> Stored {
        let reservation = state.held.as_ref().map(|held| (held.kind as u8, StoredHost::of(&held.holder)));
        Stored {
            version: VERSION,
            subsystem: self.subsystem.as_str().into(),
            generation: state.generation,
            reservation,
            registrants: state.keys.iter().map(|(host, key)| (StoredHost::of(host), *key)).collect(),
        }
    }
}

impl StoredHost {
    fn of(host: &Host) -> StoredHost {
        StoredHost { nqn: host.nqn.as_str().into(), id: crate::config::hex(&host.id) }
    }

    fn parse(&self) -> io::Result<Host> {
        let nqn = Nqn::new(&self.nqn).map_err(|error| invalid(format!("{}: {error}", self.nqn)))?;
        let is_hex = self.id.len() == 32 && self.id.bytes().all(|digit| digit.is_ascii_hexdigit());
        let id = u128::from_str_radix(&self.id, 16).ok().filter(|_| is_hex);
        let id =
            id.ok_or_else(|| invalid(format!("host identifier {:?}: want 32 hexadecimal digits", self.id)))?;
        Ok(Host { nqn, id: id.to_be_bytes() })
    }
}

fn invalid(fault: String) -> io::Error {
    io::Error::new(ErrorKind::InvalidData, fault)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    const UUID: [u8; 16] = [0xab; 16];

    fn subsystem() -> Nqn {
        Nqn::new("nqn.2014-08.org.example:disk").unwrap()
    }

    fn state() -> Reservations {
        let host = |id| Host { nqn: Nqn::new("nqn.2014-08.org.example:host").unwrap(), id: [id; 16] };
        Reservations {
            generation: 7,
            keys: BTreeMap::from([(host(1), 0x10), (host(0xfe), u64::MAX)]),
            held: Some(Held { kind: ReservationType::WriteExclusiveRegistrantsOnly, holder: host(1) }),
            persists: true,
        }
    }

    #[test]
    fn a_stored_state_is_loaded_until_persistence_is_disabled() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("a/b");
        let open = || Store::open(&folder, &subsystem(), &UUID).unwrap();
        let (store, found) = open();
        assert_eq!(found, Reservations::default());
        store.write(&state()).unwrap();
        assert_eq!(open().1, state());
        // A partly written successor after a power loss.
        fs::write(store.path.with_extension("json.new"), "{").unwrap();
        assert_eq!(open().1, state());
        let next = Reservations { held: None, generation: 8, ..state() };
        store.write(&next).unwrap();
        assert_eq!(open().1, next);
        store.write(&Reservations { persists: false, ..next }).unwrap();
        assert_eq!(open().1, Reservations::default());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 0, "nothing is left");
    }

    #[test]
    fn an_invalid_file_is_refused_and_named() {
        let folder = tempfile::tempdir().unwrap();
        let (store, _) = Store::open(folder.path(), &subsystem(), &UUID).unwrap();
        store.write(&state()).unwrap();
        let good = fs::read_to_string(&store.path).unwrap();
        let twice = format!("\"id\": \"{}\"", "01".repeat(16));
        for (bad, fault) in [
            (String::new(), "EOF"),
            (good.replace("\"version\": 1", "\"version\": 2"), "version 2: only 1 is known"),
            (good.replace(":disk", ":other"), "the file belongs to subsystem nqn.2014-08.org.example:other"),
            (good.replace("generation", "count"), "unknown field `count`"),
            (good.replace(" 16\n", " 0\n"), "cannot be registered"),
            (good.replace(&"fe".repeat(16), &"01".repeat(16)), "cannot be registered"),
            (good.replace(&"fe".repeat(16), "fe"), "host identifier \"fe\": want 32"),
            (good.replace(&"fe".repeat(16), &format!("+{}", "f".repeat(31))), "want 32 hexadecimal digits"),
            (
                good.replacen(&twice, &twice.replace("01", "02"), 1),
                "the holder of the reservation is not registered",
            ),
            (good.replacen("    3,", "    9,", 1), "invalid reservation type 9"),
            (" ".repeat(MAX_BYTES as usize + 1), "longer than"),
        ] {
            assert_ne!(bad, good, "{fault}");
            fs::write(&store.path, bad).unwrap();
            let error = Store::open(folder.path(), &subsystem(), &UUID).map(drop).unwrap_err().to_string();
            assert!(error.contains(fault) && error.contains("abababab"), "{fault}: {error}");
        }
    }
}
