//! The control thread, which answers requests of the kernel.

use super::lock;
use super::session::Session;
use exports::Error;
use exports::stop::StopSignal;
use std::os::fd::AsRawFd;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;

/// The thread handles small messages, and a process may have many exports.
const STACK_BYTES: usize = 256 << 10;

/// The running control thread and its stop signal.
pub(super) struct Control {
    stop: Arc<StopSignal>,
    thread: JoinHandle<()>,
}

impl Control {
    pub(super) fn start(session: Arc<Mutex<Session>>, name: String) -> Result<Control, Error> {
        let failed = |source| Error::System { action: "start the export's control thread", source };
        let stop = Arc::new(StopSignal::new().map_err(failed)?);
        let thread = std::thread::Builder::new()
            .name("vduse".into())
            .stack_size(STACK_BYTES)
            .spawn({
                let stop = stop.clone();
                move || serve(&stop, &session, &name)
            })
            .map_err(failed)?;
        Ok(Control { stop, thread })
    }

    /// Ends the thread; virtqueues keep running.
    pub(super) fn stop(self) {
        self.stop.raise();
        if self.thread.join().is_err() {
            tracing::error!("the control thread of an export panicked");
        }
    }
}

fn serve(stop: &StopSignal, session: &Mutex<Session>, name: &str) {
    let (kernel, misses) = {
        let session = lock(session);
        (session.kernel().fd(), session.misses())
    };
    while let Some(place) = stop.wait_any([kernel, misses.as_raw_fd()]) {
        let mut session = lock(session);
        let handled = if place == 0 {
            match session.kernel().next_request() {
                Ok(Some(request)) => session.handle(request),
                // Readable without a request: the kernel has marked the device as broken.
                Ok(None) => {
                    tracing::error!(
                        export = name,
                        "device broken: the kernel's request was answered too late"
                    );
                    return;
                }
                Err(source) => Err(Error::System { action: "read the kernel's request", source }),
            }
        } else {
            session.look_for_memory()
        };
        if let Err(error) = handled {
            tracing::error!(export = name, %error, "kernel request failed");
        }
    }
}
