//! Hosts that lose their access, and hosts that get it, while the export serves.

use crate::host::{HOST, HOST_ID, Host, Pdu};
use crate::server::{MIB, SUBSYSTEM, Server, only, wait_until};
use block::{Device, Flags, Op};
use drivers_nvme_tcp::{Address, Nqn, NvmeTcpDevice, Options, parse_address};
use exports::Export;
use exports_nvme_tcp::{Access, Config, Hosts};
use nvme::command::log_page;
use nvme::fabrics::discovery::DiscoveryHeader;
use nvme::fabrics::{ANY_CONTROLLER, nqn};
use nvme::{Command, Sgl, Status, SubmissionEntry};
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

const OTHER: &str = "nqn.2014-08.org.example:other";

fn identity(name: &str) -> (Nqn, [u8; 16]) {
    (Nqn::new(name).unwrap(), HOST_ID)
}

/// A host with an admin queue that is enabled, and an I/O queue.
fn connect(server: &Server, name: &str) -> (Host, Host) {
    let mut admin = Host::admin_of(server.address(), SUBSYSTEM, identity(name));
    admin.enable();
    let io = admin.io_queue(1, 32);
    (admin, io)
}

/// How a Connect to a subsystem ends.
fn knock(server: &Server, name: &str) -> Status {
    let mut host = Host::initialized(server.address(), false, false).of(identity(name));
    host.connect(SUBSYSTEM, 0, 32, ANY_CONTROLLER, 0).status
}

/// The generation of the discovery log page of a host, and its number of entries.
fn discovered(server: &Server, name: &str) -> (u64, u64) {
    let mut host = Host::admin_of(server.address(), nqn::DISCOVERY, identity(name));
    host.enable();
    let page = host.run(&Command::get_log_page(0, log_page::DISCOVERY, 0, 1024), 1024);
    let header = DiscoveryHeader::parse(page.data[..].try_into().unwrap());
    (header.generation, header.records)
}

#[test]
fn a_removed_host_is_disconnected_and_refused_and_others_stay() {
    let server = Server::with(MIB, |config| Config { access: only(&[HOST, OTHER]), ..config });
    let ((mut admin, mut io), (_other, mut other_io)) = (connect(&server, HOST), connect(&server, OTHER));
    assert_eq!((discovered(&server, HOST), discovered(&server, OTHER)), ((1, 2), (1, 2)));
    server.export().set_access(only(&[OTHER])).unwrap();
    assert!(admin.is_disconnected() && io.is_disconnected());
    assert_eq!(knock(&server, HOST), Status::CONNECT_INVALID_HOST);
    assert_eq!((discovered(&server, HOST), discovered(&server, OTHER)), ((2, 1), (2, 2)));
    assert_eq!(other_io.write(0, &[2; 512]), Status::SUCCESS, "its connection is the same");
    // No host at all, and then the first one again.
    server.export().set_access(only(&[])).unwrap();
    assert!(other_io.is_disconnected());
    assert_eq!(knock(&server, OTHER), Status::CONNECT_INVALID_HOST);
    server.export().set_access(only(&[HOST])).unwrap();
    assert_eq!(connect(&server, HOST).1.write(0, &[1; 512]), Status::SUCCESS);
    server.wait_for_clients(0);
}

#[test]
fn the_first_listed_host_of_an_open_export_ends_the_access_of_the_others() {
    let server = Server::start(MIB);
    let ((_admin, mut io), (_other, mut other_io)) = (connect(&server, HOST), connect(&server, OTHER));
    server.export().set_access(only(&[HOST])).unwrap();
    assert_eq!(io.write(0, &[1; 512]), Status::SUCCESS);
    assert!(other_io.is_disconnected());
    assert_eq!(knock(&server, OTHER), Status::CONNECT_INVALID_HOST);
}

#[test]
fn a_removal_returns_after_the_writes_of_all_queues_also_of_a_controller_that_is_gone() {
    let server = Server::with(MIB, |config| Config { access: only(&[HOST, OTHER]), ..config });
    let (admin, mut io) = connect(&server, HOST);
    // The second queue is on another core.
    let mut second = admin.io_queue(2, 32);
    server.device.hold();
    for io in [&mut io, &mut second] {
        let id = io.id();
        let write = Command::write(1, 0, 1, false);
        io.send_with(SubmissionEntry::new(&write, id, Sgl::InCapsule { offset: 0, len: 512 }), &[1; 512]);
    }
    wait_until(|| server.device.in_flight() == 2);
    drop(admin);
    server.device.release_soon();
    server.export().set_access(only(&[OTHER])).unwrap();
    assert_eq!(server.device.in_flight(), 0);
}

#[test]
fn data_of_a_command_from_before_a_removal_is_not_written_after_it() {
    let server = Server::with(MIB, |config| Config { access: only(&[HOST, OTHER]), ..config });
    let (_admin, mut io) = connect(&server, HOST);
    let id = io.id();
    io.send(SubmissionEntry::new(&Command::write(1, 0, 64, false), id, Sgl::Transport { len: 32 << 10 }));
    let Pdu::R2t(request) = io.receive() else { panic!("no R2T") };
    server.export().set_access(only(&[OTHER])).unwrap();
    server.export().set_access(only(&[HOST, OTHER])).unwrap();
    // The access that it has again is that of new connections.
    let before = server.device.bytes(0, 512);
    let header =
        nvme::tcp::H2cData { command_id: id, tag: request.tag, offset: 0, len: 32 << 10, is_last: true };
    let mut pdu = [0; 128];
    let len = header.encode(&io.framing, &mut pdu);
    let _ = io.stream.write_all(&[&pdu[..len], &[1; 32 << 10]].concat()); // may fail
    assert!(io.is_disconnected());
    server.wait_for_clients(0);
    assert_eq!(server.device.bytes(0, 512), before);
}

/// Tasks of one queue, each of which writes a growing number to its block until a write fails.
const TASKS: usize = 4;

/// The last number that each block acknowledged, and the thread that writes.
struct Load {
    acknowledged: Arc<[AtomicU64; TASKS]>,
    thread: JoinHandle<()>,
}

/// Writes to [`TASKS`] blocks from block `first` on, until a write fails or `stop` is set.
fn load(device: &Arc<NvmeTcpDevice>, first: usize, stop: &Arc<AtomicBool>) -> Load {
    let acknowledged: Arc<[AtomicU64; TASKS]> = Arc::default();
    let (device, counts, stop) = (device.clone(), acknowledged.clone(), stop.clone());
    let thread = std::thread::spawn(move || {
        reactor::run(async move {
            let Ok(channel) = device.open_channel() else { return };
            let left = std::rc::Rc::new(std::cell::Cell::new(TASKS));
            for task in 0..TASKS {
                let (channel, counts, stop, left) =
                    (channel.clone(), counts.clone(), stop.clone(), left.clone());
                reactor::current().spawn(async move {
                    let mut buffer = reactor::current().buffers().take(512).await;
                    for number in 1u64.. {
                        let bytes = number.to_le_bytes().repeat(64);
                        buffer.as_mut_slice()[..512].copy_from_slice(&bytes);
                        let offset = (first + task) as u64 * 512;
                        let (back, result) = buffer.transfer(&*channel, Op::Write, Flags::NONE, offset).await;
                        buffer = back;
                        if result.is_err() || stop.load(Ordering::Relaxed) {
                            break;
                        }
                        counts[task].store(number, Ordering::SeqCst);
                    }
                    left.set(left.get() - 1);
                });
            }
            while left.get() > 0 {
                reactor::current().sleep(100_000).await;
            }
        });
    });
    Load { acknowledged, thread }
}

fn initiator(server: &Server, name: &str, loss_timeout_s: u32) -> Arc<NvmeTcpDevice> {
    let address = parse_address(server.address()).unwrap();
    Arc::new(NvmeTcpDevice::open(&options(address, name, loss_timeout_s)).unwrap())
}

fn options(address: Address, name: &str, loss_timeout_s: u32) -> Options {
    Options {
        host_nqn: Some(Nqn::new(name).unwrap()),
        host_id: Some(HOST_ID),
        loss_timeout_s,
        keep_alive_s: 0,
        queues: 2,
        ..Options::new(address, Nqn::new(SUBSYSTEM).unwrap())
    }
}

/// The numbers in the blocks of a [`Load`].
fn stored(server: &Server, first: usize) -> [u64; TASKS] {
    std::array::from_fn(|task| {
        let bytes = server.device.bytes((first + task) as u64 * 512, 8);
        u64::from_le_bytes(bytes.try_into().unwrap())
    })
}

fn numbers(load: &Load) -> [u64; TASKS] {
    std::array::from_fn(|task| load.acknowledged[task].load(Ordering::SeqCst))
}

#[test]
fn under_load_no_write_of_a_removed_host_changes_the_device_after_the_removal() {
    const ROUNDS: u64 = 250;
    let server = Server::with(MIB, |config| Config { access: only(&[HOST, OTHER]), ..config });
    let (stop, never) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
    let steady = load(&initiator(&server, OTHER, 600), 100, &stop);
    for round in 0..ROUNDS {
        server.device.set_delay(20_000 + round * 37_000 % 500_000);
        let device = initiator(&server, HOST, 0);
        let queues = [0, TASKS].map(|first| load(&device, first, &never));
        wait_until(|| queues.iter().all(|queue| numbers(queue).iter().all(|number| *number > 0)));
        let before = numbers(&steady);
        server.export().set_access(only(&[OTHER])).unwrap();
        let at_return = [0, TASKS].map(|first| stored(&server, first));
        let acknowledged = queues.map(|queue| {
            let acknowledged = queue.acknowledged.clone();
            queue.thread.join().unwrap();
            std::array::from_fn::<u64, TASKS, _>(|task| acknowledged[task].load(Ordering::SeqCst))
        });
        wait_until(|| numbers(&steady).iter().zip(before).all(|(now, before)| *now > before + 2));
        let later = [0, TASKS].map(|first| stored(&server, first));
        assert_eq!(at_return, later, "round {round}: a write changed the device after the removal");
        for (acknowledged, stored) in acknowledged.iter().flatten().zip(at_return.iter().flatten()) {
            assert!(
                acknowledged <= stored,
                "round {round}: {acknowledged} is acknowledged, {stored} is there"
            );
        }
        server.export().set_access(only(&[HOST, OTHER])).unwrap();
        // Blocks begin at 0 in each round.
        assert_eq!(connect(&server, HOST).1.write(0, &[0; 2 * TASKS * 512]), Status::SUCCESS);
    }
    server.device.set_delay(0);
    let before = numbers(&steady);
    wait_until(|| numbers(&steady).iter().zip(before).all(|(now, before)| *now > before));
    stop.store(true, Ordering::Relaxed);
    steady.thread.join().unwrap();
}

#[test]
fn a_host_that_connects_all_the_time_writes_nothing_after_its_removal() {
    const ROUNDS: u32 = 60;
    let server = Server::with(MIB, |config| Config { access: only(&[OTHER]), ..config });
    server.device.set_delay(50_000);
    let address = parse_address(server.address()).unwrap();
    let (stop, attempts) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
    let knocking: Vec<_> = [0, TASKS]
        .map(|first| {
            let (stop, attempts, address) = (stop.clone(), attempts.clone(), address.clone());
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    if let Ok(device) = NvmeTcpDevice::open(&options(address.clone(), HOST, 0)) {
                        load(&Arc::new(device), first, &stop).thread.join().unwrap();
                    }
                    attempts.fetch_add(1, Ordering::SeqCst);
                }
            })
        })
        .into();
    let all = || [0, TASKS].map(|first| stored(&server, first));
    for round in 0..ROUNDS {
        let before = all();
        server.export().set_access(only(&[HOST, OTHER])).unwrap();
        if round % 2 == 0 {
            wait_until(|| all() != before);
        }
        server.export().set_access(only(&[OTHER])).unwrap();
        let (at_return, tried) = (all(), attempts.load(Ordering::SeqCst));
        wait_until(|| attempts.load(Ordering::SeqCst) > tried + 4);
        assert_eq!(all(), at_return, "round {round}");
    }
    stop.store(true, Ordering::Relaxed);
    knocking.into_iter().for_each(|thread| thread.join().unwrap());
    server.wait_for_clients(0);
}

#[test]
fn lists_of_hosts_are_read_as_they_are_written() {
    for text in ["nqn.a+nqn.b", "none", "nqn.a"] {
        assert_eq!(Hosts::parse(text).unwrap().to_string(), text);
    }
    assert_eq!(Access::default().hosts.to_string(), "any");
    assert!(Hosts::parse("nqn.a+").unwrap_err().to_string().contains("an NVMe name"));
    let many: Vec<String> = (0..1025).map(|i| format!("nqn.{i}")).collect();
    assert_eq!(Hosts::parse(&many.join("+")).unwrap_err().to_string(), "1025 hosts: want at most 1024");
}
