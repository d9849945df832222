//! Exports: started, remembered, started again.

use super::attach::attach;
use super::authority::Authority;
use super::change::Effects;
use super::hosts::{ExportAccess, PlannedHosts, listed};
use super::open_volumes::OpenVolume;
use super::{Engine, Live};
use crate::api_error::{ApiError, Kind};
use crate::labels;
use crate::state::{DATA_PLANE, ExportRecord, State, Target};
use crate::workers::{Order, RemoteExport, Tell, Workers};
use api::{Attach, DataPlane, Export, ExportChange, ExportState, NewExport, Traffic};
use block::{Device, Op};
use exports::Stats;
use hosting::export::{Apart, ExportPlan, KINDS, data_plane};
use sandbox::Profile;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use volume::{Name, Uuid};

/// Kinds that get a socket of their own unless the request names one.
const WITH_SOCKET: [&str; 2] = ["vhost-user-blk", "nbd"];
/// Keys that are fields of their own, or not for people to choose.
const OWN_KEYS: [&str; 3] = ["device", "cores", "readonly"];

/// An export that clients may connect to.
pub struct ExportLive {
    /// First: it ends before what it serves is closed.
    pub(super) export: Arc<dyn exports::Export>,
    /// The same export, if a process of its own serves it.
    pub(super) remote: Option<Arc<RemoteExport>>,
    /// Where it is.
    description: String,
    fields: Map<String, Value>,
    /// Whether it, or a device that it serves, refuses writes.
    is_read_only: bool,
    /// The hosts that may connect, if its kind has a list of them.
    pub(super) access: Option<ExportAccess>,
    /// Why its files of keys and certificates were not read again.
    pub(super) keys_error: Option<String>,
    /// Kept open.
    volumes: Vec<Arc<OpenVolume>>,
}

/// The block device that is named by fields of an export.
fn node_of(fields: &Map<String, Value>) -> Option<PathBuf> {
    fields.get("path")?.as_str().filter(|path| path.starts_with("/dev/")).map(PathBuf::from)
}

impl ExportLive {
    /// The block device of this host that it is, if it is one.
    pub(super) fn node(&self) -> Option<PathBuf> {
        node_of(&self.fields)
    }

    /// Keeps a volume open that has replaced a target.
    pub(super) fn keep(&mut self, volume: Arc<OpenVolume>) {
        self.volumes.push(volume);
    }
}

impl Live {
    /// Tells the clients of an export that what it serves has grown.
    pub fn notify_resize(&self, name: &str) {
        if let Ok(running) = self.served(name) {
            running.export.notify_resize();
        }
    }

    /// An export that clients may connect to.
    pub(super) fn served(&self, name: &str) -> Result<&ExportLive, ApiError> {
        match self.exports.get(name) {
            Some(Ok(running)) => Ok(running),
            _ => Err(ApiError::new(Kind::Unavailable, format!("export {name}: it is not served"))),
        }
    }

    /// The access to an export that clients may connect to.
    pub(super) fn access_of(&self, name: &str) -> Option<&ExportAccess> {
        self.served(name).ok()?.access.as_ref()
    }

    /// The name of an export's target.
    pub fn target_name(&self, target: &Target) -> String {
        match target {
            Target::Volume(uuid) => {
                self.volume(uuid).map_or(uuid.clone(), |(_, _, info)| info.name.to_string())
            }
            Target::Array(name) | Target::Device(name) => name.clone(),
        }
    }

    fn export_report(&self, record: &ExportRecord) -> Export {
        let volumes = record.targets.iter().map(|target| self.target_name(target));
        let running = self.exports.get(&record.name);
        let is_active = matches!(running, Some(Ok(_)));
        let running = running.map(Result::as_ref);
        Export {
            name: record.name.clone(),
            kind: record.kind.clone(),
            volumes: volumes.collect(),
            options: record.options.clone(),
            hosts: listed(record),
            ana: self.ana_of(record),
            read_only: record.read_only,
            cores: record.cores.clone(),
            state: if is_active { ExportState::Active } else { ExportState::Waiting },
            error: running.and_then(Result::err).map(ApiError::to_string),
            description: running.and_then(Result::ok).map(|running| running.description.clone()),
            traffic: running.and_then(Result::ok).map(|running| traffic(running.export.stats())),
            label: record.label.clone(),
            labels: record.labels.clone(),
        }
    }

    pub(super) fn export_record(&self, name: &str) -> Result<&ExportRecord, ApiError> {
        let record = self.state.exports.iter().find(|export| export.name == name);
        record.ok_or_else(|| ApiError::not_found("export", name))
    }
}

/// An export that nothing stands in the way of, as far as that can be seen before it is started.
struct PlannedExport {
    record: ExportRecord,
}

impl PlannedExport {
    /// It is started before it is remembered, since the kernel may choose its number; dropped, it
    /// ends.
    fn commit(self, engine: &Engine) -> Result<(), ApiError> {
        let PlannedExport { mut record } = self;
        let running = engine.start_export(&record)?;
        // After a restart it is to be that one again.
        if record.options.get("id").is_some_and(|id| id == "auto")
            && let Some(id) = running.fields.get("id").and_then(Value::as_u64)
        {
            record.options.insert("id".into(), id.to_string());
        }
        let (name, description) = (record.name.clone(), running.description.clone());
        let labels = record.labels.clone();
        engine.commit(|state| state.exports.push(record))?;
        engine.live_mut().exports.insert(name.clone(), Ok(running));
        engine.events.emit_labelled("export", &name, &labels, "created", description);
        Ok(())
    }
}

/// A change of an export that is served.
struct PlannedChange {
    before: ExportRecord,
    record: ExportRecord,
    /// Places of its cores, before and after.
    maps: (Vec<usize>, Vec<usize>),
    /// Absent when the data plane stays.
    switch: Option<PlannedSwitch>,
    /// A description of the new ANA states; absent when they stay.
    states: Option<String>,
    /// Absent when the hosts stay.
    hosts: Option<PlannedHosts>,
}

/// Another data plane for an export, with its new description.
struct PlannedSwitch {
    plane: DataPlane,
    description: String,
    fields: Map<String, Value>,
}

impl PlannedChange {
    fn commit(self, engine: &Engine) -> Result<(), ApiError> {
        let PlannedChange { before, record, maps, switch, states, mut hosts } = self;
        let name = &record.name;
        let mut effects = Effects::new(engine, "export", name);
        let set = |record: &ExportRecord| {
            let record = record.clone();
            move |state: &mut State| {
                let found = state.exports.iter_mut().find(|export| export.name == record.name);
                found.into_iter().for_each(|export| export.clone_from(&record));
            }
        };
        let mut done = Vec::new();
        if let Some(hosts) = &mut hosts {
            hosts.save_secrets(engine, &before)?;
        }
        effects.remember(set(&record), set(&before))?;
        if before.cores != record.cores {
            // One that fails half-way has moved some of its queues.
            effects.undo_by(|| Ok(engine.live().served(name)?.export.remap(&maps.0)?));
            engine.live().served(name)?.export.remap(&maps.1)?;
            done.push(served_by(&record.cores));
        }
        if let Some(states) = states {
            effects.undo_by(|| engine.put_states(&before));
            engine.put_states(&record)?;
            done.push(states);
        }
        if let Some(PlannedSwitch { plane, description, fields }) = switch {
            // Its failure changes nothing. Nothing that can fail follows, so it needs no undo.
            let switched = engine.live().served(name)?.export.set_data_plane(data_plane(plane));
            switched.map_err(ApiError::from).map_err(|error| error.about(&format!("export {name}")))?;
            if let Some(Ok(running)) = engine.live_mut().exports.get_mut(name) {
                (running.description, running.fields) = (description, fields);
            }
            done.push(format!("data plane: {plane}"));
        }
        // Last, for the same reason.
        let takes_access = hosts.as_ref().is_some_and(PlannedHosts::takes_access);
        if let Some(hosts) = hosts {
            done.push(hosts.apply(engine, &record)?);
            engine.prune_secrets(&record);
        }
        if record.labels != before.labels {
            done.push(labels::describe(&record.labels));
        }
        effects.keep();
        // The predecessor of a damaged state counts: it must not list a host that is gone.
        if takes_access && let Err(error) = engine.commit(|_| {}) {
            tracing::error!(export = name, %error, "the previous state still has hosts without access");
        }
        engine.events.emit_labelled("export", name, &record.labels, "changed", done.join("; "));
        Ok(())
    }
}

/// Whether exports of a kind can be served by the kernel or by the cores.
fn has_data_planes(kind: &str) -> bool {
    KINDS.iter().any(|known| known.name == kind && known.keys.iter().any(|key| key.name == DATA_PLANE))
}

fn served_by(cpus: &[usize]) -> String {
    let cpus: Vec<String> = cpus.iter().map(usize::to_string).collect();
    if cpus.is_empty() { "served by all cores".into() } else { format!("served by {}", cpus.join(", ")) }
}

impl Engine {
    /// Every export.
    pub fn exports(&self) -> Vec<Export> {
        let live = self.live();
        live.state.exports.iter().map(|record| live.export_report(record)).collect()
    }

    /// The export with this name.
    ///
    /// # Errors
    /// When there is none.
    pub fn export(&self, name: &str) -> Result<Export, ApiError> {
        let live = self.live();
        Ok(live.export_report(live.export_record(name)?))
    }

    /// Lines to attach an export with.
    ///
    /// # Errors
    /// When there is none, or it is not served.
    pub fn attach(&self, name: &str) -> Result<Attach, ApiError> {
        let live = self.live();
        let (record, served) = (live.export_record(name)?, live.served(name)?);
        Ok(attach(record, &served.fields, served.is_read_only))
    }

    /// Starts an export, now and at every start of the daemon.
    ///
    /// # Errors
    /// When the name is taken, what it is to serve is not there, or it cannot be started.
    pub fn create_export(&self, new: &NewExport, authority: &Authority) -> Result<Export, ApiError> {
        let _alone = self.change();
        self.plan_export(new, authority)?.commit(self)?;
        self.export(&new.name)
    }

    fn plan_export(&self, new: &NewExport, authority: &Authority) -> Result<PlannedExport, ApiError> {
        // First: `draft` reads files of keys and certificates.
        let targets = new.volumes.iter().map(|key| self.target(key, authority));
        let targets = targets.collect::<Result<Vec<Target>, ApiError>>()?;
        if self.live().export_record(&new.name).is_ok() {
            return Err(ApiError::new(Kind::Exists, format!("export {} exists already", new.name)));
        }
        let (record, plan) = self.draft(new)?;
        let live = self.live();
        live.check_portal_of(&record).map_err(|error| error.about(&format!("export {}", new.name)))?;
        if !record.read_only {
            targets
                .iter()
                .try_for_each(|target| live.check_is_no_source(&live.target_name(target), target))?;
        }
        check_are_different(&live, &new.name, &targets)?;
        for other in &live.state.exports {
            if plan_of(other).is_ok_and(|other| other.config.name() == plan.config.name()) {
                let detail = format!("export {}: {} is export {}", new.name, plan.config.name(), other.name);
                return Err(ApiError::new(Kind::Exists, detail));
            }
        }
        let label = authority.label(new.label.as_deref());
        Ok(PlannedExport { record: ExportRecord { targets, label, ..record } })
    }

    /// Changes an export while it is served.
    ///
    /// # Errors
    /// When there is none, it is not served, or its kind cannot do that.
    pub fn change_export(
        &self,
        name: &str,
        change: &ExportChange,
        check: impl FnOnce(&Export) -> Result<(), ApiError>,
    ) -> Result<Export, ApiError> {
        let _alone = self.change();
        let before = self.export(name)?;
        check(&before)?;
        match self.plan_change(name, change)? {
            Some(plan) => plan.commit(self)?,
            None => return Ok(before),
        }
        self.export(name)
    }

    /// Nothing when the export is already as it is to be.
    fn plan_change(&self, name: &str, change: &ExportChange) -> Result<Option<PlannedChange>, ApiError> {
        let before = self.live().export_record(name)?.clone();
        let mut record = before.clone();
        if let Some(cores) = &change.cores {
            record.cores.clone_from(cores);
        }
        if change.data_plane.is_some() && !has_data_planes(&record.kind) {
            let detail =
                format!("export {name}: exports of kind {} have no choice of data planes", record.kind);
            return Err(ApiError::invalid(detail));
        }
        let old = record.options.get(DATA_PLANE).and_then(|word| DataPlane::from_name(word));
        let old = old.unwrap_or(DataPlane::User);
        // The device, or the module, may have changed since the last choice.
        let new = change.data_plane.filter(|new| *new != old || *new == DataPlane::Auto);
        if let Some(new) = new {
            record.options.insert(DATA_PLANE.into(), new.to_string());
        }
        let hosts = change.hosts.as_ref().map(|hosts| self.plan_hosts(&mut record, hosts)).transpose();
        let hosts = hosts.map_err(|error| error.about(&format!("export {name}")))?.flatten();
        let states = change.ana.as_ref().map(|states| self.plan_states(&mut record, states)).transpose();
        let states = states.map_err(|error| error.about(&format!("export {name}")))?.flatten();
        let has_moved = record.cores != before.cores;
        if let Some(change) = &change.labels {
            let after = labels::changed(&before.labels, change);
            record.labels = after.map_err(|error| error.about(&format!("export {name}")))?;
        }
        let is_other = has_moved || new.is_some() || states.is_some() || hosts.is_some();
        if !is_other && record.labels == before.labels {
            return Ok(None);
        }
        let maps = (self.core_map(&before)?, self.core_map(&record)?);
        let switch = new.map(|plane| self.plan_switch(&record, plane, maps.1.clone())).transpose()?;
        // Hosts and ANA states may change while it is not served: no host is connected.
        if has_moved || switch.is_some() {
            self.live().served(name)?;
        }
        Ok(Some(PlannedChange { before, record, maps, switch, states, hosts }))
    }

    /// The switch to `plane`, which `record` already names.
    fn plan_switch(
        &self,
        record: &ExportRecord,
        plane: DataPlane,
        cores: Vec<usize>,
    ) -> Result<PlannedSwitch, ApiError> {
        let mut plan = plan_of(record)?;
        self.check_needs(record, &plan)?;
        self.check_apart(record, &plan)?;
        plan.config.complete(&record.name, cores);
        Ok(PlannedSwitch { plane, description: plan.config.line(&record.name), fields: plan.config.fields() })
    }

    /// Ends an export, and forgets it. Its clients lose it.
    ///
    /// # Errors
    /// When there is none.
    pub fn delete_export(
        &self,
        name: &str,
        check: impl FnOnce(&Export) -> Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        let _alone = self.change();
        let export = self.export(name)?;
        check(&export)?;
        self.commit(|state| state.exports.retain(|export| export.name != name))?;
        let running = self.live_mut().exports.remove(name);
        drop(running); // not under the lock: it waits for requests in flight
        self.prune_secrets(&ExportRecord { name: name.into(), ..ExportRecord::default() });
        self.events.emit_labelled("export", name, &export.labels, "deleted", "ended and forgotten");
        Ok(())
    }

    /// Ends exports at the end of the daemon. Processes of their own end side by side: one that
    /// does not end in order takes a while to be killed.
    pub(super) fn end_exports(&self, exports: BTreeMap<String, Result<ExportLive, ApiError>>) {
        const AT_A_TIME: usize = 64;
        let mut running: Vec<ExportLive> = exports.into_values().flatten().collect();
        while self.workers.is_some() && !running.is_empty() {
            let some = running.split_off(running.len().saturating_sub(AT_A_TIME));
            std::thread::scope(|scope| {
                some.into_iter().for_each(|export| drop(scope.spawn(|| drop(export))))
            });
        }
    }

    /// Checks of an export what needs nothing of what is there but the daemon's own options.
    ///
    /// # Errors
    /// With what cannot be, named.
    pub fn check_export(&self, new: &NewExport) -> Result<(), ApiError> {
        self.draft(new).map(drop)
    }

    /// The record of an export that serves nothing yet, and what it is planned as.
    fn draft(&self, new: &NewExport) -> Result<(ExportRecord, ExportPlan), ApiError> {
        Name::new(&new.name)?;
        new.label.as_deref().map(Name::new).transpose()?;
        let invalid = |detail: String| ApiError::invalid(format!("export {}: {detail}", new.name));
        labels::check(&new.labels).map_err(|error| error.about(&format!("export {}", new.name)))?;
        if new.volumes.is_empty() {
            return Err(invalid("no volume, array or device to serve".into()));
        }
        // Otherwise a kind could bring options that no check of options sees.
        if !KINDS.iter().any(|kind| kind.name == new.kind) {
            let known: Vec<&str> = KINDS.iter().map(|kind| kind.name).collect();
            return Err(invalid(format!("no such export: {:?}; there are {}", new.kind, known.join(", "))));
        }
        let mut options = new.options.clone();
        for (key, value) in &options {
            let is_key = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
            if OWN_KEYS.contains(&&**key) || !key.bytes().all(is_key) {
                return Err(invalid(format!("unknown option {key:?}")));
            }
            if key == "socket" && !Path::new(value).is_absolute() {
                return Err(invalid(format!("socket {value:?}: want an absolute path")));
            }
        }
        if WITH_SOCKET.contains(&&*new.kind)
            && !options.contains_key("socket")
            && !options.contains_key("listen")
            && !options.contains_key("portal")
        {
            let socket = self.options.runtime_dir.join(format!("{}.sock", new.name));
            options.insert("socket".into(), socket.display().to_string());
        }
        // Clients of a portal choose by this name.
        if new.kind == "nbd" && options.contains_key("portal") {
            options.entry("name".into()).or_insert_with(|| new.name.clone());
        }
        if new.kind == "ublk" {
            options.entry("id".into()).or_insert_with(|| "auto".into());
        }
        let record = ExportRecord {
            name: new.name.clone(),
            kind: new.kind.clone(),
            targets: Vec::new(),
            options,
            read_only: new.read_only,
            cores: new.cores.clone(),
            labels: new.labels.clone(),
            ..ExportRecord::default()
        };
        self.check_files(&record)?;
        let plan = plan_of(&record)?;
        if new.volumes.len() > 1 && !plan.config.takes_many() {
            return Err(invalid(format!("an export over {} serves one", record.kind)));
        }
        self.core_map(&record)?;
        self.check_needs(&record, &plan)?;
        self.check_apart(&record, &plan)?;
        Ok((record, plan))
    }

    /// The volume, array or device called `key`, if it may be exported or copied.
    pub(super) fn target(&self, key: &str, authority: &Authority) -> Result<Target, ApiError> {
        let live = self.live();
        let none = || ApiError::not_found("volume, array or device", key);
        if let Ok(array) = super::arrays::find_record(&live.state.arrays, key) {
            authority.check_whole(key, none)?;
            return whole(&live, &array.name, Target::Array(array.name.clone()));
        }
        if live.state.devices.iter().any(|device| device.name == key) {
            authority.check_whole(key, none)?;
            return whole(&live, key, Target::Device(key.into()));
        }
        match live.volume(key) {
            Ok((_, _, info)) => {
                let uuid = info.uuid.to_string();
                let label = live.state.volumes.get(&uuid).and_then(|record| record.label.as_deref());
                authority.check_owns(label, none)?;
                live.check_is_complete(&uuid)?;
                Ok(Target::Volume(uuid))
            }
            Err(error) if error.kind == Kind::NotFound => Err(none()),
            Err(error) => Err(error),
        }
    }

    /// Starts an export as its record says. Within a change.
    pub(super) fn start_export(&self, record: &ExportRecord) -> Result<ExportLive, ApiError> {
        let mut plan = plan_of(record)?;
        let access = self.complete_access(record, &mut plan)?;
        let cores = self.core_map(record)?;
        self.check_needs(record, &plan)?;
        self.use_portal(record, &mut plan)?;
        let (mut devices, mut volumes): (Vec<Arc<dyn Device>>, Vec<Arc<OpenVolume>>) = Default::default();
        for target in &record.targets {
            match target {
                Target::Volume(uuid) => {
                    if Uuid::parse_hyphenated(uuid).is_none() {
                        return Err(ApiError::not_found("volume", uuid));
                    }
                    let open = self.open_volume(uuid)?;
                    devices.push(open.device.clone());
                    volumes.push(open);
                }
                Target::Array(name) | Target::Device(name) => {
                    let live = self.live();
                    live.check_counts(name, target)?;
                    devices.push(live.base(name)?.served.clone());
                }
            }
        }
        // Named after the export, whose name does not change: what clients see of it must not
        // either.
        plan.config.complete(&record.name, cores);
        let is_read_only = record.read_only || devices.iter().any(|device| device.limits().read_only);
        let failed = |error: exports::Error| ApiError::from(error).about(&format!("export {}", record.name));
        let (export, remote): (Arc<dyn exports::Export>, _) = match &self.workers {
            None => (plan.config.start(&devices, self.cores.all()).map_err(failed)?.into(), None),
            Some(workers) => {
                let remote = self.start_apart(record, &plan, access.as_ref(), devices, workers);
                let remote = Arc::new(remote.map_err(failed)?);
                (remote.clone(), Some(remote))
            }
        };
        let (description, fields) = (plan.config.line(&record.name), plan.config.fields());
        let keys_error = None;
        Ok(ExportLive { export, remote, description, fields, is_read_only, access, keys_error, volumes })
    }

    /// Has the description of a served export be that of its record.
    pub(super) fn describe_again(&self, record: &ExportRecord) {
        let described = plan_of(record).and_then(|mut plan| {
            self.use_portal(record, &mut plan)?;
            plan.config.complete(&record.name, self.core_map(record)?);
            Ok((plan.config.line(&record.name), plan.config.fields()))
        });
        match (described, self.live_mut().exports.get_mut(&record.name)) {
            (Ok(described), Some(Ok(running))) => (running.description, running.fields) = described,
            (Err(error), _) => {
                tracing::warn!(export = record.name, %error, "the description of an export is an earlier one");
            }
            (Ok(_), _) => {}
        }
    }

    /// Has an export share the portal that it names, if it does.
    fn use_portal(&self, record: &ExportRecord, plan: &mut ExportPlan) -> Result<(), ApiError> {
        let Some(name) = plan.config.portal() else { return Ok(()) };
        let about = |error: ApiError| error.about(&format!("export {}", record.name));
        let portal = self.live().portal(name).map_err(about)?;
        plan.config.use_portal(portal).map_err(|fault| about(ApiError::invalid(fault)))
    }

    /// Ends an export that is served by a process of its own, and starts it again. Its clients
    /// reconnect.
    pub(super) fn start_again(&self, record: &ExportRecord) {
        let running = self.live_mut().exports.remove(&record.name);
        drop(running); // not under the lock: it waits for requests in flight
        let started = self.start_export(record);
        self.live_mut().exports.insert(record.name.clone(), started);
    }

    /// Starts an export in a process of its own.
    fn start_apart(
        &self,
        record: &ExportRecord,
        plan: &ExportPlan,
        access: Option<&ExportAccess>,
        devices: Vec<Arc<dyn Device>>,
        workers: &Arc<Workers>,
    ) -> Result<RemoteExport, exports::Error> {
        let order = Order {
            name: record.name.clone(),
            text: record.text(),
            host_secrets: access.map_or(Vec::new(), |access| access.secrets().to_vec()),
            listen: needs_apart(plan)?.listen,
            read_only: plan.config.is_read_only(),
            cpus: self.options.cores.iter().map(|core| core.cpu).collect(),
            core_map: plan.config.cores().to_vec(),
        };
        let (events, name) = (self.events.clone(), record.name.clone());
        let tell: Tell = Box::new(move |what, text| events.emit("export", &name, what, text));
        RemoteExport::start(order, devices, self.cores.all(), workers.clone(), tell)
    }

    /// Checks that the daemon has the capabilities and can open the paths that an export needs.
    fn check_needs(&self, record: &ExportRecord, plan: &ExportPlan) -> Result<(), ApiError> {
        let mut needs = Profile::default();
        plan.config.keep(&mut needs);
        let has = self.confined.capabilities();
        if let Some(needed) = needs.capabilities().iter().find(|needed| !has.contains(&needed.to_string())) {
            let detail = format!("export {}: it takes {needed}, which freestoned does not have", record.name);
            return Err(ApiError::new(Kind::Unavailable, detail));
        }
        self.confined.check(&needs).map_err(|error| error.about(&format!("export {}", record.name)))
    }

    /// Checks that an export can be served where exports are served: here, or in a process of its
    /// own.
    fn check_apart(&self, record: &ExportRecord, plan: &ExportPlan) -> Result<(), ApiError> {
        match self.workers {
            Some(_) => needs_apart(plan).map(drop).map_err(|error| {
                ApiError::invalid(error.to_string()).about(&format!("export {}", record.name))
            }),
            None => Ok(()),
        }
    }

    /// Checks that the daemon can read the files that an export's options name.
    fn check_files(&self, record: &ExportRecord) -> Result<(), ApiError> {
        let mut needs = Profile::default();
        hosting::export::keep_read(&record.text(), &mut needs);
        self.confined.check(&needs).map_err(|error| error.about(&format!("export {}", record.name)))
    }

    /// Places of an export's processors among the cores.
    fn core_map(&self, record: &ExportRecord) -> Result<Vec<usize>, ApiError> {
        let place = |cpu: &usize| {
            let place = self.options.cores.iter().position(|core| core.cpu == Some(*cpu));
            place.ok_or_else(|| {
                let detail =
                    format!("export {}: the daemon does not serve from processor {cpu}", record.name);
                ApiError::invalid(detail)
            })
        };
        record.cores.iter().map(place).collect()
    }
}

/// All of a device or array, if there are no volumes on it.
fn whole(live: &Live, name: &str, target: Target) -> Result<Target, ApiError> {
    match &live.base(name)?.pool {
        None => Ok(target),
        Some(_) => {
            let detail =
                format!("{name}: it is prepared for volumes, of which each is exported or copied by itself");
            Err(ApiError::new(Kind::InUse, detail))
        }
    }
}

/// Refuses a volume together with the device that it has replaced: clients know both by one
/// identity.
fn check_are_different(live: &Live, export: &str, targets: &[Target]) -> Result<(), ApiError> {
    let replaced = |target: &Target| match target {
        Target::Volume(uuid) => live.state.volumes.get(uuid)?.device_name.as_deref(),
        Target::Array(_) | Target::Device(_) => None,
    };
    let known_as = |target: &Target| match target {
        Target::Volume(_) => replaced(target),
        Target::Array(name) | Target::Device(name) => Some(live.base(name).ok()?.device.name()),
    };
    for volume in targets.iter().filter(|target| replaced(target).is_some()) {
        let is_twin = |other: &&Target| *other != volume && known_as(other) == replaced(volume);
        if let Some(other) = targets.iter().find(is_twin) {
            let (volume, other) = (live.target_name(volume), live.target_name(other));
            let detail = format!("export {export}: clients know {volume} and {other} by the same identity");
            return Err(ApiError::invalid(detail));
        }
    }
    Ok(())
}

/// The needs of an export in a process of its own.
fn needs_apart(plan: &ExportPlan) -> Result<Apart, exports::Error> {
    plan.config
        .apart()
        .map_err(|reason| exports::Error::Config(format!("not possible with --process-per-export: {reason}")))
}

pub(super) fn plan_of(record: &ExportRecord) -> Result<ExportPlan, ApiError> {
    Ok(ExportPlan::parse(&record.text())?)
}

fn traffic(stats: &Stats) -> Traffic {
    let mut traffic =
        Traffic { clients: stats.clients(), connections: stats.connections(), ..Traffic::default() };
    for queue in &stats.queues {
        traffic.reads += queue.requests(Op::Read);
        traffic.writes += queue.requests(Op::Write);
        traffic.read_bytes += queue.bytes_read();
        traffic.written_bytes += queue.bytes_written();
        traffic.errors += queue.failed();
    }
    traffic
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_export_over_ublk_is_a_block_device() {
        let node = |fields: Value| node_of(fields.as_object().unwrap());
        assert_eq!(node(json!({ "path": "/dev/ublkb3", "queues": 1 })), Some("/dev/ublkb3".into()));
        assert_eq!(node(json!({ "path": null })), None);
        assert_eq!(node(json!({ "socket": "/dev/shm/vm1.sock" })), None);
    }
}
