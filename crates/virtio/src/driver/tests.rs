//! The driver side against this crate's device side, and against hostile devices.

use super::*;
use crate::blk::{
    Command, Header, ID_BYTES, Range, VIRTIO_BLK_T_DISCARD, VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT, parse,
};
use crate::device::{Chain, QueueConfig, RingAreas, RingState, VirtQueue};
use crate::mapping::sealed_file;
use crate::memory::{GuestMemory, RegionSpec};
use crate::ring::{PackedRing, SplitRing};
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

const GUEST: u64 = 0x20_0000;
const USER: u64 = 0x7000_0000_0000;
const LEN: u64 = 0x10_0000;
/// Offset of the data of slot `i`: `DATA + i * DATA_STRIDE`, in the upper half.
const DATA: usize = 0x8_0000;
const DATA_STRIDE: usize = 0x1000;

struct Memory(Arc<GuestMemory>);

impl Memory {
    fn new() -> Memory {
        let fd = sealed_file(c"driver", LEN).unwrap();
        let spec = RegionSpec { guest_addr: GUEST, len: LEN, user_addr: USER, fd, fd_offset: 0 };
        Memory(Arc::new(GuestMemory::map(vec![spec]).unwrap()))
    }

    fn area(&self) -> SharedArea {
        let base = self.0.translate(GUEST, LEN).unwrap();
        SharedArea { base, guest_addr: GUEST, len: LEN as usize }
    }

    fn queue(&self, config: BlkQueueConfig) -> BlkQueue {
        // SAFETY: the tests keep the memory, and touch the lower half only as the device.
        unsafe { BlkQueue::new(config, self.area().part(0, DATA)) }
    }

    fn device(&self, config: BlkQueueConfig) -> VirtQueue {
        let layout = RingLayout::new(config.ring.size, config.ring.packed);
        VirtQueue::new(QueueConfig {
            size: config.ring.size,
            areas: RingAreas {
                descriptors: USER + layout.descriptors as u64,
                driver: USER + layout.driver as u64,
                device: USER + layout.device as u64,
            },
            state: RingState::from_vring_base(
                if config.ring.packed { 0x8000_8000 } else { 0 },
                config.ring.packed,
            ),
            event_idx: config.ring.event_idx,
            indirect: config.indirect,
            memory: self.0.clone(),
            inflight: None,
            log: None,
        })
        .unwrap()
    }

    fn bytes(&self, at: usize, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        // SAFETY: inside the region, to which no reference exists.
        unsafe { self.area().part(at, len).base.copy_to_nonoverlapping(bytes.as_mut_ptr(), len) };
        bytes
    }

    fn fill(&self, at: usize, len: usize, byte: u8) {
        // SAFETY: as above.
        unsafe { self.area().part(at, len).base.write_bytes(byte, len) };
    }
}

fn config(size: u16, packed: bool, event_idx: bool, indirect: bool) -> BlkQueueConfig {
    BlkQueueConfig { ring: RingConfig { size, packed, event_idx }, indirect, max_segments: (size - 2).min(6) }
}

fn every_config() -> impl Iterator<Item = BlkQueueConfig> {
    (0..8).flat_map(|bits| {
        [4u16, 8, 16, 64].map(|size| config(size, bits & 1 != 0, bits & 2 != 0, bits & 4 != 0))
    })
}

/// Pseudorandom numbers, the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

/// The driver's record of a request in flight.
#[derive(Clone, Copy)]
struct Expected {
    number: u64,
    segments: usize,
    is_read: bool,
}

/// A request that the device holds.
struct Held {
    chain: Chain,
    sector: u64,
}

struct World {
    memory: Memory,
    driver: BlkQueue,
    device: VirtQueue,
    random: Random,
    in_flight: Vec<Option<Expected>>,
    held: Vec<Held>,
    next: u64,
    completed: u64,
    /// The driver sleeps until it gets an interrupt, the device until it gets a kick.
    driver_sleeps: bool,
    device_sleeps: bool,
}

impl World {
    fn new(config: BlkQueueConfig, seed: u64) -> World {
        let memory = Memory::new();
        let driver = memory.queue(config);
        let device = memory.device(config);
        World {
            driver,
            device,
            memory,
            random: Random(seed),
            in_flight: vec![None; config.depth().into()],
            held: Vec::new(),
            next: 0,
            completed: 0,
            driver_sleeps: false,
            device_sleeps: false,
        }
    }

    fn data(slot: usize, segments: usize) -> Vec<Buffer> {
        let buffer = |i| Buffer { addr: GUEST + (DATA + slot * DATA_STRIDE + i * 512) as u64, len: 512 };
        (0..segments).map(buffer).collect()
    }

    fn driver_pushes(&mut self) {
        let free: Vec<usize> = (0..self.in_flight.len()).filter(|i| self.in_flight[*i].is_none()).collect();
        let wanted = self.random.below(free.len() + 1);
        for &slot in &free[..wanted] {
            let max = usize::from(self.driver.config().max_segments);
            let segments = 1 + self.random.below(max) * self.random.below(2);
            let request = Expected { number: self.next, segments, is_read: self.random.below(2) == 0 };
            let kind = if request.is_read { VIRTIO_BLK_T_IN } else { VIRTIO_BLK_T_OUT };
            let header = Header { kind, ioprio: 0, sector: request.number };
            let byte = if request.is_read { 0 } else { request.number as u8 };
            self.memory.fill(DATA + slot * DATA_STRIDE, segments * 512, byte);
            let data = Self::data(slot, segments);
            let pushed = match &data[..] {
                [single] => self.driver.push_single(slot as u16, header, *single, request.is_read),
                data => self.driver.push(slot as u16, header, data, request.is_read),
            };
            match pushed {
                Ok(()) => {}
                Err(PushError::Full) if !self.driver.config().indirect => break,
                Err(error) => panic!("{error:?}"),
            }
            self.in_flight[slot] = Some(request);
            self.next += 1;
        }
        if self.driver.publish() {
            self.device_sleeps = false;
        }
    }

    fn device_works(&mut self) {
        if self.device_sleeps {
            return;
        }
        self.device.disable_notifications();
        let mut chain = Chain::new();
        while self.random.below(8) > 0 && self.device.pop(&mut chain).unwrap() {
            let request = parse(&chain).unwrap();
            let (Command::Read { sector, data } | Command::Write { sector, data }) = request.command else {
                panic!("{:?}", request.command)
            };
            if matches!(request.command, Command::Read { .. }) {
                data.fill(sector as u8);
            } else {
                let mut bytes = vec![0; data.len()];
                data.copy_to(&mut bytes);
                assert!(bytes == vec![sector as u8; bytes.len()]);
            }
            request.status.set((sector % 3) as u8);
            self.held.push(Held { chain: std::mem::replace(&mut chain, Chain::new()), sector });
        }
        let wanted = self.random.below(self.held.len() + 1);
        for _ in 0..wanted {
            let which = self.random.below(self.held.len());
            let mut held = self.held.swap_remove(which);
            self.device.push_used(&mut held.chain, held.sector as u32);
        }
        if self.device.publish() {
            self.driver_sleeps = false;
        }
        if self.random.below(3) == 0 && !self.device.enable_notifications() && self.held.is_empty() {
            self.device_sleeps = true;
        }
    }

    fn driver_reaps(&mut self) {
        if self.driver_sleeps {
            return;
        }
        self.driver.disarm();
        let (in_flight, memory, completed) = (&mut self.in_flight, &self.memory, &mut self.completed);
        let count = self.driver.reap(|slot, status| {
            let slot = usize::from(slot);
            let request = in_flight[slot].take().expect("a completion of a request in flight");
            assert_eq!(status, (request.number % 3) as u8);
            let bytes = memory.bytes(DATA + slot * DATA_STRIDE, request.segments * 512);
            assert!(bytes == vec![request.number as u8; bytes.len()], "{}", request.is_read);
            *completed += 1;
        });
        count.unwrap();
        if self.random.below(3) == 0 {
            self.driver_sleeps = self.driver.arm();
        }
    }
}

#[test]
fn every_request_arrives_whole_and_comes_back_once_and_no_side_oversleeps() {
    for config in every_config() {
        for seed in 0..3 {
            let mut world = World::new(config, seed);
            for turn in 0..100_000 {
                match world.random.below(3) {
                    // Once enough has been pushed, the rest must complete without the kick of
                    // another push.
                    0 if world.next < 300 => world.driver_pushes(),
                    1 => world.device_works(),
                    _ => world.driver_reaps(),
                }
                if world.next >= 300 && world.completed == world.next {
                    break;
                }
                assert!(turn < 99_999, "{config:?}: {} of {} came back", world.completed, world.next);
            }
        }
    }
}

#[test]
fn indexes_wrap_around_unnoticed_by_both_sides() {
    for config in every_config().filter(|config| config.ring.size == 8) {
        let memory = Memory::new();
        let (mut driver, mut device) = (memory.queue(config), memory.device(config));
        let mut chain = Chain::new();
        for number in 0..70_000u64 {
            let header = Header { kind: VIRTIO_BLK_T_IN, ioprio: 0, sector: number };
            driver.push_single((number % 2) as u16, header, World::data(0, 1)[0], true).unwrap();
            driver.publish();
            assert!(device.pop(&mut chain).unwrap());
            device.push_used(&mut chain, 1);
            device.publish();
            assert_eq!(driver.reap(|slot, _| assert_eq!(u64::from(slot), number % 2)), Ok(1));
        }
    }
}

#[test]
fn a_polling_driver_costs_the_device_no_interrupt() {
    for config in every_config() {
        let mut world = World::new(config, 1);
        let mut interrupts = 0;
        for _ in 0..500 {
            world.driver_pushes();
            world.driver_sleeps = true;
            world.device_sleeps = false;
            world.device_works();
            interrupts += u32::from(!world.driver_sleeps);
            world.driver_sleeps = false;
            world.driver.reap(|slot, _| world.in_flight[usize::from(slot)] = None).unwrap();
        }
        assert_eq!(interrupts, 0, "{config:?}");
    }
}

#[test]
fn a_split_rings_descriptor_stays_as_it_is_while_its_slot_is_reused() {
    let memory = Memory::new();
    let config = config(8, false, true, true);
    let (mut driver, mut device) = (memory.queue(config), memory.device(config));
    let mut table = None;
    let mut chain = Chain::new();
    for round in 0..20u64 {
        for slot in [3, 5] {
            let header = Header { kind: VIRTIO_BLK_T_IN, ioprio: 0, sector: round };
            let data = Buffer { addr: GUEST + DATA as u64 + round * 512, len: 512 };
            driver.push_single(slot, header, data, round % 2 == 0).unwrap();
        }
        driver.publish();
        let now = memory.bytes(0, 8 * 16);
        assert_eq!(*table.get_or_insert(now.clone()), now);
        while device.pop(&mut chain).unwrap() {
            parse(&chain).unwrap().status.set(0);
            device.push_used(&mut chain, 1);
        }
        device.publish();
        assert_eq!(driver.reap(|_, _| ()), Ok(2));
    }
}

#[test]
fn ranges_and_identities_travel_in_the_queues_own_memory() {
    for config in every_config() {
        let memory = Memory::new();
        let (mut driver, mut device) = (memory.queue(config), memory.device(config));
        let range = Range { sector: 7, num_sectors: 9, flags: 1 };
        let mut chain = Chain::new();
        driver.push_range(0, VIRTIO_BLK_T_DISCARD, range).unwrap();
        driver.publish();
        assert!(device.pop(&mut chain).unwrap());
        let request = parse(&chain).unwrap();
        let Command::Discard(mut ranges) = request.command else { panic!("{config:?}: {request:?}") };
        assert_eq!((ranges.next(), ranges.next()), (Some(range), None));
        request.status.set(2);
        device.push_used(&mut chain, 1);
        device.publish();
        let mut status = None;
        driver.reap(|slot, s| status = Some((slot, s))).unwrap();
        assert_eq!(status, Some((0, 2)));

        driver.push_get_id(0).unwrap();
        driver.publish();
        assert!(device.pop(&mut chain).unwrap());
        let request = parse(&chain).unwrap();
        let Command::GetId(data) = request.command else { panic!("{config:?}: {request:?}") };
        assert_eq!(data.copy_from(b"a serial number, twenty and more"), ID_BYTES);
        request.status.set(0);
        device.push_used(&mut chain, ID_BYTES as u32 + 1);
        device.publish();
        assert_eq!(driver.reap(|_, _| ()), Ok(1));
        assert_eq!(&driver.id(0), b"a serial number, twe");
    }
}

#[test]
fn a_ring_full_of_plain_chains_takes_more_when_one_has_come_back() {
    for packed in [false, true] {
        let memory = Memory::new();
        let config = config(16, packed, false, false);
        let (mut driver, mut device) = (memory.queue(config), memory.device(config));
        let header = Header { kind: VIRTIO_BLK_T_OUT, ioprio: 0, sector: 0 };
        // Chains of 8, 6 and 3 descriptors do not fit in 16.
        driver.push(0, header, &World::data(0, 6), false).unwrap();
        driver.push(1, header, &World::data(1, 4), false).unwrap();
        assert_eq!(driver.push(2, header, &World::data(2, 1), false), Err(PushError::Full));
        assert_eq!(driver.push(2, header, &World::data(2, 7), false), Err(PushError::TooManySegments));
        driver.publish();
        let mut chain = Chain::new();
        assert!(device.pop(&mut chain).unwrap());
        parse(&chain).unwrap().status.set(0);
        device.push_used(&mut chain, 1);
        device.publish();
        assert_eq!(driver.reap(|slot, _| assert_eq!(slot, 0)), Ok(1));
        driver.push(2, header, &World::data(2, 1), false).unwrap();
    }
}

/// A queue of eight with slots 2 and 3 in flight.
fn two_in_flight(memory: &Memory, packed: bool) -> BlkQueue {
    let mut driver = memory.queue(config(8, packed, false, true));
    for slot in [2, 3] {
        let header = Header { kind: VIRTIO_BLK_T_IN, ioprio: 0, sector: 0 };
        driver.push_single(slot, header, World::data(0, 1)[0], true).unwrap();
    }
    driver.publish();
    driver
}

#[test]
fn no_entry_of_a_ring_lies_in_two_pages() {
    const PAGE: usize = 4096;
    for size in (0..=15).map(|shift| 1u16 << shift) {
        let layout = RingLayout::new(size, false);
        for index in 0..usize::from(size) {
            let at = layout.device + 4 + 8 * index;
            assert_eq!(at / PAGE, (at + 7) / PAGE, "used entry {index} of {size}");
        }
        assert_eq!((layout.driver % 2, layout.device % 4), (0, 0), "{size} entries");
        assert!(layout.device >= layout.driver + SplitRing::avail_bytes(size));
        assert!(layout.len >= layout.device + SplitRing::used_bytes(size));
        // The next queue's rings start at a page, too.
        let config = BlkQueueConfig {
            ring: RingConfig { size, packed: false, event_idx: false },
            indirect: true,
            max_segments: 16,
        };
        assert_eq!(config.memory_len() % PAGE, 0);
    }
}

#[test]
fn a_split_device_that_lies_breaks_the_ring_and_nothing_else() {
    let layout = RingLayout::new(8, false);
    let lies: [(u16, [u32; 2], RingBroken); 5] = [
        (3, [2, 3], RingBroken::UsedIndex(3)),
        (0xffff, [2, 3], RingBroken::UsedIndex(0xffff)),
        (2, [2, 2], RingBroken::UnknownId(2)),
        (1, [7, 0], RingBroken::UnknownId(7)),
        (1, [0x1_0002, 0], RingBroken::UnknownId(0x1_0002)),
    ];
    for (index, ids, broken) in lies {
        let memory = Memory::new();
        let mut driver = two_in_flight(&memory, false);
        let at = |offset| memory.area().base.wrapping_add(offset);
        // SAFETY: the ring's own memory, seen from the device.
        let ring = unsafe { SplitRing::new(8, at(layout.descriptors), at(layout.driver), at(layout.device)) };
        for (i, id) in ids.into_iter().enumerate() {
            ring.used_entry(i as u16).0.store(id, Relaxed);
        }
        ring.used_idx().store(index, Relaxed);
        for _ in 0..3 {
            assert_eq!(driver.reap(|slot, _| assert!([2, 3].contains(&slot))), Err(broken));
            assert!(!driver.arm());
        }
    }
}

#[test]
fn a_packed_device_that_lies_breaks_the_ring_and_nothing_else() {
    for ids in [[2, 2], [8, 3], [0xffff, 3], [1, 2]] {
        let memory = Memory::new();
        let mut driver = two_in_flight(&memory, true);
        let layout = RingLayout::new(8, true);
        let at = |offset| memory.area().base.wrapping_add(offset);
        // SAFETY: the ring's own memory, seen from the device.
        let ring =
            unsafe { PackedRing::new(8, at(layout.descriptors), at(layout.driver), at(layout.device)) };
        for (i, id) in ids.into_iter().enumerate() {
            ring.set_used(i as u16, 0, id);
            ring.flags(i as u16).store(0x8080, Relaxed);
        }
        for _ in 0..3 {
            let result = driver.reap(|slot, _| assert_eq!(slot, 2));
            assert!(matches!(result, Err(RingBroken::UnknownId(_))), "{ids:?}: {result:?}");
            assert!(!driver.arm());
        }
    }
}
