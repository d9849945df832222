//! The device side: a queue and its requests in flight. Every promise of `virtio::device` is
//! checked.

use crate::guest::{FIRST_BYTES, USER};
use crate::input::Input;
use crate::memfd::Memfd;
use block::Data;
use std::os::fd::AsRawFd;
use std::rc::Rc;
use std::sync::Arc;
use virtio::blk::{self, Command};
use virtio::device::{
    Chain, MAX_SEGMENTS, QueueConfig, QueueLog, RingAreas, RingError, RingState, VirtQueue,
};
use virtio::dirty_log::{DirtyLog, LOG_PAGE_BYTES};
use virtio::inflight::InflightRegion;
use virtio::memory::GuestMemory;

/// Negotiated values of a ring.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Entries.
    pub size: u16,
    /// Split or packed.
    pub is_packed: bool,
    /// VIRTIO_F_EVENT_IDX.
    pub event_idx: bool,
    /// VIRTIO_F_INDIRECT_DESC.
    pub indirect: bool,
    /// Addresses of the ring.
    pub areas: RingAreas,
}

/// A popped chain and its memory.
#[derive(Debug)]
struct Held {
    chain: Chain,
    memory: Arc<GuestMemory>,
}

/// See the module.
#[derive(Debug)]
pub struct Device {
    settings: Settings,
    queue: VirtQueue,
    memory: Arc<GuestMemory>,
    held: Vec<Held>,
    /// Chains for reuse.
    spare: Vec<Chain>,
    inflight: Option<InflightRegion>,
    log: Option<Log>,
    /// Chains pushed since the last publish.
    unpublished: usize,
}

/// A dirty log, and the guest's view of it.
#[derive(Debug)]
struct Log {
    queue: QueueLog,
    file: Rc<Memfd>,
    /// Range in the file, in bytes.
    place: std::ops::Range<usize>,
}

impl Log {
    /// Asserts that the pages of these bytes are marked, within the log's length.
    fn check(&self, addr: u64, len: u64) {
        for page in addr / LOG_PAGE_BYTES..=(addr + (len - 1)) / LOG_PAGE_BYTES {
            let Some(at) = self.place.clone().nth((page / 8) as usize) else { return };
            assert!(self.file.read::<1>(at)[0] >> (page % 8) & 1 == 1, "page {page} is not in the dirty log");
        }
    }
}

impl Device {
    /// Takes over a ring at `base`.
    pub fn start(
        settings: Settings,
        base: u32,
        memory: Arc<GuestMemory>,
        inflight: Option<InflightRegion>,
    ) -> Result<Device, RingError> {
        let queue = VirtQueue::new(config(settings, base, &memory, &inflight, &None))?;
        let (held, spare) = Default::default();
        Ok(Device { settings, queue, memory, held, spare, inflight, log: None, unpublished: 0 })
    }

    /// IDs of the chains in flight.
    pub fn held(&self) -> impl Iterator<Item = u16> {
        self.held.iter().map(|held| held.chain.id())
    }

    /// Pops a chain and checks that it lies in guest memory. Returns its ID and the number of bytes
    /// to read and to write.
    pub fn pop(&mut self) -> Result<Option<(u16, [u64; 2])>, RingError> {
        let mut chain = self.spare.pop().unwrap_or_default();
        let popped = self.queue.pop(&mut chain);
        if !matches!(popped, Ok(true)) {
            assert!(!chain.is_in_flight() && chain.readable().is_empty() && chain.writable().is_empty());
            if let Err(error) = popped {
                assert_eq!(self.queue.pop(&mut chain), Err(error), "an error is permanent");
            }
            self.spare.push(chain);
            return popped.map(|_| None);
        }
        assert!(chain.is_in_flight() && chain.id() < self.settings.size);
        let segments = || chain.readable().iter().chain(chain.writable());
        assert!((1..=MAX_SEGMENTS).contains(&segments().count()));
        for segment in segments() {
            assert!(segment.len > 0);
            let place = region_of(&self.memory, segment.base);
            let (_, left) = place.expect("a segment starts in guest memory");
            assert!(segment.len as u64 <= left, "a segment leaves its region");
        }
        let lens = [chain.readable(), chain.writable()].map(|part| part.iter().map(|s| s.len as u64).sum());
        let popped = (chain.id(), lens);
        self.held.push(Held { chain, memory: self.memory.clone() });
        assert_eq!(usize::from(self.queue.in_flight()), self.held.len());
        Ok(Some(popped))
    }

    /// Executes the request in flight that `which` selects, and returns its chain.
    pub fn complete(&mut self, which: usize, fill: u8) {
        if self.held.is_empty() {
            return;
        }
        let mut held = self.held.swap_remove(which % self.held.len());
        let written = execute(&held.chain, fill);
        let writable = held.chain.writable().to_vec();
        self.clear_log();
        self.queue.push_used(&mut held.chain, written);
        self.unpublished += 1;
        assert!(!held.chain.is_in_flight() && held.chain.writable().is_empty());
        if let Some(log) = &self.log {
            for segment in writable {
                let (addr, _) = region_of(&held.memory, segment.base).expect("checked when it was popped");
                log.check(addr, segment.len as u64);
            }
        }
        self.spare.push(held.chain);
        assert_eq!(usize::from(self.queue.in_flight()), self.held.len());
    }

    /// Publishes the pushed chains.
    pub fn publish(&mut self) {
        self.clear_log();
        let state = self.queue.state();
        self.queue.publish();
        if let Some(log) = self.log.as_ref().filter(|_| self.unpublished > 0)
            && let Some(used_addr) = log.queue.used_addr
        {
            let written = match state {
                // A packed ring's addresses are its own, whatever the front-end passed when logging
                // began.
                RingState::Packed { used, .. } => {
                    let ring = self.settings.areas.descriptors.wrapping_sub(USER);
                    ring.wrapping_add(16 * u64::from(used.slot))
                }
                RingState::Split { .. } => used_addr,
            };
            if written < FIRST_BYTES {
                log.check(written, 1);
            }
        }
        self.unpublished = 0;
    }

    fn clear_log(&self) {
        if let Some(log) = &self.log {
            log.file.fill(0);
        }
    }

    /// Calls the methods of a queue that hardly change it.
    pub fn look_around(&mut self, which: u8) {
        match which % 4 {
            0 => self.queue.disable_notifications(),
            1 => {
                let has_work = self.queue.enable_notifications();
                assert_eq!(has_work, self.queue.has_available());
            }
            2 => {
                let limit = usize::from(which / 4);
                assert!(self.queue.available_hint(limit) <= limit);
            }
            _ => {
                let state = self.queue.state();
                let again = RingState::from_vring_base(state.to_vring_base(), self.settings.is_packed);
                assert_eq!(again, state);
            }
        }
    }

    /// Changes the guest's memory.
    pub fn set_memory(&mut self, memory: Arc<GuestMemory>, areas: RingAreas) -> Result<(), RingError> {
        self.queue.set_memory(memory.clone(), areas)?;
        (self.memory, self.settings.areas) = (memory, areas);
        Ok(())
    }

    /// Starts or stops logging to a part of `file`.
    pub fn set_log(&mut self, file: &Rc<Memfd>, input: &mut Input<'_>) {
        let (offset, len) = (usize::from(input.u8()), usize::from(input.u8()) + 1);
        let choices = input.u8();
        self.log = (choices & 3 > 0).then(|| {
            let log = DirtyLog::map(file.fd(), offset as u64, len as u64).expect("the file is large enough");
            let used_addr = (choices & 4 == 0).then(|| self.settings.areas.device.wrapping_sub(USER));
            let queue = QueueLog { log: Arc::new(log), used_addr };
            Log { queue, file: file.clone(), place: offset..offset + len }
        });
        self.queue.set_log(self.log.as_ref().map(|log| log.queue.clone()));
    }

    /// Whether a successor will find the requests in flight.
    pub fn is_tracked(&self) -> bool {
        self.inflight.is_some()
    }

    /// Ends the process: a successor takes over the ring at the position of the in-flight region,
    /// or at `base`.
    pub fn crash(mut self, base: u32) -> Result<Device, RingError> {
        // The memory of these chains would stay mapped forever. For the guest and the region this
        // is equivalent.
        self.held.drain(..).for_each(|mut held| self.queue.abandon(&mut held.chain));
        assert_eq!(self.queue.in_flight(), 0);
        self.queue = VirtQueue::new(config(self.settings, base, &self.memory, &self.inflight, &self.log))?;
        self.unpublished = 0;
        Ok(self)
    }

    /// The position for a successor, if no chain is in flight or unpublished.
    pub fn handover(&self) -> Option<u32> {
        (self.held.is_empty() && self.unpublished == 0).then(|| self.queue.state().to_vring_base())
    }

    /// Writes into the in-flight region as the guest, if it exists.
    pub fn corrupt_inflight(&self, offset: u64, bytes: &[u8]) {
        if let Some(region) = &self.inflight {
            let (fd, len) = (region.fd().as_raw_fd(), bytes.len());
            // SAFETY: `bytes` is live and as long as said. Beyond the end the sealed file refuses.
            unsafe { libc::pwrite(fd, bytes.as_ptr().cast(), len, offset as i64) };
        }
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        self.held.drain(..).for_each(|mut held| self.queue.abandon(&mut held.chain));
    }
}

fn config(
    settings: Settings,
    base: u32,
    memory: &Arc<GuestMemory>,
    inflight: &Option<InflightRegion>,
    log: &Option<Log>,
) -> QueueConfig {
    QueueConfig {
        size: settings.size,
        areas: settings.areas,
        state: RingState::from_vring_base(base, settings.is_packed),
        event_idx: settings.event_idx,
        indirect: settings.indirect,
        memory: memory.clone(),
        inflight: inflight.as_ref().and_then(|region| region.queue(0)),
        log: log.as_ref().map(|log| log.queue.clone()),
    }
}

/// Guest address of a byte of this process, and the number of bytes up to the end of its region.
fn region_of(memory: &GuestMemory, at: *const u8) -> Option<(u64, u64)> {
    memory.regions().find_map(|region| {
        let offset = at.addr().checked_sub(region.host_addr().addr())? as u64;
        (offset < region.len()).then(|| (region.guest_addr() + offset, region.len() - offset))
    })
}

/// Touches every byte that a device may touch. Returns the number of bytes to report to the driver.
fn execute(chain: &Chain, fill: u8) -> u32 {
    let Ok(request) = blk::parse(chain) else {
        assert!(chain.writable().is_empty(), "there is room for a status");
        return 0;
    };
    match request.command {
        Command::Read { data, .. } => {
            check_inside(&data, chain.writable());
            assert_eq!(data.len().min(u32::MAX as usize), request.writable_len as usize);
            data.fill(fill);
        }
        Command::GetId(data) => {
            check_inside(&data, chain.writable());
            data.copy_from(&[fill; blk::ID_BYTES]);
        }
        Command::Write { data, .. } => {
            check_inside(&data, chain.readable());
            let mut bytes = [0; 0x1000];
            assert_eq!(data.copy_to(&mut bytes), data.len().min(0x1000));
            data.iter().for_each(|s| touch_ends(&s));
        }
        Command::Discard(ranges) | Command::WriteZeroes(ranges) => {
            assert!((1..=blk::MAX_RANGES).contains(&ranges.len()));
            ranges.for_each(|range| {
                let _ = range.sector.checked_add(u64::from(range.num_sectors));
            });
        }
        Command::Flush | Command::Unknown(_) | Command::Malformed(_) => {}
    }
    request.status.set(fill);
    request.writable_len.saturating_add(1)
}

/// Reads the first and the last byte without using them.
fn touch_ends(segment: &block::Segment) {
    for at in [0, segment.len - 1] {
        // SAFETY: the segment is part of a chain in flight, whose memory is mapped.
        std::hint::black_box(unsafe { segment.base.add(at).read_volatile() });
    }
}

fn check_inside(data: &Data<'_>, segments: &[block::Segment]) {
    for part in data.iter() {
        let is_in = |s: &block::Segment| {
            let from = part.base.addr().checked_sub(s.base.addr());
            from.is_some_and(|from| from <= s.len && part.len <= s.len - from)
        };
        assert!(segments.iter().any(is_in), "data outside the chain");
    }
}
