//! Address arithmetic: a part of one device, or several devices one after the other. A request that stays
//! inside one child goes to it as it is and costs no future of its own.

mod concat;
mod partition;

pub use concat::{Concat, MAX_CHILDREN};
pub use partition::Partition;
