//! Every command, every form, every refusal.

use crate::client::*;
use crate::server::{MIB, Server, wait_until};
use block::{IoError, Limits, Op, Status};
use conformance::slow::{SlowDevice, pattern};
use exports::Export;
use exports_nbd::Config;
use std::collections::HashSet;
use std::io::Write;
use std::sync::Arc;

fn patterned(offset: u64, len: u64) -> Vec<u8> {
    (offset..offset + len).map(pattern).collect()
}

#[test]
fn written_data_is_read_in_every_form() {
    let server = Server::start(4 * MIB);
    for (round, form) in FORMS.into_iter().enumerate() {
        let mut client = server.connect(form);
        assert_eq!(client.size, 4 * MIB);
        assert_eq!(client.read(512, 1024), patterned(512, 1024));
        for (at, len) in [(8192, 512), (16384, 4096), (MIB, 70_144), (2 * MIB, 1_500_160)] {
            let data: Vec<u8> = (0..len).map(|i| (i / 3 + round) as u8).collect();
            assert_eq!(client.write(0, at, &data), 0);
            assert!(client.read(at, len as u64) == data, "{form:?} {len}");
        }
        assert_eq!(client.run(FLUSH, 0, 0, 0).error, 0);
        // Restores the old content for the next round.
        assert_eq!(client.write(0, 512, &patterned(512, 1024)), 0);
    }
    let (stable, other) = server.device.stable_and_other_writes();
    assert!(stable > 0 && other == 0, "a client cannot change what the server has received");
}

#[test]
fn flush_and_fua_reach_the_device_and_a_cache_is_nothing() {
    let server = Server::start(MIB);
    let mut client = server.connect(Form::Structured);
    assert_eq!(client.write(FUA, 0, &[1; 512]), 0);
    assert_eq!((server.device.fua_writes(), server.device.flushes()), (1, 0));
    assert_eq!(client.run(FLUSH, 0, 0, 0).error, 0);
    assert_eq!(server.device.flushes(), 1);
    assert_eq!(client.run(WRITE_ZEROES, FUA, 0, 512).error, 0);
    assert_eq!(client.run(TRIM, FUA, 512, 512).error, 0);
    assert_eq!((server.device.fua_writes(), server.device.flushes()), (2, 2));
    let executed = server.device.executed();
    assert_eq!(client.run(CACHE, 0, 0, MIB).error, 0);
    assert_eq!(server.device.executed(), executed);
}

#[test]
fn zeroes_and_trims_reach_as_far_as_they_say() {
    let limits = Limits { max_discard: 8192, max_write_zeroes: 12_288 + 511, ..Limits::new(MIB) };
    let server = Server::over(SlowDevice::with_limits(limits), |config| config);
    let mut client = server.connect(Form::Extended);
    assert_eq!(client.write(0, 0, &[7; 128 << 10]), 0);
    assert_eq!(client.run(WRITE_ZEROES, 0, 512, 60 << 10).error, 0);
    let mut expected = vec![7; 128 << 10];
    expected[512..][..60 << 10].fill(0);
    assert!(client.read(0, 128 << 10) == expected);
    assert_eq!(client.run(TRIM, 0, 70 << 10, 20 << 10).error, 0);
    expected[70 << 10..][..20 << 10].fill(0xdd);
    assert!(client.read(0, 128 << 10) == expected);
}

#[test]
fn long_transfers_go_to_the_device_in_parts_it_takes() {
    let limits = Limits { max_transfer: 10_000, ..Limits::new(MIB) };
    let server = Server::over(SlowDevice::with_limits(limits), |config| config);
    let mut client = server.connect(Form::Simple);
    let data: Vec<u8> = (0..65_536u32).map(|i| (i / 9) as u8).collect();
    assert_eq!(client.write(0, 4096, &data), 0);
    assert_eq!(server.device.executed(), 7);
    assert!(client.read(4096, 65_536) == data);
}

#[test]
fn the_longest_payload_goes_through_and_a_longer_one_is_refused() {
    let server = Server::start(40 * MIB);
    for form in FORMS {
        let mut client = server.connect(form);
        let data: Vec<u8> = (0..32 * MIB).map(|i| (i / 4097) as u8).collect();
        assert_eq!(client.write(0, MIB, &data), 0);
        assert!(client.read(MIB, 32 * MIB) == data);
        let number = if form == Form::Simple { EINVAL } else { EOVERFLOW };
        assert_eq!(client.run(READ, 0, 0, 32 * MIB + 512).error, number);
        if form != Form::Extended {
            assert_eq!(client.write(0, 0, &vec![0; 33 << 20]), EINVAL);
        }
        assert!(client.read(MIB, 512) == data[..512], "the connection still works");
    }
}

#[test]
fn the_state_of_blocks_is_data() {
    let server = Server::start(16 * MIB);
    let mut client = server.connect(Form::Structured);
    let reply = client.run(BLOCK_STATUS, 0, MIB, 8 * MIB);
    assert_eq!((reply.kind, reply.data), (5, b"\0\0\0\x01\0\x80\0\0\0\0\0\0".to_vec()));
    let mut client = server.connect(Form::Extended);
    let reply = client.run(BLOCK_STATUS, 1 << 3, 0, 16 * MIB);
    let expected = b"\0\0\0\x01\0\0\0\x01\0\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0".to_vec();
    assert_eq!((reply.kind, reply.data), (6, expected));
    assert_eq!(client.run(BLOCK_STATUS, 0, 0, 17 * MIB).error, EINVAL);
    assert_eq!(server.connect(Form::Simple).run(BLOCK_STATUS, 0, 0, 512).error, EINVAL);
}

/// The flags and lengths of the extents in a reply.
fn extents(form: Form, reply: &Reply) -> Vec<(u64, u64)> {
    let (skip, width) = if form == Form::Extended { (8, 8) } else { (4, 4) };
    let number = |bytes: &[u8]| bytes.iter().fold(0, |all, byte| all << 8 | u64::from(*byte));
    let extents = reply.data[skip..].chunks(2 * width);
    extents.map(|extent| (number(&extent[..width]), number(&extent[width..]))).collect()
}

#[test]
fn extents_of_the_device_are_reported_from_the_first_byte_asked_for_to_the_last() {
    let limits = Limits { block_size: 4096, ..Limits::new(16 * MIB) };
    let server = Server::over(SlowDevice::with_limits(limits), |config| config);
    let ends =
        [(MIB, Status::DATA), (2 * MIB, Status::ZERO), (3 * MIB, Status::ZERO), (4 * MIB, Status::ZERO_HOLE)];
    server.device.report(&ends);
    for form in [Form::Structured, Form::Extended] {
        let mut client = server.connect(form);
        let reply = client.run(BLOCK_STATUS, 0, 0, 16 * MIB);
        assert_eq!(extents(form, &reply), [(MIB, 0), (2 * MIB, 2), (MIB, 3), (12 * MIB, 0)]);
        let reply = client.run(BLOCK_STATUS, 0, 2 * MIB, 2 * MIB);
        assert_eq!(extents(form, &reply), [(MIB, 2), (MIB, 3)]);
        let reply = client.run(BLOCK_STATUS, 1 << 3, MIB, 15 * MIB);
        assert_eq!(extents(form, &reply), [(2 * MIB, 2)], "one extent was asked for");
        let mut unaware = Client::unaware(&server.socket, form);
        let reply = unaware.run(BLOCK_STATUS, 0, 3 * MIB - 100, 200);
        assert_eq!(extents(form, &reply), [(100, 2), (100, 3)], "bytes inside blocks");
    }
    let many: Vec<_> =
        (1..=100).map(|i| (i * 4096, if i % 2 == 0 { Status::ZERO } else { Status::DATA })).collect();
    server.device.report(&many);
    let mut client = server.connect(Form::Structured);
    let reply = client.run(BLOCK_STATUS, 0, 0, MIB);
    let found = extents(Form::Structured, &reply);
    assert!((1..=64).contains(&found.len()) && found.iter().all(|(len, _)| *len == 4096), "{found:?}");
    server.device.fail_at(8192, IoError::Medium);
    assert_eq!(client.run(BLOCK_STATUS, 0, 0, MIB).error, EIO);
    assert_eq!(client.run(BLOCK_STATUS, 0, MIB, MIB).error, 0);
}

#[test]
fn an_invalid_request_is_refused_and_the_next_one_is_served() {
    let server = Server::start(MIB);
    for form in FORMS {
        let mut client = server.connect(form);
        for (command, flags, offset, len, number) in [
            (READ, 0, MIB, 512, EINVAL),
            (READ, 0, MIB - 512, 1024, EINVAL),
            (READ, 0, u64::MAX, 512, EINVAL),
            (READ, 0, 100, 512, EINVAL),
            (READ, 0, 0, 100, EINVAL),
            (READ, 0x80, 0, 512, EINVAL),
            (WRITE_ZEROES, 0, MIB, 512, ENOSPC),
            (TRIM, 0, MIB, 512, EINVAL),
            (CACHE, 0, MIB, 512, EINVAL),
            (FLUSH, 0, 512, 0, EINVAL),
            (99, 0, 0, 0, EINVAL),
        ] {
            let error = client.run(command, flags, offset, len).error;
            assert_eq!(error, number, "{form:?}: {command} {flags:#x} {offset} {len}");
        }
        for (offset, len, number) in
            [(MIB, 512, ENOSPC), (1, 512, EINVAL), (0, 100, EINVAL), (0, 100_000, EINVAL)]
        {
            assert_eq!(client.write(0, offset, &vec![9; len]), number, "{form:?}: {offset} {len}");
        }
        assert_eq!(client.read(0, 512), patterned(0, 512));
    }
    assert_eq!(server.failed(), 3 * 15);
    assert!(server.device.bytes(0, MIB as usize) == patterned(0, MIB), "nothing has changed");
}

#[test]
fn device_errors_are_reported_to_the_client() {
    let server = Server::start(MIB);
    for (error, number) in [
        (IoError::Medium, EIO),
        (IoError::Corrupt, EIO),
        (IoError::NoSpace, ENOSPC),
        (IoError::Unsupported, ENOTSUP),
        (IoError::DeviceGone, ESHUTDOWN),
    ] {
        server.device.fail_at(8192, error);
        for form in FORMS {
            let mut client = server.connect(form);
            assert_eq!(client.run(READ, 0, 4096, 8192).error, number, "{error:?}");
            assert_eq!(client.write(0, 8192, &[1; 512]), number, "{error:?}");
            assert_eq!(client.run(WRITE_ZEROES, FAST_ZERO, 8192, 512).error, number, "{error:?}");
            assert_eq!(client.read(0, 512), patterned(0, 512));
        }
    }
}

#[test]
fn a_read_only_export_says_so_and_refuses() {
    let device = SlowDevice::new(MIB);
    let server = Server::over(device, |config| Config { read_only: true, ..config });
    let mut client = server.connect(Form::Structured);
    assert_ne!(client.flags & 2, 0);
    assert_eq!(client.flags & 0x60, 0);
    assert_eq!(client.write(0, 0, &[1; 512]), EPERM);
    assert_eq!(client.run(TRIM, 0, 0, 512).error, EPERM);
    assert_eq!(client.run(WRITE_ZEROES, 0, 0, 512).error, EPERM);
    assert_eq!(client.run(FLUSH, 0, 0, 0).error, 0);
    assert_eq!(client.read(0, 512), patterned(0, 512));
}

#[test]
fn ten_thousand_tiny_requests_in_one_write_are_all_answered() {
    let server = Server::start(MIB);
    for form in FORMS {
        let mut client = server.connect(form);
        let all: Vec<u8> = (0..10_000u64).flat_map(|cookie| client.request(FLUSH, 0, cookie, 0, 0)).collect();
        let mut stream = client.stream.try_clone().unwrap();
        let writer = std::thread::spawn(move || stream.write_all(&all).unwrap());
        let cookies: HashSet<u64> = (0..10_000)
            .map(|_| {
                let reply = client.reply();
                assert_eq!(reply.error, 0);
                reply.cookie
            })
            .collect();
        writer.join().unwrap();
        assert_eq!((cookies.len(), cookies.iter().max()), (10_000, Some(&9999)));
    }
}

#[test]
fn requests_overtake_each_other_and_every_one_gets_its_own_data() {
    let server = Server::start(4 * MIB);
    let mut client = server.connect(Form::Structured);
    server.device.hold();
    for cookie in 0..100 {
        client.send(READ, 0, cookie, cookie * 4096, 4096);
    }
    wait_until(|| server.device.in_flight() == 100);
    server.device.let_pass();
    client.send(CACHE, 0, 777, 0, 512);
    let mut order = Vec::new();
    for _ in 0..101 {
        let reply = client.reply();
        if order.is_empty() {
            assert_eq!(reply.cookie, 777, "the others are held");
            server.device.release();
        }
        assert_eq!(reply.error, 0);
        if reply.cookie < 100 {
            assert!(reply.data == patterned(reply.cookie * 4096, 4096), "{}", reply.cookie);
        }
        order.push(reply.cookie);
    }
    let unique: HashSet<_> = order.iter().collect();
    assert_eq!(unique.len(), 101);
}

#[test]
fn two_cores_serve_connections_in_turn_and_share_the_device() {
    let server = Server::start(MIB);
    let mut clients: Vec<Client> = (0..4).map(|_| server.connect(Form::Structured)).collect();
    assert_ne!(clients[0].flags & 0x100, 0, "several connections are offered");
    for (i, client) in clients.iter_mut().enumerate() {
        assert_eq!(client.write(0, i as u64 * 512, &[i as u8 + 1; 512]), 0);
    }
    for client in &mut clients {
        let data = client.read(0, 4 * 512);
        assert!((0..4).all(|i| data[i * 512..][..512] == [i as u8 + 1; 512]));
    }
    let stats = server.export().stats();
    assert_eq!((stats.clients(), stats.connections()), (4, 4));
    let reads: Vec<u64> = stats.queues.iter().map(|queue| queue.requests(block::Op::Read)).collect();
    let bytes: u64 = stats.queues.iter().map(|queue| queue.bytes_written()).sum();
    assert_eq!((reads, bytes), (vec![2, 2], 2048));
}

#[test]
fn a_device_that_grew_is_told_to_who_comes_next_and_serves_who_is_there() {
    let server = Server::start(MIB);
    let mut before = server.connect(Form::Simple);
    assert_eq!(before.run(READ, 0, MIB, 512).error, EINVAL);
    server.device.grow(2 * MIB);
    assert_eq!(server.export().notify_resize().capacity, 2 * MIB);
    assert_eq!(before.read(MIB, 512), [0; 512]);
    assert_eq!(server.connect(Form::Simple).size, 2 * MIB);
}

#[test]
fn connections_go_to_the_cores_that_are_wanted_when_they_are_made() {
    let server = Server::start(MIB);
    let reads = |core: usize| server.export().stats().queues[core].requests(Op::Read);
    let mut old = server.connect(Form::Simple);
    old.read(0, 512);
    assert_eq!((reads(0), reads(1)), (1, 0));
    assert!(server.export().remap(&[1, 2]).unwrap_err().to_string().contains("core 2"));
    server.export().remap(&[1]).unwrap();
    for _ in 0..3 {
        server.connect(Form::Extended).read(0, 512);
    }
    old.read(0, 512);
    assert_eq!((reads(0), reads(1)), (2, 3), "who is there stays where it is");
    server.export().remap(&[]).unwrap();
    for _ in 0..4 {
        server.connect(Form::Structured).read(0, 512);
    }
    assert_eq!((reads(0), reads(1)), (4, 5));
}

#[test]
fn every_byte_of_an_image_that_ends_inside_a_block_is_served() {
    const SIZE: usize = 1_000_123;
    let image = tempfile::NamedTempFile::new().unwrap();
    let content: Vec<u8> = (0..SIZE).map(|at| (at % 251) as u8 + 1).collect();
    std::fs::write(image.path(), &content).unwrap();
    let options = drivers::io_uring::Options::new(image.path());
    let device = Arc::new(drivers::io_uring::UringDevice::open(&options).unwrap());
    let (_export, _cores, socket, _dir) = crate::server::export(device, 1, |config| config);
    for form in [Form::Simple, Form::Structured, Form::Extended] {
        let mut client = Client::connect(&socket, form);
        assert_eq!(client.size, 1_000_448);
        let mut copy = Vec::new();
        while (copy.len() as u64) < client.size {
            let len = (client.size - copy.len() as u64).min(64 << 10);
            copy.extend(client.read(copy.len() as u64, len));
        }
        assert!(copy[..SIZE] == content && copy[SIZE..].iter().all(|byte| *byte == 0));
    }
    // A write behind the end of the file is refused whole. One that has zeroes there keeps the
    // rest, and the file's size.
    let mut client = Client::connect(&socket, Form::Structured);
    assert_ne!(client.write(0, 999_936, &[9; 512]), 0);
    let mut block = [0; 512];
    block[..SIZE - 999_936].fill(9);
    assert_eq!(client.read(999_936, 512)[..SIZE - 999_936], content[999_936..]);
    assert_eq!(client.write(0, 999_936, &block), 0);
    assert_eq!(client.read(999_936, 512), block);
    assert_ne!(client.write(0, 1_000_448, &[9; 512]), 0);
    let after = std::fs::read(image.path()).unwrap();
    assert!(after[..999_936] == content[..999_936] && after[999_936..] == block[..SIZE - 999_936]);
}
