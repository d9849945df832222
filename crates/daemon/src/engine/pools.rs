//! Pools of volumes: the copies of their tables, checked and repaired while volumes are in use.

use super::bases::Base;
use super::{Engine, Live};
use crate::api_error::{ApiError, Kind};
use api::{PoolAction, PoolCapacity, Repaired, TableCopy};
use block::Device;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use volume::Pool;
use volume::store::{Copy, Found};
use volume::table::Table;

impl Live {
    /// The pools that are open, with the name of the array or device that each is on.
    pub fn pools(&self) -> impl Iterator<Item = (&String, &Arc<Pool>)> {
        self.bases.iter().filter_map(|(on, base)| Some((on, base.as_ref().ok()?.pool.as_ref()?)))
    }
}

impl Engine {
    /// Reads every copy of the table of the pool on an array or device.
    ///
    /// # Errors
    /// When there is no pool, or the device cannot be read.
    pub fn pool(&self, key: &str) -> Result<api::Pool, ApiError> {
        let (on, pool) = self.pool_called(key)?;
        Ok(report(on, &pool, &pool.check()?))
    }

    /// The room of the pool on an array or device. The device is not read.
    ///
    /// # Errors
    /// When there is no pool: the error does not tell whether there is such an array or device,
    /// since callers that see none may ask.
    pub fn pool_capacity(&self, key: &str) -> Result<PoolCapacity, ApiError> {
        let (backing, pool) = self.pool_called(key).map_err(|error| match error.kind {
            Kind::NotFound => {
                ApiError::new(Kind::NotFound, format!("no array or device {key:?} with volumes"))
            }
            _ => error,
        })?;
        let (capacity_bytes, free_bytes) = pool.room();
        Ok(PoolCapacity { backing, capacity_bytes, free_bytes })
    }

    /// Does something to the pool on an array or device.
    ///
    /// # Errors
    /// When there is no pool, or the device fails.
    pub fn act_on_pool(&self, key: &str, PoolAction::Repair: &PoolAction) -> Result<Repaired, ApiError> {
        let _alone = self.change();
        let (on, pool) = self.pool_called(key)?;
        let offsets = pool.repair()?;
        self.tell_of_rewritten(&on, &offsets);
        Ok(Repaired { offsets_bytes: offsets, pool: report(on, &pool, &pool.check()?) })
    }

    /// How many damaged copies of a table were rewritten on each array or device that has a pool.
    pub fn rewritten_copies(&self) -> Vec<(String, u64)> {
        self.live().pools().map(|(on, pool)| (on.clone(), pool.rewritten())).collect()
    }

    /// Opens what is on an array or device; an event says when its pool has rewritten damaged
    /// copies of its table.
    pub(super) fn open_base(&self, name: &str, device: Arc<dyn Device>) -> Result<Base, ApiError> {
        let is_served = !self.live().exports_of_base(name).is_empty();
        let base = Base::open(device, is_served, &self.core())?;
        if let Some(pool) = &base.pool {
            self.may_have_leftovers.store(true, Ordering::SeqCst);
            self.tell_of_rewritten(name, pool.rewritten_at_opening());
        }
        Ok(base)
    }

    fn tell_of_rewritten(&self, on: &str, offsets: &[u64]) {
        if !offsets.is_empty() {
            let places: Vec<String> = offsets.iter().map(u64::to_string).collect();
            let text = format!("damaged copies of the table rewritten at {}", places.join(", "));
            self.events.emit("pool", on, "repaired", text);
        }
    }

    fn pool_called(&self, key: &str) -> Result<(String, Arc<Pool>), ApiError> {
        let on = self.base_name(key)?;
        let pool = self.live().base(&on)?.pool.clone();
        let none = || ApiError::new(Kind::NotFound, format!("{on}: it has no pool of volumes"));
        Ok((on.clone(), pool.ok_or_else(none)?))
    }
}

fn report(on: String, pool: &Pool, found: &Found) -> api::Pool {
    let damaged = found.damaged();
    let copy = |copy: &Copy| TableCopy {
        offset_bytes: copy.offset,
        sequence: copy.table().map(|table| table.sequence),
        volumes: copy.table().map(names),
        is_damaged: damaged.contains(&copy.offset),
        state: copy.to_string(),
    };
    api::Pool {
        backing: on,
        uuid: pool.identity().1.to_string(),
        sequence: found.table.sequence,
        volumes: names(&found.table),
        copies: found.copies.iter().map(copy).collect(),
        damaged: damaged.len(),
        rewritten: pool.rewritten(),
    }
}

fn names(table: &Table) -> Vec<String> {
    table.volumes.iter().map(|volume| volume.name.to_string()).collect()
}
