//! Both sides of a session against each other: trust, and data transfer.

use std::path::Path;
use tempfile::TempDir;
use tls::authority::{Authority, write_all};
use tls::{Client, Plain, Server, Session, SessionError};
use zeroize::Zeroizing;

/// Transfers all unsent bytes of one side to the other.
fn carry(from: &mut Session, to: &mut Session) {
    let len = from.unsent().len();
    to.feed(from.unsent());
    from.sent(len);
}

/// Continues until both sides agree or one fails; returns the last result of each.
fn shake(client: &mut Session, server: &mut Session) -> [Result<bool, SessionError>; 2] {
    let mut ours = client.handshake();
    for _ in 0..10 {
        carry(client, server);
        let theirs = server.handshake();
        carry(server, client);
        if ours.is_ok() {
            ours = client.handshake();
        }
        if theirs.is_err() || matches!((&ours, &theirs), (Ok(true), Ok(true)) | (Err(_), Ok(true))) {
            return [ours, theirs];
        }
    }
    panic!("no end of it: {ours:?}");
}

fn agreed(client: &Client, server: &Server, host: &str) -> (Session, Session) {
    let (mut client, mut server) = (client.session(host).unwrap(), server.session().unwrap());
    let ends = shake(&mut client, &mut server);
    assert!(matches!(ends, [Ok(true), Ok(true)]), "{ends:?}");
    (client, server)
}

/// Returns the errors of both sides of a session that is refused.
fn refused(client: &Client, server: &Server, host: &str) -> [String; 2] {
    let (mut client, mut server) = (client.session(host).unwrap(), server.session().unwrap());
    let ends = shake(&mut client, &mut server);
    // The side that finishes first learns of the refusal by the bytes that follow.
    let [ours, theirs] = ends;
    let late = |end: Result<bool, SessionError>, session: &mut Session| match end {
        Err(error) => error.to_string(),
        Ok(_) => {
            session.read(&mut [0; 10]).map_or_else(|error| error.to_string(), |read| format!("{read:?}"))
        }
    };
    carry(&mut client, &mut server);
    let said = [late(ours, &mut client), late(theirs, &mut server)];
    assert!(said.iter().any(|side| side.contains("handshake")), "{said:?}");
    said
}

fn say(from: &mut Session, to: &mut Session, text: &[u8]) {
    from.write(text).unwrap();
    carry(from, to);
    let (mut got, mut buffer) = (Vec::<u8>::new(), [0; 1000]);
    while let Plain::Bytes(len) = to.read(&mut buffer).unwrap() {
        got.extend(&buffer[..len]);
    }
    assert!(got == text);
}

fn directory() -> TempDir {
    let directory = TempDir::new().unwrap();
    write_all(directory.path());
    directory
}

#[test]
fn sent_bytes_arrive_and_a_goodbye_differs_from_a_cut() {
    let files = directory();
    let client = Client::with_certificates(files.path()).unwrap();
    for verifies_peer in [false, true] {
        let server = Server::with_certificates(files.path(), verifies_peer).unwrap();
        for host in ["localhost", "127.0.0.1", "::1"] {
            let (mut ours, mut theirs) = agreed(&client, &server, host);
            assert!(ours.agreed().starts_with("TLSv1.3 "), "{}", ours.agreed());
            say(&mut ours, &mut theirs, b"hello");
            say(&mut theirs, &mut ours, &vec![7; 100_000]);
            ours.close();
            carry(&mut ours, &mut theirs);
            assert_eq!(theirs.read(&mut [0; 1]).unwrap(), Plain::End);
            say(&mut theirs, &mut ours, b"still there");
            ours.feed_end();
            assert!(matches!(ours.read(&mut [0; 1]), Err(SessionError::Truncated)));
        }
    }
}

#[test]
fn an_untrusted_peer_gets_an_alert() {
    let files = directory();
    let strangers = directory();
    let server = Server::with_certificates(files.path(), true).unwrap();
    let client = Client::with_certificates(files.path()).unwrap();
    let [ours, _] = refused(&client, &server, "elsewhere");
    assert!(ours.contains("not trusted") && ours.contains("ostname"), "{ours}");
    let [ours, _] = refused(&client, &server, "10.0.0.1");
    assert!(ours.contains("IP address mismatch"), "{ours}");
    let stranger = Client::with_certificates(strangers.path()).unwrap();
    let [ours, theirs] = refused(&stranger, &server, "localhost");
    assert!(ours.contains("not trusted") && theirs.contains("alert"), "{ours} {theirs}");
    // Trusts the server, and is not trusted by it.
    Authority::new().vouch(strangers.path(), "client", &[]);
    std::fs::copy(files.path().join("ca-cert.pem"), strangers.path().join("ca-cert.pem")).unwrap();
    let [ours, theirs] = refused(&Client::with_certificates(strangers.path()).unwrap(), &server, "localhost");
    assert!(theirs.contains("not trusted") && ours.contains("alert"), "{ours} {theirs}");
    for file in ["client-cert.pem", "client-key.pem"] {
        std::fs::remove_file(strangers.path().join(file)).unwrap();
    }
    let nobody = Client::with_certificates(strangers.path()).unwrap();
    let [_, theirs] = refused(&nobody, &server, "localhost");
    assert!(theirs.contains("did not return a certificate"), "{theirs}");
    let anybody = Server::with_certificates(files.path(), false).unwrap();
    agreed(&nobody, &anybody, "localhost");
}

#[test]
fn a_key_that_both_have_is_enough_and_another_is_not() {
    let files = TempDir::new().unwrap();
    let file = |name: &str, text: &str| {
        secrets::write(&files.path().join(name), text).unwrap();
        files.path().join(name)
    };
    let (good, bad) = ("5e".repeat(32), "5f".repeat(32));
    let server = Server::with_keys(&file("server", &format!("alice:{good}\nbob:{bad}\n"))).unwrap();
    let client = |text: &str| Client::with_key(&file("client", text), None).unwrap();
    let (mut ours, mut theirs) = agreed(&client(&format!("alice:{good}")), &server, "anywhere");
    assert_eq!(ours.agreed(), "TLSv1.3 TLS_AES_128_GCM_SHA256");
    say(&mut ours, &mut theirs, b"hello");
    let both = file("both", &format!("eve:{bad}\nbob:{bad}"));
    agreed(&Client::with_key(&both, Some("bob")).unwrap(), &server, "anywhere");
    refused(&client(&format!("alice:{bad}")), &server, "anywhere");
    refused(&client(&format!("eve:{good}")), &server, "anywhere");
    for (identity, said) in [(Some("mallory"), "no key of \"mallory\""), (None, "2 keys")] {
        let error = Client::with_key(&both, identity).unwrap_err().to_string();
        assert!(error.contains(said) && error.contains(both.to_str().unwrap()), "{error}");
    }
    // A certificate does not replace a key, even if an authority vouches for it.
    let certificates = directory();
    let other = Server::with_certificates(certificates.path(), false).unwrap();
    refused(&client(&format!("alice:{good}")), &other, "localhost");
    refused(&Client::with_certificates(certificates.path()).unwrap(), &server, "localhost");
}

/// Several keys of one identity, for either hash, each of which some client has.
#[test]
fn keys_of_the_caller_have_the_hash_of_their_length_and_may_share_an_identity() {
    let key = |fill: u8, len: usize| Zeroizing::new(vec![fill; len]);
    let have = |identity: &str, key| (identity.to_owned(), key);
    let server = Server::with_secrets([
        have("alice", key(1, 32)),
        have("bob", key(2, 48)),
        have("alice", key(3, 32)),
        have("bob", key(4, 48)),
        have("alice", key(5, 32)),
    ])
    .unwrap();
    let client = |identity: &str, key| Client::with_secret(identity.into(), key).unwrap();
    for (identity, fill, len, suite) in [
        ("alice", 1, 32, "TLSv1.3 TLS_AES_128_GCM_SHA256"),
        ("alice", 3, 32, "TLSv1.3 TLS_AES_128_GCM_SHA256"),
        ("alice", 5, 32, "TLSv1.3 TLS_AES_128_GCM_SHA256"),
        ("bob", 2, 48, "TLSv1.3 TLS_AES_256_GCM_SHA384"),
        ("bob", 4, 48, "TLSv1.3 TLS_AES_256_GCM_SHA384"),
    ] {
        let (mut ours, mut theirs) = agreed(&client(identity, key(fill, len)), &server, "");
        assert_eq!((ours.agreed(), theirs.peer()), (suite.to_owned(), Some(identity)));
        say(&mut ours, &mut theirs, b"hello");
        say(&mut theirs, &mut ours, &vec![7; 100_000]);
    }
    for (identity, fill, len) in [("alice", 2, 32), ("alice", 2, 48), ("bob", 1, 48), ("eve", 1, 32)] {
        let [_, theirs] = refused(&client(identity, key(fill, len)), &server, "");
        assert!(theirs.contains("handshake"), "{theirs}");
    }
    // A hello that comes byte by byte.
    let (mut ours, mut theirs) = (client("bob", key(4, 48)).session("").unwrap(), server.session().unwrap());
    assert!(!ours.handshake().unwrap());
    let hello = ours.unsent().to_vec();
    ours.sent(hello.len());
    for byte in hello {
        assert!(theirs.unsent().is_empty());
        theirs.feed(&[byte]);
        assert!(!theirs.handshake().unwrap());
    }
    let ends = shake(&mut ours, &mut theirs);
    assert!(matches!(ends, [Ok(true), Ok(true)]), "{ends:?}");
    // Bytes that are no hello.
    let mut session = server.session().unwrap();
    session.feed(b"GET / HTTP/1.1\r\n");
    assert!(session.handshake().unwrap_err().to_string().contains("http request"));
}

#[test]
fn other_protocols_are_refused_and_changed_bytes_are_noticed() {
    let files = directory();
    let server = Server::with_certificates(files.path(), false).unwrap();
    let mut session = server.session().unwrap();
    session.feed(b"GET / HTTP/1.1\r\n");
    assert!(session.handshake().unwrap_err().to_string().contains("http request"));
    let mut session = server.session().unwrap();
    assert!(!session.handshake().unwrap());
    session.feed_end();
    assert!(session.handshake().unwrap_err().to_string().contains("hung up"));
    let (mut ours, mut theirs) =
        agreed(&Client::with_certificates(files.path()).unwrap(), &server, "localhost");
    ours.write(b"hello").unwrap();
    let mut changed = ours.unsent().to_vec();
    *changed.last_mut().unwrap() ^= 1;
    theirs.feed(&changed);
    assert!(matches!(theirs.read(&mut [0; 10]), Err(SessionError::Broken(_))));
}

#[test]
fn files_are_refused_by_name() {
    let files = directory();
    let path = |name: &str| files.path().join(name);
    let said = |name: &str| {
        let error = match name.starts_with("server") {
            true => Server::with_certificates(files.path(), true).map(drop).unwrap_err(),
            false => Client::with_certificates(files.path()).map(drop).unwrap_err(),
        };
        let text = error.to_string();
        assert!(text.contains(path(name).to_str().unwrap()), "{text}");
        text
    };
    let spoilt = |name: &str, content: &[u8]| {
        let good = std::fs::read(path(name)).unwrap();
        std::fs::write(path(name), content).unwrap();
        let text = said(name);
        std::fs::write(path(name), good).unwrap();
        text
    };
    for name in ["server-cert.pem", "client-cert.pem", "ca-cert.pem"] {
        assert!(spoilt(name, b"").contains("holds no certificate"), "{name}");
        assert!(spoilt(name, b"-----BEGIN CERTIFICATE-----\nxx\n").contains("no PEM certificate"), "{name}");
        assert!(spoilt(name, &vec![b'x'; (4 << 20) + 1]).contains("longer than"), "{name}");
    }
    for name in ["server-key.pem", "client-key.pem"] {
        assert!(spoilt(name, b"nothing").contains("no PEM private key"));
        let other = directory();
        let stranger = std::fs::read(other.path().join(name)).unwrap();
        assert!(spoilt(name, &stranger).contains("is not the key of the certificate"));
        assert!(spoilt(name, &locked(&path(name))).contains("locked with a password"));
        std::fs::remove_file(path(name)).unwrap();
        assert!(said(name).contains("No such file"));
    }
}

fn locked(path: &Path) -> Vec<u8> {
    let key = openssl::pkey::PKey::private_key_from_pem(&std::fs::read(path).unwrap()).unwrap();
    key.private_key_to_pem_pkcs8_passphrase(openssl::symm::Cipher::aes_128_cbc(), b"secret").unwrap()
}
