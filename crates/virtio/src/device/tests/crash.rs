//! A device that is killed at every store it makes, and its successors.

use super::*;
use crate::crash_point::fuse::run_killed_after;
use crate::inflight::InflightRegion;

const REQUESTS: u64 = 24;

/// State that outlives a device: guest, driver and in-flight region.
struct World {
    guest: Guest,
    driver: Driver,
    region: InflightRegion,
    size: u16,
    is_packed: bool,
    next_request: u64,
    completed: Vec<u64>,
    /// Changes the rhythm of pops and pushes.
    seed: u64,
}

impl World {
    fn new(guest: &Guest, size: u16, is_packed: bool, seed: u64) -> World {
        guest.clear_rings();
        World {
            guest: guest.clone(),
            driver: Driver::new(guest, size, is_packed, false),
            region: InflightRegion::create(2, size, is_packed).unwrap(),
            size,
            is_packed,
            next_request: 0,
            completed: Vec::new(),
            seed,
        }
    }

    fn random(&mut self, below: u64) -> u64 {
        self.seed = self.seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.seed >> 33) % below
    }

    /// Runs the guest, with or without a live device.
    fn guest_turn(&mut self) {
        while let Some((request, written)) = self.driver.poll() {
            assert_eq!(u64::from(written), request + 7, "another request's completion");
            self.completed.push(request);
        }
        while self.next_request < REQUESTS {
            // The first buffer identifies the request.
            let request = self.next_request;
            let buffers: Vec<Buffer> = (0..1 + request % 3)
                .map(|i| Buffer {
                    addr: HEAP + 0x1_0000 + request * 16 + i * 0x1000,
                    len: 16,
                    is_writable: i > 0,
                })
                .collect();
            if !self.driver.add(&buffers, request % 4 == 3, request) {
                break;
            }
            self.next_request += 1;
        }
    }

    /// A device's life, from its start to the last completion unless it is killed.
    fn device_life(&mut self) {
        let base = self.guest.config(self.size, self.is_packed);
        // A wrong base, as front-ends pass after a crash: the region's position takes precedence.
        let state = RingState::from_vring_base(if self.is_packed { 0x8000_8000 } else { 0 }, self.is_packed);
        let config = QueueConfig { inflight: self.region.queue(1), state, ..base };
        let mut queue = VirtQueue::new(config).unwrap();
        let mut working: Vec<(Chain, u64)> = Vec::new();
        let mut newest = None;
        for _ in 0..2000 {
            if self.completed.len() as u64 == REQUESTS {
                return;
            }
            for _ in 0..self.random(5) {
                let mut chain = Chain::new();
                if !queue.pop(&mut chain).unwrap() {
                    break;
                }
                let request = self.request_of(&chain);
                assert!(newest < Some(request), "request {request} is popped after {newest:?}");
                assert!(!self.completed.contains(&request));
                newest = Some(request);
                working.push((chain, request));
            }
            for _ in 0..self.random(4) {
                if working.is_empty() {
                    break;
                }
                let which = self.random(working.len() as u64) as usize;
                let (mut chain, request) = working.swap_remove(which);
                queue.push_used(&mut chain, request as u32 + 7);
                if self.random(4) == 0 && queue.pop(&mut chain).unwrap() {
                    // Popped while a batch is open.
                    let request = self.request_of(&chain);
                    assert!(newest < Some(request));
                    newest = Some(request);
                    working.push((chain, request));
                }
            }
            if self.random(3) > 0 {
                queue.publish();
            }
            if self.random(3) > 0 {
                self.guest_turn();
            }
        }
        panic!("requests were lost: completed {:?}, in flight {}", self.completed, queue.in_flight());
    }

    fn request_of(&self, chain: &Chain) -> u64 {
        let request = (self.guest.0.guest_addr_of(chain.readable()[0].base).unwrap() - HEAP - 0x1_0000) / 16;
        assert_eq!(chain.readable().len() + chain.writable().len(), 1 + request as usize % 3);
        request
    }

    fn check_end(&mut self) {
        self.guest_turn();
        self.completed.sort_unstable();
        assert_eq!(self.completed, (0..REQUESTS).collect::<Vec<_>>());
    }
}

/// Kills devices after these numbers of stores, one after the other, and lets the last one live.
/// Returns `false` when the first one ended before it was killed.
fn survives(guest: &Guest, size: u16, is_packed: bool, seed: u64, kills: &[u64]) -> bool {
    let mut world = World::new(guest, size, is_packed, seed);
    world.guest_turn();
    for (i, &stores) in kills.iter().enumerate() {
        if run_killed_after(stores, || world.device_life()).is_some() {
            world.check_end();
            return i > 0;
        }
        if (seed ^ stores).is_multiple_of(2) {
            world.guest_turn();
        }
    }
    world.device_life();
    world.check_end();
    true
}

/// Kills a device at every store, for rings of several sizes. The successors are killed after
/// `again[i]` stores and half as many, or not at all.
fn killed_everywhere(is_packed: bool, sizes: &[u16], seeds: u64, again: &[u64]) {
    let guest = Guest::new();
    for &size in sizes {
        for seed in 0..seeds {
            for stores in 0.. {
                let lives = |&again| survives(&guest, size, is_packed, seed, &[stores, again, again / 2]);
                let was_killed = match again {
                    [] => survives(&guest, size, is_packed, seed, &[stores]),
                    _ => again.iter().map(lives).fold(false, |any, killed| any | killed),
                };
                if !was_killed {
                    assert!(stores > 80, "the test kills no process");
                    break;
                }
            }
        }
    }
}

#[test]
fn a_split_queue_that_is_killed_anywhere_completes_every_request_once() {
    killed_everywhere(false, &[4, 8, 16], 4, &[]);
}

#[test]
fn a_packed_queue_that_is_killed_anywhere_completes_every_request_once() {
    killed_everywhere(true, &[3, 4, 7, 16], 4, &[]);
}

#[test]
fn a_split_queue_that_is_killed_while_it_recovers_completes_every_request_once() {
    killed_everywhere(false, &[4, 8], 1, &[0, 1, 2, 3, 4, 6, 9]);
}

#[test]
fn a_packed_queue_that_is_killed_while_it_recovers_completes_every_request_once() {
    killed_everywhere(true, &[4, 7], 1, &[0, 1, 2, 3, 4, 6, 9, 13]);
}

#[test]
fn abandoned_chains_are_popped_again_by_the_successor() {
    for is_packed in [false, true] {
        let guest = Guest::new();
        let mut world = World::new(&guest, 8, is_packed, 1);
        world.guest_turn();
        let config = || QueueConfig { inflight: world.region.queue(1), ..guest.config(8, is_packed) };
        let mut queue = VirtQueue::new(config()).unwrap();
        let mut chains: Vec<Chain> = (0..4).map(|_| Chain::new()).collect();
        chains.iter_mut().for_each(|chain| assert_eq!(queue.pop(chain), Ok(true)));
        queue.push_used(&mut chains[2], 9);
        queue.publish();
        [0, 1, 3].into_iter().for_each(|i| queue.abandon(&mut chains[i]));
        assert_eq!(queue.in_flight(), 0);
        drop(queue);
        world.guest_turn();
        let config = || QueueConfig { inflight: world.region.queue(1), ..guest.config(8, is_packed) };
        let mut queue = VirtQueue::new(config()).unwrap();
        assert!(queue.publish(), "the predecessor may have died before it interrupted");
        let mut popped = Vec::new();
        for chain in &mut chains {
            assert_eq!(queue.pop(chain), Ok(true));
            popped.push(world.request_of(chain));
        }
        assert_eq!(popped, [0, 1, 3, 4]);
        chains.iter_mut().for_each(|chain| queue.abandon(chain));
    }
}

#[test]
fn a_region_that_makes_no_sense_is_refused() {
    use std::os::unix::fs::FileExt;
    for is_packed in [false, true] {
        let guest = Guest::new();
        let mut world = World::new(&guest, 8, is_packed, 1);
        world.guest_turn();
        let mut chains: Vec<Chain> = (0..4).map(|_| Chain::new()).collect();
        let config =
            |region: &InflightRegion| QueueConfig { inflight: region.queue(0), ..guest.config(8, is_packed) };
        let mut queue = VirtQueue::new(config(&world.region)).unwrap();
        chains.iter_mut().for_each(|chain| assert_eq!(queue.pop(chain), Ok(true)));
        let file = std::fs::File::from(world.region.fd().try_clone_to_owned().unwrap());
        let mut bytes = vec![0; InflightRegion::size(1, 8, is_packed) as usize];
        file.read_exact_at(&mut bytes, 0).unwrap();
        // Any byte may have any value: the result is a chain or an error, without a panic or an
        // access outside memory.
        let mut refused = 0;
        for offset in 0..bytes.len() {
            for value in [0, 1, 0x7f, 0xff] {
                let mut changed = bytes.clone();
                changed[offset] = value;
                file.write_all_at(&changed, 0).unwrap();
                let Ok(mut queue) = VirtQueue::new(config(&world.region)) else {
                    refused += 1;
                    continue;
                };
                let mut chain = Chain::new();
                while queue.pop(&mut chain) == Ok(true) {
                    queue.push_used(&mut chain, 0);
                }
            }
        }
        assert!(refused > 10);
        chains.iter_mut().for_each(|chain| queue.abandon(chain));
    }
}
