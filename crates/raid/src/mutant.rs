//! Broken variants of the engine that the simulator must catch.
//!
//! Each names a rule that looks as if it could be left out. The code that keeps the rule asks [`is`] whether it is to
//! be broken; without the feature `mutants` that is a constant `false` and the question costs nothing.
//!
//! ```ignore
//! if sequence < tail && !mutant::is(Mutant::NoTailRule) { continue }
//! ```

/// A rule that is broken. At most one is, in the whole process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Mutant {
    /// Recovery replays entries below the lane's highest tail: stale ones resurface.
    NoTailRule = 1,
    /// Healthy full stripes are written without a header in the log.
    FullStripesUnlogged,
    /// An entry is replayed when any of its parity members holds it, not all that are present.
    ReplayOnAnyParity,
    /// A parity array logs nothing and trusts the region map alone, but claims to be `ppl`.
    BitmapOnly,
    /// Entries carry no new data, neither for several strips nor in a degraded group.
    NoRedo,
    /// The nonce stays the same at every assembly: entries of an earlier one are taken for this one's.
    NoNonce,
    /// Parity is computed from the caller's memory, which may change while the write is in flight.
    NoSnapshot,
    /// Overlapping rectangles of a stripe run at the same time.
    NoRowLock,
    /// Data and parity are written without FUA.
    NoFua,
    /// The region map is not durable before the write that it covers.
    RegionMapNotAwaited,
    /// All copies of a member's superblock are written at once.
    SuperblocksAllAtOnce,
    /// A lane's space is used again before the write that its entry covers has ended.
    RetireEarly,
    /// A rebuild copies a stripe without locking its rows against writes.
    RebuildWithoutLock,
    /// A write is acknowledged though a member that missed it is not known to be out.
    AckBeforeMemberOut,
    /// A scrub makes parity fit the data though parity tells which strip is wrong.
    ScrubTrustsData,
    /// A former member that comes back is taken as it is: what was written while it was out is not copied.
    NoResync,
    /// A write that misses a member does not mark its region.
    StaleNotMarked,
    /// An array that grows says so in the same superblock that says how large its members are.
    GrowInOneStep,
    /// What is added to an array that grows is taken for zeroes, whatever is there.
    GrowWithoutZeroes,
    /// Groups are added by superblocks that members have before all new devices have theirs.
    GroupInOneStep,
    /// Writes that were joined are acknowledged before the joint write has ended.
    AckBeforeJointWrite,
    /// The next window of a change of shape is moved before superblocks say that the last one was.
    CursorNotAwaited,
    /// Requests go to bytes that are being moved.
    CrossFreely,
    /// What a crash has left in the old shape's log is replayed where bytes have the new shape.
    OldLogReplayed,
    /// What the log's replay changes is not marked for members that are missing at the start.
    ReplayedNotStale,
    /// Log space is used again once its entries are retired in memory, before an entry on the member says so.
    SpaceFreedInMemory,
    /// Marks of the region map are cleared though writes are in flight there.
    MarksClearedInFlight,
    /// A block is no longer noted as bad before the write that mends it is durable.
    BadClearedEarly,
    /// Zeroes that miss a member do not mark their region.
    ZeroesNotStale,
    /// A commit that takes a member out forgets the others that are failing.
    CommitIgnoresOthers,
    /// A member is taken out when it cannot read one block.
    OutForReadError,
    /// A read-only start writes pages of the region map that a member lacks.
    ReadOnlyRepairs,
}

impl Mutant {
    /// Every mutant.
    pub const ALL: [Mutant; 32] = [
        Mutant::NoTailRule,
        Mutant::FullStripesUnlogged,
        Mutant::ReplayOnAnyParity,
        Mutant::BitmapOnly,
        Mutant::NoRedo,
        Mutant::NoNonce,
        Mutant::NoSnapshot,
        Mutant::NoRowLock,
        Mutant::NoFua,
        Mutant::RegionMapNotAwaited,
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
    ];

    /// Whether it can only show where arrays grow.
    pub fn is_about_growth(self) -> bool {
        matches!(self, Mutant::GrowInOneStep | Mutant::GrowWithoutZeroes)
    }

    /// Whether it can only show where arrays get groups of new members.
    pub fn is_about_groups(self) -> bool {
        self == Mutant::GroupInOneStep
    }

    /// Whether it can only show where arrays change their shape.
    pub fn is_about_shapes(self) -> bool {
        matches!(self, Mutant::CursorNotAwaited | Mutant::CrossFreely | Mutant::OldLogReplayed)
    }

    /// Whether it can only show where arrays are started read-only, with damaged metadata.
    pub fn is_about_looks(self) -> bool {
        self == Mutant::ReadOnlyRepairs
    }

    /// Whether it can only show where writes come in streams.
    pub fn is_about_streams(self) -> bool {
        matches!(self, Mutant::AckBeforeJointWrite)
    }
}

#[cfg(feature = "mutants")]
static CHOSEN: std::sync::atomic::AtomicU8 = std::sync::atomic::AtomicU8::new(0);

/// Chooses the rule that is broken from now on, in the whole process; `None` breaks none.
#[cfg(feature = "mutants")]
pub fn choose(mutant: Option<Mutant>) {
    CHOSEN.store(mutant.map_or(0, |mutant| mutant as u8), std::sync::atomic::Ordering::Relaxed);
}

/// Nothing can be chosen without the feature `mutants`.
#[cfg(not(feature = "mutants"))]
pub fn choose(_: Option<Mutant>) {}

/// Whether the rule is broken.
#[cfg(feature = "mutants")]
#[inline]
pub fn is(mutant: Mutant) -> bool {
    CHOSEN.load(std::sync::atomic::Ordering::Relaxed) == mutant as u8
}

/// Whether the rule is broken: never, without the feature `mutants`.
#[cfg(not(feature = "mutants"))]
#[inline(always)]
pub const fn is(_: Mutant) -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_rule_is_broken_unless_it_is_chosen() {
        assert!(Mutant::ALL.iter().all(|mutant| !is(*mutant)));
        assert!(Mutant::ALL.iter().enumerate().all(|(i, mutant)| *mutant as usize == i + 1));
    }
}
