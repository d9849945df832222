//! Block status from the server.

use super::*;
use block::{Status, StatusReport, StatusStart};

const CONTEXT: u32 = 7;

/// The descriptors of extents, each with its length and flags, as the payload of a reply.
fn payload(replies: Replies, context: u32, extents: &[(u64, u64)]) -> Vec<u8> {
    let mut bytes = context.to_be_bytes().to_vec();
    if replies == Replies::Extended {
        bytes.extend((extents.len() as u32).to_be_bytes());
    }
    for (len, flags) in extents {
        if replies == Replies::Extended {
            bytes.extend([len.to_be_bytes(), flags.to_be_bytes()].concat());
        } else {
            bytes.extend([(*len as u32).to_be_bytes(), (*flags as u32).to_be_bytes()].concat());
        }
    }
    bytes
}

const fn kind(replies: Replies) -> u16 {
    if matches!(replies, Replies::Extended) { 6 } else { 5 }
}

fn export(replies: Replies) -> Export {
    Export { context: Some(CONTEXT), ..Export::good(replies) }
}

/// The extents that a query of 1 MiB at 1 MiB gets from a server that answers it with `answer`.
fn query(
    replies: Replies,
    answer: impl FnOnce(&mut Client, Asked) + Send + 'static,
) -> Result<Vec<(u64, Status)>, String> {
    let (_server, _session, mut queue) = Server::start(export(replies), move |client| {
        let asked = client.request();
        assert_eq!((asked.command, asked.flags, asked.offset, asked.len), (7, 0, 1 << 20, 1 << 20));
        answer(client, asked);
        client.linger();
    });
    let report = StatusReport::new();
    // SAFETY: the report outlives the query, which is waited for.
    let started = unsafe { queue.push_status(3, &report, 1 << 20, 1 << 20) };
    assert!(matches!(started, StatusStart::InRing));
    match ends(&mut queue, 1)[..] {
        [(3, Ok(()))] => Ok(report.extents().map(|extent| (extent.len, extent.status)).collect()),
        _ => Err(queue.lost().expect("the connection is lost").to_owned()),
    }
}

/// As [`query`], with one part whose extents are these.
fn described(replies: Replies, extents: &'static [(u64, u64)]) -> Result<Vec<(u64, Status)>, String> {
    query(replies, move |client, asked| {
        let bytes = client.part(&asked, 1, kind(replies), &payload(replies, CONTEXT, extents));
        // One byte at a time: the network does not keep the boundaries of descriptors.
        bytes.iter().for_each(|byte| client.send(&[*byte]));
    })
}

#[test]
fn extents_of_the_server_are_reported() {
    let (data, zero, hole) = (Status::DATA, Status::ZERO, Status::ZERO_HOLE);
    for replies in [Replies::Structured, Replies::Extended] {
        let found = described(replies, &[(4096, 0), (65536, 3), (4096, 2), (1024, 1), (512, 0)]);
        let expected = [(4096, data), (65536, hole), (4096, zero), (1024, Status::HOLE), (512, data)];
        assert_eq!(found.unwrap(), expected);
        assert_eq!(
            described(replies, &[(1 << 30, 3)]).unwrap(),
            [(1 << 20, hole)],
            "as much as was asked for"
        );
        assert_eq!(
            described(replies, &[(100, 0), (5000, 3)]).unwrap(),
            [(512, data), (4096, hole), (512, data)]
        );
        assert_eq!(described(replies, &[(100, 3)]).unwrap(), [(512, data)], "a part of a block");
    }
}

#[test]
fn a_report_without_room_ends_the_answer() {
    let found = query(Replies::Extended, |client, asked| {
        let extents: Vec<(u64, u64)> = (0..2000).map(|i| (512, if i % 2 == 0 { 0 } else { 3 })).collect();
        let bytes = client.part(&asked, 1, 6, &payload(Replies::Extended, CONTEXT, &extents));
        client.send(&bytes);
    });
    assert_eq!(found.unwrap().len(), StatusReport::MAX_EXTENTS);
}

#[test]
fn a_server_that_does_not_know_has_data() {
    for replies in [Replies::Structured, Replies::Extended] {
        for number in [0, 5, 95] {
            let found = query(replies, move |client, asked| client.done(&asked, number));
            assert_eq!(found.unwrap(), [(1 << 20, Status::DATA)], "error {number}");
        }
        let found = query(replies, move |client, asked| {
            let extents = client.part(&asked, 0, kind(replies), &payload(replies, CONTEXT, &[(4096, 3)]));
            client.send(&extents);
            client.done(&asked, 5);
        });
        assert_eq!(found.unwrap(), [(4096, Status::ZERO_HOLE), ((1 << 20) - 4096, Status::DATA)]);
    }
}

#[test]
fn a_server_without_the_context_is_not_asked() {
    for replies in every_form() {
        let (_server, _session, mut queue) = Server::start(Export::good(replies), |client| client.linger());
        let report = StatusReport::new();
        // SAFETY: nothing is in the ring.
        let started = unsafe { queue.push_status(0, &report, 0, 8192) };
        assert!(matches!(started, StatusStart::Apart(_)));
        assert_eq!((report.len(), report.covered()), (1, 8192));
    }
}

#[test]
fn a_lie_about_extents_ends_the_connection() {
    for replies in [Replies::Structured, Replies::Extended] {
        let lies: [(&str, u16, Vec<u8>); 5] = [
            ("empty extent", kind(replies), payload(replies, CONTEXT, &[(4096, 0), (0, 3)])),
            ("does not fit", kind(replies), payload(replies, CONTEXT + 1, &[(4096, 0)])),
            ("bytes long", kind(replies), payload(replies, CONTEXT, &[])),
            ("bytes long", kind(replies), payload(replies, CONTEXT, &[(4096, 0)])[..11].to_vec()),
            ("of type", 11 - kind(replies), payload(replies, CONTEXT, &[(4096, 0)])),
        ];
        for (what, kind, bytes) in lies {
            let lie = query(replies, move |client, asked| {
                let bytes = client.part(&asked, 1, kind, &bytes);
                client.send(&bytes);
            });
            let why = lie.expect_err(what);
            assert!(why.contains(what), "{what}: {why}");
        }
    }
    // Extents for a read.
    let (_server, _session, mut queue) = Server::start(export(Replies::Structured), |client| {
        let asked = client.request();
        let bytes = client.part(&asked, 1, 5, &payload(Replies::Structured, CONTEXT, &[(4096, 0)]));
        client.send(&bytes);
        client.linger();
    });
    let mut memory = vec![0; 4096];
    let list = segment(&mut memory);
    assert_eq!(push(&mut queue, 0, &Request::read(data(&list)), 0), Ok(()));
    assert_eq!(ends(&mut queue, 1), [(0, Err(IoError::DeviceGone))]);
}

#[test]
fn a_query_ends_with_its_connection_and_what_it_lacks_is_data() {
    for replies in [Replies::Structured, Replies::Extended] {
        let turns: Vec<(Export, server::Serve)> = vec![
            (
                export(replies),
                Box::new(move |client| {
                    let asked = client.request();
                    let extents = payload(replies, CONTEXT, &[(8192, 3)]);
                    let part = client.part(&asked, 0, kind(replies), &extents);
                    client.send(&part);
                }),
            ),
            (export(replies), Box::new(|client| drop(serve(client, 1)))),
        ];
        let (_server, _session, mut queue) = Server::in_turn(600, turns);
        let report = StatusReport::new();
        // SAFETY: the report outlives the query, which is waited for.
        let started = unsafe { queue.push_status(3, &report, 1 << 20, 1 << 20) };
        assert!(matches!(started, StatusStart::InRing));
        assert_eq!(ends(&mut queue, 1), [(3, Ok(()))]);
        let extents: Vec<_> = report.extents().map(|extent| (extent.len, extent.status)).collect();
        assert_eq!(extents, [(8192, Status::ZERO_HOLE), ((1 << 20) - 8192, Status::DATA)]);
        // Without a connection nothing is known.
        assert!(!queue.is_connected());
        let report = StatusReport::new();
        // SAFETY: the report is not used when the call has returned.
        let started = unsafe { queue.push_status(3, &report, 1 << 20, 1 << 20) };
        assert!(!matches!(started, StatusStart::InRing));
        let extents: Vec<_> = report.extents().map(|extent| (extent.len, extent.status)).collect();
        assert_eq!(extents, [(1 << 20, Status::DATA)]);
        assert_eq!(push(&mut queue, 0, &Request::flush(), 0), Ok(()));
        assert_eq!(ends(&mut queue, 1), [(0, Ok(()))]);
    }
}
