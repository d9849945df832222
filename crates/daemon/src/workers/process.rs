//! A worker: the process that serves one export for the daemon.

use super::wire::{self, Action, Command, KeyFile, MAX_CLIENTS, Report, Task};
use exports::Export;
use exports::stream::pass_socket;
use exports_virtio::contain_truncation;
use hosting::export::{ExportPlan, put_keys_in_force};
use reactor::{CoreConfig, Cores, PollWindow};
use rustix::process::{Signal, set_parent_process_death_signal};
use sandbox::{Mode, Sandbox};
use secrets::ReadFile;
use stack::passed::PassedDevice;
use std::io::{self, BufReader};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// How often the daemon is sent what was counted, and devices are looked at.
const LOOK: Duration = Duration::from_millis(500);
/// Serves what the daemon asks for on standard input, until the daemon closes it.
///
/// # Errors
/// When the export cannot be served, which the daemon has been told; or when a device is gone.
pub fn run(mode: Mode) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    let control = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let task: Option<Task> = wire::read_alone(&control)?;
    let Some(task) = task else { return Ok(()) };
    let name = task.name.clone();
    let served = match Served::start(task, &control, mode) {
        Ok(served) => served,
        Err(report) => {
            wire::write(&control, &report)?;
            let (Report::Invalid(reason) | Report::Failed(reason)) = report else { return Ok(()) };
            return Err(io::Error::other(format!("export {name}: {reason}")));
        }
    };
    wire::write(&control, &Report::Started)?;
    served.follow(&control)
}

/// The served export. Fields are dropped in this order.
struct Served {
    task: Task,
    export: Box<dyn Export>,
    devices: Vec<PassedDevice>,
    _cores: Cores,
}

/// The export of a task, with all secrets of its hosts. Reads files of keys and certificates.
fn plan_of(task: &Task) -> Result<ExportPlan, String> {
    let mut plan = ExportPlan::parse(&task.text).map_err(|error| error.to_string())?;
    if let Some(access) = plan.config.access().cloned() {
        let access = access.with_secrets(&task.host_secrets);
        plan.config.set_access(access.map_err(|error| format!("host {error}"))?);
    }
    Ok(plan)
}

fn failed(error: impl ToString) -> Report {
    Report::Failed(error.to_string())
}

impl Served {
    fn start(task: Task, control: &UnixStream, mode: Mode) -> Result<Served, Report> {
        let invalid = |error: String| Report::Invalid(error);
        let take = |_: &String| wire::take(control);
        let connections: io::Result<Vec<OwnedFd>> = task.devices.iter().map(take).collect();
        let connections = connections.map_err(failed)?;
        for address in &task.sockets {
            pass_socket(address, wire::take(control).map_err(failed)?);
        }
        // Reads keys and certificates.
        let mut plan = plan_of(&task).map_err(invalid)?;
        plan.config.complete(&task.name, task.core_map.clone());
        let needs = plan.config.apart().map_err(invalid)?;
        let mut sandbox = Sandbox::new(mode, needs.profile, None);
        sandbox.confine().map_err(failed)?; // before the first thread
        contain_truncation().map_err(failed)?;
        let buffers = hosting::share_buffers(task.cpus.len()).map_err(failed)?;
        // The daemon's cores poll; a second thread that polls on the same processor would only be
        // in their way.
        let core = |cpu: &Option<usize>| CoreConfig { cpu: *cpu, poll: PollWindow::up_to(0), seed: 0 };
        let cores = Cores::start(&task.cpus.iter().map(core).collect::<Vec<_>>()).map_err(failed)?;
        let queues = task.cpus.len() as u16;
        let open = |(name, connection): (&String, OwnedFd)| {
            PassedDevice::open(name, connection.into(), queues, &buffers)
        };
        let devices = task.devices.iter().zip(connections).map(open).collect::<Result<Vec<_>, _>>();
        let devices = devices.map_err(failed)?;
        sandbox.seal().map_err(failed)?;
        hosting::sandbox_log::announce(&sandbox);
        let served: Vec<_> = devices.iter().map(|passed| passed.device.clone()).collect();
        let export = plan.config.start(&served, cores.all()).map_err(|error| match error {
            exports::Error::Config(fault) => invalid(fault),
            error => failed(error),
        })?;
        Ok(Served { task, export, devices, _cores: cores })
    }

    /// Does what the daemon says, until it says no more.
    fn follow(&self, control: &UnixStream) -> io::Result<()> {
        let (stop, stopped) = channel::<()>();
        let daemon = &Mutex::new(control);
        std::thread::scope(|scope| {
            scope.spawn(move || self.report(daemon, &stopped));
            let result = self.carry_out(control, daemon);
            drop(stop);
            result
        })
    }

    fn carry_out(&self, control: &UnixStream, daemon: &Mutex<&UnixStream>) -> io::Result<()> {
        let mut reader = BufReader::new(control);
        while let Some(Command { number, action }) = wire::read(&mut reader)? {
            let result = match action {
                Action::Resize => self.resize(),
                Action::Remap(cores) => self.export.remap(&cores).map_err(|error| error.to_string()),
                Action::Reload(files) => self.reload(files),
            };
            say(daemon, &Report::Done(number, result))?;
        }
        Ok(())
    }

    fn resize(&self) -> Result<(), String> {
        for passed in self.devices.iter() {
            passed.device.refresh().map_err(|error| error.to_string())?;
        }
        self.export.notify_resize();
        Ok(())
    }

    /// Uses keys and certificates in files that the daemon has read: the sandbox opens none.
    fn reload(&self, files: Vec<KeyFile>) -> Result<(), String> {
        let files = files.into_iter().map(ReadFile::from).collect();
        let plan = secrets::from_passed(files, || plan_of(&self.task))?;
        put_keys_in_force(&*plan.config, &*self.export).map_err(|error| error.to_string())
    }

    /// Sends what was counted when that has changed, until the other end of `stopped` is dropped.
    /// Without a device the process ends.
    fn report(&self, daemon: &Mutex<&UnixStream>, stopped: &Receiver<()>) {
        let (mut sent, mut sent_clients) = (exports::Totals::default(), exports::ClientsReport::default());
        while stopped.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
            if self.devices.iter().any(PassedDevice::is_gone) {
                tracing::error!("the daemon has closed the connection of a device: the process ends");
                std::process::exit(1);
            }
            let totals = self.export.stats().totals();
            // An error is the end of the daemon, which the other thread finds.
            if totals != sent && say(daemon, &Report::Totals(totals)).is_ok() {
                sent = totals;
            }
            let mut clients = self.export.stats().client_list();
            clients.connections.truncate(MAX_CLIENTS);
            if clients != sent_clients && say(daemon, &Report::Clients(clients.clone())).is_ok() {
                sent_clients = clients;
            }
        }
    }
}

/// Writes a message whole, whichever thread does.
fn say(daemon: &Mutex<&UnixStream>, report: &Report) -> io::Result<()> {
    let daemon = daemon.lock().unwrap_or_else(PoisonError::into_inner);
    wire::write(*daemon, report)
}
