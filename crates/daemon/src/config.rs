//! The configuration file: devices, arrays, groups, volumes, portals and exports that shall exist,
//! in TOML, with the fields of the API.
//!
//! ```toml
//! [[array]]
//! name = "data"
//! level = "5"
//! members = ["/dev/sdb", "/dev/sdc", "/dev/sdd"]
//!
//! [[volume]]
//! name = "vm1"
//! backing = "data"
//! size_bytes = 68719476736
//!
//! [[export]]
//! name = "vm1"
//! kind = "vhost-user-blk"
//! volumes = ["vm1"]
//! ```
//!
//! Applying it creates missing objects, grows volumes and sets limits. It deletes nothing and
//! shrinks nothing: an object that differs in another way is reported and left alone. Applying it
//! again does nothing.

use crate::api_error::{ApiError, Kind};
use crate::confinement::{Confinement, keep_device, keep_export, keep_members, keep_portal};
use crate::engine::{Authority, Engine, checks};
use crate::state::ExportRecord;
use api::{
    Array, ArrayAction, NewArray, NewDevice, NewExport, NewPortal, NewVolume, Qos, ScrubWindow, VolumeChange,
};
use hosting::export::portal::kind_of;
use serde::Deserialize;
use std::fmt;
use std::path::{Path, PathBuf};

/// The objects that shall exist.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Directories, or files, that the sandbox keeps open for what is added later.
    #[serde(default)]
    sandbox_paths: Vec<PathBuf>,
    /// Devices.
    #[serde(default, rename = "device")]
    devices: Vec<NewDevice>,
    /// Arrays.
    #[serde(default, rename = "array")]
    arrays: Vec<NewArray>,
    /// Groups.
    #[serde(default, rename = "group")]
    groups: Vec<GroupConfig>,
    /// Volumes.
    #[serde(default, rename = "volume")]
    volumes: Vec<NewVolume>,
    /// Portals.
    #[serde(default, rename = "portal")]
    portals: Vec<NewPortal>,
    /// Exports.
    #[serde(default, rename = "export")]
    exports: Vec<NewExport>,
}

/// A group.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct GroupConfig {
    name: String,
    #[serde(default)]
    qos: Qos,
}

/// Why there is no such configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("configuration {}: {error}", .path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        error: std::io::Error,
    },
    /// It is no configuration. Nothing of the file is quoted: the path may be that of a file with
    /// keys.
    #[error("configuration {}: line {line}, column {column}: {fault}", .path.display())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The line, from 1 on.
        line: usize,
        /// The column in bytes, from 1 on.
        column: usize,
        /// Why.
        fault: String,
    },
    /// A step could not be made; those before it have been.
    #[error("configuration: {step}: {fault}")]
    Step {
        /// The step.
        step: String,
        /// Why.
        fault: ApiError,
    },
}

/// Something to be done.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Open a device.
    Device(NewDevice),
    /// Make an array.
    Array(NewArray),
    /// Choose when an array is scrubbed, and how many read errors a member may have.
    Upkeep(String, ArrayAction),
    /// Say what a group may take.
    Group(String, Qos),
    /// Make a volume.
    Volume(NewVolume),
    /// Make a volume larger, or say what it may take.
    Change(String, VolumeChange),
    /// Open a portal.
    Portal(NewPortal),
    /// Start an export.
    Export(NewExport),
    /// Nothing: it is different, and left alone.
    Leave(String),
}

impl Step {
    /// The name of what is made, where devices, arrays and volumes share names.
    fn own_name(&self) -> Option<&str> {
        match self {
            Step::Device(NewDevice { name, .. })
            | Step::Array(NewArray { name, .. })
            | Step::Volume(NewVolume { name, .. }) => Some(name),
            Step::Upkeep(..)
            | Step::Group(..)
            | Step::Change(..)
            | Step::Portal(_)
            | Step::Export(_)
            | Step::Leave(_) => None,
        }
    }

    /// The volume that is made or grows.
    fn volume(&self) -> Option<&str> {
        match self {
            Step::Volume(NewVolume { name, .. }) | Step::Change(name, _) => Some(name),
            _ => None,
        }
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Device(new) => write!(f, "open device {} ({})", new.name, new.spec),
            Step::Array(new) => write!(f, "make array {} of {}", new.name, new.members.join(", ")),
            Step::Upkeep(name, _) => write!(f, "set scrubs and read errors of array {name}"),
            Step::Group(name, _) => write!(f, "set the limits of group {name}"),
            Step::Volume(new) => {
                write!(f, "make volume {} of {} bytes on {}", new.name, new.size_bytes, new.backing)
            }
            Step::Change(name, VolumeChange { size_bytes: Some(size), .. }) => {
                write!(f, "grow volume {name} to {size} bytes")
            }
            Step::Change(name, _) => write!(f, "set the limits of volume {name}"),
            Step::Portal(new) => write!(f, "open portal {} ({})", new.name, new.listen.join(", ")),
            Step::Export(new) => {
                write!(f, "start export {} ({} of {})", new.name, new.kind, new.volumes.join(", "))
            }
            Step::Leave(what) => write!(f, "leave {what}"),
        }
    }
}

impl Config {
    /// Reads a file.
    ///
    /// # Errors
    /// When the file cannot be read or is invalid.
    pub fn read(path: &Path) -> Result<Config, ConfigError> {
        let text =
            std::fs::read_to_string(path).map_err(|error| ConfigError::Io { path: path.into(), error })?;
        Config::parse(&text, path)
    }

    /// Parses a text; errors name `path`.
    ///
    /// # Errors
    /// When the text is invalid.
    pub fn parse(text: &str, path: &Path) -> Result<Config, ConfigError> {
        toml::from_str(text).map_err(|error| {
            let before = &text.as_bytes()[..error.span().map_or(0, |span| span.start.min(text.len()))];
            let line_start = before.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
            let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
            let fault = syntax_fault(text, error.message());
            ConfigError::Syntax { path: path.into(), line, column: 1 + before.len() - line_start, fault }
        })
    }

    /// Adds what it says of the sandbox, and the needs of what there is to be.
    pub fn keep(&self, confinement: &mut Confinement) {
        self.sandbox_paths.iter().for_each(|path| confinement.keep_path(path));
        let profile = &mut confinement.profile;
        self.devices.iter().for_each(|new| keep_device(&new.spec, profile));
        self.arrays.iter().for_each(|new| keep_members(new.members.iter().chain(&new.spares), profile));
        self.portals.iter().for_each(|new| keep_portal(new, profile));
        for new in &self.exports {
            let (name, kind, options) = (new.name.clone(), new.kind.clone(), new.options.clone());
            let (read_only, cores) = (new.read_only, new.cores.clone());
            let record = ExportRecord { name, kind, options, read_only, cores, ..ExportRecord::default() };
            keep_export(&record, profile);
        }
    }

    /// The steps to take, in this order.
    pub fn plan(&self, engine: &Engine) -> Vec<Step> {
        let mut steps = Vec::new();
        for new in &self.devices {
            match engine.device(&new.name) {
                Ok(device) if device.spec != new.spec => {
                    steps.push(Step::Leave(format!(
                        "device {}: it is {}, not {}",
                        new.name, device.spec, new.spec
                    )));
                }
                Ok(_) => {}
                Err(_) => steps.push(Step::Device(new.clone())),
            }
        }
        for new in &self.arrays {
            match engine.array(&new.name) {
                // One that does not run says nothing of its level.
                Ok(Array { level: Some(level), .. }) if level != new.level => {
                    steps.push(Step::Leave(format!(
                        "array {}: it has level {}, not {}",
                        new.name, level, new.level
                    )));
                }
                Ok(array) => steps.extend(upkeep(new, &array)),
                Err(_) => steps.push(Step::Array(new.clone())),
            }
        }
        for GroupConfig { name, qos } in &self.groups {
            if !engine.groups().iter().any(|group| group.name == *name && group.qos == *qos) {
                steps.push(Step::Group(name.clone(), *qos));
            }
        }
        self.volumes.iter().for_each(|new| plan_volume(engine, new, &mut steps));
        for new in &self.portals {
            match engine.portal(&new.name) {
                Ok(portal) if portal.kind != kind_of(new) => {
                    let (is, wanted) = (portal.kind, kind_of(new));
                    steps.push(Step::Leave(format!("portal {}: it is of kind {is}, not {wanted}", new.name)));
                }
                Ok(portal) if portal.listen != new.listen => {
                    let (is, wanted) = (portal.listen.join(", "), new.listen.join(", "));
                    steps.push(Step::Leave(format!("portal {}: it listens on {is}, not {wanted}", new.name)));
                }
                Ok(_) => {}
                Err(_) => steps.push(Step::Portal(new.clone())),
            }
        }
        for new in &self.exports {
            match engine.export(&new.name) {
                Ok(export) if export.kind != new.kind || export.volumes != new.volumes => {
                    let is = format!("{} of {}", export.kind, export.volumes.join(", "));
                    steps.push(Step::Leave(format!("export {}: it is {is}", new.name)));
                }
                Ok(_) => {}
                Err(_) => steps.push(Step::Export(new.clone())),
            }
        }
        steps
    }

    /// Checks every step before the first is made, as far as it does not depend on earlier ones.
    /// Checks names, values, and that each object referred to exists or is to be created.
    fn check(&self, engine: &Engine, steps: &[Step]) -> Result<(), ConfigError> {
        let mut taken: Vec<&str> = Vec::new();
        for step in steps {
            let checked = self.check_step(engine, step).and_then(|()| match step.own_name() {
                Some(name) if taken.contains(&name) => {
                    Err(ApiError::new(Kind::Exists, format!("the name {name} is given twice")))
                }
                name => {
                    taken.extend(name);
                    Ok(())
                }
            });
            checked.map_err(|fault| ConfigError::Step { step: step.to_string(), fault })?;
        }
        Ok(())
    }

    fn check_step(&self, engine: &Engine, step: &Step) -> Result<(), ApiError> {
        let is_base = |name: &str| {
            let is_new = self.devices.iter().any(|new| new.name == name)
                || self.arrays.iter().any(|new| new.name == name);
            is_new || engine.device(name).is_ok() || engine.array(name).is_ok()
        };
        let is_volume =
            |name: &str| self.volumes.iter().any(|new| new.name == name) || engine.volume(name).is_ok();
        let is_group = |name: &str| {
            self.groups.iter().any(|new| new.name == name)
                || engine.groups().iter().any(|group| group.name == name)
        };
        let is_portal =
            |name: &str| self.portals.iter().any(|new| new.name == name) || engine.portal(name).is_ok();
        match step {
            Step::Device(new) => checks::device(new).map(drop),
            Step::Array(new) => checks::array(new).map(drop),
            Step::Upkeep(name, _) => self
                .arrays
                .iter()
                .filter(|new| new.name == *name)
                .try_for_each(|new| checks::array(new).map(drop)),
            Step::Group(name, qos) => checks::group(name, qos),
            Step::Volume(new) => {
                checks::volume(new)?;
                if new.from.is_some() {
                    return Err(ApiError::invalid(format!(
                        "volume {}: from: the configuration only makes volumes that read as zeroes",
                        new.name
                    )));
                }
                if new.size_bytes == 0 {
                    return Err(ApiError::invalid(format!("volume {}: size_bytes is missing", new.name)));
                }
                match &new.group {
                    Some(group) if !is_group(group) => Err(ApiError::not_found("group", group)),
                    _ if !is_base(&new.backing) => Err(ApiError::not_found("array or device", &new.backing)),
                    _ => Ok(()),
                }
            }
            Step::Change(_, change) => checks::limits(change.qos.as_ref(), change.min_qos.as_ref()),
            Step::Portal(new) => engine.check_portal(new).map(drop),
            Step::Export(new) => {
                engine.check_export(new)?;
                let portal = new.options.get("portal");
                if let Some(portal) = portal.filter(|portal| !is_portal(portal)) {
                    return Err(ApiError::not_found("portal", portal).about(&format!("export {}", new.name)));
                }
                match new.volumes.iter().find(|of| !is_volume(of) && !is_base(of)) {
                    Some(of) => Err(ApiError::not_found("volume, array or device", of)),
                    None => Ok(()),
                }
            }
            Step::Leave(_) => Ok(()),
        }
    }

    /// Does what is to be done.
    ///
    /// # Errors
    /// With the first step that cannot be made; nothing is made when a check that needs no step
    /// before it fails.
    pub fn apply(&self, engine: &Engine) -> Result<(), ConfigError> {
        let steps = self.plan(engine);
        self.check(engine, &steps)?;
        let total = steps.len();
        for (done, step) in steps.into_iter().enumerate() {
            engine.begin_step(step.to_string(), step.volume(), done, total);
            let made = match &step {
                Step::Device(new) => engine.create_device(new).map(drop),
                Step::Array(new) => engine.create_array(new).map(drop),
                Step::Upkeep(name, action) => engine.act_on_array(name, action, &Authority::Full).map(drop),
                Step::Group(name, qos) => engine.set_group(name, qos).map(drop),
                Step::Volume(new) => engine.create_volume(new, &Authority::Full).map(drop),
                Step::Change(name, change) => engine.change_volume(name, change, |_| Ok(())).map(drop),
                Step::Portal(new) => engine.create_portal(new).map(drop),
                Step::Export(new) => engine.create_export(new, &Authority::Full).map(drop),
                Step::Leave(what) => {
                    tracing::warn!("configuration: left alone: {what}");
                    Ok(())
                }
            };
            made.map_err(|fault| ConfigError::Step { step: step.to_string(), fault })?;
        }
        Ok(())
    }
}

/// Why a text is no configuration, without quoting it: messages of the parser and of serde hold
/// lines, keys and values.
fn syntax_fault(text: &str, message: &str) -> String {
    if toml::from_str::<toml::Table>(text).is_err() {
        return "invalid TOML".into();
    }
    // Field names and what was expected are of the program, all else is of the file.
    if message.starts_with("missing field `") {
        return message.into();
    }
    let is_unknown = message.starts_with("unknown field `");
    match (message.rsplit_once(", expected "), is_unknown) {
        (Some((_, expected)), true) => format!("unknown key: want {expected}"),
        (Some((_, expected)), false) => format!("invalid value: want {expected}"),
        (None, true) => "unknown key".into(),
        (None, false) => "invalid value".into(),
    }
}

/// The step that sets an array's scrubs and limit of read errors, if they differ. An array that
/// does not run reports neither.
fn upkeep(new: &NewArray, array: &Array) -> Option<Step> {
    let scrub_period_s = new.scrub_period_s.filter(|period_s| *period_s != array.scrub_period_s);
    let is_other = |window: &ScrubWindow| {
        Some(*window).filter(|window| window.start_minute != window.end_minute) != array.scrub_window
    };
    let scrub_window = new.scrub_window.filter(is_other);
    let read_error_budget = new.read_error_budget.filter(|budget| *budget != array.read_error_budget);
    let is_same = (scrub_period_s, scrub_window, read_error_budget) == (None, None, None);
    let action = ArrayAction::Set { scrub_period_s, scrub_window, read_error_budget };
    (!is_same && array.error.is_none()).then(|| Step::Upkeep(new.name.clone(), action))
}

fn plan_volume(engine: &Engine, new: &NewVolume, steps: &mut Vec<Step>) {
    let volume = match engine.volume(&new.name) {
        Ok(volume) => volume,
        Err(fault) if fault.kind == Kind::NotFound => {
            // Only the backing device may be missing at the moment, and the volume with it.
            let is_away = engine.array(&new.backing).is_ok_and(|array| array.error.is_some())
                || engine.device(&new.backing).is_ok_and(|device| device.error.is_some());
            let away = || Step::Leave(format!("volume {}: {} is not there", new.name, new.backing));
            return steps.push(if is_away { away() } else { Step::Volume(new.clone()) });
        }
        Err(fault) => return steps.push(Step::Leave(format!("volume {}: {fault}", new.name))),
    };
    if volume.backing != new.backing || volume.size_bytes > new.size_bytes || volume.group != new.group {
        let is = format!("{} bytes on {}, group {:?}", volume.size_bytes, volume.backing, volume.group);
        return steps.push(Step::Leave(format!("volume {}: it has {is}", new.name)));
    }
    if volume.size_bytes < new.size_bytes {
        let change = VolumeChange { size_bytes: Some(new.size_bytes), ..VolumeChange::default() };
        steps.push(Step::Change(new.name.clone(), change));
    }
    if volume.min_qos != new.min_qos {
        let change = VolumeChange { min_qos: Some(new.min_qos), ..VolumeChange::default() };
        steps.push(Step::Change(new.name.clone(), change));
    }
    if volume.qos != new.qos {
        steps.push(Step::Change(
            new.name.clone(),
            VolumeChange { qos: Some(new.qos), ..VolumeChange::default() },
        ));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_with_the_names_before_version_1_was_frozen_is_read() {
        let old = "[[group]]\nname = 'g'\nqos.iops.per_second = 5\n\
                   [[volume]]\nname = 'v'\non = 'data'\nsize = 4096\nfloor.iops = 6\n\
                   [[export]]\nname = 'e'\nkind = 'nbd'\nof = ['v']\n";
        let new = "[[group]]\nname = 'g'\nqos.iops.per_s = 5\n\
                   [[volume]]\nname = 'v'\nbacking = 'data'\nsize_bytes = 4096\nmin_qos.requests_per_s = 6\n\
                   [[export]]\nname = 'e'\nkind = 'nbd'\nvolumes = ['v']\n";
        let parse = |text: &str| Config::parse(text, "test".as_ref()).unwrap();
        assert_eq!(parse(old), parse(new));
    }
}
