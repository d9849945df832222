//! Problems of the objects, for the API, the page and metrics.

use super::Engine;
use api::{Array, ArrayState, ExportState, HealthCode, HealthProblem, MemberState, Severity};
use stack::array::wall_ns;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// Since when each problem has been seen: by code, and the name of the object.
#[derive(Default)]
pub(super) struct Since(Mutex<BTreeMap<(&'static str, String), u64>>);

impl Since {
    /// Notes the present problems, and sets their times.
    fn note(&self, problems: &mut [HealthProblem], now_ns: u64) {
        let mut since = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let before = std::mem::take(&mut *since);
        for problem in problems {
            let key = (problem.code.name(), problem.object.clone());
            problem.since_ns = before.get(&key).copied().unwrap_or(now_ns);
            since.insert(key, problem.since_ns);
        }
    }
}

impl Engine {
    /// Every problem, critical ones first.
    pub fn health(&self) -> Vec<HealthProblem> {
        let mut problems: Vec<HealthProblem> = self.arrays().iter().flat_map(of_array).collect();
        for device in self.devices() {
            if let Some(error) = &device.error {
                let text = format!("Device {} is not open: {error}", device.name);
                problems.push(problem(HealthCode::DeviceNotOpen, "device", &device.name, text));
            }
        }
        for volume in self.volumes() {
            if let Some(error) = &volume.error {
                let text = format!("Volume {} is no complete copy: {error}", volume.name);
                problems.push(problem(HealthCode::CopyFailed, "volume", &volume.name, text));
            }
        }
        for portal in self.portals() {
            if let Some(error) = &portal.error {
                let text = format!("Portal {} is not open: {error}", portal.name);
                problems.push(problem(HealthCode::PortalNotOpen, "portal", &portal.name, text));
            }
        }
        for export in self.exports() {
            if export.state != ExportState::Active {
                let state = export.state.name();
                let text = format!("Export {} is {state}{}", export.name, because(export.error.as_deref()));
                problems.push(problem(HealthCode::ExportWaiting, "export", &export.name, text));
            }
        }
        for (kind, object, error) in self.live().keys_errors() {
            let name = if kind == "portal" { "Portal" } else { "Export" };
            let text = format!("{name} {object} uses its former keys and certificates: {error}");
            problems.push(problem(HealthCode::KeysNotReloaded, kind, &object, text));
        }
        // Within a severity, the order stays.
        problems.sort_by_key(|problem| problem.severity == Severity::Warning);
        self.problems_since.note(&mut problems, wall_ns());
        problems
    }
}

fn of_array(array: &Array) -> Vec<HealthProblem> {
    let name = &array.name;
    let code = match array.state {
        ArrayState::Optimal => None,
        ArrayState::Degraded => Some(HealthCode::ArrayDegraded),
        ArrayState::Failed => Some(HealthCode::ArrayFailed),
        ArrayState::Offline => Some(HealthCode::ArrayOffline),
    };
    let state = code.map(|code| {
        let members = members_out(array);
        let why = because(array.error.as_deref().or(members.as_deref()));
        let text = format!("Array {name} is {}{why}", array.state);
        let is_last = code == HealthCode::ArrayDegraded && has_lost_redundancy(array);
        let text = if is_last { format!("{text}; no redundancy is left") } else { text };
        let usual = problem(code, "array", name, text);
        HealthProblem { severity: if is_last { Severity::Critical } else { usual.severity }, ..usual }
    });
    let mismatched = array.scrub.as_ref().filter(|scrub| !scrub.is_repairing && scrub.mismatched_rows > 0);
    let scrub = mismatched.map(|scrub| {
        let rows = scrub.mismatched_rows;
        let text = format!("The scrub of array {name} found {rows} mismatched rows");
        problem(HealthCode::MismatchedRows, "array", name, text)
    });
    state.into_iter().chain(scrub).collect()
}

/// Whether the next failure of a member loses data of an array whose level has redundancy.
fn has_lost_redundancy(array: &Array) -> bool {
    array.parity > 0 && array.redundancy_left == Some(0)
}

/// The members of an array that are not live; `None` if all are.
pub(super) fn members_out(array: &Array) -> Option<String> {
    let out = array.members.iter().filter(|member| member.state != MemberState::Live);
    let out: Vec<String> = out.map(|member| format!("slot {} {}", member.slot, member.state)).collect();
    (!out.is_empty()).then(|| out.join(", "))
}

fn because(why: Option<&str>) -> String {
    why.map(|why| format!(": {why}")).unwrap_or_default()
}

fn problem(code: HealthCode, kind: &str, object: &str, text: String) -> HealthProblem {
    let (kind, object) = (kind.to_owned(), object.to_owned());
    HealthProblem { code, severity: code.severity(), kind, object, text, since_ns: 0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_keeps_its_time_until_it_has_ended() {
        let since = Since::default();
        let times = |names: &[&str], now_ns| {
            let of = |name: &&str| problem(HealthCode::DeviceNotOpen, "device", name, String::new());
            let mut problems: Vec<HealthProblem> = names.iter().map(of).collect();
            since.note(&mut problems, now_ns);
            problems.iter().map(|problem| problem.since_ns).collect::<Vec<_>>()
        };
        assert_eq!(times(&["a"], 1), [1]);
        assert_eq!(times(&["b", "a"], 2), [2, 1]);
        assert_eq!(times(&["b"], 3), [2]);
        assert_eq!(times(&["a", "b"], 4), [4, 2]);
    }
}
