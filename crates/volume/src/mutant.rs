//! Broken variants of pools that the simulator must catch.
//!
//! Each names a rule that looks as if it could be left out. The code that keeps the rule asks [`is`] whether it is to
//! be broken; without the feature `mutants` that is a constant `false` and the question costs nothing.

/// A rule that is broken. At most one is, in the whole process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Mutant {
    /// A table is committed with one copy only.
    OneCopy = 1,
    /// The copies of a table are written without a flush between them.
    CopiesAtOnce,
    /// Both sets get each table: nothing is left while it is written.
    BothSets,
    /// Copies that are damaged or torn stay so when the pool is opened.
    NoMend,
    /// The newest whole table counts, whether or not a newer one may be lost.
    TrustLoneSet,
    /// A change that failed leaves its copies of the table.
    NoTakeBack,
    /// Room is given away before it reads as zeroes.
    NoZeroing,
    /// The table that gives room away is written before the zeroes in that room are durable.
    ZeroesNotFlushed,
    /// A change is acknowledged before the table is durable.
    CommitNotFlushed,
    /// Room that is reserved for one volume can be reserved for another.
    ReservedIsFree,
    /// A volume is deleted although it is in use.
    DeleteInUse,
    /// What a copy has behind its end in its last unit is not zeroed: a growth shows it.
    CopyEndNotZeroed,
    /// The rest of a volume that moves is copied while its users still write.
    CopyBeforeHold,
    /// A move is done by its record before the copy has the volume's identity.
    DoneBeforeSwitch,
    /// A record that says that a move is not done counts more than the pool that says it is.
    OlderRecordCounts,
    /// The copy of a move that failed at its end keeps the volume's identity.
    IdentityKept,
    /// Copies that no move will finish stay.
    LeftoversStay,
    /// The record of a move does not stand in the older state file when the copy becomes the volume.
    RecordOnce,
}

impl Mutant {
    /// Every mutant.
    pub const ALL: [Mutant; 18] = [
        Mutant::OneCopy,
        Mutant::CopiesAtOnce,
        Mutant::BothSets,
        Mutant::NoMend,
        Mutant::TrustLoneSet,
        Mutant::NoTakeBack,
        Mutant::NoZeroing,
        Mutant::ZeroesNotFlushed,
        Mutant::CommitNotFlushed,
        Mutant::ReservedIsFree,
        Mutant::DeleteInUse,
        Mutant::CopyEndNotZeroed,
        Mutant::CopyBeforeHold,
        Mutant::DoneBeforeSwitch,
        Mutant::OlderRecordCounts,
        Mutant::IdentityKept,
        Mutant::LeftoversStay,
        Mutant::RecordOnce,
    ];
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
