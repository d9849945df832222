//! Broken variants of pools that the simulator must catch.
//!
//! Each mutant breaks a rule that looks dispensable. The code that keeps the rule asks [`is`]
//! whether to break it. Without the feature `mutants` the answer is a constant `false` and costs
//! nothing.

/// A broken rule. At most one is broken in the whole process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Mutant {
    /// A table is committed with one copy only.
    OneCopy = 1,
    /// The copies of a table are written without a flush between them.
    CopiesAtOnce,
    /// Both sets get each table: no older table remains during the write.
    BothSets,
    /// The opening leaves damaged or torn copies as they are.
    NoMend,
    /// The newest whole table counts, even if a newer one may be lost.
    TrustLoneSet,
    /// A failed change leaves its copies of the table.
    NoTakeBack,
    /// Room is allocated without zeroing.
    NoZeroing,
    /// The table that allocates room is written before its zeroes are durable.
    ZeroesNotFlushed,
    /// A change is acknowledged before the table is durable.
    CommitNotFlushed,
    /// Reserved room can be reserved again for another volume.
    ReservedIsFree,
    /// A volume is deleted although it is in use.
    DeleteInUse,
    /// The rest of a copy's last unit is not zeroed, and a growth exposes it.
    CopyEndNotZeroed,
    /// The rest of a migrating volume is copied while its users still write.
    CopyBeforeHold,
    /// The record of a migration says done before the copy has the volume's identity.
    DoneBeforeSwitch,
    /// The copy of a migration that failed at its end keeps the volume's identity.
    IdentityKept,
    /// Copies that no migration will finish stay.
    LeftoversStay,
    /// The record of a migration is not due in the older state file when the copy becomes the
    /// volume.
    DueOnce,
    /// Copies that the opening could neither read nor rewrite count as rewritten.
    UnmendedForgotten,
    /// A table gets a number that a copy of a failed change may have.
    NumberUsedAgain,
    /// A volume stays after a failed change that may give its identity to the copy, and no record
    /// says so.
    StayNotRecorded,
    /// The record of a migration is not due when the copy becomes the volume.
    DueNotRecorded,
    /// A start uses the old place of a volume although the new one may count.
    DueIgnored,
    /// Only the newer state file says that a volume stays.
    StayOnce,
    /// Only the newer state file says that a migration is done.
    DoneOnce,
}

impl Mutant {
    /// Every mutant.
    pub const ALL: [Mutant; 24] = [
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
        Mutant::IdentityKept,
        Mutant::LeftoversStay,
        Mutant::DueOnce,
        Mutant::UnmendedForgotten,
        Mutant::NumberUsedAgain,
        Mutant::StayNotRecorded,
        Mutant::DueNotRecorded,
        Mutant::DueIgnored,
        Mutant::StayOnce,
        Mutant::DoneOnce,
    ];

    /// Whether requests must fail often to reveal it.
    pub fn needs_faults(self) -> bool {
        matches!(
            self,
            Mutant::UnmendedForgotten | Mutant::NumberUsedAgain | Mutant::StayNotRecorded | Mutant::StayOnce
        )
    }

    /// Whether volumes must move often to reveal it.
    pub fn needs_moves(self) -> bool {
        matches!(self, Mutant::StayNotRecorded | Mutant::DueOnce | Mutant::StayOnce | Mutant::DoneOnce)
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
