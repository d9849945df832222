//! A queue for callers outside any core, over a device that runs on one.
//!
//! ```text
//!   caller's thread                                       core
//!   push ─► ring of requests ── kick ─► (doorbell) ─► poll: wakes slots ─► Channel::submit
//!   reap ◄─ ring of completions ◄─ (event) ── flush ◄──────────────────────┘
//! ```
//!
//! A program drives a device with layers, or a device without rings, in the same way as a leaf's
//! queue. A request allocates nothing and takes no lock. Doorbell and event are written to only
//! while the other side sleeps: the core after its poll window, the caller while it is armed.

mod bells;
mod caller;
mod engine;

pub use caller::{BridgeOptions, BridgeQueue};

use block::{Data, Flags, IoResult, Op};

/// A request on its way to the core.
#[derive(Clone, Copy)]
#[repr(align(64))] // a cache line each
struct Command {
    op: Op,
    flags: Flags,
    slot: u32,
    len: u64,
    offset: u64,
    data: Data<'static>,
}

// SAFETY: by the contract of `Queue::push` the data's memory is valid until the completion, on any
// thread.
unsafe impl Send for Command {}

/// The result of a request on its way back.
#[derive(Clone, Copy)]
struct Completion {
    slot: u32,
    result: IoResult,
}
