//! Clients that never asked for the sizes of blocks: they read and write any bytes, and no write is
//! lost for that.

use crate::client::*;
use crate::server::{MIB, Server, wait_until};
use base::Rng;
use block::Limits;
use conformance::slow::{SlowDevice, pattern};
use std::time::Duration;

fn server(block_size: u32) -> Server {
    let limits = Limits { block_size, physical_block_size: block_size, ..Limits::new(MIB) };
    Server::over(SlowDevice::with_limits(Limits { volatile_cache: true, ..limits }), |config| config)
}

fn unaware(server: &Server, form: Form) -> Client {
    Client::unaware(&server.socket, form)
}

#[test]
fn any_bytes_are_read_written_zeroed_and_trimmed() {
    for (block_size, form) in
        [(512, Form::Simple), (4096, Form::Structured), (4096, Form::Extended), (65536, Form::Structured)]
    {
        let server = server(block_size);
        let mut client = unaware(&server, form);
        let mut expected: Vec<u8> = (0..MIB).map(pattern).collect();
        let mut rng = Rng::new(1);
        for round in 0..200u64 {
            let longest = if round % 2 == 0 { 40 } else { 3 * u64::from(block_size) };
            let len = 1 + rng.below(longest);
            let offset = rng.below(MIB - len + 1);
            let (from, to) = (offset as usize, (offset + len) as usize);
            match round % 5 {
                0 | 1 => {
                    let data: Vec<u8> = (0..len).map(|i| (i * 3 + round) as u8).collect();
                    assert_eq!(client.write((round % 2) as u16 * FUA, offset, &data), 0);
                    expected[from..to].copy_from_slice(&data);
                }
                2 => {
                    assert_eq!(client.run(WRITE_ZEROES, 0, offset, len).error, 0);
                    expected[from..to].fill(0);
                }
                3 => {
                    assert_eq!(client.run(TRIM, FUA, offset, len).error, 0);
                    // The device fills whole blocks with this; others stay.
                    let block = block_size as usize;
                    let (start, end) = (from.div_ceil(block) * block, to / block * block);
                    expected[start.min(end)..end].fill(0xdd);
                }
                _ => assert!(client.read(offset, len) == expected[from..to], "{offset} {len}"),
            }
        }
        assert!(server.device.bytes(0, MIB as usize) == expected, "{block_size} {form:?}");
        assert_eq!(client.write(0, MIB - 1, &[1, 2]), ENOSPC);
        assert_eq!(server.connect(form).write(0, 1, &[0; 512]), EINVAL, "who has asked keeps to them");
    }
}

#[test]
fn a_client_of_old_writes_three_bytes() {
    let server = server(4096);
    let mut client = Client::ancient(&server.socket);
    assert_eq!(client.size, MIB);
    assert_eq!(client.write(0, 4094, b"abc"), 0);
    assert_eq!(client.read(4093, 5), [pattern(4093), b'a', b'b', b'c', pattern(4097)]);
}

#[test]
fn no_part_of_a_block_is_lost_that_others_write_at_the_same_time() {
    const PART: u64 = 100;
    let server = server(4096);
    server.device.set_delay(200_000);
    let mut whole = server.connect(Form::Simple);
    std::thread::scope(|scope| {
        // Parts of two blocks, one of them in both, over both cores.
        for part in 0..4 {
            let mut client = unaware(&server, Form::Structured);
            scope.spawn(move || {
                let offset = 4096 - 2 * PART + part * PART - PART / 2;
                for round in 0..100u8 {
                    assert_eq!(client.write(0, offset, &[round; PART as usize]), 0);
                    assert_eq!(client.read(offset, PART), [round; PART as usize], "part {part}");
                }
            });
        }
    });
    // Whole blocks by a client that has asked, and parts of them by one that has not.
    let mut part = unaware(&server, Form::Simple);
    for round in 0..100u8 {
        whole.send_write(0, 1, 8192, &[round; 4096]);
        part.send_write(0, 1, 8192 + 1000, &[0xff; 10]);
        assert_eq!((whole.reply().error, part.reply().error), (0, 0));
        let block = server.device.bytes(8192, 4096);
        let others = block[..1000].iter().chain(&block[1010..]);
        assert!(others.copied().all(|byte| byte == round), "round {round}");
    }
}

#[test]
fn a_write_of_a_part_waits_for_writes_of_its_block_and_for_no_others() {
    let server = server(4096);
    let mut whole = [server.connect(Form::Simple), server.connect(Form::Simple)];
    let mut part = unaware(&server, Form::Simple);
    for round in 0..2u8 {
        // The first time the export has not kept track of what is on its way; the core of the other
        // connection has it.
        for client in &mut whole {
            server.device.hold();
            client.send_write(0, 1, 4096, &[round; 4096]);
            wait_until(|| server.device.in_flight() == 1);
            server.device.let_pass();
            server.device.release_soon();
            assert_eq!(part.write(0, 5000, &[9; 10]), 0);
            assert_eq!(server.device.in_flight(), 0, "round {round}");
            assert_eq!(client.reply().error, 0);
            assert_eq!(server.device.bytes(4999, 3), [round, 9, 9]);
        }
    }
    server.device.hold();
    whole[0].send_write(0, 1, 8192, &[7; 4096]);
    wait_until(|| server.device.in_flight() == 1);
    server.device.let_pass();
    assert_eq!(part.write(0, 5000, &[8; 10]), 0);
    assert_eq!(server.device.in_flight(), 1, "of another block");
    server.device.release();
    assert_eq!(whole[0].reply().error, 0);
}

#[test]
fn clients_that_vanish_while_they_wait_for_a_block_keep_no_other_one_waiting() {
    let server = server(4096);
    let mut client = unaware(&server, Form::Simple);
    assert_eq!(client.write(0, 1, &[1]), 0);
    server.device.hold();
    for cookie in 0..20 {
        client.send_write(0, cookie, 10, &[2; 10]);
    }
    wait_until(|| server.device.in_flight() > 0);
    drop(client);
    std::thread::sleep(Duration::from_millis(1));
    server.device.release();
    let mut next = unaware(&server, Form::Simple);
    assert_eq!(next.write(0, 12, &[3; 10]), 0);
    server.wait_for_clients(1);
    assert_eq!(next.write(0, 12, &[4; 10]), 0);
    assert_eq!(server.device.bytes(12, 10), [4; 10]);
}
