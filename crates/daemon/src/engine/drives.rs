//! Drives below devices and members: facts and health, which short-lived threads read once a
//! minute.

use super::arrays::ArrayLive;
use super::background::{Answer, Reads};
use super::{Engine, Live};
use api::{Array, Drive, DriveHealth, DriveWarning};
use stack::kinds::device::drive;
use stack::kinds::member::member;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// Between two looks at answers, and at drives that are new.
const LOOK: Duration = Duration::from_millis(500);
/// How long a change waits for the first answers of drives that it adds: so its answer, and later
/// ones, have their facts.
const FIRST_ANSWER: Duration = Duration::from_secs(1);
/// Kinds of devices whose names end with a path.
const KINDS_WITH_PATHS: [&str; 3] = ["io_uring:", "nvme_uring:", "virtio-blk-uring:"];

/// The drives by the text of their device.
pub(super) type Drives = Reads<String, Drive>;

impl Answer for Drive {
    const THREAD: &'static str = "drive";
    const PERIOD: Duration = Duration::from_secs(60);
    /// The kernel's own limit for a command is usually 60 s.
    const LIMIT: Duration = Duration::from_secs(10);
    const MAX_READS: usize = 4;

    fn unknown(reason: String) -> Drive {
        Drive::unknown(reason)
    }

    fn late(last: Option<Drive>, reason: String) -> Drive {
        let known = last.unwrap_or_default();
        Drive { temperature_celsius: None, health: None, reason: Some(reason), ..known }
    }
}

/// Starts the thread that has drives read for as long as the engine lives.
///
/// # Errors
/// When the system refuses a thread.
pub(super) fn start(engine: &Arc<Engine>) -> io::Result<()> {
    let engine = Arc::downgrade(engine);
    reactor::spawn_thread("drives", move || keep(&engine))?;
    Ok(())
}

fn keep(engine: &Weak<Engine>) {
    loop {
        let Some(engine) = engine.upgrade() else { return };
        if engine.has_ended() {
            return;
        }
        let devices = engine.live().texts_of_devices();
        engine.drives.look(&devices, Instant::now(), read);
        drop(engine);
        std::thread::sleep(LOOK);
    }
}

/// Reads the drive of a device: a path, a specification, or the name of an open device.
fn read(device: String) -> Drive {
    match path_of(&device) {
        Some(path) => in_api(drive::read(&path)),
        None => Drive::unknown("the device is no drive of this host"),
    }
}

/// The path that the text of a device or member names, if it names one.
pub(super) fn path_of(device: &str) -> Option<PathBuf> {
    let is_path = |rest: &&str| rest.starts_with('/');
    let of_name = KINDS_WITH_PATHS.iter().filter_map(|kind| device.strip_prefix(kind)).find(is_path);
    if let Some(path) = of_name {
        return Some(path.into());
    }
    member(device, true, true).ok()?.path().map(Path::to_owned)
}

fn in_api(drive: drive::Drive) -> Drive {
    let drive::Drive { model, serial, firmware, size_bytes, address, temperature_celsius, health, reason } =
        drive;
    let health = health.map(|log| DriveHealth {
        wear_percent: log.used_percent,
        spare_percent: log.spare_percent,
        spare_threshold_percent: log.spare_threshold_percent,
        media_errors: log.media_errors,
        warnings: DriveWarning::of_bits(log.critical_warning),
    });
    Drive { model, serial, firmware, size_bytes, address, temperature_celsius, health, reason }
}

impl Live {
    /// The devices, members and spares whose drives are read.
    fn texts_of_devices(&self) -> BTreeSet<String> {
        let devices = self.state.devices.iter().map(|record| record.spec.clone());
        devices.chain(self.texts_of_members()).collect()
    }

    /// The members and spares of arrays that run.
    fn texts_of_members(&self) -> impl Iterator<Item = String> {
        self.arrays.values().flat_map(ArrayLive::texts_of_members)
    }
}

impl Engine {
    /// Reads the drives that are new, and waits for them, but not for long. Called within a change,
    /// and never with a lock of the objects.
    pub(super) fn read_new_drives(&self) {
        let limit = Instant::now() + FIRST_ANSWER;
        loop {
            let devices = self.live().texts_of_devices();
            self.drives.look(&devices, Instant::now(), read);
            if devices.iter().all(|device| self.drives.of(device).is_some()) || Instant::now() >= limit {
                return;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Adds the drives of members and spares.
    pub(super) fn with_drives(&self, mut array: Array) -> Array {
        let of = |device: &Option<String>| self.drives.of(device.as_ref()?);
        array.members.iter_mut().for_each(|member| member.drive = of(&member.device));
        array.spares.iter_mut().for_each(|spare| spare.drive = of(&spare.device));
        array
    }

    /// Returns the facts of the drives of all devices, members and spares, by the name of the
    /// device or the text of the member.
    pub fn drives(&self) -> BTreeMap<String, Drive> {
        let live = self.live();
        let devices = live.state.devices.iter().map(|record| (record.name.clone(), record.spec.clone()));
        let members = live.texts_of_members().map(|text| (text.clone(), text));
        devices.chain(members).filter_map(|(name, text)| Some((name, self.drives.of(&text)?))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[test]
    fn the_path_of_a_device_is_found_in_each_of_its_texts() {
        let path = |text: &str| path_of(text).map(|path| path.display().to_string());
        for text in ["/dev/sda", "io_uring:/dev/sda", "io_uring:path=/dev/sda,direct=on"] {
            assert_eq!(path(text).as_deref(), Some("/dev/sda"), "{text}");
        }
        assert_eq!(path("nvme_uring:/dev/ng0n1").as_deref(), Some("/dev/ng0n1"));
        for text in ["mem:size=64M", "nbd:uri=nbd://host/disk", "nbd:nbd://host/disk", "mem:"] {
            assert_eq!(read(text.into()), Drive::unknown("the device is no drive of this host"), "{text}");
        }
    }
}
