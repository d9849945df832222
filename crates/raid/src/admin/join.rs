//! Waits for several futures that are not requests.

use std::future::Future;
use std::pin::Pin;
use std::task::Poll;

/// Runs all futures concurrently; returns their results in order.
pub(super) async fn join_all<T>(futures: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut running: Vec<Pin<Box<_>>> = futures.map(Box::pin).collect();
    let mut results: Vec<Option<T>> = running.iter().map(|_| None).collect();
    std::future::poll_fn(|cx| {
        let mut is_pending = false;
        for (future, result) in running.iter_mut().zip(&mut results) {
            if result.is_some() {
                continue;
            }
            match future.as_mut().poll(cx) {
                Poll::Ready(value) => *result = Some(value),
                Poll::Pending => is_pending = true,
            }
        }
        if is_pending { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    results.into_iter().map(|result| result.expect("every future has ended")).collect()
}
