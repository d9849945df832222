//! Listening sockets that one process binds and another serves.
//!
//! ```text
//!   binding process:     BoundSocket ── descriptor ──►  pass_socket(address, …)  :serving process
//!   (keeps the address)                                 its export takes the socket
//! ```
//!
//! The serving process needs no right to bind a port or to create a file. The socket outlives it:
//! clients that connect while no process serves wait in the socket's queue.

use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};

/// Sockets that no export has taken yet, by address.
static PASSED: Mutex<Vec<(String, OwnedFd)>> = Mutex::new(Vec::new());

/// Has the next export that is to listen at `address` take this socket, which listens there
/// already.
pub fn pass_socket(address: &str, socket: OwnedFd) {
    PASSED.lock().unwrap_or_else(PoisonError::into_inner).push((address.to_owned(), socket));
}

/// The socket that was passed for `address`.
pub(super) fn take(address: &str) -> Option<OwnedFd> {
    let mut passed = PASSED.lock().unwrap_or_else(PoisonError::into_inner);
    let place = passed.iter().position(|(of, _)| of == address)?;
    Some(passed.swap_remove(place).1)
}
