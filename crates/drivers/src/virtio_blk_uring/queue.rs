//! The commands of a disk as entries of a ring.

use super::facts::DiskFacts;
use super::operation::{Command, Operation};
use crate::fixed::Regions;
use crate::passthrough::transfer::Memory;
use crate::passthrough::{CommandQueue, Commands, Next, Target};
use block::{IoError, Request, Segment};
use io_uring::opcode::UringCmd16;
use io_uring::{cqueue, squeue};
use std::fs::File;
use virtio::blk::{VIRTIO_BLK_T_IN, VIRTIO_BLK_T_OUT};

/// `VIRTBLK_URING_CMD_COMPACT`: `struct virtblk_uring_compact`.
pub(super) const CMD_COMPACT: u32 = 3;
/// `VIRTBLK_URING_CMD_COMPACT_VEC`: the same with a list of `iovec`.
pub(super) const CMD_COMPACT_VEC: u32 = 4;
/// Offset of `len` in `struct io_uring_sqe`.
const SQE_LEN: usize = 24;

/// Commands of one queue in the ring: about the entries of a virtqueue, which all users share.
const MOST: u32 = 128;

/// The submission and completion ring of one core or thread over a disk.
pub type VirtioBlkUringQueue = CommandQueue<DiskCommands>;

/// An open disk.
pub struct DiskCommands {
    pub(super) file: File,
    pub(super) facts: DiskFacts,
    /// Regions to register with each ring; `None` when memory is not registered.
    pub(super) regions: Option<Regions>,
}

/// Commands in the compact form fit into entries of normal size.
impl Commands for DiskCommands {
    type Entry = squeue::Entry;
    type Answer = cqueue::Entry;
    type Operation = Operation;

    fn file(&self) -> &File {
        &self.file
    }

    fn regions(&self) -> Option<&Regions> {
        self.regions.as_ref()
    }

    fn room(&self) -> u32 {
        MOST
    }

    fn idle() -> Operation {
        Operation::idle()
    }

    #[inline]
    unsafe fn begin(
        &self,
        operation: &mut Operation,
        req: &Request<'_>,
        offset: u64,
    ) -> Result<bool, IoError> {
        // SAFETY: by the contract of this function.
        unsafe { operation.begin(req, offset, &self.facts) }
    }

    #[inline]
    fn entry(&self, operation: &mut Operation, target: &Target<'_>) -> Result<squeue::Entry, IoError> {
        let index_of = |segment: &Segment| target.buffers.and_then(|buffers| buffers.index_of(segment));
        let command = operation.next(&self.facts, target.page, |segment| index_of(segment).is_some())?;
        let index = match &command.memory {
            // The kernel takes the memory of other commands from the program.
            Memory::Single(segment) if matches!(command.kind, VIRTIO_BLK_T_IN | VIRTIO_BLK_T_OUT) => {
                index_of(segment)
            }
            _ => None,
        };
        Ok(encode(&command, operation, index, target))
    }

    #[inline]
    fn complete(&self, operation: &mut Operation, answer: i32) -> Next {
        operation.complete(answer, &self.facts)
    }
}

/// The entry of a command whose memory is in the registered buffer `index`, if any.
#[inline]
fn encode(
    command: &Command,
    operation: &Operation,
    index: Option<u16>,
    target: &Target<'_>,
) -> squeue::Entry {
    let (code, addr, len) = match command.memory {
        Memory::Single(segment) => (CMD_COMPACT, segment.base.expose_provenance(), segment.len),
        Memory::List => {
            let list = &operation.transfer.iovecs;
            (CMD_COMPACT_VEC, list.as_ptr().expose_provenance(), list.len())
        }
    };
    let mut fields = [0; 16];
    fields[..8].copy_from_slice(&command.sector.to_ne_bytes());
    fields[8..12].copy_from_slice(&command.kind.to_ne_bytes());
    let entry = UringCmd16::new(target.fd, code).cmd(fields).addr(Some(addr as u64)).buf_index(index);
    // No command is longer than `max_transfer`, which is below 4 GiB.
    with_len(entry.build().flags(target.flags), len as u32)
}

/// Sets the field `len`, for which the builder of commands has no method.
#[inline]
fn with_len(mut entry: squeue::Entry, len: u32) -> squeue::Entry {
    const { assert!(size_of::<squeue::Entry>() == 64) };
    // SAFETY: the entry is a `struct io_uring_sqe`: 64 bytes, in which a number is at this offset.
    unsafe { (&raw mut entry).cast::<u8>().add(SQE_LEN).cast::<u32>().write(len) };
    entry
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixed::FixedBuffers;
    use crate::passthrough::node;
    use crate::virtio_blk_uring::facts::tests::SMALL;
    use block::{Data, Flags, MemoryRegion};
    use io_uring::IoUring;
    use io_uring::types::Fd;

    /// The parts of an entry, by their offsets in `struct io_uring_sqe`.
    #[derive(Debug, PartialEq, Eq)]
    struct Seen {
        opcode: u8,
        flags: u8,
        fd: u32,
        cmd_op: u32,
        addr: u64,
        len: u32,
        cmd_flags: u32,
        user_data: u64,
        buf_index: u16,
        sector: u64,
        kind: u32,
        ioprio: u32,
    }

    fn seen(entry: &squeue::Entry) -> Seen {
        // SAFETY: 64 bytes of plain numbers.
        let bytes: [u8; 64] = unsafe { std::ptr::from_ref(entry).cast::<[u8; 64]>().read() };
        let u32_at = |at: usize| u32::from_ne_bytes(bytes[at..at + 4].try_into().unwrap());
        let u64_at = |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().unwrap());
        Seen {
            opcode: bytes[0],
            flags: bytes[1],
            fd: u32_at(4),
            cmd_op: u32_at(8),
            addr: u64_at(16),
            len: u32_at(24),
            cmd_flags: u32_at(28),
            user_data: u64_at(32),
            buf_index: u32_at(40) as u16,
            sector: u64_at(48),
            kind: u32_at(56),
            ioprio: u32_at(60),
        }
    }

    /// `IORING_OP_URING_CMD`.
    const URING_CMD: u8 = 46;

    fn commands() -> DiskCommands {
        DiskCommands { file: File::open("/dev/null").unwrap(), facts: SMALL, regions: None }
    }

    fn first_entry(req: &Request<'_>, offset: u64, buffers: Option<&FixedBuffers>) -> (Seen, Operation) {
        let (commands, mut operation) = (commands(), Operation::idle());
        // SAFETY: the tests keep their memory.
        assert_eq!(unsafe { commands.begin(&mut operation, req, offset) }, Ok(true));
        let target = Target { fd: Fd(7), flags: squeue::Flags::from_bits_retain(1), buffers, page: 4096 };
        let entry = commands.entry(&mut operation, &target).unwrap();
        (seen(&entry), operation)
    }

    fn list_of(memory: &mut [u8]) -> [Segment; 1] {
        [Segment { base: memory.as_mut_ptr(), len: memory.len() }]
    }

    #[test]
    fn each_field_of_a_transfer_is_where_the_kernel_looks_for_it() {
        let mut memory = vec![0; 1024];
        let list = list_of(&mut memory);
        // SAFETY: the memory outlives the test.
        let data = unsafe { Data::new(&list) };
        let expected = Seen {
            opcode: URING_CMD,
            flags: 1,
            fd: 7,
            cmd_op: 3,
            addr: list[0].base.addr() as u64,
            len: 1024,
            cmd_flags: 0,
            user_data: 0,
            buf_index: 0,
            sector: 3,
            kind: 0,
            ioprio: 0,
        };
        assert_eq!(first_entry(&Request::read(data), 1536, None).0, expected);
        let write = first_entry(&Request::write(data, Flags::FUA), 1536, None).0;
        assert_eq!(write, Seen { kind: 1, ..expected });
    }

    #[test]
    fn a_list_is_passed_as_iovecs() {
        let mut memory = vec![0; 2048];
        let (first, second) = memory.split_at_mut(512);
        let list = [list_of(first)[0], list_of(second)[0]];
        // SAFETY: the memory outlives the test.
        let (seen, operation) = first_entry(&Request::read(unsafe { Data::new(&list) }), 0, None);
        let iovecs = &operation.transfer.iovecs;
        assert_eq!((seen.cmd_op, seen.addr, seen.len), (4, iovecs.as_ptr().addr() as u64, 2));
    }

    #[test]
    fn commands_without_a_transfer_carry_their_ranges() {
        for (req, kind, len) in [
            (Request::flush(), 4, 0),
            (Request::discard(150 << 9), 11, 32),
            (Request::write_zeroes(512, Flags::NONE), 13, 16),
        ] {
            let offset = if kind == 4 { 0 } else { 4096 };
            let (seen, _) = first_entry(&req, offset, None);
            assert_eq!((seen.cmd_op, seen.kind, seen.sector, seen.len), (3, kind, 0, len));
            assert_eq!(seen.addr == 0, kind == 4);
        }
    }

    #[test]
    fn registered_memory_is_named_by_its_index() {
        let Ok(ring) = IoUring::new(4) else { return eprintln!("skipped: no io_uring here") };
        let Some(mut buffers) = FixedBuffers::new(&ring) else {
            return eprintln!("skipped: no sparse table");
        };
        let mut memory = vec![0u8; 1 << 17];
        let list = list_of(&mut memory);
        let regions = Regions::default();
        let mut other = vec![0u8; 4096];
        for segment in [list_of(&mut other)[0], list[0]] {
            regions.add(&MemoryRegion {
                addr: segment.base.addr(),
                len: segment.len,
                fd: None,
                fd_offset: 0,
            });
        }
        buffers.update(&ring, &regions);
        // SAFETY: the memory outlives the test.
        let req = Request::write(unsafe { Data::new(&list) }, Flags::NONE);
        let (seen, _) = first_entry(&req, 0, Some(&buffers));
        assert_eq!((seen.cmd_op, seen.cmd_flags, seen.buf_index), (3, 1, 1));
        // Ranges of a discard are never registered memory, even if they should lie in some.
        let (seen, _) = first_entry(&Request::discard(512), 0, Some(&buffers));
        assert_eq!((seen.cmd_flags, seen.buf_index), (0, 0));
    }

    #[test]
    fn a_character_device_is_no_other_file() {
        assert!(node::check(&std::fs::metadata("/dev/null").unwrap()).is_ok());
        assert_eq!(node::check(&std::fs::metadata("/").unwrap()), Err("a directory"));
    }
}
