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
        let [own, incoming] = running.devices(slot);
        if let Some(incoming) = incoming {
            world.extras.note_given(&incoming);
        }
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
