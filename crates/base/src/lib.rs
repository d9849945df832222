//! Small types that several crates need and that know nothing of block devices.
//!
//! | item | purpose |
//! |---|---|
//! | [`choice_of_mutant`] | the choice of a broken variant: simulation |
//! | [`Histogram`] | how often values of each size occur: latencies |
//! | [`Rng`], [`mix`] | random numbers that a seed reproduces: simulation, tests, benchmarks |
//! | [`Size`] | numbers of bytes as people write and read them: `4K`, `1.5 GiB` |
//! | [`Uuid`] | identities of arrays, members, pools, volumes and hosts |
//!
//! The crate makes no I/O and depends on no other crate of Freestone.

#![forbid(unsafe_code)]

mod histogram;
mod mutants;
mod rng;
mod size;
mod uuid;

pub use histogram::Histogram;
pub use rng::{Rng, mix};
pub use size::Size;
pub use uuid::Uuid;
