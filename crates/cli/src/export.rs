//! Exports: what `--export` can name.

use exports::vhost_user_blk::{self, SocketMode};
use graph::kinds::READ_ONLY;
use graph::spec::{CpuList, Kind, Role, Spec, SpecError, Switch, Value, key};
use std::path::PathBuf;

/// Every kind of export.
pub const KINDS: &[&Kind] = &[&VHOST_USER_BLK];

static VHOST_USER_BLK: Kind = Kind {
    name: "vhost-user-blk",
    about: "a disk for virtual machines, over a Unix socket",
    keys: &[
        key("socket", "PATH", "the Unix socket"),
        key("device", "ID", "the device to export [the first]"),
        key("queues", "N", "virtqueues offered, 1 to 64 [1]"),
        key("queue-size", "N", "largest ring the guest should use: 4 to 1024, a power of two [256]"),
        key("serial", "TEXT", "what the guest sees as serial number, at most 20 bytes [the device's id]"),
        READ_ONLY,
        key("writeback", "on|off", "start with the write cache on [on]"),
        key("mode", "server|client", "listen on the socket, or connect to a VMM that listens [server]"),
        key("permissions", "MODE", "permission bits of the socket, octal [600]"),
        key("cores", "LIST", "which of --cores serve its queues, such as 0+2 or 0-3 [all, in turn]"),
    ],
};

/// An export to be started.
#[derive(Clone, Debug)]
pub struct ExportConfig {
    /// The id of its device, if one was chosen.
    pub device: Option<String>,
    /// Processors out of `--cores` that serve its queues, if they were chosen.
    pub cores: Option<Vec<usize>>,
    /// Whether the serial number was given.
    pub has_serial: bool,
    /// The rest, but for `core_map`.
    pub config: vhost_user_blk::Config,
}

impl ExportConfig {
    /// The export that `text` describes.
    ///
    /// # Errors
    /// When the text makes no sense.
    pub fn parse(text: &str) -> Result<ExportConfig, SpecError> {
        let spec = Spec::parse(Role::Export, KINDS, text)?;
        let mut config = vhost_user_blk::Config::new(spec.require::<PathBuf>("socket")?);
        config.num_queues = spec.get_or("queues", config.num_queues)?;
        config.queue_size = spec.get_or("queue-size", config.queue_size)?;
        let serial: Option<String> = spec.get("serial")?;
        let has_serial = serial.is_some();
        config.serial = serial.unwrap_or_default();
        config.read_only = spec.get_or("readonly", Switch(false))?.0;
        config.writeback = spec.get_or("writeback", Switch(true))?.0;
        config.mode = spec.get_or("mode", Mode(config.mode))?.0;
        config.permissions = spec.get_or("permissions", Permissions(config.permissions))?.0;
        let cores = spec.get("cores")?.map(|CpuList(cpus)| cpus);
        Ok(ExportConfig { device: spec.get("device")?, cores, has_serial, config })
    }

    /// The export's name in messages.
    pub fn name(&self) -> String {
        format!("vhost-user-blk:{}", self.config.socket.display())
    }
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

struct Permissions(u32);

impl Value for Permissions {
    fn expected() -> String {
        "octal permission bits such as 600 or 0660".into()
    }

    fn parse(text: &str) -> Option<Self> {
        let is_octal = !text.is_empty() && text.bytes().all(|b| (b'0'..=b'7').contains(&b));
        u32::from_str_radix(text, 8).ok().filter(|bits| is_octal && *bits <= 0o777).map(Permissions)
    }
}
