//! `--export vduse:…`.

use super::{CORES, DEVICE, ExportConfig, RequestMemory, object, serial_of};
use crate::text::count;
use block::Device;
use exports::{Error, Export};
use exports_virtio::vduse::{Config, Vduse};
use reactor::CoreRef;
use sandbox::{Access, Profile};
use serde_json::{Map, Value, json};
use spec::{Kind, READ_ONLY, Spec, SpecError, key};
use std::path::Path;
use std::sync::Arc;

pub(super) static KIND: Kind = Kind {
    name: "vduse",
    about: "a disk on the vDPA bus of this host: vdpa dev add name NAME mgmtdev vduse",
    keys: &[
        key("name", "NAME", "the device's name, /dev/vduse/NAME"),
        DEVICE,
        key("queues", "N", "virtqueues, 1 to 64 [1]"),
        key("queue-size", "N", "largest ring the driver may use: 4 to 1024, a power of two [256]"),
        key("serial", "TEXT", "serial number, at most 20 bytes [the device's id]"),
        READ_ONLY,
        key(
            "journal",
            "PATH",
            "file that records requests in flight for a successor [/dev/shm/freestone/vduse-NAME]",
        ),
        CORES,
    ],
};

/// Where the kernel puts the nodes of devices.
const NODES: &str = "/dev/vduse";

/// An export over VDUSE.
#[derive(Debug)]
struct VduseConfig {
    /// Whether the serial number was given.
    has_serial: bool,
    config: Config,
}

/// The export that `spec` describes.
pub(super) fn parse(spec: &Spec) -> Result<Box<dyn ExportConfig>, SpecError> {
    let mut config = Config::new(spec.require::<String>("name")?);
    config.num_queues = spec.get_or("queues", config.num_queues)?;
    config.queue_size = spec.get_or("queue-size", config.queue_size)?;
    let serial: Option<String> = spec.get("serial")?;
    let has_serial = serial.is_some();
    config.serial = serial.unwrap_or_default();
    config.read_only = spec.is_on("readonly")?;
    config.journal = spec.get("journal")?;
    Ok(Box::new(VduseConfig { has_serial, config }))
}

/// Adds what every device needs whose journal lies where it does by default, if the kernel has
/// VDUSE.
pub(super) fn keep_any(profile: &mut Profile) {
    if Path::new(NODES).exists() {
        profile.allow(NODES, Access::ReadWrite);
        profile.allow_file(&Config::new("any").journal());
    }
}

impl ExportConfig for VduseConfig {
    fn name(&self) -> String {
        format!("vduse:{}", self.config.name)
    }

    fn memory(&self) -> RequestMemory {
        RequestMemory::Clients
    }

    fn complete(&mut self, device_id: &str, cores: Vec<usize>) {
        if !self.has_serial {
            self.config.serial = serial_of(device_id);
        }
        self.config.core_map = cores;
    }

    fn start(&self, devices: &[Arc<dyn Device>], cores: &[CoreRef]) -> Result<Box<dyn Export>, Error> {
        Ok(Box::new(Vduse::start(devices[0].clone(), cores, self.config.clone())?))
    }

    fn keep(&self, profile: &mut Profile) {
        profile.allow(NODES, Access::ReadWrite);
        profile.allow_file(&self.config.journal());
    }

    fn line(&self, device_id: &str) -> String {
        let Config { num_queues, name, .. } = &self.config;
        format!("vduse: {} of {device_id}, device {name}", count((*num_queues).into(), "queue"))
    }

    fn fields(&self) -> Map<String, Value> {
        let Config { name, num_queues, queue_size, serial, .. } = &self.config;
        object(json!({
            "kind": KIND.name,
            "name": name,
            "queues": num_queues,
            "queue_size": queue_size,
            "serial": serial,
            "journal": self.config.journal(),
        }))
    }

    fn is_read_only(&self) -> bool {
        self.config.read_only
    }

    fn cores(&self) -> &[usize] {
        &self.config.core_map
    }
}
