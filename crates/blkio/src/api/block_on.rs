//! The smallest executor: one future on the calling thread, which sleeps on the queues'
//! descriptors.

use super::AsyncQueue;
use crate::Error;
use std::future::Future;
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};

/// Runs a future to its end, with the requests of `queues` that it needs. It may wait for other
/// things, too; whoever wakes it may be another thread.
///
/// See [`AsyncQueue`] for an example.
///
/// # Panics
/// When the process has no descriptor left for an eventfd.
pub fn block_on<'a, T>(
    queues: impl IntoIterator<Item = &'a AsyncQueue>,
    future: impl Future<Output = T>,
) -> T {
    let queues: Vec<&AsyncQueue> = queues.into_iter().collect();
    let sleeper = Arc::new(Sleeper::new().unwrap_or_else(|e| panic!("block_on: {e}")));
    let waker = Waker::from(sleeper.clone());
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    let mut watched = vec![watch(sleeper.event.as_raw_fd())];
    watched.extend(queues.iter().map(|queue| watch(queue.as_raw_fd())));
    loop {
        if sleeper.is_woken.swap(false, Ordering::SeqCst)
            && let Poll::Ready(output) = future.as_mut().poll(&mut context)
        {
            return output;
        }
        for queue in &queues {
            // An error has ended all requests of the queue, and their futures tell.
            let _ = queue.poll_completions();
        }
        sleeper.sleep(&mut watched);
    }
}

fn watch(fd: i32) -> libc::pollfd {
    libc::pollfd { fd, events: libc::POLLIN, revents: 0 }
}

struct Sleeper {
    is_woken: AtomicBool,
    is_asleep: AtomicBool,
    event: OwnedFd,
}

impl Sleeper {
    /// One that is woken already: a future is polled first.
    fn new() -> Result<Sleeper, Error> {
        // SAFETY: no pointer is passed.
        let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
        if fd < 0 {
            return Err(Error::os("eventfd", &io::Error::last_os_error()));
        }
        // SAFETY: a fresh descriptor without another owner.
        let event = unsafe { OwnedFd::from_raw_fd(fd) };
        Ok(Sleeper { is_woken: AtomicBool::new(true), is_asleep: AtomicBool::new(false), event })
    }

    /// Sleeps until a queue has an event, or the future was woken.
    fn sleep(&self, watched: &mut [libc::pollfd]) {
        // A waker sets `is_woken` and then reads `is_asleep`; here the order is the reverse.
        self.is_asleep.store(true, Ordering::SeqCst);
        if !self.is_woken.load(Ordering::SeqCst) {
            // SAFETY: the list lives through the call. An error is an early end of sleep.
            unsafe { libc::poll(watched.as_mut_ptr(), watched.len() as libc::nfds_t, -1) };
        }
        self.is_asleep.store(false, Ordering::SeqCst);
        if watched[0].revents != 0 {
            let mut counter = 0u64;
            // SAFETY: eight bytes of our own; the descriptor does not block.
            unsafe { libc::read(self.event.as_raw_fd(), (&raw mut counter).cast(), 8) };
        }
    }
}

impl Wake for Sleeper {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_woken.store(true, Ordering::SeqCst);
        if self.is_asleep.swap(false, Ordering::SeqCst) {
            // SAFETY: eight bytes of our own.
            unsafe { libc::write(self.event.as_raw_fd(), (&raw const ONE_EVENT).cast(), 8) };
        }
    }
}

static ONE_EVENT: u64 = 1;
