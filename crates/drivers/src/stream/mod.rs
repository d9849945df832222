//! The protocol-independent parts of drivers over sockets, in addition to those of the crate
//! `stream`, which servers use, too.
//!
//! | module | function |
//! |---|---|
//! | [`connect`] | connects to an address, with deadline and cancellation |
//! | [`outbox`] | bytes that wait to be sent: own headers and the callers' memory |
//! | [`mailbox`] | events from a thread that connects to a queue |
//! | [`reconnect`] | attempts to reconnect, and their pauses |

pub(crate) mod connect;
pub(crate) mod mailbox;
pub(crate) mod outbox;
pub(crate) mod reconnect;

pub use connect::{Address, Cancel, StreamError};
