//! Checks of new objects that do not depend on existing ones.

use crate::api_error::ApiError;
use crate::labels;
use api::{MinQos, NewArray, NewDevice, NewVolume, Qos};
use hosting::create::Creation;
use stack::kinds::device::{DeviceConfig, RemoteImage};
use stack::kinds::member::member;
use volume::Name;

/// A device: its name and its specification.
///
/// # Errors
/// With what cannot be, named.
pub fn device(new: &NewDevice) -> Result<Box<dyn DeviceConfig>, ApiError> {
    Name::new(&new.name)?;
    let config = member(&new.spec, true, false)?;
    if new.size_bytes.is_some() {
        image(&*config)?;
    }
    Ok(config)
}

/// The image of a device whose size the daemon sets.
///
/// # Errors
/// When its kind has a size of its own.
pub fn image(config: &dyn DeviceConfig) -> Result<&dyn RemoteImage, ApiError> {
    let refusal = "size_bytes: the daemon creates and grows only devices of the kind rbd";
    config.image().ok_or_else(|| ApiError::invalid(refusal))
}

/// An array: its name, its shape, and the specifications of its members.
///
/// # Errors
/// With what cannot be, named.
pub fn array(new: &NewArray) -> Result<Creation, ApiError> {
    Name::new(&new.name)?;
    let creation = Creation::from(new);
    creation.check()?;
    Ok(creation)
}

/// A group: its name and its limits.
///
/// # Errors
/// With what cannot be, named.
pub fn group(name: &str, qos: &Qos) -> Result<(), ApiError> {
    Name::new(name)?;
    limits(Some(qos), None)
}

/// A volume: its name, its limits and its source.
///
/// # Errors
/// With what cannot be, named.
pub fn volume(new: &NewVolume) -> Result<Name, ApiError> {
    let name = Name::new(&new.name)?;
    new.label.as_deref().map(Name::new).transpose()?;
    labels::check(&new.labels).map_err(|error| error.about(&format!("volume {name}")))?;
    limits(Some(&new.qos), Some(&new.min_qos))?;
    if new.pivot && new.from.is_none() {
        return Err(ApiError::invalid(format!("volume {name}: pivot: from is missing")));
    }
    Ok(name)
}

/// Checks the limits of a volume and its guaranteed minimum.
///
/// # Errors
/// When a rate is 0.
pub fn limits(qos: Option<&Qos>, min: Option<&MinQos>) -> Result<(), ApiError> {
    let rates = qos.iter().flat_map(|qos| qos.list());
    if let Some((name, _)) = rates.into_iter().find(|(_, rate)| rate.is_some_and(|rate| rate.per_s == 0)) {
        return Err(ApiError::invalid(format!("{name}: 0 per_s: leave it out for no limit")));
    }
    let minima =
        min.iter().flat_map(|min| [("requests_per_s", min.requests_per_s), ("bytes_per_s", min.bytes_per_s)]);
    match minima.into_iter().find(|(_, rate)| *rate == Some(0)) {
        Some((name, _)) => Err(ApiError::invalid(format!("min_qos: {name}: 0: leave it out for no minimum"))),
        None => Ok(()),
    }
}
