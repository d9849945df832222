//! Hosts that come through TLS, and those that should.

use crate::host::{HOST, HOST_ID, Host};
use crate::portal::{Site, discovered_by};
use crate::server::{MIB, SUBSYSTEM, Server, only, wait_until};
use block::{Device, Flags, Op, Request};
use drivers_nvme_tcp::{KeyFiles, NvmeTcpDevice, Options, parse_address};
use exports::Export;
use exports_nvme_tcp::{Access, Address, Config, Nqn, Security, TlsKeys};
use nvme::command::log_page;
use nvme::fabrics::discovery::{DiscoveryEntry, SECURITY_TLS, TREQ_NOT_REQUIRED, TREQ_REQUIRED};
use nvme::fabrics::nqn;
use nvme::{Command, Status};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

pub const OTHER: &str = "nqn.2014-08.org.example:other";

pub fn name(text: &str) -> Nqn {
    Nqn::new(text).unwrap()
}

const KEY: &str = "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
/// A key for SHA-384.
const LONGER_KEY: &str =
    "NVMeTLSkey-1:02:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vcSEgBQ==:";
const OTHER_KEY: &str = "NVMeTLSkey-1:01:ICEiIyQlJicoKSorLC0uLzAxMjM0NTY3ODk6Ozw9Pj/jBqb2:";

pub fn key() -> nvme_auth::TlsKey {
    nvme_auth::TlsKey::parse(KEY).unwrap()
}

pub fn longer_key() -> nvme_auth::TlsKey {
    nvme_auth::TlsKey::parse(LONGER_KEY).unwrap()
}

/// A host's key for another subsystem.
pub fn other_key() -> nvme_auth::TlsKey {
    nvme_auth::TlsKey::parse(OTHER_KEY).unwrap()
}

/// Access by TLS with a key of the host HOST.
pub fn with_key(key: nvme_auth::TlsKey, is_required: bool) -> Access {
    let keys = Arc::new(TlsKeys::of_hosts([(name(HOST), key)]));
    Access { tls: Some(Security { keys, is_required }), ..Access::default() }
}

/// A subsystem that has a key of the host HOST.
fn server(is_required: bool) -> Server {
    Server::with(8 * MIB, |config| Config { access: with_key(key(), is_required), ..config })
}

/// Starts a proxy that forwards through TLS to `to`, and returns its address. It uses the key that
/// `host` has for `subsystem`, derived in the way with this number.
pub fn through_tls(to: &str, host: &str, subsystem: &str, way: usize) -> String {
    through_tls_with(&key(), to, host, subsystem, way)
}

/// As [`through_tls`], with another key.
pub fn through_tls_with(
    key: &nvme_auth::TlsKey,
    to: &str,
    host: &str,
    subsystem: &str,
    way: usize,
) -> String {
    let secret = key.secrets(&name(host), &name(subsystem)).swap_remove(way);
    let client = if secret.key.len() == 32 {
        // The library has another interface for these keys, which the target does not use.
        let file = tempfile::NamedTempFile::new().unwrap();
        let hex: String = secret.key.iter().map(|byte| format!("{byte:02x}")).collect();
        std::fs::write(file.path(), format!("{}:{hex}\n", secret.identity)).unwrap();
        ::tls::Client::with_key(file.path(), None).unwrap()
    } else {
        ::tls::Client::with_secret(secret.identity, secret.key).unwrap()
    };
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, to) = (listener.local_addr().unwrap().to_string(), to.to_owned());
    std::thread::spawn(move || {
        for near in listener.incoming() {
            let (near, far) = (near.unwrap(), TcpStream::connect(&to).unwrap());
            far.set_nodelay(true).unwrap();
            let session = Arc::new(Mutex::new(client.session("target").unwrap()));
            std::thread::spawn(move || relay(&near, &far, &session));
        }
    });
    address
}

/// Ends both when either does.
fn relay(near: &TcpStream, far: &TcpStream, session: &Mutex<::tls::Session>) {
    let send = |session: &mut ::tls::Session| {
        let sent = (&*far).write_all(session.unsent());
        let len = session.unsent().len();
        session.sent(len);
        sent
    };
    let hang_up = || [near, far].into_iter().for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
    let mut bytes = vec![0; 64 << 10];
    loop {
        let mut session = session.lock().unwrap();
        let is_done = session.handshake();
        if send(&mut session).is_err() || is_done.is_err() {
            return hang_up();
        }
        if matches!(is_done, Ok(true)) {
            break;
        }
        match (&*far).read(&mut bytes) {
            Ok(len @ 1..) => session.feed(&bytes[..len]),
            _ => return hang_up(),
        }
    }
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut bytes = vec![0; 64 << 10];
            while let Ok(len @ 1..) = (&*near).read(&mut bytes) {
                let mut session = session.lock().unwrap();
                if session.write(&bytes[..len]).is_err() || send(&mut session).is_err() {
                    break;
                }
            }
            hang_up();
        });
        let mut plain = vec![0; 64 << 10];
        // The end of the handshake may have brought more.
        'whole: loop {
            loop {
                let came = session.lock().unwrap().read(&mut plain);
                match came {
                    Ok(::tls::Plain::Bytes(len)) if (&*near).write_all(&plain[..len]).is_ok() => {}
                    Ok(::tls::Plain::Nothing) => break,
                    _ => break 'whole,
                }
            }
            match (&*far).read(&mut bytes) {
                Ok(len @ 1..) => session.lock().unwrap().feed(&bytes[..len]),
                _ => break,
            }
        }
        hang_up();
    });
}

/// Starts a proxy that ends TLS before `to`, and returns its address and the number of its
/// connections. It accepts a key of HOST for SUBSYSTEM, derived in the way with this number.
pub fn behind_tls(to: &str, key: &nvme_auth::TlsKey, way: usize) -> (String, Arc<AtomicUsize>) {
    let secret = key.secrets(&name(HOST), &name(SUBSYSTEM)).swap_remove(way);
    let server = ::tls::Server::with_secrets([(secret.identity, secret.key)]).unwrap();
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let (address, to) = (listener.local_addr().unwrap().to_string(), to.to_owned());
    let count = Arc::new(AtomicUsize::new(0));
    let counted = count.clone();
    std::thread::spawn(move || {
        for far in listener.incoming() {
            counted.fetch_add(1, Ordering::SeqCst);
            let (near, far) = (TcpStream::connect(&to).unwrap(), far.unwrap());
            far.set_nodelay(true).unwrap();
            let session = Arc::new(Mutex::new(server.session().unwrap()));
            std::thread::spawn(move || relay(&near, &far, &session));
        }
    });
    (address, count)
}

/// The options of our initiator, as HOST with a key.
pub fn options(address: &str, key: nvme_auth::TlsKey) -> Options {
    let host_nqn = Some(name(HOST));
    let plain = Options::new(parse_address(address).unwrap(), name(SUBSYSTEM));
    Options { tls_key: Some(key), host_nqn, queues: 2, ..plain }
}

/// Why our initiator cannot open the namespace.
pub fn refusal(options: &Options) -> String {
    NvmeTcpDevice::open(options).err().expect("the namespace was opened").to_string()
}

#[test]
fn our_host_finds_the_way_in_which_a_target_derives_the_key() {
    let server = Server::start(8 * MIB);
    for (key, way) in [key(), longer_key()].iter().flat_map(|key| (0..4).map(move |way| (key, way))) {
        let (address, connections) = behind_tls(server.address(), key, way);
        let device = Arc::new(NvmeTcpDevice::open(&options(&address, key.clone())).unwrap());
        assert_eq!(connections.load(Ordering::SeqCst), way + 1, "one for each way");
        let used = device.clone();
        let content = reactor::run(async move {
            let channel = used.open_channel().unwrap();
            let mut buffer = reactor::current().buffers().take(100_352).await;
            buffer.as_mut_slice().fill(way as u8 + 1);
            let (mut buffer, result) = buffer.transfer(&*channel, Op::Write, Flags::NONE, 4096).await;
            assert_eq!(result, Ok(()));
            buffer.as_mut_slice().fill(0);
            let (buffer, result) = buffer.transfer(&*channel, Op::Read, Flags::NONE, 4096).await;
            assert_eq!(result, Ok(()));
            buffer.as_slice().to_vec()
        });
        assert!(content == [way as u8 + 1; 100_352]);
        assert_eq!(connections.load(Ordering::SeqCst), way + 2, "a queue knows the way");
    }
}

#[test]
fn our_host_is_refused_without_the_right_key_and_never_falls_back_to_the_clear() {
    let required = server(true);
    let said = refusal(&options(required.address(), other_key()));
    assert!(said.contains("the target does not accept the TLS key of this host (tls-key): "), "{said}");
    let other = Options { host_nqn: Some(name(OTHER)), ..options(required.address(), key()) };
    assert!(refusal(&other).contains("does not accept the TLS key"));
    let clear = Options { tls_key: None, ..options(required.address(), key()) };
    assert!(refusal(&clear).contains("the server closed it"), "{}", refusal(&clear));
    let without = Server::start(MIB);
    assert!(refusal(&options(without.address(), key())).contains("does not accept the TLS key"));
}

/// Its identity in TLS has more bytes than older interfaces of TLS libraries accept.
#[test]
fn our_host_may_have_the_longest_name() {
    let long = name(&format!("nqn.2014-08.org.example:{}", "x".repeat(199)));
    for key in [key(), longer_key()] {
        let keys = Arc::new(TlsKeys::of_hosts([(long.clone(), key.clone())]));
        let access = Access { tls: Some(Security { keys, is_required: true }), ..Access::default() };
        let server = Server::with(MIB, |config| Config { access, ..config });
        let options = Options { host_nqn: Some(long.clone()), ..options(server.address(), key) };
        NvmeTcpDevice::open(&options).unwrap();
    }
}

/// The target restarts with another key, and the host's file follows.
#[test]
fn our_host_reads_its_key_again_when_it_reconnects() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("key");
    secrets::write(&path, KEY).unwrap();
    let first = server(true);
    let address = first.address().to_owned();
    let key_files = KeyFiles { tls_key: Some(path.clone()), ..KeyFiles::default() };
    let mut options = Options { key_files, tls_key: None, timeout_ms: 2000, ..options(&address, key()) };
    options.read_keys().unwrap();
    let device = Arc::new(NvmeTcpDevice::open(&options).unwrap());
    drop(first);
    let _second = Server::with(8 * MIB, |config| Config {
        ports: Config::new(Address::Tcp(address), name(SUBSYSTEM)).ports,
        access: with_key(other_key(), true),
        ..config
    });
    secrets::write(&path, "no key").unwrap();
    let (used, changed) = (device.clone(), path.clone());
    let result = reactor::run(async move {
        let request = Request::write_zeroes(4096, Flags::NONE);
        let start = Instant::now();
        let queue = loop {
            // Until the loss is noticed and a connection is there again, no queue starts.
            match used.open_channel() {
                Ok(queue) => break queue,
                Err(error) if start.elapsed() > Duration::from_secs(60) => panic!("{error}"),
                Err(_) => secrets::write(&changed, OTHER_KEY).unwrap(),
            }
            reactor::current().sleep(1_000_000).await;
        };
        queue.submit(&request, 4096).await
    });
    assert_eq!(result, Ok(()));
    // The file decides, and an invalid one is refused by name.
    secrets::write(&path, "no key").unwrap();
    let said = options.read_keys().unwrap_err();
    assert!(said.starts_with("tls-key: ") && said.contains("/key: a key looks like"), "{said}");
    assert_eq!(options.tls_key, Some(key()));
}

#[test]
fn our_host_hears_of_a_resize_through_tls() {
    let server = server(true);
    let device = NvmeTcpDevice::open(&options(server.address(), key())).unwrap();
    assert_eq!(device.limits().capacity, 8 * MIB);
    server.device.grow(16 * MIB);
    server.export().notify_resize();
    wait_until(|| device.limits().capacity == 16 * MIB);
}

/// Connects an admin queue, and returns how that went.
pub fn connect(address: &str, subsystem: &str, host: &str) -> (Host, Status) {
    let mut admin = Host::initialized(address, false, false).of((name(host), HOST_ID));
    let status = admin.connect(subsystem, 0, 32, nvme::fabrics::ANY_CONTROLLER, 0).status;
    (admin, status)
}

#[test]
fn a_host_with_a_key_has_its_blocks_through_tls_however_it_derived_it() {
    for (key, way) in [key(), longer_key()].iter().flat_map(|key| (0..4).map(move |way| (key, way))) {
        let server = Server::with(8 * MIB, |config| Config { access: with_key(key.clone(), true), ..config });
        let address = through_tls_with(key, server.address(), HOST, SUBSYSTEM, way);
        let (mut admin, status) = connect(&address, SUBSYSTEM, HOST);
        assert_eq!(status, Status::SUCCESS, "{way}");
        admin.enable();
        let mut io = admin.io_queue(1, 32);
        for len in [512, 16384, 100_352, MIB as usize] {
            let data: Vec<u8> = (0..len).map(|i| (i / 7 + way) as u8).collect();
            assert_eq!(io.write(8, &data), Status::SUCCESS, "{len}");
            assert!(io.read(8, len as u32 / 512) == data, "{len}");
        }
    }
}

#[test]
fn a_key_is_good_for_its_host_and_its_subsystem_only() {
    let server = server(true);
    let disk = through_tls(server.address(), HOST, SUBSYSTEM, 0);
    let discovery = through_tls(server.address(), HOST, nqn::DISCOVERY, 0);
    assert_eq!(connect(&disk, SUBSYSTEM, OTHER).1, Status::CONNECT_INVALID_HOST);
    assert_eq!(connect(&disk, nqn::DISCOVERY, HOST).1, Status::CONNECT_INVALID_HOST);
    assert_eq!(connect(&discovery, SUBSYSTEM, HOST).1, Status::CONNECT_INVALID_HOST);
    let (mut admin, status) = connect(&discovery, nqn::DISCOVERY, HOST);
    assert_eq!(status, Status::SUCCESS);
    admin.enable();
    assert_eq!(security(&mut admin), (SECURITY_TLS, TREQ_REQUIRED));
    // The server does not know this key: the handshake fails.
    let stranger = through_tls(server.address(), OTHER, SUBSYSTEM, 0);
    assert!(Host::silent(&stranger).is_disconnected());
}

#[test]
fn where_tls_is_required_no_client_is_served_in_the_clear() {
    refuses_the_clear(server(true).address());
}

/// Checks that a client without TLS gets no answer.
fn refuses_the_clear(address: &str) {
    let mut host = Host::silent(address);
    let request = nvme::tcp::IcReq { align_bytes: 4, header_digest: false, data_digest: false, max_r2t: 1 };
    host.stream.write_all(&request.encode()).unwrap();
    let mut answer = Vec::new();
    let _ = host.stream.read_to_end(&mut answer); // it may be reset
    assert!(answer.is_empty(), "{answer:?}");
}

#[test]
fn where_tls_is_allowed_those_without_a_key_come_without_it() {
    let server = server(false);
    let (mut admin, status) = connect(server.address(), SUBSYSTEM, OTHER);
    assert_eq!(status, Status::SUCCESS);
    admin.enable();
    assert_eq!(admin.io_queue(1, 32).write(0, &[1; 512]), Status::SUCCESS);
    assert_eq!(connect(server.address(), SUBSYSTEM, HOST).1, Status::CONNECT_INVALID_HOST, "it has a key");
    let (mut admin, status) = connect(server.address(), nqn::DISCOVERY, HOST);
    assert_eq!(status, Status::SUCCESS);
    admin.enable();
    assert_eq!(security(&mut admin), (SECURITY_TLS, TREQ_NOT_REQUIRED));
    let address = through_tls(server.address(), HOST, SUBSYSTEM, 0);
    assert_eq!(connect(&address, SUBSYSTEM, HOST).1, Status::SUCCESS);
}

/// The security fields of the discovery log.
fn security(admin: &mut Host) -> (u8, u8) {
    let page = admin.run(&Command::get_log_page(0, log_page::DISCOVERY, 0, 4096), 4096);
    let entry = DiscoveryEntry::parse(page.data[2048..3072].try_into().unwrap()).unwrap();
    assert_eq!(entry.subsystem.as_str(), SUBSYSTEM);
    (entry.security, entry.requirements)
}

#[test]
fn a_key_that_comes_later_is_required_of_its_host_alone() {
    let server = Server::start(8 * MIB);
    let tls = through_tls(server.address(), HOST, SUBSYSTEM, 0);
    assert!(tls_fails(&tls), "there is no key yet");
    let keys = Arc::new(TlsKeys::of_hosts([(name(HOST), key())]));
    let security = Some(Security { keys, is_required: false });
    server.export().set_access(Access { tls: security, ..Access::default() }).unwrap();
    let mut host = Host::admin(&tls, SUBSYSTEM);
    host.enable();
    let clear = |name_: &str| {
        let mut host = Host::initialized(server.address(), false, false).of((name(name_), HOST_ID));
        host.connect(SUBSYSTEM, 0, 32, nvme::fabrics::ANY_CONTROLLER, 0).status
    };
    assert_eq!((clear(HOST), clear(OTHER)), (Status::CONNECT_INVALID_HOST, Status::SUCCESS));
    server.export().set_access(only(&[OTHER])).unwrap();
    assert!(host.is_disconnected() && tls_fails(&tls));
}

/// Whether no handshake succeeds at the address of a proxy.
pub fn tls_fails(proxy: &str) -> bool {
    Host::silent(proxy).is_disconnected()
}

pub const FIRST: &str = "nqn.2014-08.org.example:disk-a";
pub const SECOND: &str = "nqn.2014-08.org.example:disk-b";
const OPEN: &str = "nqn.2014-08.org.example:disk-c";

/// Each of two subsystems at one portal has a key of its own for the same host.
#[test]
fn a_key_leads_to_its_subsystem_at_a_portal_and_to_no_other() {
    let mut site = Site::new(|config| config);
    site.add(FIRST, |config| Config { access: with_key(key(), true), ..config });
    site.add(SECOND, |config| Config { access: with_key(other_key(), true), ..config });
    for way in 0..4 {
        let first = through_tls(site.address(), HOST, FIRST, way);
        let second = through_tls_with(&other_key(), site.address(), HOST, SECOND, way);
        assert_eq!(connect(&first, FIRST, HOST).1, Status::SUCCESS, "{way}");
        assert_eq!(connect(&second, SECOND, HOST).1, Status::SUCCESS, "{way}");
        assert_eq!(connect(&first, SECOND, HOST).1, Status::CONNECT_INVALID_HOST);
        assert_eq!(connect(&second, FIRST, HOST).1, Status::CONNECT_INVALID_HOST);
        assert_eq!(connect(&first, FIRST, OTHER).1, Status::CONNECT_INVALID_HOST);
        // The key of one is not that of the other.
        assert!(tls_fails(&through_tls(site.address(), HOST, SECOND, way)));
    }
    // Every subsystem requires TLS, so nothing is served in the clear.
    refuses_the_clear(site.address());
    let discovery = through_tls(site.address(), HOST, nqn::DISCOVERY, 0);
    assert_eq!(discovered(&discovery, site.address()), [FIRST, SECOND]);
    // The keys of an export end with it, and new ones come with it.
    drop(site.exports.pop());
    assert!(tls_fails(&through_tls_with(&other_key(), site.address(), HOST, SECOND, 0)));
    let first = through_tls(site.address(), HOST, FIRST, 0);
    assert_eq!(connect(&first, FIRST, HOST).1, Status::SUCCESS);
    site.exports[0].set_access(with_key(other_key(), true)).unwrap();
    assert!(tls_fails(&through_tls(site.address(), HOST, FIRST, 0)));
    let first = through_tls_with(&other_key(), site.address(), HOST, FIRST, 0);
    assert_eq!(connect(&first, FIRST, HOST).1, Status::SUCCESS);
}

#[test]
fn a_portal_serves_subsystems_with_and_without_tls() {
    let mut site = Site::new(|config| config);
    site.add(FIRST, |config| Config { access: with_key(key(), true), ..config });
    site.add(SECOND, |config| Config { access: with_key(other_key(), false), ..config });
    site.add(OPEN, |config| config);
    let clear = site.address().to_owned();
    assert_eq!(connect(&clear, OPEN, HOST).1, Status::SUCCESS);
    assert_eq!(connect(&clear, FIRST, HOST).1, Status::CONNECT_INVALID_HOST);
    assert_eq!(connect(&clear, FIRST, OTHER).1, Status::CONNECT_INVALID_HOST, "TLS is required");
    assert_eq!(connect(&clear, SECOND, HOST).1, Status::CONNECT_INVALID_HOST, "it has a key");
    assert_eq!(connect(&clear, SECOND, OTHER).1, Status::SUCCESS);
    let first = through_tls(&clear, HOST, FIRST, 0);
    assert_eq!(connect(&first, FIRST, HOST).1, Status::SUCCESS);
    assert_eq!(connect(&first, OPEN, HOST).1, Status::CONNECT_INVALID_HOST);
    // In the clear, no name is shown of a subsystem that is not served so.
    assert_eq!(discovered(&clear, &clear), [SECOND, OPEN]);
    let discovery = through_tls(&clear, HOST, nqn::DISCOVERY, 0);
    assert_eq!(discovered(&discovery, &clear), [FIRST, SECOND, OPEN]);
}

/// The subsystems that HOST discovers at an address, which the target knows as `own`.
fn discovered(address: &str, own: &str) -> Vec<String> {
    let (mut admin, status) = connect(address, nqn::DISCOVERY, HOST);
    assert_eq!(status, Status::SUCCESS);
    admin.enable();
    admin.address = own.to_owned();
    discovered_by(&mut admin)
}
