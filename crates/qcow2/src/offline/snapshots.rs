//! Internal snapshots: made, applied and deleted while nothing else has the image open.
//!
//! Source: QEMU `docs/interop/qcow2.rst`, section *Snapshots*.

use super::Offline;
use super::repair::{Level, repair_image};
use crate::check::Check;
use crate::entry::COPIED;
use crate::error::{Error, Problem};
use crate::header::{at, be_bytes};
use crate::snapshot::{self, Table};
use block::Device;
use std::sync::Arc;
use std::time::Duration;

/// Makes a snapshot of the disk of the image on `device`, on the calling core. `now` is the time
/// since 1970. Returns its identifier.
///
/// # Errors
/// When the image has errors, a snapshot with this name, or refcounts that are too narrow; the
/// device's. The snapshot does not exist then.
pub async fn create(device: &Arc<dyn Device>, name: &str, now: Duration) -> Result<String, Error> {
    let run = async {
        let (mut image, mut found) = Offline::open_clean(device).await?;
        image.create_snapshot(&mut found, name, now).await
    };
    run.await.map_err(|problem| Error::new(device.name(), problem))
}

/// Lets the disk of the image on `device` have the content and the size of a snapshot, which is
/// named by identifier or name. The present content is lost.
///
/// # Errors
/// When the image has errors, or no such snapshot; the device's.
pub async fn apply(device: &Arc<dyn Device>, wanted: &str) -> Result<(), Error> {
    let run = async {
        let (mut image, mut found) = Offline::open_clean(device).await?;
        image.apply_snapshot(&mut found, wanted).await
    };
    run.await.map_err(|problem| Error::new(device.name(), problem))
}

/// Deletes a snapshot of the image on `device`, which is named by identifier or name.
///
/// # Errors
/// When the image has errors, or no such snapshot; the device's.
pub async fn delete(device: &Arc<dyn Device>, wanted: &str) -> Result<(), Error> {
    let run = async {
        let (mut image, found) = Offline::open_clean(device).await?;
        image.delete_snapshot(&found, wanted).await
    };
    run.await.map_err(|problem| Error::new(device.name(), problem))
}

impl Offline {
    async fn create_snapshot(
        &mut self,
        found: &mut Check,
        name: &str,
        now: Duration,
    ) -> Result<String, Problem> {
        let (list, mut table) = self.read_snapshots().await?;
        let id = list.check_new(&self.header, name)?;
        let (l1_offset, l1_entries) = (self.header.l1_offset, self.header.l1_entries);
        let used = self.share(found, l1_offset, l1_entries).await?;
        // The disk shares its clusters now.
        let shared = self.check().await?;
        self.correct_copied(&shared).await?;
        let l1 = be_bytes(used.l1.iter().map(|entry| entry & !COPIED));
        let start = found.report.image_end_offset / self.header.cluster_size();
        let first = if l1.is_empty() { 0 } else { start * self.header.cluster_size() };
        table.extend(snapshot::entry(first, l1_entries, &id, name, now, self.header.size));
        let places = self.append(start, &[&l1, &table]).await?;
        self.commit_snapshots(self.header.snapshot_count + 1, places[1]).await?;
        self.settle().await?;
        Ok(id)
    }

    async fn delete_snapshot(&mut self, found: &Check, wanted: &str) -> Result<(), Problem> {
        let (list, table) = self.read_snapshots().await?;
        let (_, rest) = list.without(&table, wanted)?;
        let count = self.header.snapshot_count - 1;
        self.begin().await?;
        let place = match count {
            0 => 0,
            _ => {
                let start = found.report.image_end_offset / self.header.cluster_size();
                self.append(start, &[&rest]).await?[0]
            }
        };
        self.commit_snapshots(count, place).await?;
        self.settle().await
    }

    async fn apply_snapshot(&mut self, found: &mut Check, wanted: &str) -> Result<(), Problem> {
        let (list, _) = self.read_snapshots().await?;
        let snapshot = snapshot::find(&list.snapshots, wanted)?;
        let size = snapshot.check(&self.header)?;
        if let Some(bitmaps) = self.header.bitmaps {
            let count = bitmaps.count;
            return Err(Problem::Refused(format!("{count} dirty bitmaps, which the snapshot does not fit")));
        }
        let used = self.share(found, snapshot.l1_offset, snapshot.l1_entries).await?;
        self.clear_copied(&used).await?;
        let l1 = be_bytes(used.l1.iter().map(|entry| entry & !COPIED));
        let start = found.report.image_end_offset / self.header.cluster_size();
        let place = self.append(start, &[&l1]).await?[0];
        self.commit_l1(size, used.l1.len() as u32, place).await?;
        self.settle().await
    }

    /// The snapshot table, also as its bytes.
    async fn read_snapshots(&self) -> Result<(Table, Vec<u8>), Problem> {
        snapshot::read_bytes(self.reader(), &self.header).await
    }

    /// Raises the refcounts of everything that an L1 table refers to by one reference each. Returns
    /// those.
    async fn share(&mut self, found: &mut Check, offset: u64, entries: u32) -> Result<Check, Problem> {
        let used = Check::tree(self.reader(), &self.header, offset, entries).await?;
        let most = found.width.most();
        for (cluster, more) in used.counts.referenced(0..used.clusters) {
            if !found.counts.add(cluster, more, most) {
                let text = format!("cluster {cluster} would have more than {most} references");
                return Err(Problem::Refused(text));
            }
        }
        self.correct_refcounts(found, Level::All).await?;
        Ok(used)
    }

    /// Clears the COPIED bits of L2 tables that are about to be used by the disk.
    async fn clear_copied(&mut self, used: &Check) -> Result<(), Problem> {
        for table in used.tables.keys() {
            for (index, entry) in used.read_l2(*table).await? {
                if used.geometry.data_place(entry).is_some() && entry.word & COPIED != 0 {
                    self.begin().await?;
                    let at = table + (index * used.geometry.entry_bytes()) as u64;
                    self.write("an L2 table", at, &(entry.word & !COPIED).to_be_bytes()).await?;
                }
            }
        }
        Ok(())
    }

    async fn commit_snapshots(&mut self, count: u32, offset: u64) -> Result<(), Problem> {
        let fields = [&count.to_be_bytes()[..], &offset.to_be_bytes()].concat();
        self.write_header(at::SNAPSHOTS, &fields).await
    }

    /// Lets the disk have this size and this L1 table.
    pub(super) async fn commit_l1(&mut self, size: u64, entries: u32, offset: u64) -> Result<(), Problem> {
        let (size, no_encryption) = (size.to_be_bytes(), 0u32.to_be_bytes());
        let fields = [&size[..], &no_encryption, &entries.to_be_bytes(), &offset.to_be_bytes()].concat();
        self.write_header(at::SIZE, &fields).await
    }

    /// Frees all that is not used any more, and sets COPIED bits.
    pub(super) async fn settle(&mut self) -> Result<(), Problem> {
        repair_image(self, Level::All).await.map(drop)
    }
}
