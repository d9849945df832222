//! Health: problems that an operator should look at.

use crate::words::words;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A problem.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct HealthProblem {
    /// The kind of problem.
    pub code: HealthCode,
    /// Severity.
    pub severity: Severity,
    /// The kind of object: `array`, `device`, `export`, `portal` or `volume`.
    pub kind: String,
    /// The name of the object.
    pub object: String,
    /// A sentence about it.
    pub text: String,
    /// Time since which the daemon has seen it, in nanoseconds since 1970.
    pub since_ns: u64,
}

words! {
    /// Severity of a problem.
    Severity {
        /// Data is available.
        Warning = "warning",
        /// Data is unavailable or lost, or the next failure of a member loses it.
        Critical = "critical",
    }
}

words! {
    /// Kind of a problem.
    HealthCode {
        /// An array lacks more members than its redundancy covers.
        ArrayFailed = "array-failed",
        /// The daemon cannot run an array.
        ArrayOffline = "array-offline",
        /// Members of an array are missing or rebuilding.
        ArrayDegraded = "array-degraded",
        /// A scrub has found rows whose redundancy does not match the data.
        MismatchedRows = "mismatched-rows",
        /// A device cannot be opened.
        DeviceNotOpen = "device-not-open",
        /// A drive of a device or array warns, or has little spare capacity or endurance left.
        DriveAtRisk = "drive-at-risk",
        /// The copy that a volume is has failed.
        CopyFailed = "copy-failed",
        /// A volume cannot be used: the device that it may have moved to is not open.
        VolumeNotAvailable = "volume-not-available",
        /// A portal does not listen, so the exports that use it wait.
        PortalNotOpen = "portal-not-open",
        /// An export is not served.
        ExportWaiting = "export-waiting",
        /// Keys or certificates of an export or portal could not be read again; those in use stay.
        KeysNotReloaded = "keys-not-reloaded",
    }
}

impl HealthCode {
    /// The usual severity of problems of this kind. A degraded array is critical when no
    /// redundancy is left.
    pub const fn severity(self) -> Severity {
        match self {
            HealthCode::ArrayFailed
            | HealthCode::ArrayOffline
            | HealthCode::DeviceNotOpen
            | HealthCode::VolumeNotAvailable
            | HealthCode::PortalNotOpen => Severity::Critical,
            HealthCode::ArrayDegraded
            | HealthCode::MismatchedRows
            | HealthCode::DriveAtRisk
            | HealthCode::CopyFailed
            | HealthCode::ExportWaiting
            | HealthCode::KeysNotReloaded => Severity::Warning,
        }
    }
}
