//! Tests of valid and invalid tables.

use super::*;
use proptest::prelude::*;

const UNIT: u64 = 1 << 20;

fn name(text: &str) -> Name {
    Name::new(text).unwrap()
}

fn record(number: u8, size: u64, extents: &[(u64, u64)]) -> Record {
    Record {
        uuid: Uuid([number; 16]),
        name: name(&format!("v{number}")),
        size,
        extents: extents.iter().map(|(start, len)| Extent { start: *start, len: *len }).collect(),
    }
}

fn table() -> Table {
    Table {
        pool: Uuid([9; 16]),
        name: name("data"),
        sequence: 3,
        copies: COPIES,
        unit: UNIT,
        data_offset: 4 << 20,
        units: 100,
        volumes: vec![record(1, 3 * UNIT, &[(0, 2), (50, 1)]), record(2, UNIT + 512, &[(10, 2)])],
    }
}

/// Returns the bytes with a valid checksum, whatever was changed in them.
fn sealed(mut bytes: Vec<u8>) -> Vec<u8> {
    let len = bytes.len() as u32;
    put(&mut bytes, LENGTH_AT, &len.to_le_bytes());
    let sum = checksum(&bytes);
    put(&mut bytes, CHECKSUM_AT, &sum.to_le_bytes());
    bytes
}

#[test]
fn a_table_is_read_as_it_was_written() {
    let mut bytes = table().encode().unwrap();
    assert_eq!(bytes.len(), 192 + 2 * 104 + 3 * 16);
    assert_eq!((&bytes[..8], &bytes[64..69]), (&b"FsPool\0\0"[..], &b"data\0"[..]));
    assert_eq!((bytes[192 + 16 + 2], &bytes[192 + 40..192 + 43]), (0x30, &b"v1\0"[..]));
    bytes.extend([0xff; 100]);
    assert_eq!(Table::decode(&bytes), Ok(table()));
    assert_eq!(table().position("v2"), Some(1));
    assert_eq!(table().position("v2"), table().position(&Uuid([2; 16]).to_string()));
    assert_eq!(table().position("v3"), None);
    assert_eq!(table().holes().iter().map(|hole| hole.len).sum::<u64>(), 95);
}

#[test]
fn bytes_without_a_table_are_distinguished_from_a_damaged_table() {
    let bytes = table().encode().unwrap();
    assert_eq!(Table::decode(&[0; 4096]), Err(DecodeError::None));
    assert_eq!(Table::decode(&bytes[..100]), Err(DecodeError::None));
    assert_eq!(Table::decode(&bytes[..bytes.len() - 1]), Err(DecodeError::Checksum));
    let mut later = bytes.clone();
    later[8] = 2;
    assert_eq!(Table::decode(&later), Err(DecodeError::Version(2)));
    for at in [LENGTH_AT + 3, 20, CHECKSUM_AT, bytes.len() - 1] {
        let mut damaged = bytes.clone();
        damaged[at] ^= 0x40;
        assert_eq!(Table::decode(&damaged), Err(DecodeError::Checksum), "{at}");
    }
}

#[test]
fn a_contradictory_table_with_a_valid_checksum_is_refused() {
    let nonsense = |change: fn(&mut Table)| {
        let mut table = table();
        change(&mut table);
        let bytes = table.encode().unwrap();
        match Table::decode(&bytes) {
            Err(DecodeError::Invalid(why)) => why,
            other => panic!("{other:?}"),
        }
    };
    assert!(nonsense(|table| table.volumes[1].extents[0].start = 1).contains("v2 has 2 units from 1 on"));
    assert!(nonsense(|table| table.volumes[1].extents[0].start = 99).contains("v2 has"));
    assert!(nonsense(|table| table.volumes[1].extents[0].start = u64::MAX).contains("v2 has"));
    assert!(nonsense(|table| table.volumes[0].extents[0].len = u64::MAX).contains("in None units"));
    assert!(nonsense(|table| table.volumes[0].size = 0).contains("v1 of 0 bytes"));
    assert!(nonsense(|table| table.volumes[0].size += 1).contains("v1 of 3145729 bytes"));
    assert!(nonsense(|table| table.volumes[0].size += UNIT).contains("in Some(3) units"));
    assert!(
        nonsense(|table| table.volumes[1].name = table.volumes[0].name.clone()).contains("two volumes v1")
    );
    assert!(nonsense(|table| table.volumes[1].uuid = table.volumes[0].uuid).contains("two volumes"));
    assert!(nonsense(|table| table.unit = 0).contains("units of 0 bytes"));
    assert!(nonsense(|table| table.units = u64::MAX).contains("18446744073709551615 units"));
    // The first volume would lie over the table.
    assert_eq!(
        nonsense(|table| table.data_offset = 64 << 10),
        "units begin at byte 65536, and the first 4194304 bytes hold the table"
    );
    // The next change would have no number.
    assert!(nonsense(|table| table.sequence = u64::MAX).contains("sequence number 18446744073709551615"));
    let mut bytes = table().encode().unwrap();
    bytes[12] = 3;
    assert_eq!(Table::decode(&sealed(bytes)), Err(DecodeError::Invalid("a volume is cut off".into())));
    let mut bytes = table().encode().unwrap();
    bytes.push(0);
    assert_eq!(Table::decode(&sealed(bytes)), Err(DecodeError::Invalid("1 bytes too many".into())));
    let mut bytes = table().encode().unwrap();
    bytes[64] = b'/';
    assert!(
        matches!(Table::decode(&sealed(bytes)), Err(DecodeError::Invalid(why)) if why.contains("\"/ata\""))
    );
}

#[test]
fn a_table_holds_the_largest_numbers_of_volumes_and_extents() {
    let volumes = |count: usize, extents: u64| {
        let of = |number: usize| Record {
            uuid: Uuid((number as u128).to_le_bytes()),
            name: name(&format!("v{number}")),
            size: extents * UNIT,
            extents: (0..extents)
                .map(|i| Extent { start: 2 * (number as u64 * extents + i), len: 1 })
                .collect(),
        };
        Table { units: 1 << 30, volumes: (0..count).map(of).collect(), ..table() }
    };
    let full = volumes(MAX_VOLUMES, (MAX_EXTENTS / MAX_VOLUMES) as u64);
    let bytes = full.encode().unwrap();
    assert_eq!(bytes.len(), MAX_BYTES);
    assert_eq!(Table::decode(&bytes), Ok(full));
    assert!(volumes(MAX_VOLUMES + 1, 1).encode().unwrap_err().contains("4097 volumes"));
    assert!(volumes(MAX_VOLUMES, 7).encode().unwrap_err().contains("28672 extents"));
}

proptest! {
    #[test]
    fn arbitrary_bytes_do_not_panic(mut bytes: Vec<u8>, is_sealed: bool, at in 0..400usize, byte: u8) {
        let _ = Table::decode(&bytes);
        bytes = table().encode().unwrap();
        bytes[at] = byte;
        let _ = Table::decode(&if is_sealed { sealed(bytes) } else { bytes });
    }
}
