//! Lists that Identify returns: identifiers of one namespace (Base 5.17.2.3), and which namespaces there are
//! (Base 5.17.2.2). The log page of changed namespaces has the latter's form.

use super::CommandSet;
use crate::wire::{put, u32_at};
use crate::{IDENTIFY_BYTES, IdentifyData};

/// Most namespaces of one list.
pub const MAX_LISTED: usize = IDENTIFY_BYTES / 4;
/// Namespace identifiers from here on are special; [`ALL_NAMESPACES`] is one.
pub const MAX_NSID: u32 = 0xffff_fffe;
/// Every namespace.
pub const ALL_NAMESPACES: u32 = 0xffff_ffff;

/// How a namespace can be recognized, on every path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamespaceId {
    /// EUI64.
    Eui64([u8; 8]),
    /// NGUID.
    Nguid([u8; 16]),
    /// A UUID.
    Uuid([u8; 16]),
    /// Not an identifier, but its command set.
    CommandSet(CommandSet),
}

/// Writes the identification descriptor list.
///
/// # Panics
/// When there are more than fit, which no namespace needs: each kind comes once.
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

/// Reads the identification descriptor list. What is not known, or does not fit, is left out.
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

/// Writes the list of those `namespaces` (in ascending order) that are above `above`, as many as fit.
pub fn encode_namespaces(namespaces: impl IntoIterator<Item = u32>, above: u32) -> IdentifyData {
    let mut data = [0; IDENTIFY_BYTES];
    for (i, nsid) in namespaces.into_iter().filter(|nsid| *nsid > above).take(MAX_LISTED).enumerate() {
        put(&mut data, 4 * i, nsid.to_le_bytes());
    }
    data
}

/// Reads a list of namespaces: what stands before the first 0.
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
    fn a_list_of_namespaces_goes_on_above_the_one_that_was_asked_for() {
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
