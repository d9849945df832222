//! Commands of I/O queues.

use crate::host::{Host, Pdu};
use crate::server::{MIB, Server, export};
use block::{IoError, Op};
use conformance::slow::pattern;
use drivers::mem::{MemDevice, Options as MemOptions};
use exports::{Export, Moved};
use nvme::command::{copy_range, deallocate_range, opcode};
use nvme::fabrics::{Connect, ConnectData, Nqn};
use nvme::{Command, Sgl, Status, SubmissionEntry};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

fn on_blocks(opcode: u8, lba: u64, blocks: u32) -> Command {
    Command { opcode, ..Command::read(1, lba, blocks) }
}

#[test]
fn data_goes_in_its_capsule_or_when_it_is_asked_for() {
    let server = Server::start(8 * MIB);
    let (_admin, mut io) = server.connect();
    for len in [512, 8192, 16384, 100_352, MIB as usize] {
        let data: Vec<u8> = (0..len).map(|i| (i / 7) as u8).collect();
        assert_eq!(io.write(8, &data), Status::SUCCESS, "{len}");
        assert!(io.read(8, len as u32 / 512) == data, "{len}");
    }
    let (stable, other) = server.device.stable_and_other_writes();
    assert!(stable > 0 && other == 0, "a host cannot change what the target has received");
    let too_long = Command::write(1, 0, 2049, false);
    assert_eq!(io.run_with(&too_long, &vec![0; 2049 * 512]).status, Status::INVALID_FIELD);
    assert_eq!(io.run(&Command::read(1, 0, 2049), 2049 * 512).status, Status::INVALID_FIELD);
}

#[test]
fn both_digests_go_with_everything() {
    let server = Server::start(8 * MIB);
    let mut admin = Host::initialized(server.address(), true, true);
    assert_eq!(admin.connect(crate::server::SUBSYSTEM, 0, 32, 0xffff, 0).status, Status::SUCCESS);
    admin.enable();
    let mut io = admin.io_queue(1, 32);
    let data: Vec<u8> = (0..300 << 10).map(|i| (i / 9) as u8).collect();
    assert_eq!(io.write(0, &data), Status::SUCCESS);
    assert!(io.read(0, 600) == data);
    assert_eq!(io.write(700, &data[..1024]), Status::SUCCESS);
    assert!(io.read(700, 2) == data[..1024]);
}

#[test]
fn a_host_that_looks_for_the_head_of_the_queue_finds_it() {
    let server = Server::start(MIB);
    let mut admin = server.host();
    admin.enable();
    let mut io = Host::initialized(server.address(), false, false);
    let connect = Connect { record_format: 0, queue_id: 1, entries: 4, attributes: 0, keep_alive_ms: 0 };
    let data = ConnectData {
        host_id: crate::host::HOST_ID,
        controller_id: admin.controller,
        subsystem: Nqn::new(crate::server::SUBSYSTEM).unwrap(),
        host: Nqn::new(crate::host::HOST).unwrap(),
    };
    assert_eq!(io.connect_as(&connect, &data).status, Status::SUCCESS);
    for expected in [2, 3, 0, 1] {
        let id = io.id();
        io.send(SubmissionEntry::new(&Command::read(1, 0, 1), id, Sgl::Transport { len: 512 }));
        let Pdu::Data { header, .. } = io.receive() else { panic!("no data") };
        assert!(header.is_last && !header.is_success);
        let Pdu::Response(entry) = io.receive() else { panic!("no response") };
        assert_eq!((entry.sq_head, entry.sq_id, entry.status), (expected, 1, Status::SUCCESS));
    }
}

#[test]
fn compare_verify_write_zeroes_and_deallocate_work() {
    let device = Arc::new(MemDevice::new(&MemOptions::new(4 * MIB)).unwrap());
    let (export, _cores) = export(&[device], 1, |config| config);
    let mut admin = Host::admin(export.address(), crate::server::SUBSYSTEM);
    admin.enable();
    let mut io = admin.io_queue(1, 32);
    let data: Vec<u8> = (0..256 << 10).map(|i| (i / 5 + 1) as u8 | 1).collect();
    assert_eq!(io.write(0, &data), Status::SUCCESS);
    let compare = on_blocks(opcode::COMPARE, 0, 512);
    assert_eq!(io.run_with(&compare, &data).status, Status::SUCCESS);
    let mut other = data.clone();
    other[200_000] ^= 1;
    assert_eq!(io.run_with(&compare, &other).status, Status::COMPARE_FAILURE);
    assert_eq!(io.run(&on_blocks(opcode::VERIFY, 0, 512), 0).status, Status::SUCCESS);
    assert_eq!(io.run(&Command::write_zeroes(1, 1, 2, true, false), 0).status, Status::SUCCESS);
    assert_eq!(io.run(&Command::write_zeroes(1, 5, 2, false, true), 0).status, Status::SUCCESS);
    let read = io.read(0, 8);
    let is_zero = |block: usize| read[block * 512..][..512].iter().all(|byte| *byte == 0);
    assert_eq!([0, 1, 2, 3, 4, 5, 6, 7].map(is_zero), [false, true, true, false, false, true, true, false]);
    let ranges = [deallocate_range(8, 8), deallocate_range(0, 0), deallocate_range(24, 8)].concat();
    assert_eq!(io.run_with(&Command::deallocate(1, 3), &ranges).status, Status::SUCCESS);
    assert!(io.read(8, 8).iter().chain(&io.read(24, 8)).all(|byte| *byte == 0));
    assert!(io.read(16, 8) == data[8192..12288]);
    for nsid in [1, u32::MAX] {
        assert_eq!(io.run(&Command::flush(nsid), 0).status, Status::SUCCESS);
    }
    // Linux sends as many ranges as there may be, whatever the command says.
    let room = [deallocate_range(40, 8).to_vec(), vec![0; 4080]].concat();
    assert_eq!(io.run_with(&Command::deallocate(1, 1), &room).status, Status::SUCCESS);
    assert!(io.read(40, 8).iter().all(|byte| *byte == 0));
    assert_eq!(io.run_with(&Command::deallocate(1, 3), &room[..32]).status, Status::INVALID_SGL_LENGTH);
    let outside = [deallocate_range(8, 8), deallocate_range(8191, 2)].concat();
    assert_eq!(io.run_with(&Command::deallocate(1, 2), &outside).status, Status::LBA_OUT_OF_RANGE);
    assert!(io.read(16, 8) == data[8192..12288], "nothing of it was done");
    let stats = &export.stats().queues[0];
    assert!(stats.requests(Op::Discard) == 3 && stats.requests(Op::WriteZeroes) == 2);
}

#[test]
fn a_copy_gathers_its_ranges_in_their_order() {
    let server = Server::start(64 * MIB);
    let (_admin, mut io) = server.connect();
    let data: Vec<u8> = (0..MIB).map(|i| (i / 512 * 7 + i / 11) as u8).collect();
    assert_eq!(io.write(0, &data), Status::SUCCESS);
    // One block, more than a part, and a range twice.
    let ranges = [copy_range(9, 1), copy_range(100, 777), copy_range(9, 1), copy_range(2047, 1)].concat();
    assert_eq!(io.run_with(&Command::copy(1, 5000, 4, true), &ranges).status, Status::SUCCESS);
    let block = |lba: usize, blocks: usize| &data[lba * 512..][..blocks * 512];
    assert!(io.read(5000, 780) == [block(9, 1), block(100, 777), block(9, 1), block(2047, 1)].concat());
    let (stable, other) = server.device.stable_and_other_writes();
    assert!(stable > 0 && other == 0);

    // As much as a copy may be, in as many ranges as there may be.
    let ranges: Vec<u8> = (0..256).flat_map(|i| copy_range(i * 8, 128)).collect();
    assert_eq!(io.run_with(&Command::copy(1, 65536, 256, false), &ranges).status, Status::SUCCESS);
    for i in [0, 100, 240] {
        assert!(io.read(65536 + i * 128, 128) == block(i as usize * 8, 128), "{i}");
    }
}

#[test]
fn a_copy_that_is_not_allowed_changes_nothing() {
    let server = Server::start(64 * MIB);
    let (_admin, mut io) = server.connect();
    assert_eq!(io.write(0, &[7; 4096]), Status::SUCCESS);
    let before = server.device.executed();
    let mut copy = |command: Command, ranges: &[[u8; 32]]| {
        let done = io.run_with(&command, &ranges.concat());
        (done.status, done.result)
    };
    let to = |lba| Command::copy(1, lba, 1, false);
    let two = |lba| Command::copy(1, lba, 2, false);
    let fine = copy_range(0, 8);
    assert_eq!(copy(to(100), &[copy_range(0, 32769)]), (Status::COMMAND_SIZE_LIMIT_EXCEEDED, 0));
    assert_eq!(copy(two(100), &[copy_range(0, 32768), fine]), (Status::COMMAND_SIZE_LIMIT_EXCEEDED, 0));
    for command in [to(131_072), to(131_065), to(u64::MAX)] {
        assert_eq!(copy(command, &[fine]), (Status::LBA_OUT_OF_RANGE, 0));
    }
    for lba in [131_065, u64::MAX] {
        assert_eq!(copy(two(100), &[fine, copy_range(lba, 8)]), (Status::LBA_OUT_OF_RANGE, 0));
    }
    // The destination ends at block 108 + blocks.
    for (lba, blocks) in [(0, 101), (100, 1), (108, 1), (50, 200)] {
        let overlapping = copy_range(lba, blocks);
        assert_eq!(copy(two(100), &[fine, overlapping]), (Status::OVERLAPPING_RANGE, 0), "{lba}");
    }
    assert_eq!(copy(two(100), &[fine]), (Status::INVALID_SGL_LENGTH, 0));
    let mut command = to(100);
    command.cdw[2] |= 1 << 8;
    assert_eq!(copy(command, &[fine]), (Status::INVALID_FIELD, 0), "format 1");
    assert_eq!(copy(Command { nsid: 2, ..to(100) }, &[fine]), (Status::INVALID_NAMESPACE, 0));
    assert_eq!(server.device.executed(), before);
    // The blocks before and after the destination are no overlap.
    assert_eq!(copy(two(108), &[copy_range(100, 8), copy_range(117, 1)]), (Status::SUCCESS, 0));
}

#[test]
fn a_copy_that_fails_names_the_range() {
    let server = Server::with(MIB, |config| exports_nvme_tcp::Config { read_only: true, ..config });
    let (_admin, mut io) = server.connect();
    let done = io.run_with(&Command::copy(1, 100, 1, false), &copy_range(0, 8));
    assert_eq!((done.status, done.result), (Status::WRITE_PROTECTED, 0));

    let server = Server::start(MIB);
    let (_admin, mut io) = server.connect();
    assert_eq!(io.write(0, &[7; 4096]), Status::SUCCESS);
    server.device.fail_at(8 * 512, IoError::Medium);
    let ranges = [copy_range(0, 8), copy_range(8, 1), copy_range(0, 4)].concat();
    let done = io.run_with(&Command::copy(1, 100, 3, false), &ranges);
    assert_eq!((done.status, done.result), (Status::UNRECOVERED_READ_ERROR, 1));
    let after: Vec<u8> = (108 * 512..113 * 512).map(pattern).collect();
    assert!((io.read(100, 8), io.read(108, 5)) == (vec![7; 4096], after), "the ranges before it are copied");
}

#[test]
fn an_invalid_command_is_refused_and_the_queue_keeps_working() {
    let server = Server::start(MIB);
    let (_admin, mut io) = server.connect();
    assert_eq!(io.run(&Command::read(1, 2047, 2), 1024).status, Status::LBA_OUT_OF_RANGE);
    assert_eq!(io.run(&Command::read(1, u64::MAX, 1), 512).status, Status::LBA_OUT_OF_RANGE);
    assert_eq!(io.run(&Command::read(0, 0, 1), 512).status, Status::INVALID_NAMESPACE);
    assert_eq!(io.run(&Command::read(2, 0, 1), 512).status, Status::INVALID_NAMESPACE);
    assert_eq!(io.run(&Command::flush(7), 0).status, Status::INVALID_NAMESPACE);
    assert_eq!(io.run(&Command::read(1, 0, 2), 512).status, Status::INVALID_SGL_LENGTH);
    assert_eq!(io.run(&on_blocks(0x99, 0, 1), 0).status, Status::INVALID_OPCODE);
    assert_eq!(io.run_with(&Command::write(1, 0, 4, false), &[1; 512]).status, Status::INVALID_SGL_LENGTH);
    for (sgl, status) in [
        (Sgl::None, Status::INVALID_SGL_TYPE),
        (Sgl::InCapsule { offset: 0, len: 512 }, Status::INVALID_SGL_LENGTH),
        (Sgl::InCapsule { offset: 4, len: 512 }, Status::INVALID_SGL_OFFSET),
        (Sgl::Other { kind: 0x40, fields: [1; 12] }, Status::INVALID_SGL_TYPE),
    ] {
        let id = io.id();
        io.send(SubmissionEntry::new(&Command::write(1, 0, 1, false), id, sgl));
        assert_eq!(io.finish(id).status, status, "{sgl:?}");
    }
    assert_eq!(server.device.executed(), 0);
    assert_eq!(io.write(0, &[9; 512]), Status::SUCCESS);
    assert_eq!(io.read(0, 1), [9; 512]);
}

#[test]
fn writes_are_refused_where_they_are_not_wanted() {
    let server = Server::with(MIB, |config| exports_nvme_tcp::Config { read_only: true, ..config });
    let (_admin, mut io) = server.connect();
    assert_eq!(io.write(0, &[1; 512]), Status::WRITE_PROTECTED);
    assert_eq!(io.run(&Command::write_zeroes(1, 0, 1, false, false), 0).status, Status::WRITE_PROTECTED);
    assert_eq!(io.read(0, 1).len(), 512);
}

#[test]
fn many_commands_run_side_by_side_and_more_memory_than_there_is_comes_in_turn() {
    let server = Server::start(64 * MIB);
    let (_admin, mut io) = server.connect();
    server.device.set_delay(1_000_000);
    // 100 MiB of transfers over 32 MiB of memory.
    let ask = |io: &mut Host, id: u16| {
        let command = Command::write(1, u64::from(id % 64) * 2048, 2048, false);
        io.send(SubmissionEntry::new(&command, id, Sgl::Transport { len: MIB as u32 }));
    };
    (0..60).for_each(|id| ask(&mut io, id));
    // The target asks for as much as it has memory for. Then there are those that wait, and others
    // come.
    let mut asked: VecDeque<Pdu> = (0..32).map(|_| io.receive()).collect();
    std::thread::sleep(Duration::from_millis(20));
    (60..100).for_each(|id| ask(&mut io, id));
    let mut done = 0;
    while done < 100 {
        match asked.pop_front().unwrap_or_else(|| io.receive()) {
            Pdu::R2t(request) => {
                let data = vec![request.command_id as u8; MIB as usize];
                let header = nvme::tcp::H2cData {
                    command_id: request.command_id,
                    tag: request.tag,
                    offset: 0,
                    len: MIB as u32,
                    is_last: true,
                };
                io.send_data(header, &data);
            }
            Pdu::Response(entry) => {
                assert_eq!(entry.status, Status::SUCCESS);
                done += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(server.device.executed(), 100);
}

#[test]
fn queues_go_to_the_cores_that_are_wanted_when_they_are_made() {
    let server = Server::start(MIB);
    let reads = |core: usize| server.export().stats().queues[core].requests(Op::Read);
    let (_admin, mut io) = server.connect();
    io.read(0, 8);
    assert_eq!((reads(0), reads(1)), (1, 0));
    assert!(server.export().remap(&[2]).unwrap_err().to_string().contains("core 2"));
    server.export().remap(&[1]).unwrap();
    let (_other_admin, mut other) = server.connect();
    other.read(0, 8);
    io.read(0, 8);
    assert_eq!((reads(0), reads(1)), (2, 1), "who is there stays where it is");
}

#[test]
fn a_host_and_its_bytes_are_known_while_it_is_connected_and_its_bytes_afterwards() {
    let server = Server::start(MIB);
    let (admin, mut io) = server.connect();
    assert_eq!(io.write(0, &[7; 8192]), Status::SUCCESS);
    assert_eq!(io.read(0, 8).len(), 4096);
    // Counted before the answers are sent.
    let clients = server.export().stats().client_list();
    let queues: Vec<u16> =
        clients.connections.iter().map(|client| client.peer.queue.unwrap().queue).collect();
    assert_eq!(queues, [0, 1]);
    let client = &clients.connections[1];
    assert!(client.since_ns > 0 && !client.peer.is_secured && !client.peer.is_authenticated);
    assert!(client.peer.address.as_deref().is_some_and(|address| address.starts_with("127.0.0.1:")));
    let moved = Moved { read: 4096, written: 8192 };
    assert_eq!((client.bytes, clients.connections[0].bytes), (Some(moved), Some(Moved::default())));
    let hosts = std::collections::BTreeMap::from([(client.peer.host.clone().unwrap(), moved)]);
    assert_eq!(clients.hosts, hosts);
    drop((io, admin));
    server.wait_for_clients(0);
    let clients = server.export().stats().client_list();
    assert_eq!((clients.connections.len(), clients.hosts), (0, hosts));
}
