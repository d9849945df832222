//! ANA states of the namespaces of an export over its ports.
//!
//! The option `ana` of the export has the states that differ from those of the ports, which the
//! option `listen`, or the portal, has. A change is durable before it is in force.

use super::{Engine, Live};
use crate::api_error::ApiError;
use crate::state::ExportRecord;
use api::AnaState;
use exports_nvme_tcp::{AccessState, Address, PortConfig, port_at};
use hosting::export::ports::{access_states, ports, written};
use std::collections::BTreeMap;

/// The option with the states.
const ANA: &str = "ana";

fn states_of(record: &ExportRecord) -> Result<Vec<PortConfig>, ApiError> {
    let states = record.options.get(ANA).map(|list| access_states(list)).transpose();
    Ok(states.map_err(ApiError::invalid)?.unwrap_or_default())
}

impl Live {
    /// The ports of an export, with their own states; none for kinds without.
    fn ports_of(&self, record: &ExportRecord) -> Vec<PortConfig> {
        let listen = record.options.get("listen").filter(|_| record.kind == "nvme-tcp").cloned();
        let portal = record.options.get("portal").filter(|_| record.kind == "nvme-tcp");
        let portal = self.state.portals.iter().find(|known| Some(&known.name) == portal);
        let list = listen.or_else(|| portal.map(|portal| portal.listen.join("+")));
        // One that cannot be parsed does not start.
        list.and_then(|list| ports("listen", &list).ok()).unwrap_or_default()
    }

    /// The ANA state over each port of an export; `None` for kinds without ports.
    pub(super) fn ana_of(&self, record: &ExportRecord) -> Option<BTreeMap<String, AnaState>> {
        let (ports, chosen) = (self.ports_of(record), states_of(record).unwrap_or_default());
        let state = |port: &PortConfig| AnaState::from_name(port.state_within(&chosen).name());
        let states = ports.iter().filter_map(|port| Some((port.address.to_string(), state(port)?)));
        (!ports.is_empty()).then(|| states.collect())
    }
}

impl Engine {
    /// Gives `record`, of an export as it is, other states. Returns a description; `None` when
    /// nothing is to be done.
    ///
    /// # Errors
    /// When the export has no such port.
    pub(super) fn plan_states(
        &self,
        record: &mut ExportRecord,
        change: &BTreeMap<String, AnaState>,
    ) -> Result<Option<String>, ApiError> {
        let (ports, mut states) = (self.live().ports_of(record), states_of(record)?);
        if ports.is_empty() && !change.is_empty() {
            return Err(ApiError::invalid(format!("exports of kind {} have no ANA states", record.kind)));
        }
        let mut done = Vec::new();
        for (name, state) in change {
            let address = Address::of_listen(name);
            let port = port_at(&ports, &address).map_err(ApiError::invalid)?;
            let state = AccessState::parse(state.name()).expect("both have the names of ANA states");
            if port.state_within(&states) == state {
                continue;
            }
            states.retain(|chosen| chosen.address != address);
            if port.state != state {
                states.push(PortConfig { address, state });
            }
            done.push(format!("{name} is {}", state.name()));
        }
        match states.is_empty() {
            true => record.options.remove(ANA),
            false => record.options.insert(ANA.into(), written(&states)),
        };
        Ok((!done.is_empty()).then(|| done.join(", ")))
    }

    /// Puts the states of a record in force, if its export is served.
    ///
    /// # Errors
    /// When the export refuses them; nothing has changed then.
    pub(super) fn put_states(&self, record: &ExportRecord) -> Result<(), ApiError> {
        if self.workers.is_some() {
            self.start_again(record);
            return Ok(());
        }
        let Ok(export) = self.live().served(&record.name).map(|running| running.export.clone()) else {
            return Ok(());
        };
        export.set_access_states(&states_of(record)?)?;
        self.describe_again(record);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_api_has_the_states_of_nvme() {
        let names: Vec<&str> = AnaState::ALL.iter().map(|state| state.name()).collect();
        assert_eq!(names, AccessState::names());
    }
}
