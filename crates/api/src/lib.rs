//! What goes over the daemon's REST API, version 1: the types that daemon, command line and page share.
//!
//! Names are the field's. Sizes are bytes, rates are a second, times are nanoseconds since 1970 unless the name says
//! otherwise. A request with a field that is not known is refused: a typo must not pass for a default. Answers may get
//! more fields. `docs/openapi.json` is generated from here.

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

/// What every path of the API begins with.
pub const PREFIX: &str = "/v1";
/// Where the daemon listens unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/freestone/freestoned.sock";
/// The variable that says where the daemon listens.
pub const SOCKET_VARIABLE: &str = "FREESTONE_SOCKET";
