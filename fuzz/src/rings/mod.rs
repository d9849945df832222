//! The target `rings`: a guest that usually follows the specification, against one virtqueue.
//!
//! Guest and device take turns in one thread, so an input is repeatable. As long as the guest has
//! followed the specification (`Run::is_honest`), more is asserted. No chain is refused, altered,
//! lost or used twice, whatever the device does and whenever it dies.

pub(crate) mod device;

use crate::chains;
use crate::driver::Driver;
use crate::guest::{Guest, MAX_SIZE, USER};
use crate::input::Input;
use crate::memfd::Memfd;
use device::{Device, Settings};
use std::cell::RefCell;
use std::rc::Rc;
use virtio::device::RingError;
use virtio::inflight::InflightRegion;

/// Largest number of actions in one input: later ones find nothing new.
const MAX_ACTIONS: usize = 400;
/// Passes that serve all chains of an honest guest: those that the queue has seen, the others, and
/// none. Where rings overlap, each publish may make chains available.
const MAX_PASSES: usize = 3;
/// Bytes for dirty logs.
const LOG_BYTES: usize = 1024;

thread_local! {
    /// Created once: new files and mappings would take most of the time.
    static MEMORY: RefCell<(Guest, Rc<Memfd>)> = RefCell::new((Guest::new(0), Rc::new(Memfd::new(LOG_BYTES))));
}

/// Runs one input.
pub fn run(bytes: &[u8]) {
    MEMORY.with_borrow_mut(|(guest, log)| {
        let mappings = crate::guard::live_mappings();
        guest.reset();
        if let Some(mut run) = Run::start(guest, log.clone(), &mut Input::new(bytes)) {
            run.finish();
        }
        guest.check_untouched();
        assert_eq!(crate::guard::live_mappings(), mappings, "mappings are left");
    });
}

struct Run<'a> {
    guest: &'a mut Guest,
    log: Rc<Memfd>,
    settings: Settings,
    driver: Driver,
    device: Option<Device>,
    /// The guest has followed the specification so far.
    is_honest: bool,
}

impl<'a> Run<'a> {
    /// Sets up a ring and runs every action of the input; `None` when no ring exists at the end.
    fn start(guest: &'a mut Guest, log: Rc<Memfd>, input: &mut Input<'_>) -> Option<Self> {
        let choices = input.u8();
        let is_packed = choices & 1 != 0;
        let size = match (choices & 0x80 != 0, is_packed) {
            (true, _) => input.u16(),
            (false, false) => 1 << input.below(7),
            (false, true) => 1 + input.u16() % MAX_SIZE,
        };
        let areas = match input.u8() % 16 {
            0 => areas_of(input),
            _ => guest.areas(),
        };
        let event_idx = choices & 2 != 0;
        let settings = Settings { size, is_packed, event_idx, indirect: choices & 4 != 0, areas };
        let memory = guest.map(input.u8());
        let inflight = (choices & 8 != 0).then(|| {
            let tracked = if choices & 16 != 0 { input.u16() } else { size };
            InflightRegion::create(1 + u16::from(choices >> 5 & 1), tracked.clamp(1, 256), is_packed)
        });
        let inflight = inflight.map(|region| region.expect("a region of this size can be made"));
        let is_sound = (1..=MAX_SIZE).contains(&size) && (is_packed || size.is_power_of_two());
        let is_honest = is_sound && areas == guest.areas() && choices & (16 | 64) == 0;
        let (driver, base) = Driver::new(guest, size.min(MAX_SIZE), is_packed, input.u16());
        let base = if choices & 64 != 0 { input.u32() } else { base };
        let device = Device::start(settings, base, memory, inflight);
        assert!(!is_honest || device.is_ok(), "a sound ring was refused: {device:?}");
        let mut run = Run { guest, log, settings, driver, device: Some(device.ok()?), is_honest };
        for _ in 0..MAX_ACTIONS {
            if input.is_empty() || run.device.is_none() {
                break;
            }
            run.act(input);
        }
        run.device.is_some().then_some(run)
    }

    fn act(&mut self, input: &mut Input<'_>) {
        match input.below(32) {
            0 => self.serve_all(),
            4 => self.break_rules(chains::write_descriptor, input),
            5 => self.break_rules(chains::make_available, input),
            6 => self.break_rules(chains::write_anywhere, input),
            7 => self.break_rules(chains::write_table, input),
            8 => self.driver.set_wish(self.guest, self.settings.event_idx, input.u16()),
            9 => chains::write_data(self.guest, input),
            10 | 11 => drop(self.pop()),
            12 | 13 => self.device().complete(input.below(256), 0),
            14 => self.device().publish(),
            15 => self.device().look_around(input.u8()),
            16 => self.change_memory(input),
            17 => {
                let log = self.log.clone();
                self.device().set_log(&log, input);
            }
            18 => self.crash(),
            19 => self.corrupt_inflight(input),
            20 => self.poll(),
            21 => self.device().complete(input.below(256), input.u8()),
            22 => while self.pop().is_some() {},
            // New actions take numbers from here, so that inputs keep their meaning.
            _ => chains::offer(&mut self.driver, self.guest, self.settings.indirect, input),
        }
    }

    fn device(&mut self) -> &mut Device {
        self.device.as_mut().expect("the loop ends without one")
    }

    fn break_rules(&mut self, write: fn(&Guest, bool, &mut Input<'_>), input: &mut Input<'_>) {
        self.is_honest = false;
        write(self.guest, self.settings.is_packed, input);
    }

    fn pop(&mut self) -> Option<u16> {
        let twice: Vec<u16> = if self.is_honest { self.device().held().collect() } else { Vec::new() };
        let popped = self.device().pop();
        if !self.is_honest {
            return popped.ok()?.map(|(id, _)| id);
        }
        let (id, lens) = popped.expect("a sound chain was refused")?;
        let offered = self.driver.in_flight.get(&id);
        assert_eq!(
            offered.map(|offered| offered.lens),
            Some(lens),
            "chain {id} differs from the offered one"
        );
        assert!(!twice.contains(&id), "chain {id} was popped twice");
        Some(id)
    }

    /// Lets the driver poll the used chains.
    fn poll(&mut self) {
        while self.is_honest && self.driver.poll(self.guest).is_some() {}
    }

    fn serve_all(&mut self) {
        // While used chains wait to be published, a queue may hold back those that are available.
        self.complete_all();
        for _ in 0..MAX_PASSES {
            if !self.serve_some() {
                break;
            }
        }
        self.poll();
    }

    /// Serves chains until the queue returns no more. Returns whether it returned any.
    fn serve_some(&mut self) -> bool {
        let mut has_served = false;
        while self.pop().is_some() {
            self.device().complete(0, 0);
            has_served = true;
        }
        self.complete_all();
        has_served
    }

    fn complete_all(&mut self) {
        while self.device().held().next().is_some() {
            self.device().complete(0, 0);
        }
        self.device().publish();
    }

    fn change_memory(&mut self, input: &mut Input<'_>) {
        // Available chains that are not popped yet use the old layout.
        if !self.driver.in_flight.is_empty() {
            self.is_honest = false;
        }
        let areas = if input.u8().is_multiple_of(8) { areas_of(input) } else { self.guest.areas() };
        self.is_honest &= areas == self.guest.areas();
        let memory = self.guest.map(input.u8());
        let result = self.device().set_memory(memory, areas);
        assert!(!self.is_honest || result.is_ok(), "a sound ring was refused: {result:?}");
    }

    fn crash(&mut self) {
        if !self.device().is_tracked() && self.is_honest {
            self.complete_all();
        }
        let base = self.device().handover().unwrap_or(0);
        let device = self.device.take().expect("the loop ends without one").crash(base);
        self.check_restart(&device);
        self.device = device.ok();
    }

    fn check_restart(&self, device: &Result<Device, RingError>) {
        assert!(!self.is_honest || device.is_ok(), "a sound ring was not taken over: {device:?}");
    }

    fn corrupt_inflight(&mut self, input: &mut Input<'_>) {
        self.is_honest = false;
        let (offset, bytes) = (u64::from(input.u16()) % 0x400, input.bytes(16));
        self.device().corrupt_inflight(offset, bytes);
    }

    /// An honest guest gets every chain back.
    fn finish(&mut self) {
        self.serve_all();
        assert!(!self.is_honest || self.driver.in_flight.is_empty(), "chains were lost");
    }
}

fn areas_of(input: &mut Input<'_>) -> virtio::device::RingAreas {
    let mut area = || match input.u8() % 4 {
        0 => input.u64(),
        1 => USER + u64::from(input.u16()),
        2 => USER + ((u64::from(input.u8()) % 4) << 32) + 16 * u64::from(input.u16()),
        _ => USER + 16 * u64::from(input.u8()),
    };
    virtio::device::RingAreas { descriptors: area(), driver: area(), device: area() }
}
