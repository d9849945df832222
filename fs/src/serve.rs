//! From the command line to the end of the guest.

use crate::args::Args;
use crate::confine;
use crate::device::{Device, SharedMemory};
use crate::requests::Memory;
use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGUSR1};
use signal_hook::{flag, low_level};
use std::io::{self, PipeReader, Read};
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, mpsc::Receiver};
use std::thread;
use vhost::vhost_user::{Error as ProtocolError, Listener};
use vhost_user_backend::{Error as DaemonError, VhostUserDaemon};
use virtiofsd::filesystem::FileSystem;
use virtiofsd::passthrough::PassthroughFs;
use virtiofsd::passthrough::read_only::PassthroughFsRo;

/// Exit code of an end by a signal.
const EXIT_SIGNAL: i32 = 1;

/// Something to react to.
enum Event {
    /// SIGUSR1.
    Counters,
    /// The connection has ended; an error says why, unless the guest has left.
    Ended(Result<(), String>),
    /// A queue cannot continue.
    Failed(String),
}

/// Serves until the guest has left.
///
/// # Errors
/// When a part cannot be set up, the monitor sends an invalid message, or a queue fails.
pub fn run(args: Args) -> Result<(), String> {
    let listener = confine::listener()?;
    let files = confine::limit_files(&args)?;
    let signals = watch_signals().map_err(|error| format!("cannot handle signals: {error}"))?;
    let (listener, config) = confine::enter(&args, listener, files)?;
    let failed = |error: io::Error| format!("directory {}: {error}", args.shared_dir);
    match args.readonly {
        true => serve(&args, PassthroughFsRo::new(config).map_err(failed)?, listener, signals),
        false => serve(&args, PassthroughFs::new(config).map_err(failed)?, listener, signals),
    }
}

/// Ends the process at SIGTERM, SIGINT and SIGHUP; returns a pipe with a byte for each SIGUSR1.
///
/// The parent of a sandbox has both, too: a signal to either reaches the server.
fn watch_signals() -> io::Result<PipeReader> {
    for signal in [SIGTERM, SIGINT, SIGHUP] {
        flag::register_conditional_shutdown(signal, EXIT_SIGNAL, Arc::new(AtomicBool::new(true)))?;
    }
    let (reader, writer) = io::pipe()?;
    low_level::pipe::register(SIGUSR1, writer)?;
    Ok(reader)
}

fn serve<F: FileSystem + Send + Sync + 'static>(
    args: &Args,
    fs: F,
    mut listener: Listener,
    signals: PipeReader,
) -> Result<(), String> {
    let (sender, events) = channel();
    let memory = SharedMemory::new(Memory::new());
    let failures = sender.clone();
    let fail = move |reason| drop(failures.send(Event::Failed(reason)));
    let device = Arc::new(Device::new(fs, memory.clone(), args.queues, args.tag.clone(), fail));
    let mut daemon = VhostUserDaemon::new("vhost-user".into(), device.clone(), memory)
        .map_err(|error| format!("threads of the queues: {error}"))?;
    follow_signals(signals, sender.clone())?;
    // Words that `freestone fs serve` waits for, as those of virtiofsd.
    log::info!("Waiting for vhost-user socket connection...");
    daemon.start(&mut listener).map_err(|error| format!("cannot accept a connection: {error}"))?;
    drop(listener);
    log::info!("Client connected, servicing requests");
    let wait = move || {
        let _ = sender.send(Event::Ended(ending(daemon.wait())));
        // Its end would wait for queues that wait for storage.
        std::mem::forget(daemon);
    };
    thread::Builder::new().name("connection".into()).spawn(wait).map_err(|error| error.to_string())?;
    follow(&device, &events)
}

/// Reacts to events until the end.
fn follow<F: FileSystem + Sync>(device: &Device<F>, events: &Receiver<Event>) -> Result<(), String> {
    loop {
        let result = match events.recv().map_err(|error| error.to_string())? {
            Event::Counters => {
                log::info!("{}", device.counters());
                continue;
            }
            Event::Ended(result) => result,
            Event::Failed(reason) => Err(reason),
        };
        log::info!("{}", device.counters());
        if result.is_ok() {
            log::info!("Client disconnected, shutting down");
        }
        return result;
    }
}

fn follow_signals(mut signals: PipeReader, sender: Sender<Event>) -> Result<(), String> {
    let read = move || while signals.read_exact(&mut [0]).is_ok() && sender.send(Event::Counters).is_ok() {};
    let thread = thread::Builder::new().name("signals".into()).spawn(read);
    thread.map(drop).map_err(|error| format!("cannot handle signals: {error}"))
}

/// Whether the monitor has closed the connection, or how else it has ended.
fn ending(result: Result<(), DaemonError>) -> Result<(), String> {
    match result {
        Ok(())
        | Err(DaemonError::HandleRequest(ProtocolError::Disconnected | ProtocolError::PartialMessage)) => {
            Ok(())
        }
        Err(error) => Err(format!("vhost-user: {error}")),
    }
}
