//! Volumes, their QoS limits, and groups that share limits.

use crate::labels::{Labels, LabelsChange};
use base::Size;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A volume: a named range of an array or device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Volume {
    /// Name.
    pub name: String,
    /// UUID; a rename keeps it.
    pub uuid: String,
    /// The array or device that backs the volume.
    pub backing: String,
    /// Size in bytes.
    pub size_bytes: u64,
    /// Number of extents.
    pub extents: usize,
    /// QoS limits.
    pub qos: Qos,
    /// Group whose limits the volume shares.
    pub group: Option<String>,
    /// Guaranteed minimum share of the limits of the group.
    pub min_qos: MinQos,
    /// Names of the exports that serve the volume.
    pub exports: Vec<String>,
    /// Destination of the running move.
    pub moving_to: Option<String>,
    /// The source of a copy that is not complete. Until then no export serves the volume.
    #[serde(default)]
    pub copying_from: Option<String>,
    /// The reason why the copy has failed, so that the volume can only be deleted; or why a volume
    /// that moves cannot be used.
    #[serde(default)]
    pub error: Option<String>,
    /// Name of the `provisioner` token that may change the volume.
    #[serde(default)]
    pub label: Option<String>,
    /// Labels.
    #[serde(default)]
    pub labels: Labels,
}

/// Request to create a volume, which reads as zeroes, or as a copy of another object.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewVolume {
    /// Name.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    pub name: String,
    /// The array or device that backs the volume. The daemon creates a pool there if it has none.
    #[serde(alias = "on")]
    pub backing: String,
    /// Size in bytes, a multiple of the logical block size. Default with `from`: the size of the
    /// source.
    #[serde(default, alias = "size")]
    pub size_bytes: u64,
    /// The source: a device, array or volume whose content the volume gets. Without `pivot` exports
    /// do not write to the source until the job `NAME.copy` has ended. Bytes behind its end read as
    /// zeroes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// Whether the volume replaces the source, a device or array, in its exports. Their clients
    /// stay connected and may write. When the job has ended, the exports serve the volume, and the
    /// source does not change any more. The volume has the size of the source.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub pivot: bool,
    /// QoS limits. Default: none.
    #[serde(default)]
    pub qos: Qos,
    /// Group whose limits the volume shares.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Guaranteed minimum share of the limits of the group.
    #[serde(default, alias = "floor")]
    pub min_qos: MinQos,
    /// Overwrite existing content of an array or device without a pool.
    #[serde(default)]
    pub force: bool,
    /// Name of the `provisioner` token that may change the volume. Default: the name of the
    /// caller's token, if it is a provisioner.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    pub label: Option<String>,
    /// Labels: at most 32, with keys of at most 63 bytes (letters, digits and `._-/`) and values of
    /// at most 256 bytes.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}

/// Request to move a volume.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeMove {
    /// Destination array or device. The daemon creates a pool there if it has none.
    #[serde(alias = "to")]
    pub backing: String,
    /// Overwrite existing content of an array or device without a pool.
    #[serde(default)]
    pub force: bool,
}

/// Request to change a volume. Omitted fields keep their values.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeChange {
    /// New name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// New size in bytes; a volume can only grow. Exports announce it to their clients.
    #[serde(default, alias = "size", skip_serializing_if = "Option::is_none")]
    pub size_bytes: Option<u64>,
    /// New QoS limits, which replace all limits; omitted ones are unlimited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qos: Option<Qos>,
    /// The group whose limits it shares; the empty name for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// Guaranteed minimum share of the group's limits. Omitted fields have no minimum.
    #[serde(default, alias = "floor", skip_serializing_if = "Option::is_none")]
    pub min_qos: Option<MinQos>,
    /// Labels to set; `null` removes a label. Others stay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub labels: Option<LabelsChange>,
}

/// Guaranteed minimum share of a group's limits for a volume. The limits still apply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MinQos {
    /// Requests per second, except flushes.
    #[serde(default, alias = "iops", skip_serializing_if = "Option::is_none")]
    pub requests_per_s: Option<u64>,
    /// Bytes per second.
    #[serde(default, alias = "bandwidth", skip_serializing_if = "Option::is_none")]
    pub bytes_per_s: Option<u64>,
}

/// QoS limits of a volume or group. All limits apply together; an omitted limit is unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Qos {
    /// Requests, except flushes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<Rate>,
    /// Reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_iops: Option<Rate>,
    /// Writes, discards and zero writes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_iops: Option<Rate>,
    /// Bytes of all these requests.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Rate>,
    /// Bytes read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bandwidth: Option<Rate>,
    /// Bytes written, discarded or zeroed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_bandwidth: Option<Rate>,
}

/// A rate limit with a burst allowance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rate {
    /// Requests or bytes per second, at least 1.
    #[serde(alias = "per_second")]
    #[schema(minimum = 1)]
    pub per_s: u64,
    /// Unused requests or bytes that may accumulate in a pause and be used at once.
    #[serde(default)]
    pub burst: u64,
}

impl Rate {
    /// The texts that [`Rate::parse`] takes, for error messages.
    pub const EXPECTED: &str = "a rate such as 5000, 100M or 5000:20000 (20000 at once after a pause)";

    /// Reads `RATE` or `RATE:BURST`, sizes as in `10G`; `None` unless the rate is at least 1.
    ///
    /// ```
    /// use api::volume::Rate;
    ///
    /// assert_eq!(Rate::parse("5000:20K"), Some(Rate { per_s: 5000, burst: 20 << 10 }));
    /// assert_eq!(Rate::parse("0"), None);
    /// ```
    pub fn parse(text: &str) -> Option<Rate> {
        let (per_s, burst) = text.split_once(':').unwrap_or((text, "0"));
        let rate = Rate { per_s: Size::parse(per_s)?.0, burst: Size::parse(burst)?.0 };
        (rate.per_s > 0).then_some(rate)
    }
}

impl Qos {
    /// Returns the limits with their names.
    pub fn list(&self) -> [(&'static str, Option<Rate>); 6] {
        [
            ("iops", self.iops),
            ("read_iops", self.read_iops),
            ("write_iops", self.write_iops),
            ("bandwidth", self.bandwidth),
            ("read_bandwidth", self.read_bandwidth),
            ("write_bandwidth", self.write_bandwidth),
        ]
    }
}

/// Volumes that share limits.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Group {
    /// Name.
    pub name: String,
    /// QoS limits for all volumes of the group together.
    pub qos: Qos,
    /// Names of the volumes.
    pub volumes: Vec<String>,
}
