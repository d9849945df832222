//! The interface between a transport and the queues that it serves.
//!
//! ```text
//!   Connect ─► Entrance::connect ─► Admission ─► Queue::open (on the core of the queue)
//!   Command ─► Queue::execute ◄──── memory, data of the host ────► Transport
//!                   └─────────────► Answer: data for the host, and the completion
//! ```
//!
//! Queues are generic over their transport, so a command costs no dynamic dispatch.

use crate::failure::Failure;
use exports::{ConnectionStats, DataMemory};
use nvme::{CompletionEntry, SubmissionEntry};
use std::future::Future;
use std::net::SocketAddr;

/// A completely received command.
pub struct Command<M> {
    /// The command.
    pub entry: SubmissionEntry,
    /// Its in-capsule data.
    pub data: Option<M>,
    /// Whether the data matches its digest, if the transport has one.
    pub is_intact: bool,
}

/// The answer to a command. The transport sends the data first.
pub struct Answer<M> {
    /// The completion.
    pub completion: CompletionEntry,
    /// Data for the host's buffer, which has room for all of it.
    pub data: Option<M>,
}

/// The connection of one queue, as its commands use it on their core.
pub trait Transport {
    /// Memory for the data of a command, which the transport can send and receive.
    type Memory: DataMemory;

    /// Maximum data in a command's capsule, in bytes; a multiple of 16.
    const IN_CAPSULE_BYTES: u32;

    /// Counters of the connection.
    fn stats(&self) -> &ConnectionStats;

    /// Whether nothing more can be sent to the host.
    fn is_broken(&self) -> bool;

    /// Whether the connection is encrypted.
    fn is_secured(&self) -> bool;

    /// The address that the host connected to; `None` if it has no IP address.
    fn local_address(&self) -> Option<SocketAddr>;

    /// Waits for memory of `len` bytes, at most [`MAX_TRANSFER`](crate::MAX_TRANSFER).
    fn memory(&self, len: usize) -> impl Future<Output = Self::Memory>;

    /// Returns memory at once, for the holder of [`Transport::scratch`]: at most
    /// [`SCRATCH_BYTES`](crate::SCRATCH_BYTES).
    fn uncounted(&self, len: usize) -> Self::Memory;

    /// Waits for the connection's scratch memory, which one command has at a time, until the result
    /// is dropped.
    fn scratch(&self) -> impl Future<Output = impl Sized>;

    /// Transfers the `len` bytes of a command's data that were not in its capsule from the host.
    ///
    /// # Errors
    /// The status of the command, or [`Failure::Gone`] when the host has disconnected.
    fn fetch(&self, command_id: u16, len: usize) -> impl Future<Output = Result<Self::Memory, Failure>>;
}

/// The connection of a queue, as other threads see it. The transport keeps it as long as the queue
/// is connected.
pub trait Connection: Send + Sync {
    /// Ends the connection, from any thread: no further command is received. Commands that were
    /// received are answered, unless `is_silent`.
    fn disconnect(&self, is_silent: bool);
}
