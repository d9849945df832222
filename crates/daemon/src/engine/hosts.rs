//! The hosts that may connect to an export, and their secrets.
//!
//! The state lists the hosts, in the option `hosts` of the export. It names secrets, which
//! [`crate::host_secrets`] keeps. A change is durable before it is in force, and answered then.

use super::Engine;
use crate::api_error::{ApiError, Kind};
use crate::state::ExportRecord;
use api::{HostsChange, NewHost};
use exports_nvme_tcp::{Access, HostSecrets, Hosts, Nqn};
use hosting::export::{ExportPlan, KINDS};
use std::collections::BTreeSet;

/// The option that lists the hosts.
const HOSTS: &str = "hosts";

/// Access to an export that is served.
#[derive(Clone)]
pub(super) struct ExportAccess {
    /// As the options say, with the secrets in the files that they name.
    base: Access,
    /// Secrets that were added by the API.
    secrets: Vec<HostSecrets>,
}

/// A change of the hosts of an export.
pub(super) struct PlannedHosts {
    /// Secrets that are added, each with the generation of the state that names it.
    new_secrets: Vec<(u64, HostSecrets)>,
    /// Whether a host that could connect before loses its access.
    takes_access: bool,
    /// The access from now on, if the export is served: its parts, and the whole.
    access: Option<(ExportAccess, Access)>,
    /// For the event.
    done: String,
}

/// Whether exports of a kind have a list of hosts.
fn has_hosts(kind: &str) -> bool {
    KINDS.iter().any(|known| known.name == kind && known.keys.iter().any(|key| key.name == HOSTS))
}

fn hosts_of(record: &ExportRecord) -> Result<Hosts, ApiError> {
    let parse = |text: &String| Hosts::parse(text).map_err(|error| ApiError::invalid(error.to_string()));
    record.options.get(HOSTS).map_or(Ok(Hosts::Any), parse)
}

/// The listed hosts of an export; `None` if any host may connect, or its kind knows no hosts.
pub(super) fn listed(record: &ExportRecord) -> Option<Vec<String>> {
    match hosts_of(record) {
        Ok(Hosts::Listed(hosts)) if has_hosts(&record.kind) => {
            Some(hosts.iter().map(|host| host.as_str().to_owned()).collect())
        }
        _ => None,
    }
}

impl Engine {
    /// Adds the secrets that a record names to the plan of its export. Returns the parts of the
    /// access, if its kind has a list of hosts.
    ///
    /// # Errors
    /// When a secret is missing or invalid.
    pub(super) fn complete_access(
        &self,
        record: &ExportRecord,
        plan: &mut ExportPlan,
    ) -> Result<Option<ExportAccess>, ApiError> {
        let Some(base) = plan.config.access().cloned() else { return Ok(None) };
        let secrets = self.host_secrets.read(record)?;
        // A crash may have left others.
        self.prune_secrets(record);
        let access = ExportAccess { base, secrets };
        plan.config.set_access(access.whole()?);
        Ok(Some(access))
    }

    /// Plans a change of hosts; `record`, of the export as it is, gets the new list. `None` when
    /// nothing is to be done.
    ///
    /// # Errors
    /// When a host or a secret is invalid, or the change would not do what it says.
    pub(super) fn plan_hosts(
        &self,
        record: &mut ExportRecord,
        change: &HostsChange,
    ) -> Result<Option<PlannedHosts>, ApiError> {
        if change.add.is_empty() && change.remove.is_empty() {
            return Ok(None);
        }
        if !has_hosts(&record.kind) {
            let detail = format!("exports of kind {} have no list of hosts", record.kind);
            return Err(ApiError::invalid(detail));
        }
        let added = change.add.iter().map(|host| name(&host.nqn)).collect::<Result<BTreeSet<_>, _>>()?;
        let removed = change.remove.iter().map(|nqn| name(nqn)).collect::<Result<BTreeSet<_>, _>>()?;
        let is_removed = |nqn: &str| removed.iter().any(|host| host.as_str() == nqn);
        if let Some(host) = added.intersection(&removed).next() {
            return Err(ApiError::invalid(format!("host {host}: it is both added and removed")));
        }
        if added.len() < change.add.len() {
            return Err(ApiError::invalid("a host is added twice"));
        }
        let before = hosts_of(record)?;
        let takes_access = !removed.is_empty() || before == Hosts::Any;
        let mut hosts = match before {
            Hosts::Listed(hosts) => hosts,
            Hosts::Any if added.is_empty() => {
                let detail = "any host may connect, so none can be removed: add the hosts that may connect, which \
                              ends the access of all others";
                return Err(ApiError::new(Kind::InUse, detail));
            }
            Hosts::Any => BTreeSet::new(),
        };
        hosts.extend(added.iter().cloned());
        hosts.retain(|host| !is_removed(host.as_str()));
        let hosts = Hosts::listed(hosts).map_err(|error| ApiError::invalid(error.to_string()))?;
        record.options.insert(HOSTS.into(), hosts.to_string());
        record.host_secrets.retain(|nqn, _| !is_removed(nqn));

        let running = self.live().access_of(&record.name).cloned();
        let mut secrets = match &running {
            Some(access) => access.secrets.clone(),
            None if change.add.is_empty() => Vec::new(), // they are not needed
            None => self.host_secrets.found(record)?,
        };
        secrets.retain(|secrets| !is_removed(&secrets.nqn));
        let generation = self.generation() + 1;
        let mut new_secrets = Vec::new();
        for host in change.add.iter().filter(|host| has_secret(host)) {
            let before = secrets.iter().position(|secrets| secrets.nqn == host.nqn);
            let merged = merged(before.map(|place| secrets.swap_remove(place)), host);
            merged.parse().map_err(|error| ApiError::invalid(format!("host {error}")))?;
            record.host_secrets.insert(host.nqn.clone(), generation);
            new_secrets.push((generation, merged.clone()));
            secrets.push(merged);
        }
        let access = match running {
            None => None,
            Some(ExportAccess { base, .. }) => {
                let access = ExportAccess { base: Access { hosts, ..base }, secrets };
                let whole = access.whole()?;
                if let Some((host, fault)) = added.iter().find_map(|host| Some((host, whole.lacks(host)?))) {
                    return Err(ApiError::invalid(format!("host {host}: {fault}")));
                }
                Some((access, whole))
            }
        };
        Ok(Some(PlannedHosts { new_secrets, takes_access, access, done: done(&added, &removed) }))
    }

    /// Deletes the secrets that a record does not name. A failure is logged: they mean nothing.
    pub(super) fn prune_secrets(&self, record: &ExportRecord) {
        if let Err(error) = self.host_secrets.prune(record) {
            tracing::error!(export = record.name, %error, "secrets of removed hosts cannot be deleted");
        }
    }
}

impl PlannedHosts {
    /// Writes the new secrets. `before` is the record that names the others.
    ///
    /// # Errors
    /// When they cannot be written; the change has no effect then.
    pub(super) fn save_secrets(&mut self, engine: &Engine, before: &ExportRecord) -> Result<(), ApiError> {
        match std::mem::take(&mut self.new_secrets) {
            none if none.is_empty() => Ok(()),
            new => engine.host_secrets.add(before, new),
        }
    }

    /// Whether a host that could connect before loses its access.
    pub(super) fn takes_access(&self) -> bool {
        self.takes_access
    }

    /// Puts the change in force, which the state has already. Returns a description, when hosts
    /// without access have no write in flight.
    ///
    /// # Errors
    /// When the export refuses the access; the change has no effect then.
    pub(super) fn apply(self, engine: &Engine, record: &ExportRecord) -> Result<String, ApiError> {
        let name = &record.name;
        let Some((access, whole)) = self.access else { return Ok(self.done) };
        if engine.workers.is_some() {
            // The end of a worker is the end of its writes. Its hosts connect again.
            engine.start_again(record);
            return Ok(self.done);
        }
        // Not under the lock: it waits for requests in flight.
        let export = engine.live().served(name)?.export.clone();
        export.set_access(whole)?;
        if let Some(Ok(running)) = engine.live_mut().exports.get_mut(name) {
            running.access = Some(access);
        }
        Ok(self.done)
    }
}

impl ExportAccess {
    /// With the secrets that were added by the API.
    fn whole(&self) -> Result<Access, ApiError> {
        let whole = self.base.clone().with_secrets(&self.secrets);
        whole.map_err(|error| ApiError::invalid(format!("host {error}")))
    }

    /// The secrets that were added by the API.
    pub(super) fn secrets(&self) -> &[HostSecrets] {
        &self.secrets
    }
}

/// The name of a host that can be listed.
fn name(nqn: &str) -> Result<Nqn, ApiError> {
    let host = Nqn::new(nqn).map_err(|error| ApiError::invalid(format!("host {nqn:?}: {error}")))?;
    match nqn.contains('+') {
        true => Err(ApiError::invalid(format!("host {nqn:?}: a listed name has no plus sign"))),
        false => Ok(host),
    }
}

fn has_secret(host: &NewHost) -> bool {
    let NewHost { nqn: _, dhchap, dhchap_ctrl, tls_psk } = host;
    dhchap.is_some() || dhchap_ctrl.is_some() || tls_psk.is_some()
}

/// The secrets of a host that keeps those which are not given again.
fn merged(before: Option<HostSecrets>, new: &NewHost) -> HostSecrets {
    let NewHost { nqn, dhchap, dhchap_ctrl, tls_psk } = new.clone();
    let (mut old_dhchap, mut old_ctrl, mut old_psk) = (None, None, None);
    if let Some(before) = before {
        (old_dhchap, old_ctrl, old_psk) = (before.dhchap, before.dhchap_ctrl, before.tls_psk);
    }
    HostSecrets {
        nqn,
        dhchap: dhchap.map(Into::into).or(old_dhchap),
        dhchap_ctrl: dhchap_ctrl.map(Into::into).or(old_ctrl),
        tls_psk: tls_psk.map(Into::into).or(old_psk),
    }
}

/// A description of a change, for its event.
fn done(added: &BTreeSet<Nqn>, removed: &BTreeSet<Nqn>) -> String {
    let part = |hosts: &BTreeSet<Nqn>, what: &str| {
        let names: Vec<&str> = hosts.iter().map(Nqn::as_str).collect();
        (!names.is_empty()).then(|| format!("hosts {what}: {}", names.join(", ")))
    };
    [part(added, "added"), part(removed, "removed")].into_iter().flatten().collect::<Vec<_>>().join("; ")
}
