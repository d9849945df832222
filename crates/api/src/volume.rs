//! Volumes, what they may take, and groups that share that.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A volume: bytes of an array or device under a name.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Volume {
    /// Its name.
    pub name: String,
    /// Its identity, which stays when it is renamed.
    pub uuid: String,
    /// The array or device that it lies on.
    pub on: String,
    /// Its size in bytes.
    pub size: u64,
    /// In how many pieces it lies.
    pub pieces: usize,
    /// What it may take.
    pub qos: Qos,
    /// The group whose limits it shares.
    pub group: Option<String>,
    /// What it gets of them.
    pub floor: Floor,
    /// Names of the exports that serve it.
    pub exports: Vec<String>,
    /// The array or device that it moves to at the moment.
    pub moves_to: Option<String>,
    /// Name of the `provisioner` token that may change it.
    #[serde(default)]
    pub label: Option<String>,
}

/// A volume to be made. It reads as zeroes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewVolume {
    /// Its name.
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    pub name: String,
    /// The array or device to make it on. One without volumes is prepared for them first.
    pub on: String,
    /// Its size in bytes, a multiple of the logical block size.
    pub size: u64,
    /// What it may take; anything without it.
    #[serde(default)]
    pub qos: Qos,
    /// The group whose limits it shares.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// What it gets of them whatever the others of the group take.
    #[serde(default)]
    pub floor: Floor,
    /// Whatever lies on a device without volumes may be overwritten.
    #[serde(default)]
    pub force: bool,
    /// Name of the `provisioner` token that may change it. Such a token's own name is the default for its volumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    pub label: Option<String>,
}

/// Where a volume moves.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewPlace {
    /// The array or device. One without volumes is prepared for them first.
    pub to: String,
    /// Whatever lies on a device without volumes may be overwritten.
    #[serde(default)]
    pub force: bool,
}

/// What is to be different about a volume. What is not said stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct VolumeChange {
    /// Another name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// A larger size in bytes. Users of its exports are told.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// What it may take from now on: all limits, those that are not said are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qos: Option<Qos>,
    /// The group whose limits it shares; the empty name for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// What it gets of them from now on whatever the others of the group take: what is not said is no floor.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floor: Option<Floor>,
}

/// What a volume gets of its group's limits whatever the others of the group take. The limits hold all the same.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Floor {
    /// Requests a second, of every kind but flushes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Bytes a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<u64>,
}

/// What a volume or a group may take. All limits hold at the same time; what is not there is not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Qos {
    /// Requests of every kind but flushes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub iops: Option<Rate>,
    /// Reads.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_iops: Option<Rate>,
    /// Writes, discards and written zeroes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_iops: Option<Rate>,
    /// Bytes of all of them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<Rate>,
    /// Bytes that are read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_bandwidth: Option<Rate>,
    /// Bytes that are written, discarded or zeroed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub write_bandwidth: Option<Rate>,
}

/// How many a second, and how many at once after a pause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct Rate {
    /// Requests or bytes a second; at least 1.
    #[schema(minimum = 1)]
    pub per_second: u64,
    /// How many of those that a pause has left over may come at once on top.
    #[serde(default)]
    pub burst: u64,
}

impl Qos {
    /// The limits with their names.
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
    /// Its name.
    pub name: String,
    /// What its volumes may take together.
    pub qos: Qos,
    /// Names of its volumes.
    pub volumes: Vec<String>,
}
