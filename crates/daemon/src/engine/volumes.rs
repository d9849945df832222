//! Volumes, and groups that share limits.

use super::authority::Authority;
use super::bases::PlannedPool;
use super::change::Effects;
use super::copies::{PlannedCopy, Source};
use super::{Engine, Live, checks, limits, min_limits, throttle};
use crate::api_error::{ApiError, Kind};
use crate::labels;
use crate::state::{State, Target, VolumeRecord};
use api::{Group, JobKind, LabelsChange, NewVolume, Qos, Volume, VolumeChange};
use std::collections::HashMap;
use std::sync::{Arc, MutexGuard};
use volume::{Info, Name, Pool, Reservation};

impl Live {
    /// Names of the exports of each volume.
    fn exports_of_volumes(&self) -> HashMap<&str, Vec<String>> {
        let mut exports: HashMap<&str, Vec<String>> = HashMap::new();
        for export in &self.state.exports {
            for target in &export.targets {
                if let Target::Volume(uuid) = target {
                    exports.entry(uuid).or_default().push(export.name.clone());
                }
            }
        }
        exports
    }

    fn volume_report(&self, on: &str, info: Info, exports: &HashMap<&str, Vec<String>>) -> Volume {
        let uuid = info.uuid.to_string();
        let VolumeRecord { qos, group, min_qos, label, labels, .. } =
            self.state.volumes.get(&uuid).cloned().unwrap_or_default();
        let exports = exports.get(&*uuid).cloned().unwrap_or_default();
        let moving_to = self.state.moves.get(&uuid).filter(|record| !record.is_done && !record.has_failed());
        let moving_to = moving_to.map(|record| record.to.clone());
        let copy = self.state.copies.get(&uuid);
        let copying_from = copy.map(|copy| self.target_name(&copy.source));
        let error = copy.and_then(|copy| copy.error.clone()).or_else(|| self.lost_place(&uuid));
        let Info { name, size: size_bytes, pieces: extents, .. } = info;
        Volume {
            name: name.to_string(),
            uuid,
            backing: on.to_owned(),
            size_bytes,
            extents,
            qos,
            group,
            min_qos,
            exports,
            moving_to,
            copying_from,
            error,
            label,
            labels,
        }
    }

    fn check_group(&self, name: &str) -> Result<(), ApiError> {
        match self.state.groups.contains_key(name) {
            true => Ok(()),
            false => Err(ApiError::not_found("group", name)),
        }
    }
}

/// A volume that can be made.
struct PlannedVolume {
    name: Name,
    size: u64,
    on: String,
    pool: PlannedPool,
    record: VolumeRecord,
    /// The object that it is a copy of.
    source: Option<Source>,
}

impl PlannedVolume {
    /// The volume's settings are recorded before it is created: it is never without its limits.
    fn commit(self, engine: &Engine, alone: MutexGuard<'_, ()>) -> Result<Volume, ApiError> {
        let PlannedVolume { name, size, on, pool, record, source } = self;
        if let Some(source) = source {
            return PlannedCopy { name, size, on, pool, record, source }.commit(engine);
        }
        let mut effects = Effects::new(engine, "volume", name.as_str());
        let pool = pool.commit(engine, &mut effects)?;
        let room = pool.reserve_volume(name.clone(), size)?;
        let uuid = room.info().uuid.to_string();
        let (group, of, labels) = (record.group.clone(), uuid.clone(), record.labels.clone());
        if record != VolumeRecord::default() {
            effects.remember(
                |state| drop(state.volumes.insert(uuid.clone(), record)),
                move |state| drop(state.volumes.remove(&of)),
            )?;
        }
        let (_ready, room) = match engine.make_ready(alone, JobKind::Create, (name.as_str(), &on), room) {
            Ok(ready) => ready,
            Err((_alone, error)) => {
                drop(effects);
                return Err(error);
            }
        };
        let made = || {
            if let Some(group) = &group {
                engine.live().check_group(group)?; // still
            }
            room.commit().map_err(ApiError::from)
        };
        match made() {
            Ok(_) => effects.keep(),
            Err(error) => {
                drop(effects); // within the change
                return Err(error);
            }
        }
        let text = format!("{size} bytes on {on}");
        engine.events.emit_labelled("volume", name.as_str(), &labels, "created", text);
        engine.volume(&uuid)
    }
}

/// A checked change of a volume.
struct PlannedVolumeChange<'a> {
    before: Volume,
    pool: &'a Pool,
    info: Info,
    name: Option<Name>,
    record: VolumeRecord,
    /// The room that it grows by.
    room: Option<Reservation<'a>>,
}

impl PlannedVolumeChange<'_> {
    fn commit(self, engine: &Engine, alone: MutexGuard<'_, ()>) -> Result<Volume, ApiError> {
        let PlannedVolumeChange { before, pool, info, name, record, room } = self;
        let (uuid, record) = (&before.uuid, &record);
        let old = &engine.live().state.volumes.get(uuid).cloned().unwrap_or_default();
        let mut effects = Effects::new(engine, "volume", &before.name);
        if record != old {
            engine.commit(set(uuid, record))?;
            let generation = engine.generation();
            engine.enforce(&info, record);
            effects.undo_by(move || {
                // Others may have changed the settings while room was made ready.
                let now = engine.live().state.volumes.get(uuid).cloned().unwrap_or_default();
                if now == *record {
                    engine.take_back(generation, set(uuid, old))?;
                    engine.enforce(&info, old);
                }
                Ok(())
            });
        }
        let new_name = name.as_ref().map_or(before.name.clone(), Name::to_string);
        if let Some(name) = &name {
            pool.rename_volume(uuid, name.clone())?;
            effects.undo_by(|| Ok(pool.rename_volume(uuid, Name::new(&before.name)?).map(drop)?));
        }
        let mut grown = None;
        if let Some(room) = room {
            match engine.make_ready(alone, JobKind::Grow, (&new_name, &before.backing), room) {
                Ok((ready, room)) => match room.commit() {
                    Ok(info) => grown = Some((ready, info)),
                    Err(error) => {
                        drop(effects); // within the change, which ends with `ready`
                        return Err(error.into());
                    }
                },
                Err((_alone, error)) => {
                    drop(effects);
                    return Err(error);
                }
            }
        }
        effects.keep();
        let labels = &record.labels;
        let emit = |what: &str, text: String| {
            engine.events.emit_labelled("volume", &new_name, labels, what, text);
        };
        if (VolumeRecord { labels: old.labels.clone(), ..record.clone() }) != *old {
            emit("limited", describe(&record.qos));
        }
        if *labels != old.labels {
            emit("labelled", labels::describe(labels));
        }
        if name.is_some() {
            emit("renamed", format!("was {}", before.name));
        }
        let volume = engine.volume(uuid)?;
        if let Some((_ready, info)) = grown {
            let live = engine.live();
            volume.exports.iter().for_each(|export| live.notify_resize(export));
            emit("grown", format!("{} bytes, {} before", info.size, before.size_bytes));
        }
        Ok(volume)
    }
}

/// A volume without exports.
struct PlannedVolumeDeletion {
    volume: Volume,
    pool: Arc<Pool>,
    info: Info,
}

impl PlannedVolumeDeletion {
    fn commit(self, engine: &Engine) -> Result<(), ApiError> {
        let PlannedVolumeDeletion { volume, pool, info } = self;
        let Volume { uuid, name, size_bytes: size, labels, .. } = &volume;
        let mut effects = Effects::new(engine, "volume", name);
        let (settings, copy) = engine.live().records_of(uuid);
        if settings.is_some() || copy.is_some() {
            effects.remember(
                |state| state.forget_volume(uuid),
                |state| {
                    state.volumes.extend(settings.map(|settings| (uuid.clone(), settings)));
                    state.copies.extend(copy.map(|copy| (uuid.clone(), copy)));
                },
            )?;
        }
        pool.delete_volume(uuid)?;
        effects.keep();
        engine.live_mut().volumes.remove(&info.uuid);
        let text = format!("{size} bytes are free again");
        engine.events.emit_labelled("volume", name, labels, "deleted", text);
        Ok(())
    }
}

/// Sets what a volume may take in the state.
fn set(uuid: &str, record: &VolumeRecord) -> impl FnOnce(&mut State) {
    let (uuid, record) = (uuid.to_owned(), record.clone());
    move |state| match record == VolumeRecord::default() {
        true => drop(state.volumes.remove(&uuid)),
        false => drop(state.volumes.insert(uuid, record)),
    }
}

impl Engine {
    /// Every volume.
    pub fn volumes(&self) -> Vec<Volume> {
        let live = self.live();
        let exports = live.exports_of_volumes();
        live.all_volumes().map(|(on, info)| live.volume_report(on, info, &exports)).collect()
    }

    /// The volume with this name or UUID.
    ///
    /// # Errors
    /// When there is none.
    pub fn volume(&self, key: &str) -> Result<Volume, ApiError> {
        let live = self.live();
        let (on, _, info) = live.volume(key)?;
        Ok(live.volume_report(&on, info, &live.exports_of_volumes()))
    }

    /// Makes a volume.
    ///
    /// # Errors
    /// When the name is taken, there is no such array or device, no room, or it fails.
    pub fn create_volume(&self, new: &NewVolume, authority: &Authority) -> Result<Volume, ApiError> {
        let alone = self.change();
        self.plan_volume(new, authority)?.commit(self, alone)
    }

    fn plan_volume(&self, new: &NewVolume, authority: &Authority) -> Result<PlannedVolume, ApiError> {
        let name = checks::volume(new)?;
        if let Some(group) = &new.group {
            self.live().check_group(group)?;
        }
        self.check_is_new(name.as_str())?;
        // By the record's name: arrays may be called by UUID.
        let on = self.base_name(&new.backing)?;
        if self.live().base(&on)?.pool.is_none() {
            authority.check_prepares(&on)?;
        }
        let source = new.from.as_deref().map(|key| self.plan_source(key, &on, new.pivot, authority));
        let source = source.transpose()?;
        let size = match &source {
            Some(source) => source.size_of_volume(new, self.live().base(&on)?)?,
            None => new.size_bytes,
        };
        let pool = self.plan_pool(&on, new.force, size)?;
        if source.is_some() {
            pool.check_room(size)?;
        }
        let label = authority.label(new.label.as_deref());
        let (qos, group, min_qos) = (new.qos, new.group.clone(), new.min_qos);
        let record =
            VolumeRecord { qos, group, min_qos, label, labels: new.labels.clone(), device_name: None };
        Ok(PlannedVolume { name, size, on, pool, record, source })
    }

    /// Changes a volume: all that is asked for, or nothing.
    ///
    /// # Errors
    /// When there is none, or what is asked for cannot be.
    pub fn change_volume(
        &self,
        key: &str,
        change: &VolumeChange,
        check: impl FnOnce(&Volume) -> Result<(), ApiError>,
    ) -> Result<Volume, ApiError> {
        let alone = self.change();
        let before = self.volume(key)?;
        check(&before)?;
        let (_, pool, info) = self.live().volume(key)?;
        self.plan_volume_change(before, change, &pool, info)?.commit(self, alone)
    }

    fn plan_volume_change<'a>(
        &self,
        before: Volume,
        change: &VolumeChange,
        pool: &'a Pool,
        info: Info,
    ) -> Result<PlannedVolumeChange<'a>, ApiError> {
        let name = change.name.as_deref().filter(|name| *name != before.name).map(Name::new).transpose()?;
        if let Some(name) = &name {
            self.check_is_new(name.as_str())?;
        }
        let size = change.size_bytes.filter(|size| *size != before.size_bytes);
        if let Some(size) = size.filter(|size| *size < before.size_bytes) {
            let detail = format!(
                "volume {}: {size} bytes: it has {}, and does not shrink",
                before.name, before.size_bytes
            );
            return Err(ApiError::invalid(detail));
        }
        checks::limits(change.qos.as_ref(), change.min_qos.as_ref())?;
        let group = match change.group.as_deref() {
            None => before.group.clone(),
            Some("") => None,
            Some(group) => {
                self.live().check_group(group)?;
                Some(group.to_owned())
            }
        };
        if name.is_some() || size.is_some() || group != before.group {
            self.live().check_stays(&before)?;
            self.live().check_is_no_source(&before.name, &Target::Volume(before.uuid.clone()))?;
        }
        if group != before.group && !before.exports.is_empty() {
            let detail = format!(
                "volume {}: export {} serves it: it joins a group without",
                before.name, before.exports[0]
            );
            return Err(ApiError::new(Kind::InUse, detail));
        }
        // There has to be room; it is taken last, for that may take long.
        let room = size.map(|size| pool.reserve_growth(&before.uuid, size)).transpose()?;
        let (qos, min_qos) = (change.qos.unwrap_or(before.qos), change.min_qos.unwrap_or(before.min_qos));
        let now = self.live().state.volumes.get(&before.uuid).cloned().unwrap_or_default();
        let labels = labels::changed(&now.labels, change.labels.as_ref().unwrap_or(&LabelsChange::new()));
        let labels = labels.map_err(|error| error.about(&format!("volume {}", before.name)))?;
        let record = VolumeRecord { qos, group, min_qos, labels, ..now };
        Ok(PlannedVolumeChange { before, pool, info, name, record, room })
    }

    /// Makes a volume's settings effective.
    fn enforce(&self, info: &Info, record: &VolumeRecord) {
        if let Some(open) = self.live().volumes.get(&info.uuid).and_then(|open| open.upgrade()) {
            open.limits.throttles[0].set(limits(&record.qos));
            open.limits.floor.set(min_limits(&record.min_qos));
        }
    }

    /// Removes a volume that no export serves; its content is lost.
    ///
    /// # Errors
    /// When there is none, or an export serves it.
    pub fn delete_volume(
        &self,
        key: &str,
        check: impl FnOnce(&Volume) -> Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        let _alone = self.change();
        let volume = self.volume(key)?;
        check(&volume)?;
        self.plan_volume_deletion(volume)?.commit(self)
    }

    fn plan_volume_deletion(&self, volume: Volume) -> Result<PlannedVolumeDeletion, ApiError> {
        if let Some(export) = volume.exports.first() {
            let detail = format!("volume {}: export {export} serves it", volume.name);
            return Err(ApiError::new(Kind::InUse, detail));
        }
        self.live().check_may_be_deleted(&volume)?;
        let (_, pool, info) = self.live().volume(&volume.uuid)?;
        Ok(PlannedVolumeDeletion { volume, pool, info })
    }

    /// The name of an array or device that is called by name or UUID.
    pub(super) fn base_name(&self, key: &str) -> Result<String, ApiError> {
        let live = self.live();
        let array = super::arrays::find_record(&live.state.arrays, key).map(|record| record.name.clone());
        Ok(array.unwrap_or_else(|_| key.to_owned()))
    }

    /// Every group.
    pub fn groups(&self) -> Vec<Group> {
        let live = self.live();
        let volumes: Vec<(String, Option<String>)> = live
            .all_volumes()
            .filter_map(|(_, info)| {
                let record = live.state.volumes.get(&info.uuid.to_string())?;
                Some((info.name.to_string(), record.group.clone()))
            })
            .collect();
        let group = |(name, qos): (&String, &Qos)| Group {
            name: name.clone(),
            qos: *qos,
            volumes: volumes
                .iter()
                .filter(|(_, group)| group.as_ref() == Some(name))
                .map(|(volume, _)| volume.clone())
                .collect(),
        };
        live.state.groups.iter().map(group).collect()
    }

    /// Sets the limits that the volumes of a group share; creates the group if there is none.
    ///
    /// # Errors
    /// When the name or the limits are invalid.
    pub fn set_group(&self, name: &str, qos: &Qos) -> Result<Group, ApiError> {
        let _alone = self.change();
        checks::group(name, qos)?;
        self.commit(|state| {
            state.groups.insert(name.into(), *qos);
        })?;
        let mut live = self.live_mut();
        match live.groups.get(name) {
            Some(group) => group.set(limits(qos)),
            None => drop(live.groups.insert(name.into(), throttle(qos))),
        }
        drop(live);
        self.events.emit("group", name, "limited", describe(qos));
        self.groups()
            .into_iter()
            .find(|group| group.name == name)
            .ok_or_else(|| ApiError::not_found("group", name))
    }

    /// Removes a group that no volume is in.
    ///
    /// # Errors
    /// When there is none, or a volume is in it.
    pub fn delete_group(&self, name: &str) -> Result<(), ApiError> {
        let _alone = self.change();
        self.live().check_group(name)?;
        let group = self.groups().into_iter().find(|group| group.name == name);
        if let Some(volume) = group.as_ref().and_then(|group| group.volumes.first()) {
            return Err(ApiError::new(Kind::InUse, format!("group {name}: volume {volume} is in it")));
        }
        self.commit(|state| {
            state.groups.remove(name);
        })?;
        self.live_mut().groups.remove(name);
        self.events.emit("group", name, "deleted", "no limits any more");
        Ok(())
    }
}

fn describe(qos: &Qos) -> String {
    let limit = |(name, rate): (&str, Option<api::Rate>)| {
        let rate = rate?;
        let burst = if rate.burst > 0 { format!(" (bursts of {})", rate.burst) } else { String::new() };
        Some(format!("{name} {}{burst}", rate.per_s))
    };
    let limits: Vec<String> = qos.list().into_iter().filter_map(limit).collect();
    if limits.is_empty() { "no limits".into() } else { limits.join(", ") }
}
