//! `--process-per-export`: what a process of its own keeps of an export, what it can do, and what
//! its end means to others.

use crate::common::{Daemon, MIB, shared_buffers};
use block::{Channel, Data, Device, Flags, IoError, MemoryRegion, Op, Request, Segment};
use daemon::workers::{WorkerOptions, Workers};
use reactor::{CoreConfig, CoreRef, Cores};
use reqwest::Method;
use serde_json::{Value, json};
use stack::kinds::member::member;
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader};
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

const BLOCK: usize = 4096;

/// The processes of exports by the export's name, as long as they run.
fn workers(daemon: &Daemon) -> BTreeMap<String, u32> {
    let spawners = children(daemon.pid(), "export-spawner");
    let all = spawners.iter().flat_map(|(spawner, _)| children(*spawner, "export-worker"));
    all.map(|(pid, arguments)| (arguments.last().unwrap().clone(), pid)).collect()
}

/// Children of a process whose first argument is `role`, with all of their arguments.
fn children(parent: u32, role: &str) -> Vec<(u32, Vec<String>)> {
    let pids =
        fs::read_dir("/proc").unwrap().filter_map(|entry| entry.unwrap().file_name().to_str()?.parse().ok());
    let child = |pid: u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        let mut fields = stat.rsplit(") ").next()?.split(' ');
        let (state, ppid) = (fields.next()?, fields.next()?);
        let line = fs::read_to_string(format!("/proc/{pid}/cmdline")).ok()?;
        let arguments: Vec<String> = line.split_terminator('\0').map(str::to_owned).collect();
        let is_it = state != "Z" && ppid == parent.to_string() && arguments.get(1).is_some_and(|a| a == role);
        is_it.then_some((pid, arguments))
    };
    pids.filter_map(child).collect()
}

fn kill(pid: u32) {
    signal(pid, "-KILL");
}

fn signal(pid: u32, signal: &str) {
    let pid = pid.to_string();
    assert!(std::process::Command::new("kill").args([signal, &pid]).status().unwrap().success());
}

fn is_running(pid: u32) -> bool {
    fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

/// An NBD export of a volume of its own.
fn export(daemon: &Daemon, name: &str, label: &str) -> Arc<dyn Device> {
    daemon.post(
        "/v1/volumes",
        &json!({ "name": name, "backing": "data", "size_bytes": 8 * MIB, "label": label }),
    );
    daemon.post("/v1/exports", &json!({ "name": name, "kind": "nbd", "volumes": [name], "label": label }));
    open(daemon, name)
}

/// A client of the export.
fn open(daemon: &Daemon, name: &str) -> Arc<dyn Device> {
    let socket = daemon.path(&format!("{name}.sock"));
    connect(&socket).unwrap_or_else(|| panic!("no process serves {}", socket.display()))
}

fn connect(socket: &Path) -> Option<Arc<dyn Device>> {
    member(&format!("nbd:path={}", socket.display()), false, false).unwrap().open().ok()
}

/// Writes or reads one block, which is full of `byte`.
async fn transfer(channel: &dyn Channel, op: Op, block: u64, byte: u8) -> Result<Vec<u8>, IoError> {
    let mut buffer = reactor::current().buffers().take(BLOCK).await;
    buffer.as_mut_slice().fill(byte);
    let (buffer, result) = buffer.transfer(channel, op, Flags::NONE, block * BLOCK as u64).await;
    result.map(|()| buffer.as_slice().to_vec())
}

fn run(core: &CoreRef, device: &Arc<dyn Device>, op: Op, block: u64, byte: u8) -> Vec<u8> {
    let device = device.clone();
    let done = core.block_on(move |_| async move {
        let channel = device.open_channel().unwrap();
        transfer(&*channel, op, block, byte).await
    });
    done.unwrap().unwrap_or_else(|error| panic!("{op:?} of block {block}: {error}"))
}

fn check(core: &CoreRef, device: &Arc<dyn Device>, block: u64, byte: u8) {
    assert!(
        run(core, device, Op::Read, block, 0) == vec![byte; BLOCK],
        "block {block} is not full of {byte}"
    );
}

/// A client that writes blocks and reads them back, from a core of its own, until it is stopped.
struct Load {
    rounds: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
    /// How often the client has lost its device.
    thread: std::thread::JoinHandle<u64>,
}

/// The load of a client that opens the device again as often as it is lost.
fn load(open: impl Fn() -> Option<Arc<dyn Device>> + Send + 'static) -> Load {
    const BLOCKS: u64 = 64;
    let (rounds, stop) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicBool::new(false)));
    let (counted, stopped) = (rounds.clone(), stop.clone());
    let thread = std::thread::spawn(move || {
        let cores = Cores::start(&[CoreConfig::default()]).unwrap();
        let mut losses = 0;
        while !stopped.load(Ordering::Relaxed) {
            let Some(device) = open() else { continue };
            let (counted, stopped) = (counted.clone(), stopped.clone());
            let used = cores.get(0).block_on(move |_| async move {
                let channel = device.open_channel()?;
                while !stopped.load(Ordering::Relaxed) {
                    let round = counted.load(Ordering::Relaxed);
                    let byte = |round: u64| (round % 251) as u8;
                    transfer(&*channel, Op::Write, round % BLOCKS, byte(round)).await?;
                    counted.store(round + 1, Ordering::Relaxed);
                    // The oldest acknowledged write, possibly from before the loss of the device.
                    let oldest = (round + 1).saturating_sub(BLOCKS - 1);
                    let found = transfer(&*channel, Op::Read, oldest % BLOCKS, 0).await?;
                    assert!(found == vec![byte(oldest); BLOCK], "round {oldest}: {}", found[0]);
                }
                Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
            });
            losses += u64::from(used.expect("no assertion fails").is_err());
        }
        losses
    });
    Load { rounds, stop, thread }
}

impl Load {
    fn rounds(&self) -> u64 {
        self.rounds.load(Ordering::Relaxed)
    }

    /// Ends the load; how often the client has lost its device.
    fn end(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("what is read is what was written")
    }
}

fn traffic(daemon: &Daemon, name: &str) -> Value {
    daemon.get(&format!("/v1/exports/{name}"))["traffic"].clone()
}

fn daemon() -> Daemon {
    let daemon = Daemon::with(&["--member-timeout", "1", "--process-per-export"]);
    daemon.array();
    daemon
}

/// Kills the process of export `a` under the load of its client, and waits until both clients are
/// served.
fn kill_under_load(daemon: &Daemon, of_a: &Load, of_b: &Load) {
    daemon.wait_for("load", || of_a.rounds() > 100 && of_b.rounds() > 100);
    let former = workers(daemon)["a"];
    kill(former);
    daemon.wait_for("a successor", || workers(daemon).get("a").is_some_and(|pid| *pid != former));
    let rounds = (of_a.rounds(), of_b.rounds());
    daemon.wait_for("both loads", || of_a.rounds() > rounds.0 + 100 && of_b.rounds() > rounds.1 + 100);
    let told = format!("process {former}: signal: 9 (SIGKILL)");
    daemon.wait_for("an event", || daemon.log().contains(&told));
}

#[test]
fn a_process_that_is_killed_is_started_again_and_no_other_export_notices() {
    let daemon = daemon();
    let (a, b) = (export(&daemon, "a", "alice"), export(&daemon, "b", "bob"));
    let cores = Cores::start(&[CoreConfig::default()]).unwrap();
    let before = workers(&daemon);
    assert_eq!(before.keys().collect::<Vec<_>>(), ["a", "b"]);
    run(&cores.get(0), &a, Op::Write, 700, 1);
    run(&cores.get(0), &b, Op::Write, 700, 2);
    daemon.wait_for("counters", || traffic(&daemon, "a")["connections"].as_u64() >= Some(1));
    let socket = daemon.path("a.sock");
    let of_a = load(move || connect(&socket));
    let same = b.clone();
    let of_b = load(move || Some(same.clone()));
    for _ in 0..2 {
        kill_under_load(&daemon, &of_a, &of_b);
    }
    assert_eq!((of_a.end(), of_b.end()), (2, 0), "one client loses its device as often as it is killed");
    check(&cores.get(0), &open(&daemon, "a"), 700, 1);
    check(&cores.get(0), &b, 700, 2);
    assert_eq!(workers(&daemon)["b"], before["b"], "the other process is the same");
    daemon.wait_for("counters", || traffic(&daemon, "b")["writes"].as_u64() > Some(100));
    daemon.wait_for("counters", || traffic(&daemon, "a")["connections"].as_u64() > Some(2));
    assert_eq!(traffic(&daemon, "b")["errors"], 0);
    assert_eq!(daemon.log().matches("worker-ended").count(), 2, "{}", daemon.log());
}

#[test]
fn hosts_over_nvme_tcp_go_on_with_the_next_process() {
    let daemon = daemon();
    // An address of this test alone.
    let [_, x, y, z] = std::process::id().to_be_bytes();
    let address = format!("127.{}.{y}.{z}:4420", x | 128);
    let nqn = "nqn.2014-08.org.example:a";
    daemon.volume("a", 8 * MIB);
    daemon.volume("more", 8 * MIB);
    let options = json!({ "listen": address, "nqn": nqn });
    let new = json!({ "name": "a", "kind": "nvme-tcp", "volumes": ["a", "more"], "options": options });
    daemon.post("/v1/exports", &new);
    let b = export(&daemon, "b", "bob");
    let a = member(&format!("nvme-tcp:address={address},nqn={nqn}"), false, false).unwrap().open().unwrap();
    let of_a = load(move || Some(a.clone()));
    let of_b = load(move || Some(b.clone()));
    kill_under_load(&daemon, &of_a, &of_b);
    assert_eq!((of_a.end(), of_b.end()), (0, 0), "hosts connect again and send again what was not answered");
}

#[test]
fn a_guests_disk_is_served_by_a_process_of_its_own() {
    let daemon = daemon();
    daemon.volume("v", 8 * MIB);
    daemon.post("/v1/exports", &json!({ "name": "v", "kind": "vhost-user-blk", "volumes": ["v"] }));
    assert_eq!(workers(&daemon).keys().collect::<Vec<_>>(), ["v"]);
    let buffers = shared_buffers();
    let path = daemon.path("v.sock");
    let disk = stack::parse(&format!("virtio-blk-vhost-user:path={}", path.display()))
        .unwrap()
        .open()
        .unwrap()
        .device;
    disk.map_region(&buffers).unwrap();
    let cores = Cores::start(&[CoreConfig::default()]).unwrap();
    for (block, byte) in [(0, 3), (2047, 4)] {
        run(&cores.get(0), &disk, Op::Write, block, byte);
    }
    check(&cores.get(0), &disk, 0, 3);
    check(&cores.get(0), &disk, 2047, 4);
    daemon.wait_for("counters", || traffic(&daemon, "v")["written_bytes"] == 2 * BLOCK);
    daemon.patch("/v1/volumes/v", &json!({ "size_bytes": 12 * MIB }));
    daemon.wait_for("the guest's disk to grow", || disk.limits().capacity == 12 * MIB);
    check(&cores.get(0), &disk, 2048, 0);
}

#[test]
fn a_process_has_no_way_to_devices_state_and_other_sockets() {
    let daemon = daemon();
    let device = export(&daemon, "a", "alice");
    let cores = Cores::start(&[CoreConfig::default()]).unwrap();
    check(&cores.get(0), &device, 0, 0);
    let pid = workers(&daemon)["a"];
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let value = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        line.unwrap_or_else(|| panic!("{key}: {status}")).trim().to_owned()
    };
    assert_eq!((value("NoNewPrivs"), value("Seccomp")), ("1".into(), "2".into()));
    assert_eq!(u64::from_str_radix(&value("CapPrm"), 16), Ok(0));
    for thread in fs::read_dir(format!("/proc/{pid}/task")).unwrap() {
        let status = fs::read_to_string(thread.unwrap().path().join("status")).unwrap();
        assert!(status.contains("Seccomp:\t2"), "{status}");
    }
    let log = daemon.path("log");
    for entry in fs::read_dir(format!("/proc/{pid}/fd")).unwrap() {
        let Ok(target) = fs::read_link(entry.unwrap().path()) else { continue };
        let name = target.to_str().unwrap();
        let is_known =
            ["socket:", "anon_inode:", "/memfd:", "pipe:"].iter().any(|kind| name.starts_with(kind));
        assert!(is_known || target == log || target == Path::new("/dev/null"), "{name}");
    }
    // It did not make the socket, and cannot remove it.
    kill(pid);
    daemon.wait_for("a successor", || workers(&daemon).get("a").is_some_and(|other| *other != pid));
    assert!(daemon.path("a.sock").exists());
    check(&cores.get(0), &open(&daemon, "a"), 0, 0);
}

#[test]
fn an_export_grows_and_is_removed_and_the_daemon_ends_its_processes_in_order() {
    let mut daemon = daemon();
    let a = export(&daemon, "a", "alice");
    let _b = export(&daemon, "b", "bob");
    assert_eq!(a.limits().capacity, 8 * MIB);
    daemon.patch("/v1/volumes/a", &json!({ "size_bytes": 12 * MIB }));
    assert_eq!(open(&daemon, "a").limits().capacity, 12 * MIB, "who connects now finds all of it");
    let (of_a, of_b) = (workers(&daemon)["a"], workers(&daemon)["b"]);
    daemon.delete("/v1/exports/a");
    assert!(!is_running(of_a) && !daemon.path("a.sock").exists());
    assert!(is_running(of_b) && UnixStream::connect(daemon.path("b.sock")).is_ok());
    let spawner = children(daemon.pid(), "export-spawner")[0].0;
    assert!(daemon.end("-TERM").success());
    assert!(!is_running(of_b));
    daemon.wait_for("the spawner's end", || !is_running(spawner));
    assert!(!daemon.log().contains("killed"), "{}", daemon.log());
    daemon.start();
    daemon.wait_for("the export", || workers(&daemon).contains_key("b"));
    // Without the daemon there is nothing to serve.
    let of_b = workers(&daemon)["b"];
    daemon.end("-KILL");
    daemon.wait_for("the process's end", || !is_running(of_b));
}

#[test]
fn a_guest_that_truncates_its_memory_loses_its_process_and_the_next_guest_is_served() {
    let daemon = daemon();
    daemon.volume("v", 8 * MIB);
    daemon.post("/v1/exports", &json!({ "name": "v", "kind": "vhost-user-blk", "volumes": ["v"] }));
    let b = export(&daemon, "b", "bob");
    let (former, of_b) = (workers(&daemon)["v"], workers(&daemon)["b"]);
    let spec = format!("virtio-blk-vhost-user:path={}", daemon.path("v.sock").display());
    let disk = stack::parse(&spec).unwrap().open().unwrap().device;
    let file = tempfile::tempfile_in("/dev/shm").unwrap();
    file.set_len(MIB).unwrap();
    // Addresses that are not mapped here: this guest does not look at its memory.
    let (addr, len) = (0x2000_0000_0000usize, MIB as usize);
    disk.map_region(&MemoryRegion { addr, len, fd: Some(file.as_raw_fd()), fd_offset: 0 }).unwrap();
    file.set_len(0).unwrap();
    let cores = Cores::start(&[CoreConfig::default()]).unwrap();
    let ended = cores.get(0).block_on(move |_| async move {
        let channel = disk.open_channel().unwrap();
        let segments = [Segment { base: std::ptr::without_provenance_mut(addr), len: BLOCK }];
        // SAFETY: this process does not touch the memory, and the request ends before the segments.
        let data = unsafe { Data::new(&segments) };
        channel.submit(&Request::write(data, Flags::NONE), 0).await
    });
    assert!(ended.unwrap().is_err(), "what is not there cannot be written");
    daemon.wait_for("a successor", || workers(&daemon).get("v").is_some_and(|pid| *pid != former));
    daemon.wait_for("the reason", || daemon.log().contains(&format!("process {former}: exit status: 1")));
    let next = stack::parse(&spec).unwrap().open().unwrap().device;
    assert_eq!(next.limits().capacity, 8 * MIB);
    run(&cores.get(0), &b, Op::Write, 5, 6);
    check(&cores.get(0), &b, 5, 6);
    assert_eq!(workers(&daemon)["b"], of_b);
}

#[test]
fn a_process_that_does_nothing_any_more_holds_up_no_change_and_is_killed_in_the_end() {
    let daemon = daemon();
    export(&daemon, "a", "alice");
    let b = export(&daemon, "b", "bob");
    let of_a = workers(&daemon)["a"];
    signal(of_a, "-STOP");
    daemon.patch("/v1/volumes/a", &json!({ "size_bytes": 12 * MIB }));
    daemon.delete("/v1/exports/a");
    assert!(!is_running(of_a) && !daemon.path("a.sock").exists());
    let cores = Cores::start(&[CoreConfig::default()]).unwrap();
    run(&cores.get(0), &b, Op::Write, 5, 6);
    check(&cores.get(0), &b, 5, 6);
    assert!(daemon.log().contains("it is killed"), "{}", daemon.log());
}

#[test]
fn the_spawner_reports_the_end_of_a_process_that_it_killed() {
    let program = env!("CARGO_BIN_EXE_freestoned").into();
    let arguments = ["info", "text", "16777216", "off"].map(str::to_owned).to_vec();
    let workers = Workers::start(&WorkerOptions { program, arguments }).unwrap();
    let (_control, far_control) = UnixStream::pair().unwrap();
    let (status, far_status) = UnixStream::pair().unwrap();
    workers.spawn("a", far_control.into(), far_status.into()).unwrap();
    let mut reports = BufReader::new(&status).lines();
    let mut report = || reports.next().unwrap_or_else(|| panic!("the spawner reports nothing")).unwrap();
    let pid: u32 = report().strip_prefix("pid ").unwrap().parse().unwrap();
    assert!(is_running(pid));
    status.shutdown(Shutdown::Write).unwrap();
    assert_eq!(report(), "signal: 9 (SIGKILL)");
    assert!(!is_running(pid));
}

#[test]
fn an_export_that_needs_a_device_of_the_kernel_is_refused() {
    let daemon = daemon();
    daemon.volume("v", 8 * MIB);
    for (kind, options, reason) in [
        ("ublk", json!({}), "an export of this kind needs a device of the kernel"),
        ("vhost-user-blk", json!({ "memory": "any" }), "memory=any: the daemon maps the guest's memory too"),
    ] {
        let new = json!({ "name": "e", "kind": kind, "volumes": ["v"], "options": options });
        let (status, _, detail) = daemon.refusal(Method::POST, "/v1/exports", &new);
        assert_eq!(status, 422, "{detail}");
        assert!(detail.contains("--process-per-export") && detail.contains(reason), "{detail}");
    }
    assert_eq!(daemon.get("/v1/exports").as_array().map(Vec::len), Some(0));
}
