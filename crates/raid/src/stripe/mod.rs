//! One stripe: how a request is cut, which rows wait for which, how parity follows data. Nothing here does I/O.

pub mod plan;
pub mod rect;
pub mod rows;
pub mod streams;
