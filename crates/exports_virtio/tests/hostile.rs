//! Guests and VMMs that do what the specifications forbid: their own ring or connection ends, with
//! nothing left behind, and others notice nothing.

mod common;

use base::Rng;
use common::{Buffer, Data, GUEST_BASE, Guest, GuestConfig, QueueMemory, Request, Server, SlowDevice, Vmm};
use common::{eventually, is_signalled, pair, pattern, wait_signal};
use exports::Export;
use exports_virtio::vhost_user_blk::{Config, MemoryFiles, VhostUserBlk};
use reactor::{CoreConfig, Cores};
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use virtio::blk::*;
use virtio::ring::{DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE};

const MIB: u64 = 1 << 20;

fn expected(offset: u64, len: usize) -> Vec<u8> {
    (offset..offset + len as u64).map(pattern).collect()
}

/// A way to break a ring.
type Attack = fn(&mut Guest);

fn desc(guest: &mut Guest, at: u16, addr: u64, len: u32, flags: u16, next: u16) {
    guest.set_desc(0, at, addr, len, flags, next);
}

const ATTACKS: [(&str, Attack); 13] = [
    ("a loop of descriptors", |guest| {
        let at = guest.scratch(0, 0);
        desc(guest, 0, at, 16, DESC_F_NEXT, 1);
        desc(guest, 1, at, 16, DESC_F_NEXT, 0);
        guest.offer(0, 0);
    }),
    ("a descriptor that follows itself", |guest| {
        let at = guest.scratch(0, 0);
        desc(guest, 3, at, 16, DESC_F_NEXT | DESC_F_WRITE, 3);
        guest.offer(0, 3);
    }),
    ("a head outside the table", |guest| guest.offer(0, 999)),
    ("a next outside the table", |guest| {
        let at = guest.scratch(0, 0);
        desc(guest, 0, at, 16, DESC_F_NEXT, 16);
        guest.offer(0, 0);
    }),
    ("memory that the guest does not have", |guest| {
        desc(guest, 0, 0x10, 16, DESC_F_WRITE, 0);
        guest.offer(0, 0);
    }),
    ("a length that leaves the guest's memory", |guest| {
        let at = guest.scratch(0, 0);
        desc(guest, 0, at, u32::MAX, DESC_F_WRITE, 0);
        guest.offer(0, 0);
    }),
    ("a length that wraps around", |guest| {
        desc(guest, 0, u64::MAX - 4, 16, DESC_F_WRITE, 0);
        guest.offer(0, 0);
    }),
    ("an empty buffer", |guest| {
        let at = guest.scratch(0, 0);
        desc(guest, 0, at, 0, DESC_F_WRITE, 0);
        guest.offer(0, 0);
    }),
    ("an available index that jumps", |guest| {
        guest.queues[0].ring.avail_idx().store(0x4000, Ordering::SeqCst);
        guest.kick(0);
    }),
    ("a readable buffer after a writable one", |guest| {
        let at = guest.scratch(0, 0);
        desc(guest, 0, at, 16, DESC_F_NEXT | DESC_F_WRITE, 1);
        desc(guest, 1, at, 16, 0, 0);
        guest.offer(0, 0);
    }),
    ("an indirect table in an indirect table", |guest| {
        let at = guest.scratch(0, 0);
        let inner = virtio::ring::SplitDescriptor { addr: at, len: 16, flags: DESC_F_INDIRECT, next: 0 };
        let bytes: Vec<u8> = inner.to_words().iter().flat_map(|word| word.to_le_bytes()).collect();
        guest.memory.write(at, &bytes);
        desc(guest, 0, at, 16, DESC_F_INDIRECT, 0);
        guest.offer(0, 0);
    }),
    ("an indirect table of half a descriptor", |guest| {
        let at = guest.scratch(0, 0);
        desc(guest, 0, at, 24, DESC_F_INDIRECT, 0);
        guest.offer(0, 0);
    }),
    ("a request without room for its status", |guest| {
        let at = guest.scratch(0, 0);
        desc(guest, 0, at, 16, 0, 0);
        guest.offer(0, 0);
    }),
];

#[test]
fn a_broken_ring_is_left_alone_and_the_other_goes_on() {
    let server = Server::start(2, SlowDevice::new(MIB), |config| Config { num_queues: 2, ..config });
    let mut bystander = Server::start(1, SlowDevice::new(MIB), |config| config);
    let mut neighbour = Guest::boot(&bystander.socket, GuestConfig::default());
    for (name, attack) in ATTACKS {
        let mut guest = Guest::boot(&server.socket, GuestConfig { queues: 2, ..GuestConfig::default() });
        assert_eq!(guest.read(0, 1, 512), expected(512, 512));
        attack(&mut guest);
        assert!(wait_signal(&guest.queues[0].err, Duration::from_secs(60)), "{name}");
        assert_eq!(guest.read(1, 2, 512), expected(1024, 512), "{name}: the other queue");
        assert_eq!(neighbour.read(0, 2, 512), expected(1024, 512), "{name}: another guest");
        // The ring reports its position, and works again once it is set up again.
        guest.stop_queue(0);
        guest.queues[0].ring.avail_idx().store(0, Ordering::SeqCst);
        guest.queues[0].ring.used_idx().store(0, Ordering::SeqCst);
        (guest.queues[0].next_avail, guest.queues[0].next_used) = (0, 0);
        guest.start_queue(0, 0);
        assert_eq!(guest.read(0, 3, 512), expected(1536, 512), "{name}: after a reset");
        assert!(!is_signalled(&guest.queues[0].err), "{name}: an error again");
    }
    drop(bystander.export.take());
}

#[test]
fn a_broken_ring_ends_a_connection_that_the_export_was_given() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("s");
    let listener = UnixListener::bind(&socket).unwrap();
    let cores = Cores::start(&[CoreConfig::default()]).unwrap();
    let core = cores.get(0);
    let server = std::thread::spawn(move || {
        let (connection, _) = listener.accept().unwrap();
        let config = Config::new("given");
        VhostUserBlk::start_connected(Arc::new(SlowDevice::new(MIB)), &[core], config, connection).unwrap()
    });
    let mut guest = Guest::boot(&socket, GuestConfig::default());
    let export = server.join().unwrap();
    assert_eq!(guest.read(0, 1, 512), expected(512, 512));
    assert!(export.stats().is_connected());
    ATTACKS[0].1(&mut guest);
    eventually("the end of the connection", || !export.stats().is_connected());
}

#[test]
fn a_vmm_that_truncates_its_memory_disturbs_no_other() {
    exports_virtio::contain_truncation().unwrap();
    let server = Server::start(1, SlowDevice::new(MIB), |config| config);
    let bystander = Server::start(1, SlowDevice::new(MIB), |config| config);
    let mut neighbour = Guest::boot(&bystander.socket, GuestConfig::default());
    let mut guest = Guest::boot(&server.socket, GuestConfig::default());
    assert_eq!(guest.read(0, 1, 512), expected(512, 512));
    File::from(guest.memory.fd.try_clone().unwrap()).set_len(0).unwrap();
    guest.kick(0);
    // Its ring reads as zeroes now: the available index has jumped.
    assert!(wait_signal(&guest.queues[0].err, Duration::from_secs(60)));
    assert_eq!(neighbour.read(0, 2, 512), expected(1024, 512));
    drop(guest);
    let mut next = Guest::boot(&server.socket, GuestConfig::default());
    assert_eq!(next.read(0, 3, 512), expected(1536, 512));
}

/// A blocking eventfd with a full counter whenever a server thread is about to write to any
/// descriptor. A VMM can reach this state by trying often enough.
struct FilledEvent {
    event: Arc<File>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl FilledEvent {
    /// `watched` says when the core's thread is about to write ([`report_writes`]).
    fn start(watched: Option<OwnedFd>) -> FilledEvent {
        // SAFETY: a fresh descriptor.
        let event = Arc::new(unsafe { File::from_raw_fd(libc::eventfd(0, libc::EFD_CLOEXEC)) });
        let stop = Arc::<AtomicBool>::default();
        let thread = watched.map(|listener| {
            let (event, stop) = (event.clone(), stop.clone());
            std::thread::spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    before_each_write(&listener, || fill(&event));
                }
            })
        });
        FilledEvent { event, stop, thread }
    }
}

impl Drop for FilledEvent {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.take().map(JoinHandle::join);
        if std::thread::panicking() {
            // A core that stands still would keep the server from ending, and the test from
            // failing.
            let _ = (&*self.event).read(&mut [0; 8]);
        }
    }
}

/// Fills the counter of an event. Afterwards the event is blocking again.
fn fill(mut event: &File) {
    // Another that fills it would change the flags meanwhile.
    static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());
    let _alone = ONE_AT_A_TIME.lock().unwrap();
    let set_flags = |flags: libc::c_int| {
        // SAFETY: sets the flags of a descriptor of ours.
        assert_eq!(unsafe { libc::fcntl(event.as_raw_fd(), libc::F_SETFL, flags) }, 0);
    };
    set_flags(libc::O_NONBLOCK);
    loop {
        let _ = event.read(&mut [0; 8]);
        match event.write_all(&(u64::MAX - 1).to_ne_bytes()) {
            Ok(()) => break,
            // The core has signalled it in between.
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }
    set_flags(0);
}

/// Waits until an event is signalled, and takes its counter.
fn take(mut event: &File) -> u64 {
    let mut count = [0; 8];
    loop {
        match event.read_exact(&mut count) {
            Ok(()) => return u64::from_ne_bytes(count),
            // Another thread fills it at the moment.
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock),
        }
    }
}

/// From now on every `write(2)` of the calling thread waits for the listener that is returned;
/// `None` where this system does not have that.
fn report_writes() -> Option<OwnedFd> {
    let statement = |code: u32, k: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k };
    let number = statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0);
    let is_write =
        libc::sock_filter { jf: 1, ..statement(libc::BPF_JMP | libc::BPF_JEQ, libc::SYS_write as u32) };
    let notify = statement(libc::BPF_RET, libc::SECCOMP_RET_USER_NOTIF);
    let allow = statement(libc::BPF_RET, libc::SECCOMP_RET_ALLOW);
    let mut filter = [number, is_write, notify, allow];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    let (mode, flags) = (libc::SECCOMP_SET_MODE_FILTER, libc::SECCOMP_FILTER_FLAG_NEW_LISTENER);
    // SAFETY: the program and its instructions live through the call; a descriptor that it returns
    // is new.
    unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        let fd = libc::syscall(libc::SYS_seccomp, mode, flags, &raw const program);
        (fd >= 0).then(|| OwnedFd::from_raw_fd(fd as i32))
    }
}

/// Waits briefly for a thread that is about to write, calls `act`, and resumes the thread.
fn before_each_write(listener: &OwnedFd, act: impl FnOnce()) {
    const RECEIVE: libc::c_ulong = 0xc050_2100;
    const ANSWER: libc::c_ulong = 0xc018_2101;
    let mut poll = libc::pollfd { fd: listener.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: all structures are plain data that lives through the calls, as long as the codes say.
    unsafe {
        if libc::poll(&raw mut poll, 1, 20) != 1 || poll.revents & libc::POLLIN == 0 {
            return;
        }
        let mut call: libc::seccomp_notif = std::mem::zeroed();
        if libc::ioctl(poll.fd, RECEIVE as _, &raw mut call) != 0 {
            return;
        }
        act();
        let mut answer: libc::seccomp_notif_resp = std::mem::zeroed();
        answer.id = call.id;
        answer.flags = libc::SECCOMP_USER_NOTIF_FLAG_CONTINUE as _;
        libc::ioctl(poll.fd, ANSWER as _, &raw mut answer);
    }
}

#[test]
fn a_vmm_that_fills_its_call_event_stops_neither_its_core_nor_the_end_of_the_export() {
    let server = Server::start(1, SlowDevice::new(MIB), |config| config);
    let second = server.socket.with_extension("second");
    let _second =
        VhostUserBlk::start(server.device.clone(), server.cores.all(), Config::new(&second)).unwrap();
    // Without the event index every completion interrupts.
    let refused_features = virtio::VIRTIO_F_RING_PACKED | virtio::VIRTIO_F_EVENT_IDX;
    let mut guest = Guest::boot(&second, GuestConfig { refused_features, ..GuestConfig::default() });
    let mut neighbour = Guest::boot(&server.socket, GuestConfig::default());
    let filled = FilledEvent::start(server.cores.all()[0].call(|_| report_writes()).unwrap());
    let call = filled.event.as_raw_fd();
    for (sector, is_full) in (0..100).zip([false, true].into_iter().cycle()) {
        let _ = is_full.then(|| fill(&filled.event));
        // Counts as an interrupt already.
        guest.vmm.send(Request::SetVringCall, &[0], &[call]);
        assert_eq!(guest.read(0, sector, 512), expected(sector * 512, 512));
        assert_eq!(neighbour.read(0, sector, 512), expected(sector * 512, 512), "another guest of the core");
        let count = take(&filled.event);
        assert_eq!(count >= u64::MAX - 1, is_full, "the event was signalled");
    }
    fill(&filled.event);
    // The exports end while it is full.
    drop(filled);
}

#[test]
fn a_ninth_client_that_truncates_its_memory_disturbs_no_other_however_many_regions_they_have() {
    exports_virtio::contain_truncation().unwrap();
    let server = Server::start(1, SlowDevice::new(MIB), |config| config);
    let export = |i: usize| {
        let socket = server.socket.with_extension(format!("{i}"));
        let config = Config::new(&socket);
        (VhostUserBlk::start(server.device.clone(), server.cores.all(), config).unwrap(), socket)
    };
    let exports: Vec<_> = (0..8).map(export).collect();
    let mut guests: Vec<_> =
        exports.iter().map(|(_, socket)| Guest::negotiate(socket, GuestConfig::default())).collect();
    for guest in &mut guests {
        guest.send_memory();
        let region = |i: u64| [0, GUEST_BASE + (i << 30), 4096, 0x1000_0000_0000 + (i << 30), i * 4096];
        for i in 1..512 {
            assert!(guest.vmm.send_acked(Request::AddMemReg, &region(i), &[guest.memory.fd.as_raw_fd()]));
        }
        guest.start_queue(0, 0);
        assert_eq!(guest.read(0, 1, 512), expected(512, 512));
    }
    let mut ninth = Guest::boot(&server.socket, GuestConfig::default());
    assert_eq!(ninth.read(0, 1, 512), expected(512, 512));
    File::from(ninth.memory.fd.try_clone().unwrap()).set_len(0).unwrap();
    ninth.kick(0);
    assert!(wait_signal(&ninth.queues[0].err, Duration::from_secs(60)));
    for guest in &mut guests {
        assert_eq!(guest.read(0, 2, 512), expected(1024, 512));
    }
    // The next region is one too many.
    let one_more = [0, GUEST_BASE + (600 << 30), 4096, 0x2000_0000_0000, 0];
    assert!(!guests[0].vmm.send_acked(Request::AddMemReg, &one_more, &[guests[0].memory.fd.as_raw_fd()]));
    assert_eq!(guests[1].read(0, 3, 512), expected(1536, 512));
}

#[test]
fn a_request_whose_data_was_lost_is_not_reported_as_done() {
    exports_virtio::contain_truncation().unwrap();
    let server = Server::start(1, SlowDevice::new(MIB), |config| config);
    let mut guest = Guest::boot(&server.socket, GuestConfig::default());
    // A region for data alone; the ring stays where it is.
    let data = QueueMemory::new(8192);
    let at = GUEST_BASE + (1 << 30);
    let region = [0, at, 8192, 0x1000_0000_0000, 0];
    assert!(guest.vmm.send_acked(Request::AddMemReg, &region, &[data.fd.as_raw_fd()]));
    let header = guest.scratch(0, 0);
    guest.memory.write(header, &Header { kind: VIRTIO_BLK_T_IN, ioprio: 0, sector: 1 }.to_bytes());
    let buffer = |addr, len, is_writable| Buffer { addr, len, is_writable };
    let chain = [buffer(header, 16, false), buffer(at, 512, true), buffer(header + 64, 1, true)];
    guest.submit_chain(0, &chain);
    guest.wait_used(0);
    assert!(!is_signalled(&guest.queues[0].err));
    File::from(data.fd.try_clone().unwrap()).set_len(0).unwrap();
    guest.submit_chain(0, &chain);
    assert!(wait_signal(&guest.queues[0].err, Duration::from_secs(60)));
    assert_eq!(guest.poll_used(0), None);
}

#[test]
fn memory_that_is_no_file_in_memory_is_refused_unless_it_is_allowed() {
    // Can be mapped everywhere, and is no file in memory.
    let file = File::options().read(true).write(true).open("/dev/zero").unwrap();
    let region = [1, GUEST_BASE, MIB, 0x7e00_0000_0000, 0];
    let inflight = [4096, 0, 1 | 16 << 16];
    for (memory, is_taken) in [(MemoryFiles::Ram, false), (MemoryFiles::Any, true)] {
        let server = Server::start(1, SlowDevice::new(MIB), |config| Config { memory, ..config });
        for (request, body) in [(Request::SetMemTable, &region[..]), (Request::SetInflightFd, &inflight)] {
            let guest = Guest::negotiate(&server.socket, GuestConfig::default());
            assert_eq!(guest.vmm.send_acked(request, body, &[file.as_raw_fd()]), is_taken, "{request:?}");
        }
        let mut guest = Guest::boot(&server.socket, GuestConfig::default());
        assert_eq!(guest.read(0, 1, 512), expected(512, 512));
    }
}

#[test]
fn a_broken_ring_completes_what_was_in_flight() {
    let server = Server::start(1, SlowDevice::new(MIB).held(), |config| config);
    let mut guest = Guest::boot(&server.socket, GuestConfig::default());
    let io = guest.submit(0, VIRTIO_BLK_T_IN, 5, Data::In(512));
    eventually("it is in flight", || server.device.in_flight() == 1);
    guest.offer(0, 999);
    server.device.release_soon();
    assert!(wait_signal(&guest.queues[0].err, Duration::from_secs(60)));
    assert_eq!(guest.wait_used(0).0, io.head);
    assert_eq!(guest.memory.read(io.data, 512), expected(5 * 512, 512));
}

#[test]
fn malformed_requests_are_answered_and_the_ring_goes_on() {
    let server = Server::start(1, SlowDevice::new(MIB), |config| config);
    let mut guest = Guest::boot(&server.socket, GuestConfig::default());
    let buffer = |addr, len, is_writable| Buffer { addr, len, is_writable };
    let at = guest.scratch(0, 40);
    let answer = |guest: &mut Guest, buffers: &[Buffer]| {
        guest.memory.write(at + 64, &[0xff]);
        guest.submit_chain(0, buffers);
        guest.wait_used(0);
        guest.memory.read(at + 64, 1)[0]
    };
    let status = buffer(at + 64, 1, true);
    assert_eq!(answer(&mut guest, &[status]), VIRTIO_BLK_S_IOERR, "no header");
    assert_eq!(answer(&mut guest, &[buffer(at, 15, false), status]), VIRTIO_BLK_S_IOERR, "half a header");
    for (kind, len) in
        [(VIRTIO_BLK_T_DISCARD, 0), (VIRTIO_BLK_T_DISCARD, 15), (VIRTIO_BLK_T_WRITE_ZEROES, 17)]
    {
        guest.memory.write(at, &Header { kind, ioprio: 0, sector: 0 }.to_bytes());
        let mut buffers = vec![buffer(at, 16, false), buffer(at + 1024, len, false), status];
        buffers.retain(|buffer| buffer.len > 0);
        assert_eq!(answer(&mut guest, &buffers), VIRTIO_BLK_S_IOERR, "type {kind} with {len} bytes");
    }
    let beyond = Range { sector: u64::MAX, num_sectors: u32::MAX, flags: 0 }.to_bytes();
    assert_eq!(guest.run(0, VIRTIO_BLK_T_WRITE_ZEROES, 0, Data::Out(&beyond)).0, VIRTIO_BLK_S_IOERR);
    assert_eq!(guest.run(0, VIRTIO_BLK_T_GET_ID, 0, Data::None).0, 0, "no room for the identity is no fault");
    assert_eq!(guest.read(0, 1, 512), expected(512, 512));
}

/// The messages of a whole session, cut anywhere.
fn whole_session(memory: &File) -> Vec<(Request, Vec<u64>, Vec<i32>)> {
    let fd = memory.as_raw_fd();
    let user = 0x7e00_0000_0000;
    vec![
        (Request::SetOwner, vec![], vec![]),
        (Request::GetFeatures, vec![], vec![]),
        (Request::GetProtocolFeatures, vec![], vec![]),
        (Request::SetProtocolFeatures, vec![1 | 1 << 3 | 1 << 9 | 1 << 12 | 1 << 15], vec![]),
        (
            Request::SetFeatures,
            vec![virtio::VHOST_USER_F_PROTOCOL_FEATURES | virtio::VIRTIO_F_VERSION_1],
            vec![],
        ),
        (Request::GetInflightFd, vec![0, 0, 1 | 16 << 16], vec![]),
        (Request::SetMemTable, vec![1, GUEST_BASE, MIB, user, 0], vec![fd]),
        (Request::SetVringNum, vec![pair(0, 16)], vec![]),
        (Request::SetVringBase, vec![pair(0, 0)], vec![]),
        (Request::SetVringAddr, vec![0, user, user + 0x2000, user + 0x1000, 0], vec![]),
        (Request::SetVringKick, vec![0x100], vec![]),
        (Request::SetVringEnable, vec![pair(0, 1)], vec![]),
        (Request::AddMemReg, vec![0, GUEST_BASE * 2, MIB, user * 2, 0], vec![fd]),
        (Request::GetVringBase, vec![pair(0, 0)], vec![]),
    ]
}

fn open_fds() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn mappings_of_memfds() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().matches("memfd:session").count()
}

fn memfd() -> File {
    // SAFETY: a fresh descriptor.
    let file = unsafe {
        let fd = libc::memfd_create(c"session".as_ptr(), libc::MFD_CLOEXEC);
        <File as std::os::fd::FromRawFd>::from_raw_fd(fd)
    };
    file.set_len(MIB).unwrap();
    file
}

#[test]
fn a_client_may_disappear_at_any_message_and_leaves_nothing() {
    let server = Server::start(1, SlowDevice::new(MIB), |config| config);
    let memory = memfd();
    let count = whole_session(&memory).len();
    let hang_up_after = |messages: usize, rest: &[u8]| {
        let vmm = Vmm::connect(&server.socket);
        for (request, body, fds) in whole_session(&memory).into_iter().take(messages) {
            vmm.send(request, &body, &fds);
        }
        vmm.send_raw(rest);
        let connections = server.export().stats().connections();
        drop(vmm);
        eventually("the session has ended", || {
            server.export().stats().connections() > connections || !server.export().stats().is_connected()
        });
    };
    hang_up_after(count, &[]);
    eventually("memory is given back", || server.device.regions().is_empty() && mappings_of_memfds() == 0);
    let fds = open_fds();
    for messages in 0..=count {
        hang_up_after(messages, &[]);
        hang_up_after(messages, &[5, 0, 0]);
        hang_up_after(messages, &[5, 0, 0, 0, 1, 0, 0, 0, 40, 0, 0, 0, 1]);
    }
    eventually("nothing is left", || {
        server.device.regions().is_empty() && mappings_of_memfds() == 0 && open_fds() <= fds
    });
    let mut guest = Guest::boot(&server.socket, GuestConfig::default());
    assert_eq!(guest.read(0, 4, 512), expected(2048, 512));
}

#[test]
fn messages_that_make_no_sense_end_the_connection_only() {
    let server = Server::start(1, SlowDevice::new(MIB), |config| config);
    let memory = memfd();
    let fd = memory.as_raw_fd();
    let not_an_event = File::open("/dev/null").unwrap();
    let (socket, _end) = std::os::unix::net::UnixStream::pair().unwrap();
    let user = 0x7e00_0000_0000;
    let table = |words: [u64; 5]| (Request::SetMemTable, words.to_vec(), vec![fd]);
    let bad: Vec<(Request, Vec<u64>, Vec<i32>)> = vec![
        (Request::SetFeatures, vec![u64::MAX], vec![]),
        (Request::SetProtocolFeatures, vec![u64::MAX], vec![]),
        (Request::SetVringNum, vec![pair(7, 16)], vec![]),
        (Request::SetVringNum, vec![pair(0, 0)], vec![]),
        (Request::SetVringNum, vec![pair(0, 17)], vec![]),
        (Request::SetVringNum, vec![pair(0, 1 << 20)], vec![]),
        (Request::SetVringAddr, vec![99, user, user, user, 0], vec![]),
        (Request::SetVringBase, vec![pair(1, 0)], vec![]),
        (Request::GetVringBase, vec![pair(64, 0)], vec![]),
        (Request::SetVringKick, vec![200], vec![fd]),
        (Request::SetVringKick, vec![0], vec![fd]),
        (Request::SetVringKick, vec![0], vec![]),
        (Request::SetVringCall, vec![0], vec![not_an_event.as_raw_fd()]),
        (Request::SetVringErr, vec![0], vec![socket.as_raw_fd()]),
        table([1, GUEST_BASE, MIB * 2, user, 0]),
        table([1, u64::MAX - 5, MIB, user, 0]),
        table([1, GUEST_BASE, 0, user, 0]),
        table([1, GUEST_BASE, MIB, user, u64::MAX - 4095]),
        table([33, GUEST_BASE, MIB, user, 0]),
        (Request::AddMemReg, vec![0, GUEST_BASE, MIB, user, 1 << 40], vec![fd]),
        (Request::RemMemReg, vec![0, GUEST_BASE, MIB, user, 0], vec![]),
        (Request::SetInflightFd, vec![10, 0, 1 | 16 << 16], vec![fd]),
        (Request::SetInflightFd, vec![64, u64::MAX - 63, 1 | 16 << 16], vec![fd]),
        (Request::GetInflightFd, vec![0, 0, 0], vec![]),
        (Request::GetInflightFd, vec![0, 0, 2 | 16 << 16], vec![]),
        (Request::SetLogBase, vec![1 << 40, 0], vec![fd]),
        (Request::SetConfig, vec![1 << 32, 0], vec![]),
        (Request::SetBackendReqFd, vec![], vec![fd]),
    ];
    for (request, body, fds) in bad {
        let guest = Guest::negotiate(&server.socket, GuestConfig::default());
        guest.vmm.send(request, &body, &fds);
        assert!(guest.vmm.is_hung_up(), "{request:?} {body:x?}");
    }
    let mut rng = Rng::new(1);
    for _ in 0..200 {
        let vmm = Vmm::connect(&server.socket);
        let mut noise = [0u8; 64];
        noise.fill_with(|| rng.draw() as u8);
        // A sound header before the noise gets it further.
        let (request, len) = (noise[61] % 45, noise[60] % 48);
        noise[..12].copy_from_slice(&[request, 0, 0, 0, 1, 0, 0, 0, len, 0, 0, 0]);
        let _ = (&vmm.socket).write_all(&noise);
    }
    let mut guest = Guest::boot(&server.socket, GuestConfig::default());
    assert_eq!(guest.read(0, 4, 512), expected(2048, 512));
}

#[test]
fn a_ring_that_changes_underneath_ends_in_answers_or_in_an_error() {
    let server = Server::start(1, SlowDevice::new(MIB), |config| config);
    let mut guest = Guest::boot(&server.socket, GuestConfig::default());
    let at = guest.scratch(0, 0);
    guest.memory.write(at, &Header { kind: VIRTIO_BLK_T_IN, ioprio: 0, sector: 0 }.to_bytes());
    let mut seed = 1u64;
    for round in 0..3000u32 {
        let size = guest.config.size;
        for i in 0..size {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let flags = (seed >> 32) as u16 & 7;
            let len = [1, 16, 512, 17, 0x10_0000, 0][(seed >> 40) as usize % 6];
            guest.set_desc(0, i, at + (seed >> 50) % 4096, len, flags, (seed >> 20) as u16 % (size + 1));
        }
        guest.offer(0, (seed >> 10) as u16 % size);
        if round % 7 == 0 && is_signalled(&guest.queues[0].err) {
            let _ = guest.stop_queue(0);
            guest.queues[0].ring.avail_idx().store(0, Ordering::SeqCst);
            guest.queues[0].ring.used_idx().store(0, Ordering::SeqCst);
            guest.queues[0].next_avail = 0;
            guest.start_queue(0, 0);
        }
    }
    drop(guest);
    let mut guest = Guest::boot(&server.socket, GuestConfig::default());
    assert_eq!(guest.read(0, 4, 512), expected(2048, 512));
}

#[test]
fn a_request_with_more_memory_than_the_used_ring_can_count_is_answered() {
    let server = Server::start(1, SlowDevice::new(MIB), |config| config);
    let mut guest = Guest::boot(&server.socket, GuestConfig { memory: 1 << 32, ..GuestConfig::default() });
    let at = guest.scratch(0, 0);
    guest.memory.write(at, &Header { kind: VIRTIO_BLK_T_FLUSH, ioprio: 0, sector: 0 }.to_bytes());
    guest.memory.write(at + 64, &[0xff]);
    let buffer = |addr, len, is_writable| Buffer { addr, len, is_writable };
    let huge = buffer(GUEST_BASE, u32::MAX, true);
    guest.submit_chain(0, &[buffer(at, 16, false), huge, huge, buffer(at + 64, 1, true)]);
    assert_eq!(guest.wait_used(0).1, u32::MAX);
    assert_eq!(guest.memory.read(at + 64, 1), [VIRTIO_BLK_S_OK]);
    assert_eq!(guest.read(0, 1, 512), expected(512, 512));
}
