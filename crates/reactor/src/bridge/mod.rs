//! A queue for callers outside any core, over a device that runs on one.
//!
//! ```text
//!   caller's thread                                       core
//!   push ─► ring of requests ── kick ─► (doorbell) ─► poll: wakes slots ─► Channel::submit
//!   reap ◄─ ring of completions ◄─ (event) ── flush ◄──────────────────────┘
//! ```
//!
//! So a program drives a device with layers, or one without a ring of its own, as it drives a
//! leaf's queue. Nothing is allocated and no lock is taken for a request. Doorbell and event are
//! written to only while the other side sleeps: the core after its polling window, the caller while
//! it is armed.

mod bells;
mod caller;
mod engine;
mod ring;

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

// SAFETY: the data's memory is valid until the completion, on whatever thread, by the contract of
// `Queue::push`.
unsafe impl Send for Command {}

/// The end of a request on its way back.
#[derive(Clone, Copy)]
struct Completion {
    slot: u32,
    result: IoResult,
}
