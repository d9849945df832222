//! The services of CSI over gRPC: each call runs on a thread that may wait.

use crate::controller::Controller;
use crate::fault::{Fault, Result as CallResult};
use crate::node::Node;
use crate::proto::controller_server::Controller as ControllerService;
use crate::proto::identity_server::Identity as IdentityService;
use crate::proto::node_server::Node as NodeService;
use crate::proto::*;
use std::collections::HashMap;
use std::sync::Arc;
use tonic::{Request, Response, Status};

/// The parts of the driver that a process has.
#[derive(Clone)]
pub struct Service {
    /// Name of the driver.
    pub driver: Arc<str>,
    /// The controller, in one process of the cluster.
    pub controller: Option<Arc<Controller>>,
    /// The node, in one process of each machine.
    pub node: Option<Arc<Node>>,
}

impl Service {
    /// Whether volumes or this node have zones.
    fn has_zones(&self) -> bool {
        let has_backends =
            |controller: &Arc<Controller>| controller.backends.iter().any(|backend| backend.zone.is_some());
        self.controller.as_ref().is_some_and(has_backends)
            || self.node.as_ref().is_some_and(|node| node.has_zone())
    }
}

type Answer<T> = Result<Response<T>, Status>;

/// Runs a call. It ends also when its caller disconnects.
async fn run<P, A, T>(
    part: Option<&Arc<P>>,
    name: &'static str,
    request: Request<A>,
    call: impl FnOnce(&P, A) -> CallResult<T> + Send + 'static,
) -> Answer<T>
where
    P: Send + Sync + 'static,
    A: Send + 'static,
    T: Send + 'static,
{
    let Some(part) = part.cloned() else {
        return Err(Status::unimplemented(format!("{name}: this process has another --mode")));
    };
    let request = request.into_inner();
    match tokio::task::spawn_blocking(move || call(&part, request)).await {
        Ok(Ok(answer)) => Ok(Response::new(answer)),
        Ok(Err(fault)) => {
            tracing::info!(call = name, code = ?fault.code, "{fault}");
            Err(fault.into())
        }
        Err(error) => {
            tracing::error!(call = name, "{error}");
            Err(Fault::internal(format!("{name}: {error}")).into())
        }
    }
}

fn unsupported<T>(name: &str) -> Answer<T> {
    Err(Status::unimplemented(format!("{name}: not supported")))
}

#[tonic::async_trait]
impl IdentityService for Service {
    async fn get_plugin_info(&self, _: Request<GetPluginInfoRequest>) -> Answer<GetPluginInfoResponse> {
        Ok(Response::new(GetPluginInfoResponse {
            name: self.driver.to_string(),
            vendor_version: env!("CARGO_PKG_VERSION").to_owned(),
            manifest: HashMap::new(),
        }))
    }

    async fn get_plugin_capabilities(
        &self,
        _: Request<GetPluginCapabilitiesRequest>,
    ) -> Answer<GetPluginCapabilitiesResponse> {
        use plugin_capability::{Service, Type, VolumeExpansion, service, volume_expansion};
        let service = Type::Service(Service { r#type: service::Type::ControllerService as i32 });
        let online = volume_expansion::Type::Online as i32;
        let expansion = Type::VolumeExpansion(VolumeExpansion { r#type: online });
        let controller = self.controller.is_some().then_some(service);
        let constraints =
            Type::Service(Service { r#type: service::Type::VolumeAccessibilityConstraints as i32 });
        let constraints = self.has_zones().then_some(constraints);
        let capability = |kind| PluginCapability { r#type: Some(kind) };
        let capabilities =
            controller.into_iter().chain(constraints).chain([expansion]).map(capability).collect();
        Ok(Response::new(GetPluginCapabilitiesResponse { capabilities }))
    }

    async fn probe(&self, request: Request<ProbeRequest>) -> Answer<ProbeResponse> {
        if self.controller.is_none() {
            return Ok(Response::new(ProbeResponse { ready: Some(true) }));
        }
        let probe = |controller: &Controller, _| Ok(ProbeResponse { ready: Some(controller.is_ready()) });
        run(self.controller.as_ref(), "Probe", request, probe).await
    }
}

#[tonic::async_trait]
impl ControllerService for Service {
    async fn create_volume(&self, request: Request<CreateVolumeRequest>) -> Answer<CreateVolumeResponse> {
        run(self.controller.as_ref(), "CreateVolume", request, Controller::create_volume).await
    }

    async fn delete_volume(&self, request: Request<DeleteVolumeRequest>) -> Answer<DeleteVolumeResponse> {
        let call = |controller: &Controller, request| {
            controller.delete_volume(&request).map(|()| DeleteVolumeResponse {})
        };
        run(self.controller.as_ref(), "DeleteVolume", request, call).await
    }

    async fn controller_publish_volume(
        &self,
        request: Request<ControllerPublishVolumeRequest>,
    ) -> Answer<ControllerPublishVolumeResponse> {
        let call = |controller: &Controller, request| controller.publish(&request);
        run(self.controller.as_ref(), "ControllerPublishVolume", request, call).await
    }

    async fn controller_unpublish_volume(
        &self,
        request: Request<ControllerUnpublishVolumeRequest>,
    ) -> Answer<ControllerUnpublishVolumeResponse> {
        let call = |controller: &Controller, request| {
            controller.unpublish(&request).map(|()| ControllerUnpublishVolumeResponse {})
        };
        run(self.controller.as_ref(), "ControllerUnpublishVolume", request, call).await
    }

    async fn validate_volume_capabilities(
        &self,
        request: Request<ValidateVolumeCapabilitiesRequest>,
    ) -> Answer<ValidateVolumeCapabilitiesResponse> {
        run(self.controller.as_ref(), "ValidateVolumeCapabilities", request, Controller::validate).await
    }

    async fn list_volumes(&self, request: Request<ListVolumesRequest>) -> Answer<ListVolumesResponse> {
        let call = |controller: &Controller, request| controller.list_volumes(&request);
        run(self.controller.as_ref(), "ListVolumes", request, call).await
    }

    async fn get_capacity(&self, request: Request<GetCapacityRequest>) -> Answer<GetCapacityResponse> {
        let call = |controller: &Controller, request| controller.capacity(&request);
        run(self.controller.as_ref(), "GetCapacity", request, call).await
    }

    async fn controller_get_capabilities(
        &self,
        _: Request<ControllerGetCapabilitiesRequest>,
    ) -> Answer<ControllerGetCapabilitiesResponse> {
        use controller_service_capability::rpc::Type as Rpc;
        use controller_service_capability::{Rpc as Wrapped, Type};
        let known = [
            Rpc::CreateDeleteVolume,
            Rpc::PublishUnpublishVolume,
            Rpc::ListVolumes,
            Rpc::GetCapacity,
            Rpc::ExpandVolume,
            Rpc::GetVolume,
            Rpc::GetVolumeHealth,
            Rpc::SingleNodeMultiWriter,
            Rpc::ModifyVolume,
        ];
        let capability = |rpc: Rpc| ControllerServiceCapability {
            r#type: Some(Type::Rpc(Wrapped { r#type: rpc as i32 })),
        };
        let capabilities = known.into_iter().map(capability).collect();
        Ok(Response::new(ControllerGetCapabilitiesResponse { capabilities }))
    }

    async fn controller_expand_volume(
        &self,
        request: Request<ControllerExpandVolumeRequest>,
    ) -> Answer<ControllerExpandVolumeResponse> {
        let call = |controller: &Controller, request| controller.expand(&request);
        run(self.controller.as_ref(), "ControllerExpandVolume", request, call).await
    }

    async fn controller_get_volume(
        &self,
        request: Request<ControllerGetVolumeRequest>,
    ) -> Answer<ControllerGetVolumeResponse> {
        let call = |controller: &Controller, request| controller.get_volume(&request);
        run(self.controller.as_ref(), "ControllerGetVolume", request, call).await
    }

    async fn controller_get_volume_health(
        &self,
        request: Request<ControllerGetVolumeHealthRequest>,
    ) -> Answer<ControllerGetVolumeHealthResponse> {
        let call = |controller: &Controller, request| controller.health(&request);
        run(self.controller.as_ref(), "ControllerGetVolumeHealth", request, call).await
    }

    async fn controller_modify_volume(
        &self,
        request: Request<ControllerModifyVolumeRequest>,
    ) -> Answer<ControllerModifyVolumeResponse> {
        let call = |controller: &Controller, request| {
            controller.modify(&request).map(|()| ControllerModifyVolumeResponse {})
        };
        run(self.controller.as_ref(), "ControllerModifyVolume", request, call).await
    }

    async fn controller_list_volume_health(
        &self,
        _: Request<ControllerListVolumeHealthRequest>,
    ) -> Answer<ControllerListVolumeHealthResponse> {
        unsupported("ControllerListVolumeHealth")
    }

    async fn create_snapshot(&self, _: Request<CreateSnapshotRequest>) -> Answer<CreateSnapshotResponse> {
        unsupported("CreateSnapshot")
    }

    async fn delete_snapshot(&self, _: Request<DeleteSnapshotRequest>) -> Answer<DeleteSnapshotResponse> {
        unsupported("DeleteSnapshot")
    }

    async fn list_snapshots(&self, _: Request<ListSnapshotsRequest>) -> Answer<ListSnapshotsResponse> {
        unsupported("ListSnapshots")
    }

    async fn get_snapshot(&self, _: Request<GetSnapshotRequest>) -> Answer<GetSnapshotResponse> {
        unsupported("GetSnapshot")
    }
}

#[tonic::async_trait]
impl NodeService for Service {
    async fn node_stage_volume(
        &self,
        request: Request<NodeStageVolumeRequest>,
    ) -> Answer<NodeStageVolumeResponse> {
        let call = |node: &Node, request| node.stage(&request).map(|()| NodeStageVolumeResponse {});
        run(self.node.as_ref(), "NodeStageVolume", request, call).await
    }

    async fn node_unstage_volume(
        &self,
        request: Request<NodeUnstageVolumeRequest>,
    ) -> Answer<NodeUnstageVolumeResponse> {
        let call = |node: &Node, request| node.unstage(&request).map(|()| NodeUnstageVolumeResponse {});
        run(self.node.as_ref(), "NodeUnstageVolume", request, call).await
    }

    async fn node_publish_volume(
        &self,
        request: Request<NodePublishVolumeRequest>,
    ) -> Answer<NodePublishVolumeResponse> {
        let call = |node: &Node, request| node.publish(&request).map(|()| NodePublishVolumeResponse {});
        run(self.node.as_ref(), "NodePublishVolume", request, call).await
    }

    async fn node_unpublish_volume(
        &self,
        request: Request<NodeUnpublishVolumeRequest>,
    ) -> Answer<NodeUnpublishVolumeResponse> {
        let call = |node: &Node, request| node.unpublish(&request).map(|()| NodeUnpublishVolumeResponse {});
        run(self.node.as_ref(), "NodeUnpublishVolume", request, call).await
    }

    async fn node_get_volume_stats(
        &self,
        request: Request<NodeGetVolumeStatsRequest>,
    ) -> Answer<NodeGetVolumeStatsResponse> {
        let call = |node: &Node, request| node.stats(&request);
        run(self.node.as_ref(), "NodeGetVolumeStats", request, call).await
    }

    async fn node_expand_volume(
        &self,
        request: Request<NodeExpandVolumeRequest>,
    ) -> Answer<NodeExpandVolumeResponse> {
        let call = |node: &Node, request| node.expand(&request);
        run(self.node.as_ref(), "NodeExpandVolume", request, call).await
    }

    async fn node_get_capabilities(
        &self,
        _: Request<NodeGetCapabilitiesRequest>,
    ) -> Answer<NodeGetCapabilitiesResponse> {
        use node_service_capability::rpc::Type as Rpc;
        use node_service_capability::{Rpc as Wrapped, Type};
        let known =
            [Rpc::StageUnstageVolume, Rpc::GetVolumeStats, Rpc::ExpandVolume, Rpc::SingleNodeMultiWriter];
        let capability =
            |rpc: Rpc| NodeServiceCapability { r#type: Some(Type::Rpc(Wrapped { r#type: rpc as i32 })) };
        let capabilities = known.into_iter().map(capability).collect();
        Ok(Response::new(NodeGetCapabilitiesResponse { capabilities }))
    }

    async fn node_get_info(&self, request: Request<NodeGetInfoRequest>) -> Answer<NodeGetInfoResponse> {
        run(self.node.as_ref(), "NodeGetInfo", request, |node: &Node, _| node.info()).await
    }

    async fn node_get_volume_health(
        &self,
        _: Request<NodeGetVolumeHealthRequest>,
    ) -> Answer<NodeGetVolumeHealthResponse> {
        unsupported("NodeGetVolumeHealth")
    }

    async fn node_get_storage_health(
        &self,
        _: Request<NodeGetStorageHealthRequest>,
    ) -> Answer<NodeGetStorageHealthResponse> {
        unsupported("NodeGetStorageHealth")
    }
}
