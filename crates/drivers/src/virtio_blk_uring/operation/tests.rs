//! Requests as a disk with small limits receives them.

use super::*;
use crate::passthrough::transfer::{MAX_FAULTS, MAX_RETRIES};
use crate::virtio_blk_uring::facts::tests::SMALL;
use block::Data;

const PAGE: usize = 4096;

/// Page-aligned memory of `count` pages.
fn pages(count: usize) -> (Vec<u8>, *mut u8) {
    let mut memory = vec![0; (count + 1) * PAGE];
    let skip = memory.as_ptr().align_offset(PAGE);
    let base = memory[skip..].as_mut_ptr();
    (memory, base)
}

/// A command, and the ranges or the lengths of the segments that are its memory.
#[derive(Debug, PartialEq, Eq)]
enum Sent {
    Transfer { kind: u32, sector: u64, lens: Vec<usize> },
    Ranges { kind: u32, ranges: Vec<Range> },
    Flush,
}

fn sent(operation: &Operation, command: &Command) -> Sent {
    let kind = command.kind;
    match (kind, command.memory) {
        (VIRTIO_BLK_T_FLUSH, memory) => {
            assert_eq!((memory, command.sector), (NO_MEMORY, 0));
            Sent::Flush
        }
        (VIRTIO_BLK_T_DISCARD | VIRTIO_BLK_T_WRITE_ZEROES, memory) => {
            let Memory::Single(segment) = memory else { panic!("ranges in a list") };
            assert_eq!((command.sector, segment.len), (0, operation.own.len()));
            let range = |bytes: &[u8]| Range::from_bytes(bytes.try_into().unwrap());
            Sent::Ranges { kind, ranges: operation.own.chunks(RANGE_BYTES).map(range).collect() }
        }
        (_, Memory::Single(segment)) => {
            Sent::Transfer { kind, sector: command.sector, lens: vec![segment.len] }
        }
        (_, Memory::List) => {
            let lens = operation.transfer.iovecs.iter().map(|s| s.len).collect();
            Sent::Transfer { kind, sector: command.sector, lens }
        }
    }
}

/// Runs a request with registered memory or without, answers every command with success, and
/// returns the commands.
fn run_with(req: &Request<'_>, offset: u64, facts: &DiskFacts, is_registered: bool) -> Vec<Sent> {
    let mut operation = Operation::idle();
    // SAFETY: the tests keep their memory.
    let mut has_more = unsafe { operation.begin(req, offset, facts) }.unwrap();
    let mut commands = Vec::new();
    while has_more {
        let command = operation.next(facts, PAGE, |_| is_registered).unwrap();
        commands.push(sent(&operation, &command));
        has_more = match operation.complete(0, facts) {
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

fn run(req: &Request<'_>, offset: u64, facts: &DiskFacts) -> Vec<Sent> {
    run_with(req, offset, facts, false)
}

fn write_of(sector: u64, lens: &[usize]) -> Sent {
    Sent::Transfer { kind: VIRTIO_BLK_T_OUT, sector, lens: lens.to_vec() }
}

fn read_of(sector: u64, lens: &[usize]) -> Sent {
    Sent::Transfer { kind: VIRTIO_BLK_T_IN, sector, lens: lens.to_vec() }
}

fn zeroes_of(ranges: &[(u64, u32, u32)]) -> Sent {
    let ranges =
        ranges.iter().map(|&(sector, num_sectors, flags)| Range { sector, num_sectors, flags }).collect();
    Sent::Ranges { kind: VIRTIO_BLK_T_WRITE_ZEROES, ranges }
}

#[test]
fn a_long_transfer_goes_in_parts_and_a_flush_makes_it_durable() {
    let (_memory, base) = pages(16);
    let list = [Segment { base, len: 40 << 10 }];
    // SAFETY: the memory outlives the test.
    let data = unsafe { Data::new(&list) };
    let reads = run(&Request::read(data), 512, &SMALL);
    assert_eq!(reads, [read_of(1, &[16384]), read_of(33, &[16384]), read_of(65, &[8192])]);
    let writes = run(&Request::write(data, Flags::FUA), 0, &SMALL);
    let parts = [write_of(0, &[16384]), write_of(32, &[16384]), write_of(64, &[8192])];
    assert_eq!(writes[..3], parts);
    assert_eq!(writes[3..], [Sent::Flush]);
    assert_eq!(run(&Request::write(data, Flags::NONE), 0, &SMALL), parts);
    let through = DiskFacts { has_flush: false, needs_flush: false, ..SMALL };
    assert_eq!(run(&Request::write(data, Flags::FUA), 0, &through), parts, "a disk that cannot flush");
}

#[test]
fn positions_are_sectors_whatever_the_block() {
    let large = DiskFacts { block_shift: 12, ..SMALL };
    let (_memory, base) = pages(4);
    let list = [Segment { base, len: 4096 }];
    // SAFETY: the memory outlives the test.
    let req = Request::read(unsafe { Data::new(&list) });
    assert_eq!(run(&req, 3 << 12, &large), [read_of(24, &[4096])]);
    let zeroes = run(&Request::write_zeroes(2 << 12, Flags::NONE), 1 << 12, &large);
    assert_eq!(zeroes, [zeroes_of(&[(8, 16, RANGE_F_UNMAP)])]);
    let mut operation = Operation::idle();
    // SAFETY: as above.
    let refused = unsafe { operation.begin(&req, 512, &large) };
    assert_eq!(refused, Err(IoError::Misaligned));
}

#[test]
fn a_list_goes_as_one_command_of_whole_blocks() {
    let (_memory, base) = pages(8);
    let list: Vec<Segment> =
        (0..3).map(|i| Segment { base: base.wrapping_add(i * 2 * PAGE), len: 2560 }).collect();
    // SAFETY: the memory outlives the test.
    let req = Request::write(unsafe { Data::new(&list) }, Flags::NONE);
    assert_eq!(run(&req, 0, &SMALL), [write_of(0, &[2560, 2560, 2560])]);
}

#[test]
fn only_long_registered_segments_of_a_list_go_alone() {
    let facts = DiskFacts { max_transfer: 1 << 20, max_pages: 256, ..SMALL };
    let (_memory, base) = pages(64);
    let lens = [64 << 10, 4096, 8192, 96 << 10];
    let mut at = 0;
    let list = lens.map(|len| {
        at += len;
        Segment { base: base.wrapping_add(at - len), len }
    });
    // SAFETY: the memory outlives the test.
    let req = Request::read(unsafe { Data::new(&list) });
    let alone = [read_of(0, &[64 << 10]), read_of(128, &[4096, 8192, 96 << 10])];
    assert_eq!(run_with(&req, 0, &facts, true), alone);
    assert_eq!(run_with(&req, 0, &facts, false), [read_of(0, &lens)]);
}

#[test]
fn long_zeroes_go_in_parts_and_deallocate_unless_that_is_forbidden() {
    let zeroes = run(&Request::write_zeroes(40 << 10, Flags::NONE), 0, &SMALL);
    let part = |at| zeroes_of(&[(at, 32.min(80 - at as u32), RANGE_F_UNMAP)]);
    assert_eq!(zeroes, [part(0), part(32), part(64)]);
    let keep = Flags::NO_UNMAP.with(Flags::FUA);
    assert_eq!(run(&Request::write_zeroes(512, keep), 512, &SMALL), [zeroes_of(&[(1, 1, 0)]), Sent::Flush]);
}

#[test]
fn zeroes_are_sent_where_the_disk_has_none() {
    let poor = DiskFacts { write_zeroes: None, max_transfer: 128 << 10, max_pages: 64, ..SMALL };
    let sent = run(&Request::write_zeroes(192 << 10, Flags::FUA), 0, &poor);
    assert_eq!(sent, [write_of(0, &[64 << 10, 64 << 10]), write_of(256, &[64 << 10]), Sent::Flush]);
    let mut operation = Operation::idle();
    let fast = Request::write_zeroes(512, Flags::NO_FALLBACK);
    // SAFETY: no memory.
    assert_eq!(unsafe { operation.begin(&fast, 0, &poor) }, Err(IoError::Unsupported));
    // A device without the command despite its features.
    for (flags, expected) in
        [(Flags::NONE, Next::Issue), (Flags::NO_FALLBACK, Next::Finished(Err(IoError::Unsupported)))]
    {
        // SAFETY: no memory.
        unsafe { operation.begin(&Request::write_zeroes(512, flags), 0, &SMALL) }.unwrap();
        operation.next(&SMALL, PAGE, |_| false).unwrap();
        assert_eq!(operation.complete(-libc::EOPNOTSUPP, &SMALL), expected);
    }
    operation.work = Work::WriteBuffers;
    assert_eq!(operation.next(&SMALL, PAGE, |_| false).unwrap().kind, VIRTIO_BLK_T_OUT);
}

#[test]
fn a_discard_goes_in_ranges_and_commands_of_the_limits() {
    let discard = |ranges: &[(u64, u32)]| Sent::Ranges {
        kind: VIRTIO_BLK_T_DISCARD,
        ranges: ranges.iter().map(|&(sector, num_sectors)| Range { sector, num_sectors, flags: 0 }).collect(),
    };
    // 100 blocks a range, two ranges a command.
    let sent = run(&Request::discard(250 << 9), 512, &SMALL);
    assert_eq!(sent, [discard(&[(1, 100), (101, 100)]), discard(&[(201, 50)])]);
    let poor = DiskFacts { discard: None, ..SMALL };
    // SAFETY: no memory.
    let refused = unsafe { Operation::idle().begin(&Request::discard(512), 0, &poor) };
    assert_eq!(refused, Err(IoError::Unsupported));
}

#[test]
fn a_flush_that_the_disk_does_not_have_is_no_command() {
    assert_eq!(run(&Request::flush(), 0, &SMALL), [Sent::Flush]);
    // The cache may be switched on while the disk is open.
    let through = DiskFacts { needs_flush: false, ..SMALL };
    assert_eq!(run(&Request::flush(), 0, &through), [Sent::Flush]);
    assert_eq!(run(&Request::flush(), 0, &DiskFacts { has_flush: false, ..through }), []);
}

#[test]
fn odd_requests_end_before_the_kernel_sees_them() {
    let mut operation = Operation::idle();
    let mut begin = |req: &Request<'_>, offset| {
        // SAFETY: no memory.
        unsafe { operation.begin(req, offset, &SMALL) }
    };
    let zeroes = |len| Request::write_zeroes(len, Flags::NONE);
    assert_eq!(begin(&zeroes(512), !511), Err(IoError::OutOfRange));
    assert_eq!(begin(&zeroes(1), 0), Err(IoError::Misaligned));
    assert_eq!(begin(&zeroes(0), 0), Ok(false));
    let odd = Request { len: 512, ..Request::read(Data::none()) };
    assert_eq!(begin(&odd, 0), Err(IoError::Invalid));
}

#[test]
fn each_refusal_of_the_kernel_has_its_meaning() {
    let mut operation = Operation::idle();
    for (errno, error) in [
        (libc::EIO, IoError::Medium),
        (libc::EBADF, IoError::ReadOnly),
        (libc::EROFS, IoError::ReadOnly),
        (libc::ENOSPC, IoError::OutOfRange),
        (libc::E2BIG, IoError::Invalid),
        (libc::EINVAL, IoError::Invalid),
        (libc::EOPNOTSUPP, IoError::Unsupported),
        (libc::ENODEV, IoError::DeviceGone),
    ] {
        // SAFETY: no memory.
        unsafe { operation.begin(&Request::flush(), 0, &SMALL) }.unwrap();
        assert_eq!(operation.complete(-errno, &SMALL), Next::Finished(Err(error)), "errno {errno}");
    }
    // Neither 0 nor an error number.
    assert_eq!(operation.complete(1, &SMALL), Next::Finished(Err(IoError::Medium)));
    assert_eq!(operation.complete(i32::MIN, &SMALL), Next::Finished(Err(IoError::Medium)));
}

#[test]
fn the_kernel_may_say_again_only_so_often() {
    let mut operation = Operation::idle();
    for (errno, most, error) in
        [(libc::EAGAIN, MAX_RETRIES, IoError::NoMemory), (libc::EFAULT, MAX_FAULTS, IoError::Medium)]
    {
        // SAFETY: no memory.
        unsafe { operation.begin(&Request::flush(), 0, &SMALL) }.unwrap();
        for _ in 0..most {
            assert_eq!(operation.complete(-errno, &SMALL), Next::IssueLater);
        }
        assert_eq!(operation.complete(-errno, &SMALL), Next::Finished(Err(error)));
    }
}
