//! The driver `freestone`: graphs behind the API.

use blkio::raw::{Completion, Instance, IoQueue, Memory, ReqFlags};
use blkio::{Error, Kind, Value};
use block::{Op, Segment};
use drivers::mem::{MemDevice, Options};
use exports_virtio::vhost_user_blk::{Config, VhostUserBlk};
use reactor::{CoreConfig, Cores};
use std::ffi::CStr;
use std::fs::File;
use std::mem::MaybeUninit;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

const BLOCK: usize = 4096;
const LONG: Duration = Duration::from_secs(60);

fn connected(graph: &str) -> Instance {
    let mut instance = Instance::create("freestone").unwrap();
    instance.set("graph", graph.into()).unwrap();
    instance.connect().unwrap_or_else(|e| panic!("{graph}: {e}"));
    instance
}

fn started(graph: &str, tuning: &[(&str, &str)]) -> Instance {
    let mut instance = connected(graph);
    tuning.iter().for_each(|(name, value)| instance.set(name, (*value).into()).unwrap());
    instance.start().unwrap_or_else(|e| panic!("{graph}: {e}"));
    instance
}

fn refused<T>(result: Result<T, Error>) -> (i32, String) {
    let error = result.err().expect("refused");
    (error.errno(), error.message().to_owned())
}

fn uint64(instance: &Instance, name: &str) -> u64 {
    match instance.get_as(name, Kind::Uint64).unwrap() {
        Value::Uint64(value) => value,
        other => panic!("{other:?}"),
    }
}

/// A completion: its user data, its result, its message.
type Ended = (usize, i32, Option<String>);

/// Waits for `count` completions.
fn wait(queue: &mut IoQueue, count: usize) -> Vec<Ended> {
    let mut completions = vec![MaybeUninit::<Completion>::uninit(); count];
    let mut timeout = LONG;
    let found = queue.do_io(&mut completions, count, Some(&mut timeout), None).unwrap();
    assert_eq!(found, count);
    let ended = |completion: MaybeUninit<Completion>| {
        // SAFETY: so many were filled in; messages live as long as the queue.
        let (completion, message) = unsafe {
            let completion = completion.assume_init();
            let message = completion.error_msg;
            (completion, (!message.is_null()).then(|| CStr::from_ptr(message).to_str().unwrap().to_owned()))
        };
        (completion.user_data, completion.ret, message)
    };
    let mut all: Vec<_> = completions.into_iter().map(ended).collect();
    all.sort_unstable();
    all
}

fn transfer(queue: &mut IoQueue, op: Op, block: u64, buffer: &mut [u8], user_data: usize) {
    let memory = Memory::One(Segment { base: buffer.as_mut_ptr(), len: buffer.len() });
    // SAFETY: every test waits for its requests, or drops the queue, before the buffer goes.
    unsafe { queue.transfer(op, block * BLOCK as u64, memory, user_data, ReqFlags(0)) };
}

/// Writes blocks, reads them back in another order over two queues, zeroes and discards.
fn check_data(instance: &mut Instance, polls: bool) {
    const COUNT: usize = 200; // more than a queue has slots
    let mut written: Vec<_> = (0..COUNT).map(|i| vec![i as u8 + 1; BLOCK]).collect();
    let queue = instance.queue(0, polls).unwrap();
    for (i, buffer) in written.iter_mut().enumerate() {
        transfer(queue, Op::Write, i as u64, buffer, i);
    }
    let ok = |i: usize| (i, 0, None);
    assert_eq!(wait(queue, COUNT), (0..COUNT).map(ok).collect::<Vec<_>>());
    queue.operate(Op::WriteZeroes, 0, BLOCK as u64, 1, ReqFlags(0));
    queue.operate(Op::Discard, (COUNT * BLOCK) as u64, BLOCK as u64, 2, ReqFlags(0));
    queue.operate(Op::Flush, 0, 0, 3, ReqFlags(0));
    assert_eq!(wait(queue, 3), [ok(1), ok(2), ok(3)]);
    let queue = instance.queue(1, polls).unwrap();
    let mut read = vec![vec![0xee; BLOCK]; COUNT];
    for (i, buffer) in read.iter_mut().enumerate().rev() {
        transfer(queue, Op::Read, i as u64, buffer, i);
    }
    assert_eq!(wait(queue, COUNT), (0..COUNT).map(ok).collect::<Vec<_>>());
    assert!(read[0].iter().all(|byte| *byte == 0));
    assert!(read[1..] == written[1..]);
}

fn image(name: &str, len: u64) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    File::create(&path).unwrap().set_len(len).unwrap();
    (dir, path)
}

#[test]
fn data_comes_back_through_layers_from_event_and_poll_queues() {
    let (_dir, path) = image("disk 1.img", 4 << 20);
    let file = format!("io_uring:path='{}'", path.display());
    let graphs = [
        "mem:size=2M".to_owned(),
        file.clone(),
        format!("{file} linear:offset=1M,len=2M stats"),
        format!("{file} mem:size=1M concat linear:offset=3840K stats stats fault:delay-us=10"),
    ];
    for graph in graphs {
        let tuning =
            [("num-queues", "2"), ("num-poll-queues", "2"), ("num-cores", "2"), ("num-entries", "32")];
        let mut instance = started(&graph, &tuning);
        check_data(&mut instance, false);
        check_data(&mut instance, true);
    }
}

#[test]
fn the_deepest_graph_that_is_allowed_works() {
    let graph = format!("mem:size=2M fault:delay-us=1{}", " stats".repeat(stack::MAX_DEPTH - 1));
    check_data(&mut started(&graph, &[("num-queues", "2")]), false);
}

#[test]
fn facts_are_those_of_the_topmost_device() {
    let instance = connected("mem:size=8M,block-size=4K linear:len=5M");
    assert_eq!(uint64(&instance, "capacity"), 5 << 20);
    for (name, value) in [
        ("request-alignment", Value::Int(4096)),
        ("read-only", false.into()),
        ("supports-poll-queues", true.into()),
        ("needs-mem-regions", false.into()),
        ("can-add-queues", true.into()),
        ("can-grow", false.into()),
        ("driver", "freestone".into()),
        ("num-entries", 128.into()),
        ("poll-us", 50.into()),
    ] {
        assert_eq!(instance.get(name), Ok(value), "{name}");
    }
}

#[test]
fn the_capacity_is_that_of_now() {
    let (_dir, path) = image("growing", 1 << 20);
    let mut instance = started(&format!("io_uring:path={} stats", path.display()), &[]);
    assert_eq!(uint64(&instance, "capacity"), 1 << 20);
    let mut buffer = vec![7; BLOCK];
    let queue = instance.queue(0, false).unwrap();
    transfer(queue, Op::Write, 256, &mut buffer, 1);
    let message = "the request reaches beyond the end of the device".to_owned();
    assert_eq!(wait(queue, 1), [(1, -libc::EINVAL, Some(message))]);
    File::options().write(true).open(&path).unwrap().set_len(2 << 20).unwrap();
    transfer(queue, Op::Write, 256, &mut buffer, 2);
    assert_eq!(wait(queue, 1), [(2, 0, None)]);
    assert_eq!(uint64(&instance, "capacity"), 2 << 20);
}

#[test]
fn injected_faults_end_with_their_errno() {
    for (name, errno) in [
        ("medium", libc::EIO),
        ("corrupt", libc::EILSEQ),
        ("timed-out", libc::ETIMEDOUT),
        ("device-gone", libc::ENODEV),
        ("no-space", libc::ENOSPC),
        ("no-memory", libc::ENOMEM),
        ("read-only", libc::EBADF),
        ("unsupported", libc::EOPNOTSUPP),
        ("invalid", libc::EINVAL),
    ] {
        let mut instance = started(&format!("mem:size=1M fault:error={name},op=write,after=1,count=2"), &[]);
        let queue = instance.queue(0, false).unwrap();
        let mut buffer = vec![1; BLOCK];
        for (user_data, ret) in [(1, 0), (2, -errno), (3, -errno), (4, 0)] {
            transfer(queue, Op::Write, user_data as u64, &mut buffer, user_data);
            let ended = wait(queue, 1);
            assert_eq!((ended[0].0, ended[0].1), (user_data, ret), "{name}: {ended:?}");
            assert_eq!(ended[0].2.is_some(), ret != 0, "{name}: {ended:?}");
        }
    }
}

#[test]
fn graphs_that_make_no_sense_are_refused_by_name() {
    let mut instance = Instance::create("freestone").unwrap();
    assert_eq!(refused(instance.connect()), (libc::EINVAL, "graph: no device is given".into()));
    for (graph, message) in [
        ("mem", "device mem: size=SIZE is missing"),
        (
            "null null",
            "graph: 2 devices on top (device0, device1): one is needed, such as concat makes of several",
        ),
        ("null stats:x", r#"layer stats:x: unknown key "x"; stats knows device"#),
        ("'null", "graph: the quote at byte 0 is not closed: 'null"),
    ] {
        assert_eq!(refused(instance.set("graph", graph.into())), (libc::EINVAL, message.into()));
    }
    instance.set("graph", "io_uring:path=/nowhere/disk stats".into()).unwrap();
    let (errno, message) = refused(instance.connect());
    assert!(errno == libc::ENOENT && message.contains("/nowhere/disk"), "{errno} {message}");
    instance.set("graph", "virtio-blk-vhost-user:path=/nowhere/s stats".into()).unwrap();
    let (errno, message) = refused(instance.connect());
    assert!(errno == libc::ENOENT && message.contains("/nowhere/s"), "{errno} {message}");
    instance.set("graph", "mem:size=1M linear:offset=2M".into()).unwrap();
    let (errno, message) = refused(instance.connect());
    assert!(errno == libc::EINVAL && message.contains("2097152"), "{errno} {message}");
    instance.set("path", "null".into()).unwrap();
    let message = "graph (mem:size=1M linear:offset=2M) and path (null) cannot be set at the same time";
    assert_eq!(refused(instance.connect()), (libc::EINVAL, message.into()));
    // It can be tried again, and either says what to open.
    instance.set("graph", "".into()).unwrap();
    instance.connect().unwrap();
    assert_eq!(refused(instance.set("graph", "null".into())).0, libc::EBUSY);
}

#[test]
fn tuning_that_makes_no_sense_is_refused_by_name() {
    let mut instance = connected("null");
    for (name, value, message) in [
        (
            "num-cores",
            "-1",
            "property num-cores: '-1' is not a number from 0 (as many as cpus names, or 1) to 1024",
        ),
        ("poll-us", "-2", "property poll-us: '-2' is not a number from 0 (never) to 1000000, or -1 (always)"),
        ("num-entries", "0", "property num-entries: '0' is not a number from 1 to 65536"),
        ("cpus", "1-0", "property cpus: '1-0' is not a list of processors such as 0, 0+1 or 0-3, each once"),
    ] {
        assert_eq!(refused(instance.set(name, value.into())), (libc::EINVAL, message.into()));
    }
    instance.set("cpus", "0".into()).unwrap();
    instance.set("num-cores", 2.into()).unwrap();
    assert_eq!(refused(instance.start()), (libc::EINVAL, "num-cores is 2, but cpus (0) names 1".into()));
    instance.set("num-cores", 0.into()).unwrap();
    instance.set("cpus", "1023".into()).unwrap();
    let (_, message) = refused(instance.start());
    assert!(message.contains("cpu 1023: cannot bind a thread to it"), "{message}");
    instance.set("cpus", "0".into()).unwrap();
    instance.start().unwrap();
}

#[test]
fn read_only_reaches_the_leaves() {
    let (_dir, path) = image("disk", 1 << 20);
    // A writer keeps other instances from writing, but not from reading.
    let _writer = connected(&format!("io_uring:path={}", path.display()));
    let mut instance = Instance::create("freestone").unwrap();
    instance
        .set("graph", Value::Str(format!("io_uring:path={} mem:size=1M concat stats", path.display())))
        .unwrap();
    let (_, message) = refused(instance.connect());
    assert!(message.contains("disk") && message.contains("share"), "{message}");
    instance.set("read-only", true.into()).unwrap();
    instance.connect().unwrap();
    instance.start().unwrap();
    let queue = instance.queue(0, false).unwrap();
    let mut buffer = vec![0; BLOCK];
    transfer(queue, Op::Write, 0, &mut buffer, 1);
    transfer(queue, Op::Read, 0, &mut buffer, 2);
    assert_eq!(wait(queue, 2), [(1, -libc::EBADF, Some("the device is read-only".into())), (2, 0, None)]);
    assert_eq!(connected("mem:size=1M,readonly stats").get("read-only"), Ok(Value::Bool(true)));
}

#[test]
fn queues_come_and_go_while_others_work() {
    let mut instance = started("null:latency-us=300 stats", &[("num-cores", "2")]);
    let mut buffer = vec![0; BLOCK];
    for round in 0..20 {
        let queue = instance.queue(0, false).unwrap();
        (0..10).for_each(|i| transfer(queue, Op::Read, 0, &mut buffer, i));
        let is_poll = round % 2 == 1;
        let index = instance.add_queue(is_poll).unwrap();
        let added = instance.queue(index, is_poll).unwrap();
        assert_eq!(added.completion_fd().is_none(), is_poll);
        transfer(added, Op::Read, 0, &mut buffer, 77);
        if round % 3 == 0 {
            assert_eq!(wait(added, 1), [(77, 0, None)]);
        }
        instance.remove_queue(index, is_poll).unwrap(); // with a request in flight, or without
        assert_eq!(wait(instance.queue(0, false).unwrap(), 10).len(), 10);
    }
}

#[test]
fn the_end_waits_for_requests_in_flight() {
    let mut instance = started("null:latency-us=50000,zero stats", &[]);
    let mut buffer = vec![1; BLOCK];
    let queue = instance.queue(0, false).unwrap();
    transfer(queue, Op::Read, 0, &mut buffer, 1);
    let start = Instant::now();
    // Submits, and does not wait.
    assert_eq!(queue.do_io(&mut [], 0, None, None), Ok(0));
    drop(instance);
    assert!(start.elapsed() >= Duration::from_millis(50));
    assert!(buffer.iter().all(|byte| *byte == 0), "the read had not ended");
}

#[test]
fn the_completion_fd_tells_of_completions_while_it_is_enabled() {
    let mut instance = started("mem:size=1M fault:delay-us=2000", &[("poll-us", "0")]);
    let mut buffer = vec![1; BLOCK];
    let queue = instance.queue(0, false).unwrap();
    let fd = queue.completion_fd().unwrap();
    let is_readable = |timeout_ms| {
        let mut wanted = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
        // SAFETY: one structure that lives through the call.
        unsafe { libc::poll(&raw mut wanted, 1, timeout_ms) == 1 }
    };
    let lower = || {
        let mut counter = 0u64;
        // SAFETY: eight bytes of our own.
        assert_eq!(unsafe { libc::read(fd, (&raw mut counter).cast(), 8) }, 8);
    };
    queue.set_completion_fd_enabled(true);
    for round in 0..5 {
        transfer(queue, Op::Write, 0, &mut buffer, round);
        assert_eq!(queue.do_io(&mut [], 0, None, None), Ok(0));
        assert!(is_readable(20_000), "round {round}");
        lower();
        assert_eq!(wait(queue, 1), [(round, 0, None)]);
    }
    queue.set_completion_fd_enabled(false);
    transfer(queue, Op::Write, 0, &mut buffer, 9);
    assert_eq!(queue.do_io(&mut [], 0, None, None), Ok(0));
    assert!(!is_readable(50));
    assert_eq!(wait(queue, 1), [(9, 0, None)]);
}

#[test]
fn memory_regions_reach_the_devices() {
    let (_dir, path) = image("disk", 2 << 20);
    let graph = format!("io_uring:path={},fixed-buffers=on stats", path.display());
    let mut instance = started(&graph, &[("num-queues", "2")]);
    assert_eq!(instance.get("may-pin-mem-regions"), Ok(Value::Bool(true)));
    let region = instance.alloc_region(1 << 20).unwrap();
    instance.map_region(&region).unwrap();
    // SAFETY: the region is fresh memory of so many bytes, used only by this slice while it lives.
    let memory = unsafe { std::slice::from_raw_parts_mut(region.addr as *mut u8, region.len) };
    memory.fill(3);
    let queue = instance.queue(0, false).unwrap();
    transfer(queue, Op::Write, 5, &mut memory[..BLOCK], 1);
    assert_eq!(wait(queue, 1), [(1, 0, None)]);
    transfer(queue, Op::Read, 5, &mut memory[BLOCK..2 * BLOCK], 2);
    assert_eq!(wait(queue, 1), [(2, 0, None)]);
    assert!(memory[BLOCK..2 * BLOCK].iter().all(|byte| *byte == 3));
    instance.unmap_region(&region);
    instance.free_region(&region).unwrap();
    check_data(&mut instance, false);
}

#[test]
fn a_device_in_another_process_takes_memory_that_it_was_told_about() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let cores = Cores::start(&[CoreConfig::default()]).unwrap();
    let served = Arc::new(MemDevice::new(&Options::new(2 << 20)).unwrap());
    let _export =
        VhostUserBlk::start(served, cores.all(), Config { num_queues: 2, ..Config::new(&socket) }).unwrap();
    let graph = format!("virtio-blk-vhost-user:path={} linear:offset=1M stats", socket.display());
    let mut instance = started(&graph, &[("num-queues", "2")]);
    assert_eq!(uint64(&instance, "capacity"), 1 << 20);
    for (name, value) in [("needs-mem-regions", true), ("needs-mem-region-fd", true)] {
        assert_eq!(instance.get(name), Ok(Value::Bool(value)));
    }
    assert_eq!(uint64(&instance, "mem-region-alignment"), 4096);
    let mut elsewhere = vec![0; BLOCK];
    let region = instance.alloc_region(1 << 16).unwrap();
    instance.map_region(&region).unwrap();
    // SAFETY: the region is fresh memory of so many bytes, used only by this slice while it lives.
    let memory = unsafe { std::slice::from_raw_parts_mut(region.addr as *mut u8, region.len) };
    memory.fill(9);
    let queue = instance.queue(0, false).unwrap();
    transfer(queue, Op::Write, 3, &mut memory[..BLOCK], 1);
    assert_eq!(wait(queue, 1), [(1, 0, None)]);
    transfer(queue, Op::Read, 0, &mut elsewhere, 2);
    assert_eq!(wait(queue, 1)[0].1, -libc::EINVAL);
    let queue = instance.queue(1, false).unwrap();
    transfer(queue, Op::Read, 3, &mut memory[BLOCK..2 * BLOCK], 3);
    transfer(queue, Op::Read, 2, &mut memory[2 * BLOCK..3 * BLOCK], 4);
    assert_eq!(wait(queue, 2), [(3, 0, None), (4, 0, None)]);
    assert!(memory[BLOCK..2 * BLOCK].iter().all(|byte| *byte == 9));
    assert!(memory[2 * BLOCK..3 * BLOCK].iter().all(|byte| *byte == 0));
    // It has no third virtqueue.
    let (errno, message) = refused(instance.add_queue(false));
    assert!(errno == libc::EINVAL && message.contains("queue"), "{errno} {message}");
    instance.remove_queue(0, false).unwrap();
    assert_eq!(instance.add_queue(false).unwrap(), 0);
}

fn qemu_img(folder: &tempfile::TempDir, arguments: &str) {
    let mut command = std::process::Command::new("qemu-img");
    let output = command.args(arguments.split(' ')).current_dir(folder.path()).output();
    let output = output.unwrap_or_else(|error| panic!("qemu-img (package qemu-utils): {error}"));
    assert!(output.status.success(), "qemu-img {arguments}: {output:?}");
}

#[test]
fn the_driver_qcow2_reads_and_writes_an_image() {
    let folder = tempfile::tempdir().unwrap();
    qemu_img(&folder, "create -q -f qcow2 base.qcow2 4M");
    qemu_img(&folder, "create -q -f qcow2 -F qcow2 -b base.qcow2 top.qcow2");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let connect = |settings: &[(&str, &str)]| {
        let mut instance = Instance::create("qcow2").unwrap();
        settings.iter().for_each(|(name, value)| instance.set(name, (*value).into()).unwrap());
        instance.connect().map(|()| instance)
    };
    let einval = |text: &str| (libc::EINVAL, text.to_owned());
    assert_eq!(refused(connect(&[])), einval("the property path must be set"));
    let top = path("top.qcow2");
    let (_, text) = refused(connect(&[("path", &top)]));
    assert!(text.contains(r#"names the backing file "base.qcow2", which backing=auto would open"#), "{text}");
    assert_eq!(
        refused(connect(&[("path", &top), ("image-dir", "/")])),
        einval("the property image-dir belongs to backing auto")
    );
    let mut instance = Instance::create("qcow2").unwrap();
    let (_, text) = refused(instance.set("backing", "yes".into()));
    assert_eq!(text, "property backing: 'yes' is not none or auto");
    let mut instance = connect(&[("path", &top), ("backing", "auto")]).unwrap();
    assert_eq!(uint64(&instance, "capacity"), 4 << 20);
    instance.set("num-queues", "2".into()).unwrap();
    instance.start().unwrap();
    check_data(&mut instance, false);
    drop(instance);
    qemu_img(&folder, "check -q top.qcow2");
}
