//! Metadata: everything an array keeps on its members besides data and log, and the decisions about it.
//!
//! ```text
//!   devices ─► store::read ─► Found ─► assemble ─► Assembly: a Table, members by slot, who is out and why
//!                                                     │
//!                    superblock ◄── store::Store::commit ◄── the engine: "member 3 is out"
//!                    region map ◄── RegionMap::set       ◄── a write into a region that is not marked
//!                    bad blocks ◄── BadBlocks::add       ◄── a block that nothing can bring back
//! ```
//!
//! One rule holds everywhere: what is written is written beside the newest valid copy, never over it, and counts only
//! once it is durable on every member that the array trusts. `docs/on-disk-formats.md` describes every byte.

pub mod layout;
pub mod superblock;
#[cfg(test)]
pub(crate) mod testing;

pub use layout::{Layout, LayoutError};
pub use superblock::{DecodeError, EpochId, Label, Member, MemberState, Reason, Spare, Superblock, Table};
