//! One stripe: cuts requests, locks rows, and plans the update of parity. This module does no I/O.

pub mod hasher;
pub mod lock_words;
pub mod plan;
pub mod rect;
pub mod rows;
pub mod streams;
