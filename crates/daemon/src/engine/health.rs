//! Problems of the objects, for the API, the page and metrics.

use super::Engine;
use api::{
    Array, ArrayState, Device, Drive, ExportState, HealthCode, HealthProblem, Member, MemberState, Severity,
};
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
        problems.extend(self.devices().iter().filter_map(of_drive));
        for volume in self.volumes() {
            if let Some(error) = &volume.error {
                let (code, what) = match volume.copying_from {
                    Some(_) => (HealthCode::CopyFailed, "no complete copy"),
                    None => (HealthCode::VolumeNotAvailable, "not available"),
                };
                let text = format!("Volume {} is {what}: {error}", volume.name);
                problems.push(problem(code, "volume", &volume.name, text));
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
    state.into_iter().chain(scrub).chain(of_members(&array.name, &array.members)).collect()
}

/// The drive of a device that is at risk.
fn of_drive(device: &Device) -> Option<HealthProblem> {
    let risks = risks(device.drive.as_ref())?;
    let text = format!("The drive of device {} {risks}", device.name);
    Some(problem(HealthCode::DriveAtRisk, "device", &device.name, text))
}

/// The drives of members of an array that are at risk, as one problem.
fn of_members(array: &str, members: &[Member]) -> Option<HealthProblem> {
    let of_slot = |member: &Member| Some(format!("slot {} {}", member.slot, risks(member.drive.as_ref())?));
    let members: Vec<String> = members.iter().filter_map(of_slot).collect();
    let text = format!("Drives of array {array} are at risk: {}", members.join("; "));
    (!members.is_empty()).then(|| problem(HealthCode::DriveAtRisk, "array", array, text))
}

/// A drive's risks, with its serial number: `(S1234) has used 93 % of its endurance`.
fn risks(drive: Option<&Drive>) -> Option<String> {
    let risks = drive?.health.as_ref()?.risks();
    let serial = drive?.serial.as_ref().map(|serial| format!("({serial}) ")).unwrap_or_default();
    (!risks.is_empty()).then(|| format!("{serial}{}", risks.join(", ")))
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
    use api::DriveHealth;

    #[test]
    fn drives_of_an_array_that_are_at_risk_are_one_problem() {
        let drive = |wear_percent, serial: Option<&str>| {
            let health = DriveHealth { wear_percent, ..DriveHealth::default() };
            Drive { serial: serial.map(str::to_owned), health: Some(health), ..Drive::default() }
        };
        let drives =
            [drive(95, Some("S0")), drive(89, Some("S1")), Drive::unknown("a file"), drive(100, None)];
        let member = |(slot, drive)| Member {
            slot,
            uuid: None,
            device: None,
            state: MemberState::Live,
            reason: None,
            read_errors: 0,
            drive: Some(drive),
        };
        let members: Vec<Member> = drives.into_iter().enumerate().map(member).collect();
        let problem = of_members("data", &members).unwrap();
        assert_eq!((problem.code, problem.severity), (HealthCode::DriveAtRisk, Severity::Warning));
        let text = "Drives of array data are at risk: slot 0 (S0) has used 95 % of its endurance; \
                    slot 3 has used 100 % of its endurance";
        assert_eq!(problem.text, text);
        assert_eq!(of_members("data", &members[1..3]), None);
    }

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
