//! Unreadable blocks in the logs of members: found by reading the logs, written anew while the array runs.
//!
//! The log is read by recovery alone. A block that cannot be read costs nothing while the array runs, and redundancy
//! after a crash (`log/recover.rs`). So a scrub reads the logs, too. A block may be part of a live entry, and one that
//! is not may hold what supersedes an older entry. Therefore blocks are written between two logs: the gates are
//! closed, no operation is under way, and a new nonce has made every entry void.

use super::Array;
use super::home::Home;
use super::members::{MemberChannel, Which};
use super::owner::{ReadFailure, read_failure};
use crate::config::ROW_BYTES;
use crate::metadata;
use block::{Channel, Flags, IoResult, Op};
use reactor::BufferPool;
use std::cell::RefCell;
use std::ops::Range;

/// Bytes of a log that are read at a time.
pub const LOG_PART_BYTES: u64 = 256 << 10;

impl Array {
    /// Bytes of the log on a slot's live member; 0 without one, and in an array that is only read.
    pub fn log_bytes(&self, slot: usize) -> u64 {
        let members = &self.shared.members;
        let is_used = members.is_live(slot) && !self.shared.is_read_only;
        let [own, _] = members.attached(slot);
        own.filter(|_| is_used).map_or(0, |own| own.layout.log_bytes)
    }

    /// Reads a part of the log of a slot's member, at most [`LOG_PART_BYTES`]. Returns the blocks of 4 KiB that the
    /// member cannot read, as bytes from the beginning of the member. On a core.
    pub async fn unreadable_log_blocks(&self, slot: usize, part: Range<u64>) -> Vec<u64> {
        let owner = self.owner();
        let Some(MemberChannel { channel, layout }) = owner.channels.get(slot, Which::Own) else {
            return Vec::new();
        };
        let part = layout.log_offset + part.start..layout.log_offset + part.end;
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

    /// Starts the log over and writes blocks of it anew, given as slots and bytes from the beginning of the member.
    /// Requests wait meanwhile. On a core.
    ///
    /// # Errors
    /// When the array cannot go on without members that fail.
    pub async fn rewrite_log(&self, blocks: Vec<(usize, u64)>) -> IoResult {
        self.owner();
        self.shared.at_home(move |home| Box::pin(async move { home.rewrite_log(&blocks).await })).await
    }
}

impl Home {
    async fn rewrite_log(&self, blocks: &[(usize, u64)]) -> IoResult {
        let owner = self.owner().ok_or(block::IoError::DeviceGone)?;
        let failures = RefCell::new(Vec::new());
        let rewrite = async || {
            for (slot, at) in blocks.iter().copied().filter(|(slot, _)| owner.shared.members.is_live(*slot)) {
                let Some(member) = owner.channels.get(slot, Which::Own) else { continue };
                if let Err(error) = metadata::write(&*member.channel, at, &[0; ROW_BYTES as usize]).await {
                    failures.borrow_mut().push((slot, error));
                }
            }
        };
        self.quietly(async || Ok(()), |_| (), rewrite, None).await?;
        match failures.take() {
            failures if failures.is_empty() => Ok(()),
            failures => owner.members_failed(failures).await,
        }
    }
}

/// Whether a member can read some bytes. Other errors than those of the medium show in requests.
async fn is_readable(channel: &dyn Channel, bytes: &Range<u64>) -> bool {
    let len = (bytes.end - bytes.start) as usize;
    let buffer = BufferPool::new(len).take(len).await;
    let (_, result) = buffer.transfer(channel, Op::Read, Flags::NONE, bytes.start).await;
    !result.is_err_and(|error| matches!(read_failure(error), ReadFailure::Medium))
}
