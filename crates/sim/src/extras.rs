//! Disks beside those of the slots: spares, disks that are being filled, former members that a live one has replaced.
//!
//! A keeper takes spares by itself. So the world asks the array which disk is the live member of a slot, whenever it looks
//! at it, and exchanges its own disk of the slot for that one.

use crate::disk::SimDisk;
use crate::faults;
use crate::subject::Running;
use crate::world::World;
use std::cell::RefCell;

/// What a disk is, as far as the world knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// It was given to the array, which may have it or not.
    Given,
    /// The array has said that it is a spare. It stays one until it is filled.
    Spare,
    /// It was a member until another disk took its place. The superblocks may not all say so.
    Former,
    /// The same, and the array has been assembled without it since.
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
    /// All of these disks.
    pub fn disks(&self) -> Vec<SimDisk> {
        self.0.borrow().iter().map(|extra| extra.disk.clone()).collect()
    }

    /// A disk that the array is given.
    pub fn add(&self, disk: &SimDisk) {
        self.0.borrow_mut().push(Extra { disk: disk.clone(), role: Role::Given });
    }

    /// The array has taken a disk as a spare.
    pub fn note_spare(&self, name: &str) {
        self.change(name, |role| *role = Role::Spare);
    }

    /// A disk is no spare any more, and may be gone.
    pub fn note_given(&self, name: &str) {
        self.change(name, |role| *role = Role::Given);
    }

    /// The name of a spare; `number` selects it.
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

    /// A disk of that name is the live member of a slot now; `old` was before.
    fn exchange(&self, name: &str, old: &SimDisk) -> Option<SimDisk> {
        let mut extras = self.0.borrow_mut();
        let place = extras.iter().position(|extra| block::Device::name(&extra.disk) == name)?;
        let new = extras.swap_remove(place).disk;
        extras.push(Extra { disk: old.clone(), role: Role::Former });
        Some(new)
    }

    /// The array has been assembled and every change that was cut off is over. Disks that were members before are not plugged
    /// in any more, some of them.
    pub fn settle(&self, mut is_unplugged: impl FnMut() -> bool) {
        let mut extras = self.0.borrow_mut();
        extras.retain(|extra| !(extra.role == Role::Stranger && is_unplugged()));
        for extra in extras.iter_mut().filter(|extra| extra.role == Role::Former) {
            extra.role = Role::Stranger;
        }
    }
}

/// The array says which disks its live members are, and which it fills.
pub fn look(world: &World, running: &dyn Running) {
    for slot in 0..world.members() {
        let [own, incoming] = running.devices(slot);
        if let Some(incoming) = incoming {
            world.extras.note_given(&incoming);
        }
        let Some(own) = own.filter(|_| running.live()[slot]) else { continue };
        let old = world.disk(slot);
        if block::Device::name(&old) != own
            && let Some(new) = world.extras.exchange(&own, &old)
        {
            // The change may not be durable yet.
            if old.has_failed_write() {
                new.suspect();
            }
            world.set_disk(slot, new);
        }
    }
}

/// Every disk that the array has acknowledged as a spare must be found again.
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
