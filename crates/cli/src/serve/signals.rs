//! Requests to the server by signals.

use crate::error::{EXIT_FAILURE, Error};
use hosting::arrays::Requests;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::flag;
use signal_hook::iterator;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{self, Receiver, Sender};

/// A request by a signal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Stop cleanly.
    Stop,
    /// Look at the devices again.
    Refresh,
    /// Read keys and certificates again, and look at the devices again.
    Reload,
    /// Say what was counted.
    Report,
}

/// Requests by signals and other threads, in their order. A second signal to stop ends the process
/// immediately.
pub struct Signals {
    handle: iterator::Handle,
    sender: Sender<Signal>,
    receiver: Receiver<Signal>,
}

impl Signals {
    /// Takes the signals over.
    ///
    /// # Errors
    /// When the operating system refuses.
    pub fn install() -> Result<Signals, Error> {
        let failed = |error| Error::Runtime(format!("cannot handle signals: {error}"));
        let is_stopping = Arc::new(AtomicBool::new(false));
        for signal in [SIGTERM, SIGINT] {
            // In this order: the first signal finds the flag down and raises it, the second finds
            // it up.
            flag::register_conditional_shutdown(signal, EXIT_FAILURE.into(), is_stopping.clone())
                .map_err(failed)?;
            flag::register(signal, is_stopping.clone()).map_err(failed)?;
        }
        let mut signals = iterator::Signals::new([SIGTERM, SIGINT, SIGHUP, SIGUSR1]).map_err(failed)?;
        let (handle, (sender, receiver)) = (signals.handle(), mpsc::channel());
        let signalled = sender.clone();
        let forward = move || {
            for signal in signals.forever() {
                let _ = signalled.send(meaning(signal)); // an error means that the process is ending
            }
        };
        reactor::spawn_thread("signals", forward).map_err(failed)?;
        Ok(Signals { handle, sender, receiver })
    }

    /// Requests by other threads.
    pub fn requests(&self) -> Requests {
        let request = |signal: Signal| -> Arc<dyn Fn() + Send + Sync> {
            let sender = self.sender.clone();
            Arc::new(move || {
                let _ = sender.send(signal); // as above
            })
        };
        Requests { stop: request(Signal::Stop), refresh: request(Signal::Refresh) }
    }

    /// Waits for what is asked for next.
    pub fn wait(&self) -> Signal {
        self.receiver.recv().unwrap_or(Signal::Stop)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        self.handle.close();
    }
}

fn meaning(signal: i32) -> Signal {
    match signal {
        SIGHUP => Signal::Reload,
        SIGUSR1 => Signal::Report,
        _ => Signal::Stop,
    }
}
