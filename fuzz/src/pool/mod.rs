//! Hostile pools: edited copies of a pool's table, with valid checksums if the input asks for them.
//!
//! An input takes a disk after a creation, changes or a crash (`story`) and edits the copies of its
//! table (`edit`). Then it does the same as `freestone pool check`, `pool repair` and the daemon:
//! it inspects, repairs, chooses and opens the pool. It creates, grows, renames and deletes
//! volumes, writes to them, and opens the pool again. Each step may be refused.
//!
//! Nothing may panic. Inspecting and a refused opening write nothing. The next opening must find a
//! repaired or chosen table. Volumes must keep their data, so they never overlap each other or the
//! table.

mod disk;
mod edit;
mod story;

use crate::input::Input;
use block::{Device, Flags, Op};
use disk::Disk;
use reactor::{CoreConfig, CoreRef, Cores};
use std::sync::{Arc, OnceLock};
use volume::store::{self, Copy, Found};
use volume::{Pool, PoolError, pool};

/// Bytes of the disk.
const CAPACITY: u64 = 64 << 20;
/// Bytes written at both ends of a volume.
const BLOCK: usize = 512;
const MAX_EDITS: usize = 32;

/// The core that does the I/O of every disk.
fn core() -> CoreRef {
    static CORES: OnceLock<Cores> = OnceLock::new();
    CORES.get_or_init(|| Cores::start(&[CoreConfig::default()]).expect("a core")).get(0)
}

/// Runs one input.
///
/// # Panics
/// When the pool violates a requirement.
pub fn run(bytes: &[u8]) {
    static BASES: OnceLock<Vec<story::Base>> = OnceLock::new();
    let bases = BASES.get_or_init(story::all);
    let mut input = Input::new(bytes);
    let (base, flags) = (&bases[input.below(bases.len())], input.u8());
    let steps = [input.u32(), input.u32(), input.u32()];
    let mut image = base.image.clone();
    let is_untouched = input.is_empty() && flags & 8 == 0;
    for _ in 0..MAX_EDITS {
        if input.is_empty() {
            break;
        }
        edit::edit(&mut image, bases, &mut input);
    }
    if flags & 1 == 0 {
        edit::seal(&mut image);
    }
    let disk = Arc::new(Disk::holding(image, CAPACITY));
    let device: Arc<dyn Device> = disk.clone();
    if flags & 2 != 0 {
        look(&disk, &device);
    }
    if flags & 4 != 0 {
        repair(&device);
    }
    if flags & 8 != 0 {
        choose(&device, usize::from(flags >> 4));
    }
    let before = disk.image();
    match Pool::open(device.clone(), core()) {
        Ok(pool) => {
            if is_untouched {
                assert_eq!(Some(names(&pool)), base.volumes, "the volumes of a pool that was not edited");
            }
            use_pool(pool, &device, &steps);
        }
        Err(error) => {
            assert!(!is_untouched || base.volumes.is_none(), "a pool that was not edited: {error}");
            assert!(!error.to_string().is_empty());
            assert_eq!(disk.image(), before, "a refused opening has written: {error}");
        }
    }
}

fn names(pool: &Pool) -> Vec<String> {
    pool.volumes().into_iter().map(|volume| volume.name.to_string()).collect()
}

fn inspect(device: &Arc<dyn Device>) -> Vec<Copy> {
    pool::inspect(device, &core()).expect("the disk answers")
}

/// Does the same as `freestone pool check`.
fn look(disk: &Disk, device: &Arc<dyn Device>) {
    let before = disk.image();
    let copies = inspect(device);
    let said: String = copies.iter().map(Copy::to_string).collect();
    assert!(said.len() < 4096, "four copies in {} characters", said.len());
    if let Err(error) = store::choose(copies) {
        assert!(!error.to_string().is_empty());
    }
    assert_eq!(disk.image(), before, "a look has written");
}

/// Returns the table that an opening would find.
fn found(device: &Arc<dyn Device>) -> Option<Found> {
    store::choose(inspect(device)).ok()
}

/// Does the same as `freestone pool repair`.
fn repair(device: &Arc<dyn Device>) {
    let before = found(device);
    if pool::repair(device, &core()).is_ok() {
        let (before, after) = (before.expect("it was readable"), found(device).expect("it was repaired"));
        assert!(after.is_whole(), "damaged after the repair: {:?}", after.damaged());
        assert_eq!(before.table, after.table, "a repair has changed the table");
    }
}

/// Does the same as `freestone pool repair` with a chosen copy.
fn choose(device: &Arc<dyn Device>, which: usize) {
    let copies = inspect(device);
    let Some(table) = copies[which % copies.len()].table() else { return };
    if pool::choose(device, &core(), table).is_ok() {
        let after = found(device).expect("a table was chosen");
        assert!(after.is_whole(), "damaged although a table was chosen: {:?}", after.damaged());
        assert_eq!(after.table.volumes, table.volumes);
    }
}

fn use_pool(pool: Pool, device: &Arc<dyn Device>, steps: &[u32]) {
    for step in steps {
        let [action, which, name, size] = step.to_le_bytes();
        let all = pool.volumes();
        let key = all.get(usize::from(which) % all.len().max(1)).map(|volume| volume.name.to_string());
        let key = key.unwrap_or_else(|| "v0".into());
        let name = story::name(name);
        let size = match size {
            0..=127 => u64::from(size) << 20,
            128..=191 => u64::from(size) * 512,
            _ => u64::MAX - u64::from(size) * 512 + 1,
        };
        match action % 8 {
            0 => drop(pool.create_volume(name, size)),
            1 => drop(pool.grow_volume(&key, size)),
            2 => drop(pool.rename_volume(&key, name)),
            3 => drop(pool.delete_volume(&key)),
            4 => drop(pool.extend()),
            5 => drop(pool.check().expect("the disk answers")),
            6 => drop(pool.repair()),
            _ => assert!(Pool::check_fits(&**device, size).is_ok() || size > CAPACITY / 2 || size == 0),
        }
    }
    let volumes = pool.volumes();
    let (taken, free) = pool.room();
    assert!(taken <= CAPACITY && free <= taken, "{free} of {taken} bytes are free");
    for (number, volume) in volumes.iter().enumerate() {
        touch(&pool, volume.name.as_str(), Op::Write, number as u8).expect("the disk takes writes");
    }
    drop(pool);
    let pool = Pool::open(device.clone(), core()).expect("it was open");
    assert_eq!(pool.volumes(), volumes, "other volumes than before");
    for (number, volume) in volumes.iter().enumerate() {
        touch(&pool, volume.name.as_str(), Op::Read, number as u8).expect("the disk answers");
    }
    assert!(pool.check().expect("the disk answers").is_whole() || pool.repair().is_ok());
}

/// Writes both ends of a volume, or reads them and compares.
fn touch(pool: &Pool, key: &str, op: Op, mark: u8) -> Result<(), PoolError> {
    let volume = pool.open_volume(key)?;
    let of = key.to_owned();
    core().block_on(move |_| async move {
        let (channel, capacity) = (volume.open_channel().expect("it is open"), volume.limits().capacity);
        for at in [0, capacity - BLOCK as u64] {
            let mut buffer = reactor::current().buffers().take(BLOCK).await;
            buffer.as_mut_slice().fill(if op == Op::Write { mark } else { !mark });
            let (buffer, result) = buffer.transfer(&*channel, op, Flags::NONE, at).await;
            result.expect("the disk answers");
            assert!(buffer.as_slice().iter().all(|byte| *byte == mark), "volume {of} at {at}: other data");
        }
    })?;
    Ok(())
}
