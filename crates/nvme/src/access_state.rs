//! Asymmetric namespace access (ANA): the states of a path to namespaces.
//!
//! Source: Base Specification 2.0, 8.1; for the numbers 5.16.1.13.

/// The access state of namespaces over a port.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AccessState {
    /// The best path.
    #[default]
    Optimized,
    /// Usable; hosts prefer an optimized path.
    NonOptimized,
    /// Temporarily unusable.
    Inaccessible,
    /// Permanently unusable.
    PersistentLoss,
    /// In transition to another state.
    Change,
}

impl AccessState {
    /// Every state, with its number in the log page and its name.
    pub const ALL: [(AccessState, u8, &str); 5] = [
        (AccessState::Optimized, 0x01, "optimized"),
        (AccessState::NonOptimized, 0x02, "non-optimized"),
        (AccessState::Inaccessible, 0x03, "inaccessible"),
        (AccessState::PersistentLoss, 0x04, "persistent-loss"),
        (AccessState::Change, 0x0f, "change"),
    ];

    /// The name on the command line, as nvme-cli and Linux spell it.
    pub fn name(self) -> &'static str {
        AccessState::ALL[self as usize].2
    }

    /// The state with this name.
    pub fn parse(name: &str) -> Option<AccessState> {
        AccessState::ALL.iter().find(|(_, _, known)| *known == name).map(|(state, ..)| *state)
    }

    /// Every name, for messages.
    pub fn names() -> [&'static str; 5] {
        AccessState::ALL.map(|(_, _, name)| name)
    }

    /// The number in the log page.
    pub fn number(self) -> u8 {
        AccessState::ALL[self as usize].1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_state_has_a_name_and_is_at_its_place_in_the_table() {
        for (place, name) in AccessState::names().into_iter().enumerate() {
            let state = AccessState::parse(name).unwrap();
            assert_eq!((state as usize, state.name()), (place, name));
            assert_eq!(state.number(), AccessState::ALL[place].1);
        }
        assert_eq!(AccessState::parse("best"), None);
    }
}
