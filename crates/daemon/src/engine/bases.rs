//! Bases: devices and arrays, each of which holds volumes or is served whole.

use super::change::Effects;
use super::{Engine, Live};
use crate::api_error::{ApiError, Kind};
use crate::state::Target;
use block::Device;
use layers::migrate::Migratable;
use reactor::CoreRef;
use stack::kinds::qcow2::{LiveImage, UringDevice};
use std::sync::Arc;
use std::time::{Duration, Instant};
use volume::store::ReadError;
use volume::table::DecodeError;
use volume::{Info, Name, Pool, PoolError, Uuid};

/// How long cores may take to close a volume.
const CLOSING: Duration = Duration::from_secs(5);

/// A device or an array that is open.
#[derive(Clone)]
pub struct Base {
    /// The open device.
    pub device: Arc<dyn Device>,
    /// The device of exports that serve all of it, until a volume takes its place.
    pub served: Arc<Migratable>,
    /// The volumes on it, if it was prepared for them.
    pub pool: Option<Arc<Pool>>,
    /// The image, if the device is one in the format qcow2 that is written.
    pub image: Option<Arc<LiveImage>>,
    /// The image's backing file.
    pub backing_file: Option<Arc<UringDevice>>,
}

impl Base {
    /// With the volumes that are on it, unless all of it `is_served`: then what is there is its
    /// clients' business.
    pub fn open(device: Arc<dyn Device>, is_served: bool, core: &CoreRef) -> Result<Base, ApiError> {
        let served = Arc::new(Migratable::new(device.clone()));
        let bare = Base { device, served, pool: None, image: None, backing_file: None };
        if is_served {
            return Ok(bare);
        }
        match Pool::open(bare.device.clone(), core.clone()) {
            Ok(pool) => Ok(Base { pool: Some(Arc::new(pool)), ..bare }),
            Err(PoolError::Read(_, ReadError::Decode(DecodeError::None))) => Ok(bare),
            Err(error) => Err(error.into()),
        }
    }
}

/// A pool that exists, or that can be created.
pub(super) struct PlannedPool {
    name: Name,
    base: Base,
}

impl PlannedPool {
    /// Checks that a pool that exists has room for `size` bytes.
    pub fn check_room(&self, size: u64) -> Result<(), ApiError> {
        match self.base.pool.as_ref().map(|pool| pool.room().1) {
            Some(free) if free < size => {
                Err(ApiError::new(Kind::NoRoom, format!("{}: {size} bytes: {free} are free", self.name)))
            }
            _ => Ok(()),
        }
    }

    /// The pool, which is made now if there is none; undone, the device holds what it held.
    pub fn commit<'a>(self, engine: &'a Engine, effects: &mut Effects<'a>) -> Result<Arc<Pool>, ApiError> {
        let PlannedPool { name, base } = self;
        if let Some(pool) = base.pool {
            return Ok(pool);
        }
        let (pool, former) = Pool::create_over(base.device.clone(), name.clone(), engine.core())?;
        let pool = Arc::new(pool);
        let prepared = Base { pool: Some(pool.clone()), ..base.clone() };
        engine.live_mut().bases.insert(name.to_string(), Ok(prepared));
        let made = pool.clone();
        effects.undo_by(move || {
            if made.undo_create(former)? {
                let bare = Base { pool: None, ..base };
                engine.live_mut().bases.insert(name.to_string(), Ok(bare));
            }
            Ok(())
        });
        Ok(pool)
    }
}

impl Live {
    /// Every volume, with the name of what it is on.
    pub fn all_volumes(&self) -> impl Iterator<Item = (&str, Info)> {
        let volumes = self
            .pools()
            .flat_map(|(base, pool)| pool.volumes().into_iter().map(move |info| (base.as_str(), info)));
        volumes.filter_map(|(base, info)| Some((base, self.shown(base, info)?)))
    }

    /// As [`Live::all_volumes`], those with this UUID.
    fn volumes_with(&self, uuid: Uuid) -> impl Iterator<Item = (&str, Info)> {
        self.pools()
            .filter_map(move |(base, pool)| Some((base.as_str(), self.shown(base, pool.volume_with(uuid)?)?)))
    }

    /// The volume with this name or UUID, the pool that it is in, and what that is on.
    pub fn volume(&self, key: &str) -> Result<(String, Arc<Pool>, Info), ApiError> {
        let by_uuid = Uuid::parse_hyphenated(key).into_iter().flat_map(|uuid| self.volumes_with(uuid));
        let mut found: Vec<(&str, Info)> = by_uuid.collect();
        if found.is_empty() {
            found = self.all_volumes().filter(|(_, info)| info.name.as_str() == key).collect();
        }
        let mut found = found.into_iter();
        let Some((base, info)) = found.next() else { return Err(ApiError::not_found("volume", key)) };
        if found.next().is_some() {
            let detail = format!("there are several volumes called {key}: say which by UUID");
            return Err(ApiError::new(Kind::InUse, detail));
        }
        let base = base.to_owned();
        let pool = self.bases[&base].as_ref().ok().and_then(|base| base.pool.clone());
        Ok((base, pool.expect("the volume is in it"), info))
    }

    /// Refuses a pool with a volume that another pool has, too: a copy of the other's device, or
    /// what a failed move has left.
    pub fn check_volumes_are_new(&self, name: &str, base: &Base) -> Result<(), ApiError> {
        let volumes = base.pool.iter().flat_map(|pool| pool.volumes());
        for Info { uuid, name: volume, .. } in volumes {
            if let Some((other, _)) = self.volumes_with(uuid).next() {
                let detail = format!("{name}: its volume {volume} ({uuid}) is on {other}, too");
                return Err(ApiError::new(Kind::InUse, detail));
            }
        }
        Ok(())
    }

    /// Exports that serve all of a device or array.
    pub fn exports_of_base(&self, name: &str) -> Vec<String> {
        let is_it = |target: &Target| matches!(target, Target::Array(it) | Target::Device(it) if it == name);
        let exports = self.state.exports.iter().filter(|export| export.targets.iter().any(is_it));
        exports.map(|export| export.name.clone()).collect()
    }

    /// Names of the volumes on a base, and bytes that are free.
    pub fn volumes_on(&self, name: &str) -> (Vec<String>, Option<u64>) {
        match self.bases.get(name) {
            Some(Ok(Base { pool: Some(pool), .. })) => {
                let volumes = pool.volumes().into_iter().filter_map(|info| self.shown(name, info));
                (volumes.map(|info| info.name.to_string()).collect(), Some(pool.room().1))
            }
            _ => (Vec::new(), None),
        }
    }

    /// A base that is open.
    pub fn base(&self, name: &str) -> Result<&Base, ApiError> {
        match self.bases.get(name) {
            Some(Ok(base)) => Ok(base),
            Some(Err(error)) => Err(ApiError::new(Kind::Unavailable, format!("{name}: {error}"))),
            None => Err(ApiError::not_found("array or device", name)),
        }
    }

    /// Whether a base has no volumes and no exports.
    pub fn check_is_unused(&self, name: &str) -> Result<(), ApiError> {
        let in_use = |detail: String| Err(ApiError::new(Kind::InUse, detail));
        let about = self.move_about(name).or_else(|| self.zeroing_about(name));
        let about = about.or_else(|| self.copy_about(name)).or_else(|| self.stream_about(name));
        let about = about.or_else(|| self.commit_about(name));
        if let Some(text) = about {
            return in_use(format!("{name}: {text}"));
        }
        if let Some(export) = self.exports_of_base(name).first() {
            return in_use(format!("{name}: export {export} serves it"));
        }
        let (volumes, _) = self.volumes_on(name);
        match volumes.first() {
            Some(volume) => in_use(format!("{name}: volume {volume} is on it")),
            None => Ok(()),
        }
    }
}

impl Engine {
    /// The pool on a base for a volume of `size` bytes, or that one can be made there. Within a
    /// change.
    pub(super) fn plan_pool(&self, name: &str, force: bool, size: u64) -> Result<PlannedPool, ApiError> {
        let base = self.live().base(name)?.clone();
        if base.pool.is_none() {
            self.live().check_is_unused(name)?;
            Pool::check_fits(&*base.device, size).map_err(|error| ApiError::from(error).about(name))?;
            if !force {
                let held = hosting::arrays::check_unused(name, &base.device, &self.core());
                held.map_err(|detail| ApiError::new(Kind::InUse, detail))?;
            }
        }
        Ok(PlannedPool { name: Name::new(name)?, base })
    }

    /// Looks at the sizes of everything that is open, and tells who uses it. Within a change.
    pub(super) fn refresh(&self) {
        let names: Vec<String> = self.live().bases.keys().cloned().collect();
        names.iter().for_each(|name| self.refresh_one(name));
    }

    /// Reads the size of a device or array, if it is open, and announces it to its users. Within a
    /// change.
    pub(super) fn refresh_one(&self, name: &str) {
        let base = self.live().bases.get(name).and_then(|base| base.clone().ok());
        let Some(base) = base else { return };
        if let Err(error) = base.device.refresh() {
            tracing::error!(name, %error, "cannot ask for its size");
        }
        match base.pool.as_ref().map(|pool| pool.extend()) {
            Some(Ok((before, after))) if after > before => {
                let text = format!("{after} bytes for volumes, {before} before");
                self.events.emit("array", name, "grown", text);
            }
            Some(Err(error)) => {
                tracing::error!(name, %error, "the pool cannot use the added capacity");
            }
            _ => {}
        }
        let live = self.live();
        live.exports_of_base(name).iter().for_each(|export| live.notify_resize(export));
    }
}

/// Deletes a volume that cores may be about to close.
pub(super) fn delete(pool: &Pool, info: &Info) -> Result<(), ApiError> {
    let deadline = Instant::now() + CLOSING;
    loop {
        match pool.delete_volume(&info.uuid.to_string()) {
            Err(volume::PoolError::InUse(_)) if Instant::now() < deadline => {
                std::thread::sleep(Duration::from_millis(5));
            }
            deleted => return Ok(deleted.map(drop)?),
        }
    }
}
