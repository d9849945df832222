//! Violations of the specification by a driver, case by case, and random data.

use super::*;
use crate::dirty_log::DirtyLog;
use proptest::prelude::*;
use std::os::fd::AsFd;

/// Makes descriptor 0 (split) or slot 0 (packed) available, whatever its content.
fn offer(guest: &Guest, is_packed: bool) {
    match is_packed {
        false => guest.write_u16(DRIVER + 2, 1),
        true => {
            let flags = guest.read_u16(DESC + 14);
            guest.write_u16(DESC + 14, flags & 0x7fff | 1 << 7);
        }
    }
}

fn put(guest: &Guest, is_packed: bool, index: u16, addr: u64, len: u32, flags: u16) {
    put_at(guest, is_packed, DESC + 16 * u64::from(index), addr, len, flags, index + 1);
}

fn put_at(guest: &Guest, is_packed: bool, at: u64, addr: u64, len: u32, flags: u16, next: u16) {
    match is_packed {
        false => guest.write_desc(at, addr, len, flags, next),
        true => guest.write_desc(at, addr, len, 0, flags),
    }
}

fn fill(guest: &Guest, is_packed: bool, descriptors: &[(u64, u32, u16)]) {
    guest.clear_rings();
    for (i, &(addr, len, flags)) in descriptors.iter().enumerate() {
        put(guest, is_packed, i as u16, addr, len, flags);
    }
    offer(guest, is_packed);
}

/// The result of a ring of 8 entries for these descriptors in its first places; it must be the same
/// twice.
fn pop_of(guest: &Guest, is_packed: bool, descriptors: &[(u64, u32, u16)]) -> Result<Vec<usize>, RingError> {
    fill(guest, is_packed, descriptors);
    let mut queue = guest.queue(8, is_packed);
    let mut chain = Chain::new();
    let result = queue.pop(&mut chain);
    if let Err(error) = result {
        assert_eq!(queue.pop(&mut chain), Err(error), "an error is for good");
        assert!(chain.readable().is_empty() && chain.writable().is_empty() && !chain.is_in_flight());
        assert!(!error.to_string().is_empty());
    }
    assert!(result?);
    let lens = chain.readable().iter().chain(chain.writable()).map(|s| s.len).collect();
    queue.push_used(&mut chain, 0);
    Ok(lens)
}

fn both(test: impl Fn(&Guest, bool)) {
    let guest = Guest::new();
    [false, true].into_iter().for_each(|is_packed| test(&guest, is_packed));
}

#[test]
fn a_buffer_outside_memory_is_refused() {
    both(|guest, is_packed| {
        for (addr, len) in [
            (END, 1),
            (END - 1, 2),
            (0x5000_0000, 16),
            (HIGH - 1, 2),
            (HIGH, 0x1001),
            (u64::MAX, 1),
            (u64::MAX - 15, 16),
            (u64::MAX - 15, 17),
            (0, u32::MAX),
        ] {
            let error = pop_of(guest, is_packed, &[(addr, len, WRITE)]).unwrap_err();
            assert!(matches!(error, RingError::OutsideMemory { .. }), "{addr:#x}+{len}: {error}");
        }
    });
}

#[test]
fn a_buffer_over_two_adjacent_regions_is_two_segments() {
    both(|guest, is_packed| {
        assert_eq!(pop_of(guest, is_packed, &[(BORDER - 100, 300, 0)]), Ok(vec![100, 200]));
        assert_eq!(pop_of(guest, is_packed, &[(BORDER - 100, 100, WRITE)]), Ok(vec![100]));
        let mixed = [(HIGH, 16, NEXT), (BORDER - 1, 2, NEXT), (0, 5, NEXT | WRITE), (BORDER - 1, 2, WRITE)];
        assert_eq!(pop_of(guest, is_packed, &mixed), Ok(vec![16, 1, 1, 5, 1, 1]));
    });
}

#[test]
fn an_empty_buffer_is_refused() {
    both(|guest, is_packed| {
        let error = pop_of(guest, is_packed, &[(HEAP, 16, NEXT), (HEAP, 0, WRITE)]);
        assert_eq!(error, Err(RingError::EmptyBuffer { addr: HEAP }));
    });
}

#[test]
fn a_readable_buffer_after_a_writable_one_is_refused() {
    both(|guest, is_packed| {
        let error = pop_of(guest, is_packed, &[(HEAP, 16, NEXT | WRITE), (HEAP, 1, 0)]);
        assert_eq!(error, Err(RingError::ReadableAfterWritable));
    });
}

#[test]
fn a_chain_without_end_is_refused() {
    both(|guest, is_packed| {
        let mut endless = [(HEAP, 16, NEXT); 8];
        endless[0].2 = NEXT;
        let result = match is_packed {
            true => pop_of(guest, true, &endless),
            false => {
                // Descriptor 7 leads back to 0.
                guest.clear_rings();
                endless.iter().enumerate().for_each(|(i, &(addr, len, flags))| {
                    put_at(guest, false, DESC + 16 * i as u64, addr, len, flags, (i as u16 + 1) % 8);
                });
                offer(guest, false);
                guest.queue(8, false).pop(&mut Chain::new()).map(|_| vec![])
            }
        };
        assert_eq!(result, Err(RingError::ChainTooLong { limit: 8 }));
    });
}

#[test]
fn a_chain_as_long_as_the_ring_is_taken() {
    both(|guest, is_packed| {
        let mut chain = [(HEAP, 16, NEXT); 8];
        chain[7].2 = WRITE;
        assert_eq!(pop_of(guest, is_packed, &chain), Ok(vec![16; 8]));
    });
}

#[test]
fn a_descriptor_that_leads_out_of_the_table_is_refused() {
    let guest = Guest::new();
    put_at(&guest, false, DESC, HEAP, 16, NEXT, 8);
    offer(&guest, false);
    let error = guest.queue(8, false).pop(&mut Chain::new());
    assert_eq!(error, Err(RingError::DescriptorOutOfRange { index: 8, count: 8 }));
    guest.write_u16(DRIVER + 4, 0xffff);
    let error = guest.queue(8, false).pop(&mut Chain::new());
    assert_eq!(error, Err(RingError::DescriptorOutOfRange { index: 0xffff, count: 8 }));
}

#[test]
fn an_available_index_too_far_ahead_is_refused() {
    let guest = Guest::new();
    put(&guest, false, 0, HEAP, 16, 0);
    for avail in [9, 0xffff] {
        guest.write_u16(DRIVER + 2, avail);
        let error = guest.queue(8, false).pop(&mut Chain::new());
        assert_eq!(error, Err(RingError::AvailableJump { avail_idx: avail, next_avail: 0, size: 8 }));
    }
}

#[test]
fn more_chains_in_flight_than_the_ring_has_entries_are_refused() {
    both(|guest, is_packed| {
        guest.clear_rings();
        let mut queue = guest.queue(4, is_packed);
        let mut chains: Vec<Chain> = (0..5).map(|_| Chain::new()).collect();
        for lap in 0..2 {
            for slot in 0..4 {
                let at = DESC + 16 * slot;
                guest.write_desc(at, HEAP, 16, 0, if lap == 0 { 1 << 7 } else { 1 << 15 });
            }
            if !is_packed {
                (0..4).for_each(|slot| guest.write_desc(DESC + 16 * slot, HEAP, 16, 0, 0));
                guest.write_u16(DRIVER + 2, 4 * (lap + 1));
            }
            let results: Vec<_> =
                chains[lap as usize * 4..].iter_mut().take(4).map(|c| queue.pop(c)).collect();
            match lap {
                0 => assert_eq!(results, [Ok(true); 4]),
                _ => assert_eq!(results, [Err(RingError::TooManyInFlight { size: 4 })]),
            }
        }
        assert_eq!(queue.in_flight(), 4);
        chains[..4].iter_mut().for_each(|chain| queue.push_used(chain, 0));
        assert_eq!(queue.in_flight(), 0);
    });
}

#[test]
fn chains_that_are_not_published_still_count_as_in_flight() {
    both(|guest, is_packed| {
        guest.clear_rings();
        let mut queue = guest.queue(2, is_packed);
        let mut chain = Chain::new();
        for lap in 0..2u16 {
            for slot in 0..2 {
                let flags = match (is_packed, lap) {
                    (false, _) => 0,
                    (true, 0) => 1 << 7,
                    (true, _) => 1 << 15,
                };
                guest.write_desc(DESC + 16 * slot, HEAP, 16, 0, flags);
            }
            if !is_packed {
                (0..2).for_each(|slot| guest.write_desc(DESC + 16 * slot, HEAP, 16, 0, 0));
                guest.write_u16(DRIVER + 2, 2 * (lap + 1));
            }
            for _ in 0..2 {
                match lap {
                    0 => assert_eq!(queue.pop(&mut chain), Ok(true)),
                    _ => {
                        assert_eq!(queue.pop(&mut chain), Err(RingError::TooManyInFlight { size: 2 }));
                        continue;
                    }
                }
                queue.push_used(&mut chain, 0);
            }
        }
    });
}

#[test]
fn a_head_that_is_in_flight_is_refused_where_that_is_remembered() {
    let guest = Guest::new();
    let region = crate::inflight::InflightRegion::create(1, 8, false).unwrap();
    let mut queue =
        VirtQueue::new(QueueConfig { inflight: region.queue(0), ..guest.config(8, false) }).unwrap();
    put(&guest, false, 0, HEAP, 16, 0);
    guest.write_u16(DRIVER + 2, 2);
    let mut chains = [Chain::new(), Chain::new()];
    assert_eq!(queue.pop(&mut chains[0]), Ok(true));
    assert_eq!(queue.pop(&mut chains[1]), Err(RingError::AlreadyInFlight { index: 0 }));
}

#[test]
fn a_buffer_id_beyond_the_ring_is_refused() {
    let guest = Guest::new();
    guest.write_desc(DESC, HEAP, 16, 8, 1 << 7);
    let error = guest.queue(8, true).pop(&mut Chain::new());
    assert_eq!(error, Err(RingError::IdOutOfRange { id: 8, size: 8 }));
}

#[test]
fn an_indirect_table_is_checked_like_a_ring() {
    both(|guest, is_packed| {
        let table = HEAP;
        let entry = |i: u16, flags, next| {
            put_at(guest, is_packed, table + 16 * u64::from(i), HEAP + 0x8000, 8, flags, next);
        };
        let refused = |addr, len, flags| pop_of(guest, is_packed, &[(addr, len, flags)]).unwrap_err();
        for len in [0, 1, 15, 17, 16 * 1026 + 16, u32::MAX, 0xffff_fff0] {
            assert_eq!(refused(table, len, INDIRECT), RingError::BadIndirectLength { len });
        }
        assert!(matches!(refused(END - 16, 32, INDIRECT), RingError::OutsideMemory { .. }));
        assert!(matches!(refused(u64::MAX - 15, 32, INDIRECT), RingError::OutsideMemory { .. }));
        assert_eq!(refused(table, 16, INDIRECT | NEXT), RingError::IndirectWithNext);
        entry(0, INDIRECT, 0);
        assert_eq!(refused(table, 16, INDIRECT), RingError::NestedIndirect);
        entry(0, WRITE | NEXT, 1);
        entry(1, 0, 0);
        assert_eq!(refused(table, 32, INDIRECT), RingError::ReadableAfterWritable);
        if !is_packed {
            entry(1, WRITE | NEXT, 0);
            assert_eq!(refused(table, 32, INDIRECT), RingError::ChainTooLong { limit: 2 });
            entry(1, WRITE | NEXT, 2);
            let expected = RingError::DescriptorOutOfRange { index: 2, count: 2 };
            assert_eq!(refused(table, 32, INDIRECT), expected);
        }
        // An unaligned table, the WRITE flag on it (which is ignored) and direct descriptors before
        // it are valid.
        put_at(guest, is_packed, table + 3, HEAP + 0x8000, 9, WRITE, 0);
        let chain = [(HEAP, 5, NEXT), (table + 3, 16, INDIRECT | WRITE)];
        assert_eq!(pop_of(guest, is_packed, &chain), Ok(vec![5, 9]));
        fill(guest, is_packed, &chain);
        let config = QueueConfig { indirect: false, ..guest.config(8, is_packed) };
        let error = VirtQueue::new(config).unwrap().pop(&mut Chain::new());
        assert_eq!(error, Err(RingError::IndirectNotNegotiated));
    });
}

#[test]
fn a_chain_has_at_most_so_many_segments() {
    both(|guest, is_packed| {
        for i in 0..1026u16 {
            let next = if i == 1025 { 0 } else { NEXT };
            put_at(guest, is_packed, HEAP + 16 * u64::from(i), HEAP + 0x8000, 8, next, i + 1);
        }
        let table = |len| pop_of(guest, is_packed, &[(HEAP, len, INDIRECT)]);
        assert_eq!(table(16 * 1026), Ok(vec![8; 1026]));
        let before = [(HEAP, 5, NEXT), (HEAP, 16 * 1026, INDIRECT)];
        assert_eq!(pop_of(guest, is_packed, &before), Err(RingError::TooManySegments));
        put_at(guest, is_packed, HEAP + 16 * 1025, BORDER - 1, 2, 0, 0);
        assert_eq!(table(16 * 1026), Err(RingError::TooManySegments));
    });
}

#[test]
fn impossible_rings_are_refused() {
    both(|guest, is_packed| {
        let new = |change: &dyn Fn(&mut QueueConfig)| {
            let mut config = guest.config(8, is_packed);
            change(&mut config);
            VirtQueue::new(config).map(drop)
        };
        assert_eq!(new(&|_| ()), Ok(()));
        for size in [0, 32_769, 0xffff] {
            assert!(matches!(new(&|c| c.size = size), Err(RingError::BadSize { .. })));
        }
        assert_eq!(new(&|c| c.size = 7).is_ok(), is_packed);
        let bad = |change: &dyn Fn(&mut QueueConfig)| matches!(new(change), Err(RingError::BadArea { .. }));
        assert!(bad(&|c| c.areas.descriptors += 8));
        assert!(bad(&|c| c.areas.driver += 1));
        assert!(bad(&|c| c.areas.device += 2));
        assert!(bad(&|c| c.areas.descriptors = USER + END - 16));
        assert!(bad(&|c| c.areas.driver = USER + END));
        assert!(bad(&|c| c.areas.device = u64::MAX - 3));
        if is_packed {
            let state = |base| RingState::from_vring_base(base, true);
            for base in [0x8000_8008, 0x8008_8000, 0x8001_8000, 0x8000_0001] {
                assert!(matches!(new(&|c| c.state = state(base)), Err(RingError::BadPosition { .. })));
            }
            assert_eq!(new(&|c| c.state = state(0x8003_0003)), Ok(()), "a full ring");
        }
    });
}

#[test]
#[should_panic(expected = "a chain goes back to the queue it was popped from")]
fn a_chain_of_another_queue_is_a_bug_of_ours() {
    let guest = Guest::new();
    put(&guest, false, 0, HEAP, 16, 0);
    offer(&guest, false);
    let mut chain = Chain::new();
    guest.queue(8, false).pop(&mut chain).unwrap();
    guest.queue(8, false).push_used(&mut chain, 0);
}

#[test]
fn memory_that_is_taken_away_stays_until_its_chains_are_back() {
    both(|guest, is_packed| {
        fill(guest, is_packed, &[(HIGH, 16, WRITE)]);
        let memory = Arc::new(guest.0.without(HIGH, HIGH + USER, 0x1000).unwrap());
        let old = Arc::new(guest.0.without(BORDER, BORDER + USER, END - BORDER).unwrap());
        let is_mapped = Arc::downgrade(&old);
        let mut queue = VirtQueue::new(QueueConfig { memory: old, ..guest.config(8, is_packed) }).unwrap();
        let mut chain = Chain::new();
        assert_eq!(queue.pop(&mut chain), Ok(true));
        let areas = guest.config(8, is_packed).areas;
        queue.set_memory(memory, areas).unwrap();
        assert_eq!((queue.in_flight(), is_mapped.strong_count()), (1, 1));
        let fd = sealed_file(c"log", 1 << 20).unwrap();
        let log = Arc::new(DirtyLog::map(fd.as_fd(), 0, 1 << 20).unwrap());
        queue.set_log(Some(QueueLog { log, used_addr: Some(DEVICE) }));
        queue.push_used(&mut chain, 1);
        assert_eq!((queue.in_flight(), is_mapped.strong_count()), (0, 0));
        queue.publish();
        let file = std::fs::File::from(fd);
        let mut bits = vec![0; 1 << 20];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut bits, 0).unwrap();
        let marked: Vec<u64> = (0..bits.len() as u64 * 8)
            .filter(|page| bits[*page as usize / 8] & 1 << (page % 8) != 0)
            .collect();
        let used_page = if is_packed { DESC >> 12 } else { DEVICE >> 12 };
        assert_eq!(marked, [used_page, HIGH >> 12]);
        assert!(matches!(queue.set_memory(Arc::default(), areas), Err(RingError::BadArea { .. })));
    });
}

proptest! {
    #[test]
    fn noise_in_a_ring_gives_chains_inside_memory_or_an_error(
        is_packed: bool,
        words in proptest::collection::vec((0u64..0xb_0000, 0u32..0x200, 0u16..8, 0u16..10), 16),
        table in proptest::collection::vec((0u64..0xb_0000, 0u32..0x200, 0u16..8, 0u16..10), 16),
        avail in proptest::collection::vec(0u16..9, 8),
        ahead in 0u16..10,
    ) {
        let guest = Guest::new();
        for (base, list) in [(DESC, &words), (HEAP, &table)] {
            for (i, &(addr, len, flags, next)) in list.iter().enumerate().take(if base == DESC { 8 } else { 16 }) {
                // Indirect descriptors mostly point to the table.
                let (addr, len) = if flags & INDIRECT != 0 && len % 4 > 0 { (HEAP, len / 16 * 16) } else { (addr, len) };
                let at = base + 16 * i as u64;
                match is_packed {
                    false => guest.write_desc(at, addr, len, flags, next),
                    true => guest.write_desc(at, addr, len, next, flags | 1 << 7),
                }
            }
        }
        avail.iter().enumerate().for_each(|(i, &head)| guest.write_u16(DRIVER + 4 + 2 * i as u64, head));
        guest.write_u16(DRIVER + 2, ahead);
        let mut queue = guest.queue(8, is_packed);
        let mut chains: Vec<Chain> = (0..9).map(|_| Chain::new()).collect();
        let mut popped = 0;
        while queue.pop(&mut chains[popped]) == Ok(true) {
            let chain = &chains[popped];
            for s in chain.readable().iter().chain(chain.writable()) {
                let start = guest.0.guest_addr_of(s.base);
                let end = guest.0.guest_addr_of(s.base.wrapping_add(s.len - 1));
                prop_assert_eq!(start.map(|addr| addr + s.len as u64 - 1), end);
                prop_assert!(end.is_some());
            }
            popped += 1;
        }
        prop_assert!(popped <= 8);
        chains[..popped].iter_mut().for_each(|chain| queue.push_used(chain, 1));
        queue.publish();
    }
}
