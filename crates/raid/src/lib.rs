//! Arrays of members that survive the loss of some: every RAID level, with the write hole closed.
//!
//! ```text
//!   Array (Device) ─► channel of a core ─┬─ healthy read ────────────────► member
//!                                        └─ everything else ─► the stripe's owner (one core)
//!                                                               lock rows ─► read old ─► parity ─► log ─► write
//! ```
//!
//! One idea carries all levels: an array is a stripe over independent *groups*, and a group is `k` strips of data
//! with `m` strips of parity under one [`Matrix`]. A mirror is `k = 1` with copies for parity, RAID 0 has `m = 0`.

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

pub use config::{ArrayConfig, ConfigError, Consistency, Level, Uuid};
pub use geometry::{Geometry, Place, Zone, Zones};
pub use parity::{Code, Matrix};
