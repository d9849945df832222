//! The log that closes the write hole. Before a write changes a stripe, the log makes the inputs of
//! its parity durable on the members that hold the parity.
//!
//! ```text
//!   append: header + Σ c·(unmodified strips) [+ new data] ─► lane of the stripe, on each live parity member ─► durable
//!   write:  data and parity, FUA ─► retire
//!   crash:  recover: parity = partial + Σ c·(modified strips as they are, or as the log has them)
//! ```
//!
//! # Guarantee
//!
//! A crash may interrupt any writes, and as many members as the array has parities may be lost with
//! it. Afterwards every block that no write was changing reads as before. A block that a write was
//! changing reads as its old or its new content. One exception remains, for a full stripe, whose
//! entry is a header only. If a data member is lost in the crash that interrupts such a write,
//! recovery may report blocks of this one unacknowledged write as bad.
//!
//! # Duties of the engine
//!
//! 1. *Rows are locked.* From append to retire no other operation changes the rows
//!    `[offset, offset + len)` of the stripe, in any strip.
//! 2. *The entry is durable first.* The engine writes no byte of data or parity before
//!    [`Log::append`] has returned a ticket. All of them are durable before [`Log::retire`], on
//!    every member that the superblocks call live. A write that skips a failed member before the
//!    failure is committed counts as degraded: the engine retires it only after the commit. If the
//!    stripe has no live parity member left to log to, the engine waits for the commit before it
//!    writes.
//! 3. *A write that has begun is finished.* When a member fails after writes have begun, the
//!    operation continues on the remaining members with the data and parity that it has in memory.
//!    It does not read again and it does not append again.
//! 4. *A failed append has written nothing.* Its entry counts as retired. The engine commits the
//!    failure of the member and starts the operation again.
//! 5. *Redo data* is required in three cases. The write modifies several strips, but not all. A
//!    member of the group is not live; a member that is being rebuilt is not, because its cursor on
//!    disk is older than the one in memory. Parity is not known to be in sync.
//! 6. *Checksums* of the new data are required for a full stripe without redo data.
//! 7. *Every change of blocks is logged*, discards included, while a parity member of the stripe is
//!    live. In bitmap mode the engine logs writes only at times, and a new nonce separates these
//!    times from the others. Otherwise recovery would replay a retired entry over a later write
//!    that was not logged.
//! 8. *A member that is added or re-added brings a new nonce.* While the array is quiet, one
//!    superblock commit stores the new nonce with the new member table, and every core calls
//!    [`Log::reset`]. Otherwise old entries of the member would count again.
//! 9. *Absent members are failed before recovery.* A live member of the table that is absent, or
//!    that fails during recovery, is durably failed before the next call of [`recover()`]. Recovery
//!    changes stripes on the basis of the members it has.
//! 10. *After recovery* a new nonce is durable before the first append.
//!
//! # Why recovery is correct
//!
//! Let `e` be an entry and `s` its stripe.
//!
//! *Recovery replays every write that has begun.* If a byte of data was written, `e` is durable on
//! all parity members of `s` that were live. While `e` is not retired, its sequence is at or above
//! every tail, and no other entry of `s` overlaps it. So recovery finds `e` on each of these
//! members that is still live, and replays it. Recovery also replays entries without need: of
//! writes that have not begun, or that are retired and not followed by a write of the same rows.
//! Their data has not changed since, so the replay changes nothing.
//!
//! *Recovery replays no stale entry.* Let `b` be a later entry that overlaps `e`, with data
//! written. Then `e` was retired when `b` was made, and `b` was durable on every live parity member
//! `x` of `s`. If `b` is readable on `x`, recovery sees that it *supersedes* `e`. The tail alone
//! does not suffice: it stays below `e` while some older entry of the lane is slow, and then the
//! redo data of `e` would undo `b`. If `b` is not readable on `x`, its space was used again.
//! `lane` allows that only under a durable entry on `x` that is not being overwritten and has a
//! tail above `b`, hence above `e`. All of that is true of `x` alone, so the argument holds
//! whichever other members survive.
//!
//! *Recovery updates a member that writes skipped.* A member may hang, be skipped, and respond
//! again before its failure was committed. For recovery it is live. Every write that skipped it is
//! still in the log with its new data. Replay writes this data. A parity that was no target is
//! computed from all data of the rows.
//!
//! *A stripe with all its data needs no entry.* Recovery computes its parity from the data on the
//! members and ignores the entry. Blocks of the write are old or new, and no stale entry can
//! restore old data.
//!
//! *Units that cannot be read.* [`recover()`]'s module has the rules.
//!
//! *Recovery may crash.* Parity fits the data after any part of recovery's writes, on the same or
//! fewer members. Entries are overwritten only under a new nonce.

pub mod checksum;
pub mod entry;
mod lane;
#[allow(clippy::module_inception)]
mod log;
mod recover;
mod recovery;
mod replay;
pub(crate) mod size;
mod writer;

#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod tests;

pub use entry::Nonce;
pub use log::{AppendError, Entry, Log, Payload, Redo, Target, Ticket, max_len};
pub use recover::{PendingWrite, Report, UnreadableUnit, list, recover, unfinished};
pub use recovery::{BadRange, RecoverError, Recovery, RecoveryMember};

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
