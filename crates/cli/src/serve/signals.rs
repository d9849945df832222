//! What signals ask the server for.

use super::arrays::Stop;
use crate::error::{EXIT_FAILURE, Error};
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;
use signal_hook::iterator;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

/// What a signal asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// End in good order.
    Stop,
    /// Look at the devices again.
    Refresh,
    /// Say what was counted.
    Report,
}

/// Signals as they come. A second signal to stop ends the process at once, whatever it is busy with.
pub struct Signals(iterator::Signals);

impl Signals {
    /// Takes the signals over.
    ///
    /// # Errors
    /// When the operating system refuses.
    pub fn install() -> Result<Signals, Error> {
        let failed = |error| Error::Runtime(format!("cannot handle signals: {error}"));
        let is_stopping = Arc::new(AtomicBool::new(false));
        for signal in [SIGTERM, SIGINT] {
            // In this order: the first signal finds the flag down and raises it, the second finds it up.
            flag::register_conditional_shutdown(signal, EXIT_FAILURE.into(), is_stopping.clone())
                .map_err(failed)?;
            flag::register(signal, is_stopping.clone()).map_err(failed)?;
        }
        iterator::Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR1]).map(Signals).map_err(failed)
    }

    /// Ends the waiting as a signal to stop does; for other threads.
    pub fn stop(&self) -> Stop {
        let handle = self.0.handle();
        Arc::new(move || handle.close())
    }

    /// Waits for the next signal.
    pub fn wait(&mut self) -> Signal {
        match self.0.forever().next() {
            Some(SIGHUP) => Signal::Refresh,
            Some(SIGUSR1) => Signal::Report,
            _ => Signal::Stop,
        }
    }
}
