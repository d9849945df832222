//! Disks outside the slots: spares, disks that are being rebuilt, former members that a live disk
//! has replaced.
//!
//! The array uses spares by itself. So the world asks it which disk is the live member of a slot
//! whenever it needs that, and exchanges its own disk of the slot.

use crate::disk::SimDisk;
use crate::faults;
use crate::subject::Running;
use crate::world::World;
use std::cell::RefCell;

/// The world's knowledge of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// The disk was given to the array, which may or may not use it.
    Given,
    /// The array has reported it as a spare. It stays one until it is rebuilt.
    Spare,
    /// It was a member until another disk replaced it. Some superblocks may not record that yet.
    Former,
    /// As `Former`, and the array has been assembled without it since.
    Stranger,
}

struct Extra {
    disk: SimDisk,
    role: Role,
}

/// See the module.
#[derive(Default)]
pub struct Extras(RefCell<Vec<Extra>>);

impl Extras {
    /// Every disk.
    pub fn disks(&self) -> Vec<SimDisk> {
        self.0.borrow().iter().map(|extra| extra.disk.clone()).collect()
    }

    /// Adds a disk that the array receives.
    pub fn add(&self, disk: &SimDisk) {
        self.0.borrow_mut().push(Extra { disk: disk.clone(), role: Role::Given });
    }

    /// Records that the array has accepted a disk as a spare.
    pub fn note_spare(&self, name: &str) {
        self.change(name, |role| *role = Role::Spare);
    }

    /// Records that a disk is no longer a spare, and may have been used.
    pub fn note_given(&self, name: &str) {
        self.change(name, |role| *role = Role::Given);
    }

    /// Records that the array knows a disk as a spare. A former member is one if power failed
    /// before it had filled a slot again: it is no stranger.
    fn note_found(&self, name: &str) {
        self.change(name, |role| {
            if matches!(role, Role::Former | Role::Stranger) {
                *role = Role::Given;
            }
        });
    }

    /// Returns the name of a spare; `number` selects it.
    pub fn spare(&self, number: u64) -> Option<String> {
        let extras = self.0.borrow();
        let spares: Vec<&Extra> = extras.iter().filter(|extra| extra.role == Role::Spare).collect();
        let place = number.checked_rem(spares.len() as u64)?;
        Some(block::Device::name(&spares[place as usize].disk).to_owned())
    }

    fn change(&self, name: &str, change: impl Fn(&mut Role)) {
        let mut extras = self.0.borrow_mut();
        let found = extras.iter_mut().find(|extra| block::Device::name(&extra.disk) == name);
        found.into_iter().for_each(|extra| change(&mut extra.role));
    }

    /// Exchanges the disks: `name` is now the live member of a slot that had `old`.
    fn exchange(&self, name: &str, old: &SimDisk) -> Option<SimDisk> {
        let mut extras = self.0.borrow_mut();
        let place = extras.iter().position(|extra| block::Device::name(&extra.disk) == name)?;
        let new = extras.swap_remove(place).disk;
        extras.push(Extra { disk: old.clone(), role: Role::Former });
        Some(new)
    }

    /// Settles the roles after an assembly, when every interrupted change is over. Some former
    /// members are unplugged.
    pub fn settle(&self, mut is_unplugged: impl FnMut() -> bool) {
        let mut extras = self.0.borrow_mut();
        extras.retain(|extra| !(extra.role == Role::Stranger && is_unplugged()));
        for extra in extras.iter_mut().filter(|extra| extra.role == Role::Former) {
            extra.role = Role::Stranger;
        }
    }
}

/// Asks the array for the disks of its live members, and those that it rebuilds. A disk that a slot
/// was about to get when power failed is a spare after the next start, and may fill another slot.
pub fn look(world: &World, running: &dyn Running) {
    for slot in 0..world.members() {
        let [own, _] = running.devices(slot);
        let Some(own) = own.filter(|_| running.live()[slot]) else { continue };
        let old = world.disk(slot);
        if block::Device::name(&old) == own {
            continue;
        }
        if let Some(other) = (0..world.members()).find(|other| world.has_disk(*other, &own)) {
            world.swap_disks(slot, other);
        } else if let Some(new) = world.extras.exchange(&own, &old) {
            world.set_disk(slot, new);
        }
        // The change may not be durable yet.
        if old.has_failed_write() {
            world.disk(slot).suspect();
        }
    }
    // Only now: a disk that has just lost its slot may fill one again.
    for incoming in (0..world.members()).filter_map(|slot| running.devices(slot)[1].take()) {
        world.extras.note_given(&incoming);
    }
    running.spares().iter().for_each(|name| world.extras.note_found(name));
}

/// Checks that the array finds every disk that it has acknowledged as a spare.
pub fn check_spares(world: &World, running: &dyn Running) {
    let spares = running.spares();
    for extra in world.extras.0.borrow().iter().filter(|extra| extra.role == Role::Spare) {
        let name = block::Device::name(&extra.disk);
        let is_known = spares.iter().any(|spare| spare == name) || faults::is_member(&extra.disk);
        if !is_known && !extra.disk.is_dead() && world.machine.is_on() {
            world.fail(format!("{name} was a spare, and the array does not find it: it knows {spares:?}"));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::{Filter, Plan};
    use crate::subject::{Local, Scrubbed};
    use raid::{Geometry, Level};
    use std::ops::Range;
    use std::sync::Arc;

    /// Names the disks of its slots and its spares, and does nothing.
    struct Names {
        devices: Vec<[Option<String>; 2]>,
        spares: Vec<String>,
    }

    impl Running for Names {
        fn device(&self) -> Arc<dyn block::Device> {
            unreachable!()
        }

        fn geometry(&self) -> Option<Geometry> {
            None
        }

        fn live(&self) -> Vec<bool> {
            self.devices.iter().map(|[own, _]| own.is_some()).collect()
        }

        fn fail(&self, _: usize) -> Local<'_, Result<(), String>> {
            unreachable!()
        }

        fn add<'a>(&'a self, _: usize, _: &'a SimDisk) -> Local<'a, Result<(), String>> {
            unreachable!()
        }

        fn scrub(&self, _: bool) -> Local<'_, Result<Scrubbed, String>> {
            unreachable!()
        }

        fn strips_at(&self, _: usize) -> Option<Range<u64>> {
            None
        }

        fn resync(&self) -> Local<'_, Result<(), String>> {
            unreachable!()
        }

        fn grow(&self) -> Local<'_, Result<(), String>> {
            unreachable!()
        }

        fn devices(&self, slot: usize) -> [Option<String>; 2] {
            self.devices[slot].clone()
        }

        fn spares(&self) -> Vec<String> {
            self.spares.clone()
        }

        fn stop(&self) -> Local<'_, Result<(), String>> {
            unreachable!()
        }
    }

    /// Whether a former member is still there after two assemblies, when strangers are unplugged.
    /// `incoming` and `spares`: what the array says of it while or after it was replaced.
    fn is_kept(incoming: Option<&str>, spares: &[&str]) -> bool {
        let shape = Plan::draw(1, &Filter { levels: vec![Level::Raid1], ..Filter::default() }).shape;
        let world = World::new(1, &shape, shape.geometry.capacity());
        let name = |disk: &SimDisk| Some(block::Device::name(disk).to_owned());
        let mut devices: Vec<_> = world.disks().iter().map(|disk| [name(disk), None]).collect();
        devices[0] = [name(&world.new_extra()), incoming.map(Into::into)];
        look(&world, &Names { devices: devices.clone(), spares: Vec::new() });
        devices[0][1] = None; // power fails, and the disk is a spare
        for _ in 0..2 {
            let spares = spares.iter().map(ToString::to_string).collect();
            look(&world, &Names { devices: devices.clone(), spares });
            world.extras.settle(|| true);
        }
        world.extras.disks().iter().any(|disk| block::Device::name(disk) == "disk0")
    }

    #[test]
    fn a_former_member_that_the_array_uses_again_is_not_unplugged() {
        assert!(!is_kept(None, &[]), "it is a stranger");
        assert!(is_kept(Some("disk0"), &[]), "it was filling the slot");
        assert!(is_kept(None, &["disk0"]), "it is a spare");
    }
}
