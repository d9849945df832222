//! Connecting a queue: the socket, the connection's terms, the Connect command, and authentication
//! if the controller asks for it.

use super::authentication;
use super::error::OpenError;
use super::identity::Identity;
use super::link::Link;
use drivers::stream::{Deadline, Stream};
use nvme::fabrics::{Connect, ConnectResponse, InvalidParameter};
use nvme::{Sgl, Status};

/// The purpose of a connection.
pub(super) struct Purpose {
    pub(super) queue_id: u16,
    /// Entries of the queue.
    pub(super) entries: u32,
    pub(super) keep_alive_ms: u32,
    pub(super) controller_id: u16,
}

/// Connects a queue to the target. Returns the identifier of its controller.
pub(super) fn connect(
    host: &Identity,
    purpose: &Purpose,
    deadline: &Deadline<'_>,
) -> Result<(Link, u16), OpenError> {
    let options = &host.options;
    let stream = match &host.security {
        Some(security) => security.connect(&options.address, deadline)?,
        None => Stream::connect(&options.address, deadline)?,
    };
    let mut link = Link::over(stream, options, deadline)?;
    let connect = Connect {
        record_format: 0,
        queue_id: purpose.queue_id,
        entries: purpose.entries,
        attributes: 0,
        keep_alive_ms: purpose.keep_alive_ms,
    };
    let data = host.connect_data(purpose.controller_id).encode();
    let entry = |id| connect.entry(id, Sgl::InCapsule { offset: 0, len: data.len() as u32 });
    let end = link.command(entry, &data, &mut [], deadline)?;
    match end.status {
        Status::SUCCESS => {}
        status @ Status::CONNECT_INVALID_PARAMETERS => {
            return Err(OpenError::Parameter(InvalidParameter::parse(end.result), status));
        }
        status => return Err(OpenError::Refused { command: "to connect", status }),
    }
    let response = ConnectResponse::parse(&end);
    if response.needs_authentication {
        authentication::perform(&mut link, host, deadline)?;
    } else if options.controller_key.is_some() {
        return Err(OpenError::NoProof);
    }
    Ok((link, response.controller_id))
}
