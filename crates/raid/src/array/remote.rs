//! Runs work on another core and returns its result, for messages between the cores of an array.

use reactor::{CoreRef, CoreStopped, NotSent};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

/// A future that stays on its core.
pub type LocalFuture<R> = Pin<Box<dyn Future<Output = R>>>;

/// Runs the future that `start` returns on `core`, and waits for its end. On the same core it runs
/// at once, without a message.
///
/// # Errors
/// If the core ends before the future.
pub async fn call<R: Send + 'static>(
    core: &CoreRef,
    start: impl FnOnce() -> LocalFuture<R> + Send + 'static,
) -> Result<R, CoreStopped> {
    if reactor::current().remote().is_same(core) {
        return Ok(start().await);
    }
    let answer = Arc::new(Mutex::new(Answer::Waiting(None)));
    let sender = Sender(answer.clone());
    let mut message: Box<dyn FnOnce(&reactor::Core) + Send> = Box::new(move |core| {
        let future = start();
        core.spawn(async move { sender.send(future.await) });
    });
    loop {
        match core.try_run(message) {
            Ok(()) => break,
            Err(NotSent::Stopped) => return Err(CoreStopped),
            Err(NotSent::Full(back)) => message = back,
        }
        reactor::yield_now().await;
    }
    std::future::poll_fn(|cx| {
        let mut answer = answer.lock().unwrap_or_else(PoisonError::into_inner);
        match std::mem::replace(&mut *answer, Answer::Taken) {
            Answer::Waiting(_) => {
                *answer = Answer::Waiting(Some(cx.waker().clone()));
                Poll::Pending
            }
            Answer::Sent(result) => Poll::Ready(Ok(result)),
            Answer::Taken => Poll::Ready(Err(CoreStopped)),
        }
    })
    .await
}

enum Answer<R> {
    Waiting(Option<Waker>),
    Sent(R),
    /// Already fetched, or never to arrive.
    Taken,
}

/// Sends the answer, or reports that there is none.
struct Sender<R>(Arc<Mutex<Answer<R>>>);

impl<R> Sender<R> {
    fn send(self, result: R) {
        self.put(Answer::Sent(result));
    }

    fn put(&self, new: Answer<R>) {
        let old = std::mem::replace(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), new);
        if let Answer::Waiting(Some(waker)) = old {
            waker.wake();
        }
    }
}

impl<R> Drop for Sender<R> {
    fn drop(&mut self) {
        let is_waiting = matches!(*self.0.lock().unwrap_or_else(PoisonError::into_inner), Answer::Waiting(_));
        if is_waiting {
            self.put(Answer::Taken);
        }
    }
}
