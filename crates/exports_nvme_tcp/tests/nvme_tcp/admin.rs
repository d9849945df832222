//! Admin queues: what a controller says of itself, and when it speaks up.

use crate::host::{HOST, HOST_ID, Host, Pdu};
use crate::server::{MIB, SUBSYSTEM, Server, export, only, wait_until};
use drivers::mem::{MemDevice, Options as MemOptions};
use exports::Export;
use exports_nvme_tcp::{Address, Config, NamespaceConfig, Nqn, NvmeTcp};
use nvme::command::event::{CONFIG_NAMESPACE_ATTRIBUTES, Event};
use nvme::command::{admin, cns, feature, log_page};
use nvme::fabrics::discovery::{DiscoveryEntry, DiscoveryHeader};
use nvme::fabrics::property::{Capabilities, Configuration, offset};
use nvme::fabrics::{ANY_CONTROLLER, Connect, ConnectData, InvalidParameter, nqn};
use nvme::identify::controller_data::{ControllerData, oncs};
use nvme::identify::lists::{NamespaceId, parse_descriptors, parse_namespaces};
use nvme::identify::namespace_data::NamespaceData;
use nvme::{Command, IDENTIFY_BYTES, IdentifyData, Namespace, Sgl, Status, SubmissionEntry};
use std::sync::Arc;

fn identify(host: &mut Host, nsid: u32, cns: u8) -> IdentifyData {
    let done = host.run(&Command::identify(nsid, cns, 0), IDENTIFY_BYTES as u32);
    assert_eq!(done.status, Status::SUCCESS);
    done.data.try_into().unwrap()
}

fn log(host: &mut Host, lid: u8, bytes: u32) -> Vec<u8> {
    let done = host.run(&Command::get_log_page(0, lid, 0, bytes), bytes);
    assert_eq!(done.status, Status::SUCCESS);
    done.data
}

fn connect_data(subsystem: &str, controller_id: u16) -> ConnectData {
    let (subsystem, host) = (Nqn::new(subsystem).unwrap(), Nqn::new(HOST).unwrap());
    ConnectData { host_id: HOST_ID, controller_id, subsystem, host }
}

const ADMIN: Connect = Connect {
    record_format: 0,
    queue_id: 0,
    entries: 32,
    attributes: Connect::NO_FLOW_CONTROL,
    keep_alive_ms: 0,
};

#[test]
fn a_controller_says_what_it_and_its_namespaces_are() {
    let device = |size| Arc::new(MemDevice::new(&MemOptions::new(size)).unwrap());
    let config = |config| Config { serial: Some("S123".into()), queues: 3, ..config };
    let (export, _cores) = export(&[device(MIB), device(2 * MIB)], 1, config);
    let mut host = Host::admin(export.address(), SUBSYSTEM);
    let capabilities = Capabilities::parse(host.get(offset::CAP, 8).result);
    assert_eq!((capabilities.max_entries, capabilities.command_sets), (128, Capabilities::NVM));
    // Nothing else before it is enabled.
    let early = host.run(&Command::identify(0, cns::CONTROLLER, 0), 4096);
    assert_eq!(early.status, Status::COMMAND_SEQUENCE_ERROR);
    host.enable();
    let controller = ControllerData::parse(&identify(&mut host, 0, cns::CONTROLLER));
    assert_eq!((controller.serial.as_str(), controller.model.as_str()), ("S123", "Freestone"));
    assert_eq!((controller.controller_id, controller.namespaces), (host.controller, 2));
    assert_eq!((controller.in_capsule_bytes(), controller.max_transfer_exponent), (16384, 8));
    assert_eq!(controller.subsystem, SUBSYSTEM);
    let list = identify(&mut host, 0, cns::ACTIVE_NAMESPACES);
    assert_eq!(parse_namespaces(&list).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(parse_namespaces(&identify(&mut host, 1, cns::ACTIVE_NAMESPACES)).count(), 1);
    let second = identify(&mut host, 2, cns::NAMESPACE);
    assert_eq!(Namespace::parse(&second).unwrap().blocks, 4096);
    let NamespaceData { nguid: uuid, copy_range_blocks, copy_blocks, copy_ranges, .. } =
        NamespaceData::parse(&second);
    assert_eq!((copy_range_blocks, copy_blocks, copy_ranges), (32768, 32768, 255));
    assert_eq!((controller.commands & oncs::COPY, controller.copy_formats), (oncs::COPY, 1));
    assert!(
        parse_descriptors(&identify(&mut host, 2, cns::DESCRIPTORS)).any(|id| id == NamespaceId::Uuid(uuid))
    );
    assert_ne!(NamespaceData::parse(&identify(&mut host, 1, cns::NAMESPACE)).nguid, [0; 16]);
    for nsid in [0, 3, u32::MAX] {
        let done = host.run(&Command::identify(nsid, cns::NAMESPACE, 0), 4096);
        assert_eq!(done.status, Status::INVALID_NAMESPACE, "{nsid}");
    }
    assert_eq!(host.run(&Command::identify(0, 0x77, 0), 4096).status, Status::INVALID_FIELD);
    let queues = host.run(&Command::set_features(feature::NUMBER_OF_QUEUES, 0x001f_001f), 0);
    assert_eq!(queues.result, 0x0002_0002);
    let id = host.run(&Command::get_features(feature::HOST_IDENTIFIER), 16);
    assert_eq!(id.data, HOST_ID);
    assert_eq!(log(&mut host, log_page::COMMAND_EFFECTS, 4096)[1024 + 4 * 2], 1);
    let effects = log(&mut host, log_page::COMMAND_EFFECTS, 4096);
    assert_eq!(effects[4 * usize::from(admin::GET_LBA_STATUS)], 1);
    assert_eq!(log(&mut host, log_page::SMART, 512)[3], 100);
    assert_eq!(host.run(&Command::get_log_page(0, 0xee, 0, 64), 64).status, Status::INVALID_LOG_PAGE);
    assert_eq!(
        host.run(&Command { opcode: 0x80, ..Command::keep_alive() }, 0).status,
        Status::INVALID_OPCODE
    );
    let abort = Command { opcode: admin::ABORT, ..Command::keep_alive() };
    assert_eq!(host.run(&abort, 0).result, 1, "not aborted");
}

#[test]
fn commands_that_are_fused_or_have_too_little_room_are_refused() {
    let server = Server::start(MIB);
    let mut host = server.host();
    host.enable();
    for (command, room) in [
        (Command::identify(0, cns::CONTROLLER, 0), 1024),
        (Command::identify(1, cns::NAMESPACE, 0), 4095),
        (Command::get_features(feature::HOST_IDENTIFIER), 8),
        (Command::get_features(feature::HOST_BEHAVIOR_SUPPORT), 511),
    ] {
        assert_eq!(host.run(&command, room).status, Status::INVALID_SGL_LENGTH, "{command:?}");
    }
    let mut io = host.io_queue(1, 16);
    let identify = Command::identify(0, cns::CONTROLLER, 0);
    for (queue, command, room) in [(&mut host, identify, 4096), (&mut io, Command::read(1, 0, 1), 512)] {
        for fused in [1, 2] {
            let id = queue.id();
            let entry = SubmissionEntry::new(&command, id, Sgl::Transport { len: room });
            queue.send(SubmissionEntry { flags: entry.flags | fused, ..entry });
            assert_eq!(queue.finish(id).status, Status::INVALID_FIELD, "{command:?}, {fused}");
        }
        assert_eq!(queue.run(&command, room).status, Status::SUCCESS);
    }
}

#[test]
fn features_have_their_defaults_until_the_host_sets_them() {
    let server = Server::start(MIB);
    let mut host = server.host();
    host.enable();
    let get = |host: &mut Host, id: u8, select: u32, dword: u32| {
        let command = Command::get_features(id);
        let cdw = [u32::from(id) | select << 8, dword, 0, 0, 0, 0];
        let done = host.run(&Command { cdw, ..command }, 0);
        assert_eq!(done.status, Status::SUCCESS, "{id}");
        done.result as u32
    };
    let (too_hot, too_cold) = (0, 1 << 20);
    for (id, selector, default, set) in [
        (feature::ARBITRATION, 0, 7, 0x0102_0304),
        (feature::POWER_MANAGEMENT, 0, 0, 1 << 5),
        (feature::TEMPERATURE_THRESHOLD, too_hot, 0xffff, 353),
        (feature::TEMPERATURE_THRESHOLD, too_cold, 0, 263),
        (feature::ERROR_RECOVERY, 0, 0, 10),
        (feature::WRITE_ATOMICITY, 0, 0, 1),
    ] {
        assert_eq!(get(&mut host, id, 0, selector), default, "{id}");
        let done = host.run(&Command::set_features(id, set | selector), 0);
        assert_eq!(done.status, Status::SUCCESS, "{id}");
        assert_eq!(
            (get(&mut host, id, 0, selector), get(&mut host, id, 1, selector)),
            (set, default),
            "{id}"
        );
    }
    let all_sensors = Command::set_features(feature::TEMPERATURE_THRESHOLD, 15 << 16 | 300);
    assert_eq!(host.run(&all_sensors, 0).status, Status::SUCCESS);
    assert_eq!(get(&mut host, feature::TEMPERATURE_THRESHOLD, 0, too_hot), 300);
    for (id, value) in [
        (feature::POWER_MANAGEMENT, 1),
        (feature::ERROR_RECOVERY, 1 << 16),
        (feature::TEMPERATURE_THRESHOLD, 1 << 16),
        (feature::TEMPERATURE_THRESHOLD, 2 << 20),
        (0x08, 0),
    ] {
        let status = host.run(&Command::set_features(id, value), 0).status;
        assert_eq!(status, Status::INVALID_FIELD, "{id} {value:#x}");
    }
    let behavior = Command::get_features(feature::HOST_BEHAVIOR_SUPPORT);
    assert_eq!(host.run(&behavior, 512).data, [0; 512]);
    let set = Command::set_features(feature::HOST_BEHAVIOR_SUPPORT, 0);
    let mut supported = [0; 512];
    supported[1] = 1;
    assert_eq!(host.run_with(&set, &supported).status, Status::SUCCESS);
    assert_eq!(host.run(&behavior, 512).data, supported);
    let wrong = [&[2][..], &supported[1..]].concat();
    assert_eq!(host.run_with(&set, &wrong).status, Status::INVALID_FIELD);
    assert_eq!(host.run_with(&set, &supported[..64]).status, Status::INVALID_SGL_LENGTH);
    // A controller that was disabled has forgotten it.
    host.set(offset::CC, 0);
    host.enable();
    assert_eq!(get(&mut host, feature::ARBITRATION, 0, 0), 7);
    assert_eq!(host.run(&behavior, 512).data, [0; 512]);
}

#[test]
fn the_number_of_queues_is_set_before_there_are_any() {
    let server = Server::start(MIB);
    let mut host = server.host();
    host.enable();
    let set = Command::set_features(feature::NUMBER_OF_QUEUES, 0x0001_0001);
    assert_eq!(host.run(&set, 0).status, Status::SUCCESS);
    let _io = host.io_queue(1, 16);
    assert_eq!(host.run(&set, 0).status, Status::COMMAND_SEQUENCE_ERROR);
    assert_eq!(host.run(&Command::get_features(feature::NUMBER_OF_QUEUES), 0).status, Status::SUCCESS);
    host.set(offset::CC, 0);
    host.enable();
    assert_eq!(host.run(&set, 0).status, Status::SUCCESS);
}

#[test]
fn a_host_hears_of_a_namespace_that_grew_once_until_it_looks() {
    let server = Server::start(MIB);
    let mut host = server.host();
    host.enable();
    let config = Command::set_features(feature::ASYNC_EVENT_CONFIGURATION, CONFIG_NAMESPACE_ATTRIBUTES);
    assert_eq!(host.run(&config, 0).status, Status::SUCCESS);
    let wait = |host: &mut Host| {
        let id = host.id();
        host.send(SubmissionEntry::new(&Command::async_event_request(), id, Sgl::None));
        id
    };
    let ids: Vec<u16> = (0..4).map(|_| wait(&mut host)).collect();
    let fifth = wait(&mut host);
    assert_eq!(host.finish(fifth).status, Status::TOO_MANY_EVENT_REQUESTS);
    for (grown, place) in [(2 * MIB, 0), (3 * MIB, 1)] {
        server.device.grow(grown);
        server.export().notify_resize();
        let Pdu::Response(entry) = host.receive() else { panic!("no event") };
        assert!(ids.contains(&entry.command_id), "event {place}");
        assert_eq!(Event::parse(entry.result as u32), Event::NAMESPACE_ATTRIBUTES);
        // Told already.
        server.device.grow(grown + MIB / 2);
        server.export().notify_resize();
        let changed: IdentifyData = log(&mut host, log_page::CHANGED_NAMESPACES, 4096).try_into().unwrap();
        assert_eq!(parse_namespaces(&changed).collect::<Vec<_>>(), [1]);
        let namespace = Namespace::parse(&identify(&mut host, 1, cns::NAMESPACE)).unwrap();
        assert_eq!(namespace.blocks * 512, grown + MIB / 2);
    }
}

#[test]
fn discovery_lists_the_subsystem() {
    let server = Server::with(MIB, |config| Config { access: only(&[HOST]), ..config });
    let mut host = Host::initialized(server.address(), false, false);
    assert_eq!(host.connect(nqn::DISCOVERY, 0, 32, ANY_CONTROLLER, 0).status, Status::SUCCESS);
    host.enable();
    let controller = ControllerData::parse(&identify(&mut host, 0, cns::CONTROLLER));
    assert_eq!(controller.subsystem, nqn::DISCOVERY);
    let page = log(&mut host, log_page::DISCOVERY, 3072);
    assert_eq!(DiscoveryHeader::parse(page[..1024].try_into().unwrap()).records, 2);
    let entry = DiscoveryEntry::parse(page[2048..].try_into().unwrap()).unwrap();
    assert_eq!((entry.requirements, entry.security), (0, 0), "libnvme before 1.5 would ask for TLS");
    assert_eq!(entry.subsystem.as_str(), SUBSYSTEM);
    assert_eq!(format!("{}:{}", entry.address, entry.service), server.address());
    // It has neither namespaces nor I/O queues.
    assert_eq!(host.run(&Command::identify(1, cns::NAMESPACE, 0), 4096).status, Status::INVALID_FIELD);
    let mut io = Host::initialized(server.address(), false, false);
    assert_ne!(io.connect(SUBSYSTEM, 1, 32, host.controller, 0).status, Status::SUCCESS);
    // Another host discovers nothing and is refused.
    let stranger =
        || ConnectData { host: Nqn::new("nqn.other").unwrap(), ..connect_data(SUBSYSTEM, ANY_CONTROLLER) };
    let mut other = Host::initialized(server.address(), false, false);
    assert_eq!(other.connect_as(&ADMIN, &stranger()).status, Status::CONNECT_INVALID_HOST);
    let mut other = Host::initialized(server.address(), false, false);
    let data = ConnectData { subsystem: Nqn::discovery(), ..stranger() };
    assert_eq!(other.connect_as(&ADMIN, &data).status, Status::SUCCESS);
    other.enable();
    let header = log(&mut other, log_page::DISCOVERY, 1024);
    assert_eq!(DiscoveryHeader::parse(header[..].try_into().unwrap()).records, 1);
}

#[test]
fn a_connect_that_makes_no_sense_is_refused_with_what_is_wrong() {
    let server = Server::with(MIB, |config| Config { queues: 2, ..config });
    let refused = |connect: Connect, data: ConnectData| {
        let mut host = Host::initialized(server.address(), false, false);
        let done = host.connect_as(&connect, &data);
        assert!(host.is_disconnected());
        (done.status, InvalidParameter::parse(done.result))
    };
    let good = connect_data(SUBSYSTEM, ANY_CONTROLLER);
    let invalid = |parameter| (Status::CONNECT_INVALID_PARAMETERS, parameter);
    assert_eq!(refused(ADMIN, connect_data("nqn.a", ANY_CONTROLLER)), invalid(InvalidParameter::SUBSYSTEM));
    assert_eq!(refused(ADMIN, connect_data(SUBSYSTEM, 7)), invalid(InvalidParameter::CONTROLLER_ID));
    let anonymous = ConnectData { host_id: [0; 16], ..good.clone() };
    assert_eq!(refused(ADMIN, anonymous), invalid(InvalidParameter::HOST_ID));
    let long = Connect { entries: 129, ..ADMIN };
    assert_eq!(refused(long, good.clone()), invalid(InvalidParameter::QUEUE_SIZE));
    let format = Connect { record_format: 9, ..ADMIN };
    assert_eq!(refused(format, good).0, Status::CONNECT_INCOMPATIBLE_FORMAT);
    // I/O queues: their controller must exist, belong to the host and be enabled; each only once.
    let mut host = server.host();
    let io = |queue_id| Connect { queue_id, ..ADMIN };
    let data = connect_data(SUBSYSTEM, host.controller);
    assert_eq!(refused(io(1), data.clone()).0, Status::COMMAND_SEQUENCE_ERROR);
    host.enable();
    let first = host.io_queue(1, 32);
    assert_eq!(refused(io(1), data.clone()).0, Status::COMMAND_SEQUENCE_ERROR);
    assert_eq!(refused(io(3), data.clone()), invalid(InvalidParameter::QUEUE_ID));
    let other = Nqn::new("nqn.2014-08.org.example:other").unwrap();
    let other = ConnectData { host: other, ..data };
    assert_eq!(refused(io(2), other), invalid(InvalidParameter::CONTROLLER_ID));
    drop(first);
    server.wait_for_clients(1);
    host.io_queue(1, 32);
}

#[test]
fn a_host_that_is_silent_for_too_long_is_hung_up_on() {
    let server = Server::start(MIB);
    let mut host = Host::initialized(server.address(), false, false);
    assert_eq!(host.connect(SUBSYSTEM, 0, 32, ANY_CONTROLLER, 3000).status, Status::SUCCESS);
    host.enable();
    let mut io = host.io_queue(1, 32);
    for _ in 0..7 {
        std::thread::sleep(std::time::Duration::from_millis(500));
        assert_eq!(host.run(&Command::keep_alive(), 0).status, Status::SUCCESS);
    }
    assert!(host.is_disconnected() && io.is_disconnected());
    wait_until(|| server.export().stats().clients() == 0);
}

#[test]
fn a_controller_that_is_disabled_has_no_io_queues_and_can_be_enabled_again() {
    let server = Server::start(MIB);
    let (mut host, mut io) = server.connect();
    assert_eq!(host.set(offset::CC, 0).status, Status::SUCCESS);
    assert!(io.is_disconnected());
    assert_eq!(host.get(offset::CSTS, 4).result, 0);
    host.enable();
    host.io_queue(1, 32).read(0, 1);
    let bad = Configuration { submission_exponent: 7, ..Configuration::ENABLED };
    assert_eq!(host.set(offset::CC, 0).status, Status::SUCCESS);
    assert_eq!(host.set(offset::CC, bad.encode().into()).status, Status::INVALID_FIELD);
    let shutdown = Configuration { shutdown: 1, ..Configuration::ENABLED };
    assert_eq!(host.set(offset::CC, shutdown.encode().into()).status, Status::SUCCESS);
    assert_eq!(host.get(offset::CSTS, 4).result >> 2 & 3, 2);
}

#[test]
fn a_subsystem_that_is_not_called_nqn_is_found_and_served() {
    const NAME: &str = "blktests-subsystem-0";
    let server = Server::with(MIB, |config| Config { nqn: Nqn::of_any(NAME).unwrap(), ..config });
    let mut visitor = Host::admin(server.address(), nqn::DISCOVERY);
    visitor.enable();
    let page = log(&mut visitor, log_page::DISCOVERY, 3072);
    let entry = DiscoveryEntry::parse(page[2048..].try_into().unwrap()).unwrap();
    assert_eq!(entry.subsystem.as_str(), NAME);
    let mut host = Host::admin(server.address(), NAME);
    host.enable();
    let controller = ControllerData::parse(&identify(&mut host, 0, cns::CONTROLLER));
    assert_eq!(controller.subsystem, NAME);
}

#[test]
fn a_namespace_has_the_uuid_that_was_chosen_and_no_two_have_one() {
    let device = || Arc::new(MemDevice::new(&MemOptions::new(MIB)).unwrap());
    let namespace = |uuid| NamespaceConfig { device: device(), uuid: Some([uuid; 16]) };
    let cores = reactor::Cores::start(&[reactor::CoreConfig::default()]).unwrap();
    let config = || Config::new(Address::Tcp("127.0.0.1:0".into()), Nqn::new(SUBSYSTEM).unwrap());
    let start = |uuids: [u8; 2]| NvmeTcp::start(&uuids.map(namespace), cores.all(), config());
    let export = start([5, 6]).unwrap();
    let mut host = Host::admin(export.address(), SUBSYSTEM);
    host.enable();
    for (nsid, uuid) in [(1, [5; 16]), (2, [6; 16])] {
        assert_eq!(NamespaceData::parse(&identify(&mut host, nsid, cns::NAMESPACE)).nguid, uuid);
        let descriptors = identify(&mut host, nsid, cns::DESCRIPTORS);
        assert!(parse_descriptors(&descriptors).any(|id| id == NamespaceId::Uuid(uuid)));
    }
    for uuids in [[5, 5], [5, 0]] {
        let said = start(uuids).err().unwrap().to_string();
        assert!(said.contains("want distinct and non-zero values"), "{said}");
    }
}
