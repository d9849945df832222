//! Arrays that survive the loss of members: every RAID level, with the write hole closed.
//!
//! ```text
//!   Array (Device) ─► channel of a core ─┬─ healthy read ────────────────► member
//!                                        └─ everything else ─► the stripe's owner (one core)
//!                                                               lock rows ─► read old ─► parity ─► log ─► write
//! ```
//!
//! All levels are one scheme: an array is a stripe over independent *groups*. A group has `k`
//! strips of data and `m` strips of parity under one [`Matrix`]. A mirror is `k = 1` with copies as
//! parity, RAID 0 has `m = 0`.
//!
//! A RAID 5 of three files: its creation, assembly and start, a write and a read:
//!
//! ```
//! use block::{Device, DeviceError, Flags, Op};
//! use drivers::io_uring::{Options, UringDevice};
//! use raid::Level;
//! use raid::admin::open::{Candidate, Wanted, select};
//! use raid::metadata::{CreateOptions, Identities, Shape, create};
//! use std::sync::Arc;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let directory = tempfile::tempdir()?;
//! let open = |slot: u32| -> Result<Arc<dyn Device>, Box<dyn std::error::Error>> {
//!     let path = directory.path().join(format!("member{slot}"));
//!     std::fs::File::create(&path)?.set_len(16 << 20)?;
//!     Ok(Arc::new(UringDevice::open(&Options::new(path))?))
//! };
//! let members = [open(0)?, open(1)?, open(2)?];
//! let options = CreateOptions {
//!     shape: Shape::new("data", Level::Raid5),
//!     force: false, // devices with content are refused
//!     zeroes: true,
//!     owner: "host".into(),
//!     now_ns: 1,
//!     identities: Identities::System,
//! };
//! reactor::run(async move {
//!     create(&members, &options).await.unwrap();
//!     let candidates = members.map(|device| Candidate {
//!         name: device.name().into(),
//!         device: Ok(device),
//!         is_named: true,
//!     });
//!     let selection = select(candidates.into(), &Wanted::default()).await.unwrap();
//!     let array = selection.start(2).await.unwrap();
//!     let channel = array.open_channel().unwrap();
//!     let mut buffer = reactor::current().buffers().take(4096).await;
//!     buffer.as_mut_slice().fill(7);
//!     let (mut buffer, written) = buffer.transfer(&*channel, Op::Write, Flags::NONE, 8192).await;
//!     buffer.as_mut_slice().fill(0);
//!     let (buffer, read) = buffer.transfer(&*channel, Op::Read, Flags::NONE, 8192).await;
//!     assert_eq!((written, read, buffer.as_slice()), (Ok(()), Ok(()), &[7; 4096][..]));
//!     assert_eq!(array.stop().await, Ok(()));
//! });
//! # Ok(())
//! # }
//! ```

pub mod admin;
pub mod array;
pub mod config;
pub mod geometry;
pub mod jobs;
pub mod log;
pub mod metadata;
pub mod mutant;
pub mod parity;
pub mod stripe;

pub use base::Uuid;
pub use config::{ArrayConfig, ConfigError, Consistency, Level};
pub use geometry::{Geometry, Place, Zone, Zones};
pub use parity::{Code, Matrix};
