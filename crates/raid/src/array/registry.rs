//! Registry of the parts of arrays on each core: messages carry an array's number, and find the
//! owner here.

use super::remote::{self, LocalFuture};
use super::stripe_owner::StripeOwner;
use reactor::{CoreRef, CoreStopped};
use std::cell::RefCell;
use std::rc::Rc;

thread_local! {
    /// Array, core, part. A thread has one core, except in the simulator.
    static OWNERS: RefCell<Vec<(u64, usize, Rc<StripeOwner>)>> = const { RefCell::new(Vec::new()) };
}

/// The current core's part of an array.
pub(crate) fn find(array: u64) -> Option<Rc<StripeOwner>> {
    let core = reactor::current().index();
    OWNERS.with_borrow(|owners| {
        owners.iter().find(|(id, index, _)| (*id, *index) == (array, core)).map(|(.., owner)| owner.clone())
    })
}

/// Adds the current core's part of an array.
pub(crate) fn add(array: u64, owner: Rc<StripeOwner>) {
    OWNERS.with_borrow_mut(|owners| owners.push((array, owner.core.index(), owner)));
}

/// Removes an array from this thread.
pub(crate) fn remove(array: u64) {
    let gone: Vec<_> =
        OWNERS.with_borrow_mut(|owners| owners.extract_if(.., |(id, ..)| *id == array).collect());
    drop(gone); // may drop channels, which may use this registry
}

/// Runs work on a core's part of an array; `None` if that core has no part of it.
///
/// # Errors
/// If the core ends before the work.
pub(crate) async fn run<R, W>(core: &CoreRef, array: u64, work: W) -> Result<Option<R>, CoreStopped>
where
    R: Send + 'static,
    W: FnOnce(Rc<StripeOwner>) -> LocalFuture<R> + Send + 'static,
{
    let start = move || -> LocalFuture<Option<R>> {
        match find(array).map(work) {
            Some(future) => Box::pin(async move { Some(future.await) }),
            None => Box::pin(std::future::ready(None)),
        }
    };
    remote::call(core, start).await
}

/// Runs work on the parts of an array that some cores have, one after the other.
pub(crate) async fn run_each<W>(cores: &[CoreRef], array: u64, work: W)
where
    W: FnOnce(Rc<StripeOwner>) -> LocalFuture<()> + Clone + Send + 'static,
{
    for core in cores {
        let _ = run(core, array, work.clone()).await; // a core that has ended runs nothing
    }
}
