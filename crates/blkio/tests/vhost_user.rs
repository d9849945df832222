//! The driver `virtio-blk-vhost-user` behind the API while its server ends and returns.

use blkio::raw::{Completion, Instance, IoQueue, Memory, ReqFlags};
use block::{Op, Segment};
use drivers::mem::{MemDevice, Options};
use exports_virtio::vhost_user_blk::{Config, VhostUserBlk};
use reactor::{CoreConfig, Cores};
use std::mem::MaybeUninit;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

const BLOCK: usize = 4096;
const LONG: Duration = Duration::from_secs(60);

/// A disk in memory, and the place of its server.
struct Disk {
    device: Arc<MemDevice>,
    cores: Cores,
    dir: tempfile::TempDir,
}

impl Disk {
    fn new() -> Disk {
        let device = Arc::new(MemDevice::new(&Options::new(2 << 20)).unwrap());
        let cores = Cores::start(&[CoreConfig::default()]).unwrap();
        Disk { device, cores, dir: tempfile::tempdir().unwrap() }
    }

    fn socket(&self) -> PathBuf {
        self.dir.path().join("s")
    }

    fn serve(&self) -> VhostUserBlk {
        VhostUserBlk::start(self.device.clone(), self.cores.all(), Config::new(self.socket())).unwrap()
    }
}

/// An instance with one queue, and memory that the device knows.
fn started(socket: &Path, settings: &[(&str, &str)], is_poll: bool) -> (Instance, &'static mut [u8]) {
    let mut instance = Instance::create("virtio-blk-vhost-user").unwrap();
    instance.set("path", socket.to_str().unwrap().into()).unwrap();
    settings.iter().for_each(|(name, value)| instance.set(name, (*value).into()).unwrap());
    instance.connect().unwrap();
    let (events, polls) = if is_poll { ("0", "1") } else { ("1", "0") };
    instance.set("num-queues", events.into()).unwrap();
    instance.set("num-poll-queues", polls.into()).unwrap();
    instance.start().unwrap();
    let region = instance.alloc_region(64 << 10).unwrap();
    instance.map_region(&region).unwrap();
    // SAFETY: fresh memory of the instance, which every test drops last.
    let memory = unsafe { std::slice::from_raw_parts_mut(region.addr as *mut u8, region.len) };
    (instance, memory)
}

fn submit(queue: &mut IoQueue, op: Op, buffer: &mut [u8]) {
    let memory = Memory::One(Segment { base: buffer.as_mut_ptr(), len: buffer.len() });
    // SAFETY: every test waits for its requests before the buffer goes.
    unsafe { queue.transfer(op, 0, memory, 7, ReqFlags(0)) };
    // Submits without waiting.
    assert_eq!(queue.do_io(&mut [], 0, None, None).unwrap(), 0);
}

/// Waits for one completion, and returns its result.
fn wait(queue: &mut IoQueue) -> i32 {
    let mut completions = [MaybeUninit::<Completion>::uninit()];
    let mut timeout = LONG;
    assert_eq!(queue.do_io(&mut completions, 1, Some(&mut timeout), None).unwrap(), 1);
    // SAFETY: it was filled in.
    let completion = unsafe { completions[0].assume_init_read() };
    assert_eq!(completion.user_data, 7);
    completion.ret
}

#[test]
fn a_read_completes_after_a_restart_of_the_server_if_the_program_asks_for_that() {
    for is_poll in [false, true] {
        let disk = Disk::new();
        let server = disk.serve();
        let (mut instance, memory) = started(&disk.socket(), &[("reconnect-delay", "600")], is_poll);
        let (written, read) = memory.split_at_mut(BLOCK);
        written.fill(5);
        let queue = instance.queue(0, is_poll).unwrap();
        submit(queue, Op::Write, written);
        assert_eq!(wait(queue), 0);
        drop(server);
        submit(queue, Op::Read, &mut read[..BLOCK]);
        let _server = disk.serve();
        assert_eq!(wait(queue), 0);
        assert!(read[..BLOCK] == *written);
        drop(instance);
    }
}

#[test]
fn requests_fail_at_once_by_default_when_the_server_ends() {
    for is_poll in [false, true] {
        let disk = Disk::new();
        let server = disk.serve();
        let (mut instance, memory) = started(&disk.socket(), &[], is_poll);
        let queue = instance.queue(0, is_poll).unwrap();
        submit(queue, Op::Read, &mut memory[..BLOCK]);
        assert_eq!(wait(queue), 0);
        drop(server);
        let _server = disk.serve();
        submit(queue, Op::Read, &mut memory[..BLOCK]);
        assert!(wait(queue) < 0);
        drop(instance);
    }
}

#[test]
fn a_negative_delay_is_refused_by_name() {
    for driver in ["virtio-blk-vhost-user", "nbd"] {
        let mut instance = Instance::create(driver).unwrap();
        let error = instance.set("reconnect-delay", "-1".into()).unwrap_err();
        assert_eq!(error.message(), "property reconnect-delay: -1 is negative");
    }
    let mut other = Instance::create("virtio-blk-vhost-vdpa").unwrap();
    assert_eq!(other.set("reconnect-delay", "1".into()).unwrap_err().errno(), libc::ENOENT);
}
