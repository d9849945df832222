//! A controller: what one host has of the subsystem. Made with its admin queue, and gone with it.
//!
//! Its connections are served by any cores; what they share is locked, and is nothing that reads and writes need.

use super::ports::Port;
use super::reservations::Rights;
use super::subsystem::{Refusal, Subsystem};
use nvme::Status;
use nvme::command::event::{CONFIG_ASYMMETRIC_ACCESS, CONFIG_NAMESPACE_ATTRIBUTES, Event};
use nvme::fabrics::property::{Configuration, ControllerStatus};
use nvme::fabrics::{InvalidParameter, Nqn};
use nvme::reservation::{Happening, NOTIFICATION_BYTES, Notification};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};

/// Asynchronous event requests that may wait at a time.
pub(super) const MAX_EVENT_REQUESTS: usize = 4;
/// Notifications about reservations that wait to be read; older ones are lost.
const MAX_NOTIFICATIONS: usize = 255;
/// Bits of a controller's rights.
const MAY_READ: u8 = 1;
const MAY_WRITE: u8 = 2;
/// Configuration.shutdown: none asked for.
const NO_SHUTDOWN: u8 = 0;
/// ControllerStatus.shutdown: done.
const SHUTDOWN_COMPLETE: u8 = 2;

/// Who a host is.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Host {
    pub(super) nqn: Nqn,
    pub(super) id: [u8; 16],
}

/// One host's controller.
pub(super) struct Controller {
    pub(super) id: u16,
    pub(super) host: Host,
    pub(super) is_discovery: bool,
    pub(super) subsystem: Arc<Subsystem>,
    /// Where its host came.
    pub(super) port: Arc<Port>,
    /// What reservations let its host do, by namespace. Every command looks at it, hardly anybody writes it.
    rights: Box<[AtomicU8]>,
    /// The host may be silent for so long; 0: for ever.
    keep_alive_ms: AtomicU32,
    /// The host was heard since somebody looked.
    was_heard: AtomicBool,
    shared: Mutex<Shared>,
}

#[derive(Default)]
struct Shared {
    configuration: u32,
    status: ControllerStatus,
    /// Queues that are connected, with their sockets once they are served.
    queues: BTreeMap<u16, Weak<OwnedFd>>,
    events: Events,
}

/// Asynchronous events.
#[derive(Default)]
struct Events {
    /// Which are wanted.
    config: u32,
    /// Namespaces that have changed since the host read the log page.
    changed: BTreeSet<u32>,
    /// The host knows that there is something to read.
    is_told: bool,
    /// The access state has changed since the host read of it; and it knows that.
    has_access_changed: bool,
    is_told_of_access: bool,
    /// What happened to reservations since the host read the log page, and how often something did at all.
    notifications: VecDeque<Notification>,
    notified: u64,
    is_told_of_reservations: bool,
    /// Of which happenings the host does not want to hear, by namespace.
    masks: BTreeMap<u32, u32>,
    /// Requests that wait.
    requests: usize,
    wakers: Vec<Waker>,
    /// Nobody is told any more.
    is_over: bool,
}

impl Controller {
    pub(super) fn new(
        id: u16,
        host: Host,
        is_discovery: bool,
        keep_alive_ms: u32,
        subsystem: &Arc<Subsystem>,
        port: &Arc<Port>,
    ) -> Controller {
        let queues = BTreeMap::from([(0, Weak::new())]);
        Controller {
            id,
            host,
            is_discovery,
            subsystem: subsystem.clone(),
            port: port.clone(),
            rights: subsystem.namespaces.iter().map(|_| AtomicU8::new(MAY_READ | MAY_WRITE)).collect(),
            keep_alive_ms: AtomicU32::new(keep_alive_ms),
            was_heard: AtomicBool::new(true),
            shared: Mutex::new(Shared { queues, ..Shared::default() }),
        }
    }

    fn shared(&self) -> MutexGuard<'_, Shared> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// An I/O queue comes.
    pub(super) fn join(&self, queue_id: u16) -> Result<(), Refusal> {
        let mut shared = self.shared();
        shared.check_join(queue_id)?;
        shared.queues.insert(queue_id, Weak::new());
        Ok(())
    }

    /// Whether a queue may come; the admin queue is there.
    pub(super) fn check_join(&self, queue_id: u16) -> Result<(), Refusal> {
        if queue_id == 0 { Ok(()) } else { self.shared().check_join(queue_id) }
    }

    /// A queue's connection is served.
    pub(super) fn attach(&self, queue_id: u16, socket: &Arc<OwnedFd>) {
        if let Some(place) = self.shared().queues.get_mut(&queue_id) {
            *place = Arc::downgrade(socket);
            return;
        }
        disconnect(socket);
    }

    /// A queue's connection is gone.
    pub(super) fn leave(&self, queue_id: u16) {
        self.shared().queues.remove(&queue_id);
        if queue_id == 0 {
            self.end();
            self.subsystem.forget(self.id);
        }
    }

    /// Hangs up on every queue.
    pub(super) fn end(&self) {
        let mut shared = self.shared();
        shared.events.is_over = true;
        shared.events.wakers.drain(..).for_each(Waker::wake);
        std::mem::take(&mut shared.queues).values().filter_map(Weak::upgrade).for_each(|s| disconnect(&s));
    }

    /// Ends the I/O queues: the host has disabled the controller.
    fn end_io(&self, shared: &mut Shared) {
        let io = shared.queues.split_off(&1);
        io.values().filter_map(Weak::upgrade).for_each(|socket| disconnect(&socket));
    }

    /// CC as the host set it.
    pub(super) fn configuration(&self) -> u32 {
        self.shared().configuration
    }

    /// CSTS.
    pub(super) fn status(&self) -> ControllerStatus {
        self.shared().status
    }

    /// The host sets CC.
    pub(super) fn configure(&self, value: u32) -> Result<(), Status> {
        let wanted = Configuration::parse(value);
        let has_entries = wanted.submission_exponent == 6 && wanted.completion_exponent == 4;
        let is_possible = (self.is_discovery || has_entries)
            && matches!(wanted.command_set, 0 | 6)
            && wanted.page_exponent == 0;
        let mut shared = self.shared();
        let was_enabled = shared.status.is_ready;
        if wanted.is_enabled && !was_enabled {
            if !is_possible {
                return Err(Status::INVALID_FIELD);
            }
            shared.status = ControllerStatus { is_ready: true, ..ControllerStatus::default() };
        } else if !wanted.is_enabled && was_enabled {
            shared.status.is_ready = false;
            self.end_io(&mut shared);
        }
        if wanted.shutdown != NO_SHUTDOWN {
            // Whatever was acknowledged as durable is.
            shared.status.shutdown = SHUTDOWN_COMPLETE;
        }
        shared.configuration = value;
        Ok(())
    }

    /// The host may do so much with a namespace from now on.
    pub(super) fn set_rights(&self, nsid: u32, rights: Rights) {
        let bits = if rights.read { MAY_READ } else { 0 } | if rights.write { MAY_WRITE } else { 0 };
        // Whoever has to know that no core has the old value in use any more sends each a message after this.
        self.rights[nsid as usize - 1].store(bits, Ordering::Relaxed);
    }

    /// Whether a command may read a namespace, which is there.
    ///
    /// # Errors
    /// Somebody has reserved it.
    #[inline]
    pub(super) fn check_read(&self, nsid: u32) -> Result<(), Status> {
        self.check_right(nsid, MAY_READ)
    }

    /// As [`Controller::check_read`], for one that changes something.
    ///
    /// # Errors
    /// As there.
    #[inline]
    pub(super) fn check_write(&self, nsid: u32) -> Result<(), Status> {
        self.check_right(nsid, MAY_WRITE)
    }

    #[inline]
    fn check_right(&self, nsid: u32, bit: u8) -> Result<(), Status> {
        let rights = self.rights[nsid as usize - 1].load(Ordering::Relaxed);
        if rights & bit != 0 { Ok(()) } else { Err(Status::RESERVATION_CONFLICT) }
    }

    /// The host may be silent for so long; 0: for ever.
    pub(super) fn keep_alive_ms(&self) -> u32 {
        self.keep_alive_ms.load(Ordering::Relaxed)
    }

    pub(super) fn set_keep_alive(&self, ms: u32) {
        self.keep_alive_ms.store(ms, Ordering::Relaxed);
    }

    /// The host has said something.
    #[inline]
    pub(super) fn hear(&self) {
        if !self.was_heard.load(Ordering::Relaxed) {
            self.was_heard.store(true, Ordering::Relaxed);
        }
    }

    /// Whether the host was heard since the last time.
    pub(super) fn take_heard(&self) -> bool {
        self.was_heard.swap(false, Ordering::Relaxed)
    }

    /// Which events the host wants.
    pub(super) fn event_config(&self) -> u32 {
        self.shared().events.config
    }

    pub(super) fn set_event_config(&self, config: u32) {
        let mut shared = self.shared();
        shared.events.config = config;
        shared.events.wake();
    }

    /// A namespace is not what it was.
    pub(super) fn note_change(&self, namespace: u32) {
        let mut shared = self.shared();
        shared.events.changed.insert(namespace);
        shared.events.wake();
    }

    /// Its port's access state is not what it was.
    pub(super) fn note_access(&self) {
        let mut shared = self.shared();
        shared.events.has_access_changed = true;
        shared.events.wake();
    }

    /// The host reads of the access state.
    pub(super) fn forget_access(&self) {
        let events = &mut self.shared().events;
        (events.has_access_changed, events.is_told_of_access) = (false, false);
    }

    /// Namespaces that have changed; with `is_read` they are forgotten.
    pub(super) fn changed(&self, is_read: bool) -> BTreeSet<u32> {
        let events = &mut self.shared().events;
        if !is_read {
            return events.changed.clone();
        }
        events.is_told = false;
        std::mem::take(&mut events.changed)
    }

    /// Something has happened to a reservation, or a registration.
    pub(super) fn note_reservation(&self, nsid: u32, what: Happening) {
        let events = &mut self.shared().events;
        if events.masks.get(&nsid).is_some_and(|mask| mask & what.mask() != 0) {
            return;
        }
        events.notified += 1;
        events.notifications.push_back(Notification { count: events.notified, what, nsid });
        if events.notifications.len() > MAX_NOTIFICATIONS {
            events.notifications.pop_front();
        }
        events.wake();
    }

    /// The log page with the oldest notification, empty when there is none; with `is_read` it is forgotten.
    pub(super) fn notification(&self, is_read: bool) -> [u8; NOTIFICATION_BYTES] {
        let events = &mut self.shared().events;
        let oldest = events.notifications.front().copied();
        let left = events.notifications.len().saturating_sub(1);
        if is_read {
            events.notifications.pop_front();
            events.is_told_of_reservations = false;
            events.wake();
        }
        oldest.map_or([0; NOTIFICATION_BYTES], |notification| notification.encode(left))
    }

    /// Of which happenings the host does not want to hear.
    pub(super) fn notification_mask(&self, nsid: u32) -> u32 {
        self.shared().events.masks.get(&nsid).copied().unwrap_or(0)
    }

    pub(super) fn set_notification_mask(&self, nsid: u32, mask: u32) {
        self.shared().events.masks.insert(nsid, mask);
    }

    /// One more request waits for an event; `false` when there are too many.
    pub(super) fn begin_event_request(&self) -> bool {
        let events = &mut self.shared().events;
        let is_possible = events.requests < MAX_EVENT_REQUESTS;
        events.requests += usize::from(is_possible);
        is_possible
    }

    /// The next event for a request that waits; `None` when there will be none.
    pub(super) fn poll_event(&self, context: &Context<'_>) -> Poll<Option<Event>> {
        let events = &mut self.shared().events;
        let due = events.due();
        if due.is_none() && !events.is_over {
            if !events.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                events.wakers.push(context.waker().clone());
            }
            return Poll::Pending;
        }
        events.requests -= 1;
        if events.is_over {
            return Poll::Ready(None);
        }
        match due {
            Some(Event::ASYMMETRIC_ACCESS) => events.is_told_of_access = true,
            Some(Event::RESERVATION) => events.is_told_of_reservations = true,
            _ => events.is_told = true,
        }
        Poll::Ready(due)
    }

    /// No request is answered with an event any more.
    pub(super) fn end_events(&self) {
        let mut shared = self.shared();
        shared.events.is_over = true;
        shared.events.wake();
    }
}

impl Shared {
    fn check_join(&self, queue_id: u16) -> Result<(), Refusal> {
        // Without an admin queue it is about to go.
        if !self.queues.contains_key(&0) {
            return Err(InvalidParameter::CONTROLLER_ID.into());
        }
        if !self.status.is_ready || self.queues.contains_key(&queue_id) {
            return Err(Status::COMMAND_SEQUENCE_ERROR.into());
        }
        Ok(())
    }
}

impl Events {
    /// What the host wants to hear and does not know yet.
    fn due(&self) -> Option<Event> {
        let has_changed = !self.is_told && !self.changed.is_empty();
        if has_changed && self.config & CONFIG_NAMESPACE_ATTRIBUTES != 0 {
            return Some(Event::NAMESPACE_ATTRIBUTES);
        }
        let has_access_changed = !self.is_told_of_access && self.has_access_changed;
        if has_access_changed && self.config & CONFIG_ASYMMETRIC_ACCESS != 0 {
            return Some(Event::ASYMMETRIC_ACCESS);
        }
        let has_notification = !self.is_told_of_reservations && !self.notifications.is_empty();
        has_notification.then_some(Event::RESERVATION)
    }

    fn wake(&mut self) {
        self.wakers.drain(..).for_each(Waker::wake);
    }
}

/// Ends a connection from wherever: its core finds that nothing more comes, and answers what has come.
fn disconnect(socket: &OwnedFd) {
    // SAFETY: a plain system call on a descriptor that is open.
    unsafe { libc::shutdown(socket.as_raw_fd(), libc::SHUT_RD) };
}
