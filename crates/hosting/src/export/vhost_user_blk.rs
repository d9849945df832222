//! `--export vhost-user-blk:…`.

use super::{Apart, CORES, DEVICE, ExportConfig, PERMISSIONS, Permissions, RequestMemory, object, serial_of};
use crate::text::count;
use block::Device;
use exports::stream::Address;
use exports::{DataPlane, Error, Export};
use exports_virtio::vhost_user_blk::{Config, KERNEL_DATA_PLANE, MemoryFiles, SocketMode, VhostUserBlk};
use reactor::CoreRef;
use sandbox::{Access, Profile};
use serde_json::{Map, json};
use spec::{Kind, READ_ONLY, Spec, SpecError, Switch, Value, key};
use std::path::PathBuf;
use std::sync::Arc;

pub(super) static KIND: Kind = Kind {
    name: "vhost-user-blk",
    about: "a disk for virtual machines, over a Unix socket",
    keys: &[
        key("socket", "PATH", "the Unix socket"),
        DEVICE,
        key("queues", "N", "virtqueues offered, 1 to 64 [1]"),
        key("queue-size", "N", "largest ring the guest should use: 4 to 1024, a power of two [256]"),
        key("serial", "TEXT", "serial number, at most 20 bytes [the device's id]"),
        READ_ONLY,
        key("writeback", "on|off", "start with the write cache on [on]"),
        key("mode", "server|client", "listen on the socket, or connect to a VMM that listens [server]"),
        PERMISSIONS,
        key(
            "memory",
            "ram|any",
            "files accepted as guest memory: memfd, tmpfs and hugetlbfs, or any, which may block a core [ram]",
        ),
        key(
            "data-plane",
            "user|kernel|auto",
            "server of the rings: this process, the kernel (/dev/vhost-blk, for a disk of this host or a part of one), or the kernel where it can [user]",
        ),
        CORES,
    ],
};

/// An export over vhost-user.
#[derive(Debug)]
struct VhostUserBlkConfig {
    /// Whether the serial number was given.
    has_serial: bool,
    config: Config,
}

/// The export that `spec` describes.
pub(super) fn parse(spec: &Spec) -> Result<Box<dyn ExportConfig>, SpecError> {
    let mut config = Config::new(spec.require::<PathBuf>("socket")?);
    config.num_queues = spec.get_or("queues", config.num_queues)?;
    config.queue_size = spec.get_or("queue-size", config.queue_size)?;
    let serial: Option<String> = spec.get("serial")?;
    let has_serial = serial.is_some();
    config.serial = serial.unwrap_or_default();
    config.read_only = spec.is_on("readonly")?;
    config.writeback = spec.get_or("writeback", Switch(true))?.0;
    config.mode = spec.get_or("mode", Mode(config.mode))?.0;
    config.memory = spec.get_or("memory", Memory(config.memory))?.0;
    config.data_plane = spec.get_or("data-plane", Plane(config.data_plane))?.0;
    config.permissions = spec.get_or("permissions", Permissions(config.permissions))?.0;
    Ok(Box::new(VhostUserBlkConfig { has_serial, config }))
}

impl ExportConfig for VhostUserBlkConfig {
    fn name(&self) -> String {
        format!("vhost-user-blk:{}", self.config.socket.display())
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
        Ok(Box::new(VhostUserBlk::start(devices[0].clone(), cores, self.config.clone())?))
    }

    fn keep(&self, profile: &mut Profile) {
        match self.config.mode {
            SocketMode::Listen => profile.allow_socket(&self.config.socket),
            SocketMode::Connect => profile.connect_to(&self.config.socket),
        }
        if self.config.data_plane != DataPlane::User {
            profile.allow(KERNEL_DATA_PLANE, Access::ReadWrite);
        }
    }

    fn apart(&self) -> Result<Apart, String> {
        let Config { socket, mode, permissions, memory, data_plane, .. } = &self.config;
        if *data_plane == DataPlane::Kernel {
            return Err(
                "data-plane=kernel: a process of its own has no disk that the kernel could serve".into()
            );
        }
        if *memory == MemoryFiles::Any {
            return Err(
                "memory=any: the daemon maps the guest's memory too, and takes files in memory only".into()
            );
        }
        let mut apart = Apart::default();
        match mode {
            SocketMode::Listen => {
                apart.listen.push(Address::Unix { path: socket.clone(), permissions: *permissions });
            }
            SocketMode::Connect => apart.profile.connect_to(socket),
        }
        Ok(apart)
    }

    fn line(&self, device_id: &str) -> String {
        let Config { num_queues, mode, socket, data_plane, .. } = &self.config;
        let verb = match mode {
            SocketMode::Listen => "listens on",
            SocketMode::Connect => "connects to",
        };
        let queues = count((*num_queues).into(), "queue");
        let plane = match data_plane {
            DataPlane::User => "",
            DataPlane::Kernel => ", served by the kernel",
            DataPlane::Auto => ", served by the kernel where it can",
        };
        format!("vhost-user-blk: {queues} of {device_id}, {verb} {}{plane}", socket.display())
    }

    fn fields(&self) -> Map<String, serde_json::Value> {
        let Config { socket, mode, num_queues, queue_size, serial, data_plane, .. } = &self.config;
        object(json!({
            "kind": KIND.name,
            "socket": socket,
            "mode": match mode { SocketMode::Listen => "server", SocketMode::Connect => "client" },
            "queues": num_queues,
            "queue_size": queue_size,
            "serial": serial,
            "data_plane": PLANES.iter().find(|(_, plane)| plane == data_plane).map(|(word, _)| word.name()),
        }))
    }

    fn is_read_only(&self) -> bool {
        self.config.read_only
    }

    fn cores(&self) -> &[usize] {
        &self.config.core_map
    }
}

struct Memory(MemoryFiles);

impl Value for Memory {
    fn expected() -> String {
        "ram or any".into()
    }

    fn parse(text: &str) -> Option<Self> {
        match text {
            "ram" => Some(Memory(MemoryFiles::Ram)),
            "any" => Some(Memory(MemoryFiles::Any)),
            _ => None,
        }
    }
}

struct Plane(DataPlane);

impl Value for Plane {
    fn expected() -> String {
        "user, kernel or auto".into()
    }

    fn parse(text: &str) -> Option<Self> {
        api::DataPlane::from_name(text).map(|word| Plane(data_plane(word)))
    }
}

/// Data planes by their words.
const PLANES: [(api::DataPlane, DataPlane); 3] = [
    (api::DataPlane::User, DataPlane::User),
    (api::DataPlane::Kernel, DataPlane::Kernel),
    (api::DataPlane::Auto, DataPlane::Auto),
];

/// The data plane of that word.
pub fn data_plane(word: api::DataPlane) -> DataPlane {
    let row = PLANES.iter().find(|(other, _)| *other == word);
    row.expect("the table has every word").1
}

struct Mode(SocketMode);

impl Value for Mode {
    fn expected() -> String {
        "server or client".into()
    }

    fn parse(text: &str) -> Option<Self> {
        match text {
            "server" => Some(Mode(SocketMode::Listen)),
            "client" => Some(Mode(SocketMode::Connect)),
            _ => None,
        }
    }
}
