//! Error numbers. Source: the NBD protocol, "Error values".

use block::IoError;

/// Not permitted.
pub const EPERM: u32 = 1;
/// Input or output error.
pub const EIO: u32 = 5;
/// Out of memory.
pub const ENOMEM: u32 = 12;
/// Invalid.
pub const EINVAL: u32 = 22;
/// No space left.
pub const ENOSPC: u32 = 28;
/// The request exceeds a limit of the server.
pub const EOVERFLOW: u32 = 75;
/// Not supported.
pub const ENOTSUP: u32 = 95;
/// The server shuts down.
pub const ESHUTDOWN: u32 = 108;

/// The meaning of an error number to a client. Unlisted numbers count as `EINVAL`, as the protocol
/// demands.
pub fn error_of(number: u32) -> IoError {
    match number {
        EPERM => IoError::ReadOnly,
        EIO => IoError::Medium,
        ENOMEM => IoError::NoMemory,
        ENOSPC => IoError::NoSpace,
        ENOTSUP => IoError::Unsupported,
        ESHUTDOWN => IoError::DeviceGone,
        EINVAL | EOVERFLOW => IoError::Invalid,
        _ => IoError::Invalid,
    }
}

/// An error of a server: the number, and text for people.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The number.
    pub number: u32,
    /// The text.
    pub text: &'static str,
}

impl Refusal {
    /// An invalid request.
    pub const fn invalid(text: &'static str) -> Refusal {
        Refusal { number: EINVAL, text }
    }
}

/// The server shuts down.
pub const SHUTDOWN: Refusal = Refusal { number: ESHUTDOWN, text: "the server shuts down" };

/// Maps a device error to the protocol. `is_write`: the request would have stored data.
pub fn refusal_of(error: IoError, is_write: bool) -> Refusal {
    let (number, text) = match error {
        IoError::OutOfRange if is_write => (ENOSPC, "beyond the end of the device"),
        IoError::OutOfRange => (EINVAL, "beyond the end of the device"),
        IoError::Misaligned => (EINVAL, "not a multiple of the block size"),
        IoError::Invalid => (EINVAL, "malformed request"),
        IoError::ReadOnly => (EPERM, "device is read-only"),
        IoError::Unsupported => (ENOTSUP, "not supported by the device"),
        IoError::NoSpace => (ENOSPC, "no space left in the backing store"),
        IoError::Medium => (EIO, "medium error"),
        IoError::Corrupt => (EIO, "damaged data or metadata"),
        IoError::TimedOut => (EIO, "timed out"),
        IoError::DeviceGone => (ESHUTDOWN, "device is gone"),
        IoError::NoMemory => (ENOMEM, "out of memory"),
        IoError::TooManyActiveZones => (EIO, "too many active zones"),
        IoError::TooManyOpenZones => (EIO, "too many open zones"),
    };
    Refusal { number, text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_client_reads_the_errors_that_a_server_sends() {
        let same = [
            IoError::ReadOnly,
            IoError::Unsupported,
            IoError::NoSpace,
            IoError::Medium,
            IoError::DeviceGone,
            IoError::NoMemory,
            IoError::Invalid,
        ];
        for error in same {
            assert_eq!(error_of(refusal_of(error, false).number), error);
        }
        assert_eq!(error_of(refusal_of(IoError::OutOfRange, true).number), IoError::NoSpace);
        assert_eq!(error_of(4711), IoError::Invalid);
    }
}
