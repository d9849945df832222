//! Connecting and starting without waiting: an extension for event-driven programs and devices on a
//! network.
//!
//! ```text
//!   blkio_connect_begin() ─► a thread of its own ─► blkio_get_control_fd() becomes readable ─► blkio_control_result()
//! ```
//!
//! While an operation runs, every other function answers `EBUSY` at once.

use super::{Blkio, report};
use crate::{Error, Instance, Result};
use std::ffi::c_int;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The control operation of an instance.
#[derive(Default)]
pub(super) struct Control(Arc<Mutex<Progress>>);

#[derive(Default)]
struct Progress {
    /// Readable from the end of an operation until its result was fetched; made with the first
    /// operation.
    event: Option<OwnedFd>,
    stage: Stage,
    cancel: Option<Arc<dyn Fn() + Send + Sync>>,
    is_cancelled: bool,
}

#[derive(Default)]
enum Stage {
    #[default]
    Idle,
    Running,
    Ended(Result<()>),
}

impl Control {
    pub fn is_running(&self) -> bool {
        matches!(self.progress().stage, Stage::Running)
    }

    /// Makes a running operation end soon, with `ECANCELED`.
    pub fn cancel(&self) {
        let cancel = {
            let mut progress = self.progress();
            if !matches!(progress.stage, Stage::Running) {
                return;
            }
            progress.is_cancelled = true;
            progress.cancel.clone()
        };
        if let Some(cancel) = cancel {
            cancel();
        }
    }

    fn progress(&self) -> MutexGuard<'_, Progress> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(
        &self,
        instance: &Arc<Mutex<Instance>>,
        operation: fn(&mut Instance) -> Result<()>,
    ) -> Result<()> {
        let mut progress = self.progress();
        match progress.stage {
            Stage::Running => {
                return Err(Error::new(libc::EBUSY, "a control operation is running on the instance"));
            }
            Stage::Ended(_) => {
                let message = "the result of the last control operation was not fetched";
                return Err(Error::new(libc::EBUSY, message));
            }
            Stage::Idle => {}
        }
        if progress.event.is_none() {
            progress.event = Some(eventfd()?);
        }
        progress.cancel = instance.lock().unwrap_or_else(PoisonError::into_inner).canceller();
        progress.is_cancelled = false;
        let (instance, shared) = (instance.clone(), self.0.clone());
        let work = move || {
            let result = operation(&mut instance.lock().unwrap_or_else(PoisonError::into_inner));
            end(&shared, result);
        };
        reactor::spawn_thread("blkio-control", work)
            .map_err(|e| Error::os("cannot start a thread for the control operation", &e))?;
        progress.stage = Stage::Running;
        Ok(())
    }

    fn result(&self) -> Result<()> {
        let mut progress = self.progress();
        match std::mem::take(&mut progress.stage) {
            Stage::Ended(result) => {
                if let Some(event) = &progress.event {
                    let mut counter = 0u64;
                    // SAFETY: eight bytes of our own; the descriptor does not block.
                    unsafe { libc::read(event.as_raw_fd(), (&raw mut counter).cast(), 8) };
                }
                result
            }
            Stage::Running => {
                progress.stage = Stage::Running;
                Err(Error::new(libc::EAGAIN, "the control operation is still running"))
            }
            Stage::Idle => Err(Error::new(libc::ENOENT, "no control operation was begun")),
        }
    }
}

fn end(shared: &Mutex<Progress>, result: Result<()>) {
    let mut progress = shared.lock().unwrap_or_else(PoisonError::into_inner);
    let is_cancelled = progress.is_cancelled && result.is_err();
    let cancelled = || Error::new(libc::ECANCELED, "the control operation was cancelled");
    progress.stage = Stage::Ended(if is_cancelled { Err(cancelled()) } else { result });
    progress.cancel = None;
    if let Some(event) = &progress.event {
        // SAFETY: eight bytes of our own.
        unsafe { libc::write(event.as_raw_fd(), (&raw const ONE_EVENT).cast(), 8) };
    }
}

static ONE_EVENT: u64 = 1;

fn eventfd() -> Result<OwnedFd> {
    // SAFETY: no pointer is passed.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) };
    if fd < 0 {
        return Err(Error::os("eventfd", &std::io::Error::last_os_error()));
    }
    // SAFETY: a fresh descriptor without another owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// # Safety
/// `b` is null or came from `blkio_create()`.
unsafe fn control(b: *mut Blkio, call: impl FnOnce(&Blkio) -> Result<c_int>) -> c_int {
    // SAFETY: by contract.
    let blkio = unsafe { b.as_ref() }.ok_or_else(|| Error::new(libc::EINVAL, "the blkio pointer is null"));
    blkio.and_then(call).unwrap_or_else(report)
}

/// `int blkio_connect_begin(struct blkio *b)`: `blkio_connect()` without waiting.
///
/// # Safety
/// `b` came from `blkio_create()`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_connect_begin(b: *mut Blkio) -> c_int {
    // SAFETY: by contract.
    unsafe { control(b, |blkio| blkio.control.begin(&blkio.instance, Instance::connect).map(|()| 0)) }
}

/// `int blkio_start_begin(struct blkio *b)`: `blkio_start()` without waiting.
///
/// # Safety
/// `b` came from `blkio_create()`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_start_begin(b: *mut Blkio) -> c_int {
    // SAFETY: by contract.
    unsafe { control(b, |blkio| blkio.control.begin(&blkio.instance, Instance::start).map(|()| 0)) }
}

/// `int blkio_get_control_fd(struct blkio *b)`: readable once the operation has ended, until its
/// result was fetched; `-ENOENT` before the first operation.
///
/// # Safety
/// `b` came from `blkio_create()`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_get_control_fd(b: *mut Blkio) -> c_int {
    let fd = |blkio: &Blkio| {
        let fd = blkio.control.progress().event.as_ref().map(AsRawFd::as_raw_fd);
        fd.ok_or_else(|| Error::new(libc::ENOENT, "no control operation was begun"))
    };
    // SAFETY: by contract.
    unsafe { control(b, fd) }
}

/// `int blkio_control_result(struct blkio *b)`: what `blkio_connect()` or `blkio_start()` would
/// have returned; `-EAGAIN` while it runs, `-ENOENT` when there is none.
///
/// # Safety
/// `b` came from `blkio_create()`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_control_result(b: *mut Blkio) -> c_int {
    // SAFETY: by contract.
    unsafe { control(b, |blkio| blkio.control.result().map(|()| 0)) }
}

/// `int blkio_cancel(struct blkio *b)`: makes the operation end soon; its result is then
/// `-ECANCELED`, unless it was faster.
///
/// # Safety
/// `b` came from `blkio_create()`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn blkio_cancel(b: *mut Blkio) -> c_int {
    let cancel = |blkio: &Blkio| {
        blkio.control.cancel();
        Ok(0)
    };
    // SAFETY: by contract.
    unsafe { control(b, cancel) }
}
