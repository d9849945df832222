//! `--export nvme-tcp:…`.

use super::open_portal::{OpenPortal, PortalPlan};
use super::{Apart, CORES, ExportConfig, OwnListener, RequestMemory, keep_listener, object, ports, tls_mode};
use block::{Device, SharedRole};
use exports::{Error, Export};
use exports_nvme_tcp::{
    Access, AccessState, Auth, CONTROLLER_IDS, Choices, Config, Group, Hash, Hosts, Keyring, Keys,
    NamespaceConfig, Nqn, NvmeTcp, PortConfig, PortalConfig, Security, TlsKeys,
};
use raid::Uuid;
use reactor::CoreRef;
use sandbox::Profile;
use serde_json::{Map, Value, json};
use spec::{Kind, READ_ONLY, Spec, SpecError, key};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

pub(super) static KIND: Kind = Kind {
    name: "nvme-tcp",
    about: "an NVMe subsystem, over TCP",
    keys: &[
        key(
            "listen",
            "ADDR:PORT[@STATE]+…",
            "the TCP ports, such as 0.0.0.0:4420 (systemd or systemd:NAME as for nbd), and their ANA states: optimized, \
             non-optimized, inaccessible, persistent-loss, change [optimized]. Exports of freestone serve with the same \
             ports share a listener",
        ),
        key("portal", "NAME", "instead of listen: a portal of freestoned, whose ports exports share"),
        key(
            "ana",
            "ADDR:PORT@STATE+…",
            "ANA states over some ports of listen or of the portal, instead of theirs",
        ),
        key("nqn", "NQN", "NQN of the subsystem"),
        key("device", "ID+…", "the devices to export, as namespaces 1, 2 and so on [the first]"),
        key("hosts", "NQN+…", "hosts that may connect; none: no host [any]"),
        key(
            "auth-keys",
            "FILE",
            "require authentication with the secrets in this file: lines HOSTNQN SECRET [OURS]",
        )
        .read(),
        key("auth-hashes", "NAME+…", "accepted hashes, the preferred first [sha512+sha384+sha256]"),
        key("auth-groups", "NAME+…", "accepted DH groups, the preferred first [ffdhe2048+…+ffdhe8192+null]"),
        key(
            "tls-keys",
            "FILE",
            "TLS 1.3 with the keys in this file: lines HOSTNQN KEY (nvme gen-tls-key makes keys)",
        )
        .read(),
        key(
            "tls-keyring",
            "NAME",
            "instead of tls-keys: keyring with keys for TLS (as for the device nvme-tcp)",
        ),
        key("tls", "require|allow", "whether hosts without a key may connect without TLS [require]"),
        key(
            "reservations",
            "DIR",
            "directory for reservations that hosts ask to persist (Linux does); they survive restarts and power loss \
             [reservations end with the server]",
        ),
        key("serial", "TEXT", "serial number [derived from the NQN]"),
        key(
            "uuid",
            "UUID+…",
            "UUIDs and NGUIDs of the namespaces, one for each device [derived from the NQN and the device's name]",
        ),
        READ_ONLY,
        key("queues", "N", "most I/O queues of a host, 1 to 1024 [64]"),
        key(
            "controller-ids",
            "FIRST-LAST",
            "identifiers of controllers: ranges of their own for servers of one subsystem [1-65519]",
        ),
        key("clients", "N", "most connections, one queue each, 1 to 4096; discovery does not count [256]"),
        key(
            "address-clients",
            "N",
            "most connections from one address by hosts without a key [three quarters of clients=, or all if fewer than 32]",
        ),
        key(
            "host-clients",
            "N",
            "of these, by one host [what the shares of other listed hosts leave; where others may come as address-clients]",
        ),
        CORES,
    ],
};

/// An export over NVMe/TCP.
#[derive(Debug)]
struct NvmeTcpConfig {
    config: Config,
    /// The name of the portal that it shares, which may not be open yet.
    portal: Option<String>,
    /// Of the namespaces in turn, if they were chosen.
    uuids: Vec<Uuid>,
}

/// The export that `spec` describes.
pub(super) fn parse(spec: &Spec) -> Result<Box<dyn ExportConfig>, SpecError> {
    let required =
        |name: &str, value: Option<String>| value.ok_or_else(|| spec.refuse(format!("{name} is required")));
    let (listen, portal): (Option<String>, Option<String>) = (spec.get("listen")?, spec.get("portal")?);
    let ports: Vec<PortConfig> = match (listen, &portal) {
        (Some(_), Some(_)) => return Err(spec.refuse("listen and portal: want one of them")),
        (None, Some(_)) => Vec::new(),
        (listen, None) => {
            let listen = required("listen=ADDR:PORT", listen)?;
            ports::ports("listen", &listen).map_err(|fault| spec.refuse(fault))?
        }
    };
    let name = required("nqn=NQN", spec.get("nqn")?)?;
    let name = Nqn::of_any(&name).map_err(|error| spec.refuse(format!("{name}: {error}")))?;
    let mut config = Config::at(ports, name);
    let hosts = spec.get::<String>("hosts")?.map(|list| Hosts::parse(&list)).transpose();
    let hosts = hosts.map_err(|error| spec.refuse(format!("hosts: {error}")))?.unwrap_or_default();
    config.access = Access { hosts, auth: auth(spec)?, tls: security(spec)? };
    let states = spec.get::<String>("ana")?.map(|list| ports::access_states(&list)).transpose();
    config.access_states = states.map_err(|fault| spec.refuse(fault))?.unwrap_or_default();
    config.reservations = spec.get::<String>("reservations")?.map(PathBuf::from);
    config.serial = spec.get("serial")?;
    config.read_only = spec.is_on("readonly")?;
    config.queues = spec.get_or("queues", config.queues)?;
    config.controller_ids = controller_ids(spec)?;
    config.clients = spec.get_or("clients", config.clients as u32)? as usize;
    config.address_clients = spec.get::<u32>("address-clients")?.map(|count| count as usize);
    config.host_clients = spec.get::<u32>("host-clients")?.map(|count| count as usize);
    Ok(Box::new(NvmeTcpConfig { config, portal, uuids: uuids(spec)? }))
}

/// The identities of the namespaces.
fn uuids(spec: &Spec) -> Result<Vec<Uuid>, SpecError> {
    let list: Option<String> = spec.get("uuid")?;
    let wrong = |text: &str| spec.refuse(format!("uuid: {text:?} is no UUID: want 32 hexadecimal digits"));
    let parse = |text: &str| Uuid::parse(text).ok_or_else(|| wrong(text));
    list.iter().flat_map(|list| list.split('+')).map(parse).collect()
}

/// The identifiers of controllers.
fn controller_ids(spec: &Spec) -> Result<RangeInclusive<u16>, SpecError> {
    let Some(text) = spec.get::<String>("controller-ids")? else { return Ok(CONTROLLER_IDS) };
    let number = |text: &str| text.parse().ok().filter(|id| CONTROLLER_IDS.contains(id));
    let range = text.split_once('-').and_then(|(first, last)| Some(number(first)?..=number(last)?));
    range.filter(|range| !range.is_empty()).ok_or_else(|| {
        let max = CONTROLLER_IDS.end();
        spec.refuse(format!("controller-ids={text}: expected FIRST-LAST, both from 1 to {max}"))
    })
}

/// How hosts prove who they are. The secrets are read now, so that a wrong file is refused early.
fn auth(spec: &Spec) -> Result<Option<Auth>, SpecError> {
    let file: Option<String> = spec.get("auth-keys")?;
    let (hashes, groups) = (spec.get::<String>("auth-hashes")?, spec.get::<String>("auth-groups")?);
    let Some(file) = file else {
        return match hashes.or(groups) {
            Some(_) => Err(spec.refuse("auth-hashes and auth-groups need auth-keys=FILE")),
            None => Ok(None),
        };
    };
    let keys = Keys::read(Path::new(&file)).map_err(|error| spec.refuse(format!("auth-keys: {error}")))?;
    let mut choices = Choices::default();
    if let Some(text) = hashes {
        choices.hashes = choose(&text, Hash::ALL, Hash::name).map_err(|fault| spec.refuse(fault))?;
    }
    if let Some(text) = groups {
        choices.groups = choose(&text, Group::ALL, Group::name).map_err(|fault| spec.refuse(fault))?;
    }
    Ok(Some(Auth { keys: Arc::new(keys), choices: Arc::new(choices), is_required: true }))
}

/// TLS. The keys are read now, too; those in a keyring are looked up for each connection.
fn security(spec: &Spec) -> Result<Option<Security>, SpecError> {
    let mode: Option<String> = spec.get("tls")?;
    let keys = match (spec.get::<String>("tls-keys")?, spec.get::<String>("tls-keyring")?) {
        (Some(_), Some(_)) => return Err(spec.refuse("tls-keys and tls-keyring: want one of them")),
        (Some(file), None) => TlsKeys::read(Path::new(&file)).map_err(|error| format!("tls-keys: {error}")),
        (None, Some(name)) => {
            Keyring::new(&name).and_then(TlsKeys::of_keyring).map_err(|error| format!("tls-keyring: {error}"))
        }
        (None, None) => {
            return match mode {
                Some(_) => Err(spec.refuse("tls needs tls-keys=FILE or tls-keyring=NAME")),
                None => Ok(None),
            };
        }
    };
    let is_required = match mode.as_deref() {
        None | Some("require") => true,
        Some("allow") => false,
        Some(mode) => return Err(spec.refuse(format!("tls: {mode:?} is none of require, allow"))),
    };
    let keys = keys.map_err(|error| spec.refuse(error))?;
    Ok(Some(Security { keys: Arc::new(keys), is_required }))
}

/// Those of `all` whose names are in `text`, in its order.
fn choose<T: Copy>(text: &str, all: &[T], name: fn(T) -> &'static str) -> Result<Vec<T>, String> {
    let find = |word: &str| {
        let known = || all.iter().map(|one| name(*one)).collect::<Vec<_>>().join(", ");
        let found = all.iter().copied().find(|one| name(*one) == word);
        found.ok_or_else(|| format!("{word:?} is none of {}", known()))
    };
    text.split('+').map(find).collect()
}

impl NvmeTcpConfig {
    /// Its ports, or those of the portal that it shares.
    fn ports(&self) -> impl Iterator<Item = (String, AccessState)> {
        let own = self.config.ports.iter().map(|port| (port.address.to_string(), port));
        let shared = self.config.portal.iter().flat_map(|portal| portal.ports());
        let all = own.chain(shared.map(|(address, port)| (address.to_owned(), port)));
        all.map(|(address, port)| (address, port.state_within(&self.config.access_states)))
    }

    fn keep_keyring(&self, profile: &mut Profile) {
        if self.config.access.tls.as_ref().is_some_and(|tls| tls.keys.keyring().is_some()) {
            profile.read_keyrings();
        }
    }

    fn keep_reservations(&self, profile: &mut Profile) {
        if let Some(directory) = &self.config.reservations {
            profile.make_directory(directory);
            profile.allow(directory, sandbox::Access::Files);
        }
    }

    fn start_as(
        &self,
        role: Option<Arc<SharedRole>>,
        devices: &[Arc<dyn Device>],
        cores: &[CoreRef],
    ) -> Result<Box<dyn Export>, Error> {
        if !self.uuids.is_empty() && self.uuids.len() != devices.len() {
            let (uuids, devices) = (self.uuids.len(), devices.len());
            return Err(Error::Config(format!("uuid: {uuids} for {devices} devices: want one for each")));
        }
        let uuid = |place: usize| self.uuids.get(place).map(|uuid| uuid.0);
        let namespace = |(place, device): (usize, &Arc<dyn Device>)| NamespaceConfig {
            device: device.clone(),
            uuid: uuid(place),
        };
        let namespaces: Vec<NamespaceConfig> = devices.iter().enumerate().map(namespace).collect();
        let config = Config { role, ..self.config.clone() };
        Ok(Box::new(NvmeTcp::start(&namespaces, cores, config)?))
    }
}

impl ExportConfig for NvmeTcpConfig {
    fn name(&self) -> String {
        match &self.portal {
            Some(portal) => Config::name_at(portal, &self.config.nqn),
            None => self.config.name(),
        }
    }

    fn memory(&self) -> RequestMemory {
        RequestMemory::Own
    }

    fn complete(&mut self, _device_id: &str, cores: Vec<usize>) {
        self.config.core_map = cores;
    }

    fn takes_many(&self) -> bool {
        true
    }

    fn start(&self, devices: &[Arc<dyn Device>], cores: &[CoreRef]) -> Result<Box<dyn Export>, Error> {
        self.start_as(None, devices, cores)
    }

    fn start_with_role(
        &self,
        role: &Arc<SharedRole>,
        devices: &[Arc<dyn Device>],
        cores: &[CoreRef],
    ) -> Result<Box<dyn Export>, Error> {
        self.start_as(Some(role.clone()), devices, cores)
    }

    fn keep(&self, profile: &mut Profile) {
        self.config.ports.iter().for_each(|port| keep_listener(profile, &port.address));
        self.keep_reservations(profile);
        self.keep_keyring(profile);
    }

    fn apart(&self) -> Result<Apart, String> {
        if let Some(portal) = &self.portal {
            return Err(super::shares_listener(portal));
        }
        let mut apart = Apart::default();
        apart.listen.extend(self.config.ports.iter().map(|port| port.address.clone()));
        self.keep_reservations(&mut apart.profile);
        self.keep_keyring(&mut apart.profile);
        Ok(apart)
    }

    fn line(&self, device_id: &str) -> String {
        let ports: Vec<String> = self.ports().map(|(address, state)| written(&address, state)).collect();
        let portal = self.portal.as_ref().map_or(String::new(), |portal| format!(" at portal {portal}"));
        let nqn = self.config.nqn.as_str();
        format!("nvme-tcp: {device_id} as {nqn}{portal}, listens on {}", ports.join(" and "))
    }

    fn fields(&self) -> Map<String, Value> {
        let Config { nqn, access, reservations, queues, clients, .. } = &self.config;
        let Access { hosts, auth, tls } = access;
        let hosts = match hosts {
            Hosts::Any => Value::Null,
            Hosts::Listed(hosts) => hosts.iter().map(Nqn::as_str).collect(),
        };
        let Config { address_clients, host_clients, controller_ids, .. } = &self.config;
        let port = |(address, state): (String, AccessState)| json!({ "address": address, "ana_state": state.name() });
        object(json!({
            "kind": KIND.name,
            "portal": self.portal,
            "listen": self.ports().map(port).collect::<Vec<_>>(),
            "nqn": nqn.as_str(),
            "hosts": hosts,
            "authentication": auth.is_some(),
            "tls": tls_mode(tls.as_ref().map(|tls| tls.is_required)),
            "reservations": reservations,
            "queues": queues,
            "controller_ids": [controller_ids.start(), controller_ids.end()],
            "clients": clients,
            "address_clients": address_clients,
            "host_clients": host_clients,
            "uuids": self.uuids.iter().map(Uuid::to_string).collect::<Vec<_>>(),
        }))
    }

    fn portal(&self) -> Option<&str> {
        self.portal.as_deref()
    }

    fn own_listener(&self) -> Option<OwnListener> {
        let ports = &self.config.ports;
        let first = ports.first()?.address.to_string();
        let name = Config::name_at(&first, &self.config.nqn);
        let portal = PortalPlan::NvmeTcp(PortalConfig::new(first, ports.clone()));
        Some(OwnListener { portal, name, common: Vec::new() })
    }

    fn use_portal(&mut self, portal: OpenPortal) -> Result<(), String> {
        let kind = portal.kind();
        let OpenPortal::NvmeTcp(portal) = portal else {
            return Err(super::needs_other_portal(KIND.name, kind));
        };
        self.config.ports.clear();
        self.config.portal = Some(portal);
        Ok(())
    }

    fn access(&self) -> Option<&Access> {
        Some(&self.config.access)
    }

    fn set_access(&mut self, access: Access) {
        self.config.access = access;
    }

    fn is_read_only(&self) -> bool {
        self.config.read_only
    }

    fn cores(&self) -> &[usize] {
        &self.config.core_map
    }
}

/// A port as it is written, but that the best state goes without saying.
fn written(address: &str, state: AccessState) -> String {
    match state {
        AccessState::Optimized => address.to_owned(),
        state => format!("{address}@{}", state.name()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::ExportPlan;
    use secrets::keyring::testing::TestKeyring;

    fn refusal(text: &str) -> String {
        ExportPlan::parse(text).unwrap_err().to_string()
    }

    #[test]
    fn a_subsystem_has_a_name_an_address_and_any_number_of_devices() {
        let plan = ExportPlan::parse("nvme-tcp:listen=[::1]:4420,nqn=nqn.2014-08.org:x,device=a+b").unwrap();
        assert_eq!(plan.config.name(), "nvme-tcp:[::1]:4420");
        assert_eq!(plan.devices, ["a", "b"]);
        assert!(plan.config.line("a+b").contains("a+b as nqn.2014-08.org:x"));
        let one = ExportPlan::parse("nbd:socket=s,device=a+b").unwrap();
        assert_eq!(one.devices, ["a+b"]);
        assert!(refusal("nvme-tcp:nqn=nqn.2014-08.org:x").contains("listen=ADDR:PORT is required"));
        assert!(refusal("nvme-tcp:listen=l:1").contains("nqn=NQN is required"));
        assert!(refusal("nvme-tcp:listen=l:1,portal=p,nqn=nqn.a").contains("want one of them"));
        let shared = ExportPlan::parse("nvme-tcp:portal=p,nqn=nqn.a").unwrap();
        assert!(shared.config.portal() == Some("p") && shared.config.own_listener().is_none());
        assert_eq!(shared.config.name(), "nvme-tcp:p:nqn.a");
        assert!(shared.config.apart().unwrap_err().contains("share its listener"));
        let two = "nvme-tcp:listen=10.0.0.1:4420+10.0.1.1:4420@non-optimized,nqn=nqn.2014-08.org:x";
        let two = ExportPlan::parse(two).unwrap();
        assert!(two.config.line("a").ends_with("listens on 10.0.0.1:4420 and 10.0.1.1:4420@non-optimized"));
        assert_eq!(two.config.name(), "nvme-tcp:10.0.0.1:4420");
        assert_eq!(two.config.fields()["listen"][1]["ana_state"], "non-optimized");
        let bad = refusal("nvme-tcp:listen=l:1@best,nqn=nqn.2014-08.org:x");
        assert!(bad.contains("\"best\" is none of optimized, non-optimized, inaccessible"), "{bad}");
        let other = ExportPlan::parse("nvme-tcp:listen=l:1,nqn=blktests-subsystem-0").unwrap();
        assert_eq!(other.config.fields()["nqn"], "blktests-subsystem-0");
        assert!(refusal("nvme-tcp:listen=l:1,nqn=").contains("an NVMe name"));
        assert!(refusal("nvme-tcp:listen=l:1,nqn=nqn.2014-08.org:x,hosts=nqn.a+y").contains("y: "));
        assert!(refusal("nvme-tcp:listen=l:1,nqn=nqn.2014-08.org:x,queues=many").contains("queues"));
        assert!(refusal("nvme-tcp:listen=l:1,nqn=nqn.a,host-clients=many").contains("host-clients"));
        let few =
            ExportPlan::parse("nvme-tcp:listen=l:1,nqn=nqn.a,address-clients=3,host-clients=2").unwrap();
        assert_eq!(few.config.fields()["address_clients"], 3);
        assert_eq!(few.config.fields()["host_clients"], 2);
        let half = ExportPlan::parse("nvme-tcp:listen=l:1,nqn=nqn.a,controller-ids=1000-1999").unwrap();
        assert_eq!(half.config.fields()["controller_ids"], serde_json::json!([1000, 1999]));
        for wrong in ["7", "0-9", "9-8", "1-65520", "a-b"] {
            let said = refusal(&format!("nvme-tcp:listen=l:1,nqn=nqn.a,controller-ids={wrong}"));
            assert!(said.contains("expected FIRST-LAST, both from 1 to 65519"), "{said}");
        }
    }

    #[test]
    fn keys_for_tls_are_read_at_once_too() {
        const KEY: &str = "NVMeTLSkey-1:01:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        let text = format!("nvme-tcp:listen=l:1,nqn=nqn.2014-08.org:x,tls-keys={}", path.display());
        assert!(refusal(&text).contains("tls-keys: ") && refusal(&text).contains("No such file"));
        secrets::write(&path, format!("nqn.a {KEY}\n")).unwrap();
        for (more, mode) in [("", "require"), (",tls=require", "require"), (",tls=allow", "allow")] {
            let plan = ExportPlan::parse(&format!("{text}{more}")).unwrap();
            assert_eq!(plan.config.fields()["tls"], mode);
            assert!(!format!("{plan:?}").contains("AAEC"));
        }
        assert!(refusal(&format!("{text},tls=off")).contains("\"off\" is none of require, allow"));
        assert!(refusal("nvme-tcp:listen=l:1,nqn=nqn.2014-08.org:x,tls=allow").contains("needs tls-keys"));
    }

    #[test]
    fn a_keyring_for_tls_must_exist_and_excludes_a_file() {
        let Some(ring) = TestKeyring::new() else { return };
        let text = "nvme-tcp:listen=127.0.0.1:1,nqn=nqn.2014-08.org:x";
        for (more, mode) in [("", "require"), (",tls=allow", "allow")] {
            let plan = ExportPlan::parse(&format!("{text},tls-keyring={}{more}", ring.name)).unwrap();
            assert_eq!(plan.config.fields()["tls"], mode);
        }
        let said = refusal(&format!("{text},tls-keyring=freestone-none"));
        assert!(said.contains("tls-keyring: keyring freestone-none: no keyring "), "{said}");
        let said = refusal(&format!("{text},tls-keyring=@u,tls-keys=/nowhere"));
        assert!(said.contains("tls-keys and tls-keyring: want one of them"), "{said}");
    }

    #[test]
    fn namespaces_have_the_uuids_that_are_given_and_one_for_each() {
        const UUIDS: &str = "00112233-4455-6677-8899-aabbccddeeff+ffeeddccbbaa99887766554433221100";
        let text = "nvme-tcp:listen=127.0.0.1:0,nqn=nqn.2014-08.org:x,device=a+b";
        let plan = ExportPlan::parse(&format!("{text},uuid={UUIDS}")).unwrap();
        assert_eq!(plan.config.fields()["uuids"][0], "00112233-4455-6677-8899-aabbccddeeff");
        assert!(refusal(&format!("{text},uuid=00112233")).contains("\"00112233\" is no UUID"));
        let said = plan.config.start(&[], &[]).err().unwrap().to_string();
        assert!(said.contains("uuid: 2 for 0 devices"), "{said}");
    }

    #[test]
    fn secrets_are_read_at_once_and_a_wrong_line_is_named() {
        const SECRET: &str = "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh+KfiaR:";
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys");
        let text = format!("nvme-tcp:listen=l:1,nqn=nqn.2014-08.org:x,auth-keys={}", path.display());
        assert!(refusal(&text).contains("/keys: No such file"));
        secrets::write(&path, format!("nqn.a {SECRET}\n")).unwrap();
        let plan = ExportPlan::parse(&format!("{text},auth-hashes=sha256+sha512,auth-groups=null")).unwrap();
        assert_eq!(plan.config.fields()["authentication"], true);
        let shown = format!("{plan:?}");
        assert!(shown.contains("[Sha256, Sha512]") && shown.contains("[Null]") && !shown.contains("AAEC"));
        assert!(
            refusal(&format!("{text},auth-hashes=sha1"))
                .contains("\"sha1\" is none of sha256, sha384, sha512")
        );
        assert!(refusal(&format!("{text},auth-groups=")).contains("\"\" is none of null, ffdhe2048"));
        secrets::write(&path, "nqn.a secret\n").unwrap();
        assert!(refusal(&text).contains("/keys, line 1: the host's secret: a secret looks like"));
        assert!(
            refusal("nvme-tcp:listen=l:1,nqn=nqn.2014-08.org:x,auth-groups=null").contains("need auth-keys")
        );
    }
}
