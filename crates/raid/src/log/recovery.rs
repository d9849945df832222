//! The nouns of recovery: its input, the entries it chooses, and the reasons why it stops.

use crate::ArrayConfig;
use crate::log::Nonce;
use crate::log::entry::{Header, VERSION, Write};
use block::{Channel, IoError};
use std::rc::Rc;

/// A member as recovery uses it.
#[derive(Clone)]
pub struct RecoveryMember {
    /// The channel of the member.
    pub channel: Rc<dyn Channel>,
    /// Start of its log, in bytes.
    pub log_offset: u64,
    /// Start of its data, in bytes.
    pub data_offset: u64,
}

/// The input of recovery.
pub struct Recovery<'a> {
    /// The array.
    pub config: &'a ArrayConfig,
    /// The nonce under which the entries were written, from the superblock.
    pub nonce: Nonce,
    /// Each slot's member, or `None` if it is absent.
    pub members: &'a [Option<RecoveryMember>],
    /// Whether the member of a slot holds valid data of a stripe. `false` for a failed or absent
    /// member. For one that is being rebuilt, whether the stripe lies below its durable cursor.
    pub is_live: &'a dyn Fn(u64, usize) -> bool,
    /// Entries of stripes below this one are void: a reshape has moved their bytes. 0 without a
    /// reshape.
    pub first_stripe: u64,
    /// Ranges that an earlier [`RecoverError::NotNoted`] named and the caller has noted durably.
    pub noted: &'a [BadRange],
}

/// Bytes that an unacknowledged write has left unreadable: reads fail until they are written again.
/// The parity of the rows counts them as zeroes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BadRange {
    /// The stripe.
    pub stripe: u64,
    /// The data strip.
    pub strip: usize,
    /// First byte in the strip.
    pub offset: u32,
    /// Bytes.
    pub len: u32,
}

/// Why recovery stopped. It can be called again.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecoverError {
    /// Blocks are lost. Their rows are unchanged. The caller notes the blocks durably, and passes
    /// them as [`Recovery::noted`] in the next try.
    #[error("{} lost ranges of blocks are not noted as bad", ranges.len())]
    NotNoted {
        /// The blocks.
        ranges: Vec<BadRange>,
    },
    /// A member failed: it must be durably failed before the next try.
    #[error("member {slot} failed during recovery: {error}")]
    Member {
        /// Its slot.
        slot: usize,
        /// The error of the member.
        error: IoError,
    },
    /// A copy of an entry that the scan found cannot be read any more. The next try scans again.
    #[error("the log of member {slot} became unreadable during recovery: {error}")]
    Log {
        /// Its slot.
        slot: usize,
        /// The error of the member.
        error: IoError,
    },
    /// A later version of Freestone wrote an entry of the log. Nothing was replayed.
    #[error("log of member {slot}: an entry has version {found}; supported is version {VERSION}")]
    Version {
        /// Its slot.
        slot: usize,
        /// The version of the entry.
        found: u16,
    },
    /// Two different entries have one sequence, which the engine never writes.
    #[error("log lane {lane} holds two different entries with sequence {sequence}")]
    Inconsistent {
        /// The lane.
        lane: u16,
        /// The sequence.
        sequence: u64,
    },
}

impl Recovery<'_> {
    /// The member of a slot if it is present and holds valid data of the stripe.
    pub(super) fn live(&self, stripe: u64, slot: usize) -> Option<&RecoveryMember> {
        let member = self.members.get(slot)?.as_ref()?;
        (self.is_live)(stripe, slot).then_some(member)
    }
}

/// An entry to replay, with a copy for each live target.
pub(super) struct Chosen {
    pub write: Write,
    pub copies: Vec<Header>,
    /// Every live target is a suspect: an entry that cannot be read may supersede this one.
    pub is_uncertain: bool,
}

/// Whether an error concerns the place that was read, not the whole member.
pub(super) fn is_unreadable(error: IoError) -> bool {
    matches!(error, IoError::Medium | IoError::Corrupt)
}
