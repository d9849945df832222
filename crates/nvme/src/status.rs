//! How a command ended (Base 4.2.3, NVM 3.1.2, ZNS 3.2).

use block::{IoError, IoResult};

/// Status code type and status code: bits 10:8 and 7:0 of the completion's status field. What stands above them
/// (more, do not retry, retry delay) is dropped.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Status(u16);

impl Status {
    /// The status in a completion's status field without its phase bit, as Linux hands it to user programs.
    pub const fn new(field: u16) -> Status {
        Status(field & 0x7ff)
    }

    /// Status code type: 0 generic, 1 command specific, 2 media, 3 path, 7 vendor.
    pub const fn code_type(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// Status code within its type.
    pub const fn code(self) -> u8 {
        self.0 as u8
    }

    /// What it means for a request.
    ///
    /// # Errors
    /// For every status but success.
    pub const fn result(self) -> IoResult {
        Err(match (self.code_type(), self.code()) {
            (0, 0x00) => return Ok(()),
            // Generic command status (Base 4.2.3.1).
            (0, 0x01) => IoError::Unsupported, // Invalid Command Opcode
            // Invalid Field, Command ID Conflict, fused commands, Command Sequence Error, malformed SGLs and
            // identifiers: what was sent is wrong.
            (0, 0x02 | 0x03 | 0x09 | 0x0a | 0x0c | 0x0d..=0x12 | 0x14 | 0x16 | 0x18 | 0x1a | 0x1f) => {
                IoError::Invalid
            }
            (0, 0x13 | 0x1e) => IoError::Misaligned, // PRP Offset Invalid, SGL Data Block Granularity Invalid
            (0, 0x07) => IoError::TimedOut, // Command Abort Requested: hosts abort what takes too long
            // Power loss, deleted queue, namespace detached, Keep Alive Expired, transport, not ready, format.
            (0, 0x05 | 0x08 | 0x0b | 0x19 | 0x22 | 0x24 | 0x82 | 0x84) => IoError::DeviceGone,
            // Operation Denied, Namespace is Write Protected, lockdown, reservation of somebody else.
            (0, 0x15 | 0x20 | 0x23 | 0x83) => IoError::ReadOnly,
            (0, 0x80) => IoError::OutOfRange,
            (0, 0x81) => IoError::NoSpace, // Capacity Exceeded
            // Data transfer and internal errors, preempted, sanitize, interrupted, and what later versions add.
            (0, _) => IoError::Medium,
            // Command specific: NVM and zoned command sets.
            (1, 0x80 | 0x81 | 0x83) => IoError::Invalid, // conflicting attributes, protection, size limit
            (1, 0x82 | 0xba) => IoError::ReadOnly,       // Write to Read Only Range, Zone Is Read Only
            (1, 0xb8) => IoError::OutOfRange,            // Zone Boundary Error
            (1, 0xb9) => IoError::NoSpace,               // Zone Is Full
            (1, 0xbb) => IoError::Medium,                // Zone Is Offline
            (1, 0xbc | 0xbf) => IoError::Invalid,        // Zone Invalid Write, Invalid Zone State Transition
            (1, 0xbd) => IoError::TooManyActiveZones,
            (1, 0xbe) => IoError::TooManyOpenZones,
            (1, _) => IoError::Medium,
            // Media and data integrity errors (Base 4.2.3.3, NVM 3.1.2.3).
            (2, 0x82..=0x85 | 0x88) => IoError::Corrupt, // guard, tags, compare, storage tag
            (2, 0x86) => IoError::ReadOnly,              // Access Denied
            (2, _) => IoError::Medium,
            // Path related (Base 4.2.3.4).
            (3, 0x71) => IoError::TimedOut, // Command Aborted By Host
            (3, _) => IoError::DeviceGone,
            // Reserved and vendor specific.
            (_, _) => IoError::Medium,
        })
    }
}

impl std::fmt::Debug for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NVMe status {:x}/{:02x}", self.code_type(), self.code())
    }
}

impl std::fmt::Display for Status {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Debug::fmt(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_with_a_meaning_of_its_own_keeps_it() {
        for (field, error) in [
            (0x001, IoError::Unsupported),
            (0x002, IoError::Invalid),
            (0x013, IoError::Misaligned),
            (0x020, IoError::ReadOnly),
            (0x080, IoError::OutOfRange),
            (0x081, IoError::NoSpace),
            (0x1b8, IoError::OutOfRange),
            (0x1b9, IoError::NoSpace),
            (0x1bc, IoError::Invalid),
            (0x1bd, IoError::TooManyActiveZones),
            (0x1be, IoError::TooManyOpenZones),
            (0x280, IoError::Medium),
            (0x281, IoError::Medium),
            (0x282, IoError::Corrupt),
            (0x370, IoError::DeviceGone),
            (0x371, IoError::TimedOut),
            (0x7ff, IoError::Medium),
        ] {
            assert_eq!(Status::new(field).result(), Err(error), "{}", Status::new(field));
        }
        assert_eq!(Status::new(0).result(), Ok(()));
    }

    #[test]
    fn do_not_retry_and_more_do_not_change_the_meaning() {
        for extra in [0x4000, 0x2000, 0x1800, 0x7800] {
            assert_eq!(Status::new(0x080 | extra).result(), Err(IoError::OutOfRange));
            assert_eq!(Status::new(extra).result(), Ok(()));
        }
    }

    #[test]
    fn only_status_zero_is_success() {
        for field in 1..=0x7ff {
            assert!(Status::new(field).result().is_err(), "{}", Status::new(field));
        }
    }
}
