//! Disks of this machine's `freestoned`, over ublk: for volumes of the same machine.

use super::backend::{
    Attachment, DISK_TIMEOUT, NodeBackend, block_size, host_nqn, wait_for, wait_for_block_size,
};
use super::local::LocalDaemon;
use super::record::Record;
use crate::fault::{Fault, Result};
use crate::ids::VolumeId;
use api::{Export, ExportState, NewExport};
use std::path::{Path, PathBuf};
use tonic::Code;

/// The disks of this machine's daemon.
pub struct Ublk {
    daemon: LocalDaemon,
    host_nqn: String,
}

impl Ublk {
    /// The daemon at a socket. The NQN is for the controller, which does not know how a node
    /// attaches.
    ///
    /// # Errors
    /// When there is no NQN.
    pub fn new(socket: &Path, given: Option<&str>) -> Result<Ublk> {
        Ok(Ublk { daemon: LocalDaemon::new(socket)?, host_nqn: host_nqn(given)? })
    }
}

/// Name of the export of a volume to its own machine.
fn name(id: &VolumeId) -> String {
    format!("csi-ublk-{}", id.uuid)
}

/// The device of an export, once it is served.
fn device(export: &Export) -> Option<PathBuf> {
    let id = export.options.get("id").filter(|_| export.state == ExportState::Active)?;
    id.parse::<u32>().ok().map(|id| format!("/dev/ublkb{id}").into())
}

impl NodeBackend for Ublk {
    fn host_nqn(&self) -> &str {
        &self.host_nqn
    }

    fn attach(&self, attachment: &Attachment) -> Result<PathBuf> {
        let name = name(&attachment.id);
        if self.daemon.export(&name)?.is_none() {
            let new = NewExport {
                name: name.clone(),
                kind: "ublk".into(),
                volumes: vec![attachment.id.uuid.clone()],
                options: [("id".to_owned(), "auto".to_owned())].into(),
                ..NewExport::default()
            };
            self.daemon.make(&new)?;
        }
        let served =
            || Ok(self.daemon.export(&name)?.as_ref().and_then(device).filter(|device| device.exists()));
        wait_for(DISK_TIMEOUT, served)?.ok_or_else(|| {
            Fault::new(Code::DeadlineExceeded, format!("export {name}: its disk has not appeared"))
        })
    }

    fn find(&self, record: &Record) -> Result<Option<PathBuf>> {
        let Some(id) = VolumeId::parse(&record.volume) else { return Ok(None) };
        Ok(self.daemon.export(&name(&id))?.as_ref().and_then(device))
    }

    fn detach(&self, record: &Record) -> Result<()> {
        let Some(id) = VolumeId::parse(&record.volume) else { return Ok(()) };
        self.daemon.remove(&name(&id))
    }

    fn size(&self, device: &Path) -> Result<u64> {
        block_size(Path::new("/sys"), device)
    }

    fn wait_for_size(&self, device: &Path, required: u64) -> Result<u64> {
        wait_for_block_size(Path::new("/sys"), device, required)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_has_the_number_of_an_export_that_is_served() {
        let export = |state: &str, id: &str| -> Export {
            serde_json::from_value(serde_json::json!({
                "name": "e", "kind": "ublk", "volumes": ["v"], "options": { "id": id }, "read_only": false,
                "cores": [], "state": state, "error": null, "description": null, "traffic": null,
            }))
            .unwrap()
        };
        assert_eq!(device(&export("active", "7")), Some("/dev/ublkb7".into()));
        assert_eq!(device(&export("waiting", "7")), None);
        assert_eq!(device(&export("active", "auto")), None);
    }
}
