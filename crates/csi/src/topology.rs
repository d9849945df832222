//! Zones of a cluster: a node reaches the backends of its zone, and those without one.

use crate::config::Backend;
use crate::fault::{Fault, Result};
use crate::proto::{Topology, TopologyRequirement};
use tonic::Code;

/// The key of zones, behind the name of the driver and `/`.
const KEY: &str = "zone";

/// The topology of a zone, for the driver of this name.
pub fn of_zone(driver: &str, zone: &str) -> Topology {
    Topology { segments: [(format!("{driver}/{KEY}"), zone.to_owned())].into() }
}

/// Whether the nodes of a topology reach a backend.
pub fn reaches(driver: &str, topology: &Topology, backend: &Backend) -> bool {
    let zone = topology.segments.get(&format!("{driver}/{KEY}"));
    match (&backend.zone, zone) {
        (Some(own), Some(zone)) => own == zone,
        (None, _) | (_, None) => true,
    }
}

/// The backends that meet a requirement, the preferred ones first. Others keep their order.
///
/// # Errors
/// `RESOURCE_EXHAUSTED` when none does.
pub fn select<'a>(
    driver: &str,
    backends: &[&'a Backend],
    requirement: Option<&TopologyRequirement>,
) -> Result<Vec<&'a Backend>> {
    let Some(TopologyRequirement { requisite, preferred }) = requirement else {
        return Ok(backends.to_vec());
    };
    let wanted: Vec<&Topology> = preferred.iter().chain(requisite).collect();
    if wanted.is_empty() {
        return Ok(backends.to_vec());
    }
    let rank = |backend: &Backend| wanted.iter().position(|topology| reaches(driver, topology, backend));
    let mut ranked: Vec<(usize, &Backend)> =
        backends.iter().filter_map(|backend| Some((rank(backend)?, *backend))).collect();
    ranked.sort_by_key(|(rank, _)| *rank);
    if ranked.is_empty() {
        let zones: Vec<&str> =
            wanted.iter().flat_map(|topology| topology.segments.values()).map(String::as_str).collect();
        let detail = format!("accessibility_requirements: no backend is in the zones {}", zones.join(", "));
        return Err(Fault::new(Code::ResourceExhausted, detail));
    }
    Ok(ranked.into_iter().map(|(_, backend)| backend).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backends(zones: &[Option<&str>]) -> Vec<Backend> {
        let text: String = zones
            .iter()
            .enumerate()
            .map(|(place, zone)| {
                let zone = zone.map_or(String::new(), |zone| format!("zone = '{zone}'\n"));
                format!("[[backend]]\nname = 'b{place}'\nurl = 'http://127.0.0.1:1'\nlisten = '127.0.0.1:1'\n{zone}")
            })
            .collect();
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("backends.toml");
        std::fs::write(&path, text).unwrap();
        crate::config::read(&path).unwrap()
    }

    fn selected(zones: &[Option<&str>], requisite: &[&str], preferred: &[&str]) -> Result<Vec<String>> {
        let all = backends(zones);
        let list = |zones: &[&str]| zones.iter().map(|zone| of_zone("d", zone)).collect();
        let requirement = TopologyRequirement { requisite: list(requisite), preferred: list(preferred) };
        let found = select("d", &all.iter().collect::<Vec<_>>(), Some(&requirement))?;
        Ok(found.into_iter().map(|backend| backend.name.clone()).collect())
    }

    #[test]
    fn preferred_zones_come_first_and_other_zones_not_at_all() {
        let zones = [Some("a"), Some("b"), Some("c")];
        assert_eq!(selected(&zones, &[], &[]).unwrap(), ["b0", "b1", "b2"]);
        assert_eq!(selected(&zones, &["a", "b"], &["b", "a"]).unwrap(), ["b1", "b0"]);
        assert_eq!(selected(&zones, &["c"], &[]).unwrap(), ["b2"]);
        let fault = selected(&zones, &["x"], &[]).unwrap_err();
        assert_eq!(fault.code, Code::ResourceExhausted);
        assert!(fault.message.contains("zones x"), "{fault}");
    }

    #[test]
    fn a_backend_without_a_zone_is_reached_from_all() {
        assert_eq!(selected(&[Some("a"), None], &["b"], &["b"]).unwrap(), ["b1"]);
        assert_eq!(selected(&[Some("a"), None], &["a"], &["a"]).unwrap(), ["b0", "b1"]);
        let other = Topology { segments: [("other/zone".to_owned(), "x".to_owned())].into() };
        assert!(reaches("d", &other, &backends(&[Some("a")])[0]));
    }
}
