//! Room is zeroed before it belongs to a volume. For a large volume that takes long, and no other
//! request waits.

use super::work::{Control, LOOK, Pacer, Stop, Users};
use super::{Engine, Live};
use crate::api_error::{ApiError, Kind};
use api::{Job, JobKind};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};
use volume::{Info, Reservation, Uuid};

/// Bytes that are made zeroes between two looks at what is wanted: at least, and at most where a
/// device is quick at that.
const PART: u64 = 16 << 20;
const LARGEST_PART: u64 = 1 << 30;
/// Approximate time of a part.
const PART_TIME: Duration = Duration::from_millis(20);

/// Room that is being made ready.
pub struct Zeroing {
    kind: JobKind,
    uuid: Uuid,
    volume: String,
    on: String,
    control: Arc<Control>,
}

impl Zeroing {
    /// Ends it: what was made ready is free again.
    pub fn end(&self) {
        self.control.end();
    }

    fn job(&self) -> Job {
        self.control.job(self.kind, &self.volume, &self.on)
    }
}

impl Live {
    /// The room that is being zeroed, as jobs.
    pub fn zeroing_jobs(&self) -> impl Iterator<Item = Job> {
        self.zeroing.iter().map(Zeroing::job)
    }

    /// The control of the job called `id`.
    pub fn zeroing_called(&self, id: &str) -> Option<&Arc<Control>> {
        self.zeroing.iter().find(|zeroing| zeroing.job().id == id).map(|zeroing| &zeroing.control)
    }

    /// Those who use any of these bases, or volumes on them.
    pub fn users_of(&self, bases: &[&str]) -> Users {
        let is_there = |base: &str| bases.contains(&base);
        let open = |(base, info): (&str, Info)| {
            let open = self.volumes.get(&info.uuid).filter(|_| is_there(base))?.upgrade()?;
            Some(open.device.clone())
        };
        let whole = bases.iter().filter_map(|base| Some(self.base(base).ok()?.served.clone()));
        Users::of(self.all_volumes().filter_map(open).chain(whole))
    }

    /// The volume whose room is being zeroed on a base.
    pub fn zeroing_about(&self, base: &str) -> Option<String> {
        let zeroing = self.zeroing.iter().find(|zeroing| zeroing.on == base)?;
        Some(format!("job {} is at work on it", zeroing.job().id))
    }

    /// Whether a volume with this name is being made.
    pub fn is_being_made(&self, name: &str) -> bool {
        self.zeroing.iter().any(|zeroing| zeroing.volume == name)
    }

    /// Refuses what cannot be done to a volume that grows.
    pub fn check_not_growing(&self, volume: &api::Volume) -> Result<(), ApiError> {
        match self.zeroing.iter().find(|zeroing| zeroing.uuid.to_string() == volume.uuid) {
            Some(zeroing) => {
                let detail = format!("volume {}: job {} is at work on it", volume.name, zeroing.job().id);
                Err(ApiError::new(Kind::InUse, detail))
            }
            None => Ok(()),
        }
    }
}

impl Engine {
    /// Makes room for a volume read as zeroes, in the middle of a change: others are made
    /// meanwhile.
    ///
    /// # Errors
    /// When the device fails, or the job is cancelled; within the change, so that what was changed
    /// before can be undone.
    pub(super) fn make_ready<'a, 'b>(
        &'a self,
        alone: MutexGuard<'a, ()>,
        kind: JobKind,
        (volume, on): (&str, &str),
        mut room: Reservation<'b>,
    ) -> Result<(Ready<'a>, Reservation<'b>), (MutexGuard<'a, ()>, ApiError)> {
        let control = Arc::new(Control::new(room.left()));
        self.live_mut().zeroing.push(Zeroing {
            kind,
            uuid: room.info().uuid,
            volume: volume.into(),
            on: on.into(),
            control: control.clone(),
        });
        // Even if this panics: who ends the daemon waits for it.
        let listed = Listed { engine: self, control: control.clone() };
        if self.has_ended() {
            control.end();
        }
        drop(alone);
        // Little work is done at once, before users notice.
        let users = if room.left() > PART { self.live().users_of(&[on]) } else { Users::default() };
        let cleaned = clean(&mut room, &control, users);
        let alone = self.change();
        let why = match cleaned {
            Ok(()) => return Ok((Ready { _listed: listed, _alone: alone }, room)),
            Err(Stop::Error(error)) => error,
            Err(Stop::Cancelled) => {
                ApiError::new(Kind::Stale, format!("volume {volume}: job {volume}.{kind} was given up"))
            }
            Err(Stop::Later) => ApiError::new(Kind::Unavailable, "the daemon ends"),
        };
        drop(room); // before the job is gone
        self.events.emit("volume", volume, "not made ready", format!("{kind}: {why}"));
        Err((alone, why))
    }

    /// Gives such a job up; `false` when this is none.
    ///
    /// # Errors
    /// When it was done already.
    pub(super) fn cancel_zeroing(&self, job: &Job) -> Result<bool, ApiError> {
        let Some(control) = self.live().zeroing_called(&job.id).cloned() else { return Ok(false) };
        let uuid = self
            .live()
            .zeroing
            .iter()
            .find(|zeroing| zeroing.job().id == job.id)
            .map(|it| it.uuid.to_string());
        let size = || self.volume(uuid.as_deref()?).ok().map(|volume| volume.size_bytes);
        let before = size();
        control.cancel();
        // Nothing is left of it when this has been answered.
        while self.live().zeroing_called(&job.id).is_some() {
            std::thread::sleep(LOOK / 10);
        }
        let _alone = self.change();
        match size() == before {
            true => Ok(true),
            false => Err(ApiError::new(Kind::Stale, format!("job {}: it was done already", job.id))),
        }
    }
}

fn clean(room: &mut Reservation<'_>, control: &Arc<Control>, users: Users) -> Result<(), Stop> {
    let mut pacer = Pacer::new(control, users);
    let wanted = control.clone();
    let (mut part, mut began) = (PART, Instant::now());
    let left = room.zero(async move |left| {
        wanted.set_left(left);
        part = match began.elapsed() {
            took if took < PART_TIME => LARGEST_PART.min(2 * part),
            took if took > 4 * PART_TIME => part / 2,
            _ => part,
        };
        loop {
            part = part.min(pacer.most_at_once()).max(PART);
            match pacer.begin(&wanted, part.min(left)) {
                Ok(None) => break,
                Ok(Some(wait)) => reactor::current().sleep(wait.as_nanos() as u64).await,
                Err(_) => return 0, // it is asked again below
            }
        }
        began = Instant::now();
        part
    })?;
    control.set_left(left);
    if left > 0 { control.check() } else { Ok(()) }
}

/// Zeroed room. Other changes wait, and the job stays listed, until this is dropped.
pub struct Ready<'a> {
    _listed: Listed<'a>,
    _alone: MutexGuard<'a, ()>,
}

/// A job is on the list.
struct Listed<'a> {
    engine: &'a Engine,
    control: Arc<Control>,
}

impl Drop for Listed<'_> {
    fn drop(&mut self) {
        self.engine.live_mut().zeroing.retain(|zeroing| !Arc::ptr_eq(&zeroing.control, &self.control));
    }
}
