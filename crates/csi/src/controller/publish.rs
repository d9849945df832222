//! The nodes that have access to a volume: the hosts of its export.

use super::export::place;
use super::{Controller, check_is_shareable};
use crate::capability::{access, check_is_direct};
use crate::fault::{Fault, Result};
use crate::ids::{NodeId, VolumeId, require};
use crate::parameters::is_direct;
use crate::proto::{
    ControllerPublishVolumeRequest, ControllerPublishVolumeResponse, ControllerUnpublishVolumeRequest,
};
use api::{Export, ExportChange, HostsChange, NewHost};
use client::Method;
use std::collections::HashMap;

impl Controller {
    /// Gives a node access to a volume.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` when another node has access, and the access mode permits one.
    /// `INVALID_ARGUMENT` when several nodes are to write, and the export has no reservations, or
    /// when a direct volume of Kata does not support the access.
    pub fn publish(
        &self,
        request: &ControllerPublishVolumeRequest,
    ) -> Result<ControllerPublishVolumeResponse> {
        require("volume_id", &request.volume_id)?;
        require("node_id", &request.node_id)?;
        let access = access(request.volume_capability.as_ref())?;
        if is_direct(&request.volume_context)? {
            check_is_direct(&access)?;
        }
        let id = VolumeId::find(&request.volume_id)?;
        let backend = self.backend(&id)?;
        let _held = self.locks.take(&id.to_string())?;
        let volume = backend.volume(&id)?;
        let node = NodeId::parse(&request.node_id)
            .ok_or_else(|| Fault::not_found(format!("node {:?} does not exist", request.node_id)))?;
        let export = self.export(backend, &id, &volume)?;
        check_is_shareable(&access, export.options.contains_key("reservations"))?;
        let hosts = export.hosts.clone().unwrap_or_default();
        let other = hosts.iter().find(|host| **host != node.nqn);
        if let Some(other) = other.filter(|_| access.is_single_node()) {
            return Err(Fault::precondition(format!(
                "volume {id}: access mode {} permits one node, and host {other} has access",
                access.mode.as_str_name()
            )));
        }
        let context = place(backend, &export)?.context().into_iter().collect();
        let host = new_host(node.nqn, &request.secrets);
        let has_secrets = host.dhchap.is_some() || host.dhchap_ctrl.is_some();
        if has_secrets || !hosts.contains(&host.nqn) {
            let hosts = HostsChange { add: vec![host], ..HostsChange::default() };
            self.change_hosts(&id, hosts)?;
        }
        Ok(ControllerPublishVolumeResponse { publish_context: context })
    }

    /// Ends the access of a node, or of all. The answer comes when no write of it is in flight.
    ///
    /// # Errors
    /// When the backend does not confirm that.
    pub fn unpublish(&self, request: &ControllerUnpublishVolumeRequest) -> Result<()> {
        require("volume_id", &request.volume_id)?;
        // Such volumes and nodes cannot exist, so none has access.
        let Some(id) = VolumeId::parse(&request.volume_id) else { return Ok(()) };
        let backend = self.backend(&id)?;
        let _held = self.locks.take(&id.to_string())?;
        let Some(export) = backend.find_export(&id)? else { return Ok(()) };
        // Without a list, every host may connect; that is not of this driver's making.
        let Some(hosts) = export.hosts else { return Ok(()) };
        let remove = match request.node_id.as_str() {
            "" => hosts,
            node => match NodeId::parse(node) {
                // Also when it is not listed: a lost answer may have left writes in flight.
                Some(node) => vec![node.nqn],
                None => return Ok(()),
            },
        };
        if remove.is_empty() {
            return Ok(());
        }
        self.change_hosts(&id, HostsChange { remove, ..HostsChange::default() })
    }

    fn change_hosts(&self, id: &VolumeId, hosts: HostsChange) -> Result<()> {
        let change = ExportChange { hosts: Some(hosts), ..ExportChange::default() };
        let path = ["exports", &id.export()];
        self.backend(id)?.change::<Export>(Method::PATCH, &path, &change).map(drop)
    }
}

/// A host with the secrets of a call, which nothing shows or logs.
fn new_host(nqn: String, secrets: &HashMap<String, String>) -> NewHost {
    let secret = |key: &str| secrets.get(key).cloned();
    NewHost { nqn, dhchap: secret("dhchap"), dhchap_ctrl: secret("dhchap_ctrl"), tls_psk: None }
}
