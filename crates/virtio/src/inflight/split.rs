//! In-flight tracking of a split ring: `QueueRegionSplit` and `DescStateSplit`.
//!
//! ```text
//!   header  features u64 │ version u16 │ desc_num u16 │ last_batch_head u16 │ used_idx u16
//!   entry   inflight u8 │ padding 5 B │ next u16 │ counter u64              (one for each head descriptor)
//! ```

use super::{InflightQueue, Part};
use crate::device::RingError;

const BYTES: usize = 16;

/// Keeps the region of a split ring up to date.
#[derive(Debug)]
pub(crate) struct SplitTracker {
    part: Part,
    counter: u64,
}

/// State that a dead device left behind.
#[derive(Debug)]
pub(crate) struct RecoveredSplit {
    /// Heads to resubmit, the oldest last.
    pub heads: Vec<u16>,
}

impl SplitTracker {
    /// Takes the region over for a ring of `size` entries whose used index is `used_idx`. Returns
    /// `None` with the tracker if the region was unused.
    pub(crate) fn attach(
        queue: InflightQueue,
        size: u16,
        used_idx: u16,
    ) -> Result<(SplitTracker, Option<RecoveredSplit>), RingError> {
        let mut tracker = SplitTracker { part: queue.for_ring(size, false)?, counter: 0 };
        let part = &tracker.part;
        if !part.is_initialised::<BYTES>()? {
            (0..part.desc_num).for_each(|head| tracker.set_inflight(head, 0));
            tracker.set_used_idx(used_idx);
            part.set_initialised::<BYTES>();
            return Ok((tracker, None));
        }
        tracker.finish_last_batch(size, used_idx)?;
        let mut found: Vec<(u64, u16)> = (0..part.desc_num)
            .filter(|&head| tracker.is_inflight(head))
            .map(|head| (part.get::<BYTES, 8, u64>(head), head))
            .collect();
        found.sort_unstable_by(|a, b| b.cmp(a));
        if found.iter().any(|&(_, head)| head >= size) || found.len() > usize::from(size) {
            return Err(RingError::InflightCorrupt {
                what: "a descriptor in flight that the ring does not have",
            });
        }
        tracker.counter = found.first().map_or(0, |&(newest, _)| newest.wrapping_add(1));
        Ok((tracker, Some(RecoveredSplit { heads: found.into_iter().map(|(_, head)| head).collect() })))
    }

    /// Clears the marks of the chains that the dead device published last, if it died before it did
    /// so.
    fn finish_last_batch(&self, size: u16, used_idx: u16) -> Result<(), RingError> {
        let batch = used_idx.wrapping_sub(self.part.header::<BYTES, 14, u16>());
        if batch > size {
            // Another ring has replaced the tracked one. That is valid only without requests in
            // flight.
            if (0..self.part.desc_num).any(|head| self.is_inflight(head)) {
                return Err(RingError::InflightCorrupt { what: "used_idx is far from the ring's" });
            }
        } else if batch > 0 {
            let mut head = self.part.header::<BYTES, 12, u16>();
            for _ in 0..batch {
                head = self.part.checked(head, "the last batch leaves the table")?;
                self.set_inflight(head, 0);
                head = self.part.get::<BYTES, 6, u16>(head);
            }
        }
        self.set_used_idx(used_idx);
        Ok(())
    }

    /// Records a chain as popped. Nothing may fail after this call.
    #[inline]
    pub(crate) fn popped(&mut self, head: u16) -> Result<(), RingError> {
        if self.is_inflight(head) {
            return Err(RingError::AlreadyInFlight { index: head });
        }
        self.part.set::<BYTES, 8, u64>(head, self.counter);
        self.counter = self.counter.wrapping_add(1);
        self.set_inflight(head, 1);
        Ok(())
    }

    /// Records that these chains are about to be published.
    #[inline]
    pub(crate) fn publishing(&self, batch: &[u16]) {
        let mut last = self.part.header::<BYTES, 12, u16>();
        for &head in batch {
            self.part.set::<BYTES, 6, u16>(head, last);
            last = head;
        }
        self.part.set_header::<BYTES, 12, u16>(last);
    }

    /// Records that these chains were published.
    #[inline]
    pub(crate) fn published(&self, batch: &[u16], used_idx: u16) {
        batch.iter().for_each(|&head| self.set_inflight(head, 0));
        self.set_used_idx(used_idx);
    }

    #[inline]
    fn is_inflight(&self, head: u16) -> bool {
        self.part.get::<BYTES, 0, u8>(head) == 1
    }

    #[inline]
    fn set_inflight(&self, head: u16, value: u8) {
        self.part.set::<BYTES, 0, u8>(head, value);
    }

    #[inline]
    fn set_used_idx(&self, used_idx: u16) {
        self.part.set_header::<BYTES, 14, u16>(used_idx);
    }
}
