//! State that outlives a boot: disks, and the oracle's knowledge of the volumes on them.

use super::damage::Saved;
use super::folder::SimFolder;
use super::plan::Shape;
use crate::disk::{DiskConfig, SimDisk};
use crate::gate::Gate;
use crate::machine::Machine;
use crate::oracle::Oracle;
use crate::user::{Disk, Host};
use crate::world::Stats;
use base::{Rng, mix};
use block::IoError;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::Arc;
use volume::Uuid;
use volume::store::RESERVED;

/// Units by which a disk can become larger in a run.
const MOST_EXTRA_UNITS: u64 = 64;
const PAGE: u64 = 4096;

/// A volume that exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Known {
    /// The number by which the run knows it: names and places change.
    pub id: u32,
    /// The pool that it is in.
    pub pool: usize,
    /// Its name.
    pub name: String,
    /// Its bytes.
    pub size: u64,
    /// Its identity, once the pool has said it.
    pub uuid: Option<Uuid>,
}

/// Everything that tables say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// The volumes.
    pub volumes: Vec<Known>,
    /// Units of each pool.
    pub units: Vec<u64>,
}

impl State {
    /// Takes over what the tables of some pools say in another state. Volumes of which `is_unknown`
    /// says that their place is not known stay in their places.
    pub fn copy_pools(&mut self, pools: &[usize], from: &State, is_unknown: impl Fn(&Known) -> bool) {
        let is_copied = |known: &Known| pools.contains(&known.pool) && !is_unknown(known);
        self.volumes.retain(|known| !is_copied(known));
        self.volumes.extend(from.volumes.iter().filter(|known| is_copied(known)).cloned());
        for pool in pools {
            self.units[*pool] = from.units[*pool];
        }
    }
}

/// The content of a volume.
#[derive(Clone)]
pub struct Content {
    /// The data that reads may return.
    pub oracle: Rc<RefCell<Oracle>>,
    /// Bytes that users may address.
    pub size: Rc<Cell<u64>>,
    /// Users that make requests.
    pub users: Gate,
}

/// All that a run is about.
pub struct World {
    pub shape: Shape,
    pub machine: Arc<Machine>,
    pub disks: Vec<SimDisk>,
    pub stats: Cell<Stats>,
    /// Where the state file is.
    pub folder: SimFolder,
    /// Pools that have been made, so that they must be there.
    pub is_made: RefCell<Vec<bool>>,
    /// Copies of tables that were damaged since their pool was last open.
    pub saved: RefCell<Vec<Saved>>,
    /// The states that the next start may find. The first is that of the open pools. There are more
    /// after a change was cut off, or failed and could not be taken back.
    pub states: RefCell<Vec<State>>,
    /// Whether requests fail often in this boot.
    pub is_failing: Cell<bool>,
    /// Pools whose copies of the table may be torn, since requests to their disks have failed.
    pub is_torn: RefCell<Vec<bool>>,
    contents: RefCell<BTreeMap<u32, Content>>,
    next_id: Cell<u32>,
    seed: u64,
    failure: RefCell<Option<String>>,
}

impl World {
    /// Disks that hold what a former owner has left.
    pub fn new(seed: u64, shape: &Shape) -> Rc<World> {
        let machine = Machine::new();
        let mut rng = Rng::new(seed).fork(3);
        let disks: Vec<SimDisk> = (0..shape.units.len())
            .map(|number| {
                let config = DiskConfig {
                    capacity: RESERVED + shape.units[number] * shape.unit,
                    block_size: shape.block_size,
                    has_volatile_cache: shape.has_volatile_cache,
                    has_zeroes: true,
                    latency_ns: shape.latency_ns,
                    seed: rng.draw(),
                };
                let disk = SimDisk::new(format!("disk{number}"), &machine, &config);
                fill(&disk, RESERVED..config.capacity, &mut rng);
                disk
            })
            .collect();
        let pools = disks.len();
        disks[0].poke(RESERVED, &vec![0; (shape.crowd * shape.unit) as usize]);
        let world = Rc::new(World {
            folder: SimFolder::new(&machine),
            machine,
            disks,
            stats: Cell::default(),
            is_made: RefCell::new(vec![!shape.is_created; pools]),
            saved: RefCell::default(),
            states: RefCell::default(),
            is_failing: Cell::default(),
            is_torn: RefCell::new(vec![false; pools]),
            contents: RefCell::default(),
            next_id: Cell::new(1),
            seed,
            failure: RefCell::default(),
            shape: shape.clone(),
        });
        let crowd = (1..=shape.crowd as u32).map(|number| Known {
            id: world.new_volume(shape.unit),
            pool: 0,
            name: format!("crowd{number}"),
            size: shape.unit,
            uuid: Some(Uuid(u128::from(number).to_be_bytes())),
        });
        world.decide(State { volumes: crowd.collect(), units: shape.units.clone() });
        world
    }

    /// A disk becomes larger by some units, which hold what a former owner has left.
    pub fn extend(&self, pool: usize, units: u64) {
        let (disk, bytes) = (&self.disks[pool], units * self.shape.unit);
        let before = block::Device::limits(disk).capacity;
        disk.grow(bytes);
        fill(disk, before..before + bytes, &mut Rng::new(self.seed).fork(before));
    }

    /// Changes the counts.
    pub fn count(&self, change: impl FnOnce(&mut Stats)) {
        let mut stats = self.stats.get();
        change(&mut stats);
        self.stats.set(stats);
    }

    /// Something is wrong. The first text is kept.
    pub fn fail(&self, what: String) {
        self.failure.borrow_mut().get_or_insert(what);
    }

    /// Returns the first failure.
    pub fn failure(&self) -> Option<String> {
        self.failure.borrow().clone()
    }

    /// Whether nothing is wrong and there is power.
    pub fn goes_on(&self) -> bool {
        self.machine.is_on() && self.failure.borrow().is_none()
    }

    /// Returns the state that the open pools have.
    pub fn state(&self) -> State {
        let states = self.states.borrow();
        let may_be_unknown = self.shape.has_faults || self.shape.has_absent;
        assert!(states.len() == 1 || may_be_unknown, "it is not known what is there");
        states[0].clone()
    }

    /// Whether requests fail often in this boot, and one to the disk of this pool has failed.
    pub fn has_failed(&self, pool: usize) -> bool {
        self.is_failing.get() && self.disks[pool].has_failed_write()
    }

    /// Whether an error may be the failure that was made on purpose. It excuses one error, unless
    /// requests fail often.
    pub fn excuses_error(&self) -> bool {
        if (0..self.disks.len()).any(|pool| self.has_failed(pool)) {
            return true;
        }
        let failed = self.disks.iter().find(|disk| disk.has_failed_write());
        if let Some(disk) = failed {
            disk.forgive();
            self.count(|stats| stats.failed_writes += 1);
        }
        failed.is_some() || self.folder.take_failure()
    }

    /// A number for a new volume, whose content is all zeroes.
    pub fn new_volume(&self, size: u64) -> u32 {
        let id = self.next_id.replace(self.next_id.get() + 1);
        let units = self.shape.units.iter().max().expect("a run has pools") + MOST_EXTRA_UNITS;
        // Another seed for each: what one holds is garbage in another.
        let oracle = Oracle::new(mix(self.seed ^ mix(id.into())), units * self.shape.unit);
        let content = Content {
            oracle: Rc::new(RefCell::new(oracle)),
            size: Rc::new(Cell::new(size)),
            users: Gate::default(),
        };
        self.contents.borrow_mut().insert(id, content);
        id
    }

    /// Returns the content of a volume.
    pub fn content(&self, id: u32) -> Content {
        self.contents.borrow()[&id].clone()
    }

    /// The volume as a user needs it.
    pub fn disk(&self, id: u32) -> Disk {
        let Content { oracle, size, .. } = self.content(id);
        Disk {
            name: format!("volume {id}"),
            oracle,
            size,
            block_size: self.shape.block_size,
            has_volatile_cache: self.shape.has_volatile_cache,
            // A write that failed is not in the cache: what the disk took of it is on the medium.
            // Where writes fail often, another part of the same write is perhaps in the cache.
            keeps_failed_writes: !self.shape.has_faults,
        }
    }

    /// Users that make requests.
    pub fn running(&self) -> usize {
        self.contents.borrow().values().map(|content| content.users.running()).sum()
    }

    /// Power has gone, and every request has ended.
    pub fn lose_power(&self) {
        self.disks.iter().for_each(SimDisk::lose_cache);
        self.folder.lose_power(&mut Rng::new(self.seed).fork(self.machine.boot()));
        for (number, disk) in self.disks.iter().enumerate() {
            let has_failed = self.has_failed(number);
            self.is_torn.borrow_mut()[number] |= has_failed;
            self.count(|stats| stats.failed_writes += u64::from(has_failed));
            disk.revive();
            disk.forgive();
        }
        self.contents.borrow().values().for_each(|content| content.oracle.borrow_mut().crash());
    }

    /// Decides for one of the states.
    pub fn decide(&self, state: State) {
        self.set_states(vec![state]);
    }

    /// A change is durable: it counts whatever else the next start finds.
    pub fn change(&self, change: impl FnMut(&mut State)) {
        let mut states = self.states.borrow().clone();
        states.iter_mut().for_each(change);
        self.set_states(states);
    }

    /// A change may have become durable: the next start may find it.
    pub fn may_change(&self, change: impl FnMut(&mut State)) {
        let mut states = self.states.borrow().clone();
        let mut changed = states.clone();
        changed.iter_mut().for_each(change);
        states.append(&mut changed);
        self.set_states(states);
    }

    /// Sets the states that the next start may find; the first is the one that the open pools have.
    pub fn set_states(&self, states: Vec<State>) {
        let mut different: Vec<State> = Vec::new();
        for state in states {
            if !different.contains(&state) {
                different.push(state);
            }
        }
        let before = self.states.replace(different);
        let states = self.states.borrow();
        let is_gone =
            |known: &&Known| states.iter().flat_map(|state| &state.volumes).all(|other| other.id != known.id);
        for known in before.iter().flat_map(|state| &state.volumes).filter(is_gone) {
            self.contents.borrow_mut().remove(&known.id);
        }
        for known in &states[0].volumes {
            self.content(known.id).size.set(known.size);
        }
    }
}

impl Host for World {
    fn machine(&self) -> &Machine {
        &self.machine
    }

    fn goes_on(&self) -> bool {
        World::goes_on(self)
    }

    fn fail(&self, what: String) {
        World::fail(self, what);
    }

    fn count_operation(&self) {
        self.count(|stats| stats.operations += 1);
    }

    fn excuses(&self, error: IoError) -> bool {
        error == IoError::Medium && self.excuses_error()
    }

    fn excuses_read(&self, error: IoError) -> bool {
        error == IoError::Medium && self.is_failing.get() && self.excuses_error()
    }
}

/// Puts pages onto a disk that no volume may show.
fn fill(disk: &SimDisk, range: std::ops::Range<u64>, rng: &mut Rng) {
    let page: Vec<u8> = (0..PAGE).map(|_| rng.draw() as u8 | 1).collect();
    for at in range.step_by(PAGE as usize) {
        disk.poke(at, &page);
    }
}
