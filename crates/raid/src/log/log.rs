//! The log of one core: entries go out, tickets come back.

use crate::ArrayConfig;
use crate::config::MAX_PARITY;
use crate::log::Nonce;
use arrayvec::ArrayVec;
use block::{Channel, IoError};
use std::rc::Rc;
use std::sync::Arc;

/// What is to be logged before a rectangle of a stripe is written.
#[derive(Clone, Copy)]
pub struct Entry<'a> {
    /// The stripe.
    pub stripe: u64,
    /// First byte in each strip; a multiple of the block size.
    pub offset: u32,
    /// Bytes of each strip; a multiple of the block size, at most [`max_len`].
    pub len: u32,
    /// Modified data strips, bit `i` for strip `i`.
    pub modified: u64,
    /// New data of the modified strips, ascending by strip, `len` bytes each; or nothing.
    pub redo: &'a [&'a [u8]],
    /// CRC32C of the new data of each modified strip, ascending. Needed for a full stripe without redo; else it may be
    /// empty.
    pub crcs: &'a [u32],
    /// The live parity members of the stripe; not empty.
    pub targets: &'a [Target<'a>],
}

/// A parity member that gets a copy of an entry.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    /// The parity it holds in this stripe.
    pub parity: usize,
    /// Its slot.
    pub slot: usize,
    /// Where it is written.
    pub channel: &'a Rc<dyn Channel>,
    /// Where the log begins on the member, in bytes.
    pub log_offset: u64,
    /// `Σ c·D` of this parity over the *unmodified* data strips, `len` bytes; empty for a full stripe.
    pub partial: &'a [u8],
}

/// Why an entry is not durable. Nothing stays behind: the entry counts as retired.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AppendError {
    /// Members failed (slot and error each). They must go out before the operation starts over without them.
    #[error("the log could not be written to members {0:?}")]
    Members(ArrayVec<(usize, IoError), MAX_PARITY>),
    /// The entry is larger than [`max_len`] allows.
    #[error("an entry of {0} bytes")]
    TooLarge(u64),
    /// The lane is full, and its oldest ticket was dropped without being retired: the array has failed there.
    #[error("log lane {0} is full of operations that were given up")]
    Stuck(u16),
}

/// An entry that is durable and not yet retired. Dropping it without [`Log::retire`] keeps the entry for recovery for
/// ever: that is right when the operation's writes did not all succeed, and its lane is lost for others once it is full.
#[must_use = "an entry that is not retired fills its lane"]
pub struct Ticket {}

/// The log of one core, for the lanes that this core owns.
pub struct Log {}

impl Log {
    /// An empty log. Call it on the core that will use it.
    pub fn new(config: Arc<ArrayConfig>, nonce: Nonce, epoch: u64) -> Log {
        let _ = (config, nonce, epoch);
        todo!()
    }

    /// Makes `entry` durable on all its targets; waits first in line while the lane is full.
    ///
    /// # Errors
    /// See [`AppendError`].
    pub async fn append(&self, entry: &Entry<'_>) -> Result<Ticket, AppendError> {
        let _ = entry;
        todo!()
    }

    /// The operation's data and parity are durable on every live member, or none of it was written.
    pub fn retire(&self, ticket: Ticket) {
        let _ = ticket;
        todo!()
    }

    /// The array's epoch has changed; entries carry it from now on.
    pub fn set_epoch(&self, epoch: u64) {
        let _ = epoch;
        todo!()
    }

    /// Starts over under a nonce that is durable in the superblock: every member is good again.
    ///
    /// # Panics
    /// When tickets are out, other than dropped ones.
    pub fn reset(&self, nonce: Nonce, epoch: u64) {
        let _ = (nonce, epoch);
        todo!()
    }

    /// Entries that are not retired.
    pub fn outstanding(&self) -> usize {
        todo!()
    }
}

/// Most bytes of each strip that one entry can cover, with the new data of `redo_strips` strips in it: longer
/// rectangles must be cut. A multiple of the block size; 0 when the lanes are too small for any.
pub fn max_len(config: &ArrayConfig, redo_strips: usize) -> u32 {
    let _ = (config, redo_strips);
    todo!()
}
