//! The objects that the daemon has open, and every change of them.
//!
//! A change is one function here, in two steps ([`change`]). It holds [`Engine::change`] from its
//! first check to its last step, so that changes are made one at a time. Readers use a lock of its
//! own that is held briefly. Functions here block on devices or on the disk of the state: call them
//! on threads that may block.

mod ana;
mod arrays;
mod attach;
mod authority;
mod background;
mod bases;
mod change;
pub mod checks;
mod clients;
mod commits;
mod copies;
mod devices;
mod disks;
mod drives;
mod exports;
mod health;
pub mod history;
mod hosts;
mod jobs;
mod keys;
mod moves;
mod open_volumes;
mod pivots;
mod pools;
mod portals;
mod readiness;
mod report;
pub mod samples;
mod snapshots;
mod streams;
pub mod upkeep;
mod volumes;
mod work;
mod zeroing;

use crate::api_error::{ApiError, Kind};
use crate::confinement::{Confined, Confinement};
use crate::events::Events;
use crate::host_secrets::SecretFiles;
use crate::state::{ExportRecord, State, StateError, Store};
use crate::workers::{WorkerOptions, Workers};
pub use authority::Authority;
pub use readiness::InFlight;

use api::{CoreInfo, MinQos, Qos, System};
use arrays::ArrayLive;
use bases::Base;
use exports::ExportLive;
use hosting::export::OpenPortal;
use layers::qos::Throttle;
use open_volumes::OpenVolume;
use raid::jobs::SparePool;
use reactor::{CoreConfig, CoreRef, Cores};
use readiness::Readiness;
use samples::Counted;
use stack::array::wall_ns;
use std::collections::{BTreeMap, HashMap};
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard, Weak};
use std::time::{Duration, Instant};
use volume::Uuid;
use work::Task;
use zeroing::Zeroing;

/// How the daemon runs.
#[derive(Clone, Debug)]
pub struct Options {
    /// Where its state is.
    pub state_dir: PathBuf,
    /// Directory of sockets for which no path was chosen.
    pub runtime_dir: PathBuf,
    /// Its cores; one at least.
    pub cores: Vec<CoreConfig>,
    /// Directories in which members of arrays are looked for, in addition to known paths.
    pub scan: Vec<PathBuf>,
    /// How long members that are missing are waited for before an array is run without them.
    pub member_timeout: Duration,
    /// Whether each array has a control socket, as `freestone array` uses it.
    pub has_array_sockets: bool,
    /// Rights that it gives up, and rights that it keeps.
    pub confinement: Confinement,
    /// How a process is started for each export; `None`: the daemon serves exports itself.
    pub workers: Option<WorkerOptions>,
}

/// Why the daemon cannot start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// Its state cannot be used.
    #[error(transparent)]
    State(#[from] StateError),
    /// Its sandbox cannot be entered.
    #[error("sandbox: {0}")]
    Sandbox(#[from] sandbox::Error),
    /// A core or thread is refused.
    #[error("cannot start {what}: {error}")]
    System {
        /// The object that cannot be started.
        what: &'static str,
        /// Why.
        error: io::Error,
    },
}

/// Everything that the daemon has.
pub struct Engine {
    options: Options,
    store: Store,
    host_secrets: SecretFiles,
    confined: Confined,
    events: Arc<Events>,
    problems_since: health::Since,
    spares: SparePool,
    counted: Arc<Counted>,
    history: history::Kept,
    drives: drives::Drives,
    contents: disks::Contents,
    started_ns: u64,
    started: Instant,
    /// Held by whoever changes something, as long as that takes.
    changing: Mutex<()>,
    /// An array has grown: what stands on it has to look.
    wants_refresh: AtomicBool,
    /// Copies that no move will finish may be on some pool.
    may_have_leftovers: AtomicBool,
    has_ended: AtomicBool,
    readiness: Arc<Readiness>,
    live: RwLock<Live>,
    /// Exports of the state have ended before.
    workers: Option<Arc<Workers>>,
    /// Last: whatever is open ran on them.
    cores: Cores,
    this: Weak<Engine>,
}

/// The open objects. Fields are dropped in this order: users before the objects that they use.
#[derive(Default)]
struct Live {
    state: State,
    exports: BTreeMap<String, Result<ExportLive, ApiError>>,
    /// Portals that exports use, or why they are not open.
    portals: BTreeMap<String, Result<OpenPortal, ApiError>>,
    /// Why files of keys and certificates of portals were not read again.
    portal_keys_errors: BTreeMap<String, ApiError>,
    /// Volumes that exports have open, by UUID.
    volumes: HashMap<Uuid, Weak<OpenVolume>>,
    groups: BTreeMap<String, Arc<Throttle>>,
    /// Moves that are on, by the UUID of their volume.
    moves: BTreeMap<String, Task>,
    /// Copies in progress, by the UUID of their volume.
    copies: BTreeMap<String, Task>,
    /// Streams in progress, by the name of their device.
    streams: BTreeMap<String, Task>,
    /// Commits in progress, by the name of their device.
    commits: BTreeMap<String, Task>,
    /// Room that is being made ready for volumes.
    zeroing: Vec<Zeroing>,
    /// Devices and arrays by name, or why they are not open.
    bases: BTreeMap<String, Result<Base, ApiError>>,
    /// Arrays that run, by name.
    arrays: BTreeMap<String, ArrayLive>,
}

impl Engine {
    /// Enters the sandbox, starts the cores, and brings about what the state says, as far as that
    /// is possible. The process has one thread before: threads that exist already keep what the
    /// daemon gives up.
    ///
    /// # Errors
    /// When there is a state that cannot be used, or the system refuses threads.
    pub fn start(options: Options) -> Result<Arc<Engine>, StartError> {
        let (store, state) = Store::open(&options.state_dir)?;
        let workers = options.workers.as_ref().map(Workers::start).transpose();
        let workers = workers
            .map_err(|error| StartError::System { what: "the spawner of exports' processes", error })?;
        // Before the first thread.
        let Options { confinement, runtime_dir, state_dir, scan, .. } = &options;
        let mut confined = Confined::enter(confinement.clone(), runtime_dir, state_dir, scan, &state)?;
        let cores = Cores::start(&options.cores);
        let cores = cores.map_err(|error| StartError::System { what: "cores", error })?;
        confined.seal()?;
        let groups = state.groups.iter().map(|(name, qos)| (name.clone(), throttle(qos))).collect();
        let engine = Arc::new_cyclic(|this| Engine {
            host_secrets: SecretFiles::new(&options.state_dir),
            options,
            store,
            confined,
            events: Arc::default(),
            problems_since: health::Since::default(),
            spares: SparePool::default(),
            counted: Arc::default(),
            history: history::Kept::default(),
            drives: drives::Drives::default(),
            contents: disks::Contents::default(),
            started_ns: wall_ns(),
            started: Instant::now(),
            changing: Mutex::default(),
            wants_refresh: AtomicBool::new(false),
            may_have_leftovers: AtomicBool::new(false),
            has_ended: AtomicBool::new(false),
            readiness: Arc::default(),
            live: RwLock::new(Live { state, groups, ..Live::default() }),
            workers: workers.map(Arc::new),
            cores,
            this: this.clone(),
        });
        engine.discover();
        engine.bring_about();
        engine.read_new_drives();
        engine.events.emit(
            "daemon",
            "freestoned",
            "started",
            format!("version {}", env!("CARGO_PKG_VERSION")),
        );
        upkeep::start(&engine).map_err(|error| StartError::System { what: "the upkeep", error })?;
        history::start(&engine).map_err(|error| StartError::System { what: "the history", error })?;
        drives::start(&engine).map_err(|error| StartError::System { what: "the reads of drives", error })?;
        Ok(engine)
    }

    /// The events.
    pub fn events(&self) -> &Events {
        &self.events
    }

    /// How the daemon runs.
    pub fn options(&self) -> &Options {
        &self.options
    }

    /// The daemon itself. The caller's role is for the REST layer to fill in.
    pub fn system(&self) -> System {
        let live = self.live();
        let core = |(number, CoreConfig { cpu, .. }): (usize, &CoreConfig)| {
            let serves = |record: &&ExportRecord| {
                record.cores.is_empty() || cpu.is_some_and(|cpu| record.cores.contains(&cpu))
            };
            let exports = live.state.exports.iter().filter(serves).map(|record| record.name.clone());
            CoreInfo { number, cpu: *cpu, exports: exports.collect() }
        };
        let (state, start) = self.readiness(&live);
        System {
            version: env!("CARGO_PKG_VERSION").into(),
            host: hosting::host(),
            role: None,
            state,
            start,
            pid: std::process::id(),
            started_ns: self.started_ns,
            user: sandbox::effective_user(),
            capabilities: self.confined.capabilities().to_vec(),
            state_dir: self.store.directory().display().to_string(),
            generation: live.state.generation,
            cores: self.options.cores.iter().enumerate().map(core).collect(),
        }
    }

    /// Looks at the sizes of all devices, and for whatever is missing.
    pub fn look_again(&self) {
        let alone = self.change();
        self.refresh();
        drop(alone);
        self.bring_about();
    }

    /// Nanoseconds that each core has polled and found nothing to do.
    pub fn polled_ns(&self) -> Vec<u64> {
        self.cores.all().iter().map(CoreRef::polled_ns).collect()
    }

    /// Whether every core answers.
    pub fn is_responsive(&self) -> bool {
        self.cores.all().iter().all(|core| core.block_on(|_| async {}).is_ok())
    }

    /// Stops everything cleanly: clients, requests in flight, arrays. Failures are logged. With a
    /// successor, clients that can wait for it do so. No change is made while the result lives.
    pub fn stop(&self, has_successor: bool) -> Stopped<'_> {
        self.has_ended.store(true, Ordering::SeqCst);
        // Not within a change: they may be about to make their last one.
        let tasks = {
            let mut live = self.live_mut();
            let Live { moves, copies, streams, commits, .. } = &mut *live;
            [moves, copies, streams, commits].map(std::mem::take)
        };
        tasks.iter().flat_map(BTreeMap::values).for_each(Task::stop);
        self.live().zeroing.iter().for_each(Zeroing::end);
        while !self.live().zeroing.is_empty() {
            std::thread::sleep(work::LOOK / 10);
        }
        let alone = self.change();
        let portals = std::mem::take(&mut self.live_mut().portals);
        let exports = std::mem::take(&mut self.live_mut().exports);
        // First: a host that connects again finds a portal closed, not its subsystem gone.
        portals.values().flatten().for_each(|portal| portal.close());
        if has_successor {
            exports.values().flatten().for_each(|running| running.export.hand_over());
        }
        self.end_exports(exports);
        drop(portals);
        let bases = std::mem::take(&mut self.live_mut().bases);
        for (name, base) in bases {
            if let Ok(base) = base
                && let Err(error) = hosting::flush(&base.device, &self.core())
            {
                tracing::error!(name, %error, "not flushed");
            }
        }
        let arrays = std::mem::take(&mut self.live_mut().arrays);
        for (_, array) in arrays {
            array.stop(&self.core()); // says what went wrong itself
        }
        self.events.emit("daemon", "freestoned", "stopped", "cleanly");
        Stopped(alone)
    }

    /// The core that metadata is read and written on, and that arrays have as their home.
    fn core(&self) -> CoreRef {
        self.cores.get(0)
    }

    /// Whether the daemon is about to end.
    fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::SeqCst)
    }

    /// Begins a change; other changes wait for its end.
    fn change(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn live(&self) -> RwLockReadGuard<'_, Live> {
        self.live.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn live_mut(&self) -> RwLockWriteGuard<'_, Live> {
        self.live.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a change of the state durable, which is as before when that fails. Within a change.
    fn commit(&self, edit: impl FnOnce(&mut State)) -> Result<(), ApiError> {
        let before = self.live().state.clone();
        let mut state = before.clone();
        edit(&mut state);
        state.generation += 1;
        self.store.replace(&before, &state)?;
        self.live_mut().state = state;
        Ok(())
    }

    /// Changes so far that the state directory did not take.
    pub fn state_write_failures(&self) -> u64 {
        self.store.write_failures()
    }

    /// The generation of the state.
    fn generation(&self) -> u64 {
        self.live().state.generation
    }

    /// Undoes the change of the state that led to a generation: the generation before it counts
    /// again, unless others have changed the state since. Within a change.
    fn take_back(&self, generation: u64, undo: impl FnOnce(&mut State)) -> Result<(), ApiError> {
        let now = self.live().state.clone();
        let mut state = now.clone();
        undo(&mut state);
        state.generation = match now.generation == generation {
            true => generation - 1,
            false => now.generation + 1,
        };
        self.store.take_back(&now, &state)?;
        self.live_mut().state = state;
        Ok(())
    }

    /// Whether nothing that can be served is called `name`.
    fn check_is_new(&self, name: &str) -> Result<(), ApiError> {
        let live = self.live();
        let taken = |kind: &str| Err(ApiError::new(Kind::Exists, format!("{kind} {name} exists already")));
        if live.state.devices.iter().any(|device| device.name == name) {
            taken("device")
        } else if live.state.arrays.iter().any(|array| array.name == name) {
            taken("array")
        } else if live.all_volumes().any(|(_, volume)| volume.name.as_str() == name)
            || live.is_being_made(name)
        {
            taken("volume")
        } else {
            Ok(())
        }
    }
}

/// An engine that has stopped.
pub struct Stopped<'a>(#[expect(dead_code, reason = "held, not read")] MutexGuard<'a, ()>);

/// The limits of a volume or group.
fn throttle(qos: &Qos) -> Arc<Throttle> {
    Arc::new(Throttle::new(limits(qos)))
}

fn limits(qos: &Qos) -> layers::qos::Limits {
    let rate = |rate: Option<api::Rate>| {
        rate.map(|api::Rate { per_s, burst }| layers::qos::Rate { per_second: per_s, burst })
            .unwrap_or_default()
    };
    layers::qos::Limits {
        iops: rate(qos.iops),
        read_iops: rate(qos.read_iops),
        write_iops: rate(qos.write_iops),
        bandwidth: rate(qos.bandwidth),
        read_bandwidth: rate(qos.read_bandwidth),
        write_bandwidth: rate(qos.write_bandwidth),
    }
}

/// A volume's guaranteed minimum, in the form of its limits.
fn min_limits(min: &MinQos) -> layers::qos::Limits {
    let rate = |per_second: Option<u64>| layers::qos::Rate::per_second(per_second.unwrap_or(0));
    let (iops, bandwidth) = (rate(min.requests_per_s), rate(min.bytes_per_s));
    layers::qos::Limits { iops, bandwidth, ..layers::qos::Limits::default() }
}
