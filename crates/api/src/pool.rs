//! Pools: the tables that say where volumes lie on an array or device.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The pool on an array or device, with every copy of its table as it was read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Pool {
    /// The array or device that it is on.
    pub on: String,
    /// Its identity.
    pub uuid: String,
    /// The sequence number of the table in use; each change of the pool counts it up.
    pub sequence: u64,
    /// Names of the volumes in the table in use.
    pub volumes: Vec<String>,
    /// Every copy of the table on the device.
    pub copies: Vec<TableCopy>,
    /// How many copies are damaged.
    pub damaged: usize,
    /// How many damaged copies were rewritten since the daemon has the pool open, those at its opening included.
    pub rewritten: u64,
}

/// A copy of a pool's table.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct TableCopy {
    /// Where it begins on the device, in bytes.
    pub offset: u64,
    /// Its sequence number; nothing when it is not a whole table of this pool.
    pub sequence: Option<u64>,
    /// Names of the volumes in it; nothing when it is not a whole table of this pool.
    pub volumes: Option<Vec<String>>,
    /// Whether a repair rewrites it: it is not whole, or holds another table than the one in use and the one before.
    pub is_damaged: bool,
    /// What was read there, in words.
    pub state: String,
}

/// Something to be done to the pool on an array or device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "action", rename_all = "kebab-case", deny_unknown_fields)]
pub enum PoolAction {
    /// Rewrite damaged copies of the table from the table in use.
    Repair,
}

/// What a repair has done.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Repaired {
    /// Where the rewritten copies begin on the device, in bytes.
    pub offsets: Vec<u64>,
    /// The pool as it was read afterwards.
    pub pool: Pool,
}
