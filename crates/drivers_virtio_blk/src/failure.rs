//! The errors of a transport's steps.

/// Why a step failed. The session adds the step and the device.
pub type Failure = Box<dyn std::error::Error + Send + Sync>;

/// An operating system error with the operation that failed.
#[derive(Debug, thiserror::Error)]
#[error("{what}")]
pub struct Tried {
    /// Operation and its object.
    pub what: String,
    /// Error of the operation.
    pub source: std::io::Error,
}
