//! Exports: what `--export` can name. A kind has a file, with its table of keys and what it makes
//! of them.

mod nbd;
mod nvme_tcp;
mod open_portal;
pub mod portal;
pub mod ports;
mod ublk;
mod vduse;
mod vhost_user_blk;

pub use open_portal::{OpenPortal, PortalPlan};
pub use vhost_user_blk::data_plane;

use block::{Device, SharedRole};
use exports::stream::{Address, Security};
use exports::{Error, Export};
use exports_nvme_tcp::Access as HostAccess;
use reactor::CoreRef;
use sandbox::{Access, Capability, Profile};
use serde_json::{Map, Value};
use spec::{CpuList, Entry, Key, Kind, Role, Spec, SpecError, Value as SpecValue, key};
use std::fmt::Debug;
use std::net::SocketAddr;
use std::sync::Arc;

/// Every kind of export. Its file in this folder has the rest.
const TABLE: &[Entry<Box<dyn ExportConfig>>; 5] = &[
    Entry { kind: &vhost_user_blk::KIND, parse: vhost_user_blk::parse },
    Entry { kind: &ublk::KIND, parse: ublk::parse },
    Entry { kind: &vduse::KIND, parse: vduse::parse },
    Entry { kind: &nbd::KIND, parse: nbd::parse },
    Entry { kind: &nvme_tcp::KIND, parse: nvme_tcp::parse },
];

/// The names and keys of the kinds.
pub const KINDS: &[&Kind] = &spec::kinds(TABLE);

/// Keys that every kind of export has.
const DEVICE: Key = key("device", "ID", "the device to export [the first]");
const CORES: Key = key("cores", "LIST", "which of --cores serve it, such as 0+2 or 0-3 [all, in turn]");
/// Of those that make a Unix socket.
const PERMISSIONS: Key = key("permissions", "MODE", "permission bits of the socket, octal [600]");

/// An export to be started.
#[derive(Debug)]
pub struct ExportPlan {
    /// The ids of its devices, if they were chosen.
    pub devices: Vec<String>,
    /// The text that describes it, for [`reload`].
    pub text: String,
    /// Processors out of `--cores` that serve it, if they were chosen.
    pub cores: Option<Vec<usize>>,
    /// The parsed options of its kind.
    pub config: Box<dyn ExportConfig>,
}

impl ExportPlan {
    /// The export that `text` describes.
    ///
    /// # Errors
    /// When the text is invalid.
    pub fn parse(text: &str) -> Result<ExportPlan, SpecError> {
        let (spec, config) = spec::parse(Role::Export, TABLE, text)?;
        let cores = spec.get("cores")?.map(|CpuList(cpus)| cpus);
        let device: Option<String> = spec.get("device")?;
        let devices: Vec<String> = match device {
            Some(list) if config.takes_many() => list.split('+').map(str::to_owned).collect(),
            device => device.into_iter().collect(),
        };
        Ok(ExportPlan { devices, text: text.to_owned(), cores, config })
    }
}

/// Adds the files that are read when `text` is parsed. A text that describes no export needs
/// nothing.
pub fn keep_read(text: &str, profile: &mut Profile) {
    if let Ok(spec) = Spec::parse(Role::Export, KINDS, text) {
        spec.read_paths().for_each(|path| profile.allow(path, Access::Read));
    }
}

/// As [`keep_read`], for files that [`reload`] reads: others may take their place.
pub fn keep_settings(text: &str, profile: &mut Profile) {
    if let Ok(spec) = Spec::parse(Role::Export, KINDS, text) {
        spec.read_paths().for_each(|path| profile.allow_settings(path));
    }
}

/// Whether files of keys or certificates are read when `text` is parsed.
pub fn has_keys(text: &str) -> bool {
    Spec::parse(Role::Export, KINDS, text).is_ok_and(|spec| spec.read_paths().next().is_some())
}

/// Reads the keys and certificates of a running export again. New connections use them; those
/// established stay, unless their host has lost its access. Returns whether it has such files. Must
/// not be called on a core. `portal` is the listener that it shares instead of
/// [`ExportConfig::own_listener`], which has TLS for all of its exports.
///
/// # Errors
/// When a file cannot be used, which the error names, or the export refuses the keys. Then those in
/// use stay.
pub fn reload(text: &str, export: &dyn Export, portal: Option<&OpenPortal>) -> Result<bool, String> {
    if !has_keys(text) {
        return Ok(false);
    }
    let plan = ExportPlan::parse(text).map_err(|error| error.to_string())?;
    let in_force = match (portal, plan.config.security()) {
        (Some(portal), Some(security)) => portal.set_security(security.clone()),
        _ => put_keys_in_force(&*plan.config, export),
    };
    in_force.map_err(|error| error.to_string())?;
    Ok(true)
}

/// Has a running export use the keys and certificates of a configuration that was parsed later.
///
/// # Errors
/// When the export refuses them.
pub fn put_keys_in_force(config: &dyn ExportConfig, export: &dyn Export) -> Result<(), Error> {
    match (config.security(), config.access()) {
        (Some(security), _) => export.set_security(security.clone()),
        (None, Some(access)) => export.set_access(access.clone()),
        (None, None) => Ok(()),
    }
}

/// Adds what any export may need that is made later, but for paths that it names: those depend on
/// the export.
pub fn keep_later(profile: &mut Profile) {
    ublk::keep_any(profile);
    vduse::keep_any(profile);
    profile.listen_anywhere();
    profile.resolve_names();
    profile.keep(Capability::CAP_FOWNER); // to remove a socket that others have left
}

/// The memory that requests of an export use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestMemory {
    /// That of clients, which the export registers with its devices.
    Clients,
    /// Buffers of the cores or of the export, which it does not register with its devices.
    Own,
}

/// The options of one kind of export.
pub trait ExportConfig: Debug + Send {
    /// Kind and address: the export's name in messages. No two exports have the same.
    fn name(&self) -> String;

    /// Chooses what was not said: what clients see by default of a device with this id, and the
    /// cores (places among those of the server; none: all) that serve.
    fn complete(&mut self, device_id: &str, cores: Vec<usize>);

    /// The memory of its requests.
    fn memory(&self) -> RequestMemory;

    /// Whether it exports several devices; otherwise it gets one.
    fn takes_many(&self) -> bool {
        false
    }

    /// Starts the export.
    ///
    /// # Errors
    /// When the configuration is impossible or the system refuses something.
    fn start(&self, devices: &[Arc<dyn Device>], cores: &[CoreRef]) -> Result<Box<dyn Export>, Error>;

    /// As [`ExportConfig::start`], over devices that other hosts serve too. `role` is that of this
    /// host.
    ///
    /// # Errors
    /// Also for kinds whose clients cannot learn that another host is the active one.
    fn start_with_role(
        &self,
        _role: &Arc<SharedRole>,
        _devices: &[Arc<dyn Device>],
        _cores: &[CoreRef],
    ) -> Result<Box<dyn Export>, Error> {
        let reason = "standby=on: clients of this kind cannot find the host that is active; nvme-tcp can";
        Err(Error::Config(reason.into()))
    }

    /// Adds to a profile what it needs while it starts, serves and ends.
    fn keep(&self, profile: &mut Profile);

    /// Returns its needs in a process of its own, which has no path of a device.
    ///
    /// # Errors
    /// When it cannot be served there, with the reason.
    fn apart(&self) -> Result<Apart, String> {
        Err("an export of this kind needs a device of the kernel, which a process of its own does not have"
            .into())
    }

    /// Its kind and address, printed after "export ". `device_id` is the exported device, or
    /// several joined by plus signs.
    fn line(&self, device_id: &str) -> String;

    /// The same as fields: kind, address and what else was chosen.
    fn fields(&self) -> Map<String, Value>;

    /// The name of the portal that it shares with others, if it does.
    fn portal(&self) -> Option<&str> {
        None
    }

    /// Its own listener, if exports of its kind can share one.
    fn own_listener(&self) -> Option<OwnListener> {
        None
    }

    /// Shares an open portal, where [`ExportConfig::portal`] names it, or instead of
    /// [`ExportConfig::own_listener`].
    ///
    /// # Errors
    /// When exports of this kind need another kind of portal.
    fn use_portal(&mut self, portal: OpenPortal) -> Result<(), String> {
        Err(format!("portal {}: exports of this kind use none", portal.name()))
    }

    /// TLS with certificates or keys of files, if the kind has it and it is chosen.
    fn security(&self) -> Option<&Security> {
        None
    }

    /// The hosts that may connect, if the kind has a list of them.
    fn access(&self) -> Option<&HostAccess> {
        None
    }

    /// Replaces the hosts that may connect, where [`ExportConfig::access`] has some.
    fn set_access(&mut self, _access: HostAccess) {}

    /// Whether it refuses writes even where the device takes them.
    fn is_read_only(&self) -> bool;

    /// Places of the cores that serve it; none: all.
    fn cores(&self) -> &[usize];
}

/// A listener of an export, which others of its kind with the same addresses can share.
#[derive(Debug)]
pub struct OwnListener {
    /// Its portal, as it is shared: named after its first address.
    pub portal: PortalPlan,
    /// The name of the export where it shares the listener.
    pub name: String,
    /// Options that are the same for all exports of the listener: their keys, and their values as
    /// they were given.
    pub common: Vec<(&'static str, Option<String>)>,
}

impl OwnListener {
    /// Whether both are one listener.
    pub fn is_same(&self, other: &OwnListener) -> bool {
        match (&self.portal, &other.portal) {
            (PortalPlan::NvmeTcp(one), PortalPlan::NvmeTcp(other)) => one.ports == other.ports,
            (PortalPlan::Nbd(one), PortalPlan::Nbd(other)) => one.addresses == other.addresses,
            (PortalPlan::NvmeTcp(_), PortalPlan::Nbd(_)) | (PortalPlan::Nbd(_), PortalPlan::NvmeTcp(_)) => {
                false
            }
        }
    }

    /// The first option in which exports of one listener differ, although they must not.
    pub fn difference(&self, other: &OwnListener) -> Option<&'static str> {
        let mut pairs = self.common.iter().zip(&other.common);
        pairs.find(|(one, other)| one != other).map(|((key, _), _)| *key)
    }
}

/// The needs of an export in a process of its own.
#[derive(Debug, Default)]
pub struct Apart {
    /// Where it listens. Another process binds these sockets, and passes them.
    pub listen: Vec<Address>,
    /// The sandbox profile of the process.
    pub profile: Profile,
}

/// Why an export of a portal cannot be served by a process of its own.
fn shares_listener(portal: &str) -> String {
    format!("portal={portal}: the exports of a portal share its listener; give it listen=")
}

/// Why an export cannot use a portal of this kind.
fn needs_other_portal(export: &str, portal: &str) -> String {
    format!("the portal is of kind {portal}, and exports of kind {export} need one of their kind")
}

/// Keeps what it takes to listen.
fn keep_listener(profile: &mut Profile, address: &Address) {
    match address {
        Address::Unix { path, .. } => profile.allow_socket(path),
        Address::Tcp(address) => {
            // An address without a port is refused by the export.
            let (_, port) = address.rsplit_once(':').unwrap_or_default();
            port.parse().into_iter().for_each(|port| profile.listen(port));
            if address.parse::<SocketAddr>().is_err() {
                profile.resolve_names();
            }
        }
        Address::Systemd(_) => {}
    }
}

/// The fields of an export, made with `json!`.
fn object(fields: Value) -> Map<String, Value> {
    match fields {
        Value::Object(fields) => fields,
        other => unreachable!("{other} is no object"),
    }
}

/// How an export that `requires` TLS, or has it, or not, is described.
fn tls_mode(requires: Option<bool>) -> &'static str {
    match requires {
        None => "off",
        Some(false) => "allow",
        Some(true) => "require",
    }
}

/// A device's id as the serial number of a virtio-blk disk: as much of it as fits.
fn serial_of(id: &str) -> String {
    const MAX: usize = 20; // virtio-blk's GET_ID
    let end = (0..=id.len().min(MAX)).rev().find(|at| id.is_char_boundary(*at)).unwrap_or(0);
    id[..end].to_owned()
}

/// Permission bits of a socket, as text in octal.
#[derive(Clone, Copy, Debug)]
pub struct Permissions(pub u32);

impl SpecValue for Permissions {
    fn expected() -> String {
        "octal permission bits such as 600 or 0660".into()
    }

    fn parse(text: &str) -> Option<Self> {
        let is_octal = !text.is_empty() && text.bytes().all(|b| (b'0'..=b'7').contains(&b));
        u32::from_str_radix(text, 8).ok().filter(|bits| is_octal && *bits <= 0o777).map(Permissions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_is_cut_to_a_serial_number() {
        assert_eq!(serial_of("disk"), "disk");
        assert_eq!(serial_of("a-very-long-name-of-a-disk"), "a-very-long-name-of-");
        assert_eq!(serial_of("ääääääääääää"), "ääääääääää");
    }
}
