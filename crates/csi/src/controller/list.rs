//! Lists and conditions of volumes, and the room for more.

use super::create::backing;
use super::{Controller, UNIT, bytes};
use crate::capability::{all, check_is_direct};
use crate::config::Backend;
use crate::fault::{Fault, Result};
use crate::ids::{DRIVER_LABEL, VolumeId};
use crate::parameters::Parameters;
use crate::proto::list_volumes_response::Entry;
use crate::proto::volume_health::VolumeHealthEntry;
use crate::proto::{
    ControllerGetVolumeHealthRequest, ControllerGetVolumeHealthResponse, ControllerGetVolumeRequest,
    ControllerGetVolumeResponse, GetCapacityRequest, GetCapacityResponse, ListVolumesRequest,
    ListVolumesResponse, Volume as CsiVolume, VolumeHealth, VolumeHealthErrorType,
};
use crate::topology::{of_zone, reaches};
use api::{Array, Device, ExportState, PoolCapacity, Volume};
use tonic::Code;

/// Most volumes of an answer.
const MAX_ENTRIES: usize = 500;

impl Controller {
    /// Lists the volumes of this driver, page by page: a token is the identity of the last volume
    /// before the page, so volumes that come and go move no others.
    ///
    /// # Errors
    /// `ABORTED` for a token of others.
    pub fn list_volumes(&self, request: &ListVolumesRequest) -> Result<ListVolumesResponse> {
        let wanted = usize::try_from(request.max_entries)
            .map_err(|_| Fault::invalid(format!("max_entries={}: negative", request.max_entries)))?;
        let wanted = if wanted == 0 { MAX_ENTRIES } else { wanted.min(MAX_ENTRIES) };
        let mut after = self.position(&request.starting_token)?;
        let first = after.as_ref().map_or(0, |(place, _)| *place);
        let mut found: Vec<(&Backend, VolumeId, Volume)> = Vec::new();
        for backend in &self.backends[first..] {
            // One more than is wanted tells whether there is a next page.
            let room = wanted + 1 - found.len();
            let after = after.take().map(|(_, uuid)| uuid);
            found.extend(self.page(backend, after, room)?.map(|(id, volume)| (backend, id, volume)));
            if found.len() > wanted {
                break;
            }
        }
        let has_more = found.len() > wanted;
        found.truncate(wanted);
        let last = found.last().filter(|_| has_more).map(|(_, id, _)| id.to_string());
        let entry = |(backend, id, volume): &(&Backend, VolumeId, Volume)| Entry {
            volume: Some(self.shown(backend, id, volume)),
            status: None,
        };
        Ok(ListVolumesResponse {
            entries: found.iter().map(entry).collect(),
            next_token: last.unwrap_or_default(),
        })
    }

    /// Every volume of this driver, in the order of backends and UUIDs.
    ///
    /// # Errors
    /// When a backend does not answer.
    pub fn all_volumes(&self) -> Result<Vec<(VolumeId, Volume)>> {
        let mut found: Vec<(VolumeId, Volume)> = Vec::new();
        for backend in &self.backends {
            let mut after = None;
            loop {
                let page: Vec<_> = self.page(backend, after, MAX_ENTRIES)?.collect();
                let is_last = page.len() < MAX_ENTRIES;
                after = page.last().map(|(id, _)| id.uuid.clone());
                found.extend(page);
                if is_last {
                    break;
                }
            }
        }
        Ok(found)
    }

    /// The backend and the volume behind which a page begins.
    fn position(&self, token: &str) -> Result<Option<(usize, String)>> {
        if token.is_empty() {
            return Ok(None);
        }
        let place = |id: &VolumeId| self.backends.iter().position(|backend| backend.name == id.backend);
        let found = VolumeId::parse(token).and_then(|id| Some((place(&id)?, id.uuid)));
        found.map(Some).ok_or_else(|| Fault::again(format!("starting_token {token:?} is not of this list")))
    }

    fn page(
        &self,
        backend: &Backend,
        after: Option<String>,
        room: usize,
    ) -> Result<impl Iterator<Item = (VolumeId, Volume)>> {
        let mut query =
            vec![("label", format!("{DRIVER_LABEL}={}", self.driver)), ("limit", room.to_string())];
        query.extend(after.map(|uuid| ("after", uuid)));
        let volumes: client::Result<Vec<Volume>> = backend.client.list(&["volumes"], &query);
        let name = backend.name.clone();
        let id = move |volume: &Volume| VolumeId { backend: name.clone(), uuid: volume.uuid.clone() };
        let volumes = volumes.map_err(|error| backend.fault(error))?;
        Ok(volumes.into_iter().map(move |volume| (id(&volume), volume)))
    }

    /// The room for volumes with these parameters, without that of backends that do not answer.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` for an array or device that does not exist; `UNAVAILABLE` or
    /// `DEADLINE_EXCEEDED` when no backend answers.
    pub fn capacity(&self, request: &GetCapacityRequest) -> Result<GetCapacityResponse> {
        let accesses = match request.volume_capabilities.as_slice() {
            [] => Ok(Vec::new()),
            capabilities => all(capabilities),
        };
        let Ok(accesses) = accesses else { return Ok(GetCapacityResponse::default()) };
        let parameters = Parameters::parse(&request.parameters)?;
        if parameters.is_direct && accesses.iter().any(|access| check_is_direct(access).is_err()) {
            return Ok(GetCapacityResponse::default());
        }
        let mut candidates = self.candidates(&parameters)?;
        if let Some(topology) = &request.accessible_topology {
            candidates.retain(|backend| reaches(&self.driver, topology, backend));
        }
        let (mut free, mut silent) = (Vec::new(), None);
        for backend in candidates {
            match free_bytes(backend, &backing(backend, &parameters)?) {
                Ok(bytes) => free.push(bytes),
                Err(fault) if matches!(fault.code, Code::Unavailable | Code::DeadlineExceeded) => {
                    tracing::warn!(%fault, "GetCapacity: the room of a backend is left out");
                    silent = Some(fault);
                }
                Err(fault) => return Err(fault),
            }
        }
        if let Some(fault) = silent.filter(|_| free.is_empty()) {
            return Err(fault);
        }
        let largest = free.iter().copied().max().unwrap_or_default();
        Ok(GetCapacityResponse {
            available_capacity: bytes(free.iter().fold(0, |sum: u64, free| sum.saturating_add(*free))),
            maximum_volume_size: Some(bytes(largest)),
            minimum_volume_size: Some(bytes(UNIT)),
        })
    }

    /// Shows a volume.
    ///
    /// # Errors
    /// `NOT_FOUND` without it.
    pub fn get_volume(&self, request: &ControllerGetVolumeRequest) -> Result<ControllerGetVolumeResponse> {
        let id = VolumeId::find(&request.volume_id)?;
        let backend = self.backend(&id)?;
        let volume = self.shown(backend, &id, &backend.volume(&id)?);
        let status = Some(crate::proto::controller_get_volume_response::VolumeStatus::default());
        Ok(ControllerGetVolumeResponse { volume: Some(volume), status })
    }

    /// A volume, as answers and lists show it.
    pub(super) fn shown(&self, backend: &Backend, id: &VolumeId, volume: &Volume) -> CsiVolume {
        let zone = backend.zone.iter();
        CsiVolume {
            volume_id: id.to_string(),
            capacity_bytes: bytes(volume.size_bytes),
            accessible_topology: zone.map(|zone| of_zone(&self.driver, zone)).collect(),
            ..CsiVolume::default()
        }
    }

    /// The condition of a volume: whether its export is served.
    ///
    /// # Errors
    /// `NOT_FOUND` without it.
    pub fn health(
        &self,
        request: &ControllerGetVolumeHealthRequest,
    ) -> Result<ControllerGetVolumeHealthResponse> {
        let id = VolumeId::find(&request.volume_id)?;
        let backend = self.backend(&id)?;
        let volume = backend.volume(&id)?;
        let export = backend.find_export(&id)?;
        let waiting = export.filter(|export| export.state != ExportState::Active);
        let inaccessible = |reason: &str, message: String| VolumeHealthEntry {
            status: VolumeHealthErrorType::Inaccessible as i32,
            reason: reason.to_owned(),
            message,
        };
        let mut problems = Vec::new();
        problems.extend(volume.error.map(|error| inaccessible("VolumeFailed", error)));
        problems.extend(waiting.map(|export| {
            inaccessible("ExportWaiting", format!("{}: {}", export.name, export.error.unwrap_or_default()))
        }));
        let health = VolumeHealth { volume_id: id.to_string(), health_statuses: problems };
        Ok(ControllerGetVolumeHealthResponse { volume_health: Some(health) })
    }
}

/// The room on an array or device of a backend, in bytes.
fn free_bytes(backend: &Backend, backing: &str) -> Result<u64> {
    let fault = |error| backend.fault(error);
    let pool = backend.client.find::<PoolCapacity>(&["pools", backing, "capacity"]).map_err(fault)?;
    if let Some(pool) = pool {
        return Ok(pool.free_bytes);
    }
    match room_without_volumes(backend, backing) {
        // A provisioner's token sees neither, and may not make the first volume.
        Err(fault) if fault.code == Code::PermissionDenied => Ok(0),
        room => room,
    }
}

/// The room on an array or device that has no volumes yet, or whose daemon has another version, in
/// bytes.
fn room_without_volumes(backend: &Backend, backing: &str) -> Result<u64> {
    let fault = |error| backend.fault(error);
    if let Some(array) = backend.client.find::<Array>(&["arrays", backing]).map_err(fault)? {
        return Ok(array.free_bytes.unwrap_or(array.capacity_bytes));
    }
    let device = backend.client.find::<Device>(&["devices", backing]).map_err(fault)?;
    let device = device.ok_or_else(|| {
        Fault::invalid(format!("backing {backing:?}: backend {} has no such array or device", backend.name))
    })?;
    Ok(device.free_bytes.or(device.capacity_bytes).unwrap_or_default())
}
