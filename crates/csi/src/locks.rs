//! One call at a time for each object.
//!
//! Orchestrators repeat a call that takes long, while the first one still runs. The second one does
//! not wait: it is answered with `ABORTED`, and repeated later.

use crate::fault::{Fault, Result};
use std::collections::HashSet;
use std::sync::{Arc, Mutex, PoisonError};

/// The objects at which a call is at work.
#[derive(Clone, Default)]
pub struct Locks {
    held: Arc<Mutex<HashSet<String>>>,
}

/// The right to work at an object, until it is dropped.
pub struct Held {
    locks: Locks,
    object: String,
}

impl Locks {
    /// Takes an object.
    ///
    /// # Errors
    /// `ABORTED` while another call has it.
    pub fn take(&self, object: &str) -> Result<Held> {
        let is_free = self.objects().insert(object.to_owned());
        match is_free {
            true => Ok(Held { locks: self.clone(), object: object.to_owned() }),
            false => Err(Fault::again(format!("{object}: another call for it is in progress"))),
        }
    }

    fn objects(&self) -> std::sync::MutexGuard<'_, HashSet<String>> {
        // A panic leaves the set whole.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.locks.objects().remove(&self.object);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tonic::Code;

    #[test]
    fn a_second_call_for_an_object_is_aborted_until_the_first_ends() {
        let locks = Locks::default();
        let held = locks.take("a/1").unwrap();
        let fault = locks.take("a/1").map(drop).unwrap_err();
        assert_eq!(fault.code, Code::Aborted);
        assert!(fault.message.contains("a/1"), "{fault}");
        assert!(locks.take("a/2").is_ok());
        drop(held);
        assert!(locks.take("a/1").is_ok());
    }
}
