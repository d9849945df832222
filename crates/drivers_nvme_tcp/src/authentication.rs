//! Authentication of the host on a new queue: DH-HMAC-CHAP in Authentication Send and Receive.
//!
//! Source: Base Specification 2.0, 8.13.

use super::error::OpenError;
use super::identity::Identity;
use super::link::Link;
use drivers::stream::Deadline;
use nvme::fabrics::auth;
use nvme::{Sgl, Status};
use nvme_auth::host::Refusal;
use nvme_auth::response::Parties;
use nvme_auth::{Group, Hash, Host};
use std::sync::atomic::{AtomicU16, Ordering};

/// Buffer for the longest message of a target: a challenge over 8192 bits has 1104 bytes.
const ROOM: usize = 4096;

/// Authenticates the host to the target, and the target to the host if the options demand it.
///
/// # Errors
/// When there is no secret, either side does not trust the other, or the connection fails.
pub(super) fn perform(link: &mut Link, host: &Identity, deadline: &Deadline<'_>) -> Result<(), OpenError> {
    static TRANSACTION: AtomicU16 = AtomicU16::new(0);
    let options = &host.options;
    let key = options.key.as_ref().ok_or(OpenError::NoKey)?;
    let parties = Parties { host: host.name.clone(), subsystem: options.nqn.clone() };
    let transaction = TRANSACTION.fetch_add(1, Ordering::Relaxed);
    let mut talk = Host::new(&parties, key, options.controller_key.as_ref(), transaction);
    say(link, &talk.negotiate(), deadline)?;
    let challenge = hear(link, deadline)?;
    let reply = match talk.reply(&challenge) {
        Ok(reply) => reply,
        Err(refusal) => return Err(refuse(link, &talk, refusal, deadline)),
    };
    say(link, &reply, deadline)?;
    let end = hear(link, deadline)?;
    match talk.conclude(&end) {
        Ok(Some(message)) => say(link, &message, deadline)?,
        Ok(None) => {}
        Err(refusal) => return Err(refuse(link, &talk, refusal, deadline)),
    }
    let (hash, group) = talk.chosen().unzip();
    let (hash, group) = (hash.map(Hash::name), group.map(Group::name));
    let (subsystem, both) = (parties.subsystem.as_str(), options.controller_key.is_some());
    tracing::debug!(subsystem, hash, group, both, "authenticated");
    Ok(())
}

fn say(link: &mut Link, message: &[u8], deadline: &Deadline<'_>) -> Result<(), OpenError> {
    let len = message.len() as u32; // about 1200 at most
    let entry = |id| auth::send(id, len, Sgl::InCapsule { offset: 0, len });
    match link.command(entry, message, &mut [], deadline)?.status {
        Status::SUCCESS => Ok(()),
        status => Err(OpenError::Refused { command: "an authentication message", status }),
    }
}

fn hear(link: &mut Link, deadline: &Deadline<'_>) -> Result<Vec<u8>, OpenError> {
    let mut message = vec![0; ROOM];
    let (end, got) = link.command_up_to(|id| auth::receive(id, ROOM as u32), &[], &mut message, deadline)?;
    message.truncate(got);
    match end.status {
        Status::SUCCESS => Ok(message),
        status => Err(OpenError::Refused { command: "to send an authentication message", status }),
    }
}

/// Tells the target the reason of the failure, best effort: the connection ends in any case.
fn refuse(link: &mut Link, talk: &Host<'_>, refusal: Refusal, deadline: &Deadline<'_>) -> OpenError {
    if let Refusal::Ours(fault) = refusal {
        let _ = say(link, &talk.failure(fault), deadline);
    }
    OpenError::Authentication(refusal)
}
