//! Connections that carry bytes, as clients and servers of NBD and NVMe/TCP use them.
//!
//! ```text
//!   a request's memory ◄─┐
//!   headers, short data ◄┴─ Inbox ◄─ recvmsg(2) ─┐
//!                                                Wire: the socket, and TLS over it
//!   SendQueue: headers, data ─────── sendmsg(2) ─┘
//! ```
//!
//! One system call moves the bytes of many requests. Without TLS, long data goes between socket and
//! its memory without a copy. Nothing here blocks, and nothing knows a protocol.
//!
//! The sides differ in what they send: a server owns the memory of a reply until the socket has it,
//! and a client borrows that of a request. So each has a queue of its own, a [`SendQueue`].
//!
//! | sleeper | notified by |
//! |---|---|
//! | a core, which watches a descriptor for edges | [`Readiness`]: an epoll instance |
//! | a caller that reads an eventfd, perhaps without a core | [`Wakeup`]: an eventfd and a small io_uring |

mod inbox;
mod readiness;
mod send_queue;
mod tls_buffers;
mod wakeup;
mod wire;

pub use inbox::{BUFFER_BYTES, Inbox, Received};
pub use readiness::Readiness;
pub use send_queue::{MAX_SEGMENTS, SendQueue};
pub use wakeup::Wakeup;
pub use wire::{Wire, abort, disconnect};
