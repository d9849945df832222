//! The daemon itself.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct System {
    /// Its version.
    pub version: String,
    /// Its process.
    pub pid: u32,
    /// When it was started, in nanoseconds since 1970.
    pub started_ns: u64,
    /// The user that it runs as.
    pub user: u32,
    /// Capabilities that it has. Exports that need others are refused.
    pub capabilities: Vec<String>,
    /// Where its state is.
    pub state_dir: String,
    /// Changes of its state so far.
    pub generation: u64,
    /// Its cores.
    pub cores: Vec<CoreInfo>,
}

/// A core: a thread that serves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CoreInfo {
    /// Its number.
    pub number: usize,
    /// The processor it is bound to.
    pub cpu: Option<usize>,
    /// Names of the exports that it serves.
    pub exports: Vec<String>,
}
