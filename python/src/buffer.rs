//! Memory of the device as a Python object with the buffer protocol.

use crate::error::raised;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi;
use pyo3::prelude::*;
use pyo3::types::PyMemoryView;
use std::ffi::c_int;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Memory for requests. While a request has it, Python does not; while Python views it, no request
/// gets it.
#[pyclass(frozen, module = "blkio")]
pub struct Buffer(Mutex<State>);

struct State {
    /// `None` while a request has it.
    buffer: Option<blkio::Buffer>,
    /// How many views of the memory there are.
    views: usize,
}

impl Buffer {
    pub fn new(buffer: blkio::Buffer) -> Buffer {
        Buffer(Mutex::new(State { buffer: Some(buffer), views: 0 }))
    }

    /// Takes the memory for a request.
    ///
    /// # Errors
    /// `BufferError` while another request has it, or it is viewed.
    pub fn take(&self) -> PyResult<blkio::Buffer> {
        let mut state = self.state();
        state.check_unviewed("use it for a request")?;
        state.buffer.take().ok_or_else(in_flight)
    }

    /// Gives the memory back.
    pub fn put(&self, buffer: blkio::Buffer) {
        self.state().buffer = Some(buffer);
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn check_unviewed(&self, purpose: &str) -> PyResult<()> {
        match self.views {
            0 => Ok(()),
            views => {
                let message = format!("{views} views of the buffer exist; release them to {purpose}");
                Err(PyBufferError::new_err(message))
            }
        }
    }
}

fn in_flight() -> PyErr {
    PyBufferError::new_err("the buffer belongs to a request in flight")
}

#[pymethods]
impl Buffer {
    fn __len__(&self) -> PyResult<usize> {
        self.state().buffer.as_deref().map(<[u8]>::len).ok_or_else(in_flight)
    }

    /// Most bytes that it can be resized to.
    #[getter]
    fn capacity(&self) -> PyResult<usize> {
        self.state().buffer.as_ref().map(blkio::Buffer::capacity).ok_or_else(in_flight)
    }

    /// Whether a request has it.
    #[getter]
    fn in_flight(&self) -> bool {
        self.state().buffer.is_none()
    }

    /// Changes the length, up to the capacity.
    fn resize(&self, length: usize) -> PyResult<()> {
        let mut state = self.state();
        state.check_unviewed("resize it")?;
        let buffer = state.buffer.as_mut().ok_or_else(in_flight)?;
        if length > buffer.capacity() {
            let message = format!("a length of {length} in a buffer of {} bytes", buffer.capacity());
            return Err(PyValueError::new_err(message));
        }
        buffer.resize(length);
        Ok(())
    }

    fn __getitem__<'py>(slf: &Bound<'py, Self>, key: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        let item = PyMemoryView::from(slf)?.get_item(key)?;
        if item.is_instance_of::<PyMemoryView>() { item.call_method0("tobytes") } else { Ok(item) }
    }

    fn __setitem__(slf: &Bound<'_, Self>, key: &Bound<'_, PyAny>, value: &Bound<'_, PyAny>) -> PyResult<()> {
        PyMemoryView::from(slf)?.set_item(key, value)
    }

    fn __repr__(&self) -> String {
        match &self.state().buffer {
            Some(buffer) => format!("<blkio.Buffer of {} bytes>", buffer.len()),
            None => "<blkio.Buffer in flight>".into(),
        }
    }

    /// # Safety
    /// `view` is what Python passes to `bf_getbuffer`.
    unsafe fn __getbuffer__(slf: Bound<'_, Self>, view: *mut ffi::Py_buffer, flags: c_int) -> PyResult<()> {
        let mut state = slf.get().state();
        let Some(buffer) = &mut state.buffer else {
            // SAFETY: by contract; Python wants it null after an error.
            unsafe { (*view).obj = std::ptr::null_mut() };
            return Err(in_flight());
        };
        let (start, len) = (buffer.as_mut_ptr(), buffer.len());
        // SAFETY: the memory stays where it is, and as long as it is, while views are counted.
        let status = unsafe {
            ffi::PyBuffer_FillInfo(view, slf.as_ptr(), start.cast(), len as ffi::Py_ssize_t, 0, flags)
        };
        if status != 0 {
            return Err(PyErr::fetch(slf.py()));
        }
        state.views += 1;
        Ok(())
    }

    /// # Safety
    /// As Python calls `bf_releasebuffer`: once for each view.
    unsafe fn __releasebuffer__(&self, _view: *mut ffi::Py_buffer) {
        self.state().views -= 1;
    }
}

/// A new buffer of the device.
///
/// # Errors
/// The device's own error.
pub fn allocate(device: &blkio::Device, length: usize) -> PyResult<Buffer> {
    device.buffer(length).map(Buffer::new).map_err(raised)
}
