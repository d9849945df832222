//! Hostile and faulty hosts: the target disconnects them, and other hosts are not affected.

use crate::host::{Host, Pdu};
use crate::server::{MIB, Server, wait_until};
use exports_nvme_tcp::{Config, MemoryBudget};
use nvme::tcp::{CapsuleCmd, FatalStatus, H2cData, IcReq, TermReq};
use nvme::{Command, Sgl, Status, SubmissionEntry};
use std::io::Write;
use std::time::{Duration, Instant};

/// Checks that a well-behaved host is still served.
fn check_others(server: &Server) {
    let (_admin, mut io) = server.connect();
    assert_eq!(io.read(0, 1).len(), 512);
}

/// The termination that the host receives before the target disconnects it.
fn termination(host: &mut Host) -> TermReq {
    let Pdu::Terminated(reason) = host.receive() else { panic!("not terminated") };
    assert!(host.is_disconnected());
    reason
}

#[test]
fn bytes_that_are_no_pdus_end_the_connection_with_a_reason() {
    let server = Server::start(MIB);
    for bytes in [vec![0xab; 64], b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![0; 8], vec![0xff; 4096]] {
        let mut newcomer = Host::silent(server.address());
        newcomer.stream.write_all(&bytes).unwrap();
        assert_eq!(termination(&mut newcomer).status, Ok(FatalStatus::InvalidHeader));
        let (_admin, mut io) = server.connect();
        io.stream.write_all(&bytes).unwrap();
        assert_eq!(termination(&mut io).status, Ok(FatalStatus::InvalidHeader));
    }
    // A second ICReq, on either side of the handshake.
    let again = IcReq { align_bytes: 4, header_digest: false, data_digest: false, max_r2t: 1 }.encode();
    let mut newcomer = Host::initialized(server.address(), false, false);
    newcomer.stream.write_all(&again).unwrap();
    assert_eq!(termination(&mut newcomer).status, Ok(FatalStatus::Sequence));
    let (_admin, mut io) = server.connect();
    io.stream.write_all(&again).unwrap();
    assert_eq!(termination(&mut io).status, Ok(FatalStatus::Sequence));
    check_others(&server);
}

#[test]
fn lengths_that_lie_end_the_connection() {
    let server = Server::start(MIB);
    let write =
        SubmissionEntry::new(&Command::write(1, 0, 1, false), 1, Sgl::InCapsule { offset: 0, len: 512 });
    for len in [16385, 1 << 20, u32::MAX - 100] {
        let (_admin, mut io) = server.connect();
        let mut front = [0; 128];
        let capsule = CapsuleCmd { entry: write.encode(), data_len: 512 };
        let used = capsule.encode(&io.framing, &mut front);
        front[4..8].copy_from_slice(&(len + 72).to_le_bytes());
        io.stream.write_all(&front[..used]).unwrap();
        assert_eq!(termination(&mut io).status, Ok(FatalStatus::InvalidHeader), "{len}");
    }
    check_others(&server);
}

#[test]
fn data_without_a_request_ends_the_connection() {
    let server = Server::start(8 * MIB);
    let unasked = H2cData { command_id: 1, tag: 0, offset: 0, len: 512, is_last: true };
    let (_admin, mut io) = server.connect();
    io.send_data(unasked, &[1; 512]);
    assert_eq!(termination(&mut io).status, Ok(FatalStatus::InvalidHeader));
    for (change, status) in [
        (H2cData { tag: 77, ..unasked }, FatalStatus::InvalidHeader),
        (H2cData { command_id: 9, ..unasked }, FatalStatus::InvalidHeader),
        (H2cData { offset: 512, ..unasked }, FatalStatus::DataOutOfRange),
        (H2cData { len: 256 << 10, offset: 4, ..unasked }, FatalStatus::DataOutOfRange),
        (H2cData { len: 300 << 10, ..unasked }, FatalStatus::DataOutOfRange),
    ] {
        let (_admin, mut io) = server.connect();
        let write = Command::write(1, 0, 512, false);
        io.send(SubmissionEntry::new(&write, 1, Sgl::Transport { len: 256 << 10 }));
        let Pdu::R2t(request) = io.receive() else { panic!("no R2T") };
        let tag = if change.tag == 0 { request.tag } else { change.tag };
        let header = H2cData { tag, ..change };
        let mut front = [0; 64];
        let len = header.encode(&io.framing, &mut front);
        io.stream.write_all(&front[..len]).unwrap();
        assert_eq!(termination(&mut io).status, Ok(status), "{change:?}");
    }
    assert_eq!(server.device.executed(), 0);
    check_others(&server);
}

#[test]
fn a_wrong_digest_ends_the_connection_or_the_command() {
    let server = Server::start(8 * MIB);
    let mut admin = Host::initialized(server.address(), true, true);
    assert_eq!(admin.connect(crate::server::SUBSYSTEM, 0, 32, 0xffff, 0).status, Status::SUCCESS);
    admin.enable();
    let mut io = admin.io_queue(1, 32);
    assert_eq!(io.write(0, &[5; 512]), Status::SUCCESS);
    // Of data in a capsule, and of data that was asked for.
    let entry =
        SubmissionEntry::new(&Command::write(1, 0, 1, false), 50, Sgl::InCapsule { offset: 0, len: 512 });
    let mut front = [0; 128];
    let len = CapsuleCmd { entry: entry.encode(), data_len: 512 }.encode(&io.framing, &mut front);
    io.stream.write_all(&[&front[..len], &[6; 512][..], &[0; 4][..]].concat()).unwrap();
    assert_eq!(io.finish(50).status, Status::TRANSIENT_TRANSPORT_ERROR);
    let entry = SubmissionEntry::new(&Command::write(1, 0, 64, false), 51, Sgl::Transport { len: 32768 });
    io.send(entry);
    let Pdu::R2t(request) = io.receive() else { panic!("no R2T") };
    let header = H2cData { command_id: 51, tag: request.tag, offset: 0, len: 32768, is_last: true };
    let len = header.encode(&io.framing, &mut front);
    io.stream.write_all(&[&front[..len], &vec![7; 32768][..], &[0; 4][..]].concat()).unwrap();
    assert_eq!(io.finish(51).status, Status::TRANSIENT_TRANSPORT_ERROR);
    assert_eq!(io.read(0, 1), [5; 512], "neither was carried out");
    // Of a header.
    let len = CapsuleCmd { entry: entry.encode(), data_len: 0 }.encode(&io.framing, &mut front);
    front[len - 1] ^= 1;
    io.stream.write_all(&front[..len]).unwrap();
    assert_eq!(termination(&mut io).status, Ok(FatalStatus::HeaderDigest));
    check_others(&server);
}

#[test]
fn more_commands_than_the_queue_has_places_end_the_connection() {
    let server = Server::start(MIB);
    let mut admin = server.host();
    admin.enable();
    let mut io = admin.io_queue(1, 4);
    server.device.hold();
    for id in 0..5 {
        io.send(SubmissionEntry::new(&Command::read(1, 0, 1), id, Sgl::Transport { len: 512 }));
    }
    wait_until(|| server.device.in_flight() == 4);
    server.device.release_soon();
    assert_eq!(termination(&mut io).status, Ok(FatalStatus::Sequence));
    check_others(&server);
}

#[test]
fn a_million_tiny_commands_are_answered_one_by_one() {
    let server = Server::start(MIB);
    let (mut admin, mut io) = server.connect();
    let mut bytes = Vec::new();
    let mut front = [0; 128];
    for id in 0..64u16 {
        let entry = SubmissionEntry::new(&Command { opcode: 0x90, ..Command::flush(1) }, id, Sgl::None);
        let len = CapsuleCmd { entry: entry.encode(), data_len: 0 }.encode(&io.framing, &mut front);
        bytes.extend(&front[..len]);
    }
    let (_other, mut other) = server.connect();
    for round in 0..1_000_000 / 64 {
        io.stream.write_all(&bytes).unwrap();
        for _ in 0..64 {
            let Pdu::Response(entry) = io.receive() else { panic!("no response") };
            assert_eq!(entry.status, Status::INVALID_OPCODE);
        }
        if round % 2000 == 0 {
            assert_eq!(other.read(0, 1).len(), 512);
        }
    }
    assert_eq!(admin.run(&Command::keep_alive(), 0).status, Status::SUCCESS);
}

#[test]
fn a_host_that_does_not_read_holds_its_own_memory_only() {
    let server = Server::start(8 * MIB);
    let (_admin, mut greedy) = server.connect();
    let (_others, mut other) = server.connect();
    for id in 0..127 {
        greedy.send(SubmissionEntry::new(&Command::read(1, 0, 2048), id, Sgl::Transport { len: MIB as u32 }));
    }
    wait_until(|| server.device.executed() >= 30);
    let start = Instant::now();
    (0..100).for_each(|_| assert_eq!(other.read(0, 8).len(), 4096));
    assert!(start.elapsed() < Duration::from_secs(60));
    // 32 MiB and what is in the socket.
    let executed = server.device.executed() - 100;
    assert!(executed < 60, "{executed} MiB for a host that is gone");
    for _ in 0..127 {
        let Pdu::Data { data, .. } = greedy.receive() else { panic!("no data") };
        assert_eq!(data.len(), MIB as usize);
    }
}

#[test]
fn half_open_connections_keep_no_client_out_and_end() {
    let server = Server::start(MIB);
    let start = Instant::now();
    let mut silent: Vec<Host> = (0..150).map(|_| Host::silent(server.address())).collect();
    let mut initialized = Host::initialized(server.address(), true, false);
    check_others(&server);
    assert!(silent[0].is_disconnected(), "the one that took longest had to go");
    assert!(silent[149].is_disconnected() && initialized.is_disconnected());
    assert!(start.elapsed() < Duration::from_secs(60));
}

#[test]
fn hosts_that_read_nothing_leave_memory_to_the_others() {
    let memory = MemoryBudget::new(0); // 16 MiB
    let config = memory.clone();
    let server = Server::with(8 * MIB, |other| Config { memory: config, ..other });
    let (_admin, mut greedy) = server.connect();
    let (_others, mut other) = server.connect();
    let read = Command::read(1, 0, 2048);
    for id in 0..100 {
        greedy.send(SubmissionEntry::new(&read, id, Sgl::Transport { len: MIB as u32 }));
    }
    // Its first answer has begun to come: it has taken what it may have.
    let mut first = [std::mem::MaybeUninit::uninit()];
    assert_eq!(socket2::SockRef::from(&greedy.stream).peek(&mut first).unwrap(), 1);
    for round in 0..20u8 {
        assert_eq!(other.write(0, &vec![round; MIB as usize]), Status::SUCCESS);
        assert_eq!(other.read(0, 2048), vec![round; MIB as usize]);
        assert_eq!(other.write(2048, &[round; 8192]), Status::SUCCESS, "in its capsule");
    }
    assert!(memory.in_use() <= memory.bytes(), "{memory:?}");
    let executed = server.device.executed();
    assert!(
        executed < 60 + 16 + 4,
        "{executed} requests: the greedy host has 8 MiB, and what is in the socket"
    );
    for _ in 0..100 {
        let Pdu::Data { data, .. } = greedy.receive() else { panic!("no data") };
        assert_eq!(data.len(), MIB as usize);
    }
    let compare = Command { opcode: 5, ..Command::read(1, 2048, 16) };
    for id in 200..210 {
        let data = [19; 8192];
        greedy.send_with(SubmissionEntry::new(&compare, id, Sgl::InCapsule { offset: 0, len: 8192 }), &data);
    }
    for _ in 0..10 {
        let Pdu::Response(entry) = greedy.receive() else { panic!("no response") };
        assert_eq!(entry.status, Status::SUCCESS);
    }
}
