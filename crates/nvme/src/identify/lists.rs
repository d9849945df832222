//! Lists that Identify returns: the identifiers of a namespace (Base 5.17.2.3), and the namespaces
//! of a controller (Base 5.17.2.2). The log page of changed namespaces has the latter's form.

use super::CommandSet;
use crate::wire::{put, u32_at};
use crate::{IDENTIFY_BYTES, IdentifyData};

/// Limit of namespaces of one list.
pub const MAX_LISTED: usize = IDENTIFY_BYTES / 4;
/// Namespace identifiers from here on are special; [`ALL_NAMESPACES`] is one.
pub const MAX_NSID: u32 = 0xffff_fffe;
/// Stands for all namespaces.
pub const ALL_NAMESPACES: u32 = 0xffff_ffff;

/// An identifier of a namespace, the same on all paths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamespaceId {
    /// EUI64.
    Eui64([u8; 8]),
    /// NGUID.
    Nguid([u8; 16]),
    /// A UUID.
    Uuid([u8; 16]),
    /// The command set, which is not an identifier.
    CommandSet(CommandSet),
}

/// Encodes the identification descriptor list.
///
/// # Panics
/// If `ids` do not fit. One of each kind does.
pub fn encode_descriptors(ids: &[NamespaceId]) -> IdentifyData {
    let mut data = [0; IDENTIFY_BYTES];
    let mut at = 0;
    for id in ids {
        let csi;
        let (kind, bytes): (u8, &[u8]) = match id {
            NamespaceId::Eui64(bytes) => (1, bytes),
            NamespaceId::Nguid(bytes) => (2, bytes),
            NamespaceId::Uuid(bytes) => (3, bytes),
            NamespaceId::CommandSet(set) => {
                csi = [set.csi()];
                (4, &csi)
            }
        };
        data[at..at + 2].copy_from_slice(&[kind, bytes.len() as u8]);
        data[at + 4..at + 4 + bytes.len()].copy_from_slice(bytes);
        at += 4 + bytes.len();
    }
    data
}

/// Parses the identification descriptor list. Ignores unknown and truncated descriptors.
pub fn parse_descriptors(data: &IdentifyData) -> impl Iterator<Item = NamespaceId> {
    let mut rest = data.as_slice();
    std::iter::from_fn(move || {
        let [kind, len, _, _, tail @ ..] = rest else { return None };
        let id = tail.get(..usize::from(*len)).filter(|id| !id.is_empty())?;
        rest = &tail[id.len()..];
        Some(match *kind {
            1 => id.try_into().ok().map(NamespaceId::Eui64),
            2 => id.try_into().ok().map(NamespaceId::Nguid),
            3 => id.try_into().ok().map(NamespaceId::Uuid),
            4 => CommandSet::from_csi(id[0]).ok().map(NamespaceId::CommandSet),
            _ => None,
        })
    })
    .flatten()
}

/// Encodes the list of `namespaces` (in ascending order) above `above`, as many as fit.
pub fn encode_namespaces(namespaces: impl IntoIterator<Item = u32>, above: u32) -> IdentifyData {
    let mut data = [0; IDENTIFY_BYTES];
    for (i, nsid) in namespaces.into_iter().filter(|nsid| *nsid > above).take(MAX_LISTED).enumerate() {
        put(&mut data, 4 * i, nsid.to_le_bytes());
    }
    data
}

/// Parses a list of namespaces, which ends before the first 0.
pub fn parse_namespaces(data: &IdentifyData) -> impl Iterator<Item = u32> {
    (0..MAX_LISTED).map(|i| u32_at(data, 4 * i)).take_while(|nsid| *nsid != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn identifiers_are_read_as_they_were_written() {
        let ids = [
            NamespaceId::Uuid([3; 16]),
            NamespaceId::Eui64([1; 8]),
            NamespaceId::Nguid([2; 16]),
            NamespaceId::CommandSet(CommandSet::Zoned),
        ];
        let data = encode_descriptors(&ids);
        assert_eq!(data[..5], [3, 16, 0, 0, 3]);
        assert_eq!(data[20..25], [1, 8, 0, 0, 1]);
        assert_eq!(parse_descriptors(&data).collect::<Vec<_>>(), ids);
        assert_eq!(CommandSet::of_descriptors(&data), Ok(CommandSet::Zoned));
        assert_eq!(parse_descriptors(&[0; 4096]).count(), 0);
    }

    #[test]
    fn a_list_of_namespaces_continues_above_the_given_one() {
        let data = encode_namespaces([1, 2, 5, 9], 2);
        assert_eq!(data[..12], [5, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(parse_namespaces(&data).collect::<Vec<_>>(), [5, 9]);
        let full = encode_namespaces(1..=3000, 0);
        assert_eq!(parse_namespaces(&full).count(), MAX_LISTED);
    }

    proptest! {
        #[test]
        fn any_list_ends(seed in proptest::collection::vec(any::<u8>(), 4096)) {
            let data: IdentifyData = seed.try_into().unwrap();
            prop_assert!(parse_descriptors(&data).count() <= 4096 / 5);
            prop_assert!(parse_namespaces(&data).count() <= MAX_LISTED);
        }
    }
}
