//! Posts between cores, by routes: the sending and the receiving half of a core's turn.

use super::{CURRENT, Core, Inner};
use crate::remote::Inbox;
use crate::route::{Post, Route, Sender};
use crate::task::Task;
use std::ptr;
use std::sync::Arc;

/// Turns without work after the last post of another core, before the core sleeps. They take about
/// as long as a sleep and its end, some microseconds, so at worst that time doubles.
const PATIENCE: u32 = 64;
/// Posts of one other core taken in one turn.
const POSTS_PER_TURN: usize = 64;
/// Posts whose memory is fetched at the same time.
const FETCHED: usize = 8;

/// Wakes `task` if the calling thread runs its core, or another one that has a route to it with
/// room; returns whether that is so.
#[inline]
pub(crate) fn wake_from_core(task: &'static Task, hint: *const u8) -> bool {
    // SAFETY: as in `current`.
    let Some(inner) = (unsafe { CURRENT.get().as_ref() }) else { return false };
    if ptr::eq(inner.body, task.body) {
        inner.queue(task);
        return true;
    }
    inner.post_wake(task, hint)
}

/// The end of [`post`].
pub(crate) enum Posted {
    /// It is on its way, and will be announced.
    Sent,
    /// The route is full.
    Full(Post),
    /// The calling thread runs no core, or the one that is sent to.
    NoRoute(Post),
}

/// Sends a post from the calling core to another one.
#[inline]
pub(crate) fn post(to: &Arc<Inbox>, post: Post) -> Posted {
    // SAFETY: as in `current`.
    match unsafe { CURRENT.get().as_ref() } {
        Some(inner) if !Arc::ptr_eq(&inner.inbox, to) => inner.post(to, post),
        _ => Posted::NoRoute(post),
    }
}

impl Inner {
    fn post(&self, to: &Arc<Inbox>, post: Post) -> Posted {
        let senders = &mut *self.senders.borrow_mut();
        let at = senders.iter().position(|sender| Arc::ptr_eq(&sender.inbox, to));
        let at = at.unwrap_or_else(|| {
            senders.push(Sender::new(to.clone()));
            senders.len() - 1
        });
        self.push(&mut senders[at], post).map_or_else(Posted::Full, |()| Posted::Sent)
    }

    fn post_wake(&self, task: &'static Task, hint: *const u8) -> bool {
        // A body may have served a core that has ended before.
        let is_of = |sender: &&mut Sender| ptr::eq(sender.inbox.body, task.body) && !sender.inbox.is_closed();
        if let Some(sender) = self.senders.borrow_mut().iter_mut().find(is_of) {
            return self.push(sender, Post::Wake(task, hint)).is_ok();
        }
        let inbox = task.body.inbox().filter(|inbox| !inbox.is_closed());
        inbox.is_some_and(|inbox| matches!(self.post(&inbox, Post::Wake(task, hint)), Posted::Sent))
    }

    fn push(&self, sender: &mut Sender, post: Post) -> Result<(), Post> {
        sender.push(post)?;
        self.has_unannounced.set(true);
        Ok(())
    }

    #[inline]
    pub(super) fn announce_posts(&self) {
        if self.has_unannounced.replace(false) {
            self.announce_all();
        }
    }

    fn announce_all(&self) {
        let mut ended = Vec::new();
        self.senders.borrow_mut().retain_mut(|sender| {
            let route = if sender.is_announced() { None } else { sender.announce() };
            let is_open = route.is_none();
            ended.extend(route);
            is_open
        });
        // A message that is lost may wake a task, by the routes that remain.
        ended.iter().for_each(|route| route.drain());
    }
}

impl Core {
    #[cold]
    pub(super) fn take_new_routes(&self) {
        // A core that has ended takes no more: the senders drain their routes.
        if !self.0.inbox.is_closed() {
            self.0.routes.borrow_mut().extend(self.0.inbox.take_new_routes());
        }
    }

    /// Runs messages of other cores, and queues the tasks that they have woken.
    #[inline]
    pub(super) fn run_posts(&self) -> bool {
        let mut has_found = false;
        for route in &*self.0.routes.borrow() {
            let mut taken = 0;
            while taken < POSTS_PER_TURN {
                let mut posts = [const { None }; FETCHED];
                for place in &mut posts {
                    // SAFETY: this is the receiving core, which drops its routes when it closes.
                    *place = unsafe { route.pop() };
                    let Some(post) = place else { break };
                    post.prefetch();
                    taken += 1;
                }
                let is_last = posts[FETCHED - 1].is_none();
                posts.into_iter().flatten().for_each(|post| self.receive(post));
                if is_last {
                    break;
                }
            }
            if taken > 0 {
                self.0.patience.set(PATIENCE);
                // SAFETY: as above.
                unsafe { route.note_taken() };
                has_found = true;
            }
        }
        has_found
    }

    fn receive(&self, post: Post) {
        match post {
            Post::Message(message) => {
                self.0.messages.set(self.0.messages.get() + 1);
                message.run(self);
            }
            Post::Wake(task, _) => {
                self.0.foreign_wakes.set(self.0.foreign_wakes.get() + 1);
                self.0.queue(task);
            }
        }
    }

    /// Whether another core has sent something.
    pub(super) fn has_posts(&self) -> bool {
        // SAFETY: as in `run_posts`.
        let has_some = |route: &Arc<Route>| unsafe { !route.is_empty() };
        let has_new_routes = self.0.inbox.has_new_routes() && !self.0.inbox.is_closed();
        has_new_routes || self.0.routes.borrow().iter().any(has_some)
    }

    /// Drops the routes of cores that have ended.
    pub(super) fn forget_routes(&self) {
        // SAFETY: as in `run_posts`.
        self.0
            .routes
            .borrow_mut()
            .retain_mut(|route| Arc::get_mut(route).is_none() || unsafe { !route.is_empty() });
        self.0.senders.borrow_mut().retain(|sender| !sender.inbox.is_closed() || !sender.is_announced());
    }
}
