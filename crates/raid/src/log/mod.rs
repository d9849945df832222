//! The log that closes the write hole: before a write changes a stripe, what its parity is made of is durable on the
//! members that hold the parity.
//!
//! ```text
//!   append: header + Σ c·(unmodified strips) [+ new data] ─► lane of the stripe, on each live parity member ─► durable
//!   write:  data and parity, FUA ─► retire
//!   crash:  recover: parity = partial + Σ c·(modified strips as they are, or as the log has them)
//! ```
//!
//! # What is promised
//!
//! After a crash in the middle of any writes, together with the loss of as many members as parity stands for, every
//! block that was not being written reads as it was, and a block that was being written reads as it was or as it was to
//! become. One case remains: when a full stripe was being written (its entry is a header only) *and* a data member is
//! lost in that same crash, blocks of that one unacknowledged write may be reported as bad.
//!
//! # What the engine must do
//!
//! 1. *Rows are locked.* From append to retire no other operation changes the rows `[offset, offset + len)` of the
//!    stripe, in whichever strips.
//! 2. *The entry is durable first.* No byte of data or parity is written before [`Log::append`] has returned a ticket,
//!    and all of them are durable before [`Log::retire`], on every member that the superblocks call live. A write that
//!    skips a member (it failed, and "out" is on its way) counts as degraded and is retired only when "out" is durable;
//!    when it has no live parity member left to log to, it waits for that before it writes anything.
//! 3. *Begun is finished.* When a member fails after writes have begun, the operation goes on with the data and parity
//!    that it has in memory, on the members that are left. It does not read again and it does not append again.
//! 4. *A failed append has written nothing.* It is retired; the engine makes "member out" durable and starts over.
//! 5. *Redo* is given when several strips, but not all, are modified; when any member of the group is not live (one
//!    that is being rebuilt is not: the cursor on disk is older than the one in memory); and when parity is not known to
//!    be in sync.
//! 6. *Checksums* of the new data are given for a full stripe without redo.
//! 7. *Whatever changes blocks is logged*, discards included, as long as a parity member of the stripe is live. Where
//!    writes are logged only at times (bitmap mode), a new nonce separates those times from the others: an entry that
//!    was retired would be replayed over what was written without one.
//! 8. *Members that come (back) bring a new nonce.* With the array quiet, the superblock takes a new nonce together with
//!    the new member table, and every core calls [`Log::reset`]. Else old entries of the member would count again.
//! 9. *Members that are absent are out before recovery.* A member that the table calls live and that is not there, or
//!    fails during recovery, is made durably "out" before [`recover()`] is called (again): recovery changes stripes on
//!    the strength of the members it has.
//! 10. *After recovery* a new nonce is durable before the first append.
//!
//! # Why recovery is right
//!
//! Let `e` be an entry and `s` its stripe.
//!
//! *What was begun is replayed.* If a byte of data was written, `e` is durable on all parity members of `s` that were
//! live. While it is not retired it is at or above every tail and no other entry of `s` overlaps it; so recovery finds
//! it on each of them that is still live, and replays it. What recovery replays without need (not begun, or retired and
//! not followed by a write of the same rows) it replays onto data that has not changed since, which changes nothing.
//!
//! *What is stale is not replayed.* Let `b` be a later entry that overlaps `e`, with data written. Then `e` had been
//! retired when `b` was made, and `b` was durable on every live parity member `x` of `s`. If `b` can be read on `x`,
//! recovery sees that it *supersedes* `e`. The tail alone would not do: it stays below `e` while some older entry of
//! the lane is slow, and then `e`'s redo data would undo `b`. If `b` cannot be read on `x` its space was used again,
//! and [`lane`] lets that happen only when a durable entry on `x`, which is not being overwritten, has a tail above
//! `b`, hence above `e`. All of that is true of `x` alone, so it does not matter which other members survive.
//!
//! *Who was skipped is brought along.* A member that hung, was skipped, and is there again before "out" was durable is
//! live for recovery. Every write that skipped it is still in the log with its new data: replay writes that, and
//! computes a parity that was no target from all data of the rows.
//!
//! *A stripe with all its data needs no entry.* Its parity is computed from the data as it is, whatever the entry holds.
//! Blocks of the write are old or new, and no entry that is stale can bring old data back.
//!
//! *Units that cannot be read.* [`recover()`]'s module has the rules.
//!
//! *Recovery may crash.* Whatever it has written, parity fits the data afterwards, on the same or fewer members; entries
//! are only overwritten under a new nonce.

pub mod checksum;
pub mod entry;
mod lane;
#[allow(clippy::module_inception)]
mod log;
mod recover;
mod replay;
mod writer;

#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod tests;

pub use entry::Nonce;
pub use log::{AppendError, Entry, Log, Target, Ticket, max_len};
pub use recover::{
    BadRange, PendingWrite, RecoverError, Recovery, RecoveryMember, Report, UnreadableUnit, list, recover,
    unfinished,
};

/// An array of one group for tests; its lanes hold 64 KiB.
#[cfg(test)]
pub(crate) fn test_array(data: usize, parity: usize, strip_bytes: u32, lanes: u16) -> crate::ArrayConfig {
    use crate::{Consistency, Geometry, Level, Matrix, Uuid, Zones};
    crate::ArrayConfig {
        uuid: Uuid::from_random([0x5a; 16]),
        name: "test".into(),
        level: Level::NPlusM,
        geometry: Geometry { groups: 1, data, parity, strip_bytes, group_stripes: 64, zones: Zones::NONE },
        matrix: Matrix::Powers,
        consistency: Consistency::Ppl,
        block_size: 512,
        region_bytes: 1 << 20,
        lanes,
        lane_bytes: 64 << 10,
    }
}
