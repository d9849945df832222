//! Requests as a controller with small limits receives them.

use super::*;
use crate::nvme_uring::facts::ZoneFacts;
use crate::nvme_uring::facts::tests::SMALL;
use crate::passthrough::transfer::{MAX_FAULTS, MAX_RETRIES};
use block::Data;
use nvme::command::opcode;

const PAGE: usize = 4096;
const FUA: u32 = 1 << 30;

/// Page-aligned memory of `count` pages.
fn pages(count: usize) -> (Vec<u8>, *mut u8) {
    let mut memory = vec![0; (count + 1) * PAGE];
    let skip = memory.as_ptr().align_offset(PAGE);
    let base = memory[skip..].as_mut_ptr();
    (memory, base)
}

/// Runs a request, answers every command with success, and returns the commands.
fn run(req: &Request<'_>, offset: u64, facts: &NamespaceFacts) -> Vec<(Command, Memory)> {
    let mut operation = Operation::idle();
    // SAFETY: the tests keep their memory.
    let mut goes_on = unsafe { operation.begin(req, offset, facts) }.unwrap();
    let mut commands = Vec::new();
    while goes_on {
        commands.push(operation.next(facts, PAGE).unwrap());
        goes_on = match operation.complete(0, facts) {
            Next::Issue => true,
            Next::IssueLater => unreachable!("no command was refused"),
            Next::Finished(result) => {
                assert_eq!(result, Ok(()));
                false
            }
        };
    }
    commands
}

/// First block and number of blocks of reads, writes and write zeroes.
fn ranges(commands: &[(Command, Memory)]) -> Vec<(u32, u32)> {
    commands.iter().map(|(c, _)| (c.cdw[0], (c.cdw[2] & 0xffff) + 1)).collect()
}

fn lens(commands: &[(Command, Memory)]) -> Vec<usize> {
    let len = |(_, memory): &(Command, Memory)| match memory {
        Memory::Single(segment) => segment.len,
        Memory::List => 0,
    };
    commands.iter().map(len).collect()
}

#[test]
fn a_long_transfer_goes_in_parts_of_what_the_controller_takes() {
    let (_memory, base) = pages(16);
    let list = [Segment { base, len: 40 << 10 }];
    // SAFETY: the memory outlives the test.
    let data = unsafe { Data::new(&list) };
    let commands = run(&Request::read(data), 512, &SMALL);
    assert_eq!(ranges(&commands), [(1, 32), (33, 32), (65, 16)]);
    assert_eq!(lens(&commands), [16 << 10, 16 << 10, 8 << 10]);
    assert!(commands.iter().all(|(c, _)| c.opcode == opcode::READ && c.nsid == 1));
    let commands = run(&Request::write(data, Flags::FUA), 0, &SMALL);
    assert!(commands.iter().all(|(c, _)| c.opcode == opcode::WRITE && c.cdw[2] & FUA != 0));
}

#[test]
fn memory_that_touches_one_page_more_goes_in_one_part_more() {
    let (_memory, base) = pages(8);
    // 16 KiB that start inside a page touch five pages; the controller takes four.
    let list = [Segment { base: base.wrapping_add(1024), len: 16 << 10 }];
    // SAFETY: the memory outlives the test.
    let commands = run(&Request::read(unsafe { Data::new(&list) }), 0, &SMALL);
    assert_eq!(lens(&commands), [15 << 10, 1 << 10]);
}

#[test]
fn scattered_memory_is_cut_at_blocks_and_counted_in_pages() {
    let (_memory, base) = pages(16);
    // Eight segments of 1000 bytes in eight pages: four pages hold 4000 bytes, seven whole blocks.
    let mut list: Vec<Segment> =
        (0..8).map(|i| Segment { base: base.wrapping_add(i * PAGE), len: 1000 }).collect();
    list.push(Segment { base: base.wrapping_add(9 * PAGE), len: 192 });
    let mut operation = Operation::idle();
    // SAFETY: the memory outlives the test.
    let req = Request::write(unsafe { Data::new(&list) }, Flags::NONE);
    // SAFETY: as above.
    assert_eq!(unsafe { operation.begin(&req, 0, &SMALL) }, Ok(true));
    let (command, memory) = operation.next(&SMALL, PAGE).unwrap();
    assert_eq!((memory, command.cdw[2]), (Memory::List, 6));
    let total: usize = operation.transfer.iovecs.iter().map(|s| s.len).sum();
    assert_eq!((operation.transfer.iovecs.len(), total), (4, 7 * 512));
    assert_eq!(operation.complete(0, &SMALL), Next::Issue);
    let (command, _) = operation.next(&SMALL, PAGE).unwrap();
    assert_eq!(command.cdw[0], 7);
    let first = operation.transfer.iovecs[0];
    assert_eq!((first.base, first.len), (base.wrapping_add(3 * PAGE + 584), 416));
}

#[test]
fn one_block_is_sent_in_any_number_of_pieces_that_the_kernel_takes() {
    let (_memory, base) = pages(130);
    let list: Vec<Segment> =
        (0..128).map(|i| Segment { base: base.wrapping_add(i * PAGE), len: 4 }).collect();
    let mut operation = Operation::idle();
    // SAFETY: the memory outlives the test.
    let req = Request::read(unsafe { Data::new(&list) });
    // SAFETY: as above.
    unsafe { operation.begin(&req, 0, &SMALL) }.unwrap();
    let (command, memory) = operation.next(&SMALL, PAGE).unwrap();
    assert_eq!((memory, command.cdw[2], operation.transfer.iovecs.len()), (Memory::List, 0, 128));
    let large = NamespaceFacts { block_shift: 13, ..SMALL };
    let list: Vec<Segment> = (0..2048).map(|_| Segment { base, len: 4 }).collect();
    // SAFETY: as above.
    let req = Request::read(unsafe { Data::new(&list) });
    // SAFETY: as above.
    unsafe { operation.begin(&req, 0, &large) }.unwrap();
    assert_eq!(operation.next(&large, PAGE).err(), Some(IoError::Invalid));
}

#[test]
fn long_zeroes_go_in_parts_and_deallocate_unless_that_is_forbidden() {
    let commands = run(&Request::write_zeroes(40 << 10, Flags::NONE), 0, &SMALL);
    assert_eq!(ranges(&commands), [(0, 32), (32, 32), (64, 16)]);
    assert!(commands.iter().all(|(c, _)| c.opcode == opcode::WRITE_ZEROES && c.cdw[2] & (1 << 25) != 0));
    let keep = Flags::NO_UNMAP.with(Flags::FUA);
    let commands = run(&Request::write_zeroes(512, keep), 0, &SMALL);
    assert_eq!(commands[0].0.cdw[2], FUA);
    let never = NamespaceFacts { zeroes_by_deallocating: false, ..SMALL };
    assert_eq!(run(&Request::write_zeroes(512, Flags::NONE), 0, &never)[0].0.cdw[2], 0);
}

#[test]
fn zeroes_are_sent_where_the_controller_has_none() {
    let poor = NamespaceFacts { zero_blocks: None, max_transfer: 128 << 10, max_pages: 64, ..SMALL };
    let commands = run(&Request::write_zeroes(192 << 10, Flags::FUA), 0, &poor);
    assert_eq!(ranges(&commands), [(0, 256), (256, 128)]);
    assert!(commands.iter().all(|(c, _)| c.opcode == opcode::WRITE && c.cdw[2] & FUA != 0));
    let mut operation = Operation::idle();
    let fast = Request::write_zeroes(512, Flags::NO_FALLBACK);
    // SAFETY: no memory.
    assert_eq!(unsafe { operation.begin(&fast, 0, &poor) }, Err(IoError::Unsupported));
    // A controller without the command despite its log: unknown opcode.
    for (flags, expected) in
        [(Flags::NONE, Next::Issue), (Flags::NO_FALLBACK, Next::Finished(Err(IoError::Unsupported)))]
    {
        // SAFETY: no memory.
        unsafe { operation.begin(&Request::write_zeroes(512, flags), 0, &SMALL) }.unwrap();
        operation.next(&SMALL, PAGE).unwrap();
        assert_eq!(operation.complete(0x4001, &SMALL), expected);
    }
    operation.task = Task::Request(Work::WriteBuffers);
    assert_eq!(operation.next(&SMALL, PAGE).unwrap().0.opcode, opcode::WRITE);
}

#[test]
fn a_discard_goes_in_ranges_and_commands_of_what_the_controller_takes() {
    let mut operation = Operation::idle();
    // SAFETY: no memory.
    unsafe { operation.begin(&Request::discard(200 << 9), 512, &SMALL) }.unwrap();
    let (command, Memory::Single(memory)) = operation.next(&SMALL, PAGE).unwrap() else { panic!("a list") };
    // 150 blocks per command, 100 per range.
    assert_eq!((command.cdw[0], command.cdw[1], memory.len), (1, 4, 32));
    assert_eq!(operation.own, [deallocate_range(1, 100), deallocate_range(101, 50)].concat());
    assert_eq!(operation.complete(0, &SMALL), Next::Issue);
    operation.next(&SMALL, PAGE).unwrap();
    assert_eq!(operation.own, deallocate_range(151, 50));
    assert_eq!(operation.complete(0, &SMALL), Next::Finished(Ok(())));
    let poor = NamespaceFacts { deallocation: None, ..SMALL };
    // SAFETY: no memory.
    let refused = unsafe { operation.begin(&Request::discard(512), 0, &poor) };
    assert_eq!(refused, Err(IoError::Unsupported));
}

#[test]
fn a_flush_without_a_cache_is_no_command() {
    assert_eq!(run(&Request::flush(), 0, &SMALL)[0].0, Command::flush(1));
    let through = NamespaceFacts { has_write_cache: false, ..SMALL };
    assert!(run(&Request::flush(), 0, &through).is_empty());
}

#[test]
fn odd_requests_end_before_the_controller_sees_them() {
    let mut operation = Operation::idle();
    let mut begin = |req: &Request<'_>, offset| {
        // SAFETY: no memory.
        unsafe { operation.begin(req, offset, &SMALL) }
    };
    let zeroes = |len| Request::write_zeroes(len, Flags::NONE);
    assert_eq!(begin(&zeroes(512), !511), Err(IoError::OutOfRange));
    assert_eq!(begin(&zeroes(!511), 512), Err(IoError::OutOfRange));
    assert_eq!(begin(&zeroes(512), 1), Err(IoError::Misaligned));
    assert_eq!(begin(&zeroes(1), 0), Err(IoError::Misaligned));
    assert_eq!(begin(&zeroes(0), 0), Ok(false));
    let odd = Request { len: 512, ..Request::read(Data::none()) };
    assert_eq!(begin(&odd, 0), Err(IoError::Invalid));
}

#[test]
fn the_kernel_may_say_again_only_so_often_and_what_it_gave_up_timed_out() {
    let mut operation = Operation::idle();
    // SAFETY: no memory.
    unsafe { operation.begin(&Request::flush(), 0, &SMALL) }.unwrap();
    for _ in 0..MAX_RETRIES {
        assert_eq!(operation.complete(-libc::EAGAIN, &SMALL), Next::IssueLater);
    }
    assert_eq!(operation.complete(-libc::EAGAIN, &SMALL), Next::Finished(Err(IoError::NoMemory)));
    // SAFETY: no memory.
    unsafe { operation.begin(&Request::flush(), 0, &SMALL) }.unwrap();
    for _ in 0..MAX_FAULTS {
        assert_eq!(operation.complete(-libc::EFAULT, &SMALL), Next::IssueLater);
    }
    assert_eq!(operation.complete(-libc::EFAULT, &SMALL), Next::Finished(Err(IoError::Medium)));
    assert_eq!(operation.complete(-libc::EINTR, &SMALL), Next::Finished(Err(IoError::TimedOut)));
    assert_eq!(operation.complete(0x4080, &SMALL), Next::Finished(Err(IoError::OutOfRange)));
    assert_eq!(operation.complete(1 << 16, &SMALL), Next::Finished(Err(IoError::Medium)));
}

/// 40 zones of 64 blocks.
const ZONED: NamespaceFacts = NamespaceFacts {
    max_transfer: 1024,
    zones: Some(ZoneFacts { zone_size: 64 << 9, zones: 40, max_active: 0, max_open: 0, max_append: None }),
    ..SMALL
};

/// The report of a controller with such zones, all empty but the first.
fn answer_report(operation: &mut Operation, command: &Command) -> usize {
    assert_eq!((command.opcode, command.cdw[3]), (opcode::ZONE_MANAGEMENT_RECEIVE, 1 << 16));
    assert_eq!((command.cdw[2] as usize + 1) * 4, operation.own.len());
    let (first, room) = (u64::from(command.cdw[0]) / 64, (operation.own.len() - 64) / 64);
    let count = room.min(40 - first as usize);
    operation.own[..8].copy_from_slice(&(count as u64).to_le_bytes());
    for i in 0..count {
        let start = (first + i as u64) * 64;
        let (state, pointer) = if start == 0 { (0xe, u64::MAX) } else { (1, start) };
        for (at, value) in [2 | state << 12, 60, start, pointer].into_iter().enumerate() {
            operation.own[64 * (i + 1) + 8 * at..][..8].copy_from_slice(&value.to_le_bytes());
        }
    }
    count
}

#[test]
fn a_report_longer_than_a_transfer_comes_in_parts() {
    for (offset, max, expected) in [(0, 40, 40), (0, 100, 40), (63 << 9, 3, 3), (38 * 64 * 512, 9, 2)] {
        let mut operation = Operation::idle();
        let mut zones = vec![Zone::default(); max as usize];
        let mut reported = u32::MAX;
        let req = ZoneRequest::Report { offset, zones: zones.as_mut_ptr(), max, reported: &raw mut reported };
        // SAFETY: zones and number outlive the operation.
        assert_eq!(unsafe { operation.begin_zone(req, &ZONED) }, Ok(true));
        loop {
            let (command, _) = operation.next(&ZONED, PAGE).unwrap();
            assert!(answer_report(&mut operation, &command) <= 15, "1024 bytes hold 15 zones");
            match operation.complete(0, &ZONED) {
                Next::Issue => {}
                Next::IssueLater => unreachable!("no command was refused"),
                Next::Finished(result) => break assert_eq!(result, Ok(())),
            }
        }
        assert_eq!(reported, expected);
        let first = offset / (64 << 9);
        for (i, zone) in zones[..expected as usize].iter().enumerate() {
            assert_eq!((zone.start, zone.len), ((first + i as u64) * (64 << 9), 64 << 9));
            assert_eq!((zone.capacity, zone.zone_type, zone.reset), (60 << 9, 2, 0));
            let full = zone.start == 0;
            assert_eq!(zone.zone_state, if full { 14 } else { 1 });
            assert_eq!(zone.write_pointer, if full { 64 << 9 } else { zone.start });
        }
        assert!(zones[expected as usize..].iter().all(|z| *z == Zone::default()));
    }
}

#[test]
fn a_report_that_makes_no_sense_fails_the_request_and_ends_it() {
    let mut zones = [Zone::default(); 2];
    let mut reported = 7;
    let req =
        ZoneRequest::Report { offset: 0, zones: zones.as_mut_ptr(), max: 2, reported: &raw mut reported };
    for (at, value) in [(0, 3), (64, 0xff), (64 + 16, 1), (64 + 8, 0xff)] {
        let mut operation = Operation::idle();
        // SAFETY: zones and number outlive the operation.
        unsafe { operation.begin_zone(req, &ZONED) }.unwrap();
        let (command, _) = operation.next(&ZONED, PAGE).unwrap();
        answer_report(&mut operation, &command);
        operation.own[at] = value;
        assert_eq!(operation.complete(0, &ZONED), Next::Finished(Err(IoError::Medium)), "byte {at}");
        assert_eq!(reported, 0);
    }
}

#[test]
fn zones_are_managed_by_any_of_their_bytes() {
    let mut operation = Operation::idle();
    // SAFETY: no memory.
    unsafe { operation.begin_zone(ZoneRequest::Manage(ZoneAction::Finish, (2 * 64 + 5) * 512 + 1), &ZONED) }
        .unwrap();
    let (command, _) = operation.next(&ZONED, PAGE).unwrap();
    assert_eq!(command, Command::manage_zone(1, 128, ZoneSendAction::Finish));
    assert_eq!(operation.complete(0, &ZONED), Next::Finished(Ok(())));
    // SAFETY: no memory.
    unsafe { operation.begin_zone(ZoneRequest::ManageAll(ZoneAction::Reset), &ZONED) }.unwrap();
    assert_eq!(operation.next(&ZONED, PAGE).unwrap().0, Command::manage_all_zones(1, ZoneSendAction::Reset));
    let beyond = ZoneRequest::Manage(ZoneAction::Open, 40 * 64 * 512);
    // SAFETY: no memory.
    assert_eq!(unsafe { operation.begin_zone(beyond, &ZONED) }, Err(IoError::OutOfRange));
    // SAFETY: no memory.
    let refused = unsafe { operation.begin_zone(ZoneRequest::ManageAll(ZoneAction::Open), &SMALL) };
    assert_eq!(refused, Err(IoError::Unsupported));
}
