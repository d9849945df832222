//! `--export nvme-tcp:…`.

use super::{CORES, ExportConfig, keep_listener, object};
use block::Device;
use exports::nvme_tcp::{Address, Config, NamespaceConfig, Nqn, NvmeTcp};
use exports::{Error, Export};
use graph::kinds::READ_ONLY;
use graph::spec::{Kind, Spec, SpecError, Switch, key};
use reactor::CoreRef;
use sandbox::Profile;
use serde_json::{Map, Value, json};
use std::sync::Arc;

pub(super) static KIND: Kind = Kind {
    name: "nvme-tcp",
    about: "an NVMe subsystem, over TCP",
    keys: &[
        key("listen", "ADDR:PORT", "the TCP port, such as 0.0.0.0:4420; systemd or systemd:NAME as for nbd"),
        key("nqn", "NQN", "what hosts call it"),
        key("device", "ID+…", "the devices to export, as namespaces 1, 2 and so on [the first]"),
        key("hosts", "NQN+…", "who may connect [anybody]"),
        key("serial", "TEXT", "its serial number [made of the NQN]"),
        READ_ONLY,
        key("queues", "N", "I/O queues of a host, 1 to 1024 [64]"),
        key("clients", "N", "connections at a time, a queue each, 1 to 4096 [256]"),
        CORES,
    ],
};

/// An export over NVMe/TCP.
#[derive(Debug)]
struct NvmeTcpConfig(Config);

/// The export that `spec` describes.
pub(super) fn parse(spec: &Spec) -> Result<Box<dyn ExportConfig>, SpecError> {
    let nqn = |text: &str| Nqn::new(text).map_err(|error| spec.refuse(format!("{text}: {error}")));
    let required =
        |name: &str, value: Option<String>| value.ok_or_else(|| spec.refuse(format!("needs {name}")));
    let address = Address::of_listen(&required("listen=ADDR:PORT", spec.get("listen")?)?);
    let mut config = Config::new(address, nqn(&required("nqn=NQN", spec.get("nqn")?)?)?);
    let hosts: Option<String> = spec.get("hosts")?;
    config.hosts = hosts.iter().flat_map(|list| list.split('+')).map(nqn).collect::<Result<_, _>>()?;
    config.serial = spec.get("serial")?;
    config.read_only = spec.get_or("readonly", Switch(false))?.0;
    config.queues = spec.get_or("queues", config.queues)?;
    config.clients = spec.get_or("clients", config.clients as u32)? as usize;
    Ok(Box::new(NvmeTcpConfig(config)))
}

impl ExportConfig for NvmeTcpConfig {
    fn name(&self) -> String {
        format!("nvme-tcp:{}", self.0.address)
    }

    fn complete(&mut self, _device_id: &str, cores: Vec<usize>) {
        self.0.core_map = cores;
    }

    fn takes_many(&self) -> bool {
        true
    }

    fn start(&self, devices: &[Arc<dyn Device>], cores: &[CoreRef]) -> Result<Box<dyn Export>, Error> {
        let namespace = |device: &Arc<dyn Device>| NamespaceConfig { device: device.clone(), uuid: None };
        let namespaces: Vec<NamespaceConfig> = devices.iter().map(namespace).collect();
        Ok(Box::new(NvmeTcp::start(&namespaces, cores, self.0.clone())?))
    }

    fn keep(&self, profile: &mut Profile) {
        keep_listener(profile, &self.0.address);
    }

    fn line(&self, device_id: &str) -> String {
        let Config { address, nqn, .. } = &self.0;
        format!("nvme-tcp: {device_id} as {}, listens on {address}", nqn.as_str())
    }

    fn fields(&self) -> Map<String, Value> {
        let Config { address, nqn, hosts, queues, clients, .. } = &self.0;
        object(json!({
            "kind": KIND.name,
            "listen": address.to_string(),
            "nqn": nqn.as_str(),
            "hosts": hosts.iter().map(Nqn::as_str).collect::<Vec<_>>(),
            "queues": queues,
            "clients": clients,
        }))
    }

    fn is_read_only(&self) -> bool {
        self.0.read_only
    }

    fn cores(&self) -> &[usize] {
        &self.0.core_map
    }
}

#[cfg(test)]
mod tests {
    use super::super::ExportPlan;

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
        assert!(refusal("nvme-tcp:nqn=nqn.2014-08.org:x").contains("needs listen=ADDR:PORT"));
        assert!(refusal("nvme-tcp:listen=l:1").contains("needs nqn=NQN"));
        assert!(refusal("nvme-tcp:listen=l:1,nqn=x").contains("x: "));
        assert!(refusal("nvme-tcp:listen=l:1,nqn=nqn.2014-08.org:x,hosts=nqn.a+y").contains("y: "));
        assert!(refusal("nvme-tcp:listen=l:1,nqn=nqn.2014-08.org:x,queues=many").contains("queues"));
    }
}
