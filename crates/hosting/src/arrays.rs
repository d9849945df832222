//! The arrays of a server: who keeps them, and what people can ask of them.

use crate::Error;
use crate::control::path_of;
use crate::control::protocol::{Command, Done};
use crate::control::server::{ControlSocket, Controlled};
use crate::vocabulary;
use api::ArrayAction;
use block::Device;
use raid::Uuid;
use raid::admin::edit::{FAILED, failed_slots, remove};
use raid::admin::report::ArrayReport;
use raid::array::{Array, Growth};
use raid::jobs::{Jobs, Options, SparePool, is_called};
use raid::metadata::{MaintenanceChange, Table, probe};
use reactor::{CoreRef, CoreStopped};
use sandbox::Permits;
use stack::Stack;
use stack::array::Opened;
use stack::kinds::device::{self, DeviceConfig};
use stack::kinds::member::member;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

/// Requests of control sockets to the server. Called on the threads of the sockets.
#[derive(Clone)]
pub struct Requests {
    /// Ends the server, as SIGTERM does.
    pub stop: Arc<dyn Fn() + Send + Sync>,
    /// Has it look at its devices' sizes again and tell clients, as SIGHUP does.
    pub refresh: Arc<dyn Fn() + Send + Sync>,
}

/// An array and its jobs: rebuilds, resyncs, scrubs. A read-only array has none.
pub type Kept = (Arc<Array>, Option<Arc<Jobs>>);

/// Has every array of the stacks commit, and be kept, on `core`.
///
/// # Errors
/// When a member's channel cannot be opened.
pub fn keep(stacks: &[Stack], core: &CoreRef) -> Result<Vec<Kept>, Error> {
    let spares = SparePool::default();
    stacks.iter().flat_map(|stack| &stack.arrays).map(|opened| keep_one(opened, &spares, core)).collect()
}

/// Has an array commit, and be kept, on `core`; `spares` are for every array that was given them.
///
/// # Errors
/// When a member's channel cannot be opened.
pub fn keep_one(opened: &Opened, spares: &SparePool, core: &CoreRef) -> Result<Kept, Error> {
    let Opened { array, spares: found } = opened;
    if array.is_read_only() {
        return Ok((array.clone(), None));
    }
    let subject = array.clone();
    let options = Options { spares: spares.clone(), ..Options::default() };
    let jobs = core.block_on(move |_| async move { subject.keep(options) })??;
    for (device, label) in found {
        // One that does not fit is left alone: the array is served all the same.
        if let Err(error) = jobs.add_found_spare(device.clone(), label) {
            tracing::warn!(array = array.config().name, %error, "a spare cannot be used");
        }
    }
    Ok((array.clone(), Some(Arc::new(jobs))))
}

/// Listens for commands to the arrays of the stacks: at the given socket for all, or at one socket
/// for each. In the latter case an array whose socket cannot be made is served without one.
///
/// # Errors
/// When the given socket cannot be made.
pub fn listen(
    kept: &[Kept],
    stacks: &[Stack],
    core: &CoreRef,
    requests: &Requests,
    control: Option<&Path>,
    permits: &Permits,
) -> Result<Vec<ControlSocket>, Error> {
    let is_alone = kept.len() == 1 && stacks.len() == 1;
    let running = |kept: &Kept| {
        Arc::new(Running { is_alone, ..Running::new(kept, core, requests.clone(), permits.clone()) })
    };
    if let Some(path) = control {
        let all = Arc::new(All(kept.iter().map(running).collect()));
        let socket = ControlSocket::listen(path, all)
            .map_err(|error| Error::ControlSocket { path: path.into(), error })?;
        return Ok(vec![socket]);
    }
    Ok(kept.iter().filter_map(|kept| listen_for(&kept.0, running(kept))).collect())
}

/// Listens for commands to one array at a socket named after its UUID; `None` if it cannot be made.
pub fn listen_for(array: &Array, controlled: Arc<dyn Controlled>) -> Option<ControlSocket> {
    let config = array.config();
    let path = path_of(config.uuid);
    ControlSocket::listen(&path, controlled)
        .inspect_err(|error| {
            tracing::warn!(array = config.name, %error, path = %path.display(), "no control socket");
        })
        .ok()
}

/// Ends the service of every array, so that its next start has nothing to recover.
///
/// # Errors
/// Names the first array that could not be stopped; all have been tried.
pub fn stop(kept: &[Kept], core: &CoreRef) -> Result<(), Error> {
    let mut result = Ok(());
    for (array, jobs) in kept {
        let name = array.config().name.clone();
        let (array, jobs) = (array.clone(), jobs.clone());
        let stopped = core.block_on(move |_| async move {
            if let Some(jobs) = jobs {
                jobs.stop().await;
            }
            array.stop().await
        })?;
        if let Err(error) = stopped {
            let error = Error::Stop { name, error };
            tracing::error!(%error, "the array is recovered at its next start");
            result = result.and(Err(error));
        }
    }
    result
}

/// The device of a slot that is detached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Which {
    /// Its member.
    Member,
    /// The device that is rebuilding.
    Incoming,
}

/// The completed part of a command on several devices. All checks came before, so only a device can
/// fail now, and the answer lists the completed part.
#[derive(Default)]
struct Progress(Vec<String>);

impl Progress {
    fn say(&mut self, done: String) {
        self.0.push(done);
    }

    fn note<T>(&self, result: Result<T, impl std::fmt::Display>) -> Result<T, String> {
        result.map_err(|error| match self.is_empty() {
            true => error.to_string(),
            false => format!("{error}; done before: {}", self.0.join(", ")),
        })
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    fn text(self) -> String {
        self.0.join(", ")
    }
}

/// Puts a layer over a device that becomes a member.
pub type Wrap = Arc<dyn Fn(Arc<dyn Device>) -> Arc<dyn Device> + Send + Sync>;

/// A running array, as people control it.
pub struct Running {
    array: Arc<Array>,
    jobs: Option<Arc<Jobs>>,
    core: CoreRef,
    requests: Requests,
    /// Where members can be opened.
    permits: Permits,
    /// Wraps new members.
    wrap: Option<Wrap>,
    /// The server has no other devices.
    is_alone: bool,
    /// The last device of each slot: users name a failed member by it.
    last: Mutex<Vec<Option<String>>>,
}

/// Sees that nothing on a device would be missed.
///
/// # Errors
/// With a sentence that says what it holds.
pub fn check_unused(name: &str, device: &Arc<dyn Device>, core: &CoreRef) -> Result<(), String> {
    let subject = device.clone();
    let found = core.block_on(move |_| async move {
        let channel = subject.open_channel().map_err(|error| error.to_string())?;
        probe(&*channel, &subject.limits()).await.map_err(|error| error.to_string())
    });
    let found = found.map_err(gone)?.map_err(|error| format!("{name}: it cannot be read: {error}"))?;
    if found.is_empty() {
        return Ok(());
    }
    Err(format!("{name} holds {found} (--force overwrites it)"))
}

/// All arrays of a server, behind one socket.
struct All(Vec<Arc<Running>>);

impl Controlled for All {
    fn control(&self, array: Option<&str>, command: Command) -> Result<Done, String> {
        let names = || self.0.iter().map(|running| running.name()).collect::<Vec<_>>().join(", ");
        match (array, &self.0[..]) {
            (Some(array), arrays) => {
                let found: Vec<_> = arrays.iter().filter(|running| running.is_called(array)).collect();
                match found[..] {
                    [] => Err(format!("not served here; there are {}", names())),
                    [running] => running.control(None, command),
                    _ => Err(format!("several arrays are named {array}: use the UUID")),
                }
            }
            (None, [running]) => running.control(None, command),
            (None, arrays) if command == Command::Show => {
                let arrays = arrays.iter().map(|running| running.report()).collect();
                Ok(Done { arrays, pid: std::process::id(), ..Done::default() })
            }
            (None, _) => Err(format!("which array? There are {}", names())),
        }
    }
}

impl Controlled for Running {
    fn control(&self, array: Option<&str>, command: Command) -> Result<Done, String> {
        if let Some(array) = array.filter(|array| !self.is_called(array)) {
            return Err(format!("array {array} is not served here; this is {}", self.name()));
        }
        match command {
            Command::Show => Ok(self.done(String::new())),
            Command::Stop => self.end().map(|text| self.done(text)),
            Command::Act(action) => {
                let planned = self.plan(action)?;
                self.carry_out(planned)
            }
        }
    }
}

/// An action whose devices are open and fit. Nothing is changed yet.
pub struct Planned(Step);

enum Step {
    Add {
        names: Vec<String>,
        devices: Vec<Arc<dyn Device>>,
        is_global: bool,
    },
    ReAdd {
        names: Vec<String>,
        devices: Vec<Arc<dyn Device>>,
    },
    Replace {
        slot: usize,
        name: String,
        device: Arc<dyn Device>,
    },
    /// An action without devices is checked when it is carried out, before it changes anything.
    Other(ArrayAction),
}

impl Running {
    /// An array whose jobs run on `core`. `requests` announces growth, and `permits` decides which
    /// new members may be opened.
    pub fn new(kept: &Kept, core: &CoreRef, requests: Requests, permits: Permits) -> Running {
        let (array, jobs) = kept.clone();
        let core = core.clone();
        let running = Running {
            array,
            jobs,
            core,
            requests,
            permits,
            wrap: None,
            is_alone: false,
            last: Mutex::default(),
        };
        running.remember();
        running
    }

    /// The same, with what new members are put into.
    pub fn wrapping(self, wrap: Wrap) -> Running {
        Running { wrap: Some(wrap), ..self }
    }

    /// The array.
    pub fn array(&self) -> &Array {
        &self.array
    }

    fn name(&self) -> &str {
        &self.array.config().name
    }

    /// Whether `name` is its name or UUID.
    pub fn is_called(&self, name: &str) -> bool {
        self.name() == name || Uuid::parse(name) == Some(self.array.config().uuid)
    }

    /// The jobs of the array.
    ///
    /// # Errors
    /// When the array is read-only.
    fn jobs(&self) -> Result<Arc<Jobs>, String> {
        self.jobs.clone().ok_or_else(|| "the array is served read-only: nothing can be changed".to_owned())
    }

    /// Remembers which device is in which slot, before one goes.
    fn remember(&self) {
        let slots = self.array.slots();
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        last.resize(slots.len(), None);
        slots.into_iter().filter(|slot| slot.device.is_some()).for_each(|slot| last[slot.slot] = slot.device);
    }

    /// The array, as management sees it.
    pub fn report(&self) -> api::Array {
        let status = self.jobs.as_ref().map(|jobs| jobs.status()).unwrap_or_default();
        vocabulary::array(ArrayReport::of_running(&self.array, &status), &status)
    }

    fn done(&self, text: String) -> Done {
        Done { text, array: Some(self.report()), pid: std::process::id(), ..Done::default() }
    }

    /// Opens the devices of an action and checks them.
    ///
    /// # Errors
    /// When one cannot be opened, holds something, or does not fit. Nothing has changed.
    pub fn plan(&self, action: ArrayAction) -> Result<Planned, String> {
        self.remember();
        Ok(Planned(match action {
            ArrayAction::Add { devices, force, global } => self.plan_addition(devices, force, global)?,
            ArrayAction::ReAdd { devices } => self.plan_return(devices)?,
            ArrayAction::Replace { member, device, force } => {
                self.plan_replacement(&member, device, force)?
            }
            action => Step::Other(action),
        }))
    }

    /// Carries a planned action out.
    ///
    /// # Errors
    /// When it cannot be done, or a device fails.
    pub fn carry_out(&self, Planned(step): Planned) -> Result<Done, String> {
        let text = match step {
            Step::Add { names, devices, is_global } => self.add(&names, devices, is_global)?,
            Step::ReAdd { names, devices } => self.re_add(&names, devices)?,
            Step::Replace { slot, name, device } => self.replace(slot, &name, device)?,
            Step::Other(action) => self.act(action)?,
        };
        Ok(self.done(text))
    }

    /// Carries an action without devices out.
    fn act(&self, action: ArrayAction) -> Result<String, String> {
        Ok(match action {
            ArrayAction::Add { .. } | ArrayAction::ReAdd { .. } | ArrayAction::Replace { .. } => {
                unreachable!("actions with devices are steps of their own")
            }
            ArrayAction::Fail { members } => self.fail(&members)?,
            ArrayAction::Remove { members } => self.remove(&members)?,
            ArrayAction::Grow { member_bytes } => self.grow(member_bytes)?,
            ArrayAction::Scrub { repair } => {
                self.jobs()?.scrub(repair);
                "a scrub begins".into()
            }
            ArrayAction::Set { scrub_period_s, scrub_window, read_error_budget } => {
                self.set(&vocabulary::maintenance(scrub_period_s, scrub_window, read_error_budget))?
            }
            ArrayAction::Pause => {
                self.jobs()?.pause();
                "jobs paused".into()
            }
            ArrayAction::Resume => {
                self.jobs()?.resume();
                "jobs resumed".into()
            }
            ArrayAction::Cancel => {
                self.jobs()?.cancel();
                "scrubs and replacements are cancelled".into()
            }
        })
    }

    fn end(&self) -> Result<String, String> {
        if !self.is_alone {
            return Err(
                "the server of the array serves other devices too: stop the server instead (SIGTERM)".into(),
            );
        }
        (self.requests.stop)();
        Ok("stopping".into())
    }

    fn fail(&self, members: &[String]) -> Result<String, String> {
        self.jobs()?;
        let losses = self.plan_failures(members)?;
        let mut done = Progress::default();
        for (slot, which) in losses {
            let array = self.array.clone();
            let work = match which {
                Which::Incoming => self.core.block_on(move |_| async move { array.stop_filling(slot).await }),
                Which::Member => self.core.block_on(move |_| async move { array.fail(slot).await }),
            };
            done.note(work.map_err(gone)?.map_err(|error| format!("slot {slot}: {error}")))?;
            done.say(match which {
                Which::Incoming => format!("the replacement in slot {slot} failed"),
                Which::Member => format!("slot {slot} failed"),
            });
        }
        Ok(done.text())
    }

    /// The slots of members that are to fail, which the array survives without all of them.
    fn plan_failures(&self, members: &[String]) -> Result<Vec<(usize, Which)>, String> {
        let table = self.array.table();
        let mut losses: Vec<(usize, Which)> = Vec::new();
        for member in members {
            let slot = self.slot(member, &table)?;
            if losses.iter().any(|(other, _)| *other == slot) {
                return Err(format!("slot {slot}: it is named twice"));
            }
            let members = self.array.members();
            let is_incoming = !members.is_live(slot) && members.is_filling(slot);
            losses.push((slot, if is_incoming { Which::Incoming } else { Which::Member }));
        }
        let is_member = |(_, which): &&(usize, Which)| *which == Which::Member;
        let slots: Vec<usize> = losses.iter().filter(is_member).map(|(slot, _)| *slot).collect();
        match self.array.can_lose(&slots) {
            true => Ok(losses),
            false => {
                let names: Vec<String> = slots.iter().map(usize::to_string).collect();
                let (what, it) = if slots.len() == 1 { ("slot", "it") } else { ("slots", "them") };
                Err(format!("{what} {}: the array would not survive without {it}", names.join(", ")))
            }
        }
    }

    fn remove(&self, members: &[String]) -> Result<String, String> {
        let jobs = self.jobs()?;
        let table = self.array.table();
        let (mut slots, mut spares) = (Vec::new(), Vec::new());
        for name in members {
            if name == FAILED {
                slots.extend(failed_slots(&table));
                continue;
            }
            match self.slot(name, &table) {
                Ok(slot) => slots.push(slot),
                Err(_) if jobs.has_spare_called(name) => spares.push(name.clone()),
                Err(unknown) => return Err(unknown),
            }
        }
        // Looked at before anything is done; what changes meanwhile is left alone.
        let mut after = table.clone();
        slots.iter().try_for_each(|slot| remove(&mut after, *slot)).map_err(|error| error.to_string())?;
        let mut done = Progress::default();
        if !slots.is_empty() {
            let (array, removed) = (self.array.clone(), slots.clone());
            let removed = self.core.block_on(move |_| async move { array.remove(removed).await });
            removed.map_err(gone)?.map_err(|error| error.to_string())?;
        }
        slots.iter().for_each(|slot| done.say(format!("slot {slot} is removed")));
        for name in spares {
            let (jobs, spare) = (jobs.clone(), name.clone());
            let removed = self.core.block_on(move |_| async move { jobs.remove_spare(&spare).await });
            // One that fills a slot by now is no spare.
            if let Some(device) = done.note(removed.map_err(gone)?)? {
                done.say(format!("{device} is no spare any more"));
            }
        }
        Ok(if done.is_empty() { "no member has failed".into() } else { done.text() })
    }

    fn plan_addition(&self, names: Vec<String>, force: bool, is_global: bool) -> Result<Step, String> {
        let jobs = self.jobs()?;
        let devices = self.open_all(&names, force)?;
        devices.iter().try_for_each(|device| jobs.check_new(device)).map_err(|error| error.to_string())?;
        Ok(Step::Add { names, devices, is_global })
    }

    fn add(
        &self,
        names: &[String],
        devices: Vec<Arc<dyn Device>>,
        is_global: bool,
    ) -> Result<String, String> {
        let jobs = self.jobs()?;
        let mut done = Progress::default();
        for (name, device) in names.iter().zip(devices) {
            let jobs = jobs.clone();
            let added = self.core.block_on(move |_| async move {
                match is_global {
                    true => jobs.add_global_spare(device).await,
                    false => jobs.add(device).await,
                }
            });
            done.note(added.map_err(gone)?)?;
            let whose = if is_global { " for any array of this server" } else { "" };
            done.say(format!("{name} is a spare{whose}, or fills an empty slot"));
        }
        Ok(done.text())
    }

    fn plan_return(&self, names: Vec<String>) -> Result<Step, String> {
        let jobs = self.jobs()?;
        // They are the array's own: what they hold is what is wanted.
        let devices = self.open_all(&names, true)?;
        for device in &devices {
            let (jobs, device) = (jobs.clone(), device.clone());
            let checked = self.core.block_on(move |_| async move { jobs.check_returning(&device).await });
            checked.map_err(gone)?.map_err(|error| error.to_string())?;
        }
        Ok(Step::ReAdd { names, devices })
    }

    fn re_add(&self, names: &[String], devices: Vec<Arc<dyn Device>>) -> Result<String, String> {
        let jobs = self.jobs()?;
        let mut done = Progress::default();
        for (name, device) in names.iter().zip(devices) {
            let jobs = jobs.clone();
            let added = self.core.block_on(move |_| async move { jobs.re_add(device).await });
            let is_partial = done.note(added.map_err(gone)?)?;
            let how = if is_partial { "gets what has changed" } else { "gets everything" };
            done.say(format!("{name} {how}"));
        }
        Ok(done.text())
    }

    fn plan_replacement(&self, member: &str, name: String, force: bool) -> Result<Step, String> {
        let slot = self.slot(member, &self.array.table())?;
        let device = self.open(&name, force)?;
        self.jobs()?.check_new(&device).map_err(|error| error.to_string())?;
        Ok(Step::Replace { slot, name, device })
    }

    fn replace(&self, slot: usize, name: &str, device: Arc<dyn Device>) -> Result<String, String> {
        let jobs = self.jobs()?;
        let begun = self.core.block_on(move |_| async move { jobs.replace(slot, device).await });
        begun.map_err(gone)?.map_err(|error| error.to_string())?;
        Ok(format!("slot {slot} is copied to {name}"))
    }

    fn grow(&self, size: Option<u64>) -> Result<String, String> {
        let array = self.array.clone();
        let grown = self.core.block_on(move |_| async move { array.grow(size).await });
        let Growth { before, after } = grown.map_err(gone)?.map_err(|error| error.to_string())?;
        // Layers above and clients learn of it in their turn.
        (self.requests.refresh)();
        Ok(format!("{after} bytes, {before} before"))
    }

    /// Opens devices that are to be members, all or none.
    fn open_all(&self, names: &[String], force: bool) -> Result<Vec<Arc<dyn Device>>, String> {
        if let Some((_, twice)) = names.iter().enumerate().find(|(i, name)| names[..*i].contains(name)) {
            return Err(format!("{twice}: it is named twice"));
        }
        names.iter().map(|name| self.open(name, force)).collect()
    }

    fn set(&self, change: &MaintenanceChange) -> Result<String, String> {
        self.jobs()?;
        let maintenance = change.apply(self.array.maintenance(), self.array.config())?;
        let array = self.array.clone();
        let set = self.core.block_on(move |_| async move { array.set_maintenance(maintenance).await });
        set.map_err(gone)?.map_err(|error| format!("the superblocks cannot be written: {error}"))?;
        Ok(maintenance.to_string())
    }

    /// Opens a device that is to be a member, and sees that nothing on it would be missed.
    fn open(&self, name: &str, force: bool) -> Result<Arc<dyn Device>, String> {
        let config = member(name, true, false).map_err(|error| error.to_string())?;
        let device =
            device::open(name, &*config).map_err(|error| format!("{error}{}", self.hint(&*config)))?;
        if !force {
            check_unused(name, &device, &self.core)?;
        }
        Ok(self.wrap.as_ref().map_or(device.clone(), |wrap| wrap(device)))
    }

    /// Why a member cannot be opened, if that is the sandbox's doing.
    fn hint(&self, config: &dyn DeviceConfig) -> String {
        let Some(path) = config.path() else { return String::new() };
        match self.permits.closes(path) {
            Some(open) if path.exists() => {
                let open: Vec<String> = open.iter().map(|path| path.display().to_string()).collect();
                format!(
                    " (the sandbox lets members be opened in {}; --sandbox-path adds to that)",
                    open.join(", ")
                )
            }
            _ => String::new(),
        }
    }

    /// The slot that a person means: by number, the member's UUID, or its device.
    fn slot(&self, name: &str, table: &Table) -> Result<usize, String> {
        let count = table.members.len();
        if let Ok(slot) = name.parse::<usize>() {
            return match slot < count {
                true => Ok(slot),
                false => Err(format!("slot {slot}: there is no such slot (0 to {})", count - 1)),
            };
        }
        if let Some(uuid) = Uuid::parse(name) {
            let slot = table.members.iter().position(|member| member.uuid == uuid);
            return slot.ok_or_else(|| format!("member {uuid}: it is not in the array"));
        }
        let slots = self.array.slots();
        let is_it = |device: &str| is_called(device, name);
        let slot = slots.iter().find(|slot| slot.device.as_deref().is_some_and(is_it)).map(|slot| slot.slot);
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let before = || last.iter().position(|device| device.as_deref().is_some_and(is_it));
        slot.or_else(before).ok_or_else(|| {
            let known: Vec<_> = slots.iter().filter_map(|slot| slot.device.as_deref()).collect();
            format!("member {name}: it is not in the array; there are {}", known.join(", "))
        })
    }
}

fn gone(_: CoreStopped) -> String {
    "the server is ending".into()
}
