//! Parameters of storage classes and of volume attributes classes.

use crate::fault::{Fault, Result};
use crate::ids::fingerprint;
use api::{Qos, Rate};
use std::collections::{BTreeMap, HashMap};

/// Keys that the orchestrator's tools add to those of the storage class.
const RESERVED: &str = "csi.storage.k8s.io/";
/// Labels for such keys: they help people to find a volume.
const TRACKED: [(&str, &str); 3] = [
    ("csi.storage.k8s.io/pvc/name", "csi.pvc"),
    ("csi.storage.k8s.io/pvc/namespace", "csi.namespace"),
    ("csi.storage.k8s.io/pv/name", "csi.pv"),
];
/// Parameters for nodes, which they get in the volume's context: key, least and greatest value.
const NODE_OPTIONS: [(&str, i64, i64); 3] =
    [("nr-io-queues", 1, 1024), ("ctrl-loss-tmo", -1, 86400), ("fast-io-fail-tmo", -1, 86400)];
/// The parameter that chooses another way to nodes than their `--node-backend`, and its only value.
const NODE_BACKEND: (&str, &str) = ("node-backend", "kata");
/// Prefix of limits.
const QOS: &str = "qos.";

/// Parameters of a storage class, checked.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Parameters {
    /// Backends that may have the volume; none means any.
    pub backends: Vec<String>,
    /// The array or device for the volume. Default: that of the backend.
    pub backing: Option<String>,
    /// QoS limits.
    pub qos: Qos,
    /// Group of volumes that share limits.
    pub group: Option<String>,
    /// Whether nodes can reserve the volume. Several may write to such volumes only.
    pub has_reservations: bool,
    /// Whether guests of Kata mount the volume.
    pub is_direct: bool,
    /// Options for nodes.
    pub context: BTreeMap<String, String>,
    /// Labels for people.
    pub labels: BTreeMap<String, String>,
    /// Hash of all that the storage class has chosen: a repeated call has the same.
    pub fingerprint: String,
}

impl Parameters {
    /// Parses the parameters of a call.
    ///
    /// # Errors
    /// `INVALID_ARGUMENT` that names the key.
    pub fn parse(parameters: &HashMap<String, String>) -> Result<Parameters> {
        let mut parsed = Parameters::default();
        let mut chosen = String::new();
        for (key, value) in parameters.iter().collect::<BTreeMap<_, _>>() {
            if key.starts_with(RESERVED) {
                if let Some((_, label)) = TRACKED.iter().find(|(tracked, _)| tracked == key) {
                    parsed.labels.insert((*label).to_owned(), value.clone());
                }
                continue;
            }
            chosen.push_str(&format!("{key}={value}\n"));
            match key.as_str() {
                "backend" => parsed.backends = value.split(',').map(|name| name.trim().to_owned()).collect(),
                "backing" => parsed.backing = Some(value.clone()),
                "group" => parsed.group = Some(value.clone()),
                "reservations" => parsed.has_reservations = switch(key, value)?,
                _ if key == NODE_BACKEND.0 => {
                    parsed.is_direct = is_kata(value)?;
                    parsed.context.insert(key.clone(), value.clone());
                }
                _ if key.starts_with(QOS) => set_limit(&mut parsed.qos, key, value)?,
                _ => drop(parsed.context.insert(key.clone(), node_option(key, value)?)),
            }
        }
        parsed.fingerprint = fingerprint(&chosen)[..32].to_owned();
        Ok(parsed)
    }
}

/// Checks the way to nodes that a class chooses.
fn is_kata(value: &str) -> Result<bool> {
    let (key, kata) = NODE_BACKEND;
    match value == kata {
        true => Ok(true),
        false => Err(Fault::invalid(format!(
            "parameter {key}={value:?}: want {kata}; each node has other ways by its option --node-backend"
        ))),
    }
}

/// Whether guests of Kata mount the volume with this context.
///
/// # Errors
/// `INVALID_ARGUMENT` for a way to nodes that this driver does not have.
pub fn is_direct(context: &HashMap<String, String>) -> Result<bool> {
    context.get(NODE_BACKEND.0).map_or(Ok(false), |value| is_kata(value))
}

fn switch(key: &str, value: &str) -> Result<bool> {
    match value {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(Fault::invalid(format!("parameter {key}={value:?}: want on or off"))),
    }
}

/// Changes limits as mutable parameters ask for it; limits without a key stay.
///
/// # Errors
/// `INVALID_ARGUMENT` that names the key.
pub fn change_limits(qos: &mut Qos, parameters: &HashMap<String, String>) -> Result<()> {
    for (key, value) in parameters.iter().collect::<BTreeMap<_, _>>() {
        if !key.starts_with(QOS) {
            return Err(Fault::invalid(format!(
                "mutable parameter {key:?} is unknown: want qos.iops, qos.bandwidth and their likes"
            )));
        }
        set_limit(qos, key, value)?;
    }
    Ok(())
}

fn set_limit(qos: &mut Qos, key: &str, value: &str) -> Result<()> {
    let limit = match key.strip_prefix(QOS) {
        Some("iops") => &mut qos.iops,
        Some("read-iops") => &mut qos.read_iops,
        Some("write-iops") => &mut qos.write_iops,
        Some("bandwidth") => &mut qos.bandwidth,
        Some("read-bandwidth") => &mut qos.read_bandwidth,
        Some("write-bandwidth") => &mut qos.write_bandwidth,
        _ => {
            let known = "iops, read-iops, write-iops, bandwidth, read-bandwidth, write-bandwidth";
            return Err(Fault::invalid(format!("parameter {key:?} is unknown: qos. has {known}")));
        }
    };
    *limit = match value {
        "none" => None,
        _ => Some(Rate::parse(value).ok_or_else(|| {
            Fault::invalid(format!("parameter {key}={value:?}: want {}, or none", Rate::EXPECTED))
        })?),
    };
    Ok(())
}

/// Checks an option for nodes; returns its value as NVMe hosts read it.
fn node_option(key: &str, value: &str) -> Result<String> {
    let known = NODE_OPTIONS.iter().find(|(name, ..)| *name == key);
    let Some(&(_, least, greatest)) = known else {
        return Err(Fault::invalid(format!("parameter {key:?} is unknown")));
    };
    match value.parse::<i64>() {
        Ok(number) if (least..=greatest).contains(&number) => Ok(number.to_string()),
        _ => Err(Fault::invalid(format!("parameter {key}={value:?}: want {least} to {greatest}"))),
    }
}

/// The options for nodes in a volume's context. Keys of others are left out: a context may come
/// from a volume that was not made by this driver.
pub fn node_options(context: &HashMap<String, String>) -> Result<BTreeMap<String, String>> {
    let options = NODE_OPTIONS.iter().filter_map(|(key, ..)| Some((*key, context.get(*key)?)));
    options.map(|(key, value)| Ok((key.to_owned(), node_option(key, value)?))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn map(of: &[(&str, &str)]) -> HashMap<String, String> {
        of.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    #[test]
    fn a_storage_class_chooses_place_limits_and_options_of_nodes() {
        let parsed = Parameters::parse(&map(&[
            ("backend", "rack1, rack2"),
            ("backing", "data"),
            ("qos.iops", "2000:4000"),
            ("qos.bandwidth", "100M"),
            ("ctrl-loss-tmo", "-1"),
            ("csi.storage.k8s.io/pvc/name", "web"),
            ("csi.storage.k8s.io/other", "x"),
        ]))
        .unwrap();
        assert_eq!(parsed.backends, ["rack1", "rack2"]);
        assert_eq!(parsed.qos.iops, Some(Rate { per_s: 2000, burst: 4000 }));
        assert_eq!(parsed.qos.bandwidth, Some(Rate { per_s: 100 << 20, burst: 0 }));
        assert_eq!(parsed.context, BTreeMap::from([("ctrl-loss-tmo".into(), "-1".into())]));
        assert_eq!(parsed.labels, BTreeMap::from([("csi.pvc".into(), "web".into())]));
    }

    #[test]
    fn unknown_keys_and_invalid_values_are_named() {
        let cases = [
            ("colour", "red"),
            ("qos.colour", "1"),
            ("qos.iops", "0"),
            ("qos.iops", "fast"),
            ("nr-io-queues", "0"),
            ("nr-io-queues", "4,hostnqn=x"),
            ("ctrl-loss-tmo", "-2"),
            ("reservations", "yes"),
            ("node-backend", "ublk"),
        ];
        for (key, value) in cases {
            let fault = Parameters::parse(&map(&[(key, value)])).unwrap_err();
            assert!(fault.message.contains(key), "{fault}");
        }
    }

    #[test]
    fn the_fingerprint_leaves_out_the_claim() {
        let of = |list: &[(&str, &str)]| Parameters::parse(&map(list)).unwrap().fingerprint;
        let plain = of(&[("backing", "data")]);
        assert_eq!(plain, of(&[("backing", "data"), ("csi.storage.k8s.io/pvc/name", "web")]));
        assert_ne!(plain, of(&[("backing", "fast")]));
    }

    #[test]
    fn mutable_parameters_change_the_limits_that_they_name() {
        let mut qos = Qos { write_iops: Some(Rate { per_s: 5, burst: 0 }), ..Qos::default() };
        change_limits(&mut qos, &map(&[("qos.iops", "7"), ("qos.write-iops", "none")])).unwrap();
        assert_eq!(qos, Qos { iops: Some(Rate { per_s: 7, burst: 0 }), ..Qos::default() });
        assert!(change_limits(&mut qos, &map(&[("group", "g")])).unwrap_err().message.contains("\"group\""));
    }

    #[test]
    fn options_in_a_context_are_checked_again() {
        assert_eq!(node_options(&map(&[("other", "x")])).unwrap(), BTreeMap::new());
        assert!(node_options(&map(&[("nr-io-queues", "1,nqn=x")])).is_err());
        assert!(is_direct(&map(&[("node-backend", "")])).is_err());
    }

    #[test]
    fn a_class_of_direct_volumes_tells_the_nodes() {
        let parsed = Parameters::parse(&map(&[("node-backend", "kata"), ("nr-io-queues", "2")])).unwrap();
        assert!(parsed.is_direct && is_direct(&parsed.context.into_iter().collect()).unwrap());
        assert!(!Parameters::parse(&map(&[])).unwrap().is_direct && !is_direct(&map(&[])).unwrap());
    }
}
