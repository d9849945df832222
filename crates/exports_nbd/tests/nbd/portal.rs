//! Many exports behind one listener.

use crate::client::{Client, Form, READ, WRITE};
use crate::server::{MIB, wait_until};
use block::Device;
use conformance::slow::{SlowDevice, pattern};
use drivers::mem::{MemDevice, Options as MemOptions};
use drivers_nbd::{Address as Server, Cancel, NbdQueue, OpenError, Options, Session, Tls};
use exports::Export;
use exports_nbd::{Address, Config, Nbd, Portal, PortalConfig, Security};
use reactor::{CoreConfig, Cores, PollWindow};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use tempfile::TempDir;

const UNKNOWN: u32 = 0x8000_0006;
const ACK: u32 = 1;

/// A portal and its exports. The cores are dropped last.
struct Site {
    exports: Vec<Nbd>,
    portal: Arc<Portal>,
    socket: PathBuf,
    _dir: TempDir,
    cores: Cores,
}

impl Site {
    /// A portal that accepts clients, without exports.
    fn new(change: impl FnOnce(PortalConfig) -> PortalConfig) -> Site {
        let site = Site::closed(change);
        site.portal.accept().unwrap();
        site
    }

    /// A portal where clients wait.
    fn closed(change: impl FnOnce(PortalConfig) -> PortalConfig) -> Site {
        let core = CoreConfig { poll: PollWindow::up_to(20_000), ..CoreConfig::default() };
        let cores = Cores::start(&vec![core; 2]).unwrap();
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("portal.sock");
        let address = Address::Unix { path: socket.clone(), permissions: 0o600 };
        let portal = Portal::bind(&change(PortalConfig::new("site".into(), vec![address]))).unwrap();
        Site { exports: Vec::new(), portal, socket, _dir: dir, cores }
    }

    fn start(
        &self,
        name: &str,
        device: Arc<dyn Device>,
        change: impl FnOnce(Config) -> Config,
    ) -> Result<Nbd, exports::Error> {
        let config = change(Config::at_portal(self.portal.clone(), name.into()));
        Nbd::start(device, self.cores.all(), config)
    }

    /// Exports a disk of this size.
    fn add(&mut self, name: &str, bytes: u64) {
        let device = Arc::new(MemDevice::new(&MemOptions::new(bytes)).unwrap());
        self.exports.push(self.start(name, device, |config| config).unwrap());
    }

    fn client(&self) -> Client {
        Client::greeted(&self.socket)
    }

    /// A client that has chosen an export.
    fn connect(&self, name: &str) -> Client {
        let mut client = self.client();
        assert_eq!(go(&mut client, name), ACK);
        client
    }

    fn listed(&self) -> Vec<String> {
        let mut listed = self.client().option(3, &[]);
        assert_eq!(listed.pop(), Some((ACK, Vec::new())));
        let name = |(kind, data): (u32, Vec<u8>)| {
            assert_eq!(kind, 2);
            let len = u32::from_be_bytes(data[..4].try_into().unwrap()) as usize;
            String::from_utf8(data[4..4 + len].to_vec()).unwrap()
        };
        listed.into_iter().map(name).collect()
    }

    /// The driver's client, with a key of its own.
    fn with_key(&self, name: &str, keys: &TempDir, identity: &str) -> Result<NbdQueue, OpenError> {
        let tls = Tls::new(None, Some(&keys.path().join("all")), Some(identity), None).unwrap();
        let options = Options {
            tls: Some(tls),
            export: name.into(),
            ..Options::new(Server::Unix(self.socket.clone()))
        };
        Session::open(&options, &Cancel::never()).and_then(|session| session.start_queue(&Cancel::never()))
    }
}

/// The answer to a choice of an export. The client notes the size in it.
fn go(client: &mut Client, name: &str) -> u32 {
    let data = [&(name.len() as u32).to_be_bytes(), name.as_bytes(), &[0, 0]].concat();
    let replies = client.option(7, &data);
    if let Some((_, info)) = replies.iter().find(|(kind, data)| *kind == 3 && data[..2] == [0, 0]) {
        client.size = u64::from_be_bytes(info[2..10].try_into().unwrap());
    }
    replies.last().unwrap().0
}

#[test]
fn a_hundred_exports_share_an_address_and_come_and_go() {
    let mut site = Site::new(|config| config);
    assert_eq!(site.listed(), [""; 0]);
    let names: Vec<String> = (0..100).map(|number| format!("disk-{number:02}")).collect();
    for (number, name) in (1..).zip(&names) {
        site.add(name, number * 4096);
    }
    assert_eq!(site.listed(), names);
    let mut clients: Vec<Client> = names.iter().map(|name| site.connect(name)).collect();
    for (number, client) in (1..).zip(&mut clients) {
        assert_eq!(client.size, number * 4096);
        client.send_write(0, 1, 0, &[number as u8; 512]);
        assert_eq!(client.reply().error, 0);
    }
    wait_until(|| site.portal.connections().eq([100]));
    // One ends: its client is disconnected, and no other is.
    let mut gone = clients.remove(50);
    drop(site.exports.remove(50));
    assert!(gone.is_disconnected());
    assert_eq!((site.portal.exports(), go(&mut site.client(), "disk-50")), (99, UNKNOWN));
    assert!(!site.listed().contains(&"disk-50".to_owned()));
    for (number, client) in (1u8..=100).filter(|number| *number != 51).zip(&mut clients) {
        assert_eq!(client.run(READ, 0, 0, 512).data, [number; 512]);
    }
    site.add("disk-50", 8192);
    assert_eq!(site.connect("disk-50").size, 8192);
    assert_eq!(site.exports[0].address(), site.socket.to_str().unwrap());
}

#[test]
fn a_client_that_names_no_export_gets_the_default_one_if_there_is_one() {
    let mut site = Site::new(|config| config);
    site.add("a", 4096);
    assert_eq!(go(&mut site.client(), ""), UNKNOWN);
    let mut client = site.client();
    assert_eq!((go(&mut client, "b"), go(&mut client, "a")), (UNKNOWN, ACK), "a client may try again");
    // This option has no answer but the end.
    let mut old = site.client();
    old.send_option(1, b"");
    assert!(old.is_disconnected());
    let mut site = Site::new(|config| PortalConfig { default: Some("b".into()), ..config });
    site.add("a", 4096);
    assert_eq!(go(&mut site.client(), ""), UNKNOWN, "the default export has not started");
    site.add("b", 8192);
    assert_eq!((site.connect("").size, site.connect("a").size), (8192, 4096));
    assert_eq!(site.listed(), ["a", "b"]);
}

#[test]
fn a_removal_returns_when_no_write_of_its_clients_is_in_flight() {
    let mut site = Site::new(|config| config);
    let device = Arc::new(SlowDevice::new(MIB));
    device.hold();
    let export = site.start("slow", device.clone(), |config| config).unwrap();
    site.add("other", 4096);
    let (mut client, mut other) = (site.connect("slow"), site.connect("other"));
    client.send_write(0, 1, 0, &[9; 512]);
    wait_until(|| device.in_flight() == 1);
    let removal = std::thread::spawn(move || drop(export));
    wait_until(|| go(&mut site.client(), "slow") == UNKNOWN);
    // The others are served meanwhile, and the name is free.
    assert_eq!(other.run(READ, 0, 0, 512).error, 0);
    site.add("slow", 8192);
    assert_eq!(site.connect("slow").size, 8192);
    assert!(!removal.is_finished() && device.in_flight() == 1);
    device.release();
    removal.join().unwrap();
    assert_eq!((device.in_flight(), device.bytes(0, 512)), (0, vec![9; 512]));
    // A request after the end does not reach the device.
    let late = client.request(WRITE, 0, 2, 512, 512);
    let _ = client.stream.write_all(&[&late[..], &[8; 512]].concat());
    assert_eq!(device.bytes(512, 512), (512..1024).map(pattern).collect::<Vec<_>>());
}

#[test]
fn clients_wait_until_the_portal_accepts() {
    let mut site = Site::closed(|config| config);
    let mut early = Client::silent(&site.socket);
    site.add("a", 4096);
    site.portal.accept().unwrap();
    std::io::Read::read_exact(&mut early.stream, &mut [0; 18]).unwrap();
    early.stream.write_all(&[0, 0, 0, 3]).unwrap();
    assert_eq!(go(&mut early, "a"), ACK);
    site.portal.close();
    assert_eq!(early.run(READ, 0, 0, 512).error, 0, "those that are connected stay");
    assert!(std::os::unix::net::UnixStream::connect(&site.socket).is_err());
}

#[test]
fn an_export_and_the_portal_bound_their_connections() {
    let mut site = Site::new(|config| PortalConfig { clients: 3, ..config });
    let device = || Arc::new(MemDevice::new(&MemOptions::new(4096)).unwrap());
    let few = site.start("few", device(), |config| Config { clients: 1, ..config }).unwrap();
    site.add("many", 4096);
    let _few = site.connect("few");
    wait_until(|| few.stats().clients() == 1);
    assert!(site.connect("few").is_disconnected());
    let _many = [site.connect("many"), site.connect("many")];
    wait_until(|| site.portal.connections().eq([3]));
    assert!(Client::silent(&site.socket).is_disconnected(), "the portal has no slot");
    drop(few);
    wait_until(|| site.portal.connections().eq([2]));
    assert_eq!(site.connect("many").run(READ, 0, 0, 512).error, 0);
}

#[test]
fn a_key_leads_to_the_exports_for_its_identity() {
    let keys = tempfile::tempdir().unwrap();
    let [alice, bob] =
        ["alice:aa", "bob:bb"].map(|key| format!("{key}{}\n", &key[key.len() - 1..].repeat(30)));
    secrets::write(&keys.path().join("all"), format!("{alice}{bob}")).unwrap();
    secrets::write(&keys.path().join("one"), &bob).unwrap();
    let security = |file: &str| Security {
        server: tls::Server::with_keys(&keys.path().join(file)).unwrap(),
        is_required: true,
    };
    let mut site = Site::new(|config| PortalConfig { tls: Some(security("all")), ..config });
    let device = || Arc::new(MemDevice::new(&MemOptions::new(4096)).unwrap());
    let only = |name: &str| Some([name.into()].into());
    let of_alice =
        site.start("a", device(), |config| Config { identities: only("alice"), ..config }).unwrap();
    site.add("all", 4096);
    let queue = site.with_key("a", &keys, "alice").unwrap();
    assert!(site.with_key("all", &keys, "alice").is_ok() && site.with_key("all", &keys, "bob").is_ok());
    let refused = site.with_key("a", &keys, "bob").err().expect("it is not for bob").to_string();
    assert!(refused.contains("has no export \"a\" (no such export: "), "{refused}");
    assert_eq!(go(&mut site.client(), "all"), 0x8000_0005, "TLS is required");
    // Other keys: those that are connected stay.
    let error = of_alice.set_security(security("one")).unwrap_err().to_string();
    assert!(error.contains("the portal has TLS"), "{error}");
    site.portal.set_security(security("one")).unwrap();
    assert!(site.with_key("a", &keys, "alice").is_err() && site.with_key("all", &keys, "bob").is_ok());
    assert!(queue.is_connected() && of_alice.stats().clients() == 1);
}

#[test]
fn an_export_that_cannot_be_at_a_portal_is_refused_by_name() {
    let mut site = Site::new(|config| config);
    site.add("a", 4096);
    let device = || Arc::new(MemDevice::new(&MemOptions::new(4096)).unwrap());
    let refused = |name: &str, change: &dyn Fn(Config) -> Config| {
        site.start(name, device(), change).err().expect("impossible").to_string()
    };
    let same = |config: Config| config;
    assert!(refused("a", &same).contains("portal site: export name \"a\" exists already"));
    assert!(refused("", &same).contains("an empty export name"));
    let said = refused("b", &|config| Config { identities: Some(["x".into()].into()), ..config });
    assert!(said.contains("portal site: export name \"b\": identities need TLS with keys"), "{said}");
    let files = tempfile::tempdir().unwrap();
    tls::authority::write_all(files.path());
    let server = tls::Server::with_certificates(files.path(), false).unwrap();
    let security = Security { server, is_required: true };
    let said = refused("b", &|config| Config { tls: Some(security.clone()), ..config });
    assert!(said.contains("TLS of its own: the portal has TLS"), "{said}");
    let said = site.portal.set_security(security.clone()).unwrap_err().to_string();
    assert!(said.contains("nbd:site: it has no TLS"), "{said}");
    assert_eq!((site.portal.exports(), site.listed()), (1, vec!["a".to_owned()]));
}

#[test]
fn a_client_that_asks_for_long_lists_gets_them_one_after_the_other() {
    let mut site = Site::new(|config| config);
    let description = "x".repeat(4096);
    for number in 0..200 {
        let device = Arc::new(MemDevice::new(&MemOptions::new(4096)).unwrap());
        let described = |config| Config { description: description.clone(), ..config };
        let export = site.start(&format!("disk-{number}"), device, described).unwrap();
        site.exports.push(export);
    }
    let list = b"IHAVEOPT\0\0\0\x03\0\0\0\0";
    let abort = b"IHAVEOPT\0\0\0\x02\0\0\0\0";
    let mut client = site.client();
    client.stream.write_all(&[&list.repeat(5)[..], abort].concat()).unwrap();
    let mut said = Vec::new();
    std::io::Read::read_to_end(&mut client.stream, &mut said).unwrap();
    let (mut entries, mut acks, mut at) = (0, 0, 0);
    while at < said.len() {
        let number = |from: usize| u32::from_be_bytes(said[at + from..at + from + 4].try_into().unwrap());
        match number(12) {
            2 => entries += 1,
            kind => {
                assert_eq!(kind, ACK);
                acks += 1;
            }
        }
        at += 20 + number(16) as usize;
    }
    assert_eq!((entries, acks), (5 * 200, 5 + 1));
    assert_eq!(site.connect("disk-7").form, Form::Simple);
}
