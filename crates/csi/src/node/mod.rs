//! The node: volumes attached to this machine, and mounted where the orchestrator wants them.
//!
//! ```text
//!   stage ──► NodeBackend::attach ──► block device ──► Mounts::mount_device (file systems only)
//!   publish ────────────────────────────────────────► Mounts::bind
//! ```
//!
//! A direct volume of Kata is attached only while its file system is made, checked or grown; then
//! [`Kata`] serves it to a guest, which mounts it.
//!
//! The [`Record`] of a volume has the orchestrator's wishes, and the system has the facts. Every
//! call compares both, so it may be repeated after any of its steps.

mod backend;
mod fake;
mod file_system;
mod kata;
mod local;
mod mounts;
mod nvme_tcp;
mod programs;
mod record;
mod ublk;

pub use backend::{Attachment, NodeBackend, Secrets};
pub use fake::{Fake, FakeMounts};
pub use kata::Kata;
pub use mounts::{LinuxMounts, Mounts, Usage};
pub use nvme_tcp::NvmeTcp;
pub use record::{Direct, Record};
pub use ublk::Ublk;

use crate::capability::{access, check_is_direct};
use crate::fault::{Fault, Result};
use crate::ids::{NodeId, VolumeId, require};
use crate::locks::Locks;
use crate::parameters::{is_direct, node_options};
use crate::proto::volume_capability::access_mode::Mode;
use crate::proto::volume_usage::Unit;
use crate::proto::{
    NodeExpandVolumeRequest, NodeExpandVolumeResponse, NodeGetInfoResponse, NodeGetVolumeStatsRequest,
    NodeGetVolumeStatsResponse, NodePublishVolumeRequest, NodeStageVolumeRequest, NodeUnpublishVolumeRequest,
    NodeUnstageVolumeRequest, Topology, VolumeUsage,
};
use kata::MountInfo;
use record::Records;
use std::path::{Path, PathBuf};
use tonic::Code;

/// The node of one machine.
pub struct Node {
    id: NodeId,
    max_volumes: u16,
    /// The zone of this machine, if the cluster has zones.
    topology: Option<Topology>,
    backend: Box<dyn NodeBackend>,
    mounts: Box<dyn Mounts>,
    kata: Kata,
    records: Records,
    locks: Locks,
}

impl Node {
    /// The node called `name`, with its records in `state_dir`.
    ///
    /// # Errors
    /// When the directory cannot be made.
    pub fn new(
        name: &str,
        max_volumes: u16,
        state_dir: &Path,
        backend: Box<dyn NodeBackend>,
        mounts: Box<dyn Mounts>,
        kata: Kata,
    ) -> Result<Node> {
        let id = NodeId { name: name.to_owned(), nqn: backend.host_nqn().to_owned() };
        let records = Records::new(state_dir)?;
        let locks = Locks::default();
        Ok(Node { id, max_volumes, topology: None, backend, mounts, kata, records, locks })
    }

    /// The same node in a zone.
    #[must_use]
    pub fn in_zone(self, topology: Topology) -> Node {
        Node { topology: Some(topology), ..self }
    }

    /// Whether the node is in a zone.
    pub fn has_zone(&self) -> bool {
        self.topology.is_some()
    }

    /// The identity of this node.
    ///
    /// # Errors
    /// When it is too long.
    pub fn info(&self) -> Result<NodeGetInfoResponse> {
        Ok(NodeGetInfoResponse {
            node_id: self.id.text()?,
            max_volumes_per_node: self.max_volumes.into(),
            // Without zones, every node reaches every backend over the network.
            accessible_topology: self.topology.clone(),
        })
    }

    /// Attaches a volume, and mounts its file system at the staging path. A volume that is proved
    /// empty gets a file system first.
    ///
    /// # Errors
    /// `ALREADY_EXISTS` when it is staged otherwise, `INVALID_ARGUMENT` for access that a direct
    /// volume of Kata does not support.
    pub fn stage(&self, request: &NodeStageVolumeRequest) -> Result<()> {
        require("volume_id", &request.volume_id)?;
        let staging = path("staging_target_path", &request.staging_target_path)?;
        let access = access(request.volume_capability.as_ref())?;
        let is_direct = is_direct(&request.volume_context)?;
        if is_direct {
            check_is_direct(&access)?;
        }
        let id = VolumeId::find(&request.volume_id)?;
        let attachment = Attachment::new(&id, &request.publish_context, &request.secrets)?;
        let attachment = Attachment { options: node_options(&request.volume_context)?, ..attachment };
        let _held = self.locks.take(&id.to_string())?;
        let record = match self.records.find(&id)? {
            Some(record)
                if record.staging == staging
                    && record.mount == access.mount
                    && record.direct.is_some() == is_direct =>
            {
                record
            }
            Some(record) => {
                let detail = format!("volume {id} is staged at {} otherwise", record.staging.display());
                return Err(Fault::new(Code::AlreadyExists, detail));
            }
            None => Record {
                direct: is_direct.then(Direct::default),
                ..attachment.record(&staging, access.mount.clone())
            },
        };
        // First: what a later call undoes must be known before it is done.
        self.records.save(&id, &record)?;
        if let Some(direct) = &record.direct {
            if direct.file_system_bytes == 0 {
                self.prepare(&attachment, record)?;
            }
            return self.kata.serve(&id, attachment.options.get("nr-io-queues").map(String::as_str));
        }
        let device = self.backend.attach(&attachment).map_err(|fault| fault.about(&id))?;
        match &record.mount {
            Some(mount) => self
                .mounts
                .mount_device(&device, &staging, mount, access.is_read_only())
                .map_err(|fault| fault.about(format_args!("{id} on {}", device.display()))),
            None => Ok(()),
        }
    }

    /// Prepares the file system of a direct volume of Kata: a guest only mounts it. This happens
    /// once between staging and unstaging, since a guest may have it mounted afterwards.
    fn prepare(&self, attachment: &Attachment, mut record: Record) -> Result<()> {
        let id = &attachment.id;
        // Before the disk: the file system is at least as large, though the volume grows meanwhile.
        let file_system_bytes = self.kata.volume(id)?.size_bytes;
        // An export of before a restart of the machine, which records do not outlive.
        self.kata.end_unused(id)?;
        let device = self.backend.attach(attachment).map_err(|fault| fault.about(id))?;
        if let Some(mount) = &record.mount {
            let prepared = self.mounts.prepare(&device, &mount.fs_type);
            prepared.map_err(|fault| fault.about(format_args!("{id} on {}", device.display())))?;
        }
        self.backend.detach(&record).map_err(|fault| fault.about(id))?;
        record.direct = Some(Direct { file_system_bytes });
        self.records.save(id, &record)
    }

    /// Unmounts and detaches a volume.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` while it is published or mounted elsewhere.
    pub fn unstage(&self, request: &NodeUnstageVolumeRequest) -> Result<()> {
        require("volume_id", &request.volume_id)?;
        let staging = path("staging_target_path", &request.staging_target_path)?;
        let Some(id) = VolumeId::parse(&request.volume_id) else { return Ok(()) };
        let _held = self.locks.take(&id.to_string())?;
        let Some(record) = self.records.find(&id)? else {
            // The export of before a restart of the machine. Many machines have no daemon.
            return match self.kata.end(&id) {
                Err(fault) if fault.code != Code::Unavailable => Err(fault),
                _ => self.mounts.unmount(&staging),
            };
        };
        if let Some(target) = self.published(&record)? {
            return Err(Fault::precondition(format!("volume {id} is published at {target}")));
        }
        if record.direct.is_some() {
            self.kata.end(&id)?;
            // A call may have ended while the file system was prepared.
            self.backend.detach(&record).map_err(|fault| fault.about(&id))?;
            return self.records.remove(&id);
        }
        let device = self.backend.find(&record)?;
        if let Err(fault) = self.mounts.unmount(&record.staging) {
            if fault.code != Code::DeadlineExceeded {
                return Err(fault);
            }
            // The target does not answer. Without the disk, requests fail and the mount can go.
            tracing::warn!(volume = %id, %fault, "the disk is detached before its file system");
            self.backend.detach(&record)?;
            self.mounts.unmount_lazily(&record.staging)?;
        }
        if let Some(device) = device
            && let Some(other) = self.mounts.of_device(&device)?.into_iter().next()
        {
            return Err(Fault::precondition(format!("volume {id} is mounted at {}", other.display())));
        }
        self.backend.detach(&record).map_err(|fault| fault.about(&id))?;
        self.records.remove(&id)
    }

    /// A target path of a volume at which it is published. One of before a restart of the machine
    /// is none any more.
    fn published<'a>(&self, record: &'a Record) -> Result<Option<&'a str>> {
        for target in record.targets.keys() {
            let is_published = match record.direct {
                Some(_) => self.kata.is_published(Path::new(target))?,
                None => self.mounts.is_mounted(Path::new(target))?,
            };
            if is_published {
                return Ok(Some(target));
            }
        }
        Ok(None)
    }

    /// Shows a staged volume at a target path: its directory, or its block device. A direct volume
    /// gets a file that Kata's runtime reads, and the path stays an empty directory.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` when it is not staged, or published elsewhere to a single writer.
    pub fn publish(&self, request: &NodePublishVolumeRequest) -> Result<()> {
        require("volume_id", &request.volume_id)?;
        let target = path("target_path", &request.target_path)?;
        let access = access(request.volume_capability.as_ref())?;
        let staging = path("staging_target_path", &request.staging_target_path)?;
        let id = VolumeId::find(&request.volume_id)?;
        let _held = self.locks.take(&id.to_string())?;
        let record = self.records.find(&id)?.filter(|record| record.staging == staging);
        let not_staged =
            || Fault::precondition(format!("volume {id} is not staged at {}", staging.display()));
        let mut record = record.ok_or_else(not_staged)?;
        if record.mount.is_some() == access.is_block() {
            return Err(Fault::new(
                Code::AlreadyExists,
                format!("volume {id} is staged with another access type"),
            ));
        }
        let key = target.display().to_string();
        let other = record.targets.keys().find(|other| **other != key);
        if let Some(other) = other.filter(|_| access.mode == Mode::SingleNodeSingleWriter) {
            return Err(Fault::precondition(format!("volume {id}: its single writer has it at {other}")));
        }
        let read_only = request.readonly || access.is_read_only();
        match record.targets.get(&key) {
            Some(before) if *before != read_only => {
                let detail = format!("volume {id} is published at {key} with readonly={before}");
                return Err(Fault::new(Code::AlreadyExists, detail));
            }
            _ => drop(record.targets.insert(key, read_only)),
        }
        if let (Some(_), Some(mount)) = (&record.direct, &record.mount) {
            check_is_direct(&access)?;
            self.kata.place(&target)?;
            let export = self.kata.export(&id)?;
            let info = export.and_then(|export| MountInfo::new(&export, mount, read_only));
            let info = info.ok_or_else(not_staged)?;
            self.records.save(&id, &record)?;
            return self.kata.publish(&target, &info);
        }
        let device = self.backend.find(&record)?.ok_or_else(not_staged)?;
        let source = match record.mount {
            Some(_) if !self.mounts.is_mounted(&staging)? => return Err(not_staged()),
            Some(_) => &staging,
            None => &device,
        };
        self.records.save(&id, &record)?;
        self.mounts.bind(source, &target, access.is_block(), read_only)
    }

    /// Ends that, and removes the target path.
    ///
    /// # Errors
    /// When the system refuses.
    pub fn unpublish(&self, request: &NodeUnpublishVolumeRequest) -> Result<()> {
        require("volume_id", &request.volume_id)?;
        let target = path("target_path", &request.target_path)?;
        let id = VolumeId::parse(&request.volume_id);
        let key = id.as_ref().map_or(request.volume_id.clone(), VolumeId::to_string);
        let _held = self.locks.take(&key)?;
        let record = id.as_ref().map_or(Ok(None), |id| self.records.find(id))?;
        let text = target.display().to_string();
        if record.as_ref().is_some_and(|record| record.direct.is_some() && record.targets.contains_key(&text))
        {
            self.kata.unpublish(&target)?;
        }
        match self.mounts.unmount(&target) {
            // Its file system is used at other places, or its disk does not answer.
            Err(fault) if fault.code == Code::DeadlineExceeded => self.mounts.unmount_lazily(&target)?,
            result => result?,
        }
        self.mounts.remove(&target)?;
        let (Some(id), Some(mut record)) = (id, record) else { return Ok(()) };
        record.targets.remove(&text);
        self.records.save(&id, &record)
    }

    /// The room on a volume that is published or staged.
    ///
    /// # Errors
    /// `NOT_FOUND` when it is not at that path, `UNIMPLEMENTED` for a direct volume of Kata.
    pub fn stats(&self, request: &NodeGetVolumeStatsRequest) -> Result<NodeGetVolumeStatsResponse> {
        let (id, record) = self.at(&request.volume_id, &request.volume_path)?;
        if record.direct.is_some() {
            let detail =
                format!("volume {id}: a guest of Kata has its file system, whose room is not known here");
            return Err(Fault::new(Code::Unimplemented, detail));
        }
        let device = self.device(&id, &record, &request.volume_path)?;
        if record.mount.is_none() {
            let total = self.backend.size(&device)?;
            let total = i64::try_from(total).unwrap_or(i64::MAX);
            let usage = VolumeUsage { total, unit: Unit::Bytes as i32, ..VolumeUsage::default() };
            return Ok(NodeGetVolumeStatsResponse { usage: vec![usage] });
        }
        let [bytes, inodes] = self.mounts.usage(Path::new(&request.volume_path))?;
        let usage = |of: Usage, unit: Unit| VolumeUsage {
            available: of.available,
            total: of.total,
            used: of.used,
            unit: unit as i32,
        };
        Ok(NodeGetVolumeStatsResponse { usage: vec![usage(bytes, Unit::Bytes), usage(inodes, Unit::Inodes)] })
    }

    /// Grows the file system of a volume that has grown.
    ///
    /// # Errors
    /// `NOT_FOUND` when the volume is not at that path, `UNAVAILABLE` while its disk is as small as
    /// before, `FAILED_PRECONDITION` while a guest of Kata has its file system.
    pub fn expand(&self, request: &NodeExpandVolumeRequest) -> Result<NodeExpandVolumeResponse> {
        let (id, record) = self.at(&request.volume_id, &request.volume_path)?;
        let _held = self.locks.take(&id.to_string())?;
        let required = request.capacity_range.unwrap_or_default().required_bytes;
        let required = u64::try_from(required).unwrap_or_default();
        if let Some(Direct { file_system_bytes }) = record.direct {
            if file_system_bytes < required {
                return Err(Fault::precondition(format!(
                    "volume {id}: its file system of {file_system_bytes} bytes is for a guest of Kata, and grows \
                     to {required} when the volume is staged the next time: restart its pod"
                )));
            }
            let capacity_bytes = i64::try_from(file_system_bytes).unwrap_or(i64::MAX);
            return Ok(NodeExpandVolumeResponse { capacity_bytes });
        }
        let device = self.device(&id, &record, &request.volume_path)?;
        let size = self.backend.wait_for_size(&device, required)?;
        if let Some(mount) = &record.mount {
            self.mounts.grow(&device, &record.staging, &mount.fs_type)?;
        }
        Ok(NodeExpandVolumeResponse { capacity_bytes: i64::try_from(size).unwrap_or(i64::MAX) })
    }

    /// The volume that a call finds at a path, with its record.
    fn at(&self, volume: &str, path_text: &str) -> Result<(VolumeId, Record)> {
        require("volume_id", volume)?;
        require("volume_path", path_text)?;
        let id = VolumeId::find(volume)?;
        let record = self.records.find(&id)?.filter(|record| {
            record.staging == Path::new(path_text) || record.targets.contains_key(path_text)
        });
        let record = record.ok_or_else(|| absent(&id, path_text))?;
        Ok((id, record))
    }

    /// The device of a volume at a path.
    fn device(&self, id: &VolumeId, record: &Record, path_text: &str) -> Result<PathBuf> {
        self.backend.find(record)?.ok_or_else(|| absent(id, path_text))
    }
}

fn absent(id: &VolumeId, path_text: &str) -> Fault {
    Fault::not_found(format!("volume {id} is not at {path_text}"))
}

/// A path in a call.
fn path(field: &str, text: &str) -> Result<PathBuf> {
    require(field, text)?;
    match text.starts_with('/') && !text.contains('\0') {
        true => Ok(text.into()),
        false => Err(Fault::invalid(format!("{field} {text:?}: want an absolute path"))),
    }
}
