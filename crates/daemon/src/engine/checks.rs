//! Checks of what is to be made that need nothing of what is there.

use super::arrays::creation;
use crate::fault::Fault;
use api::{Floor, NewArray, NewDevice, NewVolume, Qos};
use graph::kinds::device::DeviceConfig;
use graph::kinds::raid::member;
use serving::create::Creation;
use volume::Name;

/// A device: its name and its specification.
///
/// # Errors
/// With what cannot be, named.
pub fn device(new: &NewDevice) -> Result<DeviceConfig, Fault> {
    Name::new(&new.name)?;
    Ok(member(&new.spec, true, false)?)
}

/// An array: its name, its shape, and the specifications of its members.
///
/// # Errors
/// With what cannot be, named.
pub fn array(new: &NewArray) -> Result<Creation, Fault> {
    Name::new(&new.name)?;
    let creation = creation(new)?;
    creation.check()?;
    Ok(creation)
}

/// A group: its name and its limits.
///
/// # Errors
/// With what cannot be, named.
pub fn group(name: &str, qos: &Qos) -> Result<(), Fault> {
    Name::new(name)?;
    limits(Some(qos), None)
}

/// A volume: its name and its limits.
///
/// # Errors
/// With what cannot be, named.
pub fn volume(new: &NewVolume) -> Result<Name, Fault> {
    let name = Name::new(&new.name)?;
    new.label.as_deref().map(Name::new).transpose()?;
    limits(Some(&new.qos), Some(&new.floor))?;
    Ok(name)
}

/// What a volume may take, and what it gets of its group's limits.
///
/// # Errors
/// When a rate is 0.
pub fn limits(qos: Option<&Qos>, floor: Option<&Floor>) -> Result<(), Fault> {
    let rates = qos.iter().flat_map(|qos| qos.list());
    if let Some((name, _)) = rates.into_iter().find(|(_, rate)| rate.is_some_and(|rate| rate.per_second == 0))
    {
        return Err(Fault::invalid(format!("{name}: 0 per_second: leave it out for no limit")));
    }
    let floors = floor.iter().flat_map(|floor| [("iops", floor.iops), ("bandwidth", floor.bandwidth)]);
    match floors.into_iter().find(|(_, rate)| *rate == Some(0)) {
        Some((name, _)) => Err(Fault::invalid(format!("floor: {name}: 0: leave it out for no floor"))),
        None => Ok(()),
    }
}
