//! A device in each of its states.

use crate::buffer::{self, Buffer};
use crate::error::{closed, in_use, raised};
use crate::queue::Queue;
use blkio::{Builder, Connected, Value};
use pyo3::prelude::*;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// A device from its description to its end.
#[pyclass(frozen, module = "blkio._blkio")]
pub struct Device(Mutex<Stage>);

enum Stage {
    Created(Builder),
    Connected(Connected),
    Started(blkio::Device),
    /// In another thread's hands.
    Busy,
    Closed,
}

impl Device {
    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a change of state that may wait. After an error the device is closed.
    fn change(
        &self,
        py: Python<'_>,
        change: impl FnOnce(Stage) -> blkio::Result<Stage> + Send,
    ) -> PyResult<()> {
        let stage = std::mem::replace(&mut *self.stage(), Stage::Busy);
        match stage {
            Stage::Busy => Err(in_use("device")),
            Stage::Closed => {
                *self.stage() = Stage::Closed;
                Err(closed("device"))
            }
            stage => {
                let result = py.detach(|| change(stage));
                let (stage, result) = match result {
                    Ok(stage) => (stage, Ok(())),
                    Err(error) => (Stage::Closed, Err(raised(error))),
                };
                *self.stage() = stage;
                result
            }
        }
    }

    fn started(&self) -> PyResult<blkio::Device> {
        match &*self.stage() {
            Stage::Started(device) => Ok(device.clone()),
            Stage::Busy => Err(in_use("device")),
            Stage::Closed => Err(closed("device")),
            Stage::Created(_) | Stage::Connected(_) => {
                Err(raised(blkio::Error::new(EBUSY, "the device is not started")))
            }
        }
    }
}

const EBUSY: i32 = 16;

#[pymethods]
impl Device {
    #[new]
    fn new(driver: &str) -> PyResult<Device> {
        Ok(Device(Mutex::new(Stage::Created(Builder::new(driver).map_err(raised)?))))
    }

    #[getter]
    fn state(&self) -> &'static str {
        match &*self.stage() {
            Stage::Created(_) => "created",
            Stage::Connected(_) => "connected",
            Stage::Started(_) => "started",
            Stage::Busy => "busy",
            Stage::Closed => "closed",
        }
    }

    fn names(&self) -> PyResult<Vec<&'static str>> {
        match &*self.stage() {
            Stage::Created(builder) => Ok(builder.property_names().collect()),
            Stage::Connected(connected) => Ok(connected.property_names().collect()),
            Stage::Started(device) => Ok(device.property_names()),
            Stage::Busy => Err(in_use("device")),
            Stage::Closed => Err(closed("device")),
        }
    }

    fn get(&self, py: Python<'_>, name: &str) -> PyResult<Py<PyAny>> {
        let value = match &*self.stage() {
            Stage::Created(builder) => builder.value(name),
            Stage::Connected(connected) => connected.value(name),
            Stage::Started(device) => device.value(name),
            Stage::Busy => return Err(in_use("device")),
            Stage::Closed => return Err(closed("device")),
        };
        Ok(match value.map_err(raised)? {
            Value::Bool(value) => value.into_pyobject(py)?.to_owned().into_any().unbind(),
            Value::Int(value) => value.into_pyobject(py)?.into_any().unbind(),
            Value::Uint64(value) => value.into_pyobject(py)?.into_any().unbind(),
            Value::Str(value) => value.into_pyobject(py)?.into_any().unbind(),
        })
    }

    /// Sets a property to what the text means.
    fn set(&self, name: &str, value: &str) -> PyResult<()> {
        let result = match &mut *self.stage() {
            Stage::Created(builder) => builder.put(name, value),
            Stage::Connected(connected) => connected.put(name, value),
            Stage::Started(_) => {
                let message = format!("property {name} cannot be set once the device is started");
                Err(blkio::Error::new(EBUSY, message))
            }
            Stage::Busy => return Err(in_use("device")),
            Stage::Closed => return Err(closed("device")),
        };
        result.map_err(raised)
    }

    fn connect(&self, py: Python<'_>) -> PyResult<()> {
        self.change(py, |stage| match stage {
            Stage::Created(builder) => builder.connect().map(Stage::Connected),
            stage => Ok(stage),
        })
    }

    fn start(&self, py: Python<'_>) -> PyResult<()> {
        self.change(py, |stage| match stage {
            Stage::Created(builder) => builder.start().map(Stage::Started),
            Stage::Connected(connected) => connected.start().map(Stage::Started),
            stage => Ok(stage),
        })
    }

    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let stage = std::mem::replace(&mut *self.stage(), Stage::Closed);
        if matches!(stage, Stage::Busy) {
            *self.stage() = stage;
            return Err(in_use("device"));
        }
        py.detach(|| drop(stage));
        Ok(())
    }

    fn buffer(&self, length: usize) -> PyResult<Buffer> {
        buffer::allocate(&self.started()?, length)
    }

    fn queue(&self, py: Python<'_>, index: usize, is_poll: bool) -> PyResult<Queue> {
        let device = self.started()?;
        let open = || if is_poll { device.poll_queue(index) } else { device.queue(index) };
        py.detach(open).map(Queue::new).map_err(raised)
    }

    fn add_queue(&self, py: Python<'_>, is_poll: bool) -> PyResult<Queue> {
        let device = self.started()?;
        let open = || if is_poll { device.add_poll_queue() } else { device.add_queue() };
        py.detach(open).map(Queue::new).map_err(raised)
    }
}
