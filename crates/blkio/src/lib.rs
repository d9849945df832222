//! One API for any block device, in C and in Rust.
//!
//! The C library is a drop-in for libblkio 1.5: the same functions, properties, errors and memory
//! layouts, under the same name (`libblkio.so.1`), and more behind it. Rust programs use what this
//! page lists:
//!
//! ```
//! # fn main() -> blkio::Result<()> {
//! # let file = tempfile::NamedTempFile::new().unwrap();
//! # file.as_file().set_len(1 << 20).unwrap();
//! # let path = file.path().to_str().unwrap();
//! let device = blkio::Builder::new("io_uring")?.set("path", path)?.start()?;
//! let mut queue = device.queue(0)?;
//! queue.write_at(4096, b"some bytes")?;
//! queue.flush()?;
//! let mut bytes = [0; 4];
//! queue.read_at(4101, &mut bytes)?;
//! assert_eq!(&bytes, b"byte");
//! # Ok(())
//! # }
//! ```
//!
//! * [`Queue`]: blocking calls; any number of requests in flight, polled ([`Queue::submit`],
//!   [`Queue::wait`]); borrowed memory with checked lifetimes ([`Queue::scope`]).
//! * [`AsyncQueue`]: futures for any executor, and [`block_on`] for programs that have none.
//! * [`Buffer`]: memory that the device knows, which a request owns while it is in flight.
//!
//! A token, a future or a scope may be dropped, forgotten or unwound by a panic. Memory that a
//! device may still touch is not given back before the device is done.
//!
//! ```text
//!   C program ─► capi ─┐
//!                      ├─► Instance   created → connected → started; properties, memory regions, queues
//!   Rust program ► api ┘      │ drivers::blkio::Driver: one file of each kind, `blkio.rs`
//!                             ▼
//!                          IoQueue    op slots, waiting line, completions  ─► drivers::direct::DirectQueue
//! ```
//!
//! A queue does no more than give each request a slot and remember its `user_data`. The rings below
//! it are those of the leaf driver, so the library costs nothing in addition.
//!
//! Source: `blkio(3)` of libblkio 1.5.0.

mod api;
pub mod capi;
mod freestone;
mod instance;
mod memory;
mod queue;
mod rules;
mod segments;

/// The base of the C API: instances and queues whose callers keep the memory of requests valid
/// themselves.
pub mod raw {
    pub use crate::instance::Instance;
    pub use crate::queue::{Completion, IoQueue, ReqFlags};
    pub use crate::segments::Memory;
    pub use drivers::blkio::Region;
}

pub use api::{
    AsyncQueue, Buffer, Builder, Completion, Completions, Connected, Device, Memory, Payload, Pending,
    Property, Queue, Request, Scope, ScopedRequest, Token, block_on,
};
pub use drivers::blkio::{Error, Kind, Result, State, Value};
pub use drivers::direct::{Zone, ZoneAction};

pub(crate) use raw::{Instance, IoQueue, Region};
