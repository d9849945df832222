//! A transport in memory: hosts put commands into plain queues, without a socket or PDUs. Shows
//! that a subsystem needs no more of a transport than its interface.

use block::{Data, Limits, Segment};
use conformance::slow::{SlowDevice, pattern};
use exports::{ConnectionStats, DataMemory, Error, Stats};
use nvme::command::{Command as Nvme, admin, cns};
use nvme::fabrics::property::{Configuration, PropertySet, offset};
use nvme::fabrics::{ANY_CONTROLLER, Connect, ConnectData, Nqn};
use nvme::identify::controller_data::ControllerData;
use nvme::reservation::{Acquire, AcquireAction, Register, RegisterAction, ReservationType};
use nvme::{AccessState, CompletionEntry, Sgl, Status, SubmissionEntry};
use nvme_auth::tls_key::TlsSecret;
use nvme_target::{
    Answer, Command, Connection, Directory, Entrance, Failure, Listed, NamespaceConfig, Newcomer, Port,
    Queue, Refusal, Subsystem, SubsystemConfig, Transport,
};
use reactor::{CoreConfig, Cores, Permits, current, yield_now};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Weak};

const SUBSYSTEM: &str = "nqn.2014-08.org.example:disk";
/// TRTYPE of RDMA: any but that of TCP.
const TRTYPE: u8 = 1;
const BLOCK: usize = 512;

/// Memory on the heap.
struct Heap {
    _bytes: Box<[u8]>,
    segments: [Segment; 1],
}

impl Heap {
    fn new(bytes: &[u8]) -> Heap {
        let mut bytes: Box<[u8]> = bytes.into();
        let segments = [Segment { base: bytes.as_mut_ptr(), len: bytes.len() }];
        Heap { _bytes: bytes, segments }
    }
}

// SAFETY: the segment is that of the bytes on the heap, which we own.
unsafe impl DataMemory for Heap {
    fn len(&self) -> usize {
        self.segments[0].len
    }

    unsafe fn data(&self) -> Data<'_> {
        // SAFETY: by contract; the segment is that of the bytes, which we own.
        unsafe { Data::new(&self.segments) }
    }
}

/// The connection as the controller sees it. Counts how often it was disconnected.
#[derive(Default)]
struct Line(AtomicU32);

impl Connection for Line {
    fn disconnect(&self, _is_silent: bool) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// The two queues of a connection, and the host's buffers.
struct Plain {
    stats: ConnectionStats,
    scratch: Permits,
    /// The data of commands, by their identifier.
    outgoing: RefCell<BTreeMap<u16, Vec<u8>>>,
    completions: RefCell<Vec<(CompletionEntry, Vec<u8>)>>,
    is_gone: Cell<bool>,
}

/// Scratch memory, until it is dropped.
struct Scratch<'a>(&'a Permits);

impl Drop for Scratch<'_> {
    fn drop(&mut self) {
        self.0.release(1);
    }
}

impl Transport for Plain {
    type Memory = Heap;

    const IN_CAPSULE_BYTES: u32 = 4096;

    fn stats(&self) -> &ConnectionStats {
        &self.stats
    }

    fn is_broken(&self) -> bool {
        self.is_gone.get()
    }

    fn is_secured(&self) -> bool {
        false
    }

    fn local_address(&self) -> Option<SocketAddr> {
        "192.0.2.1:4420".parse().ok()
    }

    async fn memory(&self, len: usize) -> Heap {
        Heap::new(&vec![0; len])
    }

    fn uncounted(&self, len: usize) -> Heap {
        Heap::new(&vec![0; len])
    }

    async fn scratch(&self) -> impl Sized {
        self.scratch.acquire(1).await;
        Scratch(&self.scratch)
    }

    async fn fetch(&self, command_id: u16, len: usize) -> Result<Heap, Failure> {
        yield_now().await; // as a network would
        match self.outgoing.borrow_mut().remove(&command_id).filter(|bytes| bytes.len() == len) {
            Some(bytes) if !self.is_gone.get() => Ok(Heap::new(&bytes)),
            _ => Err(Failure::Gone),
        }
    }
}

/// A subsystem of a portal; this transport keeps no more about it.
struct Service(Arc<Subsystem>);

impl Listed for Service {
    type Tls = ();

    fn subsystem(&self) -> &Arc<Subsystem> {
        &self.0
    }

    fn tls<'a>(_: impl Iterator<Item = &'a TlsSecret>) -> Result<(), Error> {
        Err(Error::Config("this transport has no TLS".into()))
    }
}

/// A connected queue of a host.
struct Host {
    queue: Rc<Queue>,
    transport: Rc<Plain>,
    line: Arc<Line>,
    controller: u16,
    next_id: Cell<u16>,
}

/// How a command ended.
struct Done {
    status: Status,
    result: u64,
    data: Vec<u8>,
}

impl Host {
    /// Connects a queue of the host with this number, on the calling core.
    fn connect(entrance: &Entrance<Service>, number: u8, queue_id: u16, id: u16) -> Result<Host, Refusal> {
        let attributes = Connect::NO_FLOW_CONTROL;
        let connect = Connect { record_format: 0, queue_id, entries: 32, attributes, keep_alive_ms: 0 };
        let data = ConnectData {
            host_id: [number; 16],
            controller_id: id,
            subsystem: Nqn::new(SUBSYSTEM).unwrap(),
            host: Nqn::new(&format!("nqn.2014-08.org.example:host{number}")).unwrap(),
        };
        let entry = connect.entry(0, Sgl::InCapsule { offset: 0, len: 1024 });
        let newcomer = Newcomer { peer: "memory", proven: None };
        let (_, admission) = entrance.connect(newcomer, &entry, &data.encode())?;
        let controller = admission.controller().clone();
        let line = Arc::new(Line::default());
        let connection: Arc<dyn Connection> = line.clone();
        controller.attach(queue_id, &connection);
        let weak: Weak<dyn Connection> = Arc::downgrade(&connection);
        let stats = Arc::new(Stats::new(1));
        let transport = Plain {
            stats: ConnectionStats::new(stats.queues[0].clone(), stats.connect()),
            scratch: Permits::new(1),
            outgoing: RefCell::default(),
            completions: RefCell::default(),
            is_gone: Cell::new(false),
        };
        Ok(Host {
            queue: Rc::new(Queue::open(admission, 0, &weak).unwrap()),
            transport: Rc::new(transport),
            line,
            controller: controller.id,
            next_id: Cell::new(0),
        })
    }

    /// An admin queue that is enabled, and an I/O queue.
    async fn pair(entrance: &Entrance<Service>, number: u8) -> (Host, Host) {
        let admin = Host::connect(entrance, number, 0, ANY_CONTROLLER).ok().unwrap();
        let enable =
            PropertySet { bytes: 4, offset: offset::CC, value: Configuration::ENABLED.encode().into() };
        assert_eq!(admin.finish(admin.submit(|id| enable.entry(id), &[])).await.status, Status::SUCCESS);
        let io = Host::connect(entrance, number, 1, admin.controller).ok().unwrap();
        (admin, io)
    }

    /// Puts a command into the submission queue. Returns its identifier.
    fn submit(&self, entry: impl FnOnce(u16) -> SubmissionEntry, data: &[u8]) -> u16 {
        let id = self.next_id.get();
        self.next_id.set(id + 1);
        let entry = entry(id);
        let is_in_capsule = matches!(entry.sgl, Sgl::InCapsule { .. });
        if !is_in_capsule && !data.is_empty() {
            self.transport.outgoing.borrow_mut().insert(id, data.to_vec());
        }
        let command = Command { entry, data: is_in_capsule.then(|| Heap::new(data)), is_intact: true };
        let (queue, transport) = (self.queue.clone(), self.transport.clone());
        queue.hear();
        current().spawn(async move {
            if let Some(Answer { completion, data }) = queue.execute(command, &*transport).await {
                let mut bytes = vec![0; data.as_ref().map_or(0, DataMemory::len)];
                data.into_iter().for_each(|mut data| data.copy_to(&mut bytes));
                transport.completions.borrow_mut().push((completion, bytes));
            }
        });
        id
    }

    /// The completion of a command, once it has one.
    fn completed(&self, id: u16) -> Option<Done> {
        let mut completions = self.transport.completions.borrow_mut();
        let place = completions.iter().position(|(completion, _)| completion.command_id == id)?;
        let (completion, data) = completions.swap_remove(place);
        Some(Done { status: completion.status, result: completion.result, data })
    }

    async fn finish(&self, id: u16) -> Done {
        loop {
            match self.completed(id) {
                Some(done) => return done,
                None => yield_now().await,
            }
        }
    }

    /// Runs a command with room for `room` bytes of data.
    async fn run(&self, command: &Nvme, room: usize) -> Done {
        let len = room as u32;
        self.finish(self.submit(|id| SubmissionEntry::new(command, id, Sgl::Transport { len }), &[])).await
    }

    /// Runs a command with data in its capsule, or in the host's buffer.
    async fn run_with(&self, command: &Nvme, data: &[u8], is_in_capsule: bool) -> Done {
        let len = data.len() as u32;
        let sgl = if is_in_capsule { Sgl::InCapsule { offset: 0, len } } else { Sgl::Transport { len } };
        self.finish(self.submit(|id| SubmissionEntry::new(command, id, sgl), data)).await
    }

    async fn read(&self, lba: u64, blocks: u32) -> Done {
        self.run(&Nvme::read(1, lba, blocks), blocks as usize * BLOCK).await
    }

    async fn write(&self, lba: u64, data: &[u8], is_in_capsule: bool) -> Status {
        let blocks = (data.len() / BLOCK) as u32;
        self.run_with(&Nvme::write(1, lba, blocks, false), data, is_in_capsule).await.status
    }
}

/// Runs `test` on a core, with the entrance of a portal with one subsystem.
fn with_subsystem<F>(test: impl FnOnce(Entrance<Service>, Arc<SlowDevice>) -> F + Send + 'static)
where
    F: Future<Output = ()> + 'static,
{
    let cores = Cores::start(&[CoreConfig::default()]).unwrap();
    let device = Arc::new(SlowDevice::with_limits(Limits { volatile_cache: true, ..Limits::new(1 << 20) }));
    let namespaces = [NamespaceConfig { device: device.clone(), uuid: None }];
    let config = SubsystemConfig::new(Nqn::new(SUBSYSTEM).unwrap());
    let ports = || {
        let address = "192.0.2.1:4420".parse().ok();
        vec![Arc::new(Port::new(1, TRTYPE, AccessState::Optimized, address, None))]
    };
    let mut subsystem = Subsystem::open(&config, &namespaces, cores.all(), "memory".into()).unwrap();
    subsystem.ports = ports();
    let directory = Directory::new("portal".into());
    let discovery = directory.discovery("serial".into(), ports(), cores.all());
    let discovery = Arc::new(Service(Arc::new(discovery.unwrap())));
    directory.add(Arc::new(Service(Arc::new(subsystem)))).unwrap();
    let entrance = Entrance { directory, discovery, port: 0, portal: "portal".into() };
    cores.all()[0].block_on(move |_| test(entrance, device)).unwrap();
}

#[test]
fn a_host_identifies_reads_and_writes_over_plain_queues() {
    with_subsystem(|entrance, device| async move {
        let (admin, io) = Host::pair(&entrance, 1).await;
        let done = admin.run(&Nvme::identify(0, cns::CONTROLLER, 0), 4096).await;
        let data = ControllerData::parse(done.data.first_chunk().unwrap());
        assert_eq!((done.status, data.subsystem.as_str()), (Status::SUCCESS, SUBSYSTEM));
        assert_eq!(data.command_capsule_units, (64 + Plain::IN_CAPSULE_BYTES) / 16);
        let done = io.read(8, 2).await;
        let expected: Vec<u8> = (8 * BLOCK as u64..10 * BLOCK as u64).map(pattern).collect();
        assert!(done.status == Status::SUCCESS && done.data == expected);
        assert_eq!(io.write(0, &[7; BLOCK], true).await, Status::SUCCESS);
        assert_eq!(io.write(1, &[8; 3 * BLOCK], false).await, Status::SUCCESS);
        assert_eq!(device.bytes(0, 4 * BLOCK), [[7; BLOCK].as_slice(), &[8; 3 * BLOCK]].concat());
        assert_eq!(io.read(1 << 20, 1).await.status, Status::LBA_OUT_OF_RANGE);
        assert_eq!(
            io.run_with(&Nvme::write(1, 0, 2, false), &[0; BLOCK], true).await.status,
            Status::INVALID_SGL_LENGTH
        );
        // The connection breaks while the target waits for data: there is no answer.
        io.transport.is_gone.set(true);
        let id = io.submit(
            |id| SubmissionEntry::new(&Nvme::write(1, 0, 1, false), id, Sgl::Transport { len: 512 }),
            &[9; BLOCK],
        );
        for _ in 0..4 {
            yield_now().await;
        }
        assert!(io.completed(id).is_none() && device.bytes(0, 1) == [7]);
    });
}

#[test]
fn a_reservation_keeps_another_host_from_writing() {
    with_subsystem(|entrance, _device| async move {
        let (_first_admin, first) = Host::pair(&entrance, 1).await;
        let (_second_admin, second) = Host::pair(&entrance, 2).await;
        let register = Register {
            action: RegisterAction::Register,
            ignores_key: false,
            persists: None,
            current: 0,
            new: 1,
        };
        let (command, keys) = register.command(1);
        assert_eq!(first.run_with(&command, &keys, true).await.status, Status::SUCCESS);
        let kind = ReservationType::WriteExclusive;
        let acquire = Acquire { action: AcquireAction::Acquire, kind, current: 1, preempted: 0 };
        let (command, keys) = acquire.command(1);
        assert_eq!(first.run_with(&command, &keys, false).await.status, Status::SUCCESS);
        assert_eq!(second.write(0, &[1; BLOCK], true).await, Status::RESERVATION_CONFLICT);
        assert_eq!(second.read(0, 1).await.status, Status::SUCCESS);
        assert_eq!(first.write(0, &[1; BLOCK], true).await, Status::SUCCESS);
    });
}

#[test]
fn an_abort_completes_while_a_command_is_in_flight_and_the_end_of_the_admin_queue_ends_the_others() {
    with_subsystem(|entrance, device| async move {
        let (admin, io) = Host::pair(&entrance, 1).await;
        device.hold();
        let read = Nvme::read(1, 0, 1);
        let held = io.submit(|id| SubmissionEntry::new(&read, id, Sgl::Transport { len: 512 }), &[]);
        yield_now().await;
        let abort = Nvme { opcode: admin::ABORT, nsid: 0, cdw: [u32::from(held) << 16 | 1, 0, 0, 0, 0, 0] };
        let done = admin.run(&abort, 0).await;
        // Bit 0: the command was not aborted.
        assert_eq!((done.status, done.result), (Status::SUCCESS, 1));
        assert!(io.completed(held).is_none());
        device.release();
        assert_eq!(io.finish(held).await.status, Status::SUCCESS);
        // An event request ends without an answer, and the I/O queue is disconnected.
        let event = Nvme::async_event_request();
        let event = admin.submit(|id| SubmissionEntry::new(&event, id, Sgl::None), &[]);
        yield_now().await;
        admin.queue.end();
        for _ in 0..4 {
            yield_now().await;
        }
        assert!(admin.completed(event).is_none());
        let (id, line) = (admin.controller, io.line.clone());
        drop(admin);
        assert_eq!(line.0.load(Ordering::Relaxed), 1);
        assert!(Host::connect(&entrance, 1, 2, id).is_err(), "its controller is gone");
    });
}
