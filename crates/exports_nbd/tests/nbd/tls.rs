//! TLS as clients find it: those who ask for it, those who do not, and those who try to slip
//! something in.

use crate::client::{Client, Form, READ};
use crate::server::{MIB, Server, wait_until};
use conformance::slow::SlowDevice;
use exports::Export;
use exports_nbd::{Config, Security};
use std::io::{Read, Write};
use std::path::Path;
use tempfile::TempDir;
use tls::authority::write_all;
use tls::{Plain, Session};

const STARTTLS: &[u8] = b"IHAVEOPT\0\0\0\x05\0\0\0\0";
const LIST: &[u8] = b"IHAVEOPT\0\0\0\x03\0\0\0\0";
const GO: &[u8] = b"IHAVEOPT\0\0\0\x07\0\0\0\x06\0\0\0\0\0\0";

fn secured(files: &Path, is_required: bool) -> Server {
    let security = Security { server: tls::Server::with_certificates(files, false).unwrap(), is_required };
    Server::over(SlowDevice::new(MIB), |config| Config { tls: Some(security), ..config })
}

fn files() -> TempDir {
    let files = tempfile::tempdir().unwrap();
    write_all(files.path());
    files
}

/// The kind of an answer without anything but a sentence.
fn answer(client: &mut Client) -> u32 {
    let mut header = [0; 20];
    client.stream.read_exact(&mut header).unwrap();
    let number = |at: usize| u32::from_be_bytes(header[at..at + 4].try_into().unwrap());
    client.stream.read_exact(&mut vec![0; number(16) as usize]).unwrap();
    number(12)
}

/// A client whose STARTTLS was acknowledged.
fn asked(server: &Server) -> Client {
    let mut client = Client::greeted(&server.socket);
    client.stream.write_all(STARTTLS).unwrap();
    assert_eq!(answer(&mut client), 1);
    client
}

fn pump(client: &mut Client, session: &mut Session) {
    let len = session.unsent().len();
    client.stream.write_all(session.unsent()).unwrap();
    session.sent(len);
}

fn agree(client: &mut Client, files: &Path) -> Session {
    let mut session = tls::Client::with_certificates(files).unwrap().session("localhost").unwrap();
    while !session.handshake().unwrap() {
        pump(client, &mut session);
        let mut bytes = [0; 1000];
        let len = client.stream.read(&mut bytes).unwrap();
        assert!(len > 0, "disconnected");
        session.feed(&bytes[..len]);
    }
    pump(client, &mut session);
    session
}

fn read(client: &mut Client, session: &mut Session, len: usize) -> Vec<u8> {
    let (mut got, mut bytes) = (vec![0; len], [0; 1000]);
    let mut at = 0;
    while at < len {
        match session.read(&mut got[at..]).unwrap() {
            Plain::Bytes(count) => at += count,
            Plain::Nothing => {
                let count = client.stream.read(&mut bytes).unwrap();
                assert!(count > 0, "disconnected");
                session.feed(&bytes[..count]);
            }
            Plain::End => panic!("an end after {at} bytes"),
        }
    }
    got
}

#[test]
fn a_client_that_starts_tls_is_served_even_byte_by_byte() {
    let files = files();
    let server = secured(files.path(), true);
    let mut client = asked(&server);
    let mut session = agree(&mut client, files.path());
    for byte in GO {
        session.write(&[*byte]).unwrap();
        pump(&mut client, &mut session);
    }
    // Two information replies (20 + 12 and 20 + 14 bytes), and the acknowledgement.
    let said = read(&mut client, &mut session, 32 + 34 + 20);
    assert_eq!(said[32 + 34 + 12..][..4], [0, 0, 0, 1]);
    let request = client.request(READ, 0, 7, 4096, 8192);
    for byte in &request {
        session.write(&[*byte]).unwrap();
        pump(&mut client, &mut session);
    }
    let reply = read(&mut client, &mut session, 16 + 8192);
    assert_eq!(reply[..8], [0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0]);
    assert_eq!(server.export().stats().clients(), 1);
    session.write(&client.request(2, 0, 8, 0, 0)).unwrap();
    pump(&mut client, &mut session);
    let mut rest = Vec::new();
    client.stream.read_to_end(&mut rest).unwrap();
    session.feed(&rest);
    assert_eq!(session.read(&mut [0; 1]).unwrap(), Plain::End, "the server says goodbye");
    server.wait_for_clients(0);
}

#[test]
fn a_client_without_tls_is_refused_or_served_as_configured() {
    let files = files();
    let server = secured(files.path(), true);
    let mut client = Client::greeted(&server.socket);
    client.stream.write_all(&[LIST, GO].concat()).unwrap();
    assert_eq!([answer(&mut client), answer(&mut client)], [0x8000_0005; 2]);
    let server = secured(files.path(), false);
    let mut client = server.connect(Form::Structured);
    assert_eq!(client.run(READ, 0, 0, 512).error, 0);
}

#[test]
fn bytes_in_the_clear_are_never_taken_for_what_comes_through_tls() {
    let files = files();
    for is_required in [false, true] {
        let server = secured(files.path(), is_required);
        let mut client = Client::greeted(&server.socket);
        client.stream.write_all(&[STARTTLS, GO].concat()).unwrap();
        assert!(client.is_disconnected());
        let mut client = asked(&server);
        client.stream.write_all(GO).unwrap();
        let mut alert = Vec::new();
        // An alert, as TLS has it, and the end.
        let _ = client.stream.read_to_end(&mut alert);
        assert!(alert.is_empty() || alert[0] == 21, "{alert:?}");
        // In the middle of the handshake, and behind it.
        let mut client = asked(&server);
        let mut session = agree(&mut client, files.path());
        client.stream.write_all(GO).unwrap();
        let mut said = Vec::new();
        let _ = client.stream.read_to_end(&mut said);
        session.feed(&said);
        assert!(session.read(&mut [0; 1]).is_err());
        wait_until(|| server.export().stats().connections() == 0);
    }
}

#[test]
fn a_stream_that_breaks_behind_tls_ends_its_connection_alone() {
    let files = files();
    let server = secured(files.path(), true);
    let served = || {
        let mut client = asked(&server);
        let mut session = agree(&mut client, files.path());
        session.write(GO).unwrap();
        pump(&mut client, &mut session);
        read(&mut client, &mut session, 32 + 34 + 20);
        (client, session)
    };
    let (mut good, mut its) = served();
    let (mut client, _) = served();
    client.stream.write_all(b"something in the clear, longer than a header").unwrap();
    assert!(client.is_disconnected());
    drop(served());
    server.wait_for_clients(1);
    its.write(&good.request(READ, 0, 7, 0, 512)).unwrap();
    pump(&mut good, &mut its);
    read(&mut good, &mut its, 16 + 512);
}

#[test]
fn our_own_client_says_why_it_is_not_let_in() {
    use drivers_nbd::{Address, Cancel, Options, Session, Tls};
    let (files, strangers) = (files(), files());
    let security =
        Security { server: tls::Server::with_certificates(files.path(), true).unwrap(), is_required: true };
    let server = Server::over(SlowDevice::new(MIB), |config| Config { tls: Some(security), ..config });
    let open = |tls: Option<Tls>| {
        let options = Options { tls, ..Options::new(Address::Unix(server.socket.clone())) };
        Session::open(&options, &Cancel::never()).and_then(|session| session.start_queue(&Cancel::never()))
    };
    let tls =
        |files: &TempDir, host: &str| Tls::new(Some(files.path()), None, None, Some(host.into())).unwrap();
    let refusal = |tls| open(tls).err().expect("not let in").to_string();
    assert!(refusal(None).contains("the server demands TLS (tls=require or nbds://)"));
    let said = refusal(Some(tls(&files, "elsewhere")));
    assert!(said.contains("not trusted: ") && said.contains("ostname mismatch"), "{said}");
    let said = refusal(Some(tls(&strangers, "localhost")));
    assert!(said.contains("the peer's certificate is not trusted"), "{said}");
    // It trusts the server, and is not trusted: with TLS 1.3 it hears that from the first answer.
    std::fs::copy(files.path().join("ca-cert.pem"), strangers.path().join("ca-cert.pem")).unwrap();
    let said = refusal(Some(tls(&strangers, "localhost")));
    assert!(said.contains("TLS: ") && said.contains("alert"), "{said}");
    open(Some(tls(&files, "localhost"))).unwrap();
    let plain = Server::start(MIB);
    let options =
        Options { tls: Some(tls(&files, "localhost")), ..Options::new(Address::Unix(plain.socket.clone())) };
    let said = Session::open(&options, &Cancel::never()).unwrap_err().to_string();
    assert_eq!(said, "the server does not support TLS, which is required (the server does not support TLS)");
}
