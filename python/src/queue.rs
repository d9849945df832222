//! A queue: requests go in with the Python objects of their memory, and come out as tuples.

use crate::buffer::Buffer;
use crate::error::{closed, in_use};
use blkio::{Completion, Memory, Request, Token, ZoneAction};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::collections::HashMap;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::{Duration, Instant};

/// How long a wait may keep a signal's Python handler from running.
const SLICE: Duration = Duration::from_millis(100);

/// A queue, for one thread at a time.
#[pyclass(frozen, module = "blkio._blkio")]
pub struct Queue(Mutex<Option<Open>>);

struct Open {
    queue: blkio::Queue,
    /// The Python objects whose memory requests in flight have.
    buffers: HashMap<Token, Vec<Py<Buffer>>>,
}

/// Token, errno or 0, sentence, and the zones of a report: start, length, capacity, write pointer,
/// type, state, whether a reset is wanted.
type Ended = (u64, i32, String, Vec<(u64, u64, u64, u64, u8, u8, bool)>);

impl Queue {
    pub fn new(queue: blkio::Queue) -> Queue {
        Queue(Mutex::new(Some(Open { queue, buffers: HashMap::new() })))
    }

    fn lock(&self) -> PyResult<MutexGuard<'_, Option<Open>>> {
        match self.0.try_lock() {
            Ok(guard) => Ok(guard),
            Err(TryLockError::Poisoned(error)) => Ok(error.into_inner()),
            Err(TryLockError::WouldBlock) => Err(in_use("queue")),
        }
    }

    fn with<T>(&self, call: impl FnOnce(&mut Open) -> PyResult<T>) -> PyResult<T> {
        call(self.lock()?.as_mut().ok_or_else(|| closed("queue"))?)
    }
}

fn flagged<P>(request: Request<P>, flags: u32) -> Request<P> {
    let request = if flags & 1 != 0 { request.fua() } else { request };
    let request = if flags & 2 != 0 { request.no_unmap() } else { request };
    if flags & 4 != 0 { request.no_fallback() } else { request }
}

/// The memory of all buffers, or of none.
fn take_all(buffers: &[Py<Buffer>]) -> PyResult<Vec<blkio::Buffer>> {
    let mut taken = Vec::with_capacity(buffers.len());
    for buffer in buffers {
        match buffer.get().take() {
            Ok(memory) => taken.push(memory),
            Err(error) => {
                buffers.iter().zip(taken).for_each(|(buffer, memory)| buffer.get().put(memory));
                return Err(error);
            }
        }
    }
    Ok(taken)
}

#[pymethods]
impl Queue {
    /// Enqueues a read or write of all of the buffers.
    fn transfer(&self, is_write: bool, offset: u64, buffers: Vec<Py<Buffer>>, flags: u32) -> PyResult<u64> {
        self.with(|open| {
            let memory = take_all(&buffers)?;
            let request = match is_write {
                true => Request::write_vectored(offset, memory),
                false => Request::read_vectored(offset, memory),
            };
            let token = open.queue.submit(flagged(request, flags));
            open.buffers.insert(token, buffers);
            Ok(token.into())
        })
    }

    /// Enqueues `flush`, `discard` or `write_zeroes`.
    fn operate(&self, operation: &str, offset: u64, length: u64, flags: u32) -> PyResult<u64> {
        let request = match operation {
            "flush" => Request::flush(),
            "discard" => Request::discard(offset, length),
            "write_zeroes" => Request::write_zeroes(offset, length),
            other => return Err(PyValueError::new_err(format!("unknown operation '{other}'"))),
        };
        self.with(|open| Ok(open.queue.submit(flagged(request, flags)).into()))
    }

    /// Enqueues a report of up to `maximum` zones.
    fn report_zones(&self, offset: u64, maximum: u32) -> PyResult<u64> {
        self.with(|open| Ok(open.queue.submit(Request::report_zones(offset, maximum)).into()))
    }

    /// Enqueues a change of a zone, or of all.
    fn manage_zones(&self, action: &str, offset: Option<u64>) -> PyResult<u64> {
        let action = match action {
            "close" => ZoneAction::Close,
            "finish" => ZoneAction::Finish,
            "open" => ZoneAction::Open,
            "reset" => ZoneAction::Reset,
            other => {
                let message = format!("'{other}' is none of close, finish, open and reset");
                return Err(PyValueError::new_err(message));
            }
        };
        let request = match offset {
            Some(offset) => Request::manage_zone(action, offset),
            None => Request::manage_all_zones(action),
        };
        self.with(|open| Ok(open.queue.submit(request).into()))
    }

    /// Submits, waits for `minimum` completions (or as many as there can be, or `timeout` seconds),
    /// and returns all that there are.
    #[pyo3(signature = (minimum, timeout))]
    fn complete(&self, py: Python<'_>, minimum: usize, timeout: Option<f64>) -> PyResult<Vec<Ended>> {
        let invalid = |_| PyValueError::new_err(format!("a timeout of {} s", timeout.unwrap_or_default()));
        let timeout = timeout.map(Duration::try_from_secs_f64).transpose().map_err(invalid)?;
        // A time that no clock reaches is none.
        let deadline = timeout.and_then(|timeout| Instant::now().checked_add(timeout));
        self.with(|open| {
            wait(py, &mut open.queue, minimum, deadline)?;
            let completions = open.queue.poll().map_err(crate::error::raised)?;
            Ok(completions.map(|completion| ended(completion, &mut open.buffers)).collect())
        })
    }

    /// How many requests were not returned by `complete` yet.
    #[getter]
    fn outstanding(&self) -> PyResult<usize> {
        self.with(|open| Ok(open.queue.outstanding()))
    }

    /// The completion descriptor; -1 for a poll queue.
    fn fileno(&self) -> PyResult<RawFd> {
        self.with(|open| Ok(open.queue.completion_fd().map_or(-1, |fd| fd.as_raw_fd())))
    }

    /// Switches events on the completion descriptor on or off.
    fn enable_events(&self, enable: bool) -> PyResult<()> {
        self.with(|open| {
            open.queue.enable_events(enable);
            Ok(())
        })
    }

    /// Closes it, after what is in flight has ended.
    fn close(&self, py: Python<'_>) -> PyResult<()> {
        let open = self.lock()?.take();
        if let Some(Open { queue, buffers }) = open {
            py.detach(|| drop(queue));
            drop(buffers);
        }
        Ok(())
    }
}

impl Drop for Queue {
    /// Waits for the device without the interpreter lock: what the device waits for may be another
    /// thread of Python.
    fn drop(&mut self) {
        let open = self.0.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        if let Some(Open { queue, buffers }) = open {
            Python::attach(|py| py.detach(|| drop(queue)));
            drop(buffers);
        }
    }
}

/// Waits in slices, between which handlers of signals run.
fn wait(py: Python<'_>, queue: &mut blkio::Queue, minimum: usize, deadline: Option<Instant>) -> PyResult<()> {
    loop {
        let left = deadline.map_or(SLICE, |deadline| deadline.saturating_duration_since(Instant::now()));
        let minimum = minimum.min(queue.outstanding());
        let waited = py.detach(|| queue.wait_timeout(minimum, left.min(SLICE)).map(|ended| ended.len()));
        if waited.map_err(crate::error::raised)? >= minimum || left.is_zero() {
            return Ok(());
        }
        py.check_signals()?;
    }
}

/// Gives the memory back to its Python objects.
fn ended(completion: Completion, buffers: &mut HashMap<Token, Vec<Py<Buffer>>>) -> Ended {
    let Completion { token, result, memory } = completion;
    let mut zones = Vec::new();
    match memory {
        Memory::None => {}
        Memory::One(_) => unreachable!("all transfers are vectored"),
        Memory::Many(all) => {
            let objects = buffers.remove(&token).unwrap_or_default();
            objects.iter().zip(all).for_each(|(object, buffer)| object.get().put(buffer));
        }
        Memory::Zones(all) => {
            let fields = |z: blkio::Zone| {
                (z.start, z.len, z.capacity, z.write_pointer, z.zone_type, z.zone_state, z.reset != 0)
            };
            zones = all.into_iter().map(fields).collect();
        }
    }
    match result {
        Ok(()) => (token.into(), 0, String::new(), zones),
        Err(error) => (token.into(), error.errno(), error.message().to_owned(), Vec::new()),
    }
}
