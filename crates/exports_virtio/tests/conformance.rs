//! The suite that every device passes, through the export: device ─ export ─ rings ─ our own
//! client.

mod common;

use block::Device;
use common::SharedBuffers;
use conformance::Suite;
use drivers::mem::{MemDevice, Options as MemOptions};
use drivers::null::{NullDevice, Options as NullOptions};
use drivers_virtio_blk::{Choice, Frontend, Options, Session, VirtioBlk};
use exports::Export;
use exports_virtio::vhost_user_blk::{Config, VhostUserBlk};
use reactor::{CoreConfig, Cores, PollWindow};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const MIB: u64 = 1 << 20;

/// How client and export talk.
#[derive(Clone, Copy, Debug)]
struct Way {
    packed: bool,
    event_idx: bool,
    indirect: bool,
    queues: u16,
    cores: usize,
}

fn choice(on: bool) -> Choice {
    if on { Choice::On } else { Choice::Off }
}

/// Exports `device` and runs `test` with a client of it.
fn exported(device: Arc<dyn Device>, way: Way, test: impl FnOnce(Suite, &VhostUserBlk)) {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("blk.sock");
    let core = CoreConfig { poll: PollWindow::up_to(20_000), ..CoreConfig::default() };
    let cores = Cores::start(&vec![core; way.cores]).unwrap();
    let config = Config { num_queues: way.queues, ..Config::new(&socket) };
    let export = VhostUserBlk::start(device, cores.all(), config).unwrap();
    let options = Options {
        packed: choice(way.packed),
        event_idx: choice(way.event_idx),
        indirect: choice(way.indirect),
        inflight: Choice::On,
        config_wce: Choice::On,
        ..Options::new(&socket)
    };
    let buffers = SharedBuffers::new(256 << 20);
    let client = Arc::new(VirtioBlk::open(&options).unwrap());
    client.map_region(&buffers.memory.region()).unwrap();
    test(Suite::new(client).buffers(Arc::new(buffers)), &export);
    drop(export);
}

fn every_way() -> impl Iterator<Item = Way> {
    (0..8u8).map(|bits| {
        let on = |bit: u8| bits & bit != 0;
        // Queues and cores take their turns, so that every pair of settings occurs.
        let (queues, cores) = [(2, 1), (4, 2)][usize::from(bits.count_ones() as u8 % 2)];
        Way { packed: on(1), event_idx: on(2), indirect: on(4), queues, cores }
    })
}

#[test]
fn a_ram_disk_passes_through_every_kind_of_ring() {
    for way in every_way() {
        println!("{way:?}");
        let options = MemOptions { max_size: 96 * MIB, ..MemOptions::new(64 * MIB) };
        let device = Arc::new(MemDevice::new(&options).unwrap());
        exported(device, way, |suite, _| suite.run());
    }
}

/// Raises its flag when it goes, even in a panic.
struct RaisedAtTheEnd<'a>(&'a AtomicBool);

impl Drop for RaisedAtTheEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_ram_disk_passes_while_its_queues_move_from_core_to_core() {
    for packed in [false, true] {
        let way = Way { packed, event_idx: true, indirect: true, queues: 2, cores: 2 };
        let device = Arc::new(MemDevice::new(&MemOptions::new(64 * MIB)).unwrap());
        exported(device, way, |suite, export| {
            let is_over = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    for turn in (0u16..=u16::MAX).cycle().take_while(|_| !is_over.load(Ordering::Relaxed)) {
                        export.remap_queue(turn % 2, usize::from(turn / 2 % 2)).unwrap();
                        std::thread::sleep(Duration::from_micros(500));
                    }
                });
                let _end = RaisedAtTheEnd(&is_over);
                suite.run();
            });
        });
    }
}

#[test]
fn a_null_device_passes_as_far_as_it_can() {
    for way in every_way().filter(|way| way.indirect && way.event_idx) {
        let device = Arc::new(NullDevice::new(&NullOptions::new(64 * MIB)).unwrap());
        exported(device, way, |suite, _| suite.without_data().run());
    }
}

#[test]
fn a_device_that_waits_passes() {
    let way = Way { packed: false, event_idx: true, indirect: true, queues: 2, cores: 1 };
    let options = NullOptions { latency_ns: 30_000, ..NullOptions::new(64 * MIB) };
    exported(Arc::new(NullDevice::new(&options).unwrap()), way, |suite, _| suite.without_data().run());
}

#[test]
fn a_read_only_device_passes() {
    let way = Way { packed: true, event_idx: true, indirect: true, queues: 2, cores: 2 };
    let options = MemOptions { read_only: true, ..MemOptions::new(64 * MIB) };
    exported(Arc::new(MemDevice::new(&options).unwrap()), way, |suite, _| suite.run());
}

#[test]
fn large_blocks_pass() {
    let way = Way { packed: true, event_idx: false, indirect: true, queues: 2, cores: 2 };
    let options = MemOptions { block_size: 4096, ..MemOptions::new(64 * MIB) };
    exported(Arc::new(MemDevice::new(&options).unwrap()), way, |suite, _| suite.run());
}

#[test]
fn a_disk_that_grows_passes() {
    let way = Way { packed: false, event_idx: true, indirect: true, queues: 2, cores: 2 };
    let options = MemOptions { max_size: 96 * MIB, ..MemOptions::new(64 * MIB) };
    let device = Arc::new(MemDevice::new(&options).unwrap());
    let growing = device.clone();
    exported(device, way, |suite, _| suite.on_grow(move || growing.resize(96 * MIB).unwrap()).run());
}

#[test]
fn a_ram_disk_passes_over_a_connection_that_is_given() {
    let device = Arc::new(MemDevice::new(&MemOptions::new(64 * MIB)).unwrap());
    let cores = Cores::start(&[CoreConfig::default()]).unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let config = Config { num_queues: 4, ..Config::new("given") };
    let export = VhostUserBlk::start_connected(device, cores.all(), config, ours).unwrap();
    let frontend = Frontend::new(theirs, Duration::from_secs(10)).unwrap();
    let options = Options::new("unused");
    let session = Session::negotiate("disk", frontend, &options).unwrap();
    session.start(4, 128).unwrap();
    let buffers = SharedBuffers::new(256 << 20);
    let client = Arc::new(VirtioBlk::over(session.clone()));
    client.map_region(&buffers.memory.region()).unwrap();
    Suite::new(client).buffers(Arc::new(buffers)).run();
    assert_eq!((export.stats().connections(), export.stats().clients()), (1, 1));
    drop(export);
    while !session.is_gone() {
        std::thread::yield_now(); // its thread reads the end of the connection
    }
}
