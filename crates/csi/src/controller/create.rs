//! CreateVolume: a volume with labels, then its export.
//!
//! ```text
//!   by label csi.name ── found ──► same size and parameters? ──► export ──► answer
//!        │ not found                     └─ no ──► ALREADY_EXISTS
//!        └──► POST volume ── made ──────────────────────────────► export ──► answer
//!                 ├─ job ───► wait a while ──► ABORTED: the orchestrator asks again
//!                 └─ no room ──► the next backend
//! ```

use super::{Controller, NAME_LABEL, PARAMETERS_LABEL, RESERVATIONS_LABEL, check_is_shareable, size_within};
use crate::capability::{all, check_is_direct};
use crate::config::Backend;
use crate::fault::{Fault, Result};
use crate::ids::{DRIVER_LABEL, VolumeId, require, volume_name};
use crate::parameters::{Parameters, change_limits};
use crate::proto::{CreateVolumeRequest, CreateVolumeResponse, TopologyRequirement, Volume as CsiVolume};
use crate::topology;
use api::{Job, JobKind, Labels, MAX_LABEL_VALUE, NewVolume, Volume};
use client::{Begun, Method};
use tonic::Code;

/// A volume that is wanted, checked.
struct Wanted {
    name: String,
    size: u64,
    limit: u64,
    parameters: Parameters,
    topology: Option<TopologyRequirement>,
}

impl Controller {
    /// Makes a volume.
    ///
    /// # Errors
    /// `ALREADY_EXISTS` for a name with another size or other parameters, `RESOURCE_EXHAUSTED`
    /// without room, `ABORTED` while a job zeroes the volume.
    pub fn create_volume(&self, request: CreateVolumeRequest) -> Result<CreateVolumeResponse> {
        let wanted = check(&request)?;
        let candidates = self.candidates(&wanted.parameters)?;
        let accessible = topology::select(&self.driver, &candidates, wanted.topology.as_ref())?;
        let _held = self.locks.take(&format!("volume {:?}", wanted.name))?;
        for backend in &candidates {
            if let Some(volume) = self.find_by_name(backend, &wanted.name)? {
                check_is_wanted(&volume, &wanted)?;
                check_is_accessible(backend, &accessible, &wanted)?;
                return self.complete(backend, &volume, &wanted);
            }
        }
        // A job of an earlier call may be at work, perhaps on a later backend.
        for backend in &candidates {
            if let Some(job) = job_of(backend, &wanted) {
                let volume = backend.wait_for(&job, || self.find_by_name(backend, &wanted.name))?;
                check_is_wanted(&volume, &wanted)?;
                check_is_accessible(backend, &accessible, &wanted)?;
                return self.complete(backend, &volume, &wanted);
            }
        }
        let mut full = None;
        for backend in &accessible {
            match self.make(backend, &wanted) {
                Err(fault) if fault.code == Code::ResourceExhausted => full = Some(fault),
                Err(fault) => return Err(fault),
                Ok(volume) => return self.complete(backend, &volume, &wanted),
            }
        }
        Err(full.unwrap_or_else(|| Fault::internal("no backend is configured")))
    }

    /// The backends that the parameters permit.
    pub(super) fn candidates(&self, parameters: &Parameters) -> Result<Vec<&Backend>> {
        let named = self.named(parameters)?;
        if !parameters.has_reservations {
            return Ok(named);
        }
        let able: Vec<&Backend> =
            named.into_iter().filter(|backend| backend.reservations.is_some()).collect();
        match able.is_empty() {
            true => Err(Fault::invalid(
                "parameter reservations=on: no backend of the class is configured with a directory for them",
            )),
            false => Ok(able),
        }
    }

    /// The backends that the parameters name, or all.
    fn named(&self, parameters: &Parameters) -> Result<Vec<&Backend>> {
        if parameters.backends.is_empty() {
            return Ok(self.backends.iter().collect());
        }
        let find = |name: &String| {
            let found = self.backends.iter().find(|backend| backend.name == *name);
            found.ok_or_else(|| Fault::invalid(format!("parameter backend={name:?}: it is not configured")))
        };
        parameters.backends.iter().map(find).collect()
    }

    fn find_by_name(&self, backend: &Backend, name: &str) -> Result<Option<Volume>> {
        let query =
            [("label", format!("{NAME_LABEL}={name}")), ("label", format!("{DRIVER_LABEL}={}", self.driver))];
        let found: client::Result<Vec<Volume>> = backend.client.list(&["volumes"], &query);
        Ok(found.map_err(|error| backend.fault(error))?.into_iter().next())
    }

    fn make(&self, backend: &Backend, wanted: &Wanted) -> Result<Volume> {
        let Wanted { name, size, parameters, .. } = wanted;
        let backing = backing(backend, parameters)?;
        let mut labels = Labels::from([
            (DRIVER_LABEL.to_owned(), self.driver.clone()),
            (NAME_LABEL.to_owned(), name.clone()),
            (PARAMETERS_LABEL.to_owned(), parameters.fingerprint.clone()),
        ]);
        labels.extend(parameters.labels.clone());
        if parameters.has_reservations {
            labels.insert(RESERVATIONS_LABEL.to_owned(), "on".to_owned());
        }
        let new = NewVolume {
            name: volume_name(name),
            backing,
            size_bytes: *size,
            from: None,
            pivot: false,
            qos: parameters.qos,
            group: parameters.group.clone(),
            min_qos: api::MinQos::default(),
            force: false,
            label: None,
            labels,
        };
        match backend.change::<Begun<Volume>>(Method::POST, &["volumes"], &new) {
            Ok(Begun::Done(volume)) => Ok(volume),
            Ok(Begun::Job(job)) => backend.wait_for(&job, || self.find_by_name(backend, name)),
            Err(fault) if fault.code == Code::AlreadyExists => Err(taken(backend, wanted, fault)),
            Err(fault) => Err(fault),
        }
    }

    /// Answers for a volume that exists.
    fn complete(&self, backend: &Backend, volume: &Volume, wanted: &Wanted) -> Result<CreateVolumeResponse> {
        let id = VolumeId { backend: backend.name.clone(), uuid: volume.uuid.clone() };
        let _held = self.locks.take(&id.to_string())?;
        self.export(backend, &id, volume)?;
        let context = wanted.parameters.context.clone();
        let volume_context = context.into_iter().collect();
        let volume = CsiVolume { volume_context, ..self.shown(backend, &id, volume) };
        Ok(CreateVolumeResponse { volume: Some(volume) })
    }
}

/// The array or device for a volume.
pub(super) fn backing(backend: &Backend, parameters: &Parameters) -> Result<String> {
    let backing = parameters.backing.clone().or_else(|| backend.backing.clone());
    backing.ok_or_else(|| {
        Fault::invalid(format!(
            "parameter backing is missing, and backend {} has no default for it",
            backend.name
        ))
    })
}

fn check(request: &CreateVolumeRequest) -> Result<Wanted> {
    require("name", &request.name)?;
    if request.name.len() > MAX_LABEL_VALUE || request.name.chars().any(char::is_control) {
        return Err(Fault::invalid(format!(
            "name {:?}: want at most {MAX_LABEL_VALUE} bytes without control characters",
            request.name
        )));
    }
    let accesses = all(&request.volume_capabilities)?;
    if request.volume_content_source.is_some() {
        return Err(Fault::invalid("volume_content_source: this driver makes neither clones nor snapshots"));
    }
    let mut parameters = Parameters::parse(&request.parameters)?;
    for access in &accesses {
        check_is_shareable(access, parameters.has_reservations)?;
        if parameters.is_direct {
            check_is_direct(access)?;
        }
    }
    change_limits(&mut parameters.qos, &request.mutable_parameters)?;
    let range = request.capacity_range.as_ref();
    let size = size_within(range)?;
    let limit = range.and_then(|range| u64::try_from(range.limit_bytes).ok()).filter(|limit| *limit > 0);
    let topology = request.accessibility_requirements.clone();
    Ok(Wanted { name: request.name.clone(), size, limit: limit.unwrap_or(u64::MAX), parameters, topology })
}

/// Compares the volume of an earlier call with the wanted one.
fn check_is_wanted(volume: &Volume, wanted: &Wanted) -> Result<()> {
    let other = |text: String| {
        Err(Fault::new(Code::AlreadyExists, format!("volume {:?} exists with {text}", wanted.name)))
    };
    if !(wanted.size..=wanted.limit).contains(&volume.size_bytes) {
        other(format!("{} bytes; {} to {} are wanted", volume.size_bytes, wanted.size, wanted.limit))
    } else if volume.labels.get(PARAMETERS_LABEL) != Some(&wanted.parameters.fingerprint) {
        other("other parameters".into())
    } else {
        Ok(())
    }
}

/// Refuses the volume of an earlier call that the nodes of this one do not reach.
fn check_is_accessible(backend: &Backend, accessible: &[&Backend], wanted: &Wanted) -> Result<()> {
    if accessible.iter().any(|other| other.name == backend.name) {
        return Ok(());
    }
    let detail = format!("volume {:?} exists on backend {}, in another zone", wanted.name, backend.name);
    Err(Fault::new(Code::AlreadyExists, detail))
}

/// The job that makes the volume. A provisioner's token sees no jobs, and needs none: without this
/// answer the daemon refuses the name.
fn job_of(backend: &Backend, wanted: &Wanted) -> Option<Job> {
    let id = format!("{}.{}", volume_name(&wanted.name), JobKind::Create);
    backend.client.find::<Job>(&["jobs", &id]).ok().flatten()
}

/// The daemon has the name already: for a volume of others, or for one that is being made.
fn taken(backend: &Backend, wanted: &Wanted, fault: Fault) -> Fault {
    let name = volume_name(&wanted.name);
    match backend.client.find::<Volume>(&["volumes", &name]) {
        Ok(Some(_)) => fault,
        _ => Fault::again(format!("volume {name} is being made: {}", fault.message)),
    }
}
