//! State that outlives a boot: the image's file, its backing file, and the oracle of the disk.

use super::bitmap::Bitmap;
use super::file::{append, refer, word};
use super::plan::{Plan, Shape};
use crate::disk::{DiskConfig, SimDisk};
use crate::gate::Gate;
use crate::machine::Machine;
use crate::oracle::{Oracle, SECTOR, Ticket};
use crate::user::{Disk, Host};
use crate::world::Stats;
use base::{Rng, mix};
use block::{Device, IoError, Op};
use layers::fault::{Action, Fault, Rule};
use qcow2::entry::{COPIED, Entry, Geometry};
use qcow2::write::{Options, Output, Writer};
use qcow2::{Image, Others, Problem, Qcow2, RestartLog};
use reactor::Simulation;
use std::cell::{Cell, RefCell};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Wake, Waker};

/// Bytes of a part of the backing file that may have no data: a whole number of blocks.
const HOLE: usize = 4096;

/// A change of internal snapshots that failed, or was interrupted.
pub enum Pending {
    /// A snapshot with this name may exist. The oracle and the start of the change say what it then
    /// has. With `true` it was acknowledged: it exists.
    Made(String, Oracle, Ticket, bool),
    /// This snapshot may exist no more.
    Deleted(String),
}

/// The content of the restart log's file when power goes, or the process is killed. Requests that
/// have begun still end then, and write to it.
struct LogAtEnd {
    log: File,
    bytes: Mutex<Option<Vec<u8>>>,
}

impl LogAtEnd {
    fn new(log: &File) -> Arc<LogAtEnd> {
        Arc::new(LogAtEnd { log: log.try_clone().expect("a descriptor"), bytes: Mutex::default() })
    }

    fn bytes(&self) -> MutexGuard<'_, Option<Vec<u8>>> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the file the content that it had then.
    fn restore(&self) {
        let Some(bytes) = self.bytes().take() else { return };
        let restored = self.log.set_len(bytes.len() as u64).and_then(|()| self.log.write_all_at(&bytes, 0));
        restored.expect("a temporary file");
    }
}

impl Wake for LogAtEnd {
    fn wake(self: Arc<Self>) {
        let mut bytes = vec![0; self.log.metadata().expect("a temporary file").len() as usize];
        self.log.read_exact_at(&mut bytes, 0).expect("a temporary file");
        *self.bytes() = Some(bytes);
    }
}

/// All that a run is about.
pub struct World {
    pub shape: Shape,
    pub machine: Arc<Machine>,
    /// The file of the image.
    pub file: SimDisk,
    /// The backing file.
    pub backing: Option<SimDisk>,
    /// Its content as a device. An image is opened in each boot.
    opened_backing: RefCell<Option<Arc<dyn Device>>>,
    /// Whether the image names it.
    pub has_backing: Cell<bool>,
    pub disk: Disk,
    pub users: Gate,
    pub stats: Cell<Stats>,
    /// The internal snapshots, the oldest first: name and content.
    pub snapshots: RefCell<Vec<(String, Vec<u8>)>>,
    /// The changes of snapshots that may have happened.
    pub pending: RefCell<Vec<Pending>>,
    /// Snapshots that were made so far, or may have been.
    pub made: Cell<u64>,
    /// A change of snapshots has failed since the image was opened: it is closed as dirty.
    pub is_unsettled: Cell<bool>,
    /// The dirty bitmap, if there is one.
    pub bitmap: Option<Bitmap>,
    /// The file of the restart log.
    pub log: File,
    log_at_end: Arc<LogAtEnd>,
    /// How often the machine was started.
    pub starts: Cell<u8>,
    /// Clusters that leaked when the image was closed, if it was and no power has been lost since.
    pub leaks: Cell<Option<u64>>,
    /// The last program that wrote the image had not closed it when it was opened.
    pub had_session: Cell<bool>,
    /// The image has no clusters without use.
    pub are_leaks_freed: Cell<bool>,
    failure: RefCell<Option<String>>,
}

impl World {
    /// A new image, of which some clusters are compressed zeroes, and others data.
    pub fn new(plan: &Plan) -> Rc<World> {
        let shape = plan.shape.clone();
        let machine = Machine::new();
        let mut rng = Rng::new(plan.seed).fork(5);
        let mut oracle = Oracle::new(mix(plan.seed), shape.size);
        let mut content = vec![0; shape.size as usize];
        let backing = shape.backing.map(|bytes| match shape.backing_bits {
            Some(bits) => {
                let image =
                    backing_image(&shape, bits, &mut oracle, &mut content[..bytes as usize], &mut rng);
                let len = image.len().next_multiple_of(shape.block_size as usize) as u64;
                let disk = new_disk("backing", &machine, &shape, len, rng.draw());
                disk.let_resize();
                disk.poke(0, &image);
                disk
            }
            None => {
                let disk = new_disk("backing", &machine, &shape, bytes, rng.draw());
                disk.poke(0, &write(&mut oracle, 0, bytes));
                disk.tell_zeroes();
                for offset in (0..bytes).step_by(HOLE) {
                    if rng.one_in(4) {
                        let len = bytes.min(offset + HOLE as u64) - offset;
                        clear(&mut oracle, offset, len);
                        disk.poke(offset, &vec![0; len as usize]);
                    }
                }
                disk.peek(0, &mut content[..bytes as usize]);
                disk
            }
        });
        let (image, is_shared, bitmap) = create(&shape, &mut oracle, &mut content, &mut rng);
        if let Some(bitmap) = &bitmap {
            bitmap.begin(&oracle);
        }
        let bytes = image.len().next_multiple_of(shape.block_size as usize) as u64;
        let file =
            new_disk("file", &machine, &shape, shape.fixed.map_or(bytes, |room| room.max(bytes)), rng.draw());
        if shape.fixed.is_none() {
            file.let_resize();
        }
        file.poke(0, &image);
        let disk = Disk {
            name: "the image".into(),
            oracle: Rc::new(RefCell::new(oracle)),
            size: Rc::new(Cell::new(shape.size)),
            block_size: shape.block_size,
            // Entries of tables are written by flushes, whatever the disk below has.
            has_volatile_cache: true,
            keeps_failed_writes: false,
        };
        let log = tempfile::tempfile().expect("a temporary file");
        Rc::new(World {
            machine,
            file,
            has_backing: Cell::new(backing.is_some()),
            backing,
            opened_backing: RefCell::default(),
            disk,
            users: Gate::default(),
            stats: Cell::default(),
            snapshots: RefCell::new(is_shared.then(|| ("s".to_owned(), content)).into_iter().collect()),
            pending: RefCell::default(),
            made: Cell::default(),
            is_unsettled: Cell::default(),
            bitmap,
            log_at_end: LogAtEnd::new(&log),
            log,
            starts: Cell::default(),
            leaks: Cell::new(Some(0)),
            had_session: Cell::default(),
            are_leaks_freed: Cell::default(),
            failure: RefCell::default(),
            shape,
        })
    }

    /// Changes the counts.
    pub fn count(&self, change: impl FnOnce(&mut Stats)) {
        let mut stats = self.stats.get();
        change(&mut stats);
        self.stats.set(stats);
    }

    /// The devices below the disk, but for the image's file.
    pub fn others(&self) -> Others {
        let backing = self.opened_backing.borrow().clone().filter(|_| self.has_backing.get());
        Others { backing, data_file: None }
    }

    /// A job on the image and its backing file has failed: only for a reason.
    pub fn job_failed(&self, job: &str, error: IoError) {
        if self.machine.is_on() && !self.excuses(error) {
            self.fail(format!("a {job} failed: {error}"));
        }
    }

    /// A job was refused: only for a reason that all jobs have, or one that `is_excused` takes.
    pub fn job_refused(&self, job: &str, problem: &Problem, is_excused: impl Fn(&str) -> bool) {
        let is_excused = match problem {
            _ if !self.machine.is_on() => true,
            Problem::Refused(why) if why.contains("no backing file") => !self.has_backing.get(),
            Problem::Refused(why) => why.contains("internal snapshots") || is_excused(why),
            Problem::Write { .. } | Problem::Io { .. } => self.has_failed(),
            _ => false,
        };
        if !is_excused {
            self.fail(format!("a {job} was refused: {problem}"));
        }
    }

    /// The image's file, and the backing file.
    fn disks(&self) -> impl Iterator<Item = &SimDisk> {
        [&self.file].into_iter().chain(&self.backing)
    }

    /// Whether a request to a file has failed since [`World::mend`].
    pub fn has_failed(&self) -> bool {
        self.disks().any(SimDisk::has_failed_write)
    }

    /// No request to the files fails from now on.
    pub fn mend(&self) {
        for disk in self.disks() {
            disk.revive();
            disk.forgive();
        }
    }

    /// The backing file, if it is an image and the image names it.
    pub fn backing_image(&self) -> Option<&SimDisk> {
        self.backing.as_ref().filter(|_| self.has_backing.get() && self.shape.backing_bits.is_some())
    }

    /// Opens the backing file for reading.
    pub fn open_backing(&self, simulation: &Simulation) {
        let Some(disk) = self.backing.clone().filter(|_| self.has_backing.get()) else { return };
        let device: Arc<dyn Device> = Arc::new(disk);
        let opened = match self.backing_image() {
            None => Ok(device),
            Some(_) => {
                let cache_bytes = self.shape.cache_bytes;
                let slow = Fault::new(device);
                slow.add(Rule::new(Action::Delay(self.shape.backing_delay_ns)).on(&[Op::Read]));
                let device: Arc<dyn Device> = Arc::new(slow);
                let image = simulation.cores()[0].remote().block_on(|_| async { Image::open(device).await });
                let opened = image
                    .expect("the core runs")
                    .and_then(|image| Qcow2::new(image, Others::default(), cache_bytes));
                opened.map(|image| Arc::new(image) as Arc<dyn Device>)
            }
        };
        match opened {
            Ok(device) => *self.opened_backing.borrow_mut() = Some(device),
            Err(error) => self.fail(format!("the backing file cannot be read: {error}")),
        }
    }

    /// The image names no backing file any more. If that `is_unused`, it now has other bytes.
    pub fn forget_backing(&self, is_unused: bool) {
        self.has_backing.set(false);
        if let (true, Some(disk)) = (is_unused, &self.backing) {
            disk.poke(0, &vec![0xee; disk.limits().capacity as usize]);
        }
    }

    /// Returns the first failure.
    pub fn failure(&self) -> Option<String> {
        self.failure.borrow().clone()
    }

    /// Whether the snapshot of a deletion may be gone, because an earlier one failed.
    pub fn is_deleted(&self, deletion: &Pending) -> bool {
        let Pending::Deleted(name) = deletion else { return false };
        self.pending.borrow().iter().any(|other| matches!(other, Pending::Deleted(other) if other == name))
    }

    /// The restart log of a boot.
    pub fn restart_log(&self, session: u32) -> RestartLog {
        let file = self.log.try_clone().expect("a descriptor");
        RestartLog::new(file, [self.starts.get(); 16], session, self.shape.log_records)
    }

    /// Turns power on, for a boot that ends with a kill or a power loss.
    pub fn begin_boot(&self, is_kill: bool) {
        self.machine.power_on();
        self.machine.set_kill(is_kill);
        self.machine.wake_at_crash(&Waker::from(self.log_at_end.clone()));
    }

    /// Power has gone, or the process was killed, and every request has ended. `is_logged`: a
    /// restart log has, and the next process reads, what a kill would lose.
    pub fn end_boot(&self, is_logged: bool) {
        self.log_at_end.restore();
        self.opened_backing.take();
        let mut oracle = self.disk.oracle.borrow_mut();
        match self.machine.is_kill() {
            true if is_logged => oracle.kill(),
            true => {
                // The content that a read then finds stays.
                self.disks().for_each(SimDisk::write_cache);
                oracle.crash();
            }
            false => {
                self.starts.set(self.starts.get() + 1);
                self.disks().for_each(SimDisk::lose_cache);
                oracle.crash();
            }
        }
        self.mend();
        let is_restored = self.machine.is_kill() && is_logged;
        if let Some(bitmap) = self.bitmap.as_ref().filter(|bitmap| !bitmap.is_saved.get() && !is_restored) {
            bitmap.clear(&self.file, 1 << self.shape.cluster_bits, &oracle);
        }
    }
}

impl Host for World {
    fn machine(&self) -> &Machine {
        &self.machine
    }

    fn goes_on(&self) -> bool {
        self.machine.is_on() && self.failure.borrow().is_none()
    }

    fn fail(&self, what: String) {
        self.failure.borrow_mut().get_or_insert(what);
    }

    fn count_operation(&self) {
        self.count(|stats| stats.operations += 1);
    }

    fn excuses(&self, error: IoError) -> bool {
        match error {
            // One failed write may fail several requests: those of its flush, and of the next.
            IoError::Medium => self.has_failed(),
            // Clusters that have leaked take room.
            IoError::NoSpace => self.shape.fixed.is_some(),
            _ => false,
        }
    }

    fn excuses_read(&self, error: IoError) -> bool {
        error == IoError::Medium && self.has_failed()
    }
}

fn new_disk(name: &str, machine: &Arc<Machine>, shape: &Shape, capacity: u64, seed: u64) -> SimDisk {
    let config = DiskConfig {
        capacity,
        block_size: shape.block_size,
        has_volatile_cache: shape.has_volatile_cache,
        has_zeroes: shape.has_zeroes,
        latency_ns: shape.latency_ns,
        seed,
    };
    SimDisk::new(name, machine, &config)
}

/// New data for a range, which is durable.
fn write(oracle: &mut Oracle, offset: u64, len: u64) -> Vec<u8> {
    let (lba, count) = (offset / SECTOR as u64, len / SECTOR as u64);
    let mut bytes = vec![0; len as usize];
    let version = oracle.new_version();
    oracle.fill(lba, version, &mut bytes);
    let ticket = oracle.begin_write(lba, count, version);
    oracle.end_write(lba, count, ticket, true, true);
    bytes
}

/// Makes a range zeroes, which are durable.
fn clear(oracle: &mut Oracle, offset: u64, len: u64) {
    let (lba, count) = (offset / SECTOR as u64, len / SECTOR as u64);
    let ticket = oracle.begin_write(lba, count, crate::ZEROES);
    oracle.end_write(lba, count, ticket, true, true);
}

/// The file of a backing image with clusters of `1 << cluster_bits` bytes, of which some are
/// compressed zeroes, and most have data. `content`: that of the part with clusters.
fn backing_image(
    shape: &Shape,
    cluster_bits: u32,
    oracle: &mut Oracle,
    content: &mut [u8],
    rng: &mut Rng,
) -> Vec<u8> {
    let mut options = Options::new(shape.size);
    (options.cluster_bits, options.refcount_order) = (cluster_bits, 4);
    let cluster = options.cluster_size();
    let mut writer = Writer::new(options, Bytes(Vec::new())).expect("options that fit");
    let mut offset = 0;
    for part in content.chunks_mut(cluster as usize) {
        let written = match rng.below(4) {
            0 => Ok(()),
            1 if part.len() as u64 == cluster => writer.write_compressed(offset, part),
            _ => {
                part.copy_from_slice(&write(oracle, offset, part.len() as u64));
                let rest = cluster.min(shape.size - offset) as usize;
                let mut whole = part.to_vec();
                whole.resize(rest, 0);
                writer.write(offset, &whole)
            }
        };
        written.expect("memory");
        offset += cluster;
    }
    let (Bytes(mut bytes), len) = writer.finish().expect("memory");
    bytes.resize(len as usize, 0);
    bytes
}

/// The file of a new image, whether it has a snapshot, and its bitmap. `content`: that of the
/// backing file, and then that of the disk.
fn create(
    shape: &Shape,
    oracle: &mut Oracle,
    content: &mut [u8],
    rng: &mut Rng,
) -> (Vec<u8>, bool, Option<Bitmap>) {
    let mut options = Options::new(shape.size);
    options.cluster_bits = shape.cluster_bits;
    options.refcount_order = shape.refcount_order;
    options.has_extended_l2 = shape.has_extended_l2;
    let format = if shape.backing_bits.is_some() { "qcow2" } else { "raw" };
    options.backing = shape.backing.map(|_| ("backing".into(), format.into()));
    let cluster = options.cluster_size();
    let mut writer = Writer::new(options, Bytes(Vec::new())).expect("options that fit");
    let mut data = 0;
    for offset in (0..shape.size).step_by(cluster as usize) {
        let len = cluster.min(shape.size - offset);
        let own = &mut content[offset as usize..][..len as usize];
        let kind = rng.below(12);
        let written = if kind < shape.density && data < shape.most_data {
            data += 1;
            own.copy_from_slice(&write(oracle, offset, len));
            writer.write(offset, own)
        } else if kind == 11 && len == cluster {
            own.fill(0);
            clear(oracle, offset, len);
            writer.write_compressed(offset, &vec![0; len as usize])
        } else if kind == 10 {
            own.fill(0);
            clear(oracle, offset, len);
            writer.write_zeroes(offset)
        } else {
            Ok(())
        };
        written.expect("memory");
    }
    let (Bytes(mut bytes), len) = writer.finish().expect("memory");
    bytes.resize(len as usize, 0);
    let is_shared = shape.has_snapshot && share(&mut bytes, shape);
    let bitmap = shape.bitmap.and_then(|bits| Bitmap::add(&mut bytes, shape, bits));
    (bytes, is_shared, bitmap)
}

/// Makes an internal snapshot of an image whose refcounts have 16 bits, if its last refcount block
/// has room: the disk then shares all its clusters and L2 tables. Returns whether it has.
fn share(image: &mut Vec<u8>, shape: &Shape) -> bool {
    let geometry = Geometry {
        cluster_bits: shape.cluster_bits,
        has_extended_l2: shape.has_extended_l2,
        has_data_file: false,
        is_v2: false,
    };
    let cluster = geometry.cluster_size();
    let l1 = word(image, 40);
    let l1_bytes = 8 * shape.size.div_ceil(geometry.l2_entries() * cluster);
    let Some(table) = append(image, cluster, 1 + l1_bytes.div_ceil(cluster)) else { return false };
    let copy = table + cluster;
    for at in (l1..l1 + l1_bytes).step_by(8) {
        let entry = word(image, at) & !COPIED;
        image[at as usize..][..8].copy_from_slice(&entry.to_be_bytes());
        if entry == 0 {
            continue;
        }
        refer(image, cluster, entry / cluster);
        for slot in (entry..entry + cluster).step_by(geometry.entry_bytes()) {
            let data = word(image, slot) & !COPIED;
            image[slot as usize..][..8].copy_from_slice(&data.to_be_bytes());
            let clusters = geometry.host_clusters(Entry { word: data, bitmap: 0 });
            clusters.for_each(|number| refer(image, cluster, number));
        }
    }
    image.copy_within(l1 as usize..(l1 + l1_bytes) as usize, copy as usize);
    let mut snapshot = [0; 60];
    snapshot[..8].copy_from_slice(&copy.to_be_bytes());
    snapshot[8..12].copy_from_slice(&(l1_bytes as u32 / 8).to_be_bytes());
    snapshot[12..16].copy_from_slice(&[0, 1, 0, 1]); // lengths of identifier and name
    snapshot[39] = 16; // bytes of extra data: two numbers
    snapshot[48..56].copy_from_slice(&shape.size.to_be_bytes());
    snapshot[56..58].copy_from_slice(b"1s");
    image[table as usize..][..60].copy_from_slice(&snapshot);
    image[60..64].copy_from_slice(&1u32.to_be_bytes());
    image[64..72].copy_from_slice(&table.to_be_bytes());
    true
}

/// A file in memory.
struct Bytes(Vec<u8>);

impl Output for Bytes {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> std::io::Result<()> {
        let end = offset as usize + bytes.len();
        if self.0.len() < end {
            self.0.resize(end, 0);
        }
        self.0[offset as usize..end].copy_from_slice(bytes);
        Ok(())
    }
}
