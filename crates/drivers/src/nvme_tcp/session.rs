//! An open namespace: its limits, its queues, and its connection thread.

use super::connection_thread;
use super::controller::Controller;
use super::error::OpenError;
use super::facts::{Facts, Told};
use super::link::Terms;
use super::options::{Options, host};
use super::queue::NvmeTcpQueue;
use super::queue_mailbox::{Connection, QueueMailbox, lock};
use crate::stream::Cancel;
use crate::stream::connect::Patience;
use crate::stream::wakeup::Wakeup;
use block::{Limits, SharedLimits};
use nvme::fabrics::property::Capabilities;
use nvme::fabrics::{ANY_CONTROLLER, ConnectData};
use nvme::tcp::{Framing, MIN_MAX_H2C_DATA};
use nvme::{IDENTIFY_BYTES, IdentifyData};
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use vmm_sys_util::eventfd::EventFd;

/// A job for the connection thread.
pub(super) enum Task {
    /// Connect the queue of a mailbox.
    Connect(Arc<QueueMailbox>),
    /// Query the size of the namespace.
    Refresh,
}

/// A job and its result.
pub(super) struct Job {
    pub(super) task: Task,
    done: EventFd,
    answer: Mutex<Option<Result<(), OpenError>>>,
    /// Whether the requester stopped waiting.
    is_dropped: AtomicBool,
}

impl Job {
    pub(super) fn answer(&self, answer: Result<(), OpenError>) {
        *lock(&self.answer) = Some(answer);
        // Fails only when the counter is full; then the event is raised already.
        let _ = self.done.write(1);
    }

    pub(super) fn is_dropped(&self) -> bool {
        self.is_dropped.load(Ordering::Acquire)
    }
}

/// The state that session, queues and connection thread share.
pub(super) struct Shared {
    pub(super) name: String,
    pub(super) options: Options,
    /// The host's identity.
    pub(super) host: ConnectData,
    pub(super) limits: Arc<SharedLimits>,
    /// The properties of the opened namespace: after a loss it must be the same namespace.
    pub(super) facts: Facts,
    /// I/O queues granted by the controller.
    pub(super) max_queues: AtomicU32,
    pub(super) wake: EventFd,
    pub(super) jobs: Mutex<VecDeque<Arc<Job>>>,
    pub(super) mailboxes: Mutex<Mailboxes>,
    /// The reason why a queue aborted its connection.
    pub(super) lost: Mutex<Option<String>>,
    pub(super) is_stopping: AtomicBool,
    /// Whether there is no connection thread.
    is_detached: bool,
}

/// The mailboxes of all queues.
#[derive(Default)]
pub(super) struct Mailboxes {
    /// Reserved identifiers; `true` for queues that were connected and must be reconnected after a
    /// loss.
    pub(super) taken: Vec<(Arc<QueueMailbox>, bool)>,
    /// The identifier that was assigned last: a target needs some time to release a used one.
    last_id: u16,
    /// The reason why there are no connections any more.
    pub(super) dead: Option<Arc<str>>,
}

impl Shared {
    fn new(options: &Options, host: ConnectData, facts: Facts, queues: u32) -> Result<Shared, OpenError> {
        let options = Options { nsid: Some(facts.nsid), ..options.clone() };
        Ok(Shared {
            limits: SharedLimits::new(facts.limits(options.read_only)),
            name: options.name(),
            options,
            host,
            facts,
            max_queues: AtomicU32::new(queues),
            wake: event()?,
            jobs: Mutex::default(),
            mailboxes: Mutex::default(),
            lost: Mutex::default(),
            is_stopping: AtomicBool::new(false),
            is_detached: false,
        })
    }

    /// Reports that a queue's connection is unusable.
    pub(super) fn report_lost(&self, why: String) {
        if self.is_detached {
            let why = why.into();
            lock(&self.mailboxes).taken.iter().for_each(|(mailbox, _)| mailbox.give_up(&why));
            return;
        }
        lock(&self.lost).get_or_insert(why);
        self.wake();
    }

    pub(super) fn wake(&self) {
        let _ = self.wake.write(1);
    }
}

/// An open namespace. A connection thread maintains its controller: it sends keep-alive commands,
/// handles events, and reconnects after a loss.
pub struct Session {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
    stop: Cancel,
}

impl Session {
    /// Connects to the controller and queries the namespace. Blocks for at most the options'
    /// timeout.
    ///
    /// # Errors
    /// When there is no target, the subsystem or namespace does not exist, or `cancel` was called.
    pub fn open(options: &Options, cancel: &Cancel) -> Result<Arc<Session>, OpenError> {
        options.check().map_err(OpenError::Options)?;
        let (host_id, host) = host(options);
        let (controller_id, subsystem) = (ANY_CONTROLLER, options.nqn.clone());
        let host = ConnectData { host_id, controller_id, subsystem, host };
        let patience = Patience::new(options.timeout_ms, cancel);
        let (controller, facts) = Controller::connect(options, &host, &patience)?;
        let shared = Arc::new(Shared::new(options, host, facts, controller.queues)?);
        let (name, capacity) = (&shared.name, facts.capacity);
        tracing::info!(device = %name, capacity, queues = controller.queues, "connected");
        let stop = Cancel::new().map_err(OpenError::System)?;
        let (of_thread, cancel) = (shared.clone(), stop.clone());
        let thread = reactor::spawn_thread("nvme-tcp", move || {
            connection_thread::run(&of_thread, controller, &cancel)
        });
        let thread = Some(thread.map_err(OpenError::System)?);
        Ok(Arc::new(Session { shared, thread, stop }))
    }

    /// Creates the queue of a session without a controller, over a socket that accepts commands at
    /// once. The caller supplies the controller's structures; digests follow the options, and
    /// nothing reconnects. For tests and fuzzers that play the target.
    ///
    /// # Errors
    /// When the structures or the options are invalid.
    pub fn detached(
        socket: OwnedFd,
        options: &Options,
        controller: &IdentifyData,
        namespace: &IdentifyData,
    ) -> Result<NvmeTcpQueue, OpenError> {
        options.check().map_err(OpenError::Options)?;
        let nothing = [0; IDENTIFY_BYTES];
        let facts = Facts::new(&Told {
            capabilities: Capabilities::parse(0xffff),
            controller,
            nsid: options.nsid.unwrap_or(1),
            namespace,
            descriptors: &nothing,
            limits: &nothing,
        })?;
        let (host_id, host) = host(options);
        let host = ConnectData { host_id, controller_id: 1, subsystem: options.nqn.clone(), host };
        let shared = Shared { is_detached: true, ..Shared::new(options, host, facts, 1)? };
        let stop = Cancel::never();
        let session = Arc::new(Session { shared: Arc::new(shared), thread: None, stop });
        let wakeup = Wakeup::new().map_err(OpenError::System)?;
        let event = wakeup.share_event().map_err(OpenError::System)?;
        let lease = Lease::take(&session, options.queue_depth, event)?;
        let (header_digest, data_digest) = (options.header_digest, options.data_digest);
        let framing = Framing { header_digest, data_digest, ..Framing::default() };
        let terms = Terms { to_send: framing, to_receive: framing, max_h2c_data: MIN_MAX_H2C_DATA };
        lease.mailbox.connected(Connection { socket: socket.into(), terms, facts })?;
        Ok(NvmeTcpQueue::new(lease, wakeup))
    }

    /// A name for people.
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// The properties of the controller and the namespace when it was opened.
    pub fn facts(&self) -> &Facts {
        &self.shared.facts
    }

    /// The current limits of the device.
    pub fn limits(&self) -> Limits {
        self.shared.limits.get()
    }

    /// The limits that change with the namespace.
    pub fn shared_limits(&self) -> &Arc<SharedLimits> {
        &self.shared.limits
    }

    /// Maximum number of concurrent queues.
    pub fn max_queues(&self) -> u32 {
        self.shared.max_queues.load(Ordering::Relaxed)
    }

    /// Starts a queue with its own connection, which blocks as [`Session::open`] does.
    ///
    /// # Errors
    /// When all queues are in use, the target refuses, or the timeout expires.
    pub fn start_queue(self: &Arc<Self>, cancel: &Cancel) -> Result<NvmeTcpQueue, OpenError> {
        self.start_queue_of(self.shared.options.queue_depth, cancel)
    }

    /// As [`Session::start_queue`], for another number of requests: 1 to
    /// [`super::MAX_QUEUE_DEPTH`], or less if the controller supports less.
    pub fn start_queue_of(self: &Arc<Self>, depth: u32, cancel: &Cancel) -> Result<NvmeTcpQueue, OpenError> {
        let options = Options { queue_depth: depth, ..self.shared.options.clone() };
        options.check().map_err(OpenError::Options)?;
        // A queue is full when all entries but one are in use.
        let facts = self.facts();
        let depth = depth.min(facts.max_entries.saturating_sub(1)).min(facts.max_commands).max(1);
        let wakeup = Wakeup::new().map_err(OpenError::System)?;
        let event = wakeup.share_event().map_err(OpenError::System)?;
        let lease = Lease::take(self, depth, event)?;
        self.ask(Task::Connect(lease.mailbox.clone()), cancel)?;
        Ok(NvmeTcpQueue::new(lease, wakeup))
    }

    /// Queries the namespace's size and updates [`Session::limits`]. If the controller reports
    /// changes, the session notices them without this.
    ///
    /// # Errors
    /// When the timeout expires.
    pub fn refresh(&self, cancel: &Cancel) -> Result<(), OpenError> {
        self.ask(Task::Refresh, cancel)
    }

    fn ask(&self, task: Task, cancel: &Cancel) -> Result<(), OpenError> {
        let (answer, is_dropped) = (Mutex::default(), AtomicBool::new(false));
        let job = Arc::new(Job { task, done: event()?, answer, is_dropped });
        lock(&self.shared.jobs).push_back(job.clone());
        self.shared.wake();
        let patience = Patience::new(self.shared.options.timeout_ms, cancel);
        let waited = patience.wait(job.done.as_raw_fd(), libc::POLLIN, None);
        job.is_dropped.store(true, Ordering::Release);
        match lock(&job.answer).take() {
            Some(answer) => answer,
            None => Err(waited.err().map_or(OpenError::Lost("no answer".into()), OpenError::Stream)),
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        self.shared.is_stopping.store(true, Ordering::Release);
        self.stop.cancel();
        self.shared.wake();
        if let Some(thread) = self.thread.take() {
            // The panic was reported already.
            let _ = thread.join();
        }
    }
}

fn event() -> Result<EventFd, OpenError> {
    EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK).map_err(OpenError::System)
}

/// The right to a queue; released when dropped.
pub(super) struct Lease {
    session: Arc<Session>,
    pub(super) mailbox: Arc<QueueMailbox>,
}

impl Lease {
    fn take(session: &Arc<Session>, depth: u32, event: EventFd) -> Result<Lease, OpenError> {
        let most = session.max_queues();
        let mut mailboxes = lock(&session.shared.mailboxes);
        if let Some(why) = &mailboxes.dead {
            return Err(OpenError::Lost(why.to_string()));
        }
        let is_free = |id: &u16| mailboxes.taken.iter().all(|(mailbox, _)| mailbox.queue_id != *id);
        let after = (mailboxes.last_id..most as u16).map(|id| id + 1);
        let id = after.chain(1..=most as u16).find(is_free).ok_or(OpenError::AllInUse(most))?;
        let mailbox = Arc::new(QueueMailbox::new(id, depth, event));
        mailboxes.taken.push((mailbox.clone(), false));
        mailboxes.last_id = id;
        Ok(Lease { session: session.clone(), mailbox })
    }

    pub(super) fn session(&self) -> &Arc<Session> {
        &self.session
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.session.shared
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        lock(&self.session.shared.mailboxes)
            .taken
            .retain(|(mailbox, _)| !Arc::ptr_eq(mailbox, &self.mailbox));
    }
}
