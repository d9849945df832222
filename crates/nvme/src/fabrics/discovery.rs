//! The discovery log page (Base 5.16.1.23): a header, and an entry for each path to a subsystem.

use super::{ANY_CONTROLLER, Nqn, NqnError};
use crate::wire::{put, put_text, text_at, u16_at, u64_at};

/// Bytes of the header, and of each entry.
pub const RECORD_BYTES: usize = 1024;

/// The header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiscoveryHeader {
    /// Changes with the log.
    pub generation: u64,
    /// Entries that follow.
    pub records: u64,
    /// Format of the log; 0 is the only one.
    pub record_format: u16,
}

impl DiscoveryHeader {
    /// Reads the header.
    pub fn parse(bytes: &[u8; RECORD_BYTES]) -> DiscoveryHeader {
        DiscoveryHeader {
            generation: u64_at(bytes, 0),
            records: u64_at(bytes, 8),
            record_format: u16_at(bytes, 16),
        }
    }

    /// Writes the header.
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        put(&mut bytes, 0, self.generation.to_le_bytes());
        put(&mut bytes, 8, self.records.to_le_bytes());
        put(&mut bytes, 16, self.record_format.to_le_bytes());
        bytes
    }
}

/// TRTYPE of TCP.
pub const TRANSPORT_TCP: u8 = 3;
/// ADRFAM of IPv4, and of IPv6.
pub const FAMILY_IPV4: u8 = 1;
/// See [`FAMILY_IPV4`].
pub const FAMILY_IPV6: u8 = 2;
/// SUBTYPE of another discovery service.
pub const SUBTYPE_REFERRAL: u8 = 1;
/// SUBTYPE of a subsystem with namespaces.
pub const SUBTYPE_NVM: u8 = 2;
/// SUBTYPE of the discovery subsystem itself.
pub const SUBTYPE_THIS_DISCOVERY: u8 = 3;
/// TREQ: whether a secure channel is required is not specified. libnvme before 1.5 takes every
/// other value as a wish for TLS.
pub const TREQ_NOT_SPECIFIED: u8 = 0;
/// TREQ: a secure channel is required.
pub const TREQ_REQUIRED: u8 = 1;
/// SECTYPE, of TCP: TLS 1.3.
pub const SECURITY_TLS: u8 = 2;
/// TREQ: a secure channel is not required.
pub const TREQ_NOT_REQUIRED: u8 = 2;

/// A path to a subsystem.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiscoveryEntry {
    /// TRTYPE; [`TRANSPORT_TCP`].
    pub transport: u8,
    /// ADRFAM; [`FAMILY_IPV4`], [`FAMILY_IPV6`].
    pub family: u8,
    /// SUBTYPE; [`SUBTYPE_NVM`].
    pub subtype: u8,
    /// TREQ.
    pub requirements: u8,
    /// The port of the subsystem.
    pub port_id: u16,
    /// The controller, or [`ANY_CONTROLLER`].
    pub controller_id: u16,
    /// Limit of entries of an admin queue.
    pub admin_entries: u16,
    /// TCP port of the subsystem, in decimal digits.
    pub service: String,
    /// IP address of the subsystem.
    pub address: String,
    /// The subsystem.
    pub subsystem: Nqn,
    /// The first byte of TSAS: over TCP 0 for no security, 1 and 2 for TLS.
    pub security: u8,
}

impl DiscoveryEntry {
    /// A subsystem with namespaces at an IP address and a TCP port, without security.
    pub fn tcp(address: std::net::SocketAddr, subsystem: Nqn) -> DiscoveryEntry {
        DiscoveryEntry::at(TRANSPORT_TCP, address, subsystem)
    }

    /// The same for a transport with this TRTYPE.
    pub fn at(transport: u8, address: std::net::SocketAddr, subsystem: Nqn) -> DiscoveryEntry {
        DiscoveryEntry {
            transport,
            family: if address.is_ipv4() { FAMILY_IPV4 } else { FAMILY_IPV6 },
            subtype: if subsystem.is_discovery() { SUBTYPE_THIS_DISCOVERY } else { SUBTYPE_NVM },
            requirements: TREQ_NOT_SPECIFIED,
            port_id: 1,
            controller_id: ANY_CONTROLLER,
            admin_entries: super::MIN_ADMIN_ENTRIES,
            service: address.port().to_string(),
            address: address.ip().to_string(),
            subsystem,
            security: 0,
        }
    }

    /// Reads an entry.
    ///
    /// # Errors
    /// If the subsystem's name is invalid.
    pub fn parse(bytes: &[u8; RECORD_BYTES]) -> Result<DiscoveryEntry, NqnError> {
        Ok(DiscoveryEntry {
            transport: bytes[0],
            family: bytes[1],
            subtype: bytes[2],
            requirements: bytes[3],
            port_id: u16_at(bytes, 4),
            controller_id: u16_at(bytes, 6),
            admin_entries: u16_at(bytes, 8),
            service: text_at(bytes, 32, 32),
            address: text_at(bytes, 512, 256),
            subsystem: Nqn::parse_any_field(&bytes[256..512])?,
            security: bytes[768],
        })
    }

    /// Encodes the entry. Address and port are ASCII, padded with spaces.
    pub fn encode(&self) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        bytes[..4].copy_from_slice(&[self.transport, self.family, self.subtype, self.requirements]);
        put(&mut bytes, 4, self.port_id.to_le_bytes());
        put(&mut bytes, 6, self.controller_id.to_le_bytes());
        put(&mut bytes, 8, self.admin_entries.to_le_bytes());
        put_text(&mut bytes, 32, 32, &self.service, b' ');
        put_text(&mut bytes, 512, 256, &self.address, b' ');
        self.subsystem.put(&mut bytes, 256, 256);
        bytes[768] = self.security;
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::super::nqn::MAX_NQN;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_entry_has_the_layout_of_the_specification() {
        let name = Nqn::new("nqn.2014-08.org.example:disk").unwrap();
        let entry = DiscoveryEntry::tcp("[fe80::1]:4420".parse().unwrap(), name);
        let bytes = entry.encode();
        assert_eq!(bytes[..10], [3, 2, 2, 0, 1, 0, 0xff, 0xff, 32, 0]);
        assert_eq!((&bytes[32..37], bytes[63]), (&b"4420 "[..], b' '));
        assert_eq!((&bytes[256..260], bytes[511]), (&b"nqn."[..], 0));
        assert_eq!((&bytes[512..520], bytes[767]), (&b"fe80::1 "[..], b' '));
        assert_eq!(bytes[768..], [0; 256]);
        assert_eq!(DiscoveryEntry::parse(&bytes), Ok(entry));
        let header = DiscoveryHeader { generation: 7, records: 1, record_format: 0 };
        assert_eq!(header.encode()[..18], [7, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(DiscoveryHeader::parse(&header.encode()), header);
        let itself = DiscoveryEntry::tcp("127.0.0.1:8009".parse().unwrap(), Nqn::discovery());
        assert_eq!((itself.subtype, itself.family), (3, 1));
    }

    proptest! {
        #[test]
        fn any_entry_is_read_or_refused(seed in proptest::collection::vec(any::<u8>(), 1024), named in any::<bool>()) {
            let mut bytes: [u8; 1024] = seed.try_into().unwrap();
            if named {
                bytes[256..262].copy_from_slice(b"nqn.a\0");
            }
            let name = bytes[256..512].split(|byte| *byte == 0).next().filter(|name| name.len() < 256);
            let text = name.filter(|name| (1..=MAX_NQN).contains(&name.len())).map(std::str::from_utf8);
            let is_name = matches!(text, Some(Ok(text)) if !text.contains(char::is_control));
            prop_assert!(is_name || !named);
            prop_assert_eq!(DiscoveryEntry::parse(&bytes).is_ok(), is_name);
        }
    }
}
