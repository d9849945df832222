//! One API for any block device, in C and in Rust.
//!
//! The C library is a drop-in for libblkio 1.5: the same functions, properties, errors and memory layouts, under
//! the same name (`libblkio.so.1`), and more behind it.
//!
//! ```text
//!   C program ─► capi ─┐
//!                      ├─► Instance   created → connected → started; properties, memory regions, queues
//!   Rust program ──────┘      │ Driver: one file each in `drivers`
//!                             ▼
//!                          IoQueue    op slots, waiting line, completions  ─► drivers::direct::DirectQueue
//! ```
//!
//! A queue does no more than give each request a slot and remember its `user_data`; the rings below it are those
//! of the leaf driver, so the library costs nothing in addition.
//!
//! Source: `blkio(3)` of libblkio 1.5.0.

pub mod capi;
mod driver;
mod drivers;
mod error;
mod instance;
mod memory;
mod property;
mod queue;
mod rules;

pub use error::{Error, Result};
pub use instance::Instance;
pub use memory::Region;
pub use property::{Kind, State, Value};
pub use queue::{Completion, IoQueue, Memory, ReqFlags};
