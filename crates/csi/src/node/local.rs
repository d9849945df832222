//! Exports of this machine's `freestoned`.

use crate::fault::{Fault, Result};
use crate::ids::VolumeId;
use api::{Export, NewExport, Volume};
use client::{Client, Method};
use std::path::Path;
use std::time::Duration;
use tonic::Code;

/// Limit of a request to the daemon.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(50);

/// The daemon of this machine.
pub(super) struct LocalDaemon {
    client: Client,
}

impl LocalDaemon {
    /// The daemon at a socket, which may be started later.
    pub fn new(socket: &Path) -> Result<LocalDaemon> {
        Ok(LocalDaemon { client: Client::at_socket(socket, Some(REQUEST_TIMEOUT))? })
    }

    /// The volume.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` when it is not on this machine.
    pub fn volume(&self, id: &VolumeId) -> Result<Volume> {
        let found = self.client.find(&["volumes", &id.uuid])?;
        found.ok_or_else(|| Fault::precondition(format!("volume {id}: it is not on this machine")))
    }

    /// The export of this name.
    pub fn export(&self, name: &str) -> Result<Option<Export>> {
        Ok(self.client.find(&["exports", name])?)
    }

    /// Makes an export.
    ///
    /// # Errors
    /// `FAILED_PRECONDITION` when its volume is not on this machine.
    pub fn make(&self, new: &NewExport) -> Result<()> {
        let made: client::Result<Export> = self.client.change(Method::POST, &["exports"], new);
        made.map(drop).map_err(|error| match Fault::from(error) {
            fault if fault.code == Code::NotFound => {
                Fault::precondition(format!("{}: it is not on this machine", fault.message))
            }
            fault => fault,
        })
    }

    /// Removes an export, which may be gone already.
    pub fn remove(&self, name: &str) -> Result<()> {
        match self.client.delete(&["exports", name], &[]).map_err(Fault::from) {
            Err(fault) if fault.code == Code::NotFound => Ok(()),
            outcome => outcome,
        }
    }
}
