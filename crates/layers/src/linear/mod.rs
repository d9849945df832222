//! Address arithmetic: a part of one device, or several devices one after the other. A request
//! inside one child is forwarded unchanged, without a future of its own.

mod concat;
pub mod kind;
mod partition;

pub use concat::{Concat, MAX_CHILDREN};
pub use partition::Partition;
