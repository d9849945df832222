//! The kind `qos` of layers.

use super::{Limits, Qos, Rate, Throttle};
use crate::kind::{DEVICE, LayerConfig, LayerSpec};
use crate::stats::Stats;
use base::Size;
use block::{Device, DeviceError};
use spec::{Kind, Spec, SpecError, key};
use std::sync::Arc;

/// The kind.
pub static KIND: Kind = Kind {
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

/// The layer of a specification.
///
/// # Errors
/// When a value is invalid, or there is no limit.
pub fn parse(spec: &Spec) -> Result<LayerSpec, SpecError> {
    LayerSpec::over(spec, limits(spec)?)
}

/// Each device gets the limits by itself.
impl LayerConfig for Limits {
    fn wrap(
        &self,
        device: Arc<dyn Device>,
        _counters: &mut Vec<Arc<Stats>>,
    ) -> Result<Arc<dyn Device>, DeviceError> {
        Ok(Arc::new(Qos::new(device, vec![Arc::new(Throttle::new(*self))])))
    }
}

fn limits(spec: &Spec) -> Result<Limits, SpecError> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use spec::Role;

    #[test]
    fn limits_are_written_a_second_and_their_bursts_in_time() {
        let limits = |text| {
            let spec = Spec::parse(Role::Layer, &[&KIND], text).map_err(|error| error.to_string())?;
            limits(&spec).map_err(|error| error.to_string())
        };
        let found = limits("qos:iops=5000,write-bandwidth=100M,burst-ms=200").unwrap();
        assert_eq!(found.iops, Rate { per_second: 5000, burst: 1000 });
        assert_eq!(found.write_bandwidth, Rate { per_second: 100 << 20, burst: 20 << 20 });
        assert_eq!(found.read_iops, Rate::default());
        assert!(limits("qos").unwrap_err().contains("a limit is needed"));
        assert!(limits("qos:burst-ms=5").unwrap_err().contains("a limit is needed"));
        assert!(limits("qos:iops=many").unwrap_err().contains("iops=many"));
    }
}
