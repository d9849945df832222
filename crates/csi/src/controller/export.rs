//! The export of a volume: an NVMe/TCP subsystem of its own, without hosts until it is published.

use super::{Controller, RESERVATIONS_LABEL};
use crate::config::{Backend, Listener};
use crate::fault::{Fault, Result};
use crate::ids::{DRIVER_LABEL, VolumeId, derived_uuid};
use api::{Export, NewExport, Volume};
use client::Method;
use std::collections::{BTreeMap, HashSet};
use std::net::SocketAddr;
use tonic::Code;

/// How many ports are tried: others may use some that the daemon's exports do not have.
const MAX_PORTS_TRIED: usize = 16;

/// Where and as which disk a node finds a volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// NQN of the subsystem.
    pub nqn: String,
    /// UUID of its only namespace.
    pub uuid: String,
    /// Addresses, separated by commas.
    pub addresses: String,
}

impl Place {
    /// As a node gets it, in the context of a published volume. It has no secret.
    pub fn context(self) -> [(String, String); 3] {
        [("nqn".into(), self.nqn), ("uuid".into(), self.uuid), ("addresses".into(), self.addresses)]
    }
}

impl Controller {
    /// The export of a volume, which is made if it does not exist: a call may have ended between
    /// the volume and its export.
    pub(super) fn export(&self, backend: &Backend, id: &VolumeId, volume: &Volume) -> Result<Export> {
        if let Some(export) = backend.find_export(id)? {
            return Ok(export);
        }
        let nqn = format!("{}:{}", self.nqn_prefix, id.uuid);
        let mut labels = volume.labels.clone();
        labels.insert(DRIVER_LABEL.into(), self.driver.clone());
        let uuid = derived_uuid(&nqn);
        let options = [("nqn", nqn), ("uuid", uuid), ("hosts", "none".into())];
        let mut new = NewExport {
            name: id.export(),
            kind: "nvme-tcp".into(),
            volumes: vec![id.uuid.clone()],
            options: options.into_iter().map(|(key, value)| (key.to_owned(), value)).collect(),
            labels,
            ..NewExport::default()
        };
        if volume.labels.contains_key(RESERVATIONS_LABEL) {
            let directory = backend.reservations.clone().ok_or_else(|| {
                Fault::precondition(format!(
                    "volume {id}: backend {} is not configured with a directory for reservations",
                    backend.name
                ))
            })?;
            new.options.insert("reservations".into(), directory);
        }
        match &backend.listener {
            Listener::Portal { name, .. } => {
                new.options.insert("portal".into(), name.clone());
                make(backend, &new)
            }
            Listener::Ports { first, last } => make_at_free_port(backend, new, *first, *last),
        }
    }
}

/// Makes an export, or finds the one that another process of this driver has made meanwhile.
fn make(backend: &Backend, new: &NewExport) -> Result<Export> {
    let made = backend.change(Method::POST, &["exports"], new);
    match made {
        Err(fault) if fault.code == Code::AlreadyExists => {
            let found = backend.client.find(&["exports", &new.name]);
            found.map_err(|error| backend.fault(error))?.ok_or(fault)
        }
        made => made,
    }
}

/// Makes an export at the first port that none has.
fn make_at_free_port(backend: &Backend, mut new: NewExport, first: SocketAddr, last: u16) -> Result<Export> {
    let exports: Vec<Export> =
        backend.client.list(&["exports"], &[]).map_err(|error| backend.fault(error))?;
    let used: HashSet<u16> = exports
        .iter()
        .flat_map(|export| addresses(&export.options))
        .filter(|address| address.ip() == first.ip() || address.ip().is_unspecified())
        .map(|address| address.port())
        .collect();
    let mut refusal = None;
    for port in (first.port()..=last).filter(|port| !used.contains(port)).take(MAX_PORTS_TRIED) {
        new.options.insert("listen".into(), SocketAddr::new(first.ip(), port).to_string());
        match make(backend, &new) {
            // Another call, driver or program has the port.
            Err(fault) if matches!(fault.code, Code::AlreadyExists | Code::FailedPrecondition) => {
                tracing::debug!(export = new.name, port, %fault, "the next port is tried");
                refusal = Some(fault);
            }
            result => return result,
        }
    }
    Err(refusal.unwrap_or_else(|| {
        let detail = format!("backend {}: every port of listen={first}-{last} has an export", backend.name);
        Fault::new(Code::ResourceExhausted, detail)
    }))
}

/// The addresses at which an export with these options listens.
fn addresses(options: &BTreeMap<String, String>) -> Vec<SocketAddr> {
    let listen = options.get("listen").map_or("", String::as_str);
    // Each may have an ANA state: ADDR:PORT@STATE.
    let address = |part: &str| part.split('@').next().and_then(|address| address.parse().ok());
    listen.split('+').filter_map(address).collect()
}

/// The place of an export.
///
/// # Errors
/// `FAILED_PRECONDITION` when the export is not one that nodes can find.
pub(super) fn place(backend: &Backend, export: &Export) -> Result<Place> {
    let lacks = |what: &str| Fault::precondition(format!("export {}: it has no {what}", export.name));
    let option = |key: &str| export.options.get(key).cloned();
    let addresses = match (&backend.listener, option("portal")) {
        (Listener::Portal { addresses, .. }, Some(_)) => addresses.clone(),
        _ => addresses(&export.options),
    };
    if addresses.is_empty() {
        return Err(lacks("address that the backend's configuration or its option listen names"));
    }
    let nqn = option("nqn").ok_or_else(|| lacks("option nqn"))?;
    let addresses: Vec<String> = addresses.iter().map(SocketAddr::to_string).collect();
    let uuid = option("uuid").unwrap_or_else(|| derived_uuid(&nqn));
    Ok(Place { nqn, uuid, addresses: addresses.join(",") })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_with_their_states() {
        let of = |listen: &str| addresses(&BTreeMap::from([("listen".to_owned(), listen.to_owned())]));
        assert_eq!(of("10.0.0.1:4420@optimized+[::1]:4421").len(), 2);
        assert_eq!(of("systemd"), []);
        assert_eq!(addresses(&BTreeMap::new()), []);
    }
}
