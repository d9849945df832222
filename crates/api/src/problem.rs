//! What an answer says that is an error (RFC 9457, `application/problem+json`).

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Why a request was not carried out. Nothing has changed, with one exception: a request of type `failed` may have met a
/// device that fails. Content that `force` or an unused device gave up may be overwritten then, and an action on several
/// members of an array may have been carried out for the first of them; `detail` lists those.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Problem {
    /// What kind of problem it is: a word for programs, such as `not-found`, `in-use` or `no-room`.
    #[serde(rename = "type")]
    pub kind: String,
    /// The same for people.
    pub title: String,
    /// The status of the answer.
    pub status: u16,
    /// What is wrong, with the object and the value.
    pub detail: String,
}

impl Problem {
    /// The media type of an answer that is a problem.
    pub const MEDIA_TYPE: &str = "application/problem+json";
}
