//! The safe Rust API: the crate's public face.
//!
//! ```text
//!   Builder ─► Connected ─► Device ─► Queue ─► AsyncQueue
//!                             │         │
//!                           Pool      Slots     own each request's memory until its completion
//!                             │         │
//!                           Buffer    raw::IoQueue
//! ```
//!
//! All safety hangs on one rule about memory that a raw queue has a pointer to. The memory lives in
//! a slot, or in the frame of a scope, until the raw queue returns the completion or is dropped.
//! Dropping a raw queue waits. Futures, tokens and handles are no more than names of slots.

mod aio;
mod block_on;
mod blocking;
mod buffer;
mod builder;
mod device;
mod pool;
mod property;
mod queue;
mod request;
mod scope;
mod shared;
mod slots;
#[cfg(test)]
mod tests;

pub use aio::{AsyncQueue, Pending};
pub use block_on::block_on;
pub use buffer::Buffer;
pub use builder::{Builder, Connected};
pub use device::Device;
pub use property::Property;
pub use queue::{Completion, Completions, Queue};
pub use request::{Memory, Payload, Request};
pub use scope::{Scope, ScopedRequest};
pub use slots::Token;
