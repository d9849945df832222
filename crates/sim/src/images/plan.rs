//! The events of a run, drawn from a seed.

use crate::machine::CrashAt;
use base::{Rng, mix};

/// The image and its machine.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Bytes of the disk.
    pub size: u64,
    /// The cluster size as a power of two.
    pub cluster_bits: u32,
    /// Whether clusters have subclusters.
    pub has_extended_l2: bool,
    /// A refcount has `1 << refcount_order` bits.
    pub refcount_order: u32,
    /// Of twelve clusters of the new image so many have data.
    pub density: u64,
    /// Most clusters of the new image with data.
    pub most_data: u64,
    /// Whether the disk shares all its clusters with an internal snapshot.
    pub has_snapshot: bool,
    /// Bytes of a granule of the dirty bitmap as a power of two, if there is one.
    pub bitmap: Option<u8>,
    /// Bytes of the backing file, if there is one.
    pub backing: Option<u64>,
    /// The cluster size of the backing file as a power of two, if it is an image. Its disk is as
    /// large as that of the image, with zeroes behind [`Shape::backing`].
    pub backing_bits: Option<u32>,
    /// How late reads of that image by the one above it start, in nanoseconds.
    pub backing_delay_ns: u64,
    /// Bytes that the file can have, if it cannot grow.
    pub fixed: Option<u64>,
    pub block_size: u32,
    pub has_volatile_cache: bool,
    pub has_zeroes: bool,
    pub latency_ns: u64,
    /// Cores with users.
    pub cores: usize,
    pub cache_bytes: u64,
    /// Records of the restart log.
    pub log_records: u32,
}

/// The events between power on and power off.
#[derive(Clone, Debug, Default)]
pub struct Boot {
    pub seed: u64,
    /// The requests of each user.
    pub users: Vec<u64>,
    /// When power goes; without it the image is closed.
    pub crash: Option<CrashAt>,
    /// When power goes while the image is closed, counted from there.
    pub crash_at_end: Option<CrashAt>,
    /// Whether only the process ends, and disks keep their caches.
    pub is_kill: bool,
    /// Whether the image is opened with its restart log.
    pub has_log: bool,
    /// Changes of internal snapshots, streams and commits, while users work.
    pub steps: Vec<Step>,
    /// The write that fails, counted from the first request of a user; 0 for none.
    pub failing_write: u32,
    /// From then on, one request in so many to the files fails; 0 for none.
    pub failing: u64,
}

impl Boot {
    /// Whether requests to the files may fail.
    pub fn has_failures(&self) -> bool {
        self.failing_write > 0 || self.failing > 0
    }

    /// Whether the boot commits the image to its backing file.
    pub fn has_commit(&self) -> bool {
        self.steps.iter().any(|step| matches!(step.command, Command::Commit))
    }
}

/// A command to an image in use.
#[derive(Clone, Copy, Debug)]
pub struct Step {
    /// Requests of users since the last one.
    pub after: u64,
    /// The command.
    pub command: Command,
}

/// See [`Step`].
#[derive(Clone, Copy, Debug)]
pub enum Command {
    /// Makes an internal snapshot.
    Create,
    /// Deletes the oldest snapshot; makes one if there is none.
    Delete,
    /// Copies the data of the backing file into the image, which then has none.
    Stream,
    /// Copies the data of the image to the backing file, which is an image.
    Commit,
}

/// A run.
#[derive(Clone, Debug)]
pub struct Plan {
    pub(super) seed: u64,
    pub(super) shape: Shape,
    pub(super) boots: Vec<Boot>,
}

impl Plan {
    /// Draws the plan of a seed. `has_faults`: requests to the files fail often.
    pub fn draw(seed: u64, has_faults: bool) -> Plan {
        let mut rng = Rng::new(mix(seed));
        let mut shape = Shape::draw(&mut rng);
        // Of a large disk few tables are in memory.
        let most_steps = if shape.most_data < u64::MAX { 4 } else { 2 };
        let mut boots: Vec<Boot> = (0..2 + rng.below(6)).map(|_| Boot::draw(&mut rng)).collect();
        for boot in &mut boots {
            boot.has_log = !rng.one_in(4);
            boot.is_kill = rng.one_in(2);
            let steps = if rng.one_in(3) { 1 + rng.below(most_steps) } else { 0 };
            let mut step = || {
                let command = match rng.below(6) {
                    0..2 => Command::Delete,
                    2..4 if shape.backing.is_some() => Command::Stream,
                    _ => Command::Create,
                };
                Step { after: rng.log_uniform(60), command }
            };
            boot.steps = (0..steps).map(|_| step()).collect();
        }
        if shape.most_data == u64::MAX && rng.one_in(2) {
            (shape.bitmap, shape.refcount_order) = (Some(9 + rng.below(6) as u8), 4);
        }
        for boot in &mut boots {
            if rng.one_in(4) {
                let count = 1 + rng.log_uniform(30);
                let kind = if rng.one_in(2) { CrashAt::WriteStarted } else { CrashAt::WriteEnded };
                (boot.crash, boot.crash_at_end) = (None, Some(kind(count)));
            }
        }
        // Requests that end at the same time change entries in the same turn.
        if rng.one_in(4) {
            shape.latency_ns = 1;
        }
        commits(&mut Rng::new(mix(seed)).fork(9), &mut shape, &mut boots);
        if has_faults {
            faults(&mut Rng::new(mix(seed)).fork(10), &mut shape, &mut boots);
        }
        Plan { seed, shape, boots }
    }
}

/// Lets requests to the files fail often. Subclusters may have several blocks, so that writes to a
/// part of one copy the rest.
fn faults(rng: &mut Rng, shape: &mut Shape, boots: &mut [Boot]) {
    if shape.has_extended_l2 {
        let larger = rng.below(3) as u32;
        shape.cluster_bits += larger;
        shape.fixed = shape.fixed.map(|bytes| bytes << larger);
    }
    for boot in boots {
        boot.failing = if rng.one_in(4) { 0 } else { 2 + rng.log_uniform(200) };
    }
}

/// Lets some runs with a backing file have one that is an image, with commits to it.
fn commits(rng: &mut Rng, shape: &mut Shape, boots: &mut [Boot]) {
    if shape.backing.is_none() || rng.one_in(2) {
        return;
    }
    let least = if shape.block_size == 4096 { 12 } else { 9 };
    shape.backing_bits = Some(least + rng.below(u64::from(17 - least)) as u32);
    shape.has_snapshot &= rng.one_in(4);
    for boot in boots {
        for step in &mut boot.steps {
            if rng.one_in(2) {
                step.command = Command::Commit;
            }
        }
        if boot.steps.is_empty() && rng.one_in(2) {
            boot.steps.push(Step { after: rng.log_uniform(60), command: Command::Commit });
        }
    }
    if rng.one_in(2) {
        shape.backing_delay_ns = shape.latency_ns * rng.log_uniform(50);
    }
}

impl Shape {
    fn draw(rng: &mut Rng) -> Shape {
        let has_extended_l2 = rng.one_in(4);
        let cluster_bits = if has_extended_l2 { 14 } else { 9 + rng.below(5) as u32 };
        let block_size = if cluster_bits >= 12 && !has_extended_l2 && rng.one_in(3) { 4096 } else { 512 };
        // With the widest refcounts and the smallest clusters the refcount table soon is too short.
        let is_long = cluster_bits == 9 && rng.one_in(3);
        let size = match is_long {
            true => 3 << 20,
            false => (64 << 10) * (1 + rng.below(8)) + u64::from(block_size) * rng.below(9),
        };
        let backing =
            rng.one_in(3).then(|| u64::from(block_size) * (1 + rng.below(size / u64::from(block_size))));
        let clusters = size >> cluster_bits;
        // With little room, many writes wait for the release of clusters.
        let spare = if rng.one_in(2) { clusters / 16 + 16 } else { clusters / 4 + 40 };
        let room = (clusters + spare) << cluster_bits;
        let has_snapshot = !is_long && rng.one_in(3);
        let refcount_order = match (is_long, has_snapshot) {
            (true, _) => 6,
            (_, true) => 4,
            _ => rng.below(7) as u32,
        };
        Shape {
            size,
            cluster_bits,
            has_extended_l2,
            refcount_order,
            // 4096 clusters fill the first refcount table: 164 of them have metadata.
            most_data: if is_long { 3850 + rng.below(60) } else { u64::MAX },
            density: if is_long { 8 } else { 1 + 4 * u64::from(has_snapshot) },
            has_snapshot,
            bitmap: None,
            backing: backing.filter(|_| !is_long),
            backing_bits: None,
            backing_delay_ns: 0,
            fixed: rng.one_in(4).then_some(room),
            block_size,
            has_volatile_cache: !rng.one_in(4),
            has_zeroes: !rng.one_in(3),
            latency_ns: [1000, 10_000, 100_000][rng.below(3) as usize],
            cores: 1 + rng.below(2) as usize,
            cache_bytes: 4096 * (1 + rng.below(8)),
            log_records: rng.log_uniform(512) as u32,
        }
    }
}

impl Boot {
    fn draw(rng: &mut Rng) -> Boot {
        let users = (0..1 + rng.below(4)).map(|_| 1 + rng.log_uniform(100)).collect();
        let crash = match rng.below(8) {
            0..3 => Some(CrashAt::WriteStarted(1 + rng.log_uniform(400))),
            3..6 => Some(CrashAt::WriteEnded(1 + rng.log_uniform(400))),
            _ => None,
        };
        let failing_write = if rng.one_in(4) { 1 + rng.log_uniform(100) as u32 } else { 0 };
        Boot { seed: rng.draw(), users, crash, failing_write, ..Boot::default() }
    }
}
