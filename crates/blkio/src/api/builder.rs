//! A device before it is started: what the user says, and what the device says.

use super::{Device, Property};
use crate::{Instance, Result, Value};
use std::sync::Arc;

/// A device that is being described.
pub struct Builder {
    instance: Instance,
    /// Properties that can be set only when the device is connected.
    tuning: Vec<(String, Value)>,
}

impl Builder {
    /// A device of the driver of that name.
    ///
    /// # Errors
    /// `ENOENT` when there is none, `ENOSYS` when this system lacks what it needs.
    pub fn new(driver: &str) -> Result<Builder> {
        Ok(Builder { instance: Instance::create(driver)?, tuning: Vec::new() })
    }

    /// Sets a property; text is converted to its type. A property that can be set only when the
    /// device is connected is kept until then.
    ///
    /// # Errors
    /// `ENOENT` unknown, `ENOTTY` wrong type, `EACCES` read-only, `EINVAL` a value that cannot be.
    pub fn set(mut self, name: &str, value: impl Into<Value>) -> Result<Builder> {
        self.put(name, value)?;
        Ok(self)
    }

    /// As [`Builder::set`], in place.
    ///
    /// # Errors
    /// As [`Builder::set`].
    pub fn put(&mut self, name: &str, value: impl Into<Value>) -> Result<()> {
        let value = value.into();
        match self.instance.set(name, value.clone()) {
            Err(error) if error.errno() == libc::ENODEV => {
                self.tuning.push((name.to_owned(), value));
                Ok(())
            }
            result => result,
        }
    }

    /// A property's value.
    ///
    /// # Errors
    /// `ENOENT` unknown, `ENODEV` not known before the device is connected, `ENOTTY` of another
    /// type.
    pub fn get<T: Property>(&self, name: &str) -> Result<T> {
        T::from_value(name, self.value(name)?)
    }

    /// A property's value, of whatever type it is.
    ///
    /// # Errors
    /// `ENOENT` unknown, `ENODEV` not known before the device is connected.
    pub fn value(&self, name: &str) -> Result<Value> {
        self.instance.get(name)
    }

    /// The names of the driver's properties.
    pub fn property_names(&self) -> impl Iterator<Item = &'static str> {
        self.instance.property_names()
    }

    /// Returns a function that another thread can call to make [`Builder::connect`] fail soon;
    /// `None` if connecting cannot take long.
    pub fn canceller(&self) -> Option<Arc<dyn Fn() + Send + Sync>> {
        self.instance.canceller()
    }

    /// Opens the device.
    ///
    /// # Errors
    /// Names the property that is wrong, or the device's error.
    pub fn connect(mut self) -> Result<Connected> {
        self.instance.connect()?;
        let connected = Connected { instance: self.instance };
        self.tuning.into_iter().try_fold(connected, |connected, (name, value)| connected.set(&name, value))
    }

    /// Opens the device and its queues: [`Builder::connect`] and [`Connected::start`].
    ///
    /// # Errors
    /// As these.
    pub fn start(self) -> Result<Device> {
        self.connect()?.start()
    }
}

/// An open device that has told its properties, and has no queues yet.
pub struct Connected {
    instance: Instance,
}

impl Connected {
    /// Sets a property, as [`Builder::set`].
    ///
    /// # Errors
    /// `ENOENT` unknown, `ENOTTY` wrong type, `EACCES` read-only, `EBUSY` too late, `EINVAL` a
    /// value that cannot be.
    pub fn set(mut self, name: &str, value: impl Into<Value>) -> Result<Connected> {
        self.put(name, value)?;
        Ok(self)
    }

    /// As [`Connected::set`], in place.
    ///
    /// # Errors
    /// As [`Connected::set`].
    pub fn put(&mut self, name: &str, value: impl Into<Value>) -> Result<()> {
        self.instance.set(name, value.into())
    }

    /// A property's value.
    ///
    /// # Errors
    /// `ENOENT` unknown, `ENOTTY` of another type.
    pub fn get<T: Property>(&self, name: &str) -> Result<T> {
        T::from_value(name, self.value(name)?)
    }

    /// A property's value, of whatever type it is.
    ///
    /// # Errors
    /// `ENOENT` unknown.
    pub fn value(&self, name: &str) -> Result<Value> {
        self.instance.get(name)
    }

    /// The names of the driver's properties.
    pub fn property_names(&self) -> impl Iterator<Item = &'static str> {
        self.instance.property_names()
    }

    /// Makes `num-queues` queues and `num-poll-queues` poll queues.
    ///
    /// # Errors
    /// `EINVAL` for numbers of queues that the device does not have; what the device refuses.
    pub fn start(mut self) -> Result<Device> {
        self.instance.start()?;
        Device::new(self.instance)
    }
}

impl std::fmt::Debug for Builder {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder").field("tuning", &self.tuning).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Connected {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Connected").finish_non_exhaustive()
    }
}
