//! Arrays: made, found, run, controlled.

use super::authority::Authority;
use super::change::Effects;
use super::{Engine, Live, checks};
use crate::api_error::{ApiError, Kind};
use crate::state::{ArrayRecord, State, Target};
use api::{Array, ArrayAction, Done, Member, NewArray};
use block::Device;
use hosting::arrays::{Kept, Planned, Requests, Running, keep_one, listen_for};
use hosting::control::protocol::{self, Command};
use hosting::control::server::{ControlSocket, Controlled};
use hosting::create::PlannedCreation;
use raid::Uuid;
use raid::admin::open::Wanted;
use raid::array::Array as RaidArray;
use raid::jobs::{Jobs, Status};
use raid::metadata::zero_superblock;
use reactor::CoreRef;
use stack::array::{Opened, choose, disks_in, find, labels};
use stack::retry::retry_while;
use std::path::Path;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

/// An array that runs.
pub struct ArrayLive {
    /// First, so that no client controls an array that is closing.
    _socket: Option<ControlSocket>,
    running: Arc<Running>,
    kept: Kept,
}

impl ArrayLive {
    /// The array.
    pub fn array(&self) -> &Arc<RaidArray> {
        &self.kept.0
    }

    /// Its jobs, unless it is read-only.
    pub fn jobs(&self) -> Option<&Arc<Jobs>> {
        self.kept.1.as_ref()
    }

    /// The status of its jobs.
    pub fn status(&self) -> Status {
        self.jobs().map(|jobs| jobs.status()).unwrap_or_default()
    }

    /// The texts of its members and spares.
    pub fn texts_of_members(&self) -> Vec<String> {
        let slots = self.array().slots().into_iter();
        slots.filter_map(|slot| slot.device).chain(self.status().spares).collect()
    }

    /// Its present state.
    pub fn report(&self) -> Array {
        self.running.report()
    }

    /// Stops it cleanly.
    pub fn stop(self, core: &CoreRef) {
        let ArrayLive { _socket: socket, running, kept } = self;
        drop((socket, running));
        // An array that cannot be stopped was logged, and is recovered at its next start.
        let _ = hosting::arrays::stop(&[kept], core);
    }
}

/// An array that can be made.
struct PlannedArray {
    record: ArrayRecord,
    creation: PlannedCreation,
}

impl PlannedArray {
    /// The state knows the array before its members do: nothing is written to them for an array
    /// that is not remembered.
    fn commit(self, engine: &Engine) -> Result<(), ApiError> {
        let PlannedArray { record, creation } = self;
        let name = &record.name;
        let mut effects = Effects::new(engine, "array", name);
        effects.remember(
            |state| state.arrays.push(record.clone()),
            |state| state.arrays.retain(|array| array.uuid != record.uuid),
        )?;
        effects.undo_by(|| engine.erase_all(&record.devices, &record.uuid));
        creation.commit()?;
        engine.run_array(&record, true)?;
        effects.keep();
        let array = engine.array(name)?;
        let text = format!(
            "level {} over {} members, {} bytes",
            array.level.map_or("unknown", api::Level::name),
            array.members.len(),
            array.capacity_bytes
        );
        engine.events.emit("array", name, "created", text);
        Ok(())
    }
}

/// An array that nothing is on.
struct PlannedArrayDeletion {
    record: ArrayRecord,
    /// Devices whose superblocks are erased.
    erased: Option<Vec<String>>,
}

impl PlannedArrayDeletion {
    fn commit(self, engine: &Engine) -> Result<(), ApiError> {
        let PlannedArrayDeletion { record: ArrayRecord { name, uuid, .. }, erased } = self;
        engine.commit(|state| state.forget_base(&name))?;
        engine.take_down(&name);
        // The array is deleted from here on, whatever becomes of its members.
        let text = match erased.map(|devices| engine.erase_all(&devices, &uuid)) {
            None => "stopped and forgotten".to_owned(),
            Some(Ok(())) => "stopped, its members' superblocks erased".to_owned(),
            Some(Err(error)) => {
                tracing::error!(array = name, %error, "members of a deleted array keep their superblocks");
                format!("stopped; members keep superblocks that could not be erased: {error}")
            }
        };
        engine.events.emit("array", &name, "deleted", text);
        Ok(())
    }
}

/// An action on an array that runs. The devices that it names are open and fit.
struct PlannedAction {
    name: String,
    running: Arc<Running>,
    /// Devices that become members or spares.
    newcomers: Vec<String>,
    planned: Planned,
    /// The event.
    word: &'static str,
}

impl PlannedAction {
    /// The state knows where newcomers are before they are members: they must be found at the next
    /// start, whenever that is. By then they are checked: a name that cannot be used never gets
    /// into the state.
    fn commit(self, engine: &Engine) -> Result<protocol::Done, ApiError> {
        let PlannedAction { name, running, newcomers, planned, word } = self;
        let mut effects = Effects::new(engine, "array", &name);
        if !newcomers.is_empty() {
            effects.remember(
                |state| devices_of(state, &name).for_each(|devices| devices.extend(newcomers.clone())),
                |state| {
                    devices_of(state, &name).for_each(|devices| devices.retain(|it| !newcomers.contains(it)));
                },
            )?;
        }
        let done = running.carry_out(planned);
        let done = done.map_err(|error| ApiError::invalid(format!("array {name}: {error}")))?;
        effects.keep();
        if engine.wants_refresh.swap(false, Ordering::SeqCst) {
            engine.refresh();
        }
        engine.events.emit("array", &name, word, &*done.text);
        engine.read_new_drives();
        Ok(done)
    }
}

fn devices_of<'a>(state: &'a mut State, array: &'a str) -> impl Iterator<Item = &'a mut Vec<String>> {
    state.arrays.iter_mut().filter(move |record| record.name == array).map(|record| &mut record.devices)
}

impl Engine {
    /// Every array.
    pub fn arrays(&self) -> Vec<Array> {
        let live = self.live();
        live.state.arrays.iter().map(|record| self.array_report(&live, record)).collect()
    }

    /// The array with this name or UUID.
    ///
    /// # Errors
    /// When there is none.
    pub fn array(&self, key: &str) -> Result<Array, ApiError> {
        let live = self.live();
        let record = find_record(&live.state.arrays, key)?;
        Ok(self.array_report(&live, record))
    }

    fn array_report(&self, live: &Live, record: &ArrayRecord) -> Array {
        let array = live.array_report(record);
        let full_in_s = self.full_in_s(&record.name, array.free_bytes);
        self.with_drives(Array { full_in_s, ..array })
    }

    /// The members of an array.
    ///
    /// # Errors
    /// When there is no such array.
    pub fn members(&self, key: &str) -> Result<Vec<Member>, ApiError> {
        Ok(self.array(key)?.members)
    }

    /// Makes an array of devices, and runs it.
    ///
    /// # Errors
    /// When the request is invalid, or members do not fit, hold something, or fail.
    pub fn create_array(&self, new: &NewArray) -> Result<Array, ApiError> {
        let _alone = self.change();
        self.plan_array(new)?.commit(self)?;
        self.read_new_drives();
        self.array(&new.name)
    }

    fn plan_array(&self, new: &NewArray) -> Result<PlannedArray, ApiError> {
        let creation = checks::array(new)?;
        self.check_is_new(&new.name)?;
        let members = || new.members.iter().chain(&new.spares);
        self.check_are_open(&new.name, members())?;
        let creation = creation.plan()?;
        let record = ArrayRecord {
            name: new.name.clone(),
            uuid: creation.uuid().to_string(),
            devices: members().cloned().collect(),
        };
        Ok(PlannedArray { record, creation })
    }

    /// Checks that the sandbox lets members of an array be opened.
    fn check_are_open<'a>(
        &self,
        name: &str,
        members: impl IntoIterator<Item = &'a String>,
    ) -> Result<(), ApiError> {
        let checked = members.into_iter().try_for_each(|member| self.check_is_open(member));
        checked.map_err(|error| error.about(&format!("array {name}")))
    }

    /// Does something to an array that runs.
    ///
    /// # Errors
    /// When it does not run, or that cannot be done.
    pub fn act_on_array(
        &self,
        key: &str,
        action: &ArrayAction,
        authority: &Authority,
    ) -> Result<Done, ApiError> {
        let name = find_record(&self.live().state.arrays, key)?.name.clone();
        let text = self.control_array(&name, action.clone(), authority)?.text;
        Ok(Done { text: if text.is_empty() { "done".into() } else { text }, array: self.array(&name)? })
    }

    /// Carries out what the API, or the array's control socket, asks of an array that runs.
    fn control_array(
        &self,
        name: &str,
        action: ArrayAction,
        authority: &Authority,
    ) -> Result<protocol::Done, ApiError> {
        let _alone = self.change();
        self.plan_action(name, action, authority)?.commit(self)
    }

    fn plan_action(
        &self,
        name: &str,
        action: ArrayAction,
        authority: &Authority,
    ) -> Result<PlannedAction, ApiError> {
        let word = word(&action);
        let (running, newcomers) = {
            let live = self.live();
            let offline = || ApiError::new(Kind::Unavailable, format!("array {name}: it does not run"));
            let running = live.arrays.get(name).ok_or_else(offline)?.running.clone();
            if matches!(action, ArrayAction::Grow { .. }) {
                live.check_keeps_size(name, &Target::Array(name.into()))?;
            }
            let known = &find_record(&live.state.arrays, name)?.devices;
            let mut newcomers = newcomers(&action);
            newcomers.retain(|device| !known.contains(device));
            (running, newcomers)
        };
        authority.check_newcomers(&newcomers)?;
        self.check_are_open(name, &newcomers)?;
        let planned = running.plan(action);
        let planned = planned.map_err(|error| ApiError::invalid(format!("array {name}: {error}")))?;
        Ok(PlannedAction { name: name.to_owned(), running, newcomers, planned, word })
    }

    /// Stops an unused array and forgets it. Its superblocks are erased unless members are to be
    /// `kept`.
    ///
    /// # Errors
    /// When there is none, it is in use, or its members cannot be written.
    pub fn delete_array(
        &self,
        key: &str,
        is_kept: bool,
        check: impl FnOnce(&Array) -> Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        let _alone = self.change();
        let array = self.array(key)?;
        check(&array)?;
        self.plan_array_deletion(&array.name, is_kept)?.commit(self)
    }

    fn plan_array_deletion(&self, name: &str, is_kept: bool) -> Result<PlannedArrayDeletion, ApiError> {
        let live = self.live();
        live.check_is_unused(name)?;
        let record = find_record(&live.state.arrays, name)?.clone();
        let is_elsewhere = |device: &String| {
            live.state.arrays.iter().any(|other| other.name != name && other.devices.contains(device))
        };
        let own = || record.devices.iter().filter(|device| !is_elsewhere(device)).cloned().collect();
        let erased = (!is_kept).then(own);
        Ok(PlannedArrayDeletion { record, erased })
    }

    /// Erases the superblocks of an array that does not run any more.
    fn erase_all(&self, devices: &[String], uuid: &str) -> Result<(), ApiError> {
        // Cores may be about to close them.
        let members: Vec<Arc<dyn Device>> = retry_while(stack::is_in_use, || {
            find(devices, uuid, true).into_iter().map(|candidate| candidate.device).collect::<Result<_, _>>()
        })?;
        members.iter().try_for_each(|device| self.erase(device))
    }

    fn erase(&self, device: &Arc<dyn Device>) -> Result<(), ApiError> {
        let device = device.clone();
        let erased = self.core().block_on(move |_| async move {
            let channel = device.open_channel().map_err(ApiError::from)?;
            zero_superblock(&*channel, device.limits().capacity).await.map_err(ApiError::failed)
        });
        erased?.map(drop)
    }

    /// Finds the members of an array and runs it, degraded if it `may_be`. Within a change.
    pub(super) fn run_array(&self, record: &ArrayRecord, may_be_degraded: bool) -> Result<(), ApiError> {
        let opened = self.open_array(record, may_be_degraded)?;
        let core = self.core();
        let kept = keep_one(&opened, &self.spares, &core)?;
        let this = self.this.clone();
        let refresh = move || {
            if let Some(engine) = this.upgrade() {
                engine.wants_refresh.store(true, Ordering::SeqCst);
            }
        };
        // An array's socket does not end the daemon: that is refused before it is asked for.
        let requests = Requests { stop: Arc::new(|| {}), refresh: Arc::new(refresh) };
        let counted = self.counted.clone();
        let wrap = Arc::new(move |device| counted.count(device));
        let running = Arc::new(Running::new(&kept, &core, requests, self.confined.permits()).wrapping(wrap));
        let base = match self.open_base(&record.name, opened.array.clone()) {
            Ok(base) => base,
            Err(error) => {
                ArrayLive { _socket: None, running, kept }.stop(&core);
                return Err(error);
            }
        };
        let remembered = Remembered { engine: self.this.clone(), running: running.clone() };
        let socket = self.options.has_array_sockets.then(|| listen_for(&opened.array, Arc::new(remembered)));
        let mut live = self.live_mut();
        live.bases.insert(record.name.clone(), Ok(base));
        live.arrays.insert(record.name.clone(), ArrayLive { _socket: socket.flatten(), running, kept });
        Ok(())
    }

    fn open_array(&self, record: &ArrayRecord, may_be_degraded: bool) -> Result<Opened, ApiError> {
        let wanted = Wanted { array: Some(record.uuid.clone()), run: may_be_degraded, ..Wanted::default() };
        let mut devices = record.devices.clone();
        for directory in &self.options.scan {
            let is_known = |path: &Path| devices.iter().any(|known| is_same(Path::new(known), path));
            let new: Vec<String> = disks_in(directory)?
                .iter()
                .filter(|path| !is_known(path))
                .map(|path| path.display().to_string())
                .collect();
            devices.extend(new);
        }
        let selection = retry_while(stack::array::ArrayError::is_in_use, || {
            let mut candidates = find(&devices, &record.uuid, true);
            for candidate in &mut candidates {
                if let Ok(device) = &mut candidate.device {
                    *device = self.counted.count(device.clone());
                }
            }
            choose(candidates, &wanted)
        })?;
        for warning in &selection.warnings {
            tracing::warn!(array = record.name, "{warning}");
        }
        if let (Some(slot), false) = (selection.assembly.missing.first(), may_be_degraded) {
            let detail = format!("array {}: slot {slot} is missing, and waited for", record.name);
            return Err(ApiError::new(Kind::Unavailable, detail));
        }
        let spares = selection.spares();
        let array = stack::array::start(selection)?;
        Ok(Opened { array, spares })
    }

    fn take_down(&self, name: &str) {
        let (base, array) = {
            let mut live = self.live_mut();
            (live.bases.remove(name), live.arrays.remove(name))
        };
        drop(base);
        if let Some(array) = array {
            array.stop(&self.core());
        }
        // Cores close their channels on request; the first of them forwards it. Then the members
        // are free for their next user.
        for core in self.cores.all() {
            let _ = core.call(|_| ());
        }
    }

    /// Learns of arrays whose members lie where they are looked for.
    pub(super) fn discover(&self) {
        for directory in &self.options.scan {
            let found = match labels(directory) {
                Ok(found) => found,
                Err(error) => {
                    tracing::warn!(%error, "no arrays are looked for");
                    continue;
                }
            };
            for (path, name, uuid) in found {
                self.learn(&path, &name, uuid);
            }
        }
    }

    fn learn(&self, path: &Path, name: &str, uuid: Uuid) {
        let (path, uuid) = (path.display().to_string(), uuid.to_string());
        let live = self.live();
        if live.state.arrays.iter().any(|array| array.uuid == uuid && array.devices.contains(&path)) {
            return;
        }
        let is_new = !live.state.arrays.iter().any(|array| array.uuid == uuid);
        drop(live);
        if is_new && let Err(error) = self.check_is_new(name) {
            tracing::warn!(array = name, uuid, path, %error, "an array was found that cannot be run");
            return;
        }
        let learnt = self.commit(|state| match state.arrays.iter_mut().find(|array| array.uuid == uuid) {
            Some(array) => array.devices.push(path.clone()),
            None => {
                let (name, uuid) = (name.to_owned(), uuid.clone());
                state.arrays.push(ArrayRecord { name, uuid, devices: vec![path.clone()] });
            }
        });
        match learnt {
            Ok(()) if is_new => self.events.emit("array", name, "found", format!("a member at {path}")),
            Ok(()) => {}
            Err(error) => tracing::error!(array = name, %error, "a found member cannot be recorded"),
        }
    }
}

/// The record of the array with this name or UUID.
pub(super) fn find_record<'a>(records: &'a [ArrayRecord], key: &str) -> Result<&'a ArrayRecord, ApiError> {
    let uuid = Uuid::parse(key).map(|uuid| uuid.to_string());
    let is_it = |record: &&ArrayRecord| record.name == key || Some(&record.uuid) == uuid.as_ref();
    records.iter().find(is_it).ok_or_else(|| ApiError::not_found("array", key))
}

fn is_same(one: &Path, other: &Path) -> bool {
    one == other || matches!((one.canonicalize(), other.canonicalize()), (Ok(one), Ok(other)) if one == other)
}

/// The event of an action.
fn word(action: &ArrayAction) -> &'static str {
    match action {
        ArrayAction::Fail { .. } => "member failed",
        ArrayAction::Remove { .. } => "member removed",
        ArrayAction::Add { .. } => "device added",
        ArrayAction::ReAdd { .. } => "member re-added",
        ArrayAction::Replace { .. } => "member replaced",
        ArrayAction::Grow { .. } => "grown",
        ArrayAction::Scrub { .. } => "scrub begun",
        ArrayAction::Set { .. } => "set",
        ArrayAction::Pause => "paused",
        ArrayAction::Resume => "resumed",
        ArrayAction::Cancel => "cancelled",
    }
}

/// Devices that become members or spares.
fn newcomers(action: &ArrayAction) -> Vec<String> {
    match action {
        ArrayAction::Add { devices, .. } | ArrayAction::ReAdd { devices } => devices.clone(),
        ArrayAction::Replace { device, .. } => vec![device.clone()],
        _ => Vec::new(),
    }
}

/// An array's control socket: what it asks for goes the way of all changes.
struct Remembered {
    engine: Weak<Engine>,
    running: Arc<Running>,
}

impl Controlled for Remembered {
    fn control(&self, array: Option<&str>, command: Command) -> Result<protocol::Done, String> {
        let name = &self.running.array().config().name;
        let Command::Act(action) = command else { return self.running.control(array, command) };
        if let Some(other) = array.filter(|array| !self.running.is_called(array)) {
            return Err(format!("array {other} is not served here; this is {name}"));
        }
        let engine = self.engine.upgrade().ok_or("the daemon is ending")?;
        engine.control_array(name, action, &Authority::Full).map_err(|error| {
            // A client of the socket names the array itself.
            error.detail.strip_prefix(&format!("array {name}: ")).unwrap_or(&error.detail).to_owned()
        })
    }
}
