//! Registry of the parts of arrays on each core: messages carry an array's number, and find the
//! owner here.

use super::stripe_owner::StripeOwner;
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
