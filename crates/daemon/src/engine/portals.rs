//! Portals: listeners that exports share. The daemon opens them before the exports, and closes them
//! after.

use super::{Engine, Live};
use crate::api_error::{ApiError, Kind};
use crate::state::{ExportRecord, PortalRecord};
use api::NewPortal;
use hosting::export::OpenPortal;
use hosting::export::{PortalPlan, portal};
use sandbox::Profile;
use volume::Name;

/// The option of an export that names its portal.
const PORTAL: &str = "portal";

impl Live {
    /// An open portal.
    pub(super) fn portal(&self, name: &str) -> Result<OpenPortal, ApiError> {
        match self.portals.get(name) {
            Some(Ok(portal)) => Ok(portal.clone()),
            Some(Err(error)) => Err(ApiError::new(Kind::Unavailable, format!("portal {name}: {error}"))),
            None => Err(ApiError::not_found("portal", name)),
        }
    }

    /// Checks that the portal exists that an export is to use, if it uses one, and has its kind.
    pub(super) fn check_portal_of(&self, record: &ExportRecord) -> Result<(), ApiError> {
        let Some(name) = record.options.get(PORTAL) else { return Ok(()) };
        match self.state.portals.iter().find(|portal| portal.name == *name) {
            Some(portal) if portal.kind != record.kind => {
                let (is, kind) = (&portal.kind, &record.kind);
                let detail = format!("portal {name}: it has exports of kind {is}, and none of kind {kind}");
                Err(ApiError::invalid(detail))
            }
            Some(_) => Ok(()),
            None => Err(ApiError::not_found("portal", name)),
        }
    }

    fn exports_of_portal(&self, name: &str) -> Vec<String> {
        let uses = |export: &&ExportRecord| export.options.get(PORTAL).is_some_and(|portal| portal == name);
        self.state.exports.iter().filter(uses).map(|export| export.name.clone()).collect()
    }

    fn portal_report(&self, record: &PortalRecord) -> api::Portal {
        let PortalRecord { name, kind, listen, clients, options } = record;
        let running = self.portals.get(name);
        let open = running.and_then(|portal| portal.as_ref().ok());
        api::Portal {
            name: name.clone(),
            kind: kind.clone(),
            listen: listen.clone(),
            addresses: open.map_or(Vec::new(), OpenPortal::addresses),
            clients: *clients,
            options: options.clone(),
            connections: open.map_or(Vec::new(), OpenPortal::connections),
            exports: self.exports_of_portal(name),
            discovery_clients: open.map_or(0, OpenPortal::discovery_clients),
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
        let addresses = opened.addresses().join(" and ");
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
        let running = {
            let mut live = self.live_mut();
            live.portal_keys_errors.remove(name);
            live.portals.remove(name)
        };
        drop(running); // not under the lock: it waits for connections
        self.events.emit("portal", name, "deleted", "closed and forgotten");
        Ok(())
    }

    /// The record of a portal, checked as far as its options go.
    ///
    /// # Errors
    /// With the option that is invalid.
    pub fn check_portal(&self, new: &NewPortal) -> Result<PortalRecord, ApiError> {
        let NewPortal { name, listen, options, .. } = new;
        Name::new(name)?;
        let check = |needs: &Profile| {
            self.confined.check(needs).map_err(|error| error.about(&format!("portal {name}")))
        };
        // First: `plan_of` reads files of keys and certificates.
        let mut needs = Profile::default();
        portal::keep_read(new, &mut needs);
        check(&needs)?;
        let plan = plan_of(new)?;
        plan.keep(&mut needs);
        check(&needs)?;
        Ok(PortalRecord {
            name: name.clone(),
            kind: portal::kind_of(new).to_owned(),
            listen: listen.clone(),
            clients: plan.clients() as u32,
            options: options.clone(),
        })
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
        let open: Vec<OpenPortal> = self.live().portals.values().flatten().cloned().collect();
        for portal in open {
            if let Err(error) = portal.accept() {
                tracing::error!(portal = portal.name(), %error, "no host can connect");
            }
        }
    }

    fn open_portal(&self, record: &PortalRecord) -> Result<OpenPortal, ApiError> {
        let opened = plan_of(&record.description())?.open(self.cores.all());
        opened.map_err(|error| ApiError::from(error).about(&format!("portal {}", record.name)))
    }
}

/// The portal that `new` describes, checked as far as its options go.
pub(super) fn plan_of(new: &NewPortal) -> Result<PortalPlan, ApiError> {
    let plan = PortalPlan::parse(new);
    let plan = plan.map_err(|fault| ApiError::invalid(fault).about(&format!("portal {}", new.name)))?;
    plan.check()?;
    Ok(plan)
}
