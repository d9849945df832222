//! Volumes that exports have open.

use super::{Engine, min_limits, throttle};
use crate::api_error::ApiError;
use crate::state::VolumeRecord;
use block::Device;
use layers::migrate::Migratable;
use layers::qos::{Qos, Throttle};
use std::sync::Arc;

/// A volume that exports serve, all of them the same: its limits hold for them together.
pub struct OpenVolume {
    /// The device of exports: counted, limited, and independent of the pool that holds the volume.
    pub device: Arc<Migratable>,
    /// Its own limits, then those of its group.
    pub throttles: Vec<Arc<Throttle>>,
    /// Its guaranteed minimum of its group's limits.
    pub floor: Arc<Throttle>,
}

impl OpenVolume {
    /// A place of the volume under the volume's limits.
    pub fn limited(&self, place: Arc<dyn Device>) -> Arc<dyn Device> {
        limited(place, &self.throttles, &self.floor)
    }
}

fn limited(place: Arc<dyn Device>, throttles: &[Arc<Throttle>], floor: &Arc<Throttle>) -> Arc<dyn Device> {
    Arc::new(Qos::new(place, throttles.to_vec()).with_floor(floor.clone()))
}

impl Engine {
    /// The device by which exports serve a volume: one for all of them.
    pub(super) fn open_volume(&self, uuid: &str) -> Result<Arc<OpenVolume>, ApiError> {
        let (_, pool, info) = self.live().volume(uuid)?;
        self.live().check_place_is_known(&info.uuid.to_string())?;
        if let Some(open) = self.live().volumes.get(&info.uuid).and_then(|open| open.upgrade()) {
            return Ok(open);
        }
        let (throttles, floor) = self.throttles_of(uuid);
        let mut device = Migratable::new(limited(pool.open_volume(uuid)?, &throttles, &floor));
        let known_as = self.live().state.volumes.get(uuid).and_then(|record| record.device_name.clone());
        if let Some(name) = known_as {
            device = device.named(name);
        }
        let open = Arc::new(OpenVolume { device: Arc::new(device), throttles, floor });
        self.live_mut().volumes.insert(info.uuid, Arc::downgrade(&open));
        Ok(open)
    }

    /// The limits of a volume and of its group, and its guaranteed minimum.
    pub(super) fn throttles_of(&self, uuid: &str) -> (Vec<Arc<Throttle>>, Arc<Throttle>) {
        let live = self.live();
        let VolumeRecord { qos, group, min_qos, .. } =
            live.state.volumes.get(uuid).cloned().unwrap_or_default();
        let mut throttles = vec![throttle(&qos)];
        throttles.extend(group.as_ref().and_then(|group| live.groups.get(group).cloned()));
        (throttles, Arc::new(Throttle::new(min_limits(&min_qos))))
    }
}
