//! Portals: listeners that exports of one kind share.

use super::keep_listener;
use super::nbd::{ADDRESS_CLIENTS, TLS, TLS_CERTIFICATES, TLS_PSK, TLS_VERIFY_PEER, security};
use super::open_portal::PortalPlan;
use super::ports::port;
use api::{DEFAULT_PORTAL_KIND, NewPortal};
use exports::Error;
use exports::stream::Address;
use sandbox::{Access, Profile};
use spec::{Kind, Role, Spec, SpecError, field, key};
use std::path::PathBuf;

/// Every kind of portal, with its options.
pub const KINDS: &[&Kind] = &[&NVME_TCP, &NBD];

static NVME_TCP: Kind =
    Kind { name: DEFAULT_PORTAL_KIND, about: "NVMe subsystems behind one listener", keys: &[] };

static NBD: Kind = Kind {
    name: "nbd",
    about: "NBD exports behind one listener",
    keys: &[
        key("default-export", "NAME", "the export of clients that name none [they are refused]"),
        TLS,
        TLS_CERTIFICATES,
        TLS_PSK,
        TLS_VERIFY_PEER,
        ADDRESS_CLIENTS,
    ],
};

/// The kind of a portal.
pub fn kind_of(new: &NewPortal) -> &str {
    new.kind.as_deref().unwrap_or(DEFAULT_PORTAL_KIND)
}

/// The options of a portal.
fn spec_of(new: &NewPortal) -> Result<Spec, SpecError> {
    let options: Vec<String> = new.options.iter().map(|(key, value)| field(key, value)).collect();
    let separator = if options.is_empty() { "" } else { ":" };
    Spec::parse(Role::Portal, KINDS, &format!("{}{separator}{}", kind_of(new), options.join(",")))
}

/// The paths of files of keys and certificates.
fn key_paths(new: &NewPortal) -> Vec<PathBuf> {
    spec_of(new).map_or(Vec::new(), |spec| spec.read_paths().map(PathBuf::from).collect())
}

/// Adds the files that are read when the portal is parsed.
pub fn keep_read(new: &NewPortal, profile: &mut Profile) {
    key_paths(new).into_iter().for_each(|path| profile.allow(path, Access::Read));
}

/// As [`keep_read`], for files that are read again: others may take their place.
pub fn keep_settings(new: &NewPortal, profile: &mut Profile) {
    key_paths(new).iter().for_each(|path| profile.allow_settings(path));
}

/// Whether files of keys or certificates are read when the portal is parsed.
pub fn has_keys(new: &NewPortal) -> bool {
    !key_paths(new).is_empty()
}

impl PortalPlan {
    /// The portal that `new` describes. Reads its keys and certificates.
    ///
    /// # Errors
    /// With the option that is invalid.
    pub fn parse(new: &NewPortal) -> Result<PortalPlan, String> {
        let NewPortal { name, listen, clients, .. } = new;
        let spec = spec_of(new).map_err(|error| error.to_string())?;
        let plan = if spec.kind() == NBD.name {
            let addresses = listen.iter().map(|text| Address::of_listen(text)).collect();
            let mut config = exports_nbd::PortalConfig::new(name.clone(), addresses);
            config.clients = clients.map_or(config.clients, |clients| clients as usize);
            of_nbd(&spec, &mut config).map_err(|error| error.to_string())?;
            PortalPlan::Nbd(config)
        } else {
            let ports = listen.iter().map(|text| port("listen", text)).collect::<Result<_, _>>()?;
            let mut config = exports_nvme_tcp::PortalConfig::new(name.clone(), ports);
            config.clients = clients.map_or(config.clients, |clients| clients as usize);
            PortalPlan::NvmeTcp(config)
        };
        Ok(plan)
    }

    /// Checks its numbers.
    ///
    /// # Errors
    /// Names the portal, the number and its range.
    pub fn check(&self) -> Result<(), Error> {
        match self {
            PortalPlan::NvmeTcp(config) => config.check(),
            PortalPlan::Nbd(config) => config.check(),
        }
    }

    /// Most connections of each address.
    pub fn clients(&self) -> usize {
        match self {
            PortalPlan::NvmeTcp(config) => config.clients,
            PortalPlan::Nbd(config) => config.clients,
        }
    }

    /// Adds what it takes to listen.
    pub fn keep(&self, profile: &mut Profile) {
        match self {
            PortalPlan::NvmeTcp(config) => {
                config.ports.iter().for_each(|port| keep_listener(profile, &port.address));
            }
            PortalPlan::Nbd(config) => {
                config.addresses.iter().for_each(|address| keep_listener(profile, address));
            }
        }
    }

    /// TLS with keys or certificates of files, if it has it.
    pub fn security(&self) -> Option<&exports_nbd::Security> {
        match self {
            PortalPlan::NvmeTcp(_) => None,
            PortalPlan::Nbd(config) => config.tls.as_ref(),
        }
    }
}

fn of_nbd(spec: &Spec, config: &mut exports_nbd::PortalConfig) -> Result<(), SpecError> {
    config.default = spec.get("default-export")?;
    config.tls = security(spec)?;
    config.address_clients = spec.get::<u32>(ADDRESS_CLIENTS.name)?.map(|count| count as usize);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::tls_mode;
    use super::*;

    fn new(kind: Option<&str>, listen: &[&str], options: &[(&str, &str)]) -> NewPortal {
        NewPortal {
            name: "p".into(),
            kind: kind.map(str::to_owned),
            listen: listen.iter().map(|text| (*text).to_owned()).collect(),
            clients: None,
            options: options.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
        }
    }

    #[test]
    fn a_portal_of_subsystems_has_addresses_states_and_a_limit() {
        let listen = ["10.0.0.1:4420", "10.0.1.1:4420@non-optimized"];
        let Ok(PortalPlan::NvmeTcp(config)) = PortalPlan::parse(&new(None, &listen, &[])) else { panic!() };
        let ports: Vec<String> =
            config.ports.iter().map(|port| format!("{}@{}", port.address, port.state.name())).collect();
        assert_eq!(ports, ["10.0.0.1:4420@optimized", "10.0.1.1:4420@non-optimized"]);
        let few = NewPortal { clients: Some(7), ..new(None, &listen, &[]) };
        assert_eq!((config.clients, PortalPlan::parse(&few).unwrap().clients()), (4096, 7));
        let fault = PortalPlan::parse(&new(None, &["l:1@best"], &[])).unwrap_err();
        assert!(fault.starts_with("listen: \"best\" is none of optimized"), "{fault}");
        let fault = PortalPlan::parse(&new(None, &["l:1"], &[("tls", "off")])).unwrap_err();
        assert!(fault.contains("tls"), "{fault}");
    }

    #[test]
    fn a_portal_of_nbd_exports_has_tls_and_may_have_a_default_export() {
        let folder = tempfile::tempdir().unwrap();
        tls::authority::write_all(folder.path());
        let path = folder.path().to_str().unwrap();
        let parse = |options: &[(&str, &str)]| match PortalPlan::parse(&new(Some("nbd"), &["l:1"], options)) {
            Ok(PortalPlan::Nbd(config)) => {
                Ok((config.default, tls_mode(config.tls.map(|tls| tls.is_required))))
            }
            Ok(PortalPlan::NvmeTcp(_)) => panic!(),
            Err(fault) => Err(fault),
        };
        let check = |listen: &[&str], options: &[(&str, &str)]| {
            let plan = PortalPlan::parse(&new(Some("nbd"), listen, options)).unwrap();
            plan.check().unwrap_err().to_string()
        };
        assert_eq!(parse(&[]), Ok((None, "off")));
        let options = [("tls-certificates", path), ("default-export", "vm1")];
        assert_eq!(parse(&options), Ok((Some("vm1".into()), "require")));
        let with_keys = new(Some("nbd"), &["l:1"], &options);
        assert!(has_keys(&with_keys) && !has_keys(&new(Some("nbd"), &["l:1"], &[])));
        for (option, fault) in [
            (("tls", "allow"), "tls needs tls-certificates=DIR or tls-psk=FILE"),
            (("listen", "l:1"), "listen"),
        ] {
            let said = parse(&[option]).unwrap_err();
            assert!(said.contains(fault), "{said}");
        }
        assert!(check(&["l:1"], &[("default-export", "")]).contains("portal p: default export name of 0"));
        assert!(check(&["l:1"], &[("address-clients", "0")]).contains("portal p: 0 clients of an address"));
        assert!(check(&[], &[]).contains("portal p: 0 addresses: want 1 to 16"));
        let said = PortalPlan::parse(&new(Some("iscsi"), &["l:1"], &[])).unwrap_err();
        assert!(said.contains("iscsi"), "{said}");
    }
}
