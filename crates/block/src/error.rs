//! The one error type of the data path.

/// Why a request failed. Small and `Copy`: the data path never allocates to report an error.
///
/// Each edge (virtio status, errno, NVMe status, NBD) maps it exactly once, in one exhaustive
/// `match`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoError {
    /// The request does not lie wholly inside the device.
    OutOfRange,
    /// Offset, length or memory does not have the alignment that [`crate::Limits`] asks for.
    Misaligned,
    /// The request is malformed in another way (no memory for a read, too many segments, …).
    Invalid,
    /// A write to a read-only device.
    ReadOnly,
    /// The device has no such operation, or not with these flags.
    Unsupported,
    /// The backing store is full (a thin volume, a sparse file).
    NoSpace,
    /// The medium could not read or write the blocks.
    Medium,
    /// Data or metadata is known to be wrong: a checksum does not match, or entries contradict the
    /// format.
    Corrupt,
    /// The device did not answer within its deadline.
    TimedOut,
    /// The device is gone: unplugged, disconnected, closed or permanently failed.
    DeviceGone,
    /// Memory or another resource of the host ran out.
    NoMemory,
    /// The write or open needs one more active zone than the device can have.
    TooManyActiveZones,
    /// The write or open needs one more open zone than the device can have.
    TooManyOpenZones,
}

/// The result of a request.
pub type IoResult = Result<(), IoError>;

impl IoError {
    /// The error for the errno of a system call.
    ///
    /// `errno` is positive. Numbers are those of Linux, so that this crate needs no system library.
    pub fn from_errno(errno: i32) -> IoError {
        match errno {
            1 | 13 | 30 => IoError::ReadOnly,                // EPERM, EACCES, EROFS
            6 | 19 | 107 | 108 | 121 => IoError::DeviceGone, // ENXIO, ENODEV, ENOTCONN, ESHUTDOWN, EREMOTEIO
            12 | 11 => IoError::NoMemory,                    // ENOMEM, EAGAIN
            22 => IoError::Invalid,                          // EINVAL
            27 => IoError::OutOfRange,                       // EFBIG
            28 | 122 => IoError::NoSpace,                    // ENOSPC, EDQUOT
            62 | 110 => IoError::TimedOut,                   // ETIME, ETIMEDOUT
            74 | 84 => IoError::Corrupt,                     // EBADMSG, EILSEQ
            75 => IoError::TooManyActiveZones,               // EOVERFLOW
            109 => IoError::TooManyOpenZones,                // ETOOMANYREFS
            95 => IoError::Unsupported,                      // EOPNOTSUPP
            _ => IoError::Medium,
        }
    }

    /// The Linux error number (positive) for a C caller.
    pub fn to_errno(self) -> i32 {
        match self {
            IoError::OutOfRange | IoError::Misaligned | IoError::Invalid => 22, // EINVAL
            IoError::ReadOnly => 9,                                             // EBADF, as pwrite(2) says
            IoError::Unsupported => 95,                                         // EOPNOTSUPP
            IoError::NoSpace => 28,                                             // ENOSPC
            IoError::Medium => 5,                                               // EIO
            IoError::Corrupt => 84,                                             // EILSEQ
            IoError::TimedOut => 110,                                           // ETIMEDOUT
            IoError::DeviceGone => 19,                                          // ENODEV
            IoError::NoMemory => 12,                                            // ENOMEM
            IoError::TooManyActiveZones => 75, // EOVERFLOW, as Linux says of zoned block devices
            IoError::TooManyOpenZones => 109,  // ETOOMANYREFS, likewise
        }
    }
}

impl std::fmt::Display for IoError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            IoError::OutOfRange => "beyond the end of the device",
            IoError::Misaligned => "not aligned as the device needs it",
            IoError::Invalid => "malformed request",
            IoError::ReadOnly => "device is read-only",
            IoError::Unsupported => "not supported by the device",
            IoError::NoSpace => "no space left in the backing store",
            IoError::Medium => "medium error",
            IoError::Corrupt => "damaged data or metadata",
            IoError::TimedOut => "timed out",
            IoError::DeviceGone => "device is gone",
            IoError::NoMemory => "out of memory",
            IoError::TooManyActiveZones => "too many active zones",
            IoError::TooManyOpenZones => "too many open zones",
        })
    }
}

impl std::error::Error for IoError {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_with_an_errno_of_its_own_survives_the_way_through_errno() {
        for error in [
            IoError::Unsupported,
            IoError::NoSpace,
            IoError::Medium,
            IoError::Corrupt,
            IoError::TimedOut,
            IoError::DeviceGone,
            IoError::NoMemory,
            IoError::TooManyActiveZones,
            IoError::TooManyOpenZones,
        ] {
            assert_eq!(IoError::from_errno(error.to_errno()), error);
        }
    }
}
