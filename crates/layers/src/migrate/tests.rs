//! Migrations under load, and cancelled ones.

use super::*;
use block::{DeviceError, DirtyBitmap, Flags, IoError, KernelBacking, KernelExtent, Op};
use conformance::{MIN_CAPACITY, Suite};
use drivers::mem::{MemDevice, Options};
use drivers::null::{NullDevice, Options as NullOptions};
use reactor::{CoreConfig, Cores};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::time::Duration;

const MIB: usize = 1 << 20;

fn mem(size: u64) -> Arc<dyn Device> {
    Arc::new(MemDevice::new(&Options::new(size)).unwrap())
}

/// Copies the dirty ranges; returns their number.
fn copy(core: &CoreRef, dirty: &Dirty, from: &Arc<dyn Device>, to: &Arc<dyn Device>) -> usize {
    let (mut at, mut chunks) = (0, 0);
    while let Some(chunk) = dirty.take(at) {
        (at, chunks) = (chunk.end, chunks + 1);
        let (from, to) = (from.clone(), to.clone());
        let copied = core.block_on(move |core| async move {
            let (from, to) = (from.open_channel().unwrap(), to.open_channel().unwrap());
            let buffer = core.buffers().take((chunk.end - chunk.start) as usize).await;
            let (buffer, read) = buffer.transfer(&*from, Op::Read, Flags::NONE, chunk.start).await;
            read.unwrap();
            buffer.transfer(&*to, Op::Write, Flags::NONE, chunk.start).await.1
        });
        copied.unwrap().unwrap();
    }
    chunks
}

fn one_core() -> Cores {
    Cores::start(&[CoreConfig::default()]).unwrap()
}

#[test]
fn it_passes_the_suite_and_has_counted_it() {
    let device = Arc::new(Migratable::new(mem(4 * MIN_CAPACITY)));
    Suite::new(device.clone()).run();
    let snapshot = device.snapshot();
    assert_eq!(snapshot.in_flight(), 0);
    assert!(snapshot.of(Op::Read).completed > 1000 && snapshot.of(Op::Read).errors > 0);
    assert!(CHANNELS.with_borrow(|all| all.is_empty()));
}

/// A device that takes registered buffers, and succeeds with them.
struct Registering(Arc<dyn Device>);

struct RegisteringChannel(Rc<dyn Channel>);

impl Channel for RegisteringChannel {
    fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
        if req.data.is_registered() { IoFuture::ready(Ok(())) } else { self.0.submit(req, offset) }
    }
    fn block_status<'a>(&'a self, report: &'a StatusReport, offset: u64, len: u64) -> IoFuture<'a> {
        self.0.block_status(report, offset, len)
    }
}

impl Device for Registering {
    fn name(&self) -> &str {
        "registering"
    }
    fn limits(&self) -> Limits {
        self.0.limits()
    }
    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Ok(Rc::new(RegisteringChannel(self.0.open_channel()?)))
    }
    fn refresh(&self) -> Result<Limits, DeviceError> {
        self.0.refresh()
    }
    fn map_region(&self, _: &MemoryRegion) -> Result<(), DeviceError> {
        Ok(())
    }
    fn unmap_region(&self, _: &MemoryRegion) {}
    fn takes_registered(&self) -> bool {
        true
    }
    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(self.name()))
    }
}

#[test]
fn a_copy_that_takes_no_registered_buffers_gets_none_from_channels_that_are_open() {
    let device = Arc::new(Migratable::new(Arc::new(Registering(mem(MIN_CAPACITY)))));
    assert!(device.takes_registered());
    let cores = one_core();
    let (core, opened) = (cores.get(0), device.clone());
    let channel = core.call(move |_| opened.open_channel().map(|channel| OPEN.set(Some(channel))));
    channel.unwrap().unwrap();
    let read = || {
        core.block_on(|_| async {
            let channel = OPEN.with_borrow(|channel| channel.clone()).unwrap();
            channel.submit(&Request::read(block::Data::registered(0, 0, 4096)), 0).await
        })
    };
    assert_eq!(read().unwrap(), Ok(()));
    let migration = device.begin(mem(MIN_CAPACITY), true).unwrap();
    migration.hold().unwrap();
    migration.complete();
    assert_eq!(read().unwrap(), Err(IoError::Unsupported));
    assert!(!device.takes_registered());
    core.call(|_| drop(OPEN.take())).unwrap();
}

thread_local! {
    /// The open channel of the core of a test.
    static OPEN: RefCell<Option<Rc<dyn Channel>>> = const { RefCell::new(None) };
}

#[test]
fn it_passes_the_suite_while_it_moves_to_and_fro() {
    let places = [mem(MIN_CAPACITY), mem(MIN_CAPACITY)];
    let device = Arc::new(Migratable::new(places[0].clone()));
    let (ended, moves) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let mover = std::thread::spawn({
        let (device, ended, moves, cores) = (device.clone(), ended.clone(), moves.clone(), one_core());
        move || {
            while !ended.load(Ordering::SeqCst) {
                let number = moves.load(Ordering::SeqCst);
                let (from, to) = (&places[number % 2], &places[(number + 1) % 2]);
                let migration = device.begin(to.clone(), true).unwrap();
                copy(&cores.get(0), migration.dirty(), from, to);
                migration.hold().unwrap();
                copy(&cores.get(0), migration.dirty(), from, to);
                assert_eq!(migration.dirty().bytes(), 0, "nothing is written while all is held");
                // A later write to the old device would be detected.
                if number % 3 == 2 {
                    drop(migration);
                    continue_with(&device, from);
                    let migration = device.begin(to.clone(), true).unwrap();
                    migration.hold().unwrap();
                    copy(&cores.get(0), migration.dirty(), from, to);
                    migration.complete();
                } else {
                    migration.complete();
                }
                moves.fetch_add(1, Ordering::SeqCst);
            }
        }
    });
    while moves.load(Ordering::SeqCst) < 24 {
        Suite::new(device.clone()).run();
    }
    ended.store(true, Ordering::SeqCst);
    mover.join().unwrap();
    assert_eq!(device.snapshot().in_flight(), 0);
}

fn continue_with(device: &Migratable, child: &Arc<dyn Device>) {
    assert!(Arc::ptr_eq(&device.child(), child), "a move that was given up has changed nothing");
}

#[test]
fn requests_wait_while_they_are_held_and_go_to_whoever_counts_then() {
    for is_completed in [true, false] {
        let (old, new) = (mem(MIB as u64), mem(MIB as u64));
        let device = Arc::new(Migratable::new(old.clone()));
        let cores = one_core();
        let write = |device: Arc<dyn Device>| {
            cores.get(0).block_on(move |core| async move {
                let channel = device.open_channel().unwrap();
                let mut buffer = core.buffers().take(4096).await;
                buffer.as_mut_slice().fill(7);
                buffer.transfer(&*channel, Op::Write, Flags::NONE, 0).await.1
            })
        };
        let first = |device: &Arc<dyn Device>| {
            let device = device.clone();
            let read = cores.get(0).block_on(move |core| async move {
                let channel = device.open_channel().unwrap();
                let buffer = core.buffers().take(4096).await;
                let (buffer, read) = buffer.transfer(&*channel, Op::Read, Flags::NONE, 0).await;
                read.map(|()| buffer.as_slice()[0])
            });
            read.unwrap().unwrap()
        };
        let migration = device.begin(new.clone(), true).unwrap();
        migration.hold().unwrap();
        std::thread::scope(|scope| {
            let writing = scope.spawn(|| write(device.clone()).unwrap());
            while device.snapshot().in_flight() == 0 {
                std::thread::yield_now();
            }
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!((first(&old), first(&new), device.snapshot().in_flight()), (0, 0, 1), "it waits");
            if is_completed {
                migration.complete()
            } else {
                drop(migration)
            }
            assert_eq!(writing.join().unwrap(), Ok(()));
        });
        let expected = if is_completed { (0, 7) } else { (7, 0) };
        assert_eq!((first(&old), first(&new)), expected);
    }
}

#[test]
fn a_write_that_began_before_the_move_is_copied_when_it_ends() {
    let slow = NullOptions { latency_ns: 50_000_000, ..NullOptions::new(4 * MIB as u64) };
    let device = Arc::new(Migratable::new(Arc::new(NullDevice::new(&slow).unwrap())));
    let cores = one_core();
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| {
            let device = device.clone();
            let written = cores.get(0).block_on(move |_| async move {
                let channel = device.open_channel().unwrap();
                channel.submit(&Request::write_zeroes(4096, Flags::NONE), 3 * MIB as u64).await
            });
            written.unwrap()
        });
        while device.snapshot().in_flight() == 0 {
            std::thread::yield_now();
        }
        let migration = device.begin(mem(4 * MIB as u64), false).unwrap();
        while migration.dirty().take(0).is_some() {}
        assert_eq!(device.snapshot().in_flight(), 1, "it is still on its way");
        migration.hold().unwrap();
        assert_eq!(migration.dirty().take(0), Some(3 * MIB as u64..4 * MIB as u64));
        assert_eq!(writing.join().unwrap(), Ok(()));
    });
}

/// A device that reports its regions, and has limits of its own.
struct Told {
    limits: Limits,
    capacity: AtomicU64,
    regions: Mutex<Vec<MemoryRegion>>,
    refuses: AtomicBool,
}

impl Told {
    fn new(limits: Limits) -> Arc<Told> {
        Arc::new(Told {
            capacity: limits.capacity.into(),
            limits,
            regions: Mutex::default(),
            refuses: AtomicBool::new(false),
        })
    }

    fn addresses(&self) -> Vec<usize> {
        self.regions.lock().unwrap().iter().map(|region| region.addr).collect()
    }
}

impl Device for Told {
    fn name(&self) -> &str {
        "told"
    }

    fn limits(&self) -> Limits {
        Limits { capacity: self.capacity.load(Ordering::SeqCst), ..self.limits.clone() }
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Err(DeviceError::new("told", "no channel"))
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
        Ok(self.limits())
    }

    fn map_region(&self, region: &MemoryRegion) -> Result<(), DeviceError> {
        if self.refuses.load(Ordering::SeqCst) {
            return Err(DeviceError::new("told", "no region"));
        }
        self.regions.lock().unwrap().push(*region);
        Ok(())
    }

    fn unmap_region(&self, region: &MemoryRegion) {
        self.regions.lock().unwrap().retain(|known| known != region);
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Err(DeviceError::not_in_kernel(self.name()))
    }
}

#[test]
fn regions_are_known_to_both_and_then_to_one() {
    let region = |addr| MemoryRegion { addr, len: 4096, fd: None, fd_offset: 0 };
    let limits = Limits::new(1 << 20);
    let (old, new) = (Told::new(limits.clone()), Told::new(limits));
    let device = Arc::new(Migratable::new(old.clone()));
    device.map_region(&region(1)).unwrap();
    device.map_region(&region(2)).unwrap();
    new.refuses.store(true, Ordering::SeqCst);
    assert!(device.begin(new.clone(), true).is_err());
    new.refuses.store(false, Ordering::SeqCst);
    let migration = device.begin(new.clone(), true).unwrap();
    assert!(device.begin(new.clone(), true).is_err(), "one move at a time");
    device.unmap_region(&region(1));
    device.map_region(&region(3)).unwrap();
    assert_eq!((old.addresses(), new.addresses()), (vec![2, 3], vec![2, 3]));
    new.refuses.store(true, Ordering::SeqCst);
    assert!(device.map_region(&region(4)).is_err());
    assert_eq!((old.addresses(), new.addresses()), (vec![2, 3], vec![2, 3]));
    drop(migration);
    assert_eq!((old.addresses(), new.addresses()), (vec![2, 3], vec![]));
    new.refuses.store(false, Ordering::SeqCst);
    let migration = device.begin(new.clone(), true).unwrap();
    migration.hold().unwrap();
    migration.complete();
    assert_eq!((old.addresses(), new.addresses()), (vec![], vec![2, 3]));
    device.unmap_region(&region(2));
    assert_eq!(new.addresses(), vec![3]);
}

#[test]
fn a_place_that_breaks_promises_is_refused_by_name_if_there_are_users() {
    let limits = Limits::new(1 << 20);
    let device = Arc::new(Migratable::new(Told::new(limits.clone())));
    let refused = |limits: Limits, is_served| match device.begin(Told::new(limits), is_served) {
        Ok(_) => "taken".to_owned(),
        Err(error) => error.to_string(),
    };
    let text = refused(Limits { block_size: 4096, ..limits.clone() }, false);
    assert!(text.contains("in blocks of 4096"), "{text}");
    assert!(refused(Limits { capacity: 1 << 19, ..limits.clone() }, false).contains("do not hold"));
    assert!(refused(Limits { read_only: true, ..limits.clone() }, false).contains("read-only: true"));
    for (worse, what) in [
        (Limits { max_transfer: 4096, ..limits.clone() }, "the longest transfer is 4096"),
        (Limits { max_discard: 0, ..limits.clone() }, "the longest discard is 0"),
        (Limits { volatile_cache: true, ..limits.clone() }, "the volatile cache is 1"),
    ] {
        let text = refused(worse.clone(), true);
        assert!(text.contains(what), "{text}");
        let migration = device.begin(Told::new(worse.clone()), false).unwrap();
        assert_eq!(device.limits(), worse, "new clients see the limits that both keep");
        drop(migration);
        assert_eq!(device.limits(), limits);
    }
    assert_eq!(refused(Limits { max_transfer: 1 << 31, memory_alignment: 512, ..limits }, true), "taken");
}

/// A block device of the kernel, with a dirty bitmap.
struct Disk(File);

impl Device for Disk {
    fn name(&self) -> &str {
        "disk"
    }

    fn limits(&self) -> Limits {
        Limits::new(1 << 20)
    }

    fn open_channel(&self) -> Result<Rc<dyn Channel>, DeviceError> {
        Err(DeviceError::new("disk", "no channel"))
    }

    fn refresh(&self) -> Result<Limits, DeviceError> {
        Ok(self.limits())
    }

    fn map_region(&self, _: &MemoryRegion) -> Result<(), DeviceError> {
        Ok(())
    }

    fn unmap_region(&self, _: &MemoryRegion) {}

    fn bitmaps(&self) -> Vec<Arc<dyn DirtyBitmap>> {
        vec![Arc::new(Disk(File::open("/dev/null").unwrap()))]
    }

    fn kernel_backing(&self) -> Result<Arc<dyn KernelBacking>, DeviceError> {
        Ok(Arc::new(Disk(File::open("/dev/null").unwrap())))
    }
}

impl KernelBacking for Disk {
    fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    fn extent(&self) -> KernelExtent {
        KernelExtent { start: 4096, len: None }
    }

    fn lend(&self) -> Result<(), DeviceError> {
        Ok(())
    }

    fn take_back(&self) -> Result<(), DeviceError> {
        Err(DeviceError::new("disk", "taken"))
    }
}

impl DirtyBitmap for Disk {
    fn name(&self) -> &str {
        "b"
    }

    fn granularity(&self) -> u64 {
        512
    }

    fn run(&self, offset: u64, len: u64) -> (bool, u64) {
        (offset > 0, len)
    }
}

#[test]
fn a_device_with_a_place_in_the_kernel_or_bitmaps_migrates_when_they_are_not_in_use() {
    let device = Arc::new(Migratable::new(Arc::new(Disk(File::open("/dev/null").unwrap()))));
    let begin = || device.begin(mem(MIB as u64), true);
    let refused = || begin().err().unwrap().to_string();
    let backing = device.kernel_backing().unwrap();
    assert_eq!(backing.extent().start, 4096);
    assert!(backing.lend().is_ok() && backing.take_back().is_err());
    assert!(refused().ends_with("the kernel serves clients of disk"), "{}", refused());
    drop(backing);
    let bitmaps = device.bitmaps();
    let bitmap = &bitmaps[0];
    assert_eq!((bitmap.name(), bitmap.granularity(), bitmap.run(0, 9)), ("b", 512, (false, 9)));
    assert!(refused().ends_with("an export offers the dirty bitmaps of disk"), "{}", refused());
    drop(bitmaps);
    let migration = begin().unwrap();
    assert!(device.bitmaps().is_empty() && device.kernel_backing().is_err());
    drop(migration);
    assert!(device.bitmaps().len() == 1 && device.kernel_backing().is_ok());
    let migration = begin().unwrap();
    migration.hold().unwrap();
    migration.complete();
    assert!(device.bitmaps().is_empty() && device.kernel_backing().is_err(), "those of the copy");
}

#[test]
fn a_child_that_grows_during_a_migration_keeps_its_place() {
    let child = Told::new(Limits::new(1 << 20));
    let device = Arc::new(Migratable::new(child.clone()).named("disk".into()));
    assert_eq!(device.name(), "disk");
    let migration = device.begin(mem(2 * MIB as u64), true).unwrap();
    child.capacity.store(2 << 20, Ordering::SeqCst);
    let refused = migration.hold().unwrap_err().to_string();
    assert_eq!(refused, "disk: it has 2097152 bytes, and had 1048576 when the migration began");
    child.capacity.store(1 << 20, Ordering::SeqCst);
    migration.hold().unwrap();
}

#[test]
fn a_copy_that_cannot_be_opened_ends_the_move_and_nothing_else() {
    let device = Arc::new(Migratable::new(mem(MIB as u64)));
    let cores = one_core();
    let request = |core: &CoreRef, offset| {
        let device = device.clone();
        core.block_on(move |_| async move {
            let channel = device.open_channel().unwrap();
            let held = channel.submit(&Request::write_zeroes(512, Flags::NONE), offset).await;
            std::mem::forget(channel); // it stays open
            held
        })
    };
    assert_eq!(request(&cores.get(0), 0).unwrap(), Ok(()));
    let migration = device.begin(Told::new(Limits::new(1 << 20)), true).unwrap();
    assert!(migration.hold().unwrap_err().to_string().contains("no channel"));
    assert_eq!(request(&cores.get(0), 0).unwrap(), Ok(()), "nothing is held");
    assert_eq!(request(&cores.get(0), MIB as u64).unwrap(), Err(IoError::OutOfRange));
    drop(migration);
    assert_eq!(request(&cores.get(0), 0).unwrap(), Ok(()));
}
