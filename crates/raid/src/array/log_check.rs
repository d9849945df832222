//! Finds unreadable blocks in the logs of members, and rewrites them while the array runs.
//!
//! Only recovery reads the log. An unreadable block does no harm while the array runs, but costs
//! redundancy after a crash (`log/recover.rs`). So a scrub also reads the logs. An unreadable block
//! may be part of a live entry, and other blocks may have entries that supersede an older one.
//! Therefore blocks are rewritten between two logs: the gates are closed, no operation is in
//! flight, and a new nonce has made every entry void.

use super::Array;
use super::committer::MetadataCommitter;
use super::members::{MemberChannel, MemberRole};
use super::stop::{ReadFailure, read_failure};
use crate::config::ROW_BYTES;
use crate::metadata;
use block::{Channel, Flags, IoResult, Op};
use reactor::BufferPool;
use std::cell::RefCell;
use std::ops::Range;

/// Bytes of a log that are read at a time.
pub const LOG_PART_BYTES: u64 = 256 << 10;

impl Array {
    /// Bytes of the log on a slot's live member; 0 without one, and in a read-only array.
    pub fn log_bytes(&self, slot: usize) -> u64 {
        let members = &self.shared.members;
        let is_used = members.is_live(slot) && !self.shared.common.is_read_only;
        let [own, _] = members.attached(slot);
        own.filter(|_| is_used).map_or(0, |own| own.layout.log_bytes)
    }

    /// Reads a part of the log of a slot's member, at most [`LOG_PART_BYTES`]. Returns the
    /// unreadable blocks of 4 KiB, as offsets on the member in bytes. Must run on a core.
    pub async fn unreadable_log_blocks(&self, slot: usize, part: Range<u64>) -> Vec<u64> {
        let owner = self.owner();
        let Some(MemberChannel { channel, log_offset, .. }) = owner.channels.get(slot, MemberRole::Current)
        else {
            return Vec::new();
        };
        let part = log_offset + part.start..log_offset + part.end;
        if is_readable(&*channel, &part).await {
            return Vec::new();
        }
        let mut unreadable = Vec::new();
        for at in part.clone().step_by(ROW_BYTES as usize) {
            if !is_readable(&*channel, &(at..part.end.min(at + u64::from(ROW_BYTES)))).await {
                unreadable.push(at);
            }
        }
        unreadable
    }

    /// Starts a new log and rewrites blocks of it, given as slots and offsets on the member in
    /// bytes. Requests wait meanwhile. Must run on a core.
    ///
    /// # Errors
    /// If the array cannot continue without the members that fail.
    pub async fn rewrite_log(&self, blocks: Vec<(usize, u64)>) -> IoResult {
        self.owner();
        self.shared
            .on_committer(move |committer| Box::pin(async move { committer.rewrite_log(&blocks).await }))
            .await
    }
}

impl MetadataCommitter {
    async fn rewrite_log(&self, blocks: &[(usize, u64)]) -> IoResult {
        let owner = self.owner().ok_or(block::IoError::DeviceGone)?;
        let failures = RefCell::new(Vec::new());
        let rewrite = async || {
            for (slot, at) in blocks.iter().copied().filter(|(slot, _)| owner.shared.members.is_live(*slot)) {
                let Some(member) = owner.channels.get(slot, MemberRole::Current) else { continue };
                if let Err(error) = metadata::write(&*member.channel, at, &[0; ROW_BYTES as usize]).await {
                    failures.borrow_mut().push((slot, error));
                }
            }
        };
        self.while_quiesced(async || Ok(()), |_| (), rewrite, None).await?;
        match failures.take() {
            failures if failures.is_empty() => Ok(()),
            failures => owner.members_failed(failures).await,
        }
    }
}

/// Whether a member can read some bytes. Only errors of the medium count; others show in requests.
async fn is_readable(channel: &dyn Channel, bytes: &Range<u64>) -> bool {
    let len = (bytes.end - bytes.start) as usize;
    let buffer = BufferPool::new(len).take(len).await;
    let (_, result) = buffer.transfer(channel, Op::Read, Flags::NONE, bytes.start).await;
    !result.is_err_and(|error| matches!(read_failure(error), ReadFailure::Medium))
}
