//! Simulated disks, power and time, and the oracle that knows what must be on them.
#![forbid(unsafe_code)]

mod disk;
mod machine;
mod medium;
mod oracle;
mod rng;

pub use disk::{DiskConfig, SimDisk};
pub use machine::{CrashAt, Machine};
pub use oracle::{ANYTHING, Oracle, SECTOR, Ticket, Violation, ZEROES};
pub use rng::{Rng, mix};
