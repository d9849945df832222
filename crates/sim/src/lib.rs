//! Simulated disks, power and time, and the oracle that knows what must be on them.
//!
//! ```text
//!   seed ─► Plan ─► run_plan ─► boot, boot, boot …, epilogue
//!                                │
//!                                ├─ Subject: the array (or a toy) on …
//!                                ├─ SimDisk: latency, caches, faults, power loss
//!                                └─ Client ─► Oracle: judges every read
//! ```
//!
//! The array is the real one, on the real reactor, under virtual time and with one or two simulated
//! cores in one thread. Everything follows from one number, so that a failing run can be replayed
//! and made small. See `docs/simulation.md`.
#![forbid(unsafe_code)]

mod array;
mod boot;
mod client;
mod commands;
mod creation;
mod damage;
mod directed;
mod disk;
mod extras;
mod faults;
mod gate;
mod growth;
pub mod images;
mod kept;
mod machine;
mod medium;
mod newcomers;
mod operate;
mod operations;
mod oracle;
mod pairs;
mod plan;
pub mod pools;
mod run;
mod shapes;
mod streams;
mod subject;
pub mod tables;
#[cfg(test)]
mod toys;
mod user;
mod wide;
mod world;

pub use array::ArraySubject;
pub use base::{Rng, mix};
pub use commands::Command;
pub use directed::Story;
pub use disk::{DiskConfig, SimDisk};
pub use faults::{Fault, Place};
pub use machine::{CrashAt, Machine};
pub use operations::Operations;
pub use oracle::{ANYTHING, Oracle, SECTOR, Ticket, Violation, ZEROES};
pub use plan::{Action, Boot, Filter, Newcomers, Next, Plan, Shape, Step};
pub use run::{Outcome, Shrunk, catch_panics, cut, run_plan, run_seed, shrink};
pub use subject::{Local, Refusal, Running, Scrubbed, Subject};
pub use world::Stats;
