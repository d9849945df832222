//! The session of a program that writes the image: its mark in the header, and what an earlier one
//! has left.

use super::home::{Entries, Home, in_background, lock};
use super::marks::Mark;
use super::restart::{Log, RestartLog};
use crate::entry::{COPIED, Entry};
use crate::header::{at, be_bytes, incompatible};
use crate::mutant::{self, Mutant};
use block::{IoError, IoResult};
use std::collections::BTreeMap;

impl Home {
    /// Sets the entries that the log has of the last session, and has the image name the new one.
    /// Autoclear bits that are unknown are cleared before the first write.
    pub(super) async fn begin_session(&self, view: &Entries, log: Option<RestartLog>) -> IoResult {
        let (header, image) = (&view.format().header, view.format().image.name());
        let last = header.session();
        let left = log.as_ref().map(|log| log.entries(last)).transpose().map_err(|error| {
            tracing::error!(image, %error, "the restart log cannot be read");
            IoError::DeviceGone
        })?;
        // A repair by QEMU 7.2 drops the snapshots of an image with autoclear bits that it does not
        // know, but not those of a dirty one.
        let is_dirty = self.snapshots.get().is_used() || header.is_dirty();
        self.is_unsettled.set(header.is_dirty());
        if let Some(left) = left.filter(|left| !left.is_empty()) {
            self.write_mark(view, last, is_dirty).await?;
            self.restore(view, &left).await.inspect_err(|error| {
                let text =
                    "writes of a killed server cannot be restored; without its restart log they are lost";
                tracing::error!(image, %error, text);
            })?;
            tracing::warn!(image, clusters = left.len(), "writes of a killed server were restored");
        }
        let log = log.map(|log| log.begin(last)).transpose().unwrap_or_else(|error| {
            let text = "no restart log: a kill of the server loses writes that were not flushed";
            tracing::warn!(image, %error, text);
            None
        });
        let session = log.as_ref().map_or(0, Log::session);
        self.write_mark(view, session, session > 0 && is_dirty || header.is_dirty()).await?;
        log.map(|log| self.log.get_or_init(|| log));
        if let Some(bitmaps) = &view.format().bitmaps {
            bitmaps.begin(&self.file).await?;
        }
        if last > 0 {
            in_background(view, async |home, view| home.end_leaks(view).await);
        }
        Ok(())
    }

    /// Frees what a session that was not closed has left.
    async fn end_leaks(&self, view: &Entries) {
        let image = view.format().image.name();
        match self.free_leaks(view).await {
            Ok(0) => {}
            Ok(clusters) => tracing::warn!(image, clusters, "clusters that a crash had leaked were freed"),
            Err(error) => tracing::warn!(image, %error, "clusters that a crash has leaked stay"),
        }
    }

    /// Writes the features of the header that say who writes the image, unless it has them.
    pub(super) async fn write_mark(&self, view: &Entries, session: u32, is_dirty: bool) -> IoResult {
        let mark = Mark { session, is_dirty };
        let features = self.features(view, mark);
        if view.format().header.version >= 3 && self.written.get() != Some(features) {
            // A write that fails may have happened.
            self.written.set(None);
            self.refcounts.write_header(at::INCOMPATIBLE, &be_bytes(features)).await?;
            self.written.set(Some(features));
        }
        self.mark.set(mark);
        Ok(())
    }

    /// The features of the header with a mark.
    fn features(&self, view: &Entries, mark: Mark) -> [u64; 3] {
        let mut features = view.format().header.features_with(mark.session, mark.is_dirty);
        if view.format().is_corrupt() {
            features[0] |= incompatible::CORRUPT;
        }
        features
    }

    /// Sets the entries of some clusters of the disk, whose data is in the file, and makes them
    /// durable. Clusters that they refer to have references before any other is taken.
    async fn restore(&self, view: &Entries, entries: &BTreeMap<u64, Entry>) -> IoResult {
        let (metadata, geometry) = (view.format(), view.format().geometry);
        let clusters = metadata.header.size.div_ceil(geometry.cluster_size());
        for (cluster, entry) in entries {
            let is_valid = geometry.place(*entry, cluster.wrapping_mul(geometry.cluster_size()), 0).is_ok();
            if *cluster >= clusters || !is_valid || self.overlaps(metadata, *entry) {
                return Err(IoError::Corrupt);
            }
            if metadata.data_file.is_none() && !mutant::is(Mutant::RestoredWithoutRefcount) {
                for cluster in geometry.host_clusters(*entry) {
                    self.refcounts.claim(cluster, entry.word & COPIED != 0).await?;
                }
            }
        }
        for (cluster, entry) in entries {
            let mut locked = lock(view, *cluster).await?;
            let old = locked.entry;
            if old != *entry {
                let needed = *cluster..*cluster + 1;
                if self.reserve_tables(view, needed.clone()).await == Err(IoError::NoSpace) {
                    // Clusters that leaked with the kill have the room.
                    let kept = entries.values().flat_map(|entry| geometry.host_clusters(*entry)).collect();
                    self.free_leaks_but(view, kept).await.map_err(|_| IoError::NoSpace)?;
                    self.reserve_tables(view, needed).await?;
                }
                self.set(view, &mut locked, *entry).await?;
                if geometry.host_clusters(old) != geometry.host_clusters(*entry) {
                    self.drop_place(view, old);
                }
            }
        }
        self.flush(view).await
    }
}
