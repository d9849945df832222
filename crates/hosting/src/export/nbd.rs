//! `--export nbd:…`.

use super::open_portal::{OpenPortal, PortalPlan};
use super::{
    Apart, CORES, DEVICE, ExportConfig, OwnListener, PERMISSIONS, Permissions, RequestMemory, keep_listener,
    object, tls_mode,
};
use block::Device;
use exports::{Error, Export};
use exports_nbd::{Address, Config, Nbd, PortalConfig, Security};
use reactor::CoreRef;
use sandbox::Profile;
use serde_json::{Map, Value, json};
use spec::{Key, Kind, READ_ONLY, Spec, SpecError, Switch, key};
use std::path::PathBuf;
use std::sync::Arc;

/// Keys of exports with a listener of their own, and of portals: see [`security`].
pub(super) const TLS: Key = key(
    "tls",
    "off|allow|require",
    "TLS: never, on request of the client, always [require, with one of the next two]",
);
pub(super) const TLS_CERTIFICATES: Key =
    key("tls-certificates", "DIR", "directory of server-cert.pem and server-key.pem").read();
pub(super) const TLS_PSK: Key =
    key("tls-psk", "FILE", "lines IDENTITY:HEXKEY; a client needs one of the keys").read();
pub(super) const TLS_VERIFY_PEER: Key = key(
    "tls-verify-peer",
    "on|off",
    "require client certificates signed by ca-cert.pem in tls-certificates [off]",
);
pub(super) const ADDRESS_CLIENTS: Key = key(
    "address-clients",
    "N",
    "most connections from one address by clients without a key [three quarters of clients=, or all if fewer than 32]",
);

pub(super) static KIND: Kind = Kind {
    name: "nbd",
    about: "a network block device, over a Unix socket or TCP",
    keys: &[
        key("socket", "PATH", "the Unix socket; or one of the next two"),
        key(
            "listen",
            "ADDR:PORT",
            "the TCP port; systemd or systemd:NAME takes a socket passed by systemd. Exports of freestone serve with the \
             same socket or port share it; clients choose one by name",
        ),
        key(
            "portal",
            "NAME",
            "a portal of freestoned, where clients choose one of many exports by name; it has the TLS options",
        ),
        key(
            "name",
            "NAME",
            "the name of the export; clients may omit it where no other export has the address [the device's id]",
        ),
        key("description", "TEXT", "description in the list of exports []"),
        TLS,
        TLS_CERTIFICATES,
        TLS_PSK,
        TLS_VERIFY_PEER,
        key("identities", "IDENTITY+…", "clients that may use it, by their keys in tls-psk [all]"),
        DEVICE,
        READ_ONLY,
        key("clients", "N", "most connections, 1 to 4096 [64]"),
        ADDRESS_CLIENTS,
        PERMISSIONS,
        CORES,
    ],
};

/// An export over NBD.
#[derive(Debug)]
struct NbdConfig {
    /// The name of the portal that it shares, which may not be open yet.
    portal: Option<String>,
    /// Whether the name was given.
    has_name: bool,
    /// The options of TLS, as they were given.
    tls_options: Vec<(&'static str, Option<String>)>,
    /// Whether TLS is required, if the listener has it.
    requires_tls: Option<bool>,
    config: Config,
}

/// The export that `spec` describes.
pub(super) fn parse(spec: &Spec) -> Result<Box<dyn ExportConfig>, SpecError> {
    let portal: Option<String> = spec.get("portal")?;
    let mut config = match portal {
        None => Config::new(address(spec)?),
        Some(_) => {
            refuse_with_portal(spec)?;
            // The portal is there when the export starts.
            Config::new(Address::Tcp(String::new()))
        }
    };
    let name: Option<String> = spec.get("name")?;
    let has_name = name.is_some();
    config.name = name.unwrap_or_default();
    config.description = spec.get("description")?.unwrap_or_default();
    config.tls = security(spec)?;
    let tls_options = TLS_OPTIONS.map(|key| Ok((key, spec.get::<String>(key)?)));
    let tls_options = tls_options.into_iter().collect::<Result<_, SpecError>>()?;
    let requires_tls = config.tls.as_ref().map(|tls| tls.is_required);
    let identities: Option<String> = spec.get("identities")?;
    config.identities = identities.map(|list| list.split('+').map(Box::from).collect());
    config.read_only = spec.is_on("readonly")?;
    config.clients = spec.get_or("clients", config.clients as u32)? as usize;
    config.address_clients = spec.get::<u32>("address-clients")?.map(|count| count as usize);
    Ok(Box::new(NbdConfig { portal, has_name, tls_options, requires_tls, config }))
}

/// The options of TLS, which starts before a client names an export.
const TLS_OPTIONS: [&str; 4] = [TLS.name, TLS_CERTIFICATES.name, TLS_PSK.name, TLS_VERIFY_PEER.name];

/// Refuses options that the portal has for all of its exports.
fn refuse_with_portal(spec: &Spec) -> Result<(), SpecError> {
    for key in ["socket", "listen", "permissions"].into_iter().chain(TLS_OPTIONS) {
        if spec.get::<String>(key)?.is_some() {
            return Err(spec.refuse(format!("{key} and portal: the portal has it for all of its exports")));
        }
    }
    Ok(())
}

/// TLS of an export or a portal. Reads certificates and keys at once, so that a wrong file is
/// refused early.
pub(super) fn security(spec: &Spec) -> Result<Option<Security>, SpecError> {
    let (mode, verifies_peer) = (spec.get("tls")?, spec.get::<Switch>("tls-verify-peer")?);
    let sources = (spec.get::<PathBuf>("tls-certificates")?, spec.get::<PathBuf>("tls-psk")?);
    let is_required = match (mode, &sources) {
        (Some(TlsMode::Off), _) | (None, (None, None)) => {
            return match (mode, verifies_peer) {
                (None, Some(_)) => Err(spec.refuse("tls-verify-peer needs tls-certificates=DIR")),
                _ => Ok(None),
            };
        }
        (mode, _) => mode != Some(TlsMode::Allow),
    };
    let server = match sources {
        (Some(directory), None) => {
            let verifies_peer = verifies_peer.is_some_and(|verifies| verifies.0);
            tls::Server::with_certificates(&directory, verifies_peer)
                .map_err(|error| spec.refuse(format!("tls-certificates: {error}")))?
        }
        (None, Some(_)) if verifies_peer.is_some() => {
            return Err(
                spec.refuse("tls-verify-peer is about certificates; with tls-psk clients prove their key")
            );
        }
        (None, Some(file)) => {
            tls::Server::with_keys(&file).map_err(|error| spec.refuse(format!("tls-psk: {error}")))?
        }
        (Some(_), Some(_)) => return Err(spec.refuse("tls-certificates and tls-psk exclude each other")),
        (None, None) => return Err(spec.refuse("tls needs tls-certificates=DIR or tls-psk=FILE")),
    };
    Ok(Some(Security { server, is_required }))
}

/// The clients that use TLS.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TlsMode {
    Off,
    Allow,
    Require,
}

impl spec::Value for TlsMode {
    fn expected() -> String {
        "off, allow or require".into()
    }

    fn parse(text: &str) -> Option<TlsMode> {
        Some(match text {
            "off" => TlsMode::Off,
            "allow" => TlsMode::Allow,
            "require" => TlsMode::Require,
            _ => return None,
        })
    }
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
        (None, None) => Err(spec.refuse("socket=PATH or listen=ADDR:PORT is required")),
    }
}

impl NbdConfig {
    /// Its address, or those of the portal that it shares.
    fn addresses(&self) -> Vec<String> {
        match (&self.portal, &self.config.portal) {
            (_, Some(portal)) => portal.addresses().map(str::to_owned).collect(),
            (None, None) => vec![self.config.address.to_string()],
            (Some(_), None) => Vec::new(),
        }
    }
}

impl ExportConfig for NbdConfig {
    fn name(&self) -> String {
        match &self.portal {
            Some(portal) => Config::name_at(portal, &self.config.name),
            None if self.config.portal.is_some() => {
                Config::name_at(&self.config.address.to_string(), &self.config.name)
            }
            None => format!("nbd:{}", self.config.address),
        }
    }

    fn memory(&self) -> RequestMemory {
        RequestMemory::Own
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
        if self.portal.is_none() {
            keep_listener(profile, &self.config.address);
        }
    }

    fn apart(&self) -> Result<Apart, String> {
        if let Some(portal) = &self.portal {
            return Err(super::shares_listener(portal));
        }
        Ok(Apart { listen: vec![self.config.address.clone()], ..Apart::default() })
    }

    fn line(&self, device_id: &str) -> String {
        let Config { name, .. } = &self.config;
        let name = if name == device_id { String::new() } else { format!(" as {name:?}") };
        let portal = self.portal.as_ref().map_or(String::new(), |portal| format!(" at portal {portal}"));
        format!("nbd: {device_id}{name}{portal}, listens on {}", self.addresses().join(" and "))
    }

    fn fields(&self) -> Map<String, Value> {
        let Config { address, name, description, clients, address_clients, identities, .. } = &self.config;
        let mut fields = object(json!({
            "kind": KIND.name,
            if matches!(address, Address::Unix { .. }) { "socket" } else { "listen" }: self.addresses().first(),
            "name": name,
            "description": description,
            "clients": clients,
            "address_clients": address_clients,
        }));
        // The portal has it, and may get other keys.
        match &self.portal {
            Some(portal) => fields.insert("portal".into(), json!(portal)),
            None => fields.insert("tls".into(), tls_mode(self.requires_tls).into()),
        };
        fields.extend(identities.as_ref().map(|identities| ("identities".to_owned(), json!(identities))));
        fields
    }

    fn portal(&self) -> Option<&str> {
        self.portal.as_deref()
    }

    fn own_listener(&self) -> Option<OwnListener> {
        if self.portal.is_some() || self.config.portal.is_some() {
            return None;
        }
        let address = self.config.address.to_string();
        let name = Config::name_at(&address, &self.config.name);
        let mut portal = PortalConfig::new(address, vec![self.config.address.clone()]);
        portal.tls.clone_from(&self.config.tls);
        Some(OwnListener { portal: PortalPlan::Nbd(portal), name, common: self.tls_options.clone() })
    }

    fn use_portal(&mut self, portal: OpenPortal) -> Result<(), String> {
        let kind = portal.kind();
        let OpenPortal::Nbd(portal) = portal else { return Err(super::needs_other_portal(KIND.name, kind)) };
        (self.config.portal, self.config.tls) = (Some(portal), None);
        Ok(())
    }

    fn security(&self) -> Option<&Security> {
        self.config.tls.as_ref()
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
        assert!(refusal("nbd:name=x").contains("socket=PATH or listen=ADDR:PORT is required"));
        assert!(refusal("nbd:socket=s,listen=l:1").contains("exclude"));
        assert_eq!(name_of("nbd:portal=net,name=x"), "nbd:net:x");
        for own in ["socket=s", "listen=l:1", "permissions=600", "tls=allow", "tls-psk=f"] {
            let key = own.split_once('=').unwrap().0;
            let said = refusal(&format!("nbd:portal=net,{own}"));
            assert!(said.contains(&format!("{key} and portal: the portal has it")), "{said}");
        }
        assert!(refusal("nbd:listen=l:1,permissions=600").contains("permissions"));
        assert!(refusal("nbd:socket=s,clients=many").contains("clients"));
        assert!(refusal("nbd:socket=s,address-clients=x").contains("address-clients"));
        let few = ExportPlan::parse("nbd:listen=l:1,address-clients=3").unwrap();
        assert_eq!(few.config.fields()["address_clients"], 3);
    }
    #[test]
    fn certificates_and_keys_are_read_at_once_and_a_wrong_one_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().display();
        let mode = |text: &str| {
            let plan = ExportPlan::parse(&format!("nbd:socket=s{text}")).unwrap();
            plan.config.fields()["tls"].as_str().unwrap().to_owned()
        };
        assert_eq!((mode(""), mode(",tls=off")), ("off".into(), "off".into()));
        let certificates = format!("nbd:socket=s,tls-certificates={path}");
        assert!(refusal(&certificates).contains("/server-cert.pem: No such file"));
        tls::authority::write_all(folder.path());
        assert_eq!(mode(&format!(",tls-certificates={path}")), "require");
        assert_eq!(mode(&format!(",tls-certificates={path},tls=allow,tls-verify-peer=on")), "allow");
        assert_eq!(mode(&format!(",tls-certificates={path},tls=off")), "off");
        std::fs::remove_file(folder.path().join("ca-cert.pem")).unwrap();
        assert!(
            refusal(&format!("{certificates},tls-verify-peer=on")).contains("/ca-cert.pem: No such file")
        );
        secrets::write(&folder.path().join("keys"), "alice:5e5e").unwrap();
        let keys = format!("nbd:socket=s,tls-psk={path}/keys");
        let said = refusal(&keys);
        assert!(said.contains("/keys: line 1: a key of 2 bytes") && !said.contains("5e5e"), "{said}");
        assert!(refusal(&format!("{certificates},tls-psk=x")).contains("exclude each other"));
        assert!(refusal(&format!("{keys},tls-verify-peer=on")).contains("about certificates"));
        assert!(
            refusal("nbd:socket=s,tls=require").contains("tls needs tls-certificates=DIR or tls-psk=FILE")
        );
        assert!(refusal("nbd:socket=s,tls-verify-peer=on").contains("needs tls-certificates"));
        assert!(refusal("nbd:socket=s,tls=maybe").contains("off, allow or require"));
    }
}
