//! Commands of an operator, judged.

use crate::boot::HANGS_NS;
use crate::commands::{Command, Said};
use crate::faults;
use crate::gate::within;
use crate::newcomers;
use crate::subject::Subject;
use crate::world::World;
use std::rc::Rc;

/// Does a command to an array that is stopped.
pub(crate) async fn run(world: &World, subject: &Rc<dyn Subject>, command: Command) {
    let mut disks = world.plugged_disks();
    let mut named = None;
    match command {
        Command::Fail(slot) if world.is_lost(slot) || !world.may_lose(slot) => return,
        Command::Fail(slot) => world.note_loss(slot),
        Command::RemoveSpare(number) => {
            named = world.extras.spare(number);
            let Some(name) = &named else { return };
            world.extras.note_given(name);
        }
        Command::AddSpare => {
            let disk = world.new_extra();
            newcomers::soil(world, std::slice::from_ref(&disk));
            named = Some(block::Device::name(&disk).to_owned());
            disks.push(disk);
        }
        Command::ReAdd(slot) => {
            let disk = world.disk(slot);
            if !world.is_lost(slot) || disk.is_dead() || world.is_beyond(world.shape.group_of(slot)) {
                return;
            }
            world.note_loss(slot); // a failed write counts for a disk that fails now
            world.note_giving_up(slot);
            named = Some(block::Device::name(&disk).to_owned());
        }
        Command::SetReadErrors(value) => world.change_budget(|budget| budget.begin(value)),
        _ => {}
    }
    let writes = world.machine.writes_started();
    let done = within(HANGS_NS, subject.command(&disks, command, named.clone())).await;
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
    match (command, &named) {
        (Command::RemoveSpare(_), Some(name)) if !is_done && !has_written => world.extras.note_spare(name),
        (Command::AddSpare, Some(name)) if is_done => {
            world.extras.note_spare(name);
            world.count(|stats| stats.spares += 1);
        }
        (Command::ReAdd(slot), _) if is_done => {
            world.note_live(slot);
            world.count(|stats| stats.rebuilds += 1);
        }
        _ => {}
    }
    if has_written && !(is_done && command.is_modifying() || command.starts_array()) {
        return world.fail(format!("{command:?} has written: {said:?}"));
    }
    // A slot may have had the spare as its member for some time.
    let was_member = |name: &String| {
        let disk = disks.iter().find(|disk| block::Device::name(*disk) == name);
        disk.is_some_and(faults::is_member)
    };
    let is_damaged = world.is_damaged() || world.is_any_beyond() || !world.is_whole();
    let is_expected = match said {
        Said::Done => true,
        Said::NotClean => !world.was_stopped(),
        Said::Nothing if named.as_ref().is_some_and(was_member) => true,
        Said::Needed | Said::Nothing => is_damaged || !world.was_stopped(),
        Said::Wrong(_) => false,
        // Damage may keep a log or a list from being looked at.
        Said::Failed(_) => is_damaged,
    };
    if !is_expected {
        world.fail(format!("{command:?}: {said:?}"));
    }
}
