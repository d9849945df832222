//! The native half of the Python package `blkio`: the safe Rust API as Python objects.
//!
//! The package's Python half (`blkio/*.py`) is what programs use. Here is what needs the other
//! side: devices, queues, and buffers that Python sees as memory while no request has them.
//!
//! Waiting happens without the interpreter lock. The lock of a queue is tried and never waited for,
//! so that a signal handler that uses a queue in use gets an exception.

mod buffer;
mod device;
mod error;
mod queue;

use pyo3::prelude::*;

/// `blkio._blkio`
#[pymodule]
fn _blkio(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_class::<device::Device>()?;
    module.add_class::<queue::Queue>()?;
    module.add_class::<buffer::Buffer>()
}
