//! A request whose operation was judged, and the judgement of its body.

use super::answer::Failure;
use super::asks::Asked;
use super::roles::{Caller, Row};

/// A request whose operation its caller may ask for.
#[derive(Clone, Debug)]
pub struct Judged {
    pub(super) caller: Caller,
    pub(super) row: &'static Row,
}

impl Judged {
    /// Judges what a body asks for.
    ///
    /// # Errors
    /// When the role may not ask for that.
    pub fn check(&self, asked: &[Asked]) -> Result<(), Failure> {
        let Judged { caller, row } = self;
        // A provisioner may say its own label.
        let own = Asked::label(&caller.label);
        for asked in asked.iter().filter(|asked| **asked != own) {
            debug_assert!(row.asks.contains(&asked.ask), "{} {}: {asked:?}", row.method, row.path);
            if !asked.ask.roles().contains(&caller.role) {
                return Err(caller.refuse(&asked.what, asked.ask.roles()));
            }
        }
        Ok(())
    }
}
