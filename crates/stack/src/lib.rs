//! From text to open devices.
//!
//! ```text
//!                             text (a whole graph in one string) ┐
//!   kind:key=value,… ─► spec (grammar) ─► kinds (tables, typed options) ─► stack (devices under layers)
//! ```
//!
//! Every front end that takes specifications from users (the program, the C API) shares one
//! grammar, one table of kinds and one set of messages. Everything that can be checked without
//! opening is checked when the text is read. Exports are not part of a graph: the crate `hosting`
//! has their kinds, in the same grammar.

#![forbid(unsafe_code)]

pub mod array;
pub mod kinds;
pub mod passed;
pub mod retry;
mod stack;
pub mod text;

pub use stack::{Base, DevicePlan, MAX_DEPTH, MAX_DEVICES, Stack, StackPlan, is_in_use};
pub use text::{GraphError, parse};
