//! The client against a handwritten server.

mod handshake;
mod hostile;
mod reconnect;
mod server;
mod status;

use super::*;
use block::{Data, Flags, IoError, Queue, Request, Segment};
use drivers::test_queue::{data, ends, push, segment};
use server::{ALL_FLAGS, Asked, Client, Export, Server, part};
use std::time::{Duration, Instant};

fn every_form() -> [Replies; 3] {
    [Replies::Simple, Replies::Structured, Replies::Extended]
}

#[test]
fn parts_of_replies_may_come_in_any_order_and_between_each_other() {
    for replies in [Replies::Structured, Replies::Extended] {
        let (_server, _session, mut queue) = Server::start(Export::good(replies), |client| {
            let (first, second) = (client.request(), client.request());
            let data = |asked: &Asked, from: u64, byte: u8, len: usize| {
                [&(asked.offset + from).to_be_bytes()[..], &vec![byte; len]].concat()
            };
            let hole = [&(first.offset + 2048).to_be_bytes()[..], &1024u32.to_be_bytes()].concat();
            let parts = [
                client.part(&first, 0, 1, &data(&first, 3072, 4, 1024)),
                client.part(&second, 0, 1, &data(&second, 512, 6, 512)),
                client.part(&first, 0, 2, &hole),
                client.part(&first, 0, 1, &data(&first, 0, 1, 2048)),
                client.part(&second, 1, 1, &data(&second, 0, 5, 512)),
                client.part(&first, 1, 0, &[]),
            ];
            // One byte at a time: the network does not keep the boundaries of replies.
            for byte in parts.concat() {
                client.send(&[byte]);
            }
            assert_eq!(client.request().command, 2, "an orderly disconnect");
        });
        let (mut first, mut second) = (vec![9; 4096], vec![9; 1024]);
        let (a, b) = (segment(&mut first), segment(&mut second));
        assert_eq!(push(&mut queue, 3, &Request::read(data(&a)), 1 << 20), Ok(()));
        assert_eq!(push(&mut queue, 5, &Request::read(data(&b)), 512), Ok(()));
        assert_eq!(ends(&mut queue, 2), [(3, Ok(())), (5, Ok(()))]);
        let expected = [[1; 1024], [1; 1024], [0; 1024], [4; 1024]].concat();
        assert!(first == expected && second == [[5; 512], [6; 512]].concat());
    }
}

/// Serves `count` requests successfully and returns them.
fn serve(client: &mut Client, count: usize) -> Vec<Asked> {
    let mut seen = Vec::new();
    for _ in 0..count {
        let asked = client.request();
        seen.push(Asked { cookie: 0, ..asked });
        match asked.command {
            0 => client.data(&asked, &vec![7; asked.len as usize]),
            1 => {
                client.payload(&asked);
                client.done(&asked, 0);
            }
            _ => client.done(&asked, 0),
        }
    }
    seen
}

#[test]
fn every_request_reaches_the_server_as_it_should() {
    for replies in every_form() {
        let (_server, _session, mut queue) = Server::start(Export::good(replies), move |client| {
            let seen = serve(client, 8);
            let payload = if replies == Replies::Extended { 1 << 5 } else { 0 };
            let asked = |command, flags, offset, len| Asked { command, flags, cookie: 0, offset, len };
            assert_eq!(
                seen,
                [
                    asked(0, 0, 512, 4096),
                    asked(1, payload, 1024, 4096),
                    asked(1, 1 | payload, 1024, 4096),
                    asked(3, 0, 0, 0),
                    asked(4, 0, 4096, 8192),
                    asked(6, 0, 4096, 8192),
                    asked(6, 1 | 1 << 1, 4096, 8192),
                    asked(6, 1 << 4, 4096, 8192),
                ]
            );
        });
        let mut buffer = vec![0; 4096];
        let list = segment(&mut buffer);
        let fua = Flags::FUA;
        let requests = [
            (Request::read(data(&list)), 512),
            (Request::write(data(&list), Flags::NONE), 1024),
            (Request::write(data(&list), fua), 1024),
            (Request::flush(), 99),
            (Request::discard(8192), 4096),
            (Request::write_zeroes(8192, Flags::NONE), 4096),
            (Request::write_zeroes(8192, fua.with(Flags::NO_UNMAP)), 4096),
            (Request::write_zeroes(8192, Flags::NO_FALLBACK), 4096),
        ];
        for (req, offset) in requests {
            assert_eq!(push(&mut queue, 0, &req, offset), Ok(()));
            assert_eq!(ends(&mut queue, 1), [(0, Ok(()))], "{req:?}");
        }
        // Requests that need no server.
        assert_eq!(push(&mut queue, 1, &Request::write(Data::none(), Flags::NONE), 0), Ok(()));
        assert!(!queue.arm());
        assert_eq!(ends(&mut queue, 1), [(1, Ok(()))]);
    }
}

#[test]
fn a_server_without_fua_flushes_and_one_without_a_cache_does_not() {
    for (flags, commands) in [(ALL_FLAGS & !(1 << 3), &[1, 3][..]), (ALL_FLAGS & !(3 << 2), &[1])] {
        let export = Export { flags, ..Export::good(Replies::Structured) };
        let (_server, session, mut queue) = Server::start(export, move |client| {
            let seen: Vec<u16> = serve(client, commands.len()).iter().map(|asked| asked.command).collect();
            assert_eq!(seen, commands);
            assert_eq!(client.request().command, 2);
        });
        assert_eq!(session.limits().volatile_cache, commands.len() == 2);
        let mut buffer = vec![0; 512];
        let list = segment(&mut buffer);
        assert_eq!(push(&mut queue, 0, &Request::write(data(&list), Flags::FUA), 0), Ok(()));
        assert_eq!(ends(&mut queue, 1), [(0, Ok(()))]);
        if commands.len() == 1 {
            assert_eq!(push(&mut queue, 0, &Request::flush(), 0), Ok(()));
            assert_eq!(ends(&mut queue, 1), [(0, Ok(()))]);
        }
    }
}

#[test]
fn requests_longer_than_the_server_takes_go_part_by_part() {
    let flags = ALL_FLAGS & !(1 << 6);
    let export = Export { flags, blocks: Some([512, 512, 1000]), ..Export::good(Replies::Simple) };
    let (_server, _session, mut queue) = Server::start(export, |client| {
        for command in [0, 1, 1] {
            for i in 0..4 {
                let asked = client.request();
                assert_eq!((asked.command, asked.offset, asked.len), (command, 4096 + i * 512, 512));
                if command == 0 {
                    client.data(&asked, &[i as u8; 512]);
                } else {
                    client.payload(&asked);
                    client.done(&asked, 0);
                }
            }
        }
        // The third part fails: no fourth one is sent.
        for error in [0, 0, 28] {
            let asked = client.request();
            client.payload(&asked);
            client.done(&asked, error);
        }
        assert_eq!(client.request().command, 2);
    });
    let mut buffer = vec![9; 2048];
    // Memory segments with other boundaries than the parts.
    let (front, back) = buffer.split_at_mut(700);
    let list = [segment(front)[0], segment(back)[0]];
    let requests = [
        Request::read(data(&list)),
        Request::write(data(&list), Flags::NONE),
        Request::write_zeroes(2048, Flags::NONE),
    ];
    for req in requests {
        assert_eq!(push(&mut queue, 0, &req, 4096), Ok(()));
        assert_eq!(ends(&mut queue, 1), [(0, Ok(()))]);
    }
    assert_eq!(push(&mut queue, 0, &requests[1], 4096), Ok(()));
    assert_eq!(ends(&mut queue, 1), [(0, Err(IoError::NoSpace))]);
    assert!(buffer.chunks(512).enumerate().all(|(i, part)| part.iter().all(|byte| *byte == i as u8)));
}

#[test]
fn a_range_that_is_too_long_for_the_server_is_cut() {
    let (_server, _session, mut queue) = Server::start(Export::good(Replies::Structured), |client| {
        let asked = client.request();
        assert_eq!((asked.command, asked.len), (4, 3 << 20));
        client.done(&asked, 75);
        let seen = serve(client, 3);
        assert!(
            seen.iter().enumerate().all(|(i, part)| part.offset == (i as u64) << 20 && part.len == 1 << 20)
        );
        // The command is not tried again.
        assert_eq!(serve(client, 2)[0].len, 1 << 20);
    });
    assert_eq!(push(&mut queue, 0, &Request::discard(3 << 20), 0), Ok(()));
    assert_eq!(ends(&mut queue, 1), [(0, Ok(()))]);
    assert_eq!(push(&mut queue, 0, &Request::write_zeroes(2 << 20, Flags::NONE), 0), Ok(()));
    assert_eq!(ends(&mut queue, 1), [(0, Ok(()))]);
}

#[test]
fn each_error_number_has_its_meaning() {
    const CASES: [(u32, IoError); 8] = [
        (1, IoError::ReadOnly),
        (5, IoError::Medium),
        (12, IoError::NoMemory),
        (22, IoError::Invalid),
        (28, IoError::NoSpace),
        (75, IoError::Invalid),
        (95, IoError::Unsupported),
        (12345, IoError::Invalid),
    ];
    for replies in every_form() {
        let (_server, _session, mut queue) = Server::start(Export::good(replies), |client| {
            for (number, _) in CASES {
                let asked = client.request();
                client.done(&asked, number);
            }
            let asked = client.request();
            client.done(&asked, 108);
            assert_eq!(client.request().command, 2, "the client disconnects from a server that shuts down");
        });
        let mut buffer = vec![9; 512];
        let list = segment(&mut buffer);
        for (number, error) in CASES {
            assert_eq!(push(&mut queue, 0, &Request::read(data(&list)), 0), Ok(()));
            assert_eq!(ends(&mut queue, 1), [(0, Err(error))], "{number}");
        }
        assert_eq!(push(&mut queue, 0, &Request::flush(), 0), Ok(()));
        assert_eq!(ends(&mut queue, 1), [(0, Err(IoError::DeviceGone))]);
        assert_eq!(push(&mut queue, 0, &Request::flush(), 0), Err(IoError::DeviceGone));
    }
}

#[test]
fn an_error_among_the_parts_fails_the_read_and_its_text_is_skipped() {
    let (_server, _session, mut queue) = Server::start(Export::good(Replies::Structured), |client| {
        let asked = client.request();
        let text = [&[0, 0, 0, 5, 0, 4][..], b"oops", &asked.offset.to_be_bytes()].concat();
        let data = [&asked.offset.to_be_bytes()[..], &[1; 512]].concat();
        let bytes = [
            client.part(&asked, 0, 0x8002, &text),
            client.part(&asked, 0, 1, &data),
            client.part(&asked, 1, 0x8001, &[0, 0, 0, 22, 0, 0]),
        ];
        client.send(&bytes.concat());
        serve(client, 1);
    });
    let mut buffer = vec![9; 1024];
    let list = segment(&mut buffer);
    assert_eq!(push(&mut queue, 0, &Request::read(data(&list)), 4096), Ok(()));
    assert_eq!(ends(&mut queue, 1), [(0, Err(IoError::Medium))], "the first error counts");
    assert_eq!(push(&mut queue, 0, &Request::read(data(&list)), 4096), Ok(()));
    assert_eq!(ends(&mut queue, 1), [(0, Ok(()))]);
}

#[test]
fn long_and_short_reads_and_writes_share_a_connection() {
    for replies in every_form() {
        let (_server, _session, mut queue) = Server::start(Export::good(replies), |client| {
            // The written data, by block.
            let mut disk = vec![0u8; 16 << 20];
            loop {
                let asked = client.request();
                let range = asked.offset as usize..(asked.offset + asked.len) as usize;
                match asked.command {
                    0 => client.data(&asked, &disk[range]),
                    1 => {
                        disk[range].copy_from_slice(&client.payload(&asked));
                        client.done(&asked, 0);
                    }
                    _ => break,
                }
            }
        });
        let lens = [512, 4096, 1 << 20, 16384, 200 << 10, 512, 65536, 3 << 20];
        let mut buffers: Vec<Vec<u8>> =
            (0..16).map(|i| (0..lens[i % 8]).map(|at| (at / 5 + i) as u8).collect()).collect();
        let expected = buffers.clone();
        let lists: Vec<[Segment; 1]> = buffers.iter_mut().map(|buffer| segment(buffer)).collect();
        let offsets: Vec<u64> = lists
            .iter()
            .scan(0, |at, list| {
                *at += list[0].len as u64;
                Some(*at - list[0].len as u64)
            })
            .collect();
        for round in 0..4 {
            for (i, list) in lists.iter().enumerate() {
                let data = data(list);
                let req =
                    if round % 2 == 0 { Request::write(data, Flags::NONE) } else { Request::read(data) };
                assert_eq!(push(&mut queue, i as u32, &req, offsets[i]), Ok(()));
            }
            let ended = ends(&mut queue, 16);
            assert!(ended.iter().all(|(_, result)| result.is_ok()), "{ended:?}");
            if round % 2 == 0 {
                lists.iter().for_each(|list| data(list).fill(0xee));
            }
        }
        assert!(buffers == expected);
    }
}

#[test]
fn a_device_says_what_its_session_does_and_why_a_channel_cannot_be_opened() {
    let good = Export::good(Replies::Extended);
    let one_connection = Export { flags: ALL_FLAGS & !(1 << 8), ..good };
    let (server, session, queue) = Server::start(one_connection, |client| {
        assert_eq!(client.request().command, 2);
    });
    let device = NbdDevice::over(session.clone());
    assert_eq!(device.limits(), session.limits());
    assert!(device.name().starts_with("nbd+unix:///?socket=/"), "{}", device.name());
    assert_eq!(device.refresh().unwrap(), device.limits(), "the server is not asked");
    drop(queue);
    drop(server);
    let error = reactor::run(async move { device.open_channel().err().unwrap().to_string() });
    assert!(error.contains("cannot connect to /"), "{error}");
}
