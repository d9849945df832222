//! Volumes with a copy of a device, an array or another volume, as jobs.
//!
//! ```text
//!   record set ─► room made under a hidden name ─► copied, flushed ─► the room gets the volume's name ─► record removed
//! ```
//!
//! - Room with a hidden name is no volume of its pool ([`moves::is_unfinished_copy`]). A start that
//!   knows no record of it deletes it.
//! - The name is one durable change of the pool's table: from then on the volume is complete.
//! - A start copies from the beginning: the source may have changed meanwhile.
//! - As long as the record has no error, the source is not deleted, and clients write to it only if
//!   the volume takes its place ([`super::pivots`]).

use super::authority::Authority;
use super::bases::{Base, PlannedPool, delete};
use super::change::Effects;
use super::moves::RETRY;
use super::open_volumes::OpenVolume;
use super::pivots::Pivot;
use super::work::{Control, Pacer, Stop, Task, join, waiting};
use super::{Engine, Live};
use crate::api_error::{ApiError, Kind};
use crate::state::{CopyRecord, ExportRecord, PivotRecord, Target, VolumeRecord};
use api::{Job, JobKind, NewVolume, Volume};
use block::Device;
use layers::migrate::Dirty;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use volume::{Info, Name, Pool, Uuid};

/// Bytes of a range that is copied as one.
const CHUNK: u64 = 1 << 20;

/// The object that a volume is a copy of.
pub(super) struct Source {
    target: Target,
    bytes: u64,
    /// Present if the volume takes its place.
    pivot: Option<PivotRecord>,
}

impl Source {
    /// The size of a new volume on a base: the size asked for, or that of the source.
    ///
    /// # Errors
    /// When the volume would be smaller than its source, or larger although it takes its place.
    pub fn size_of_volume(&self, new: &NewVolume, base: &Base) -> Result<u64, ApiError> {
        match new.size_bytes {
            0 => Ok(self.bytes.next_multiple_of(base.device.limits().block_size.into())),
            size if size < self.bytes || (self.pivot.is_some() && size > self.bytes) => {
                let from = new.from.as_deref().unwrap_or_default();
                let detail = format!("volume {}: {size} bytes: {from} has {}", new.name, self.bytes);
                Err(ApiError::invalid(detail))
            }
            size => Ok(size),
        }
    }
}

impl Live {
    /// The volume in the room of a base's pool: none if the room is hidden. An incomplete copy has
    /// the name that it will have.
    pub fn shown(&self, base: &str, info: Info) -> Option<Info> {
        let copy = ::moves::is_unfinished_copy(&info).then(|| self.state.copies.get(&info.uuid.to_string()));
        match copy.flatten() {
            Some(copy) => Some(Info { name: Name::new(&copy.name).ok()?, ..info }),
            None => (!::moves::is_hidden(&self.state.moves, base, &info)).then_some(info),
        }
    }

    /// Copies in progress, as jobs.
    pub fn copy_jobs(&self) -> impl Iterator<Item = Job> {
        self.state.copies.iter().filter_map(|(uuid, record)| {
            let job = |control: &Control| control.job(JobKind::Copy, &record.name, &record.backing);
            if let Some(task) = self.copies.get(uuid) {
                return Some(job(&task.control));
            }
            let missing = self.base(&record.backing).err().or(self.missing_source(&record.source));
            record.error.is_none().then(|| waiting(job(&Control::new(record.size_bytes)), missing))
        })
    }

    fn missing_source(&self, source: &Target) -> Option<ApiError> {
        match source {
            Target::Volume(uuid) => self.volume(uuid).err(),
            Target::Array(name) | Target::Device(name) => self.base(name).err(),
        }
    }

    /// The job called `id`, with the UUID of its volume.
    pub fn copy_called(&self, id: &str) -> Option<(&String, &Task)> {
        self.copies.get_key_value(self.copy_record_called(id)?.0)
    }

    /// The record of that job, whether or not it runs.
    fn copy_record_called(&self, id: &str) -> Option<(&String, &CopyRecord)> {
        let name = id.strip_suffix(".copy")?;
        self.state.copies.iter().find(|(_, record)| record.name == name)
    }

    /// The settings of a volume, and its copy.
    pub fn records_of(&self, uuid: &str) -> (Option<VolumeRecord>, Option<CopyRecord>) {
        (self.state.volumes.get(uuid).cloned(), self.state.copies.get(uuid).cloned())
    }

    /// Refuses the use of a volume whose copy is not complete.
    pub fn check_is_complete(&self, uuid: &str) -> Result<(), ApiError> {
        let Some(copy) = self.state.copies.get(uuid) else { return Ok(()) };
        let (name, from) = (&copy.name, self.target_name(&copy.source));
        let detail = match &copy.error {
            Some(error) => format!("volume {name}: the copy of {from} has failed: {error}"),
            None => format!("volume {name}: the copy of {from} is not complete"),
        };
        Err(ApiError::new(Kind::InUse, detail))
    }

    /// Refuses a change of the object `name` while it is copied. A pivot follows the writes of
    /// clients.
    pub fn check_is_no_source(&self, name: &str, target: &Target) -> Result<(), ApiError> {
        match self.active_copies().find(|(_, copy)| copy.source == *target && copy.pivot.is_none()) {
            Some((_, copy)) => Err(ApiError::new(Kind::InUse, format!("{name}: {}", about(copy)))),
            None => Ok(()),
        }
    }

    /// Copies that have not failed, and whose volume is not lost with its base, by the UUID of the
    /// volume.
    pub(super) fn active_copies(&self) -> impl Iterator<Item = (&String, &CopyRecord)> {
        let copies = self.state.copies.iter();
        copies.filter(|(_, copy)| copy.error.is_none() && self.bases.contains_key(&copy.backing))
    }

    /// The copy of all of a base.
    pub fn copy_about(&self, base: &str) -> Option<String> {
        let is_it = |target: &Target| matches!(target, Target::Array(it) | Target::Device(it) if it == base);
        self.active_copies().find(|(_, copy)| is_it(&copy.source)).map(|(_, copy)| about(copy))
    }

    /// Refuses to delete a volume while it is copied, or is the copy.
    pub fn check_may_be_deleted(&self, volume: &Volume) -> Result<(), ApiError> {
        let Some(copy) = self.state.copies.get(&volume.uuid) else {
            self.check_stays(volume)?;
            return self.check_is_no_source(&volume.name, &Target::Volume(volume.uuid.clone()));
        };
        match self.copies.contains_key(&volume.uuid) {
            true => {
                let detail = format!("volume {}: job {}.copy is at work on it", copy.name, copy.name);
                Err(ApiError::new(Kind::InUse, detail))
            }
            false => Ok(()),
        }
    }

    /// Refuses a source that clients may write.
    fn check_no_writers(&self, name: &str, target: &Target) -> Result<(), ApiError> {
        let writes = |export: &&ExportRecord| !export.read_only && export.targets.contains(target);
        match self.state.exports.iter().find(writes) {
            Some(export) => {
                let detail = format!(
                    "{name}: clients of export {} may write to it: only a source that does not change is copied",
                    export.name
                );
                Err(ApiError::new(Kind::InUse, detail))
            }
            None => Ok(()),
        }
    }
}

/// A volume that can be made as a copy.
pub(super) struct PlannedCopy {
    pub name: Name,
    pub size: u64,
    pub on: String,
    pub pool: PlannedPool,
    pub record: VolumeRecord,
    pub source: Source,
}

impl PlannedCopy {
    /// The volume is remembered before its room is made: a start deletes room that it does not
    /// know.
    pub fn commit(self, engine: &Engine) -> Result<Volume, ApiError> {
        let PlannedCopy { name, size, on, pool, record, source: Source { target, bytes, pivot } } = self;
        let from = engine.live().target_name(&target);
        let id = Uuid::random().map_err(ApiError::failed)?;
        let uuid = id.to_string();
        let copy = CopyRecord {
            name: name.to_string(),
            backing: on.clone(),
            size_bytes: size,
            source: target,
            source_bytes: bytes,
            error: None,
            pivot,
        };
        let begun = copy.clone();
        let mut effects = Effects::new(engine, "volume", name.as_str());
        let pool = pool.commit(engine, &mut effects)?;
        effects.remember(
            |state| {
                drop(state.copies.insert(uuid.clone(), copy));
                if record != VolumeRecord::default() {
                    state.volumes.insert(uuid.clone(), record);
                }
            },
            move |state| state.forget_volume(&id.to_string()),
        )?;
        ::moves::make_room(&pool, id, size)?;
        let of = uuid.clone();
        effects.undo_by(move || Ok(pool.delete_volume(&of).map(drop)?));
        engine.start_copy(&uuid, &begun)?;
        effects.keep();
        engine.events.emit("volume", name.as_str(), "copying", format!("from {from}"));
        engine.volume(&uuid)
    }
}

impl Engine {
    /// The object called `key` as the source of a volume on the base `on`, which takes its place if
    /// it `is_pivot`.
    pub(super) fn plan_source(
        &self,
        key: &str,
        on: &str,
        is_pivot: bool,
        authority: &Authority,
    ) -> Result<Source, ApiError> {
        let target = self.target(key, authority)?;
        if let Target::Device(name) = &target
            && let Some(about) = self.live().commit_about(name)
        {
            return Err(ApiError::new(Kind::InUse, format!("{name}: {about}")));
        }
        if matches!(&target, Target::Array(name) | Target::Device(name) if name == on) {
            return Err(ApiError::invalid(format!("{key}: it cannot hold a copy of itself")));
        }
        if let Target::Volume(uuid) = &target {
            let volume = self.volume(uuid)?;
            self.live().check_stays(&volume)?;
        }
        let bytes = self.open_source(&target)?.0.limits().capacity;
        let pivot = match is_pivot {
            true => Some(self.live().plan_pivot(key, &target, on)?),
            false => {
                self.live().check_no_writers(key, &target)?;
                None
            }
        };
        Ok(Source { target, bytes, pivot })
    }

    /// The device of a source, and the base that it is on.
    pub(super) fn open_source(&self, target: &Target) -> Result<(Arc<dyn Device>, String), ApiError> {
        match target {
            Target::Volume(uuid) => {
                let (on, pool, _) = self.live().volume(uuid)?;
                self.live().check_place_is_known(uuid)?;
                Ok((pool.open_volume(uuid)?, on))
            }
            Target::Array(name) | Target::Device(name) => {
                Ok((self.live().base(name)?.device.clone(), name.clone()))
            }
        }
    }

    pub(super) fn start_copy(&self, uuid: &str, record: &CopyRecord) -> Result<(), ApiError> {
        let engine = self.this.upgrade().ok_or_else(|| ApiError::failed("the daemon ends"))?;
        let volume = uuid.to_owned();
        let pivot = record.pivot.as_ref().map(|_| self.begin_pivot(uuid, record)).transpose()?;
        let work = move |control: &Arc<Control>| engine.carry_out_copy(&volume, pivot, control);
        let task = Task::start("copy", record.size_bytes, work);
        self.live_mut().copies.insert(uuid.into(), task.map_err(ApiError::failed)?);
        Ok(())
    }

    /// Continues recorded copies that do not run, if their devices are open. Runs within a change.
    pub(super) fn go_on_with_copies(&self) {
        let records = self.live().state.copies.clone();
        for (uuid, record) in records {
            if record.error.is_some() || self.live().copies.contains_key(&uuid) {
                continue;
            }
            let Ok(pool) = self.live().pool(&record.backing) else { continue };
            let continued = match room(&pool, &uuid) {
                Some(info) if !::moves::is_unfinished_copy(&info) => {
                    self.note_found_copy(&uuid, &record, &pool)
                }
                // The source may not be there yet.
                _ if self.open_source(&record.source).is_err() => Ok(()),
                Some(_) if record.pivot.is_some() => self.restart_pivot(&uuid, &record),
                Some(_) => self.start_copy(&uuid, &record),
                // The daemon ended before the volume was created.
                None => self.commit(|state| state.forget_volume(&uuid)),
            };
            if let Err(error) = continued {
                tracing::error!(volume = record.name, %error, "a copy does not continue for now");
            }
        }
    }

    /// A start finds that a copy is complete. Its record goes once later starts find that, too.
    fn note_found_copy(&self, uuid: &str, record: &CopyRecord, pool: &Pool) -> Result<(), ApiError> {
        pool.settle()?;
        self.forget_copy(uuid, record, None)
    }

    /// The copy, on a thread of its own.
    fn carry_out_copy(&self, uuid: &str, pivot: Option<Pivot>, control: &Arc<Control>) {
        // The request that started the copy first completes its change.
        drop(self.change());
        let Some(record) = self.live().state.copies.get(uuid).cloned() else { return };
        let copied = self.copy_source(uuid, &record, pivot.as_ref(), control);
        let _alone = self.change();
        let completed = copied.and_then(|()| match pivot {
            Some(pivot) => self.switch_to_copy(uuid, &record, pivot, control).map(Some),
            None => Ok(self.complete_copy(uuid, &record).map(|()| None)?),
        });
        let ended = match completed {
            Ok(open) => self.forget_copy(uuid, &record, open),
            Err(Stop::Later) => Ok(()),
            Err(Stop::Cancelled) => self.remove_copy(uuid, &record),
            Err(Stop::Error(error)) => self.note_failed_copy(uuid, &record, &error),
        };
        self.live_mut().copies.remove(uuid);
        if let Err(error) = ended {
            tracing::error!(volume = record.name, %error, "the end of a copy is not recorded yet");
        }
    }

    /// Copies the source to the room of a volume: durably, or for a pivot all but the last writes
    /// of clients.
    fn copy_source(
        &self,
        uuid: &str,
        record: &CopyRecord,
        pivot: Option<&Pivot>,
        control: &Arc<Control>,
    ) -> Result<(), Stop> {
        let (old, from) = self.open_source(&record.source)?;
        let users = self.live().users_of(&[&from, &record.backing]);
        let pacer = Some(Pacer::new(control, users));
        if let Some(pivot) = pivot {
            return self.copy(pivot.migration.dirty(), pivot.places(), control, pacer, false);
        }
        let has = old.limits().capacity;
        if has < record.source_bytes {
            let detail = format!("{}: {has} bytes: it had {}", old.name(), record.source_bytes);
            return Err(Stop::Error(ApiError::failed(detail)));
        }
        let pool = self.live().pool(&record.backing)?;
        let new: Arc<dyn Device> = pool.open_volume(uuid)?;
        let dirty = Arc::new(Dirty::new(record.size_bytes, CHUNK));
        self.copy(&dirty, [&old, &new], control, pacer, true)?;
        hosting::flush(&new, &self.core()).map_err(Stop::from)
    }

    /// Makes a complete copy a volume of its pool. Within a change.
    pub(super) fn complete_copy(&self, uuid: &str, record: &CopyRecord) -> Result<(), ApiError> {
        let pool = self.live().pool(&record.backing)?;
        pool.rename_volume(uuid, Name::new(&record.name)?)?;
        Ok(())
    }

    /// Forgets the copy of a complete volume. After a pivot, exports that run serve the volume,
    /// which is `open`.
    fn forget_copy(
        &self,
        uuid: &str,
        record: &CopyRecord,
        open: Option<Arc<OpenVolume>>,
    ) -> Result<(), ApiError> {
        let from = self.live().target_name(&record.source);
        while let Err(error) = self.commit(|state| state.complete_copy(uuid)) {
            if open.is_none() || self.has_ended() {
                return Err(error);
            }
            // Clients use the volume already, and the next start knows it from the pool.
            tracing::error!(volume = record.name, %error, "cannot remember that a copy is complete");
            std::thread::sleep(RETRY);
        }
        let text = format!("{} bytes on {}, a copy of {from}", record.size_bytes, record.backing);
        self.events.emit("volume", &record.name, "created", text);
        if record.pivot.is_some() {
            self.hand_exports_over(uuid, &record.name, &from, open);
        }
        Ok(())
    }

    /// Keeps the reason why a copy has failed.
    pub(super) fn note_failed_copy(
        &self,
        uuid: &str,
        record: &CopyRecord,
        error: &ApiError,
    ) -> Result<(), ApiError> {
        let from = self.live().target_name(&record.source);
        self.events.emit("volume", &record.name, "not created", format!("copying {from}: {error}"));
        self.set_copy_error(uuid, error)
    }

    pub(super) fn set_copy_error(&self, uuid: &str, error: &ApiError) -> Result<(), ApiError> {
        self.commit(|state| {
            if let Some(copy) = state.copies.get_mut(uuid) {
                copy.error = Some(error.to_string());
            }
        })
    }

    /// Removes the volume of a cancelled copy.
    fn remove_copy(&self, uuid: &str, record: &CopyRecord) -> Result<(), ApiError> {
        let from = self.live().target_name(&record.source);
        self.events.emit("volume", &record.name, "not created", format!("copying {from}: cancelled"));
        self.commit(|state| state.forget_volume(uuid))?;
        // Room that stays is deleted later.
        self.may_have_leftovers.store(true, Ordering::SeqCst);
        let pool = self.live().pool(&record.backing)?;
        room(&pool, uuid).map_or(Ok(()), |info| delete(&pool, &info))
    }

    /// Gives up a copy that waits for its source. Within a change.
    ///
    /// # Errors
    /// When its volume may be complete, or that cannot be found out.
    pub(super) fn cancel_waiting_copy(&self, job: &Job) -> Result<(), ApiError> {
        let found =
            self.live().copy_record_called(&job.id).map(|(uuid, record)| (uuid.clone(), record.clone()));
        let (uuid, record) = found.ok_or_else(|| ApiError::not_found("job", &job.id))?;
        let pool = self.live().pool(&record.backing)?;
        let is_unfinished = room(&pool, &uuid).is_none_or(|info| ::moves::is_unfinished_copy(&info));
        if !is_unfinished || record.pivot.as_ref().is_some_and(|pivot| pivot.is_due) {
            return Err(ApiError::new(Kind::InUse, "the copy may be complete"));
        }
        self.remove_copy(&uuid, &record)
    }

    /// Gives such a job up; `false` when this is none.
    ///
    /// # Errors
    /// When it was done already.
    pub(super) fn cancel_copy(&self, job: &Job) -> Result<bool, ApiError> {
        let (uuid, thread) = {
            let live = self.live();
            let Some((uuid, task)) = live.copy_called(&job.id) else { return Ok(false) };
            (uuid.clone(), task.cancel())
        };
        join(thread)?;
        match self.live().volume(&uuid) {
            Ok(_) => Err(ApiError::new(Kind::Stale, format!("job {}: it has ended already", job.id))),
            Err(_) => Ok(true),
        }
    }
}

/// Describes a copy to a request that would change its source.
fn about(copy: &CopyRecord) -> String {
    format!("it is copied to volume {} (job {}.copy)", copy.name, copy.name)
}

/// The room of a volume in a pool.
fn room(pool: &Pool, uuid: &str) -> Option<Info> {
    pool.volume_with(Uuid::parse_hyphenated(uuid)?)
}
