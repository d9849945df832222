//! Broken variants of tables that the simulator must catch.
//!
//! Each mutant breaks a rule that looks dispensable. The code that keeps the rule asks [`is`]
//! whether to break it. Without the feature `mutants` the answer is a constant `false` and costs
//! nothing.

/// A broken rule. At most one is broken in the whole process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Mutant {
    /// A grace period ends at once.
    NoGrace = 1,
    /// A grace period waits for the requests of the calling core only.
    GraceOfOneCore,
    /// Several tasks hold the lock of a slot.
    NoSlotLock,
    /// A slot that a task has locked is changed by another one that takes no lock.
    LockNotSeen,
    /// A hold does not reach other cores.
    HoldOfOneCore,
    /// An evicted leaf stays in the directories of other cores.
    NoForgetting,
    /// A core keeps a leaf that was evicted while it was on its way.
    StaleFetch,
    /// A leaf is evicted without being saved.
    DirtyEviction,
    /// A leaf is evicted while slots of it are locked.
    LockedEviction,
    /// A flush does not wait for the save of another flush.
    FlushOvertakes,
    /// An entry that changes while its leaf is saved counts as saved.
    ChangeDuringSave,
    /// A failed save is forgotten.
    FailedSave,
}

impl Mutant {
    /// Every mutant.
    pub const ALL: [Mutant; 12] = [
        Mutant::NoGrace,
        Mutant::GraceOfOneCore,
        Mutant::NoSlotLock,
        Mutant::LockNotSeen,
        Mutant::HoldOfOneCore,
        Mutant::NoForgetting,
        Mutant::StaleFetch,
        Mutant::DirtyEviction,
        Mutant::LockedEviction,
        Mutant::FlushOvertakes,
        Mutant::ChangeDuringSave,
        Mutant::FailedSave,
    ];
}

base::choice_of_mutant!(Mutant);
