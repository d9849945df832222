//! Devices over devices.
//!
//! | module | purpose |
//! |---|---|
//! | [`linear`] | a partition of a device; several devices one after the other |
//! | [`stats`] | counts requests, bytes and errors, and measures latency |
//! | [`qos`] | limits requests and bytes a second, of a device or of a group |
//! | [`migrate`] | counts requests, and replaces a device by its copy while it is in use |
//! | [`fault`] | injects errors, delays and torn writes by rule |
//! | [`checker`] | panics when its parent breaks the contract of a device |
//!
//! A layer is a [`block::Device`] whose channel on each core wraps its child's. It forwards each
//! method itself, so that a forgotten one does not compile. Layers never depend on drivers or
//! exports.
//!
//! Two devices in memory as one, with counters on top:
//!
//! ```
//! use block::{Data, Device, Flags, IoError, Op, Request, Segment};
//! use drivers::mem::{MemDevice, Options};
//! use layers::{linear::Concat, stats::Stats};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), block::DeviceError> {
//! let half = || Ok(Arc::new(MemDevice::new(&Options::new(1 << 20))?) as Arc<dyn Device>);
//! let stats = Arc::new(Stats::new(Arc::new(Concat::new(vec![half()?, half()?])?)));
//! let device = stats.clone();
//! reactor::run(async move {
//!     let channel = device.open_channel().unwrap();
//!     let mut memory = [7u8; 8192];
//!     let segments = [Segment { base: memory.as_mut_ptr(), len: memory.len() }];
//!     // SAFETY: the memory outlives the requests.
//!     let write = Request::write(unsafe { Data::new(&segments) }, Flags::NONE);
//!     assert_eq!(channel.submit(&write, (1 << 20) - 4096).await, Ok(()));
//!     assert_eq!(channel.submit(&write, 2 << 20).await, Err(IoError::OutOfRange));
//! });
//! let snapshot = stats.snapshot();
//! let writes = snapshot.of(Op::Write);
//! assert_eq!((writes.completed, writes.errors, writes.bytes), (2, 1, 8192));
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

pub mod checker;
pub mod fault;
pub mod kind;
pub mod linear;
pub mod migrate;
pub mod qos;
pub mod stats;

#[cfg(test)]
mod bitmap_tests;
