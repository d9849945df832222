//! What several of the programs here share.

pub mod memory;
