//! A device that ends requests only when a test releases them, waits or closes it. It writes to the
//! memory of a request only then: memory that was freed too early shows, best under
//! AddressSanitizer.

use crate::api::Device;
use crate::{Instance, Region, Result, Value};
use block::{IoResult, Op, Queue, Request, Segment};
use drivers::blkio::{Capacity, Driver, Properties, Spec};
use drivers::direct::{DirectQueue, Zone, ZoneRequest, sleep_on_event};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Content of every read.
pub const FILL: u8 = 0xab;

/// How a test rules the device.
#[derive(Default)]
pub struct Control {
    /// How many requests may end.
    pub released: AtomicUsize,
    /// Requests end only when they are released, however long a caller waits.
    pub is_stubborn: AtomicBool,
    /// Waiting fails.
    pub is_broken: AtomicBool,
    /// How many requests the device has ended.
    pub ended: AtomicUsize,
    event: Mutex<Option<RawFd>>,
}

impl Control {
    /// Lets `count` more requests end, and raises the event.
    pub fn release(&self, count: usize) {
        self.released.fetch_add(count, Ordering::SeqCst);
        if let Some(fd) = *self.event.lock().unwrap() {
            // SAFETY: eight bytes of our own.
            unsafe { libc::write(fd, (&raw const ONE).cast(), 8) };
        }
    }
}

static ONE: u64 = 1;

/// A device of `capacity` 1 MiB with one queue of depth 4.
pub fn device() -> (Device, Arc<Control>) {
    device_with(|_| {})
}

/// As [`device`], with other properties.
pub fn device_with(facts: fn(&mut Properties)) -> (Device, Arc<Control>) {
    let control = Arc::new(Control::default());
    let mut instance = Instance::over("fake", Box::new(Fake { control: control.clone(), facts }));
    instance.connect().unwrap();
    instance.start().unwrap();
    (Device::new(instance).unwrap(), control)
}

struct Fake {
    control: Arc<Control>,
    facts: fn(&mut Properties),
}

impl Driver for Fake {
    fn specs(&self) -> Vec<Spec> {
        Vec::new()
    }

    fn can_add_queues(&self) -> bool {
        true
    }

    fn check(&self, _: &str, _: &Value) -> Result<()> {
        Ok(())
    }

    fn connect(&mut self, properties: &mut Properties) -> Result<()> {
        properties.put("mem-region-alignment", 4096u64);
        (self.facts)(properties);
        Ok(())
    }

    fn start(&mut self, _: &Properties) -> Result<()> {
        Ok(())
    }

    fn open_queue(&mut self, _: &Properties, _: bool) -> Result<Box<dyn DirectQueue>> {
        // SAFETY: no pointer is passed; the descriptor has no other owner.
        let event = unsafe { OwnedFd::from_raw_fd(libc::eventfd(0, libc::EFD_NONBLOCK)) };
        *self.control.event.lock().unwrap() = Some(event.as_raw_fd());
        Ok(Box::new(FakeQueue { control: self.control.clone(), event, in_flight: Vec::new() }))
    }

    fn capacity(&self) -> Capacity {
        Arc::new(|| Ok(1 << 20))
    }

    fn map_region(&mut self, _: &Region) -> Result<()> {
        Ok(())
    }

    fn unmap_region(&mut self, _: &Region) {}

    fn canceller(&self) -> Option<Arc<dyn Fn() + Send + Sync>> {
        None
    }
}

enum Work {
    Read(Vec<Segment>),
    Report { zones: *mut Zone, reported: *mut u32 },
    Other,
}

struct FakeQueue {
    control: Arc<Control>,
    event: OwnedFd,
    in_flight: Vec<(u32, Work)>,
}

// SAFETY: the pointers are memory of requests.
unsafe impl Send for FakeQueue {}

impl FakeQueue {
    fn end_oldest(&mut self) -> u32 {
        let (slot, work) = self.in_flight.remove(0);
        match work {
            Work::Read(segments) => segments.iter().for_each(|segment| {
                // SAFETY: by the contract of `push`, which is what the tests hold the API to.
                unsafe { segment.base.write_bytes(FILL, segment.len) };
            }),
            Work::Report { zones, reported } => {
                // SAFETY: as above; there is room for one zone at least.
                unsafe {
                    (*zones).start = 7;
                    *reported = 1;
                }
            }
            Work::Other => {}
        }
        self.control.ended.fetch_add(1, Ordering::SeqCst);
        slot
    }
}

impl Queue for FakeQueue {
    fn depth(&self) -> u32 {
        4
    }

    unsafe fn push(&mut self, slot: u32, req: &Request<'_>, _: u64) -> IoResult {
        let work = if req.op == Op::Read { Work::Read(req.data.iter().collect()) } else { Work::Other };
        self.in_flight.push((slot, work));
        Ok(())
    }

    fn kick(&mut self) {}

    fn reap(&mut self, done: &mut dyn FnMut(u32, IoResult)) -> usize {
        let released = &self.control.released;
        let count = released.load(Ordering::SeqCst).min(self.in_flight.len());
        released.fetch_sub(count, Ordering::SeqCst);
        for _ in 0..count {
            let slot = self.end_oldest();
            done(slot, Ok(()));
        }
        count
    }

    fn event_fd(&self) -> Option<RawFd> {
        Some(self.event.as_raw_fd())
    }

    fn arm(&mut self) -> bool {
        self.control.released.load(Ordering::SeqCst) == 0
    }

    fn disarm(&mut self) {}
}

impl DirectQueue for FakeQueue {
    fn wait(&mut self, _: u32, timeout: Option<Duration>, mask: Option<&libc::sigset_t>) -> io::Result<()> {
        if self.control.is_broken.load(Ordering::SeqCst) {
            return Err(io::Error::from_raw_os_error(libc::EIO));
        }
        if self.control.is_stubborn.load(Ordering::SeqCst) {
            return sleep_on_event(self, timeout, mask);
        }
        self.control.released.store(1, Ordering::SeqCst);
        Ok(())
    }

    unsafe fn push_zone(&mut self, slot: u32, req: ZoneRequest) -> IoResult {
        let ZoneRequest::Report { zones, reported, .. } = req else {
            return Err(block::IoError::Unsupported);
        };
        self.in_flight.push((slot, Work::Report { zones, reported }));
        Ok(())
    }
}

impl Drop for FakeQueue {
    /// As every leaf: nothing is in flight afterwards.
    fn drop(&mut self) {
        *self.control.event.lock().unwrap() = None;
        while !self.in_flight.is_empty() {
            self.end_oldest();
        }
    }
}
