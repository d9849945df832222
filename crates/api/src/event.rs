//! Events: what has happened.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Something that has happened.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Counts events since the daemon was started, from 1.
    pub id: u64,
    /// When, in nanoseconds since 1970.
    pub at_ns: u64,
    /// What it is about: `device`, `array`, `volume`, `pool`, `group`, `export`, `job` or `daemon`.
    pub kind: String,
    /// Its name.
    pub name: String,
    /// What has happened, in one word: `created`, `changed`, `deleted`, …
    pub what: String,
    /// A sentence.
    pub text: String,
}
