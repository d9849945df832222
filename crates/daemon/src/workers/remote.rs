//! An export that a worker serves, as the engine sees it.

use super::Workers;
use super::wire::{self, Action, Command, KeyFile, MAX_KEY_BYTES, Report, Task};
use block::{Device, Limits};
use exports::stream::{Address, BoundSocket};
use exports::{ClientsReport, Error, Export, Stats, Totals};
use exports_nvme_tcp::HostSecrets;
use exports_virtio::vhost_user_blk::{Config, VhostUserBlk};
use reactor::CoreRef;
use secrets::ReadFile;
use std::io::{self, BufRead, BufReader, Read};
use std::net::Shutdown;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a worker may take to start.
const START: Duration = Duration::from_secs(30);
/// How long a command is waited for. A worker that takes longer carries it out all the same.
const ANSWER: Duration = Duration::from_secs(2);
/// How long a worker may take to end in order before it is killed.
const END: Duration = Duration::from_secs(10);
/// Between the end of a worker and the first attempt to start its successor; doubled up to
/// [`MAX_PAUSE`].
const MIN_PAUSE: Duration = Duration::from_millis(50);
/// Longest time between two attempts.
const MAX_PAUSE: Duration = Duration::from_secs(10);
/// A worker that has served as long has not failed at its start: the next pause is short again.
const STEADY: Duration = Duration::from_secs(60);
/// Largest ring of a device's connection.
const QUEUE_SIZE: u16 = 256;
/// Longest text of a worker, or about its end, that is shown, in bytes.
const MAX_TEXT: usize = 400;

/// Called with what has happened to a worker: in a word, and in a sentence.
pub type Tell = Box<dyn Fn(&str, String) + Send + Sync>;

/// The export that a worker is to serve.
pub struct Order {
    /// The export's name.
    pub name: String,
    /// The export, as a command line has it.
    pub text: String,
    /// Secrets of its hosts that the text does not name.
    pub host_secrets: Vec<HostSecrets>,
    /// Where it listens.
    pub listen: Vec<Address>,
    /// Whether it refuses writes. The daemon refuses them too.
    pub read_only: bool,
    /// The processor of each core.
    pub cpus: Vec<Option<usize>>,
    /// Places of the cores that serve it; none: all.
    pub core_map: Vec<usize>,
}

/// An export that a process of its own serves. Dropping it ends the process in order.
pub struct RemoteExport {
    shared: Arc<Shared>,
    supervisor: Option<JoinHandle<()>>,
}

struct Shared {
    order: Order,
    devices: Vec<Arc<dyn Device>>,
    cores: Vec<CoreRef>,
    workers: Arc<Workers>,
    /// Clients that come while no worker runs wait in them.
    sockets: Vec<BoundSocket>,
    stats: Stats,
    tell: Tell,
    state: Mutex<State>,
    progress: Mutex<Progress>,
    changed: Condvar,
}

struct State {
    core_map: Vec<usize>,
    /// `None` while no worker runs.
    link: Option<Link>,
}

/// How far an export is on its way to its end.
#[derive(Default)]
struct Progress {
    is_stopping: bool,
    has_ended: bool,
}

/// The way to a worker.
struct Link {
    control: UnixStream,
    /// The worker is killed when it is closed.
    status: UnixStream,
    devices: Vec<VhostUserBlk>,
    done: Receiver<(u64, Result<(), String>)>,
    commands: u64,
}

/// Messages from a worker, and from the spawner about it.
struct Incoming {
    pid: String,
    reports: BufReader<UnixStream>,
    status: BufReader<UnixStream>,
    done: Sender<(u64, Result<(), String>)>,
    counted: Totals,
}

impl RemoteExport {
    /// Starts a worker that serves `devices`; `cores` of this process serve the devices to it.
    ///
    /// # Errors
    /// As an export of this process; or when no process can be started.
    pub fn start(
        order: Order,
        devices: Vec<Arc<dyn Device>>,
        cores: &[CoreRef],
        workers: Arc<Workers>,
        tell: Tell,
    ) -> Result<RemoteExport, Error> {
        let sockets = order.listen.iter().map(BoundSocket::bind).collect::<Result<_, _>>()?;
        let shared = Arc::new(Shared {
            state: Mutex::new(State { core_map: order.core_map.clone(), link: None }),
            order,
            devices,
            cores: cores.to_vec(),
            workers,
            sockets,
            stats: Stats::of_totals(),
            tell,
            progress: Mutex::default(),
            changed: Condvar::new(),
        });
        let incoming = shared.start_worker()?;
        let supervisor = reactor::spawn_thread("export-worker", {
            let shared = shared.clone();
            move || shared.supervise(incoming)
        });
        // Without the thread the worker ends: no thread reads its reports.
        let supervisor = supervisor.map_err(|error| system("start a thread for the process", error))?;
        Ok(RemoteExport { shared, supervisor: Some(supervisor) })
    }

    /// Passes the worker its files of keys and certificates, which it uses for new connections. A
    /// worker that starts later reads them itself.
    ///
    /// # Errors
    /// When they are no text, or too long to be passed; or when the worker refuses them.
    pub fn reload(&self, files: &[ReadFile]) -> Result<(), Error> {
        let bytes: usize = files.iter().map(|file| file.content.len()).sum();
        if bytes > MAX_KEY_BYTES {
            let fault = format!("files of {bytes} bytes: a process of its own takes {MAX_KEY_BYTES}");
            return Err(Error::Config(fault));
        }
        let files = files.iter().map(KeyFile::new).collect::<Result<_, _>>().map_err(Error::Config)?;
        match &mut lock(&self.shared.state).link {
            Some(link) => link.command(Action::Reload(files)).map_err(Error::Config),
            None => Ok(()),
        }
    }
}

impl Export for RemoteExport {
    fn stats(&self) -> &Stats {
        &self.shared.stats
    }

    fn notify_resize(&self) -> Limits {
        let mut state = lock(&self.shared.state);
        if let Some(link) = &mut state.link {
            for device in &link.devices {
                device.notify_resize();
            }
            if let Err(error) = link.command(Action::Resize) {
                tracing::warn!(export = self.shared.order.name, %error, "the export's process did not resize it");
            }
        }
        self.shared.devices[0].limits()
    }

    fn remap(&self, cores: &[usize]) -> Result<(), Error> {
        let mut state = lock(&self.shared.state);
        if let Some(link) = &mut state.link {
            link.devices.iter().try_for_each(|device| device.remap(cores))?;
            link.command(Action::Remap(cores.to_vec())).map_err(Error::Config)?;
        }
        // The map with which a successor begins.
        state.core_map = cores.to_vec();
        Ok(())
    }
}

impl Drop for RemoteExport {
    fn drop(&mut self) {
        lock(&self.shared.progress).is_stopping = true;
        self.shared.changed.notify_all();
        if let Some(link) = &lock(&self.shared.state).link {
            let _ = link.control.shutdown(Shutdown::Write); // fails where the worker has ended
        }
        let progress = lock(&self.shared.progress);
        let waited = self.shared.changed.wait_timeout_while(progress, END, |progress| !progress.has_ended);
        if waited.is_ok_and(|(_, waited)| waited.timed_out())
            && let Some(link) = &lock(&self.shared.state).link
        {
            tracing::warn!(
                export = self.shared.order.name,
                "the export's process does not end: it is killed"
            );
            kill(&link.status);
        }
        if let Some(supervisor) = self.supervisor.take()
            && supervisor.join().is_err()
        {
            tracing::error!(export = self.shared.order.name, "the thread of the export's process panicked");
        }
    }
}

impl Shared {
    /// Starts a worker, and waits until clients are served.
    fn start_worker(&self) -> Result<Incoming, Error> {
        // As long as that takes: what is changed meanwhile is changed in the worker.
        let mut state = lock(&self.state);
        let failed = |error| system("start a process for the export", error);
        let (control, far_control) = UnixStream::pair().map_err(failed)?;
        let (status, far_status) = UnixStream::pair().map_err(failed)?;
        self.workers.spawn(&self.order.name, far_control.into(), far_status.into()).map_err(failed)?;
        let mut incoming = BufReader::new(status.try_clone().map_err(failed)?);
        status.set_read_timeout(Some(START)).map_err(failed)?;
        let pid = match line(&mut incoming).map_err(failed)? {
            said if said.starts_with("pid ") => said["pid ".len()..].to_owned(),
            said => return Err(failed(io::Error::other(said))),
        };
        control.set_write_timeout(Some(ANSWER)).map_err(failed)?;
        control.set_read_timeout(Some(START)).map_err(failed)?;
        let devices = self.hand_out(&control, &state.core_map)?;
        let mut reports = BufReader::new(control.try_clone().map_err(failed)?);
        match wire::read(&mut reports).map_err(failed)? {
            Some(Report::Started) => {}
            Some(Report::Invalid(text)) => return Err(Error::Config(cut(text))),
            Some(Report::Failed(text)) => return Err(failed(io::Error::other(cut(text)))),
            other => return Err(failed(io::Error::other(format!("process {pid} ended early: {other:?}")))),
        }
        control.set_read_timeout(None).map_err(failed)?;
        let (sender, done) = channel();
        let control = &state.link.insert(Link { control, status, devices, done, commands: 0 }).control;
        if lock(&self.progress).is_stopping {
            let _ = control.shutdown(Shutdown::Write); // the one who stops has found no worker
        }
        Ok(Incoming { pid, reports, status: incoming, done: sender, counted: Totals::default() })
    }

    /// Says to a worker what it serves, and passes it the devices and sockets.
    fn hand_out(&self, control: &UnixStream, core_map: &[usize]) -> Result<Vec<VhostUserBlk>, Error> {
        let failed = |error| system("hand the export to its process", error);
        let Order { name, text, host_secrets, cpus, read_only, .. } = &self.order;
        let task = Task {
            name: name.clone(),
            text: text.clone(),
            host_secrets: host_secrets.clone(),
            cpus: cpus.clone(),
            core_map: core_map.to_vec(),
            devices: self.devices.iter().map(|device| device.name().to_owned()).collect(),
            sockets: self.sockets.iter().map(|socket| socket.address().to_owned()).collect(),
        };
        wire::write(control, &task).map_err(failed)?;
        let mut served = Vec::new();
        for device in &self.devices {
            let (ours, theirs) = UnixStream::pair().map_err(failed)?;
            let config = Config {
                num_queues: self.cores.len().try_into().unwrap_or(u16::MAX),
                queue_size: QUEUE_SIZE,
                read_only: *read_only,
                core_map: core_map.to_vec(),
                ..Config::new(format!("{name}: process"))
            };
            served.push(VhostUserBlk::start_connected(device.clone(), &self.cores, config, ours)?);
            wire::pass(control, theirs.as_fd()).map_err(failed)?;
        }
        for socket in &self.sockets {
            wire::pass(control, socket.as_fd()).map_err(failed)?;
        }
        Ok(served)
    }

    /// Follows a worker, and its successors, until the export ends.
    fn supervise(&self, mut incoming: Incoming) {
        let mut before = Totals::default();
        let mut pause = MIN_PAUSE;
        loop {
            let began = Instant::now();
            if let Err(error) = self.follow(&mut incoming, &before) {
                let export = &self.order.name;
                tracing::warn!(export, pid = incoming.pid, %error, "the export's process sent no message: it is killed");
                kill(incoming.status.get_ref());
            }
            before = Totals { clients: 0, ..before.followed_by(&incoming.counted) };
            let how = self.end_worker(incoming);
            self.stats.set_totals(&before);
            self.stats.set_client_list(ClientsReport::default());
            if lock(&self.progress).is_stopping {
                break;
            }
            (self.tell)("worker-ended", how);
            if began.elapsed() >= STEADY {
                pause = MIN_PAUSE;
            }
            match self.restart(&mut pause) {
                Some(next) => incoming = next,
                None => break,
            }
        }
        lock(&self.progress).has_ended = true;
        self.changed.notify_all();
    }

    /// Reads what a worker says until it says no more.
    fn follow(&self, incoming: &mut Incoming, before: &Totals) -> io::Result<()> {
        while let Some(report) = wire::read(&mut incoming.reports)? {
            match report {
                Report::Totals(totals) => {
                    incoming.counted = totals;
                    self.stats.set_totals(&before.followed_by(&totals));
                }
                Report::Clients(clients) => self.stats.set_client_list(clients),
                // An error means that the answer comes too late.
                Report::Done(number, result) => drop(incoming.done.send((number, result))),
                other => return Err(io::Error::other(format!("{other:?} of a process that serves"))),
            }
        }
        Ok(())
    }

    /// Waits for the end of a worker, which is killed if it does not end, and then of its requests.
    /// How it ended.
    fn end_worker(&self, incoming: Incoming) -> String {
        let Incoming { pid, mut status, .. } = incoming;
        // Set to wait for long at the start.
        let _ = status.get_ref().set_read_timeout(Some(END));
        let how = match line(&mut status) {
            Ok(how) => how,
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => "the spawner has ended".into(),
            Err(error) => {
                kill(status.get_ref());
                let how = line(&mut status).unwrap_or_else(|_| "no answer of the spawner".into());
                format!("killed, since it did not end ({error}): {how}")
            }
        };
        let link = lock(&self.state).link.take();
        // Not under the lock: it waits for what is in flight. No successor runs before all of that
        // has ended.
        drop(link);
        format!("process {pid}: {how}")
    }

    /// Starts the successor of a worker; `None` when the export ends.
    fn restart(&self, pause: &mut Duration) -> Option<Incoming> {
        let mut told = None;
        loop {
            let progress = lock(&self.progress);
            let waited = self.changed.wait_timeout_while(progress, *pause, |progress| !progress.is_stopping);
            if waited.is_ok_and(|(progress, _)| progress.is_stopping) {
                return None;
            }
            *pause = (*pause * 2).min(MAX_PAUSE);
            match self.start_worker() {
                Ok(incoming) => {
                    (self.tell)("worker-started", format!("process {} serves clients", incoming.pid));
                    return Some(incoming);
                }
                Err(error) => {
                    let fault = error.to_string();
                    if told.as_ref() != Some(&fault) {
                        (self.tell)("worker-failed", format!("no process serves clients: {fault}"));
                        told = Some(fault);
                    }
                }
            }
        }
    }
}

impl Link {
    /// Has a command carried out. One that takes long is carried out later.
    fn command(&mut self, action: Action) -> Result<(), String> {
        self.commands += 1;
        let number = self.commands;
        // An error is the end of the worker: its successor begins with what is asked for.
        if wire::write(&self.control, &Command { number, action }).is_err() {
            return Ok(());
        }
        let deadline = Instant::now() + ANSWER;
        loop {
            match self.done.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
                Ok((done, result)) if done == number => return result.map_err(cut),
                Ok(_) => {} // the answer to an earlier one
                Err(_) => return Ok(()),
            }
        }
    }
}

fn system(action: &'static str, source: io::Error) -> Error {
    Error::System { action, source }
}

/// Has the spawner kill a worker. It reports the end on the same socket, so that stays readable.
fn kill(status: &UnixStream) {
    let _ = status.shutdown(Shutdown::Write); // fails where the spawner has ended
}

/// Reads a line of the spawner.
fn line(status: &mut BufReader<UnixStream>) -> io::Result<String> {
    let mut line = String::new();
    status.take(MAX_TEXT as u64).read_line(&mut line)?;
    match line.trim() {
        "" => Err(io::ErrorKind::UnexpectedEof.into()),
        line => Ok(line.to_owned()),
    }
}

/// A text of a worker, which may be hostile: of bounded length, on one line.
fn cut(text: String) -> String {
    text.chars().filter(|c| !c.is_control()).take(MAX_TEXT).collect()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
