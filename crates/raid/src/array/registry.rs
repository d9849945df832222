//! Which part of which array lives on which core: messages carry an array's number, and find its owner here.

use super::owner::Owner;
use std::cell::RefCell;
use std::rc::Rc;

thread_local! {
    /// Array, core, part. A thread has one core, but for the simulator's.
    static OWNERS: RefCell<Vec<(u64, usize, Rc<Owner>)>> = const { RefCell::new(Vec::new()) };
}

/// The running core's part of an array.
pub(crate) fn find(array: u64) -> Option<Rc<Owner>> {
    let core = reactor::current().index();
    OWNERS.with_borrow(|owners| {
        owners.iter().find(|(id, index, _)| (*id, *index) == (array, core)).map(|(.., owner)| owner.clone())
    })
}

/// Makes the running core's part of an array known.
pub(crate) fn add(array: u64, owner: Rc<Owner>) {
    OWNERS.with_borrow_mut(|owners| owners.push((array, owner.core.index(), owner)));
}

/// Forgets an array on this thread.
pub(crate) fn remove(array: u64) {
    let gone: Vec<_> =
        OWNERS.with_borrow_mut(|owners| owners.extract_if(.., |(id, ..)| *id == array).collect());
    drop(gone); // may end channels, which may look here
}
