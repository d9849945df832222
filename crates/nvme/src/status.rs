//! Status of completed commands (Base 4.2.3, NVM 3.1.2, ZNS 3.2).

use block::{IoError, IoResult};

/// Status code type and status code: bits 10:8 and 7:0 of the completion's status field. The bits
/// above them (more, do not retry, retry delay) are dropped.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Status(u16);

impl Status {
    /// The status in a completion's status field without its phase bit, as Linux returns it to user
    /// programs.
    pub const fn new(field: u16) -> Status {
        Status(field & 0x7ff)
    }

    /// The status field, without the dropped bits.
    pub const fn field(self) -> u16 {
        self.0
    }

    /// Status code type: 0 generic, 1 command specific, 2 media, 3 path, 7 vendor.
    pub const fn code_type(self) -> u8 {
        (self.0 >> 8) as u8
    }

    /// Status code within its type.
    pub const fn code(self) -> u8 {
        self.0 as u8
    }

    /// The result of a request whose command ended with this status.
    ///
    /// # Errors
    /// For every status except success.
    pub const fn result(self) -> IoResult {
        Err(match (self.code_type(), self.code()) {
            (0, 0x00) => return Ok(()),
            // Generic command status (Base 4.2.3.1).
            (0, 0x01) => IoError::Unsupported, // Invalid Command Opcode
            // Invalid Field, Command ID Conflict, fused commands, Command Sequence Error, malformed
            // SGLs and identifiers: the command is wrong.
            (0, 0x02 | 0x03 | 0x09 | 0x0a | 0x0c | 0x0d..=0x12 | 0x14 | 0x16 | 0x18 | 0x1a | 0x1f) => {
                IoError::Invalid
            }
            (0, 0x13 | 0x1e) => IoError::Misaligned, // PRP Offset Invalid, SGL Data Block Granularity Invalid
            (0, 0x07) => IoError::TimedOut,          // Command Abort Requested: hosts abort slow commands
            // Power loss, deleted queue, namespace detached, Keep Alive Expired, transport, not
            // ready, format.
            (0, 0x05 | 0x08 | 0x0b | 0x19 | 0x22 | 0x24 | 0x82 | 0x84) => IoError::DeviceGone,
            // Operation Denied, Namespace is Write Protected, lockdown, reservation of another
            // host.
            (0, 0x15 | 0x20 | 0x23 | 0x83) => IoError::ReadOnly,
            (0, 0x80) => IoError::OutOfRange,
            (0, 0x81) => IoError::NoSpace, // Capacity Exceeded
            // Data transfer and internal errors, preempted, sanitize, interrupted, and codes of
            // later versions.
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

/// A list of named statuses: name, type, code and meaning.
macro_rules! named {
    ($($(#[$doc:meta])* $name:ident = $kind:literal / $code:literal;)*) => {
        impl Status {
            $($(#[$doc])* pub const $name: Status = Status::new($kind << 8 | $code);)*
        }
    };
}

named! {
    /// The command succeeded.
    SUCCESS = 0 / 0x00;
    /// Generic: the command does not exist.
    INVALID_OPCODE = 0 / 0x01;
    /// Generic: a field has an invalid value.
    INVALID_FIELD = 0 / 0x02;
    /// Generic: the command identifier is in use.
    COMMAND_ID_CONFLICT = 0 / 0x03;
    /// Generic: the data transfer failed.
    DATA_TRANSFER_ERROR = 0 / 0x04;
    /// Generic: the controller failed.
    INTERNAL_ERROR = 0 / 0x06;
    /// Generic: the host has aborted the command.
    ABORT_REQUESTED = 0 / 0x07;
    /// Generic: the queue of the command was deleted.
    ABORTED_SQ_DELETION = 0 / 0x08;
    /// Generic: the namespace or its format is invalid.
    INVALID_NAMESPACE = 0 / 0x0b;
    /// Generic: the order of commands is invalid (I/O before Connect).
    COMMAND_SEQUENCE_ERROR = 0 / 0x0c;
    /// Generic: the SGL has the wrong number of descriptors.
    INVALID_SGL_COUNT = 0 / 0x0e;
    /// Generic: the SGL's data is shorter or longer than the command's.
    INVALID_SGL_LENGTH = 0 / 0x0f;
    /// Generic: an SGL descriptor has an unknown type.
    INVALID_SGL_TYPE = 0 / 0x11;
    /// Generic: data in the capsule starts at an invalid offset.
    INVALID_SGL_OFFSET = 0 / 0x16;
    /// Generic: the host identifier is in another format.
    INCONSISTENT_HOST_ID = 0 / 0x18;
    /// Generic: the host sent nothing for the keep-alive timeout.
    KEEP_ALIVE_EXPIRED = 0 / 0x19;
    /// Generic: the keep-alive timeout is not supported.
    INVALID_KEEP_ALIVE = 0 / 0x1a;
    /// Generic: writes are refused.
    WRITE_PROTECTED = 0 / 0x20;
    /// Generic: the transport failed temporarily.
    TRANSIENT_TRANSPORT_ERROR = 0 / 0x22;
    /// Generic: the command does not support this command set.
    INVALID_COMMAND_SET = 0 / 0x2c;
    /// Generic: blocks beyond the end of the namespace.
    LBA_OUT_OF_RANGE = 0 / 0x80;
    /// Generic: the medium is full.
    CAPACITY_EXCEEDED = 0 / 0x81;
    /// Generic: the namespace is not ready yet.
    NAMESPACE_NOT_READY = 0 / 0x82;
    /// Generic: another host has reserved the namespace.
    RESERVATION_CONFLICT = 0 / 0x83;

    /// Command specific: the queue identifier is in use or too large.
    INVALID_QUEUE_ID = 1 / 0x01;
    /// Command specific: more asynchronous event requests than AERL allows.
    TOO_MANY_EVENT_REQUESTS = 1 / 0x05;
    /// Command specific: the log page does not exist.
    INVALID_LOG_PAGE = 1 / 0x09;
    /// Command specific: the feature cannot be saved.
    FEATURE_NOT_SAVEABLE = 1 / 0x0d;
    /// Command specific: the feature's value is fixed.
    FEATURE_NOT_CHANGEABLE = 1 / 0x0e;
    /// Command specific: the feature belongs to the controller, not to a namespace.
    FEATURE_NOT_NAMESPACE_SPECIFIC = 1 / 0x0f;

    /// Fabrics: the record format of a Connect is unknown.
    CONNECT_INCOMPATIBLE_FORMAT = 1 / 0x80;
    /// Fabrics: the controller already has a host.
    CONNECT_CONTROLLER_BUSY = 1 / 0x81;
    /// Fabrics: a parameter of Connect is invalid; the completion names it
    /// ([`crate::fabrics::InvalidParameter`]).
    CONNECT_INVALID_PARAMETERS = 1 / 0x82;
    /// Fabrics: the host must read the discovery log again.
    CONNECT_RESTART_DISCOVERY = 1 / 0x83;
    /// Fabrics: this host may not connect.
    CONNECT_INVALID_HOST = 1 / 0x84;
    /// Fabrics: a queue of this type cannot be disconnected.
    INVALID_QUEUE_TYPE = 1 / 0x85;
    /// Fabrics: the discovery log changed while it was read.
    DISCOVER_RESTART = 1 / 0x90;
    /// Fabrics: the host must authenticate first.
    AUTHENTICATION_REQUIRED = 1 / 0x91;

    /// NVM: attributes that contradict each other.
    CONFLICTING_ATTRIBUTES = 1 / 0x80;
    /// NVM: blocks that are read only.
    WRITE_TO_READ_ONLY_RANGE = 1 / 0x82;
    /// NVM: longer than a limit of the controller.
    COMMAND_SIZE_LIMIT_EXCEEDED = 1 / 0x83;
    /// NVM: the source of a copy overlaps its destination.
    OVERLAPPING_RANGE = 1 / 0x87;

    /// Zoned: the blocks cross the end of a zone.
    ZONE_BOUNDARY = 1 / 0xb8;
    /// Zoned: the limit of active zones is reached.
    TOO_MANY_ACTIVE_ZONES = 1 / 0xbd;
    /// Zoned: the limit of open zones is reached.
    TOO_MANY_OPEN_ZONES = 1 / 0xbe;

    /// Media: the blocks cannot be written.
    WRITE_FAULT = 2 / 0x80;
    /// Media: the blocks cannot be read.
    UNRECOVERED_READ_ERROR = 2 / 0x81;
    /// Media: the data does not match its guard.
    GUARD_CHECK_ERROR = 2 / 0x82;
    /// Media: the data does not match that of the compare command.
    COMPARE_FAILURE = 2 / 0x85;
    /// Media: access is denied.
    ACCESS_DENIED = 2 / 0x86;
    /// Media: the blocks are deallocated or unwritten.
    UNWRITTEN_BLOCK = 2 / 0x87;

    /// Path: the controller failed; another one may succeed.
    INTERNAL_PATH_ERROR = 3 / 0x00;
    /// Path: the namespace is permanently unreachable on this path.
    ANA_PERSISTENT_LOSS = 3 / 0x01;
    /// Path: the namespace is unreachable on this path.
    ANA_INACCESSIBLE = 3 / 0x02;
    /// Path: the state of the path is changing.
    ANA_TRANSITION = 3 / 0x03;
    /// Path: the host has aborted the command.
    ABORTED_BY_HOST = 3 / 0x71;
}

impl Status {
    /// The status of any command whose device fails with `error`.
    pub const fn of(error: IoError) -> Status {
        match error {
            IoError::OutOfRange => Status::LBA_OUT_OF_RANGE,
            IoError::Misaligned | IoError::Invalid => Status::INVALID_FIELD,
            IoError::ReadOnly => Status::WRITE_PROTECTED,
            IoError::Unsupported => Status::INVALID_OPCODE,
            IoError::NoSpace => Status::CAPACITY_EXCEEDED,
            // Linux turns every media error of a read or write into EIO.
            IoError::Medium => Status::UNRECOVERED_READ_ERROR,
            IoError::Corrupt => Status::GUARD_CHECK_ERROR,
            IoError::TimedOut => Status::ABORT_REQUESTED,
            IoError::DeviceGone => Status::INTERNAL_PATH_ERROR,
            IoError::NoMemory => Status::INTERNAL_ERROR,
            IoError::TooManyActiveZones => Status::TOO_MANY_ACTIVE_ZONES,
            IoError::TooManyOpenZones => Status::TOO_MANY_OPEN_ZONES,
        }
    }

    /// Whether the same command may succeed later, or on another path. Such a status is sent
    /// without "do not retry".
    pub const fn is_worth_retrying(self) -> bool {
        matches!(
            (self.code_type(), self.code()),
            (0, 0x04 | 0x06 | 0x07 | 0x08 | 0x19 | 0x22 | 0x82) | (1, 0x81) | (3, _)
        )
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
    fn an_error_of_the_device_arrives_at_the_host_unchanged() {
        for error in [
            IoError::OutOfRange,
            IoError::Invalid,
            IoError::ReadOnly,
            IoError::Unsupported,
            IoError::NoSpace,
            IoError::Medium,
            IoError::Corrupt,
            IoError::TimedOut,
            IoError::DeviceGone,
            IoError::TooManyActiveZones,
            IoError::TooManyOpenZones,
        ] {
            assert_eq!(Status::of(error).result(), Err(error));
        }
        assert_eq!(Status::of(IoError::Misaligned).result(), Err(IoError::Invalid));
        assert_eq!(Status::of(IoError::NoMemory).result(), Err(IoError::Medium));
        assert_eq!(Status::new(Status::CONNECT_INVALID_PARAMETERS.field()).field(), 0x182);
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
