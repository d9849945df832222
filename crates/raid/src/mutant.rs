//! Broken variants of the engine that the simulator must catch.
//!
//! Each mutant breaks a rule that seems unnecessary. The code that keeps the rule asks [`is`]
//! whether to break it. Without the feature `mutants` the answer is a constant `false` and costs
//! nothing.
//!
//! ```ignore
//! if sequence < tail && !mutant::is(Mutant::NoTailRule) { continue }
//! ```

/// A rule to break. At most one is broken in a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Mutant {
    /// Recovery replays entries below the lane's highest tail, and stale ones overwrite newer data.
    NoTailRule = 1,
    /// Healthy full stripes are written without a header in the log.
    FullStripesUnlogged,
    /// Recovery replays an entry with a copy on any of its parity members, not on all present ones.
    ReplayOnAnyParity,
    /// A parity array logs nothing and relies on the write-intent bitmap, but claims to be `ppl`.
    BitmapOnly,
    /// Entries carry no new data, neither for several strips nor in a degraded group.
    NoRedo,
    /// The nonce is the same at every assembly: entries of an earlier assembly count.
    NoNonce,
    /// Memory that the caller may change while the write is in flight is not copied.
    NoSnapshot,
    /// Overlapping rectangles of a stripe run at the same time.
    NoRowLock,
    /// Data and parity are written without FUA.
    NoFua,
    /// A write does not wait until its mark in the write-intent bitmap is durable.
    IntentBitmapNotAwaited,
    /// All copies of a member's superblock are written at once.
    SuperblocksAllAtOnce,
    /// A lane's space is used again before the write that its entry covers has ended.
    RetireEarly,
    /// A rebuild copies a stripe without locking its rows against writes.
    RebuildWithoutLock,
    /// A write is acknowledged before the failure of a member that missed it is durable.
    AckBeforeMemberOut,
    /// A scrub recomputes parity from data although parity identifies the wrong strip.
    ScrubTrustsData,
    /// A re-added member counts as complete: writes that it missed are not copied.
    NoResync,
    /// A write that misses a member does not mark its region.
    StaleNotMarked,
    /// One superblock commit contains the array's new size and the members' new sizes.
    GrowInOneStep,
    /// The added range of an array that grows counts as zeroes, whatever its content.
    GrowWithoutZeroes,
    /// Groups are added by superblocks that members get before all new devices have theirs.
    GroupInOneStep,
    /// Joined writes are acknowledged before the joint write has ended.
    AckBeforeJointWrite,
    /// A reshape moves the next window before superblocks record the previous one.
    CursorNotAwaited,
    /// Requests access bytes that a reshape is moving.
    CrossFreely,
    /// Recovery replays the old geometry's log onto bytes that have the new geometry.
    OldLogReplayed,
    /// Changes by recovery are not marked for members that are missing at the start.
    ReplayedNotStale,
    /// Log space is used again once its entries are retired in memory, before an entry on the
    /// member records that.
    SpaceFreedInMemory,
    /// Marks of the write-intent bitmap are cleared while writes are in flight there.
    MarksClearedInFlight,
    /// A block is removed from the bad-block list before the write that repairs it is durable.
    BadClearedEarly,
    /// Zeroes that miss a member do not mark their region.
    ZeroesNotStale,
    /// A commit that marks a member as failed omits other failing members.
    CommitIgnoresOthers,
    /// A member is marked as failed if it cannot read one block.
    OutForReadError,
    /// A read-only start writes pages of the write-intent bitmap that a member lacks.
    ReadOnlyRepairs,
    /// Superblocks name the copy of a member before the copy has one.
    CopyNotIntroduced,
    /// A creation writes superblocks that can be assembled to one member after the other, at once.
    CreatedInOneStep,
    /// A creation leaves the write-intent bitmap, bad blocks and log of a former array.
    OldAreasKept,
    /// A write to all live copies of a mirror omits an incoming device.
    IncomingCopyForgotten,
    /// A core writes to the copies of a stripe that another core owns, and locks no rows.
    OtherCoresUnlocked,
    /// A core writes to stripes of another core also when the write has an entry in the log, or
    /// members are missing or incoming.
    OtherCoresLog,
}

impl Mutant {
    /// Every mutant.
    pub const ALL: [Mutant; 38] = [
        Mutant::NoTailRule,
        Mutant::FullStripesUnlogged,
        Mutant::ReplayOnAnyParity,
        Mutant::BitmapOnly,
        Mutant::NoRedo,
        Mutant::NoNonce,
        Mutant::NoSnapshot,
        Mutant::NoRowLock,
        Mutant::NoFua,
        Mutant::IntentBitmapNotAwaited,
        Mutant::SuperblocksAllAtOnce,
        Mutant::RetireEarly,
        Mutant::RebuildWithoutLock,
        Mutant::AckBeforeMemberOut,
        Mutant::ScrubTrustsData,
        Mutant::NoResync,
        Mutant::StaleNotMarked,
        Mutant::GrowInOneStep,
        Mutant::GrowWithoutZeroes,
        Mutant::GroupInOneStep,
        Mutant::AckBeforeJointWrite,
        Mutant::CursorNotAwaited,
        Mutant::CrossFreely,
        Mutant::OldLogReplayed,
        Mutant::ReplayedNotStale,
        Mutant::SpaceFreedInMemory,
        Mutant::MarksClearedInFlight,
        Mutant::BadClearedEarly,
        Mutant::ZeroesNotStale,
        Mutant::CommitIgnoresOthers,
        Mutant::OutForReadError,
        Mutant::ReadOnlyRepairs,
        Mutant::CopyNotIntroduced,
        Mutant::CreatedInOneStep,
        Mutant::OldAreasKept,
        Mutant::IncomingCopyForgotten,
        Mutant::OtherCoresUnlocked,
        Mutant::OtherCoresLog,
    ];

    /// Whether only growing arrays can show the mutant.
    pub fn is_about_growth(self) -> bool {
        matches!(self, Mutant::GrowInOneStep | Mutant::GrowWithoutZeroes)
    }

    /// Whether only arrays that get groups of new members can show it.
    pub fn is_about_groups(self) -> bool {
        self == Mutant::GroupInOneStep
    }

    /// Whether only arrays during a reshape can show it.
    pub fn is_about_shapes(self) -> bool {
        matches!(self, Mutant::CursorNotAwaited | Mutant::CrossFreely | Mutant::OldLogReplayed)
    }

    /// Whether only arrays that start read-only, with damaged metadata, can show it.
    pub fn is_about_looks(self) -> bool {
        self == Mutant::ReadOnlyRepairs
    }

    /// Whether only replacements of live members can show the mutant.
    pub fn is_about_operations(self) -> bool {
        matches!(self, Mutant::CopyNotIntroduced | Mutant::IncomingCopyForgotten)
    }

    /// Whether only creations on disks that hold old data can show the mutant.
    pub fn is_about_creation(self) -> bool {
        matches!(self, Mutant::CreatedInOneStep | Mutant::OldAreasKept)
    }

    /// Whether only streams of writes can show the mutant.
    pub fn is_about_streams(self) -> bool {
        matches!(self, Mutant::AckBeforeJointWrite)
    }
}

base::choice_of_mutant!(Mutant);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_rule_is_broken_unless_it_is_chosen() {
        assert!(Mutant::ALL.iter().all(|mutant| !is(*mutant)));
        assert!(Mutant::ALL.iter().enumerate().all(|(i, mutant)| *mutant as usize == i + 1));
    }
}
