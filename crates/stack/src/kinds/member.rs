//! Members of arrays, as texts name them: a path, or the specification of a device.

use super::device::{self, DeviceConfig, KINDS};
use drivers::io_uring;
use spec::{Role, SpecError};
use std::path::PathBuf;

/// The member that a path names.
pub fn member_at(path: impl Into<PathBuf>, direct: bool, read_only: bool) -> Box<dyn DeviceConfig> {
    let mut options = io_uring::Options::new(path);
    options.direct = direct;
    options.read_only = read_only;
    Box::new(options)
}

/// Whether a text is a device specification rather than a path: it begins with a kind of device and
/// a colon.
pub fn is_spec(text: &str) -> bool {
    let is_kind = |kind: &str| KINDS.iter().any(|known| known.name == kind);
    text.split_once(':').is_some_and(|(kind, _)| is_kind(kind))
}

/// The member that a text names on its own: a device specification if it begins with a kind of
/// device and a colon, else a path.
///
/// # Errors
/// When the specification is invalid.
pub fn member(text: &str, direct: bool, read_only: bool) -> Result<Box<dyn DeviceConfig>, SpecError> {
    if !is_spec(text) {
        return Ok(member_at(text, direct, read_only));
    }
    let (mut config, _) = device::parse(text)?;
    if config.is_standby() {
        return Err(standby_refused(text));
    }
    if read_only {
        config.make_read_only();
    }
    Ok(config)
}

/// Refuses a device that waits while another host uses it, where nothing follows that.
pub(crate) fn standby_refused(text: &str) -> SpecError {
    let reason = "standby=on: only freestone serve follows the lock of an image";
    SpecError::refused(Role::Device, text, reason.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_waits_for_its_turn_is_no_member() {
        let error = member("rbd:pool=p,image=i,standby=on", true, false).unwrap_err().to_string();
        assert!(error.ends_with("standby=on: only freestone serve follows the lock of an image"), "{error}");
    }
}
