//! Error responses (RFC 9457, `application/problem+json`).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Reason for which a request was refused. The request changed nothing, with one exception. A
/// problem of type `failed` may stem from a failing device. Content that `force` or an unused
/// device gave up may be overwritten, and an action on several members of an array may be complete
/// for the first of them. `detail` lists these members.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// Machine-readable kind of the problem, such as `not-found`, `in-use` or `no-room`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Human-readable form of `type`.
    pub title: String,
    /// HTTP status code.
    pub status: u16,
    /// Description with the object, the value and the reason.
    pub detail: String,
}

impl Problem {
    /// Media type of error responses.
    pub const MEDIA_TYPE: &str = "application/problem+json";
}
