//! The shared state of the device, and the thread that listens for its events.
//!
//! The thread detects that the device is lost or that its configuration space has changed. It
//! touches no request: it reports a lost device to the mailbox of every queue, and a change by a
//! call.

use super::parts::{QueueEvents, QueueMailbox};
use drivers::stream::Mailbox;
use reactor::PeerEvent;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Duration;
use virtio::blk::ConfigSpace;
use vmm_sys_util::eventfd::EventFd;

/// Callback for changes of the configuration space.
type OnConfig = Box<dyn Fn(&ConfigSpace) + Send>;

/// State of the device.
pub struct Peer {
    name: String,
    config: Mutex<ConfigSpace>,
    on_config: Mutex<Option<OnConfig>>,
    is_gone: AtomicBool,
    /// The reason why the device is lost.
    lost: Mutex<Option<String>>,
    /// Whether the reconnect delay of an outage has passed.
    is_late: AtomicBool,
    /// Whether a request has completed since the device returned.
    has_progress: AtomicBool,
    mailboxes: Mutex<Vec<(u16, Arc<QueueMailbox>)>>,
}

impl Peer {
    /// The state of the device `name`.
    pub fn new(name: String) -> Arc<Peer> {
        Arc::new(Peer {
            name,
            config: Mutex::default(),
            on_config: Mutex::default(),
            is_gone: AtomicBool::new(false),
            lost: Mutex::default(),
            is_late: AtomicBool::new(false),
            has_progress: AtomicBool::new(false),
            mailboxes: Mutex::default(),
        })
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether the device is lost. Everything that it did before is visible once this returns
    /// `true`.
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.is_gone.load(Ordering::Acquire)
    }

    /// The reason why the device is lost.
    pub fn lost(&self) -> Option<String> {
        lock(&self.lost).clone()
    }

    /// Reports to every queue that the device is lost. By then it writes to no memory of ours.
    pub fn set_gone(&self, why: &str) {
        lock(&self.lost).get_or_insert_with(|| why.to_owned());
        if self.is_gone.swap(true, Ordering::SeqCst) {
            return;
        }
        tracing::warn!(device = %self.name, why, "device lost");
        self.tell_all(|events| events.is_gone = true);
    }

    /// Whether requests fail until the device returns.
    pub fn is_late(&self) -> bool {
        self.is_late.load(Ordering::Acquire)
    }

    /// Reports to every queue that requests fail until the device returns.
    pub fn set_late(&self) {
        self.is_late.store(true, Ordering::SeqCst);
        self.tell_all(|events| (events.is_late, events.is_back) = (true, false));
    }

    /// Ends the state of [`Peer::set_late`].
    pub fn set_back(&self) {
        self.is_late.store(false, Ordering::SeqCst);
    }

    /// Records that the returned device has completed a request.
    pub fn note_progress(&self) {
        self.has_progress.store(true, Ordering::Release);
    }

    /// Whether [`Peer::note_progress`] was called since the last call.
    pub fn take_progress(&self) -> bool {
        self.has_progress.swap(false, Ordering::AcqRel)
    }

    fn tell_all(&self, change: impl Fn(&mut QueueEvents)) {
        lock(&self.mailboxes).iter().for_each(|(_, mailbox)| mailbox.tell(&change));
    }

    /// The configuration space as it was last read.
    pub fn config(&self) -> ConfigSpace {
        *lock(&self.config)
    }

    /// Stores the configuration space that was read.
    pub fn set_config(&self, config: ConfigSpace) {
        *lock(&self.config) = config;
    }

    /// Sets the callback for changes of the configuration space, which runs on the listening
    /// thread.
    pub fn set_on_config(&self, call: OnConfig) {
        *lock(&self.on_config) = Some(call);
    }

    /// Distributes a changed configuration space; `read` is the result of reading it again.
    pub fn config_changed<E: std::fmt::Display>(&self, read: Result<ConfigSpace, E>) {
        match read {
            Ok(config) => {
                tracing::info!(device = %self.name, sectors = config.capacity, "device configuration changed");
                self.set_config(config);
                if let Some(call) = &*lock(&self.on_config) {
                    call(&config);
                }
            }
            Err(error) => tracing::warn!(device = %self.name, %error, "device configuration cannot be read"),
        }
    }

    /// Adds a mailbox for queue `index`, which raises `call` with each event.
    ///
    /// # Errors
    /// When the kernel refuses the event.
    pub fn add_queue(&self, index: u16, call: &EventFd) -> io::Result<Arc<QueueMailbox>> {
        // The device may have filled the counter; the watchers are woken nevertheless.
        let call = Mutex::new(PeerEvent::new(as_fd(call))?);
        let mailbox = Arc::new(Mailbox::raising(move || lock(&call).signal()));
        lock(&self.mailboxes).push((index, mailbox.clone()));
        if self.is_late() {
            // The report to all queues may have missed this one.
            mailbox.tell(|events| events.is_late = true);
        }
        Ok(mailbox)
    }

    /// Removes the mailbox of queue `index`.
    pub fn remove_queue(&self, index: u16) {
        lock(&self.mailboxes).retain(|(i, _)| *i != index);
    }
}

/// Work of a [`Listener`].
pub trait Watch: Send + 'static {
    /// Descriptors with the poll events to wait for; -1 for none.
    fn wanted(&self) -> Vec<(RawFd, i16)>;

    /// Longest wait before [`Watch::handle`] is called without events.
    fn period(&self) -> Option<Duration>;

    /// Handles the events, one flag for each of [`Watch::wanted`]. Returns `false` to end the
    /// thread.
    fn handle(&mut self, came: &[bool]) -> bool;
}

/// The listening thread, which ends when this value is dropped.
pub struct Listener {
    stop: EventFd,
    thread: Option<JoinHandle<()>>,
}

impl Listener {
    /// Starts the thread.
    ///
    /// # Errors
    /// When the thread cannot be created.
    pub fn start(watch: impl Watch) -> io::Result<Listener> {
        let stop = EventFd::new(libc::EFD_CLOEXEC | libc::EFD_NONBLOCK)?;
        let stopped = stop.try_clone()?;
        let thread = reactor::spawn_thread("virtio-blk-peer", move || listen(watch, &stopped))?;
        Ok(Listener { stop, thread: Some(thread) })
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        // This fails only when the counter is full, which the first write cannot find.
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn listen(mut watch: impl Watch, stop: &EventFd) {
    loop {
        let wanted = watch.wanted();
        let stop = (stop.as_raw_fd(), libc::POLLIN);
        let came = wait(wanted.into_iter().chain([stop]), watch.period());
        let Some((stopped, came)) = came.split_last() else { return };
        if *stopped || !watch.handle(came) {
            return;
        }
    }
}

/// Waits until a descriptor has one of its events, or the period is over.
fn wait(wanted: impl Iterator<Item = (RawFd, i16)>, period: Option<Duration>) -> Vec<bool> {
    let mut fds: Vec<_> = wanted.map(|(fd, events)| libc::pollfd { fd, events, revents: 0 }).collect();
    let timeout = period.map_or(-1, |period| period.as_millis().clamp(1, i32::MAX as u128) as i32);
    // SAFETY: the list outlives the call.
    if unsafe { libc::poll(fds.as_mut_ptr(), fds.len() as libc::nfds_t, timeout) } < 0 {
        return vec![false; fds.len()];
    }
    fds.iter().map(|entry| entry.revents != 0).collect()
}

/// An event as its descriptor.
pub fn as_fd(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: `event` owns the descriptor and is borrowed as long.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

/// Locks a value that is consistent after every step, even if another thread panicked.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
