//! `--export nbd:…`.

use super::{CORES, DEVICE, ExportConfig, PERMISSIONS, Permissions, keep_listener, object};
use block::Device;
use exports::nbd::{Address, Config, Nbd};
use exports::{Error, Export};
use graph::kinds::READ_ONLY;
use graph::spec::{Kind, Spec, SpecError, Switch, key};
use reactor::CoreRef;
use sandbox::Profile;
use serde_json::{Map, Value, json};
use std::path::PathBuf;
use std::sync::Arc;

pub(super) static KIND: Kind = Kind {
    name: "nbd",
    about: "a network block device, over a Unix socket or TCP",
    keys: &[
        key("socket", "PATH", "the Unix socket; or the next"),
        key(
            "listen",
            "ADDR:PORT",
            "the TCP port; systemd or systemd:NAME takes a socket that systemd passes",
        ),
        key("name", "NAME", "what clients call it; no name at all will do, too [the device's id]"),
        key("description", "TEXT", "what the list of exports says beside the name []"),
        DEVICE,
        READ_ONLY,
        key("clients", "N", "connections at a time, 1 to 4096 [64]"),
        PERMISSIONS,
        CORES,
    ],
};

/// An export over NBD.
#[derive(Debug)]
struct NbdConfig {
    /// Whether the name was given.
    has_name: bool,
    config: Config,
}

/// The export that `spec` describes.
pub(super) fn parse(spec: &Spec) -> Result<Box<dyn ExportConfig>, SpecError> {
    let mut config = Config::new(address(spec)?);
    let name: Option<String> = spec.get("name")?;
    let has_name = name.is_some();
    config.name = name.unwrap_or_default();
    config.description = spec.get("description")?.unwrap_or_default();
    config.read_only = spec.get_or("readonly", Switch(false))?.0;
    config.clients = spec.get_or("clients", config.clients as u32)? as usize;
    Ok(Box::new(NbdConfig { has_name, config }))
}

fn address(spec: &Spec) -> Result<Address, SpecError> {
    let permissions: Option<Permissions> = spec.get("permissions")?;
    let listen: Option<String> = spec.get("listen")?;
    match (spec.get::<PathBuf>("socket")?, listen) {
        (Some(path), None) => {
            Ok(Address::Unix { path, permissions: permissions.map_or(0o600, |permissions| permissions.0) })
        }
        (None, Some(_)) if permissions.is_some() => Err(spec.refuse("permissions are those of socket=")),
        (None, Some(listen)) => Ok(Address::of_listen(&listen)),
        (Some(_), Some(_)) => Err(spec.refuse("socket and listen exclude each other")),
        (None, None) => Err(spec.refuse("needs socket=PATH or listen=ADDR:PORT")),
    }
}

impl ExportConfig for NbdConfig {
    fn name(&self) -> String {
        format!("nbd:{}", self.config.address)
    }

    fn complete(&mut self, device_id: &str, cores: Vec<usize>) {
        if !self.has_name {
            self.config.name = device_id.to_owned();
        }
        self.config.core_map = cores;
    }

    fn start(&self, devices: &[Arc<dyn Device>], cores: &[CoreRef]) -> Result<Box<dyn Export>, Error> {
        Ok(Box::new(Nbd::start(devices[0].clone(), cores, self.config.clone())?))
    }

    fn keep(&self, profile: &mut Profile) {
        keep_listener(profile, &self.config.address);
    }

    fn line(&self, device_id: &str) -> String {
        let Config { address, name, .. } = &self.config;
        let name = if name == device_id { String::new() } else { format!(" as {name:?}") };
        format!("nbd: {device_id}{name}, listens on {address}")
    }

    fn fields(&self) -> Map<String, Value> {
        let Config { address, name, description, clients, .. } = &self.config;
        object(json!({
            "kind": KIND.name,
            if matches!(address, Address::Unix { .. }) { "socket" } else { "listen" }: address.to_string(),
            "name": name,
            "description": description,
            "clients": clients,
        }))
    }

    fn is_read_only(&self) -> bool {
        self.config.read_only
    }

    fn cores(&self) -> &[usize] {
        &self.config.core_map
    }
}

#[cfg(test)]
mod tests {
    use super::super::ExportPlan;

    fn name_of(text: &str) -> String {
        ExportPlan::parse(text).unwrap().config.name()
    }

    fn refusal(text: &str) -> String {
        ExportPlan::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn an_export_listens_in_one_place() {
        assert_eq!(name_of("nbd:socket=/tmp/s"), "nbd:/tmp/s");
        assert_eq!(name_of("nbd:listen=[::1]:10809,name=x"), "nbd:[::1]:10809");
        assert_eq!(name_of("nbd:listen=systemd"), "nbd:systemd");
        assert_eq!(name_of("nbd:listen=systemd:disk"), "nbd:systemd:disk");
        assert_eq!(name_of("nbd:listen=systemd.example:1"), "nbd:systemd.example:1");
        assert!(refusal("nbd:name=x").contains("needs socket=PATH or listen=ADDR:PORT"));
        assert!(refusal("nbd:socket=s,listen=l:1").contains("exclude"));
        assert!(refusal("nbd:listen=l:1,permissions=600").contains("permissions"));
        assert!(refusal("nbd:socket=s,clients=many").contains("clients"));
    }
}
