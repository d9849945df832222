//! Discovery services: they list what there is to connect to.

use base::Uuid;
use drivers_nvme_tcp::Nqn;
use drivers_nvme_tcp::kind::{Name, TLS_KEY, TLS_KEYRING, key_files, tls_keyring};
use drivers_rbd::kind as image;
use spec::{Entry, Kind, Role, Spec, SpecError, Value, key};

/// Every kind of discovery service.
const TABLE: &[Entry<Service>; 2] =
    &[Entry { kind: &NVME_TCP, parse: nvme_tcp }, Entry { kind: &RBD, parse: rbd }];

/// The names and keys of the kinds.
pub const KINDS: &[&Kind] = &spec::kinds(TABLE);

static NVME_TCP: Kind = Kind {
    name: "nvme-tcp",
    about: "the discovery service of an NVMe/TCP target, or of a network",
    keys: &[
        key("address", "HOST[:PORT]", "address of the service; IPv6 as [ADDR]:PORT [port 8009]"),
        key("hostnqn", "NQN", "the host's name [/etc/nvme/hostnqn, or one made of hostid]"),
        key("hostid", "UUID", "the host's identifier [/etc/nvme/hostid, or a new one]"),
        key("dhchap-key", "FILE", "file with the host's secret, for services that require authentication")
            .read(),
        key("dhchap-ctrl-key", "FILE", "file with the service's secret, to authenticate the service as well")
            .read(),
        TLS_KEY,
        TLS_KEYRING,
        key("hdgst", "on|off", "header digests [off]"),
        key("ddgst", "on|off", "data digests [off]"),
        key("timeout-ms", "N", "timeout [10000]"),
    ],
};

static RBD: Kind = Kind {
    name: "rbd",
    about: "the pools and images of a Ceph cluster",
    keys: &[image::CONF, image::USER, image::TIMEOUT],
};

/// A service, and how to reach it.
#[derive(Debug)]
pub enum Service {
    /// The discovery service of NVMe over Fabrics.
    NvmeTcp(Box<drivers_nvme_tcp::Options>),
    /// A Ceph cluster.
    Rbd(drivers_rbd::ClusterOptions),
}

/// The service that `text` describes.
///
/// # Errors
/// When the text is invalid.
pub fn parse(text: &str) -> Result<Service, SpecError> {
    Ok(spec::parse(Role::Discovery, TABLE, text)?.1)
}

fn rbd(spec: &Spec) -> Result<Service, SpecError> {
    let defaults = drivers_rbd::ClusterOptions::default();
    let options = drivers_rbd::ClusterOptions {
        conf: spec.get("conf")?,
        user: spec.get_or("user", defaults.user)?,
        timeout_ms: spec.get_or("timeout-ms", defaults.timeout_ms)?,
    };
    options.check().map_err(|why| spec.refuse(why))?;
    Ok(Service::Rbd(options))
}

fn nvme_tcp(spec: &Spec) -> Result<Service, SpecError> {
    let Address(address) = spec.require("address")?;
    let defaults = drivers_nvme_tcp::Options::new(address, Nqn::discovery());
    let mut options = drivers_nvme_tcp::Options {
        host_nqn: spec.get("hostnqn")?.map(|Name(nqn)| nqn),
        host_id: spec.get("hostid")?.map(|Uuid(id)| id),
        key_files: key_files(spec)?,
        tls_keyring: tls_keyring(spec)?,
        header_digest: spec.is_on("hdgst")?,
        data_digest: spec.is_on("ddgst")?,
        timeout_ms: spec.get_or("timeout-ms", defaults.timeout_ms)?,
        ..defaults
    };
    options.read_keys().map_err(|why| spec.refuse(why))?;
    Ok(Service::NvmeTcp(Box::new(options)))
}

struct Address(drivers_nvme_tcp::Address);

impl Value for Address {
    fn expected() -> String {
        "HOST, HOST:PORT or [IPV6]:PORT".into()
    }

    fn parse(text: &str) -> Option<Self> {
        drivers_nvme_tcp::parse_address_at(text, drivers_nvme_tcp::DISCOVERY_PORT).ok().map(Address)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nvme_tcp(text: &str) -> drivers_nvme_tcp::Options {
        match parse(text).unwrap() {
            Service::NvmeTcp(options) => *options,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_cluster_has_a_configuration_and_a_user() {
        let Service::Rbd(options) = parse("rbd:conf=/c,user=u,timeout-ms=1").unwrap() else { panic!() };
        assert_eq!((options.conf, &*options.user, options.timeout_ms), (Some("/c".into()), "u", 1));
        let Service::Rbd(options) = parse("rbd:").unwrap() else { panic!() };
        assert_eq!(options, drivers_rbd::ClusterOptions::default());
        assert!(parse("rbd:user=a/b").unwrap_err().to_string().contains("user=a/b"));
        assert!(parse("rbd:pool=a").unwrap_err().to_string().contains("pool"));
    }

    #[test]
    fn a_service_has_an_address_and_the_port_of_discovery() {
        let options = nvme_tcp("nvme-tcp:address=10.0.0.1,hostnqn=nqn.a,ddgst");
        assert_eq!(options.address.to_string(), "10.0.0.1:8009");
        assert!(options.nqn.is_discovery() && options.data_digest && !options.header_digest);
        assert_eq!(options.host_nqn.unwrap().as_str(), "nqn.a");
        assert_eq!(nvme_tcp("nvme-tcp:address=[::1]:4420").address.to_string(), "[::1]:4420");
        for (text, why) in [
            ("nvme-tcp:hostnqn=nqn.a", "address"),
            ("nvme-tcp:address=:1", "HOST"),
            ("nvme-tcp:address=a,nqn=nqn.b", "nqn"),
            ("nbd:address=a", "nbd"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(why), "{error}");
        }
    }
}
