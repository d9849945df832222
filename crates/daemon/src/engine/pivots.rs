//! Pivots: a volume takes the place of the device or array that it is a copy of, while the clients
//! of the source are connected.
//!
//! ```text
//!   record set ─► room made ─► copied, and what is written meanwhile again ─► record: due, twice ─► clients wait
//!       ─► rest copied, flushed ─► the room gets the volume's name ─► clients use the volume
//!       ─► exports name the volume, record removed
//! ```
//!
//! - Exports of all of a device or array open its [`Migratable`], which lets the volume replace it.
//! - The source alone counts until the room has the volume's name, and from then on the volume
//!   alone. Both are the same at that moment, because clients wait. The name is one durable change
//!   of the pool's table.
//! - A start finds the record. If the room has its name, the start completes the pivot before it
//!   starts any export; else the source is served, and the copy begins again.
//! - The record is set to *due* before the name. While it is due and the pool is not open, a start
//!   does not serve the source. The state before the last change has the due record too, so that a
//!   damaged state file does not bring the source back.
//! - A record with an error means that the source counts, whatever the name of the room is. It is
//!   durable before clients continue with the source after a name that may have been written.
//! - The volume keeps the name of the source's device, from which exports derive the identity of
//!   disks and namespaces.

use super::moves::RETRY;
use super::open_volumes::OpenVolume;
use super::work::{Control, Stop};
use super::{Engine, Live};
use crate::api_error::{ApiError, Kind};
use crate::state::{CopyRecord, ExportRecord, PivotRecord, Target};
use block::{Device, Limits};
use layers::migrate::{Migratable, Migration};
use std::sync::Arc;
use std::time::Instant;
use volume::Uuid;

/// A pivot whose copy is made.
pub(super) struct Pivot {
    open: Arc<OpenVolume>,
    pub migration: Migration,
    source: Arc<dyn Device>,
    volume: Arc<dyn Device>,
}

impl Pivot {
    /// The places to copy from and to.
    pub fn places(&self) -> [&Arc<dyn Device>; 2] {
        [&self.source, &self.volume]
    }
}

impl Live {
    /// Checks that a volume on the base `on` can take the place of a source.
    pub fn plan_pivot(&self, key: &str, source: &Target, on: &str) -> Result<PivotRecord, ApiError> {
        let (Target::Array(name) | Target::Device(name)) = source else {
            let detail =
                format!("{key}: it is a volume: `freestone volume move` moves it, and a copy has no pivot");
            return Err(ApiError::invalid(detail));
        };
        if let Some(copy) = self.pivot_of(source) {
            let detail =
                format!("{key}: job {}.copy is about to replace it by volume {}", copy.name, copy.name);
            return Err(ApiError::new(Kind::InUse, detail));
        }
        let in_kernel = |export: &&ExportRecord| export.targets.contains(source) && export.is_in_kernel();
        if let Some(export) = self.state.exports.iter().find(in_kernel) {
            let detail =
                format!("{key}: the kernel serves it for export {}, but serves no volumes", export.name);
            return Err(ApiError::new(Kind::InUse, detail));
        }
        let base = self.base(name)?;
        let limits = base.device.limits();
        if limits.read_only {
            return Err(ApiError::invalid(format!("{key}: it is read-only, and a volume is not")));
        }
        let volume = Limits { capacity: limits.capacity, ..self.base(on)?.device.limits() };
        match base.served.refusal(&volume, true) {
            Some(why) => Err(ApiError::invalid(format!("{key}: a volume on {on} cannot replace it: {why}"))),
            None => Ok(PivotRecord { device_name: base.served.name().to_owned(), is_due: false }),
        }
    }

    /// The copy that is to replace a source.
    fn pivot_of(&self, source: &Target) -> Option<&CopyRecord> {
        let is_it = |(_, copy): &(&String, &CopyRecord)| copy.source == *source && copy.pivot.is_some();
        self.active_copies().find(is_it).map(|(_, copy)| copy)
    }

    /// Refuses another size of the source `name` of a pivot.
    pub fn check_keeps_size(&self, name: &str, source: &Target) -> Result<(), ApiError> {
        match self.pivot_of(source) {
            Some(copy) => {
                let detail = format!("{name}: it keeps its size until job {}.copy has ended", copy.name);
                Err(ApiError::new(Kind::InUse, detail))
            }
            None => Ok(()),
        }
    }

    /// Refuses to serve a source as long as it is not known whether a volume has taken its place.
    pub fn check_counts(&self, name: &str, source: &Target) -> Result<(), ApiError> {
        let is_unknown = |(uuid, copy): &(&String, &CopyRecord)| {
            let is_due = copy.pivot.as_ref().is_some_and(|pivot| pivot.is_due);
            is_due && copy.source == *source && !self.copies.contains_key(*uuid)
        };
        match self.active_copies().find(is_unknown) {
            Some((_, CopyRecord { name: volume, backing, .. })) => {
                let detail = format!(
                    "{name}: volume {volume} on {backing} may have replaced it: {backing} says that when it is open"
                );
                Err(ApiError::new(Kind::Unavailable, detail))
            }
            None => Ok(()),
        }
    }
}

impl Engine {
    /// Begins to mark what clients of the source write. Within a change.
    pub(super) fn begin_pivot(&self, uuid: &str, record: &CopyRecord) -> Result<Pivot, ApiError> {
        let (source, name) = self.open_source(&record.source)?;
        let volume: Arc<dyn Device> = self.live().pool(&record.backing)?.open_volume(uuid)?;
        let limits = self.limits_of(uuid);
        let device = self.live().base(&name)?.served.clone();
        let open = Arc::new(OpenVolume { device, limits });
        let migration = open.device.begin(open.limits.over(volume.clone()), true)?;
        // From now on changes of its limits reach it.
        let id = Uuid::parse_hyphenated(uuid).ok_or_else(|| ApiError::not_found("volume", uuid))?;
        self.live_mut().volumes.insert(id, Arc::downgrade(&open));
        Ok(Pivot { open, migration, source, volume })
    }

    /// Copies again from the beginning, since the source counts. A source or a place that does not
    /// do any more ends the pivot. Within a change.
    pub(super) fn restart_pivot(&self, uuid: &str, record: &CopyRecord) -> Result<(), ApiError> {
        if record.pivot.as_ref().is_some_and(|pivot| pivot.is_due) {
            // A table that the opening could not read may have the name.
            let pool = self.live().pool(&record.backing)?;
            pool.settle()?;
            self.set_due(uuid, false)?;
        }
        match self.start_copy(uuid, record) {
            Ok(()) => Ok(()),
            Err(error) => self.note_failed_copy(uuid, record, &error),
        }
    }

    fn set_due(&self, uuid: &str, is_due: bool) -> Result<(), ApiError> {
        self.commit(|state| {
            let pivot = state.copies.get_mut(uuid).and_then(|copy| copy.pivot.as_mut());
            pivot.into_iter().for_each(|pivot| pivot.is_due = is_due);
        })
    }

    /// The last part of a pivot: clients wait, and then use the volume. Within a change.
    pub(super) fn switch_to_copy(
        &self,
        uuid: &str,
        record: &CopyRecord,
        pivot: Pivot,
        control: &Arc<Control>,
    ) -> Result<Arc<OpenVolume>, Stop> {
        control.check()?;
        self.set_due(uuid, true)?;
        self.commit(|_| {})?; // the state before the last change is the same
        let begin = Instant::now();
        pivot.migration.hold()?;
        self.copy(pivot.migration.dirty(), pivot.places(), control, None, true)?;
        hosting::flush(&pivot.volume, &self.core())?;
        if let Err(error) = self.complete_copy(uuid, record) {
            // The pool may have the name all the same. Clients wait until the source counts.
            while let Err(error) = self.set_copy_error(uuid, &error).and_then(|()| self.commit(|_| {})) {
                tracing::error!(volume = record.name, %error, "cannot remember that a pivot has failed");
                std::thread::sleep(RETRY);
            }
            return Err(error.into());
        }
        let Pivot { open, migration, .. } = pivot;
        migration.complete();
        tracing::info!(volume = record.name, waited = ?begin.elapsed(), of = open.device.name(), "pivoted");
        Ok(open)
    }

    /// Exports of a source serve the volume that has replaced it; the next ones of the source serve
    /// the source.
    pub(super) fn hand_exports_over(
        &self,
        uuid: &str,
        volume: &str,
        source: &str,
        open: Option<Arc<OpenVolume>>,
    ) {
        let target = Target::Volume(uuid.to_owned());
        let mut live = self.live_mut();
        let of_volume = live.state.exports.iter().filter(|export| export.targets.contains(&target));
        let exports: Vec<String> = of_volume.map(|export| export.name.clone()).collect();
        if let Some(open) = open {
            for name in &exports {
                if let Some(Ok(running)) = live.exports.get_mut(name) {
                    running.keep(open.clone());
                }
            }
            if let Some(Ok(base)) = live.bases.get_mut(source) {
                base.served = Arc::new(Migratable::new(base.device.clone()));
            }
        }
        drop(live);
        for name in &exports {
            let text = format!("it serves volume {volume}, which has replaced {source}");
            self.events.emit("export", name, "changed", text);
        }
    }
}
