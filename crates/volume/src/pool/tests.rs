//! Pools: operations, refusals, and the state after a loss of power.

use super::*;
use base::Rng;
use block::{DeviceError, IoFuture, IoResult, KernelBacking, MemoryRegion, Op, StatusReport};
use conformance::Suite;
use drivers::mem::{MemDevice, Options};
use layers::fault::{Action, Fault, Rule};
use reactor::{CoreConfig, Cores};
use std::rc::Rc;

const MIB: u64 = 1 << 20;

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn disk(size: u64) -> Arc<dyn Device> {
    Arc::new(MemDevice::new(&Options::new(size)).unwrap())
}

/// The core that all tests share.
fn core() -> CoreRef {
    static CORES: std::sync::OnceLock<Cores> = std::sync::OnceLock::new();
    CORES.get_or_init(|| Cores::start(&[CoreConfig::default()]).unwrap()).get(0)
}

fn open(device: Arc<dyn Device>) -> Result<Pool, PoolError> {
    Pool::open(device, core())
}

fn pool(device: &Arc<dyn Device>) -> Pool {
    Pool::create(device.clone(), name("data"), core()).unwrap()
}

fn pieces(pool: &Pool) -> Vec<(String, u64, usize)> {
    pool.volumes().iter().map(|info| (info.name.to_string(), info.size, info.pieces)).collect()
}

#[test]
fn a_pool_takes_what_its_device_has_become_larger_by() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    let file = std::fs::File::create(&path).unwrap();
    file.set_len(16 * MIB).unwrap();
    let options = drivers::io_uring::Options::new(&path);
    let device: Arc<dyn Device> = Arc::new(drivers::io_uring::UringDevice::open(&options).unwrap());
    let pool = pool(&device);
    assert_eq!(pool.extend().unwrap(), (12 * MIB, 12 * MIB));
    pool.create_volume(name("one"), 12 * MIB).unwrap();
    file.set_len(32 * MIB + 5000).unwrap();
    device.refresh().unwrap();
    assert_eq!((pool.extend().unwrap(), pool.room()), ((12 * MIB, 28 * MIB), (28 * MIB, 16 * MIB)));
    assert_eq!(pool.grow_volume("one", 28 * MIB).unwrap().pieces, 1);
    drop(pool);
    assert_eq!(open(device).unwrap().room(), (28 * MIB, 0));
}

#[test]
fn volumes_are_made_found_again_grown_renamed_and_removed() {
    let device = disk(64 * MIB);
    let pool = pool(&device);
    assert_eq!(pool.room(), (60 * MIB, 60 * MIB));
    let one = pool.create_volume(name("one"), 10 * MIB).unwrap();
    pool.create_volume(name("two"), 5 * MIB + 512).unwrap();
    assert_eq!(pool.room().1, 44 * MIB);
    assert_eq!(pool.rename_volume("two", name("other")).unwrap().name, name("other"));
    assert_eq!(pool.rename_volume("other", name("other")).unwrap().size, 5 * MIB + 512);
    // A user that has the volume open keeps it.
    let (open_two, uuid) = (pool.open_volume("other").unwrap(), Uuid::random().unwrap());
    let two = pool.identify_volume("other", uuid, name("two")).unwrap();
    assert_eq!((two.uuid, two.is_open, pool.volumes().len()), (uuid, true, 2));
    assert!(matches!(pool.delete_volume(&uuid.to_string()), Err(PoolError::InUse(_))));
    drop(open_two);
    let known_as = |key| pool.open_volume(key).unwrap().name().to_owned();
    let before = known_as("two");
    assert_eq!(pool.rename_volume(&uuid.to_string(), name("other")).unwrap().uuid, uuid);
    assert_eq!(known_as("other"), before, "a client would take it for another disk");
    // Another volume follows "one"; "other", the last volume, has free room behind it.
    assert_eq!(pool.grow_volume("one", 12 * MIB).unwrap().pieces, 2);
    assert_eq!(pool.grow_volume("one", 13 * MIB).unwrap().pieces, 2);
    assert_eq!(pool.grow_volume("other", 6 * MIB).unwrap().pieces, 1, "its last unit had room");
    let before = pool.volumes();
    drop(pool);
    let pool = open(device).unwrap();
    assert_eq!((pool.volumes(), pool.identity().0), (before, name("data")));
    assert_eq!(pool.delete_volume(&one.uuid.to_string()).unwrap().name, name("one"));
    assert_eq!(pieces(&pool), [("other".to_owned(), 6 * MIB, 1)]);
    assert_eq!(pool.room().1, 54 * MIB);
}

#[test]
fn impossible_changes_are_refused_with_a_reason_and_change_nothing() {
    let device = disk(16 * MIB);
    let said = |result: Result<Info, PoolError>| result.unwrap_err().to_string();
    let no_pool = open(device.clone()).err().unwrap().to_string();
    assert_eq!(no_pool, "mem: no pool found");
    let pool = pool(&device);
    pool.create_volume(name("one"), MIB).unwrap();
    let before = pool.volumes();
    assert_eq!(said(pool.create_volume(name("one"), MIB)), "volume one already exists");
    assert_eq!(said(pool.create_volume(name("x"), 12 * MIB)), "12582912 bytes: 11534336 are free");
    assert_eq!(said(pool.create_volume(name("x"), 0)), "a volume of 0 bytes: a volume must not be empty");
    assert!(said(pool.create_volume(name("x"), 1000)).ends_with("the device has blocks of 512 bytes"));
    assert!(said(pool.create_volume(name("x"), u64::MAX - 511)).ends_with("11534336 are free"));
    assert_eq!(said(pool.grow_volume("one", MIB)), "a volume of 1048576 bytes: one already has 1048576");
    assert_eq!(said(pool.grow_volume("x", MIB)), "volume \"x\" does not exist");
    assert_eq!(said(pool.delete_volume("")), "volume \"\" does not exist");
    pool.create_volume(name("two"), MIB).unwrap();
    assert_eq!(said(pool.rename_volume("two", name("one"))), "volume one already exists");
    let one = before[0].uuid;
    assert_eq!(said(pool.identify_volume("two", one, name("x"))), "volume x already exists");
    assert_eq!(said(pool.create_copy(one, name("x"), MIB)), "volume x already exists");
    let open = pool.open_volume("one").unwrap();
    assert_eq!(said(pool.delete_volume("one")), "volume one is in use");
    drop(open);
    pool.delete_volume("two").unwrap();
    assert_eq!(pool.volumes(), before);
    let again = Pool::create(device, name("x"), core()).err().unwrap().to_string();
    assert_eq!(again, "mem already contains pool data");
    let small = Pool::create(disk(4 * MIB), name("x"), core()).err().unwrap().to_string();
    assert_eq!(small, "mem has 4194304 bytes: a pool needs 5242880");
}

#[test]
fn a_small_device_has_no_pool_and_a_part_of_one_is_refused() {
    let none = |error: &PoolError| matches!(error, PoolError::Read(_, ReadError::Decode(DecodeError::None)));
    for size in [512, store::SETS[0][1], MIB + 512, 3 * MIB] {
        let error = open(disk(size)).err().unwrap();
        assert!(none(&error), "{size}: {error}");
        let copies = inspect(&disk(size), &core()).unwrap();
        assert!(copies.iter().all(|copy| copy.state == store::State::Bad(DecodeError::None)), "{size}");
    }
    let device = Arc::new(MemDevice::new(&Options::new(64 * MIB)).unwrap());
    let base: Arc<dyn Device> = device.clone();
    drop(pool(&base));
    for size in [2 * MIB, 3 * MIB, 4 * MIB] {
        device.resize(size).unwrap();
        let error = open(base.clone()).err().unwrap();
        assert!(!none(&error), "{size}: {error}");
    }
}

#[test]
fn a_device_that_has_become_smaller_than_its_pool_is_not_opened() {
    let device = Arc::new(MemDevice::new(&Options::new(64 * MIB)).unwrap());
    let base: Arc<dyn Device> = device.clone();
    drop(pool(&base));
    device.resize(63 * MIB).unwrap();
    let refusal = open(base).err().unwrap().to_string();
    assert_eq!(refusal, "mem has 66060288 bytes: a pool needs 67108864");
}

#[test]
fn a_pool_that_is_refused_for_its_size_keeps_its_damaged_copy() {
    let device = Arc::new(MemDevice::new(&Options::new(64 * MIB)).unwrap());
    let base: Arc<dyn Device> = device.clone();
    drop(pool(&base));
    let place = store::SETS[0][1];
    let zeroed = on(&base, &core(), async move |channel: &dyn Channel| {
        store::zero(channel, &Limits::new(64 * MIB), place, ALIGNMENT).await
    });
    zeroed.unwrap();
    device.resize(63 * MIB).unwrap();
    assert!(matches!(open(base.clone()), Err(PoolError::TooSmall { .. })));
    let is_damaged = inspect(&base, &core()).unwrap()[1].table().is_none();
    assert!(is_damaged, "the refused opening has written");
    device.resize(64 * MIB).unwrap();
    assert_eq!(open(base).unwrap().rewritten_at_opening(), [place]);
}

#[test]
fn a_size_near_the_end_of_all_numbers_does_not_fit_and_is_no_overflow() {
    for size in [u64::MAX - 511, 1 << 63] {
        let refusal = Pool::check_fits(&*disk(64 * MIB), size).unwrap_err();
        assert!(matches!(refusal, PoolError::Full { free, .. } if free == 60 * MIB), "{refusal}");
    }
}

#[test]
fn units_are_whole_stripes() {
    let unit = |optimal_io_size| unit_of(&Limits { optimal_io_size, ..Limits::new(MIB) });
    assert_eq!(
        [0, 4096, 256 << 10, 320 << 10, 3 << 20, 1000].map(unit),
        [MIB, MIB, MIB, (320 << 10) * 4, 3 * MIB, MIB]
    );
}

#[test]
fn a_volume_in_one_piece_passes_the_suite_and_grows_in_place() {
    let pool = pool(&disk(64 * MIB));
    pool.create_volume(name("one"), 32 * MIB).unwrap();
    let volume = pool.open_volume("one").unwrap();
    Suite::new(volume).on_grow(move || drop(pool.grow_volume("one", 40 * MIB).unwrap())).run();
}

#[test]
fn a_volume_in_many_pieces_passes_the_suite_and_grows_to_another_place() {
    let pool = pool(&disk(128 * MIB));
    // Every other unit belongs to another volume.
    for number in 0..40 {
        pool.create_volume(name(&format!("v{number}")), MIB).unwrap();
    }
    (0..40).step_by(2).for_each(|number| drop(pool.delete_volume(&format!("v{number}")).unwrap()));
    let rest = pool.room().1 - 20 * MIB;
    pool.create_volume(name("rest"), rest).unwrap();
    assert_eq!(pool.create_volume(name("one"), 18 * MIB).unwrap().pieces, 18);
    let volume = pool.open_volume("one").unwrap();
    Suite::new(volume).on_grow(move || drop(pool.grow_volume("one", 20 * MIB).unwrap())).run();
}

/// Reads or writes a block of a device.
fn transfer(device: &Arc<dyn Device>, op: Op, offset: u64, fill: u8) -> (IoResult, u8) {
    let device = device.clone();
    let transfer = move |_| async move {
        let channel = device.open_channel().unwrap();
        let mut buffer = reactor::BufferPool::default().take(512).await;
        buffer.as_mut_slice().fill(fill);
        let (buffer, result) = buffer.transfer(&*channel, op, block::Flags::NONE, offset).await;
        (result, buffer.as_slice()[0])
    };
    core().block_on(transfer).unwrap()
}

#[test]
fn users_of_a_volume_share_its_bytes_and_see_no_other_volume() {
    let device = disk(32 * MIB);
    let pool = pool(&device);
    for volume in ["one", "two"] {
        pool.create_volume(name(volume), 4 * MIB).unwrap();
    }
    let [one, same, two] = ["one", "one", "two"].map(|key| pool.open_volume(key).unwrap() as Arc<dyn Device>);
    assert_eq!(transfer(&one, Op::Write, 4 * MIB - 512, 7), (Ok(()), 7));
    assert_eq!(transfer(&same, Op::Read, 4 * MIB - 512, 0), (Ok(()), 7));
    assert_eq!(transfer(&two, Op::Read, 0, 1), (Ok(()), 0));
    assert_eq!(transfer(&one, Op::Write, 4 * MIB, 7).0, Err(IoError::OutOfRange));
    pool.grow_volume("one", 5 * MIB).unwrap();
    assert_eq!((one.limits().capacity, same.limits().capacity), (5 * MIB, 5 * MIB));
    assert_eq!(transfer(&same, Op::Read, 4 * MIB, 1), (Ok(()), 0));
    // Bytes of a deleted volume read as zeroes in the volume that gets its units.
    drop((one, same));
    pool.delete_volume("one").unwrap();
    pool.create_volume(name("new"), 9 * MIB).unwrap();
    let new: Arc<dyn Device> = pool.open_volume("new").unwrap();
    for offset in (0..9 * MIB).step_by(512 << 10) {
        assert_eq!(transfer(&new, Op::Read, offset, 1), (Ok(()), 0));
    }
    assert_eq!(transfer(&new, Op::Read, 4 * MIB - 512, 1), (Ok(()), 0));
}

/// Zeroes `bytes` bytes and returns how many are left.
fn zero(room: &mut Reservation<'_>, bytes: u64) -> u64 {
    let mut once = Some(bytes);
    room.zero(async move |_| once.take().unwrap_or(0)).unwrap()
}

#[test]
fn reserved_room_belongs_to_one_volume_and_blocks_no_other_change() {
    let device = disk(32 * MIB);
    let pool = pool(&device);
    pool.create_volume(name("one"), 4 * MIB).unwrap();
    let before = pool.volumes();
    let said = |result: Result<Info, PoolError>| result.unwrap_err().to_string();
    let mut new = pool.reserve_volume(name("new"), 8 * MIB).unwrap();
    let mut more = pool.reserve_growth("one", 10 * MIB).unwrap();
    assert_eq!((new.left(), zero(&mut new, 3 * MIB), more.left()), (8 * MIB, 5 * MIB, 6 * MIB));
    assert_eq!((pool.volumes(), pool.room().1), (before.clone(), 10 * MIB));
    assert_eq!(said(pool.create_volume(name("new"), MIB)), "volume new already exists");
    assert_eq!(said(pool.rename_volume("one", name("new"))), "volume new already exists");
    assert_eq!(said(pool.create_volume(name("large"), 11 * MIB)), "11534336 bytes: 10485760 are free");
    assert_eq!(said(pool.grow_volume("one", 5 * MIB)), "volume one is in use");
    assert_eq!(said(pool.delete_volume("one")), "volume one is in use");
    // Other volumes are created meanwhile, each in its own place.
    pool.rename_volume("one", name("first")).unwrap();
    let other = pool.create_volume(name("other"), 10 * MIB).unwrap();
    assert_eq!(pool.room().1, 0);
    for reservation in [&mut new, &mut more] {
        while zero(reservation, MIB) > 0 {}
    }
    let new = new.commit().unwrap();
    let grown = more.commit().unwrap();
    assert_eq!((grown.name.as_str(), grown.size, grown.uuid), ("first", 10 * MIB, before[0].uuid));
    assert_eq!(pool.volumes(), [grown, other, new]);
    let volumes = pool.volumes();
    drop(pool);
    assert_eq!(open(device).unwrap().volumes(), volumes);
}

#[test]
fn an_abandoned_reservation_is_free_again_and_not_durable() {
    let device = disk(32 * MIB);
    let pool = pool(&device);
    pool.create_volume(name("one"), 4 * MIB).unwrap();
    let (before, room) = (pool.volumes(), pool.room());
    let mut new = pool.reserve_volume(name("new"), 8 * MIB).unwrap();
    zero(&mut new, 4 * MIB);
    drop((new, pool.reserve_growth("one", 8 * MIB).unwrap()));
    assert_eq!((pool.volumes(), pool.room()), (before.clone(), room));
    pool.reserve_growth("one", 8 * MIB).unwrap();
    drop(pool.reserve_volume(name("new"), 8 * MIB).unwrap());
    drop(pool);
    let pool = open(device).unwrap();
    assert_eq!((pool.volumes(), pool.room()), (before, room));
}

#[test]
#[should_panic = "would expose former content"]
fn a_volume_is_not_made_before_all_of_it_reads_as_zeroes() {
    let pool = pool(&disk(32 * MIB));
    let mut new = pool.reserve_volume(name("new"), 8 * MIB).unwrap();
    zero(&mut new, 4 * MIB);
    let _ = new.commit();
}

#[test]
fn a_copy_has_nothing_of_anothers_behind_its_end() {
    let pool = pool(&disk(16 * MIB));
    pool.create_volume(name("old"), 4 * MIB).unwrap();
    let old: Arc<dyn Device> = pool.open_volume("old").unwrap();
    for offset in (0..4 * MIB).step_by(512) {
        assert_eq!(transfer(&old, Op::Write, offset, 7), (Ok(()), 7));
    }
    drop(old);
    pool.delete_volume("old").unwrap();
    let uuid = Uuid::random().unwrap();
    assert_eq!(pool.create_copy(uuid, name("copy"), MIB + 512).unwrap().uuid, uuid);
    pool.grow_volume("copy", 4 * MIB).unwrap();
    let copy: Arc<dyn Device> = pool.open_volume("copy").unwrap();
    for offset in (MIB + 512..4 * MIB).step_by(512) {
        assert_eq!(transfer(&copy, Op::Read, offset, 1), (Ok(()), 0), "{offset}");
    }
}

/// A device with a volatile cache that remembers in which order it was written.
struct Recorder {
    limits: Limits,
    log: Arc<Mutex<Vec<Entry>>>,
}

#[derive(Clone)]
enum Entry {
    Write(u64, Vec<u8>),
    Flush,
}

struct RecorderChannel {
    limits: Limits,
    log: Arc<Mutex<Vec<Entry>>>,
}

/// The content of a device after these entries. Unflushed entries may be lost or torn: `choose`
/// returns how many bytes of each have arrived.
fn image(log: &[Entry], len: u64, mut choose: impl FnMut(usize) -> usize) -> Vec<u8> {
    let flushed = log.iter().rposition(|entry| matches!(entry, Entry::Flush)).unwrap_or(0);
    let mut bytes = vec![0xee; len as usize];
    for (place, entry) in log.iter().enumerate() {
        if let Entry::Write(offset, data) = entry {
            let arrived = if place < flushed { data.len() } else { choose(data.len()) };
            bytes[*offset as usize..][..arrived].copy_from_slice(&data[..arrived]);
        }
    }
    bytes
}

impl Device for Recorder {
    fn name(&self) -> &str {
        "recorder"
    }

    fn limits(&self) -> Limits {
        self.limits.clone()
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Ok(Rc::new(RecorderChannel { limits: self.limits.clone(), log: self.log.clone() }))
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
        Ok(self.limits())
    }

    fn map_region(&self, _region: &MemoryRegion) -> Result<(), DeviceError> {
        Ok(())
    }

    fn unmap_region(&self, _region: &MemoryRegion) {}

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(self.name()))
    }
}

impl Channel for RecorderChannel {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        let mut log = self.log.lock().unwrap();
        let mut bytes = vec![0; req.len as usize];
        match req.op {
            Op::Flush => log.push(Entry::Flush),
            Op::Write => {
                req.data.copy_to(&mut bytes);
                log.push(Entry::Write(offset, bytes));
            }
            Op::WriteZeroes => log.push(Entry::Write(offset, bytes)),
            Op::Read => {
                let now = image(&log, self.limits.capacity, |len| len);
                req.data.copy_from(&now[offset as usize..][..bytes.len()]);
            }
            Op::Discard => {}
        }
        IoFuture::ready(Ok(()))
    }

    fn block_status<'a>(&'a self, report: &'a StatusReport, _: u64, len: u64) -> IoFuture<'a> {
        report.answer_data(len)
    }
}

/// Whichever unflushed writes are lost, the pool is in its state before or after the change.
/// Acknowledged changes are present, and a volume never exposes former content of its units.
#[test]
fn a_loss_of_power_at_any_moment_leaves_the_old_or_the_new_table() {
    const LEN: u64 = 8 * MIB;
    let limits = Limits { volatile_cache: true, ..Limits::new(LEN) };
    let log = Arc::new(Mutex::new(Vec::new()));
    let device: Arc<dyn Device> = Arc::new(Recorder { limits, log: log.clone() });
    let pool = pool(&device);
    let steps: [(&str, &dyn Fn()); 6] = [
        ("create", &|| drop(pool.create_volume(name("one"), MIB).unwrap())),
        ("create", &|| drop(pool.create_volume(name("two"), MIB).unwrap())),
        ("grow", &|| drop(pool.grow_volume("one", 2 * MIB).unwrap())),
        ("rename", &|| drop(pool.rename_volume("one", name("other")).unwrap())),
        ("delete", &|| drop(pool.delete_volume("two").unwrap())),
        ("create", &|| drop(pool.create_volume(name("three"), 2 * MIB).unwrap())),
    ];
    let mut rng = Rng::new(11);
    let mut crashes = 0;
    for (what, step) in steps {
        let (first, before) = (log.lock().unwrap().len(), pool.volumes());
        step();
        let (entries, after) = (log.lock().unwrap().clone(), pool.volumes());
        for end in first..=entries.len() {
            for round in 0..6 {
                let bytes = image(&entries[..end], LEN, |len| match (round, rng.below(3)) {
                    (0, _) | (1.., 0) => 0,
                    (1, _) | (2.., 1) => len,
                    _ => rng.below(len as u64 / 512) as usize * 512,
                });
                let left = open(ram(&bytes)).unwrap();
                crashes += 1;
                let found = left.volumes();
                assert!(found == before || found == after, "{what}, {end}: {found:?}");
                assert!(end < entries.len() || found == after, "{what}: acknowledged, and lost");
                if found == after {
                    for info in &after {
                        let volume: Arc<dyn Device> = left.open_volume(info.name.as_str()).unwrap();
                        for offset in (0..info.size).step_by(256 << 10) {
                            assert_eq!(transfer(&volume, Op::Read, offset, 1), (Ok(()), 0), "{what}, {end}");
                        }
                    }
                }
            }
        }
    }
    assert!(crashes > 100, "{crashes}");
}

/// A device in memory that holds these bytes.
fn ram(bytes: &[u8]) -> Arc<dyn Device> {
    let device = disk(bytes.len() as u64);
    let (base, bytes) = (device.clone(), bytes.to_vec());
    let fill = move |_| async move {
        let channel = base.open_channel().unwrap();
        let pool = reactor::BufferPool::default();
        for (number, part) in bytes.chunks(reactor::MAX_BUFFER).enumerate() {
            let mut buffer = pool.take(part.len()).await;
            buffer.as_mut_slice().copy_from_slice(part);
            let at = (number * reactor::MAX_BUFFER) as u64;
            buffer.transfer(&*channel, Op::Write, block::Flags::NONE, at).await.1.unwrap();
        }
    };
    core().block_on(fill).unwrap();
    device
}

/// Damages to one copy of the table: bytes that changed, a sector of zeroes, a block that cannot be
/// read.
#[derive(Clone, Copy, Debug)]
enum Damage {
    Flipped(u64),
    Zeroed(u64),
    Unreadable,
}

impl Damage {
    /// The device with this damage to the copy at an offset.
    fn inflict(self, mut bytes: Vec<u8>, copy: u64) -> Arc<dyn Device> {
        match self {
            Damage::Flipped(sector) => bytes[(copy + sector * 512 + 77) as usize] ^= 0x10,
            Damage::Zeroed(sector) => bytes[(copy + sector * 512) as usize..][..512].fill(0),
            Damage::Unreadable => {
                let fault = Fault::new(ram(&bytes));
                let reads = Rule::new(Action::Error(IoError::Medium)).on(&[Op::Read]);
                fault.add(reads.within(copy..copy + 4096));
                return Arc::new(fault);
            }
        }
        ram(&bytes)
    }

    /// All kinds of damage to a table of `len` bytes.
    fn all(len: u64) -> impl Iterator<Item = Damage> {
        let sectors = 0..len.div_ceil(512);
        sectors.flat_map(|s| [Damage::Flipped(s), Damage::Zeroed(s)]).chain([Damage::Unreadable])
    }
}

const COPIES: [u64; 4] = [64 << 10, 3 << 20, 2 << 20, 1 << 20];

/// Calls `judge` for each step of a recorded pool with the durable volumes before and after it.
fn recorded(mut judge: impl FnMut(&str, &[Entry], usize, (&[Info], &[Info]))) {
    let limits = Limits { volatile_cache: true, ..Limits::new(8 * MIB) };
    let log = Arc::new(Mutex::new(Vec::new()));
    let device: Arc<dyn Device> = Arc::new(Recorder { limits, log: log.clone() });
    let pool = pool(&device);
    let steps: [(&str, &dyn Fn()); 5] = [
        ("create", &|| drop(pool.create_volume(name("one"), MIB).unwrap())),
        ("create", &|| drop(pool.create_volume(name("two"), MIB).unwrap())),
        ("grow", &|| drop(pool.grow_volume("one", 2 * MIB).unwrap())),
        ("delete", &|| drop(pool.delete_volume("two").unwrap())),
        ("rename", &|| drop(pool.rename_volume("one", name("other")).unwrap())),
    ];
    for (what, step) in steps {
        let (first, before) = (log.lock().unwrap().len(), pool.volumes());
        step();
        let (entries, after) = (log.lock().unwrap().clone(), pool.volumes());
        judge(what, &entries, first, (&before, &after));
    }
}

#[test]
fn a_damaged_copy_of_the_table_costs_nothing_and_is_rewritten() {
    let mut opened = 0;
    recorded(|what, entries, _, (_, after)| {
        let bytes = image(entries, 8 * MIB, |len| len);
        for copy in COPIES {
            for damage in Damage::all(512) {
                let device = damage.inflict(bytes.clone(), copy);
                let found = open(device.clone()).unwrap().volumes();
                assert_eq!(found, after, "{what}: {damage:?} at {copy}");
                if !matches!(damage, Damage::Unreadable) {
                    let whole = read(&device, &core()).unwrap().is_whole();
                    assert!(whole, "{what}: {damage:?} at {copy} is not rewritten");
                }
                opened += 1;
            }
        }
    });
    assert_eq!(opened, 5 * 4 * 3);
}

#[test]
fn damage_never_brings_an_older_table_back_and_refusals_name_the_copies() {
    let (mut opened, mut refused) = (0, 0);
    recorded(|what, entries, first, (before, after)| {
        for end in first..=entries.len() {
            for arrived in [0, 1, 2] {
                let bytes = image(&entries[..end], 8 * MIB, |len| arrived * len / 2 / 512 * 512);
                for (copy, other) in [(0, 1), (2, 3), (0, 2), (1, 3), (1, 1), (3, 3)] {
                    let device = Damage::Flipped(0).inflict(bytes.clone(), COPIES[copy]);
                    let device = match copy == other {
                        true => device,
                        false => {
                            let mut bytes = bytes.clone();
                            bytes[COPIES[copy] as usize + 77] ^= 0x10;
                            Damage::Zeroed(0).inflict(bytes, COPIES[other])
                        }
                    };
                    match open(device) {
                        Ok(pool) => {
                            let found = pool.volumes();
                            assert!(found == before || found == after, "{what}, {end}: {found:?}");
                            assert!(end < entries.len() || found == after, "{what}: acknowledged, and lost");
                            opened += 1;
                        }
                        Err(error) => {
                            let said = error.to_string();
                            let names = COPIES.iter().all(|copy| said.contains(&format!("at {copy}: ")));
                            assert!(names && said.contains("freestone pool check"), "{said}");
                            refused += 1;
                        }
                    }
                }
            }
        }
    });
    assert!(opened > 300 && refused > 50, "{opened} opened, {refused} refused");
}

#[test]
fn a_change_after_a_creation_that_lost_its_second_table_is_never_taken_for_one_that_was_not_made() {
    let write = |device: &Arc<dyn Device>, at: u64| {
        let base = device.clone();
        let write = async move |channel: &dyn Channel| {
            let mut buffer = reactor::BufferPool::default().take(512).await;
            buffer.as_mut_slice().fill(0);
            buffer.transfer(channel, Op::Write, block::Flags::NONE, at).await.1
        };
        on(&base, &core(), write).unwrap();
    };
    let device = disk(8 * MIB);
    drop(pool(&device));
    // A crash of the creation can leave this too: set 0 holds nothing, and set 1 holds table 1.
    COPIES[..2].iter().for_each(|at| write(&device, *at));
    let pool = open(device.clone()).unwrap();
    pool.create_volume(name("one"), MIB).unwrap();
    drop(pool);
    let newest = inspect(&device, &core()).unwrap();
    let newest = newest.iter().filter_map(|copy| Some((copy.table()?.sequence, copy.offset)));
    let last = newest.clone().max().unwrap().0;
    newest.filter(|(sequence, _)| *sequence == last).for_each(|(_, at)| write(&device, at));
    let refused = open(device).map(|pool| pool.volumes());
    assert!(matches!(refused, Err(PoolError::Read(_, ReadError::Damaged(_)))), "{refused:?}");
}

#[test]
fn a_pool_of_the_former_format_is_opened_and_converted_by_its_first_change() {
    const LEN: u64 = 8 * MIB;
    let device = disk(LEN);
    let pool = pool(&device);
    pool.create_volume(name("one"), MIB).unwrap();
    let table = pool.lock().table.clone();
    drop(pool);
    let mut bytes = vec![0xee; LEN as usize];
    for (sequence, at) in [(table.sequence - 1, SETS_BEFORE[0]), (table.sequence, SETS_BEFORE[1])] {
        let volumes = if sequence == table.sequence { table.volumes.clone() } else { Vec::new() };
        let copy = Table { sequence, copies: 0, volumes, ..table.clone() }.encode().unwrap();
        bytes[at as usize..][..copy.len()].copy_from_slice(&copy);
    }
    // A damaged copy may have been the newest.
    for at in SETS_BEFORE {
        let said = open(Damage::Flipped(0).inflict(bytes.clone(), at)).err().unwrap().to_string();
        assert!(said.contains("may be among them"), "{said}");
    }
    let device = ram(&bytes);
    let pool = open(device.clone()).unwrap();
    assert_eq!(pool.volumes().len(), 1);
    pool.create_volume(name("two"), MIB).unwrap();
    let volumes = pool.volumes();
    drop(pool);
    assert_eq!(open(device.clone()).unwrap().volumes(), volumes);
    assert!(read(&device, &core()).unwrap().is_whole());
}

/// Offsets of the copies of the former format, by sequence number.
const SETS_BEFORE: [u64; 2] = [64 << 10, 2 << 20];

/// Changes of a pool with the volumes `one` and `two`, each of which ends with one commit.
type Change = fn(&Pool) -> Result<Info, PoolError>;
const CHANGES: [(&str, Change); 4] = [
    ("create", |pool| pool.create_volume(name("new"), MIB)),
    ("grow", |pool| pool.grow_volume("one", 2 * MIB)),
    ("rename", |pool| pool.rename_volume("one", name("other"))),
    ("delete", |pool| pool.delete_volume("two")),
];

/// A pool with two volumes on a device to which faults can be added.
fn fragile() -> (Arc<dyn Device>, Arc<Fault>, Pool) {
    let base = disk(8 * MIB);
    let fault = Arc::new(Fault::new(base.clone()));
    let device: Arc<dyn Device> = fault.clone();
    let pool = pool(&device);
    pool.create_volume(name("one"), MIB).unwrap();
    pool.create_volume(name("two"), MIB).unwrap();
    (base, fault, pool)
}

#[test]
fn a_change_that_fails_at_any_copy_has_not_happened_at_the_next_start_either() {
    let (mut failed, mut done) = (0, 0);
    for (what, change) in CHANGES {
        for copy in COPIES {
            for is_once in [true, false] {
                let (base, fault, pool) = fragile();
                let before = pool.volumes();
                let writes = Rule::new(Action::Error(IoError::Medium)).on(&[Op::Write]);
                let writes = writes.within(copy..copy + 4096);
                fault.add(if is_once { writes.once() } else { writes });
                let result = change(&pool);
                let found = open(base.clone()).unwrap().volumes();
                if result.is_ok() {
                    done += 1;
                    assert_eq!(
                        found,
                        pool.volumes(),
                        "{what}: the copy at {copy} is not of this commit's set"
                    );
                    continue;
                }
                failed += 1;
                assert!(matches!(result, Err(PoolError::Io(..))), "{what}: {result:?}");
                assert_eq!((found, pool.volumes()), (before.clone(), before), "{what}: the copy at {copy}");
                fault.clear();
                change(&pool).unwrap();
                assert_eq!(open(base).unwrap().volumes(), pool.volumes(), "{what}: after the copy at {copy}");
            }
        }
    }
    assert_eq!((failed, done), (16, 16), "two copies of four belong to a commit");
}

/// A failing change of which one copy is written, in a place that takes no further writes.
fn fail_after_one_copy(pool: &Pool, fault: &Fault, change: Change, also: &[u64]) -> PoolError {
    let is_even = pool.lock().table.sequence.is_multiple_of(2);
    let [first, second] = if is_even { [COPIES[2], COPIES[3]] } else { [COPIES[0], COPIES[1]] };
    // The second copy is written first.
    let failing = Rule::new(Action::Error(IoError::Medium)).on(&[Op::Write]);
    for at in [first].iter().chain(also).filter(|at| **at != second) {
        fault.add(failing.clone().within(*at..*at + 4096));
    }
    fault.add(Rule { after: 1, ..failing.within(second..second + 4096) });
    change(pool).unwrap_err()
}

#[test]
fn a_change_that_cannot_be_taken_back_is_outranked_by_the_table_before_it() {
    for (what, change) in CHANGES {
        let (base, fault, pool) = fragile();
        let before = pool.volumes();
        let error = fail_after_one_copy(&pool, &fault, change, &[]);
        assert!(matches!(error, PoolError::Io(..)) && pool.is_settled(), "{what}: {error}");
        assert_eq!(
            (open(base.clone()).unwrap().volumes(), pool.volumes()),
            (before.clone(), before),
            "{what}"
        );
        fault.clear();
        pool.create_volume(name("later"), MIB).unwrap();
        assert_eq!(open(base).unwrap().volumes(), pool.volumes(), "{what}");
    }
}

#[test]
fn a_change_that_can_be_neither_taken_back_nor_outranked_says_so_and_the_next_one_takes_it_back_first() {
    for (what, change) in CHANGES {
        let (base, fault, pool) = fragile();
        let before = pool.volumes();
        let said = fail_after_one_copy(&pool, &fault, change, &COPIES).to_string();
        assert!(said.contains("the next start may find the change made"), "{what}: {said}");
        assert_eq!((pool.volumes(), pool.is_settled()), (before.clone(), false), "{what}");
        assert!(
            pool.create_volume(name("later"), MIB).is_err(),
            "{what}: no change builds on an unknown table"
        );
        fault.clear();
        pool.create_volume(name("later"), MIB).unwrap();
        let found = open(base).unwrap().volumes();
        assert_eq!((&found[..2], found[2].name.as_str()), (&before[..], "later"), "{what}");
    }
}

#[test]
fn a_copy_that_the_opening_can_neither_read_nor_rewrite_is_rewritten_before_the_next_change() {
    for at in COPIES {
        let (base, fault, pool) = fragile();
        let before = pool.volumes();
        drop(pool);
        let failing = Rule::new(Action::Error(IoError::Medium)).on(&[Op::Read, Op::Write]);
        fault.add(failing.within(at..at + 4096));
        let pool = open(fault.clone()).unwrap();
        assert_eq!((pool.volumes(), pool.is_settled()), (before.clone(), false), "the copy at {at}");
        assert!(matches!(pool.create_volume(name("later"), MIB), Err(PoolError::Io(..))), "the copy at {at}");
        fault.clear();
        pool.create_volume(name("later"), MIB).unwrap();
        assert_eq!((pool.is_settled(), pool.rewritten()), (true, 1), "the copy at {at}");
        assert_eq!(open(base).unwrap().volumes(), pool.volumes(), "the copy at {at}");
    }
}
