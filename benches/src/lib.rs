//! Code that several of these programs share.

pub mod memory;
