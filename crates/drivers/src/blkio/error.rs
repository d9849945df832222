//! Errors of the control path: an errno for programs, a sentence for people.

use block::DeviceError;
use std::io;

/// A positive errno and what it is about. One word, so that results of fast calls travel in
/// registers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Error(Box<(i32, String)>);

/// The result of the control path.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// `errno` (positive) with a message that names the object and the value.
    pub fn new(errno: i32, message: impl Into<String>) -> Error {
        Error(Box::new((errno, message.into())))
    }

    /// The operating system's error about `what`; `EIO` if it has no errno.
    pub fn os(what: &str, error: &io::Error) -> Error {
        let errno = error.raw_os_error().unwrap_or(match error.kind() {
            io::ErrorKind::InvalidInput | io::ErrorKind::InvalidData => libc::EINVAL,
            io::ErrorKind::TimedOut => libc::ETIMEDOUT,
            io::ErrorKind::UnexpectedEof => libc::ECONNRESET,
            _ => libc::EIO,
        });
        Error::new(errno, format!("{what}: {error}"))
    }

    /// A device's error, with the errno of the system call that caused it or else `otherwise`.
    pub fn device(error: &DeviceError, otherwise: i32) -> Error {
        let mut message = error.to_string();
        let mut errno = otherwise;
        let mut source = std::error::Error::source(error);
        while let Some(cause) = source {
            let text = cause.to_string();
            if !message.contains(&text) {
                message = format!("{message}: {text}");
            }
            if let Some(found) = cause.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error) {
                errno = found;
            }
            source = cause.source();
        }
        Error::new(errno, message)
    }

    /// The positive errno.
    pub fn errno(&self) -> i32 {
        self.0.0
    }

    /// The sentence.
    pub fn message(&self) -> &str {
        &self.0.1
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0.1)
    }
}

impl std::error::Error for Error {}

/// Keeps the sentence; the errno is that of the [`Error`] within.
impl From<Error> for io::Error {
    fn from(error: Error) -> io::Error {
        io::Error::new(io::Error::from_raw_os_error(error.errno()).kind(), error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_errno_of_a_cause_deep_below_is_found() {
        let cause = io::Error::from_raw_os_error(libc::ECONNREFUSED);
        let error = DeviceError::new("nbd:x", "cannot connect").because(cause);
        let error = Error::device(&error, libc::EIO);
        assert_eq!(error.errno(), libc::ECONNREFUSED);
        assert!(error.message().contains("nbd:x") && error.message().contains("refused"), "{error}");
    }
}
