//! Waiting for several requests at once.

use crate::{IoFuture, IoResult};
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};

/// Limit of futures in one [`join_all`]: the list lives inside the future, not on the heap.
pub const MAX_JOINED: usize = 16;

/// Waits for all futures, even after one has failed. Returns the error of the first failed future
/// in the order of the list.
///
/// # Panics
/// With more than [`MAX_JOINED`] futures: a caller with more joins them in groups.
pub fn join_all<'a>(futures: impl Iterator<Item = IoFuture<'a>>) -> impl Future<Output = IoResult> + 'a {
    let mut children = [const { None }; MAX_JOINED];
    let mut count = 0;
    for future in futures {
        assert!(count < MAX_JOINED, "join_all takes {MAX_JOINED} futures");
        children[count] = Some(future);
        count += 1;
    }
    JoinAll { children, results: [Ok(()); MAX_JOINED], count }
}

struct JoinAll<'a> {
    children: [Option<IoFuture<'a>>; MAX_JOINED],
    results: [IoResult; MAX_JOINED],
    count: usize,
}

impl Future for JoinAll<'_> {
    type Output = IoResult;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<IoResult> {
        let this = &mut *self;
        let mut is_pending = false;
        for (child, result) in this.children.iter_mut().zip(&mut this.results).take(this.count) {
            let Some(future) = child else { continue };
            match Pin::new(future).poll(cx) {
                Poll::Ready(r) => {
                    *result = r;
                    *child = None;
                }
                Poll::Pending => is_pending = true,
            }
        }
        if is_pending {
            return Poll::Pending;
        }
        Poll::Ready(this.results[..this.count].iter().copied().find(Result::is_err).unwrap_or(Ok(())))
    }
}
