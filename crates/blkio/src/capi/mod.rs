//! The C library: every function of `blkio.h`, one to one over [`crate::Instance`] and
//! [`crate::IoQueue`].
//!
//! Functions return 0 or a negative errno, and leave a sentence for the calling thread behind. A
//! null pointer where an object must be is `EINVAL`. Some mistakes of a C caller cannot be checked:
//! a pointer to something else, a queue that was removed, two threads in one queue.
//!
//! Source: `blkio(3)`; the layout of structures is that of `blkio.h`.

mod control;
mod instance;
mod message;
mod queue;

pub use control::*;
pub use instance::*;
pub use message::*;
pub use queue::*;

use crate::{Error, Instance, Result};
use std::ffi::{CStr, c_char, c_int};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// `struct blkio`: an instance, and the control operation that may be running on it.
pub struct Blkio {
    instance: Arc<Mutex<Instance>>,
    control: control::Control,
}

impl Blkio {
    /// The instance, unless a control operation is running.
    fn instance(&self) -> Result<MutexGuard<'_, Instance>> {
        if self.control.is_running() {
            return Err(Error::new(libc::EBUSY, "a control operation is running on the instance"));
        }
        Ok(self.instance.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

/// Runs `call` on the instance behind `b`, with its result as a C program gets it.
///
/// # Safety
/// `b` is null or came from `blkio_create()` and was not destroyed.
unsafe fn with<T>(
    b: *mut Blkio,
    call: impl FnOnce(&mut Instance) -> Result<T>,
) -> std::result::Result<T, c_int> {
    // SAFETY: by contract.
    let blkio = unsafe { b.as_ref() }.ok_or_else(|| Error::new(libc::EINVAL, "the blkio pointer is null"));
    let result = blkio.and_then(|blkio| call(&mut *blkio.instance()?));
    result.map_err(report)
}

/// Leaves the sentence behind and returns the negative errno.
fn report(error: Error) -> c_int {
    message::set(error.message());
    -error.errno()
}

fn returned(result: std::result::Result<(), c_int>) -> c_int {
    result.err().unwrap_or(0)
}

/// A C string as text.
///
/// # Safety
/// `text` is null or a C string that outlives the result.
unsafe fn text<'a>(text: *const c_char, what: &str) -> Result<&'a str> {
    if text.is_null() {
        return Err(Error::new(libc::EINVAL, format!("{what} is a null pointer")));
    }
    // SAFETY: by contract.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Error::new(libc::EINVAL, format!("{what} {text:?} is not UTF-8")))
}
