//! Portals of NVMe/TCP: listeners that exports share.

use super::keep_listener;
use super::ports::port;
use exports::nvme_tcp::PortalConfig;
use sandbox::Profile;

/// The portal `name` that listens at each `ADDR:PORT[@STATE]` of `listen`. `clients` limits the
/// connections of each address, if that was said.
///
/// # Errors
/// When an address has an unknown state.
pub fn parse(name: &str, listen: &[String], clients: Option<u32>) -> Result<PortalConfig, String> {
    let ports = listen.iter().map(|text| port("listen", text)).collect::<Result<_, _>>()?;
    let mut config = PortalConfig::new(name.into(), ports);
    config.clients = clients.map_or(config.clients, |clients| clients as usize);
    Ok(config)
}

/// Adds what it takes to listen.
pub fn keep(config: &PortalConfig, profile: &mut Profile) {
    config.ports.iter().for_each(|port| keep_listener(profile, &port.address));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_portal_has_addresses_states_and_a_limit() {
        let listen = ["10.0.0.1:4420", "10.0.1.1:4420@non-optimized"].map(str::to_owned);
        let config = parse("p", &listen, None).unwrap();
        let ports: Vec<String> =
            config.ports.iter().map(|port| format!("{}@{}", port.address, port.state.name())).collect();
        assert_eq!(ports, ["10.0.0.1:4420@optimized", "10.0.1.1:4420@non-optimized"]);
        assert_eq!((config.clients, parse("p", &listen, Some(7)).unwrap().clients), (4096, 7));
        let fault = parse("p", &["l:1@best".to_owned()], None).unwrap_err();
        assert!(fault.starts_with("listen: \"best\" is none of optimized"), "{fault}");
    }
}
