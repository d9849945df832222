//! The caller's side: a [`Queue`] for any thread, one thread at a time.

use super::bells::Bells;
use super::engine::{Engine, EngineParts};
use super::{Command, Completion};
use crate::cores::Cores;
use crate::ring::{Consumer, Producer, ring};
use crate::source::PollWindow;
use block::{Data, Device, DeviceError, IoError, IoResult, Queue, Request};
use std::os::fd::RawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Options of a queue over a bridge.
#[derive(Clone, Copy, Debug)]
pub struct BridgeOptions {
    /// Largest number of requests in flight, 1 to [`BridgeOptions::MAX_DEPTH`].
    pub depth: u32,
    /// The caller polls; the queue has no event.
    pub is_polled: bool,
    /// How long the caller polls for completions before it sleeps.
    pub spin: PollWindow,
}

impl BridgeOptions {
    /// Largest depth: that of the deepest rings of virtio and NVMe, in 4 MiB of commands.
    pub const MAX_DEPTH: u32 = 1 << 16;
}

impl Default for BridgeOptions {
    /// 128 requests, an event, and up to 20 µs of polling, twice the cost of a sleep and a wake-up.
    fn default() -> BridgeOptions {
        BridgeOptions { depth: 128, is_polled: false, spin: PollWindow::up_to(20_000) }
    }
}

/// A queue of a device that a core serves. Dropping it waits for the requests in flight.
pub struct BridgeQueue {
    requests: Producer<Command>,
    completions: Consumer<Completion>,
    bells: Arc<Bells>,
    is_busy: Box<[bool]>,
    in_flight: u32,
    is_polled: bool,
    window: PollWindow,
    spin_ns: u64,
    engine: Engine,
    /// The core runs at least as long as the queue.
    cores: Arc<Cores>,
}

/// Polls of the ring between two readings of the clock.
const LOOKS_PER_TICK: u32 = 32;

impl BridgeQueue {
    /// Opens a queue of `device`, served by the core with number `core`. Must not be called on a
    /// core.
    ///
    /// # Errors
    /// If the depth is outside its range, the device cannot be opened on that core, or the kernel
    /// refuses an eventfd.
    ///
    /// # Panics
    /// If no core has that number.
    pub fn open(
        cores: &Arc<Cores>,
        core: usize,
        device: Arc<dyn Device>,
        options: &BridgeOptions,
    ) -> Result<BridgeQueue, DeviceError> {
        let BridgeOptions { depth, is_polled, spin } = *options;
        let failed = |what: String| DeviceError::new(device.name(), what);
        if !(1..=BridgeOptions::MAX_DEPTH).contains(&depth) {
            let max = BridgeOptions::MAX_DEPTH;
            return Err(failed(format!("a queue for {depth} requests: 1 to {max}")));
        }
        let bells = Bells::new().map_err(|e| failed("cannot make an eventfd".into()).because(e))?;
        let bells = Arc::new(bells);
        let (requests, incoming) = ring(depth);
        let (outgoing, completions) = ring(depth);
        let parts = EngineParts { device: device.clone(), incoming, outgoing, bells: bells.clone(), depth };
        let engine = Engine::start(&cores.get(core), parts)?;
        Ok(BridgeQueue {
            requests,
            completions,
            bells,
            is_busy: vec![false; depth as usize].into(),
            in_flight: 0,
            is_polled,
            window: spin,
            spin_ns: spin.start_ns,
            engine,
            cores: cores.clone(),
        })
    }

    /// Number of requests that were pushed and not reaped.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Whether the queue has no event.
    pub fn is_polled(&self) -> bool {
        self.is_polled
    }

    /// As [`Queue::arm`], with the event at the last of the next `count` completions. `count` is
    /// limited to the requests in flight.
    pub fn arm_for(&mut self, count: u32) -> bool {
        let count = count.min(self.in_flight).max(1);
        self.bells.arm_caller(self.completions.taken() + u64::from(count));
        !self.has(count)
    }

    /// Polls until `count` completions (at most the requests in flight) wait; returns whether they
    /// do. Stops after the adaptive spin time, or after `limit` if that is shorter.
    pub fn spin_for(&mut self, count: u32, limit: Option<Duration>) -> bool {
        let budget = Duration::from_nanos(self.spin_ns);
        self.look_for(count, limit.map_or(budget, |limit| budget.min(limit)))
    }

    /// Adapts the next spin to the length of the sleep that followed the last one.
    pub fn note_slept(&mut self, slept: Duration) {
        let slept_ns = u64::try_from(slept.as_nanos()).unwrap_or(u64::MAX);
        self.spin_ns = self.window.after_sleep(self.spin_ns, slept_ns);
    }

    /// Polls for up to `limit` until `count` completions (at most the requests in flight) wait;
    /// returns whether they do.
    pub fn look_for(&mut self, count: u32, limit: Duration) -> bool {
        let count = count.min(self.in_flight).max(1);
        if self.has(count) {
            return true;
        }
        let start = Instant::now();
        while start.elapsed() < limit {
            for _ in 0..LOOKS_PER_TICK {
                std::hint::spin_loop();
                if self.has(count) {
                    return true;
                }
            }
        }
        false
    }

    /// Whether `count` completions wait. After the core has ended all requests count as completed.
    #[inline]
    fn has(&mut self, count: u32) -> bool {
        self.completions.available() >= count as usize || (self.in_flight > 0 && self.bells.is_gone())
    }

    /// Fails all requests in flight. Their core has ended, and nothing uses their memory any more.
    #[cold]
    fn fail_all(&mut self, done: &mut dyn FnMut(u32, IoResult)) -> usize {
        for (slot, is_busy) in self.is_busy.iter_mut().enumerate() {
            if std::mem::replace(is_busy, false) {
                done(slot as u32, Err(IoError::DeviceGone));
            }
        }
        std::mem::take(&mut self.in_flight) as usize
    }
}

impl Queue for BridgeQueue {
    fn depth(&self) -> u32 {
        self.is_busy.len() as u32
    }

    #[inline]
    unsafe fn push(&mut self, slot: u32, req: &Request<'_>, offset: u64) -> IoResult {
        let is_busy = &mut self.is_busy[slot as usize];
        assert!(!*is_busy, "slot {slot} is busy");
        if self.bells.is_gone() {
            return Err(IoError::DeviceGone);
        }
        *is_busy = true;
        self.in_flight += 1;
        // SAFETY: by contract the window's memory is valid until the completion has been reaped.
        let data = unsafe { std::mem::transmute::<Data<'_>, Data<'static>>(req.data) };
        let command = Command { op: req.op, flags: req.flags, slot, len: req.len, offset, data };
        // SAFETY: this slot was not busy, so fewer than `depth` commands have no completion; the
        // core has published the others' completions after it took those commands out.
        unsafe { self.requests.push(command) };
        Ok(())
    }

    #[inline]
    fn kick(&mut self) {
        if self.requests.publish() {
            self.bells.wake_core();
        }
    }

    #[inline]
    fn reap(&mut self, done: &mut dyn FnMut(u32, IoResult)) -> usize {
        // The mark orders all that the core published before it ended, so the ring is read after
        // it.
        let is_gone = self.in_flight > 0 && self.bells.is_gone();
        let mut count = 0;
        while let Some(Completion { slot, result }) = self.completions.pop() {
            self.is_busy[slot as usize] = false;
            done(slot, result);
            count += 1;
        }
        self.in_flight -= count as u32;
        if is_gone { count + self.fail_all(done) } else { count }
    }

    fn event_fd(&self) -> Option<RawFd> {
        (!self.is_polled).then(|| self.bells.caller_fd())
    }

    fn arm(&mut self) -> bool {
        self.arm_for(1)
    }

    fn disarm(&mut self) {
        self.bells.disarm_caller();
    }
}

impl Drop for BridgeQueue {
    fn drop(&mut self) {
        self.kick();
        while self.in_flight > 0 {
            if self.reap(&mut |_, _| ()) == 0 {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
        self.engine.stop(&self.cores);
    }
}
