//! Layers: devices over other devices.

use crate::spec::{Key, Kind, Role, Spec, SpecError, Value, key};
use base::Size;
use block::{Device, DeviceError, IoError, Op};
use layers::checker::Checker;
use layers::fault::{Action, Fault, Rule};
use layers::linear::{Concat, Partition};
use layers::qos::{Limits, Qos, Rate, Throttle};
use layers::stats::Stats;
use std::sync::Arc;

/// Every kind of layer.
pub const KINDS: &[&Kind] = &[&LINEAR, &CONCAT, &STATS, &QOS, &FAULT];

const DEVICE: Key = key("device", "ID", "the device below [every device given before, each by itself]");

static LINEAR: Kind = Kind {
    name: "linear",
    about: "a range of the device",
    keys: &[
        key("offset", "SIZE", "start of the range [0]"),
        key("len", "SIZE", "length of the range [to the end, growing with the device]"),
        DEVICE,
    ],
};

static CONCAT: Kind = Kind {
    name: "concat",
    about: "several devices, one after the other, as one",
    keys: &[
        key("devices", "LIST", "the devices in their order, joined by + [all devices given before]"),
        key(
            "id",
            "NAME",
            "the name by which layers and exports refer to it [those of its devices, joined by +]",
        ),
    ],
};

static STATS: Kind =
    Kind { name: "stats", about: "counts and times requests; SIGUSR1 prints the counters", keys: &[DEVICE] };

static QOS: Kind = Kind {
    name: "qos",
    about: "limits requests and bytes a second",
    keys: &[
        key("iops", "N", "requests of every kind but flushes, a second [no limit]"),
        key("read-iops", "N", "reads a second [no limit]"),
        key("write-iops", "N", "writes, discards and written zeroes a second [no limit]"),
        key("bandwidth", "SIZE", "bytes of all of them a second [no limit]"),
        key("read-bandwidth", "SIZE", "bytes that are read a second [no limit]"),
        key("write-bandwidth", "SIZE", "bytes that are written, discarded or zeroed a second [no limit]"),
        key("burst-ms", "N", "burst after a pause, in milliseconds of each rate [10]"),
        DEVICE,
    ],
};

static FAULT: Kind = Kind {
    name: "fault",
    about: "injects errors, delays and torn writes, for tests",
    keys: &[
        key("op", "LIST", "read, write, write_zeroes, discard, flush, joined by + [all]"),
        key("error", "ERROR", "error of the request: medium, corrupt, timed-out, device-gone, no-space, …"),
        key("delay-us", "N", "delay of the request in microseconds"),
        key(
            "torn",
            "SIZE",
            "part of a write that is done; the write then fails with error=, or reports success",
        ),
        key("offset", "SIZE", "start of the affected bytes [0]"),
        key("len", "SIZE", "number of affected bytes from offset= [to the end]"),
        key("probability", "P", "probability for each request, from 0 to 1 [1]"),
        key("after", "N", "requests to skip first [0]"),
        key("count", "N", "most requests to affect [no limit]"),
        DEVICE,
    ],
};

/// A layer and the devices below it.
#[derive(Clone, Debug)]
pub enum LayerSpec {
    /// On the device with this id, or on each one by itself.
    Over(LayerConfig, Option<String>),
    /// On several devices, which are one from then on.
    Join(JoinSpec),
}

/// How several devices become one.
#[derive(Clone, Debug)]
pub struct JoinSpec {
    /// The layer that joins them.
    pub config: JoinConfig,
    /// The ids of the devices; `None`: all.
    pub devices: Option<Vec<String>>,
    /// The name of the whole.
    pub id: Option<String>,
}

/// A layer to be put on several devices.
#[derive(Clone, Debug)]
pub enum JoinConfig {
    /// One after the other.
    Concat,
}

impl JoinConfig {
    /// Makes one device of `devices`. Debug builds put a checker in between.
    ///
    /// # Errors
    /// Errors of the layer.
    pub fn join(&self, devices: Vec<Arc<dyn Device>>) -> Result<Arc<dyn Device>, DeviceError> {
        let children = devices.into_iter().map(checked).collect();
        Ok(match self {
            JoinConfig::Concat => Arc::new(Concat::new(children)?),
        })
    }
}

/// A layer to be put on a device.
#[derive(Clone, Debug)]
pub enum LayerConfig {
    /// A part of the device.
    Linear {
        /// Where it begins.
        offset: u64,
        /// How long it is; `None`: to the end.
        len: Option<u64>,
    },
    /// Counters.
    Stats,
    /// Limits of each device by itself.
    Qos(Limits),
    /// Faults by these rules.
    Fault(Vec<Rule>),
}

impl LayerSpec {
    /// The layer that `text` describes.
    ///
    /// # Errors
    /// When the text is invalid.
    pub fn parse(text: &str) -> Result<LayerSpec, SpecError> {
        let spec = Spec::parse(Role::Layer, KINDS, text)?;
        let config = match spec.kind() {
            "linear" => LayerConfig::Linear {
                offset: spec.get_or("offset", Size(0))?.0,
                len: spec.get("len")?.map(|Size(len)| len),
            },
            "concat" => {
                let devices = spec.get("devices")?.map(|Names(names)| names);
                return Ok(LayerSpec::Join(JoinSpec {
                    config: JoinConfig::Concat,
                    devices,
                    id: spec.get("id")?,
                }));
            }
            "stats" => LayerConfig::Stats,
            "qos" => LayerConfig::Qos(qos_limits(&spec)?),
            "fault" => LayerConfig::Fault(fault_rules(&spec)?),
            kind => unreachable!("{kind} stands in no table"),
        };
        Ok(LayerSpec::Over(config, spec.get("device")?))
    }
}

/// `device`, watched in debug builds: a layer above that breaks the rules ends the program.
fn checked(device: Arc<dyn Device>) -> Arc<dyn Device> {
    if cfg!(debug_assertions) { Arc::new(Checker::new(device)) } else { device }
}

impl LayerConfig {
    /// Puts the layer on `device`, and a stats layer's counters among `counters`. Debug builds put
    /// a checker in between.
    ///
    /// # Errors
    /// Errors of the layer.
    pub fn wrap(
        &self,
        device: Arc<dyn Device>,
        counters: &mut Vec<Arc<Stats>>,
    ) -> Result<Arc<dyn Device>, DeviceError> {
        let child = checked(device);
        Ok(match self {
            LayerConfig::Linear { offset, len } => Arc::new(Partition::new(child, *offset, *len)?),
            LayerConfig::Stats => {
                let stats = Arc::new(Stats::new(child));
                counters.push(stats.clone());
                stats
            }
            LayerConfig::Qos(limits) => Arc::new(Qos::new(child, vec![Arc::new(Throttle::new(*limits))])),
            LayerConfig::Fault(rules) => {
                let fault = Fault::new(child);
                rules.iter().for_each(|rule| {
                    fault.add(rule.clone());
                });
                Arc::new(fault)
            }
        })
    }
}

fn qos_limits(spec: &Spec) -> Result<Limits, SpecError> {
    let burst_ms = u64::from(spec.get_or("burst-ms", 0u32)?);
    let rate = |per_second: u64| {
        let burst = u128::from(per_second) * u128::from(burst_ms) / 1000;
        Rate { per_second, burst: u64::try_from(burst).unwrap_or(u64::MAX) }
    };
    let requests = |key| Ok(rate(spec.get_or(key, 0u64)?));
    let bytes = |key| Ok(rate(spec.get_or(key, Size(0))?.0));
    let limits = Limits {
        iops: requests("iops")?,
        read_iops: requests("read-iops")?,
        write_iops: requests("write-iops")?,
        bandwidth: bytes("bandwidth")?,
        read_bandwidth: bytes("read-bandwidth")?,
        write_bandwidth: bytes("write-bandwidth")?,
    };
    if limits.is_unlimited() {
        return Err(spec.refuse("a limit is needed: iops=, bandwidth= or one of theirs for reads and writes"));
    }
    Ok(limits)
}

/// One rule, or two when a request is both delayed and failed.
fn fault_rules(spec: &Spec) -> Result<Vec<Rule>, SpecError> {
    let error = spec.get("error")?.map(|ErrorName(error)| error);
    let delay = spec.get::<u32>("delay-us")?.map(|us| Action::Delay(u64::from(us) * 1000));
    let torn = spec.get("torn")?.map(|Size(len)| Action::Torn { len, result: error.map_or(Ok(()), Err) });
    let last = torn.or(error.map(Action::Error));
    if delay.is_none() && last.is_none() {
        return Err(spec.refuse("one of error=, delay-us= and torn= is needed"));
    }
    let Size(offset) = spec.get_or("offset", Size(0))?;
    let end = spec.get("len")?.map_or(u64::MAX, |Size(len)| offset.saturating_add(len));
    let rule = |action| -> Result<Rule, SpecError> {
        Ok(Rule {
            action,
            ops: spec.get_or("op", Ops(Op::ALL.to_vec()))?.0,
            range: offset..end,
            probability: spec.get_or("probability", Probability(1.0))?.0,
            after: spec.get_or("after", 0)?,
            count: spec.get("count")?,
        })
    };
    delay.into_iter().chain(last).map(rule).collect()
}

/// Every error by the name that people write.
const ERRORS: [(&str, IoError); 13] = [
    ("medium", IoError::Medium),
    ("corrupt", IoError::Corrupt),
    ("timed-out", IoError::TimedOut),
    ("device-gone", IoError::DeviceGone),
    ("no-space", IoError::NoSpace),
    ("no-memory", IoError::NoMemory),
    ("read-only", IoError::ReadOnly),
    ("unsupported", IoError::Unsupported),
    ("invalid", IoError::Invalid),
    ("misaligned", IoError::Misaligned),
    ("out-of-range", IoError::OutOfRange),
    ("too-many-active-zones", IoError::TooManyActiveZones),
    ("too-many-open-zones", IoError::TooManyOpenZones),
];

struct ErrorName(IoError);

impl Value for ErrorName {
    fn expected() -> String {
        ERRORS.map(|(name, _)| name).join(", ")
    }

    fn parse(text: &str) -> Option<Self> {
        ERRORS.iter().find(|(name, _)| *name == text).map(|(_, error)| ErrorName(*error))
    }
}

/// Ids joined by `+`.
struct Names(Vec<String>);

impl Value for Names {
    fn expected() -> String {
        "ids joined by +, each once".into()
    }

    fn parse(text: &str) -> Option<Self> {
        let names: Vec<String> = text.split('+').map(str::to_owned).collect();
        let is_new = |(i, name): (usize, &String)| !name.is_empty() && !names[..i].contains(name);
        names.iter().enumerate().all(is_new).then_some(Names(names))
    }
}

struct Ops(Vec<Op>);

impl Value for Ops {
    fn expected() -> String {
        format!("operations joined by +, of {}", Op::ALL.map(Op::name).join(", "))
    }

    fn parse(text: &str) -> Option<Self> {
        text.split('+')
            .map(|name| Op::ALL.into_iter().find(|op| op.name() == name))
            .collect::<Option<_>>()
            .map(Ops)
    }
}

struct Probability(f64);

impl Value for Probability {
    fn expected() -> String {
        "a number from 0 to 1".into()
    }

    fn parse(text: &str) -> Option<Self> {
        text.parse().ok().filter(|p| (0.0..=1.0).contains(p)).map(Probability)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(text: &str) -> Result<Vec<Rule>, String> {
        match LayerSpec::parse(text) {
            Ok(LayerSpec::Over(LayerConfig::Fault(rules), _)) => Ok(rules),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error.to_string()),
        }
    }

    #[test]
    fn a_fault_says_what_happens_to_whom() {
        let medium = Rule::new(Action::Error(IoError::Medium)).on(&[Op::Read, Op::Write]).within(4096..8192);
        assert_eq!(rules("fault:op=read+write,error=medium,offset=4K,len=4K"), Ok(vec![medium]));
        let [late, gone] = &rules("fault:delay-us=20,error=device-gone,count=1,probability=0.5").unwrap()[..]
        else {
            panic!("two rules")
        };
        assert_eq!((late.action, gone.action), (Action::Delay(20_000), Action::Error(IoError::DeviceGone)));
        assert_eq!((late.count, gone.probability), (Some(1), 0.5));
        let torn = Rule::new(Action::Torn { len: 512, result: Ok(()) });
        assert_eq!(rules("fault:torn=512"), Ok(vec![torn]));
    }

    #[test]
    fn limits_are_written_a_second_and_their_bursts_in_time() {
        let limits = |text| match LayerSpec::parse(text) {
            Ok(LayerSpec::Over(LayerConfig::Qos(limits), None)) => Ok(limits),
            Ok(other) => panic!("{other:?}"),
            Err(error) => Err(error.to_string()),
        };
        let found = limits("qos:iops=5000,write-bandwidth=100M,burst-ms=200").unwrap();
        assert_eq!(found.iops, Rate { per_second: 5000, burst: 1000 });
        assert_eq!(found.write_bandwidth, Rate { per_second: 100 << 20, burst: 20 << 20 });
        assert_eq!(found.read_iops, Rate::default());
        assert!(limits("qos").unwrap_err().contains("a limit is needed"));
        assert!(limits("qos:burst-ms=5").unwrap_err().contains("a limit is needed"));
        assert!(limits("qos:iops=many").unwrap_err().contains("iops=many"));
    }

    #[test]
    fn a_fault_that_makes_no_sense_is_refused() {
        let refusal = |text| rules(text).unwrap_err();
        assert_eq!(
            refusal("fault:op=read"),
            "layer fault:op=read: one of error=, delay-us= and torn= is needed"
        );
        assert!(refusal("fault:error=bad").contains("error=bad: expected medium, corrupt, timed-out"));
        assert!(
            refusal("fault:error=medium,op=read+erase")
                .contains("op=read+erase: expected operations joined by +")
        );
        assert!(
            refusal("fault:error=medium,probability=2")
                .contains("probability=2: expected a number from 0 to 1")
        );
    }
}
