//! What an operator does to an array that is stopped, with the code of the commands (`raid::admin`). Power may go in all of
//! it: afterwards the array is as it was before a command, or as after it.

use crate::rng::Rng;
use raid::metadata::{Maintenance, MaintenanceChange};

/// A command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// A member is taken out.
    Fail(usize),
    /// All members that are out are removed.
    RemoveFailed,
    /// A spare is let go; the number selects it.
    RemoveSpare(u64),
    /// The budget of read errors changes.
    SetReadErrors(u32),
    /// Metadata is looked at, and what a crash has left in the log.
    Examine,
    /// Metadata and parity are checked.
    Check,
}

/// What a command has come to.
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

    /// Whether it may write.
    pub fn is_modifying(self) -> bool {
        !matches!(self, Command::Examine | Command::Check)
    }
}

/// What an array's budget of read errors may be: the last that was set, and those that were being set when power went.
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
