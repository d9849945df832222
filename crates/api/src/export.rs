//! Exports, to which clients attach.

use crate::host::HostsChange;
use crate::labels::{Labels, LabelsChange};
use crate::words::words;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use utoipa::ToSchema;

/// An export.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Export {
    /// Name.
    pub name: String,
    /// Kind: `vhost-user-blk`, `ublk`, `vduse`, `nbd` or `nvme-tcp`.
    pub kind: String,
    /// Names of the served volumes, arrays or devices: one, or several as the namespaces of an NVMe
    /// subsystem.
    pub volumes: Vec<String>,
    /// Options of the kind, as in `freestone serve --export`.
    pub options: BTreeMap<String, String>,
    /// NQNs of the hosts that may connect; absent if any host may, or for kinds without a list.
    #[serde(default)]
    pub hosts: Option<Vec<String>>,
    /// The ANA state of the namespaces over each port, by its address as configured; absent for
    /// kinds other than nvme-tcp.
    #[serde(default)]
    pub ana: Option<BTreeMap<String, AnaState>>,
    /// Whether writes are refused.
    pub read_only: bool,
    /// Processors that serve the export; empty means all processors of the daemon.
    pub cores: Vec<usize>,
    /// State.
    pub state: ExportState,
    /// Reason for the state `waiting`.
    pub error: Option<String>,
    /// Address of the export, and values that the daemon chose for omitted options.
    pub description: Option<String>,
    /// Traffic since the start of the daemon.
    pub traffic: Option<Traffic>,
    /// Name of the `provisioner` token that may delete the export.
    #[serde(default)]
    pub label: Option<String>,
    /// Labels.
    #[serde(default)]
    pub labels: Labels,
}

words! {
    /// State of an export.
    ExportState {
        /// Clients may connect.
        Active = "active",
        /// A served object is missing or the start failed; the daemon retries.
        Waiting = "waiting",
    }
}

/// Traffic of an export.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Traffic {
    /// Connected clients.
    pub clients: u64,
    /// Connections accepted in total.
    pub connections: u64,
    /// Completed reads.
    pub reads: u64,
    /// Completed writes.
    pub writes: u64,
    /// Bytes read by clients.
    pub read_bytes: u64,
    /// Bytes written by clients.
    pub written_bytes: u64,
    /// Requests completed with an error.
    pub errors: u64,
}

/// Request to start an export now and at each start of the daemon.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewExport {
    /// Name.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    pub name: String,
    /// Kind: `vhost-user-blk`, `ublk`, `vduse`, `nbd` or `nvme-tcp`.
    pub kind: String,
    /// Volumes, arrays or devices to serve, by name; volumes also by UUID.
    #[serde(alias = "of")]
    pub volumes: Vec<String>,
    /// Options of the kind, as in `freestone serve --export`.
    /// Without `socket` and `listen`, an export over a Unix socket gets a socket named after it.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub options: BTreeMap<String, String>,
    /// Refuse writes.
    #[serde(default)]
    pub read_only: bool,
    /// Processors that serve the export; empty means all processors of the daemon.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cores: Vec<usize>,
    /// Name of the `provisioner` token that may delete the export. Default: the name of the
    /// caller's token, if it is a provisioner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    pub label: Option<String>,
    /// Labels: at most 32, with keys of at most 63 bytes (letters, digits and `._-/`) and values of
    /// at most 256 bytes.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

/// Request to change an export while it is in use.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct ExportChange {
    /// Processors of the daemon that serve the export from now on; empty means all.
    /// Supported by vhost-user-blk exports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<Vec<usize>>,
    /// Server of the rings from now on, also after a restart of the daemon. Each ring is drained
    /// once. Supported by vhost-user-blk exports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data_plane: Option<DataPlane>,
    /// Changes of the hosts that may connect from now on. Supported by nvme-tcp exports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hosts: Option<HostsChange>,
    /// ANA states of the namespaces from now on, also after a restart of the daemon, by the address
    /// of the port as configured. Other ports keep theirs. Hosts are notified. Supported by
    /// nvme-tcp exports.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ana: Option<BTreeMap<String, AnaState>>,
    /// Labels to set; `null` removes a label. Others stay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<LabelsChange>,
}

words! {
    /// Access of hosts to namespaces over a port (asymmetric namespace access, ANA).
    AnaState {
        /// The best path.
        Optimized = "optimized",
        /// Usable; hosts prefer an optimized path.
        NonOptimized = "non-optimized",
        /// Temporarily unusable.
        Inaccessible = "inaccessible",
        /// Permanently unusable.
        PersistentLoss = "persistent-loss",
        /// In transition to another state.
        Change = "change",
    }
}

words! {
    /// The server of the rings of a vhost-user-blk export.
    DataPlane {
        /// The cores of the daemon.
        User = "user",
        /// The kernel, through `/dev/vhost-blk`.
        Kernel = "kernel",
        /// The kernel where it can serve the device, else the cores.
        Auto = "auto",
    }
}

/// Command lines that attach clients to an export.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Attach {
    /// Lines by program: `qemu` (9.2 and newer), `qemu-before-9.2`, `libvirt-disk` and
    /// `libvirt-domain`, `cloud-hypervisor`, `nvme`, `nbd-client`, `path`, …
    pub lines: BTreeMap<String, String>,
    /// Arguments by program, for programs without a shell: commands, or the options of one.
    #[serde(default)]
    pub argv: BTreeMap<String, Vec<Vec<String>>>,
}

impl Attach {
    /// Key of the line for QEMU before 9.2, present where it differs from the line of `qemu`.
    pub const OLD_QEMU: &str = "qemu-before-9.2";
}
