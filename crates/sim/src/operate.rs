//! Commands of an operator, judged.

use crate::boot::HANGS_NS;
use crate::commands::{Command, Said};
use crate::disk::SimDisk;
use crate::gate::within;
use crate::subject::Subject;
use crate::world::World;
use std::rc::Rc;

/// Does a command to an array that is stopped.
pub(crate) async fn run(world: &World, subject: &Rc<dyn Subject>, disks: &[SimDisk], command: Command) {
    let mut spare = None;
    match command {
        Command::Fail(slot) if world.is_lost(slot) || !world.may_lose(slot) => return,
        Command::Fail(slot) => world.note_loss(slot),
        Command::RemoveSpare(number) => {
            spare = world.extras.spare(number);
            let Some(name) = &spare else { return };
            world.extras.note_given(name);
        }
        Command::SetReadErrors(value) => world.change_budget(|budget| budget.begin(value)),
        _ => {}
    }
    let writes = world.machine.writes_started();
    let done = within(HANGS_NS, subject.command(disks, command, spare.clone())).await;
    if !world.machine.is_on() {
        return;
    }
    let Some(said) = done else { return world.fail(format!("{command:?} hangs")) };
    let has_written = world.machine.writes_started() > writes;
    let is_done = said == Said::Done;
    world.count(|stats| stats.commands += u64::from(is_done));
    if let (Command::SetReadErrors(_), true) = (command, is_done || !has_written) {
        world.change_budget(|budget| budget.end(is_done));
    }
    if let (Some(name), false) = (&spare, is_done || has_written) {
        world.extras.note_spare(name);
    }
    if has_written && !(is_done && command.is_modifying()) {
        return world.fail(format!("{command:?} has written: {said:?}"));
    }
    let is_damaged = world.is_damaged() || world.is_any_beyond() || !world.is_whole();
    let is_expected = match said {
        Said::Done => true,
        Said::NotClean => !world.was_stopped(),
        Said::Needed | Said::Nothing => is_damaged || !world.was_stopped(),
        Said::Wrong(_) => false,
        // Damage may keep a log or a list from being looked at.
        Said::Failed(_) => is_damaged,
    };
    if !is_expected {
        world.fail(format!("{command:?}: {said:?}"));
    }
}
