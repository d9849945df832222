//! Volumes that exports have open.

use super::{Engine, min_limits, throttle};
use crate::api_error::ApiError;
use crate::state::VolumeRecord;
use block::Device;
use layers::migrate::Migratable;
use layers::qos::{Qos, Throttle, Waits};
use std::sync::Arc;

/// A volume that exports serve, all of them the same: its limits hold for them together.
pub struct OpenVolume {
    /// The device of exports: counted, limited, and independent of the pool that holds the volume.
    pub device: Arc<Migratable>,
    /// Its limits.
    pub limits: VolumeLimits,
}

/// The limits of a volume, wherever it lies.
pub struct VolumeLimits {
    /// Its own limits, then those of its group.
    pub throttles: Vec<Arc<Throttle>>,
    /// Its guaranteed minimum of its group's limits.
    pub floor: Arc<Throttle>,
    /// Waits of its requests for its limits and those of its group.
    pub waits: Arc<Waits>,
}

impl VolumeLimits {
    /// A place of the volume under these limits.
    pub fn over(&self, place: Arc<dyn Device>) -> Arc<dyn Device> {
        let limited = Qos::new(place, self.throttles.clone());
        Arc::new(limited.with_floor(self.floor.clone()).with_waits(self.waits.clone()))
    }
}

impl Engine {
    /// The device by which exports serve a volume: one for all of them.
    pub(super) fn open_volume(&self, uuid: &str) -> Result<Arc<OpenVolume>, ApiError> {
        let (_, pool, info) = self.live().volume(uuid)?;
        self.live().check_place_is_known(&info.uuid.to_string())?;
        if let Some(open) = self.live().volumes.get(&info.uuid).and_then(|open| open.upgrade()) {
            return Ok(open);
        }
        let limits = self.limits_of(uuid);
        let mut device = Migratable::new(limits.over(pool.open_volume(uuid)?));
        let known_as = self.live().state.volumes.get(uuid).and_then(|record| record.device_name.clone());
        if let Some(name) = known_as {
            device = device.named(name);
        }
        let open = Arc::new(OpenVolume { device: Arc::new(device), limits });
        self.live_mut().volumes.insert(info.uuid, Arc::downgrade(&open));
        Ok(open)
    }

    /// The limits of a volume and of its group, and its guaranteed minimum.
    pub(super) fn limits_of(&self, uuid: &str) -> VolumeLimits {
        let live = self.live();
        let VolumeRecord { qos, group, min_qos, .. } =
            live.state.volumes.get(uuid).cloned().unwrap_or_default();
        let mut throttles = vec![throttle(&qos)];
        throttles.extend(group.as_ref().and_then(|group| live.groups.get(group).cloned()));
        let floor = Arc::new(Throttle::new(min_limits(&min_qos)));
        VolumeLimits { throttles, floor, waits: Arc::default() }
    }
}
