//! Discovery services: who says what there is to connect to.

use super::device::{Name, Uuid, secret};
use crate::spec::{Kind, Role, Spec, SpecError, Switch, Value, key};
use drivers::nvme_tcp::{self, Nqn, Options};

/// Every kind of discovery service.
pub const KINDS: &[&Kind] = &[&NVME_TCP];

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
        key("hdgst", "on|off", "header digests [off]"),
        key("ddgst", "on|off", "data digests [off]"),
        key("timeout-ms", "N", "timeout [10000]"),
    ],
};

/// The service that `text` describes.
///
/// # Errors
/// When the text is invalid.
pub fn parse(text: &str) -> Result<Options, SpecError> {
    let spec = Spec::parse(Role::Discovery, KINDS, text)?;
    let Service(address) = spec.require("address")?;
    let defaults = Options::new(address, Nqn::discovery());
    Ok(Options {
        host_nqn: spec.get("hostnqn")?.map(|Name(nqn)| nqn),
        host_id: spec.get("hostid")?.map(|Uuid(id)| id),
        key: secret(&spec, "dhchap-key")?,
        controller_key: secret(&spec, "dhchap-ctrl-key")?,
        header_digest: spec.get_or("hdgst", Switch(false))?.0,
        data_digest: spec.get_or("ddgst", Switch(false))?.0,
        timeout_ms: spec.get_or("timeout-ms", defaults.timeout_ms)?,
        ..defaults
    })
}

struct Service(nvme_tcp::Address);

impl Value for Service {
    fn expected() -> String {
        "HOST, HOST:PORT or [IPV6]:PORT".into()
    }

    fn parse(text: &str) -> Option<Self> {
        nvme_tcp::parse_address_at(text, nvme_tcp::DISCOVERY_PORT).ok().map(Service)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_service_has_an_address_and_the_port_of_discovery() {
        let options = parse("nvme-tcp:address=10.0.0.1,hostnqn=nqn.a,ddgst").unwrap();
        assert_eq!(options.address.to_string(), "10.0.0.1:8009");
        assert!(options.nqn.is_discovery() && options.data_digest && !options.header_digest);
        assert_eq!(options.host_nqn.unwrap().as_str(), "nqn.a");
        assert_eq!(parse("nvme-tcp:address=[::1]:4420").unwrap().address.to_string(), "[::1]:4420");
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
