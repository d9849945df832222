//! A gate that every stripe operation passes: closed while something about the array changes that
//! operations under way must not see.

use reactor::CoreRef;
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::task::{Context, Poll, Waker};

/// See the module.
#[derive(Default)]
pub struct Gate {
    inside: Cell<usize>,
    /// How often it was closed and not opened.
    closed: Cell<usize>,
    /// The core that closed it last.
    closer: RefCell<Option<CoreRef>>,
    waiting: RefCell<Vec<Waker>>,
}

/// An operation inside; it leaves when this is dropped.
pub struct Inside<'a>(&'a Gate);

impl Gate {
    /// Enters the gate if it is open.
    #[inline]
    pub fn try_enter(&self) -> Option<Inside<'_>> {
        if self.closed.get() > 0 {
            return None;
        }
        self.inside.set(self.inside.get() + 1);
        Some(Inside(self))
    }

    /// Ready when the gate is open.
    pub fn poll_open(&self, cx: &mut Context<'_>) -> Poll<()> {
        self.poll(cx, self.closed.get() == 0)
    }

    /// Whether a core keeps the gate closed that has ended.
    pub fn is_abandoned(&self) -> bool {
        self.closed.get() > 0 && self.closer.borrow().as_ref().is_some_and(CoreRef::is_stopped)
    }

    /// Lets no operation in any more, on behalf of `closer`, and waits until all have left. If the
    /// core that closed it before has ended, `closer` takes its place.
    pub async fn close(&self, closer: CoreRef) {
        if self.is_abandoned() {
            self.closed.set(0);
        }
        self.closed.set(self.closed.get() + 1);
        self.closer.replace(Some(closer));
        poll_fn(|cx| self.poll(cx, self.inside.get() == 0)).await;
    }

    /// Undoes one [`Gate::close`].
    pub fn open(&self) {
        self.closed.set(self.closed.get() - 1);
        self.wake();
    }

    fn poll(&self, cx: &mut Context<'_>, is_ready: bool) -> Poll<()> {
        if is_ready {
            return Poll::Ready(());
        }
        self.waiting.borrow_mut().push(cx.waker().clone());
        Poll::Pending
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
