//! The parts of an image in use that a commit writes to its backing file.
//!
//! ```text
//!   image ── parts with a place ─► copier ─► the backing file, open for writing
//!     └───── parts without one ──► read from the backing file as it was opened for reading
//! ```
//!
//! Until the image is closed it reads parts without a place from the backing file, by the tables
//! that it read before. So a commit changes no cluster of the backing file of which the image lacks
//! a part. First the image gets that part, and requests end that may read it there.

use super::channel::LiveChannel;
use super::stream::Zeroes;
use crate::content::Places;
use crate::entry::Place;
use crate::mutant::{self, Mutant};
use block::IoError;
use reactor::yield_now;
use std::ops::Range;

/// A [`Commit`](super::Commit) on one core.
pub struct CommitChannel {
    channel: LiveChannel,
    /// Bytes of a cluster of the backing file.
    cluster_size: u64,
}

impl CommitChannel {
    pub(super) fn new(channel: LiveChannel, cluster_size: u64) -> CommitChannel {
        CommitChannel { channel, cluster_size }
    }

    /// The first part of `range` that the image has and the backing file may lack; empty, at the
    /// end of the range, if there is none. It may be written to the backing file.
    ///
    /// # Errors
    /// As a write: the image gets data of the backing file.
    pub async fn next(&self, range: Range<u64>) -> Result<Range<u64>, IoError> {
        let places = &self.channel.content.places;
        let mut at = range.start;
        while at < range.end {
            let run = places.run(at, range.end - at).await?;
            if run.place != Place::Unallocated {
                let part = at..at + run.len;
                self.complete(&part).await?;
                // A raw backing file keeps its data where it is.
                if self.cluster_size > 1 && !mutant::is(Mutant::CommitWithoutGrace) {
                    places.0.grace().await;
                }
                return Ok(part);
            }
            at += run.len;
            // A run that is known has not waited.
            yield_now().await;
        }
        Ok(range.end..range.end)
    }

    /// Lets the image have all of the backing file's clusters that `part` touches.
    async fn complete(&self, part: &Range<u64>) -> Result<(), IoError> {
        if mutant::is(Mutant::CommitNotCompleted) {
            return Ok(());
        }
        let size = self.channel.size().0;
        let start = part.start / self.cluster_size * self.cluster_size;
        let end = part.end.next_multiple_of(self.cluster_size).min(size);
        // Zeroes, too: the cluster is another one after the commit, and then may be freed.
        let zeroes = if mutant::is(Mutant::CommitWithoutZeroes) { Zeroes::Skipped } else { Zeroes::Placed };
        self.channel.populate(start..part.start, zeroes).await?;
        self.channel.populate(part.end..end, zeroes).await
    }
}
