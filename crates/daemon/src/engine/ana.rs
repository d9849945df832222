//! ANA states of the namespaces of an export over its ports.
//!
//! The option `ana` of the export has the states that differ from those of the ports, which the
//! option `listen`, or the portal, has. A change is durable before it is in force.

use super::{Engine, Live};
use crate::api_error::ApiError;
use crate::state::ExportRecord;
use api::AnaState;
use exports::nvme_tcp::{AccessState, Address, PortConfig};
use hosting::export::ports::{access_states, ports, written};
use std::collections::BTreeMap;

/// The option with the states.
const ANA: &str = "ana";

/// A change of the states.
pub(super) struct PlannedStates {
    before: Vec<PortConfig>,
    after: Vec<PortConfig>,
    /// For the event.
    done: String,
}

fn states_of(record: &ExportRecord) -> Result<Vec<PortConfig>, ApiError> {
    let states = record.options.get(ANA).map(|list| access_states(list)).transpose();
    Ok(states.map_err(ApiError::invalid)?.unwrap_or_default())
}

impl Live {
    /// The ports of an export, with their own states; none for kinds without.
    fn ports_of(&self, record: &ExportRecord) -> Vec<PortConfig> {
        let listen = record.options.get("listen").filter(|_| record.kind == "nvme-tcp").cloned();
        let portal = record.options.get("portal");
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
    /// Plans a change of states; `record`, of the export as it is, gets the new ones. `None` when
    /// nothing is to be done.
    ///
    /// # Errors
    /// When the export has no such port.
    pub(super) fn plan_states(
        &self,
        record: &mut ExportRecord,
        change: &BTreeMap<String, AnaState>,
    ) -> Result<Option<PlannedStates>, ApiError> {
        let (ports, before) = (self.live().ports_of(record), states_of(record)?);
        if ports.is_empty() && !change.is_empty() {
            return Err(ApiError::invalid(format!("exports of kind {} have no ANA states", record.kind)));
        }
        let mut after = before.clone();
        let mut done = Vec::new();
        for (name, state) in change {
            let address = Address::of_listen(name);
            let Some(port) = ports.iter().find(|port| port.address == address) else {
                let known: Vec<String> = ports.iter().map(|port| port.address.to_string()).collect();
                let detail = format!("ana: {name:?} is no port: want one of {}", known.join(", "));
                return Err(ApiError::invalid(detail));
            };
            let state = AccessState::parse(state.name()).expect("both have the names of ANA states");
            if port.state_within(&after) == state {
                continue;
            }
            after.retain(|chosen| chosen.address != address);
            if port.state != state {
                after.push(PortConfig { address, state });
            }
            done.push(format!("{name} is {}", state.name()));
        }
        match after.is_empty() {
            true => record.options.remove(ANA),
            false => record.options.insert(ANA.into(), written(&after)),
        };
        let done = done.join(", ");
        Ok((!done.is_empty()).then_some(PlannedStates { before, after, done }))
    }
}

impl PlannedStates {
    /// Puts the change in force, which the state has already. Returns a description.
    ///
    /// # Errors
    /// When the export refuses it; nothing has changed then.
    pub(super) fn apply(&self, engine: &Engine, record: &ExportRecord) -> Result<String, ApiError> {
        if engine.workers.is_some() {
            engine.start_again(record);
        } else if engine.live().served(&record.name).is_ok() {
            engine.set_states(record, &self.after)?;
        }
        Ok(self.done.clone())
    }

    /// Undoes [`PlannedStates::apply`].
    pub(super) fn undo(&self, engine: &Engine, before: &ExportRecord) -> Result<(), ApiError> {
        match engine.workers.is_some() {
            true => engine.start_again(before),
            false if engine.live().served(&before.name).is_ok() => engine.set_states(before, &self.before)?,
            false => {}
        }
        Ok(())
    }
}

impl Engine {
    fn set_states(&self, record: &ExportRecord, states: &[PortConfig]) -> Result<(), ApiError> {
        let export = self.live().served(&record.name)?.export.clone();
        export.set_access_states(states)?;
        self.describe_again(record);
        Ok(())
    }
}
