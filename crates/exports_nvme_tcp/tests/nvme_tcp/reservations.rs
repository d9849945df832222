//! Hosts that share a namespace.

use crate::host::{Host, Pdu};
use crate::server::{MIB, SUBSYSTEM, Server, wait_until};
use exports_nvme_tcp::{Config, Nqn};
use nvme::command::event::Event;
use nvme::command::{cns, copy_range, deallocate_range, feature, log_page, opcode};
use nvme::fabrics::InvalidParameter;
use nvme::identify::controller_data::{ControllerData, oncs};
use nvme::identify::namespace_data::NamespaceData;
use nvme::reservation::*;
use nvme::{Command, IDENTIFY_BYTES, IdentifyData, Sgl, Status, SubmissionEntry};
use std::path::Path;
use std::time::{Duration, Instant};

/// A host, its key being its number.
struct Peer {
    admin: Host,
    io: Host,
    key: u64,
}

fn identity(number: u8) -> (Nqn, [u8; 16]) {
    (Nqn::new(&format!("nqn.2014-08.org.example:host{number}")).unwrap(), [number; 16])
}

impl Peer {
    fn connect(server: &Server, number: u8) -> Peer {
        let mut admin = Host::admin_of(server.address(), SUBSYSTEM, identity(number));
        admin.enable();
        let io = admin.io_queue(1, 32);
        Peer { admin, io, key: number.into() }
    }

    /// Connected and registered.
    fn registered(server: &Server, number: u8) -> Peer {
        let mut peer = Peer::connect(server, number);
        assert_eq!(peer.register(RegisterAction::Register, None), Status::SUCCESS);
        peer
    }

    fn register(&mut self, action: RegisterAction, persists: Option<bool>) -> Status {
        let register = Register { action, ignores_key: false, persists, current: self.key, new: self.key };
        let (command, keys) = register.command(1);
        self.io.run_with(&command, &keys).status
    }

    fn take(&mut self, action: AcquireAction, kind: ReservationType, preempted: u64) -> Status {
        let (command, keys) = Acquire { action, kind, current: self.key, preempted }.command(1);
        self.io.run_with(&command, &keys).status
    }

    fn acquire(&mut self, kind: ReservationType) -> Status {
        self.take(AcquireAction::Acquire, kind, 0)
    }

    fn release(&mut self, action: ReleaseAction) -> Status {
        let (command, key) = Release { action, current: self.key }.command(1);
        self.io.run_with(&command, &key).status
    }

    fn write(&mut self) -> Status {
        self.io.write(0, &[self.key as u8; 512])
    }

    fn read(&mut self) -> Status {
        self.io.run(&Command::read(1, 0, 1), 512).status
    }

    fn report(&mut self) -> Report {
        let done = self.io.run(&Report::command(1, 4096), 4096);
        assert_eq!(done.status, Status::SUCCESS);
        Report::parse(&done.data).unwrap()
    }

    fn notification(&mut self) -> Vec<u8> {
        let len = NOTIFICATION_BYTES as u32;
        let command = Command::get_log_page(0, log_page::RESERVATION_NOTIFICATION, 0, len);
        self.admin.run(&command, len).data
    }

    fn feature(&mut self, id: u8) -> u64 {
        let done = self.admin.run(&Command { nsid: 1, ..Command::get_features(id) }, 0);
        assert_eq!(done.status, Status::SUCCESS);
        done.result
    }

    fn set_feature(&mut self, nsid: u32, id: u8, value: u32) -> Status {
        self.admin.run(&Command { nsid, ..Command::set_features(id, value) }, 0).status
    }
}

#[test]
fn every_command_is_judged_by_what_the_specification_lets_a_stranger_do() {
    let server = Server::start(MIB);
    let (mut holder, mut stranger) = (Peer::registered(&server, 1), Peer::connect(&server, 2));
    let on_block = |opcode| Command { opcode, ..Command::read(1, 0, 1) };
    let range = deallocate_range(0, 1);
    for (kind, may_read) in
        [(ReservationType::WriteExclusive, true), (ReservationType::ExclusiveAccess, false)]
    {
        assert_eq!(holder.acquire(kind), Status::SUCCESS);
        let refused = |is_refused| if is_refused { Status::RESERVATION_CONFLICT } else { Status::SUCCESS };
        for (peer, is_holder) in [(&mut stranger, false), (&mut holder, true)] {
            let (reads, writes) = (refused(!is_holder && !may_read), refused(!is_holder));
            assert_eq!((peer.write(), peer.read()), (writes, reads), "{kind:?}");
            let io = &mut peer.io;
            assert_eq!(io.run(&Command::write_zeroes(1, 8, 1, false, false), 0).status, writes);
            assert_eq!(io.run(&Command::flush(1), 0).status, writes);
            assert_eq!(io.run(&Command::flush(!0), 0).status, writes);
            assert_eq!(io.run_with(&Command::deallocate(1, 1), &range).status, writes);
            let copy = io.run_with(&Command::copy(1, 64, 1, false), &copy_range(0, 1)).status;
            assert_eq!(copy, writes, "it reads and writes");
            assert_eq!(io.write(0, &vec![peer.key as u8; 100 << 10]), writes, "its data is not asked for");
            assert_eq!(io.run(&on_block(opcode::VERIFY), 0).status, reads);
            let compare = io.run_with(&on_block(opcode::COMPARE), &[0; 512]).status;
            assert_eq!(compare, if reads == Status::SUCCESS { Status::COMPARE_FAILURE } else { reads });
        }
        assert_eq!(server.device.bytes(0, 512), [1; 512]);
        assert_eq!(holder.release(ReleaseAction::Release(kind)), Status::SUCCESS);
    }
    assert_eq!((stranger.write(), stranger.read()), (Status::SUCCESS, Status::SUCCESS));
}

#[test]
fn a_host_is_the_same_over_all_its_controllers_and_not_by_its_identifier_alone() {
    let server = Server::start(MIB);
    let mut one = Peer::registered(&server, 1);
    assert_eq!(one.acquire(ReservationType::ExclusiveAccess), Status::SUCCESS);
    let mut again = Peer::connect(&server, 1);
    assert_eq!(again.write(), Status::SUCCESS);
    let (_, id) = identity(1);
    let mut admin = Host::admin_of(server.address(), SUBSYSTEM, (identity(2).0, id));
    admin.enable();
    assert_eq!(admin.io_queue(1, 32).write(0, &[0; 512]), Status::RESERVATION_CONFLICT);
    let entry = |controller| Registrant { controller, is_holder: true, key: 1, host_id: id };
    let report = again.report();
    assert_eq!(report.registrants, [entry(one.admin.controller), entry(again.admin.controller)]);
    assert_eq!((report.generation, report.kind), (1, Some(ReservationType::ExclusiveAccess)));
    // Its registration stays when it goes.
    drop((one, again));
    server.wait_for_clients(1);
    let mut other = Peer::connect(&server, 3);
    assert_eq!(other.report().registrants, [entry(NO_CONTROLLER)]);
    assert_eq!(other.write(), Status::RESERVATION_CONFLICT);
    let mut back = Peer::connect(&server, 1);
    assert_eq!(back.write(), Status::SUCCESS);
}

#[test]
fn a_preempt_completes_after_all_writes_of_the_preempted_host() {
    let server = Server::start(MIB);
    let (mut one, mut other) = (Peer::registered(&server, 1), Peer::registered(&server, 2));
    // The second queue is on another core.
    let mut second = one.admin.io_queue(2, 32);
    assert_eq!(one.acquire(ReservationType::WriteExclusive), Status::SUCCESS);
    server.device.hold();
    for io in [&mut one.io, &mut second] {
        let id = io.id();
        let write = Command::write(1, 0, 1, false);
        io.send_with(SubmissionEntry::new(&write, id, Sgl::InCapsule { offset: 0, len: 512 }), &[1; 512]);
    }
    wait_until(|| server.device.in_flight() == 2);
    server.device.release_soon();
    let preempt = AcquireAction::PreemptAndAbort;
    assert_eq!(other.take(preempt, ReservationType::WriteExclusive, 1), Status::SUCCESS);
    assert_eq!(server.device.in_flight(), 0, "it is answered before the writes");
    assert_eq!(other.write(), Status::SUCCESS);
    for io in [&mut one.io, &mut second] {
        let Pdu::Response(entry) = io.receive() else { panic!("no response") };
        assert_eq!(entry.status, Status::SUCCESS, "it was admitted");
        assert_eq!(io.write(0, &[1; 512]), Status::RESERVATION_CONFLICT);
    }
    assert_eq!(server.device.bytes(0, 512), [2; 512]);
}

#[test]
fn data_that_comes_after_the_right_to_write_is_gone_is_not_written() {
    let server = Server::start(MIB);
    let (mut one, mut other) = (Peer::registered(&server, 1), Peer::registered(&server, 2));
    let id = one.io.id();
    one.io.send(SubmissionEntry::new(&Command::write(1, 0, 64, false), id, Sgl::Transport { len: 32 << 10 }));
    let Pdu::R2t(request) = one.io.receive() else { panic!("no R2T") };
    assert_eq!(
        other.acquire(ReservationType::WriteExclusive),
        Status::SUCCESS,
        "the target does not wait for the host's data"
    );
    let header =
        nvme::tcp::H2cData { command_id: id, tag: request.tag, offset: 0, len: 32 << 10, is_last: true };
    one.io.send_data(header, &vec![1; 32 << 10]);
    assert_eq!(one.io.finish(id).status, Status::RESERVATION_CONFLICT);
    assert_eq!(one.read(), Status::SUCCESS, "the queue still works");
    assert_ne!(server.device.bytes(0, 512), [1; 512]);
}

#[test]
fn hosts_hear_of_what_others_did_to_them_unless_they_do_not_want_to() {
    let server = Server::start(MIB);
    let [mut one, mut two, mut three] = [1, 2, 3].map(|number| Peer::registered(&server, number));
    assert_eq!(two.notification(), [0; NOTIFICATION_BYTES]);
    assert_eq!(two.set_feature(1, feature::RESERVATION_NOTIFICATION_MASK, 1), Status::INVALID_FIELD);
    assert_eq!(three.set_feature(!0, feature::RESERVATION_NOTIFICATION_MASK, 0b1110), Status::SUCCESS);
    assert_eq!(three.feature(feature::RESERVATION_NOTIFICATION_MASK), 0b1110);
    let id = two.admin.id();
    two.admin.send(SubmissionEntry::new(&Command::async_event_request(), id, Sgl::None));
    let kind = ReservationType::WriteExclusiveRegistrantsOnly;
    for _ in 0..2 {
        assert_eq!(one.acquire(kind), Status::SUCCESS);
        assert_eq!(one.release(ReleaseAction::Release(kind)), Status::SUCCESS);
    }
    let Pdu::Response(entry) = two.admin.receive() else { panic!("no event") };
    assert_eq!((entry.command_id, Event::parse(entry.result as u32)), (id, Event::RESERVATION));
    assert_eq!(one.take(AcquireAction::Preempt, kind, 2), Status::SUCCESS);
    let mut expect = |count, what: Happening, left| {
        let page = two.notification();
        assert_eq!((page[0], page[8], page[9], page[12]), (count, what as u8, left, 1));
    };
    expect(1, Happening::ReservationReleased, 2);
    expect(2, Happening::ReservationReleased, 1);
    expect(3, Happening::RegistrationPreempted, 0);
    assert_eq!(two.notification(), [0; NOTIFICATION_BYTES]);
    assert_eq!(three.notification(), [0; NOTIFICATION_BYTES]);
    assert_eq!(one.notification(), [0; NOTIFICATION_BYTES], "who does it knows");
}

fn persistent(directory: &Path) -> Server {
    Server::with(MIB, |config| Config { reservations: Some(directory.into()), ..config })
}

#[test]
fn with_a_directory_reservations_outlive_the_server_if_they_are_to() {
    let folder = tempfile::tempdir().unwrap();
    let directory = folder.path().join("reservations");
    let kind = ReservationType::ExclusiveAccessRegistrantsOnly;
    let before = {
        let server = persistent(&directory);
        let mut one = Peer::connect(&server, 1);
        assert_eq!(one.register(RegisterAction::Register, Some(true)), Status::SUCCESS);
        assert_eq!(one.acquire(kind), Status::SUCCESS);
        assert_eq!(one.feature(feature::RESERVATION_PERSISTENCE), 1);
        one.report()
    };
    let server = persistent(&directory);
    let (mut one, mut stranger) = (Peer::connect(&server, 1), Peer::connect(&server, 2));
    assert_eq!((stranger.read(), one.write()), (Status::RESERVATION_CONFLICT, Status::SUCCESS));
    let report = one.report();
    assert_eq!((report.kind, report.persists, report.generation), (Some(kind), true, before.generation));
    // A change that cannot be made durable is not applied.
    let moved = folder.path().join("moved");
    std::fs::rename(&directory, &moved).unwrap();
    assert_eq!(one.release(ReleaseAction::Release(kind)), Status::INTERNAL_ERROR);
    assert_eq!(stranger.read(), Status::RESERVATION_CONFLICT);
    std::fs::rename(&moved, &directory).unwrap();
    // And what is not to persist is forgotten.
    assert_eq!(one.set_feature(1, feature::RESERVATION_PERSISTENCE, 0), Status::SUCCESS);
    assert_eq!(stranger.read(), Status::RESERVATION_CONFLICT);
    drop(server);
    let server = persistent(&directory);
    let mut stranger = Peer::connect(&server, 2);
    assert_eq!((stranger.read(), stranger.report().registrants), (Status::SUCCESS, vec![]));
}

#[test]
fn reservation_support_is_reported_and_invalid_commands_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    for has_directory in [true, false] {
        let server = if has_directory { persistent(folder.path()) } else { Server::start(MIB) };
        let mut peer = Peer::connect(&server, 1);
        let mut identify = |nsid, what| -> IdentifyData {
            let done = peer.admin.run(&Command::identify(nsid, what, 0), IDENTIFY_BYTES as u32);
            done.data.try_into().unwrap()
        };
        assert_ne!(ControllerData::parse(&identify(0, cns::CONTROLLER)).commands & oncs::RESERVATIONS, 0);
        let namespace = NamespaceData::parse(&identify(1, cns::NAMESPACE));
        assert_eq!(namespace.reservations, if has_directory { 0xff } else { 0xfe });
        let persistence = peer.set_feature(1, feature::RESERVATION_PERSISTENCE, 1);
        let expected = if has_directory { Status::SUCCESS } else { Status::INVALID_FIELD };
        assert_eq!((persistence, peer.register(RegisterAction::Register, Some(true))), (expected, expected));
    }
    let server = Server::start(MIB);
    let mut peer = Peer::registered(&server, 1);
    let mut report = Report::command(1, 4096);
    report.cdw[1] = 0;
    assert_eq!(peer.io.run(&report, 4096).status, Status::INCONSISTENT_HOST_ID);
    assert_eq!(peer.io.run(&Report::command(2, 4096), 4096).status, Status::INVALID_NAMESPACE);
    let (command, keys) = Register {
        action: RegisterAction::Unregister,
        ignores_key: true,
        persists: None,
        current: 0,
        new: 0,
    }
    .command(!0);
    assert_eq!(peer.io.run_with(&command, &keys).status, Status::INVALID_NAMESPACE);
    let command = Command { nsid: 1, ..command };
    assert_eq!(peer.io.run_with(&command, &keys[..8]).status, Status::INVALID_SGL_LENGTH);
    let nonsense = Command { cdw: [7, 0, 0, 0, 0, 0], ..command };
    assert_eq!(peer.io.run_with(&nonsense, &keys).status, Status::INVALID_FIELD);
    assert_eq!(peer.report().registrants.len(), 1, "nothing of that has changed anything");
    let short = peer.io.run(&Report::command(1, 64), 64);
    assert_eq!(Report::parse(&short.data).unwrap().registrants, []);
}

#[test]
fn hosts_that_fight_over_a_namespace_never_both_have_it() {
    const ROUNDS: usize = 300;
    let server = Server::start(MIB);
    server.device.set_delay(200_000);
    // Each takes it from the other, and finds its own number after it has written it, as long as it
    // has it.
    let fight = |mut peer: Peer| {
        let kind = ReservationType::ExclusiveAccess;
        let (mut found, deadline) = (0, Instant::now() + Duration::from_secs(60));
        let key = peer.key;
        let mut pauses_us = (1..).map(|n: u64| n * 1237 * key % 4000);
        while found < ROUNDS {
            assert!(Instant::now() < deadline, "only {found} rounds");
            // It comes at any moment, and not before the other could do anything.
            std::thread::sleep(Duration::from_micros(pauses_us.next().unwrap()));
            let other = 3 - peer.key;
            // There may be no registrant to preempt, or this host has been preempted itself.
            peer.take(AcquireAction::Preempt, kind, other);
            let is_mine = peer.acquire(kind) == Status::SUCCESS;
            if !is_mine {
                peer.register(RegisterAction::Register, None);
            }
            while is_mine && found < ROUNDS && peer.write() == Status::SUCCESS {
                let read = peer.io.run(&Command::read(1, 0, 1), 512);
                // A host that is preempted meanwhile may read the other's data.
                if peer.write() == Status::SUCCESS {
                    assert_eq!(read.status, Status::SUCCESS);
                    assert!(read.data == [peer.key as u8; 512], "host {} has written into it", read.data[0]);
                    found += 1;
                }
            }
        }
    };
    let peers = [1, 2].map(|number| Peer::registered(&server, number));
    let threads = peers.map(|peer| std::thread::spawn(move || fight(peer)));
    threads.into_iter().for_each(|thread| thread.join().expect("a host has failed"));
}

#[test]
fn a_read_only_namespace_has_reservations_too() {
    let server = Server::with(MIB, |config| Config { read_only: true, ..config });
    let mut peer = Peer::registered(&server, 1);
    assert_eq!(peer.acquire(ReservationType::WriteExclusive), Status::SUCCESS);
    assert_eq!((peer.write(), peer.read()), (Status::WRITE_PROTECTED, Status::SUCCESS));
    assert_eq!(peer.report().registrants.len(), 1);
}

#[test]
fn an_io_queue_has_another_host_identifier_only_where_no_reservation_depends_on_it() {
    let server = Server::start(MIB);
    let mut admin = Host::admin_of(server.address(), SUBSYSTEM, identity(1));
    admin.enable();
    let other = || Host::initialized(server.address(), false, false).of((identity(1).0, [9; 16]));
    let mut io = other();
    assert_eq!(io.connect(SUBSYSTEM, 1, 32, admin.controller, 0).status, Status::SUCCESS);
    assert_eq!(io.write(0, &[1; 512]), Status::SUCCESS);
    let _peer = Peer::registered(&server, 2);
    let refused = other().connect(SUBSYSTEM, 2, 32, admin.controller, 0);
    assert_eq!(refused.status, Status::CONNECT_INVALID_PARAMETERS);
    assert_eq!(InvalidParameter::parse(refused.result), InvalidParameter::HOST_ID);
    assert_eq!(admin.io_queue(2, 32).write(0, &[1; 512]), Status::SUCCESS, "its own identifier");
}
