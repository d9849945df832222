//! Places for connections: no peer takes those of others.

use crate::host::{HOST, Host};
use crate::server::{MIB, SUBSYSTEM, Server, only};
use exports_nvme_tcp::{Config, Nqn};
use nvme::Status;
use nvme::fabrics::ANY_CONTROLLER;
use nvme::fabrics::nqn::DISCOVERY;
use socket2::{Domain, Socket, Type};
use std::net::SocketAddr;

const OTHER: &str = "nqn.2014-08.org.example:other";

fn named(name: &str, id: u8) -> (Nqn, [u8; 16]) {
    (Nqn::new(name).unwrap(), [id; 16])
}

/// How a Connect of an admin queue ends.
fn connect(host: Host, name: &str) -> (Host, Status) {
    let mut host = host.of(named(name, 7));
    let status = host.connect(SUBSYSTEM, 0, 32, ANY_CONTROLLER, 0).status;
    (host, status)
}

/// A host that comes from another address of this machine.
fn from(address: [u8; 4], server: &Server) -> Host {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((address, 0)).into()).unwrap();
    socket.connect(&server.address().parse::<SocketAddr>().unwrap().into()).unwrap();
    let mut host = Host::silent(server.address());
    host.stream = socket.into();
    host.initialize(false, false)
}

#[test]
fn there_are_as_many_places_as_the_configuration_says() {
    let server = Server::with(MIB, |config| Config { clients: 2, ..config });
    let (_admin, io) = server.connect();
    let (mut refused, status) = connect(Host::initialized(server.address(), false, false), HOST);
    assert_eq!(status, Status::CONNECT_CONTROLLER_BUSY);
    assert!(refused.is_disconnected());
    drop(io);
    server.wait_for_clients(1);
    let (_host, status) = connect(Host::initialized(server.address(), false, false), HOST);
    assert_eq!(status, Status::SUCCESS);
}

#[test]
fn anonymous_discovery_takes_no_place_of_a_host() {
    let server = Server::with(MIB, |config| Config { clients: 2, ..config });
    let mut visitors: Vec<Host> = (0..40).map(|_| Host::admin(server.address(), DISCOVERY)).collect();
    let (_admin, mut io) = server.connect();
    assert_eq!(io.write(0, &[1; 512]), Status::SUCCESS);
    assert!(visitors[0].is_disconnected(), "the oldest made room for the newest");
    visitors[39].enable();
    drop(visitors);
    server.wait_for_clients(2);
}

#[test]
fn one_listed_host_leaves_places_to_the_others() {
    let access = only(&[HOST, OTHER]);
    let server = Server::with(MIB, |config| Config { clients: 4, access, ..config });
    let new = || Host::initialized(server.address(), false, false);
    let taken: Vec<_> = (0..3).map(|_| connect(new(), HOST)).collect();
    assert!(taken.iter().all(|(_, status)| *status == Status::SUCCESS));
    assert_eq!(connect(new(), HOST).1, Status::CONNECT_CONTROLLER_BUSY);
    let (_other, status) = connect(new(), OTHER);
    assert_eq!(status, Status::SUCCESS);
    assert_eq!(connect(new(), OTHER).1, Status::CONNECT_CONTROLLER_BUSY, "all four are taken");
}

#[test]
fn a_host_has_as_many_connections_as_the_configuration_says() {
    let server = Server::with(MIB, |config| Config { host_clients: Some(1), ..config });
    let new = || Host::initialized(server.address(), false, false);
    let (_first, status) = connect(new(), HOST);
    assert_eq!(status, Status::SUCCESS);
    assert_eq!(connect(new(), HOST).1, Status::CONNECT_CONTROLLER_BUSY);
    assert_eq!(connect(new(), OTHER).1, Status::SUCCESS);
}

#[test]
fn one_address_leaves_places_to_the_others() {
    let server = Server::with(MIB, |config| Config { address_clients: Some(2), ..config });
    let names = ["nqn.a", "nqn.b", "nqn.c"];
    let taken: Vec<_> = names.map(|name| connect(from([127, 0, 0, 2], &server), name)).into();
    let statuses: Vec<_> = taken.iter().map(|(_, status)| *status).collect();
    assert_eq!(statuses, [Status::SUCCESS, Status::SUCCESS, Status::CONNECT_CONTROLLER_BUSY]);
    assert_eq!(connect(from([127, 0, 0, 3], &server), "nqn.c").1, Status::SUCCESS);
}

#[test]
fn a_host_with_a_default_configuration_has_all_its_queues_twice() {
    let server = Server::start(MIB);
    let mut kept = Vec::new();
    for _ in 0..2 {
        let mut admin = server.host();
        admin.enable();
        kept.extend((1..=64).map(|queue| admin.io_queue(queue, 32)));
        kept.push(admin);
    }
    server.wait_for_clients(130);
}
