//! A port of a portal, where hosts choose a subsystem by their Connect.
//!
//! Source: Base Specification 2.0, 6.3 (Connect).

use crate::directory::{Directory, Listed};
use crate::refusal::Refusal;
use crate::subsystem::{Admission, Subsystem};
use nvme::fabrics::{CONNECT_DATA_BYTES, Connect, ConnectData, FabricsType, InvalidParameter, Nqn};
use nvme::{Sgl, Status, SubmissionEntry};
use nvme_auth::access::Security;
use std::sync::Arc;

/// A port of a portal.
pub struct Entrance<S: Listed> {
    /// The subsystems of the portal.
    pub directory: Arc<Directory<S>>,
    /// The discovery subsystem.
    pub discovery: Arc<S>,
    /// The index of the port.
    pub port: usize,
    /// The portal's name, for logs.
    pub portal: Arc<str>,
}

/// A host that connects a queue.
#[derive(Clone, Copy, Debug)]
pub struct Newcomer<'a> {
    /// Its address, as logs have it.
    pub peer: &'a str,
    /// The identity that its TLS key proves: the host, and the subsystem of the key.
    pub proven: Option<&'a (Nqn, Nqn)>,
}

impl<S: Listed> Entrance<S> {
    /// Chooses the subsystem, and validates the Connect there. `data` is that of the capsule.
    ///
    /// # Errors
    /// The status of the command.
    pub fn connect(
        &self,
        newcomer: Newcomer<'_>,
        entry: &SubmissionEntry,
        data: &[u8],
    ) -> Result<(Arc<S>, Admission), Refusal> {
        if FabricsType::of(entry) != Some(FabricsType::Connect) {
            return Err(Status::COMMAND_SEQUENCE_ERROR.into());
        }
        let is_whole =
            matches!(entry.sgl, Sgl::InCapsule { offset: 0, len } if len as usize == CONNECT_DATA_BYTES);
        let data = data.first_chunk::<CONNECT_DATA_BYTES>().filter(|_| is_whole);
        let data = data.ok_or(Status::INVALID_SGL_LENGTH)?;
        let (connect, data) = (Connect::parse(&entry.cdw), ConnectData::parse(data)?);
        let service = match data.subsystem.is_discovery() {
            true => Some(self.discovery.clone()),
            false => self.directory.find(&data.subsystem),
        };
        let subsystem = service.as_ref().map(|service| service.subsystem());
        if subsystem.is_some_and(|subsystem| subsystem.failures.are_too_many(newcomer.peer)) {
            return Err(Status::CONNECT_CONTROLLER_BUSY.into());
        }
        self.check_proof(newcomer.proven, &data, subsystem)?;
        if connect.record_format != 0 {
            return Err(Status::CONNECT_INCOMPATIBLE_FORMAT.into());
        }
        let service = service.ok_or(InvalidParameter::SUBSYSTEM)?;
        let subsystem = service.subsystem();
        let admission = subsystem.connect(&subsystem.ports[self.port], &connect, &data)?;
        Ok((service, admission))
    }

    /// Checks that a newcomer may use this host's name for the subsystem: a host with a key must
    /// have used it for TLS, and every host where TLS is required. No key is known for discovery,
    /// which is open to all, or for an unknown subsystem.
    fn check_proof(
        &self,
        proven: Option<&(Nqn, Nqn)>,
        data: &ConnectData,
        subsystem: Option<&Arc<Subsystem>>,
    ) -> Result<(), Refusal> {
        let has_key = |security: &Security| security.keys.have(&data.host, &data.subsystem);
        let needs_key = |security: &Security| security.is_required || has_key(security);
        let is_right = match (proven, subsystem) {
            (Some((host, subsystem)), _) => *host == data.host && *subsystem == data.subsystem,
            (None, Some(subsystem)) => !subsystem.admitted().access.tls.as_ref().is_some_and(needs_key),
            (None, None) => true,
        };
        if is_right {
            return Ok(());
        }
        let (export, host, is_tls) = (&*self.portal, data.host.as_str(), proven.is_some());
        let subsystem = data.subsystem.as_str();
        tracing::warn!(
            export,
            subsystem,
            host,
            is_tls,
            "host refused: no TLS key for its name and this subsystem"
        );
        Err(Status::CONNECT_INVALID_HOST.into())
    }
}
