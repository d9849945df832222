//! The interfaces that every driver, layer, format and export of Freestone is written against.
//!
//! ```text
//!   Device (shared by all cores, control)  ── open_channel() ──►  Channel (one core, data path)
//!                                                                   │ submit(&Request, offset)
//!                                                                   ▼
//!                                                                 IoFuture (two words, pooled)
//!   Queue (a leaf's submission and completion rings; knows nothing of futures)
//! ```
//!
//! This crate makes no system call, reads no clock and starts no thread. Its only `unsafe` code is the
//! future pool ([`IoFuture`]) and the windows onto caller memory ([`Data`]).

mod data;
mod device;
mod error;
mod io_future;
mod join;
mod limits;
mod queue;
mod request;

pub use data::{Data, Segment, Segments};
pub use device::{Channel, Device, DeviceError, MemoryRegion};
pub use error::{IoError, IoResult};
pub use io_future::{IoFuture, Operation, release_pool};
pub use join::{MAX_JOINED, join_all};
pub use limits::{Limits, SharedLimits};
pub use queue::Queue;
pub use request::{Flags, Op, Request};
