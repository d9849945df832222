//! The thread that maintains a controller's connections. Only this thread uses the admin queue and
//! connects.
//!
//! ```text
//!   serve ── keep alive, events, new queues, timeout ticks ──► lost ──► reconnect ──► serve
//!                                                                         └► timeout: every request fails
//! ```
//!
//! The loss of one connection is the loss of all, as controllers treat it (TCP 3.5). All
//! connections are aborted before the first new one is made: data that the kernel still had to send
//! must not arrive after newer data. A target that continues to execute commands of a lost
//! connection can still mix up both. It has to drain them itself, as for every other initiator.

use super::connect::{self, Purpose};
use super::controller::Controller;
use super::error::OpenError;
use super::identity::Identity;
use super::queue_mailbox::{Connection, QueueMailbox, lock};
use super::shared::{Shared, Task};
use drivers::stream::{Cancel, Deadline, StreamError};
use nvme::Status;
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

/// Initial pause between attempts to reconnect; doubles with each attempt.
const FIRST_DELAY: Duration = Duration::from_millis(200);
/// Interval of the queues' timeout tick.
const TICK: Duration = Duration::from_secs(1);
/// Timeout of an orderly controller shutdown, in milliseconds.
const LEAVE_MS: u64 = 500;
/// Maximum consecutive events: a controller that always has another must not delay other work.
const MAX_EVENTS: usize = 16;
/// Pause before retrying a queue identifier that the target has not released yet.
const FORGET: Duration = Duration::from_millis(20);

/// The reason why serving a controller ended.
enum End {
    Stopped,
    Lost(String),
}

/// Maintains `controller` and its successors until the session ends.
pub(super) fn run(shared: &Arc<Shared>, mut host: Identity, mut controller: Controller, stop: &Cancel) {
    loop {
        let why = match serve(shared, &host, &mut controller, stop) {
            End::Lost(why) => why,
            End::Stopped => {
                let _ = controller.shut_down(&Deadline::new(LEAVE_MS, &Cancel::never()));
                return;
            }
        };
        tracing::warn!(device = %shared.name, %why, "connection lost: reconnecting");
        drop(controller);
        controller = match reconnect(shared, &mut host, stop, why) {
            Ok(controller) => controller,
            Err(None) => return,
            Err(Some(why)) => {
                tracing::error!(device = %shared.name, %why, "reconnect timeout: requests fail from now on");
                give_up(shared, &why.into());
                return;
            }
        };
    }
}

fn serve(shared: &Shared, host: &Identity, controller: &mut Controller, stop: &Cancel) -> End {
    let interval = Controller::keep_alive_interval(&shared.options);
    let timeout_ms = match shared.options.keep_alive_s {
        0 => shared.options.timeout_ms,
        seconds => u64::from(seconds) * 1000,
    };
    let (mut alive_at, mut tick_at) = (Instant::now(), Instant::now());
    loop {
        let deadline = Deadline::new(timeout_ms, stop);
        let now = Instant::now();
        let mut next = tick_at + TICK;
        if let Some(interval) = interval {
            next = next.min(alive_at + interval);
        }
        let is_readable = wait(shared, controller, next.saturating_duration_since(now));
        if shared.is_stopping.load(Ordering::Acquire) {
            return End::Stopped;
        }
        if let Some(why) = lock(&shared.lost).take() {
            return End::Lost(why);
        }
        let mut done = work(shared, host, controller, &deadline);
        if done.is_ok() && is_readable {
            done = controller
                .listen(&deadline)
                .and_then(|is_change| look(shared, controller, is_change, &deadline));
        }
        let now = Instant::now();
        if done.is_ok() && interval.is_some_and(|interval| now >= alive_at + interval) {
            alive_at = now;
            done = controller.keep_alive(&deadline).and_then(|()| heed(shared, controller, &deadline));
        }
        if now >= tick_at + TICK {
            tick_at = now;
            lock(&shared.mailboxes).taken.iter().for_each(|(mailbox, _)| mailbox.tick());
        }
        match done {
            Ok(()) => {}
            Err(OpenError::Stream(StreamError::Cancelled)) => return End::Stopped,
            Err(error) => return End::Lost(error.to_string()),
        }
    }
}

/// Waits until there is work. Returns whether the admin queue is readable.
fn wait(shared: &Shared, controller: &mut Controller, timeout: Duration) -> bool {
    let has_unread = controller.has_unread();
    let timeout = if has_unread { Duration::ZERO } else { timeout };
    let entry = |fd| libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let mut fds = [entry(shared.wake.as_raw_fd()), entry(controller.fd())];
    let timeout_ms = i32::try_from(timeout.as_millis() + 1).unwrap_or(i32::MAX);
    // SAFETY: the array outlives the call.
    let ready = unsafe { libc::poll(fds.as_mut_ptr(), 2, timeout_ms) };
    if ready > 0 && fds[0].revents != 0 {
        let _ = shared.wake.read();
    }
    has_unread || ready > 0 && fds[1].revents != 0
}

/// Executes pending jobs. An error of a queue goes to the requester; an error of the admin queue is
/// returned.
fn work(
    shared: &Shared,
    host: &Identity,
    controller: &mut Controller,
    deadline: &Deadline<'_>,
) -> Result<(), OpenError> {
    loop {
        let Some(job) = lock(&shared.jobs).pop_front() else { return Ok(()) };
        if job.is_dropped() {
            continue;
        }
        match &job.task {
            Task::Refresh => {
                let learnt = measure(shared, controller, deadline);
                let lost = learnt.as_ref().err().filter(|e| is_loss(e)).map(ToString::to_string);
                job.answer(learnt);
                if let Some(why) = lost {
                    return Err(OpenError::Lost(why));
                }
            }
            Task::Connect(mailbox) => {
                let connected = connect(host, controller.id, mailbox, &shared.facts, deadline)
                    .map(|connection| mailbox.connected(connection));
                if connected.is_ok() {
                    let mut mailboxes = lock(&shared.mailboxes);
                    let ours = mailboxes.taken.iter_mut().find(|(other, _)| Arc::ptr_eq(other, mailbox));
                    if let Some((_, is_connected)) = ours {
                        *is_connected = true;
                    }
                }
                job.answer(connected);
            }
        }
    }
}

/// Whether an error means that the connection is unusable.
fn is_loss(error: &OpenError) -> bool {
    matches!(error, OpenError::Stream(_) | OpenError::Protocol(_))
}

/// Handles an event that arrived while waiting for something else.
fn heed(shared: &Shared, controller: &mut Controller, deadline: &Deadline<'_>) -> Result<(), OpenError> {
    let is_change = controller.take_event(deadline)?;
    look(shared, controller, is_change, deadline)
}

/// Queries the namespace again if it changed. A namespace that became unusable does not end the
/// connection: requests fail by themselves.
fn look(
    shared: &Shared,
    controller: &mut Controller,
    mut is_change: bool,
    deadline: &Deadline<'_>,
) -> Result<(), OpenError> {
    for _ in 0..MAX_EVENTS {
        if is_change {
            match measure(shared, controller, deadline) {
                Err(error) if is_loss(&error) => return Err(error),
                Err(error) => {
                    tracing::warn!(device = %shared.name, %error, "namespace changed and cannot be used")
                }
                Ok(()) => {}
            }
        }
        // The query may have received the next event.
        is_change = controller.take_event(deadline)?;
        if !is_change {
            break;
        }
    }
    Ok(())
}

/// Queries the namespace's size.
fn measure(shared: &Shared, controller: &mut Controller, deadline: &Deadline<'_>) -> Result<(), OpenError> {
    let facts = controller.learn(Some(shared.facts.nsid), deadline)?;
    if !shared.facts.is_same(&facts) {
        return Err(OpenError::Changed);
    }
    if facts.capacity != shared.limits.capacity() {
        tracing::info!(device = %shared.name, capacity = facts.capacity, "namespace capacity changed");
        shared.limits.set_capacity(facts.capacity);
    }
    Ok(())
}

/// Connects the queue of a mailbox.
fn connect(
    host: &Identity,
    controller_id: u16,
    mailbox: &QueueMailbox,
    facts: &super::Facts,
    deadline: &Deadline<'_>,
) -> Result<Connection, OpenError> {
    let purpose =
        Purpose { queue_id: mailbox.queue_id, entries: mailbox.depth + 1, keep_alive_ms: 0, controller_id };
    loop {
        match connect::connect(host, &purpose, deadline) {
            Ok((link, _)) => {
                let terms = link.terms();
                return Ok(Connection { wire: link.into_wire(), terms, facts: *facts });
            }
            // The target has not released this identifier's previous queue yet.
            Err(OpenError::Refused { status: Status::COMMAND_SEQUENCE_ERROR, .. }) => {
                deadline.pause(FORGET)?
            }
            Err(error) => return Err(error),
        }
    }
}

/// Aborts all connections and reconnects. `Err(None)`: the session ends.
fn reconnect(
    shared: &Shared,
    host: &mut Identity,
    stop: &Cancel,
    mut why: String,
) -> Result<Controller, Option<String>> {
    lock(&shared.mailboxes)
        .taken
        .iter()
        .filter(|(_, is_connected)| *is_connected)
        .for_each(|(mailbox, _)| mailbox.disconnect());
    let start = Instant::now();
    let options = &shared.options;
    let (longest, most) = (options.reconnect_delay_s, options.loss_timeout_s);
    let mut delay = FIRST_DELAY;
    while start.elapsed() < Duration::from_secs(most.into()) {
        let left = Duration::from_secs(most.into()).saturating_sub(start.elapsed());
        match Deadline::new(u64::MAX, stop).pause(delay.min(left)) {
            Ok(()) => {}
            Err(_) => return Err(None),
        }
        delay = (delay * 2).min(Duration::from_secs(longest.into())).max(FIRST_DELAY);
        lock(&shared.lost).take();
        host.renew();
        match attempt(shared, host, &Deadline::new(options.timeout_ms, stop)) {
            Ok(controller) => {
                tracing::info!(device = %shared.name, after_ms = start.elapsed().as_millis() as u64, "reconnected");
                return Ok(controller);
            }
            Err(OpenError::Stream(StreamError::Cancelled)) => return Err(None),
            Err(error) if error.is_final() => return Err(Some(error.to_string())),
            Err(error) => why = error.to_string(),
        }
        tracing::debug!(device = %shared.name, %why, "reconnect attempt failed");
    }
    Err(Some(why))
}

/// Makes all connections, or none.
fn attempt(shared: &Shared, host: &Identity, deadline: &Deadline<'_>) -> Result<Controller, OpenError> {
    let (controller, facts) = Controller::connect(host, deadline)?;
    if !shared.facts.is_same(&facts) {
        return Err(OpenError::Changed);
    }
    shared.max_queues.store(controller.queues, Ordering::Relaxed);
    let mailboxes: Vec<Arc<QueueMailbox>> = lock(&shared.mailboxes)
        .taken
        .iter()
        .filter(|(_, is_connected)| *is_connected)
        .map(|(mailbox, _)| mailbox.clone())
        .collect();
    let connections: Vec<Connection> = mailboxes
        .iter()
        .map(|mailbox| connect(host, controller.id, mailbox, &facts, deadline))
        .collect::<Result<_, _>>()?;
    shared.limits.set_capacity(facts.capacity);
    for (mailbox, connection) in mailboxes.iter().zip(connections) {
        mailbox.connected(connection);
    }
    Ok(controller)
}

/// Reports to all queues and jobs that there will be no connection any more.
fn give_up(shared: &Shared, why: &Arc<str>) {
    let mut mailboxes = lock(&shared.mailboxes);
    mailboxes.dead = Some(why.clone());
    mailboxes.taken.iter().for_each(|(mailbox, _)| mailbox.give_up(why));
    drop(mailboxes);
    while !shared.is_stopping.load(Ordering::Acquire) {
        for job in lock(&shared.jobs).drain(..) {
            job.answer(Err(OpenError::Lost(why.to_string())));
        }
        wait_for(&shared.wake);
    }
}

fn wait_for(event: &vmm_sys_util::eventfd::EventFd) {
    let mut entry = libc::pollfd { fd: event.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: the entry outlives the call.
    let ready = unsafe { libc::poll(&raw mut entry, 1, -1) };
    if ready > 0 || io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
        let _ = event.read();
    }
}
