//! Keeps the role of this host for an image that other hosts serve too (`standby=on`).
//!
//! ```text
//!   standby ── lock is free, or its owner is dead ──► active ── cluster has blocklisted us ──► fenced
//!                                                      │  ▲
//!                                no answer for 10 s    ▼  │   the probe is answered
//!                                                     standby, with the lock
//! ```
//!
//! A thread looks at the lock once a second. With the lock, it reads a block instead. So a host
//! that cannot reach the cluster is no path before the lock is given away. A host that was shut out
//! learns of it without a request.

use super::error::OpenError;
use super::options::Options;
use super::queue::{RbdQueue, RbdShared};
use block::{Data, HostRole, Queue, Request, Segment, SharedLimits, SharedRole};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Pause between two looks at the lock, or two probes.
const PERIOD: Duration = Duration::from_secs(1);
/// Time without an answer after which this host is no path to the image. Less than the 30 s after
/// which Ceph gives the lock of a silent client away.
const SILENCE: Duration = Duration::from_secs(10);
/// Bytes that a probe reads.
const PROBE_BYTES: usize = 512;

/// The thread. Ends with the device.
pub(super) struct RoleKeeper {
    /// Its drop ends the thread.
    open: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl RoleKeeper {
    /// Starts the thread, which inherits the processors of the caller. Takes the lock before it
    /// returns, if it is free.
    ///
    /// # Errors
    /// When the cluster refuses the lock, or a thread cannot be started.
    pub(super) fn start(
        shared: &Arc<RbdShared>,
        role: &Arc<SharedRole>,
        limits: &Arc<SharedLimits>,
        options: &Options,
    ) -> Result<RoleKeeper, OpenError> {
        let (open, closed) = mpsc::channel();
        let mut keeping = Keeping {
            shared: shared.clone(),
            role: role.clone(),
            limits: limits.clone(),
            options: options.clone(),
            closed,
        };
        let has_lock = keeping.take_over()?;
        // Two servers with force would fence each other for ever.
        keeping.options.force = false;
        if !has_lock {
            tracing::info!(device = shared.name, "standby: another host has the lock of the image");
        }
        let thread = reactor::spawn_thread("rbd-role", move || keeping.run(has_lock))
            .map_err(|error| OpenError::Refused(format!("cannot start a thread: {error}")))?;
        Ok(RoleKeeper { open: Some(open), thread: Some(thread) })
    }
}

impl Drop for RoleKeeper {
    fn drop(&mut self) {
        self.open = None;
        if let Some(thread) = self.thread.take() {
            // The thread does not panic.
            let _ = thread.join();
        }
    }
}

/// The state of the thread.
struct Keeping {
    shared: Arc<RbdShared>,
    role: Arc<SharedRole>,
    limits: Arc<SharedLimits>,
    options: Options,
    /// Disconnected when the device is closed.
    closed: Receiver<()>,
}

impl Keeping {
    /// Waits for a period. Returns whether the device was closed.
    fn is_closed_after_a_period(&self) -> bool {
        self.closed.recv_timeout(PERIOD) != Err(RecvTimeoutError::Timeout)
    }

    fn run(&self, mut has_lock: bool) {
        let mut reported = String::new();
        while !has_lock {
            if self.is_closed_after_a_period() {
                return;
            }
            match self.take_over() {
                Ok(taken) => has_lock = taken,
                Err(error) => {
                    let error = error.to_string();
                    if error != reported {
                        tracing::warn!(device = self.shared.name, error, "standby: cannot take over");
                        reported = error;
                    }
                }
            }
        }
        self.probe_until_closed();
    }

    /// Takes the lock if it is free. Returns whether this host is active.
    fn take_over(&self) -> Result<bool, OpenError> {
        if !self.shared.image.take_free_lock(&self.options)? {
            return Ok(false);
        }
        // The former owner may have changed the size.
        self.limits.set_capacity(self.shared.image.size()?);
        tracing::info!(device = self.shared.name, "active: this host has the lock of the image");
        self.role.set(HostRole::Active);
        Ok(true)
    }

    /// Reads a block each period, and sets the role by the answers.
    fn probe_until_closed(&self) {
        let mut memory = vec![0; PROBE_BYTES];
        let list = [Segment { base: memory.as_mut_ptr(), len: memory.len() }];
        let Ok(mut queue) = RbdQueue::new(self.shared.clone(), 1) else {
            tracing::warn!(device = self.shared.name, "the cluster is not probed: cannot make an eventfd");
            return;
        };
        let (mut started, mut is_in_flight) = (Instant::now(), false);
        while !self.is_closed_after_a_period() && self.role.get() != HostRole::Fenced {
            queue.reap(&mut |_, result| {
                is_in_flight = false;
                if result.is_ok() && !self.role.is_active() {
                    tracing::info!(device = self.shared.name, "active: the cluster answers again");
                    self.role.set(HostRole::Active);
                }
            });
            if is_in_flight {
                if started.elapsed() >= SILENCE && self.role.is_active() {
                    tracing::error!(device = self.shared.name, "standby: the cluster does not answer");
                    self.role.set(HostRole::Standby);
                }
                continue;
            }
            started = Instant::now();
            // SAFETY: the memory outlives the list and the queue, which waits for its operations.
            is_in_flight = unsafe {
                let probe = Request::read(Data::new(&list));
                queue.submit(0, &probe, 0).is_ok()
            };
        }
    }
}
