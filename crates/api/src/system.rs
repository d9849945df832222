//! The daemon itself.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// The daemon.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct System {
    /// Its version.
    pub version: String,
    /// Readiness of the daemon.
    pub state: SystemState,
    /// Progress of the start: the step of the configuration that is under way.
    pub start: Option<StartProgress>,
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

/// Readiness of the daemon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SystemState {
    /// The daemon applies its configuration: volumes and exports may be missing.
    Starting,
    /// The configuration is applied.
    Ready,
    /// The daemon finishes requests in flight and refuses changes.
    Stopping,
}

impl SystemState {
    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            SystemState::Starting => "starting",
            SystemState::Ready => "ready",
            SystemState::Stopping => "stopping",
        }
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
