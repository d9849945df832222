//! Files of keys and certificates that exports use, read again while they serve.

use super::Engine;
use super::exports::plan_of;
use crate::api_error::ApiError;
use crate::state::ExportRecord;
use hosting::export::{has_keys, put_keys_in_force};

impl Engine {
    /// Reads the keys and certificates of exports again. New connections use them; those that are
    /// established stay, unless their host has lost its access. The log and the health name a file
    /// that cannot be used; the keys and certificates in use stay then.
    pub fn reload_keys(&self) {
        let _alone = self.change();
        let records = self.live().state.exports.clone();
        for record in records.iter().filter(|record| has_keys(&record.text())) {
            // One that waits reads them when it starts.
            if self.live().served(&record.name).is_err() {
                continue;
            }
            let reloaded = self.reload_keys_of(record);
            match &reloaded {
                Ok(()) => {
                    let text = "new connections use the keys and certificates that its files hold now";
                    self.events.emit_labelled("export", &record.name, &record.labels, "keys-reloaded", text);
                }
                Err(error) => {
                    let export = &*record.name;
                    tracing::error!(export, %error, "keys and certificates not reloaded: those in use stay");
                }
            }
            if let Some(Ok(running)) = self.live_mut().exports.get_mut(&record.name) {
                running.keys_error = reloaded.err().map(|error| error.to_string());
            }
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
