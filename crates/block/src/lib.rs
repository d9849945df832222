//! The interfaces that all drivers, layers, formats and exports of Freestone implement or use.
//!
//! ```text
//!   Device (shared by all cores, control)  ── open_channel() ──►  Channel (one core, data path)
//!                                                                   │ submit(&Request, offset)
//!                                                                   ▼
//!                                                                 IoFuture (two words, pooled)
//!   Queue (a leaf's submission and completion rings, without futures)
//! ```
//!
//! A channel over memory, and a request to it:
//!
//! ```
//! use block::{Channel, Data, Flags, IoError, IoFuture, Limits, Op, Request, Segment};
//! use block::StatusReport;
//! # use std::{cell::RefCell, future::Future, pin::pin, task::{Context, Poll, Waker}};
//!
//! struct Ram(Limits, RefCell<Vec<u8>>);
//!
//! impl Channel for Ram {
//!     fn submit<'a>(&'a self, req: &'a Request<'a>, offset: u64) -> IoFuture<'a> {
//!         if let Err(error) = self.0.check(req, offset) {
//!             return IoFuture::ready(Err(error));
//!         }
//!         let (at, mut bytes) = (offset as usize, self.1.borrow_mut());
//!         let done = match req.op {
//!             Op::Read => req.data.copy_from(&bytes[at..]),
//!             Op::Write => req.data.copy_to(&mut bytes[at..]),
//!             _ => return IoFuture::ready(Err(IoError::Unsupported)),
//!         };
//!         assert_eq!(done as u64, req.len);
//!         IoFuture::ready(Ok(()))
//!     }
//!
//!     fn block_status<'a>(
//!         &'a self, report: &'a StatusReport, offset: u64, len: u64,
//!     ) -> IoFuture<'a> {
//!         match self.0.check_range(offset, len) {
//!             Ok(()) => report.answer_data(len),
//!             Err(error) => IoFuture::ready(Err(error)),
//!         }
//!     }
//! }
//!
//! let ram = Ram(Limits::new(1 << 20), RefCell::new(vec![0; 1 << 20]));
//! let mut memory = [7u8; 4096];
//! let segments = [Segment { base: memory.as_mut_ptr(), len: memory.len() }];
//! // SAFETY: the memory outlives the request.
//! let write = Request::write(unsafe { Data::new(&segments) }, Flags::NONE);
//! # let poll = |request: IoFuture<'_>| {
//! #     pin!(request).poll(&mut Context::from_waker(Waker::noop()))
//! # };
//! assert_eq!(poll(ram.submit(&write, 8192)), Poll::Ready(Ok(())));
//! assert_eq!(ram.1.borrow()[8192..][..4096], [7; 4096]);
//! assert_eq!(poll(ram.submit(&write, 1 << 20)), Poll::Ready(Err(IoError::OutOfRange)));
//! ```
//!
//! This crate makes no system call, reads no clock and starts no thread. Its only `unsafe` code is
//! the future pool ([`IoFuture`]) and the windows onto caller memory ([`Data`]).

mod data;
mod device;
mod dirty;
mod error;
mod io_future;
mod join;
mod limits;
mod queue;
mod request;
mod role;
mod status;

pub use data::{Data, RegisteredBuffer, Segment, Segments};
pub use device::{Channel, Device, DeviceError, KernelBacking, KernelExtent, MemoryRegion};
pub use dirty::DirtyBitmap;
pub use error::{IoError, IoResult};
pub use io_future::{IoFuture, Operation, release_pool};
pub use join::{MAX_JOINED, join_all};
pub use limits::{Limits, SharedLimits};
pub use queue::{Queue, StatusStart};
pub use request::{Flags, Op, Request};
pub use role::{HostRole, SharedRole};
pub use status::{Status, StatusExtent, StatusReport};
