//! A vhost-user client whose server is killed and started again under load.

use crate::common::{PATIENCE, Server, path_value, run_json_in};
use block::{Device, Flags, MemoryRegion, Op, Request};
use reactor::{CoreConfig, CoreRef, Cores, Permits};
use stack::kinds::member::member;
use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 1024;
/// Requests at a time on each core.
const WRITERS: u64 = 8;
const MIB: u64 = 1 << 20;
const NQN: &str = "nqn.2014-08.org.example:disk";

/// The buffers of this program's cores, in memory that a server maps. All tests share it.
fn shared_buffers() -> MemoryRegion {
    static BUFFERS: OnceLock<MemoryRegion> = OnceLock::new();
    *BUFFERS.get_or_init(|| stack::passed::share_buffers(1 << 30).unwrap())
}

fn serve(folder: &Path, disk: &Path) -> Server {
    serve_at(folder, "s", &format!("io_uring:{}", path_value("path", disk)))
}

fn serve_at(folder: &Path, socket: &str, device: &str) -> Server {
    let export = format!("vhost-user-blk:{},queues=2", path_value("socket", &folder.join(socket)));
    Server::start_in(folder, &["--device", device, "--export", &export, "--cores", "0,1"]).0
}

/// A client of the server in `folder`.
fn open(folder: &Path, more: &str) -> Arc<dyn Device> {
    let buffers = shared_buffers();
    let spec =
        format!("virtio-blk-vhost-user:{},reconnect-delay=600{more}", path_value("path", &folder.join("s")));
    let device = member(&spec, false, false).unwrap().open().unwrap();
    device.map_region(&buffers).unwrap();
    device
}

/// State that a test and its writers share.
#[derive(Default)]
struct Load {
    is_enough: AtomicBool,
    completed: AtomicU64,
}

/// Content of a block.
fn content(block: u64, round: u8) -> Vec<u8> {
    let words = [block ^ 0x5eed_b10c, round.into()];
    words.iter().cycle().take(BLOCK as usize / 8).flat_map(|word| word.to_le_bytes()).collect()
}

/// Writes the blocks that are `part` modulo 2 again and again, each time with the number of the
/// round, and reads each one, until it is enough. Returns the last round.
fn write(core: &CoreRef, device: &Arc<dyn Device>, part: u64, load: &Arc<Load>) -> u8 {
    let (device, load) = (device.clone(), load.clone());
    let last = core.block_on(move |_| async move {
        let channel = device.open_channel().unwrap();
        let mut round = 0u8;
        while round == 0 || !load.is_enough.load(Ordering::SeqCst) {
            round = round % 250 + 1;
            let ended = Rc::new(Permits::new(0));
            for writer in 0..WRITERS {
                let (channel, load, ended) = (channel.clone(), load.clone(), ended.clone());
                reactor::current().spawn(async move {
                    for block in (2 * writer + part..BLOCKS).step_by(2 * WRITERS as usize) {
                        let (expected, flags) =
                            (content(block, round), if block % 16 < 2 { Flags::FUA } else { Flags::NONE });
                        let mut buffer = reactor::current().buffers().take(BLOCK as usize).await;
                        buffer.as_mut_slice().copy_from_slice(&expected);
                        let (mut buffer, written) =
                            buffer.transfer(&*channel, Op::Write, flags, block * BLOCK).await;
                        assert_eq!(written, Ok(()), "block {block}");
                        buffer.as_mut_slice().fill(0);
                        let (buffer, read) =
                            buffer.transfer(&*channel, Op::Read, Flags::NONE, block * BLOCK).await;
                        assert_eq!(read, Ok(()), "block {block}");
                        assert!(buffer.as_slice() == expected, "block {block} of round {round}");
                        load.completed.fetch_add(1, Ordering::SeqCst);
                    }
                    ended.release(1);
                });
            }
            ended.acquire(WRITERS as usize).await;
        }
        channel.submit(&Request::flush(), 0).await.unwrap();
        round
    });
    last.expect("the core runs")
}

/// Two cores. They must outlive the device, which may work after the last request.
fn two_cores() -> Cores {
    Cores::start(&[CoreConfig::default(), CoreConfig::default()]).unwrap()
}

/// Writes on two cores while the server is killed `kills` times. Returns the last round of each
/// core, and the server.
fn load_and_kill(
    cores: &Cores,
    device: &Arc<dyn Device>,
    kills: u32,
    serve: impl Fn() -> Server,
    first: Server,
) -> ([u8; 2], Server) {
    let load = Arc::new(Load::default());
    let mut server = first;
    std::thread::scope(|scope| {
        let writing = [0, 1].map(|part| {
            let load = load.clone();
            scope.spawn(move || write(&cores.get(part), device, part as u64, &load))
        });
        for kill in 0..kills {
            let before = load.completed.load(Ordering::SeqCst);
            let start = Instant::now();
            while load.completed.load(Ordering::SeqCst) < before + 50 * u64::from(kill % 7) + 1 {
                assert!(!writing.iter().any(|thread| thread.is_finished()), "a request failed");
                assert!(start.elapsed() < PATIENCE, "no request completes");
                std::thread::yield_now();
            }
            server.kill();
            server = serve();
        }
        load.is_enough.store(true, Ordering::SeqCst);
        (writing.map(|thread| thread.join().unwrap()), server)
    })
}

fn survives_kills(more: &str) {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let disk = folder.join("disk");
    File::create(&disk).unwrap().set_len(BLOCKS * BLOCK).unwrap();
    let server = serve(folder, &disk);
    let (cores, device) = (two_cores(), open(folder, more));
    let (rounds, server) = load_and_kill(&cores, &device, 15, || serve(folder, &disk), server);
    drop(device);
    assert_eq!(server.stop().0, 0);
    check(&disk, rounds);
}

/// Checks that each block has the content of its last round.
fn check(disk: &Path, rounds: [u8; 2]) {
    let bytes = std::fs::read(disk).unwrap();
    for (block, found) in bytes.chunks(BLOCK as usize).enumerate() {
        assert!(found == content(block as u64, rounds[block % 2]), "block {block} of rounds {rounds:?}");
    }
}

#[test]
fn kills_of_a_vhost_user_server_are_only_pauses_with_in_flight_memory() {
    survives_kills(",inflight=on");
    survives_kills(",inflight=on,packed=on,queue-size=16");
}

#[test]
fn kills_of_a_vhost_user_server_are_only_pauses_without_in_flight_memory() {
    survives_kills(",inflight=off");
    survives_kills(",inflight=off,packed=on,event-idx=off,indirect=off");
}

#[test]
fn a_server_in_its_sandbox_reconnects_to_the_server_of_its_device() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let disk = folder.join("disk");
    File::create(&disk).unwrap().set_len(BLOCKS * BLOCK).unwrap();
    let back = || serve_at(folder, "back", &format!("io_uring:{}", path_value("path", &disk)));
    let server = back();
    let path = path_value("path", &folder.join("back"));
    let front = serve_at(folder, "s", &format!("virtio-blk-vhost-user:{path},reconnect-delay=600"));
    let (cores, device) = (two_cores(), open(folder, ""));
    let (rounds, server) = load_and_kill(&cores, &device, 6, back, server);
    drop(device);
    let (code, log) = front.stop();
    assert!(code == 0 && log.contains("connection lost: reconnecting"), "{log}");
    assert!(!log.contains("refused"), "{log}");
    assert_eq!(server.stop().0, 0);
    check(&disk, rounds);
}

/// A server of an array of `local` and of the disk of the server in `folder`, over NBD and over
/// vhost-user, and a client of each.
fn front(folder: &Path, local: &Path) -> (Server, [Arc<dyn Device>; 2]) {
    let remote = format!("virtio-blk-vhost-user:{},id=m1", path_value("path", &folder.join("s")));
    let sockets = ["nbd", "guest"].map(|name| folder.join(name));
    let [nbd, guest] = sockets.each_ref().map(|socket| path_value("socket", socket));
    let devices = ["--device", &format!("io_uring:{},id=m0", path_value("path", local))];
    let remote = ["--device", &format!("{remote},reconnect-delay=600")];
    let exports =
        ["--export", &format!("nbd:{nbd}"), "--export", &format!("vhost-user-blk:{guest},queues=2")];
    let array = ["--device", "raid:members=m0+m1,id=data", "--memory", "64M"];
    let args = [&devices[..], &remote, &array, &exports].concat();
    let server = Server::start_in(folder, &args).0;
    let guest = member(&format!("virtio-blk-vhost-user:{}", path_value("path", &sockets[1])), false, false);
    let clients = [member(&format!("nbd:{}", path_value("path", &sockets[0])), false, false), guest]
        .map(|spec| spec.unwrap().open().unwrap());
    clients[1].map_region(&shared_buffers()).unwrap();
    (server, clients)
}

#[test]
fn a_member_over_vhost_user_survives_kills_of_its_server() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let paths: [PathBuf; 2] = [folder.join("m0"), folder.join("m1")];
    paths.iter().for_each(|path| File::create(path).unwrap().set_len(32 * MIB).unwrap());
    let names = paths.each_ref().map(|path| path.to_str().unwrap());
    run_json_in(folder, &["array", "create", "data", "--level", "1", "--json", names[0], names[1]]);
    let mut server = serve(folder, &paths[1]);
    let (front, devices) = front(folder, &paths[0]);
    let (cores, mut rounds) = (two_cores(), [0, 0]);
    for device in &devices {
        (rounds, server) = load_and_kill(&cores, device, 5, || serve(folder, &paths[1]), server);
    }
    drop(devices);
    let (code, log) = front.stop();
    assert!(code == 0 && log.contains("connection lost: reconnecting"), "{log}");
    assert_eq!(server.stop().0, 0);
    let [first, second] = paths.map(|path| std::fs::read(path).unwrap());
    for block in 0..BLOCKS {
        let wanted = content(block, rounds[block as usize % 2]);
        let at = first.chunks(BLOCK as usize).position(|found| found == wanted);
        let at = at.unwrap_or_else(|| panic!("block {block} is not on the first member")) * BLOCK as usize;
        assert!(second[at..at + BLOCK as usize] == wanted, "block {block} is not on the second member");
    }
}

#[test]
fn network_clients_use_a_disk_over_vhost_user_with_buffers_that_its_server_maps() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let disk = folder.join("disk");
    File::create(&disk).unwrap().set_len(BLOCKS * BLOCK).unwrap();
    let mut server = serve(folder, &disk);
    let path = path_value("path", &folder.join("s"));
    let nbd = path_value("socket", &folder.join("nbd"));
    let address = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (front, _) = Server::start_in(
        folder,
        &[
            "--device",
            &format!("virtio-blk-vhost-user:{path},reconnect-delay=600"),
            "--export",
            &format!("nbd:{nbd}"),
            "--export",
            &format!("nvme-tcp:listen={address},nqn={NQN}"),
            "--memory",
            "64M",
        ],
    );
    let specs = [
        format!("nbd:{}", path_value("path", &folder.join("nbd"))),
        format!("nvme-tcp:address={address},nqn={NQN}"),
    ];
    for spec in specs {
        let (cores, device) = (two_cores(), member(&spec, false, false).unwrap().open().unwrap());
        let (rounds, next) = load_and_kill(&cores, &device, 3, || serve(folder, &disk), server);
        server = next;
        drop(device);
        check(&disk, rounds);
    }
    let (code, log) = front.stop();
    assert!(code == 0, "{log}");
}

#[test]
fn a_disk_that_grows_while_its_server_is_away_has_its_new_size() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let disk = folder.join("disk");
    let resize = |bytes| File::options().write(true).open(&disk).unwrap().set_len(bytes).unwrap();
    File::create(&disk).unwrap().set_len(MIB).unwrap();
    let server = serve(folder, &disk);
    let device = open(folder, "");
    let wait_for = |bytes| {
        let start = Instant::now();
        while device.limits().capacity != bytes {
            assert!(start.elapsed() < PATIENCE, "{:?}", device.limits());
            std::thread::sleep(std::time::Duration::from_millis(5));
        }
    };
    server.kill();
    resize(2 * MIB);
    let mut server = serve(folder, &disk);
    wait_for(2 * MIB);
    // The server announces the next size to the client that has returned.
    resize(3 * MIB);
    server.signal("HUP");
    server.event("refreshed");
    wait_for(3 * MIB);
    server.kill();
    resize(MIB);
    let _server = serve(folder, &disk);
    let error = reactor::run(async move {
        let start = Instant::now();
        loop {
            match device.open_channel() {
                Err(error) => return error.to_string(),
                Ok(channel) => drop(channel),
            }
            assert!(start.elapsed() < PATIENCE, "the smaller disk is not refused");
            reactor::current().sleep(5_000_000).await;
        }
    });
    assert!(error.contains("capacity in bytes shrank from 3145728 to 1048576"), "{error}");
}
