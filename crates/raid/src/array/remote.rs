//! Runs work on another core and returns its result, for messages between the cores of an array.

use reactor::{Call, CallRequest, Core, CoreRef, CoreStopped, Reply};
use std::future::Future;
use std::pin::Pin;

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
    Call::default().run(core, Work(Box::new(start))).await
}

/// The start of a future on the called core.
struct Work<R>(Box<dyn FnOnce() -> LocalFuture<R> + Send>);

impl<R: Send + 'static> CallRequest for Work<R> {
    type Answer = R;

    const IS_ORDERED: bool = true;

    fn start(self, core: &Core, reply: Reply<Work<R>>) {
        let future = (self.0)();
        core.spawn(async move { reply.send(future.await) });
    }
}
