//! Random operations, checked against the states that driver and device should see.

use super::*;
use proptest::prelude::*;
use std::collections::VecDeque;

#[derive(Clone, Debug)]
enum Step {
    Add {
        readable: Vec<u32>,
        writable: Vec<u32>,
        is_indirect: bool,
    },
    Pop(u8),
    Push(u8),
    Publish,
    Poll(u8),
    WantInterrupts(bool),
    WantNotifications(bool),
    /// A new queue takes over, as at the end of a migration.
    Restart,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let lens = || proptest::collection::vec(1u32..5000, 0..4);
    let step = prop_oneof![
        6 => (lens(), lens(), any::<bool>()).prop_map(|(readable, writable, is_indirect)| Step::Add {
            readable,
            writable,
            is_indirect
        }),
        4 => (1u8..5).prop_map(Step::Pop),
        6 => any::<u8>().prop_map(Step::Push),
        4 => Just(Step::Publish),
        4 => (1u8..8).prop_map(Step::Poll),
        2 => any::<bool>().prop_map(Step::WantInterrupts),
        2 => any::<bool>().prop_map(Step::WantNotifications),
        1 => Just(Step::Restart),
    ];
    proptest::collection::vec(step, 1..400)
}

/// The expected state.
struct Model {
    guest: Guest,
    is_packed: bool,
    size: u16,
    event_idx: bool,
    driver: Driver,
    queue: VirtQueue,
    next_token: u64,
    available: VecDeque<(u64, Vec<Buffer>)>,
    popped: Vec<(Chain, u64)>,
    pushed: VecDeque<(u64, u32)>,
    published: VecDeque<(u64, u32)>,
    wants_interrupts: bool,
    /// Whether the last used chains raised no interrupt.
    is_polled: bool,
    /// Whether the next chain must raise a notification; `None` when either is valid.
    notifies: Option<bool>,
}

impl Model {
    fn new(size: u16, is_packed: bool, event_idx: bool) -> Model {
        let guest = Guest::new();
        Model {
            driver: Driver::new(&guest, size, is_packed, event_idx),
            queue: VirtQueue::new(QueueConfig { event_idx, ..guest.config(size, is_packed) }).unwrap(),
            guest,
            is_packed,
            size,
            event_idx,
            next_token: 0,
            available: VecDeque::new(),
            popped: Vec::new(),
            pushed: VecDeque::new(),
            published: VecDeque::new(),
            wants_interrupts: true,
            is_polled: false,
            notifies: Some(true),
        }
    }

    fn step(&mut self, step: &Step) {
        match step {
            Step::Add { readable, writable, is_indirect } => self.add(readable, writable, *is_indirect),
            Step::Pop(count) => (0..*count).for_each(|_| self.pop()),
            Step::Push(which) => self.push((*which).into()),
            Step::Publish => self.publish(),
            Step::Poll(count) => (0..*count).for_each(|_| self.poll()),
            Step::WantInterrupts(wanted) => self.wants_interrupts = *wanted,
            Step::WantNotifications(wanted) => self.want_notifications(*wanted),
            Step::Restart => self.restart(),
        }
        assert_eq!(self.queue.has_available(), !self.available.is_empty());
        assert_eq!(usize::from(self.queue.in_flight()), self.popped.len());
    }

    fn add(&mut self, readable: &[u32], writable: &[u32], is_indirect: bool) {
        let lens = readable.iter().map(|&len| (len, false)).chain(writable.iter().map(|&len| (len, true)));
        let buffers: Vec<Buffer> = lens
            .enumerate()
            .map(|(i, (len, is_writable))| match len % 7 {
                0 => Buffer { addr: HIGH + u64::from(len % 0x800), len: len % 0x800 + 1, is_writable },
                _ => {
                    // Some lie over the border of two regions.
                    let addr = HEAP + 0x1_0000 + (self.next_token * 977 + i as u64 * 5003) % 0x4_8000;
                    Buffer { addr, len, is_writable }
                }
            })
            .collect();
        if buffers.is_empty() || !self.driver.add(&buffers, is_indirect, self.next_token) {
            return;
        }
        if let Some(expected) = self.notifies {
            assert_eq!(self.driver.must_notify(), expected);
        }
        if self.event_idx && self.notifies == Some(true) {
            self.notifies = None; // the request was for one chain
        }
        self.available.push_back((self.next_token, buffers));
        self.next_token += 1;
    }

    fn pop(&mut self) {
        let mut chain = Chain::new();
        let mut has_popped = self.queue.pop(&mut chain).unwrap();
        if !has_popped && !self.available.is_empty() {
            assert!(!self.is_packed && self.is_polled && !self.pushed.is_empty());
            self.publish();
            has_popped = self.queue.pop(&mut chain).unwrap();
        }
        assert_eq!(has_popped, !self.available.is_empty());
        let Some((token, buffers)) = self.available.pop_front() else { return };
        let sides = [(chain.readable(), false), (chain.writable(), true)];
        for (segments, is_writable) in sides {
            // Buffers over a border come as two segments.
            let got: Vec<u64> = segments
                .iter()
                .flat_map(|s| {
                    let start = self.guest.0.guest_addr_of(s.base).unwrap();
                    start..start + s.len as u64
                })
                .collect();
            let wanted: Vec<u64> = buffers
                .iter()
                .filter(|b| b.is_writable == is_writable)
                .flat_map(|b| b.addr..b.addr + u64::from(b.len))
                .collect();
            assert_eq!(got, wanted);
        }
        self.popped.push((chain, token));
    }

    fn push(&mut self, which: usize) {
        if self.popped.is_empty() {
            return;
        }
        let (mut chain, token) = self.popped.swap_remove(which % self.popped.len());
        let written = token as u32 * 3;
        self.queue.push_used(&mut chain, written);
        self.pushed.push_back((token, written));
    }

    fn publish(&mut self) {
        // The driver sets its event request when it has no more used chains to read, as drivers do.
        let is_idle = self.published.is_empty();
        if is_idle {
            self.driver.want_interrupts(self.wants_interrupts);
        }
        let interrupts = self.queue.publish();
        let count = self.pushed.len();
        if count > 0 {
            self.is_polled = !interrupts;
        }
        self.published.append(&mut self.pushed);
        if is_idle {
            assert_eq!(interrupts, self.wants_interrupts && count > 0);
        }
    }

    fn poll(&mut self) {
        assert_eq!(self.driver.poll(), self.published.pop_front());
    }

    fn want_notifications(&mut self, wanted: bool) {
        match wanted {
            true => assert_eq!(self.queue.enable_notifications(), !self.available.is_empty()),
            false => self.queue.disable_notifications(),
        }
        self.notifies = match wanted {
            true if self.event_idx && !self.available.is_empty() => None,
            false if self.event_idx && !self.is_packed => None,
            _ => Some(wanted),
        };
    }

    fn restart(&mut self) {
        while !self.popped.is_empty() {
            self.push(0);
        }
        self.publish();
        while !self.published.is_empty() {
            self.poll();
        }
        let state = self.queue.state();
        let again = RingState::from_vring_base(state.to_vring_base(), self.is_packed);
        assert_eq!(state, again);
        let base = self.guest.config(self.size, self.is_packed);
        let config = QueueConfig { event_idx: self.event_idx, state: again, ..base };
        self.queue = VirtQueue::new(config).unwrap();
        self.is_polled = false;
        self.notifies = (!self.event_idx || self.available.is_empty()).then_some(true);
        assert_eq!(
            self.queue.publish(),
            self.next_token > self.available.len() as u64 && !self.is_at_start()
        );
        assert!(!self.queue.publish());
    }

    /// Whether the used position equals that of an unused ring.
    fn is_at_start(&self) -> bool {
        self.driver.used == 0 && self.driver.used_wrap
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]
    #[test]
    fn every_chain_goes_round_once_and_in_order(
        size in prop_oneof![Just(1u16), Just(2), Just(8), Just(64)],
        odd in 0u16..3,
        is_packed: bool,
        event_idx: bool,
        steps in steps(),
    ) {
        let size = if is_packed { size + odd } else { size };
        let mut model = Model::new(size, is_packed, event_idx);
        steps.iter().for_each(|step| model.step(step));
    }
}

#[test]
fn a_driver_that_polls_sees_used_chains_before_more_are_popped() {
    for (event_idx, wants_interrupts) in [(false, false), (true, false), (false, true), (true, true)] {
        let guest = Guest::new();
        let mut driver = Driver::new(&guest, 8, false, event_idx);
        let mut queue = VirtQueue::new(QueueConfig { event_idx, ..guest.config(8, false) }).unwrap();
        let mut chain = Chain::new();
        for token in 0..20 {
            let buffer = Buffer { addr: HEAP + 0x1_0000, len: 512, is_writable: true };
            driver.want_interrupts(wants_interrupts);
            assert!(driver.add(&[buffer], false, token));
            assert_eq!(queue.pop(&mut chain), Ok(true));
            queue.push_used(&mut chain, 512);
            assert!(driver.add(&[buffer], false, token + 100));
            // The queue does not know the driver before the first used chain.
            let comes_at_once = wants_interrupts || token == 0;
            assert_eq!(queue.pop(&mut chain), Ok(comes_at_once));
            if !comes_at_once {
                assert_eq!(driver.poll(), None);
                assert!(!queue.publish() && queue.has_available());
                assert_eq!(queue.pop(&mut chain), Ok(true));
            }
            queue.push_used(&mut chain, 512);
            assert_eq!(queue.publish(), wants_interrupts);
            assert_eq!((driver.poll(), driver.poll()), (Some((token, 512)), Some((token + 100, 512))));
            assert_eq!(driver.poll(), None);
        }
    }
}

#[test]
fn a_split_ring_goes_on_past_the_wrap_of_its_indices() {
    for event_idx in [false, true] {
        let mut model = Model::new(4, false, event_idx);
        let add = Step::Add { readable: vec![16], writable: vec![1], is_indirect: true };
        for i in 0..70_000u32 {
            for step in [&add, &Step::Pop(1), &Step::Push(0), &Step::Publish, &Step::Poll(1)] {
                model.step(step);
            }
            if i % 1000 == 0 {
                model.step(&Step::WantNotifications(true));
                model.step(&Step::WantInterrupts(i % 3000 == 0));
            }
        }
    }
}
