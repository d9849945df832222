//! Moves of volumes to another array or device, as jobs: the crate `moves` says what is durable
//! when.

use super::authority::Authority;
use super::bases::{PlannedPool, delete};
use super::change::Effects;
use super::open_volumes::OpenVolume;
use super::work::{Control, Pacer, Stop, Task, join, waiting};
use super::{Engine, Live};
use crate::api_error::{ApiError, Kind};
use crate::state::{MoveRecord, Target};
use ::moves::{Copier, Owner, Parts, Resumed, Whole};
use api::{ArrayAction, Job, JobKind, VolumeMove};
use block::{Device, DeviceError, IoError, Limits};
use layers::migrate::{Dirty, Migration, why_not};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use volume::{Info, Pool};

/// Between two attempts to make the state durable.
pub(super) const RETRY: Duration = Duration::from_secs(1);

impl Live {
    /// The move of a volume that has to do with a base. A move that has failed ends with the base
    /// whose room it left occupied.
    pub fn move_about(&self, base: &str) -> Option<String> {
        let is_open = matches!(self.bases.get(base), Some(Ok(_)));
        let is_about = |(_, record): &(&String, &MoveRecord)| match record.has_failed() {
            true => is_open && record.to == base,
            false => record.from == base || record.to == base,
        };
        let (uuid, record) = self.state.moves.iter().find(is_about)?;
        let name = self.name_of_moving(uuid);
        Some(format!("volume {name} moves from {} to {} (job {name}.move)", record.from, record.to))
    }

    /// Refuses what cannot be done to a volume that moves, grows, or is an incomplete copy.
    pub fn check_stays(&self, volume: &api::Volume) -> Result<(), ApiError> {
        self.check_not_growing(volume)?;
        self.check_is_complete(&volume.uuid)?;
        match self.state.moves.get(&volume.uuid) {
            Some(record) => {
                let detail = match record.has_failed() {
                    false => format!("volume {}: it moves to {} at the moment", volume.name, record.to),
                    true => format!(
                        "volume {}: its move has failed, and its room on {} is not freed yet",
                        volume.name, record.to
                    ),
                };
                Err(ApiError::new(Kind::InUse, detail))
            }
            None => Ok(()),
        }
    }

    /// The error of a volume of which it is not known where it is.
    pub fn lost_place(&self, uuid: &str) -> Option<String> {
        let is_unknown = ::moves::is_unknown(&self.state.moves, uuid) && !self.moves.contains_key(uuid);
        let record = self.state.moves.get(uuid).filter(|_| is_unknown)?;
        let (name, MoveRecord { from, to, .. }) = (self.name_of_moving(uuid), record);
        Some(format!(
            "volume {name}: it may have moved from {from} to {to}: {to} says that when it is open, or job {name}.move is cancelled and the volume stays on {from}"
        ))
    }

    /// Refuses to use a volume of which it is not known where it is.
    pub fn check_place_is_known(&self, uuid: &str) -> Result<(), ApiError> {
        self.lost_place(uuid).map_or(Ok(()), |error| Err(ApiError::new(Kind::Unavailable, error)))
    }

    /// Moves as jobs.
    pub fn move_jobs(&self) -> impl Iterator<Item = Job> {
        self.state.moves.iter().filter_map(|(uuid, record)| {
            let name = self.name_of_moving(uuid);
            let job = |control: &Control| control.job(JobKind::Move, &name, &record.to);
            if let Some(moving) = self.moves.get(uuid) {
                return Some(job(&moving.control));
            }
            let missing = self.base(&record.from).and(self.base(&record.to)).err();
            let size = self.volume(uuid).map_or(0, |(_, _, info)| info.size);
            (!record.is_done && !record.has_failed()).then(|| waiting(job(&Control::new(size)), missing))
        })
    }

    /// The move that is called `id`, and runs.
    fn move_called(&self, id: &str) -> Option<(&String, &Task)> {
        let name = id.strip_suffix(".move")?;
        self.moves.iter().find(|(uuid, _)| self.name_of_moving(uuid) == name)
    }

    /// The move that is called `id`, and does not run.
    fn waiting_move_called(&self, id: &str) -> Option<(String, MoveRecord)> {
        let name = id.strip_suffix(".move")?;
        let mut waiting = self.state.moves.iter().filter(|(uuid, _)| !self.moves.contains_key(*uuid));
        let (uuid, record) = waiting.find(|(uuid, _)| self.name_of_moving(uuid) == name)?;
        Some((uuid.clone(), record.clone()))
    }

    /// The name of a volume that moves: its UUID as long as its pool is not open.
    fn name_of_moving(&self, uuid: &str) -> String {
        self.volume(uuid).map_or(uuid.to_owned(), |(_, _, info)| info.name.to_string())
    }

    /// The pool on a base.
    pub fn pool(&self, base: &str) -> Result<Arc<Pool>, ApiError> {
        let none = || ApiError::new(Kind::Unavailable, format!("{base}: it has no volumes any more"));
        self.base(base)?.pool.clone().ok_or_else(none)
    }
}

/// A move that may begin.
struct PlannedMove {
    volume: api::Volume,
    record: MoveRecord,
    pool: PlannedPool,
}

impl PlannedMove {
    fn commit(self, engine: &Engine) -> Result<Job, ApiError> {
        let PlannedMove { volume, record, pool } = self;
        let (uuid, to) = (volume.uuid.clone(), record.to.clone());
        let mut effects = Effects::new(engine, "volume", &volume.name);
        pool.commit(engine, &mut effects)?;
        effects.remember(
            |state| drop(state.moves.insert(uuid.clone(), record)),
            |state| drop(state.moves.remove(&volume.uuid)),
        )?;
        engine.start_move(&uuid, volume.size_bytes)?;
        effects.keep();
        engine.events.emit("volume", &volume.name, "moving", format!("to {to}"));
        Ok(engine.live().moves[&uuid].control.job(JobKind::Move, &volume.name, &to))
    }
}

impl Engine {
    /// Begins to move a volume to another array or device. It may be in use; its users do not
    /// notice.
    ///
    /// # Errors
    /// When there is no such volume or place, the volume moves already, or its users rely on what
    /// the place cannot do.
    pub fn move_volume(&self, key: &str, place: &VolumeMove) -> Result<Job, ApiError> {
        let _alone = self.change();
        self.plan_move(key, place)?.commit(self)
    }

    fn plan_move(&self, key: &str, place: &VolumeMove) -> Result<PlannedMove, ApiError> {
        let volume = self.volume(key)?;
        self.live().check_stays(&volume)?;
        self.live().check_is_no_source(&volume.name, &Target::Volume(volume.uuid.clone()))?;
        let to = self.base_name(&place.backing)?;
        if to == volume.backing {
            return Err(ApiError::invalid(format!("volume {}: it is on {to} already", volume.name)));
        }
        self.check_place(&volume, &to)?;
        let pool = self.plan_pool(&to, place.force, volume.size_bytes)?;
        pool.check_room(volume.size_bytes)?;
        let record = MoveRecord::new(volume.backing.clone(), to)?;
        Ok(PlannedMove { volume, record, pool })
    }

    /// Whether another pool offers all that users of the volume, if any, rely on.
    fn check_place(&self, volume: &api::Volume, to: &str) -> Result<(), ApiError> {
        let live = self.live();
        let limits = |base: &str| {
            let limits = live.base(base)?.device.limits();
            Ok::<_, ApiError>(Limits { capacity: volume.size_bytes, ..limits })
        };
        match why_not(&limits(&volume.backing)?, &limits(to)?, !volume.exports.is_empty()) {
            Some(why) => {
                Err(ApiError::invalid(format!("volume {}: it cannot move to {to}: {why}", volume.name)))
            }
            None => Ok(()),
        }
    }

    /// Continues recorded moves that do not run, if their devices are open. Runs within a change.
    pub(super) fn go_on_with_moves(&self) {
        if self.may_have_leftovers.swap(false, Ordering::SeqCst) {
            self.remove_leftovers();
        }
        let records = self.live().state.moves.clone();
        for (uuid, record) in records {
            if self.live().moves.contains_key(&uuid) {
                continue;
            }
            match ::moves::resume(self, &uuid, &record) {
                Ok(Resumed::Open) => {}
                Ok(Resumed::Ended) => continue,
                Err(error) => {
                    tracing::error!(uuid, %error, "the move of a volume has not ended yet");
                    continue;
                }
            }
            let size = self.live().volume(&uuid).map(|(_, _, info)| info.size);
            if let Ok(size) = size
                && self.live().pool(&record.to).is_ok()
                && let Err(error) = self.start_move(&uuid, size)
            {
                tracing::error!(uuid, %error, "a move cannot continue");
            }
        }
    }

    /// Deletes copies that nothing will finish. Looked for after a pool was opened or a move has
    /// failed. Within a change.
    fn remove_leftovers(&self) {
        let (pools, state) = {
            let live = self.live();
            let pools = live.bases.values().filter_map(|base| base.as_ref().ok()?.pool.clone());
            (pools.collect::<Vec<Arc<Pool>>>(), live.state.clone())
        };
        let is_known = |uuid: &str| {
            state.copies.contains_key(uuid) || state.moves.values().any(|record| record.copy == uuid)
        };
        if !::moves::remove_leftovers(&pools, is_known) {
            self.may_have_leftovers.store(true, Ordering::SeqCst);
        }
    }

    /// The control of the job called `id`, if it is a volume's.
    pub(super) fn control_of(&self, id: &str) -> Option<Arc<Control>> {
        let live = self.live();
        let of_volume = live.move_called(id).or(live.copy_called(id)).map(|(_, task)| task);
        let of_task =
            of_volume.or(live.stream_called(id)).or(live.commit_called(id)).map(|task| &task.control);
        of_task.or(live.zeroing_called(id)).cloned()
    }

    /// Gives a job up. The volume of a move stays where it is; of an array's jobs a scrub and a
    /// replacement end.
    ///
    /// # Errors
    /// When there is no such job, or the array needs it.
    pub fn cancel_job(&self, id: &str) -> Result<(), ApiError> {
        if self.cancel_waiting_move(id)? {
            return Ok(());
        }
        let job = self.job(id)?;
        if job.waits_for.is_some() {
            return self.cancel_waiting(&job);
        }
        let of_volume = self.cancel_zeroing(&job)? || self.cancel_copy(&job)?;
        if of_volume || self.cancel_stream(&job)? || self.cancel_commit(&job)? {
            return Ok(());
        }
        let (uuid, thread) = {
            let live = self.live();
            let Some((uuid, moving)) = live.move_called(id) else {
                drop(live);
                return self.cancel_job_of_array(&job);
            };
            (uuid.clone(), moving.cancel())
        };
        join(thread)?;
        match self.live().volume(&uuid) {
            Ok((on, ..)) if on == job.backing => Err(ApiError::new(
                Kind::Stale,
                format!("job {id}: it was done already, the volume is on {on}"),
            )),
            _ => Ok(()),
        }
    }

    /// Gives up a recorded move that waits for the device of one of its places; `false` when this
    /// is none.
    ///
    /// # Errors
    /// When it was done already, or that cannot be recorded.
    fn cancel_waiting_move(&self, id: &str) -> Result<bool, ApiError> {
        if self.live().waiting_move_called(id).is_none() {
            return Ok(false);
        }
        let _alone = self.change();
        let found = self.live().waiting_move_called(id);
        let Some((uuid, record)) = found else { return Ok(false) };
        let MoveRecord { from, to, .. } = &record;
        let stale = |detail| Err(ApiError::new(Kind::Stale, format!("job {id}: {detail}")));
        if record.is_done {
            return stale(format!("it was done already, the volume is on {to}"));
        }
        if record.has_failed() {
            return stale(format!("it has ended already, the volume is on {from}"));
        }
        let keeps = |error: ApiError| error.about(&format!("job {id}: the volume cannot stay on {from}"));
        ::moves::cancel(self, &uuid, &record).map_err(keeps)?;
        let name = self.live().name_of_moving(&uuid);
        self.events.emit("volume", &name, "not moved", format!("it stays on {from}: cancelled"));
        self.may_have_leftovers.store(true, Ordering::SeqCst);
        Ok(true)
    }

    fn cancel_job_of_array(&self, job: &Job) -> Result<(), ApiError> {
        match job.kind {
            JobKind::Check | JobKind::Repair | JobKind::Replace => {
                self.act_on_array(&job.backing, &ArrayAction::Cancel, &Authority::Full).map(drop)
            }
            kind => {
                let detail =
                    format!("job {}: array {} needs its {kind}: it can only be paused", job.id, job.backing);
                Err(ApiError::new(Kind::InUse, detail))
            }
        }
    }

    fn start_move(&self, uuid: &str, total: u64) -> Result<(), ApiError> {
        let engine = self.this.upgrade().ok_or_else(|| ApiError::failed("the daemon ends"))?;
        let volume = uuid.to_owned();
        let task = Task::start("move", total, move |control| engine.carry_out_move(&volume, control));
        self.live_mut().moves.insert(uuid.into(), task.map_err(ApiError::failed)?);
        Ok(())
    }

    /// The move, on a thread of its own.
    fn carry_out_move(&self, uuid: &str, control: &Arc<Control>) {
        // The request that started the move first completes its change.
        drop(self.change());
        let Some(record) = self.live().state.moves.get(uuid).cloned() else { return };
        let result = self.copy_and_switch(uuid, &record, control);
        let name = self.live().name_of_moving(uuid);
        let _alone = self.change();
        let ended = match result {
            Ok(()) => {
                self.events.emit("volume", &name, "moved", format!("to {}", record.to));
                ::moves::free_old_place(self, uuid, &record)
            }
            Err(Stop::Later) => Ok(()),
            Err(stop) => {
                let why = match stop {
                    Stop::Error(error) => error.to_string(),
                    Stop::Cancelled | Stop::Later => "cancelled".into(),
                };
                self.events.emit("volume", &name, "not moved", format!("it stays on {}: {why}", record.from));
                self.may_have_leftovers.store(true, Ordering::SeqCst);
                let record = self.live().state.moves.get(uuid).cloned().unwrap_or(record);
                ::moves::give_up(self, uuid, &record)
            }
        };
        self.live_mut().moves.remove(uuid);
        if let Err(error) = ended {
            tracing::error!(volume = name, %error, "a move leaves something behind for now");
        }
    }

    fn copy_and_switch(&self, uuid: &str, record: &MoveRecord, control: &Arc<Control>) -> Result<(), Stop> {
        let (from, to) = (self.live().pool(&record.from)?, self.live().pool(&record.to)?);
        let info = self.live().volume(uuid)?.2;
        ::moves::make_copy(self, record, info.size)?;
        let open = {
            let _alone = self.change();
            self.open_volume(uuid)?
        };
        let old: Arc<dyn Device> = from.open_volume(uuid)?;
        let new: Arc<dyn Device> = to.open_volume(&record.copy)?;
        let migration = {
            let _alone = self.change(); // no export begins to serve it meanwhile
            let is_served = !self.volume(uuid)?.exports.is_empty();
            open.device.begin(open.limits.over(new.clone()), is_served)?
        };
        let users = self.live().users_of(&[&record.from, &record.to]);
        self.copy(migration.dirty(), [&old, &new], control, Some(Pacer::new(control, users)), false)?;
        self.switch(&info, record, &open, migration, [&old, &new], control)
    }

    /// The rest, while the volume's users wait.
    fn switch(
        &self,
        info: &Info,
        record: &MoveRecord,
        open: &OpenVolume,
        migration: Migration,
        places: [&Arc<dyn Device>; 2],
        control: &Arc<Control>,
    ) -> Result<(), Stop> {
        let _alone = self.change();
        let begin = Instant::now();
        ::moves::switch(self, info, record, migration, |migration| {
            self.copy(migration.dirty(), places, control, None, true)?;
            // The copy's table is durable after its data: it is flushed before, and again with the
            // table.
            hosting::flush(places[1], &self.core()).map_err(Stop::from)
        })?;
        tracing::info!(volume = %info.name, to = record.to, waited = ?begin.elapsed(), of = open.device.name(), "moved");
        Ok(())
    }

    /// Copies dirty regions: all of them if it `is_last`, else until so few are left that users of
    /// the volume can wait for them. With a pacer, users' requests have priority.
    pub(super) fn copy(
        &self,
        dirty: &Arc<Dirty>,
        places: [&Arc<dyn Device>; 2],
        control: &Arc<Control>,
        pacer: Option<Pacer>,
        is_last: bool,
    ) -> Result<(), Stop> {
        self.copy_parts(dirty, places, || Ok(Whole), control, pacer, is_last)
    }

    /// As [`Engine::copy`], of the parts that `open` returns on the core that copies.
    pub(super) fn copy_parts<P: Parts + 'static>(
        &self,
        dirty: &Arc<Dirty>,
        places: [&Arc<dyn Device>; 2],
        open: impl FnOnce() -> Result<P, DeviceError> + Send + 'static,
        control: &Arc<Control>,
        pacer: Option<Pacer>,
        is_last: bool,
    ) -> Result<(), Stop> {
        let [old, new] = places.map(Clone::clone);
        let (dirty, control) = (dirty.clone(), control.clone());
        let copied = self.core().block_on(move |core| async move {
            let copier = Copier::new(&old, &new)?.only(open()?);
            let mut pacer = pacer;
            let begin = async |bytes| {
                let Some(pacer) = &mut pacer else { return Ok(()) };
                pacer.wait(&core, &control, bytes).await
            };
            let failed = |error: IoError| Stop::from(ApiError::failed(format!("copying: {error}")));
            let copied = copier.copy(&dirty, is_last, begin, |left| control.set_left(left), failed).await;
            Ok::<_, DeviceError>(copied)
        });
        copied.map_err(ApiError::from)??
    }
}

impl Owner for Engine {
    type Error = ApiError;

    fn pool(&self, place: &str) -> Result<Arc<Pool>, ApiError> {
        self.live().pool(place)
    }

    fn set(&self, volume: &str, record: Option<&MoveRecord>) -> Result<(), ApiError> {
        self.commit(|state| {
            match record {
                Some(record) => state.moves.insert(volume.into(), record.clone()),
                None => state.moves.remove(volume),
            };
        })
    }

    fn delete(&self, pool: &Pool, info: &Info) -> Result<(), ApiError> {
        delete(pool, info)
    }

    fn pause(&self) -> bool {
        std::thread::sleep(RETRY);
        true
    }
}
