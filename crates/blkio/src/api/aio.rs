//! A queue for futures, under any executor.
//!
//! ```text
//!   submit ─► Pending ─ first poll of any ─► kick ─► device ─► completion fd ─► poll_completions ─► wakers
//! ```
//!
//! A future is a token and a handle of the queue. The queue owns the memory, so that dropping or
//! forgetting a future at any time is harmless: its request is carried out all the same.

use super::request::{Payload, Request};
use super::slots::{Owner, Token};
use super::{Buffer, Queue};
use crate::{Error, Result, Zone};
use std::future::Future;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};

/// A queue whose requests are futures. Clones name the same queue, which is dropped (and waits for
/// what is in flight) with the last clone and future.
///
/// Something must call [`AsyncQueue::poll_completions`] when the descriptor of [`AsFd`] becomes
/// readable: a task of the program's executor (`tokio::io::unix::AsyncFd`, `async_io::Async`), or
/// [`block_on`](super::block_on).
///
/// ```
/// # fn main() -> blkio::Result<()> {
/// # let file = tempfile::NamedTempFile::new().unwrap();
/// # file.as_file().set_len(1 << 20).unwrap();
/// # let path = file.path().to_str().unwrap();
/// let device = blkio::Builder::new("io_uring")?.set("path", path)?.start()?;
/// let queue = device.queue(0)?.into_async()?;
/// let mut buffer = device.buffer(4096)?;
/// buffer.fill(7);
/// blkio::block_on([&queue], async {
///     let (result, buffer) = queue.write(0, buffer).await;
///     result?;
///     // Both are on their way before either is waited for.
///     let reads = [queue.read(0, buffer), queue.read(8192, device.buffer(4096)?)];
///     for read in reads {
///         let (result, buffer) = read.await;
///         result?;
///         println!("{}", buffer[0]);
///     }
///     queue.flush().await
/// })
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct AsyncQueue {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    queue: Mutex<Queue>,
    /// The queue's completion descriptor, our own copy.
    fd: OwnedFd,
}

/// A request on its way: a future of its result, with its memory.
///
/// It is enqueued already, and goes to the device at the latest when a future of the queue is
/// polled for the first time. Dropping it does not cancel it: its memory is given back when the
/// device is done.
#[must_use = "whether a request has succeeded is known when it has ended"]
#[derive(Debug)]
pub struct Pending<P> {
    /// `None` once the result has been returned.
    queue: Option<AsyncQueue>,
    token: Token,
    payload: PhantomData<fn() -> P>,
}

impl Queue {
    /// Turns this into a queue of futures. Completions of earlier requests are discarded.
    ///
    /// # Errors
    /// `ENOTSUP` for a poll queue, which has nothing to wake a sleeper with.
    pub fn into_async(mut self) -> Result<AsyncQueue> {
        let no_fd = || Error::new(libc::ENOTSUP, "a poll queue has no completion descriptor");
        let fd = self.completion_fd().ok_or_else(no_fd)?.try_clone_to_owned();
        let fd = fd.map_err(|e| Error::os("the completion descriptor", &e))?;
        self.enable_events(true);
        Ok(AsyncQueue { shared: Arc::new(Shared { queue: Mutex::new(self), fd }) })
    }
}

impl AsyncQueue {
    /// Enqueues a request.
    pub fn submit<P: Payload>(&self, request: Request<P>) -> Pending<P> {
        let token = self.lock().begin(request, Owner::Claimant(None));
        Pending { queue: Some(self.clone()), token, payload: PhantomData }
    }

    /// Reads at byte `offset` into all of the buffer.
    pub fn read(&self, offset: u64, buffer: Buffer) -> Pending<Buffer> {
        self.submit(Request::read(offset, buffer))
    }

    /// Writes all of the buffer at byte `offset`.
    pub fn write(&self, offset: u64, buffer: Buffer) -> Pending<Buffer> {
        self.submit(Request::write(offset, buffer))
    }

    /// Reads at byte `offset` into all of the buffers, in their order.
    pub fn read_vectored(&self, offset: u64, buffers: Vec<Buffer>) -> Pending<Vec<Buffer>> {
        self.submit(Request::read_vectored(offset, buffers))
    }

    /// Writes all of the buffers at byte `offset`, in their order.
    pub fn write_vectored(&self, offset: u64, buffers: Vec<Buffer>) -> Pending<Vec<Buffer>> {
        self.submit(Request::write_vectored(offset, buffers))
    }

    /// Makes everything durable whose write has ended before.
    pub fn flush(&self) -> Pending<()> {
        self.submit(Request::flush())
    }

    /// Makes `len` bytes at `offset` zero.
    pub fn write_zeroes(&self, offset: u64, len: u64) -> Pending<()> {
        self.submit(Request::write_zeroes(offset, len))
    }

    /// Says that `len` bytes at `offset` are not needed any more.
    pub fn discard(&self, offset: u64, len: u64) -> Pending<()> {
        self.submit(Request::discard(offset, len))
    }

    /// Describes up to `max` zones, from the one at `offset` on.
    pub fn report_zones(&self, offset: u64, max: u32) -> Pending<Vec<Zone>> {
        self.submit(Request::report_zones(offset, max))
    }

    /// Submits what was enqueued and wakes the tasks whose requests have ended. To be called when
    /// the descriptor is readable, which it consumes.
    ///
    /// # Errors
    /// When the queue itself has failed. All its requests have ended with an error then.
    pub fn poll_completions(&self) -> Result<()> {
        let mut queue = self.lock();
        let result = reap_or_close(&mut queue);
        drop(queue);
        self.wake();
        result
    }

    /// Wakes tasks, without the lock: a waker may do anything.
    fn wake(&self) {
        loop {
            let Some(waker) = self.lock().wakers.pop() else { return };
            waker.wake();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.shared.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn reap_or_close(queue: &mut Queue) -> Result<()> {
    let result = queue.reap_all();
    if result.is_err() {
        queue.close();
    }
    result
}

impl AsFd for AsyncQueue {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.fd.as_fd()
    }
}

impl AsRawFd for AsyncQueue {
    fn as_raw_fd(&self) -> RawFd {
        self.shared.fd.as_raw_fd()
    }
}

impl<P: Payload> Future for Pending<P> {
    type Output = P::Output;

    /// # Panics
    /// When it is polled again after it was ready.
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<P::Output> {
        let token = self.token;
        let handle = self.queue.as_ref().expect("a future that was ready is not polled again");
        let mut queue = handle.lock();
        let mut is_pending = queue.slots.wake_at_end(token, cx.waker());
        if is_pending && queue.has_unsubmitted {
            // An error has closed the queue, and thereby ended this request, too.
            let _ = reap_or_close(&mut queue);
            is_pending = !queue.slots.has_ended(token);
        }
        let ended = if is_pending { None } else { queue.slots.claim(token) };
        let has_woken = !queue.wakers.is_empty();
        drop(queue);
        if has_woken {
            handle.wake();
        }
        if is_pending {
            return Poll::Pending;
        }
        let (result, memory) = ended.expect("it has ended and no other call has its token");
        self.queue = None;
        Poll::Ready(P::output(result, memory))
    }
}

impl<P> Drop for Pending<P> {
    fn drop(&mut self) {
        if let Some(handle) = &self.queue {
            let memory = handle.lock().slots.abandon(self.token);
            drop(memory);
        }
    }
}
