//! The export as a VMM sees it: negotiation, configuration space, rings that start and stop, memory
//! that comes and goes, clients that leave.

mod common;

use common::{Buffer, Data, GUEST_BASE, Guest, GuestConfig, QueueMemory, Request, Server, SlowDevice, Vmm};
use common::{eventfd, eventually, is_signalled, pair, pattern, wait_signal};
use exports::Export;
use exports_virtio::vhost_user_blk::{Config, MAX_QUEUE_SIZE, SocketMode, VhostUserBlk};
use std::os::fd::AsRawFd;
use std::time::Duration;
use virtio::blk::*;

const MIB: u64 = 1 << 20;

fn expected(offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(pattern).collect()
}

fn config_space(vmm: &Vmm, offset: u32, size: u32) -> Vec<u8> {
    let mut body = Vec::new();
    for word in [offset, size, 0] {
        body.extend_from_slice(&word.to_ne_bytes());
    }
    body.resize(12 + size as usize, 0);
    vmm.ask_bytes(Request::GetConfig, &body)[12..].to_vec()
}

#[test]
fn the_configuration_space_is_answered_in_any_length_up_to_256() {
    let server = Server::start(1, SlowDevice::new(MIB), |config| Config { num_queues: 4, ..config });
    let guest = Guest::negotiate(&server.socket, GuestConfig::default());
    let whole = config_space(&guest.vmm, 0, 256);
    assert_eq!(whole.len(), 256);
    let space = ConfigSpace::from_bytes(&whole);
    assert_eq!((space.capacity, space.num_queues, space.blk_size), (MIB / 512, 4, 512));
    assert_eq!((space.seg_max, space.size_max), (126, 2080 * 4096));
    for (offset, size) in [(0, 8), (0, 60), (8, 4), (34, 2), (255, 1), (60, 196)] {
        let part = config_space(&guest.vmm, offset, size);
        assert_eq!(part, whole[offset as usize..(offset + size) as usize]);
    }
    assert!(config_space(&guest.vmm, 250, 7).is_empty(), "refused, and the session still works");
    assert_eq!(guest.vmm.ask_u64(Request::GetQueueNum), 4);
    assert!(guest.vmm.ask_u64(Request::GetMaxMemSlots) >= 32);
}

#[test]
fn every_request_type_gets_its_answer() {
    let server = Server::start(1, SlowDevice::new(MIB), |config| config);
    let mut guest = Guest::boot(&server.socket, GuestConfig::default());
    assert_eq!(guest.read(0, 3, 1024), expected(3 * 512, 1024));

    let (status, _) = guest.run(0, VIRTIO_BLK_T_OUT, 7, Data::Out(&[0x5a; 512]));
    assert_eq!((status, server.device.bytes(7 * 512, 512)), (0, vec![0x5a; 512]));
    assert_eq!(server.device.fua_writes(), 0, "the cache is on");
    assert_eq!(server.device.stable_and_other_writes(), (0, 1), "a guest may change its memory");

    assert_eq!(guest.run(0, VIRTIO_BLK_T_FLUSH, 0, Data::None).0, 0);
    assert_eq!(server.device.flushes(), 1);

    let (status, io) = guest.run(0, VIRTIO_BLK_T_GET_ID, 0, Data::In(20));
    assert_eq!((status, &guest.memory.read(io.data, 20)[..]), (0, &b"freestone-test\0\0\0\0\0\0"[..]));

    let ranges = |ranges: &[Range]| ranges.iter().flat_map(|range| range.to_bytes()).collect::<Vec<u8>>();
    let two = [Range { sector: 8, num_sectors: 2, flags: 0 }, Range { sector: 16, num_sectors: 1, flags: 0 }];
    assert_eq!(guest.run(0, VIRTIO_BLK_T_WRITE_ZEROES, 0, Data::Out(&ranges(&two))).0, 0);
    assert_eq!(server.device.bytes(8 * 512, 1024), [0; 1024]);
    assert_eq!(server.device.bytes(10 * 512, 512), expected(10 * 512, 512));
    assert_eq!(server.device.bytes(16 * 512, 512), [0; 512]);
    assert_eq!(guest.run(0, VIRTIO_BLK_T_DISCARD, 0, Data::Out(&ranges(&two))).0, 0);
    assert_eq!(server.device.bytes(16 * 512, 512), [0xdd; 512]);

    let unmap = [Range { sector: 8, num_sectors: 1, flags: RANGE_F_UNMAP }];
    assert_eq!(guest.run(0, VIRTIO_BLK_T_WRITE_ZEROES, 0, Data::Out(&ranges(&unmap))).0, 0);
    assert_eq!(guest.run(0, VIRTIO_BLK_T_DISCARD, 0, Data::Out(&ranges(&unmap))).0, VIRTIO_BLK_S_UNSUPP);
    let reserved = [Range { sector: 8, num_sectors: 1, flags: 2 }];
    assert_eq!(
        guest.run(0, VIRTIO_BLK_T_WRITE_ZEROES, 0, Data::Out(&ranges(&reserved))).0,
        VIRTIO_BLK_S_UNSUPP
    );

    for kind in [2, 14, 25, u32::MAX] {
        assert_eq!(guest.run(0, kind, 0, Data::In(512)).0, VIRTIO_BLK_S_UNSUPP, "type {kind}");
    }
    for (sector, data) in
        [(MIB / 512, Data::In(512)), (u64::MAX, Data::In(512)), (u64::MAX / 512, Data::In(512))]
    {
        assert_eq!(guest.run(0, VIRTIO_BLK_T_IN, sector, data).0, VIRTIO_BLK_S_IOERR, "sector {sector}");
    }
    assert_eq!(guest.run(0, VIRTIO_BLK_T_IN, 0, Data::In(100)).0, VIRTIO_BLK_S_IOERR, "not a whole block");
    server.device.fail_at(512, block::IoError::Medium);
    assert_eq!(guest.run(0, VIRTIO_BLK_T_IN, 0, Data::In(1024)).0, VIRTIO_BLK_S_IOERR);
    assert_eq!(guest.read(0, 2, 512), expected(1024, 512));
}

#[test]
fn header_and_status_may_lie_anywhere_in_the_descriptors() {
    let server = Server::start(1, SlowDevice::new(MIB), |config| config);
    let mut guest = Guest::boot(&server.socket, GuestConfig::default());
    let at = guest.scratch(0, 40);
    guest.memory.write(at, &Header { kind: VIRTIO_BLK_T_IN, ioprio: 0, sector: 2 }.to_bytes());
    let buffer = |addr, len, is_writable| Buffer { addr, len, is_writable };
    // The header in two descriptors; data and status together in one that is split in the middle of
    // the data.
    guest.submit_chain(
        0,
        &[
            buffer(at, 5, false),
            buffer(at + 5, 11, false),
            buffer(at + 64, 300, true),
            buffer(at + 364, 213, true),
        ],
    );
    let (_, written) = guest.wait_used(0);
    assert_eq!(written, 513);
    assert_eq!(guest.memory.read(at + 64, 512), expected(1024, 512));
    assert_eq!(guest.memory.read(at + 64 + 512, 1), [0]);
}

#[test]
fn a_read_only_export_refuses_writes() {
    let server = Server::start(1, SlowDevice::new(MIB), |config| Config { read_only: true, ..config });
    let mut guest = Guest::boot(&server.socket, GuestConfig::default());
    assert_ne!(guest.features & VIRTIO_BLK_F_RO, 0);
    assert_eq!(guest.features & (VIRTIO_BLK_F_DISCARD | VIRTIO_BLK_F_WRITE_ZEROES), 0);
    assert_eq!(guest.run(0, VIRTIO_BLK_T_OUT, 0, Data::Out(&[1; 512])).0, VIRTIO_BLK_S_IOERR);
    let range = Range { sector: 0, num_sectors: 1, flags: 0 }.to_bytes();
    assert_eq!(guest.run(0, VIRTIO_BLK_T_WRITE_ZEROES, 0, Data::Out(&range)).0, VIRTIO_BLK_S_IOERR);
    assert_eq!(guest.read(0, 0, 512), expected(0, 512));
}

#[test]
fn writes_go_through_while_the_cache_is_off_or_cannot_be_flushed() {
    let server = Server::start(1, SlowDevice::new(MIB), |config| config);
    let write = |guest: &mut Guest| {
        let before = server.device.fua_writes();
        assert_eq!(guest.run(0, VIRTIO_BLK_T_OUT, 0, Data::Out(&[1; 512])).0, 0);
        server.device.fua_writes() - before
    };
    let switch = |guest: &Guest, on: u8| {
        let mut body = Vec::new();
        for word in [ConfigSpace::WRITEBACK_OFFSET as u32, 1, 0] {
            body.extend_from_slice(&word.to_ne_bytes());
        }
        body.push(on);
        guest.vmm.send_bytes(Request::SetConfig, 1 | 8, &body, &[]);
        assert_eq!(guest.vmm.receive(Request::SetConfig).0, [0; 8]);
        assert_eq!(config_space(&guest.vmm, ConfigSpace::WRITEBACK_OFFSET as u32, 1), [on]);
    };
    let mut guest = Guest::boot(&server.socket, GuestConfig::default());
    assert_eq!(write(&mut guest), 0);
    switch(&guest, 0);
    assert_eq!(write(&mut guest), 1);
    switch(&guest, 1);
    assert_eq!(write(&mut guest), 0);
    switch(&guest, 0);
    drop(guest);
    // The next client finds the cache as the export was configured.
    let mut guest = Guest::boot(&server.socket, GuestConfig::default());
    assert_eq!(write(&mut guest), 0);
    drop(guest);
    let refused = virtio::VIRTIO_F_RING_PACKED | VIRTIO_BLK_F_FLUSH | VIRTIO_BLK_F_CONFIG_WCE;
    let mut guest =
        Guest::boot(&server.socket, GuestConfig { refused_features: refused, ..Default::default() });
    assert_eq!(write(&mut guest), 1, "a driver that cannot flush");
}

#[test]
fn rings_are_enabled_from_the_start_without_protocol_features() {
    let server = Server::start(1, SlowDevice::new(MIB), |config| config);
    let config = GuestConfig {
        refused_features: virtio::VIRTIO_F_RING_PACKED | virtio::VHOST_USER_F_PROTOCOL_FEATURES,
        ..GuestConfig::default()
    };
    let mut guest = Guest::negotiate(&server.socket, config);
    let memory = [1, GUEST_BASE, guest.memory.len, 0x7e00_0000_0000, 0];
    guest.vmm.send(Request::SetMemTable, &memory, &[guest.memory.fd.as_raw_fd()]);
    guest.describe_queue(0, 0);
    guest.vmm.send(Request::SetVringKick, &[0], &[guest.queues[0].kick.as_raw_fd()]);
    assert_eq!(guest.read(0, 0, 512), expected(0, 512));
}

#[test]
fn a_ring_that_is_disabled_or_stopped_is_not_served_and_goes_on_where_it_was() {
    let server = Server::start(2, SlowDevice::new(MIB), |config| config);
    let mut guest = Guest::boot(&server.socket, GuestConfig::default());
    for sector in 0..5 {
        guest.read(0, sector, 512);
    }
    assert!(guest.enable_queue(0, false));
    let io = guest.submit(0, VIRTIO_BLK_T_IN, 9, Data::In(512));
    std::thread::sleep(Duration::from_millis(30));
    assert!(guest.poll_used(0).is_none());
    assert!(guest.enable_queue(0, true));
    assert_eq!(guest.wait_used(0).0, io.head);
    let base = guest.stop_queue(0);
    assert_eq!(base, 6);
    let io = guest.submit(0, VIRTIO_BLK_T_IN, 9, Data::In(512));
    std::thread::sleep(Duration::from_millis(30));
    assert!(guest.poll_used(0).is_none());
    guest.start_queue(0, base as u16);
    assert_eq!(guest.wait_used(0).0, io.head);
    assert_eq!(guest.memory.read(io.data, 512), expected(9 * 512, 512));
}

#[test]
fn stopping_a_ring_completes_what_is_in_flight() {
    let server = Server::start(1, SlowDevice::new(MIB).held(), |config| config);
    let mut guest = Guest::boot(&server.socket, GuestConfig::default());
    let ios: Vec<_> = (0..4).map(|sector| guest.submit(0, VIRTIO_BLK_T_IN, sector, Data::In(512))).collect();
    eventually("all four are in flight", || server.device.in_flight() == 4);
    server.device.release_soon();
    assert_eq!(guest.stop_queue(0), 4);
    for _ in &ios {
        guest.poll_used(0).expect("completed before the answer");
    }
    for (sector, io) in ios.iter().enumerate() {
        assert_eq!(guest.memory.read(io.data, 512), expected(sector as u64 * 512, 512));
    }
}

#[test]
fn a_ring_without_a_kick_descriptor_is_polled() {
    let server = Server::start(1, SlowDevice::new(MIB), |config| config);
    let mut guest = Guest::negotiate(&server.socket, GuestConfig::default());
    guest.send_memory();
    guest.describe_queue(0, 0);
    guest.vmm.send(Request::SetVringKick, &[0x100], &[]);
    assert!(guest.enable_queue(0, true));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(guest.read(0, 1, 512), expected(512, 512));
}

#[test]
fn the_guest_is_interrupted_when_it_wants_to_be() {
    let server = Server::start(1, SlowDevice::new(MIB), |config| config);
    let refused = virtio::VIRTIO_F_RING_PACKED | virtio::VIRTIO_F_EVENT_IDX;
    let mut guest =
        Guest::boot(&server.socket, GuestConfig { refused_features: refused, ..Default::default() });
    guest.read(0, 0, 512);
    assert!(wait_signal(&guest.queues[0].call, Duration::from_secs(60)));
    guest.queues[0].ring.avail_flags().store(1, std::sync::atomic::Ordering::SeqCst);
    guest.read(0, 0, 512);
    std::thread::sleep(Duration::from_millis(20));
    assert!(!is_signalled(&guest.queues[0].call));
    // A new descriptor is signalled at once, and from then on.
    guest.queues[0].ring.avail_flags().store(0, std::sync::atomic::Ordering::SeqCst);
    let call = eventfd();
    guest.vmm.send(Request::SetVringCall, &[0], &[call.as_raw_fd()]);
    assert!(wait_signal(&call, Duration::from_secs(60)));
    guest.read(0, 0, 512);
    assert!(wait_signal(&call, Duration::from_secs(60)) && !is_signalled(&guest.queues[0].call));
}

#[test]
fn queues_move_between_cores_while_they_work() {
    let server =
        Server::start(2, SlowDevice::new(MIB).slow(20_000), |config| Config { num_queues: 2, ..config });
    let mut guest = Guest::boot(&server.socket, GuestConfig { queues: 2, ..GuestConfig::default() });
    for round in 0..200u64 {
        let ios: Vec<_> = (0..8u64)
            .map(|i| {
                let (queue, sector) = ((i % 2) as usize, (round * 8 + i) % (MIB / 512));
                (queue, sector, guest.submit(queue, VIRTIO_BLK_T_IN, sector, Data::In(512)))
            })
            .collect();
        server.export().remap_queue((round % 2) as u16, (round / 2 % 2) as usize).unwrap();
        for _ in 0..4 {
            guest.wait_used(0);
            guest.wait_used(1);
        }
        for (_, sector, io) in ios {
            assert_eq!(guest.memory.read(io.status, 1), [0]);
            assert_eq!(guest.memory.read(io.data, 512), expected(sector * 512, 512));
        }
    }
    assert!(server.export().remap_queue(2, 0).unwrap_err().to_string().contains("queue 2"));
    assert!(server.export().remap_queue(0, 2).unwrap_err().to_string().contains("core 2"));
    assert_eq!(server.export().stats().queues[0].requests(block::Op::Read), 800);
}

#[test]
fn a_resize_reaches_the_client() {
    let server = Server::start(1, SlowDevice::new(MIB), |config| config);
    let mut guest = Guest::boot(&server.socket, GuestConfig::default());
    let (ours, theirs) = std::os::unix::net::UnixStream::pair().unwrap();
    assert!(guest.vmm.send_acked(Request::SetBackendReqFd, &[], &[theirs.as_raw_fd()]));
    drop(theirs);
    // The message that brought the channel has been answered; the channel is kept right after that.
    assert_eq!(guest.vmm.ask_u64(Request::GetQueueNum), 1);
    server.device.grow(2 * MIB);
    assert_eq!(server.export().notify_resize().capacity, 2 * MIB);
    let mut message = [0; 12];
    ours.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    std::io::Read::read_exact(&mut &ours, &mut message).unwrap();
    assert_eq!(message[0], 2, "CONFIG_CHANGE_MSG");
    assert_eq!(ConfigSpace::from_bytes(&config_space(&guest.vmm, 0, 60)).capacity, 2 * MIB / 512);
    assert_eq!(guest.read(0, 2 * MIB / 512 - 1, 512), [0; 512]);
}

#[test]
fn memory_regions_come_and_go_while_rings_run() {
    let server = Server::start(1, SlowDevice::new(MIB), |config| config);
    let mut guest = Guest::boot(&server.socket, GuestConfig::default());
    let more = QueueMemory::new(MIB);
    let high = GUEST_BASE + (1 << 30);
    let region = [0, high, MIB, 0x7f00_0000_0000, 0];
    assert_eq!(server.device.regions().len(), 1);
    for round in 0..10u64 {
        assert!(guest.vmm.send_acked(Request::AddMemReg, &region, &[more.fd.as_raw_fd()]));
        assert_eq!(server.device.regions().len(), 2);
        let at = guest.scratch(0, 50);
        guest.memory.write(at, &Header { kind: VIRTIO_BLK_T_IN, ioprio: 0, sector: round }.to_bytes());
        let buffer = |addr, len, is_writable| Buffer { addr, len, is_writable };
        guest.submit_chain(
            0,
            &[buffer(at, 16, false), buffer(high + 512, 512, true), buffer(at + 64, 1, true)],
        );
        assert_eq!(guest.wait_used(0).1, 513);
        assert_eq!(more.read(GUEST_BASE + 512, 512), expected(round * 512, 512));
        assert!(guest.vmm.send_acked(Request::RemMemReg, &region, &[]));
        assert_eq!(server.device.regions().len(), 1);
        assert_eq!(guest.read(0, round, 512), expected(round * 512, 512));
    }
    // The region with the rings is removed and added again: the ring waits and then continues.
    let first = [0, GUEST_BASE, guest.memory.len, 0x7e00_0000_0000, 0];
    assert!(guest.vmm.send_acked(Request::RemMemReg, &first, &[]));
    let io = guest.submit(0, VIRTIO_BLK_T_IN, 3, Data::In(512));
    assert!(guest.vmm.send_acked(Request::AddMemReg, &first, &[guest.memory.fd.as_raw_fd()]));
    assert_eq!(guest.wait_used(0).0, io.head);
}

#[test]
fn a_client_that_leaves_in_the_middle_of_io_leaves_nothing_behind() {
    let server = Server::start(1, SlowDevice::new(MIB).held(), |config| config);
    let mut guest = Guest::boot(&server.socket, GuestConfig::default());
    for sector in 0..4 {
        guest.submit(0, VIRTIO_BLK_T_OUT, sector, Data::Out(&[7; 512]));
    }
    eventually("all four are in flight", || server.device.in_flight() == 4);
    drop(guest);
    server.device.release_soon();
    eventually("the session has ended", || server.device.regions().is_empty());
    assert_eq!(server.device.in_flight(), 0);
    assert_eq!(server.device.bytes(0, 2048), [7; 2048]);
    let mut guest = Guest::boot(&server.socket, GuestConfig::default());
    assert_eq!(guest.read(0, 9, 512), expected(9 * 512, 512));
    assert_eq!(server.export().stats().connections(), 2);
    assert!(server.export().stats().is_connected());
}

#[test]
fn an_export_stops_under_load() {
    let mut server = Server::start(2, SlowDevice::new(MIB).held(), |config| config);
    let mut guest = Guest::boot(&server.socket, GuestConfig::default());
    let ios: Vec<_> = (0..4).map(|sector| guest.submit(0, VIRTIO_BLK_T_IN, sector, Data::In(512))).collect();
    eventually("all four are in flight", || server.device.in_flight() == 4);
    server.device.release_soon();
    drop(server.export.take());
    assert_eq!(ios.iter().filter(|_| guest.poll_used(0).is_some()).count(), 4);
    assert!(guest.vmm.is_hung_up() && !server.socket.exists() && server.device.regions().is_empty());
}

#[test]
fn the_dirty_log_names_exactly_the_pages_that_were_written() {
    let server = Server::start(1, SlowDevice::new(MIB), |config| config);
    let mut guest = Guest::boot(&server.socket, GuestConfig::default());
    guest.read(0, 0, 512);
    let pages = |addr: u64| (addr / 4096) as usize;
    let log = QueueMemory::new((GUEST_BASE + (8 << 20)).div_ceil(4096 * 8));
    guest.vmm.send(Request::SetLogBase, &[log.len, 0], &[log.fd.as_raw_fd()]);
    guest.vmm.receive(Request::SetLogBase);
    guest.vmm.send(Request::SetFeatures, &[guest.features | virtio::VHOST_F_LOG_ALL], &[]);
    guest.send_addresses(0, Some(guest.used_ring_addr(0)));
    assert_eq!(guest.vmm.ask_u64(Request::GetQueueNum), 1);
    let dirty = || -> Vec<usize> {
        let bytes = log.read(GUEST_BASE, log.len as usize);
        let is_set = |page: &usize| bytes[page / 8] >> (page % 8) & 1 == 1;
        (0..bytes.len() * 8).filter(is_set).collect()
    };
    let clear = || log.write(GUEST_BASE, &vec![0; log.len as usize]);
    clear();
    let (status, io) = guest.run(0, VIRTIO_BLK_T_IN, 0, Data::In(8192));
    assert_eq!(status, 0);
    let used = pages(guest.used_ring_addr(0));
    eventually("the used ring is marked", || dirty().contains(&used));
    assert_eq!(dirty(), [used, pages(io.status), pages(io.data), pages(io.data) + 1]);
    clear();
    let (_, io) = guest.run(0, VIRTIO_BLK_T_OUT, 0, Data::Out(&[1; 4096]));
    eventually("the used ring is marked", || dirty().contains(&used));
    assert_eq!(dirty(), [used, pages(io.status)]);
    // Switched off again.
    guest.vmm.send(Request::SetFeatures, &[guest.features], &[]);
    guest.send_addresses(0, None);
    assert_eq!(guest.vmm.ask_u64(Request::GetQueueNum), 1);
    clear();
    guest.read(0, 0, 512);
    assert_eq!(dirty(), [0usize; 0]);
}

#[test]
fn an_export_can_connect_to_a_vmm_that_listens_and_finds_it_again() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("vmm.sock");
    let cores = reactor::Cores::start(&[reactor::CoreConfig::default()]).unwrap();
    let config = Config { mode: SocketMode::Connect, ..Config::new(&socket) };
    let device = std::sync::Arc::new(SlowDevice::new(MIB));
    let export = VhostUserBlk::start(device, cores.all(), config).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    let listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
    for _ in 0..3 {
        let vmm = Vmm { socket: listener.accept().unwrap().0 };
        assert_ne!(vmm.ask_u64(Request::GetFeatures) & virtio::VIRTIO_F_VERSION_1, 0);
    }
    drop(listener);
    drop(export);
    assert!(socket.exists(), "it is the VMM's");
}

#[test]
fn rings_of_every_size_are_served() {
    let server = Server::start(1, SlowDevice::new(MIB), |config| config);
    for size in [2, 4, 128, MAX_QUEUE_SIZE] {
        let refused_features = virtio::VIRTIO_F_RING_PACKED;
        let mut guest =
            Guest::boot(&server.socket, GuestConfig { size, refused_features, ..Default::default() });
        let status = match size {
            2 => guest.run(0, VIRTIO_BLK_T_FLUSH, 0, Data::None).0,
            _ => guest.run(0, VIRTIO_BLK_T_IN, 0, Data::In(512)).0,
        };
        assert_eq!(status, 0);
    }
    let guest = Guest::negotiate(&server.socket, GuestConfig::default());
    assert!(!guest.vmm.send_acked(Request::SetVringNum, &[pair(0, 2048)], &[]));
    assert!(guest.vmm.is_hung_up());
}
