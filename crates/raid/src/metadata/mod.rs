//! Metadata: everything an array keeps on its members besides data and log, and the decisions about it.
//!
//! ```text
//!   devices ─► read_superblock ─► Found ─► assemble ─► Assembly: a Table, members by slot, who is out and why
//!                                                         │
//!                        superblock ◄── Store::commit  ◄── the engine: "member 3 is out"
//!                        region map ◄── RegionMap::set ◄── a write into a region that is not marked
//!                        bad blocks ◄── BadBlocks::add ◄── a block that nothing can bring back
//! ```
//!
//! One rule holds everywhere: what is written is written beside the newest valid copy, never over it, and counts only
//! once it is durable on every member that the array trusts. `docs/on-disk-formats.md` describes every byte.

pub mod assemble;
pub mod bad_blocks;
pub mod create;
pub mod group;
mod io;
pub mod layout;
pub mod maintenance;
pub mod newcomers;
pub mod region_map;
mod replicated;
pub mod restripe;
pub mod shape;
mod signatures;
pub mod store;
pub mod superblock;
#[cfg(test)]
pub(crate) mod testing;

pub use assemble::{AssembleOptions, Assembly, Refusal, Rejected, Returning, assemble};
pub use bad_blocks::{BadBlocks, BadBlocksError, BadRange, LoadError};
pub use create::{CreateError, CreateOptions, Identities, PlannedCreation, create, plan_creation};
pub use group::{AddError, add_groups};
pub use io::{MemberFailures, Target, Targets};
pub(crate) use io::{all, write, zero, zero_cheaply};
pub use layout::{Layout, LayoutError};
pub use maintenance::{Maintenance, MaintenanceChange, Window};
pub use newcomers::{AddOptions, Unready};
pub use region_map::RegionMap;
pub use restripe::{Goal, RestripeError, begin_restripe};
pub use shape::Shape;
pub use signatures::probe;
pub use store::{Found, ReadError, Store, read_superblock, write_label, zero_superblock};
pub use superblock::{
    DecodeError, EpochId, Label, Member, MemberSet, MemberState, Reason, Reshape, Spare, Superblock, Table,
};
