//! How connections end: by the host, by its silence, by ours.

use crate::host::Pdu;
use crate::server::{MIB, Server, wait_until};
use exports::Export;
use nvme::{Command, Sgl, SubmissionEntry};
use std::time::{Duration, Instant};

#[test]
fn with_the_admin_queue_its_io_queues_go_and_others_stay() {
    let server = Server::start(MIB);
    let (admin, mut io) = server.connect();
    let (_other, mut others) = server.connect();
    drop(admin);
    assert!(io.is_disconnected());
    assert_eq!(others.read(0, 1).len(), 512);
    server.wait_for_clients(2);
}

#[test]
fn a_host_that_vanishes_in_the_middle_of_anything_leaves_nothing_behind() {
    let server = Server::start(8 * MIB);
    server.device.set_delay(5_000_000);
    for round in 0..20u16 {
        let (mut admin, mut io) = server.connect();
        let event = SubmissionEntry::new(&Command::async_event_request(), 99, Sgl::None);
        admin.send(event);
        for id in 0..8 {
            io.send(SubmissionEntry::new(&Command::read(1, 0, 512), id, Sgl::Transport { len: 256 << 10 }));
            let write = Command::write(1, 0, 512, false);
            io.send(SubmissionEntry::new(&write, 100 + id, Sgl::Transport { len: 256 << 10 }));
        }
        match round % 4 {
            // Half of what was asked for.
            0 => {
                let request = loop {
                    if let Pdu::R2t(request) = io.receive() {
                        break request;
                    }
                };
                let (command_id, tag) = (request.command_id, request.tag);
                let header = nvme::tcp::H2cData { command_id, tag, offset: 0, len: 65536, is_last: false };
                let mut front = [0; 64];
                let len = header.encode(&io.framing, &mut front);
                std::io::Write::write_all(&mut io.stream, &[&front[..len], &[1; 1000][..]].concat()).unwrap();
            }
            1 => drop(io.receive()),
            2 => drop(admin),
            _ => {}
        }
    }
    server.wait_for_clients(0);
}

#[test]
fn an_export_that_stops_waits_for_what_is_in_flight_and_not_for_data_that_never_comes() {
    let mut server = Server::start(8 * MIB);
    server.device.hold();
    let (mut admin, mut io) = server.connect();
    admin.send(SubmissionEntry::new(&Command::async_event_request(), 9, Sgl::None));
    io.send(SubmissionEntry::new(&Command::read(1, 0, 8), 1, Sgl::Transport { len: 4096 }));
    io.send(SubmissionEntry::new(&Command::write(1, 0, 512, false), 2, Sgl::Transport { len: 256 << 10 }));
    let Pdu::R2t(_) = io.receive() else { panic!("no R2T") };
    wait_until(|| server.device.in_flight() == 1);
    server.device.release_soon();
    let start = Instant::now();
    server.export = None;
    assert!(start.elapsed() < Duration::from_secs(4));
    let Pdu::Data { data, .. } = io.receive() else { panic!("what was in flight was not answered") };
    assert_eq!(data.len(), 4096);
    assert!(io.is_disconnected() && admin.is_disconnected());
}

#[test]
fn statistics_count_queues_as_clients() {
    let server = Server::start(MIB);
    let (_admin, io) = server.connect();
    server.wait_for_clients(2);
    drop(io);
    server.wait_for_clients(1);
    assert_eq!(server.export().stats().connections(), 2);
}
