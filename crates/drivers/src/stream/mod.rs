//! What drivers over sockets share: nothing here knows a protocol.
//!
//! | module | what it does |
//! |---|---|
//! | [`connect`] | from an address to a connected socket, whole messages over it, and an end to both at any time |
//! | [`inbox`] | receives: data straight to where it belongs, and everything else into a buffer |
//! | [`outbox`] | sends: headers of our own and the callers' memory, in few system calls |
//! | [`wire`] | the socket, and TLS over it |
//! | [`wakeup`] | an eventfd that rises when the socket has something |

pub(crate) mod connect;
pub(crate) mod inbox;
pub(crate) mod outbox;
pub(crate) mod wakeup;
pub(crate) mod wire;

pub use connect::{Address, Cancel, StreamError};
