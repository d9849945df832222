//! The open objects, as the API reports them.

use super::Live;
use crate::state::{ArrayRecord, DeviceRecord};
use api::{Array, ArrayState, Device};

impl Live {
    /// A device.
    pub fn device_report(&self, record: &DeviceRecord) -> Device {
        let DeviceRecord { name, spec, .. } = record;
        let base = self.base(name);
        let limits = base.as_ref().ok().map(|base| base.device.limits());
        let (volumes, free_bytes) = self.volumes_on(name);
        Device {
            name: name.clone(),
            spec: spec.clone(),
            capacity_bytes: limits.as_ref().map(|limits| limits.capacity),
            block_bytes: limits.as_ref().map(|limits| limits.block_size),
            read_only: limits.is_some_and(|limits| limits.read_only),
            free_bytes,
            full_in_s: None,
            volumes,
            exports: self.exports_of_base(name),
            error: base.err().map(|error| error.to_string()),
            drive: None,
        }
    }

    /// An array, which may not run.
    pub fn array_report(&self, record: &ArrayRecord) -> Array {
        let (volumes, free_bytes) = self.volumes_on(&record.name);
        let exports = self.exports_of_base(&record.name);
        let mut array = match self.arrays.get(&record.name) {
            Some(running) => running.report(),
            None => offline_array(record),
        };
        array.error = self.base(&record.name).err().map(|error| error.to_string());
        Array { volumes, free_bytes, exports, ..array }
    }
}

fn offline_array(record: &ArrayRecord) -> Array {
    Array {
        name: record.name.clone(),
        uuid: record.uuid.clone(),
        state: ArrayState::Offline,
        redundancy_left: None,
        is_running: false,
        is_clean: false,
        generation: 0,
        level: None,
        consistency: None,
        groups: 0,
        data: 0,
        parity: 0,
        strip_bytes: 0,
        block_bytes: 0,
        capacity_bytes: 0,
        free_bytes: None,
        full_in_s: None,
        reshape: None,
        members: Vec::new(),
        spares: Vec::new(),
        jobs: Vec::new(),
        scrub: None,
        contradictions: 0,
        scrub_period_s: 0,
        scrub_window: None,
        is_scheduled_scrub: false,
        last_scrub_ns: None,
        next_scrub_ns: None,
        read_error_budget: 0,
        volumes: Vec::new(),
        exports: Vec::new(),
        error: None,
    }
}
