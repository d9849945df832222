//! Many subsystems behind one listener.

use crate::host::{HOST, HOST_ID, Host, Pdu};
use crate::server::{MIB, only, wait_until};
use block::{Device, Limits};
use conformance::slow::SlowDevice;
use drivers::mem::{MemDevice, Options as MemOptions};
use exports::Export;
use exports_nvme_tcp::{
    Access, AccessState, Address, Config, HostSecrets, NamespaceConfig, Nqn, NvmeTcp, PortConfig, Portal,
    PortalConfig,
};
use nvme::command::event::{CONFIG_DISCOVERY_LOG, Event};
use nvme::command::{cns, feature, log_page};
use nvme::fabrics::discovery::{DiscoveryEntry, DiscoveryHeader};
use nvme::fabrics::{ANY_CONTROLLER, Connect, ConnectData, InvalidParameter, nqn};
use nvme::identify::controller_data::{ControllerData, oaes};
use nvme::tcp::{CapsuleCmd, Framing, IcReq};
use nvme::{Command, IdentifyData, Sgl, Status, SubmissionEntry};
use reactor::{CoreConfig, Cores, PollWindow};
use std::collections::VecDeque;
use std::io::Write;
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

const OTHER: &str = "nqn.2014-08.org.example:other";
const FIRST: &str = "nqn.2014-08.org.example:disk-a";
const SECOND: &str = "nqn.2014-08.org.example:disk-b";

/// A portal and its exports. The cores are dropped last.
pub struct Site {
    pub exports: Vec<NvmeTcp>,
    pub portal: Arc<Portal>,
    pub cores: Cores,
}

impl Site {
    /// A portal that accepts hosts, without exports.
    pub fn new(change: impl FnOnce(PortalConfig) -> PortalConfig) -> Site {
        let site = Site::closed(change);
        site.portal.accept().unwrap();
        site
    }

    /// A portal where hosts wait.
    fn closed(change: impl FnOnce(PortalConfig) -> PortalConfig) -> Site {
        let core = CoreConfig { poll: PollWindow::up_to(20_000), ..CoreConfig::default() };
        let cores = Cores::start(&vec![core; 2]).unwrap();
        let port = PortConfig { address: Address::Tcp("127.0.0.1:0".into()), state: AccessState::Optimized };
        let portal = Portal::bind(cores.all(), change(PortalConfig::new("site".into(), vec![port]))).unwrap();
        Site { exports: Vec::new(), portal, cores }
    }

    pub fn address(&self) -> &str {
        self.portal.addresses().next().unwrap()
    }

    /// Exports a small disk.
    pub fn add(&mut self, subsystem: &str, change: impl FnOnce(Config) -> Config) {
        let device = Arc::new(MemDevice::new(&MemOptions::new(MIB)).unwrap());
        let export = self.start(subsystem, device, change).unwrap();
        self.exports.push(export);
    }

    fn start(
        &self,
        subsystem: &str,
        device: Arc<dyn Device>,
        change: impl FnOnce(Config) -> Config,
    ) -> Result<NvmeTcp, exports::Error> {
        let config = change(Config::at_portal(self.portal.clone(), Nqn::new(subsystem).unwrap()));
        NvmeTcp::start(&[NamespaceConfig { device, uuid: None }], self.cores.all(), config)
    }

    /// A host with an admin queue that is enabled, and an I/O queue.
    fn connect(&self, subsystem: &str, name: &str) -> (Host, Host) {
        let mut admin = Host::admin_of(self.address(), subsystem, identity(name));
        admin.enable();
        let io = admin.io_queue_of(subsystem, 1, 32);
        (admin, io)
    }

    /// How the Connect of an admin queue ends.
    fn knock(&self, subsystem: &str, name: &str) -> (Status, u64) {
        let mut host = Host::initialized(self.address(), false, false).of(identity(name));
        let done = host.connect(subsystem, 0, 32, ANY_CONTROLLER, 0);
        (done.status, done.result)
    }

    /// The subsystems that a host discovers.
    fn discovered(&self, name: &str) -> Vec<String> {
        let mut host = Host::admin_of(self.address(), nqn::DISCOVERY, identity(name));
        host.enable();
        discovered_by(&mut host)
    }
}

fn identity(name: &str) -> (Nqn, [u8; 16]) {
    (Nqn::new(name).unwrap(), HOST_ID)
}

/// A Connect to an unknown subsystem.
const UNKNOWN: (Status, u64) = (Status::CONNECT_INVALID_PARAMETERS, InvalidParameter::SUBSYSTEM.result());

/// The subsystems in a discovery log, which must begin with the discovery subsystem.
pub fn discovered_by(host: &mut Host) -> Vec<String> {
    let mut page = read_log(host, 0, 1024);
    let records = DiscoveryHeader::parse(page[..].try_into().unwrap()).records;
    let mut names = Vec::new();
    for place in 0..records {
        // In parts that are no whole records, as hosts may read.
        page = read_log(host, 1024 * (place + 1), 768);
        page.extend(read_log(host, 1024 * (place + 1) + 768, 256));
        let entry = DiscoveryEntry::parse(page[..].try_into().unwrap()).unwrap();
        assert_eq!(format!("{}:{}", entry.address, entry.service), host.address);
        names.push(entry.subsystem.as_str().to_owned());
    }
    assert_eq!(names.remove(0), nqn::DISCOVERY);
    names
}

fn read_log(host: &mut Host, offset: u64, len: u32) -> Vec<u8> {
    let done = host.run(&Command::get_log_page_from(0, log_page::DISCOVERY, offset, len), len);
    assert_eq!((done.status, done.data.len()), (Status::SUCCESS, len as usize));
    done.data
}

#[test]
fn each_subsystem_has_its_own_blocks_and_an_unknown_one_is_refused() {
    let mut site = Site::new(|config| config);
    site.add(FIRST, |config| config);
    site.add(SECOND, |config| config);
    let (mut first, mut first_io) = site.connect(FIRST, HOST);
    let (_second, mut second_io) = site.connect(SECOND, HOST);
    assert_eq!(first_io.write(0, &[1; 512]), Status::SUCCESS);
    assert_eq!(second_io.write(0, &[2; 512]), Status::SUCCESS);
    assert_eq!((first_io.read(0, 1), second_io.read(0, 1)), (vec![1; 512], vec![2; 512]));
    let data: IdentifyData =
        first.run(&Command::identify(0, cns::CONTROLLER, 0), 4096).data.try_into().unwrap();
    assert_eq!(ControllerData::parse(&data).subsystem, FIRST);
    assert_eq!(site.knock("nqn.2014-08.org.example:none", HOST), UNKNOWN);
    // A queue of one subsystem's controller is no queue of another's.
    let mut stray = Host::initialized(site.address(), false, false);
    let done = stray.connect(SECOND, 2, 32, first.controller + 1, 0);
    assert_eq!(
        (done.status, done.result),
        (Status::CONNECT_INVALID_PARAMETERS, InvalidParameter::CONTROLLER_ID.result())
    );
    assert_eq!(site.exports[0].stats().clients(), 2);
    assert_eq!(site.exports[0].addresses().collect::<Vec<_>>(), [site.address()]);
    assert_eq!(site.portal.subsystems(), 2);
}

#[test]
fn a_host_discovers_the_subsystems_that_it_may_use() {
    let mut site = Site::new(|config| config);
    assert_eq!(site.discovered(HOST), [""; 0]);
    site.add(FIRST, |config| Config { access: only(&[HOST]), ..config });
    site.add(SECOND, |config| Config { access: only(&[HOST, OTHER]), ..config });
    assert_eq!(site.discovered(HOST), [FIRST, SECOND]);
    assert_eq!(site.discovered(OTHER), [SECOND]);
    assert_eq!(site.discovered("nqn.2014-08.org.example:stranger"), [""; 0]);
    assert_eq!(site.knock(FIRST, OTHER).0, Status::CONNECT_INVALID_HOST);
    site.exports[0].set_access(only(&[OTHER])).unwrap();
    assert_eq!(
        (site.discovered(HOST), site.discovered(OTHER)),
        (vec![SECOND.into()], vec![FIRST.into(), SECOND.into()])
    );
    assert_eq!(site.knock(FIRST, HOST).0, Status::CONNECT_INVALID_HOST);
    site.exports.remove(0);
    assert_eq!(site.discovered(OTHER), [SECOND]);
    assert_eq!(site.knock(FIRST, OTHER), UNKNOWN);
}

#[test]
fn exports_come_and_go_while_others_are_in_use() {
    let mut site = Site::new(|config| config);
    site.add(FIRST, |config| config);
    let (_admin, mut io) = site.connect(FIRST, HOST);
    for round in 0..5 {
        site.add(SECOND, |config| config);
        let (mut admin, mut other) = site.connect(SECOND, HOST);
        assert_eq!(other.write(0, &[round; 512]), Status::SUCCESS);
        assert_eq!(io.write(0, &[round; 512]), Status::SUCCESS);
        drop(site.exports.pop());
        assert!(admin.is_disconnected() && other.is_disconnected());
        assert_eq!(io.read(0, 1), [round; 512], "its connection is the same");
        assert_eq!(site.knock(SECOND, HOST), UNKNOWN);
    }
    let device = Arc::new(MemDevice::new(&MemOptions::new(MIB)).unwrap());
    let said = site.start(FIRST, device, |config| config).err().unwrap().to_string();
    assert!(said.contains(&format!("portal site: subsystem {FIRST} exists already")), "{said}");
    assert_eq!(io.write(0, &[9; 512]), Status::SUCCESS);
}

#[test]
fn an_export_ends_when_its_requests_have_and_keeps_no_device() {
    let site = Site::new(|config| config);
    let device = Arc::new(SlowDevice::with_limits(Limits::new(MIB)));
    let export = site.start(FIRST, device.clone(), |config| config).unwrap();
    let (_admin, mut io) = site.connect(FIRST, HOST);
    device.hold();
    let id = io.id();
    let write =
        SubmissionEntry::new(&Command::write(1, 0, 1, false), id, Sgl::InCapsule { offset: 0, len: 512 });
    io.send_with(write, &[7; 512]);
    wait_until(|| device.in_flight() == 1);
    device.release_soon();
    drop(export);
    assert_eq!(device.in_flight(), 0);
    assert_eq!(Arc::strong_count(&device), 1, "neither the portal nor a connection keeps it");
}

#[test]
fn a_handshake_with_an_export_that_ends_ends_with_it() {
    let mut site = Site::new(|config| config);
    let device = Arc::new(MemDevice::new(&MemOptions::new(MIB)).unwrap());
    let secrets = HostSecrets {
        nqn: HOST.into(),
        dhchap: Some("DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:".to_owned().into()),
        dhchap_ctrl: None,
        tls_psk: None,
    };
    let access = Access::default().with_secrets(&[secrets]).unwrap();
    let export = site.start(FIRST, device.clone(), |config| Config { access, ..config }).unwrap();
    site.add(SECOND, |config| config);
    // It is to authenticate, and does not.
    let mut pending = Host::initialized(site.address(), false, false);
    assert_eq!(pending.connect(FIRST, 0, 32, ANY_CONTROLLER, 0).status, Status::SUCCESS);
    let mut undecided = Host::initialized(site.address(), false, false);
    drop(export);
    assert_eq!(Arc::strong_count(&device), 1);
    assert!(pending.is_disconnected());
    assert_eq!(undecided.connect(SECOND, 0, 32, ANY_CONTROLLER, 0).status, Status::SUCCESS);
}

/// Sends all that opens an admin queue, and does not wait for an answer.
fn rush(address: &str, subsystem: &str) -> Option<TcpStream> {
    let mut stream = TcpStream::connect(address).ok()?;
    let request = IcReq { align_bytes: 4, header_digest: false, data_digest: false, max_r2t: 1 };
    let mut bytes = request.encode().to_vec();
    let connect = Connect { record_format: 0, queue_id: 0, entries: 32, attributes: 0, keep_alive_ms: 0 };
    let entry = connect.entry(1, Sgl::InCapsule { offset: 0, len: 1024 });
    let mut front = [0; 128];
    let capsule = CapsuleCmd { entry: entry.encode(), data_len: 1024 };
    let len = capsule.encode(&Framing { align_bytes: 4, ..Framing::default() }, &mut front);
    bytes.extend(&front[..len]);
    let (host, subsystem) = (Nqn::new(HOST).unwrap(), Nqn::new(subsystem).unwrap());
    bytes.extend(ConnectData { host_id: HOST_ID, controller_id: ANY_CONTROLLER, subsystem, host }.encode());
    stream.write_all(&bytes).ok()?;
    Some(stream)
}

#[test]
fn hosts_that_connect_while_an_export_ends_keep_nothing_of_it() {
    let site = Site::new(|config| config);
    let device = Arc::new(MemDevice::new(&MemOptions::new(MIB)).unwrap());
    let (is_over, address) = (Arc::new(AtomicBool::new(false)), site.address().to_owned());
    let flag = is_over.clone();
    let crowd = std::thread::spawn(move || {
        let mut connected = VecDeque::new();
        while !flag.load(Ordering::Relaxed) {
            connected.extend(rush(&address, FIRST));
            if connected.len() > 16 {
                connected.pop_front();
            }
        }
    });
    let mut hosts = 0;
    while hosts < 200 {
        let export = site.start(FIRST, device.clone(), |config| config).unwrap();
        wait_until(|| export.stats().connections() > 0);
        hosts += export.stats().connections();
        drop(export);
        assert_eq!(Arc::strong_count(&device), 1);
    }
    is_over.store(true, Ordering::Relaxed);
    crowd.join().unwrap();
    assert_eq!(site.portal.subsystems(), 0);
}

#[test]
fn a_persistent_discovery_connection_reports_each_change_once() {
    let mut site = Site::new(|config| config);
    let mut visitor = Host::admin(site.address(), nqn::DISCOVERY);
    visitor.enable();
    let data: IdentifyData =
        visitor.run(&Command::identify(0, cns::CONTROLLER, 0), 4096).data.try_into().unwrap();
    assert_eq!(ControllerData::parse(&data).async_events, oaes::DISCOVERY_LOG);
    let enable = Command::set_features(feature::ASYNC_EVENT_CONFIGURATION, CONFIG_DISCOVERY_LOG);
    assert_eq!(visitor.run(&enable, 0).status, Status::SUCCESS);
    let expect = |visitor: &mut Host, change: &mut dyn FnMut()| {
        let id = visitor.id();
        visitor.send(SubmissionEntry::new(&Command::async_event_request(), id, Sgl::None));
        change();
        let Pdu::Response(entry) = visitor.receive() else { panic!("no event") };
        assert_eq!(Event::parse(entry.result as u32), Event::DISCOVERY_LOG);
        // It is reported again once the log was read.
        read_log(visitor, 0, 1024);
    };
    expect(&mut visitor, &mut || site.add(FIRST, |config| config));
    expect(&mut visitor, &mut || site.add(SECOND, |config| config));
    expect(&mut visitor, &mut || site.exports[0].set_access(only(&[OTHER])).unwrap());
    expect(&mut visitor, &mut || drop(site.exports.remove(0)));
    assert_eq!(discovered_by(&mut visitor), [SECOND]);
}

#[test]
fn a_portal_has_a_limit_of_connections_and_each_export_its_own() {
    let mut site = Site::new(|config| PortalConfig { clients: 5, ..config });
    site.add(FIRST, |config| Config { clients: 3, ..config });
    site.add(SECOND, |config| config);
    let hosts: Vec<Host> = (0..3).map(|_| Host::admin(site.address(), FIRST)).collect();
    assert_eq!(site.knock(FIRST, HOST).0, Status::CONNECT_CONTROLLER_BUSY);
    let others: Vec<Host> = (0..2).map(|_| Host::admin(site.address(), SECOND)).collect();
    assert_eq!(site.knock(SECOND, HOST).0, Status::CONNECT_CONTROLLER_BUSY);
    assert_eq!(site.discovered(HOST), [FIRST, SECOND], "discovery does not count");
    drop(hosts);
    wait_until(|| site.exports[0].stats().clients() == 0);
    assert_eq!(site.knock(SECOND, HOST).0, Status::SUCCESS);
    drop(others);
    for (config, fault) in [
        (PortalConfig { clients: 0, ..PortalConfig::new("p".into(), vec![]) }, "portal p: 0 addresses"),
        (PortalConfig { ports: vec![], ..PortalConfig::new("p".into(), vec![]) }, "want 1 to 16"),
    ] {
        let said = Portal::bind(site.cores.all(), config).err().unwrap().to_string();
        assert!(said.contains(fault), "{said}");
    }
}

#[test]
fn hosts_wait_at_a_portal_until_it_accepts_them() {
    let mut site = Site::closed(|config| config);
    let address = site.address().to_owned();
    let waiting = std::thread::spawn(move || Host::admin(&address, FIRST).get(0x1c, 4).status);
    // It is connected, and no subsystem is refused meanwhile.
    let early = TcpStream::connect(site.address()).unwrap();
    site.add(FIRST, |config| config);
    site.portal.accept().unwrap();
    site.portal.accept().unwrap();
    assert_eq!(waiting.join().unwrap(), Status::SUCCESS);
    drop(early);
}

#[test]
fn connects_that_choose_nothing_sensible_change_nothing() {
    let mut site = Site::new(|config| config);
    site.add(FIRST, |config| config);
    let connect = Connect { record_format: 0, queue_id: 0, entries: 32, attributes: 0, keep_alive_ms: 0 };
    let data = ConnectData {
        host_id: HOST_ID,
        controller_id: ANY_CONTROLLER,
        subsystem: Nqn::new(FIRST).unwrap(),
        host: Nqn::new(HOST).unwrap(),
    };
    let good = data.encode();
    let refuse = |bytes: [u8; 1024], connect: &Connect| {
        let mut host = Host::initialized(site.address(), false, false);
        let id = host.id();
        host.send_with(connect.entry(id, Sgl::InCapsule { offset: 0, len: 1024 }), &bytes);
        let done = host.finish(id);
        assert_ne!(done.status, Status::SUCCESS);
        assert!(host.is_disconnected());
        done
    };
    // Names without an end, empty, with control characters, that are prefixes or longer.
    for name in [
        &[b'n'; 256][..],
        b"\0",
        b"nqn.\x01\0",
        &FIRST.as_bytes()[..20],
        b"nqn.2014-08.org.example:disk-a2\0",
    ] {
        let mut bytes = good;
        bytes[256..512].fill(0);
        bytes[256..256 + name.len()].copy_from_slice(name);
        assert_eq!(refuse(bytes, &connect).status, Status::CONNECT_INVALID_PARAMETERS, "{name:?}");
    }
    assert_eq!(refuse([0; 1024], &connect).status, Status::CONNECT_INVALID_PARAMETERS);
    refuse([0xff; 1024], &connect);
    let format = Connect { record_format: 1, ..connect };
    assert_eq!(refuse(good, &format).status, Status::CONNECT_INCOMPATIBLE_FORMAT);
    // Discovery has no I/O queues.
    let visitor = Host::admin(site.address(), nqn::DISCOVERY);
    let mut stray = Host::initialized(site.address(), false, false);
    let done = stray.connect(nqn::DISCOVERY, 1, 32, visitor.controller, 0);
    assert_eq!(done.result, InvalidParameter::CONTROLLER_ID.result());
    let (_admin, mut io) = site.connect(FIRST, HOST);
    assert_eq!(io.write(0, &[1; 512]), Status::SUCCESS);
}

#[test]
fn a_host_connects_to_a_hundred_subsystems_and_uses_each() {
    let mut site = Site::new(|config| config);
    let names: Vec<String> = (0..100).map(|disk| format!("nqn.2014-08.org.example:disk-{disk:03}")).collect();
    names.iter().for_each(|name| site.add(name, |config| config));
    let found = site.discovered(HOST);
    assert_eq!(found, names);
    let mut hosts: Vec<(Host, Host)> = found.iter().map(|name| site.connect(name, HOST)).collect();
    for (place, (_, io)) in hosts.iter_mut().enumerate() {
        assert_eq!(io.write(0, &[place as u8; 512]), Status::SUCCESS);
    }
    for (place, (_, io)) in hosts.iter_mut().enumerate() {
        assert_eq!(io.read(0, 1), [place as u8; 512]);
    }
    // Both cores serve.
    let served = |core: usize| -> u64 {
        site.exports.iter().map(|export| export.stats().queues[core].bytes_written()).sum()
    };
    assert_eq!((served(0), served(1)), (50 * 512, 50 * 512));
}

#[test]
fn a_thousand_subsystems_are_listed_in_parts() {
    let mut site = Site::new(|config| config);
    let device: Arc<dyn Device> = Arc::new(MemDevice::new(&MemOptions::new(MIB)).unwrap());
    for disk in 0..1000 {
        // Every other one is for this host.
        let access = if disk % 2 == 0 { only(&[HOST]) } else { only(&[OTHER]) };
        let name = format!("nqn.2014-08.org.example:disk-{disk:04}");
        let export = site.start(&name, device.clone(), |config| Config { access, ..config }).unwrap();
        site.exports.push(export);
    }
    let mut visitor = Host::admin(site.address(), nqn::DISCOVERY);
    visitor.enable();
    let names = discovered_by(&mut visitor);
    let expected: Vec<String> =
        (0..1000).step_by(2).map(|disk| format!("nqn.2014-08.org.example:disk-{disk:04}")).collect();
    assert_eq!(names, expected);
    // In one part, as long as a command may be.
    let whole = read_log(&mut visitor, 0, 502 * 1024);
    let last = DiscoveryEntry::parse(whole[501 * 1024..].try_into().unwrap()).unwrap();
    assert_eq!(last.subsystem.as_str(), expected[499]);
    let behind = Command::get_log_page_from(0, log_page::DISCOVERY, 502 * 1024 + 4, 64);
    assert_eq!(visitor.run(&behind, 64).status, Status::INVALID_FIELD);
}
