//! Metadata: all state of an array on its members besides data and log, and the decisions based on
//! it.
//!
//! ```text
//!   devices ─► read_superblock ─► Found ─► assemble ─► Assembly: a Table, members by slot, rejected devices
//!                                                         │
//!                superblock ◄── Store::commit  ◄── the engine: "member 3 has failed"
//!       write-intent bitmap ◄── IntentBitmap::set ◄── a write into a region that is not marked
//!                bad blocks ◄── BadBlocks::add ◄── a block whose data is lost
//! ```
//!
//! One rule holds for all metadata. A write goes next to the newest valid copy, never over it. It
//! counts only once it is durable on every member that the array trusts. `docs/on-disk-formats.md`
//! describes every byte.

pub mod assemble;
pub mod bad_blocks;
pub mod create;
mod create_error;
pub mod group;
pub mod intent_bitmap;
mod io;
pub mod layout;
pub mod maintenance;
pub mod newcomers;
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
pub use create::{CreateOptions, Identities, PlannedCreation, create, plan_creation};
pub use create_error::CreateError;
pub use group::{AddError, add_groups};
pub use intent_bitmap::IntentBitmap;
pub use io::{MemberFailures, Target, Targets};
pub(crate) use io::{all, write, zero, zero_cheaply};
pub use layout::{Layout, LayoutError};
pub use maintenance::{Maintenance, MaintenanceChange, Window};
pub use newcomers::{AddOptions, Unready};
pub use restripe::{Goal, RestripeError, begin_restripe};
pub use shape::Shape;
pub use signatures::probe;
pub use store::{Found, ReadError, Store, read_superblock, supersede, write_label, zero_superblock};
pub use superblock::{
    DecodeError, EpochId, Label, Member, MemberSet, MemberState, Reason, Reshape, Spare, Superblock, Table,
};
