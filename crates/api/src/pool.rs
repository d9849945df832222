//! Pools: tables of the extents of volumes on an array or device.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The pool of an array or device, with each copy of its table as read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Pool {
    /// The array or device of the pool.
    pub backing: String,
    /// UUID.
    pub uuid: String,
    /// Sequence number of the table in use; each change of the pool increments it.
    pub sequence: u64,
    /// Names of the volumes in the table in use.
    pub volumes: Vec<String>,
    /// Every copy of the table on the device.
    pub copies: Vec<TableCopy>,
    /// Number of damaged copies.
    pub damaged: usize,
    /// Number of damaged copies rewritten since the daemon opened the pool, including at the
    /// opening.
    pub rewritten: u64,
}

/// Room of a pool.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PoolCapacity {
    /// The array or device of the pool.
    pub backing: String,
    /// Bytes that its volumes can have in total.
    pub capacity_bytes: u64,
    /// Bytes that new volumes can have; one volume can have all of them.
    pub free_bytes: u64,
}

/// A copy of a pool's table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TableCopy {
    /// Offset on the device in bytes.
    pub offset_bytes: u64,
    /// Sequence number; null unless the copy is a complete table of this pool.
    pub sequence: Option<u64>,
    /// Names of the volumes in the copy; null unless the copy is a complete table of this pool.
    pub volumes: Option<Vec<String>>,
    /// Whether a repair rewrites the copy: it is incomplete, or neither the table in use nor its
    /// predecessor.
    pub is_damaged: bool,
    /// Description of the copy as read.
    pub state: String,
}

/// An action on the pool of an array or device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "action", rename_all = "kebab-case", deny_unknown_fields)]
pub enum PoolAction {
    /// Rewrite damaged copies of the table from the table in use.
    Repair,
}

/// Result of a repair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Repaired {
    /// Offsets of the rewritten copies on the device in bytes.
    pub offsets_bytes: Vec<u64>,
    /// The pool as read after the repair.
    pub pool: Pool,
}
