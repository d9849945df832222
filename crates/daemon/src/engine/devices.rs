//! Devices: leaves that were registered.

use super::bases::Base;
use super::{Engine, checks};
use crate::confinement::keep_device;
use crate::fault::Fault;
use crate::state::DeviceRecord;
use api::{Device, NewDevice};
use graph::kinds::raid::member;
use graph::patience::patiently;
use sandbox::Profile;

/// A device that is open, and not registered yet.
struct PlannedDevice {
    record: DeviceRecord,
    base: Base,
}

impl PlannedDevice {
    fn commit(self, engine: &Engine) -> Result<(), Fault> {
        let PlannedDevice { record, base } = self;
        let DeviceRecord { name, spec } = record.clone();
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
        live.state.devices.iter().map(|record| live.device_report(record)).collect()
    }

    /// The device with this name.
    ///
    /// # Errors
    /// When there is none.
    pub fn device(&self, name: &str) -> Result<Device, Fault> {
        let live = self.live();
        let record = live.state.devices.iter().find(|device| device.name == name);
        record.map(|record| live.device_report(record)).ok_or_else(|| Fault::not_found("device", name))
    }

    /// Opens a device, now and at every start.
    ///
    /// # Errors
    /// When the name is taken, the specification makes no sense, or the device cannot be opened.
    pub fn create_device(&self, new: &NewDevice) -> Result<Device, Fault> {
        let _alone = self.change();
        self.plan_device(new)?.commit(self)?;
        self.device(&new.name)
    }

    fn plan_device(&self, new: &NewDevice) -> Result<PlannedDevice, Fault> {
        checks::device(new)?;
        self.check_is_new(&new.name)?;
        let record = DeviceRecord { name: new.name.clone(), spec: new.spec.clone() };
        self.check_is_open(&record.spec).map_err(|fault| fault.about(&format!("device {}", new.name)))?;
        let base = self.open_device(&record)?;
        Ok(PlannedDevice { record, base })
    }

    /// Closes a device that nothing is on, and forgets it. What it holds stays as it is.
    ///
    /// # Errors
    /// When there is none, or it is in use.
    pub fn delete_device(
        &self,
        name: &str,
        check: impl FnOnce(&Device) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let _alone = self.change();
        check(&self.device(name)?)?;
        self.live().check_is_unused(name)?;
        self.commit(|state| state.devices.retain(|device| device.name != name))?;
        let base = self.live_mut().bases.remove(name);
        drop(base); // not under the lock: closing may wait
        self.events.emit("device", name, "deleted", "closed and forgotten");
        Ok(())
    }

    /// Checks that the sandbox lets a device or member be opened: a path or a specification.
    pub(super) fn check_is_open(&self, text: &str) -> Result<(), Fault> {
        let mut needs = Profile::default();
        keep_device(text, &mut needs);
        self.confined.check(&needs)
    }

    /// Opens a device as its record says.
    pub(super) fn open_device(&self, record: &DeviceRecord) -> Result<Base, Fault> {
        let config = member(&record.spec, true, false)?;
        let device = patiently(graph::is_in_use, || config.open())?;
        self.open_base(&record.name, device)
    }
}
