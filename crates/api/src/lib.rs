//! Types of the daemon's REST API, version 1, shared by daemon, command line and page.
//!
//! Sizes are bytes, rates are per second, and times are nanoseconds since 1970, unless the name has
//! another unit.
//! The daemon refuses a request with an unknown field, so that a typo does not become a default.
//! Later versions may add fields to answers.
//! `docs/openapi.json` is generated from these types.

#![forbid(unsafe_code)]

pub mod array;
pub mod device;
pub mod event;
pub mod export;
pub mod job;
pub mod pool;
pub mod problem;
pub mod sample;
pub mod system;
pub mod volume;

pub use array::{Array, ArrayAction, ArrayState, Done, Member, NewArray, Scrub, ScrubWindow, Spare};
pub use device::{Device, NewDevice};
pub use event::Event;
pub use export::{Attach, Export, ExportChange, ExportState, NewExport, Traffic};
pub use job::{Job, JobChange};
pub use pool::{Pool, PoolAction, Repaired, TableCopy};
pub use problem::Problem;
pub use sample::{Sample, Samples};
pub use system::{CoreInfo, StartProgress, System, SystemState};
pub use volume::{Floor, Group, NewPlace, NewVolume, Qos, Rate, Volume, VolumeChange};

/// Prefix of all paths of the API.
pub const PREFIX: &str = "/v1";
/// Default path of the daemon's socket.
pub const DEFAULT_SOCKET: &str = "/run/freestone/freestoned.sock";
/// Environment variable with the path of the daemon's socket.
pub const SOCKET_VARIABLE: &str = "FREESTONE_SOCKET";
