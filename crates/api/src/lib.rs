//! The vocabulary of management: types of the daemon's REST API, version 1, and of the control
//! sockets of arrays. Daemon, command line and page share them.
//!
//! Sizes are bytes, rates are per second, and times are nanoseconds since 1970, unless the name has
//! another unit.
//! The daemon refuses a request with an unknown field, so that a typo does not become a default.
//! Later versions may add fields to answers.
//! Requests also accept the names that fields had before version 1 was frozen: `on`, `of`, `size`,
//! `floor`, `per_second`, ….
//! `docs/openapi.json` is generated from these types.

#![forbid(unsafe_code)]

pub mod array;
pub mod client;
pub mod device;
pub mod disk;
pub mod drive;
pub mod event;
pub mod export;
pub mod health;
pub mod history;
pub mod host;
pub mod job;
pub mod labels;
pub mod pool;
pub mod portal;
pub mod problem;
pub mod sample;
pub mod system;
pub mod volume;
mod words;

pub use array::{
    Array, ArrayAction, ArrayState, Consistency, Done, Level, Member, MemberState, NewArray, Reshape, Scrub,
    ScrubWindow, Spare,
};
pub use client::Client;
pub use device::{Device, DeviceChange, ImageSnapshot, NewDevice, NewImageSnapshot};
pub use disk::{Disk, DiskTransport, DiskUse, DiskUseKind};
pub use drive::{Drive, DriveHealth, DriveWarning};
pub use event::Event;
pub use export::{AnaState, Attach, DataPlane, Export, ExportChange, ExportState, NewExport, Traffic};
pub use health::{HealthCode, HealthProblem, Severity};
pub use history::{History, HistoryMarker, HistoryPoint};
pub use host::{HostsChange, NewHost};
pub use job::{Job, JobChange, JobKind};
pub use labels::{Labels, LabelsChange, MAX_LABEL_KEY, MAX_LABEL_VALUE, MAX_LABELS};
pub use pool::{Pool, PoolAction, PoolCapacity, Repaired, TableCopy};
pub use portal::{DEFAULT_PORTAL_KIND, NewPortal, Portal, default_portal_kind};
pub use problem::Problem;
pub use sample::{Sample, Samples};
pub use system::{CoreInfo, Role, StartProgress, System, SystemState};
pub use volume::{Group, MinQos, NewVolume, Qos, Rate, Volume, VolumeChange, VolumeMove};

/// Prefix of all paths of the API.
pub const PREFIX: &str = "/v1";
/// Default path of the daemon's socket.
pub const DEFAULT_SOCKET: &str = "/run/freestone/freestoned.sock";
/// Environment variable with the path of the daemon's socket.
pub const SOCKET_VARIABLE: &str = "FREESTONE_SOCKET";

#[cfg(test)]
mod tests {
    use super::*;
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    fn read<T: DeserializeOwned>(value: Value) -> T {
        serde_json::from_value(value).unwrap()
    }

    #[test]
    fn requests_accept_the_names_before_version_1_was_frozen() {
        let old: NewVolume = read(json!({
            "name": "v", "on": "data", "size": 4096, "floor": { "iops": 5, "bandwidth": 6 },
            "qos": { "iops": { "per_second": 7 } },
        }));
        let new: NewVolume = read(json!({
            "name": "v", "backing": "data", "size_bytes": 4096,
            "min_qos": { "requests_per_s": 5, "bytes_per_s": 6 }, "qos": { "iops": { "per_s": 7 } },
        }));
        assert_eq!(old, new);
        let old: VolumeChange = read(json!({ "size": 8192, "floor": {} }));
        assert_eq!(old, read(json!({ "size_bytes": 8192, "min_qos": {} })));
        let old: VolumeMove = read(json!({ "to": "fast" }));
        assert_eq!(old, read(json!({ "backing": "fast" })));
        let old: NewExport = read(json!({ "name": "e", "kind": "nbd", "of": ["v"] }));
        assert_eq!(old, read(json!({ "name": "e", "kind": "nbd", "volumes": ["v"] })));
    }

    #[test]
    fn a_field_by_both_names_is_refused() {
        let both = json!({ "name": "v", "on": "data", "backing": "data", "size_bytes": 4096 });
        assert!(
            serde_json::from_value::<NewVolume>(both).unwrap_err().to_string().contains("duplicate field")
        );
    }
}
