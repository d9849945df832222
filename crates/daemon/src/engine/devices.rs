//! Devices: leaves that were registered.

use super::bases::Base;
use super::{Engine, Live, checks};
use crate::api_error::ApiError;
use crate::confinement::keep_device;
use crate::state::{DeviceRecord, Target};
use api::{Device, DeviceChange, NewDevice};
use layers::migrate::Migratable;
use sandbox::Profile;
use stack::kinds::device::open_with_image;
use stack::kinds::member::member;
use stack::kinds::qcow2::Opened;
use stack::retry::retry_while;
use std::sync::Arc;

/// A device that is open, and not registered yet.
struct PlannedDevice {
    record: DeviceRecord,
    base: Base,
}

impl PlannedDevice {
    fn commit(self, engine: &Engine) -> Result<(), ApiError> {
        let PlannedDevice { record, base } = self;
        let DeviceRecord { name, spec, .. } = record.clone();
        engine.commit(|state| state.devices.push(record))?;
        engine.live_mut().bases.insert(name.clone(), Ok(base));
        engine.events.emit("device", &name, "created", spec);
        Ok(())
    }
}

impl Engine {
    /// Every device.
    pub fn devices(&self) -> Vec<Device> {
        let live = self.live();
        live.state.devices.iter().map(|record| self.device_report(&live, record)).collect()
    }

    /// The device with this name.
    ///
    /// # Errors
    /// When there is none.
    pub fn device(&self, name: &str) -> Result<Device, ApiError> {
        let live = self.live();
        let record = live.state.devices.iter().find(|device| device.name == name);
        record
            .map(|record| self.device_report(&live, record))
            .ok_or_else(|| ApiError::not_found("device", name))
    }

    fn device_report(&self, live: &Live, record: &DeviceRecord) -> Device {
        let device = live.device_report(record);
        let full_in_s = self.full_in_s(&record.name, device.free_bytes);
        Device { drive: self.drives.of(&record.spec), full_in_s, ..device }
    }

    /// Opens a device, now and at every start. With a size, creates its image first; the image
    /// remains if it cannot be opened then.
    ///
    /// # Errors
    /// When the name is taken, the specification is invalid, or the device cannot be opened.
    pub fn create_device(&self, new: &NewDevice) -> Result<Device, ApiError> {
        let _alone = self.change();
        self.plan_device(new)?.commit(self)?;
        self.read_new_drives();
        self.device(&new.name)
    }

    fn plan_device(&self, new: &NewDevice) -> Result<PlannedDevice, ApiError> {
        let config = checks::device(new)?;
        self.check_is_new(&new.name)?;
        let record = DeviceRecord { name: new.name.clone(), spec: new.spec.clone(), device_name: None };
        self.check_is_open(&record.spec).map_err(|error| error.about(&format!("device {}", new.name)))?;
        if let Some(size) = new.size_bytes {
            checks::image(&*config)?.create(size)?;
        }
        let base = self.open_device(&record)?;
        self.live().check_volumes_are_new(&record.name, &base)?;
        Ok(PlannedDevice { record, base })
    }

    /// Grows the image of a device, and announces its size to clients.
    ///
    /// # Errors
    /// When there is none, it is not an image, or it would shrink.
    pub fn change_device(
        &self,
        name: &str,
        change: &DeviceChange,
        check: impl FnOnce(&Device) -> Result<(), ApiError>,
    ) -> Result<Device, ApiError> {
        let _alone = self.change();
        let device = self.device(name)?;
        check(&device)?;
        self.live().check_keeps_size(name, &Target::Device(name.into()))?;
        let config = member(&device.spec, true, false)?;
        let size = change.size_bytes;
        checks::image(&*config).map_err(|error| error.about(name))?.grow(size)?;
        self.refresh_one(name);
        self.events.emit("device", name, "grown", format!("{size} bytes"));
        self.device(name)
    }

    /// Closes an unused device and forgets it. Its content is kept.
    ///
    /// # Errors
    /// When there is none, or it is in use.
    pub fn delete_device(
        &self,
        name: &str,
        check: impl FnOnce(&Device) -> Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        let _alone = self.change();
        check(&self.device(name)?)?;
        self.live().check_is_unused(name)?;
        self.commit(|state| state.forget_base(name))?;
        let base = self.live_mut().bases.remove(name);
        drop(base); // not under the lock: closing may wait
        self.events.emit("device", name, "deleted", "closed and forgotten");
        Ok(())
    }

    /// Checks that the sandbox lets a device or member be opened: a path or a specification.
    pub(super) fn check_is_open(&self, text: &str) -> Result<(), ApiError> {
        let mut needs = Profile::default();
        keep_device(text, &mut needs);
        self.confined.check(&needs)
    }

    /// Opens a device as its record says.
    pub(super) fn open_device(&self, record: &DeviceRecord) -> Result<Base, ApiError> {
        let config = member(&record.spec, true, false)?;
        let Opened { device, live, backing_file } =
            retry_while(stack::is_in_use, || open_with_image(&record.spec, &*config))?;
        let mut base = Base { image: live, backing_file, ..self.open_base(&record.name, device)? };
        if let Some(name) = &record.device_name {
            base.served = Arc::new(Migratable::new(base.device.clone()).named(name.clone()));
        }
        Ok(base)
    }
}
