//! Ports of NVMe/TCP exports and portals as text: `ADDR:PORT[@STATE]`, joined by plus signs.

use exports_nvme_tcp::{AccessState, Address, PortConfig};

/// A port. `key` is the option with the text, for messages.
///
/// # Errors
/// When the access state is unknown.
pub fn port(key: &str, text: &str) -> Result<PortConfig, String> {
    let (address, state) = match text.rsplit_once('@') {
        None => (text, AccessState::default()),
        Some((address, name)) => {
            let unknown = || format!("{key}: {name:?} is none of {}", AccessState::names().join(", "));
            (address, AccessState::parse(name).ok_or_else(unknown)?)
        }
    };
    Ok(PortConfig { address: Address::of_listen(address), state })
}

/// Ports that are joined by plus signs.
///
/// # Errors
/// As [`port`].
pub fn ports(key: &str, list: &str) -> Result<Vec<PortConfig>, String> {
    list.split('+').map(|text| port(key, text)).collect()
}

/// The access states in the option `ana`: each port has one.
///
/// # Errors
/// As [`port`]; when a port has no state, or is named twice.
pub fn access_states(list: &str) -> Result<Vec<PortConfig>, String> {
    if let Some(text) = list.split('+').find(|text| !text.contains('@')) {
        return Err(format!("ana: {text:?} has no state: want ADDR:PORT@STATE"));
    }
    let states = ports("ana", list)?;
    let is_twice = |place: usize| states[..place].iter().any(|port| port.address == states[place].address);
    match (0..states.len()).find(|place| is_twice(*place)) {
        Some(place) => Err(format!("ana: {} is named twice", states[place].address)),
        None => Ok(states),
    }
}

/// The text of [`access_states`].
pub fn written(states: &[PortConfig]) -> String {
    let texts: Vec<String> =
        states.iter().map(|port| format!("{}@{}", port.address, port.state.name())).collect();
    texts.join("+")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_states_are_read_as_they_are_written() {
        let list = "10.0.0.1:4420@optimized+[fd00::1]:4420@inaccessible";
        assert_eq!(written(&access_states(list).unwrap()), list);
        for (list, fault) in [
            ("l:1", "ana: \"l:1\" has no state: want ADDR:PORT@STATE"),
            ("l:1@optimized+l:1@change", "ana: l:1 is named twice"),
        ] {
            assert_eq!(access_states(list), Err(fault.to_owned()));
        }
        let fault = access_states("l:1@best").unwrap_err();
        assert!(fault.starts_with("ana: \"best\" is none of optimized"), "{fault}");
    }
}
