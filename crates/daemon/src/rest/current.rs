//! A value that SIGHUP replaces while requests use it.

use std::sync::{Arc, PoisonError, RwLock};

/// The value in use. Clones share it.
#[derive(Debug)]
pub(super) struct Current<T>(Arc<RwLock<T>>);

impl<T> Clone for Current<T> {
    fn clone(&self) -> Current<T> {
        Current(self.0.clone())
    }
}

impl<T: Clone> Current<T> {
    pub(super) fn new(value: T) -> Current<T> {
        Current(Arc::new(RwLock::new(value)))
    }

    pub(super) fn get(&self) -> T {
        self.0.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(super) fn set(&self, value: T) {
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = value;
    }
}
