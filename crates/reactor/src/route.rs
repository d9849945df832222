//! The route from one core to another: wakes, and messages that need no order, without an atomic
//! read-modify-write for each.
//!
//! ```text
//!   sending core: Sender::push ─► ring ─► Route::pop: receiving core, in its turn
//!                 Sender::announce, at the end of its turn ─► ends the sleep of the receiving core
//!   sending core ◄── number of posts taken ◄── Route::note_taken: receiving core, once a turn
//! ```
//!
//! A core has one route to each core that it has sent something to. A message that must arrive
//! after those that other cores sent before takes the queue of the inbox instead. Claims, each with
//! a model (`cfg(loom)`, `route/models.rs`):
//!
//! * A post is seen with what was written before it, and its place is used again only after it was
//!   taken.
//! * A core that goes to sleep finds the last post, or the sender finds it asleep.
//! * Nothing stays in a route to a core that has ended: either that core finds it when it closes,
//!   or the sender finds the core closed.

use crate::remote::{Inbox, Message};
use crate::ring::{Consumer, Padded, Producer, ring};
use crate::sync::{AtomicU64, Mutex, UnsafeCell, is_broken, lock};
use crate::task::Task;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// Most posts on their way from one core to another.
const ROUTE: u32 = if cfg!(loom) { 2 } else { 256 };

/// A message or a wake of another core.
pub(crate) enum Post {
    Message(Message),
    /// Wakes a task of the receiving core, which is about to read what is at the address, if one is
    /// known.
    Wake(&'static Task, *const u8),
}

/// Lines of a message that its receiver reads at once.
const MESSAGE_LINES: usize = 3;

impl Post {
    /// Fetches the memory that the receiver is about to read: another core has just written to it.
    #[inline]
    pub(crate) fn prefetch(&self) {
        match self {
            Post::Message(message) => {
                let start = message.memory();
                (0..MESSAGE_LINES).for_each(|line| prefetch(start.wrapping_add(64 * line)));
            }
            Post::Wake(_, hint) => prefetch(*hint),
        }
    }
}

#[inline]
fn prefetch(_address: *const u8) {
    // SAFETY: a prefetch reads nothing, whatever the address.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(_address.cast());
    }
}

// SAFETY: a header's fields without an atomic belong to the thread of its core, and a post of it
// goes there; a sender uses its address alone. The other address is a hint, and is not read.
unsafe impl Send for Post {}

/// The receiving end.
pub(crate) struct Route {
    /// Used by the receiving core, and by the holder of `drain` once that core is closed.
    consumer: UnsafeCell<Consumer<Post>>,
    /// Number of posts that were taken, as the sender may use their places again.
    taken: Padded<AtomicU64>,
    drain: Mutex<()>,
}

// SAFETY: as the fields say, one thread at a time uses the consumer.
unsafe impl Sync for Route {}
// SAFETY: posts are `Send`.
unsafe impl Send for Route {}

impl Route {
    /// Takes the oldest post.
    ///
    /// # Safety
    /// Called by the receiving core, which is not closed.
    #[inline]
    pub(crate) unsafe fn pop(&self) -> Option<Post> {
        // SAFETY: by contract this is the only user.
        self.consumer.with_mut(|consumer| unsafe { (*consumer).pop() })
    }

    /// Whether nothing is on its way.
    ///
    /// # Safety
    /// As for [`Route::pop`].
    #[inline]
    pub(crate) unsafe fn is_empty(&self) -> bool {
        // SAFETY: by contract this is the only user.
        self.consumer.with_mut(|consumer| unsafe { (*consumer).available() == 0 })
    }

    /// Lets the sender use the places of the posts that were taken.
    ///
    /// # Safety
    /// As for [`Route::pop`].
    #[inline]
    pub(crate) unsafe fn note_taken(&self) {
        // SAFETY: by contract this is the only user.
        let taken = self.consumer.with_mut(|consumer| unsafe { (*consumer).taken() });
        let order = match is_broken("places are returned with release") {
            false => Ordering::Release,
            true => Ordering::Relaxed,
        };
        self.taken.0.store(taken, order);
    }

    /// Drops the posts on their way to a core that is closed: their messages are lost.
    pub(crate) fn drain(&self) {
        let _turn = lock(&self.drain);
        // SAFETY: the core that is closed takes posts no more, and this is the holder of `drain`.
        while let Some(post) = self.consumer.with_mut(|consumer| unsafe { (*consumer).pop() }) {
            drop(post);
        }
    }
}

/// The sending end. It belongs to one core.
pub(crate) struct Sender {
    pub(crate) inbox: Arc<Inbox>,
    route: Arc<Route>,
    producer: Producer<Post>,
    /// Number of posts that are known to be taken.
    taken: u64,
    /// Number of posts that were announced.
    announced: u64,
}

impl Sender {
    /// A new route to a core.
    pub(crate) fn new(inbox: Arc<Inbox>) -> Sender {
        let (producer, consumer) = ring(ROUTE);
        let consumer = UnsafeCell::new(consumer);
        let route = Arc::new(Route { consumer, taken: Padded::default(), drain: Mutex::new(()) });
        inbox.add_route(route.clone());
        Sender { inbox, route, producer, taken: 0, announced: 0 }
    }

    /// Sends a post, which the core finds in its next turn, or when [`Sender::announce`] has ended
    /// its sleep.
    ///
    /// # Errors
    /// The post, if the route is full.
    #[inline]
    pub(crate) fn push(&mut self, post: Post) -> Result<(), Post> {
        if self.producer.published() - self.taken >= u64::from(ROUTE) {
            self.taken = self.route.taken.0.load(Ordering::Acquire);
            if self.producer.published() - self.taken >= u64::from(ROUTE) {
                return Err(post);
            }
        }
        // SAFETY: fewer posts than the capacity were not taken, as the receiving core has
        // published.
        unsafe { self.producer.push(post) };
        self.producer.publish();
        // Most sleeps end here, so that both cores work at the same time. The look proves nothing:
        // `announce` looks again, after a fence.
        if self.inbox.body.is_perhaps_asleep() {
            self.inbox.body.end_sleep();
        }
        Ok(())
    }

    /// Whether every post was announced.
    #[inline]
    pub(crate) fn is_announced(&self) -> bool {
        self.announced == self.producer.published()
    }

    /// Ends the core's sleep if it sleeps. If the core has ended, returns the route to be drained:
    /// the core may have drained it before the last post.
    pub(crate) fn announce(&mut self) -> Option<Arc<Route>> {
        self.announced = self.producer.published();
        self.inbox.body.end_sleep();
        let is_closed =
            !is_broken("a sender looks again whether the inbox is closed") && self.inbox.is_closed();
        is_closed.then(|| self.route.clone())
    }
}

#[cfg(all(test, loom))]
mod models;

#[cfg(all(test, not(loom)))]
mod tests;
