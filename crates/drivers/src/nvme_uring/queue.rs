//! The commands of a namespace as entries of a ring.

use super::admin::PassthroughCommand;
use super::facts::NamespaceFacts;
use super::operation::Operation;
use crate::direct::ZoneRequest;
use crate::fixed::Regions;
use crate::passthrough::transfer::Memory;
use crate::passthrough::{CommandQueue, Commands, Next, Target};
use block::{IoError, Request};
use io_uring::opcode::UringCmd80;
use io_uring::{cqueue, squeue};
use std::fs::File;

/// `NVME_URING_CMD_IO`: `_IOWR('N', 0x80, struct nvme_uring_cmd)`.
const CMD_IO: u32 = 0xc048_4e80;
/// `NVME_URING_CMD_IO_VEC`: the same with a list of `iovec`.
const CMD_IO_VEC: u32 = 0xc048_4e81;

/// Commands of one queue in the ring. The controller's own queues hold 1023 on Linux, for all
/// users. On some kernels, commands beyond that are executed wrong
/// ([`crate::passthrough::transfer::Transfer::may_retry`]).
const MOST: u32 = 256;

/// The submission and completion ring of one core or thread over a namespace.
pub type NvmeQueue = CommandQueue<NamespaceCommands>;

/// An open namespace.
pub struct NamespaceCommands {
    pub(super) file: File,
    pub(super) facts: NamespaceFacts,
}

/// Pass-through commands need the large entries (`IORING_SETUP_SQE128`, `IORING_SETUP_CQE32`).
impl Commands for NamespaceCommands {
    type Entry = squeue::Entry128;
    type Answer = cqueue::Entry32;
    type Operation = Operation;

    fn file(&self) -> &File {
        &self.file
    }

    fn regions(&self) -> Option<&Regions> {
        None
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

    unsafe fn begin_zone(&self, operation: &mut Operation, req: ZoneRequest) -> Result<bool, IoError> {
        // SAFETY: by the contract of this function.
        unsafe { operation.begin_zone(req, &self.facts) }
    }

    #[inline]
    fn entry(&self, operation: &mut Operation, target: &Target<'_>) -> Result<squeue::Entry128, IoError> {
        let (command, memory) = operation.next(&self.facts, target.page)?;
        let (code, addr, len) = match memory {
            Memory::Single(segment) => (CMD_IO, segment.base.expose_provenance(), segment.len),
            Memory::List => {
                let list = &operation.transfer.iovecs;
                (CMD_IO_VEC, list.as_ptr().expose_provenance(), list.len())
            }
        };
        // No command is longer than `max_transfer`, which is below 4 GiB.
        let command = PassthroughCommand::new(&command, addr as u64, len as u32).to_bytes();
        Ok(UringCmd80::new(target.fd, code).cmd(command).build().flags(target.flags))
    }

    #[inline]
    fn complete(&self, operation: &mut Operation, answer: i32) -> Next {
        operation.complete(answer, &self.facts)
    }
}
