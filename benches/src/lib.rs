//! Code that several of these programs share.

pub mod array;
pub mod member;
pub mod memory;
pub mod table;
