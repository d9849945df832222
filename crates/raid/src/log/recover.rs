//! After a crash: what the log holds is brought to the members.

use crate::ArrayConfig;
use crate::log::Nonce;
use block::{Channel, IoError};
use std::rc::Rc;

/// A member as recovery uses it.
#[derive(Clone)]
pub struct RecoveryMember {
    /// The member.
    pub channel: Rc<dyn Channel>,
    /// Where its log begins, in bytes.
    pub log_offset: u64,
    /// Where its data begins, in bytes.
    pub data_offset: u64,
}

/// What recovery works on.
pub struct Recovery<'a> {
    /// The array.
    pub config: &'a ArrayConfig,
    /// The nonce under which the entries were written, from the superblock.
    pub nonce: Nonce,
    /// Each slot's member, when it is there.
    pub members: &'a [Option<RecoveryMember>],
    /// Whether the member of a slot holds valid data of a stripe. `false` for one that is out or not there; for one that
    /// is being rebuilt, whether the stripe lies below its durable cursor.
    pub is_live: &'a dyn Fn(u64, usize) -> bool,
}

/// Bytes that an unacknowledged write has left unreadable: they fail until they are written again. Parity of the rows
/// stands for zeroes there.
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

/// What recovery found and did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Entries of this assembly, copies counted once.
    pub entries: u64,
    /// Replayed.
    pub replayed: u64,
    /// Below their lane's tail.
    pub stale: u64,
    /// Followed by another of the same rows.
    pub superseded: u64,
    /// Not on all live targets: their writes had not begun.
    pub incomplete: u64,
    /// Of stripes that have lost more members than parity stands for; nothing was done.
    pub lost: u64,
    /// What cannot be read until it is written again.
    pub bad: Vec<BadRange>,
    /// The highest sequence of any lane.
    pub highest_sequence: u64,
}

/// Why recovery stopped. It can be called again.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecoverError {
    /// A member failed: it must be made "out" before the next try.
    #[error("member {slot} failed during recovery: {error}")]
    Member {
        /// Its slot.
        slot: usize,
        /// What it said.
        error: IoError,
    },
    /// Two different entries have one sequence: no array writes that.
    #[error("log lane {lane} holds two different entries with sequence {sequence}")]
    Inconsistent {
        /// The lane.
        lane: u16,
        /// The sequence.
        sequence: u64,
    },
}

/// Replays the log of all lanes. When it returns, every stripe is consistent; the log must then be used under a new
/// nonce only.
///
/// # Errors
/// See [`RecoverError`].
pub async fn recover(context: &Recovery<'_>) -> Result<Report, RecoverError> {
    let _ = context;
    todo!()
}
