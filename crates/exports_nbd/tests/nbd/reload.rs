//! Certificates that change while the export serves.

use crate::client::{Form, READ};
use crate::server::{MIB, Server};
use conformance::slow::SlowDevice;
use drivers_nbd::{Address, Cancel, Options, Session, Tls};
use exports::Export;
use exports_nbd::{Config, Security};
use std::path::Path;
use tempfile::TempDir;
use tls::authority::write_all;

fn files() -> TempDir {
    let files = tempfile::tempdir().unwrap();
    write_all(files.path());
    files
}

fn security(files: &Path, is_required: bool) -> Security {
    Security { server: tls::Server::with_certificates(files, true).unwrap(), is_required }
}

#[test]
fn connections_stay_and_new_ones_use_the_new_certificate() {
    let (old, new) = (files(), files());
    let tls = Some(security(old.path(), true));
    let server = Server::over(SlowDevice::new(MIB), |config| Config { tls, ..config });
    let connect = |files: &TempDir| {
        let tls = Some(Tls::new(Some(files.path()), None, None, Some("localhost".into())).unwrap());
        let options = Options { tls, ..Options::new(Address::Unix(server.socket.clone())) };
        Session::open(&options, &Cancel::never()).and_then(|session| session.start_queue(&Cancel::never()))
    };
    let queue = connect(&old).unwrap();
    assert!(connect(&new).is_err());
    server.wait_for_clients(1);
    server.export().set_security(security(new.path(), true)).unwrap();
    assert!(connect(&old).is_err());
    let other = connect(&new).unwrap();
    server.wait_for_clients(2);
    assert!(queue.is_connected() && other.is_connected());
    // Whether TLS is required changes, too.
    server.export().set_security(security(new.path(), false)).unwrap();
    assert_eq!(server.connect(Form::Structured).run(READ, 0, 0, 512).error, 0);
}

/// The server changes its authority, and later our driver's files follow.
#[test]
fn our_driver_reads_its_certificates_again_for_each_connection() {
    let (old, new, ours) = (files(), files(), files());
    let copy = |from: &TempDir, name: &str| {
        std::fs::copy(from.path().join(name), ours.path().join(name)).unwrap();
    };
    let names = ["ca-cert.pem", "client-cert.pem", "client-key.pem"];
    names.iter().for_each(|name| copy(&old, name));
    let tls = Some(security(old.path(), true));
    let server = Server::over(SlowDevice::new(MIB), |config| Config { tls, ..config });
    let tls = Some(Tls::new(Some(ours.path()), None, None, Some("localhost".into())).unwrap());
    let options = Options { tls, ..Options::new(Address::Unix(server.socket.clone())) };
    let session = Session::open(&options, &Cancel::never()).unwrap();
    let first = session.start_queue(&Cancel::never()).unwrap();
    server.export().set_security(security(new.path(), true)).unwrap();
    assert!(session.start_queue(&Cancel::never()).is_err(), "the files are still the old ones");
    names.iter().for_each(|name| copy(&new, name));
    let second = session.start_queue(&Cancel::never()).unwrap();
    // A file that is no certificate: what was read last stays in use.
    std::fs::write(ours.path().join("ca-cert.pem"), "no certificate").unwrap();
    let third = session.start_queue(&Cancel::never()).unwrap();
    assert!([first, second, third].iter().all(|queue| queue.is_connected()));
}

#[test]
fn an_export_without_tls_gets_none() {
    let server = Server::start(MIB);
    let error = server.export().set_security(security(files().path(), true)).unwrap_err().to_string();
    assert!(error.contains("it has no TLS"), "{error}");
    assert_eq!(server.connect(Form::Structured).run(READ, 0, 0, 512).error, 0);
}
