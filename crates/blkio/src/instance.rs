//! A device from creation to its end: properties, states, regions, queues.

use crate::freestone::{FREESTONE, QCOW2};
use crate::memory::{RegionRules, Regions};
use crate::rules::Rules;
use crate::{Error, IoQueue, Kind, Region, Result, State, Value};
use drivers::blkio::{Driver, Properties, common, wrong_kind};
use stack::kinds::blkio::DRIVERS;
use std::sync::Arc;

/// Where a queue of some index is.
enum Place {
    /// Nowhere: it was removed.
    Vacant,
    Here(Box<IoQueue>),
    /// With whoever borrowed it.
    Lent,
}

/// Queues by index; a removed one leaves a gap.
type Queues = Vec<Place>;

/// A device as its program configures it. Its queues may be used by other threads meanwhile.
///
/// Fields are dropped in their order: queues wait for what is in flight, then the device is closed,
/// then memory is given back.
pub struct Instance {
    queues: Queues,
    poll_queues: Queues,
    driver: Box<dyn Driver>,
    regions: Regions,
    properties: Properties,
    state: State,
    rules: Option<Arc<Rules>>,
}

impl Instance {
    /// An instance of the driver of that name.
    ///
    /// # Errors
    /// `ENOENT` when there is none, `ENOSYS` when this system lacks what it needs.
    pub fn create(driver_name: &str) -> Result<Instance> {
        match DRIVERS.iter().chain(&[&FREESTONE, &QCOW2]).find(|driver| driver.name == driver_name) {
            Some(driver) => Ok(Instance::over(driver_name, (driver.create)()?)),
            None => Err(Error::new(libc::ENOENT, format!("unknown driver '{driver_name}'"))),
        }
    }

    /// An instance of `driver`.
    pub(crate) fn over(driver_name: &str, driver: Box<dyn Driver>) -> Instance {
        let mut specs = common(driver_name, driver.can_add_queues());
        specs.extend(driver.specs());
        Instance {
            queues: Vec::new(),
            poll_queues: Vec::new(),
            driver,
            regions: Regions::default(),
            properties: Properties::new(specs),
            state: State::Created,
            rules: None,
        }
    }

    /// Where it is in its life.
    pub fn state(&self) -> State {
        self.state
    }

    /// The names of its properties.
    pub fn property_names(&self) -> impl Iterator<Item = &'static str> {
        self.properties.names()
    }

    /// A property's value.
    ///
    /// # Errors
    /// `ENOENT` unknown, `ENODEV` not known before the device is connected.
    pub fn get(&self, name: &str) -> Result<Value> {
        let value = self.properties.get(name, self.state)?;
        if name == "capacity" { (self.driver.capacity())().map(Value::Uint64) } else { Ok(value.clone()) }
    }

    /// As [`Instance::get`], of the type that the caller expects.
    ///
    /// # Errors
    /// `ENOTTY` when it has another.
    pub fn get_as(&self, name: &str, kind: Kind) -> Result<Value> {
        let actual = self.properties.kind(name)?;
        if actual == kind { self.get(name) } else { Err(wrong_kind(name, actual, kind)) }
    }

    /// Sets a property; text is converted to its type.
    ///
    /// # Errors
    /// `ENOENT` unknown, `ENOTTY` wrong type, `EACCES` read-only, `EBUSY` too late, `ENODEV` too
    /// early, `EINVAL` a value that cannot be.
    pub fn set(&mut self, name: &str, value: Value) -> Result<()> {
        let value = self.properties.convert(name, value, self.state)?;
        if let ("num-queues" | "num-poll-queues", Value::Int(count)) = (name, &value)
            && *count < 0
        {
            return Err(Error::new(libc::EINVAL, format!("property {name}: {count} is negative")));
        }
        self.driver.check(name, &value)?;
        self.properties.put(name, value);
        Ok(())
    }

    /// Opens the device that the properties name; nothing when it is connected already.
    ///
    /// # Errors
    /// `EBUSY` when it is started; what is wrong with the settings or the device, and then it can
    /// be tried again.
    pub fn connect(&mut self) -> Result<()> {
        match self.state {
            State::Created => {}
            State::Connected => return Ok(()),
            State::Started => return Err(Error::new(libc::EBUSY, "the instance is already started")),
        }
        let result = self.driver.connect(&mut self.properties);
        match result {
            Ok(()) => self.state = State::Connected,
            Err(_) => self.properties.forget_facts(),
        }
        result
    }

    /// Makes the queues; nothing when it is started already.
    ///
    /// # Errors
    /// `ENODEV` when it is not connected, `EINVAL` for numbers of queues that the
    /// device does not have; what the device refuses.
    pub fn start(&mut self) -> Result<()> {
        match self.state {
            State::Created => return self.check_connected(),
            State::Started => return Ok(()),
            State::Connected => {}
        }
        let [events, polls] = ["num-queues", "num-poll-queues"].map(|name| self.properties.int(name));
        self.check_counts(events, polls)?;
        self.driver.start(&self.properties)?;
        let rules = Arc::new(Rules::new(&self.properties, self.driver.codes(), self.driver.capacity()));
        let mut open = |count: i32, is_poll| -> Result<Queues> {
            (0..count)
                .map(|_| {
                    let rings = self.driver.open_queue(&self.properties, is_poll)?;
                    Ok(Place::Here(Box::new(IoQueue::new(rings, rules.clone(), is_poll))))
                })
                .collect()
        };
        let queues = open(events, false)?;
        self.poll_queues = open(polls, true)?;
        self.queues = queues;
        self.rules = Some(rules);
        self.state = State::Started;
        Ok(())
    }

    fn check_counts(&self, events: i32, polls: i32) -> Result<()> {
        let refuse = |message: String| Err(Error::new(libc::EINVAL, message));
        if polls > 0 && !self.properties.bool("supports-poll-queues") {
            return refuse(format!("num-poll-queues is {polls}, but poll queues are not supported"));
        }
        if events + polls == 0 && !self.driver.can_add_queues() {
            return refuse("num-queues and num-poll-queues are both 0, and no queues can be added".into());
        }
        let max = self.properties.int("max-queues");
        if i64::from(events) + i64::from(polls) > i64::from(max) {
            return refuse(format!(
                "num-queues ({events}) and num-poll-queues ({polls}) are together more than max-queues ({max})"
            ));
        }
        Ok(())
    }

    /// The queue or poll queue at `index`. The pointer is good until it is removed or the instance
    /// ends.
    ///
    /// # Errors
    /// `ENOENT` when there is none, `EBUSY` when it is lent.
    pub fn queue(&mut self, index: i32, is_poll: bool) -> Result<&mut IoQueue> {
        match self.place(index, is_poll)? {
            Place::Here(queue) => Ok(queue),
            _ => Err(lent_queue(index, is_poll)),
        }
    }

    /// Lends a queue or poll queue to whoever uses it without the instance.
    ///
    /// # Errors
    /// `ENOENT` when there is none, `EBUSY` when it is lent already.
    pub(crate) fn lend_queue(&mut self, index: i32, is_poll: bool) -> Result<Box<IoQueue>> {
        let place = self.place(index, is_poll)?;
        match std::mem::replace(place, Place::Lent) {
            Place::Here(queue) => Ok(queue),
            _ => Err(lent_queue(index, is_poll)),
        }
    }

    /// Takes a lent queue back; `None` when it has been closed.
    pub(crate) fn take_back(&mut self, index: i32, is_poll: bool, queue: Option<Box<IoQueue>>) {
        let place = self.place(index, is_poll).expect("a lent queue has a place");
        *place = queue.map_or(Place::Vacant, Place::Here);
    }

    fn place(&mut self, index: i32, is_poll: bool) -> Result<&mut Place> {
        let queues = if is_poll { &mut self.poll_queues } else { &mut self.queues };
        let place = usize::try_from(index).ok().and_then(|index| queues.get_mut(index));
        match place {
            None | Some(Place::Vacant) => Err(no_such_queue(index, is_poll)),
            Some(place) => Ok(place),
        }
    }

    /// Adds a queue or poll queue and returns its index, the lowest that is free.
    ///
    /// # Errors
    /// `ENOTSUP` if the driver cannot add queues, in any state. `EBUSY` before the start. `EINVAL`
    /// if the device has no poll queues, or no more queues. The device's own error.
    pub fn add_queue(&mut self, is_poll: bool) -> Result<i32> {
        if !self.driver.can_add_queues() {
            return Err(Error::new(libc::ENOTSUP, "queues cannot be added (can-add-queues is false)"));
        }
        let rules = self.started_rules()?.clone();
        if is_poll && !self.properties.bool("supports-poll-queues") {
            return Err(Error::new(libc::EINVAL, "poll queues are not supported"));
        }
        let max = self.properties.int("max-queues");
        let all = self.queues.iter().chain(&self.poll_queues);
        let existing = all.filter(|place| !matches!(place, Place::Vacant)).count();
        if existing >= max as usize {
            let message = format!("there are {existing} queues, max-queues is {max}");
            return Err(Error::new(libc::EINVAL, message));
        }
        let rings = self.driver.open_queue(&self.properties, is_poll)?;
        let queues = if is_poll { &mut self.poll_queues } else { &mut self.queues };
        let vacant = queues.iter().position(|place| matches!(place, Place::Vacant));
        let index = vacant.unwrap_or(queues.len());
        if index == queues.len() {
            queues.push(Place::Vacant);
        }
        queues[index] = Place::Here(Box::new(IoQueue::new(rings, rules, is_poll)));
        Ok(index as i32)
    }

    /// Removes a queue or poll queue, after what it has in flight has ended. Others keep their
    /// index.
    ///
    /// # Errors
    /// `ENOENT` when there is none, `EBUSY` when it is lent.
    pub fn remove_queue(&mut self, index: i32, is_poll: bool) -> Result<()> {
        self.lend_queue(index, is_poll)?;
        self.take_back(index, is_poll, None);
        Ok(())
    }

    /// Allocates memory for buffers; it is not mapped yet.
    ///
    /// # Errors
    /// `ENODEV` before the device is connected, `EINVAL` for a length that is no multiple of
    /// `mem-region-alignment`.
    pub fn alloc_region(&mut self, len: usize) -> Result<Region> {
        self.check_connected()?;
        self.regions.allocate(len, self.region_rules().alignment, self.driver.own_alignment())
    }

    /// Gives memory of [`Instance::alloc_region`] back.
    ///
    /// # Errors
    /// `EINVAL` for memory that is none, or is still mapped.
    pub fn free_region(&mut self, region: &Region) -> Result<()> {
        self.regions.free(region)
    }

    /// Tells the device about memory that requests will use.
    ///
    /// # Errors
    /// `ENODEV` before the device is connected, `EBUSY` before the start, `EINVAL` for a region
    /// that is malformed or mapped already, `ENOSPC` for too many; what the device cannot take.
    pub fn map_region(&mut self, region: &Region) -> Result<()> {
        self.check_connected()?;
        self.started_rules()?;
        self.regions.check(region, self.region_rules())?;
        self.driver.map_region(&self.for_device(region))?;
        self.regions.add_mapped(region);
        Ok(())
    }

    /// Takes a region back; one that is not mapped is none of the library's business.
    pub fn unmap_region(&mut self, region: &Region) {
        if self.regions.remove_mapped(region) {
            self.driver.unmap_region(&self.for_device(region));
        }
    }

    /// A region as the device gets it: all of its memory if the library allocated it.
    fn for_device(&self, region: &Region) -> Region {
        if self.driver.own_alignment() > 1 { self.regions.whole(region) } else { *region }
    }

    /// Makes a `connect` that runs on another thread fail soon; `None` where it cannot take long.
    pub(crate) fn canceller(&self) -> Option<Arc<dyn Fn() + Send + Sync>> {
        self.driver.canceller()
    }

    fn check_connected(&self) -> Result<()> {
        match self.state {
            State::Created => Err(Error::new(libc::ENODEV, "the instance is not connected")),
            State::Connected | State::Started => Ok(()),
        }
    }

    fn started_rules(&self) -> Result<&Arc<Rules>> {
        self.rules.as_ref().ok_or_else(|| Error::new(libc::EBUSY, "the instance is not started"))
    }

    fn region_rules(&self) -> RegionRules {
        RegionRules {
            alignment: self.properties.uint64("mem-region-alignment").max(1),
            needs_fd: self.properties.bool("needs-mem-region-fd"),
            max_regions: self.properties.uint64("max-mem-regions"),
        }
    }
}

fn no_such_queue(index: i32, is_poll: bool) -> Error {
    Error::new(libc::ENOENT, format!("{} {index} does not exist", kind_of_queue(is_poll)))
}

fn lent_queue(index: i32, is_poll: bool) -> Error {
    Error::new(libc::EBUSY, format!("the {} with index {index} is in use", kind_of_queue(is_poll)))
}

fn kind_of_queue(is_poll: bool) -> &'static str {
    if is_poll { "poll queue" } else { "queue" }
}
