//! Checks of the requests of zoned namespaces. The namespace must have at least 8 zones of at least
//! 512 KiB capacity, and limits of its own on open and active zones.

use super::driver::{self, pattern};
use block::{Flags, IoError, IoResult, Request};
use drivers::direct::{DirectQueue, Zone, ZoneAction, ZoneRequest};
use drivers::nvme_uring::{NvmeFile, NvmeQueue, ZoneFacts};

type Driver = driver::Driver<NvmeQueue>;

const EMPTY: u8 = 1;
const IMPLICITLY_OPEN: u8 = 2;
const EXPLICITLY_OPEN: u8 = 3;
const CLOSED: u8 = 4;
const FULL: u8 = 14;

/// Requests that only zoned namespaces support, one at a time.
impl Driver {
    /// Up to `max` zones from the one at `offset` on.
    pub fn report(&mut self, offset: u64, max: u32) -> Result<Vec<Zone>, block::IoError> {
        let mut zones = vec![Zone::default(); max as usize];
        let mut reported = u32::MAX;
        let req = ZoneRequest::Report { offset, zones: zones.as_mut_ptr(), max, reported: &raw mut reported };
        // SAFETY: zones and number outlive the request, which is waited for.
        unsafe { self.queue.push_zone(0, req) }?;
        self.finish()?;
        zones.truncate(reported as usize);
        Ok(zones)
    }

    pub fn zone(&mut self, req: ZoneRequest) -> IoResult {
        // SAFETY: no memory.
        unsafe { self.queue.push_zone(0, req) }?;
        self.finish()
    }

    pub fn manage(&mut self, action: ZoneAction, offset: u64) -> IoResult {
        self.zone(ZoneRequest::Manage(action, offset))
    }

    pub fn manage_all(&mut self, action: ZoneAction) -> IoResult {
        self.zone(ZoneRequest::ManageAll(action))
    }
}

pub fn run(file: &NvmeFile, is_polled: bool) {
    let facts = file.facts().zones.expect("a zoned namespace");
    let mut driver = Driver::new(file, is_polled);
    assert_eq!(driver.manage_all(ZoneAction::Reset), Ok(()));
    reports(&mut driver, &facts);
    writes(&mut driver, &facts);
    states(&mut driver, &facts);
    limits(&mut driver, &facts);
    all_at_once(&mut driver, &facts);
    assert_eq!(driver.manage_all(ZoneAction::Reset), Ok(()));
}

fn zone(driver: &mut Driver, offset: u64) -> Zone {
    let zones = driver.report(offset, 1).expect("a report");
    assert_eq!(zones.len(), 1);
    zones[0]
}

fn states_of(driver: &mut Driver, facts: &ZoneFacts) -> Vec<u8> {
    driver.report(0, facts.zones as u32).expect("a report").iter().map(|z| z.zone_state).collect()
}

fn reports(driver: &mut Driver, facts: &ZoneFacts) {
    let all = driver.report(0, facts.zones as u32 + 10).expect("a report");
    assert_eq!(all.len() as u64, facts.zones, "all zones, and no more");
    for (i, zone) in all.iter().enumerate() {
        assert_eq!((zone.start, zone.len), (i as u64 * facts.zone_size, facts.zone_size));
        assert_eq!((zone.zone_type, zone.zone_state, zone.write_pointer), (2, EMPTY, zone.start));
        assert!(zone.capacity <= zone.len && zone.capacity > 0);
        assert_eq!((zone.reset, zone.reserved), (0, [0; 29]));
    }
    let some = driver.report(2 * facts.zone_size + 1, 3).expect("a report");
    assert_eq!(some, all[2..5], "from inside a zone on");
    let last = driver.report((facts.zones - 2) * facts.zone_size, 9).expect("a report");
    assert_eq!(last, all[all.len() - 2..], "up to the last");
    assert!(driver.report(0, 0).expect("a report").is_empty());
    let beyond = facts.zones * facts.zone_size;
    assert_eq!(driver.report(beyond, 1).err(), Some(IoError::OutOfRange));
    assert_eq!(driver.report(u64::MAX, 1).err(), Some(IoError::OutOfRange));
}

fn writes(driver: &mut Driver, facts: &ZoneFacts) {
    let start = facts.zone_size;
    let bytes = pattern(start, 48 << 10, 1);
    for (i, part) in bytes.chunks(16 << 10).enumerate() {
        let at = start + (i as u64) * (16 << 10);
        assert_eq!(driver.write(at, part, Flags::NONE), Ok(()), "write {i}");
        let zone = zone(driver, start);
        assert_eq!((zone.zone_state, zone.write_pointer), (IMPLICITLY_OPEN, at + (16 << 10)));
    }
    assert!(*driver.read(start, bytes.len()).expect("read") == *bytes);
    for wrong in [start, start + (32 << 10), start + (64 << 10)] {
        let result = driver.write(wrong, &bytes[..4096], Flags::NONE);
        assert_eq!(result, Err(IoError::Invalid), "a write at {wrong:#x}, where the pointer is not");
    }
    assert_eq!(zone(driver, start).write_pointer, start + (48 << 10), "failed writes move nothing");

    // One request, several commands: they run in order.
    let second = 2 * facts.zone_size;
    let capacity = zone(driver, second).capacity;
    let bytes = pattern(second, capacity as usize, 2);
    assert_eq!(driver.write(second, &bytes, Flags::FUA), Ok(()), "a whole zone at once");
    let full = zone(driver, second);
    assert_eq!((full.zone_state, full.write_pointer), (FULL, second + facts.zone_size));
    assert!(*driver.read(second, bytes.len()).expect("read") == *bytes);
    assert_eq!(driver.write(second, &bytes[..4096], Flags::NONE), Err(IoError::NoSpace), "a full zone");
    // Write zeroes is supported, too.
    let third = 3 * facts.zone_size;
    assert_eq!(driver.run(&Request::write_zeroes(32 << 10, Flags::NONE), third), Ok(()));
    assert_eq!(zone(driver, third).write_pointer, third + (32 << 10));
    assert!(driver.read(third, 32 << 10).expect("read").iter().all(|b| *b == 0));
    let too_long = vec![0; capacity as usize];
    let result = driver.write(third + (32 << 10), &too_long, Flags::NONE);
    assert!(matches!(result, Err(IoError::OutOfRange | IoError::NoSpace)), "beyond the zone: {result:?}");
    assert_eq!(driver.run(&Request::flush(), 0), Ok(()));
}

fn states(driver: &mut Driver, facts: &ZoneFacts) {
    assert_eq!(driver.manage_all(ZoneAction::Reset), Ok(()));
    let start = 4 * facts.zone_size;
    let mut expect = |action, state, write_pointer| {
        assert_eq!(driver.manage(action, start + 12345), Ok(()), "{action:?}");
        let zone = zone(driver, start);
        assert_eq!((zone.zone_state, zone.write_pointer), (state, write_pointer), "after {action:?}");
    };
    expect(ZoneAction::Open, EXPLICITLY_OPEN, start);
    expect(ZoneAction::Close, CLOSED, start);
    expect(ZoneAction::Open, EXPLICITLY_OPEN, start);
    expect(ZoneAction::Finish, FULL, start + facts.zone_size);
    expect(ZoneAction::Reset, EMPTY, start);
    let result = driver.manage(ZoneAction::Close, start);
    assert_eq!(result, Err(IoError::Invalid), "an empty zone cannot be closed");
    let beyond = ZoneRequest::Manage(ZoneAction::Open, facts.zones * facts.zone_size);
    assert_eq!(driver.zone(beyond), Err(IoError::OutOfRange));
}

fn limits(driver: &mut Driver, facts: &ZoneFacts) {
    assert!(0 < facts.max_open && facts.max_open < facts.max_active, "limits to be tried: {facts:?}");
    assert!(u64::from(facts.max_active) < facts.zones);
    let at = |i: u32| u64::from(i) * facts.zone_size;
    for i in 0..facts.max_open {
        assert_eq!(driver.manage(ZoneAction::Open, at(i)), Ok(()), "zone {i}");
    }
    assert_eq!(driver.manage(ZoneAction::Open, at(facts.max_open)), Err(IoError::TooManyOpenZones));
    for i in 0..facts.max_open {
        assert_eq!(driver.manage(ZoneAction::Close, at(i)), Ok(()), "zone {i}");
    }
    for i in facts.max_open..facts.max_active {
        assert_eq!(driver.manage(ZoneAction::Open, at(i)), Ok(()), "zone {i}");
    }
    let one_more = at(facts.max_active);
    assert_eq!(driver.manage(ZoneAction::Open, one_more), Err(IoError::TooManyActiveZones));
    assert_eq!(driver.write(one_more, &[0; 4096], Flags::NONE), Err(IoError::TooManyActiveZones));
}

fn all_at_once(driver: &mut Driver, facts: &ZoneFacts) {
    assert_eq!(driver.manage_all(ZoneAction::Reset), Ok(()));
    assert_eq!(driver.write(0, &[1; 4096], Flags::NONE), Ok(()));
    assert_eq!(driver.manage(ZoneAction::Open, facts.zone_size), Ok(()));
    assert_eq!(states_of(driver, facts)[..3], [IMPLICITLY_OPEN, EXPLICITLY_OPEN, EMPTY]);
    for (action, expected) in [
        (ZoneAction::Close, [CLOSED, CLOSED, EMPTY]),
        (ZoneAction::Open, [EXPLICITLY_OPEN, EXPLICITLY_OPEN, EMPTY]),
        (ZoneAction::Finish, [FULL, FULL, EMPTY]),
        (ZoneAction::Reset, [EMPTY, EMPTY, EMPTY]),
    ] {
        assert_eq!(driver.manage_all(action), Ok(()), "all: {action:?}");
        let states = states_of(driver, facts);
        assert_eq!(states[..3], expected, "after all: {action:?}");
        assert!(states[3..].iter().all(|s| *s == EMPTY));
    }
}
