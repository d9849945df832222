//! Copy: the target copies blocks within a namespace, so that their data stays off the network.
//!
//! A copy is checked as a whole before its first block changes. Its parts are ordinary reads and
//! writes: between them, the rights of the host are checked again.
//!
//! Source: NVM Command Set Specification 1.0, 3.2.2; for the status of an overlap 1.1.

use crate::PART;
use crate::failure::Failure;
use crate::io::{Bytes, Place};
use crate::queue::Queue;
use crate::transport::{Command, Transport};
use block::{Flags, Op};
use exports::DataMemory;
use nvme::Status;
use nvme::command::{COPY_RANGE_BYTES, Copy, parse_copy_range};

/// Supported formats of source ranges: 0 (OCFS).
pub(crate) const FORMATS: u16 = 1;
/// Longest copy, which must end within a host's timeout on a slow device.
const MAX_BYTES: u32 = 16 << 20;

/// Limit of the blocks of a copy, and of each source range: MCL and MSSRL.
pub(crate) const fn max_blocks(block_size: u32) -> u32 {
    MAX_BYTES / block_size
}

impl Queue {
    /// Executes Copy. The completion of a copy that failed has the index of the first source range
    /// that was not copied.
    pub(crate) async fn copy<T: Transport>(
        &self,
        command: &mut Command<T::Memory>,
        transport: &T,
    ) -> Result<(), Failure> {
        let entry = command.entry;
        let place = self.place(entry.nsid)?;
        let copy = Copy::parse(&entry.cdw);
        if copy.format != 0 {
            return Err(Status::INVALID_FIELD.into());
        }
        let len = copy.ranges as usize * COPY_RANGE_BYTES;
        // Before its list is requested.
        place.admit_read()?;
        place.admit_write()?;
        let mut incoming = self.incoming(command, len, transport).await?;
        let mut list = vec![0; len];
        incoming.copy_to(&mut list);
        drop(incoming);
        let sources = sources(&place, &copy, &list)?;
        let flags = if copy.fua { place.target.durable() } else { Flags::NONE };
        let mut to = copy.lba << place.namespace.block_shift();
        for (index, source) in sources.into_iter().enumerate() {
            let copied = copy_range(&place, source, to, flags, transport).await;
            copied.map_err(|failure| at_range(failure, index))?;
            to += source.len;
        }
        Ok(())
    }
}

/// The source ranges, once all of the copy is allowed.
fn sources(place: &Place<'_>, copy: &Copy, list: &[u8]) -> Result<Vec<Bytes>, Status> {
    let limit = max_blocks(1 << place.namespace.block_shift());
    let (list, _) = list.as_chunks::<COPY_RANGE_BYTES>();
    let ranges = || list.iter().map(parse_copy_range);
    let blocks: u64 = ranges().map(|(_, blocks)| u64::from(blocks)).sum();
    // The limit of each range is that of all.
    let blocks = u32::try_from(blocks).ok().filter(|blocks| *blocks <= limit);
    let destination = place.bytes(copy.lba, blocks.ok_or(Status::COMMAND_SIZE_LIMIT_EXCEEDED)?)?;
    let sources: Vec<Bytes> =
        ranges().map(|(lba, blocks)| place.bytes(lba, blocks)).collect::<Result<_, _>>()?;
    match sources.iter().any(|source| source.overlaps(&destination)) {
        false => Ok(sources),
        true => Err(Status::OVERLAPPING_RANGE),
    }
}

/// Copies one range to `to`, part by part.
async fn copy_range<T: Transport>(
    place: &Place<'_>,
    source: Bytes,
    to: u64,
    flags: Flags,
    transport: &T,
) -> Result<(), Failure> {
    transport.stats().count_request(Op::Read, source.len);
    transport.stats().count_request(Op::Write, source.len);
    for at in (0..source.len).step_by(PART) {
        if transport.is_broken() {
            return Err(Failure::Gone);
        }
        // At most one command of the queue at a time: there is memory for one part.
        let _turn = transport.scratch().await;
        let memory = transport.uncounted((source.len - at).min(PART as u64) as usize);
        place.admit_read()?;
        // SAFETY: the memory outlives both transfers, which are awaited here.
        let data = unsafe { memory.data() };
        place.target.transfer(Op::Read, Flags::NONE, source.offset + at, data).await?;
        let _running = place.admit_write()?;
        place.target.transfer(Op::Write, flags, to + at, data).await?;
    }
    Ok(())
}

fn at_range(failure: Failure, index: usize) -> Failure {
    match failure {
        Failure::Status(status) => Failure::Detailed { status, result: index as u64 },
        other => other,
    }
}
