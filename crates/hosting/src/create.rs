//! Making an array.

use crate::vocabulary;
use api::NewArray;
use block::{Device, DeviceError};
use raid::metadata::{
    CreateError, CreateOptions, Identities, MaintenanceChange, Shape, Table, plan_creation,
};
use raid::{Consistency, Level, Uuid};
use spec::SpecError;
use stack::array::wall_ns;
use stack::kinds::device;
use stack::kinds::member::member;
use std::sync::Arc;

/// A requested array. Omitted properties get defaults.
#[derive(Clone, Debug, PartialEq)]
pub struct Creation {
    /// Its name.
    pub name: String,
    /// Its level.
    pub level: Level,
    /// Paths or device specifications, in the order of their slots.
    pub members: Vec<String>,
    /// Devices that wait for a member to fail.
    pub spares: Vec<String>,
    /// Bytes of a strip.
    pub strip_bytes: Option<u32>,
    /// How it stays consistent.
    pub consistency: Option<Consistency>,
    /// Independent groups.
    pub groups: Option<usize>,
    /// Parity strips, for level n+m.
    pub parities: Option<usize>,
    /// Copies of everything, for level 10.
    pub copies: Option<usize>,
    /// Bytes of each member to use at most.
    pub member_bytes: Option<u64>,
    /// When it is scrubbed, and how many read errors a member may have.
    pub maintenance: MaintenanceChange,
    /// Whatever lies on the members may be overwritten.
    pub force: bool,
}

impl From<&NewArray> for Creation {
    fn from(new: &NewArray) -> Creation {
        Creation {
            name: new.name.clone(),
            level: vocabulary::raid_level(new.level),
            members: new.members.clone(),
            spares: new.spares.clone(),
            strip_bytes: new.strip_bytes,
            consistency: new.consistency.map(vocabulary::raid_consistency),
            groups: new.groups,
            parities: new.parities,
            copies: new.copies,
            member_bytes: new.member_bytes,
            maintenance: vocabulary::maintenance(new.scrub_period_s, new.scrub_window, new.read_error_budget),
            force: new.force,
        }
    }
}

/// Why there is no such array.
#[derive(Debug, thiserror::Error)]
pub enum CreationError {
    /// There cannot be one.
    #[error("array {0}: {1}")]
    Nonsense(String, String),
    /// A member's specification is invalid.
    #[error("{0}")]
    Spec(#[from] SpecError),
    /// A member cannot be opened.
    #[error("device {0}")]
    Device(#[from] DeviceError),
    /// Members do not fit, hold something, or fail.
    #[error("array {0}: {1}")]
    Create(String, CreateError),
}

/// An array whose members and spares are open and passed every check. Nothing is written yet.
pub struct PlannedCreation {
    name: String,
    planned: raid::metadata::PlannedCreation,
}

impl PlannedCreation {
    /// The array's identity.
    pub fn uuid(&self) -> Uuid {
        self.planned.uuid()
    }

    /// Makes the array; its members are closed again. Runs a core on the calling thread.
    ///
    /// # Errors
    /// When a device fails. The content of the devices may be lost then, and superblocks of the
    /// array may remain.
    pub fn commit(self) -> Result<Table, CreationError> {
        let PlannedCreation { name, planned } = self;
        reactor::run(planned.commit()).map_err(|error| CreationError::Create(name, error))
    }
}

impl Creation {
    /// Makes the array: [`Creation::plan`] and [`PlannedCreation::commit`].
    ///
    /// # Errors
    /// See [`CreationError`].
    pub fn carry_out(&self) -> Result<Table, CreationError> {
        self.plan()?.commit()
    }

    /// Checks the shape and the specifications of members and spares. No device is opened.
    ///
    /// # Errors
    /// See [`CreationError`].
    pub fn check(&self) -> Result<(), CreationError> {
        self.members.iter().chain(&self.spares).try_for_each(|text| member(text, true, false).map(drop))?;
        self.checked_shape().map(drop)
    }

    /// Opens the members, and checks that the array can be made of them and that nothing on them is
    /// lost, or may be.
    /// Nothing is written. Runs a core on the calling thread.
    ///
    /// # Errors
    /// See [`CreationError`].
    pub fn plan(&self) -> Result<PlannedCreation, CreationError> {
        // Invalid properties are refused before any device is opened or its size is checked.
        let shape = self.checked_shape()?;
        let (members, spares) = (open(&self.members)?, open(&self.spares)?);
        let options = CreateOptions {
            shape,
            force: self.force,
            zeroes: true,
            owner: crate::host(),
            now_ns: wall_ns(),
            identities: Identities::System,
        };
        let planned = reactor::run(async move { plan_creation(&members, &spares, &options).await });
        Ok(PlannedCreation { name: self.name.clone(), planned: planned.map_err(|error| self.fault(error))? })
    }

    fn fault(&self, error: CreateError) -> CreationError {
        match error {
            CreateError::Shape(_) => CreationError::Nonsense(self.name.clone(), error.to_string()),
            _ => CreationError::Create(self.name.clone(), error),
        }
    }

    fn checked_shape(&self) -> Result<Shape, CreationError> {
        let nonsense = |fault: String| CreationError::Nonsense(self.name.clone(), fault);
        let mut shape = self.shape().map_err(nonsense)?;
        let config = shape.config(Identities::System.uuid(), self.members.len(), 1 << 40, 512);
        let config = config.map_err(|error| self.fault(error))?;
        shape.maintenance = self.maintenance.apply(shape.maintenance, &config).map_err(nonsense)?;
        Ok(shape)
    }

    fn shape(&self) -> Result<Shape, String> {
        let level = self.level;
        let refuse = |what: &str, is_given: bool, levels: &[Level]| match is_given && !levels.contains(&level)
        {
            true => Err(format!("level {} takes no --{what}", level.name())),
            false => Ok(()),
        };
        let grouped = [Level::Raid10, Level::Raid50, Level::Raid60, Level::Raid70, Level::NPlusM];
        refuse("groups", self.groups.is_some(), &grouped)?;
        refuse("parities", self.parities.is_some(), &[Level::NPlusM])?;
        refuse("copies", self.copies.is_some(), &[Level::Raid10])?;
        let group = self.members.len() / self.groups.unwrap_or(1).max(1);
        Ok(Shape {
            groups: self.groups,
            copies: self.copies,
            data: self.parities.map(|parities| group.saturating_sub(parities)),
            parity: self.parities,
            strip_bytes: self.strip_bytes,
            consistency: self.consistency,
            member_bytes: self.member_bytes,
            ..Shape::new(&self.name, level)
        })
    }
}

fn open(devices: &[String]) -> Result<Vec<Arc<dyn Device>>, CreationError> {
    devices.iter().map(|text| Ok(device::open(text, &*member(text, true, false)?)?)).collect()
}
