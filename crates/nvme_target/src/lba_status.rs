//! Get LBA Status: the allocated blocks of a namespace, from the block status of its device.
//!
//! The actions that report potentially unrecoverable blocks return empty lists, because devices do
//! not report such blocks.
//!
//! Source: NVM Command Set Specification 1.1, 4.2.1.

use crate::failure::Failure;
use crate::queue::{Queue, Reply, room};
use crate::subsystem::Namespace;
use crate::transport::Transport;
use block::{Status as BlockStatus, StatusReport};
use exports::Target;
use nvme::lba_status::{Action, DESCRIPTOR_BYTES, GetLbaStatus, HEADER_BYTES, LbaRange, LbaStatusList};
use nvme::{Status, SubmissionEntry};
use reactor::yield_now;
use std::ops::Range;

/// Longest list, whatever the host has room for. The host continues after the last range.
const MAX_LIST_BYTES: usize = 64 << 10;

impl Queue {
    /// Executes Get LBA Status.
    pub(crate) async fn lba_status<T: Transport>(
        &self,
        entry: &SubmissionEntry,
        transport: &T,
    ) -> Result<Reply<T::Memory>, Failure> {
        let controller = self.controller();
        controller.port.check_access()?;
        let get = GetLbaStatus::parse(&entry.cdw).ok_or(Status::INVALID_FIELD)?;
        let namespace = controller.subsystem.namespace(entry.nsid).ok_or(Status::INVALID_NAMESPACE)?;
        let range = bytes_of(&get, namespace)?;
        let limit = get.bytes.min(MAX_LIST_BYTES as u64) as usize;
        let limit = limit.checked_sub(HEADER_BYTES).ok_or(Status::INVALID_FIELD)?;
        let room = room(entry)?.checked_sub(HEADER_BYTES).ok_or(Status::INVALID_SGL_LENGTH)?;
        let limit = limit.min(room) / DESCRIPTOR_BYTES;
        let list = match get.action {
            Action::Allocated => allocated(namespace, range, limit).await?,
            Action::Scan | Action::Tracked => LbaStatusList::new(),
        };
        self.reply_with(entry, &list.encode(), transport).await
    }
}

/// The requested bytes of a namespace, at least one block.
fn bytes_of(get: &GetLbaStatus, namespace: &Namespace) -> Result<Range<u64>, Status> {
    let shift = namespace.block_shift();
    let blocks = namespace.capacity() >> shift;
    let end = match get.blocks {
        0 => Some(blocks),
        count => get.lba.checked_add(count.into()).filter(|end| *end <= blocks),
    };
    let end = end.filter(|end| *end > get.lba).ok_or(Status::LBA_OUT_OF_RANGE)?;
    Ok(get.lba << shift..end << shift)
}

/// The allocated blocks of a range, in at most `limit` descriptors. Blocks without storage that do
/// not read as zeroes count as allocated.
async fn allocated(namespace: &Namespace, range: Range<u64>, limit: usize) -> Result<LbaStatusList, Failure> {
    // An admin queue keeps no device open. The channel of an I/O queue on this core is shared.
    let target = Target::open(namespace.device.clone(), true).map_err(|_| Status::INTERNAL_ERROR)?;
    let shift = namespace.block_shift();
    let report = Box::new(StatusReport::new());
    let mut list = LbaStatusList::new();
    let mut at = range.start;
    while at < range.end && list.is_complete {
        report.clear();
        target.block_status(&report, at, range.end - at).await?;
        for extent in report.extents() {
            if !extent.status.contains(BlockStatus::ZERO_HOLE) {
                list.push(LbaRange { lba: at >> shift, blocks: extent.len >> shift }, limit);
            }
            at += extent.len;
        }
        // A device may answer at once, and for a short part of a long range.
        yield_now().await;
    }
    Ok(list)
}
