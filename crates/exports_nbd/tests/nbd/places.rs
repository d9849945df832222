//! Places for connections over TCP: no address and no client with a key takes those of others.

use crate::server::MIB;
use conformance::slow::SlowDevice;
use exports::Export;
use exports_nbd::{Address, Config, Nbd, Security};
use reactor::{CoreConfig, Cores};
use socket2::{Domain, Socket, Type};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::Duration;

fn export(change: impl FnOnce(Config) -> Config) -> (Nbd, Cores) {
    let cores = Cores::start(&[CoreConfig::default()]).unwrap();
    let config = change(Config::new(Address::Tcp("127.0.0.1:0".into())));
    (Nbd::start(Arc::new(SlowDevice::new(MIB)), cores.all(), config).unwrap(), cores)
}

fn connect(address: [u8; 4], export: &Nbd) -> TcpStream {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&SocketAddr::from((address, 0)).into()).unwrap();
    socket.connect(&export.address().parse::<SocketAddr>().unwrap().into()).unwrap();
    socket.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    socket.into()
}

/// A client that has chosen the export; `None` when it is disconnected instead.
fn client(address: [u8; 4], export: &Nbd) -> Option<TcpStream> {
    let mut stream = connect(address, export);
    stream.read_exact(&mut [0; 18]).ok()?;
    stream.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
    stream.read_exact(&mut [0; 10]).ok()?;
    Some(stream)
}

#[test]
fn one_address_leaves_places_to_the_others() {
    let (export, _cores) = export(|config| Config { address_clients: Some(2), ..config });
    let taken: Vec<_> = (0..2).map(|_| client([127, 0, 0, 2], &export).expect("a place")).collect();
    assert!(client([127, 0, 0, 2], &export).is_none());
    assert!(client([127, 0, 0, 3], &export).is_some());
    drop(taken);
    crate::server::wait_until(|| export.stats().clients() == 0);
    assert!(client([127, 0, 0, 2], &export).is_some(), "slots are freed");
}

#[test]
fn half_open_connections_of_one_address_do_not_push_out_those_of_another() {
    let (export, _cores) = export(|config| config);
    let mut patient = connect([127, 0, 0, 3], &export);
    let silent: Vec<_> = (0..200).map(|_| connect([127, 0, 0, 2], &export)).collect();
    patient.read_exact(&mut [0; 18]).unwrap();
    patient.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
    patient.read_exact(&mut [0; 10]).unwrap();
    drop(silent);
}

#[test]
fn clients_without_a_key_leave_places_to_those_that_have_one() {
    let folder = tempfile::tempdir().unwrap();
    let keys = folder.path().join("keys");
    secrets::write(&keys, format!("alice:{0}\nbob:{0}\n", "5e".repeat(32))).unwrap();
    let server = tls::Server::with_keys(&keys).unwrap();
    let security = Security { server, is_required: false };
    let (export, _cores) = export(|config| Config { tls: Some(security), clients: 4, ..config });
    let taken: Vec<_> = (0..2).map(|_| client([127, 0, 0, 2], &export).expect("a place")).collect();
    let mut refused = client([127, 0, 0, 3], &export).expect("the handshake may lead to TLS");
    assert_eq!(refused.read(&mut [0; 1]).unwrap(), 0, "a place is kept for alice, and one for bob");
    assert_eq!(export.stats().connections(), 2);
    drop(taken);
}
