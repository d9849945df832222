//! Errors of the library as Python exceptions, all of them with errno and sentence.

use pyo3::prelude::*;

pyo3::import_exception!(blkio._errors, Error);
pyo3::import_exception!(blkio._errors, ClosedError);

/// `ENODEV`, for what was closed.
const ENODEV: i32 = 19;

/// `EBUSY`, for what another thread uses.
const EBUSY: i32 = 16;

/// The exception for an error of the library.
pub fn raised(error: blkio::Error) -> PyErr {
    Error::new_err((error.errno(), error.message().to_owned()))
}

/// The exception for the use of a closed object.
pub fn closed(what: &str) -> PyErr {
    ClosedError::new_err((ENODEV, format!("the {what} is closed")))
}

/// The exception for the use of an object by two threads.
pub fn in_use(what: &str) -> PyErr {
    Error::new_err((EBUSY, format!("the {what} is in use by another thread")))
}
