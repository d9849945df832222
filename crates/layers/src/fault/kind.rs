//! The kind `fault` of layers.

use super::{Action, Fault, Rule};
use crate::kind::{DEVICE, LayerConfig, LayerSpec};
use crate::stats::Stats;
use base::Size;
use block::{Device, DeviceError, IoError, Op};
use spec::{Kind, Spec, SpecError, Value, key};
use std::sync::Arc;

/// The kind.
pub static KIND: Kind = Kind {
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

/// The layer of a specification.
///
/// # Errors
/// When a value is invalid, or no fault is stated.
pub fn parse(spec: &Spec) -> Result<LayerSpec, SpecError> {
    LayerSpec::over(spec, rules(spec)?)
}

impl LayerConfig for Vec<Rule> {
    fn wrap(
        &self,
        device: Arc<dyn Device>,
        _counters: &mut Vec<Arc<Stats>>,
    ) -> Result<Arc<dyn Device>, DeviceError> {
        let fault = Fault::new(device);
        self.iter().for_each(|rule| {
            fault.add(rule.clone());
        });
        Ok(Arc::new(fault))
    }
}

/// One rule, or two when a request is both delayed and failed.
fn rules(spec: &Spec) -> Result<Vec<Rule>, SpecError> {
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
    use spec::Role;

    fn rules(text: &str) -> Result<Vec<Rule>, String> {
        let spec = Spec::parse(Role::Layer, &[&KIND], text).map_err(|error| error.to_string())?;
        super::rules(&spec).map_err(|error| error.to_string())
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
