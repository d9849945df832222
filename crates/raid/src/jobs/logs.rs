//! The logs of members are read at the end of a scrub: a block that cannot be read is rewritten.

use super::keeper::Keeper;
use crate::array::LOG_PART_BYTES;
use std::collections::BTreeMap;

impl Keeper {
    /// Reads the logs of all live members, and rewrites blocks that their members cannot read.
    pub(super) async fn check_logs(&self) {
        let array = self.array().clone();
        let mut unreadable = Vec::new();
        for slot in 0..array.config().geometry.members() {
            let (mut at, bytes) = (0, array.log_bytes(slot));
            while at < bytes {
                if self.must_stop() {
                    return;
                }
                if let Err(sleep) = self.begin(LOG_PART_BYTES) {
                    sleep.await;
                    continue;
                }
                let end = bytes.min(at + LOG_PART_BYTES);
                let blocks = array.unreadable_log_blocks(slot, at..end).await;
                unreadable.extend(blocks.into_iter().map(|block| (slot, block)));
                at = end;
            }
        }
        if unreadable.is_empty() {
            return;
        }
        let mut counts = BTreeMap::new();
        unreadable.iter().for_each(|(slot, _)| *counts.entry(*slot).or_insert(0) += 1);
        let result = array.rewrite_log(unreadable).await;
        for (slot, count) in counts {
            self.event(match &result {
                Ok(()) => format!("slot {slot}: {count} unreadable blocks of the log were rewritten"),
                Err(error) => format!("slot {slot}: {count} blocks of the log cannot be read: {error}"),
            });
        }
    }
}
