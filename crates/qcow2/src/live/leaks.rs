//! Clusters that a crash has left without use: found and freed while the image is in use.
//!
//! A cluster leaks when its refcount is higher than the number of references to it. Nothing takes
//! such a cluster, so a search has time: it notes the clusters whose use changes meanwhile, and
//! passes over them. A refcount that falls to 1 needs a COPIED bit, and these change while no
//! request changes the disk.

use super::home::{Entries, Home};
use super::snapshots::read_error;
use crate::check::Check;
use crate::error::Problem;
use crate::mutant::{self, Mutant};
use std::cell::Cell;
use std::collections::HashSet;

impl Home {
    /// Lowers refcounts to the number of references, of all clusters whose use does not change
    /// meanwhile. Returns the number of these clusters.
    ///
    /// # Errors
    /// When the metadata has errors: nothing is freed. The device's.
    pub(super) async fn free_leaks(&self, view: &Entries) -> Result<u64, Problem> {
        let search = async {
            // Clusters that wait for their release would be passed over.
            self.reclaim(view).await.map_err(read_error)?;
            // A flush has clusters that are on their way to a quarantine.
            self.flushing.during(1, async { self.begin_search(HashSet::new()) }).await;
            let freed = match self.flush(view).await {
                Ok(()) => self.search(view).await,
                Err(error) => Err(read_error(error)),
            };
            self.in_use.take();
            freed
        };
        self.holding.during(1, Box::pin(search)).await
    }

    /// As [`Home::free_leaks`], while an image is opened. Clusters of `kept` are in use.
    pub(super) async fn free_leaks_but(&self, view: &Entries, kept: HashSet<u64>) -> Result<u64, Problem> {
        self.begin_search(kept);
        let freed = self.search(view).await;
        self.in_use.take();
        freed
    }

    /// Begins to note clusters whose use changes.
    fn begin_search(&self, mut in_use: HashSet<u64>) {
        in_use.extend(self.lent.borrow().iter());
        in_use.extend(self.reserved.borrow().values());
        in_use.extend(self.dropped.borrow().iter());
        in_use.extend(self.quarantine.borrow().values().flatten());
        for open in self.changes.borrow().values() {
            in_use.extend(open.clusters.first..open.clusters.first + open.clusters.count);
        }
        *self.in_use.borrow_mut() = Some(in_use);
    }

    /// Notes that clusters get a use, or lose one.
    pub(super) fn note_use(&self, clusters: impl IntoIterator<Item = u64>) {
        if let Some(in_use) = &mut *self.in_use.borrow_mut()
            && !mutant::is(Mutant::ChangesDuringSearch)
        {
            in_use.extend(clusters);
        }
    }

    async fn search(&self, view: &Entries) -> Result<u64, Problem> {
        let found = Check::references(&self.file.reader, &self.header_now(view)).await?;
        let errors = found.report.corruptions + found.report.check_errors;
        if errors > 0 {
            return Err(Problem::Refused(format!("{errors} errors in the metadata")));
        }
        let has_ones = Cell::new(self.is_unsettled.get());
        let freed = self.lower(|cluster, count| match found.counts.get(cluster) {
            1 if count > 1 => {
                has_ones.set(true);
                count
            }
            references => references,
        });
        let freed = freed.await?;
        if !has_ones.get() {
            return Ok(freed);
        }
        let ones = self.held(view, async {
            self.begin_change_of_snapshots(view).await?;
            let ones = self.lower(|cluster, count| match found.counts.get(cluster) {
                1 => 1,
                _ => count,
            });
            let ones = ones.await?;
            self.refresh_copied(view).await?;
            self.end_change_of_snapshots(view, false).await?;
            Ok(ones)
        });
        Ok(freed + ones.await?)
    }

    /// Lowers the refcounts of clusters whose use does not change. `wanted` gets a cluster and its
    /// refcount. Returns their number.
    async fn lower(&self, wanted: impl Fn(u64, u64) -> u64) -> Result<u64, Problem> {
        let is_noted = |cluster| self.in_use.borrow().as_ref().is_none_or(|in_use| in_use.contains(&cluster));
        let wanted = |cluster, count| if is_noted(cluster) { count } else { wanted(cluster, count) };
        let mut lowered = 0;
        for number in 0..self.refcounts.blocks() {
            lowered += self.refcounts.lower(number, wanted).await.map_err(read_error)?;
        }
        Ok(lowered)
    }
}
