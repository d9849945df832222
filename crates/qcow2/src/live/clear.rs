//! Discards and writes of zeroes: entries that change without data.

use super::home::{Entries, Home, Locked, lock};
use crate::entry::{COPIED, Cluster, Entry};
use block::{IoError, IoResult};
use reactor::yield_now;
use std::ops::Range;

/// How clusters lose their content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Clear {
    Discard,
    Zero,
    /// Zeroes, and the clusters keep their places.
    ZeroInPlace,
}

impl Home {
    /// Clears whole clusters of the disk, or subclusters: `range` is in bytes.
    ///
    /// # Errors
    /// [`IoError::Corrupt`], the device's. Some clusters may be clear then.
    pub(super) async fn clear(&self, view: &Entries, range: Range<u64>, how: Clear) -> IoResult {
        let cluster_size = self.file.cluster_size();
        let clusters = range.start / cluster_size..range.end.div_ceil(cluster_size);
        for (done, cluster) in clusters.enumerate() {
            if view.format().is_corrupt() {
                return Err(IoError::Corrupt);
            }
            let locked = lock(view, cluster).await?;
            self.clear_cluster(view, locked, cluster, &range, how).await?;
            if done % 64 == 63 {
                self.tidy(view);
                yield_now().await;
            }
        }
        self.tidy(view);
        Ok(())
    }

    /// As [`Home::clear`], for a part of a cluster, if the cluster still has the entry `old`.
    /// Returns whether it had.
    ///
    /// # Errors
    /// As [`Home::clear`].
    pub(super) async fn clear_if(
        &self,
        view: &Entries,
        range: Range<u64>,
        old: Entry,
        how: Clear,
    ) -> Result<bool, IoError> {
        let cluster = range.start / self.file.cluster_size();
        let locked = lock(view, cluster).await?;
        let is_same = locked.entry == old;
        if is_same {
            self.clear_cluster(view, locked, cluster, &range, how).await?;
        }
        Ok(is_same)
    }

    async fn clear_cluster(
        &self,
        view: &Entries,
        mut locked: Locked,
        cluster: u64,
        range: &Range<u64>,
        how: Clear,
    ) -> IoResult {
        let old = locked.entry;
        let mask = view.format().geometry.subclusters_in(cluster, range);
        let new = self.cleared(view, old, mask, how);
        if new != old {
            self.reserve_tables(view, cluster..cluster + 1).await?;
            self.set(view, &mut locked, new).await?;
            if view.format().geometry.data_place(new).is_none() {
                self.drop_place(view, old);
            }
        }
        Ok(())
    }

    /// The entry of a cluster after its subclusters of `mask` were cleared.
    fn cleared(&self, view: &Entries, old: Entry, mask: u32, how: Clear) -> Entry {
        let metadata = view.format();
        let zeroes = |entry: Entry| metadata.geometry.zeroed(entry, mask);
        if mask != u32::MAX && metadata.geometry.has_extended_l2 {
            return zeroes(old);
        }
        let zero = if metadata.geometry.is_v2 { Entry::NONE } else { zeroes(Entry::NONE) };
        match metadata.geometry.cluster(old) {
            // Without a backing file it reads as zeroes.
            Cluster::Unallocated if how == Clear::Discard && !metadata.backing.is_used() => old,
            Cluster::Unallocated if metadata.geometry.is_v2 => old,
            Cluster::Zero => old,
            Cluster::Data(_) | Cluster::ZeroAllocated(_)
                if how == Clear::ZeroInPlace && old.word & COPIED != 0 =>
            {
                zeroes(old)
            }
            _ => zero,
        }
    }
}
