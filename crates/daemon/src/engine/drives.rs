//! Drives below devices and members: facts and health, which short-lived threads read once a
//! minute. A drive that does not answer keeps its thread, and nothing waits for that thread.

use super::{Engine, Live};
use api::{Array, Drive, DriveHealth, DriveWarning};
use stack::kinds::device::drive;
use stack::kinds::member::member;
use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, TryRecvError, channel};
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, Instant};

/// Between two looks at answers, and at drives that are new.
const LOOK: Duration = Duration::from_millis(500);
/// Between the answer of a drive and its next read.
const PERIOD: Duration = Duration::from_secs(60);
/// A drive that has not answered for so long is reported. The kernel's own limit for a command is
/// usually 60 s.
const ANSWER: Duration = Duration::from_secs(10);
/// How long a change waits for the first answers of drives that it adds: so its answer, and later
/// ones, have their facts.
const FIRST_ANSWER: Duration = Duration::from_secs(1);
/// Most reads at a time of drives that may still answer in time.
const MAX_READS: usize = 4;
/// Most threads that wait for drives. Further drives are not read until one has ended.
const MAX_THREADS: usize = 64;
/// Kinds of devices whose names end with a path.
const KINDS_WITH_PATHS: [&str; 3] = ["io_uring:", "nvme_uring:", "virtio-blk-uring:"];

/// The drives by the text of their device.
#[derive(Default)]
pub(super) struct Drives(Mutex<BTreeMap<String, Known>>);

/// A drive that is read.
struct Known {
    /// `None` before its first answer.
    drive: Option<Drive>,
    next_read: Instant,
    reading: Option<Reading>,
}

struct Reading {
    began: Instant,
    answer: Receiver<Drive>,
}

impl Reading {
    fn is_late(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.began) >= ANSWER
    }
}

impl Known {
    /// Takes the answer of the drive if there is one.
    fn look(&mut self, now: Instant) {
        let Some(reading) = &self.reading else { return };
        let drive = match reading.answer.try_recv() {
            Ok(drive) => drive,
            Err(TryRecvError::Disconnected) => Drive::unknown("the read of the drive failed"),
            Err(TryRecvError::Empty) if reading.is_late(now) => {
                let reason = format!("the drive has not answered for {} s", ANSWER.as_secs());
                let known = self.drive.take().unwrap_or_default();
                let known = Drive { temperature_celsius: None, health: None, ..known };
                self.drive = Some(Drive { reason: Some(reason), ..known });
                return;
            }
            Err(TryRecvError::Empty) => return,
        };
        *self = Known { drive: Some(drive), next_read: now + PERIOD, reading: None };
    }
}

impl Drives {
    /// Returns the facts of the drive of a device. `None` before its first answer.
    pub fn of(&self, device: &str) -> Option<Drive> {
        let known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.get(device)?.drive.clone()
    }

    /// Takes answers, and begins to read the drives of `devices` that are due by `read`.
    fn look(&self, devices: BTreeSet<String>, now: Instant, read: fn(&str) -> Drive) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        known.values_mut().for_each(|drive| drive.look(now));
        // A drive that does not answer is remembered: it has a thread already.
        known.retain(|device, drive| drive.reading.is_some() || devices.contains(device));
        for device in &devices {
            if !known.contains_key(device) {
                let new = Known { drive: None, next_read: now, reading: None };
                known.insert(device.clone(), new);
            }
        }
        let readings = || known.values().filter_map(|drive| drive.reading.as_ref());
        let mut threads = readings().count();
        let mut reads = readings().filter(|reading| !reading.is_late(now)).count();
        for (device, drive) in known.iter_mut() {
            if reads == MAX_READS || threads >= MAX_THREADS {
                return;
            }
            if drive.reading.is_some() || drive.next_read > now || !devices.contains(device) {
                continue;
            }
            match begin(device.clone(), now, read) {
                Ok(reading) => {
                    drive.reading = Some(reading);
                    (reads, threads) = (reads + 1, threads + 1);
                }
                Err(error) => {
                    drive.next_read = now + PERIOD;
                    tracing::warn!(device, %error, "no thread to read the drive");
                }
            }
        }
    }
}

/// Reads a drive on a thread of its own.
fn begin(device: String, now: Instant, read: fn(&str) -> Drive) -> io::Result<Reading> {
    let (send, answer) = channel();
    reactor::spawn_thread("drive", move || drop(send.send(read(&device))))?;
    Ok(Reading { began: now, answer })
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
        engine.drives.look(devices, Instant::now(), read);
        drop(engine);
        std::thread::sleep(LOOK);
    }
}

/// Reads the drive of a device: a path, a specification, or the name of an open device.
fn read(device: &str) -> Drive {
    match path_of(device) {
        Some(path) => in_api(drive::read(&path)),
        None => Drive::unknown("the device is no drive of this host"),
    }
}

fn path_of(device: &str) -> Option<PathBuf> {
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
        self.arrays.values().flat_map(|array| {
            let slots = array.array().slots().into_iter();
            slots.filter_map(|slot| slot.device).chain(array.status().spares)
        })
    }
}

impl Engine {
    /// Reads the drives that are new, and waits for them, but not for long. Called within a change,
    /// and never with a lock of the objects.
    pub(super) fn read_new_drives(&self) {
        let limit = Instant::now() + FIRST_ANSWER;
        loop {
            let devices = self.live().texts_of_devices();
            self.drives.look(devices.clone(), Instant::now(), read);
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
    use std::sync::atomic::{AtomicUsize, Ordering};

    fn set(devices: &[&str]) -> BTreeSet<String> {
        devices.iter().map(|device| (*device).to_owned()).collect()
    }

    /// Looks until `is_done`.
    fn look_until(
        drives: &Drives,
        devices: &[&str],
        now: Instant,
        read: fn(&str) -> Drive,
        is_done: impl Fn() -> bool,
    ) {
        let limit = Instant::now() + Duration::from_secs(120);
        while !is_done() {
            assert!(Instant::now() < limit, "no answer");
            drives.look(set(devices), now, read);
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn model(drives: &Drives, device: &str) -> Option<String> {
        drives.of(device)?.model
    }

    #[test]
    fn a_drive_is_read_again_after_a_minute_and_forgotten_with_its_device() {
        static READS: AtomicUsize = AtomicUsize::new(0);
        fn read(device: &str) -> Drive {
            let number = READS.fetch_add(1, Ordering::SeqCst);
            Drive { model: Some(format!("{device} {number}")), ..Drive::default() }
        }
        let (drives, now) = (Drives::default(), Instant::now());
        assert_eq!(drives.of("a"), None);
        look_until(&drives, &["a"], now, read, || drives.of("a").is_some());
        for late_s in [0, 59] {
            drives.look(set(&["a"]), now + Duration::from_secs(late_s), read);
        }
        assert_eq!((READS.load(Ordering::SeqCst), model(&drives, "a")), (1, Some("a 0".into())));
        let later = now + PERIOD;
        look_until(&drives, &["a"], later, read, || model(&drives, "a") == Some("a 1".into()));
        drives.look(set(&[]), later, read);
        assert_eq!(drives.of("a"), None);
    }

    #[test]
    fn a_drive_that_hangs_delays_no_other_and_takes_one_thread() {
        static HUNG: AtomicUsize = AtomicUsize::new(0);
        fn read(device: &str) -> Drive {
            if device.starts_with("hung") {
                HUNG.fetch_add(1, Ordering::SeqCst);
                std::thread::sleep(Duration::from_secs(3600));
            }
            Drive { model: Some(device.into()), ..Drive::default() }
        }
        let (drives, now) = (Drives::default(), Instant::now());
        let devices = ["hung1", "hung2", "hung3", "hung4", "ready"];
        look_until(&drives, &devices, now, read, || HUNG.load(Ordering::SeqCst) == MAX_READS);
        assert_eq!(drives.of("ready"), None, "so many reads are under way");
        let late = now + ANSWER;
        look_until(&drives, &devices, late, read, || model(&drives, "ready").is_some());
        let hung = drives.of("hung1").unwrap();
        assert_eq!(hung, Drive::unknown("the drive has not answered for 10 s"));
        // Neither with time nor with a device that is gone and returns.
        for devices in [&devices[..], &["ready"], &devices] {
            let later = late + 2 * PERIOD;
            drives.look(set(devices), later, read);
        }
        assert_eq!(HUNG.load(Ordering::SeqCst), MAX_READS);
        assert!(drives.of("hung4").is_some());
    }

    #[test]
    fn a_read_that_fails_is_reported() {
        let (drives, now) = (Drives::default(), Instant::now());
        look_until(&drives, &["a"], now, |_| panic!("on purpose"), || drives.of("a").is_some());
        assert_eq!(drives.of("a"), Some(Drive::unknown("the read of the drive failed")));
    }

    #[test]
    fn the_path_of_a_device_is_found_in_each_of_its_texts() {
        let path = |text: &str| path_of(text).map(|path| path.display().to_string());
        for text in ["/dev/sda", "io_uring:/dev/sda", "io_uring:path=/dev/sda,direct=on"] {
            assert_eq!(path(text).as_deref(), Some("/dev/sda"), "{text}");
        }
        assert_eq!(path("nvme_uring:/dev/ng0n1").as_deref(), Some("/dev/ng0n1"));
        for text in ["mem:size=64M", "nbd:uri=nbd://host/disk", "nbd:nbd://host/disk", "mem:"] {
            assert_eq!(read(text), Drive::unknown("the device is no drive of this host"), "{text}");
        }
    }
}
