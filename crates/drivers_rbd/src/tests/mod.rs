//! The driver over libraries in memory ([`fake`]).

mod fake;
mod standby;

use super::*;
use block::{Data, Flags, IoError, IoResult, Op, Request};
use conformance::Suite;
use drivers::test_queue::{data, ends, push, segment};
use fake::{FakeCluster, FakeImage};
use reactor::{CoreConfig, Cores};
use std::sync::atomic::Ordering::SeqCst;
use std::time::{Duration, Instant};

const SIZE: usize = 32 << 20;

/// Opens the image that a test has made, as the user of the test.
fn open(name: &str) -> RbdDevice {
    open_with(Options { user: name.into(), ..Options::new("pool", name) }).unwrap()
}

fn open_with(options: Options) -> Result<RbdDevice, DeviceError> {
    RbdDevice::open_with(fake::library, &options)
}

fn ends_of(queue: &mut RbdQueue, req: &Request<'_>) -> IoResult {
    push(queue, 0, req, 0)?;
    ends(queue, 1)[0].1
}

#[test]
fn an_image_passes_the_conformance_suite() {
    let image = FakeImage::create("conformance", SIZE);
    let device = open("conformance");
    let limits = device.limits();
    assert_eq!((limits.capacity, limits.optimal_io_size), (SIZE as u64, 4 << 20));
    assert!(!limits.volatile_cache && limits.native_fua);
    let grow = move || image.data.lock().unwrap().resize(SIZE + (1 << 20), 0);
    Suite::new(Arc::new(device)).on_grow(grow).run();
}

#[test]
fn an_image_with_a_cache_passes_the_conformance_suite() {
    FakeImage::create("cached", SIZE);
    let options = Options { user: "cached".into(), cache: true, ..Options::new("pool", "cached") };
    let device = open_with(options).unwrap();
    assert!(device.limits().volatile_cache && !device.limits().native_fua);
    Suite::new(Arc::new(device)).run();
}

#[test]
fn only_a_cache_needs_a_flush_after_a_write_with_fua() {
    for (name, cache, flushes) in [("fua", false, 0), ("fua-cached", true, 1)] {
        let image = FakeImage::create(name, SIZE);
        let options = Options { user: name.into(), cache, ..Options::new("pool", name) };
        let mut queue = open_with(options).unwrap().open_queue().unwrap();
        let mut bytes = [7; 4096];
        let list = segment(&mut bytes);
        assert_eq!(ends_of(&mut queue, &Request::write(data(&list), Flags::FUA)), Ok(()));
        assert_eq!(image.flushes.load(SeqCst), flushes);
        assert_eq!(ends_of(&mut queue, &Request::write(data(&list), Flags::NONE)), Ok(()));
        assert_eq!(image.flushes.load(SeqCst), flushes);
        assert_eq!(ends_of(&mut queue, &Request::flush()), Ok(()));
        assert_eq!(image.flushes.load(SeqCst), flushes + 1);
    }
}

#[test]
fn zeroes_that_keep_their_space_are_written_or_refused() {
    let image = FakeImage::create("thick", SIZE);
    let mut queue = open("thick").open_queue().unwrap();
    assert_eq!(ends_of(&mut queue, &Request::write_zeroes(4096, Flags::NONE)), Ok(()));
    assert_eq!(image.thick_zeroes.load(SeqCst), 0);
    assert_eq!(ends_of(&mut queue, &Request::write_zeroes(4096, Flags::NO_UNMAP)), Ok(()));
    assert_eq!(image.thick_zeroes.load(SeqCst), 1);
    let without_fallback = Flags::NO_UNMAP.with(Flags::NO_FALLBACK);
    let refused = ends_of(&mut queue, &Request::write_zeroes(4096, without_fallback));
    assert_eq!(refused, Err(IoError::Unsupported));
}

#[test]
fn an_error_of_the_cluster_is_the_error_of_the_request() {
    let image = FakeImage::create("errors", SIZE);
    let mut queue = open("errors").open_queue().unwrap();
    let mut bytes = [0; 4096];
    let list = segment(&mut bytes);
    let errors = [
        (libc::ESHUTDOWN, IoError::DeviceGone),
        (libc::ETIMEDOUT, IoError::TimedOut),
        (libc::ENOSPC, IoError::NoSpace),
    ];
    for (errno, error) in errors {
        image.fail_with.store(errno, SeqCst);
        let requests = [
            Request::read(data(&list)),
            Request::write(data(&list), Flags::NONE),
            Request::discard(4096),
            Request::write_zeroes(4096, Flags::NONE),
            Request::flush(),
        ];
        for req in &requests {
            assert_eq!(ends_of(&mut queue, req), Err(error), "{req:?}");
        }
    }
    image.fail_with.store(0, SeqCst);
    assert_eq!(ends_of(&mut queue, &Request::read(data(&list))), Ok(()));
}

#[test]
fn an_operation_that_does_not_start_has_no_completion() {
    let image = FakeImage::create("refused", SIZE);
    let mut queue = open("refused").open_queue().unwrap();
    image.refuse_with.store(libc::ENOMEM, SeqCst);
    assert_eq!(push(&mut queue, 0, &Request::flush(), 0), Err(IoError::NoMemory));
    assert_eq!(image.in_flight.load(SeqCst), 0);
    image.refuse_with.store(0, SeqCst);
    assert_eq!(ends_of(&mut queue, &Request::flush()), Ok(()));
}

#[test]
fn a_read_beyond_the_end_of_an_image_that_shrank_fails() {
    let image = FakeImage::create("shrunk", SIZE);
    let mut queue = open("shrunk").open_queue().unwrap();
    image.cut_reads_by.store(512, SeqCst);
    let mut bytes = [0; 4096];
    let list = segment(&mut bytes);
    assert_eq!(ends_of(&mut queue, &Request::read(data(&list))), Err(IoError::OutOfRange));
}

#[test]
fn a_queue_that_is_closed_under_load_waits_for_its_operations() {
    for round in 0..20 {
        let image = FakeImage::create("closed", SIZE);
        let device = open("closed");
        let mut queue = device.open_queue().unwrap();
        drop(device); // the queue keeps the image open
        let mut buffers = vec![vec![round; 4096]; 64];
        let lists: Vec<_> = buffers.iter_mut().map(|bytes| segment(bytes)).collect();
        image.hold();
        for (slot, list) in lists.iter().enumerate() {
            let req = match slot % 4 {
                0 => Request::read(data(list)),
                1 => Request::write(data(list), Flags::NONE),
                2 => Request::discard(4096),
                _ => Request::flush(),
            };
            push(&mut queue, slot as u32, &req, slot as u64 * 4096).unwrap();
        }
        let closing = std::thread::spawn(move || drop(queue));
        std::thread::sleep(Duration::from_millis(2));
        assert!(!closing.is_finished(), "operations are in flight");
        image.release();
        closing.join().unwrap();
        assert!(!image.is_open.load(SeqCst));
        assert_eq!(image.in_flight.load(SeqCst), 0);
    }
}

#[test]
fn images_of_one_user_share_a_connection_until_the_last_is_closed() {
    FakeImage::create("shared-a", SIZE);
    FakeImage::create("shared-b", SIZE);
    let cluster = FakeCluster::of("sharer");
    let of = |image: &str| Options { user: "sharer".into(), ..Options::new("pool", image) };
    let (first, second) = (open_with(of("shared-a")).unwrap(), open_with(of("shared-b")).unwrap());
    assert_eq!((cluster.connected.load(SeqCst), cluster.shut_down.load(SeqCst)), (1, 0));
    drop(first);
    assert_eq!(cluster.shut_down.load(SeqCst), 0);
    let cached = open_with(Options { cache: true, ..of("shared-a") }).unwrap();
    assert_eq!(cluster.connected.load(SeqCst), 2, "the cache is an option of the connection");
    drop((second, cached));
    assert_eq!(cluster.shut_down.load(SeqCst), 2);
    drop(open_with(of("shared-a")).unwrap());
    assert_eq!(cluster.connected.load(SeqCst), 3);
}

#[test]
fn threads_of_the_library_are_not_bound_to_the_processor_of_the_core() {
    FakeImage::create("unbound", SIZE);
    let free = std::thread::available_parallelism().unwrap().get() as u32;
    let cores = Cores::start(&[CoreConfig { cpu: Some(0), ..CoreConfig::default() }]).unwrap();
    cores.get(0).call(|_| drop(open("unbound"))).unwrap();
    assert!(FakeCluster::of("unbound").processors.load(SeqCst) >= free);
}

#[test]
fn a_lock_of_another_client_is_broken_only_with_force() {
    let image = FakeImage::create("locked", SIZE);
    let options = Options { user: "locked".into(), ..Options::new("pool", "locked") };
    *image.owner.lock().unwrap() = Some("10.0.0.9:0/77".into());
    let error = open_with(options.clone()).err().unwrap().to_string();
    assert!(error.starts_with("rbd:pool/locked: cannot take the exclusive lock of the image: "), "{error}");
    assert!(error.ends_with("the client at 10.0.0.9:0/77 has it; force=on breaks its lock"), "{error}");
    assert!(!image.is_open.load(SeqCst));
    let shared = open_with(Options { exclusive: Some(false), ..options.clone() }).unwrap();
    assert_eq!(image.owner.lock().unwrap().as_deref(), Some("10.0.0.9:0/77"));
    drop(shared);
    drop(open_with(Options { read_only: true, ..options.clone() }).unwrap());
    let device = open_with(Options { force: true, ..options }).unwrap();
    assert_ne!(image.owner.lock().unwrap().as_deref(), Some("10.0.0.9:0/77"));
    drop(device);
    assert_eq!(*image.owner.lock().unwrap(), None);
}

#[test]
fn the_lock_of_a_dead_predecessor_is_broken_at_once() {
    let image = FakeImage::create("inherited", SIZE);
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("inherited.lock");
    let lock_file = Some(file.clone());
    let options = Options { user: "inherited".into(), lock_file, ..Options::new("pool", "inherited") };
    drop(open_with(options.clone()).unwrap());
    let own = std::fs::read_to_string(&file).unwrap();
    assert_eq!(own, "127.0.0.1:0/1\n");
    // Another process of this host, which has been killed, and one of another host.
    std::fs::write(&file, "127.0.0.1:0/55\n").unwrap();
    for (owner, opens) in [("127.0.0.1:0/55", true), ("10.0.0.9:0/77", false)] {
        *image.owner.lock().unwrap() = Some(owner.into());
        assert_eq!(open_with(options.clone()).is_ok(), opens, "{owner}");
    }
}

#[test]
fn an_image_without_the_feature_is_opened_unless_the_lock_is_required() {
    let image = FakeImage::create("featureless", SIZE);
    image.features.store(0, SeqCst);
    drop(open("featureless"));
    let options = Options { exclusive: Some(true), ..Options::new("pool", "featureless") };
    let error = open_with(options).err().unwrap().to_string();
    assert_eq!(error, "rbd:pool/featureless: exclusive=on: the image lacks the feature exclusive-lock");
}

#[test]
fn a_new_size_of_the_image_is_noticed() {
    let image = FakeImage::create("watched", SIZE);
    let device = open("watched");
    assert!(image.is_watched());
    for size in [SIZE * 2, SIZE / 2, SIZE] {
        image.resize(size);
        let start = Instant::now();
        while device.limits().capacity != size as u64 {
            assert!(start.elapsed() < Duration::from_secs(60), "{:?}", device.limits());
            std::thread::yield_now();
        }
    }
    drop(device);
    assert!(!image.is_watched() && !image.is_open.load(SeqCst));
}

#[test]
fn a_snapshot_is_read_only() {
    let image = FakeImage::create("snapshot", SIZE);
    let options = Options { snapshot: Some("monday".into()), ..Options::new("pool", "snapshot") };
    let device = open_with(options).unwrap();
    assert_eq!((device.name(), device.limits().read_only), ("rbd:pool/snapshot@monday", true));
    assert!(image.is_read_only.load(SeqCst) && !image.is_watched());
    Suite::new(Arc::new(device)).run();
}

#[test]
fn an_image_that_cannot_be_opened_is_refused_with_the_step_that_failed() {
    FakeImage::create("tiny", 100);
    let refused = |options: Options, expected: &str| {
        let error = open_with(options).err().unwrap().to_string();
        assert!(error.contains(expected), "{error}");
    };
    refused(Options::new("pool", "missing"), "rbd:pool/missing: cannot open the image: No such file");
    refused(Options::new("missing", "image"), "cannot open the pool missing");
    refused(Options::new("pool", "tiny"), "size 100 bytes: less than one block of 512");
    refused(
        Options { conf: Some("/missing.conf".into()), ..Options::new("pool", "x") },
        "read /missing.conf",
    );
    FakeCluster::of("stranger").refuse_connect.store(libc::EACCES, SeqCst);
    let stranger = Options { user: "stranger".into(), ..Options::new("pool", "x") };
    refused(stranger, "cannot connect to the cluster as client.stranger: Permission denied");
    let cluster = FakeCluster::of("stranger");
    assert_eq!(cluster.shut_down.load(SeqCst), 1, "the handle is released");
    let missing = || Err("librbd.so.1 is not installed (package librbd1)".to_owned());
    let error = RbdDevice::open_with(missing, &Options::new("pool", "x")).err().unwrap().to_string();
    assert_eq!(error, "rbd:pool/x: librbd.so.1 is not installed (package librbd1)");
}

#[test]
fn every_kind_of_operation_has_a_request() {
    let image = FakeImage::create("kinds", SIZE);
    let mut queue = open("kinds").open_queue().unwrap();
    let (mut first, mut second) = ([1; 512], [2; 1024]);
    let list = [segment(&mut first)[0], segment(&mut second)[0]];
    for op in Op::ALL {
        let len = if op == Op::Flush { 0 } else { 1536 };
        let data = if op.has_data() { data(&list) } else { Data::none() };
        assert_eq!(ends_of(&mut queue, &Request { op, flags: Flags::NONE, len, data }), Ok(()));
        let expected = if op == Op::Write { [first.as_slice(), &second].concat() } else { vec![0; 1536] };
        assert_eq!(image.data.lock().unwrap()[..1536], expected, "{op:?}");
        (first, second) = ([1; 512], [2; 1024]);
    }
}
