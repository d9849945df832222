//! Validates requests: refused, answered at once, or passed to the device. Pure.

use crate::offer::Selected;
use block::{IoError, Limits};
use nbd::Replies;
use nbd::error::{EOVERFLOW, Refusal, refusal_of};
use nbd::handshake::MAX_PAYLOAD;
use nbd::reply::Reply;
use nbd::request::{
    CMD_FLAG_DF, CMD_FLAG_FAST_ZERO, CMD_FLAG_FUA, CMD_FLAG_NO_HOLE, CMD_FLAG_PAYLOAD_LEN, CMD_FLAG_REQ_ONE,
    Command, Header,
};

/// Longest payload of a refused request that is skipped; a client that sends more is disconnected.
const MAX_SKIPPED: u64 = 2 * MAX_PAYLOAD as u64;

/// The negotiated values that requests are checked against.
#[derive(Clone, Debug)]
pub(crate) struct Rules {
    pub(crate) form: Replies,
    /// The metadata contexts that the client selected.
    pub(crate) selected: Selected,
    pub(crate) is_read_only: bool,
    /// Whether the client requested the block sizes, so that it must obey them.
    pub(crate) knows_blocks: bool,
    pub(crate) limits: Limits,
}

/// The decision about a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// Pass it to the device with `data` bytes of memory; the payload of a write follows.
    Run { data: usize },
    /// Answer it after skipping `skip` bytes of payload.
    Answer { content: Reply, skip: u64 },
    /// The client disconnects: no reply, and nothing follows.
    Leave,
    /// The rest of the stream cannot be parsed.
    Disconnect(&'static str),
}

/// A range of whole blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Blocks {
    /// Byte offset on the device.
    pub(crate) offset: u64,
    /// Bytes before the requested range.
    pub(crate) head: usize,
    pub(crate) len: usize,
}

impl Blocks {
    /// The blocks of `block_size` bytes that a request touches.
    #[inline]
    pub(crate) fn of(header: &Header, block_size: u32) -> Blocks {
        let mask = u64::from(block_size) - 1;
        let offset = header.offset & !mask;
        let len = ((header.offset + header.len + mask) & !mask) - offset;
        Blocks { offset, head: (header.offset - offset) as usize, len: len as usize }
    }

    /// Whether the request covers them completely.
    #[inline]
    pub(crate) fn are_meant(&self, header: &Header) -> bool {
        self.len as u64 == header.len
    }
}

impl Rules {
    /// Validates a request. `capacity` is the device's current size in bytes.
    pub(crate) fn judge(&self, header: &Header, capacity: u64) -> Verdict {
        let payload = self.payload(header);
        if payload > MAX_SKIPPED || (self.form == Replies::Extended && payload > MAX_PAYLOAD.into()) {
            return Verdict::Disconnect("a request has more payload than the server takes");
        }
        match self.check(header, capacity) {
            Err(refusal) => Verdict::Answer { content: Reply::Failed(refusal), skip: payload },
            Ok(()) => match header.command {
                Command::Disconnect => Verdict::Leave,
                // The server has no cache to prefetch into.
                Command::Cache => Verdict::Answer { content: Reply::Done, skip: 0 },
                // The protocol leaves the meaning of an empty request to the server: nothing is
                // done.
                Command::Read | Command::Write | Command::Trim | Command::WriteZeroes if header.len == 0 => {
                    Verdict::Answer { content: Reply::Done, skip: 0 }
                }
                Command::Read | Command::Write => Verdict::Run { data: self.blocks(header).len },
                _ => Verdict::Run { data: 0 },
            },
        }
    }

    /// Bytes of payload that follow the header.
    pub(crate) fn payload(&self, header: &Header) -> u64 {
        // With extended headers a flag announces payload. QEMU (at least up to 10.0) sends writes
        // with payload but without the flag.
        let is_said = self.form == Replies::Extended && header.flags & CMD_FLAG_PAYLOAD_LEN != 0;
        let is_there = is_said || header.command == Command::Write;
        if is_there { header.len } else { 0 }
    }

    /// The blocks that a read or write touches.
    #[inline]
    pub(crate) fn blocks(&self, header: &Header) -> Blocks {
        Blocks::of(header, self.limits.block_size)
    }

    fn check(&self, header: &Header, capacity: u64) -> Result<(), Refusal> {
        let Header { command, flags, len, .. } = *header;
        if flags & !self.known_flags(command) != 0 {
            return Err(Refusal::invalid("unknown command flag"));
        }
        let is_write = matches!(command, Command::Write | Command::WriteZeroes);
        if self.is_read_only && (is_write || command == Command::Trim) {
            return Err(refusal_of(IoError::ReadOnly, is_write));
        }
        match command {
            Command::Unknown(_) => return Err(Refusal::invalid("unknown command")),
            // A disconnect is valid whatever its other fields contain.
            Command::Disconnect => return Ok(()),
            Command::Flush if header.offset | len != 0 => {
                return Err(Refusal::invalid("flush: offset and length must be 0"));
            }
            Command::Flush => return Ok(()),
            Command::Trim if self.limits.max_discard == 0 => {
                return Err(Refusal::invalid("the device does not support discard"));
            }
            Command::WriteZeroes if self.limits.max_write_zeroes == 0 => {
                return Err(Refusal::invalid("the device does not support write zeroes"));
            }
            Command::BlockStatus if self.selected.len() == 0 => {
                return Err(Refusal::invalid("no metadata context was negotiated"));
            }
            Command::BlockStatus if len == 0 => {
                return Err(Refusal::invalid("block status: length must not be 0"));
            }
            Command::Read if len > MAX_PAYLOAD.into() && self.form != Replies::Simple => {
                return Err(Refusal { number: EOVERFLOW, text: "longer than the largest payload" });
            }
            Command::Read | Command::Write if len > MAX_PAYLOAD.into() => {
                return Err(Refusal::invalid("longer than the largest payload"));
            }
            _ => {}
        }
        self.check_range(header, capacity).map_err(|error| refusal_of(error, is_write))
    }

    fn check_range(&self, header: &Header, capacity: u64) -> Result<(), IoError> {
        match header.offset.checked_add(header.len) {
            Some(end) if end <= capacity => {}
            _ => return Err(IoError::OutOfRange),
        }
        let mask = u64::from(self.limits.block_size) - 1;
        if self.knows_blocks && (header.offset | header.len) & mask != 0 {
            Err(IoError::Misaligned)
        } else {
            Ok(())
        }
    }

    fn known_flags(&self, command: Command) -> u16 {
        let payload = match (self.form, command) {
            (Replies::Extended, Command::Write) => CMD_FLAG_PAYLOAD_LEN,
            _ => 0,
        };
        let own = match command {
            Command::Read if self.form != Replies::Simple => CMD_FLAG_DF,
            Command::WriteZeroes => CMD_FLAG_NO_HOLE | CMD_FLAG_FAST_ZERO,
            Command::BlockStatus => CMD_FLAG_REQ_ONE,
            // Other fields of a disconnect are ignored.
            Command::Disconnect => u16::MAX,
            _ => 0,
        };
        CMD_FLAG_FUA | payload | own
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nbd::error::{EINVAL, ENOSPC, EPERM};

    const MIB: u64 = 1 << 20;
    const READ: Command = Command::Read;
    const WRITE: Command = Command::Write;

    fn rules(form: Replies) -> Rules {
        let mut selected = Selected::default();
        if form != Replies::Simple {
            selected.add(0);
        }
        Rules { form, selected, is_read_only: false, knows_blocks: true, limits: Limits::new(256 * MIB) }
    }

    fn judge(rules: &Rules, command: Command, flags: u16, offset: u64, len: u64) -> Verdict {
        rules.judge(&Header { command, flags, cookie: 1, offset, len }, rules.limits.capacity)
    }

    /// The error number of a refusal, and the bytes to skip.
    fn refused(verdict: Verdict) -> (u32, u64) {
        match verdict {
            Verdict::Answer { content: Reply::Failed(refusal), skip } => (refusal.number, skip),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_valid_request_goes_to_the_device() {
        for form in [Replies::Simple, Replies::Structured, Replies::Extended] {
            let rules = rules(form);
            let payload = if form == Replies::Extended { CMD_FLAG_PAYLOAD_LEN } else { 0 };
            assert_eq!(judge(&rules, WRITE, 0, 0, 1024), Verdict::Run { data: 1024 }, "QEMU's");
            assert_eq!(judge(&rules, READ, 0, 512, 1024), Verdict::Run { data: 1024 });
            assert_eq!(
                judge(&rules, WRITE, 1 | payload, 255 * MIB, MIB),
                Verdict::Run { data: MIB as usize }
            );
            assert_eq!(judge(&rules, WRITE, payload, 0, 32 * MIB), Verdict::Run { data: 32 << 20 });
            assert_eq!(judge(&rules, Command::Flush, 0, 0, 0), Verdict::Run { data: 0 });
            assert_eq!(judge(&rules, Command::Trim, 1, 0, 256 * MIB), Verdict::Run { data: 0 });
            assert_eq!(judge(&rules, Command::WriteZeroes, 0x13, 0, 256 * MIB), Verdict::Run { data: 0 });
            assert_eq!(judge(&rules, Command::Disconnect, 0xffff, 7, 7), Verdict::Leave);
        }
    }

    #[test]
    fn block_status_goes_to_the_device() {
        let status = judge(&rules(Replies::Structured), Command::BlockStatus, CMD_FLAG_REQ_ONE, MIB, 8 * MIB);
        assert_eq!(status, Verdict::Run { data: 0 });
    }

    #[test]
    fn a_request_that_needs_no_device_is_answered() {
        let rules = rules(Replies::Structured);
        let done = Verdict::Answer { content: Reply::Done, skip: 0 };
        assert_eq!(judge(&rules, Command::Cache, 0, 0, MIB), done);
        for command in [READ, WRITE, Command::Trim, Command::WriteZeroes] {
            assert_eq!(judge(&rules, command, 0, 512, 0), done);
        }
    }

    #[test]
    fn a_refused_write_is_skipped_and_too_long_a_one_ends_the_connection() {
        let structured = rules(Replies::Structured);
        assert_eq!(refused(judge(&structured, WRITE, 0, 256 * MIB, 512)), (ENOSPC, 512));
        assert_eq!(refused(judge(&structured, WRITE, 0, u64::MAX, 512)), (ENOSPC, 512));
        assert_eq!(refused(judge(&structured, WRITE, 0, 1, 512)), (EINVAL, 512));
        assert_eq!(refused(judge(&structured, WRITE, 0x80, 0, 100)), (EINVAL, 100));
        assert_eq!(refused(judge(&structured, WRITE, 0, 0, 33 * MIB)), (EINVAL, 33 * MIB));
        assert!(matches!(judge(&structured, WRITE, 0, 0, 65 * MIB), Verdict::Disconnect(_)));
        let extended = rules(Replies::Extended);
        assert_eq!(refused(judge(&extended, WRITE, 0, 100, 512)), (EINVAL, 512));
        assert_eq!(refused(judge(&extended, READ, CMD_FLAG_PAYLOAD_LEN, 0, 512)), (EINVAL, 512));
        assert!(matches!(judge(&extended, WRITE, CMD_FLAG_PAYLOAD_LEN, 0, 33 * MIB), Verdict::Disconnect(_)));
        assert!(matches!(judge(&extended, READ, CMD_FLAG_PAYLOAD_LEN, 0, u64::MAX), Verdict::Disconnect(_)));
    }

    #[test]
    fn an_invalid_request_is_refused() {
        let simple = rules(Replies::Simple);
        let structured = rules(Replies::Structured);
        for (rules, command, flags, offset, len, number) in [
            (&simple, READ, 0, 0, 33 * MIB, EINVAL),
            (&structured, READ, 0, 0, 33 * MIB, EOVERFLOW),
            (&simple, READ, CMD_FLAG_DF, 0, 512, EINVAL),
            (&structured, READ, CMD_FLAG_NO_HOLE, 0, 512, EINVAL),
            (&structured, READ, CMD_FLAG_PAYLOAD_LEN, 0, 512, EINVAL),
            (&structured, READ, 0, 256 * MIB, 512, EINVAL),
            (&structured, READ, 0, 0, 511, EINVAL),
            (&structured, READ, 0, u64::MAX - 511, 512, EINVAL),
            (&structured, Command::Flush, 0, 0, 512, EINVAL),
            (&structured, Command::Trim, 0, 256 * MIB, 512, EINVAL),
            (&structured, Command::WriteZeroes, 0, 256 * MIB, 512, ENOSPC),
            (&structured, Command::WriteZeroes, CMD_FLAG_DF, 0, 512, EINVAL),
            (&structured, Command::Cache, CMD_FLAG_REQ_ONE, 0, 512, EINVAL),
            (&structured, Command::Cache, 0, 256 * MIB, 512, EINVAL),
            (&simple, Command::BlockStatus, 0, 0, 512, EINVAL),
            (&structured, Command::BlockStatus, 0, 0, 0, EINVAL),
            (&structured, Command::Unknown(8), 0, 0, 0, EINVAL),
        ] {
            let verdict = judge(rules, command, flags, offset, len);
            assert_eq!(refused(verdict), (number, 0), "{command:?} {flags:#x} {offset} {len}");
        }
    }

    #[test]
    fn a_client_without_block_sizes_may_address_any_byte() {
        let rules = Rules { knows_blocks: false, ..rules(Replies::Structured) };
        assert_eq!(judge(&rules, READ, 0, 513, 1), Verdict::Run { data: 512 });
        assert_eq!(judge(&rules, WRITE, 0, 511, 2), Verdict::Run { data: 1024 });
        assert_eq!(judge(&rules, Command::WriteZeroes, 0, 1, 1), Verdict::Run { data: 0 });
        assert_eq!(refused(judge(&rules, WRITE, 0, 256 * MIB - 1, 2)), (ENOSPC, 2));
        let blocks = |offset, len| {
            let header = Header { command: WRITE, flags: 0, cookie: 1, offset, len };
            let blocks = rules.blocks(&header);
            ((blocks.offset, blocks.head, blocks.len), blocks.are_meant(&header))
        };
        assert_eq!(blocks(512, 512), ((512, 0, 512), true));
        assert_eq!(blocks(1023, 2), ((512, 511, 1024), false));
        assert_eq!(blocks(1024, 1), ((1024, 0, 512), false));
    }

    #[test]
    fn a_read_only_export_refuses_whatever_changes_it() {
        let rules = Rules { is_read_only: true, ..rules(Replies::Structured) };
        assert_eq!(refused(judge(&rules, WRITE, 0, 0, 512)), (EPERM, 512));
        assert_eq!(refused(judge(&rules, Command::Trim, 0, 0, 512)), (EPERM, 0));
        assert_eq!(refused(judge(&rules, Command::WriteZeroes, 0, 0, 512)), (EPERM, 0));
        assert_eq!(judge(&rules, Command::Flush, 0, 0, 0), Verdict::Run { data: 0 });
        assert_eq!(judge(&rules, READ, 0, 0, 512), Verdict::Run { data: 512 });
    }

    #[test]
    fn an_unsupported_command_is_refused_before_it_reaches_the_device() {
        let limits = Limits { max_discard: 0, max_write_zeroes: 0, ..Limits::new(MIB) };
        let rules = Rules { limits, ..rules(Replies::Structured) };
        assert_eq!(refused(judge(&rules, Command::Trim, 0, 0, 512)), (EINVAL, 0));
        assert_eq!(refused(judge(&rules, Command::WriteZeroes, 0, 0, 512)), (EINVAL, 0));
    }
}
