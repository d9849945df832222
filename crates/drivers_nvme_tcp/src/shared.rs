//! The state that session, queues and connection thread share, and the jobs of the thread.

use super::error::OpenError;
use super::facts::Facts;
use super::options::Options;
use super::queue_mailbox::{QueueMailbox, lock};
use block::SharedLimits;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
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
    pub(super) done: EventFd,
    pub(super) answer: Mutex<Option<Result<(), OpenError>>>,
    /// Whether the requester stopped waiting.
    pub(super) is_dropped: AtomicBool,
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
    pub(super) is_detached: bool,
}

/// The mailboxes of all queues.
#[derive(Default)]
pub(super) struct Mailboxes {
    /// Reserved identifiers; `true` for queues that were connected and must be reconnected after a
    /// loss.
    pub(super) taken: Vec<(Arc<QueueMailbox>, bool)>,
    /// The identifier that was assigned last: a target needs some time to release a used one.
    pub(super) last_id: u16,
    /// The reason why there are no connections any more.
    pub(super) dead: Option<Arc<str>>,
}

impl Shared {
    pub(super) fn new(options: &Options, facts: Facts, queues: u32) -> Result<Shared, OpenError> {
        Ok(Shared {
            limits: SharedLimits::new(facts.limits(options.read_only)),
            name: options.name(),
            options: options.clone(),
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

pub(super) fn event() -> Result<EventFd, OpenError> {
    EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK).map_err(OpenError::System)
}
