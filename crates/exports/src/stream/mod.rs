//! Exports over a stream of bytes: the parts that NBD and NVMe/TCP share over Unix and TCP sockets.
//!
//! ```text
//!   Listener ─► Acceptor (control thread): handshakes ─► a core: Inbox ─► requests ─► Outbox
//!                                                               ▲     Readiness       │
//!                                                               └──── the socket ◄────┘
//! ```
//!
//! One control thread ([`Acceptor`]) drives all handshakes, so half-open connections cost neither
//! threads nor cores. A client that completes its handshake takes a [`ConnectionSlot`] and moves to
//! a core ([`Registry`]). There a [`connection`] serves it with its [`Protocol`]. One `recvmsg`
//! receives many requests ([`Inbox`]), and one `sendmsg` sends many replies ([`Outbox`]). Data
//! stays in buffers of a [`Store`] between device and socket, without a copy. [`Readiness`] watches
//! idle sockets. The crate `stream` has the parts that clients use, too.
//!
//! [`Inbox`]: ::stream::Inbox
//! [`Readiness`]: ::stream::Readiness

mod acceptor;
mod address;
mod bound;
mod budget;
mod connection;
mod connection_slots;
mod inherited;
mod link;
mod listener;
mod listeners;
mod log_limit;
mod memory;
mod outbox;
mod passed;
mod places;
mod registry;
mod security;
mod unix;

pub use acceptor::{AcceptHandler, Admitted, Handshake, HandshakeStep};
pub use address::Address;
pub use bound::BoundSocket;
pub use budget::{FRAGMENT, MIN_MEMORY, MemoryBudget, Minimum};
pub use connection::{Found, MAX_REQUEST_HEADER, Protocol};
pub use connection_slots::{Applicant, ConnectionLimits, ConnectionSlot, ConnectionSlots, NoSlot, Origin};
pub use link::{Grant, Link, Parts};
pub(crate) use listener::Listener;
pub use listeners::{DEFAULT_PORTAL_CLIENTS, Listeners, MAX_ADDRESSES, MAX_PORTAL_CLIENTS, fault_of_portal};
pub use log_limit::LogLimit;
pub(crate) use memory::Store;
pub use memory::{Memory, copy};
pub(crate) use outbox::Outbox;
pub use outbox::{MAX_FRONT, ReplyPart};
pub use passed::pass_socket;
pub use places::Places;
pub use registry::Registry;
pub use security::Security;
pub use unix::{SocketPath, UnixSocket, listen};
