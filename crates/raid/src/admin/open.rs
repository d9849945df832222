//! From devices to an array that may be started: reads their superblocks, selects those of one
//! array, and decides.

use crate::Uuid;
use crate::array::{Array, Start, StartError};
use crate::metadata::{
    AssembleOptions, Assembly, Found, Label, Layout, ReadError, Refusal, assemble, read_superblock,
};
use block::{Device, DeviceError};
use std::collections::BTreeMap;
use std::io::ErrorKind;
use std::sync::Arc;

/// A device that may be a member.
pub struct Candidate {
    /// Its name, for messages.
    pub name: String,
    /// The device, or why it cannot be opened.
    pub device: Result<Arc<dyn Device>, DeviceError>,
    /// Whether an operator named the device; otherwise it was found in a directory, and its content
    /// is unknown.
    pub is_named: bool,
}

/// The array to open, and the checks to override.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// The array's name or UUID; `None` if all devices belong to one array.
    pub array: Option<String>,
    /// Start although the missing members could have continued without the present ones.
    pub run: bool,
    /// Start although data may be lost.
    pub force: bool,
    /// Open the array for reading only. Features that this version must not write are allowed.
    pub read_only: bool,
}

/// An array that may be started, and its members' devices.
pub struct Selection {
    /// The decision of assembly.
    pub assembly: Assembly,
    /// The device of each used slot.
    pub devices: Vec<Option<Arc<dyn Device>>>,
    /// The devices of all found members and spares, used or not, by name.
    pub found: BTreeMap<String, Arc<dyn Device>>,
    /// Warnings for the operator: rejected devices, possible losses. Sentences.
    pub warnings: Vec<String>,
}

impl Selection {
    /// The layout of a slot's member, if it is used.
    pub fn layout(&self, slot: usize) -> Option<Layout> {
        match &self.assembly.members[slot].as_ref()?.label {
            Label::Member(superblock) => Some(superblock.layout),
            Label::Spare(_) => None,
        }
    }

    /// Starts the array, with recovery after a crash. Must run on a core. `wall_ns`: nanoseconds
    /// since 1970.
    ///
    /// # Errors
    /// See [`StartError`].
    pub async fn start(self, wall_ns: u64) -> Result<Arc<Array>, StartError> {
        let Selection { assembly, found, .. } = self;
        Array::start(Start::new(assembly, wall_ns, false, |member| found.get(&member.name).cloned())).await
    }

    /// Starts the array for reading only, without a write to any member. Must run on a core.
    ///
    /// # Errors
    /// See [`StartError`].
    pub async fn start_read_only(self, wall_ns: u64) -> Result<Arc<Array>, StartError> {
        let Selection { assembly, found, .. } = self;
        let start = Start::new(assembly, wall_ns, false, |member| found.get(&member.name).cloned());
        Array::start_read_only(start).await
    }

    /// Spares that the array may use, with their devices.
    pub fn spares(&self) -> Vec<(Arc<dyn Device>, Found)> {
        let spare = |found: &Found| Some((self.found.get(&found.name)?.clone(), found.clone()));
        self.assembly.spares.iter().filter_map(spare).collect()
    }

    /// The name of the array.
    pub fn name(&self) -> &str {
        &self.assembly.table.config.name
    }
}

/// Why no array can be started.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// A device that an operator named is no member.
    #[error(transparent)]
    NoMember(#[from] ReadError),
    /// A member is in use. A start without it would mark a good member as failed.
    #[error("{0}")]
    InUse(DeviceError),
    /// The devices form no array, or none that is safe to start.
    #[error("{refusal}{}", list(.unopened))]
    Refused {
        /// The reason.
        refusal: Refusal,
        /// Devices that could not be opened: messages.
        unopened: Vec<String>,
    },
    /// No device belongs to the requested array.
    #[error("array {wanted}: no member found among {looked_at} devices{}", list(.unopened))]
    NotFound {
        /// Name or UUID.
        wanted: String,
        /// Number of examined devices.
        looked_at: usize,
        /// Devices that could not be opened: messages.
        unopened: Vec<String>,
    },
    /// Several arrays have the requested name.
    #[error("array {wanted}: several arrays have this name ({}): name one by its UUID", .uuids.join(", "))]
    Ambiguous {
        /// The name.
        wanted: String,
        /// The UUIDs.
        uuids: Vec<String>,
    },
    /// Members have features that need a newer version.
    #[error("array {array}: {why}")]
    ReadOnly {
        /// The array.
        array: String,
        /// Why the array must not be written.
        why: String,
    },
}

fn list(messages: &[String]) -> String {
    if messages.is_empty() { String::new() } else { format!(" ({})", messages.join("; ")) }
}

/// A member and its device.
struct Known {
    found: Found,
    device: Arc<dyn Device>,
}

/// Selects the members of one array among devices, and decides whether the array may be started.
/// Must run on a core.
/// # Errors
/// Names the reason, with the devices, why it may not be started.
pub async fn select(candidates: Vec<Candidate>, wanted: &Wanted) -> Result<Selection, OpenError> {
    let looked_at = candidates.len();
    let (mut known, mut unopened) = (Vec::new(), Vec::new());
    for Candidate { name, device, is_named } in candidates {
        let result = match &device {
            Ok(device) => read(&name, &**device).await,
            Err(error) if is_named && !is_busy(error) => {
                unopened.push(error.to_string());
                continue;
            }
            Err(_) if is_named => {
                return Err(OpenError::InUse(device.err().expect("it was not opened")));
            }
            Err(_) => continue,
        };
        match (result, device) {
            (Ok(found), Ok(device)) => known.push(Known { found, device }),
            // Its slot counts as missing, as with a device that cannot be opened.
            (Err(error @ ReadError::Io { .. }), _) if is_named => {
                tracing::warn!("{error}: the device is not used");
                unopened.push(error.to_string());
            }
            (Err(error), _) if is_named => return Err(error.into()),
            _ => {}
        }
    }
    let array = match &wanted.array {
        Some(name) => Some(uuid_of(name, &known, looked_at, &unopened)?),
        None => None,
    };
    let options = AssembleOptions { array, run: wanted.run, force: wanted.force };
    let found = known.iter().map(|known| known.found.clone()).collect();
    let assembly = match assemble(found, &options) {
        Ok(assembly) => assembly,
        Err(refusal) => return Err(OpenError::Refused { refusal, unopened }),
    };
    if let Some(why) = assembly.read_only.as_ref().filter(|_| !wanted.read_only) {
        let array = assembly.table.config.name.clone();
        return Err(OpenError::ReadOnly { array, why: why.clone() });
    }
    let devices: BTreeMap<String, Arc<dyn Device>> =
        known.into_iter().map(|known| (known.found.name, known.device)).collect();
    let device_of =
        |found: &Option<Found>| found.as_ref().and_then(|found| devices.get(&found.name).cloned());
    Ok(Selection {
        devices: assembly.members.iter().map(device_of).collect(),
        warnings: warnings(&assembly, &unopened),
        assembly,
        found: devices,
    })
}

/// Whether a device exists but another program uses it.
fn is_busy(error: &DeviceError) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref::<std::io::Error>());
    source.is_some_and(|error| matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::ResourceBusy))
}

async fn read(name: &str, device: &dyn Device) -> Result<Found, ReadError> {
    match device.open_channel() {
        Ok(channel) => read_superblock(name, &*channel, device.limits().capacity).await,
        Err(error) => {
            tracing::warn!(%error, "device cannot be opened");
            Err(ReadError::Io { name: name.to_owned(), error: block::IoError::DeviceGone })
        }
    }
}

/// The array with this name or UUID.
fn uuid_of(name: &str, known: &[Known], looked_at: usize, unopened: &[String]) -> Result<Uuid, OpenError> {
    let mut uuids: Vec<Uuid> = known
        .iter()
        .filter_map(|known| match &known.found.label {
            Label::Member(superblock) => Some(&superblock.table.config),
            Label::Spare(_) => None,
        })
        .filter(|config| config.name == name || Uuid::parse(name) == Some(config.uuid))
        .map(|config| config.uuid)
        .collect();
    uuids.sort_unstable();
    uuids.dedup();
    match uuids[..] {
        [] => {
            let (wanted, unopened) = (name.to_owned(), unopened.to_vec());
            Err(OpenError::NotFound { wanted, looked_at, unopened })
        }
        [uuid] => Ok(uuid),
        _ => {
            let uuids = uuids.iter().map(Uuid::to_string).collect();
            Err(OpenError::Ambiguous { wanted: name.to_owned(), uuids })
        }
    }
}

/// Whether a superblock belongs to the array with this name or UUID: as a member, or as a spare
/// that the array may use.
pub fn is_of(label: &Label, array: &str) -> bool {
    let is_it = |name: &str, uuid: Uuid| name == array || Uuid::parse(array) == Some(uuid);
    match label {
        Label::Member(superblock) => {
            let config = &superblock.table.config;
            is_it(&config.name, config.uuid)
        }
        Label::Spare(spare) => spare.array.is_none_or(|uuid| is_it(&spare.array_name, uuid)),
    }
}

fn warnings(assembly: &Assembly, unopened: &[String]) -> Vec<String> {
    let mut warnings = unopened.to_vec();
    warnings.extend(assembly.rejected.iter().map(|rejected| format!("{}: {}", rejected.name, rejected.why)));
    warnings.extend(assembly.returning.iter().map(|member| {
        let how = if member.is_partial { "only changed regions are copied" } else { "all data is copied" };
        format!(
            "{}: the device is stale: slot {} has failed; re-add it ({how})",
            member.found.name, member.slot
        )
    }));
    let slot_missing = |slot: &usize| format!("slot {slot} is missing: the array is degraded");
    warnings.extend(assembly.missing.iter().map(slot_missing));
    warnings.extend(assembly.losses.iter().map(|loss| format!("forced: {loss}")));
    warnings
}
