//! Files of keys and certificates of exports and portals, read again while they serve.

use super::exports::plan_of;
use super::portals::plan_of as plan_of_portal;
use super::{Engine, Live};
use crate::api_error::ApiError;
use crate::state::{ExportRecord, PortalRecord};
use api::Labels;
use hosting::export::{has_keys, portal, put_keys_in_force};

impl Live {
    /// Portals and exports whose files were not read again: kind, name and reason.
    pub(super) fn keys_errors(&self) -> Vec<(&'static str, String, String)> {
        let portals = self.portal_keys_errors.iter();
        let portals = portals.map(|(name, error)| ("portal", name.clone(), error.to_string()));
        let running = self.exports.iter().filter_map(|(name, running)| Some((name, running.as_ref().ok()?)));
        let exports =
            running.filter_map(|(name, running)| Some(("export", name.clone(), running.keys_error.clone()?)));
        portals.chain(exports).collect()
    }
}

impl Engine {
    /// Reads the keys and certificates of exports and portals again. New connections use them;
    /// those that are established stay, unless their host has lost its access. The log and the
    /// health name a file that cannot be used; the keys and certificates in use stay then.
    pub fn reload_keys(&self) {
        let _alone = self.change();
        let (portals, exports) = {
            let live = self.live();
            (live.state.portals.clone(), live.state.exports.clone())
        };
        for record in portals.iter().filter(|record| portal::has_keys(&record.description())) {
            // One that is not open reads them when it opens.
            if self.live().portal(&record.name).is_ok() {
                let reloaded = self.reload_keys_of_portal(record);
                self.tell_of_keys("portal", &record.name, &Labels::new(), &reloaded);
                let errors = &mut self.live_mut().portal_keys_errors;
                match reloaded {
                    Ok(()) => drop(errors.remove(&record.name)),
                    Err(error) => drop(errors.insert(record.name.clone(), error)),
                }
            }
        }
        for record in exports.iter().filter(|record| has_keys(&record.text())) {
            // One that waits reads them when it starts.
            if self.live().served(&record.name).is_ok() {
                let reloaded = self.reload_keys_of(record);
                self.tell_of_keys("export", &record.name, &record.labels, &reloaded);
                if let Some(Ok(running)) = self.live_mut().exports.get_mut(&record.name) {
                    running.keys_error = reloaded.err().map(|error| error.to_string());
                }
            }
        }
    }

    fn tell_of_keys(&self, kind: &str, name: &str, labels: &Labels, reloaded: &Result<(), ApiError>) {
        match reloaded {
            Ok(()) => {
                let text = "new connections use the keys and certificates that its files hold now";
                self.events.emit_labelled(kind, name, labels, "keys-reloaded", text);
            }
            Err(error) => {
                tracing::error!(kind, name, %error, "keys and certificates not reloaded: those in use stay");
            }
        }
    }

    fn reload_keys_of_portal(&self, record: &PortalRecord) -> Result<(), ApiError> {
        let plan = plan_of_portal(&record.description())?;
        let portal = self.live().portal(&record.name)?;
        match plan.security() {
            Some(security) => Ok(portal.set_security(security.clone())?),
            None => Ok(()),
        }
    }

    fn reload_keys_of(&self, record: &ExportRecord) -> Result<(), ApiError> {
        let (plan, files) = secrets::noting(|| plan_of(record));
        let mut plan = plan?;
        let access = self.complete_access(record, &mut plan)?;
        let (export, remote) = {
            let live = self.live();
            let running = live.served(&record.name)?;
            (running.export.clone(), running.remote.clone())
        };
        // Not under the lock: both wait for clients.
        match remote {
            Some(remote) => remote.reload(&files)?,
            None => put_keys_in_force(&*plan.config, &*export)?,
        }
        if let Some(Ok(running)) = self.live_mut().exports.get_mut(&record.name) {
            running.access = access;
        }
        Ok(())
    }
}
