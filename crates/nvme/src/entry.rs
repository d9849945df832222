//! Submission and completion queue entries as bytes (Base 3.3.3), with the data descriptors of
//! fabrics (Base 4.1.2). A command capsule carries the same 64 bytes, a response the same 16.

use crate::wire::{put, u16_at, u32_at, u64_at};
use crate::{Command, Status};

/// Bytes of a submission queue entry.
pub const SUBMISSION_BYTES: usize = 64;
/// Bytes of a completion queue entry.
pub const COMPLETION_BYTES: usize = 16;
/// In a submission queue entry's flags: SGLs describe the data, as in all commands over fabrics
/// (Base 3.3.3.1, PSDT = 01b).
pub const FLAG_SGL: u8 = 1 << 6;
/// In a submission queue entry's flags: the command is the first or the second of a fused operation
/// (Base 3.3.3.1, FUSE).
pub const FLAGS_FUSED: u8 = 3;

/// The location of a command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sgl {
    /// No data: all sixteen bytes are zero.
    None,
    /// In the capsule, after the entry: data block descriptor with an offset (type 0h, subtype 1h).
    InCapsule {
        /// Bytes from the start of the capsule's data, which the controller's ICDOFF determines.
        offset: u64,
        /// Bytes of data.
        len: u32,
    },
    /// The transport moves the data by its own means: transport data block (type 5h, subtype Ah).
    Transport {
        /// Bytes of data.
        len: u32,
    },
    /// A descriptor that NVMe/TCP does not have.
    Other {
        /// The descriptor's type (high four bits) and subtype.
        kind: u8,
        /// Its first twelve bytes.
        fields: [u8; 12],
    },
}

impl Sgl {
    const IN_CAPSULE: u8 = 0x01;
    const TRANSPORT: u8 = 0x5a;

    /// Reads a descriptor.
    pub fn parse(bytes: &[u8; 16]) -> Sgl {
        if *bytes == [0; 16] {
            return Sgl::None;
        }
        match bytes[15] {
            Sgl::IN_CAPSULE => Sgl::InCapsule { offset: u64_at(bytes, 0), len: u32_at(bytes, 8) },
            Sgl::TRANSPORT => Sgl::Transport { len: u32_at(bytes, 8) },
            kind => Sgl::Other { kind, fields: crate::wire::array_at(bytes, 0) },
        }
    }

    /// Writes the descriptor.
    pub fn encode(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        match *self {
            Sgl::None => {}
            Sgl::InCapsule { offset, len } => {
                put(&mut bytes, 0, offset.to_le_bytes());
                put(&mut bytes, 8, len.to_le_bytes());
                bytes[15] = Sgl::IN_CAPSULE;
            }
            Sgl::Transport { len } => {
                put(&mut bytes, 8, len.to_le_bytes());
                bytes[15] = Sgl::TRANSPORT;
            }
            Sgl::Other { kind, fields } => {
                put(&mut bytes, 0, fields);
                bytes[15] = kind;
            }
        }
        bytes
    }

    /// Bytes of data; 0 for an unknown descriptor.
    pub const fn len(&self) -> u32 {
        match self {
            Sgl::InCapsule { len, .. } | Sgl::Transport { len } => *len,
            Sgl::None | Sgl::Other { .. } => 0,
        }
    }

    /// Whether the descriptor has no data.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// A submission queue entry, without the metadata pointer and dwords 2 and 3, which are not used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SubmissionEntry {
    /// The opcode.
    pub opcode: u8,
    /// Fused operation and kind of data descriptor; [`FLAGS_FUSED`], [`FLAG_SGL`].
    pub flags: u8,
    /// Identifier among the commands in flight on its queue.
    pub command_id: u16,
    /// The namespace. In a fabrics command the lowest byte is the command's type.
    pub nsid: u32,
    /// The location of the data.
    pub sgl: Sgl,
    /// Command dwords 10 to 15.
    pub cdw: [u32; 6],
}

impl SubmissionEntry {
    /// The entry of `command` over fabrics, with the identifier `command_id` and the data that
    /// `sgl` describes.
    pub const fn new(command: &Command, command_id: u16, sgl: Sgl) -> SubmissionEntry {
        let Command { opcode, nsid, cdw } = *command;
        SubmissionEntry { opcode, flags: FLAG_SGL, command_id, nsid, sgl, cdw }
    }

    /// Refuses one command of a fused operation, for a controller that has none of these.
    ///
    /// # Errors
    /// [`Status::INVALID_FIELD`].
    #[inline]
    pub const fn check_not_fused(&self) -> Result<(), Status> {
        if self.flags & FLAGS_FUSED == 0 { Ok(()) } else { Err(Status::INVALID_FIELD) }
    }

    /// The command, without the fields of the transport.
    pub const fn command(&self) -> Command {
        Command { opcode: self.opcode, nsid: self.nsid, cdw: self.cdw }
    }

    /// Parses the entry. Any 64 bytes are one; the meaning of the fields depends on the opcode.
    pub fn parse(bytes: &[u8; SUBMISSION_BYTES]) -> SubmissionEntry {
        SubmissionEntry {
            opcode: bytes[0],
            flags: bytes[1],
            command_id: u16_at(bytes, 2),
            nsid: u32_at(bytes, 4),
            sgl: Sgl::parse(&crate::wire::array_at(bytes, 24)),
            cdw: std::array::from_fn(|i| u32_at(bytes, 40 + 4 * i)),
        }
    }

    /// Writes the entry.
    pub fn encode(&self) -> [u8; SUBMISSION_BYTES] {
        let mut bytes = [0; SUBMISSION_BYTES];
        bytes[0] = self.opcode;
        bytes[1] = self.flags;
        put(&mut bytes, 2, self.command_id.to_le_bytes());
        put(&mut bytes, 4, self.nsid.to_le_bytes());
        put(&mut bytes, 24, self.sgl.encode());
        for (i, dword) in self.cdw.iter().enumerate() {
            put(&mut bytes, 40 + 4 * i, dword.to_le_bytes());
        }
        bytes
    }
}

/// A completion queue entry. Fabrics have no phase bit, so none is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletionEntry {
    /// Dwords 0 and 1: the result of the command.
    pub result: u64,
    /// The controller's position in the submission queue.
    pub sq_head: u16,
    /// The submission queue; 0 over fabrics.
    pub sq_id: u16,
    /// Identifier of the command that ended.
    pub command_id: u16,
    /// Its status.
    pub status: Status,
    /// The same command would fail again.
    pub do_not_retry: bool,
}

impl CompletionEntry {
    const DO_NOT_RETRY: u16 = 1 << 15;

    /// The completion of `command_id` with `status` and without a result. An error has "do not
    /// retry".
    pub fn new(command_id: u16, status: Status) -> CompletionEntry {
        let do_not_retry = status != Status::SUCCESS && !status.is_worth_retrying();
        CompletionEntry { result: 0, sq_head: 0, sq_id: 0, command_id, status, do_not_retry }
    }

    /// Reads the entry.
    pub fn parse(bytes: &[u8; COMPLETION_BYTES]) -> CompletionEntry {
        let field = u16_at(bytes, 14);
        CompletionEntry {
            result: u64_at(bytes, 0),
            sq_head: u16_at(bytes, 8),
            sq_id: u16_at(bytes, 10),
            command_id: u16_at(bytes, 12),
            status: Status::new(field >> 1),
            do_not_retry: field & CompletionEntry::DO_NOT_RETRY != 0,
        }
    }

    /// Writes the entry, with phase bit 0.
    pub fn encode(&self) -> [u8; COMPLETION_BYTES] {
        let mut bytes = [0; COMPLETION_BYTES];
        let dnr = if self.do_not_retry { CompletionEntry::DO_NOT_RETRY } else { 0 };
        put(&mut bytes, 0, self.result.to_le_bytes());
        put(&mut bytes, 8, self.sq_head.to_le_bytes());
        put(&mut bytes, 10, self.sq_id.to_le_bytes());
        put(&mut bytes, 12, self.command_id.to_le_bytes());
        put(&mut bytes, 14, (self.status.field() << 1 | dnr).to_le_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_write_has_the_layout_of_the_specification() {
        let command = Command::write(0x1122_3344, 0x0102_0304_0506_0708, 8, true);
        let bytes =
            SubmissionEntry::new(&command, 0xabcd, Sgl::InCapsule { offset: 0, len: 0x1000 }).encode();
        assert_eq!(bytes[..8], [0x01, 0x40, 0xcd, 0xab, 0x44, 0x33, 0x22, 0x11]);
        assert_eq!(bytes[8..24], [0; 16]);
        assert_eq!(bytes[24..40], [0, 0, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0, 0, 0, 0x01]);
        assert_eq!(bytes[40..52], [8, 7, 6, 5, 4, 3, 2, 1, 7, 0, 0, 0x40]);
        assert_eq!(SubmissionEntry::parse(&bytes).command(), command);
        assert_eq!(Sgl::Transport { len: 512 }.encode()[8..], [0, 2, 0, 0, 0, 0, 0, 0x5a]);
        assert_eq!(Sgl::parse(&[0; 16]), Sgl::None);
    }

    #[test]
    fn a_completion_has_its_status_above_the_phase_bit() {
        let entry = CompletionEntry {
            result: 0x1122_3344_5566_7788,
            sq_head: 5,
            sq_id: 0,
            command_id: 0x0102,
            status: Status::LBA_OUT_OF_RANGE,
            do_not_retry: true,
        };
        let bytes = entry.encode();
        assert_eq!(bytes[..8], [0x88, 0x77, 0x66, 0x55, 0x44, 0x33, 0x22, 0x11]);
        assert_eq!(bytes[8..], [5, 0, 0, 0, 2, 1, 0x00, 0x81]);
        assert_eq!(CompletionEntry::parse(&bytes), entry);
        assert!(!CompletionEntry::new(1, Status::SUCCESS).do_not_retry);
        assert!(CompletionEntry::new(1, Status::INVALID_FIELD).do_not_retry);
        assert!(!CompletionEntry::new(1, Status::NAMESPACE_NOT_READY).do_not_retry);
    }

    fn any_sgl() -> impl Strategy<Value = Sgl> {
        prop_oneof![
            Just(Sgl::None),
            (any::<u64>(), any::<u32>()).prop_map(|(offset, len)| Sgl::InCapsule { offset, len }),
            any::<u32>().prop_map(|len| Sgl::Transport { len }),
            (0x10u8..0x20, any::<[u8; 12]>()).prop_map(|(kind, fields)| Sgl::Other { kind, fields }),
        ]
    }

    proptest! {
        #[test]
        fn an_encoded_submission_entry_is_read_the_same(
            (opcode, flags, command_id, nsid) in any::<(u8, u8, u16, u32)>(), sgl in any_sgl(), cdw in any::<[u32; 6]>(),
        ) {
            let entry = SubmissionEntry { opcode, flags, command_id, nsid, sgl, cdw };
            prop_assert_eq!(SubmissionEntry::parse(&entry.encode()), entry);
        }

        #[test]
        fn any_sixteen_bytes_are_a_completion(bytes in any::<[u8; 16]>()) {
            let entry = CompletionEntry::parse(&bytes);
            prop_assert_eq!(CompletionEntry::parse(&entry.encode()), entry);
        }
    }
}
