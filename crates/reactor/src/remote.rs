//! Messages from other threads to a core.

#[cfg(loom)]
use self::modelled::ArrayQueue;
use crate::core::Core;
use crate::core::posts::{self, Posted};
use crate::ring::Padded;
use crate::route::{Post, Route};
use crate::simulated::receive;
use crate::sync::{AtomicBool, AtomicU64, Mutex, fence, is_broken, lock};
use crate::task::Body;
#[cfg(not(loom))]
use crossbeam_queue::ArrayQueue;
use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc;

/// Limit of waiting messages.
const INBOX: usize = 1024;

type Work = Box<dyn FnOnce(&Core) + Send>;

/// A message whose memory its sender uses again.
pub(crate) trait Deliver: Send + Sync {
    /// Called on the core that the message was sent to.
    fn arrive(self: Arc<Self>, core: &Core);
    /// Called instead when the core has ended.
    fn lose(&self);
}

/// A message in an inbox.
pub(crate) enum Message {
    Work(Work),
    Reused(Reused),
}

impl Message {
    /// The address of what the receiver reads first.
    pub(crate) fn memory(&self) -> *const u8 {
        match self {
            Message::Work(work) => std::ptr::from_ref(&**work).cast(),
            Message::Reused(message) => {
                message.0.as_ref().map_or(std::ptr::null(), |it| Arc::as_ptr(it).cast())
            }
        }
    }

    /// Runs the message, on its core.
    pub(crate) fn run(self, core: &Core) {
        match self {
            Message::Work(work) => work(core),
            Message::Reused(mut message) => message.0.take().into_iter().for_each(|it| it.arrive(core)),
        }
    }
}

/// A message of its sender's memory on its way. Dropped on the way, it is lost.
pub(crate) struct Reused(Option<Arc<dyn Deliver>>);

impl Drop for Reused {
    fn drop(&mut self) {
        if let Some(message) = self.0.take() {
            message.lose();
        }
    }
}

/// The messages of other threads to a core. A queue that all threads share keeps the order in which
/// they were sent; routes from other cores bring those that need no order.
pub(crate) struct Inbox {
    messages: ArrayQueue<Message>,
    pub(crate) body: &'static Body,
    /// The core has ended and reads no more messages.
    is_closed: AtomicBool,
    /// Routes from other cores that the core has not taken yet.
    new_routes: Mutex<Vec<Arc<Route>>>,
    has_new_routes: AtomicBool,
    /// Nanoseconds that the core has polled without finding work; kept here because other threads
    /// read it.
    pub(crate) polled_ns: Padded<AtomicU64>,
}

impl Inbox {
    pub(crate) fn new(body: &'static Body) -> Arc<Inbox> {
        let (messages, is_closed) = (ArrayQueue::new(INBOX), AtomicBool::new(false));
        Arc::new(Inbox {
            messages,
            body,
            is_closed,
            new_routes: Mutex::default(),
            has_new_routes: AtomicBool::new(false),
            polled_ns: Padded::default(),
        })
    }

    #[inline]
    pub(crate) fn is_empty(&self) -> bool {
        self.messages.is_empty()
    }

    pub(crate) fn take(&self) -> Option<Message> {
        self.messages.pop()
    }

    /// Refuses further messages and loses those that wait in the queue. The core then drains its
    /// routes; a sender that adds to a route later drains it.
    pub(crate) fn close(&self) {
        self.is_closed.store(true, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        while self.messages.pop().is_some() {}
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst)
    }

    /// Adds a route from another core. Its first post is announced as the others.
    pub(crate) fn add_route(&self, route: Arc<Route>) {
        lock(&self.new_routes).push(route);
        self.has_new_routes.store(true, Ordering::Release);
    }

    /// Whether [`Inbox::take_new_routes`] has something to return.
    #[inline]
    pub(crate) fn has_new_routes(&self) -> bool {
        self.has_new_routes.load(Ordering::Acquire)
    }

    /// The routes that were added since the last call.
    pub(crate) fn take_new_routes(&self) -> Vec<Arc<Route>> {
        self.has_new_routes.store(false, Ordering::Relaxed);
        std::mem::take(&mut *lock(&self.new_routes))
    }

    /// Called after a push. If the core emptied the inbox for the last time before that push, the
    /// sender empties it.
    fn clear_if_closed(&self) {
        if !is_broken("a sender looks again whether the inbox is closed")
            && self.is_closed.load(Ordering::SeqCst)
        {
            self.close();
        }
    }
}

/// The core has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CoreStopped;

impl std::fmt::Display for CoreStopped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the core has stopped")
    }
}

impl std::error::Error for CoreStopped {}

/// Why a message was not sent.
pub enum NotSent {
    /// The inbox is full. Contains the message.
    Full(Box<dyn FnOnce(&Core) + Send>),
    /// The core has ended.
    Stopped,
}

/// Why a message of the sender's memory was not sent; it is not lost either.
pub(crate) enum Refused {
    Full,
    Stopped,
}

/// A handle of a core for other threads. They send it work; the core answers with messages only.
#[derive(Clone)]
pub struct CoreRef {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) index: usize,
}

impl CoreRef {
    /// The core's number among those that were started together.
    pub fn index(&self) -> usize {
        self.index
    }

    /// Sends `work` to the core, which runs it soon. Waits while the inbox is full, so a core must
    /// not call it for another core that may be waiting for the caller.
    ///
    /// # Errors
    /// If the core has ended; `work` does not run.
    pub fn run(&self, work: impl FnOnce(&Core) + Send + 'static) -> Result<(), CoreStopped> {
        let mut message = Message::Work(Box::new(work));
        loop {
            if self.is_stopped() {
                return Err(CoreStopped);
            }
            match self.send(message) {
                Ok(()) => break,
                Err(back) => message = back,
            }
            std::thread::yield_now();
        }
        Ok(())
    }

    /// Sends a message by the queue that all threads share, if there is room. It arrives after
    /// those that were sent before.
    fn send(&self, message: Message) -> Result<(), Message> {
        self.inbox.messages.push(message)?;
        self.inbox.body.end_sleep();
        self.inbox.clear_if_closed();
        Ok(())
    }

    /// Sends a message by the route of the calling core, if it has room, or as [`CoreRef::send`]
    /// where there is no route. The calling core announces it at the end of its turn.
    fn send_by_route(&self, message: Message) -> Result<(), Message> {
        match posts::post(&self.inbox, Post::Message(message)) {
            Posted::Sent => Ok(()),
            Posted::Full(Post::Message(back)) => Err(back),
            Posted::NoRoute(Post::Message(message)) => self.send(message),
            Posted::Full(Post::Wake(..)) | Posted::NoRoute(Post::Wake(..)) => {
                unreachable!("a post that is refused comes back as it is")
            }
        }
    }

    /// As [`CoreRef::run`], but does not wait while the inbox is full. For cores that send each
    /// other messages and may not wait for each other.
    ///
    /// # Errors
    /// [`NotSent::Full`] with `work` if the inbox is full; [`NotSent::Stopped`] if the core has
    /// ended.
    pub fn try_run(&self, work: Box<dyn FnOnce(&Core) + Send>) -> Result<(), NotSent> {
        if self.is_stopped() {
            return Err(NotSent::Stopped);
        }
        match self.send(Message::Work(work)) {
            Err(Message::Work(work)) => Err(NotSent::Full(work)),
            Err(Message::Reused(_)) => unreachable!("the queue returns the message that it refuses"),
            Ok(()) => Ok(()),
        }
    }

    /// As [`CoreRef::try_run`], for a message whose memory the sender uses again. Unless it is
    /// ordered, it may overtake messages that were sent before.
    pub(crate) fn try_deliver(&self, message: Arc<dyn Deliver>, is_ordered: bool) -> Result<(), Refused> {
        if self.is_stopped() {
            return Err(Refused::Stopped);
        }
        let message = Message::Reused(Reused(Some(message)));
        let sent = if is_ordered { self.send(message) } else { self.send_by_route(message) };
        if let Err(back) = sent {
            if let Message::Reused(mut back) = back {
                back.0 = None; // the caller has it again
            }
            return Err(Refused::Full);
        }
        Ok(())
    }

    /// Nanoseconds that the core has polled so far without finding work. Periods of a few turns are
    /// not counted.
    pub fn polled_ns(&self) -> u64 {
        self.inbox.polled_ns.0.load(Ordering::Relaxed)
    }

    /// Whether the core has ended.
    pub fn is_stopped(&self) -> bool {
        self.inbox.is_closed()
    }

    /// Whether both are the same core.
    pub fn is_same(&self, other: &CoreRef) -> bool {
        Arc::ptr_eq(&self.inbox, &other.inbox)
    }

    /// Runs `work` on the core and waits for its result. Must not be called on a core.
    ///
    /// # Errors
    /// If the core has ended before `work` could run.
    pub fn call<R: Send + 'static>(
        &self,
        work: impl FnOnce(&Core) -> R + Send + 'static,
    ) -> Result<R, CoreStopped> {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.run(move |core| drop(sender.send(work(core))))?;
        receive(&receiver).map_err(|_| CoreStopped)
    }

    /// Runs the future that `start` returns as a task of the core and waits for its end. Must not
    /// be called on a core.
    ///
    /// # Errors
    /// If the core ends before the future.
    pub fn block_on<F, R>(&self, start: impl FnOnce(Core) -> F + Send + 'static) -> Result<R, CoreStopped>
    where
        F: Future<Output = R> + 'static,
        R: Send + 'static,
    {
        let (sender, receiver) = mpsc::sync_channel(1);
        self.run(move |core| {
            let future = start(core.clone());
            core.spawn(async move { drop(sender.send(future.await)) });
        })?;
        receive(&receiver).map_err(|_| CoreStopped)
    }

    /// Ends the core after the messages sent before this one. The core then drops its tasks, so the
    /// caller drains it first.
    pub fn stop(&self) {
        let _ = self.run(|core| core.request_stop());
    }
}

/// The stand-in for crossbeam's queue in models of loom. It promises less: `is_empty` orders
/// nothing.
#[cfg(loom)]
mod modelled {
    use crate::sync::{AtomicU64, Mutex};
    use std::collections::VecDeque;
    use std::sync::atomic::Ordering;

    pub(super) struct ArrayQueue<T> {
        values: Mutex<VecDeque<T>>,
        len: AtomicU64,
        capacity: usize,
    }

    impl<T> ArrayQueue<T> {
        pub(super) fn new(capacity: usize) -> Self {
            ArrayQueue { values: Mutex::new(VecDeque::new()), len: AtomicU64::new(0), capacity }
        }

        pub(super) fn push(&self, value: T) -> Result<(), T> {
            let mut values = self.values.lock().unwrap();
            if values.len() == self.capacity {
                return Err(value);
            }
            values.push_back(value);
            self.len.store(values.len() as u64, Ordering::Release);
            Ok(())
        }

        pub(super) fn pop(&self) -> Option<T> {
            let mut values = self.values.lock().unwrap();
            let value = values.pop_front();
            self.len.store(values.len() as u64, Ordering::Release);
            value
        }

        pub(super) fn is_empty(&self) -> bool {
            self.len.load(Ordering::Relaxed) == 0
        }
    }
}
