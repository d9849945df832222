//! An operator's commands on an array that is stopped, with the code of the commands
//! (`raid::admin`). Power may go in all of it: afterwards the array is as it was before a command,
//! or as after it.

use base::Rng;
use raid::metadata::{Maintenance, MaintenanceChange};

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// A member is marked as failed.
    Fail(usize),
    /// All failed members are removed.
    RemoveFailed,
    /// A spare is removed; the number selects it.
    RemoveSpare(u64),
    /// The budget of read errors changes.
    SetReadErrors(u32),
    /// A disk with old data becomes a spare.
    AddSpare,
    /// The former member of a slot is re-added: the array starts, rebuilds it, and stops.
    ReAdd(usize),
    /// Metadata is looked at, and what a crash has left in the log.
    Examine,
    /// Metadata and parity are checked.
    Check,
}

/// The result of a command.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Said {
    /// It is done.
    Done,
    /// It was refused because the array was not stopped cleanly.
    NotClean,
    /// It was refused because the array needs what it is about.
    Needed,
    /// There is nothing to do it with.
    Nothing,
    /// Something is wrong with the array: a sentence.
    Wrong(String),
    /// Anything else.
    Failed(String),
}

impl Command {
    /// Any command. `members`: of the array.
    pub fn draw(rng: &mut Rng, members: u64) -> Command {
        match rng.below(9) {
            0..3 => Command::Fail(rng.below(members) as usize),
            3 => Command::RemoveFailed,
            4 => Command::RemoveSpare(rng.draw()),
            5 | 6 => Command::SetReadErrors(1000 + rng.below(1000) as u32),
            7 => Command::Examine,
            _ => Command::Check,
        }
    }

    /// A command that adds a disk. `members`: of the array.
    pub fn draw_addition(rng: &mut Rng, members: u64) -> Command {
        match rng.below(3) {
            0 => Command::AddSpare,
            _ => Command::ReAdd(rng.below(members) as usize),
        }
    }

    /// Whether the command starts the array, and may write before it fails.
    pub fn starts_array(self) -> bool {
        matches!(self, Command::ReAdd(_))
    }

    /// Whether it may write.
    pub fn is_modifying(self) -> bool {
        !matches!(self, Command::Examine | Command::Check)
    }
}

/// An array's possible budgets of read errors: the last that was set, and those that were being set
/// when power went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Budget {
    last: Option<u32>,
    others: [Option<u32>; 8],
}

impl Budget {
    /// It is being set.
    pub fn begin(&mut self, value: u32) {
        self.others.rotate_right(1);
        self.others[0] = Some(value);
    }

    /// It was set, or was not.
    pub fn end(&mut self, is_set: bool) {
        let value = self.others[0].take();
        match is_set {
            true => (self.last, self.others) = (value, [None; 8]),
            false => self.others.rotate_left(1),
        }
    }

    /// The array says what it is; whether that may be.
    pub fn note(&mut self, value: u32) -> bool {
        let before = self.last.unwrap_or(Maintenance::default().read_errors);
        let may_be = value == before || self.others.contains(&Some(value));
        (self.last, self.others) = (Some(value), [None; 8]);
        may_be
    }
}

/// The change that sets a budget.
pub fn budget(value: u32) -> MaintenanceChange {
    MaintenanceChange { read_errors: Some(value), ..MaintenanceChange::default() }
}
