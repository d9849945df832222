//! State of the daemon.

use crate::words::words;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct System {
    /// Version.
    pub version: String,
    /// Name of the host when the daemon started.
    #[serde(default)]
    pub host: String,
    /// Role of the sender of the request; absent in answers of older daemons.
    #[serde(default)]
    pub role: Option<Role>,
    /// Readiness of the daemon.
    pub state: SystemState,
    /// Progress of the start: the step of the configuration that is under way.
    pub start: Option<StartProgress>,
    /// Process ID.
    pub pid: u32,
    /// Start time in nanoseconds since 1970.
    pub started_ns: u64,
    /// User ID of the process.
    pub user: u32,
    /// Capabilities of the process. The daemon refuses exports that need others.
    pub capabilities: Vec<String>,
    /// State directory.
    pub state_dir: String,
    /// Number of changes of the state so far.
    pub generation: u64,
    /// Cores.
    pub cores: Vec<CoreInfo>,
}

words! {
    /// The rights of the sender of a request: those of its token; over the Unix socket `admin`.
    Role {
        /// Reads everything and changes nothing.
        ReadOnly = "read-only",
        /// Makes, grows, limits and deletes volumes and exports that have its token's name as their
        /// label, and sees only those.
        Provisioner = "provisioner",
        /// Does all that loses no data and reaches no file: deletes no array, device or volume, and
        /// uses no new disk.
        Operator = "operator",
        /// Does everything.
        Admin = "admin",
    }
}

words! {
    /// Readiness of the daemon.
    SystemState {
        /// The daemon applies its configuration: volumes and exports may be missing.
        Starting = "starting",
        /// The configuration is applied.
        Ready = "ready",
        /// The daemon finishes requests in flight and refuses changes.
        Stopping = "stopping",
    }
}

/// Progress of a configuration that is applied.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StartProgress {
    /// The step under way, as `freestoned --plan` prints it.
    pub step: String,
    /// Steps that are complete.
    pub done_steps: usize,
    /// Steps in all.
    pub total_steps: usize,
    /// Bytes that the step has zeroed, if it zeroes a volume.
    pub done_bytes: Option<u64>,
    /// Bytes that the step zeroes in all.
    pub total_bytes: Option<u64>,
}

/// A core: a thread that serves exports.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct CoreInfo {
    /// Number.
    pub number: usize,
    /// Processor to which the core is bound.
    pub cpu: Option<usize>,
    /// Names of the exports that the core serves.
    pub exports: Vec<String>,
}
