//! The controller: volumes and the nodes that have access, asked of `freestoned`.
//!
//! | file | calls |
//! |---|---|
//! | `create` | CreateVolume |
//! | `publish` | ControllerPublishVolume, ControllerUnpublishVolume |
//! | `list` | ListVolumes, GetCapacity, ControllerGetVolume, ControllerGetVolumeHealth |
//! | this one | DeleteVolume, ValidateVolumeCapabilities, ControllerExpandVolume, ControllerModifyVolume |
//!
//! Every call may be repeated after any of its requests, and gives the same answer then.

mod create;
mod export;
mod list;
mod publish;

use crate::capability::{Access, access, all, check_is_direct};
use crate::config::Backend;
use crate::fault::{Fault, Result};
use crate::ids::{DRIVER_LABEL, VolumeId};
use crate::locks::Locks;
use crate::parameters::{Parameters, change_limits, is_direct};
use crate::proto::validate_volume_capabilities_response::Confirmed;
use crate::proto::{
    CapacityRange, ControllerExpandVolumeRequest, ControllerExpandVolumeResponse,
    ControllerModifyVolumeRequest, DeleteVolumeRequest, ValidateVolumeCapabilitiesRequest,
    ValidateVolumeCapabilitiesResponse,
};
use api::{Export, Job, System, Volume, VolumeChange};
use client::{Begun, Method};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};
use tonic::Code;

/// Limit of the question whether a backend answers.
const PROBE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long a call waits for a job that zeroes a volume. Sidecars give a call ten seconds at least.
const JOB_PATIENCE: Duration = Duration::from_secs(8);
/// How long a daemon may need to close a volume whose export has ended.
const CLOSE_PATIENCE: Duration = Duration::from_secs(8);
const POLL: Duration = Duration::from_millis(200);
/// Volumes have whole units of this size, in bytes.
const UNIT: u64 = 1 << 20;
/// Size of a volume for which no size is required, in bytes.
const DEFAULT_SIZE: u64 = 1 << 30;

/// The label with the orchestrator's name of a volume.
const NAME_LABEL: &str = "csi.name";
/// The label with the hash of the parameters that a volume was made with.
const PARAMETERS_LABEL: &str = "csi.parameters";
/// The label of a volume that nodes can reserve.
const RESERVATIONS_LABEL: &str = "csi.reservations";

/// The controller.
pub struct Controller {
    /// Name of the driver.
    driver: String,
    /// Prefix of the NQNs of subsystems.
    nqn_prefix: String,
    /// Storage hosts, in the order of their use.
    pub backends: Vec<Backend>,
    /// One call at a time for each volume.
    locks: Locks,
    /// Whether a backend has answered since the start.
    was_ready: AtomicBool,
}

impl Controller {
    /// The controller of a driver's volumes on these backends.
    pub fn new(driver: &str, nqn_prefix: &str, backends: Vec<Backend>) -> Controller {
        Controller {
            driver: driver.to_owned(),
            nqn_prefix: nqn_prefix.to_owned(),
            backends,
            locks: Locks::default(),
            was_ready: AtomicBool::new(false),
        }
    }

    /// Whether a backend has answered since the start. The controller stays ready when it does not
    /// answer later: orchestrators restart a driver that is not, which helps no backend.
    pub fn is_ready(&self) -> bool {
        if !self.was_ready.load(Ordering::Relaxed) && self.has_backend() {
            self.was_ready.store(true, Ordering::Relaxed);
        }
        self.was_ready.load(Ordering::Relaxed)
    }

    fn has_backend(&self) -> bool {
        let answers = |backend: &Backend| {
            let system = backend.client.get_within::<System>(&["system"], PROBE_TIMEOUT);
            // A refusal is an answer: a provisioner's token does not see the daemon.
            system.map_or_else(|error| error.status().is_some(), |_| true)
        };
        self.backends.iter().any(answers)
    }

    /// Deletes a volume and its export.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` while a node has access, or when this driver has not made the volume.
    pub fn delete_volume(&self, request: &DeleteVolumeRequest) -> Result<()> {
        crate::ids::require("volume_id", &request.volume_id)?;
        // Such a volume cannot exist.
        let Some(id) = VolumeId::parse(&request.volume_id) else { return Ok(()) };
        let backend = self.backend(&id)?;
        let _held = self.locks.take(&id.to_string())?;
        let Some(volume) = backend.find_volume(&id)? else { return Ok(()) };
        if volume.labels.get(DRIVER_LABEL) != Some(&self.driver) {
            return Err(Fault::precondition(format!(
                "volume {id} ({}): driver {} has not made it",
                volume.name, self.driver
            )));
        }
        if let Some(export) = backend.find_export(&id)? {
            if let Some(hosts) = export.hosts.filter(|hosts| !hosts.is_empty()) {
                let hosts = hosts.join(", ");
                return Err(Fault::precondition(format!("volume {id}: hosts have access to it: {hosts}")));
            }
            backend.delete(&["exports", &export.name])?;
        }
        let has_others = volume.exports.iter().any(|name| *name != id.export());
        let deadline = Instant::now() + CLOSE_PATIENCE;
        loop {
            match backend.delete(&["volumes", &id.uuid]) {
                // The daemon may still be closing what the export served.
                Err(fault)
                    if fault.code == Code::FailedPrecondition && !has_others && Instant::now() < deadline =>
                {
                    std::thread::sleep(POLL);
                }
                result => return result,
            }
        }
    }

    /// Says whether a volume supports kinds of access.
    ///
    /// # Errors
    /// `NOT_FOUND` without the volume.
    pub fn validate(
        &self,
        request: ValidateVolumeCapabilitiesRequest,
    ) -> Result<ValidateVolumeCapabilitiesResponse> {
        let id = VolumeId::find(&request.volume_id)?;
        if request.volume_capabilities.is_empty() {
            return Err(Fault::invalid("volume_capabilities are missing"));
        }
        let volume = self.backend(&id)?.volume(&id)?;
        let has_reservations = volume.labels.contains_key(RESERVATIONS_LABEL);
        let check = || {
            let is_direct = is_direct(&request.volume_context)?;
            for access in all(&request.volume_capabilities)? {
                check_is_shareable(&access, has_reservations)?;
                if is_direct {
                    check_is_direct(&access)?;
                }
            }
            Parameters::parse(&request.parameters)
        };
        Ok(match check() {
            Ok(_) => {
                let confirmed = Confirmed {
                    volume_context: request.volume_context,
                    volume_capabilities: request.volume_capabilities,
                    parameters: request.parameters,
                    mutable_parameters: request.mutable_parameters,
                };
                ValidateVolumeCapabilitiesResponse { confirmed: Some(confirmed), message: String::new() }
            }
            Err(fault) => ValidateVolumeCapabilitiesResponse { confirmed: None, message: fault.message },
        })
    }

    /// Grows a volume, while it is in use too.
    ///
    /// # Errors
    /// `OUT_OF_RANGE` beyond the backend's room, `ABORTED` while a job zeroes the new part.
    pub fn expand(&self, request: &ControllerExpandVolumeRequest) -> Result<ControllerExpandVolumeResponse> {
        let id = VolumeId::find(&request.volume_id)?;
        let range = request.capacity_range.as_ref();
        let range = range.ok_or_else(|| Fault::invalid("capacity_range is missing"))?;
        let size = size_within(Some(range))?;
        let is_block = match &request.volume_capability {
            Some(capability) => access(Some(capability))?.is_block(),
            None => false,
        };
        let backend = self.backend(&id)?;
        let _held = self.locks.take(&id.to_string())?;
        let volume = backend.volume(&id)?;
        let volume = match volume.size_bytes >= size {
            true => volume,
            false => {
                let change = VolumeChange { size_bytes: Some(size), ..VolumeChange::default() };
                match backend.change::<Begun<Volume>>(Method::PATCH, &["volumes", &id.uuid], &change)? {
                    Begun::Done(volume) => volume,
                    Begun::Job(job) => backend.wait_for(&job, || {
                        Ok(Some(backend.volume(&id)?).filter(|volume| volume.size_bytes >= size))
                    })?,
                }
            }
        };
        Ok(ControllerExpandVolumeResponse {
            capacity_bytes: bytes(volume.size_bytes),
            node_expansion_required: !is_block,
        })
    }

    /// Changes the limits of a volume, while it is in use too.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` that names an unknown parameter.
    pub fn modify(&self, request: &ControllerModifyVolumeRequest) -> Result<()> {
        let id = VolumeId::find(&request.volume_id)?;
        let backend = self.backend(&id)?;
        let _held = self.locks.take(&id.to_string())?;
        let before = backend.volume(&id)?.qos;
        let mut qos = before;
        change_limits(&mut qos, &request.mutable_parameters)?;
        if qos == before {
            return Ok(());
        }
        let change = VolumeChange { qos: Some(qos), ..VolumeChange::default() };
        backend.change::<Volume>(Method::PATCH, &["volumes", &id.uuid], &change).map(drop)
    }

    /// The backend of a volume.
    fn backend(&self, id: &VolumeId) -> Result<&Backend> {
        let found = self.backends.iter().find(|backend| backend.name == id.backend);
        found.ok_or_else(|| {
            // Not "not found": its volume may exist, and the orchestrator must not forget it.
            Fault::precondition(format!("volume {id}: backend {:?} is not configured", id.backend))
        })
    }
}

impl Backend {
    fn find_volume(&self, id: &VolumeId) -> Result<Option<Volume>> {
        self.client.find(&["volumes", &id.uuid]).map_err(|error| self.fault(error))
    }

    fn volume(&self, id: &VolumeId) -> Result<Volume> {
        self.find_volume(id)?.ok_or_else(|| Fault::not_found(format!("volume {id} does not exist")))
    }

    fn find_export(&self, id: &VolumeId) -> Result<Option<Export>> {
        self.client.find(&["exports", &id.export()]).map_err(|error| self.fault(error))
    }

    fn change<T: serde::de::DeserializeOwned>(
        &self,
        method: Method,
        path: &[&str],
        body: &impl serde::Serialize,
    ) -> Result<T> {
        self.client.change(method, path, body).map_err(|error| self.fault(error))
    }

    /// Deletes an object that may be gone already.
    fn delete(&self, path: &[&str]) -> Result<()> {
        match self.client.delete(path, &[]).map_err(|error| self.fault(error)) {
            Err(fault) if fault.code == Code::NotFound => Ok(()),
            result => result,
        }
    }

    /// Waits a while for a job, whose result `done` finds.
    fn wait_for<T>(&self, job: &Job, done: impl Fn() -> Result<Option<T>>) -> Result<T> {
        let deadline = Instant::now() + JOB_PATIENCE;
        loop {
            let found = self.client.find::<Job>(&["jobs", &job.id]).map_err(|error| self.fault(error))?;
            // In this order: a job that is not found has ended before `done` looks.
            if let Some(result) = done()? {
                return Ok(result);
            }
            match found {
                Some(job) if Instant::now() > deadline => return Err(in_progress(&job)),
                Some(_) => std::thread::sleep(POLL),
                None => {
                    let detail = format!("job {} has ended without its result: events say why", job.id);
                    return Err(Fault::internal(detail).about(format_args!("backend {}", self.name)));
                }
            }
        }
    }

    fn fault(&self, error: client::Error) -> Fault {
        Fault::from(error).about(format_args!("backend {}", self.name))
    }
}

/// Refuses several writers to a volume that they cannot reserve.
fn check_is_shareable(access: &Access, has_reservations: bool) -> Result<()> {
    if has_reservations || !access.is_shared() {
        return Ok(());
    }
    Err(Fault::invalid(format!(
        "access mode {} needs a volume with reservations: the parameter reservations=on of its storage class",
        access.mode.as_str_name()
    )))
}

/// The call succeeds when this job has ended.
fn in_progress(job: &Job) -> Fault {
    let percent = job.done_bytes.saturating_mul(100) / job.total_bytes.max(1);
    Fault::again(format!("job {}: {percent} % done", job.id))
}

/// The size for a range, in whole units.
fn size_within(range: Option<&CapacityRange>) -> Result<u64> {
    let range = range.copied().unwrap_or_default();
    let CapacityRange { required_bytes, limit_bytes } = range;
    let (Ok(required), Ok(limit)) = (u64::try_from(required_bytes), u64::try_from(limit_bytes)) else {
        return Err(Fault::invalid(format!("capacity_range: {required_bytes} to {limit_bytes}: negative")));
    };
    let limit = if limit == 0 { i64::MAX as u64 } else { limit };
    let wanted = if required == 0 { DEFAULT_SIZE.min(limit / UNIT * UNIT) } else { required };
    let size = wanted.checked_next_multiple_of(UNIT).filter(|size| (1..=limit).contains(size));
    size.ok_or_else(|| {
        let detail = format!(
            "capacity_range: {required_bytes} to {limit_bytes} bytes: no multiple of {UNIT} is in it"
        );
        Fault::new(Code::OutOfRange, detail)
    })
}

/// A size as CSI has it.
fn bytes(size: u64) -> i64 {
    i64::try_from(size).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_whole_units_within_the_range() {
        let size = |required_bytes, limit_bytes| {
            size_within(Some(&CapacityRange { required_bytes, limit_bytes })).map_err(|fault| fault.code)
        };
        assert_eq!(size_within(None), Ok(DEFAULT_SIZE));
        assert_eq!(size(1, 0), Ok(UNIT));
        assert_eq!(size(0, 10 << 20), Ok(10 << 20));
        assert_eq!(size(3 << 20, 3 << 20), Ok(3 << 20));
        assert_eq!(size(UNIT as i64 + 1, UNIT as i64 + 2), Err(Code::OutOfRange));
        assert_eq!(size(0, 4096), Err(Code::OutOfRange));
        assert_eq!(size(2 << 20, 1 << 20), Err(Code::OutOfRange));
        assert_eq!(size(i64::MAX, 0), Err(Code::OutOfRange));
        assert_eq!(size(-1, 0), Err(Code::InvalidArgument));
    }
}
