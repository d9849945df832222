//! Models of a route between two cores. After a lost post the receiving core sleeps for ever, and
//! loom reports the deadlock. Counted references are std's, because loom's cannot be dropped after
//! a deadlock.

use super::*;
use crate::doorbell::Doorbell;
use crate::remote::CoreRef;
use crate::sync::{model, must_fail};
use crate::task::Body;
use loom::thread;

/// A core that receives posts.
struct Receiver {
    body: &'static Body,
    doorbell: Doorbell,
    inbox: Arc<Inbox>,
    routes: Vec<Arc<Route>>,
}

impl Receiver {
    fn new() -> Receiver {
        let (body, doorbell) = Body::of_model();
        Receiver { body, doorbell, inbox: Inbox::new(body), routes: Vec::new() }
    }

    /// Takes the next post, and sleeps until it arrives, as a core does.
    fn wait(&mut self) -> Post {
        loop {
            if self.inbox.has_new_routes() {
                self.routes.extend(self.inbox.take_new_routes());
            }
            for route in &self.routes {
                // SAFETY: this is the receiver, which does not close.
                if let Some(post) = unsafe { route.pop() } {
                    // SAFETY: as above.
                    unsafe { route.note_taken() };
                    return post;
                }
            }
            self.body.begin_sleep();
            // SAFETY: as above.
            let has_post = self.routes.iter().any(|route| unsafe { !route.is_empty() });
            if !has_post && !self.inbox.has_new_routes() {
                self.doorbell.wait();
            }
            self.body.woke_up();
        }
    }
}

fn message() -> Post {
    Post::Message(Message::Work(Box::new(|_| ())))
}

/// A core sends two posts to a core that goes to sleep in between.
fn posts_reach_a_core_that_sleeps() {
    let mut receiver = Receiver::new();
    let task = receiver.body.new_task();
    let inbox = receiver.inbox.clone();
    // A task's address may go to any thread.
    let task_address = std::ptr::from_ref(task).addr();
    let sending = thread::spawn(move || {
        let mut sender = Sender::new(inbox);
        assert!(sender.push(message()).is_ok());
        assert!(sender.announce().is_none());
        let task = std::ptr::with_exposed_provenance::<Task>(task_address);
        // SAFETY: headers live for ever.
        assert!(sender.push(Post::Wake(unsafe { &*task }, std::ptr::null())).is_ok());
        assert!(sender.announce().is_none() && sender.is_announced());
    });
    assert!(matches!(receiver.wait(), Post::Message(_)));
    assert!(matches!(receiver.wait(), Post::Wake(woken, _) if std::ptr::eq(woken, task)));
    sending.join().unwrap();
}

/// A core sends more posts than there are places while the other one takes them.
fn places_are_used_again() {
    let mut receiver = Receiver::new();
    let inbox = receiver.inbox.clone();
    let sending = thread::spawn(move || {
        let mut sender = Sender::new(inbox);
        let mut sent = 0;
        for _ in 0..=ROUTE {
            sent += u32::from(sender.push(message()).is_ok());
        }
        assert!(sender.announce().is_none());
        sent
    });
    // All but the last find room, whatever the receiver has taken.
    for _ in 0..ROUTE {
        assert!(matches!(receiver.wait(), Post::Message(_)));
    }
    if sending.join().unwrap() > ROUTE {
        assert!(matches!(receiver.wait(), Post::Message(_)));
    }
}

/// A core ends while another one sends it a message. The message is lost, never kept.
fn a_post_to_a_core_that_ends_is_lost() {
    let (body, _) = Body::of_model();
    let inbox = Inbox::new(body);
    let kept = Arc::new(());
    let sending = {
        let (to, kept) = (CoreRef { inbox: inbox.clone(), index: 0 }, kept.clone());
        thread::spawn(move || {
            if to.is_stopped() {
                return;
            }
            let mut sender = Sender::new(to.inbox.clone());
            assert!(sender.push(Post::Message(Message::Work(Box::new(move |_| drop(kept))))).is_ok());
            if let Some(route) = sender.announce() {
                route.drain();
            }
        })
    };
    inbox.close();
    inbox.take_new_routes().iter().for_each(|route| route.drain());
    sending.join().unwrap();
    assert_eq!(Arc::strong_count(&kept), 1);
}

#[test]
fn no_post_to_a_core_is_lost() {
    model(posts_reach_a_core_that_sleeps);
    must_fail("a core that goes to sleep puts a fence before its last look", posts_reach_a_core_that_sleeps);
    must_fail("a thread that wakes a core puts a fence before its look", posts_reach_a_core_that_sleeps);
    must_fail("values are published with release", posts_reach_a_core_that_sleeps);
}

#[test]
fn a_place_is_used_again_only_after_its_post_was_taken() {
    model(places_are_used_again);
    must_fail("places are returned with release", places_are_used_again);
}

#[test]
fn nothing_stays_in_a_route_to_a_core_that_has_ended() {
    model(a_post_to_a_core_that_ends_is_lost);
    must_fail("a sender looks again whether the inbox is closed", a_post_to_a_core_that_ends_is_lost);
}
