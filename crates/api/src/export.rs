//! Exports: what clients attach to.

use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// An export.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Export {
    /// Its name.
    pub name: String,
    /// `vhost-user-blk`, `ublk`, `vduse`, `nbd` or `nvme-tcp`.
    pub kind: String,
    /// The volumes, arrays or devices that it serves: one, or several as the namespaces of an NVMe subsystem.
    pub of: Vec<String>,
    /// Options of its kind, as `freestone serve --export` takes them.
    pub options: BTreeMap<String, String>,
    /// Whether it refuses writes.
    pub read_only: bool,
    /// Processors that serve it; all of the daemon's when none is named.
    pub cores: Vec<usize>,
    /// Whether it is served.
    pub state: ExportState,
    /// Why it is not served.
    pub error: Option<String>,
    /// Where it is and what was chosen that the options do not say.
    pub description: Option<String>,
    /// What went through it since the daemon was started.
    pub traffic: Option<Traffic>,
    /// Name of the `provisioner` token that may delete it.
    #[serde(default)]
    pub label: Option<String>,
}

/// Whether an export is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum ExportState {
    /// Clients may connect.
    Active,
    /// What it serves is not there, or it could not be started: that is tried again and again.
    Waiting,
}

impl ExportState {
    /// The word for it.
    pub const fn name(self) -> &'static str {
        match self {
            ExportState::Active => "active",
            ExportState::Waiting => "waiting",
        }
    }
}

/// What went through an export.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Traffic {
    /// Clients that are connected.
    pub clients: u64,
    /// Clients that have connected so far.
    pub connections: u64,
    /// Reads that have ended.
    pub reads: u64,
    /// Writes that have ended.
    pub writes: u64,
    /// Bytes that clients have read.
    pub bytes_read: u64,
    /// Bytes that clients have written.
    pub bytes_written: u64,
    /// Requests that were answered with an error.
    pub failed: u64,
}

/// An export to be started, now and at every start of the daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewExport {
    /// Its name.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    pub name: String,
    /// `vhost-user-blk`, `ublk`, `vduse`, `nbd` or `nvme-tcp`.
    pub kind: String,
    /// The volumes, arrays or devices to serve, by name; volumes by UUID too.
    pub of: Vec<String>,
    /// Options of the kind, as `freestone serve --export` takes them. Without `socket` (and `listen`) an export over a
    /// Unix socket gets one that is called after it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, String>,
    /// Refuse writes.
    #[serde(default)]
    pub read_only: bool,
    /// Processors to serve it; all of the daemon's when none is named.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cores: Vec<usize>,
    /// Name of the `provisioner` token that may delete it. Such a token's own name is the default for its exports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    pub label: Option<String>,
}

/// What is to be different about an export while it is served.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportChange {
    /// Processors to serve it from now on, out of the daemon's; all of them when none is named. Exports over
    /// vhost-user-blk can do that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<Vec<usize>>,
}

/// Lines to attach an export with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Attach {
    /// By program: `qemu` (9.2 and newer), `qemu-before-9.2`, `libvirt`, `cloud-hypervisor`, `nvme`, `nbd-client`, `path`, …
    pub lines: BTreeMap<String, String>,
}

impl Attach {
    /// The program whose line is for QEMU before 9.2, where it is not that of `qemu`.
    pub const OLD_QEMU: &str = "qemu-before-9.2";
}
