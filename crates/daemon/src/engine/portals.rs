//! Portals: listeners that NVMe/TCP exports share. The daemon opens them before the exports, and
//! closes them after.

use super::{Engine, Live};
use crate::api_error::{ApiError, Kind};
use crate::state::{ExportRecord, PortalRecord};
use api::NewPortal;
use exports::nvme_tcp::{Portal, PortalConfig};
use hosting::export::portal;
use sandbox::Profile;
use std::sync::Arc;
use volume::Name;

/// The option of an export that names its portal.
const PORTAL: &str = "portal";

impl Live {
    /// An open portal.
    pub(super) fn portal(&self, name: &str) -> Result<Arc<Portal>, ApiError> {
        match self.portals.get(name) {
            Some(Ok(portal)) => Ok(portal.clone()),
            Some(Err(error)) => Err(ApiError::new(Kind::Unavailable, format!("portal {name}: {error}"))),
            None => Err(ApiError::not_found("portal", name)),
        }
    }

    /// Checks that the portal exists that an export is to use, if it uses one.
    pub(super) fn check_portal_of(&self, record: &ExportRecord) -> Result<(), ApiError> {
        let Some(name) = record.options.get(PORTAL) else { return Ok(()) };
        match self.state.portals.iter().any(|portal| portal.name == *name) {
            true => Ok(()),
            false => Err(ApiError::not_found("portal", name)),
        }
    }

    fn exports_of_portal(&self, name: &str) -> Vec<String> {
        let uses = |export: &&ExportRecord| export.options.get(PORTAL).is_some_and(|portal| portal == name);
        self.state.exports.iter().filter(uses).map(|export| export.name.clone()).collect()
    }

    fn portal_report(&self, record: &PortalRecord) -> api::Portal {
        let PortalRecord { name, listen, clients } = record;
        let running = self.portals.get(name);
        let open = running.and_then(|portal| portal.as_ref().ok());
        api::Portal {
            name: name.clone(),
            listen: listen.clone(),
            addresses: open.map_or(Vec::new(), |open| open.addresses().map(str::to_owned).collect()),
            clients: *clients,
            connections: open
                .map_or(Vec::new(), |open| open.connections().map(|count| count as u32).collect()),
            exports: self.exports_of_portal(name),
            discovery_clients: open.map_or(0, |open| open.stats().clients()),
            error: running.and_then(|portal| portal.as_ref().err()).map(ApiError::to_string),
        }
    }
}

impl Engine {
    /// Every portal.
    pub fn portals(&self) -> Vec<api::Portal> {
        let live = self.live();
        live.state.portals.iter().map(|record| live.portal_report(record)).collect()
    }

    /// The portal with this name.
    ///
    /// # Errors
    /// When there is none.
    pub fn portal(&self, name: &str) -> Result<api::Portal, ApiError> {
        let live = self.live();
        let record = live.state.portals.iter().find(|portal| portal.name == name);
        Ok(live.portal_report(record.ok_or_else(|| ApiError::not_found("portal", name))?))
    }

    /// Opens a portal, now and at every start of the daemon.
    ///
    /// # Errors
    /// When the name is taken, or the portal cannot be opened.
    pub fn create_portal(&self, new: &NewPortal) -> Result<api::Portal, ApiError> {
        let _alone = self.change();
        let record = self.check_portal(new)?;
        if self.portal(&new.name).is_ok() {
            return Err(ApiError::new(Kind::Exists, format!("portal {} exists already", new.name)));
        }
        let opened = self.open_portal(&record)?;
        opened.accept()?;
        let addresses = opened.addresses().collect::<Vec<_>>().join(" and ");
        self.commit(|state| state.portals.push(record))?;
        self.live_mut().portals.insert(new.name.clone(), Ok(opened));
        self.events.emit("portal", &new.name, "created", format!("listens on {addresses}"));
        self.portal(&new.name)
    }

    /// Closes a portal that no export uses, and forgets it.
    ///
    /// # Errors
    /// When there is none, or exports use it.
    pub fn delete_portal(
        &self,
        name: &str,
        check: impl FnOnce(&api::Portal) -> Result<(), ApiError>,
    ) -> Result<(), ApiError> {
        let _alone = self.change();
        let portal = self.portal(name)?;
        check(&portal)?;
        if !portal.exports.is_empty() {
            let detail = format!("portal {name}: exports use it: {}", portal.exports.join(", "));
            return Err(ApiError::new(Kind::InUse, detail));
        }
        self.commit(|state| state.portals.retain(|portal| portal.name != name))?;
        let running = self.live_mut().portals.remove(name);
        drop(running); // not under the lock: it waits for connections
        self.events.emit("portal", name, "deleted", "closed and forgotten");
        Ok(())
    }

    /// The record of a portal, checked as far as its options go.
    ///
    /// # Errors
    /// With the option that is invalid.
    pub fn check_portal(&self, new: &NewPortal) -> Result<PortalRecord, ApiError> {
        let NewPortal { name, listen, clients } = new;
        Name::new(name)?;
        let config = config_of(name, listen, *clients)?;
        let record =
            PortalRecord { name: name.clone(), listen: listen.clone(), clients: config.clients as u32 };
        let mut needs = Profile::default();
        portal::keep(&config, &mut needs);
        self.confined.check(&needs).map_err(|error| error.about(&format!("portal {name}")))?;
        Ok(record)
    }

    /// Opens the portals of the state that are not open. Hosts wait there until
    /// [`Engine::accept_at_portals`]. Within a change.
    pub(super) fn open_portals(&self) {
        let records = self.live().state.portals.clone();
        for record in &records {
            let name = &record.name;
            if matches!(self.live().portals.get(name), Some(Ok(_))) {
                continue;
            }
            let opened = self.open_portal(record);
            let is_known = |error: &ApiError| matches!(self.live().portals.get(name), Some(Err(before)) if before == error);
            match &opened {
                Ok(_) => self.events.emit("portal", name, "opened", "exports may use it"),
                Err(error) if !is_known(error) => {
                    self.events.emit("portal", name, "missing", error.to_string());
                }
                Err(_) => {}
            }
            self.live_mut().portals.insert(name.clone(), opened);
        }
    }

    /// Accepts hosts at every portal. Once the exports have started: a host that came before waits,
    /// rather than being refused an export that is about to start.
    pub(super) fn accept_at_portals(&self) {
        let open: Vec<Arc<Portal>> = self.live().portals.values().flatten().cloned().collect();
        for portal in open {
            if let Err(error) = portal.accept() {
                tracing::error!(portal = portal.name(), %error, "no host can connect");
            }
        }
    }

    fn open_portal(&self, record: &PortalRecord) -> Result<Arc<Portal>, ApiError> {
        let PortalRecord { name, listen, clients } = record;
        let opened = Portal::bind(self.cores.all(), config_of(name, listen, Some(*clients))?);
        opened.map_err(|error| ApiError::from(error).about(&format!("portal {name}")))
    }
}

fn config_of(name: &str, listen: &[String], clients: Option<u32>) -> Result<PortalConfig, ApiError> {
    let config = portal::parse(name, listen, clients);
    let config = config.map_err(|fault| ApiError::invalid(format!("portal {name}: {fault}")))?;
    config.check()?;
    Ok(config)
}
