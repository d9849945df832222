//! The protocol-independent parts of drivers over sockets, in addition to those of the crate
//! `stream`, which servers use, too.
//!
//! | module | function |
//! |---|---|
//! | `connect` | connects to an address, with deadline and cancellation |
//! | [`Outbox`] | bytes that wait to be sent: own headers and the callers' memory |
//! | [`Mailbox`] | events from a thread that connects to a queue |
//! | [`reconnect`] | attempts to reconnect, and their pauses |

mod connect;
mod mailbox;
mod outbox;
pub mod reconnect;

pub use connect::{Address, Cancel, Deadline, Stream, StreamError, Timed};
pub use mailbox::Mailbox;
pub use outbox::Outbox;
