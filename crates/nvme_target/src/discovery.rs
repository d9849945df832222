//! The discovery log page (Base 5.16.1.23): a header, and an entry for each path to a subsystem.
//!
//! The page of a portal with many subsystems is long, and a host reads it in parts. Each part is
//! made from the present subsystems. A host that reads another generation than before starts again.

use nvme::Status;
use nvme::fabrics::Nqn;
use nvme::fabrics::discovery::{DiscoveryEntry, DiscoveryHeader, RECORD_BYTES};
use std::net::SocketAddr;
use std::ops::Range;

/// The subsystems of a portal, for its discovery controllers.
pub(crate) trait Catalog: Send + Sync {
    /// Those of a visitor's entries that `wanted` selects. Called on cores, so it must not wait.
    fn excerpt(&self, visitor: &Visitor<'_>, wanted: Range<u64>) -> Excerpt;
}

/// A host that is connected to a discovery controller.
pub(crate) struct Visitor<'a> {
    pub(crate) host: &'a Nqn,
    /// Whether it came through TLS.
    pub(crate) is_secured: bool,
    /// The port that it connected to, its TRTYPE, and its address; `None` if that is no IP address.
    pub(crate) port: u16,
    pub(crate) transport: u8,
    pub(crate) address: Option<SocketAddr>,
}

/// A part of a visitor's entries.
pub(crate) struct Excerpt {
    /// Changes with the subsystems and their hosts.
    pub(crate) generation: u64,
    /// The number of all entries.
    pub(crate) records: u64,
    /// The selected ones.
    pub(crate) entries: Vec<DiscoveryEntry>,
}

/// Returns `len` bytes of the page from `start` on, with zeroes behind its end.
///
/// # Errors
/// When `start` is behind the end.
pub(crate) fn read(
    catalog: &dyn Catalog,
    visitor: &Visitor<'_>,
    start: u64,
    len: usize,
) -> Result<Vec<u8>, Status> {
    const RECORD: u64 = RECORD_BYTES as u64;
    // The header is the first record.
    let first = start / RECORD;
    let end = start.saturating_add(len as u64).div_ceil(RECORD);
    let Excerpt { generation, records, entries } =
        catalog.excerpt(visitor, first.saturating_sub(1)..end.saturating_sub(1));
    if start > (1 + records) * RECORD {
        return Err(Status::INVALID_FIELD);
    }
    let mut part = Vec::with_capacity(len + 2 * RECORD_BYTES);
    if first == 0 {
        part.extend(DiscoveryHeader { generation, records, record_format: 0 }.encode());
    }
    entries.iter().for_each(|entry| part.extend(entry.encode()));
    part.drain(..part.len().min((start % RECORD) as usize));
    part.resize(len, 0);
    Ok(part)
}

#[cfg(test)]
mod tests {
    use super::*;
    use nvme::fabrics::discovery::TRANSPORT_TCP;

    /// A catalog with so many entries.
    struct Count(u64);

    impl Catalog for Count {
        fn excerpt(&self, visitor: &Visitor<'_>, wanted: Range<u64>) -> Excerpt {
            let entry = |place| {
                let subsystem = Nqn::new(&format!("nqn.2014-08.org.example:{place}")).unwrap();
                DiscoveryEntry::tcp(visitor.address.unwrap(), subsystem)
            };
            let entries = (0..self.0).filter(|place| wanted.contains(place)).map(entry).collect();
            Excerpt { generation: 7, records: self.0, entries }
        }
    }

    #[test]
    fn parts_of_a_page_are_those_of_the_whole() {
        let host = Nqn::new("nqn.2014-08.org.example:host").unwrap();
        let address = "127.0.0.1:4420".parse().ok();
        let visitor = Visitor { host: &host, is_secured: false, port: 1, transport: TRANSPORT_TCP, address };
        let part = |start, len| read(&Count(3), &visitor, start, len);
        let whole = part(0, 4096).unwrap();
        let header = DiscoveryHeader::parse(whole[..1024].try_into().unwrap());
        assert_eq!((header.generation, header.records), (7, 3));
        let last = DiscoveryEntry::parse(whole[3072..].try_into().unwrap()).unwrap();
        assert_eq!(last.subsystem.as_str(), "nqn.2014-08.org.example:2");
        for (start, len) in
            [(0, 4), (4, 1020), (1020, 8), (1024, 1024), (2044, 1500), (3072, 1024), (4092, 4)]
        {
            assert!(part(start as u64, len).unwrap() == whole[start..start + len], "{start}, {len}");
        }
        assert_eq!(part(3072, 2048).unwrap()[1024..], [0; 1024]);
        assert_eq!(part(4096, 64).unwrap(), [0; 64]);
        for start in [4100, 1 << 40, u64::MAX - 3] {
            assert_eq!(part(start, 64), Err(Status::INVALID_FIELD));
        }
    }
}
