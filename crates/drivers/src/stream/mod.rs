//! The protocol-independent parts of drivers over sockets.
//!
//! | module | function |
//! |---|---|
//! | [`connect`] | connects to an address, with deadline and cancellation |
//! | [`inbox`] | receives: data straight into the caller's memory, everything else into a buffer |
//! | [`outbox`] | sends: own headers and the callers' memory, in few system calls |
//! | [`wire`] | the socket, and TLS over it |
//! | [`wakeup`] | an eventfd that is raised when the socket is ready |
//! | [`mailbox`] | events from a thread that connects to a queue |
//! | [`reconnect`] | attempts to reconnect, and their pauses |

pub(crate) mod connect;
pub(crate) mod inbox;
pub(crate) mod mailbox;
pub(crate) mod outbox;
pub(crate) mod reconnect;
pub(crate) mod wakeup;
pub(crate) mod wire;

pub use connect::{Address, Cancel, StreamError};
