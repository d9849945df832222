//! An open namespace: its limits, its queues, and its connection thread.

use super::connection_thread;
use super::controller::Controller;
use super::error::OpenError;
use super::facts::{Facts, Structures};
use super::identity::Identity;
use super::link::Terms;
use super::options::Options;
use super::queue_mailbox::{Connection, QueueMailbox, lock};
use super::shared::{Job, Shared, Task, event};
use ::stream::{Wakeup, Wire};
use block::{Limits, SharedLimits};
use drivers::stream::{Cancel, Deadline};
use nvme::fabrics::property::Capabilities;
use nvme::tcp::{Framing, MIN_MAX_H2C_DATA};
use nvme::{IDENTIFY_BYTES, IdentifyData};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use vmm_sys_util::eventfd::EventFd;

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
        let mut host = Identity::new(options.clone())?;
        let deadline = Deadline::new(options.timeout_ms, cancel);
        let (controller, facts) = Controller::connect(&host, &deadline)?;
        // From now on it is this namespace.
        host.options.nsid = Some(facts.nsid);
        let shared = Arc::new(Shared::new(&host.options, facts, controller.queues)?);
        let (name, capacity) = (&shared.name, facts.capacity);
        tracing::info!(device = %name, capacity, queues = controller.queues, "connected");
        let stop = Cancel::new().map_err(OpenError::System)?;
        let (of_thread, cancel) = (shared.clone(), stop.clone());
        let thread = reactor::spawn_thread("nvme-tcp", move || {
            connection_thread::run(&of_thread, host, controller, &cancel)
        });
        let thread = Some(thread.map_err(OpenError::System)?);
        Ok(Arc::new(Session { shared, thread, stop }))
    }

    /// A lease of the queue of a session without a controller, over `socket`.
    pub(super) fn lease_detached(
        socket: OwnedFd,
        options: &Options,
        controller: &IdentifyData,
        namespace: &IdentifyData,
    ) -> Result<(Lease, Wakeup), OpenError> {
        options.check().map_err(OpenError::Options)?;
        let nothing = [0; IDENTIFY_BYTES];
        let facts = Facts::new(&Structures {
            capabilities: Capabilities::parse(0xffff),
            controller,
            nsid: options.nsid.unwrap_or(1),
            namespace,
            descriptors: &nothing,
            limits: &nothing,
        })?;
        let options = Options { nsid: Some(facts.nsid), ..options.clone() };
        let shared = Shared { is_detached: true, ..Shared::new(&options, facts, 1)? };
        let stop = Cancel::never();
        let session = Arc::new(Session { shared: Arc::new(shared), thread: None, stop });
        let wakeup = Wakeup::new().map_err(OpenError::System)?;
        let event = wakeup.share_event().map_err(OpenError::System)?;
        let lease = Lease::take(&session, options.queue_depth, event)?;
        let (header_digest, data_digest) = (options.header_digest, options.data_digest);
        let framing = Framing { header_digest, data_digest, ..Framing::default() };
        let terms = Terms { to_send: framing, to_receive: framing, max_h2c_data: MIN_MAX_H2C_DATA };
        lease.mailbox.connected(Connection { wire: Wire::new(Arc::new(socket), None), terms, facts });
        Ok((lease, wakeup))
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

    /// Leases a queue of at most `depth` requests and connects it.
    pub(super) fn lease(self: &Arc<Self>, depth: u32, cancel: &Cancel) -> Result<(Lease, Wakeup), OpenError> {
        let options = Options { queue_depth: depth, ..self.shared.options.clone() };
        options.check().map_err(OpenError::Options)?;
        // A queue is full when all entries but one are in use.
        let facts = self.facts();
        let depth = depth.min(facts.max_entries.saturating_sub(1)).min(facts.max_commands).max(1);
        let wakeup = Wakeup::new().map_err(OpenError::System)?;
        let event = wakeup.share_event().map_err(OpenError::System)?;
        let lease = Lease::take(self, depth, event)?;
        self.ask(Task::Connect(lease.mailbox.clone()), cancel)?;
        Ok((lease, wakeup))
    }

    /// Maximum requests of a queue, if its caller names no other number.
    pub(super) fn queue_depth(&self) -> u32 {
        self.shared.options.queue_depth
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
        let deadline = Deadline::new(self.shared.options.timeout_ms, cancel);
        let waited = deadline.wait(job.done.as_raw_fd(), libc::POLLIN, None);
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
