//! A gate that every stripe operation passes: closed while something about the array changes that operations under way
//! must not see.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Poll, Waker};

/// See the module.
#[derive(Default)]
pub struct Gate {
    inside: Cell<usize>,
    /// How many want it closed.
    closed: Cell<usize>,
    waiting: RefCell<Vec<Waker>>,
}

/// An operation inside; it leaves when this is dropped.
pub struct Inside<'a>(&'a Gate);

impl Gate {
    /// Waits until the gate is open.
    #[inline]
    pub async fn enter(&self) -> Inside<'_> {
        if self.closed.get() > 0 {
            self.wait(|gate| gate.closed.get() == 0).await;
        }
        self.inside.set(self.inside.get() + 1);
        Inside(self)
    }

    /// Lets nobody in any more, and waits until everybody has left.
    pub async fn close(&self) {
        self.closed.set(self.closed.get() + 1);
        self.wait(|gate| gate.inside.get() == 0).await;
    }

    /// Undoes one [`Gate::close`].
    pub fn open(&self) {
        self.closed.set(self.closed.get() - 1);
        self.wake();
    }

    async fn wait(&self, is_ready: impl Fn(&Gate) -> bool) {
        poll_fn(|cx| {
            if is_ready(self) {
                return Poll::Ready(());
            }
            self.waiting.borrow_mut().push(cx.waker().clone());
            Poll::Pending
        })
        .await;
    }

    fn wake(&self) {
        self.waiting.take().into_iter().for_each(Waker::wake);
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        let gate = self.0;
        gate.inside.set(gate.inside.get() - 1);
        if gate.inside.get() == 0 && gate.closed.get() > 0 {
            gate.wake();
        }
    }
}
