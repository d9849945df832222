//! The kind of work of a request, for drivers whose devices may lack commands for some requests.

use block::{Flags, IoError, Op, Request};

/// The work of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Work {
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Zeroes written with a command.
    WriteZeroes,
    /// Zeroes sent as data.
    WriteBuffers,
    /// Discards, with a command.
    Discard,
    /// Flushes.
    Flush,
}

impl Work {
    /// The work of a request on a device that has commands for write zeroes and discard, or not.
    ///
    /// # Errors
    /// [`IoError::Unsupported`]: a discard without a command, or write zeroes without a command
    /// and with [`Flags::NO_FALLBACK`].
    #[inline]
    pub fn of(req: &Request<'_>, has_write_zeroes: bool, has_discard: bool) -> Result<Work, IoError> {
        Ok(match req.op {
            Op::Read => Work::Read,
            Op::Write => Work::Write,
            Op::WriteZeroes if has_write_zeroes => Work::WriteZeroes,
            Op::WriteZeroes if req.flags.contains(Flags::NO_FALLBACK) => return Err(IoError::Unsupported),
            Op::WriteZeroes => Work::WriteBuffers,
            Op::Discard if has_discard => Work::Discard,
            Op::Discard => return Err(IoError::Unsupported),
            Op::Flush => Work::Flush,
        })
    }

    /// The other way to do the work after the device has refused it with an error, if there is
    /// one.
    pub fn fallback(self, error: IoError, flags: Flags) -> Option<Work> {
        let is_refused = self == Work::WriteZeroes && error == IoError::Unsupported;
        (is_refused && !flags.contains(Flags::NO_FALLBACK)).then_some(Work::WriteBuffers)
    }
}
