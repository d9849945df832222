//! Clients that come over a stream of bytes: what NBD has in common with any protocol over Unix and TCP sockets.
//!
//! ```text
//!   Listener ─► Acceptor (control thread): accept, talk within a deadline ─► a core: Inbox ─► requests ─► Outbox
//!                                                                               ▲     Readiness       │
//!                                                                               └──── the socket ◄───┘
//! ```
//!
//! Who has just come is spoken with on one control thread for all ([`Acceptor`]), so half-open connections cost neither
//! threads nor cores; whoever has said what it wants takes a [`ConnectionSlot`] and is handed to a core ([`Registry`]). There a
//! [`connection`] lives, on which its [`Protocol`] is spoken: one `recvmsg` takes many requests ([`Inbox`]), one `sendmsg` carries many replies ([`Outbox`]), and data lies in buffers of a
//! [`Store`] from the device to the socket without being copied. A socket that has nothing to say is watched through
//! [`Readiness`].

mod acceptor;
mod address;
mod budget;
mod connection;
mod connection_slots;
mod inbox;
mod inherited;
mod link;
mod listener;
mod log_limit;
mod memory;
mod outbox;
mod places;
mod readiness;
mod registry;
mod unix;
mod wire;

pub(crate) use acceptor::{AcceptHandler, Acceptor, Admitted, Handshake, HandshakeStep};
pub use address::Address;
pub use budget::{MIN_MEMORY, MemoryBudget};
pub(crate) use budget::{Minimum, PIECE};
pub(crate) use connection::{Found, Protocol};
pub(crate) use connection_slots::{
    Applicant, ConnectionLimits, ConnectionSlot, ConnectionSlots, NoSlot, Origin,
};
pub(crate) use inbox::{Inbox, Received};
pub(crate) use link::{Grant, Link, Parts};
pub(crate) use listener::Listener;
pub(crate) use memory::{Memory, Store, copy};
pub(crate) use outbox::{MAX_FRONT, Outbox, ReplyPart};
pub(crate) use places::Places;
pub(crate) use readiness::Readiness;
pub(crate) use registry::Registry;
pub(crate) use unix::UnixSocket;
pub use unix::{SocketPath, listen};
pub use wire::Security;
pub(crate) use wire::Wire;
