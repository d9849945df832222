//! Volumes, and groups that share limits.

use super::{Engine, Live, check_floor, check_qos, floor_limits, limits, throttle};
use crate::fault::{Fault, Kind};
use crate::state::{Target, VolumeRecord};
use api::{Group, NewVolume, Qos, Volume, VolumeChange};
use block::Device;
use layers::qos::Throttle;
use layers::relocate::Relocatable;
use std::collections::HashMap;
use std::sync::Arc;
use volume::{Info, Name, Pool};

/// A volume that exports serve, all of them the same: its limits hold for them together.
pub struct OpenVolume {
    /// What exports are given: counted, limited, and at whichever place it is.
    pub device: Arc<Relocatable>,
    /// Its own limits, then those of its group.
    pub throttles: Vec<Arc<Throttle>>,
    /// What it gets of its group's.
    pub floor: Arc<Throttle>,
}

impl Live {
    /// Names of the exports of each volume.
    fn exports_of_volumes(&self) -> HashMap<&str, Vec<String>> {
        let mut exports: HashMap<&str, Vec<String>> = HashMap::new();
        for export in &self.state.exports {
            for target in &export.of {
                if let Target::Volume(uuid) = target {
                    exports.entry(uuid).or_default().push(export.name.clone());
                }
            }
        }
        exports
    }

    fn volume_report(&self, on: &str, info: Info, exports: &HashMap<&str, Vec<String>>) -> Volume {
        let uuid = info.uuid.to_string();
        let VolumeRecord { qos, group, floor } = self.state.volumes.get(&uuid).cloned().unwrap_or_default();
        let exports = exports.get(&*uuid).cloned().unwrap_or_default();
        let moves_to = self.state.moves.get(&uuid).filter(|record| !record.is_done);
        let moves_to = moves_to.map(|record| record.to.clone());
        let Info { name, size, pieces, .. } = info;
        let (name, on) = (name.to_string(), on.to_owned());
        Volume { name, uuid, on, size, pieces, qos, group, floor, exports, moves_to }
    }

    fn check_group(&self, name: &str) -> Result<(), Fault> {
        match self.state.groups.contains_key(name) {
            true => Ok(()),
            false => Err(Fault::not_found("group", name)),
        }
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
    pub fn volume(&self, key: &str) -> Result<Volume, Fault> {
        let live = self.live();
        let (on, _, info) = live.volume(key)?;
        Ok(live.volume_report(&on, info, &live.exports_of_volumes()))
    }

    /// Makes a volume.
    ///
    /// # Errors
    /// When the name is taken, there is no such array or device, no room, or it fails.
    pub fn create_volume(&self, new: &NewVolume) -> Result<Volume, Fault> {
        let alone = self.change();
        let name = Name::new(&new.name)?;
        check_qos(&new.qos)?;
        check_floor(&new.floor)?;
        if let Some(group) = &new.group {
            self.live().check_group(group)?;
        }
        self.check_is_new(name.as_str())?;
        // By the record's name: arrays may be called by UUID.
        let on = self.base_name(&new.on)?;
        let pool = self.pool_on(&on, new.force, new.size)?;
        let room = pool.reserve_volume(name, new.size)?;
        let (_ready, room) =
            self.make_ready(alone, "create", (&new.name, &on), room).map_err(|(_, fault)| fault)?;
        if let Some(group) = &new.group {
            self.live().check_group(group)?; // still
        }
        let info = room.commit()?;
        let record = VolumeRecord { qos: new.qos, group: new.group.clone(), floor: new.floor };
        if record != VolumeRecord::default()
            && let Err(fault) = self.commit(|state| drop(state.volumes.insert(info.uuid.to_string(), record)))
        {
            take_back(&pool, &info);
            return Err(fault);
        }
        self.events.emit("volume", &new.name, "created", format!("{} bytes on {on}", new.size));
        self.volume(&info.uuid.to_string())
    }

    /// Changes a volume: all that is asked for, or nothing.
    ///
    /// # Errors
    /// When there is none, or what is asked for cannot be.
    pub fn change_volume(
        &self,
        key: &str,
        change: &VolumeChange,
        check: impl FnOnce(&Volume) -> Result<(), Fault>,
    ) -> Result<Volume, Fault> {
        let alone = self.change();
        let before = self.volume(key)?;
        check(&before)?;
        let (_, pool, info) = self.live().volume(key)?;
        let uuid = info.uuid.to_string();
        // What makes no sense is found out before anything is done.
        let name = change.name.as_deref().filter(|name| *name != before.name).map(Name::new).transpose()?;
        if let Some(name) = &name {
            self.check_is_new(name.as_str())?;
        }
        let size = change.size.filter(|size| *size != before.size);
        if let Some(size) = size.filter(|size| *size < before.size) {
            let detail =
                format!("volume {}: {size} bytes: it has {}, and does not shrink", before.name, before.size);
            return Err(Fault::invalid(detail));
        }
        change.qos.as_ref().map_or(Ok(()), check_qos)?;
        change.floor.as_ref().map_or(Ok(()), check_floor)?;
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
        }
        if group != before.group && !before.exports.is_empty() {
            let detail = format!(
                "volume {}: export {} serves it: it joins a group without",
                before.name, before.exports[0]
            );
            return Err(Fault::new(Kind::InUse, detail));
        }
        // There has to be room; it is taken last, for that may take long.
        let room = size.map(|size| pool.reserve_growth(&uuid, size)).transpose()?;
        let (qos, floor) = (change.qos.unwrap_or(before.qos), change.floor.unwrap_or(before.floor));
        let record = VolumeRecord { qos, group, floor };
        let old = VolumeRecord { qos: before.qos, group: before.group.clone(), floor: before.floor };
        if record != old {
            self.set_record(&info, &record)?;
        }
        let undo_record = || {
            // Others may have changed the settings while room was made ready.
            let now = self.live().state.volumes.get(&uuid).cloned().unwrap_or_default();
            match record == old || now != record {
                true => Ok(()),
                false => self.set_record(&info, &old),
            }
        };
        let renamed = name.is_some();
        if let Some(name) = name
            && let Err(error) = pool.rename_volume(&uuid, name)
        {
            return Err(self.undone(error.into(), &before.name, undo_record()));
        }
        let mut is_grown = None;
        if let Some(room) = room {
            let name = self.volume(&uuid)?.name;
            let undo = || {
                if renamed {
                    pool.rename_volume(&uuid, Name::new(&before.name)?)?;
                }
                undo_record()
            };
            match self.make_ready(alone, "grow", (&name, &before.on), room) {
                Ok((ready, room)) => match room.commit() {
                    Ok(info) => is_grown = Some((ready, info)),
                    Err(error) => return Err(self.undone(error.into(), &before.name, undo())),
                },
                Err((_alone, fault)) => return Err(self.undone(fault, &before.name, undo())),
            }
        }
        let name = self.volume(&uuid)?.name;
        if record != old {
            self.events.emit("volume", &name, "limited", describe(&record.qos));
        }
        if renamed {
            self.events.emit("volume", &name, "renamed", format!("was {}", before.name));
        }
        if let Some((_ready, info)) = is_grown {
            let grown = self.volume(&uuid)?;
            let live = self.live();
            grown.exports.iter().for_each(|export| live.notify_resize(export));
            let text = format!("{} bytes, {} before", info.size, before.size);
            self.events.emit("volume", info.name.as_str(), "grown", text);
        }
        self.volume(&uuid)
    }

    /// Makes a volume's settings durable and effective.
    fn set_record(&self, info: &Info, record: &VolumeRecord) -> Result<(), Fault> {
        let uuid = info.uuid.to_string();
        self.commit(|state| match *record == VolumeRecord::default() {
            true => drop(state.volumes.remove(&uuid)),
            false => drop(state.volumes.insert(uuid.clone(), record.clone())),
        })?;
        if let Some(open) = self.live().volumes.get(&info.uuid).and_then(|open| open.upgrade()) {
            open.throttles[0].set(limits(&record.qos));
            open.floor.set(floor_limits(&record.floor));
        }
        Ok(())
    }

    /// Why a change failed. When a part of it could not be undone, an event says so.
    fn undone(&self, fault: Fault, volume: &str, undo: Result<(), Fault>) -> Fault {
        if let Err(error) = undo {
            let text = format!("a change failed ({fault}), and a part of it could not be undone: {error}");
            self.events.emit("volume", volume, "changed in part", text);
        }
        fault
    }

    /// Removes a volume that nobody serves; what is on it is lost.
    ///
    /// # Errors
    /// When there is none, or an export serves it.
    pub fn delete_volume(
        &self,
        key: &str,
        check: impl FnOnce(&Volume) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let _alone = self.change();
        let volume = self.volume(key)?;
        check(&volume)?;
        if let Some(export) = volume.exports.first() {
            let detail = format!("volume {}: export {export} serves it", volume.name);
            return Err(Fault::new(Kind::InUse, detail));
        }
        self.live().check_stays(&volume)?;
        let (_, pool, info) = self.live().volume(&volume.uuid)?;
        pool.delete_volume(&volume.uuid)?;
        if self.live().state.volumes.contains_key(&volume.uuid) {
            // It is gone: settings that stay behind are nobody's.
            self.commit(|state| drop(state.volumes.remove(&volume.uuid)))?;
        }
        self.live_mut().volumes.remove(&info.uuid);
        self.events.emit("volume", &volume.name, "deleted", format!("{} bytes are free again", volume.size));
        Ok(())
    }

    /// The device by which exports serve a volume: one for all of them.
    pub(super) fn open_volume(&self, uuid: &str) -> Result<Arc<OpenVolume>, Fault> {
        let (_, pool, info) = self.live().volume(uuid)?;
        if let Some(open) = self.live().volumes.get(&info.uuid).and_then(|open| open.upgrade()) {
            return Ok(open);
        }
        let VolumeRecord { qos, group, floor } =
            self.live().state.volumes.get(uuid).cloned().unwrap_or_default();
        let mut throttles = vec![throttle(&qos)];
        throttles.extend(group.as_ref().and_then(|group| self.live().groups.get(group).cloned()));
        let device: Arc<dyn Device> = pool.open_volume(uuid)?;
        let floor = Arc::new(Throttle::new(floor_limits(&floor)));
        let limited = layers::qos::Qos::new(device, throttles.clone()).with_floor(floor.clone());
        let device = Arc::new(Relocatable::new(Arc::new(limited)));
        let open = Arc::new(OpenVolume { device, throttles, floor });
        self.live_mut().volumes.insert(info.uuid, Arc::downgrade(&open));
        Ok(open)
    }

    /// The name of an array or device that is called by name or UUID.
    pub(super) fn base_name(&self, key: &str) -> Result<String, Fault> {
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

    /// Says what the volumes of a group may take together, from now on; makes the group if there is none.
    ///
    /// # Errors
    /// When the name or the limits make no sense.
    pub fn set_group(&self, name: &str, qos: &Qos) -> Result<Group, Fault> {
        let _alone = self.change();
        Name::new(name)?;
        check_qos(qos)?;
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
            .ok_or_else(|| Fault::not_found("group", name))
    }

    /// Removes a group that no volume is in.
    ///
    /// # Errors
    /// When there is none, or a volume is in it.
    pub fn delete_group(&self, name: &str) -> Result<(), Fault> {
        let _alone = self.change();
        self.live().check_group(name)?;
        let group = self.groups().into_iter().find(|group| group.name == name);
        if let Some(volume) = group.as_ref().and_then(|group| group.volumes.first()) {
            return Err(Fault::new(Kind::InUse, format!("group {name}: volume {volume} is in it")));
        }
        self.commit(|state| {
            state.groups.remove(name);
        })?;
        self.live_mut().groups.remove(name);
        self.events.emit("group", name, "deleted", "no limits any more");
        Ok(())
    }
}

/// Removes a volume that was made for nothing.
fn take_back(pool: &Pool, info: &Info) {
    if let Err(error) = pool.delete_volume(&info.uuid.to_string()) {
        tracing::error!(volume = %info.name, %error, "a volume whose settings could not be saved stays");
    }
}

fn describe(qos: &Qos) -> String {
    let limit = |(name, rate): (&str, Option<api::Rate>)| {
        let rate = rate?;
        let burst = if rate.burst > 0 { format!(" (bursts of {})", rate.burst) } else { String::new() };
        Some(format!("{name} {}{burst}", rate.per_second))
    };
    let limits: Vec<String> = qos.list().into_iter().filter_map(limit).collect();
    if limits.is_empty() { "no limits".into() } else { limits.join(", ") }
}
