//! A controller: the association of one host with the subsystem. Created and destroyed with its
//! admin queue.
//!
//! Any core may serve its connections. Their shared state is under a lock, and reads and writes do
//! not need it.

use crate::features::Features;
use crate::host::Host;
use crate::ports::Port;
use crate::refusal::Refusal;
use crate::reservations::Rights;
use crate::subsystem::Subsystem;
use crate::transport::Connection;
use nvme::Status;
use nvme::command::event::{
    CONFIG_ASYMMETRIC_ACCESS, CONFIG_DISCOVERY_LOG, CONFIG_NAMESPACE_ATTRIBUTES, Event,
};
use nvme::fabrics::InvalidParameter;
use nvme::fabrics::property::{Configuration, ControllerStatus};
use nvme::reservation::{Happening, NOTIFICATION_BYTES, Notification};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::task::{Context, Poll, Waker};

/// Maximum outstanding asynchronous event requests.
pub(crate) const MAX_EVENT_REQUESTS: usize = 4;
/// Maximum unread reservation notifications; older ones are dropped.
const MAX_NOTIFICATIONS: usize = 255;
/// Bits of a controller's rights.
const MAY_READ: u8 = 1;
const MAY_WRITE: u8 = 2;
/// The host has lost its access, which this controller never regains. Overrides the other two.
const REVOKED: u8 = 4;
/// Configuration.shutdown: not requested.
const NO_SHUTDOWN: u8 = 0;
/// ControllerStatus.shutdown: complete.
const SHUTDOWN_COMPLETE: u8 = 2;

/// One host's controller.
pub struct Controller {
    /// The identifier.
    pub id: u16,
    /// The host.
    pub host: Host,
    /// Whether it is one of the discovery subsystem.
    pub is_discovery: bool,
    pub(crate) subsystem: Arc<Subsystem>,
    /// The port that the host connected to.
    pub port: Arc<Port>,
    /// The host's rights, by namespace. Every command reads them; writes are rare.
    rights: Box<[AtomicU8]>,
    /// Keep-alive timeout; 0: none.
    keep_alive_ms: AtomicU32,
    /// Whether the host has sent a command since the last check.
    was_heard: AtomicBool,
    shared: Mutex<Shared>,
}

#[derive(Default)]
struct Shared {
    configuration: u32,
    status: ControllerStatus,
    /// Connected queues, with their connections once they are served.
    queues: BTreeMap<u16, Option<Weak<dyn Connection>>>,
    events: Events,
    features: Features,
}

/// State of asynchronous events.
#[derive(Default)]
struct Events {
    /// The enabled event types.
    config: u32,
    /// Namespaces that have changed since the host read the log page.
    changed: BTreeSet<u32>,
    /// Whether the host has been notified of unread changes.
    is_told: bool,
    /// Whether the access state has changed since the host read it, and whether the host has been
    /// notified.
    has_access_changed: bool,
    is_told_of_access: bool,
    /// The same for the subsystems that a discovery controller lists.
    has_listing_changed: bool,
    is_told_of_listing: bool,
    /// Reservation notifications since the host read the log page, and their total count.
    notifications: VecDeque<Notification>,
    notified: u64,
    is_told_of_reservations: bool,
    /// Masked reservation notifications, by namespace.
    masks: BTreeMap<u32, u32>,
    /// Outstanding event requests.
    requests: usize,
    wakers: Vec<Waker>,
    /// Whether events have ended.
    is_over: bool,
}

impl Controller {
    pub(crate) fn new(
        id: u16,
        host: Host,
        keep_alive_ms: u32,
        subsystem: &Arc<Subsystem>,
        port: &Arc<Port>,
    ) -> Controller {
        let queues = BTreeMap::from([(0, None)]);
        Controller {
            id,
            host,
            is_discovery: subsystem.is_discovery(),
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

    /// Adds an I/O queue.
    pub(crate) fn join(&self, queue_id: u16) -> Result<(), Refusal> {
        let mut shared = self.shared();
        shared.check_join(queue_id)?;
        shared.queues.insert(queue_id, None);
        Ok(())
    }

    /// Checks whether a queue may be added; the admin queue exists.
    pub(crate) fn check_join(&self, queue_id: u16) -> Result<(), Refusal> {
        if queue_id == 0 { Ok(()) } else { self.shared().check_join(queue_id) }
    }

    /// Records the connection of a queue that is served. If the controller has ended, it is
    /// disconnected.
    pub fn attach(&self, queue_id: u16, connection: &Arc<dyn Connection>) {
        if let Some(place) = self.shared().queues.get_mut(&queue_id) {
            *place = Some(Arc::downgrade(connection));
            return;
        }
        self.disconnect(&**connection);
    }

    /// Removes a queue.
    pub(crate) fn leave(&self, queue_id: u16) {
        self.shared().queues.remove(&queue_id);
        if queue_id == 0 {
            self.end();
            self.subsystem.forget(self);
        }
    }

    /// Disconnects every queue.
    pub(crate) fn end(&self) {
        let mut shared = self.shared();
        shared.events.is_over = true;
        shared.events.wakers.drain(..).for_each(Waker::wake);
        self.disconnect_all(&std::mem::take(&mut shared.queues));
    }

    /// Disconnects the I/O queues: the host has disabled the controller.
    fn end_io(&self, shared: &mut Shared) {
        self.disconnect_all(&shared.queues.split_off(&1));
    }

    fn disconnect_all(&self, queues: &BTreeMap<u16, Option<Weak<dyn Connection>>>) {
        let connections = queues.values().flatten().filter_map(Weak::upgrade);
        connections.for_each(|connection| self.disconnect(&*connection));
    }

    /// Disconnects a queue. A host without access gets no answers to the received commands.
    fn disconnect(&self, connection: &dyn Connection) {
        connection.disconnect(self.is_revoked());
    }

    /// Whether there is an I/O queue.
    pub(crate) fn has_io_queues(&self) -> bool {
        self.shared().queues.range(1..).next().is_some()
    }

    /// Runs `work` on the values of features.
    pub(crate) fn features<R>(&self, work: impl FnOnce(&mut Features) -> R) -> R {
        work(&mut self.shared().features)
    }

    /// The current value of CC.
    pub(crate) fn configuration(&self) -> u32 {
        self.shared().configuration
    }

    /// The current value of CSTS.
    pub(crate) fn status(&self) -> ControllerStatus {
        self.shared().status
    }

    /// Sets CC, as the host requests.
    pub(crate) fn configure(&self, value: u32) -> Result<(), Status> {
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
            shared.features = Features::default();
            self.end_io(&mut shared);
        }
        if wanted.shutdown != NO_SHUTDOWN {
            // Every acknowledged durable write is durable already.
            shared.status.shutdown = SHUTDOWN_COMPLETE;
        }
        shared.configuration = value;
        Ok(())
    }

    /// Ends the host's access: from now on commands that use a namespace are refused.
    pub(crate) fn revoke(&self) {
        for rights in &self.rights {
            rights.fetch_or(REVOKED, Ordering::Relaxed);
        }
    }

    /// Whether the host has lost its access.
    pub(crate) fn is_revoked(&self) -> bool {
        self.rights.first().is_some_and(|rights| rights.load(Ordering::Relaxed) & REVOKED != 0)
    }

    /// Sets the host's reservation rights to a namespace.
    pub(crate) fn set_rights(&self, nsid: u32, rights: Rights) {
        let bits = if rights.read { MAY_READ } else { 0 } | if rights.write { MAY_WRITE } else { 0 };
        // To be sure that no core uses the old value any more, the caller then sends each core a
        // message.
        let keep = |old| Some(old & REVOKED | bits);
        let _ = self.rights[nsid as usize - 1].fetch_update(Ordering::Relaxed, Ordering::Relaxed, keep);
    }

    /// Checks that a command may read an existing namespace.
    ///
    /// # Errors
    /// A reservation conflict, or the end of the host's access.
    #[inline]
    pub(crate) fn check_read(&self, nsid: u32) -> Result<(), Status> {
        self.check_right(nsid, MAY_READ)
    }

    /// As [`Controller::check_read`], for a command that modifies data.
    ///
    /// # Errors
    /// As [`Controller::check_read`].
    #[inline]
    pub(crate) fn check_write(&self, nsid: u32) -> Result<(), Status> {
        self.check_right(nsid, MAY_WRITE)
    }

    #[inline]
    fn check_right(&self, nsid: u32, bit: u8) -> Result<(), Status> {
        let rights = self.rights[nsid as usize - 1].load(Ordering::Relaxed);
        match rights & (bit | REVOKED) {
            allowed if allowed == bit => Ok(()),
            0 => Err(Status::RESERVATION_CONFLICT),
            // The controller is about to be destroyed.
            _ => Err(Status::ABORTED_SQ_DELETION),
        }
    }

    /// The keep-alive timeout; 0: none.
    pub(crate) fn keep_alive_ms(&self) -> u32 {
        self.keep_alive_ms.load(Ordering::Relaxed)
    }

    pub(crate) fn set_keep_alive(&self, ms: u32) {
        self.keep_alive_ms.store(ms, Ordering::Relaxed);
    }

    /// Records that the host has sent a command.
    #[inline]
    pub(crate) fn hear(&self) {
        if !self.was_heard.load(Ordering::Relaxed) {
            self.was_heard.store(true, Ordering::Relaxed);
        }
    }

    /// Returns whether the host has sent a command since the last call.
    pub(crate) fn take_heard(&self) -> bool {
        self.was_heard.swap(false, Ordering::Relaxed)
    }

    /// The event types that the host has enabled.
    pub(crate) fn event_config(&self) -> u32 {
        self.shared().events.config
    }

    pub(crate) fn set_event_config(&self, config: u32) {
        let mut shared = self.shared();
        shared.events.config = config;
        shared.events.wake();
    }

    /// Records that a namespace has changed.
    pub(crate) fn note_change(&self, namespace: u32) {
        let mut shared = self.shared();
        shared.events.changed.insert(namespace);
        shared.events.wake();
    }

    /// Records that the access state of the controller's port has changed.
    pub(crate) fn note_access(&self) {
        let mut shared = self.shared();
        shared.events.has_access_changed = true;
        shared.events.wake();
    }

    /// Clears the pending change of the access state: the host has read it.
    pub(crate) fn forget_access(&self) {
        let events = &mut self.shared().events;
        (events.has_access_changed, events.is_told_of_access) = (false, false);
    }

    /// Records that the subsystems that a discovery controller lists, or their hosts, have changed.
    pub(crate) fn note_listing(&self) {
        let mut shared = self.shared();
        shared.events.has_listing_changed = true;
        shared.events.wake();
    }

    /// Clears the pending change of the listed subsystems: the host reads them.
    pub(crate) fn forget_listing(&self) {
        let events = &mut self.shared().events;
        (events.has_listing_changed, events.is_told_of_listing) = (false, false);
    }

    /// The changed namespaces; `is_read` clears the list.
    pub(crate) fn changed(&self, is_read: bool) -> BTreeSet<u32> {
        let events = &mut self.shared().events;
        if !is_read {
            return events.changed.clone();
        }
        events.is_told = false;
        std::mem::take(&mut events.changed)
    }

    /// Records a notification about a reservation or a registration.
    pub(crate) fn note_reservation(&self, nsid: u32, what: Happening) {
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

    /// The log page with the oldest notification, or an empty page; `is_read` removes the
    /// notification.
    pub(crate) fn notification(&self, is_read: bool) -> [u8; NOTIFICATION_BYTES] {
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

    /// The reservation notifications that the host has masked.
    pub(crate) fn notification_mask(&self, nsid: u32) -> u32 {
        self.shared().events.masks.get(&nsid).copied().unwrap_or(0)
    }

    pub(crate) fn set_notification_mask(&self, nsid: u32, mask: u32) {
        self.shared().events.masks.insert(nsid, mask);
    }

    /// Counts an event request. Returns `false` when there are too many.
    pub(crate) fn begin_event_request(&self) -> bool {
        let events = &mut self.shared().events;
        let is_possible = events.requests < MAX_EVENT_REQUESTS;
        events.requests += usize::from(is_possible);
        is_possible
    }

    /// The next event for an outstanding request; `None` once events have ended.
    pub(crate) fn poll_event(&self, context: &Context<'_>) -> Poll<Option<Event>> {
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
            Some(Event::DISCOVERY_LOG) => events.is_told_of_listing = true,
            _ => events.is_told = true,
        }
        Poll::Ready(due)
    }

    /// Ends all outstanding event requests without an event.
    pub(crate) fn end_events(&self) {
        let mut shared = self.shared();
        shared.events.is_over = true;
        shared.events.wake();
    }
}

impl Shared {
    fn check_join(&self, queue_id: u16) -> Result<(), Refusal> {
        // Without an admin queue the controller is about to be destroyed.
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
    /// The next enabled event that the host has not been notified of.
    fn due(&self) -> Option<Event> {
        let has_changed = !self.is_told && !self.changed.is_empty();
        if has_changed && self.config & CONFIG_NAMESPACE_ATTRIBUTES != 0 {
            return Some(Event::NAMESPACE_ATTRIBUTES);
        }
        let has_access_changed = !self.is_told_of_access && self.has_access_changed;
        if has_access_changed && self.config & CONFIG_ASYMMETRIC_ACCESS != 0 {
            return Some(Event::ASYMMETRIC_ACCESS);
        }
        let has_listing_changed = !self.is_told_of_listing && self.has_listing_changed;
        if has_listing_changed && self.config & CONFIG_DISCOVERY_LOG != 0 {
            return Some(Event::DISCOVERY_LOG);
        }
        let has_notification = !self.is_told_of_reservations && !self.notifications.is_empty();
        has_notification.then_some(Event::RESERVATION)
    }

    fn wake(&mut self) {
        self.wakers.drain(..).for_each(Waker::wake);
    }
}
