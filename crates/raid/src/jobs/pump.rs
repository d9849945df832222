//! A window of stripes in flight. Its user empties it before it is dropped: requests run to their
//! end.

use reactor::Sleep;
use std::future::Future;
use std::pin::Pin;
use std::task::Poll;

/// Futures that run together.
pub(super) struct Pump<'a, T> {
    running: Vec<Pin<Box<dyn Future<Output = T> + 'a>>>,
}

impl<'a, T> Pump<'a, T> {
    pub fn new() -> Pump<'a, T> {
        Pump { running: Vec::new() }
    }

    pub fn len(&self) -> usize {
        self.running.len()
    }

    pub fn push(&mut self, future: impl Future<Output = T> + 'a) {
        self.running.push(Box::pin(future));
    }

    /// Waits until something has ended, or a timer has; `None` for the latter.
    pub async fn next(&mut self, mut timer: Option<Sleep>) -> Option<T> {
        std::future::poll_fn(|cx| {
            for i in 0..self.running.len() {
                if let Poll::Ready(result) = self.running[i].as_mut().poll(cx) {
                    drop(self.running.swap_remove(i));
                    return Poll::Ready(Some(result));
                }
            }
            match &mut timer {
                Some(timer) => Pin::new(timer).poll(cx).map(|()| None),
                None if self.running.is_empty() => Poll::Ready(None),
                None => Poll::Pending,
            }
        })
        .await
    }
}
