//! The members of an array that no process runs, as a host.

use super::args::GrowArgs;
use super::host::{Host, Outcome};
use super::offline::{Members, edit, fill, grow, show};
use crate::error::Error;
use api::{Array, ArrayAction};
use hosting::vocabulary;

impl Host for Members<'_> {
    fn show(&mut self) -> Result<Vec<Array>, Error> {
        show::arrays(Some(self.array), self.place)
    }

    fn act(&mut self, action: ArrayAction) -> Result<Outcome, Error> {
        match action {
            ArrayAction::Fail { members } => edit::fail(self, members),
            ArrayAction::Remove { members } => edit::remove(self, members),
            ArrayAction::Add { devices, force, global } => edit::add(self, &devices, force, global),
            ArrayAction::ReAdd { devices } => fill::re_add(self, &devices),
            ArrayAction::Replace { member, device, force } => fill::replace(self, &member, &device, force),
            ArrayAction::Grow { member_bytes } => grow::run(self, member_bytes),
            ArrayAction::Set { scrub_period_s, scrub_window, read_error_budget } => {
                edit::set(self, &vocabulary::maintenance(scrub_period_s, scrub_window, read_error_budget))
            }
            ArrayAction::Scrub { .. } | ArrayAction::Pause | ArrayAction::Resume | ArrayAction::Cancel => {
                Err(self.not_running())
            }
        }
    }

    fn extend(&mut self, args: &GrowArgs) -> Result<Outcome, Error> {
        match args.goal() {
            Some(goal) => grow::restripe(self, args, goal),
            None => grow::add(self, args),
        }
    }

    fn stop(&mut self) -> Result<Outcome, Error> {
        Err(self.not_running())
    }
}

impl Members<'_> {
    fn not_running(&self) -> Error {
        Error::Runtime(format!("array {}: it does not run", self.array))
    }
}
