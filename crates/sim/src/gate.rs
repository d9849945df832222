//! Lets the main task of a simulation wait for others.

use reactor::Core;
use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Context, Poll, Waker};

/// Counts running tasks.
#[derive(Clone, Default)]
pub struct Gate(Rc<(Cell<usize>, RefCell<Option<Waker>>)>);

impl Gate {
    /// Runs a counted `task` on `core`.
    pub fn spawn(&self, core: &Core, task: impl Future<Output = ()> + 'static) {
        self.0.0.set(self.0.0.get() + 1);
        let gate = self.clone();
        core.with_current(|| {
            core.spawn(async move {
                task.await;
                gate.0.0.set(gate.0.0.get() - 1);
                if let Some(waker) = gate.0.1.borrow_mut().take() {
                    waker.wake();
                }
            });
        });
    }

    /// Number of running tasks.
    pub fn running(&self) -> usize {
        self.0.0.get()
    }

    /// Ready when no task runs.
    pub fn poll_empty(&self, cx: &mut Context<'_>) -> Poll<()> {
        if self.running() == 0 {
            return Poll::Ready(());
        }
        *self.0.1.borrow_mut() = Some(cx.waker().clone());
        Poll::Pending
    }
}

/// Returns the result of `future`, or `None` when it takes longer than `ns`.
pub async fn within<R>(ns: u64, future: impl Future<Output = R>) -> Option<R> {
    let mut future = pin!(future);
    let mut alarm = pin!(reactor::current().sleep(ns));
    std::future::poll_fn(|cx| {
        if let Poll::Ready(result) = future.as_mut().poll(cx) {
            return Poll::Ready(Some(result));
        }
        Pin::new(&mut alarm).as_mut().poll(cx).map(|()| None)
    })
    .await
}
