//! Events.

use crate::labels::Labels;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// An event.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Sequence number since the start of the daemon, from 1.
    pub id: u64,
    /// Time in nanoseconds since 1970.
    pub at_ns: u64,
    /// Kind of the object: `device`, `array`, `volume`, `pool`, `group`, `export`, `job` or
    /// `daemon`.
    pub kind: String,
    /// Name of the object.
    pub name: String,
    /// Event type, one word: `created`, `changed`, `deleted`, …
    pub what: String,
    /// Description of the event.
    pub text: String,
    /// Labels of the volume or export then.
    #[serde(default, skip_serializing_if = "Labels::is_empty")]
    pub labels: Labels,
}
