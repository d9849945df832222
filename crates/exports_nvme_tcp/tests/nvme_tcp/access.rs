//! Several ports, and how well namespaces are reached over each.

use crate::host::{Host, Pdu};
use crate::server::{MIB, SUBSYSTEM, Server};
use block::{HostRole, SharedRole};
use exports::Export;
use exports_nvme_tcp::{AccessState, Address, Config, PortConfig};
use nvme::command::event::{CONFIG_ASYMMETRIC_ACCESS, Event};
use nvme::command::{cns, feature, log_page};
use nvme::fabrics::discovery::{DiscoveryEntry, DiscoveryHeader};
use nvme::fabrics::{InvalidParameter, nqn};
use nvme::identify::controller_data::{ControllerData, cmic, oaes};
use nvme::identify::namespace_data::NamespaceData;
use nvme::{Command, IDENTIFY_BYTES, IdentifyData, Sgl, Status, SubmissionEntry};

/// Two ports, the second of which is not the best.
fn server() -> Server {
    Server::with(MIB, |config| {
        let port = |state| PortConfig { address: Address::Tcp("127.0.0.1:0".into()), state };
        Config { ports: vec![port(AccessState::Optimized), port(AccessState::NonOptimized)], ..config }
    })
}

fn addresses(server: &Server) -> Vec<String> {
    server.export().addresses().map(str::to_owned).collect()
}

/// A host at an address, with an admin queue that is enabled and an I/O queue.
fn connect(address: &str) -> (Host, Host) {
    let mut admin = Host::admin(address, SUBSYSTEM);
    admin.enable();
    let io = admin.io_queue(1, 32);
    (admin, io)
}

fn page(host: &mut Host, lid: u8, bytes: u32) -> Vec<u8> {
    let done = host.run(&Command::get_log_page(0, lid, 0, bytes), bytes);
    assert_eq!(done.status, Status::SUCCESS);
    done.data
}

/// The state that the log page tells of.
fn state(host: &mut Host) -> u8 {
    page(host, log_page::ASYMMETRIC_ACCESS, 52)[32]
}

#[test]
fn both_ports_lead_to_the_same_blocks_and_each_says_how_well() {
    let server = server();
    let [first, second] = &addresses(&server)[..] else { panic!("two ports") };
    let ((mut one, mut one_io), (mut other, mut other_io)) = (connect(first), connect(second));
    assert_eq!(one_io.write(0, &[7; 512]), Status::SUCCESS);
    assert_eq!(other_io.read(0, 1), [7; 512]);
    assert_eq!((state(&mut one), state(&mut other)), (1, 2));
    assert_ne!(one.controller, other.controller);
    let mut identify = |nsid, what| -> IdentifyData {
        let done = other.run(&Command::identify(nsid, what, 0), IDENTIFY_BYTES as u32);
        done.data.try_into().unwrap()
    };
    let controller = ControllerData::parse(&identify(0, cns::CONTROLLER));
    assert_eq!(controller.paths, cmic::PORTS | cmic::CONTROLLERS | cmic::ASYMMETRIC_ACCESS);
    assert_eq!((controller.ana_capabilities, controller.ana_group_max, controller.ana_groups), (0x1f, 1, 1));
    assert!(controller.ana_transition_s > 0 && controller.async_events & oaes::ASYMMETRIC_ACCESS != 0);
    assert_eq!(NamespaceData::parse(&identify(1, cns::NAMESPACE)).ana_group, 1);
    // A queue comes to the port of its controller only.
    let mut stray = Host::initialized(second, false, false);
    let refusal = stray.connect(SUBSYSTEM, 2, 32, one.controller, 0);
    assert_eq!(refusal.status, Status::CONNECT_INVALID_PARAMETERS);
    assert_eq!(refusal.result, InvalidParameter::CONTROLLER_ID.result());
}

#[test]
fn discovery_tells_of_every_port_wherever_it_is_asked() {
    let server = server();
    let addresses = addresses(&server);
    for (place, address) in addresses.iter().enumerate() {
        let mut host = Host::admin(address, nqn::DISCOVERY);
        host.enable();
        let found = page(&mut host, log_page::DISCOVERY, 4096);
        assert_eq!(DiscoveryHeader::parse(found[..1024].try_into().unwrap()).records, 3);
        let entry =
            |at: usize| DiscoveryEntry::parse(found[1024 * at..][..1024].try_into().unwrap()).unwrap();
        assert_eq!(usize::from(entry(1).port_id), place + 1, "the discovery subsystem itself");
        for (at, address) in (2..).zip(&addresses) {
            let entry = entry(at);
            assert_eq!((usize::from(entry.port_id), entry.subsystem.as_str()), (at - 1, SUBSYSTEM));
            assert_eq!(format!("{}:{}", entry.address, entry.service), *address);
        }
    }
}

#[test]
fn a_port_that_changes_keeps_commands_off_and_its_hosts_hear_of_it_once() {
    let server = server();
    let addresses = addresses(&server);
    let ((mut admin, mut io), (_other, mut other_io)) = (connect(&addresses[0]), connect(&addresses[1]));
    let config = Command::set_features(feature::ASYNC_EVENT_CONFIGURATION, CONFIG_ASYMMETRIC_ACCESS);
    assert_eq!(admin.run(&config, 0).status, Status::SUCCESS);
    let id = admin.id();
    admin.send(SubmissionEntry::new(&Command::async_event_request(), id, Sgl::None));
    assert!(server.export().set_access_state(0, AccessState::Inaccessible));
    assert!(!server.export().set_access_state(2, AccessState::Inaccessible), "there is no such port");
    let Pdu::Response(entry) = admin.receive() else { panic!("no event") };
    assert_eq!((entry.command_id, Event::parse(entry.result as u32)), (id, Event::ASYMMETRIC_ACCESS));
    let write = |io: &mut Host| io.write(0, &[1; 512]);
    for (access, number, status) in [
        (AccessState::Inaccessible, 3, Status::ANA_INACCESSIBLE),
        (AccessState::PersistentLoss, 4, Status::ANA_PERSISTENT_LOSS),
        (AccessState::Change, 15, Status::ANA_TRANSITION),
        (AccessState::NonOptimized, 2, Status::SUCCESS),
    ] {
        server.export().set_access_state(0, access);
        assert_eq!((state(&mut admin), write(&mut io)), (number, status));
        assert_eq!(io.run(&Command::flush(1), 0).status, status);
        assert_eq!(write(&mut other_io), Status::SUCCESS, "the other port is as it was");
        assert_eq!(server.export().access_state(0), Some(access));
    }
    // The page was read, so the next change causes an event.
    let id = admin.id();
    admin.send(SubmissionEntry::new(&Command::async_event_request(), id, Sgl::None));
    server.export().set_access_state(0, AccessState::Optimized);
    let Pdu::Response(entry) = admin.receive() else { panic!("no event") };
    assert_eq!((entry.command_id, Event::parse(entry.result as u32)), (id, Event::ASYMMETRIC_ACCESS));
}

#[test]
fn a_standby_keeps_commands_off_until_it_takes_over_and_its_hosts_hear_of_it() {
    let role = SharedRole::new(HostRole::Standby);
    let server =
        Server::with(MIB, |config| Config { role: Some(role.clone()), controller_ids: 700..=701, ..config });
    let (mut admin, mut io) = server.connect();
    let config = Command::set_features(feature::ASYNC_EVENT_CONFIGURATION, CONFIG_ASYMMETRIC_ACCESS);
    assert_eq!(admin.run(&config, 0).status, Status::SUCCESS);
    let id = admin.id();
    admin.send(SubmissionEntry::new(&Command::async_event_request(), id, Sgl::None));
    assert_eq!(io.write(0, &[1; 512]), Status::ANA_INACCESSIBLE);
    role.set(HostRole::Active);
    assert_eq!(io.write(0, &[1; 512]), Status::SUCCESS);
    server.export().notify_resize();
    let Pdu::Response(entry) = admin.receive() else { panic!("no event") };
    assert_eq!((entry.command_id, Event::parse(entry.result as u32)), (id, Event::ASYMMETRIC_ACCESS));
    assert_eq!(state(&mut admin), 1);
    role.set(HostRole::Fenced);
    assert_eq!((state(&mut admin), io.write(0, &[1; 512])), (3, Status::ANA_INACCESSIBLE));
    let data: IdentifyData =
        admin.run(&Command::identify(1, cns::NAMESPACE, 0), IDENTIFY_BYTES as u32).data.try_into().unwrap();
    assert_eq!(NamespaceData::parse(&data).reservations, 0, "other hosts would not know of them");
}

#[test]
fn controllers_are_numbered_within_the_range_of_their_server() {
    let server = Server::with(MIB, |config| Config { controller_ids: 700..=701, ..config });
    let (first, second) = (server.host(), server.host());
    assert_eq!((first.controller, second.controller), (700, 701));
    let mut third = Host::initialized(server.address(), false, false);
    let busy = third.connect(SUBSYSTEM, 0, 32, 0xffff, 0);
    assert_eq!(busy.status, Status::CONNECT_CONTROLLER_BUSY);
    drop(first);
    server.wait_for_clients(1);
    assert_eq!(server.host().controller, 700);
}

#[test]
fn a_port_that_cannot_be_opened_leaves_nothing_behind() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let devices =
        [std::sync::Arc::new(drivers::mem::MemDevice::new(&drivers::mem::Options::new(MIB)).unwrap())];
    let cores = reactor::Cores::start(&[reactor::CoreConfig::default()]).unwrap();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let port = |address: String| PortConfig { address: Address::Tcp(address), state: AccessState::Optimized };
    let name = exports_nvme_tcp::Nqn::new(SUBSYSTEM).unwrap();
    let address = Address::Tcp(free.to_string());
    let config = Config {
        ports: vec![port(free.to_string()), port(taken.local_addr().unwrap().to_string())],
        ..Config::new(address, name)
    };
    let namespaces = devices
        .map(|device| exports_nvme_tcp::NamespaceConfig { device: device as std::sync::Arc<_>, uuid: None });
    assert!(exports_nvme_tcp::NvmeTcp::start(&namespaces, cores.all(), config).is_err());
    std::net::TcpListener::bind(free).expect("the first port is free again");
}
